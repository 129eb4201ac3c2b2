"""Errors of attention from an 8-bit cache: relative RMS of o against float64 on the unquantised q, k and v, on the CPU.

    python bench/quantized_errors.py [--head-dims 64 128] [--lengths 512 4096] [--json FILE] [--markdown FILE]
    python bench/quantized_errors.py --lengths 128 --steps 2 --draws 1

On three kinds of inputs, those of backward_errors.py: standard normal; with outliers, as in "FlashAttention-3", N(0, 1)
+ N(0, 100) Bernoulli(0.001); recorded, of the first, a middle and the last layer of a GPT-2 that is trained for --steps
steps on this repository's documents. q is bfloat16, k and v are quantised by tessera.quantize, once with one scale for
the tensor, a head, 128 tokens of a head, and a token and head; once as they are, once with q and k rotated, and once
with v rotated, too, and o rotated back. Of each, the error of quantisation alone, by float64 arithmetic on the numbers
that the codes and scales stand for, and of the kernel, which reads the codes (o in bfloat16); errors are root mean
squares over the draws. Exit 1 if a kernel's error is more than 1.1 times that of quantisation alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import tessera
from tessera import quantize, rotate

SCHEMES = ("tensor", "head", "block", "token")
ROTATED = ("", "k", "k and v")
BLOCK = 128
MOST_ADDED = 1.10  # of the kernel, times the error of quantisation alone
HEADS, HEADS_KV = 4, 2


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64, of [B, S, H, D]; the queries are the last of the keys."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2)


def values(quantized: tessera._quantize.Quantized) -> torch.Tensor:
    """What codes and scales stand for, in float64."""
    codes, scale = quantized.codes.double(), quantized.scale.double()
    if scale.dim() == 3:
        tokens = 1 if scale.shape[1] == codes.shape[1] else BLOCK
        scale = scale.repeat_interleave(tokens, 1)[:, : codes.shape[1]]
    return codes * scale[..., None]


def relative(o: torch.Tensor, expected: torch.Tensor) -> float:
    return float((o.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def by_kernel(q: torch.Tensor, k: tessera._quantize.Quantized, v: tessera._quantize.Quantized) -> torch.Tensor:
    """Scales of tokens are for pages: each sequence is one page."""
    options = {"causal": True, "k_descale": k.scale, "v_descale": v.scale}
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


def errors(inputs: list[torch.Tensor], dtype: str, scheme: str, rotated: str) -> tuple[float, float]:
    """Of quantisation alone, and of the kernel."""
    q, k, v = inputs
    expected = exact(q, k, v)
    k8 = quantize(k, dtype, scheme=scheme, rotate=rotated != "")
    v8 = quantize(v, dtype, scheme=scheme, rotate=rotated == "k and v")
    alone = exact(rotate(q.float()) if rotated else q, values(k8), values(v8))
    o = by_kernel(rotate(q) if rotated else q, k8, v8)
    if rotated == "k and v":
        alone, o = rotate(alone.float(), inverse=True), rotate(o, inverse=True)
    return relative(alone, expected), relative(o, expected)


def measure(options: argparse.Namespace) -> list[dict]:
    rows: dict[tuple, list[tuple[float, float]]] = {}
    for dim in options.head_dims:
        for length in options.lengths:
            sources = [drawn(options, dim, length)]
            if options.steps > 0 and length <= options.longest_recorded:
                sources.append(recorded(options, dim, length))
            for source in sources:
                for data, inputs in source:
                    for dtype in options.dtypes:
                        for scheme in SCHEMES:
                            for rotated in ROTATED:
                                key = (data, dim, length, dtype, scheme, rotated)
                                rows.setdefault(key, []).append(errors(inputs, dtype, scheme, rotated))
            print(f"D {dim}, {length} keys", flush=True)

    def mean(pairs: list[tuple[float, float]], n: int) -> float:
        return math.sqrt(sum(pair[n] ** 2 for pair in pairs) / len(pairs))

    names = ("data", "head_dim", "length", "dtype", "scheme", "rotated")
    return [dict(zip(names, key)) | {"alone": mean(x, 0), "kernel": mean(x, 1)} for key, x in rows.items()]


def table(rows: list[dict]) -> str:
    """Errors in per cent, quantisation alone / the kernel's, a row for each kind of input, size and dtype."""
    columns = [(scheme, rotated) for rotated in ROTATED for scheme in SCHEMES]
    names = [scheme + (f", {rotated} rotated" if rotated else "") for scheme, rotated in columns]
    lines = ["| inputs | D | keys | dtype | " + " | ".join(names) + " |", "| --- " * (4 + len(names)) + "|"]
    found = {tuple(row[name] for name in ("data", "head_dim", "length", "dtype", "scheme", "rotated")): row
             for row in rows}  # fmt: skip
    for key in dict.fromkeys(key[:4] for key in found):
        cells = (found[(*key, *column)] for column in columns)
        text = " | ".join(f"{100 * row['alone']:.2f} / {100 * row['kernel']:.2f}" for row in cells)
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | {key[3]} | {text} |")
    return "\n".join(lines) + "\n"


def verdicts(rows: list[dict]) -> list[str]:
    wrong = [
        f"{row['data']}, D {row['head_dim']}, {row['length']} keys, {row['dtype']}, {row['scheme']}: "
        f"the kernel's error is {row['kernel'] / row['alone']:.2f} x that of quantisation alone"
        for row in rows
        if row["kernel"] > MOST_ADDED * row["alone"]
    ]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--queries", type=int, default=128, help="the last rows of a drawn sequence")
    parser.add_argument("--dtypes", nargs="+", default=["float8_e4m3", "float8_e5m2", "int8"])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of training before recording; 0: nothing is recorded")
    parser.add_argument("--longest-recorded", type=int, default=512)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = measure(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.markdown:
        options.markdown.write_text(table(rows))
    print(table(rows))
    wrong = verdicts(rows)
    print("\n".join(wrong) or "the kernels add at most 10 % to what quantisation costs")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
