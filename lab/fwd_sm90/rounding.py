"""What the stale max of fwd_sm90 costs O, and dQ and dK, simulated in NumPy: softmax and its second product with P and O in bfloat16,
everything else in float64, dQ and dK with delta = rowsum(dO ∘ O) of that O. A warp's 16 rows take their maximum in the first tile, and where
a lane's share of a later tile's sum passes a bound (kStaleMaxBound, kernels/tessera/attention/softmax.cuh); a bound of 0: in every tile, as a
running maximum; inf: never again. Relative RMS errors, their squares summed over the heads that are drawn, since a few rows make most of them.

    python lab/fwd_sm90/rounding.py --csv FILE [--heads 16] [--length 1024] [--outliers 0 0.001]
"""

import argparse
import csv
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from inputs import bfloat16, draw

TILES = {128: 128, 192: 64, 256: 64}  # keys, by head size
BOUNDS = (0, 8, 16, 32, 64, math.inf)
COLUMNS = ("outliers", "mask", "head_dim", "tile", "bound", "o", "d_q", "d_k", "tiles_done_again")
WARP_ROWS = 16


def squares(x, exact):
    """Of the error, and of what it is relative to."""
    return ((x - exact) ** 2).sum(), (exact**2).sum()


def forward(scores, v, tile, bound):
    """O of the simulated kernel, and the share of tiles behind a row's first that take a maximum. scores: log2 units."""
    length = len(scores)
    top, total, o = np.full(length, -np.inf), np.zeros(length), np.zeros((length, v.shape[1]))
    again = later = 0
    for begin in range(0, length, tile):
        s = scores[:, begin : begin + tile]
        sees = (s > -np.inf).any(1).reshape(-1, WARP_ROWS).any(1)
        takes = sees.copy()
        if begin > 0 and bound > 0:
            p = np.exp2(s - top[:, None])
            lanes = np.stack([p[:, np.arange(s.shape[1]) // 2 % 4 == lane].sum(1) for lane in range(4)], 1)
            takes &= ((lanes.max(1) > bound) | (top == -np.inf)).reshape(-1, WARP_ROWS).any(1)
            later, again = later + sees.sum(), again + takes.sum()
        raised = np.where(np.repeat(takes, WARP_ROWS), np.maximum(top, s.max(1)), top)
        base = np.where(raised == -np.inf, 0, raised)
        rescale = np.where(top == raised, 1, np.exp2(top - base))
        top, total, o = raised, total * rescale, o * rescale[:, None]
        p = np.exp2(s - base[:, None]).astype(np.float32)
        total, o = total + p.sum(1), o + bfloat16(p) @ v[begin : begin + tile]
    return o / total[:, None], again / max(later, 1)


def squares_of_head(head_dim, outliers, causal, length, seed):
    """For each bound: squares of O, dQ, dK, and the share of tiles done again."""
    rng = np.random.default_rng(seed)
    q, k, v, d_o = (draw(rng, (length, head_dim), outliers).astype(np.float64) for _ in range(4))
    scores = q @ k.T * (head_dim**-0.5 * np.log2(np.e))
    if causal:
        scores[np.triu_indices(length, 1)] = -np.inf
    p = np.exp2(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    exact, d_p = p @ v, d_o @ v.T
    d_s = p * (d_p - (d_o * exact).sum(1, keepdims=True))
    for bound in BOUNDS:
        o, again = forward(scores, v, TILES[head_dim], bound)
        o = bfloat16(o)
        with_o = p * (d_p - (d_o * o).sum(1, keepdims=True))
        yield *squares(o, exact), *squares(with_o @ k, d_s @ k), *squares(with_o.T @ q, d_s.T @ q), again


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", required=True, metavar="FILE")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--outliers", type=float, nargs="+", default=[0, 1e-3], help="their share of the inputs")
    options = parser.parse_args()
    with open(options.csv, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for outliers in options.outliers:
            for causal in (False, True):
                for head_dim, tile in TILES.items():
                    heads = [list(squares_of_head(head_dim, outliers, causal, options.length, seed)) for seed in range(options.heads)]
                    for bound, found in zip(BOUNDS, np.sum(heads, 0)):
                        numbers = [f"{math.sqrt(found[i] / found[i + 1]):.3e}" for i in (0, 2, 4)] + [f"{found[6] / options.heads:.4f}"]
                        row = (outliers, "causal" if causal else "full", head_dim, tile, bound, *numbers)
                        writer.writerow(row)
                        print(*row, flush=True)


if __name__ == "__main__":
    main()
