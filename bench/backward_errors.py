"""Errors of the backward pass: relative RMS of dQ, dK and dV against float64, of each of Tessera's kernels
that support a problem, PyTorch's FlashAttention-2 and cuDNN, in one run on one GPU.

    python bench/backward_errors.py --csv FILE [--head-dims 64 128] [--steps 200]
    python bench/backward_errors.py --device cpu --length 96 --steps 2 --draws 2 --csv FILE

On three kinds of inputs in bfloat16: standard normal; with outliers, one element in a thousand having a normal of
standard deviation 10 added; recorded, Q, K, V and dO of the first, a middle and the last layer of a GPT-2 of 768 / D
heads, trained for --steps steps on this repository's documents, byte by byte. Each is generated --draws times
(recorded: one more training step each), since with outliers a few rows make most of an error, and their roundings are
chance. Each call uses its own O and LSE. All heads of two sequences are compared with float64. In the table, errors are
dQ dK dV, times 1e-3, root mean squares over the draws, and the ratio is the largest to cuDNN's of the same gradient.
`least` is the error of float64 gradients from an O in bfloat16: no backward pass with such an O does better except by
chance, and where dP is near delta in most rows it is most of every kernel's error.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F

from cuda_bench import machine
from cuda_bench.contestants import enter
from cuda_bench.exact import Exact
from cuda_bench.problem import DTYPES, Inputs, Problem

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("gpt2_train", ROOT / "examples/gpt2/train.py")
train = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(train)

DTYPE = "bfloat16"
HEAD_DIMS = (64, 96, 128, 192, 256)
WIDTH, LAYERS = 768, 6  # of the model; all head sizes divide it
CONTESTANTS = ("tessera", "sm80", "flash", "cudnn")
GRADIENTS = ("d_q", "d_k", "d_v")
Errors = dict[str, float]  # by gradient
LEAST = "least"
COLUMNS = ("data", "head_dim", "mask", "draw", "contestant", "kernel", *GRADIENTS)


def drawn(options: argparse.Namespace, dim: int) -> Iterator[tuple[str, Problem, Inputs]]:
    heads = max(2, 512 // dim)
    for data in ("normal", "outliers"):
        for causal in (False, True):
            problem = Problem(data, 2, options.length, options.length, heads, heads, dim, dim, causal, dtype=DTYPE)
            for _ in range(options.draws):
                inputs = Inputs.of(problem, True, options.device)
                if data == "outliers":
                    for x in (inputs.q, inputs.k, inputs.v, inputs.d_o):
                        # A 16-bit rand has 256 values.
                        x += (torch.rand(x.shape, device=x.device) < 1e-3) * 10 * torch.randn_like(x)
                yield data, problem, inputs


@contextmanager
def recording(calls: list):
    """(q, k, v, o) [B, H, S, D] of every call of scaled_dot_product_attention, o with its gradient kept."""
    attention = F.scaled_dot_product_attention

    def recorded(q, k, v, *arguments, **options):
        o = attention(q, k, v, *arguments, **options)
        o.retain_grad()
        calls.append((q, k, v, o))
        return o

    F.scaled_dot_product_attention = recorded
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention


def recorded(options: argparse.Namespace, dim: int) -> Iterator[tuple[str, Problem, Inputs]]:
    """Of --draws more steps of a model that has been trained."""
    train.SIZES["recorded"] = (LAYERS, WIDTH // dim, WIDTH)
    setting = train.parse(["--model", "recorded", "--attention", "sdpa", "--length", str(options.length), "--batch",
                           "4",
                           "--device", options.device, "--text", str(ROOT / "docs")])  # fmt: skip
    model, reader = train.make_model("sdpa", setting), train.Reader(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate)

    def loss_of_batch():
        tokens = reader.batch()
        optimizer.zero_grad(set_to_none=True)
        return model(input_ids=tokens, labels=tokens).loss

    calls: list = []
    for step in range(options.steps + options.draws):
        with recording(calls) if step >= options.steps else nullcontext():
            loss = loss_of_batch()
        loss.backward()
        if step + 1 < options.steps + options.draws:
            optimizer.step()
    print(f"D {dim}: {LAYERS} layers recorded at a loss of {float(loss.detach()):.2f}", flush=True)
    for layer in sorted({0, LAYERS // 2, LAYERS - 1}):
        for q, k, v, o in calls[layer::LAYERS]:
            rows = [x.detach().transpose(1, 2).to(DTYPES[DTYPE]).contiguous() for x in (q, k, v, o.grad)]
            problem = Problem("recorded", *rows[0].shape[:2], options.length, rows[0].shape[2], rows[0].shape[2], dim,
                              dim,
                              True, dtype=DTYPE)  # fmt: skip
            yield f"layer {layer}", problem, Inputs(*rows)


def errors_of(problem: Problem, inputs: Inputs, names: list[str], said: set[str]) -> Iterator[tuple[str, str, Errors]]:
    """(contestant, its kernel, errors); prints which contestants do not support the call, unless it is `said`."""
    exact = Exact(problem, inputs, "backward")
    yield LEAST, "float64", exact.errors_by_rounding_o()
    entered, reasons = enter(problem, inputs, "backward", names)
    for contestant in entered:
        try:
            call, results = contestant.call()
            errors = exact.errors(results(call()))
        except RuntimeError as error:
            reasons[contestant.name] = str(error).splitlines()[0]
            continue
        tessera = contestant.name in ("tessera", "sm80")
        kernel = contestant.kernel if contestant.name == "sm80" else contestant.plan()["kernel"] if tessera else ""
        yield contestant.name, kernel, errors
    for refusal in sorted({f"  {name}: {reason[:120]}" for name, reason in reasons.items()} - said):
        print(refusal)
        said.add(refusal)


def ratio(errors: Errors, peer: Errors | None) -> str:
    return "" if peer is None else f" ({max(errors[name] / peer[name] for name in GRADIENTS):.2f})"


def root_mean_square(draws: list[Errors]) -> Errors:
    return {name: (sum(errors[name] ** 2 for errors in draws) / len(draws)) ** 0.5 for name in GRADIENTS}


def line(data: str, dim: int, mask: str, found: dict[tuple[str, str], list[Errors]]) -> str:
    """found: the draws' errors by contestant and kernel."""
    means = {contestant: root_mean_square(draws) for contestant, draws in found.items()}
    peer = next((errors for (name, _), errors in means.items() if name == "cudnn"), None)
    texts = [
        f"{name if name == LEAST else kernel or name} "
        f"{' '.join(f'{errors[g] * 1e3:.2f}' for g in GRADIENTS)}{ratio(errors, peer)}"
        for (name, kernel), errors in means.items()
    ]
    return f"{data:9} D {dim:3} {mask:6} | {' | '.join(texts)}"


