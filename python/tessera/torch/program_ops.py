"""The operators `tessera::program_forward` and `tessera::program_backward`: attention with a score program, whose text,
declarations, tensors and numbers are arguments."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from tessera import _core, _score

from tessera._trace import kind_of, kind_of_number

from . import kernels, ops, options
from .options import Options

SCHEMA = (
    "Tensor[] captured, SymInt[] integers, float[] numbers, str score_text, str mask_text, str declared, int[] order"
)
_NUM_OPTIONS = len(options.NAMES)
_BIAS, _SINK = options.NAMES.index("bias"), options.NAMES.index("sink")


class Given(NamedTuple):
    """A program as arguments of an operator."""

    captured: Sequence[Tensor]
    integers: Sequence[Any]  # the named integers, which may be symbolic
    numbers: Sequence[float]  # all other named numbers
    score: str
    mask: str
    declared: str  # "bias float 2; c float -1": name, type, rank of tensors, then of numbers, whose rank is -1
    order: Sequence[int] = ()  # of o's axes in memory


def of_named(arrays: Dict[str, Tensor], numbers: Dict[str, Any], score: str, mask: str) -> Given:
    kinds = {name: kind_of_number(x) for name, x in numbers.items()}
    declared = [f"{name} {kind_of(x)} {x.dim()}" for name, x in arrays.items()]
    declared += [f"{name} {kind} -1" for name, kind in kinds.items()]
    integers = [x for name, x in numbers.items() if kinds[name] == "int"]
    others = [float(x) for name, x in numbers.items() if kinds[name] != "int"]
    return Given(list(arrays.values()), integers, others, score, mask, "; ".join(declared))


def of_bound(bound: _score.Bound) -> Given:
    named = [name for name, _, rank in bound.declared if rank < 0]
    kinds = {"int": int, "bool": bool, "float": float}
    types = {name: kinds[kind] for name, kind, _ in bound.declared}
    numbers = {name: types[name](x) for name, x in zip(named, bound.numbers)}
    declared = "; ".join(f"{name} {kind} {rank}" for name, kind, rank in bound.declared)
    return of_named({}, numbers, bound.score, bound.mask)._replace(captured=list(bound.arrays), declared=declared)


@functools.lru_cache(maxsize=256)
def _declared(text: str) -> Tuple[Tuple[str, str, int], ...]:
    entries = [entry.split() for entry in text.split("; ") if entry]
    return tuple((name, kind, int(rank)) for name, kind, rank in entries)


def arrays_of(program: Given) -> Dict[str, Tensor]:
    return dict(zip((name for name, _, rank in _declared(program.declared) if rank >= 0), program.captured))


def numbers_of(program: Given) -> Dict[str, Any]:
    integers, numbers = iter(program.integers), iter(program.numbers)
    return {
        name: next(integers) if kind == "int" else bool(next(numbers)) if kind == "bool" else next(numbers)
        for name, kind, rank in _declared(program.declared)
        if rank < 0
    }


def _not_empty(tensor: Tensor) -> Tensor:
    """Of rank 0 as [1], which is what the library takes."""
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def with_program(given: Options, program: Given) -> Options:
    """`given` with the program, as `_core` takes it."""
    parsed = _score.program(program.score, program.mask, _declared(program.declared))
    scalars = tuple(numbers_of(program).values())
    captured = [_not_empty(kernels.plain(x)) for x in program.captured]
    return {**given, "program": parsed, "captured": captured, "scalars": scalars}


def gradients_of(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> List[Any]:
    """Memory for the gradients that are wanted, None for the others."""
    return [x.new_empty(x.shape) if is_wanted else None for x, is_wanted in zip(tensors, wanted)]


def with_gradients(given: Options, gradients: Sequence[Any]) -> Options:
    return {**given, "d_captured": [None if x is None else _not_empty(x) for x in gradients]}


# ---- forward --------------------------------------------------------------------------------------------------------


def split(flat: Sequence[Any]) -> Tuple[Options, Given]:
    return options.unpack(tuple(flat[:_NUM_OPTIONS])), Given(*flat[_NUM_OPTIONS:])


def _forward(q: Tensor, k: Tensor, v: Tensor, *flat) -> Tuple[Tensor, Tensor, Tensor]:
    given, program = split(flat)
    return ops.forward_and_low(q, k, v, with_program(given, program), kernels.new_output(q, v, program.order))


program_forward = torch.library.custom_op(
    "tessera::program_forward",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {options.SCHEMA}, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
)


def outputs_without_data(q: Tensor, v: Tensor, given: Options, order: Sequence[int]) -> Tuple[Tensor, Tensor, Tensor]:
    _, lse_shape = kernels.output_shapes(q, v)
    lse, low = q.new_empty(lse_shape, dtype=torch.float32), ops.new_low(q, given, lse_shape)
    return kernels.new_output(q, v, order), lse, low


@program_forward.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *flat) -> Tuple[Tensor, Tensor, Tensor]:
    given, program = split(flat)
    kernels.check("forward", q, k, v, with_program(given, program))
    return outputs_without_data(q, v, given, program.order)


# ---- backward -------------------------------------------------------------------------------------------------------


def _backward(
    d_o, d_lse, q, k, v, o, lse, lse_low, want_d_bias, want_d_sink, want_d_captured, *flat
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, List[Tensor]]:
    if not ops.recorded.active and kernels.in_detached_double_backward(
        d_o, d_lse, q, k, v, flat[_BIAS], flat[_SINK], *flat[_NUM_OPTIONS]
    ):
        raise NotImplementedError(ops.SECOND_DERIVATIVE)
    given, program = split(flat)
    if ops.is_kept(lse_low, lse):
        given["lse_low"] = lse_low
    d_captured = gradients_of(program.captured, want_d_captured)
    given = with_gradients(with_program(given, program), d_captured)
    *found, d_bias, d_sink = kernels.backward(d_o, d_lse, q, k, v, o, lse, want_d_bias, want_d_sink, given)
    empty = [q.new_empty((0,), dtype=torch.float32) if x is None else x for x in (d_bias, d_sink, *d_captured)]
    return (*found, *empty[:2], empty[2:])


program_backward = torch.library.custom_op(
    "tessera::program_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor? d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? lse_low, "
    f"bool want_d_bias, bool want_d_sink, bool[] want_d_captured, {options.SCHEMA}, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])",
)


@program_backward.register_fake
def _backward_fake(d_o, d_lse, q, k, v, o, lse, lse_low, want_d_bias, want_d_sink, want_d_captured, *flat):
    given, program = split(flat)
    d_bias = q.new_empty(flat[_BIAS].shape if want_d_bias else (0,), dtype=torch.float32)
    d_sink = q.new_empty(flat[_SINK].shape if want_d_sink else (0,), dtype=torch.float32)
    d_captured = gradients_of(program.captured, want_d_captured)
    given = with_gradients(with_program(given, program), d_captured)
    named = {"d_lse": d_lse, "lse_low": lse_low if ops.is_kept(lse_low, lse) else None}
    named |= {"d_bias": d_bias if want_d_bias else None, "d_sink": d_sink if want_d_sink else None}
    given.update((name, x) for name, x in named.items() if x is not None)
    kernels.check("backward", q, k, v, given, o=o, lse=lse, d_o=d_o)
    empty = [q.new_empty((0,), dtype=torch.float32) if x is None else x for x in d_captured]
    return *(t.new_empty(t.shape) for t in (q, k, v)), d_bias, d_sink, empty


# ---- gradients ------------------------------------------------------------------------------------------------------


def _setup_context(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    q, k, v, *flat = inputs
    o, lse, low = output
    ctx.mark_non_differentiable(low)
    captured = flat[_NUM_OPTIONS]
    ctx.count = len(captured)
    ctx.save_for_backward(q, k, v, o, lse, low, *captured, *flat[: options.NUM_TENSORS])
    ctx.settings, ctx.program = flat[options.NUM_TENSORS : _NUM_OPTIONS], flat[_NUM_OPTIONS + 1 :]


def _gradients(run, ctx, wanted, want_d_captured, d_o, d_lse) -> Tuple[List[Any], List[Any]]:
    """Of q, k, v and the options, and of the captured tensors."""
    q, k, v, o, lse, low, *rest = ctx.saved_tensors
    captured, tensors = list(rest[: ctx.count]), rest[ctx.count :]
    if d_o is None and d_lse is None:
        return [None] * (3 + _NUM_OPTIONS), [None] * ctx.count
    want_d_bias, want_d_sink = wanted[3 + _BIAS], wanted[3 + _SINK]
    d_q, d_k, d_v, d_bias, d_sink, d_captured = run(
        d_o, d_lse, q, k, v, o, lse, low, want_d_bias, want_d_sink, list(want_d_captured), *tensors, *ctx.settings,
        captured, *ctx.program,
    )  # fmt: skip
    of_options: List[Any] = [None] * _NUM_OPTIONS
    of_options[_BIAS] = d_bias.to(tensors[_BIAS].dtype) if want_d_bias else None
    of_options[_SINK] = d_sink if want_d_sink else None
    found = [x if is_wanted else None for x, is_wanted in zip(d_captured, want_d_captured)]
    return [d_q, d_k, d_v, *of_options], found


def _autograd(ctx, d_o, d_lse, _=None):
    wanted = ctx.needs_input_grad
    found, d_captured = _gradients(program_backward, ctx, wanted, wanted[3 + _NUM_OPTIONS], d_o, d_lse)
    # PyTorch takes an empty list for one of tensors, whose gradients are an empty list.
    return (*found, d_captured, *([] if isinstance(x, list) and not x else None for x in ctx.program))


program_forward.register_autograd(_autograd, setup_context=_setup_context)
program_backward.register_autograd(ops.refuse_second_derivative)


# ---- vmap: one element after another --------------------------------------------------------------------------------


def _one_by_one(run, info, in_dims, arguments):
    def at(x, dim, index: int):
        if isinstance(x, (list, tuple)):
            dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(x)
            return [at(each, of_each, index) for each, of_each in zip(x, dims)]
        return x.select(dim, index) if isinstance(dim, int) and isinstance(x, Tensor) else x

    elements = [
        run(*(at(x, dim, index) for x, dim in zip(arguments, in_dims))) for index in range(info.batch_size)
    ]  # fmt: skip
    found = tuple(
        list(map(torch.stack, zip(*each))) if isinstance(each[0], (list, tuple)) else torch.stack(each)
        for each in zip(*elements)
    )
    return found, tuple([0] * len(x) if isinstance(x, list) else 0 for x in found)


def _with_vmap(operator: Any) -> None:
    operator.register_vmap(lambda info, in_dims, *arguments: _one_by_one(operator, info, in_dims, arguments))


_with_vmap(program_forward)
_with_vmap(program_backward)


# ---- torch.func: its transforms do not use an operator's registered gradient, and see tensors only as arguments ------


class FirstDerivative(torch.autograd.Function):
    """`program_backward` as a node of autograd's graph, whose derivative is refused. The captured tensors come last."""

    @staticmethod
    def forward(count, *arguments):
        rest, captured = arguments[: len(arguments) - count], arguments[len(arguments) - count :]
        ops.recorded.active = True
        try:
            *found, d_captured = program_backward(*rest[:-_REST], list(captured), *rest[-_REST:])
        finally:
            ops.recorded.active = False
        return (*found, *d_captured)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(ops.refuse_second_derivative)

    @staticmethod
    def vmap(info, in_dims, count, *arguments):
        return _one_by_one(functools.partial(FirstDerivative.apply, count), info, in_dims[1:], arguments)


