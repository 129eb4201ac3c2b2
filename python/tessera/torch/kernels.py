"""Calls of the kernels on plain tensors: no autograd, no tracing, nothing but layout and allocation."""

from __future__ import annotations

import functools
import math
from typing import Optional, Tuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from tessera import _core

from .dropout import seed_and_offset
from .options import Options

# DLPack's C exchange interface hands out memory whatever autograd thinks of it, __dlpack__ none that needs a gradient.
_MARKS_MATTER = not hasattr(Tensor, "__dlpack_c_exchange_api__")


def in_detached_double_backward(*tensors: Optional[Tensor]) -> bool:
    """Whether a compiled program's backward pass with create_graph=True runs this kernel on detached tensors.

    PyTorch refuses the second derivative of a compiled program by a node whose inputs are what the program has saved. If
    those are intermediate results alone, which are detached, torch.autograd.grad does not reach the node, and the
    derivative is dropped. Such a call is known by this: the kernel runs in a backward pass whose graph is kept, either in
    the forward function of an autograd.Function (PyTorch 2.13) or recorded, though nothing there requires a gradient (2.11).
    """
    return (
        (torch.is_grad_enabled() or not torch._C._is_fwd_grad_enabled())
        and torch._C._current_graph_task_id() != -1
        and torch._C._autograd._get_current_graph_task_keep_graph()
        and not any(t is not None and t.requires_grad for t in tensors)
    )


def refuse_tangents(*tensors) -> None:
    """Forward-mode derivatives, which autograd's nodes refuse by themselves, where there is none."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError("tessera.torch: a forward-mode derivative was asked for, accepted is reverse mode")


def plain(tensor: Tensor) -> Tensor:
    """The same memory without autograd's marks, where they are in the way; a copy of what is stored negated."""
    if tensor.is_neg():  # memory does not tell: torch.Tensor.resolve_neg
        return tensor.detach().resolve_neg()
    return tensor.detach() if _MARKS_MATTER and tensor.requires_grad else tensor


def seen_by_others(*tensors: Optional[Tensor]) -> bool:
    """Whether a tracer, a mode, a transform of torch.func or torch.autograd.grad's is_grads_batched must see a call."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(isinstance(t, Tensor) and torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)
    )


def refuse_gradients(what: str, **tensors: Optional[Tensor]) -> None:
    """Of a call that writes where it is told and is no node of autograd's graph."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise _core.Error(f"{name}: requires a gradient, which {what} has not: accepted under torch.no_grad()")


def mark_written(*tensors: Optional[Tensor]) -> None:
    """What the library wrote in place counts as modified, so that autograd refuses what it saved of it before."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if isinstance(tensor, Tensor)])


# ---- checks without data --------------------------------------------------------------------------------------------

_DEVICE_TYPES = {"meta": 0, "cpu": 1, "cuda": 2}  # DLPack's, and one for meta tensors
_OTHER_DEVICE, _NO_GPU = 12, -1


class Unknown(Exception):
    """A size that a tracer has no value for."""


def _value(number):
    """What stands behind a symbolic number, or a pair of them, without a guard on it."""
    if isinstance(number, tuple):
        return tuple(map(_value, number))
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    if not number.node.has_hint():
        raise Unknown(f"{number}: a size without a value")
    return number.node.hint


def without_data(tensor: Tensor, contiguous_rows: bool = False) -> _core.ArrayWithoutData:
    """The tensor as the library's checks take it. contiguous_rows: a copy where `rows` would make one."""
    shape, strides = [_value(n) for n in tensor.shape], [_value(n) for n in tensor.stride()]
    if contiguous_rows and strides and strides[-1] != 1:
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    place, index = _DEVICE_TYPES.get(tensor.device.type, _OTHER_DEVICE), tensor.device.index or 0
    if tensor.device.type == "cuda" and not torch.cuda.is_available():
        index = _NO_GPU
    return _core.ArrayWithoutData(str(tensor.dtype)[len("torch.") :], shape, strides, place, index)


def has_data(tensor: object) -> bool:
    """False for meta tensors and those of a tracer."""
    return not isinstance(tensor, Tensor) or not (tensor.is_meta or isinstance(tensor, FakeTensor))


def described(value):
    """An argument of a plan: of a tensor without data what is known of it, everything else as it is."""
    return value if has_data(value) else without_data(value)


def check(direction: str, q: Tensor, k: Tensor, v: Tensor, options: Options, **others: Optional[Tensor]) -> None:
    """Raises what a call of these tensors would, except for what only data tell. `others`: o, lse, d_o."""
    try:
        by_rows = {name: without_data(x, contiguous_rows=True) for name, x in dict(q=q, k=k, v=v).items()}
        by_rows.update((name, without_data(x, contiguous_rows=True)) for name, x in others.items() if x is not None)
        given = {
            name: without_data(x) if isinstance(x, Tensor) else _value(x)
            for name, x in options.items()
            if name != "dropout_state" or x.device == q.device  # which may be on the host for any q
        }
    except Unknown:
        return
    _core.check(direction, **by_rows, **given)


def rows(tensor: Tensor) -> Tensor:
    """With a contiguous last dimension, as kernels read their rows. contiguous() would keep an empty one's strides."""
    if tensor.stride(-1) != 1:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return plain(tensor)


