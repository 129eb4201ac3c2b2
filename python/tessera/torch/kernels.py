"""Calls of the kernels on plain tensors, without autograd and tracing: only layouts and allocation."""

from __future__ import annotations

import functools
import json
import math
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from tessera import _core

from .dropout import seed_and_offset
from .options import Options

# DLPack's C exchange interface exports memory whatever autograd says; __dlpack__ refuses tensors that require a
# gradient.
_MARKS_MATTER = not hasattr(Tensor, "__dlpack_c_exchange_api__")


def in_detached_double_backward(*tensors: Optional[Tensor]) -> bool:
    """True if a compiled program's backward pass with create_graph=True runs this kernel on detached tensors.

    PyTorch refuses the second derivative of a compiled program by a node whose inputs are the tensors saved by the
    program. If all of them are intermediate results, which are detached, torch.autograd.grad does not reach the node,
    and the derivative is silently dropped. Such a call is recognised as follows: the kernel runs in a backward pass
    whose graph is kept, either in the forward function of an autograd.Function (PyTorch 2.13), or recorded although no
    tensor there requires a gradient (2.11).
    """
    return (
        (torch.is_grad_enabled() or not torch._C._is_fwd_grad_enabled())
        and torch._C._current_graph_task_id() != -1
        and torch._C._autograd._get_current_graph_task_keep_graph()
        and not any(t is not None and t.requires_grad for t in tensors)
    )


def refuse_tangents(*tensors) -> None:
    """Refuses forward-mode derivatives where there is no autograd node that would refuse them."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "tessera.torch: a forward-mode derivative was asked for, accepted is reverse mode"
            )


def plain(tensor: Tensor) -> Tensor:
    """The same memory without autograd's marks, if they prevent the export; a copy of a lazily negated tensor."""
    if tensor.is_neg():  # memory does not show the negation: torch.Tensor.resolve_neg
        return tensor.detach().resolve_neg()
    return tensor.detach() if _MARKS_MATTER and tensor.requires_grad else tensor


def seen_by_others(*tensors: Optional[Tensor]) -> bool:
    """True if a tracer, a mode, a transform of torch.func or is_grads_batched of torch.autograd.grad must see a
    call."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(isinstance(t, Tensor) and torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)
    )


def refuse_gradients(what: str, **tensors: Optional[Tensor]) -> None:
    """For a call that writes to given tensors and is not a node of autograd's graph."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise _core.Error(
                f"{name}: requires a gradient, which {what} does not compute: accepted under torch.no_grad()"
            )


def mark_written(*tensors: Optional[Tensor]) -> None:
    """Marks tensors that the library wrote in place as modified, so that autograd refuses their earlier saved
    versions."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if isinstance(tensor, Tensor)])


# ---- checks without data --------------------------------------------------------------------------------------------

_DEVICE_TYPES = {"meta": 0, "cpu": 1, "cuda": 2}  # DLPack's numbers, and one for meta tensors
_OTHER_DEVICE, _NO_GPU = 12, -1


class Unknown(Exception):
    """A size without a value during tracing."""


def _value(number):
    """The value of a symbolic number, or of a pair of them, without adding a guard."""
    if isinstance(number, tuple):
        return tuple(map(_value, number))
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    if not number.node.has_hint():
        raise Unknown(f"{number}: a size without a value")
    return number.node.hint


class Layout(NamedTuple):
    """A tensor without data: the arguments of `_core.ArrayWithoutData`. A key of caches."""

    dtype: str
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    device_type: int
    device_id: int

    def contiguous(self, shape: Sequence[int], dtype: str = "") -> Layout:
        """Of another shape and, if given, dtype, contiguous."""
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return self._replace(dtype=dtype or self.dtype, shape=tuple(shape), strides=strides)

    def array(self) -> _core.ArrayWithoutData:
        return _core.ArrayWithoutData(*self)


def layout_of(tensor: Tensor) -> Layout:
    shape, strides = tuple(_value(n) for n in tensor.shape), tuple(_value(n) for n in tensor.stride())
    place, index = _DEVICE_TYPES.get(tensor.device.type, _OTHER_DEVICE), tensor.device.index or 0
    if tensor.device.type == "cuda" and not torch.cuda.is_available():
        index = _NO_GPU
    return Layout(str(tensor.dtype)[len("torch.") :], shape, strides, place, index)


def without_data(tensor: Tensor, contiguous_rows: bool = False) -> _core.ArrayWithoutData:
    """The tensor as the library's checks expect it. contiguous_rows: with the layout that `rows` would copy to."""
    layout = layout_of(tensor)
    if contiguous_rows and layout.strides and layout.strides[-1] != 1:
        layout = layout.contiguous(layout.shape)
    return layout.array()


