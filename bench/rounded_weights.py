"""Errors of attention whose weights are e4m3, as tensor cores of 8 bits need them, by the way of rounding, in float64.

    python bench/rounded_weights.py [--head-dims 64 128] [--lengths 512 4096] [--json FILE]

q, k and v are e4m3 codes with a scale a tensor. P = 2^8 exp(S - row maximum), and O = sum of P V / sum of P. Ways:

    nearest            each weight to nearest, the sum of weights before rounding: fwd_sm90_fp8
    rounded sums       the sum of the rounded weights
    448                the largest weight becomes 448, the largest number, instead of 256
    best factor        for each row the factor in [1, 2) with the least squares of rounding errors, times 2^7
    feedback           a weight's rounding error is added to the next key's weight
    stochastic         up or down at random, right on average
    two terms          a second e4m3 product for what rounding left
    two terms, half    the same for every second group of 32 keys, the step of one instruction
    mended, 32         the largest of each 32 keys' weights exact, the others to nearest
    baseline           P - c to nearest, c the mean weight of the row's first 128 keys, and c times the sum of V's rows
    baseline, sums     the same with the sum of the rounded weights

Inputs are those of quantized_errors.py and two whose values are related from key to key: a V with a mean of 1, and a V
whose rows are moving averages of 32 normal ones. Printed is the error relative to float64 on the inputs before
quantisation, over that of quantisation alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import torch

import quantized_errors
from quantized_errors import relative, values
from tessera import quantize

LARGEST, FACTOR, STEP, BLOCK = 448, 256, 32, 128


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.float().to(torch.float8_e4m3fn).double()


def stochastic(x: torch.Tensor) -> torch.Tensor:
    exponent = (torch.frexp(x).exponent - 1).clamp(min=-6)
    step = torch.ldexp(torch.ones_like(x), exponent - 3)
    return torch.floor(x / step + torch.rand(x.shape, dtype=x.dtype)) * step


def with_feedback(x: torch.Tensor) -> torch.Tensor:
    rounded, left = torch.empty_like(x), torch.zeros_like(x[..., 0])
    for key in range(x.shape[-1]):
        rounded[..., key] = e4m3((x[..., key] + left).clamp(0, LARGEST))
        left += x[..., key] - rounded[..., key]
    return rounded


def best_factor(x: torch.Tensor) -> torch.Tensor:
    """Of weights whose largest is 1."""
    factors = [2 ** (7 + n / 8) for n in range(9)]
    left = torch.stack([((e4m3(x * f) / f - x) ** 2).sum(-1) for f in factors])
    factor = torch.tensor(factors, dtype=x.dtype)[left.argmin(0)][..., None]
    return e4m3(x * factor) / factor


def largest_mended(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    keys = x.shape[-1] // STEP * STEP
    groups = x[..., :keys].unflatten(-1, (-1, STEP))
    mended = rounded.clone()
    at = groups.argmax(-1, keepdim=True)
    mended[..., :keys].unflatten(-1, (-1, STEP)).scatter_(-1, at, groups.gather(-1, at))
    return mended


def ways(x: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(way, O), of weights whose largest is 1."""
    P, total = x * FACTOR, x.sum(-1, keepdim=True) * FACTOR
    rounded = e4m3(P)
    yield "nearest", rounded @ v / total
    yield "rounded sums", rounded @ v / rounded.sum(-1, keepdim=True)
    yield "448", e4m3(x * LARGEST) @ v / (total * LARGEST / FACTOR)
    yield "best factor", best_factor(x) @ v / x.sum(-1, keepdim=True)
    yield "feedback", with_feedback(P) @ v / total
    yield "stochastic", stochastic(P) @ v / total
    second = e4m3((P - rounded) * 16) / 16
    yield "two terms", (rounded + second) @ v / total
    half = torch.arange(P.shape[-1]) // STEP % 2 == 0
    yield "two terms, half", (rounded + second * half) @ v / total
    yield "mended, 32", largest_mended(P, rounded) @ v / total
    c = P[..., :BLOCK].mean(-1, keepdim=True)
    above, of_c = e4m3(P - c), c * v.sum(-2, keepdim=True)
    yield "baseline", (above @ v + of_c) / total
    yield "baseline, sums", (above @ v + of_c) / (above.sum(-1, keepdim=True) + c * P.shape[-1])


def related(options: argparse.Namespace, dim: int, length: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for data, (q, k, v) in quantized_errors.drawn(options, dim, length):
        if data == "normal":
            yield "V of mean 1", [q, k, v + 1]
            more = torch.cat([v, torch.randn(v[:, : STEP - 1].shape).to(v.dtype)], 1).double()
            yield "smooth V", [q, k, (more.unfold(1, STEP, 1).sum(-1) / math.sqrt(STEP)).to(v.dtype)]


def errors(inputs: list[torch.Tensor]) -> dict[str, float]:
    """Of quantisation alone, "alone", and of each way over it. Without a causal mask."""
    group = inputs[0].shape[2] // inputs[1].shape[2]
    q8 = quantize(inputs[0], "float8_e4m3", scheme="tensor", heads_kv=inputs[1].shape[2])
    k8, v8 = (quantize(x, "float8_e4m3", scheme="tensor") for x in inputs[1:])

    def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))]

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])

    q, k, v = heads(*(x.double() for x in inputs))
    expected = scores(q, k).softmax(-1) @ v
    q, k, v = heads(*(values(x) for x in (q8, k8, v8)))
    s = scores(q, k)
    x = torch.exp(s - s.amax(-1, keepdim=True))
    alone = relative(x @ v / x.sum(-1, keepdim=True), expected)
    return {"alone": alone} | {name: relative(o, expected) / alone for name, o in ways(x, v)}


def measure(options: argparse.Namespace) -> list[dict]:
    found: dict[tuple, list[dict[str, float]]] = {}
    for dim, length in itertools.product(options.head_dims, options.lengths):
        sources = [quantized_errors.drawn(options, dim, length), related(options, dim, length)]
        if options.steps > 0 and length <= options.longest_recorded:
            sources.append(quantized_errors.recorded(options, dim, length))
        for data, inputs in itertools.chain(*sources):
            found.setdefault((data, dim, length), []).append(errors([inputs[0][:, -options.queries :], *inputs[1:]]))
    rows = []
    for (data, dim, length), draws in found.items():
        means = {name: sum(draw[name] for draw in draws) / len(draws) for name in draws[0]}
        rows.append({"data": data, "head_dim": dim, "length": length, **means})
        texts = (f"{name} {x:.3f}" for name, x in means.items() if name != "alone")
        print(f"{data}, D {dim}, {length} keys, {100 * means['alone']:.2f} %: {', '.join(texts)}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--queries", type=int, default=128, help="the last rows of a sequence")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30, help="of training before recording; 0: nothing is recorded")
    parser.add_argument("--longest-recorded", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = measure(options)
    if options.json:
        quantized_errors.write(options.json, quantized_errors.facts(__file__), "weights", rows)


if __name__ == "__main__":
    main()
