"""The error of a long sum in float32, such as those of dK and dV of a causal sequence's first keys. Tensor cores
truncate sums instead of rounding them to nearest, and lose half a unit of the last place in each step, always in the
same direction: the error grows with the length."""

import numpy as np
import pytest
from inputs import bfloat16

COLUMNS, STEP = 32, 16  # queries that wgmma adds in one step


def toward_zero(x):
    nearest = np.float32(x)
    return np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)


def errors(length):
    """Relative RMS errors of the first key's dV, whose weights are about 1 / i: rounded to the nearest; cut."""
    rng = np.random.default_rng(1)
    weights = np.exp(rng.standard_normal(length) - 0.5) / np.arange(1, length + 1)
    d_o = bfloat16(rng.standard_normal((length, COLUMNS))).astype(float)
    steps = np.einsum("sk,skd->sd", weights.reshape(-1, STEP), d_o.reshape(-1, STEP, COLUMNS))
    nearest = cut = np.zeros(COLUMNS, np.float32)
    for step in steps:
        nearest, cut = np.float32(nearest + step), toward_zero(cut + step)
    exact = weights @ d_o
    return [np.sqrt(((got - exact) ** 2).sum() / (exact**2).sum()) for got in (nearest, cut)]


@pytest.mark.parametrize("length", [16384, 131072])
def test_cut_sums_err_in_proportion_to_the_length(length):
    nearest, cut = errors(length)
    assert nearest < 1e-5
    assert cut == pytest.approx(2.8e-9 * length, rel=0.3)  # 2.8e-3 at 1048576