def _empty_twin(tensor: Tensor) -> Tensor:
    """Uninitialised, contiguous, in its shape, dtype and place. empty_like is quicker, but would keep other strides."""
    return torch.empty_like(tensor) if tensor.is_contiguous() else tensor.new_empty(tensor.shape)


def _twin_by_heads(tensor: Tensor) -> Tensor:
    """The same of [B, H, S, D], in its order in memory where that has contiguous rows."""
    twin = torch.empty_like(tensor)
    return twin if twin.stride(-1) == 1 else tensor.new_empty(tensor.shape)


def _keywords(q: Tensor, options: Options) -> dict:
    """`options` as `_core` takes them, and where the call computes."""
    keywords = {name: plain(value) if isinstance(value, Tensor) else value for name, value in options.items()}
    state = keywords.pop("dropout_state", None)
    if state is not None and keywords.get("dropout_p"):
        add_dropout(keywords, q, state)
    add_place(keywords, q, keywords.pop("threads", 0))
    return keywords


def add_dropout(options: dict, q: Tensor, state: Tensor) -> None:
    """Adds dropout's state, which the kernels read where q lies when they run.

    A GPU's call whose state is on the host gets its two numbers: nothing is copied, and nothing waits."""
    if q.is_cuda and not state.is_cuda:
        options["dropout_seed"], options["dropout_offset"] = seed_and_offset(state)
    else:
        options["dropout_state"] = state.to(q.device)


def add_place(options: dict, q: Tensor, threads: int = 0) -> None:
    """What computing where q lies takes: PyTorch's memory on a GPU, its threads on the CPU."""
    if q.is_cuda:
        options["workspace"] = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
        return
    options["threads"] = threads = threads or torch.get_num_threads()
    if threads > 1:
        options["openmp"] = True  # PyTorch's own threads, which spin for a while after each of its operators


class NotWhatEagerDoes(RuntimeError):
    """A captured call failed where an eager one would not: PyTorch's kernel in its place would be another program."""


def planned(run, direction: str, tensors: tuple, options: dict) -> None:
    """run(*tensors, **options). Under capture it refuses only what the plan refuses, as an eager call does."""
    try:
        run(*tensors, **options)
    except _core.Error as error:
        q, k, v, o, lse = tensors[:5]
        if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise
        _core.check(direction, q, k, v, o, lse, **{name: x for name, x in options.items() if name != "workspace"})
        raise NotWhatEagerDoes(f"while a CUDA graph is captured: {error}") from error


def output_shapes(q: Tensor, v: Tensor) -> Tuple[tuple, tuple]:
    """Shapes of o and lse: [B, Sq, Hq, Dv] and [B, Hq, Sq], or packed [Tq, Hq, Dv] and [Hq, Tq]."""
    if q.dim() == 4:
        batch, seqlen_q, heads, _ = q.shape
        return (batch, seqlen_q, heads, v.shape[-1]), (batch, heads, seqlen_q)
    if q.dim() == 3:
        rows, heads, _ = q.shape
        return (rows, heads, v.shape[-1]), (heads, rows)
    raise _core.Error(f"q: rank {q.dim()}, accepted [B, Sq, Hq, D], or [Tq, Hq, D] with cu_seqlens_q")


# Inference alone has these: what no backward pass has needs no lower digits.
_WITHOUT_GRADIENT = ("page_table", "page_indices", "tree_mask", "prefix_groups")


def keeps_low(options: Options) -> bool:
    """Whether a forward pass keeps what its LSE's rounding leaves out, for its backward pass."""
    standard = "standard" in str(options.get("kernel", ""))  # it stores its scores, and has no use for more of the LSE
    return not standard and not any(name in options for name in _WITHOUT_GRADIENT)


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, want_lse: bool = True, o: Optional[Tensor] = None,
    lse: Optional[Tensor] = None, by_heads: bool = False,
) -> Tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """o and lse, written where they are given. by_heads: q, k, v are [B, H, S, D], and o is [B, Sq, Hq, Dv]."""
    if forward_ad._current_level >= 0:
        refuse_tangents(q, k, v, *options.values())
    if by_heads:
        batch, heads, seqlen_q, _ = q.shape
        o = q.new_empty((batch, seqlen_q, heads, v.shape[-1]))
        lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
        _core.forward_by_heads(rows(q), rows(k), rows(v), o, lse, **_keywords(q, options))
        return o, lse
    o_shape, lse_shape = output_shapes(q, v)
    if o is None:
        o = _empty_twin(q) if o_shape == q.shape else q.new_empty(o_shape)
    if want_lse and lse is None:
        lse = q.new_empty(lse_shape, dtype=torch.float32)
    planned(_core.forward, "forward", (rows(q), rows(k), rows(v), o, lse), _keywords(q, options))
    return o, lse


def backward(
    d_o: Optional[Tensor], d_lse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    want_d_bias: bool, want_d_sink: bool, options: Options, by_heads: bool = False,
) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    """d_q, d_k, d_v, d_bias, d_sink; the last two are float32, None where they are not wanted. by_heads: as forward's."""
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
    d_q, d_k, d_v = twin(q), twin(k), twin(v)
    d_o = torch.zeros_like(o) if d_o is None else rows(d_o)
    tensors = (rows(q), rows(k), rows(v), rows(o), plain(lse), d_o, d_q, d_k, d_v)
    if by_heads:
        run(*tensors, **keywords)
    else:
        planned(run, "backward", tensors, keywords)
    return d_q, d_k, d_v, d_bias, d_sink
