"""Attention to a cache of keys and values that grows in place."""

from typing import Optional, Tuple, Union

import torch
from tessera.torch import attention
from torch import Tensor

from flash_attn._call import lse_of, options_of
from flash_attn.layers.rotary import rotate


def _lengths(cache_seqlens: Optional[Union[int, Tensor]], q: Tensor, num_keys: int) -> Tensor:
    """Keys already in the cache, int32 [B]."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens.to(torch.int32)
    length = num_keys if cache_seqlens is None else cache_seqlens
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def _append(cache: Tensor, new: Tensor, rows: Tensor, pages: Optional[Tensor]) -> None:
    """Writes new [B, S_new, Hkv, D] at cache[rows[b, i] of sequence b]; rows [B, S_new] are positions in a sequence."""
    if pages is None:
        sequence = torch.arange(new.shape[0], device=new.device)[:, None]
        cache[sequence, rows] = new
        return
    page_size = cache.shape[1]
    page = torch.gather(pages.to(torch.int64), 1, rows // page_size)
    cache[page, rows % page_size] = new


def attend_cache(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
    softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    if (k is None) != (v is None):
        raise ValueError("v: must be given with k, and k with v")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: None with new keys, accepted is where they are to stand")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx: given together with block_table, accepted is one of them")
    if block_table is not None and cache_leftpad is not None:
        raise ValueError("cache_leftpad: given together with block_table, accepted is one of them")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos: given without new keys, accepted only with k and v")
    if rotary_cos is not None and (2 * rotary_cos.shape[-1]) % 16 != 0:
        raise ValueError(f"rotary_cos: rotary_dim {2 * rotary_cos.shape[-1]}, accepted multiples of 16")
    with torch.no_grad():
        pages = block_table
        if cache_batch_idx is not None:
            pages = cache_batch_idx.to(torch.int32)[:, None]  # a cache row is one page
        num_keys = k_cache.shape[1] * (1 if pages is None else pages.shape[1])
        lengths = _lengths(cache_seqlens, q, num_keys)
        if k is not None:
            _check_room("k", cache_seqlens, k.shape[1], num_keys, "the cache's room")
            if rotary_cos is not None:
                _check_room("rotary_cos", cache_seqlens, k.shape[1], rotary_cos.shape[0], "its rows")
                q, k = _rotate(q, k, lengths, rotary_cos, rotary_sin, rotary_interleaved, causal, window_size)
            rows = lengths[:, None].to(torch.int64) + torch.arange(k.shape[1], device=k.device)
            _append(k_cache, k, rows, pages)
            _append(v_cache, v, rows, pages)
            lengths = lengths + k.shape[1]
        if cache_leftpad is not None:
            k_cache, v_cache, pages, lengths = _without_padding(
                k_cache, v_cache, cache_batch_idx, cache_leftpad.to(torch.int32), lengths
            )
        options = options_of(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, None, None)
        out, lse = attention(
            q, k_cache, v_cache, seqused_k=lengths, page_table=pages, return_lse=True, **options
        )
        return out, lse_of(lse)


def _without_padding(
    k_cache: Tensor, v_cache: Tensor, rows: Optional[Tensor], leftpad: Tensor, lengths: Tensor
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """The caches as pages of one key, the table and the lengths of the keys after each sequence's padding.

    The padding is never read, so that it may hold anything, and what comes after it is not copied. What is measured from
    a sequence's last key (causal, window, ALiBi) is the same with and without the padding. On the CPU decoding is ten
    times as fast as with a mask that hides it.
    """
    # Of both caches, keys must lie equally far apart; else, copies.
    if _keys_a_sequence(k_cache) is None or _keys_a_sequence(k_cache) != _keys_a_sequence(v_cache):
        k_cache, v_cache = (t.clone(memory_format=torch.contiguous_format) for t in (k_cache, v_cache))
    distance, num_keys = _keys_a_sequence(k_cache), k_cache.shape[1]
    if rows is None:
        rows = torch.arange(k_cache.shape[0], device=leftpad.device)
    keys = torch.arange(num_keys, device=leftpad.device) + leftpad[:, None]
    pages = rows[:, None] * distance + keys.clamp(max=num_keys - 1)
    return _single_keys(k_cache), _single_keys(v_cache), pages.to(torch.int32), (lengths - leftpad).clamp(min=0)


def _keys_a_sequence(cache: Tensor) -> Optional[int]:
    """How many keys lie between two sequences' first in cache [B, Sk, Hkv, D]; None: not a whole number."""
    batch, num_keys = cache.stride(0), cache.stride(1)
    return batch // num_keys if num_keys > 0 and batch % num_keys == 0 else None


def _single_keys(cache: Tensor) -> Tensor:
    """cache [B, Sk, Hkv, D] as [pages, 1, Hkv, D] in the same memory, each key and what lies between sequences a page."""
    pages = 0 if cache.numel() == 0 else (cache.shape[0] - 1) * cache.stride(0) // cache.stride(1) + cache.shape[1]
    shape = (pages, 1, *cache.shape[2:])
    return cache.as_strided(shape, (cache.stride(1), cache.stride(1), *cache.stride()[2:]))


def _check_room(name: str, lengths: Union[int, Tensor], num_new: int, room: int, what: str) -> None:
    """Lengths that a GPU has are not waited for: there PyTorch's own indexing asserts that they are in range."""
    if isinstance(lengths, Tensor):
        if lengths.is_cuda or torch.compiler.is_compiling():
            return
        lengths = int(lengths.max()) if lengths.numel() else 0
    if lengths + num_new > room:
        raise ValueError(f"{name}: {num_new} new keys after {lengths}, accepted at most {room} in all, {what}")


def _rotate(q, k, lengths, cos, sin, interleaved, causal, window_size):
    first = lengths[:, None].to(torch.int64)
    rows_k = first + torch.arange(k.shape[1], device=k.device)
    # Queries without an order among themselves all stand where the new keys begin.
    ordered = causal or any(side is not None and side >= 0 for side in window_size)
    rows_q = first + torch.arange(q.shape[1], device=q.device) if ordered else first.expand(-1, q.shape[1])
    return rotate(q, cos[rows_q], sin[rows_q], interleaved), rotate(k, cos[rows_k], sin[rows_k], interleaved)
