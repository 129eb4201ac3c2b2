"""Attention with a cache of keys and values that grows in place."""

from typing import Optional, Tuple

import torch
from tessera.torch import attention, checks, kernels
from tessera.torch.api import check
from tessera.torch.ops import refuse_derivatives
from torch import Tensor

from flash_attn._append import Angles, append
from flash_attn._call import lse_of, options_of
from flash_attn._extent import Extent, tracing


def attend_cache(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
    softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    _check_arguments(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table
    )
    inputs = dict(
        q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip
    if tracing():
        kernels.refuse_gradients("flash_attn_with_kvcache", **inputs)
    elif k is not None:  # the cache is written in place; other gradients are refused when they are requested
        kernels.refuse_gradients("flash_attn_with_kvcache", k_cache=k_cache, v_cache=v_cache)
    with torch.no_grad():
        pages = block_table
        if cache_batch_idx is not None:
            pages = cache_batch_idx.to(torch.int32)[:, None]  # a cache row is one page
        leftpad = None if cache_leftpad is None else cache_leftpad.to(torch.int32)
        num_new = 0 if k is None else k.shape[1]
        num_rotated = 0
        if rotary_cos is not None:
            # Without an order among themselves, all queries have the position of the first new key.
            ordered = causal or any(side is not None and side >= 0 for side in window_size)
            num_rotated = max(num_new, q.shape[1] if ordered else 1)
        extent = Extent(
            num_pages=k_cache.shape[0],
            page_size=k_cache.shape[1],
            room=k_cache.shape[1] * (1 if pages is None else pages.shape[1]),
            is_block_table=block_table is not None,
            num_new=num_new,
            num_rotated=num_rotated,
            num_angles=0 if rotary_cos is None else rotary_cos.shape[0],
            clamps=Extent.clamped_on(k_cache),
        )
        lengths = extent.checked(cache_seqlens, pages, leftpad, q)
        options = options_of(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, None, None)
        if k is not None:
            if not tracing():  # attention must refuse before the cache is written
                check(q, k_cache, v_cache, page_table=pages, seqused_k=lengths, **options)
            angles = None
            if rotary_cos is not None:
                first = lengths[:, None]
                rows_q = first + torch.arange(q.shape[1], device=q.device) if ordered else first.expand(-1, q.shape[1])
                rows_k = first + torch.arange(num_new, device=q.device)
                angles = Angles(
                    rotary_cos, rotary_sin, *map(extent.within_rotary, (rows_q, rows_k)), rotary_interleaved
                )
            q = append(extent, q, k, v, k_cache, v_cache, lengths, pages, angles)
            lengths = lengths + num_new
        lengths, pages, leftpad = extent.within(lengths, pages, leftpad)
        if leftpad is not None:
            k_cache, v_cache, pages, lengths = _without_padding(k_cache, v_cache, cache_batch_idx, leftpad, lengths)
        out, lse = attention(
            q, k_cache, v_cache, seqused_k=lengths, page_table=pages, return_lse=True, **options
        )
        lse = lse_of(lse)
    return (out, lse) if tracing() else tuple(refuse_derivatives(_NO_GRADIENT, (out, lse), *inputs.values()))


_NO_GRADIENT = (
    "flash_attn_with_kvcache: a gradient was asked for, accepted is a call for inference: flash_attn_func has gradients"
)


def _check_arguments(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table
) -> None:  # fmt: skip
    """Checks of shapes and dtypes, which must precede writing the cache."""
    indices = dict(cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    for name, tensor in indices.items():
        if isinstance(tensor, Tensor) and tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: dtype {tensor.dtype}, accepted torch.int32 and torch.int64")
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
    batch = q.shape[0]

    def require(name: str, tensor: Tensor, shape: tuple, dtypes: tuple) -> None:
        checks.check_tensor(name, tensor)
        if tensor.shape != shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, accepted {shape}")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name}: dtype {tensor.dtype}, accepted {' or '.join(map(str, dtypes))}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: on device {tensor.device}, q is on {q.device}: accepted: one device for all")

    integers = (torch.int32, torch.int64)
    if isinstance(cache_seqlens, Tensor):
        require("cache_seqlens", cache_seqlens, (batch,), integers)
    if cache_batch_idx is not None:
        require("cache_batch_idx", cache_batch_idx, (batch,), integers)
    if cache_leftpad is not None:
        require("cache_leftpad", cache_leftpad, (batch,), integers)
    if block_table is not None:
        checks.check_tensor("block_table", block_table)
        columns = block_table.shape[-1] if block_table.dim() > 0 else 0
        require("block_table", block_table, (batch, columns), (torch.int32,))
    if k is None:
        return  # nothing is written, so attention checks the rest
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k)):
        checks.check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: rank {tensor.dim()}, accepted 4")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(f"v_cache: shape {tuple(v_cache.shape)}, k_cache has {tuple(k_cache.shape)}")
    require("k", k, (batch, k.shape[1], *k_cache.shape[2:]), (k_cache.dtype,))
    require("v", v, (batch, k.shape[1], *v_cache.shape[2:]), (v_cache.dtype,))
    if rotary_cos is None:
        return
    if (2 * rotary_cos.shape[-1]) % 16 != 0:
        raise ValueError(f"rotary_cos: rotary_dim {2 * rotary_cos.shape[-1]}, accepted multiples of 16")
    if 2 * rotary_cos.shape[-1] > q.shape[-1]:
        raise ValueError(
            f"rotary_cos: rotary_dim {2 * rotary_cos.shape[-1]}, accepted at most the head size {q.shape[-1]}"
        )
    require("rotary_sin", rotary_sin, tuple(rotary_cos.shape), (rotary_sin.dtype,) if rotary_sin is not None else ())


