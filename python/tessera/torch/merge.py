"""The merge of partial results in PyTorch: the operator `tessera::combine`, its shapes, gradients and vmap."""

from __future__ import annotations

import functools
from typing import Literal, Optional, Tuple, Union, overload

import torch
from torch import Tensor

from tessera import _core

from . import checks, kernels


def _outputs(o_parts: Tensor, lse_parts: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    lse_shape = lse_parts.shape[1:]
    return o_parts.new_empty(o_parts.shape[1:]), lse_parts.new_empty(lse_shape), lse_parts.new_empty(lse_shape)


def _merge(o_parts: Tensor, lse_parts: Tensor, lse_low_parts: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """o, lse, lse_low; the last is empty if no part has one."""
    if kernels.forward_ad._current_level >= 0:
        kernels.refuse_tangents(o_parts, lse_parts)
    o, lse, low = _outputs(o_parts, lse_parts)
    if lse_low_parts is None:
        _core.combine(kernels.rows(o_parts), kernels.plain(lse_parts), o, lse)
        return o, lse, low.new_empty(0)
    _core.combine(kernels.rows(o_parts), kernels.plain(lse_parts), o, lse, kernels.plain(lse_low_parts), low)
    return o, lse, low


_combine = torch.library.custom_op(
    "tessera::combine", _merge, mutates_args=(),
    schema="(Tensor o_parts, Tensor lse_parts, Tensor? lse_low_parts) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip


@_combine.register_fake
def _fake(o_parts: Tensor, lse_parts: Tensor, lse_low_parts: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    o, lse, low = _outputs(o_parts, lse_parts)
    lower = () if lse_low_parts is None else (lse_low_parts, low)
    try:
        rows, *others = (kernels.without_data(x, x is o_parts) for x in (o_parts, lse_parts, o, lse, *lower))
    except kernels.Unknown:
        pass
    else:
        _core.combine(rows, *others)
    return o, lse, low if lower else low.new_empty(0)


def _setup_context(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs)


def _weights(lse_parts: Tensor, lse_low_parts: Optional[Tensor]) -> Tensor:
    """exp(LSE_n - LSE) [N, B, H, S] from the parts' own LSEs. The rounded LSE of the result has an error of 0.5 at
    8e6."""
    exact = lse_parts.double()
    if lse_low_parts is not None:
        exact = exact + lse_low_parts.double()
    largest = exact.amax(0, keepdim=True) if exact.shape[0] > 0 else exact.new_zeros(1, *exact.shape[1:])
    w = torch.exp(exact - torch.where(largest == -torch.inf, 0.0, largest))
    total = w.sum(0, keepdim=True)
    return (w / torch.where(total == 0, 1.0, total)).float()


def _backward(ctx, d_o: Tensor, d_lse: Tensor, _: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, None]:
    """With w_n = exp(LSE_n - LSE): d o_n = w_n d_o, d LSE_n = w_n (d_o . (o_n - o) + d_LSE)."""
    o_parts, lse_parts, lse_low_parts = ctx.saved_tensors

    def by_row(x: Tensor) -> Tensor:
        return x.transpose(-1, -2)[..., None]  # [N, B, S, H, 1]

    w = _weights(lse_parts, lse_low_parts)
    counts = by_row(lse_parts > -torch.inf)  # the o of a part that saw no key may hold anything
    parts, d_o = torch.where(counts, o_parts.float(), 0.0), d_o.float()
    difference = torch.where(counts, parts - (by_row(w) * parts).sum(0), 0.0)
    d_lse_parts = w * ((d_o * difference).sum(-1).transpose(-1, -2) + d_lse)
    return (by_row(w) * d_o).to(o_parts.dtype), d_lse_parts, None


_combine.register_autograd(_backward, setup_context=_setup_context)


def _vmap(run, info, in_dims, o_parts: Tensor, lse_parts: Tensor, lse_low_parts: Optional[Tensor]):
    """The mapped dimension joins the batch."""

    def fold(tensor: Optional[Tensor], dim) -> Optional[Tensor]:
        if tensor is None:
            return None
        tensor = tensor.unsqueeze(1) if dim is None else tensor.movedim(dim, 1)
        return tensor.expand(tensor.shape[0], info.batch_size, *tensor.shape[2:]).flatten(1, 2)

    merged = run(*(fold(x, dim) for x, dim in zip((o_parts, lse_parts, lse_low_parts), in_dims)))
    size = info.batch_size
    o, lse, low = (t if t.dim() == 1 else t.unflatten(0, (size, t.shape[0] // size)) for t in merged)
    return (o, lse, low), (0, 0, None if low.dim() == 1 else 0)


_combine.register_vmap(functools.partial(_vmap, _combine))


class _Transformable(torch.autograd.Function):
    """The operator for torch.func's transforms, which do not use its registered gradient."""

    @staticmethod
    def forward(*arguments):
        return _combine(*arguments)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap(_Transformable.apply, info, in_dims, *arguments)


@overload
def combine(
    o_parts: Tensor, lse_parts: Tensor, lse_low_parts: Optional[Tensor] = None, *, return_lse: Literal[False] = False,
    return_lse_low: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def combine(
    o_parts: Tensor, lse_parts: Tensor, lse_low_parts: Optional[Tensor] = None, *, return_lse_low: Literal[True],
    return_lse: bool = False,
) -> Tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def combine(
    o_parts: Tensor, lse_parts: Tensor, lse_low_parts: Optional[Tensor] = None, *, return_lse: Literal[True],
    return_lse_low: Literal[False] = False,
) -> Tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def combine(
    o_parts: Tensor, lse_parts: Tensor, lse_low_parts: Optional[Tensor] = None, *, return_lse: bool = False,
    return_lse_low: bool = False,
) -> Union[Tensor, Tuple[Tensor, ...]]: ...  # fmt: skip
def combine(
    o_parts: Tensor, lse_parts: Tensor, lse_low_parts: Optional[Tensor] = None, *, return_lse: bool = False,
    return_lse_low: bool = False,
) -> Union[Tensor, Tuple[Tensor, ...]]:  # fmt: skip
    """Merges N results over disjoint sets of keys into the result over all of them, exactly, with gradients through
    both. With m = max_n LSE_n: LSE = m + log sum_n exp(LSE_n - m), o = sum_n exp(LSE_n - LSE) o_n.

    Args:
        o_parts: [N, B, S, H, Dv], float32, float16 or bfloat16, on the CPU or a GPU.
        lse_parts: [N, B, H, S], float32. Parts that saw no key (-inf) are skipped, whatever their o holds.
        lse_low_parts: the rounding error of lse_parts, with the same shape; it has no gradient of its own.

    Returns:
        o [B, S, H, Dv] in o_parts' dtype; with `return_lse` (o, lse [B, H, S]), with `return_lse_low` (o, lse,
        lse_low).

    Raises:
        tessera.Error: (a ValueError) an argument is wrong; one line names it, what was given and what is accepted.
    """
    for name, tensor in (("o_parts", o_parts), ("lse_parts", lse_parts), ("lse_low_parts", lse_low_parts)):
        if tensor is not None or name != "lse_low_parts":
            checks.check_tensor(name, tensor)
    if return_lse_low and lse_low_parts is None:
        lse_low_parts = torch.zeros_like(lse_parts)
    transformed = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    o, lse, low = (_Transformable.apply if transformed else _combine)(o_parts, lse_parts, lse_low_parts)
    return (o, lse, low) if return_lse_low else (o, lse) if return_lse else o
