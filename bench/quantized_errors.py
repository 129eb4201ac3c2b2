"""Errors of attention on 8 bits: relative RMS of o against float64 on the unquantised q, k and v, on the CPU.

    python bench/quantized_errors.py [--head-dims 64 128] [--lengths 512 4096] [--json FILE]
    python bench/quantized_errors.py --lengths 128 --steps 2 --draws 1

On three kinds of inputs, those of backward_errors.py: standard normal; with outliers, as in "FlashAttention-3", N(0, 1)
+ N(0, 100) Bernoulli(0.001); recorded, of the first, a middle and the last layer of a GPT-2 that is trained for --steps
steps on this repository's documents. k and v are quantised by tessera.quantize, once with one scale for the tensor, a
head, 128 tokens of a head, and a token and head; once as they are, once with q and k rotated, and once with v rotated,
too, and o rotated back. q is bfloat16 or, with e4m3 keys and values, also quantised as they are (a token's scales are
for keys and values alone). Of each, the error of quantisation alone, by float64 arithmetic on the numbers that the
codes and scales stand for; `least`, the same with o rounded to bfloat16, below which no kernel is whose o has that
dtype; and of the kernel, which reads the codes. Errors are root mean squares over the draws. Exit 1 if a kernel's error
is more than 1.1 times the least.

--json writes what scripts/make_quantized_errors.py makes docs/reference/quantized-errors.md of.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import tessera
from cuda_bench import machine
from tessera import quantize, rotate
from tessera._quantize import Quantized

SCHEMES = ("tensor", "head", "block", "token")
ROTATED = ("", "k", "k and v")
BLOCK = 128
MOST_ADDED = 1.10  # of the kernel, times the least error
ERRORS = ("alone", "least", "kernel")
HEADS, HEADS_KV = 4, 2


class Case(NamedTuple):
    q_dtype: str
    dtype: str  # of k and v
    scheme: str
    rotated: str


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64, of [B, S, H, D]; the queries are the last of the keys."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2)


def values(x: torch.Tensor | Quantized, group: int = 1) -> torch.Tensor:
    """What x stands for, in float64; `group` heads share a scale."""
    if isinstance(x, torch.Tensor):
        return x.double()
    codes, scale = x.codes.double(), x.scale.double()
    if scale.dim() == 3:
        tokens = 1 if scale.shape[1] == codes.shape[1] else BLOCK
        scale = scale.repeat_interleave(tokens, 1)[:, : codes.shape[1]]
    return codes * scale.repeat_interleave(group if scale.numel() > 1 else 1, -1)[..., None]


def relative(o: torch.Tensor, expected: torch.Tensor) -> float:
    return float((o.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def by_kernel(q: torch.Tensor | Quantized, k: Quantized, v: Quantized) -> torch.Tensor:
    """Scales of tokens are for pages: each sequence is one page."""
    options = {"causal": True, "k_descale": k.scale, "v_descale": v.scale}
    if not isinstance(q, torch.Tensor):
        q, options["q_descale"] = q
    if k.scale.dim() == 3 and k.scale.shape[1] == k.codes.shape[1]:
        batch, rows = k.codes.shape[:2]
        options["page_table"] = torch.arange(batch, dtype=torch.int32)[:, None]
        options["seqused_k"] = torch.full((batch,), rows, dtype=torch.int32)
    return tessera.attention(q, k.codes, v.codes, **options)


def drawn(options: argparse.Namespace, dim: int, length: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for data in ("normal", "outliers"):
        for draw in range(options.draws):
            generator = torch.Generator().manual_seed(draw)
            inputs = []
            for rows, heads in ((min(length, options.queries), HEADS), (length, HEADS_KV), (length, HEADS_KV)):
                x = torch.randn(1, rows, heads, dim, generator=generator)
                if data == "outliers":
                    chosen = torch.rand(x.shape, generator=generator) < 1e-3
                    x += chosen * 10 * torch.randn(x.shape, generator=generator)
                inputs.append(x.bfloat16())
            yield data, inputs


def recorded(options: argparse.Namespace, dim: int, length: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    import backward_errors  # trains a model: only if it is wanted

    asked = argparse.Namespace(length=length, steps=options.steps, draws=options.draws, device="cpu")
    for _, _, inputs in backward_errors.recorded(asked, dim):
        yield "recorded", [x[:1] for x in (inputs.q, inputs.k, inputs.v)]


def errors(inputs: list[torch.Tensor], expected: torch.Tensor, case: Case) -> tuple[float, ...]:
    """ERRORS."""
    q, k, v = inputs
    dtype, scheme, rotated = case.dtype, case.scheme, case.rotated
    k8 = quantize(k, dtype, scheme=scheme, rotate=rotated != "")
    v8 = quantize(v, dtype, scheme=scheme, rotate=rotated == "k and v")
    if case.q_dtype == dtype:
        kernel_q = exact_q = quantize(q, dtype, scheme=scheme, rotate=rotated != "", heads_kv=k.shape[2])
    else:
        kernel_q, exact_q = (rotate(q), rotate(q.float())) if rotated else (q, q)
    alone = exact(values(exact_q, q.shape[2] // k.shape[2]), values(k8), values(v8))
    o = by_kernel(kernel_q, k8, v8)
    results = [alone.float(), alone.bfloat16(), o]
    if rotated == "k and v":
        results = [rotate(x, inverse=True) for x in results]
    return tuple(relative(x, expected) for x in results)


def cases(dtypes: list[str]) -> Iterator[Case]:
    for dtype in dtypes:
        for q_dtype in ("bfloat16", "float8_e4m3") if dtype == "float8_e4m3" else ("bfloat16",):
            for scheme in SCHEMES:
                for rotated in ROTATED:
                    if scheme != "token" or q_dtype == "bfloat16":
                        yield Case(q_dtype, dtype, scheme, rotated)


def measure(options: argparse.Namespace) -> list[dict]:
    rows: dict[tuple, list[tuple[float, ...]]] = {}
    for dim in options.head_dims:
        for length in options.lengths:
            sources = [drawn(options, dim, length)]
            if options.steps > 0 and length <= options.longest_recorded:
                sources.append(recorded(options, dim, length))
            for data, inputs in itertools.chain(*sources):
                expected = exact(*inputs)
                for case in cases(options.dtypes):
                    rows.setdefault((data, dim, length, *case), []).append(errors(inputs, expected, case))
            print(f"D {dim}, {length} keys", flush=True)

    def means(draws: list[tuple[float, ...]]) -> dict[str, float]:
        return {name: math.sqrt(sum(x * x for x in of) / len(of)) for name, of in zip(ERRORS, zip(*draws))}

    names = ("data", "head_dim", "length", *Case._fields)
    return [dict(zip(names, key)) | means(draws) for key, draws in rows.items()]


def facts(script: str = __file__) -> dict[str, str]:
    """The machine, the commit and the command line of `script`, without its --json."""
    device = tessera.device()
    arguments = sys.argv[1:]
    if "--json" in arguments:
        at = arguments.index("--json")
        del arguments[at : at + 2]
    return {
        "processor": device["name"],
        "isa": device["isa"],
        "tessera": tessera.__version__,
        "pytorch": torch.__version__,
        "commit": machine.commit(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", f"bench/{Path(script).name}", *arguments]),
    }


def write(path: Path, machine: dict[str, str], name: str, rows: list[dict]) -> None:
    """A row a line, errors with four digits."""
    short = [{k: float(f"{x:.4g}") if isinstance(x, float) else x for k, x in row.items()} for row in rows]
    lines = ",\n".join(json.dumps(row) for row in short)
    path.write_text(f'{{"machine": {json.dumps(machine)},\n"{name}": [\n{lines}\n]}}\n')


def name_of(row: dict) -> str:
    rotated = f", {row['rotated']} rotated" if row["rotated"] else ""
    return (
        f"{row['data']}, D {row['head_dim']}, {row['length']} keys, q {row['q_dtype']}, k and v {row['dtype']}, "
        f"{row['scheme']}{rotated}"
    )


def verdicts(rows: list[dict]) -> list[str]:
    wrong = [
        f"{name_of(row)}: the kernel's error is {row['kernel'] / row['least']:.2f} x the least"
        for row in rows
        if row["kernel"] > MOST_ADDED * row["least"]
    ]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--queries", type=int, default=128, help="the last rows of a drawn sequence")
    parser.add_argument("--dtypes", nargs="+", default=["float8_e4m3", "float8_e5m2", "int8"])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of training before recording; 0: nothing is recorded")
    parser.add_argument("--longest-recorded", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options)
    if options.json:
        write(options.json, facts(), "errors", rows)
    for row in rows:
        print(f"{name_of(row)}: " + ", ".join(f"{name} {100 * row[name]:.2f} %" for name in ERRORS))
    wrong = verdicts(rows)
    print("\n".join(wrong) or "the kernels add at most 10 % to the least errors")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