def has_data(tensor: object) -> bool:
    """False for meta tensors and those of a tracer."""
    return not isinstance(tensor, Tensor) or not (tensor.is_meta or isinstance(tensor, FakeTensor))


def described(value):
    """An argument of a plan: the layout of a tensor without data, anything else unchanged."""
    return value if has_data(value) else without_data(value)


def _described(value):
    """An option without data: tensors, lists of them, and numbers."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_described, value))
    return without_data(value) if isinstance(value, Tensor) else _value(value)


def check(direction: str, q: Tensor, k: Tensor, v: Tensor, options: Options, **others: Optional[Tensor]) -> None:
    """Raises the errors of a call with these tensors, except those that depend on data. `others`: o, lse, d_o."""
    try:
        by_rows = {name: without_data(x, contiguous_rows=True) for name, x in dict(q=q, k=k, v=v).items()}
        by_rows.update((name, without_data(x, contiguous_rows=True)) for name, x in others.items() if x is not None)
        given = {
            name: _described(x)
            for name, x in options.items()
            if name != "dropout_state" or x.device == q.device  # it may be on the host for any q
        }
    except Unknown:
        return
    _core.check(direction, **by_rows, **given)


def _key(value: Any) -> Any:
    """An option as a part of a cache's key: tensors as their layouts."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return layout_of(value) if isinstance(value, Tensor) else _value(value)


def _from_key(value: Any) -> Any:
    if isinstance(value, Layout):
        return value.array()
    return tuple(map(_from_key, value)) if isinstance(value, tuple) else value


def accumulates(direction: str, q: Layout, k: Layout, v: Layout, options: Options) -> bool:
    """True if a call can add to partial results in float32: on a GPU only by the kernel that serves it otherwise, since
    another might be much slower. lse and lse_low are planned as contiguous."""
    if q.dtype == "float64":  # its sums are float64
        return False
    given = {name: _key(value) for name, value in options.items() if name not in ("dropout_state", "lse_low")}
    return _accumulates(direction, q, k, v, tuple(sorted(given.items())))


@functools.lru_cache(maxsize=1024)
def _accumulates(direction: str, q: Layout, k: Layout, v: Layout, options: tuple) -> bool:
    *batch, rows, heads, _ = q.shape
    lse = q.contiguous((*batch, heads, rows), "float32").array()
    given = {name: _from_key(value) for name, value in options}

    def kernel(**more: Any) -> str:
        arrays = (layout.array() for layout in (q, k, v))
        return json.loads(_core.plan_json(direction, *arrays, lse=lse, lse_low=lse, **given, **more))["kernel"]

    try:
        adds = kernel(accumulate=1)
        return q.device_type == _DEVICE_TYPES["cpu"] or adds == kernel()
    except _core.Error:
        return False


def rows(tensor: Tensor) -> Tensor:
    """With a contiguous last dimension, as kernels require. contiguous() would keep the strides of an empty tensor."""
    if tensor.stride(-1) != 1:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return plain(tensor) if _MARKS_MATTER or tensor.is_neg() else tensor


