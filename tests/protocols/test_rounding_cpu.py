"""The cost of the stale max if P is bfloat16 on a CPU, simulated: the error of O and, through delta = rowsum(dO * O),
the errors of dQ and dK, with P and O in bfloat16 and everything else exact.

- amx: 32 queries start from the maxima of the tile's first 32 keys. If one weight of a job exceeds a bound, all 32 use
  their maxima of the job.
- dot (vdpbf16ps): the same in blocks of 256 keys by the sums of 32 keys each, and the next block also starts from its
  own maximum.
- decode_amx: each row by itself, in blocks of 32 keys; the bound applies to one lane's two keys.
- decode_dot: blocks of 64 keys whose maximum is always known."""

import numpy as np
import pytest
from headers import constant
from inputs import bfloat16, draw

TILE_ROWS, STAGE, SUPER_BLOCK = 32, constant("kStaleMaxKeys"), constant("kBlockKeysAmx")
DOT_BLOCK, DOT_DECODE_BLOCK, LANES = 256, 64, 16
LOG2E = float(np.log2(np.e))
LENGTH, HEADS = 512, 4


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
    out = []
    for first, rows, tile in tiles_of(s, width):
        best = tile[..., :STAGE].max(-1)
        rows.top = np.where(best == -np.inf, best.max(-1, keepdims=True), best)
        for begin, end in jobs_of(first + TILE_ROWS if causal else length, 64 if width <= 64 else 128):
            part = tile[..., begin:end]
            passes = np.full(heads, True) if bound is None else (measured(rows.weights(part), of) > bound).any(-1)
            if passes.any():
                rows.raise_top(part, threshold, passes[:, None])
            rows.add(rows.weights(part), v[:, begin:end])
        out.append(rows.result())
    return np.concatenate(out, 1)


def dot(s, v, causal, of, bound, threshold):
    heads, length = s.shape[:2]
    out = []
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
                    passed = passes & ~passed
                else:
                    passed[:] = False
                rows.top = np.where(plain[:, None], rows.top, top)
                rows.raise_top(part, threshold, plain[:, None])
                rows.add(rows.weights(part), v[:, begin:end])
        out.append(rows.result())
    return np.concatenate(out, 1)


def decode(s, v, bound, threshold, block):
    heads, length = s.shape[:2]
    rows = Rows(heads, length, v.shape[-1])
    for begin in range(0, length, block):
        part = s[..., begin : begin + block]
        takes = np.full((heads, length), True)
        if bound is not None and begin > 0:
            takes = rows.weights(part).reshape(heads, length, -1, LANES).sum(-2).max(-1) > bound
        rows.raise_top(part, threshold, takes)
        rows.add(rows.weights(part), v[:, begin : begin + block])
    return rows.result()


def of_rounded_p(name):
    return constant(name, "StaleMax<true>")


# What a bound is of, the bound, and by how many powers of two a maximum passes the stale one that it replaces.
LAGGING = ("job", 2.0**16, 8)  # as far as a max may lag where P stays float32
NEVER_STALE, ANY = ("", None, 0), of_rounded_p("kRescaleThreshold")
PATHS = {
    "amx": (amx, [("weight", of_rounded_p("kMostWeight"), ANY), LAGGING]),
    "dot": (dot, [("stage", of_rounded_p("kMostSum"), ANY), LAGGING]),
    "decode_amx": (
        lambda s, v, _, of, bound, threshold: decode(s, v, bound, threshold, STAGE),
        [("lane", constant("kMostLaneSum"), ANY), LAGGING],
    ),
    "decode_dot": (
        lambda s, v, _, of, bound, threshold: decode(s, v, bound, threshold, DOT_DECODE_BLOCK),
        [NEVER_STALE, ("", None, 8)],
    ),
}
INPUTS = {"normal": (1, 0), "outliers": (1, 1e-3)}  # the scores' standard deviation, and the fraction of outliers


def squares(path, head_dim, inputs, causal, length, seed):
    """Squared errors of O, dQ and dK: of P rounded once, and of each choice of the path."""
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

    yield squared(once)
    simulate, choices = PATHS[path]
    for of, bound, threshold in choices:
        yield squared(simulate(s, v, causal, of, bound, threshold))


def ratios(path, inputs, causal=False, head_dim=64):
    """Errors of O, dQ and dK over those of P rounded once: by the library, and with a max that may lag by 2^8."""
    errors = sum(np.array(list(squares(path, head_dim, inputs, causal, LENGTH, seed))) for seed in range(HEADS))
    return np.sqrt(errors[1:] / errors[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("path", ["amx", "dot"])
def test_forward_costs_little_more_than_one_rounding(path, causal):
    assert (ratios(path, "normal", causal)[0] <= 1.06).all()
    bounded, lagging = ratios(path, "outliers", causal)
    assert (bounded <= 1.08).all()
    assert lagging[0] >= 1.1  # the simulation shows what the bounds are for


@pytest.mark.parametrize("path", ["decode_amx", "decode_dot"])
def test_decoding_costs_one_rounding(path):
    assert (ratios(path, "normal")[0] <= 1.05).all()
    bounded, lagging = ratios(path, "outliers")
    assert (bounded <= 1.05).all()
    assert lagging[0] >= 1.1
