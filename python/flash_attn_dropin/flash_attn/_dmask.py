"""S_dmask: the softmax before its division, as in flash_attn's kernels, negative where dropped. For tests.

flash_attn's forward kernel processes the keys in blocks of `block_size_n`, from the last block to the first, and stores
exp(s - m) for a block, where m is the row's maximum over that block and those after it. To get the softmax, multiply
each block by exp(m - lse).
"""

import math
from typing import Optional

import torch
from tessera.torch import attention
from torch import Tensor

_ROUNDED = 128  # flash_attn rounds queries and keys of S_dmask's shape up to a multiple of this


def block_size_n(device, head_dim, is_dropout, is_causal) -> int:
    """Keys of a block in flash_attn's forward kernel, from its table. The CPU, and head sizes above its maximum of 256,
    count as sm80."""
    is_sm8x = torch.device(device).type == "cuda" and 80 < _capability(device) < 90
    if head_dim <= 32 or (head_dim <= 64 and not is_dropout):
        return 128
    if 96 < head_dim <= 128 and (is_dropout or (is_sm8x and not is_causal)):
        return 32
    return 64


def _capability(device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def s_dmask_shape(q: Tensor, k: Tensor, options: dict) -> tuple:
    if options["dropout_p"] == 0:
        return (0,)
    batch, longest = q.shape[0], (q.shape[1], k.shape[1])
    if options.get("cu_seqlens_q") is not None:
        batch, longest = options["cu_seqlens_q"].shape[0] - 1, (options["max_seqlen_q"], options["max_seqlen_k"])
    return (batch, q.shape[-2], *(-(-length // _ROUNDED) * _ROUNDED for length in longest))


def s_dmask(q: Tensor, k: Tensor, options: dict) -> Tensor:
    """[B, Hq, Sq, Sk] in q's dtype, both lengths rounded up to multiples of 128, 0 where a key is not seen; empty
    without dropout.

    `options` are those of the call of `tessera.torch.attention`.
    """
    if options["dropout_p"] == 0:
        return q.new_empty(0)
    if options.get("page_table") is not None:
        raise NotImplementedError("return_attn_probs: given with dropout and block_table, accepted is one of them")
    shape = s_dmask_shape(q, k, options)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        lengths_q = lengths_k = None
        if options.get("cu_seqlens_q") is not None:
            q, lengths_q = _padded(q, options["cu_seqlens_q"], options["max_seqlen_q"])
            k, lengths_k = _padded(k, options["cu_seqlens_k"], options["max_seqlen_k"])
            if options.get("seqused_k") is not None:
                lengths_k = options["seqused_k"].to(torch.int64)
        head_dim, seqlen_q, seqlen_k = q.shape[-1], q.shape[1], k.shape[1]
        out = q.new_zeros(shape)
        maximum = torch.tensor(-math.inf, device=q.device)
        block = block_size_n(q.device, head_dim, True, options["causal"])
        for first in reversed(range(0, seqlen_k, block)):
            columns = torch.arange(first, min(first + block, seqlen_k), device=q.device)
            s = _scores(q, k, columns, lengths_q, lengths_k, options)
            maximum = torch.maximum(maximum, s.amax(-1, keepdim=True))
            size = torch.exp(s - maximum.masked_fill(maximum == -math.inf, 0.0))
            signed = torch.where(_kept(q, k, columns, options), size, -size)
            out[:, :, :seqlen_q, first : first + columns.numel()] = signed.to(q.dtype)
        return out


def _padded(rows: Tensor, cu_seqlens: Tensor, longest: int):
    """Packed rows [T, H, D] as [B, longest, H, D], zeros after each sequence, and the sequences' lengths."""
    bounds = cu_seqlens.tolist()
    out = rows.new_zeros(len(bounds) - 1, longest, *rows.shape[1:])
    for b, (first, last) in enumerate(zip(bounds, bounds[1:])):
        out[b, : last - first] = rows[first:last]
    return out, cu_seqlens.diff().to(torch.int64)


def _scores(
    q: Tensor, k: Tensor, columns: Tensor, lengths_q: Optional[Tensor], lengths_k: Optional[Tensor], options: dict
) -> Tensor:
    """[B, Hq, Sq, columns]: the scores as `tessera.torch.attention` defines them, at least in float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = k[:, columns].to(dtype)
    grouped = q.to(dtype).unflatten(2, (keys.shape[2], -1))
    s = torch.einsum("bikgd,bjkd->bkgij", grouped, keys).flatten(1, 2)
    s = s * (q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"])
    if options["softcap"] > 0:
        s = options["softcap"] * torch.tanh(s / options["softcap"])

    def by_sequence(lengths: Optional[Tensor], default: int):
        return default if lengths is None else lengths[:, None, None, None]

    num_queries, num_keys = by_sequence(lengths_q, q.shape[1]), by_sequence(lengths_k, k.shape[1])
    row = torch.arange(q.shape[1], device=q.device)[:, None]
    distance = columns - (row + num_keys - num_queries)  # from the diagonal that ends at the last key
    if options["alibi_slopes"] is not None:
        s = s - options["alibi_slopes"][..., None, None].to(dtype) * distance.abs()
    left, right = options["window"]
    visible = (row < num_queries) & (columns < num_keys)
    if options["causal"]:
        visible = visible & (distance <= 0)
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    if options.get("mask") is not None:
        visible = visible & options["mask"][..., columns]
    return s.masked_fill(~visible, -math.inf)


def _kept(q: Tensor, k: Tensor, columns: Tensor, options: dict) -> Tensor:
    """The entries that dropout keeps, bool [B, Hq, Sq, columns]: a function of its state and of an entry's indices
    only.

    The kernels compute it, with zero queries and keys and the identity as values: the result is 0 where dropped.
    """
    zeros = {"dtype": torch.float32, "device": q.device}
    place = torch.arange(k.shape[1], device=q.device)
    identity = (place[:, None] == columns).to(torch.float32).expand(q.shape[0], -1, -1).unsqueeze(2).contiguous()
    uniform = attention(
        torch.zeros(*q.shape[:3], 8, **zeros), torch.zeros(q.shape[0], k.shape[1], 1, 8, **zeros), identity,
        dropout_p=options["dropout_p"], dropout_state=options["dropout_state"],
    )  # fmt: skip
    return uniform.transpose(1, 2) != 0
