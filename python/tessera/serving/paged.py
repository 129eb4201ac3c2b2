"""Attention over pages, in the terms of an engine's step: index tensors that stay where they are."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

import tessera
from tessera import _core
from tessera._core import Error
from tessera.torch import kernels


class Prefix(NamedTuple):
    """Keys that all sequences of a step begin with, in the same pages: of whole pages, before the first query of each."""

    cu_seqlens_q: Tensor  # int32 [2]: the queries of all sequences, as those of one
    seqused_k: Tensor  # int32 [1]
    page_table: Tensor  # int32 [1, its pages]
    own_seqused_k: Tensor  # int32 [B]: the keys after it
    own_page_table: Tensor  # int32 [B, the other pages]


def common_prefix(keys: int, *, cu_seqlens_q: Tensor, seqused_k: Tensor, page_table: Tensor, page_size: int) -> Optional[Prefix]:
    """Once a step: what `attend` wants to know of a prefix of `keys` keys; of what fills no page there is None.

    Index tensors are views of the step's, but for the lengths, which are computed without waiting for a GPU. A sequence without
    tokens may have any length."""
    pages = keys // page_size
    if pages == 0:
        return None
    return Prefix(
        cu_seqlens_q[:: cu_seqlens_q.shape[0] - 1],
        torch.full((1,), pages * page_size, dtype=torch.int32, device=seqused_k.device),
        page_table[:1, :pages],
        (seqused_k - pages * page_size).clamp_(min=0),
        page_table[:, pages:],
    )


@torch.no_grad()
def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, *, cu_seqlens_q: Tensor, seqused_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, page_table: Optional[Tensor] = None, page_indptr: Optional[Tensor] = None,
    page_indices: Optional[Tensor] = None, return_lse: bool = False, prefix: Optional[Prefix] = None, **options: Any,
) -> Optional[Tensor]:  # fmt: skip
    """Writes out [T, Hq, Dv] of packed q [T, Hq, D] against pages [pages, page_size, Hkv, D | Dv]; rows past the last
    sequence become 0. `page_table` [B, max_pages], or CSR: `page_indptr` [B + 1] and `page_indices` [N]. `options` are
    `tessera.attention`'s. Returns the LSE [Hq, T] where it is asked for. `prefix`: of `common_prefix`, with a page_table; its
    keys are read once for all sequences, unless an option measures from a query's place (window, alibi_slopes) or is a tensor
    of scores.

    The plan is found by shapes and bounds, which grow in powers of two so that few plans serve all steps."""
    options.update(page_table=page_table, page_indptr=page_indptr, page_indices=page_indices)
    given = {name: value for name, value in options.items() if value is not None}
    row_pages = (page_indices if page_table is None else page_table).shape[-1]
    given.update(
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        max_seqlen_q=bound(max_seqlen_q, q.shape[0]),
        max_seqlen_k=bound(max_seqlen_k, row_pages * k_cache.shape[1]),
    )
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise Error("k_cache, v_cache: a last dimension that is not contiguous, accepted a contiguous one: neither is copied")
    if prefix is None or any(name in given for name in _BY_PLACE):
        _, lse = kernels.forward(q, k_cache, v_cache, given, want_lse=return_lse, o=out)
        return lse
    return _attend_prefix(q, k_cache, v_cache, out, given, return_lse, prefix)


_BY_PLACE = ("window", "alibi_slopes", "bias", "mask", "block_mask", "top_left", "dropout_p")


def _attend_prefix(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, given: Any, return_lse: bool, prefix: Prefix,
) -> Optional[Tensor]:  # fmt: skip
    """The queries of all sequences as those of one against the prefix, each sequence's against its own keys, and the merge."""
    tokens, page_size = q.shape[0], k_cache.shape[1]
    parts = out.new_empty(2, 1, *out.shape)
    lses = torch.empty(2, 1, out.shape[1], tokens, dtype=torch.float32, device=q.device)
    keys = prefix.page_table.shape[1] * page_size
    for_prefix = {name: value for name, value in given.items() if name in ("scale", "softcap", "batch_invariant", "threads")}
    for_prefix.update(
        cu_seqlens_q=prefix.cu_seqlens_q, seqused_k=prefix.seqused_k, page_table=prefix.page_table, max_seqlen_q=tokens,
        max_seqlen_k=keys,
    )  # fmt: skip
    kernels.forward(q, k_cache, v_cache, for_prefix, o=parts[0, 0], lse=lses[0, 0])
    own_pages = prefix.own_page_table.shape[1]
    given.update(
        seqused_k=prefix.own_seqused_k, page_table=prefix.own_page_table,
        max_seqlen_k=max(1, min(given["max_seqlen_k"] - keys, own_pages * page_size)),
    )  # fmt: skip
    kernels.forward(q, k_cache, v_cache, given, o=parts[1, 0], lse=lses[1, 0])
    lse = torch.empty_like(lses[0]) if return_lse else None
    _core.combine(parts, lses, out[None], lse)
    return None if lse is None else lse[0]


def bound(length: int, most: int) -> int:
    """The power of two from `length` on, at most `most`."""
    return max(1, min(1 << max(length - 1, 0).bit_length(), most))


@torch.no_grad()
def write_slots(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Writes k [T, Hkv, D] and v [T, Hkv, Dv] to slots [T] of pages [pages, page_size, Hkv, D | Dv] of any strides, slot s
    being key s % page_size of page s // page_size. A negative slot is passed over. Tokens past the slots are padding."""
    k, v = k[: slots.shape[0]], v[: slots.shape[0]]
    if not k.is_cuda:  # a GPU's kernel passes over a page out of range; here that would be refused
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    page_size = k_cache.shape[1]
    # Each token is a sequence of its own: the slot's page up to the slot, whose last key is new.
    pages = torch.div(slots, page_size, rounding_mode="floor").to(torch.int32)
    lengths = (torch.remainder(slots, page_size) + 1).to(torch.int32)
    tessera.append(k[:, None], v[:, None], k_cache, v_cache, lengths, page_table=pages[:, None])


def key_lengths(indptr: Tensor, last_page_len: Optional[Tensor], page_size: int) -> Tensor:
    """`seqused_k` int32 [B] of a CSR page table's `page_indptr` [B + 1] and `last_page_len` [B], the keys of each sequence's
    last page; None where pages have one key."""
    count = indptr[1:] - indptr[:-1]
    lengths = count * page_size
    if last_page_len is not None:
        lengths = torch.where(count > 0, lengths - page_size + last_page_len, 0)
    return lengths.to(torch.int32)
