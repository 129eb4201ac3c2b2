"""The operators `tessera::attention_forward` and `tessera::attention_backward`: shapes, gradients, vmap.

Both are functional, so that torch.compile, torch.export and functorch see two opaque nodes with known shapes.
"""

from __future__ import annotations

import functools
import threading
from typing import Optional, Tuple

import torch
from torch import Tensor

from tessera._core import Error

from . import kernels, options

# Operators take options flat: those with a gradient first.
_OPTION_NAMES, _NUM_TENSOR_OPTIONS = options.NAMES, options.NUM_TENSORS
_BIAS, _SINK = _OPTION_NAMES.index("bias"), _OPTION_NAMES.index("sink")

SECOND_DERIVATIVE = "tessera.torch.attention: a second derivative was asked for, accepted is the first"


class _Recorded(threading.local):
    """Whether `FirstDerivative` runs here, which is in autograd's graph whatever its tensors say within torch.func."""

    active = False


_recorded = _Recorded()



def _forward(q: Tensor, k: Tensor, v: Tensor, *flat) -> Tuple[Tensor, Tensor]:
    return kernels.forward(q, k, v, options.unpack(flat))


attention_forward = torch.library.custom_op(
    "tessera::attention_forward",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {options.SCHEMA}) -> (Tensor, Tensor)",
)