def _empty_twin(tensor: Tensor) -> Tensor:
    """Uninitialised, contiguous, with the same shape, dtype and device. empty_like is faster, but keeps other
    strides."""
    return torch.empty_like(tensor) if tensor.is_contiguous() else tensor.new_empty(tensor.shape)


def empty_output(q: Tensor, shape: tuple) -> Tensor:
    """Uninitialised and contiguous, of the output's dtype."""
    if shape == q.shape and q.dtype not in _CODES:
        return _empty_twin(q)
    return q.new_empty(shape, dtype=output_dtype(q))


def _twin_by_heads(tensor: Tensor) -> Tensor:
    """The same for [B, H, S, D], with its order in memory if rows are contiguous there."""
    twin = torch.empty_like(tensor)
    return twin if twin.stride(-1) == 1 else tensor.new_empty(tensor.shape)


def _keywords(q: Tensor, options: Options) -> dict:
    """`options` as `_core` expects them, with the place of the computation."""
    keywords = {name: plain(value) if isinstance(value, Tensor) else value for name, value in options.items()}
    state = keywords.pop("dropout_state", None)
    if state is not None and keywords.get("dropout_p"):
        add_dropout(keywords, q, state)
    add_place(keywords, q, keywords.pop("threads", 0))
    return keywords


def add_dropout(options: dict, q: Tensor, state: Tensor) -> None:
    """Adds dropout's state, which the kernels read on q's device when they run.

    For a GPU call whose state is on the host, its two numbers are passed: nothing is copied, and nothing waits."""
    if q.is_cuda and not state.is_cuda:
        options["dropout_seed"], options["dropout_offset"] = seed_and_offset(state)
    else:
        options["dropout_state"] = state.to(q.device)


def add_place(options: dict, q: Tensor, threads: int = 0) -> None:
    """Adds what a computation on q's device uses: PyTorch's memory on a GPU, its threads on the CPU."""
    if q.is_cuda:
        options["workspace"] = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
        return
    options["threads"] = threads = threads or torch.get_num_threads()
    if threads > 1:
        options["openmp"] = True  # PyTorch's own threads, which spin for a while after each operator


class NotWhatEagerDoes(RuntimeError):
    """A captured call failed where an eager call would not; PyTorch's kernel instead would change the program."""


def planned(run, direction: str, tensors: tuple, options: dict) -> None:
    """run(*tensors, **options). Under capture it raises only the refusals of the plan, as an eager call does."""
    try:
        run(*tensors, **options)
    except _core.Error as error:
        q, k, v, o, lse = tensors[:5]
        if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise
        _core.check(direction, q, k, v, o, lse, **{name: x for name, x in options.items() if name != "workspace"})
        raise NotWhatEagerDoes(f"while a CUDA graph is captured: {error}") from error


_CODES = frozenset((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))


def output_dtype(q: Tensor) -> torch.dtype:
    """q's, or bfloat16 if q has 8 bits."""
    return torch.bfloat16 if q.dtype in _CODES else q.dtype


def output_shapes(q: Tensor, v: Tensor) -> Tuple[tuple, tuple]:
    """Shapes of o and lse: [B, Sq, Hq, Dv] and [B, Hq, Sq], or packed [Tq, Hq, Dv] and [Hq, Tq]."""
    if q.dim() == 4:
        batch, seqlen_q, heads, _ = q.shape
        return (batch, seqlen_q, heads, v.shape[-1]), (batch, heads, seqlen_q)
    if q.dim() == 3:
        rows, heads, _ = q.shape
        return (rows, heads, v.shape[-1]), (heads, rows)
    raise _core.Error(f"q: rank {q.dim()}, accepted [B, Sq, Hq, D], or [Tq, Hq, D] with cu_seqlens_q")


def order_in_memory(tensor: Tensor) -> list:
    """The axes before the last, that of the smallest stride first. Dynamo cannot sort by symbolic numbers."""
    strides, order = tensor.stride(), []
    for axis in range(tensor.dim() - 2, -1, -1):
        place = 0
        while place < len(order) and strides[order[place]] <= strides[axis]:
            place += 1
        order.insert(place, axis)
    return order


