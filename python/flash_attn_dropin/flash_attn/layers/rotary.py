"""Rotary position embedding (Su et al., "RoFormer", 2021)."""

from typing import Optional, Union

import torch
from torch import Tensor


def _positions(
    x: Tensor, seqlen_offsets: Union[int, Tensor], cu_seqlens: Optional[Tensor], max_seqlen: Optional[int]
) -> Tensor:
    """The row of cos and sin for each row of x: [1 or B, S], or [T] for packed x."""
    device = x.device
    if cu_seqlens is None:
        rows = torch.arange(x.shape[1], device=device)
        if isinstance(seqlen_offsets, Tensor):
            return rows + seqlen_offsets.to(torch.int64)[:, None]
        return (rows + seqlen_offsets)[None]
    starts = cu_seqlens[:-1].to(torch.int64)
    lengths = cu_seqlens[1:].to(torch.int64) - starts
    first = starts - seqlen_offsets
    return torch.arange(x.shape[0], device=device) - torch.repeat_interleave(first, lengths, output_size=x.shape[0])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., H, D] rotated by cos, sin [..., rotary_dim / 2], in float32; columns from rotary_dim on are unchanged."""
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    turned = x[..., :rotary_dim].to(torch.promote_types(x.dtype, torch.float32))
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), dim=-1)


class _Written(torch.autograd.Function):
    """An alias of x that holds `turned` and has its gradient. Autograd allows no other way to write to a leaf."""

    @staticmethod
    def forward(ctx, x, turned):
        x.copy_(turned)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def apply_rotary_emb(
    x,
    cos,
    sin,
    interleaved=False,
    inplace=False,
    seqlen_offsets: Union[int, Tensor] = 0,
    cu_seqlens: Optional[Tensor] = None,
    max_seqlen: Optional[int] = None,
):
    """x rotated for its positions.

    x [B, S, H, D], or [T, H, D] with cu_seqlens [B + 1]; cos, sin [S_max, rotary_dim / 2]; seqlen_offsets an int or
    [B]: the position of each sequence's first row. interleaved: pairs are (0, 1), (2, 3) and so on, otherwise (0,
    rotary_dim / 2) and so on. inplace: x itself is written and returned; for a leaf that requires a gradient, or a view
    of one, an alias of it is returned, whose gradient is that of the original x.
    """
    if cos.shape != sin.shape:
        raise ValueError(f"sin: shape {tuple(sin.shape)}, must be that of cos: {tuple(cos.shape)}")
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"cos: rotary_dim {2 * cos.shape[-1]}, accepted at most the head size {x.shape[-1]}")
    positions = _positions(x, seqlen_offsets, cu_seqlens, max_seqlen)
    turned = rotate(x, cos[positions], sin[positions], interleaved)
    if not inplace:
        return turned
    if torch.is_grad_enabled() and x.requires_grad and (x.is_leaf or (x._is_view() and x._base.is_leaf)):
        return _Written.apply(x.detach(), turned)
    return x.copy_(turned)


apply_rotary_emb_func = apply_rotary_emb