def _backward(
    d_o, d_lse, q, k, v, o, lse, want_d_bias, want_d_sink, *flat
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """kernels.backward as an operator, which returns tensors only: what is not wanted is empty."""
    if not _recorded.active and kernels.in_detached_double_backward(d_o, d_lse, q, k, v, flat[_BIAS], flat[_SINK]):
        raise NotImplementedError(SECOND_DERIVATIVE)
    return tuple(
        q.new_empty((0,), dtype=torch.float32) if gradient is None else gradient
        for gradient in kernels.backward(d_o, d_lse, q, k, v, o, lse, want_d_bias, want_d_sink, options.unpack(flat))
    )


attention_backward = torch.library.custom_op(
    "tessera::attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor? d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool want_d_bias, "
    f"bool want_d_sink, {options.SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@attention_forward.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *flat) -> Tuple[Tensor, Tensor]:
    for name, tensor in zip(("k", "v", *_OPTION_NAMES[:_NUM_TENSOR_OPTIONS]), (k, v, *flat)):
        if tensor is not None and name != "dropout_state" and tensor.device != q.device:
            raise Error(f"{name}: on device {tensor.device}, q is on {q.device}: accepted: one device for all")
    o_shape, lse_shape = kernels.output_shapes(q, v)
    return q.new_empty(o_shape), q.new_empty(lse_shape, dtype=torch.float32)


@attention_backward.register_fake
def _backward_fake(d_o, d_lse, q, k, v, o, lse, want_d_bias, want_d_sink, *flat):
    return (
        *(t.new_empty(t.shape) for t in (q, k, v)),
        q.new_empty(flat[_BIAS].shape if want_d_bias else (0,), dtype=torch.float32),
        q.new_empty(flat[_SINK].shape if want_d_sink else (0,), dtype=torch.float32),
    )


# ---- gradients ------------------------------------------------------------------------------------------------------


def _setup_context(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    q, k, v, *flat = inputs
    o, lse = output
    ctx.save_for_backward(q, k, v, o, lse, *flat[:_NUM_TENSOR_OPTIONS])
    ctx.settings = flat[_NUM_TENSOR_OPTIONS:]


def _autograd(run, ctx, d_o: Optional[Tensor], d_lse: Optional[Tensor]):
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    bias, sink = tensors[_BIAS], tensors[_SINK]
    rest = (None,) * (len(_OPTION_NAMES) - 2)
    if d_o is None and d_lse is None:
        return (None,) * (3 + len(_OPTION_NAMES))
    want_d_bias, want_d_sink = ctx.needs_input_grad[3 + _BIAS], ctx.needs_input_grad[3 + _SINK]
    d_q, d_k, d_v, d_bias, d_sink = run(
        d_o, d_lse, q, k, v, o, lse, want_d_bias, want_d_sink, *tensors, *ctx.settings
    )
    return (
        d_q,
        d_k,
        d_v,
        d_bias.to(bias.dtype) if want_d_bias else None,
        d_sink if want_d_sink else None,
        *rest,
    )


attention_forward.register_autograd(functools.partial(_autograd, attention_backward), setup_context=_setup_context)


def _refuse_second_derivative(ctx, *cotangents):
    raise NotImplementedError(SECOND_DERIVATIVE)


attention_backward.register_autograd(_refuse_second_derivative)


class FirstDerivative(torch.autograd.Function):
    """`attention_backward` as a node of autograd's graph, for create_graph=True and torch.func: its inputs are those of
    the call, so that whatever is differentiated through the gradients meets it, and it refuses."""

    @staticmethod
    def forward(*arguments):
        _recorded.active = True
        try:
            return attention_backward(*arguments)
        finally:
            _recorded.active = False

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(_refuse_second_derivative)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _backward_vmap(FirstDerivative.apply, info, in_dims, *arguments)


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient, *inputs):
        return gradient.view_as(gradient)

    backward = staticmethod(_refuse_second_derivative)


def refuse_second_derivatives(gradients, *inputs):
    """Gradients that were computed outside of autograd, as functions of `inputs` whose derivative is refused."""
    if kernels.forward_ad._current_level >= 0:
        kernels.refuse_tangents(*inputs)
    if not torch.is_grad_enabled():
        return gradients
    inputs = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    return [g if g is None else _Connected.apply(g, *inputs) for g in gradients] if inputs else gradients


# ---- vmap: the mapped dimension joins the batch ---------------------------------------------------------------------


class _Fold:
    """Folds vmap's dimension V into the batch B of dense tensors: [V, B, ...] -> [V * B, ...]."""

    def __init__(self, size: int, batch: int):
        self.size, self.batch = size, batch

    def dense(self, tensor: Optional[Tensor], dim: Optional[int]) -> Optional[Tensor]:
        if tensor is None:
            return None
        tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        return tensor.expand(self.size, *tensor.shape[1:]).flatten(0, 1)

    def scores(self, tensor: Optional[Tensor], dim: Optional[int]) -> Optional[Tensor]:
        """Bias and masks, whose batch may be 1."""
        if tensor is None or (dim is None and tensor.shape[0] == 1):
            return tensor
        tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        return tensor.expand(self.size, self.batch, *tensor.shape[2:]).flatten(0, 1)

    def slopes(self, tensor: Optional[Tensor], dim: Optional[int]) -> Optional[Tensor]:
        """[Hq] or [B, Hq]."""
        if tensor is None or (dim is None and tensor.dim() == 1):
            return tensor
        tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        if tensor.dim() == 2:
            tensor = tensor.unsqueeze(1)
        return tensor.expand(self.size, self.batch, tensor.shape[-1]).flatten(0, 1)

    def undo(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.size, tensor.shape[0] // self.size))


def _fold_options(fold: _Fold, dims, flat) -> list:
    named = dict(zip(_OPTION_NAMES, flat))
    dim = dict(zip(_OPTION_NAMES, dims))
    for name in ("sink", "dropout_state"):
        if dim[name] is not None:
            raise NotImplementedError(f"vmap: {name} is mapped over, accepted is one {name} for all")
    for name in ("bias", "mask", "block_mask"):
        named[name] = fold.scores(named[name], dim[name])
    named["alibi_slopes"] = fold.slopes(named["alibi_slopes"], dim["alibi_slopes"])
    for name in ("seqused_k", "causal_seqs", "tree_mask"):
        named[name] = fold.dense(named[name], dim[name])
    return list(named.values())


def _batch_of(q: Tensor, dim: Optional[int], flat) -> int:
    """B of q [B, Sq, Hq, D], with vmap's dimension at `dim`."""
    named = dict(zip(_OPTION_NAMES, flat))
    for name in ("cu_seqlens_q", "cu_seqlens_k", "page_table", "page_indptr", "page_indices"):
        if named[name] is not None:
            raise NotImplementedError(
                f"vmap: given with {name}; packed and paged sequences have no batch dimension to map over, accepted are "
                "dense q, k, v"
            )
    if named["prefix_groups"] is not None:
        raise NotImplementedError("vmap: given with prefix_groups, accepted without: its groups are those of one batch")
    rank = q.dim() - (dim is not None)
    if rank != 4:
        raise NotImplementedError(f"vmap: q has rank {rank} inside, accepted [B, Sq, Hq, D]")
    return q.shape[1 if dim == 0 else 0]


def _forward_vmap(run, info, in_dims, q, k, v, *flat):
    fold = _Fold(info.batch_size, _batch_of(q, in_dims[0], flat))
    q, k, v = (fold.dense(t, dim) for t, dim in zip((q, k, v), in_dims))
    o, lse = run(q, k, v, *_fold_options(fold, in_dims[3:], flat))
    return (fold.undo(o), fold.undo(lse)), (0, 0)


attention_forward.register_vmap(functools.partial(_forward_vmap, attention_forward))


def _backward_vmap(run, info, in_dims, d_o, d_lse, q, k, v, o, lse, want_d_bias, want_d_sink, *flat):
    if want_d_sink:
        raise NotImplementedError("vmap: gradient of sink, accepted are gradients of q, k, v and a mapped bias")
    bias, bias_dim = flat[_BIAS], in_dims[9 + _BIAS]
    if want_d_bias and bias_dim is None:
        raise NotImplementedError("vmap: gradient of a bias that is not mapped over, accepted is one bias an entry")
    batch = _batch_of(q, in_dims[2], flat)
    fold = _Fold(info.batch_size, batch)
    tensors = [fold.dense(t, dim) for t, dim in zip((d_o, d_lse, q, k, v, o, lse), in_dims)]
    d_q, d_k, d_v, d_bias, d_sink = run(
        *tensors, want_d_bias, False, *_fold_options(fold, in_dims[9:], flat)
    )
    if want_d_bias:
        d_bias = fold.undo(d_bias)
        if bias.movedim(bias_dim, 0).shape[1] == 1:  # one bias for the batch inside
            d_bias = d_bias.sum(1, keepdim=True)
    return (fold.undo(d_q), fold.undo(d_k), fold.undo(d_v), d_bias, d_sink), (0, 0, 0, 0 if want_d_bias else None, None)


attention_backward.register_vmap(functools.partial(_backward_vmap, attention_backward))


# ---- torch.func: its transforms do not look into an operator's registered gradient ----------------------------------


class Transformable(torch.autograd.Function):
    """`attention_forward` for torch.func.grad, vjp and vmap of them."""

    @staticmethod
    def forward(*arguments):
        return attention_forward(*arguments)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx, d_o, d_lse):
        return _autograd(FirstDerivative.apply, ctx, d_o, d_lse)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _forward_vmap(Transformable.apply, info, in_dims, *arguments)


class Eager(torch.autograd.Function):
    """`attention_forward` where nothing but autograd looks on: the kernels without an operator's Python dispatch.

    What has no gradient is one argument, a dict, for each argument costs. `by_heads`: q, k, v are [B, H, S, D], and o is [B, Sq, Hq, Dv] all
    the same: the transposes are no nodes of autograd's graph.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, sink, others, return_lse, by_heads=False):
        given = others
        if bias is not None or sink is not None:
            given = dict(others)
            if bias is not None:
                given["bias"] = bias
            if sink is not None:
                given["sink"] = sink
        ctx.by_heads = by_heads
        o, lse = kernels.forward(q, k, v, given, by_heads=by_heads)
        ctx.set_materialize_grads(False)
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        ctx.save_for_backward(q, k, v, o, lse, *tensors.values())
        ctx.tensors = tuple(tensors)
        ctx.settings = {name: value for name, value in given.items() if name not in tensors} if tensors else given
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx, d_o, d_lse=None):
        if d_o is None and d_lse is None:
            return (None,) * 8
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        given = {**ctx.settings, **dict(zip(ctx.tensors, tensors))} if tensors else ctx.settings
        want_d_bias, want_d_sink = ctx.needs_input_grad[3:5]
        create_graph = torch.is_grad_enabled()
        if create_graph or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            run = _flat(FirstDerivative.apply if create_graph else attention_backward)
            q, k, v = _by_rows(ctx.by_heads, q, k, v)
            d_q, d_k, d_v, d_bias, d_sink = run(d_o, d_lse, q, k, v, o, lse, want_d_bias, want_d_sink, given)
            d_q, d_k, d_v = _by_rows(ctx.by_heads, d_q, d_k, d_v)
        else:
            d_q, d_k, d_v, d_bias, d_sink = kernels.backward(
                d_o, d_lse, q, k, v, o, lse, want_d_bias, want_d_sink, given, ctx.by_heads
            )
        if want_d_bias:
            d_bias = d_bias.to(given["bias"].dtype)
        return d_q, d_k, d_v, d_bias if want_d_bias else None, d_sink if want_d_sink else None, None, None, None


def _by_rows(by_heads: bool, *tensors: Tensor) -> Tuple[Tensor, ...]:
    """[B, H, S, D] as [B, S, H, D], or the other way round."""
    return tuple(t.transpose(1, 2) for t in tensors) if by_heads else tensors


def _flat(operator):
    """An operator as a function of a dict of options."""
    return lambda *arguments: operator(*arguments[:-1], *options.pack(arguments[-1]))


# Function.apply without its search for torch.func's transforms, which `attention` has made already.
apply_eager = super(torch.autograd.Function, Eager).apply
