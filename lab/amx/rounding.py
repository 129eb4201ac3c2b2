"""What the stale max costs where P is bfloat16 on a CPU, simulated in NumPy: O's error and, through delta = rowsum(dO * O), those of dQ and dK,
with P and O in bfloat16 and everything else exact.

amx: 32 queries go by the maxima of the tile's first 32 keys; where in a job a bound is passed, all 32 take their maxima of the job.
dot (vdpbf16ps): the same in blocks of 256 keys, and the block after goes by its maximum, too. What a bound is of: the sum of a row's weights
in a job or block, their sums over 32 keys each, or the largest. decode_amx: rows by themselves, blocks of 32 keys, the bound is of a lane's two
keys. decode_dot: blocks of 64 keys whose maximum is always known. A maximum replaces the stale one where it is more than a threshold above it.

    python lab/amx/rounding.py --csv FILE [--heads 16] [--length 1024] [--path amx]

Bounds and thresholds are powers of two. Errors are pooled over the heads (root of the sum of squares) and divided by those of a running maximum;
`o_once`: O's by that of P rounded once against the row's maximum. `again`: the share of jobs, blocks or rows' blocks that a bound does again.
"""

import argparse
import csv
import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from inputs import bfloat16, draw

TILE_ROWS, STAGE, SUPER_BLOCK = 32, 32, 256
DOT_BLOCK, DOT_DECODE_BLOCK, LANES = 256, 64, 16
COLUMNS = ("path", "inputs", "mask", "head_dim", "of", "bound", "threshold", "o", "d_q", "d_k", "o_once", "again")
LOG2E = float(np.log2(np.e))
RUNNING = ("", None, 0)


def measured(weights, of):
    """What a bound is compared with: [..., keys] -> [...]."""
    if of == "job":
        return weights.sum(-1)
    if of == "weight":
        return weights.max(-1)
    padded = np.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, -weights.shape[-1] % STAGE)])
    return padded.reshape(*weights.shape[:-1], -1, STAGE).sum(-1).max(-1)


class Rows:
    """Rows [heads, rows]: stale max, sum, O."""

    def __init__(self, heads, rows, width):
        self.top = np.full((heads, rows), -np.inf, np.float32)
        self.total = np.zeros((heads, rows), np.float32)
        self.o = np.zeros((heads, rows, width), np.float32)

    def weights(self, s, top=None):
        top = self.top if top is None else top
        with np.errstate(over="ignore"):
            return np.exp2(s - np.where(top == -np.inf, 0, top)[..., None])

    def add(self, p, v):
        self.total += p.sum(-1)
        self.o += bfloat16(p) @ v

    def raise_top(self, s, threshold, where):
        """To the maxima of `s`, of the rows `where`."""
        best = s.max(-1)
        old = np.where(self.total == 0, -np.inf, self.top)
        moves = (best > old + threshold) & where
        raised = np.where(moves, best, self.top)
        alpha = np.where(moves, np.exp2(old - np.where(raised == -np.inf, 0, raised)), 1).astype(np.float32)
        self.top = raised
        self.total *= alpha
        self.o *= alpha[..., None]

    def result(self):
        return self.o / self.total[..., None]