def _without_padding(
    k_cache: Tensor, v_cache: Tensor, rows: Optional[Tensor], leftpad: Tensor, lengths: Tensor
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """The caches as pages of one key, the table and the lengths of the keys after each sequence's padding.

    The padding is never read, so it may hold anything, and the keys after it are not copied. Causal masks, windows and
    ALiBi are measured from a sequence's last key, so padding does not change them. On the CPU, decoding is ten times as
    fast as with a mask that hides the padding.
    """
    # Both caches need the same distance between keys; otherwise they are copied.
    if _keys_a_sequence(k_cache) is None or _keys_a_sequence(k_cache) != _keys_a_sequence(v_cache):
        k_cache, v_cache = (t.clone(memory_format=torch.contiguous_format) for t in (k_cache, v_cache))
    distance, num_keys = _keys_a_sequence(k_cache), k_cache.shape[1]
    if rows is None:
        rows = torch.arange(k_cache.shape[0], device=leftpad.device)
    keys = torch.arange(num_keys, device=leftpad.device) + leftpad[:, None]
    pages = rows[:, None] * distance + keys.clamp(max=num_keys - 1)
    return _single_keys(k_cache), _single_keys(v_cache), pages.to(torch.int32), (lengths - leftpad).clamp(min=0)


def _keys_a_sequence(cache: Tensor) -> Optional[int]:
    """The distance between sequences of cache [B, Sk, Hkv, D], in keys; None if it is not a whole number."""
    batch, num_keys = cache.stride(0), cache.stride(1)
    return batch // num_keys if num_keys > 0 and batch % num_keys == 0 else None


def _single_keys(cache: Tensor) -> Tensor:
    """cache [B, Sk, Hkv, D] as [pages, 1, Hkv, D] in the same memory: each key, and each gap between sequences, is a
    page."""
    pages = 0 if cache.numel() == 0 else (cache.shape[0] - 1) * cache.stride(0) // cache.stride(1) + cache.shape[1]
    shape = (pages, 1, *cache.shape[2:])
    return cache.as_strided(shape, (cache.stride(1), cache.stride(1), *cache.stride()[2:]))
