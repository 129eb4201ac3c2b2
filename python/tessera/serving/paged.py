"""Attention on pages, in the terms of an engine's step: index tensors that stay in place."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Union

import torch
from torch import Tensor

from tessera._core import Error
from tessera.torch import cache, kernels
from tessera.torch import options as of_call


class Prefix(NamedTuple):
    """Keys that all sequences of a step begin with, in the same full pages, before the first query of each."""

    groups: Tensor  # int32 [2]: the whole batch
    lens: Tensor  # int32 [1]
    keys: int


def common_prefix(keys: int, *, seqused_k: Tensor, page_size: int) -> Optional[Prefix]:
    """Called once per step: the arguments of `attend` for a prefix of `keys` keys, or None if it fills no page. Waits
    for no GPU. A sequence without tokens may have any length."""
    keys -= keys % page_size
    if keys == 0:
        return None
    groups = torch.zeros(2, dtype=torch.int32, device=seqused_k.device)
    groups[1:].fill_(seqused_k.shape[0])
    return Prefix(groups, torch.full((1,), keys, dtype=torch.int32, device=seqused_k.device), keys)


# Options with which a prefix is not read once.
_EACH_ALONE = ("window", "alibi_slopes", "bias", "mask", "block_mask", "top_left", "dropout_p", "batch_invariant")


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, *, cu_seqlens_q: Tensor, seqused_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, page_table: Optional[Tensor] = None, page_indptr: Optional[Tensor] = None,
    page_indices: Optional[Tensor] = None, return_lse: bool = False, prefix: Optional[Prefix] = None, **options: Any,
) -> Optional[Tensor]:  # fmt: skip
    """Writes out [T, Hq, Dv] for packed q [T, Hq, D] and pages [pages, page_size, Hkv, D | Dv]; rows after the last
    sequence become 0. `page_table` is [B, max_pages], or CSR: `page_indptr` [B + 1] and `page_indices` [N]. `options`
    are those of `tessera.attention`. Returns the LSE [Hq, T] if it is requested. `prefix`: the result of
    `common_prefix`; its keys are read once for all sequences, unless an option depends on a query's position (window,
    alibi_slopes), is a tensor of scores, or requires bits independent of the batch.

    Raises tessera.Error for a tensor that requires a gradient outside of torch.no_grad(): there is none.

    The plan is found by shapes and bounds, which are rounded up to powers of two so that few plans serve all steps."""
    options.update(page_table=page_table, page_indptr=page_indptr, page_indices=page_indices)
    given = of_call.given("attend", options)
    kernels.refuse_gradients("tessera.serving", q=q, k_cache=k_cache, v_cache=v_cache, out=out, **given)
    if "sink" in given:
        given["sink"] = given["sink"].float()  # it may be in the model's dtype
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
        raise Error(
            "k_cache, v_cache: a last dimension that is not contiguous, accepted a contiguous one: neither is copied"
        )
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
    """`length` rounded up to a power of two, at most `most`."""
    return max(1, min(1 << max(length - 1, 0).bit_length(), most))


def write_slots(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, descales: Optional[Dict[str, Tensor]] = None
) -> None:
    """Writes k [T, Hkv, D] and v [T, Hkv, Dv] to `slots` [T] of pages [pages, page_size, Hkv, D | Dv] with any strides:
    slot s is key s % page_size of page s // page_size. Negative slots are skipped. Tokens after the slots are
    padding. `descales`: of pages of 8 bits."""
    k, v = k[: slots.shape[0]], v[: slots.shape[0]]
    if not k.is_cuda:  # a GPU's kernel skips a page out of range; here it would be refused
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    page_size = k_cache.shape[1]
    # Each token is a sequence of its own, from the start of the slot's page to the slot, whose last key is new.
    pages = torch.div(slots, page_size, rounding_mode="floor").to(torch.int32)
    lengths = (torch.remainder(slots, page_size) + 1).to(torch.int32)
    cache.append(k[:, None], v[:, None], k_cache, v_cache, lengths, page_table=pages[:, None], **(descales or {}))


Scale = Union[Tensor, float, None]


def descales_of(k_scale: Scale, v_scale: Scale, device: torch.device) -> Dict[str, Tensor]:
    """k_descale and v_descale [1] of an engine's scales of an 8-bit cache, a number each (value = scale * code); None
    is 1. Waits for no GPU if they are tensors of the device."""

    def of(scale: Scale) -> Tensor:
        return torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=device).detach().reshape(1)

    return {"k_descale": of(k_scale), "v_descale": of(v_scale)}


def key_lengths(indptr: Tensor, last_page_len: Optional[Tensor], page_size: int) -> Tensor:
    """`seqused_k` int32 [B] from `page_indptr` [B + 1] of a CSR page table and `last_page_len` [B], the number of keys
    of each sequence's last page; None if pages have one key."""
    count = indptr[1:] - indptr[:-1]
    lengths = count * page_size
    if last_page_len is not None:
        lengths = torch.where(count > 0, lengths - page_size + last_page_len, 0)
    return lengths.to(torch.int32)
