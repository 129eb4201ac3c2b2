"""Score programs in PyTorch: calls with gradients of the tensors that a program captures.

Eager calls on plain tensors run here; transforms, tracers and compilers see the operators of program_ops."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from tessera import _core, _score
from tessera._score import Bound, Mod

from . import kernels, ops, program_ops
from . import options as of_call
from .checks import check_tensor
from .options import Options
from .program_ops import Given


def bind(score_mod: Mod, mask_mod: Mod, captured: Optional[Dict[str, Any]]) -> Optional[Bound]:
    """The program of a call, all of whose arrays are tensors."""
    bound = _score.bind(score_mod, mask_mod, captured)
    if bound is not None:
        for name, tensor in zip(bound.names, bound.arrays):
            check_tensor(f"captured ({name})", tensor)
    return bound


def given_of(score_mod: Mod, mask_mod: Mod, captured: Optional[Dict[str, Any]]) -> Given:
    """Within torch.compile: the texts, and what the caller named. Functions are traced by program_graph."""
    for argument, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if not (mod is None or isinstance(mod, str) or callable(mod)):
            raise _core.Error(f"{argument}: {type(mod).__name__}, accepted a text or a function")
    arrays, numbers = {}, {}
    for name, value in (captured or {}).items():
        if isinstance(value, Tensor):
            check_tensor(f"captured ({name})", value)
            arrays[name] = value
        elif isinstance(value, (bool, int, float, torch.SymInt)):
            numbers[name] = value
        else:
            raise _core.Error(f"captured: {name!r} is {type(value).__name__}, accepted arrays and numbers")
    texts = [mod if isinstance(mod, str) else "" for mod in (score_mod, mask_mod)]
    return program_ops.of_named(arrays, numbers, *texts)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, sink, others, results, program, *tensors):
        given = dict(others)
        if bias is not None:
            given["bias"] = bias
        if sink is not None:
            given["sink"] = sink
        if kernels.keeps_low(given):
            given["lse_low"] = q.new_empty(kernels.output_shapes(q, v)[1], dtype=torch.float32)
        program = program._replace(captured=tensors)
        whole = program_ops.with_program(given, program)
        o, lse = kernels.forward(q, k, v, whole, o=kernels.new_output(q, v, program.order))
        ctx.set_materialize_grads(False)
        saved = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        ctx.save_for_backward(q, k, v, o, lse, *saved.values(), *tensors)
        ctx.names, ctx.program = tuple(saved), program._replace(captured=())
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
        d_captured = program_ops.gradients_of(tensors, ctx.needs_input_grad[8:])
        whole = program_ops.with_program(given, ctx.program._replace(captured=tensors))
        whole = program_ops.with_gradients(whole, d_captured)
        wanted = ctx.needs_input_grad[3:5]
        d_q, d_k, d_v, d_bias, d_sink = kernels.backward(d_o, d_lse, q, k, v, o, lse, *wanted, whole)
        if d_bias is not None:
            d_bias = d_bias.to(given["bias"].dtype)
        return (d_q, d_k, d_v, d_bias, d_sink, None, None, None, *d_captured)


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], sink: Optional[Tensor], given: Options, results: int,
    score_mod: Mod, mask_mod: Mod, captured: Optional[Dict[str, Any]],
) -> Union[Tensor, Tuple[Tensor, ...]]:  # fmt: skip
    """`tessera.torch.attention` with a program."""
    if torch.compiler.is_dynamo_compiling():
        flat = of_call.pack({**given, "bias": bias, "sink": sink})
        program = given_of(score_mod, mask_mod, captured)._replace(order=kernels.order_in_memory(q))
        functions = [mod if callable(mod) else None for mod in (score_mod, mask_mod)]
        if functions == [None, None]:
            found = program_ops.program_forward(q, k, v, *flat, *program)
        else:
            from . import program_graph

            found = program_graph.attention(q, k, v, flat, *functions, program)
        return found[0] if results == 1 else tuple(found[:results])
    program = program_ops.of_bound(bind(score_mod, mask_mod, captured))
    program = program._replace(order=kernels.order_in_memory(q))
    functorch = torch._C._functorch.peek_interpreter_stack() is not None
    tensors = (q, k, v, *program.captured)
    if functorch or kernels.seen_by_others(*tensors) or not all(map(kernels.has_data, tensors)):
        operator = program_ops.transformable if functorch else program_ops.program_forward
        found = operator(q, k, v, *of_call.pack({**given, "bias": bias, "sink": sink}), *program)
        return found[0] if results == 1 else tuple(found[:results])
    tensors = program.captured
    return _Attention.apply(q, k, v, bias, sink, given, results, program._replace(captured=()), *tensors)


def attention_backward(
    d_o: Optional[Tensor], d_lse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    grad_bias: bool, grad_sink: bool, grad_captured: Union[bool, Sequence[str]], given: Options, bound: Optional[Bound],
) -> Tuple[Any, ...]:  # fmt: skip
    """`tessera.attention_backward` with a program."""
    if bound is None:
        raise _core.Error("grad_captured: given without score_mod and mask_mod, accepted with one of them")
    inputs = (q, k, v, o, lse, d_o, d_lse, *given.values(), *bound.arrays)
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if kernels.seen_by_others(*tensors) or not all(map(kernels.has_data, tensors)):
        raise _core.Error("score_mod, mask_mod: attention_backward under a transform or tracer, accepted eager calls")
    names = [] if grad_captured is False else bound.differentiable(grad_captured)
    d_captured = program_ops.gradients_of(bound.arrays, [name in names for name in bound.names])
    whole = program_ops.with_gradients(
        program_ops.with_program(given, program_ops.of_bound(bound)), d_captured
    )  # fmt: skip
    gradients = kernels.backward(d_o, d_lse, q, k, v, o, lse, grad_bias, grad_sink, whole)
    gradients = ops.refuse_second_derivatives([*gradients, *d_captured], *inputs)
    by_name = {name: x for name, x in zip(bound.names, gradients[5:]) if x is not None}
    return (*gradients[:5], bound.shaped(by_name) if grad_captured is not False else None)
