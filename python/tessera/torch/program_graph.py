"""Score programs of functions that torch.compile traces.

Dynamo traces score_mod and mask_mod as the body of a higher-order operator, whose operands are what they capture.
Running that operator, which PyTorch does when it traces the graph further, runs the body with values that record what
is done to them, as `tessera._trace` does with a function: the text and the captured tensors become arguments of
`tessera::program_forward`, the only operator that compilers after Dynamo see.
"""

from __future__ import annotations

import operator
from typing import Any, Dict, Tuple

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.variables.higher_order_ops import BaseHOPVariable, _hop_name_to_variable_class
from torch._higher_order_ops.base_hop import BaseHOP
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.node import map_arg

from tessera._core import Error
from tessera._trace import Captured, Elements, Names, Traced, input_named, text_of_result

from . import options, program_ops
from .program_ops import Given

# In a body: s, b, h, i or j of the pair, as a tensor of rank 0.
_input = torch.library.custom_op(
    "tessera::program_input", lambda like, name: None, mutates_args=(), schema="(Tensor like, str name) -> Tensor"
)


@_input.register_fake
def _input_fake(like: Tensor, name: str) -> Tensor:
    return like.new_empty((), dtype=like.dtype if name == "s" else torch.int32)


# The end of a body: the arguments of `program_forward`, with the results of score_mod and mask_mod where those are
# functions, and the texts and declarations that the caller gave.
_end = torch.library.custom_op(
    "tessera::program_end",
    lambda *_: None,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {options.SCHEMA}, {program_ops.SCHEMA}, Tensor? score_result, "
    "Tensor? mask_result) -> (Tensor, Tensor, Tensor)",
)


@_end.register_fake
def _end_fake(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> Tuple[Tensor, Tensor, Tensor]:
    given, program = program_ops.split(flat[:-2])
    return program_ops.outputs_without_data(q, v, given, program.order)


# ---- running a body -------------------------------------------------------------------------------------------------


class _Run:
    """One run of a body, which ends with `program_forward`."""

    def __init__(self, body: GraphModule):
        self._body, self._names = body, Names()
        self._values: Dict[Node, Any] = {}
        self._recorded: Dict[Node, Any] = {}  # tensors and numbers as recorded operations see them

    def __call__(self, *operands: Any) -> Any:
        nodes = self._body.graph.nodes
        self._values.update(zip((node for node in nodes if node.op == "placeholder"), operands))
        self._declare(next(node for node in nodes if node.target is torch.ops.tessera.program_end.default))
        for node in nodes:
            if node.op == "output":
                return self._plain(node.args[0])
            if node.op == "placeholder":
                continue
            try:
                self._values[node] = self._run(node)
            except Error as error:
                place = (node.stack_trace or "").strip().splitlines()[-2:]
                raise Error(f"{' '.join(map(str.strip, place))}: {error}") from None
        raise AssertionError("a graph ends with its output")

    def _declare(self, end: Node) -> None:
        """The names that the caller chose, which are operands."""
        program = Given(*self._plain(end.args[3 + len(options.NAMES) : -2]))
        self._names.arrays.update(program_ops.arrays_of(program))
        self._names.numbers.update(program_ops.numbers_of(program))

    def _plain(self, argument: Any) -> Any:
        return map_arg(argument, self._values.__getitem__)

    def _as_recorded(self, node: Node) -> Any:
        value = self._values[node]
        if not isinstance(value, (Tensor, torch.SymInt, torch.SymFloat)):
            return value
        if node not in self._recorded:
            name = node.name.strip("_").removeprefix("l_").removeprefix("self_")
            if isinstance(value, torch.SymFloat):
                value = torch.scalar_tensor(value, dtype=torch.float64)
            is_tensor = isinstance(value, Tensor)
            self._recorded[node] = (self._names.capture if is_tensor else self._names.capture_symbolic)(name, value)
        return self._recorded[node]

    def _run(self, node: Node) -> Any:
        if node.op == "get_attr":
            return operator.attrgetter(node.target)(self._body)
        if node.target is torch.ops.tessera.program_input.default:
            return input_named(node.args[1])
        if node.target is torch.ops.tessera.program_end.default:
            return self._end(node)
        is_recorded = any(isinstance(self._values[x], (Traced, Captured, Elements)) for x in node.all_input_nodes)
        place = self._as_recorded if is_recorded else self._values.__getitem__
        arguments, keywords = map_arg(node.args, place), map_arg(node.kwargs, place)
        if node.op == "call_method":
            return getattr(arguments[0], node.target)(*arguments[1:], **keywords)
        return node.target(*arguments, **keywords)

    def _end(self, node: Node) -> Any:
        *arguments, score_result, mask_result = node.args
        q, k, v, *flat = self._plain(tuple(arguments))
        given, program = flat[: len(options.NAMES)], Given(*flat[len(options.NAMES) :])
        texts = {"score_mod": program.score, "mask_mod": program.mask}
        for name, result in (("score_mod", score_result), ("mask_mod", mask_result)):
            if result is not None:
                texts[name] = text_of_result(name, self._as_recorded(result))
        whole = program_ops.of_named(self._names.arrays, self._names.numbers, *texts.values())
        program = whole._replace(order=program.order)
        return program_ops.program_forward(q, k, v, *given, *program)


class _Programmed(BaseHOP):
    """body(*operands), where the body ends with `program_end`."""

    def __init__(self) -> None:
        HigherOrderOperator.__init__(self, "tessera_programmed")
        self.py_impl(DispatchKey.Autograd)(self._run)
        self.py_impl(DispatchKey.CompositeExplicitAutograd)(self._run)
        for mode in (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode):
            self.py_impl(mode)(self._run_in)

    @staticmethod
    def _run(body: GraphModule, *operands: Any) -> Any:
        return _Run(body)(*operands)

    @staticmethod
    def _run_in(mode: Any, body: GraphModule, *operands: Any) -> Any:
        with mode:
            return _Run(body)(*operands)


class _ProgrammedVariable(BaseHOPVariable):
    """How Dynamo traces it: an index of a captured tensor by a number of the pair stays an index, as within
    FlexAttention's operator; elsewhere PyTorch would read that number. Operands may share memory, as nothing is
    written."""

    supports_aliasing = True

    def _call_function(self, *arguments: Any) -> Any:
        with TransformGetItemToIndex():
            return super()._call_function(*arguments)


_programmed = _Programmed()
_hop_name_to_variable_class[_programmed.name()] = _ProgrammedVariable


def attention(
    q: Tensor, k: Tensor, v: Tensor, flat: Tuple[Any, ...], score_mod: Any, mask_mod: Any, program: Given
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`program_forward` of functions (or None), traced by Dynamo, and of texts."""

    def body() -> Tuple[Tensor, Tensor, Tensor]:
        pair = [_input(q, name) for name in ("b", "h", "i", "j")]
        score = None if score_mod is None else score_mod(_input(q, "s"), *pair)
        visible = None if mask_mod is None else mask_mod(*pair)
        return _end(q, k, v, *flat, *program, score, visible)

    return _programmed(body)
