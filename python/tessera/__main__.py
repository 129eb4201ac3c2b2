"""The command `tessera` of the Python package, also `python -m tessera`. Its commands are compare, plot, plan, support
and info, with the options and the output of the program that `make install` installs, and doctor. The other commands of
that program are refused.

Exit codes: 0 done, 1 failed, 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, NoReturn

import tessera
from tessera import _core, compare, doctor
from tessera.compare.errors import WrongUse, require

_ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16", "neon", "neon_bf16")
_PROGRAM_ONLY = {  # command: (what it does, its replacement in Python)
    "run": ("attention on tensors from .npy and .safetensors files", "tessera.attention takes arrays"),
    "trace": ("a tiled attention, step by step", "examples/attention.py in the source tree is the algorithm in NumPy"),
    "cache": (
        "lists, compiles and clears the CUDA kernels kept on disk",
        "a kernel is compiled when it is first needed",
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line; argparse would also print its usage."""
        print(f"tessera: {message} ({self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def _add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="cuda or cpu (cuda where PyTorch and Tessera have a GPU)")
    parser.add_argument("--kernel", choices=_core.kernel_names(), default="auto", help="which kernel (auto)")
    parser.add_argument("--isa", choices=_ISAS, help="instruction set (the best here)")
    parser.add_argument("--threads", type=int, metavar="INT", help="threads (all cores)")


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-B", "--batch", type=int, default=1, metavar="INT", help="sequences (1)")
    add("--sq", type=int, required=True, metavar="INT", help="queries of a sequence")
    add("--sk", type=int, metavar="INT", help="keys of a sequence (--sq)")
    add("-H", "--heads", type=int, default=8, metavar="INT", help="query heads (8)")
    add("--kv-heads", type=int, metavar="INT", help="key and value heads (-H)")
    add("-D", "--head-dim", type=int, default=64, metavar="INT", help="head size of queries and keys (64)")
    add("--dv", type=int, metavar="INT", help="head size of values (-D)")
    add("--dtype", choices=("float32", "float16", "bfloat16", "float64"), default="float32", help="(float32)")
    add("--direction", choices=("forward", "backward"), default="forward", help="(forward)")
    add("--bias", action="store_true", help="with a bias [1, Hq, Sq, Sk]")
    add("--mask", action="store_true", help="with a mask [1, 1, Sq, Sk]")
    add("--alibi", dest="alibi_slopes", action="store_true", help="with ALiBi slopes [Hq]")
    add("--sink", action="store_true", help="with a sink [Hq]")
    add("--scale", type=float, metavar="FLOAT", help="factor of the scores (1 / sqrt(D))")
    add("--causal", action="store_true", help="a query sees no key right of the diagonal")
    add("--top-left", action="store_true", help="the diagonal starts at the first key (ends at the last)")
    add("--window", type=int, nargs=2, default=(-1, -1), metavar=("LEFT", "RIGHT"),
        help="keys visible left and right of the diagonal, -1 for all")  # fmt: skip
    add("--softcap", type=float, default=0.0, metavar="C", help="scores become c tanh(s / c)")
    add("--dropout", type=float, default=0.0, metavar="P", help="probability that an entry is dropped, below 1")
    add("--deterministic", action="store_true", help="gradients have the same bits every time")
    add("--batch-invariant", action="store_true", help="a sequence's bits do not depend on its batch")
    add(
        "--arch", type=int, metavar="INT", help="plan for a GPU of this architecture, such as 90, that need not be here"
    )
    add("--json", action="store_true", help="as JSON")


def _plan(options: argparse.Namespace) -> None:
    from tessera.compare.device import device_named

    sk = options.sq if options.sk is None else options.sk
    heads, heads_kv = options.heads, options.heads if options.kv_heads is None else options.kv_heads
    dv = options.head_dim if options.dv is None else options.dv
    sizes = (options.batch, options.sq, sk, heads, heads_kv, options.head_dim, dv)
    for flag, size in zip(("-B", "--sq", "--sk", "-H", "--kv-heads", "-D", "--dv"), sizes):
        require(0 <= size <= 2**24, flag, size, "0 .. 2^24")
    ordinal = None
    if options.arch is None and device_named(options.device) == "cuda":
        import torch

        ordinal = torch.cuda.current_device()
    tensors = [name for name in ("bias", "mask", "alibi_slopes", "sink") if getattr(options, name)]
    text = _core.plan_of_sizes(
        list(sizes), options.dtype, options.direction == "backward", tensors, options.arch, ordinal, options.json,
        scale=options.scale, causal=options.causal, top_left=options.top_left, window=tuple(options.window),
        softcap=options.softcap, dropout_p=options.dropout, deterministic=options.deterministic,
        batch_invariant=options.batch_invariant, kernel=options.kernel, threads=options.threads or 0,
    )  # fmt: skip
    print(_indented(text) if options.json else text.rstrip())


def _indented(text: str) -> str:
    return json.dumps(json.loads(text), indent=2, ensure_ascii=False)


def _plot(options: argparse.Namespace) -> None:
    from tessera.compare import plot

    try:
        plot.main([options.report, options.picture])
    except ValueError as refusal:
        raise WrongUse(str(refusal)) from None


def _info(options: argparse.Namespace) -> None:
    text = _core.info(options.json)
    print(_indented(text) if options.json else text.rstrip())


def _support(options: argparse.Namespace) -> None:
    form = "json" if options.json else "markdown" if options.markdown else "text"
    text = _core.support(form)
    print(_indented(text) if options.json else text.rstrip())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tessera", description="Exact attention that never stores the score matrix.")
    parser.add_argument("--version", action="version", version=f"tessera {tessera.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Any, more: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, description=text, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        added.set_defaults(run=run)
        return added

    compared = command(
        "compare",
        "Tessera beside standard attention and PyTorch's own: time, memory, error",
        compare.run,
        "Standard attention is the textbook's: it stores the score matrix, by PyTorch's matrix products where it is\n"
        "installed, else by NumPy's. Errors are those against float64, on a sample. FLOPs: 4 B H N^2 D forward, "
        "halved\n"
        "when causal, times 2.5 backward.\n\n"
        "  tessera compare --causal --lengths 1024,4096,16384 --plot compare.png\n"
        "  tessera compare --dtype bfloat16 -H 32 --kv-heads 8 -D 128 --direction forward",
    )
    compare.add_arguments(compared)
    planned = command("plan", "Which kernel would be chosen for given sizes, and why", _plan)
    _add_plan_arguments(planned)
    for parser_of_kernels in (compared, planned):
        _add_device_arguments(parser_of_kernels)
    plotted = command(
        "plot", "Draws the report of a comparison: memory and speed over length (needs matplotlib)", _plot
    )
    plotted.add_argument("report", help="what compare --report wrote, here or in the program")
    plotted.add_argument("picture", help="a .png or .svg file")
    command("info", "The CPU, what was chosen for it, threads and GPUs", _info).add_argument(
        "--json", action="store_true", help="as JSON"
    )
    supported = command("support", "Which options each back end supports, in which dtypes", _support)
    forms = supported.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="every answer as JSON, refusals with their reasons")
    forms.add_argument("--markdown", action="store_true", help="as a page: the kernels by dtype, and what is refused")
    doctor.add_arguments(
        command("doctor", "What will run here, why the rest will not, and the command that mends each", doctor.run)
    )
    for name, (text, _) in _PROGRAM_ONLY.items():
        commands.add_parser(name, help=f"(the program of make install alone) {text}")
    return parser


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _PROGRAM_ONLY:
        name = arguments[0]
        print(
            f"tessera: {name}: a command of the program tessera that make install in the source tree builds, not of "
            f"the Python package's ({_PROGRAM_ONLY[name][1]})",
            file=sys.stderr,
        )
        return 2
    options = _parser().parse_args(arguments)
    if getattr(options, "isa", None) is not None:
        os.environ["TESSERA_ISA"] = options.isa  # read at the library's first call, which comes later
    try:
        if getattr(options, "threads", None) is not None:
            require(1 <= options.threads <= 1024, "--threads", options.threads, "1 .. 1024")
        options.run(options)
    except WrongUse as error:
        print(f"tessera: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (tessera.Error, OSError, MemoryError) as error:
        print(f"tessera: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
