"""Score programs on one GPU: Tessera with a program, beside the nearest built-in options and FlexAttention with that
function.

    python bench/cuda_programs.py [--csv FILE] [--lengths 4096 16384] [--head-dims 64 128] [--programs NAME ...]
                                  [--directions forward backward decode] [--no-flex] [--processes 14]
                                  [--prepare-seconds 250] [--seconds 400]

bfloat16, batch 1, 16 heads. FlexAttention is compiled by torch.compile; its results are compared with Tessera's before
it is timed (relative RMS error, at most 1 %). Cells are prepared by --processes at once, for at most --prepare-seconds,
then timed one by one, up to --seconds; what has no result then is counted. For each cell: the program's milliseconds,
and the ratios of FlexAttention's time (x) and of the program's to the built-in's (/). The last lines say which cells
miss their bounds.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import os
import sys
from typing import Any, Callable, NamedTuple, Optional

import tessera
import tessera.torch
import torch
from cuda_bench import machine, taking_turns, timing

MOST_DIFFERENCE = 0.01
HEADS = 16
DIRECTIONS = ("forward", "backward", "decode")


class Program:
    """A text, what it captures, the same for FlexAttention, and the options that cost least beside it."""

    def __init__(self, score="", mask="", captured=None, flex_score=None, flex_mask=None, gradients=(), **nearest):
        self.score, self.mask, self.captured, self.gradients = score or None, mask or None, captured or {}, gradients
        self.flex_score, self.flex_mask, self.nearest = flex_score, flex_mask, nearest


def programs(n: int) -> dict[str, Callable[[], Program]]:
    relative = torch.randn(HEADS, 2 * n, device="cuda") / 4
    slopes = torch.exp2(-torch.arange(1, HEADS + 1, device="cuda") / 2).float()
    temperature = 1 + torch.rand(HEADS, device="cuda")
    doc = (torch.arange(n, device="cuda", dtype=torch.int32) // 1000).repeat(1, 1)
    ends = torch.tensor([*range(0, n, 1000), n], device="cuda", dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
    with_relative = functools.partial(
        Program, score="s + relative[h, i - j + len_k]", captured={"relative": relative},
        flex_score=lambda s, b, h, i, j: s + relative[h, i - j + n],
    )  # fmt: skip

    def as_dense() -> dict:
        """The relative bias as an option, where it fits in memory."""
        if n > 4096:
            return {}
        at = torch.arange(n, device="cuda")
        return {"bias": relative[:, at[:, None] - at + n].to(torch.bfloat16)[None]}

    with_temperature = functools.partial(
        Program, score="s * temperature[h]", captured={"temperature": temperature},
        flex_score=lambda s, b, h, i, j: s * temperature[h],
    )  # fmt: skip
    return {
        "causal": lambda: Program(mask="j <= q_pos", flex_mask=lambda b, h, i, j: j <= i, causal=True),
        "window": lambda: Program(
            mask="j <= q_pos && q_pos - j < 1024", flex_mask=lambda b, h, i, j: (j <= i) & (i - j < 1024),
            window=(1023, 0),
        ),  # fmt: skip
        "documents": lambda: Program(
            mask="j <= q_pos && doc[b, i] == doc[b, j]", captured={"doc": doc},
            flex_mask=lambda b, h, i, j: (j <= i) & (doc[0, i] == doc[0, j]), **packed,
        ),  # fmt: skip
        "prefix": lambda: Program(
            mask="j < 1024 || j <= q_pos", flex_mask=lambda b, h, i, j: (j < 1024) | (j <= i), causal=True
        ),
        "ALiBi": lambda: Program(
            score="s + slope[h] * (j - i)", captured={"slope": slopes},
            flex_score=lambda s, b, h, i, j: s + slopes[h] * (j - i), alibi_slopes=slopes,
        ),  # fmt: skip
        "softcap": lambda: Program(
            score="50 * tanh(s / 50)", flex_score=lambda s, b, h, i, j: 50 * torch.tanh(s / 50), softcap=50.0
        ),
        "softcap by a scalar": lambda: Program(score="c * tanh(s / c)", captured={"c": 50.0}, softcap=50.0),
        "relative": lambda: with_relative(**as_dense()),
        "relative, its gradient": lambda: with_relative(gradients=("relative",), **as_dense()),
        "temperature": with_temperature,
        "temperature, its gradient": lambda: with_temperature(gradients=("temperature",)),
        "dilated window": lambda: Program(
            mask="(q_pos - j) % 16 == 0 && abs(q_pos - j) < 1024",
            flex_mask=lambda b, h, i, j: ((i - j) % 16 == 0) & (torch.abs(i - j) < 1024), window=(1023, 1023),
        ),  # fmt: skip
        "neighbours in an image": lambda: Program(
            mask="abs(q_pos // 64 - j // 64) <= 3 && abs(q_pos % 64 - j % 64) <= 3",
            flex_mask=lambda b, h, i, j: (torch.abs(i // 64 - j // 64) <= 3) & (torch.abs(i % 64 - j % 64) <= 3),
            window=(195, 195),
        ),  # fmt: skip
        "three at once": lambda: Program(
            score="50 * tanh((s + relative[h, i - j + len_k]) / 50)", mask="j <= q_pos && doc[b, i] == doc[b, j]",
            captured={"relative": relative, "doc": doc},
            flex_score=lambda s, b, h, i, j: 50 * torch.tanh((s + relative[h, i - j + n]) / 50),
            flex_mask=lambda b, h, i, j: (j <= i) & (doc[0, i] == doc[0, j]), softcap=50.0, **packed,
        ),  # fmt: skip
        "a mask a head": lambda: Program(mask="h % 2 == 0 ? j <= q_pos : abs(i - j) <= 512", causal=True),
        "dense bias": lambda: dense_bias(n),
    }


def dense_bias(n: int) -> Program:
    bias = torch.randn(1, HEADS, n, n, device="cuda", dtype=torch.bfloat16)
    return Program(flex_score=lambda s, b, h, i, j: s + bias[0, h, i, j], bias=bias)


class Cell(NamedTuple):
    direction: str
    program: str
    length: int
    head_dim: int
    with_flex: bool

    def is_measured(self) -> bool:
        if self.program == "dense bias":
            return self.direction == "forward" and self.length <= 4096
        if "gradient" in self.program:
            return self.direction == "backward"
        return self.program != "temperature" or self.direction != "backward"


class Calls:
    """Inputs, and what is called with them."""

    def __init__(self, cell: Cell, program: Program, flex: Optional[Callable]):
        torch.manual_seed(0)
        self.cell, self.program, self.flex = cell, program, flex
        queries = 1 if cell.direction == "decode" else cell.length
        shapes = [(1, rows, HEADS, cell.head_dim) for rows in (queries, cell.length, cell.length, queries)]
        self.rows = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]

    def ours(self, options: dict, gradients=()) -> Callable:
        is_packed = "cu_seqlens_q" in options and self.cell.direction != "decode"
        if not is_packed:
            options = {name: value for name, value in options.items() if not name.startswith("cu_")}
        if "bias" in options and self.cell.direction == "decode":
            options = {**options, "bias": options["bias"][:, :, -1:]}
        q, k, v, d_o = (x[0] for x in self.rows) if is_packed else self.rows
        if self.cell.direction != "backward":
            return lambda: tessera.attention(q, k, v, **options)
        o, lse = tessera.attention(q, k, v, return_lse=True, **options)
        more = {"grad_captured": list(gradients)} if gradients else {}
        return lambda: tessera.attention_backward(q, k, v, o, lse, d_o, **options, **more)

    def programmed(self) -> Callable:
        p = self.program
        if p.score is None and p.mask is None:
            return self.ours(p.nearest)
        captured = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in p.captured.items()}
        return self.ours({"score_mod": p.score, "mask_mod": p.mask, "captured": captured}, p.gradients)

    def theirs(self) -> Callable:
        q, k, v, d_o = (x.transpose(1, 2).contiguous() for x in self.rows)
        if self.cell.direction != "backward":

            def forward():
                with torch.no_grad():
                    return self.flex(q, k, v)

            return forward
        captured = [self.program.captured[name].requires_grad_() for name in self.program.gradients]
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = self.flex(*leaves)
        return lambda: torch.autograd.grad(o, leaves + captured, d_o, retain_graph=True)

    def all(self) -> dict[str, Callable]:
        calls = {"program": self.programmed()}
        if self.program.score or self.program.mask:
            calls["builtin"] = self.ours(self.program.nearest)
        if self.flex is not None:
            calls["flex"] = self.theirs()
        return calls


def compiled_flex(cell: Cell, program: Program, lock: Any) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = None
    if program.flex_mask is not None:
        with lock:
            block_mask = create_block_mask(program.flex_mask, None, None, cell.length, cell.length, device="cuda")
            torch.cuda.empty_cache()
    call = functools.partial(flex_attention, score_mod=program.flex_score, block_mask=block_mask)
    return torch.compile(call, dynamic=False)


def prepare(cell: Cell, lock: Any) -> Callable[[], dict]:
    torch._dynamo.config.recompile_limit = 1000
    program = programs(cell.length)[cell.program]()
    has_function = program.flex_score is not None or program.flex_mask is not None
    flex = compiled_flex(cell, program, lock) if cell.with_flex and has_function else None
    calls = Calls(cell, program, flex).all()
    made = {name: call() for name, call in calls.items() if name != "flex"}
    result = {}
    if flex is not None:
        try:
            made["flex"] = calls["flex"]()
        except Exception as error:  # FlexAttention's kernels cannot do every cell
            result["flex_error"], flex = str(error).splitlines()[0][:120], None
    if flex is not None:
        result["difference"] = difference(made["program"], made["flex"], cell.direction)
    del calls, made
    torch.cuda.empty_cache()

    def measure() -> dict:
        timed = timing.contest(Calls(cell, program, flex).all(), timing.Steadiness(30, 60, 1))
        result.update({f"{name}_ms": one.seconds * 1e3 for name, one in timed.items()})
        torch.cuda.empty_cache()
        return result

    return measure


def difference(ours, theirs, direction: str) -> float:
    if direction != "backward":
        pairs = [(ours.transpose(1, 2), theirs)]
    else:
        *rows, captured = ours if isinstance(ours[-1], dict) else (*ours, {})
        pairs = [(a.transpose(1, 2), b) for a, b in zip(rows[:3], theirs)]
        pairs += list(zip(captured.values(), theirs[3:]))
    return max(
        ((a.float() - b.float()).square().mean() / b.float().square().mean()).sqrt().item() for a, b in pairs
    )


def bounds(cell: Cell) -> dict[str, float]:
    """The least of FlexAttention's time and the most of the program's, beside the program's and the built-in's."""
    if cell.program == "dense bias":
        return {"flex": 1.1}
    if cell.direction == "backward":
        return {"flex": 1.25 if cell.length < 16384 else 1.6, "builtin": 1.1}
    return {"flex": 1.5, "builtin": 1.1}


def missed(cell: Cell, line: dict) -> list[str]:
    if "error" in line:
        return [line["error"]]
    found = []
    if line.get("difference", 0) > MOST_DIFFERENCE:
        found.append(f"differs by {line['difference']:.4f}")
    of_cell = bounds(cell)
    if "flex_ms" in line and line["flex_ms"] / line["program_ms"] < of_cell["flex"]:
        found.append(f"x {line['flex_ms'] / line['program_ms']:.2f} < {of_cell['flex']}")
    if "builtin_ms" in line and line["program_ms"] / line["builtin_ms"] > of_cell["builtin"]:
        found.append(f"/ {line['program_ms'] / line['builtin_ms']:.2f} > {of_cell['builtin']}")
    return found


def text_of(line: Optional[dict]) -> str:
    if line is None or "program_ms" not in line:
        return f"{'-' if line is None else 'error':>24}"
    flex = f"x{line['flex_ms'] / line['program_ms']:5.2f}" if "flex_ms" in line else ""
    flex = "x none" if "flex_error" in line else flex
    builtin = f"/{line['program_ms'] / line['builtin_ms']:5.2f}" if "builtin_ms" in line else ""
    return f"{line['program_ms']:9.3f} {flex:6} {builtin:6} "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS, choices=DIRECTIONS)
    parser.add_argument("--programs", nargs="+")
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--prepare-seconds", type=float, default=250)
    parser.add_argument("--processes", type=int, default=14)
    options = parser.parse_args()
    machine.need_gpu()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes are enough
    names = options.programs or list(programs(16))
    kinds = list(itertools.product(options.directions, options.lengths, names))
    drawn = [
        Cell(direction, name, n, d, not options.no_flex and direction != "decode")
        for direction, n, name in kinds
        for d in options.head_dims
    ]
    # What is not prepared in time is of the last head dimension.
    cells = sorted((c for c in drawn if c.is_measured()), key=lambda c: (-c.head_dim, DIRECTIONS.index(c.direction)))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; program ms, x FlexAttention's, / built-in's")
    lines: dict[Cell, dict] = {}
    for number, line in taking_turns.measure(
        prepare, cells, options.processes, options.prepare_seconds, options.seconds
    ):
        cell = cells[number]
        lines[cell] = line
        print(f"{cell.direction:8} {cell.length:6} {cell.program:25} D {cell.head_dim:3}{text_of(line)}", flush=True)
    print(f"{'':41}" + "".join(f"{'D ' + str(d):>12}{'':12}" for d in options.head_dims))
    for direction, n, name in kinds:
        of_kind = [cell for cell in cells if (cell.direction, cell.length, cell.program) == (direction, n, name)]
        if any(cell in lines for cell in of_kind):
            print(f"{direction:8} {n:6} {name:25}" + "".join(text_of(lines.get(cell)) for cell in of_kind))
    failed = {cell: missed(cell, line) for cell, line in lines.items() if missed(cell, line)}
    for cell, why in failed.items():
        print(f"{cell.direction} {cell.program}, {cell.length}, D {cell.head_dim}: {', '.join(why)}")
    print(f"{len(lines) - len(failed)} of {len(cells)} cells hold, {len(cells) - len(lines)} not measured")
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            columns = ["program_ms", "builtin_ms", "flex_ms", "difference", "flex_error", "error"]
            writer = csv.DictWriter(file, [*Cell._fields[:4], *columns])
            writer.writeheader()
            for cell, line in lines.items():
                writer.writerow({**dict(list(cell._asdict().items())[:4]), **line})
    return 1 if failed or len(lines) < len(cells) else 0


if __name__ == "__main__":
    sys.exit(main())