def new_output(q: Tensor, v: Tensor, order: Sequence[int]) -> Tensor:
    """Memory for o with its axes in this order, as `order_in_memory` gives it; the last one is contiguous."""
    shape, _ = output_shapes(q, v)
    strides, stride = [1] * len(shape), shape[-1]
    for axis in order:
        strides[axis] = stride
        stride = stride * shape[axis]
    return q.new_empty_strided(shape, strides)


# These options are for inference only; without a backward pass, the LSE's low float is not needed.
_WITHOUT_GRADIENT = ("page_table", "page_indices", "tree_mask", "prefix_groups")


def keeps_low(options: Options) -> bool:
    """True if a forward pass keeps the rounding error of its LSE for the backward pass."""
    if not options:
        return True
    standard = "standard" in str(options.get("kernel", ""))  # it stores its scores, and does not need the low float
    return not standard and not any(name in options for name in _WITHOUT_GRADIENT)


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, want_lse: bool = True, o: Optional[Tensor] = None,
    lse: Optional[Tensor] = None, by_heads: bool = False,
) -> Tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """o and lse, written to the given tensors, if any. by_heads: q, k, v are [B, H, S, D], and o is [B, Sq, Hq, Dv]."""
    if forward_ad._current_level >= 0:
        refuse_tangents(q, k, v, *options.values())
    if by_heads:
        batch, heads, seqlen_q, _ = q.shape
        o = q.new_empty((batch, seqlen_q, heads, v.shape[-1]), dtype=output_dtype(q))
        if lse is None:
            lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
        _core.forward_by_heads(rows(q), rows(k), rows(v), o, lse, **_keywords(q, options))
        return o, lse
    if o is None or (want_lse and lse is None):
        o_shape, lse_shape = output_shapes(q, v)
        if o is None:
            o = empty_output(q, o_shape)
        if want_lse and lse is None:
            lse = q.new_empty(lse_shape, dtype=torch.float32)
    tensors, keywords = (rows(q), rows(k), rows(v), o, lse), _keywords(q, options)
    if q.is_cuda:  # nothing is captured on the CPU, where another Python call would show in a small problem's time
        planned(_core.forward, "forward", tensors, keywords)
    else:
        _core.forward(*tensors, **keywords)
    return o, lse


def backward(
    d_o: Optional[Tensor], d_lse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    want_d_bias: bool, want_d_sink: bool, options: Options, by_heads: bool = False,
    sums: Optional[Tuple[Tensor, Tensor, Tensor]] = None,
) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    """d_q, d_k, d_v, d_bias, d_sink; the last two are float32, or None if not requested. by_heads: as in forward.
    sums: float32 d_q, d_k, d_v to which the call adds (the option `accumulate`)."""
    if forward_ad._current_level >= 0:
        refuse_tangents(d_o, d_lse, q, k, v, o, lse, *options.values())
    keywords = _keywords(q, options)
    if d_lse is not None:
        keywords["d_lse"] = plain(d_lse)
    d_bias = d_sink = None
    if want_d_bias:
        keywords["d_bias"] = d_bias = q.new_empty(options["bias"].shape, dtype=torch.float32)
    if want_d_sink:
        keywords["d_sink"] = d_sink = q.new_empty(options["sink"].shape, dtype=torch.float32)
    twin, run = (_twin_by_heads, _core.backward_by_heads) if by_heads else (_empty_twin, _core.backward)
    d_q, d_k, d_v = sums or (twin(q), twin(k), twin(v))
    d_o = torch.zeros_like(o) if d_o is None else rows(d_o)
    tensors = (rows(q), rows(k), rows(v), rows(o), plain(lse), d_o, d_q, d_k, d_v)
    if by_heads:
        run(*tensors, **keywords)
    else:
        planned(run, "backward", tensors, keywords)
    return d_q, d_k, d_v, d_bias, d_sink
