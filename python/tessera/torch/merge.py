"""The merge of partial results in PyTorch: the operator `tessera::combine`, its shapes, gradients and vmap."""

from __future__ import annotations

import functools
from typing import Literal, Tuple, Union, overload

import torch
from torch import Tensor

from tessera import _core

from . import checks, kernels


def _merge(o_parts: Tensor, lse_parts: Tensor) -> Tuple[Tensor, Tensor]:
    if kernels.forward_ad._current_level >= 0:
        kernels.refuse_tangents(o_parts, lse_parts)
    o, lse = o_parts.new_empty(o_parts.shape[1:]), lse_parts.new_empty(lse_parts.shape[1:])
    _core.combine(kernels.rows(o_parts), kernels.plain(lse_parts), o, lse)
    return o, lse


_combine = torch.library.custom_op(
    "tessera::combine", _merge, mutates_args=(), schema="(Tensor o_parts, Tensor lse_parts) -> (Tensor, Tensor)"
)


@_combine.register_fake
def _fake(o_parts: Tensor, lse_parts: Tensor) -> Tuple[Tensor, Tensor]:
    if lse_parts.device != o_parts.device:
        raise _core.Error(
            f"lse_parts: on device {lse_parts.device}, o_parts is on {o_parts.device}: accepted: one device for all"
        )
    return o_parts.new_empty(o_parts.shape[1:]), lse_parts.new_empty(lse_parts.shape[1:])


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx, d_o: Tensor, d_lse: Tensor) -> Tuple[Tensor, Tensor]:
    """With w_n = exp(lse_n - lse): d o_n = w_n d_o, d lse_n = w_n (d_o . (o_n - o) + d_lse)."""
    o_parts, lse_parts, o, lse = ctx.saved_tensors
    counts = lse_parts > -torch.inf  # [N, B, H, S]; what saw nothing may hold anything
    w = torch.where(counts, torch.exp(lse_parts - lse), 0.0)

    def by_row(x: Tensor) -> Tensor:
        return x.transpose(-1, -2)[..., None]  # [N, B, S, H, 1]

    d_o = d_o.float()
    difference = torch.where(by_row(counts), o_parts.float() - o.float(), 0.0)
    d_lse_parts = w * ((d_o * difference).sum(-1).transpose(-1, -2) + d_lse)
    return (by_row(w) * d_o).to(o_parts.dtype), d_lse_parts


_combine.register_autograd(_backward, setup_context=_setup_context)


def _vmap(run, info, in_dims, o_parts: Tensor, lse_parts: Tensor):
    """The mapped dimension joins the batch."""

    def fold(tensor: Tensor, dim) -> Tensor:
        tensor = tensor.unsqueeze(1) if dim is None else tensor.movedim(dim, 1)
        return tensor.expand(tensor.shape[0], info.batch_size, *tensor.shape[2:]).flatten(1, 2)

    merged = run(fold(o_parts, in_dims[0]), fold(lse_parts, in_dims[1]))
    return tuple(t.unflatten(0, (info.batch_size, t.shape[0] // info.batch_size)) for t in merged), (0, 0)


_combine.register_vmap(functools.partial(_vmap, _combine))


class _Transformable(torch.autograd.Function):
    """The operator for torch.func's transforms, which do not look into its registered gradient."""

    @staticmethod
    def forward(*arguments):
        return _combine(*arguments)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap(_Transformable.apply, info, in_dims, *arguments)


@overload
def combine(o_parts: Tensor, lse_parts: Tensor, *, return_lse: Literal[False] = False) -> Tensor: ...
@overload
def combine(o_parts: Tensor, lse_parts: Tensor, *, return_lse: Literal[True]) -> Tuple[Tensor, Tensor]: ...
@overload
def combine(
    o_parts: Tensor, lse_parts: Tensor, *, return_lse: bool
) -> Union[Tensor, Tuple[Tensor, Tensor]]: ...
def combine(
    o_parts: Tensor, lse_parts: Tensor, *, return_lse: bool = False
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Merges N results over disjoint sets of keys into the result over all of them, exactly, with gradients through
    both. With m = max_n lse_n: lse = m + log sum_n exp(lse_n - m), o = sum_n exp(lse_n - lse) o_n.

    Args:
        o_parts: [N, B, S, H, Dv], float32, float16 or bfloat16, on the CPU or a GPU.
        lse_parts: [N, B, H, S], float32. Parts that saw nothing (-inf) do not count, whatever their o holds.

    Returns:
        o [B, S, H, Dv] in o_parts' dtype; with `return_lse` the pair (o, lse [B, H, S]).

    Raises:
        tessera.Error: (a ValueError) an argument is wrong; one line names it, what was given and what is accepted.
    """
    for name, tensor in (("o_parts", o_parts), ("lse_parts", lse_parts)):
        checks.check_tensor(name, tensor)
    transformed = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    o, lse = (_Transformable.apply if transformed else _combine)(o_parts, lse_parts)
    return (o, lse) if return_lse else o
