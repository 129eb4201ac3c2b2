"""Score programs in PyTorch: calls with gradients of the tensors that a program captures.

They run eagerly: in a compiled program they break the graph."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from tessera import _core, _score
from tessera._score import Bound, Mod

from . import kernels, ops
from .checks import check_tensor
from .options import Options


@torch.compiler.disable
def bind(score_mod: Mod, mask_mod: Mod, captured: Optional[Dict[str, Any]]) -> Optional[Bound]:
    """The program of a call, all of whose arrays are tensors."""
    bound = _score.bind(score_mod, mask_mod, captured)
    if bound is not None:
        for name, tensor in zip(bound.names, bound.arrays):
            check_tensor(f"captured ({name})", tensor)
    return bound


def _with_program(given: Options, bound: Bound, tensors: Sequence[Tensor]) -> Options:
    own = {"program": bound.program, "captured": [kernels.plain(x) for x in tensors], "scalars": bound.numbers}
    return {**given, **own}


def _gradients(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list:
    return [x.new_empty(x.shape) if is_wanted else None for x, is_wanted in zip(tensors, wanted)]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, sink, others, results, bound, *tensors):
        given = dict(others)
        if bias is not None:
            given["bias"] = bias
        if sink is not None:
            given["sink"] = sink
        if kernels.keeps_low(given):
            given["lse_low"] = q.new_empty(kernels.output_shapes(q, v)[1], dtype=torch.float32)
        o, lse = kernels.forward(q, k, v, _with_program(given, bound, tensors))
        ctx.set_materialize_grads(False)
        saved = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        ctx.save_for_backward(q, k, v, o, lse, *saved.values(), *tensors)
        ctx.names, ctx.bound = tuple(saved), bound
        ctx.settings = {name: x for name, x in given.items() if name not in saved}
        if results < 3:
            return o if results == 1 else (o, lse)
        ctx.mark_non_differentiable(given["lse_low"])
        return o, lse, given["lse_low"]

    @staticmethod
    def backward(ctx, d_o, d_lse=None, _=None):
        q, k, v, o, lse, *rest = ctx.saved_tensors
        count = len(ctx.names)
        tensors = rest[count:]
        if d_o is None and d_lse is None:
            return (None,) * (8 + len(tensors))
        if torch.is_grad_enabled():  # create_graph=True
            raise NotImplementedError(ops.SECOND_DERIVATIVE)
        given = {**ctx.settings, **dict(zip(ctx.names, rest[:count]))}
        d_captured = _gradients(tensors, ctx.needs_input_grad[8:])
        options = {**_with_program(given, ctx.bound, tensors), "d_captured": d_captured}
        wanted = ctx.needs_input_grad[3:5]
        d_q, d_k, d_v, d_bias, d_sink = kernels.backward(d_o, d_lse, q, k, v, o, lse, *wanted, options)
        if d_bias is not None:
            d_bias = d_bias.to(given["bias"].dtype)
        return (d_q, d_k, d_v, d_bias, d_sink, None, None, None, *d_captured)


@torch.compiler.disable
def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], sink: Optional[Tensor], given: Options, results: int,
    bound: Bound,
) -> Union[Tensor, Tuple[Tensor, ...]]:  # fmt: skip
    """`tessera.torch.attention` with a program."""
    if kernels.seen_by_others(q, k, v, *bound.arrays) or not all(map(kernels.has_data, (q, k, v, *bound.arrays))):
        raise _core.Error("score_mod, mask_mod: under torch.func, a mode or a tracer, accepted are eager calls on data")
    return _Attention.apply(q, k, v, bias, sink, given, results, bound, *bound.arrays)


@torch.compiler.disable
def attention_backward(
    d_o: Optional[Tensor], d_lse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    grad_bias: bool, grad_sink: bool, grad_captured: Union[bool, Sequence[str]], given: Options, bound: Optional[Bound],
) -> Tuple[Any, ...]:  # fmt: skip
    """`tessera.attention_backward` with a program."""
    if bound is None:
        raise _core.Error("grad_captured: given without score_mod and mask_mod, accepted with one of them")
    names = [] if grad_captured is False else bound.differentiable(grad_captured)
    d_captured = _gradients(bound.arrays, [name in names for name in bound.names])
    options = {**_with_program(given, bound, bound.arrays), "d_captured": d_captured}
    gradients = kernels.backward(d_o, d_lse, q, k, v, o, lse, grad_bias, grad_sink, options)
    inputs = (q, k, v, o, lse, d_o, d_lse, *given.values(), *bound.arrays)
    gradients = ops.refuse_second_derivatives([*gradients, *d_captured], *inputs)
    by_name = {name: x for name, x in zip(bound.names, gradients[5:]) if x is not None}
    return (*gradients[:5], bound.shaped(by_name) if grad_captured is not False else None)
