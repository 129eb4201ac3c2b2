"""Attention and its gradients in float64, some rows of one head at a time, for arrays of NumPy or of PyTorch on any device.

For a row i: s = score(scale q_i K^T), p = softmax(s), o = p V, dp = dO_i V^T, ds = p (dp - p.dp), dq = scale ds K, and over
all rows dK = scale dS^T Q, dV = P^T dO (Dao et al. 2022, appendix B).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Rows(NamedTuple):
    """o [R, Dv] and d_q [R, D] of the rows, and what they add to d_k [Sk, D] and d_v [Sk, Dv]; without d_o: o alone."""

    o: Any
    d_q: Any = None
    d_k: Any = None
    d_v: Any = None


def attend(
    xp: Any, q: Any, k: Any, v: Any, diagonal: Any, *, scale: float, d_o: Any = None, causal: bool = False,
    window_left: int = -1, softcap: float = 0.0, bias: Any = None, mask: Any = None, slope: Any = 0.0,
) -> Rows:  # fmt: skip
    """xp: numpy or torch. float64 q [R, D], k [Sk, D], v [Sk, Dv], d_o [R, Dv]; diagonal [R]: the key that each row's query
    stands at, i + Sk - Sq; bias, mask [R, Sk]; slope: of ALiBi, for this head."""
    s = scale * (q @ k.T)
    d_cap = 1.0
    if softcap:
        tanh = xp.tanh(s / softcap)
        s, d_cap = softcap * tanh, 1 - tanh**2
    if bias is not None:
        s = s + bias
    keys = xp.cumsum(xp.ones_like(k[:, 0]), 0) - 1  # 0 .. Sk - 1, on the device of k
    right = keys - diagonal[:, None]  # of the diagonal
    s = s - slope * xp.abs(right)
    hidden = xp.zeros_like(s, dtype=xp.bool_ if hasattr(xp, "bool_") else xp.bool)
    if causal:
        hidden = hidden | (right > 0)
    if window_left >= 0:
        hidden = hidden | (right < -window_left)
    if mask is not None:
        hidden = hidden | ~mask
    s = xp.where(hidden, -math.inf, s)
    largest = xp.amax(s, axis=-1, keepdims=True)
    p = xp.exp(s - xp.where(largest == -math.inf, 0.0, largest))
    total = p.sum(axis=-1, keepdims=True)
    p = p / xp.where(total == 0, 1.0, total)  # a row that sees nothing: 0
    o = p @ v
    if d_o is None:
        return Rows(o)
    d_p = d_o @ v.T
    d_s = scale * d_cap * p * (d_p - (p * d_p).sum(axis=-1, keepdims=True))
    return Rows(o, d_s @ k, d_s.T @ q, p.T @ d_o)