def run(options: argparse.Namespace) -> list[tuple]:
    rows: list[tuple] = []
    for dim in options.head_dims:
        for make in (drawn, recorded):
            for (data, mask), draws in itertools.groupby(make(options, dim), lambda made: (made[0], made[1].mask)):
                found: dict[tuple[str, str], list[Errors]] = {}
                said: set[str] = set()
                for draw, (_, problem, inputs) in enumerate(draws):
                    for name, kernel, errors in errors_of(problem, inputs, options.contestants, said):
                        found.setdefault((name, kernel), []).append(errors)
                        rows.append((data, dim, mask, draw, name, kernel, *(f"{errors[g]:.4e}" for g in GRADIENTS)))
                print(line(data, dim, mask, found), flush=True)
                write(options.csv, rows)  # partial results, in case the time runs out
    return rows


def write(path: Path, rows: list[tuple]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--head-dims", type=int, nargs="+", choices=HEAD_DIMS, default=list(HEAD_DIMS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, help="all; on a CPU there is tessera alone")
    parser.add_argument("--draws", type=int, default=8, help="of each kind of inputs (8)")
    parser.add_argument("--length", type=int, default=1024, help="queries and keys of a sequence (1024)")
    parser.add_argument("--steps", type=int, default=200, help="that the recorded model is trained for (200)")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    if options.draws < 1:
        parser.error(f"--draws: {options.draws}, accepted is 1 or more")
    on_gpu = options.device.startswith("cuda")
    if not on_gpu and options.contestants not in (None, ["tessera"]):
        parser.error("--contestants: on a CPU there is tessera alone")
    options.contestants = options.contestants or (list(CONTESTANTS) if on_gpu else ["tessera"])
    return options


def main(arguments=None) -> int:
    options = parse(arguments)
    if options.device.startswith("cuda"):
        machine.need_gpu()
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
