"""Attention over pages, in the terms of an engine's step: index tensors that stay where they are."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from tessera._core import Error
from tessera.torch import cache, kernels
from tessera.torch import options as of_call


class Prefix(NamedTuple):
    """Keys that all sequences of a step begin with, in the same pages: of whole pages, before the first query of each."""

    groups: Tensor  # int32 [2]: all of the batch
    lens: Tensor  # int32 [1]
    keys: int


def common_prefix(keys: int, *, seqused_k: Tensor, page_size: int) -> Optional[Prefix]:
    """Once a step: what `attend` wants to know of a prefix of `keys` keys; of what fills no page there is None. Waits for no GPU.
    A sequence without tokens may have any length."""
    keys -= keys % page_size
    if keys == 0:
        return None
    groups = torch.zeros(2, dtype=torch.int32, device=seqused_k.device)
    groups[1:].fill_(seqused_k.shape[0])
    return Prefix(groups, torch.full((1,), keys, dtype=torch.int32, device=seqused_k.device), keys)


# What a prefix is not read once with.
_EACH_ALONE = ("window", "alibi_slopes", "bias", "mask", "block_mask", "top_left", "dropout_p", "batch_invariant")


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, *, cu_seqlens_q: Tensor, seqused_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, page_table: Optional[Tensor] = None, page_indptr: Optional[Tensor] = None,
    page_indices: Optional[Tensor] = None, return_lse: bool = False, prefix: Optional[Prefix] = None, **options: Any,
) -> Optional[Tensor]:  # fmt: skip
    """Writes out [T, Hq, Dv] of packed q [T, Hq, D] against pages [pages, page_size, Hkv, D | Dv]; rows past the last
    sequence become 0. `page_table` [B, max_pages], or CSR: `page_indptr` [B + 1] and `page_indices` [N]. `options` are
    `tessera.attention`'s. Returns the LSE [Hq, T] where it is asked for. `prefix`: of `common_prefix`; its
    keys are read once for all sequences, unless an option measures from a query's place (window, alibi_slopes), is a tensor of
    scores, or asks for bits that do not depend on the batch.

    Raises tessera.Error for a tensor that requires a gradient, outside of torch.no_grad(): there is none.

    The plan is found by shapes and bounds, which grow in powers of two so that few plans serve all steps."""
    options.update(page_table=page_table, page_indptr=page_indptr, page_indices=page_indices)
    given = of_call.given("attend", options)
    kernels.refuse_gradients("tessera.serving", q=q, k_cache=k_cache, v_cache=v_cache, out=out, **given)
    if "sink" in given:
        given["sink"] = given["sink"].float()  # in the model's dtype
    max_seqlen_q = of_call.integer("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = of_call.integer("max_seqlen_k", max_seqlen_k)
    row_pages = (page_indices if page_table is None else page_table).shape[-1]
    given.update(
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        max_seqlen_q=bound(max_seqlen_q, q.shape[0]),
        max_seqlen_k=bound(max_seqlen_k, row_pages * k_cache.shape[1]),
    )
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise Error("k_cache, v_cache: a last dimension that is not contiguous, accepted a contiguous one: neither is copied")
    if prefix is not None and all(given.get(name, False) is False for name in _EACH_ALONE):
        most = given["max_seqlen_k"]
        given.update(
            prefix_groups=prefix.groups, prefix_lens=prefix.lens, max_prefix_k=bound(prefix.keys, most),
            max_suffix_k=bound(max_seqlen_k - prefix.keys, most),
        )  # fmt: skip
    with torch.no_grad():
        _, lse = kernels.forward(q, k_cache, v_cache, given, want_lse=return_lse, o=out)
    kernels.mark_written(out)
    return lse


def bound(length: int, most: int) -> int:
    """The power of two from `length` on, at most `most`."""
    return max(1, min(1 << max(length - 1, 0).bit_length(), most))


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
    cache.append(k[:, None], v[:, None], k_cache, v_cache, lengths, page_table=pages[:, None])


def key_lengths(indptr: Tensor, last_page_len: Optional[Tensor], page_size: int) -> Tensor:
    """`seqused_k` int32 [B] of a CSR page table's `page_indptr` [B + 1] and `last_page_len` [B], the keys of each sequence's
    last page; None where pages have one key."""
    count = indptr[1:] - indptr[:-1]
    lengths = count * page_size
    if last_page_len is not None:
        lengths = torch.where(count > 0, lengths - page_size + last_page_len, 0)
    return lengths.to(torch.int32)
