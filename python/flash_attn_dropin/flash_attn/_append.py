"""Appends new keys and values to a cache and rotates queries and new keys: `tessera.append`, also in traced
programs."""

from typing import NamedTuple, Optional

import torch
from tessera.serving.paged import write_slots
from tessera.torch import cache
from torch import Tensor

from flash_attn._extent import Extent, tracing
from flash_attn.layers.rotary import rotate


class Angles(NamedTuple):
    """cos, sin [R, rotary_dim / 2], and the row of them for each query [B, Sq] and each new key [B, S_new]."""

    cos: Tensor
    sin: Tensor
    rows_q: Tensor
    rows_k: Tensor
    interleaved: bool


def append(
    extent: Extent, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
    pages: Optional[Tensor], angles: Optional[Angles],
) -> Tensor:  # fmt: skip
    """Writes k, v [B, S_new, Hkv, D] after each sequence's `lengths` keys, in place, and returns q, rotated if there
    are angles. If the extent clamps, tokens out of range are dropped."""
    if extent.num_new == 0 and angles is None:
        return q
    if extent.clamps and not q.is_cuda and not tracing():  # a GPU's kernel drops them itself, the CPU's refuses them
        return _append_within(extent, q, k, v, k_cache, v_cache, lengths, pages, angles)
    q_out = cos = sin = rows_q = rows_k = None
    if angles is not None:
        q = q.to(k.dtype)
        q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
        cos, sin = (x if x.dtype == k.dtype else x.float() for x in angles[:2])
        rows_q, rows_k = (x.to(torch.int32) for x in (angles.rows_q, angles.rows_k))
    cache.append(
        k.contiguous(), v.contiguous(), k_cache, v_cache, lengths + extent.num_new, page_table=pages,
        q=q.contiguous() if angles is not None else None, q_out=q_out, cos=cos, sin=sin, positions_q=rows_q,
        positions_k=rows_k, interleaved=angles is not None and angles.interleaved,
    )  # fmt: skip
    return q if q_out is None else q_out


def _append_within(
    extent: Extent, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
    pages: Optional[Tensor], angles: Optional[Angles],
) -> Tensor:  # fmt: skip
    if angles is not None:
        cos, sin, interleaved = angles.cos, angles.sin, angles.interleaved
        q, k = (rotate(x, cos[at], sin[at], interleaved) for x, at in ((q, angles.rows_q), (k, angles.rows_k)))
    write_slots(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, extent.slots(lengths, pages))
    return q