def jobs_of(end, job_keys):
    """As list_jobs in src/cpu/amx_jobs.hpp."""
    for begin in range(0, end, SUPER_BLOCK):
        stages = (min(end - begin, SUPER_BLOCK) + STAGE - 1) // STAGE
        parts = -(-stages * STAGE // job_keys)
        for part in range(parts):
            yield begin + stages * part // parts * STAGE, begin + stages * (part + 1) // parts * STAGE


def tiles_of(s, width):
    """Of each tile its first row, its rows, and their scores."""
    heads, length = s.shape[:2]
    for first in range(0, length, TILE_ROWS):
        yield first, Rows(heads, TILE_ROWS, width), s[:, first : first + TILE_ROWS]


def amx(s, v, causal, of, bound, threshold):
    heads, length, width = s.shape[0], s.shape[1], v.shape[-1]
    out, jobs, again = [], 0, 0
    for first, rows, tile in tiles_of(s, width):
        best = tile[..., :STAGE].max(-1)
        rows.top = np.where(best == -np.inf, best.max(-1, keepdims=True), best)
        for begin, end in jobs_of(first + TILE_ROWS if causal else length, 64 if width <= 64 else 128):
            part = tile[..., begin:end]
            passes = np.full(heads, True) if bound is None else (measured(rows.weights(part), of) > bound).any(-1)
            jobs, again = jobs + heads, again + passes.sum()
            if passes.any():
                rows.raise_top(part, threshold, passes[:, None])
            rows.add(rows.weights(part), v[:, begin:end])
        out.append(rows.result())
    return np.concatenate(out, 1), again / jobs


def dot(s, v, causal, of, bound, threshold):
    heads, length = s.shape[:2]
    out, blocks, again = [], 0, 0
    for first, rows, tile in tiles_of(s, v.shape[-1]):
        passed = np.zeros(heads, bool)  # of the block before
        last = first + TILE_ROWS if causal else length
        for block in range(0, last, DOT_BLOCK):
            stop = min(last, block + DOT_BLOCK)
            cut = min(stop, (first + 1) // 8 * 8) if causal else stop  # keys that all rows see
            cut = block if cut - block < STAGE else cut
            for begin, end, full in ((block, cut, True), (cut, stop, False)):
                if begin == end:
                    continue
                part, top = tile[..., begin:end], rows.top
                plain = np.full(heads, True)
                if full and bound is not None:
                    if begin == 0:
                        top = part[..., :STAGE].max(-1)
                    passes = (measured(rows.weights(part, top), of) > bound).any(-1)
                    plain = passed | passes
                    blocks, again = blocks + heads, again + plain.sum()
                    passed = passes & ~passed
                else:
                    passed[:] = False
                rows.top = np.where(plain[:, None], rows.top, top)
                rows.raise_top(part, threshold, plain[:, None])
                rows.add(rows.weights(part), v[:, begin:end])
        out.append(rows.result())
    return np.concatenate(out, 1), again / max(blocks, 1)


def decode(s, v, bound, threshold, block):
    heads, length = s.shape[:2]
    rows = Rows(heads, length, v.shape[-1])
    blocks = again = 0
    for begin in range(0, length, block):
        part = s[..., begin : begin + block]
        takes = np.full((heads, length), True)
        if bound is not None and begin > 0:
            takes = rows.weights(part).reshape(heads, length, -1, LANES).sum(-2).max(-1) > bound
            blocks, again = blocks + takes.size, again + takes.sum()
        rows.raise_top(part, threshold, takes)
        rows.add(rows.weights(part), v[:, begin : begin + block])
    return rows.result(), again / max(blocks, 1)


FORWARD = [RUNNING, ("job", 16, 8), *(("job", bound, threshold) for bound in (10, 9, 8, 7, 6) for threshold in (8, 0))]
FORWARD += [("stage", 6, 0), ("stage", 5, 0), ("weight", 6, 0), ("weight", 5, 0), ("weight", 4, 0)]
# The simulation, what it is simulated with, and whether it meets masks.
PATHS = {
    "amx": (amx, FORWARD, True),
    "dot": (dot, FORWARD, True),
    "decode_amx": (
        lambda s, v, _, of, bound, threshold: decode(s, v, bound, threshold, STAGE),
        [RUNNING, ("lane", 16, 8), *(("lane", bound, 0) for bound in (8, 6, 4, 3, 2, 1))],
        False,
    ),
    "decode_dot": (
        lambda s, v, _, of, bound, threshold: decode(s, v, bound, threshold, DOT_DECODE_BLOCK),
        [RUNNING, ("", None, 8), ("", None, 4)],
        False,
    ),
}
# The scores' standard deviation, and the share of outliers.
INPUTS = {"normal": (1, 0), "sharp": (2, 0), "outliers": (1, 1e-3)}


def squares(path, head_dim, inputs, causal, length, seed):
    """For P rounded once and each choice of the path: squared errors of O, dQ, dK, summed, and the share done again."""
    rng = np.random.default_rng(seed)
    spread, outliers = INPUTS[inputs]
    q, k, v, d_o = (draw(rng, (1, length, head_dim), outliers) for _ in range(4))
    s = q.astype(np.float64) @ k.swapaxes(1, 2) * (spread * head_dim**-0.5 * LOG2E)
    if causal:
        s[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    p = np.exp2(s - s.max(-1, keepdims=True))
    once = bfloat16(p) @ v / p.sum(-1, keepdims=True)
    p /= p.sum(-1, keepdims=True)
    exact = p @ v
    s = s.astype(np.float32)

    def squared(o):
        o = bfloat16(o)
        d_s = (d_o * (exact - o)).sum(-1, keepdims=True) * p  # its error
        return [(x.astype(np.float64) ** 2).sum() for x in (o - exact, d_s @ k, d_s.swapaxes(1, 2) @ q)]

    yield squared(once), 0
    simulate, choices, _ = PATHS[path]
    for of, bound, threshold in choices:
        o, again = simulate(s, v, causal, of, None if bound is None else 2.0**bound, threshold)
        yield squared(o), 0 if bound is None else again


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", required=True, metavar="FILE")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--path", choices=PATHS, action="append")
    options = parser.parse_args()
    with open(options.csv, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for path in options.path or PATHS:
            _, choices, masks = PATHS[path]
            for inputs, causal, head_dim in itertools.product(INPUTS, (False, True) if masks else (False,), (64, 128)):
                errors, again = 0, 0
                for seed in range(options.heads):
                    found = list(squares(path, head_dim, inputs, causal, options.length, seed))
                    errors = errors + np.array([x for x, _ in found])
                    again = again + np.array([x for _, x in found]) / options.heads
                once, running = errors[0], errors[1]
                for (of, bound, threshold), found, share in zip(choices, errors[1:], again[1:]):
                    ratios = [f"{x:.3f}" for x in np.sqrt(found / running)] + [f"{np.sqrt(found / once)[0]:.3f}", f"{share:.4f}"]
                    row = (path, inputs, "causal" if causal else "full", head_dim, of, "" if bound is None else bound, threshold, *ratios)
                    writer.writerow(row)
                    print(*row, flush=True)


if __name__ == "__main__":
    main()
