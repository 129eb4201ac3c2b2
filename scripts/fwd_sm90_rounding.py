#!/usr/bin/env python3
"""What rounding P to 16 bits costs O, by the number that fwd_sm90 takes P relative to. Simulated; wants PyTorch, no GPU.

    scripts/fwd_sm90_rounding.py [--keys 2048] [--seeds 8] [--dtype bfloat16]

softmax(Q K^T / sqrt(d)) V block by block with everything exact but P's and O's rounding, for inputs that are normal, and with
outliers: one element in a thousand has a normal of standard deviation 10 added. Three ways to choose the references:

    running   the running maximum, as cuDNN: the error that the others are divided by
    kept      the first block's maxima as long as no lane's sum of a block passes 2^6: kernels/tessera/fwd_sm90.cuh
    in turns  of every second row a block's own maximum, in turns: tried, too slow (its page, numerics)

Prints relative RMS errors of O against float64 as multiples of running's, and in brackets how many percent of the blocks behind
the first a warp has to do again.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

import torch

WAYS = ("running", "kept", "in turns")
WARP_ROWS, LANES = 16, 4  # of whose rows one decides for all; that share a row
PROMPT_BOUND, EVEN_SHARE, OUTWEIGHS = 2.0**6, 18.0, 0.25
MAX_FALL, SUM_TO_FALL = 8.0, 2.0**12
RUNNING_BLOCK = 128  # keys
TILES = ((64, 64), (128, 80), (128, 128), (256, 64))  # head_dim, block_n
MOST_ROWS = 256  # of a problem, drawn


@dataclass
class Result:
    o: torch.Tensor  # float64, not rounded
    again: float  # of the blocks behind the first


def halves_of_lanes(p: torch.Tensor) -> torch.Tensor:
    """[rows, keys] -> sums [rows, lanes, 2]: a lane has two keys of eight, which are summed apart."""
    return p.unflatten(1, (-1, LANES, 2)).sum(1)


def by_warp(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, WARP_ROWS).any(1).repeat_interleave(WARP_ROWS)


def attend(way: str, scores: torch.Tensor, v: torch.Tensor, block_n: int, dtype: torch.dtype) -> Result:
    """scores [rows, keys], log2 units, hidden ones -inf; v [keys, head_dim_v]. Rows are of warps, first to last."""
    rows = scores.shape[0]
    second_half = torch.arange(rows) % WARP_ROWS >= WARP_ROWS // 2
    ref, o = torch.full((rows,), -math.inf, dtype=torch.float64), torch.zeros(rows, v.shape[1], dtype=torch.float64)
    sums = torch.zeros(rows, LANES, dtype=torch.float64)
    again = blocks = 0

    def move(to: torch.Tensor) -> None:
        nonlocal ref, o, sums
        alpha = torch.where(ref == to, 1.0, torch.exp2(ref - to))
        ref, o, sums = to, o * alpha[:, None], sums * alpha[:, None]

    for number, (s, values) in enumerate(zip(scores.split(block_n, 1), v.split(block_n))):
        padding = -s.shape[1] % (2 * LANES)
        s, values = torch.nn.functional.pad(s, (0, padding), value=-math.inf), torch.nn.functional.pad(values, (0, 0, 0, padding))
        seen, best = by_warp((s > -math.inf).any(1)), s.amax(1)
        if number == 0 or way == "running":
            move(torch.maximum(ref, best))
        else:
            own = seen & (second_half if number % 2 == 0 else ~second_half) & (way == "in turns")
            lowest = (ref[:, None] - torch.where(sums > SUM_TO_FALL, 0.0, MAX_FALL)).amax(1)
            move(torch.where(own, torch.maximum(best, lowest), ref))
            share = halves_of_lanes(torch.exp2(s - ref[:, None]))
            if way == "in turns":
                room = (sums * OUTWEIGHS).clamp(EVEN_SHARE, PROMPT_BOUND)[:, :, None]
                fits = (share < room).all(2).all(1) | own
            else:
                fits = (share.sum(2) < PROMPT_BOUND).all(1)
            refused = by_warp(~fits) & seen
            move(torch.where(refused, torch.maximum(ref, best), ref))
            again, blocks = again + int(refused.sum()), blocks + int(seen.sum())
        p = torch.exp2(s - ref[:, None])
        sums, o = sums + halves_of_lanes(p).sum(2), o + p.to(dtype).double() @ values
    return Result(o / sums.sum(1, keepdim=True), again / max(blocks, 1))


def errors(
    keys: int, tile: tuple[int, int], dtype: torch.dtype, causal: bool, outliers: bool, seeds: int
) -> dict[str, tuple[float, float]]:
    """By way: relative RMS error and blocks done again, of `seeds` draws."""
    head_dim, block_n = tile
    squares, again, exact_squares = dict.fromkeys(WAYS, 0.0), dict.fromkeys(WAYS, 0.0), 0.0
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)

        def normal() -> torch.Tensor:
            x = torch.randn(keys, head_dim, generator=generator, dtype=torch.float64)
            if outliers:
                chosen = torch.rand(x.shape, generator=generator) < 1e-3
                x += chosen * 10 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
            return x.to(dtype).double()

        q, k, v = normal(), normal(), normal()
        warps = torch.randperm(keys // WARP_ROWS, generator=generator)[: MOST_ROWS // WARP_ROWS].sort().values
        rows = (warps[:, None] * WARP_ROWS + torch.arange(WARP_ROWS)).flatten()
        scores = q[rows] @ k.T * (math.log2(math.e) / math.sqrt(head_dim))
        if causal:
            scores.masked_fill_(torch.arange(keys) > rows[:, None], -math.inf)
        exact = torch.softmax(scores * math.log(2), 1) @ v
        exact_squares += float(exact.square().sum())
        for way in squares:
            result = attend(way, scores, v, RUNNING_BLOCK if way == "running" else block_n, dtype)
            squares[way] += float((result.o.to(dtype).double() - exact).square().sum())
            again[way] += result.again / seeds
    return {way: (math.sqrt(squares[way] / exact_squares), again[way]) for way in squares}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=2048, help="a multiple of 16")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    options = parser.parse_args()
    if options.keys < WARP_ROWS or options.keys % WARP_ROWS:
        parser.error(f"--keys: {options.keys}, accepted multiples of {WARP_ROWS}")
    if options.seeds < 1:
        parser.error(f"--seeds: {options.seeds}, accepted 1 or more")
    print(f"{'inputs':<10}{'mask':<8}{'D':>4}{'keys a block':>14}{'running':>12}{'kept':>16}{'in turns':>16}")
    for outliers in (False, True):
        for causal in (False, True):
            for tile in TILES:
                of = errors(options.keys, tile, getattr(torch, options.dtype), causal, outliers, options.seeds)
                running = of["running"][0]
                line = f"{'outliers' if outliers else 'normal':<10}{'causal' if causal else 'full':<8}{tile[0]:>4}{tile[1]:>14}"
                line += f"{running:>12.2e}"
                for way in WAYS[1:]:
                    error, again = of[way]
                    line += f"{error / running:>8.3f} ({100 * again:4.1f})"
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
