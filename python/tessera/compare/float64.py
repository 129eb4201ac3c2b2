"""Attention and its gradients written out, for NumPy arrays and for PyTorch tensors on any device: the reference in
float64, and the same plain computation in any other type.

For a row i: s = score(scale q_i K^T), p = softmax(s), o = p V, dp = dO_i V^T, ds = p (dp - p.dp), dq = scale ds K, and
over all rows dK = scale dS^T Q, dV = P^T dO (Dao et al. 2022, appendix B).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

Product = Callable[[Any, Any], Any]


class Rows(NamedTuple):
    """p [..., R, Sk], o [..., R, Dv] and lse [..., R] of the rows. With d_o, also d_s [..., R, Sk], which is a bias's
    gradient, d_sink [..., R], d_q [..., R, D], and the rows' contributions to d_k [..., Sk, D] and d_v [..., Sk,
    Dv]."""

    p: Any
    o: Any
    lse: Any
    d_s: Any = None
    d_sink: Any = None
    d_q: Any = None
    d_k: Any = None
    d_v: Any = None


def hidden_keys(
    xp: Any, keys: Any, diagonal: Any, *, causal: bool = False, window: tuple[int, int] = (-1, -1), seqlen: Any = None
) -> Any:
    """bool [..., R, Sk], True for keys that a row does not see. window: left and right, -1 for no bound."""
    right = keys - diagonal[..., None]  # of the diagonal
    hidden = xp.zeros_like(right, dtype=bool if hasattr(xp, "ndarray") else xp.bool)
    if seqlen is not None:
        hidden = hidden | (keys >= seqlen)
    if causal:
        hidden = hidden | (right > 0)
    if window[0] >= 0:
        hidden = hidden | (right < -window[0])
    if window[1] >= 0:
        hidden = hidden | (right > window[1])
    return hidden


def scores(
    xp: Any, q: Any, k: Any, diagonal: Any, *, scale: Any, softcap: float = 0.0, bias: Any = None, mask: Any = None,
    slope: Any = None, product: Product = operator.matmul, **where: Any,
) -> Any:  # fmt: skip
    """Scores [..., R, Sk] in q's type, -inf for hidden keys. Arguments as for attend."""
    s = scale * product(q, k.swapaxes(-1, -2))
    if softcap:
        s = softcap * xp.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    keys = xp.cumsum(xp.ones_like(k[..., 0]), -1, dtype=xp.float64)[..., None, :] - 1  # 0 .. Sk - 1, on k's device
    if slope is not None:
        s = s - slope * xp.asarray(xp.abs(keys - diagonal[..., None]), dtype=s.dtype)
    hidden = hidden_keys(xp, keys, diagonal, **where)
    if mask is not None:
        hidden = hidden | ~mask
    return xp.where(hidden, -math.inf, s)


def attend(
    xp: Any, q: Any, k: Any, v: Any, diagonal: Any, *, scale: Any, d_o: Any = None, d_lse: Any = 0.0, sink: Any = None,
    softcap: float = 0.0, product: Product = operator.matmul, stored: Callable[[Any], Any] = lambda x: x,
    **options: Any,
) -> Rows:  # fmt: skip
    """xp: numpy or torch. q [..., R, D], k [..., Sk, D], v [..., Sk, Dv] and d_o [..., R, Dv] have one type. diagonal
    [..., R]: the key aligned with each row's query, i + Sk - Sq. Options of scores: bias, mask [..., R, Sk], slope (of
    ALiBi), sink [..., 1, 1]; of visibility: those of hidden_keys. Leading dimensions broadcast. product: the matrix
    product; stored: the conversion of P and dS before they are multiplied."""
    s = scores(xp, q, k, diagonal, scale=scale, softcap=softcap, product=product, **options)
    largest = xp.amax(s, -1, keepdims=True) if s.shape[-1] else s.sum(-1, keepdims=True) - math.inf
    if sink is not None:
        largest = xp.maximum(largest, sink)
    largest = xp.where(largest == -math.inf, 0.0, largest)
    largest = largest.detach() if hasattr(largest, "detach") else largest  # it cancels except for rounding
    p = xp.exp(s - largest)
    total = p.sum(-1, keepdims=True)
    if sink is not None:
        total = total + xp.exp(sink - largest)
    total = xp.where(total == 0, 1.0, total)
    p = p / total  # a row that sees no key: 0, unless it has a sink
    seen = (s > -math.inf).any(-1, keepdims=True)
    lse = xp.where(seen, xp.log(total) + largest, -math.inf)
    o = product(stored(p), v)
    if d_o is None:
        return Rows(p, o, lse[..., 0])
    d_p = product(d_o, v.swapaxes(-1, -2))
    delta = (p * d_p).sum(-1, keepdims=True) - d_lse
    d_s = p * (d_p - delta)
    d_sink = None if sink is None else (-xp.where(seen, xp.exp(sink - xp.where(seen, lse, 0.0)), 0.0) * delta)[..., 0]
    d_qk = d_s if not softcap else d_s * (1 - xp.tanh(scale * product(q, k.swapaxes(-1, -2)) / softcap) ** 2)
    d_qk = stored(d_qk)
    return Rows(
        p, o, lse[..., 0], d_s, d_sink, scale * product(d_qk, k), scale * product(d_qk.swapaxes(-1, -2), q),
        product(stored(p).swapaxes(-1, -2), d_o),
    )  # fmt: skip
