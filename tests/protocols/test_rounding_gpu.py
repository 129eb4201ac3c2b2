"""The cost of the stale max for O, dQ and dK on a GPU, simulated: softmax and its second product with P and O in
bfloat16, everything else in float64, and delta = rowsum(dO * O) with that O. A warp's 16 rows use their maximum in the
first tile, and update it if one lane's part of a later tile's sum exceeds a bound. A bound of 0 gives a running
maximum, an infinite bound never updates it."""

import math

import numpy as np
import pytest
from headers import constant
from inputs import bfloat16, draw

TILES = {128: 128, 256: 64}  # keys, by head size
BOUNDS = (0, constant("kStaleMaxBound"), math.inf)
WARP_ROWS = 16
HEADS, LENGTH, OUTLIERS = 2, 768, 1e-3


def squares(x, exact):
    """Of the error, and of what it is relative to."""
    return ((x - exact) ** 2).sum(), (exact**2).sum()


def forward(scores, v, tile, bound):
    """O of the simulated kernel. scores: in log2 units."""
    length = len(scores)
    top, total, o = np.full(length, -np.inf), np.zeros(length), np.zeros((length, v.shape[1]))
    for begin in range(0, length, tile):
        s = scores[:, begin : begin + tile]
        sees = (s > -np.inf).any(1).reshape(-1, WARP_ROWS).any(1)
        takes = sees.copy()
        if begin > 0 and bound > 0:
            p = np.exp2(s - top[:, None])
            lanes = np.stack([p[:, np.arange(s.shape[1]) // 2 % 4 == lane].sum(1) for lane in range(4)], 1)
            takes &= ((lanes.max(1) > bound) | (top == -np.inf)).reshape(-1, WARP_ROWS).any(1)
        raised = np.where(np.repeat(takes, WARP_ROWS), np.maximum(top, s.max(1)), top)
        base = np.where(raised == -np.inf, 0, raised)
        rescale = np.where(top == raised, 1, np.exp2(top - base))
        top, total, o = raised, total * rescale, o * rescale[:, None]
        p = np.exp2(s - base[:, None]).astype(np.float32)
        total, o = total + p.sum(1), o + bfloat16(p) @ v[begin : begin + tile]
    return o / total[:, None]


def squares_of_head(head_dim, outliers, causal, length, seed):
    """For each bound: squared errors and squares of O, dQ and dK."""
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
        o = bfloat16(forward(scores, v, TILES[head_dim], bound))
        with_o = p * (d_p - (d_o * o).sum(1, keepdims=True))
        yield *squares(o, exact), *squares(with_o @ k, d_s @ k), *squares(with_o.T @ q, d_s.T @ q)


@pytest.mark.parametrize(("head_dim", "causal"), [(128, False), (128, True), (256, False)])
def test_the_bound_keeps_errors_near_those_of_a_running_maximum(head_dim, causal):
    heads = [list(squares_of_head(head_dim, OUTLIERS, causal, LENGTH, seed)) for seed in range(HEADS)]
    running, bounded, unbounded = (np.sqrt(found[[0, 2, 4]] / found[[1, 3, 5]]) for found in np.sum(heads, 0))
    assert (bounded <= running * 1.1).all()
    assert (unbounded >= running * [1.05, 1.1, 1.1]).all()  # the simulation shows what the bound is for