_REST = len(Given._fields) - 1  # a program without its captured tensors


def first_derivative(*arguments):
    """`program_backward` by FirstDerivative."""
    *before, captured = arguments[:-_REST]
    found = FirstDerivative.apply(len(captured), *before, *arguments[-_REST:], *captured)
    return (*found[:5], list(found[5:]))


class Transformable(torch.autograd.Function):
    """`program_forward` for torch.func.grad, vjp and vmap of them. The captured tensors come last."""

    @staticmethod
    def forward(q, k, v, flat, program, *tensors):
        given = [*tensors[: options.NUM_TENSORS], *flat]
        return program_forward(q, k, v, *given, list(tensors[options.NUM_TENSORS :]), *program)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, flat, program, *tensors = inputs
        given, captured = tensors[: options.NUM_TENSORS], tensors[options.NUM_TENSORS :]
        _setup_context(ctx, (q, k, v, *given, *flat, captured, *program), output)

    @staticmethod
    def backward(ctx, d_o, d_lse, _):
        wanted = ctx.needs_input_grad
        of_options = (*wanted[:3], *wanted[5:])
        found, d_captured = _gradients(
            first_derivative, ctx, of_options, wanted[5 + options.NUM_TENSORS :], d_o, d_lse
        )  # fmt: skip
        return (*found[:3], None, None, *found[3 : 3 + options.NUM_TENSORS], *d_captured)

    @staticmethod
    def vmap(info, in_dims, q, k, v, flat, program, *tensors):
        def run(q, k, v, *tensors):
            return Transformable.apply(q, k, v, flat, program, *tensors)

        return _one_by_one(run, info, (*in_dims[:3], *in_dims[5:]), (q, k, v, *tensors))


def transformable(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> Tuple[Tensor, Tensor, Tensor]:
    """`program_forward` by Transformable."""
    settings, program = flat[options.NUM_TENSORS : _NUM_OPTIONS], Given(*flat[_NUM_OPTIONS:])
    tensors = (*flat[: options.NUM_TENSORS], *program.captured)
    return Transformable.apply(q, k, v, settings, tuple(program)[1:], *tensors)
