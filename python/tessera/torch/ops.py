"""The operators `tessera::attention_forward` and `tessera::attention_backward`: shapes, gradients, vmap.

Both are functional, so that torch.compile, torch.export and functorch see two opaque nodes with known shapes.
"""

from __future__ import annotations

import functools
import threading
from typing import Optional, Tuple

import torch
from torch import Tensor

from tessera._shapes import is_tensor, way_to_fold

from . import kernels, options

# Operators have flat options: those with a gradient first.
_OPTION_NAMES, _NUM_TENSOR_OPTIONS = options.NAMES, options.NUM_TENSORS
_BIAS, _SINK = _OPTION_NAMES.index("bias"), _OPTION_NAMES.index("sink")

SECOND_DERIVATIVE = "tessera.torch.attention: a second derivative was asked for, accepted is the first"


class _Recorded(threading.local):
    """True if `FirstDerivative` runs; within torch.func it is part of autograd's graph whatever its tensors say."""

    active = False


recorded = _Recorded()



def new_low(q: Tensor, given: options.Options, lse_shape: tuple) -> Tensor:
    """A tensor for lse_low, the rounding error of the LSE; empty if it is not kept."""
    return q.new_empty(lse_shape if kernels.keeps_low(given) else (0,), dtype=torch.float32)


def is_kept(low: Optional[Tensor], lse: Tensor) -> bool:
    return low is not None and low.shape == lse.shape


def forward_and_low(
    q: Tensor, k: Tensor, v: Tensor, given: options.Options, o: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor, Tensor]:
    """o, lse and lse_low; adds lse_low to `given` if it is kept."""
    lse = q.new_empty(kernels.output_shapes(q, v)[1], dtype=torch.float32)
    low = new_low(q, given, lse.shape)
    if is_kept(low, lse):
        given["lse_low"] = low
    o, lse = kernels.forward(q, k, v, given, o=o, lse=lse)
    return o, lse, low


def _forward(q: Tensor, k: Tensor, v: Tensor, *flat) -> Tuple[Tensor, Tensor, Tensor]:
    return forward_and_low(q, k, v, options.unpack(flat))


attention_forward = torch.library.custom_op(
    "tessera::attention_forward",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {options.SCHEMA}) -> (Tensor, Tensor, Tensor)",
)


