"""Appends new keys and values to a cache in place: the operator `tessera::append`, which tracers see."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from tessera import _core

from . import kernels

_TENSORS = (
    "cu_seqlens", "page_table", "q", "q_out", "cos", "sin", "positions_q", "positions_k", "dropped", "k_descale",
    "v_descale",
)  # fmt: skip
# and q, if q_out is absent; scales are written with compute_scales
_WRITTEN = ("k_cache", "v_cache", "q_out", "dropped", "k_descale", "v_descale")


def _append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqused_k: Tensor, cu_seqlens: Optional[Tensor],
    page_table: Optional[Tensor], q: Optional[Tensor], q_out: Optional[Tensor], cos: Optional[Tensor],
    sin: Optional[Tensor], positions_q: Optional[Tensor], positions_k: Optional[Tensor], dropped: Optional[Tensor],
    k_descale: Optional[Tensor], v_descale: Optional[Tensor], interleaved: bool, compute_scales: bool,
) -> None:  # fmt: skip
    _core.append(
        kernels.plain(k), kernels.plain(v), k_cache, v_cache, seqused_k, cu_seqlens=cu_seqlens, page_table=page_table,
        q=q, q_out=q_out, cos=cos, sin=sin, positions_q=positions_q, positions_k=positions_k, dropped=dropped,
        k_descale=k_descale, v_descale=v_descale, interleaved=interleaved, compute_scales=compute_scales,
    )  # fmt: skip


_operator = torch.library.custom_op("tessera::append", _append, mutates_args=_WRITTEN)


@_operator.register_fake
def _fake(k, v, k_cache, v_cache, seqused_k, *others) -> None:
    *tensors, interleaved, compute_scales = others
    try:
        described = [
            None if t is None else kernels.without_data(t) for t in (k, v, k_cache, v_cache, seqused_k, *tensors)
        ]
    except kernels.Unknown:
        return
    named = dict(zip(_TENSORS, described[5:]))
    _core.append(*described[:5], **named, interleaved=interleaved, compute_scales=compute_scales)


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqused_k: Tensor,
    *,
    interleaved: bool = False,
    compute_scales: bool = False,
    **tensors: Any,
) -> None:
    """`tessera.append` of tensors. Written tensors are marked as modified; tensors that require a gradient are
    refused."""
    by_name = {name: tensors.get(name) for name in _TENSORS}
    kernels.refuse_gradients("tessera.append", k=k, v=v, k_cache=k_cache, v_cache=v_cache, **by_name)
    q, q_out = by_name["q"], by_name["q_out"]
    inputs = (k, v, k_cache, v_cache, seqused_k, *by_name.values())
    if not kernels.seen_by_others(*inputs) and all(map(kernels.has_data, inputs)):
        _append(*inputs, interleaved, compute_scales)
        scales = (by_name["k_descale"], by_name["v_descale"]) if compute_scales else ()
        kernels.mark_written(k_cache, v_cache, q if q_out is None else q_out, by_name["dropped"], *scales)
        return
    if q is not None and q_out is None:  # an operator declares which of its arguments it writes
        by_name["q_out"] = torch.empty_like(q, memory_format=torch.contiguous_format)
    _operator(k, v, k_cache, v_cache, seqused_k, *by_name.values(), interleaved, compute_scales)
    if q is not None and q_out is None:
        q.copy_(by_name["q_out"])