def _backward(
    d_o, d_lse, q, k, v, o, lse, lse_low, want_d_bias, want_d_sink, *flat
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """kernels.backward as an operator, which returns tensors only: outputs that are not requested are empty."""
    if not recorded.active and kernels.in_detached_double_backward(d_o, d_lse, q, k, v, flat[_BIAS], flat[_SINK]):
        raise NotImplementedError(SECOND_DERIVATIVE)
    given = options.unpack(flat)
    if is_kept(lse_low, lse):
        given["lse_low"] = lse_low
    return tuple(
        q.new_empty((0,), dtype=torch.float32) if gradient is None else gradient
        for gradient in kernels.backward(d_o, d_lse, q, k, v, o, lse, want_d_bias, want_d_sink, given)
    )


attention_backward = torch.library.custom_op(
    "tessera::attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor? d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? lse_low, "
    f"bool want_d_bias, bool want_d_sink, {options.SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@attention_forward.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *flat) -> Tuple[Tensor, Tensor, Tensor]:
    o_shape, lse_shape = kernels.output_shapes(q, v)
    given = options.unpack(flat)
    kernels.check("forward", q, k, v, given)
    o = q.new_empty(o_shape, dtype=kernels.output_dtype(q))
    return o, q.new_empty(lse_shape, dtype=torch.float32), new_low(q, given, lse_shape)


@attention_backward.register_fake
def _backward_fake(d_o, d_lse, q, k, v, o, lse, lse_low, want_d_bias, want_d_sink, *flat):
    given = options.unpack(flat)
    d_bias = q.new_empty(flat[_BIAS].shape if want_d_bias else (0,), dtype=torch.float32)
    d_sink = q.new_empty(flat[_SINK].shape if want_d_sink else (0,), dtype=torch.float32)
    if d_lse is not None:
        given["d_lse"] = d_lse
    if is_kept(lse_low, lse):
        given["lse_low"] = lse_low
    if want_d_bias:
        given["d_bias"] = d_bias
    if want_d_sink:
        given["d_sink"] = d_sink
    kernels.check("backward", q, k, v, given, o=o, lse=lse, d_o=d_o)
    return *(t.new_empty(t.shape) for t in (q, k, v)), d_bias, d_sink


# ---- gradients ------------------------------------------------------------------------------------------------------


def _setup_context(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    q, k, v, *flat = inputs
    o, lse, low = output
    ctx.mark_non_differentiable(low)
    ctx.save_for_backward(q, k, v, o, lse, low, *flat[:_NUM_TENSOR_OPTIONS])
    ctx.settings = flat[_NUM_TENSOR_OPTIONS:]


def _autograd(run, ctx, d_o: Optional[Tensor], d_lse: Optional[Tensor], _: Optional[Tensor] = None):
    q, k, v, o, lse, low, *tensors = ctx.saved_tensors
    bias, sink = tensors[_BIAS], tensors[_SINK]
    rest = (None,) * (len(_OPTION_NAMES) - 2)
    if d_o is None and d_lse is None:
        return (None,) * (3 + len(_OPTION_NAMES))
    want_d_bias, want_d_sink = ctx.needs_input_grad[3 + _BIAS], ctx.needs_input_grad[3 + _SINK]
    d_q, d_k, d_v, d_bias, d_sink = run(
        d_o, d_lse, q, k, v, o, lse, low, want_d_bias, want_d_sink, *tensors, *ctx.settings
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


def refuse_second_derivative(ctx, *cotangents):
    raise NotImplementedError(SECOND_DERIVATIVE)


attention_backward.register_autograd(refuse_second_derivative)


class FirstDerivative(torch.autograd.Function):
    """`attention_backward` as a node of autograd's graph, for create_graph=True and torch.func. Its inputs are those of
    the call, so that any derivative through the gradients reaches it, and it refuses."""

    @staticmethod
    def forward(*arguments):
        recorded.active = True
        try:
            return attention_backward(*arguments)
        finally:
            recorded.active = False

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(refuse_second_derivative)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _backward_vmap(FirstDerivative.apply, info, in_dims, *arguments)


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, refusal, output, *inputs):
        ctx.refusal = refusal
        return output.view_as(output)

    @staticmethod
    def backward(ctx, *cotangents):
        raise NotImplementedError(ctx.refusal)


def refuse_derivatives(refusal: str, outputs, *inputs):
    """Outputs computed outside of autograd, as functions of `inputs` whose derivative is refused."""
    if kernels.forward_ad._current_level >= 0:
        kernels.refuse_tangents(*inputs)
    if not torch.is_grad_enabled():
        return outputs
    inputs = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    return [x if x is None else _Connected.apply(refusal, x, *inputs) for x in outputs] if inputs else outputs


refuse_second_derivatives = functools.partial(refuse_derivatives, SECOND_DERIVATIVE)


# ---- vmap -----------------------------------------------------------------------------------------------------------
# The mapped dimension V joins the batch B of dense tensors, [V, B, ...] -> [V * B, ...], and one call computes all
# elements. They are computed one after another if a sequence's number in the batch matters (dropout, packed and paged
# sequences, prefixes), for a sink per element, and for gradients of a shared bias or sink.


class _Fold:
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

    def heads(self, tensor: Optional[Tensor], dim: Optional[int]) -> Optional[Tensor]:
        """[Hq] or [B, Hq]."""
        if tensor is None or (dim is None and tensor.dim() == 1):
            return tensor
        tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        if tensor.dim() == 2:
            tensor = tensor.unsqueeze(1)
        return tensor.expand(self.size, self.batch, tensor.shape[-1]).flatten(0, 1)

    def undo(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.size, tensor.shape[0] // self.size))


_PLACE_MATTERS = (
    "dropout_state", "cu_seqlens_q", "cu_seqlens_k", "page_table", "page_indptr", "page_indices", "prefix_groups",
    "q_descale", "k_descale", "v_descale",
)  # fmt: skip


def _fold_of(size: int, q: Tensor, dim: Optional[int], dims: dict, named: dict) -> Optional[_Fold]:
    """None: the elements are computed one after another."""
    if q.dim() - (dim is not None) != 4:
        return None
    # All sequences have one such tensor in common, such as the sink.
    if any(dims[name] is not None and is_tensor(name) and way_to_fold(name) is None for name in named):
        return None
    if any(named[name] is not None for name in _PLACE_MATTERS):
        return None
    return _Fold(size, q.shape[1 if dim == 0 else 0])


def _fold_options(fold: _Fold, dims: dict, named: dict) -> list:
    ways = {"scores": fold.scores, "heads": fold.heads, "dense": fold.dense}
    named = dict(named)
    for name in filter(is_tensor, named):
        if way := way_to_fold(name):
            named[name] = ways[way](named[name], dims[name])
    return list(named.values())


def _one_by_one(run, info, in_dims, arguments) -> Tuple[Tensor, ...]:
    def element(index: int) -> tuple:
        return tuple(x.select(dim, index) if isinstance(dim, int) else x for x, dim in zip(arguments, in_dims))

    return tuple(map(torch.stack, zip(*(run(*element(index)) for index in range(info.batch_size)))))


def _forward_vmap(run, info, in_dims, q, k, v, *flat):
    named, dims = dict(zip(_OPTION_NAMES, flat)), dict(zip(_OPTION_NAMES, in_dims[3:]))
    fold = _fold_of(info.batch_size, q, in_dims[0], dims, named)
    if fold is None:
        return _one_by_one(run, info, in_dims, (q, k, v, *flat)), (0, 0, 0)
    q, k, v = (fold.dense(t, dim) for t, dim in zip((q, k, v), in_dims))
    o, lse, low = run(q, k, v, *_fold_options(fold, dims, named))
    kept = is_kept(low, lse)
    return (fold.undo(o), fold.undo(lse), fold.undo(low) if kept else low), (0, 0, 0 if kept else None)


attention_forward.register_vmap(functools.partial(_forward_vmap, attention_forward))


def _backward_vmap(run, info, in_dims, d_o, d_lse, q, k, v, o, lse, lse_low, want_d_bias, want_d_sink, *flat):
    named, dims = dict(zip(_OPTION_NAMES, flat)), dict(zip(_OPTION_NAMES, in_dims[10:]))
    fold = _fold_of(info.batch_size, q, in_dims[2], dims, named)
    if fold is None or want_d_sink or (want_d_bias and dims["bias"] is None):
        arguments = (d_o, d_lse, q, k, v, o, lse, lse_low, want_d_bias, want_d_sink, *flat)
        return _one_by_one(run, info, in_dims, arguments), (0,) * 5
    if lse_low is not None and lse_low.numel() == 0:
        lse_low = None
    tensors = [fold.dense(t, dim) for t, dim in zip((d_o, d_lse, q, k, v, o, lse, lse_low), in_dims)]
    d_q, d_k, d_v, d_bias, d_sink = run(*tensors, want_d_bias, False, *_fold_options(fold, dims, named))
    if want_d_bias:
        d_bias = fold.undo(d_bias)
        if named["bias"].movedim(dims["bias"], 0).shape[1] == 1:  # one bias for the inner batch
            d_bias = d_bias.sum(1, keepdim=True)
    return (fold.undo(d_q), fold.undo(d_k), fold.undo(d_v), d_bias, d_sink), (0, 0, 0, 0 if want_d_bias else None, None)


attention_backward.register_vmap(functools.partial(_backward_vmap, attention_backward))


# ---- torch.func: its transforms do not use an operator's registered gradient -----------------------------------------


class Transformable(torch.autograd.Function):
    """`attention_forward` for torch.func.grad, vjp and vmap of them."""

    @staticmethod
    def forward(*arguments):
        return attention_forward(*arguments)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx, d_o, d_lse, _):
        return _autograd(FirstDerivative.apply, ctx, d_o, d_lse)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _forward_vmap(Transformable.apply, info, in_dims, *arguments)


class Eager(torch.autograd.Function):
    """`attention_forward` if only autograd needs to see the call: the kernels without an operator's Python dispatch.

    Everything without a gradient is passed as one argument, a dict, because each argument has a cost. `by_heads`: q, k,
    v are [B, H, S, D] while o is [B, Sq, Hq, Dv]; the transposes are not nodes of autograd's graph. `results`: how many
    of o, lse and lse_low are returned.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, sink, others, results, by_heads=False):
        given = dict(others)
        if bias is not None:
            given["bias"] = bias
        if sink is not None:
            given["sink"] = sink
        ctx.by_heads = by_heads
        o = lse = None
        if kernels.keeps_low(given):
            if by_heads:
                shape = q.shape[:3]
            else:
                o_shape, shape = kernels.output_shapes(q, v)
                o = kernels.empty_output(q, o_shape)
            given["lse_low"] = low = q.new_empty(shape, dtype=torch.float32)
            lse = torch.empty_like(low)
        o, lse = kernels.forward(q, k, v, given, o=o, lse=lse, by_heads=by_heads)
        ctx.set_materialize_grads(False)
        tensors, settings = {}, {}
        for name, value in given.items():
            (tensors if isinstance(value, Tensor) else settings)[name] = value
        ctx.save_for_backward(q, k, v, o, lse, *tensors.values())
        ctx.tensors, ctx.settings = tuple(tensors), settings
        if results == 1:
            return o
        if results == 2:
            return o, lse
        low = given.get("lse_low", q.new_empty((0,), dtype=torch.float32))
        ctx.mark_non_differentiable(low)
        return o, lse, low

    @staticmethod
    def backward(ctx, d_o, d_lse=None, _=None):
        if d_o is None and d_lse is None:
            return (None,) * 8
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        given = {**ctx.settings, **dict(zip(ctx.tensors, tensors))} if tensors else ctx.settings
        want_d_bias, want_d_sink = ctx.needs_input_grad[3:5]
        create_graph = torch.is_grad_enabled()
        if create_graph or kernels.seen_by_others(d_o, d_lse):
            operator = FirstDerivative.apply if create_graph else attention_backward
            q, k, v = _by_rows(ctx.by_heads, q, k, v)
            d_q, d_k, d_v, d_bias, d_sink = operator(
                d_o, d_lse, q, k, v, o, lse, given.get("lse_low"), want_d_bias, want_d_sink, *options.pack(given)
            )
            d_q, d_k, d_v = _by_rows(ctx.by_heads, d_q, d_k, d_v)
        else:
            d_q, d_k, d_v, d_bias, d_sink = kernels.backward(
                d_o, d_lse, q, k, v, o, lse, want_d_bias, want_d_sink, given, ctx.by_heads
            )
        if want_d_bias:
            d_bias = d_bias.to(given["bias"].dtype)
        return d_q, d_k, d_v, d_bias if want_d_bias else None, d_sink if want_d_sink else None, None, None, None


def _by_rows(by_heads: bool, *tensors: Tensor) -> Tuple[Tensor, ...]:
    """[B, H, S, D] as [B, S, H, D], or the reverse."""
    return tuple(t.transpose(1, 2) for t in tensors) if by_heads else tensors


# Function.apply without its search for torch.func's transforms, which `attention` has already done.
apply_eager = super(torch.autograd.Function, Eager).apply
