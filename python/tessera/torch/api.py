"""`tessera.torch.attention`: one call for eager, compiled, exported and mapped programs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Dict, Literal, Optional, Sequence, Tuple, Union, overload

import torch
from torch import Tensor

from tessera import _core
from tessera._core import Error
from tessera._hints import with_options
from tessera._score import Mod

from . import dropout, kernels, ops, score_programs
from . import options as of_call
from .checks import check_tensor, scores_view

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tessera._options import Options


def _sink(sink: Tensor) -> Tensor:
    """In float32, as the kernels expect it; models keep it in their own dtype."""
    if not sink.is_floating_point():
        raise Error(f"sink: dtype {sink.dtype}, accepted floating-point ones")
    return sink.float()


def _autocast(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]
) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    """In autocast's dtype, if autocast is active."""
    device_type = q.device.type
    if q.is_meta or not torch.is_autocast_enabled(device_type) or q.dtype == torch.float64:
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(device_type)
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        bias = bias.to(dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype), bias


def check(q: Tensor, k: Tensor, v: Tensor, *, dropout_state: Optional[Tensor] = None, **options) -> None:
    """Raises the errors of `attention` for these arguments, named as in `tessera.attention`, except those that depend
    on data."""
    q, k, v, _ = _autocast(q, k, v, None)
    given = of_call.given("attention", options)
    if kernels.has_data(q):
        _core.check("forward", kernels.rows(q), kernels.rows(k), kernels.rows(v), **given)
    else:
        kernels.check("forward", q, k, v, given)


def _add_dropout(given: of_call.Options, q: Tensor, seed=None, offset=None) -> None:
    """Adds the state of a call with dropout, from the caller's arguments or from PyTorch's generator."""
    if "dropout_state" in given:
        dropout.check_state(given["dropout_state"], seed, offset)
    seed = None if seed is None else of_call.unsigned("dropout_seed", seed)
    offset = None if offset is None else of_call.unsigned("dropout_offset", offset)
    if "dropout_p" not in given:
        given.pop("dropout_state", None)
        return
    if "dropout_state" in given:
        return
    if seed is None and offset is not None:
        raise Error("dropout_offset: given without dropout_seed, accepted is both, or neither")
    if seed is None:
        given["dropout_state"] = dropout.new_state(q.device)
    else:
        given["dropout_state"] = dropout.given_state(seed, 0 if offset is None else offset, q.device)


_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _watched(*tensors: Optional[Tensor]) -> bool:
    """True if more than autograd must see the call."""
    return tensors[0].is_meta or dropout.traced() or not _PLAIN_TYPES.issuperset(map(type, tensors))


def attention_by_heads(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """`attention` of q, k, v [B, H, S, D], the layout of models, without tensor options: o is [B, Sq, Hq, Dv]. Three
    transposes take a fifth of the host's time of a call with gradients; here they are not nodes of autograd's graph."""
    alone = (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad)
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._is_any_autocast_enabled()
        and not _watched(q, k, v)
    )
    if not alone:
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
    given = of_call.given("attention", options)
    of_call.refuse_gradients(given)
    _add_dropout(given, q)
    return ops.apply_eager(q, k, v, None, None, given, 1, True)


def _by_rows(layout: str, **tensors: Tensor) -> Iterator[Tensor]:
    """[B, H, S, D] as [B, S, H, D], packed [H, T, D] as [T, H, D], or the reverse: views of the same memory."""
    if layout != "bhsd":
        raise Error(f'layout: {layout!r}, accepted "bshd", [B, S, H, D], or "bhsd", [B, H, S, D]')
    for name, tensor in tensors.items():
        if tensor.dim() < 3:
            raise Error(f"{name}: rank {tensor.dim()}, accepted [B, H, S, D], or packed [H, T, D]")
        yield tensor.transpose(-3, -2)


def _heads_first(
    layout: str, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, return_lse_low: bool, options: dict
):  # fmt: skip
    """`attention` of [B, H, S, D], packed [H, T, D]."""
    found = attention(*_by_rows(layout, q=q, k=k, v=v), return_lse=return_lse, return_lse_low=return_lse_low, **options)
    if isinstance(found, Tensor):
        return found.transpose(-3, -2)
    o, *others = found
    return (o.transpose(-3, -2), *others)


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, return_lse_low: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse_low: Literal[True],
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tuple[Tensor, Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], return_lse_low: Literal[False] = False,
    **options: Unpack[Options],
) -> Tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    return_lse_low: bool = False,
    **options: Unpack[Options],
) -> Union[Tensor, Tuple[Tensor, ...]]: ...


@functools.partial(with_options, without=("openmp",))
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, return_lse_low: bool = False, score_mod: Mod = None,
    mask_mod: Mod = None, captured: Optional[Dict[str, Any]] = None, **options: Unpack[Options],
) -> Union[Tensor, Tuple[Tensor, ...]]:  # fmt: skip
    """Exact attention, O = softmax(scale * Q K^T + ...) V, with gradients for q, k, v, bias and sink, through O and
    LSE.

    Shapes: q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], with Hq a multiple of Hkv; packed [T, H, D] with
    `cu_seqlens_q`, `cu_seqlens_k` (int32, [B + 1]); paged k, v [pages, page_size, Hkv, D] with `page_table` (int32, [B,
    max_pages], or `page_indptr` [B + 1] and `page_indices`) and `seqused_k` (int32, [B]); paged keys have no gradient.
    Dtypes: float32, float16, bfloat16, and float64 by the reference kernel. Strides are arbitrary; a tensor whose last
    dimension is not contiguous is copied. Under autocast, q, k, v are converted to its dtype.

    For query i and key j: s = scale * (q_i . k_j); softcap c > 0: s = c tanh(s / c); s += bias; ALiBi:
    s -= slope |i + Sk - Sq - j|; s = -inf where j is not visible.

    Args:
        Options, by keyword only:
        layout: "bshd", or "bhsd" if q, k, v and O are [B, H, S, D] as in SDPA (packed [H, T, D], pages [pages, Hkv,
            page_size, D]).
        scale: of the scores; 1 / sqrt(D) by default.
        causal: key j is visible to query i if j <= i + Sk - Sq, or j <= i with `top_left`.
        window: keys visible left and right of that diagonal, -1 = all.
        softcap: 0 = none.
        bias: [B|1, Hq|1, Sq|1, Sk] or its last dimensions, float32 or q's dtype.
        mask: bool, as bias, True = visible.
        block_mask: bool [B|1, Hq|1, ceil(Sq / mask_block[0]), ceil(Sk / mask_block[1])], True = visible.
        alibi_slopes: float32 [Hq] or [B, Hq].
        sink: [Hq], a logit that joins the denominator and the LSE.
        q_descale, k_descale, v_descale: float32 scales of 8-bit q, k, v, as in `tessera.attention`; without gradients,
            on the CPU.
        causal_seqs, tree_mask, prefix_groups, prefix_lens, max_prefix_k, max_suffix_k: as in `tessera.attention`; a
            tree mask and prefixes have no gradient.
        place_q, place_k, places, place_heads, total_heads_kv, first_sequence: where rows, heads and sequences are in a
            whole of which they are a part, as in `tessera.attention`.
        dropout_p: 0 <= p < 1. Seed and offset come from torch's generator, unless `dropout_seed` or `dropout_state`
            (int64 [2]: seed, offset) is given.
        max_seqlen_q, max_seqlen_k: upper bounds of a packed sequence, 0 = unknown; required with bias or masks on
            packed input.
        list_capacity: as in `tessera.attention`.
        deterministic: backward repeats its bits. batch_invariant: forward's bits do not depend on the batch.
        kernel: as in `tessera.attention`; a kernel for one direction can be given only for a call without gradients.
        threads: 0 = torch.get_num_threads().
        score_mod, mask_mod, captured: a program of one (query, key) pair, as in `tessera.attention`: a text, or a
            function with the arguments of FlexAttention's. Tensors that it captures have gradients.
        return_lse: also return LSE, float32 [B, Hq, Sq] or packed [Hq, Tq]; -inf if a query sees no key.
        return_lse_low: also return the rounding error of the LSE, float32 with its shape, for `combine` and
            `tessera.attention_backward`; it has no gradient.

    Returns:
        O [B, Sq, Hq, Dv] or [Tq, Hq, Dv] in q's dtype; with `return_lse` (O, LSE), with `return_lse_low` (O, LSE,
            rounding error of the LSE).

    Raises:
        tessera.Error: (a ValueError) an argument is wrong; one line names it, what was given and what is accepted.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
    layout = options.pop("layout", "bshd")
    programmed = score_mod is not None or mask_mod is not None or bool(captured)
    if layout != "bshd":
        if programmed:
            options.update(score_mod=score_mod, mask_mod=mask_mod, captured=captured)
        return _heads_first(layout, q, k, v, return_lse, return_lse_low, options)
    seed, offset = options.pop("dropout_seed", None), options.pop("dropout_offset", None)
    given = of_call.given("attention", options) if options else {}
    if given:
        of_call.refuse_gradients(given)
    bias, sink = given.pop("bias", None), given.pop("sink", None)
    compiling = torch.compiler.is_compiling()
    if compiling or torch._C._is_any_autocast_enabled():
        q, k, v, bias = _autocast(q, k, v, bias)
    # Sk is known only for dense keys.
    seqlen_k = k.shape[1] if k.dim() == 4 and "page_table" not in given and "page_indices" not in given else None
    if bias is not None:
        bias = scores_view("bias", bias, seqlen_k)
    if "mask" in given:
        given["mask"] = scores_view("mask", given["mask"], seqlen_k)
    if sink is not None:
        sink = _sink(sink)
    if given or seed is not None or offset is not None:
        _add_dropout(given, q, seed, offset)
    functorch = not compiling and torch._C._functorch.peek_interpreter_stack() is not None
    if return_lse_low and q.dim() in (3, 4) and not kernels.keeps_low(given):
        raise Error(
            "return_lse_low: True, accepted False: a call without a backward pass (pages, tree_mask, prefix_groups) "
            "writes no "
            "lse_low"
        )
    results = 3 if return_lse_low else 2 if return_lse else 1
    if programmed:
        return score_programs.attention(q, k, v, bias, sink, given, results, score_mod, mask_mod, captured)
    if functorch or _watched(q, k, v, bias, sink):
        operator = ops.Transformable.apply if functorch else ops.attention_forward
        found = operator(q, k, v, *of_call.pack({**given, "bias": bias, "sink": sink}))
        return found[0] if results == 1 else tuple(found[:results])
    differentiable = (
        q.requires_grad or k.requires_grad or v.requires_grad
        or (bias is not None and bias.requires_grad) or (sink is not None and sink.requires_grad)
    )  # fmt: skip
    if differentiable and torch.is_grad_enabled():
        return ops.apply_eager(q, k, v, bias, sink, given, results)
    if bias is not None:
        given["bias"] = bias
    if sink is not None:
        given["sink"] = sink
    if return_lse_low:
        given["lse_low"] = low = q.new_empty(kernels.output_shapes(q, v)[1], dtype=torch.float32)
    o, lse = kernels.forward(q, k, v, given, want_lse=results > 1)
    return o if results == 1 else (o, lse) if results == 2 else (o, lse, low)


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Optional[Tensor], *, d_lse: Optional[Tensor] = None,
    lse_low: Optional[Tensor] = None, grad_bias: bool = False, grad_sink: bool = False,
    grad_captured: Union[bool, Sequence[str]] = False, score_mod: Mod = None, mask_mod: Mod = None,
    captured: Optional[Dict[str, Any]] = None, **options: Unpack[Options],
) -> Tuple[Any, ...]:  # fmt: skip
    """`tessera.attention_backward` of tensors: returns d_q, d_k, d_v, d_bias, d_sink, d_captured; their own derivative
    is refused."""
    for name, tensor in dict(q=q, k=k, v=v, o=o, lse=lse, d_o=d_o, d_lse=d_lse, lse_low=lse_low).items():
        if tensor is not None or name not in ("d_lse", "lse_low"):
            check_tensor(name, tensor)
    layout = options.pop("layout", "bshd")
    if layout != "bshd":
        q, k, v, o, d_o = _by_rows(layout, q=q, k=k, v=v, o=o, d_o=d_o)
        wanted = {"d_lse": d_lse, "lse_low": lse_low, "grad_bias": grad_bias, "grad_sink": grad_sink}
        wanted.update(grad_captured=grad_captured, score_mod=score_mod, mask_mod=mask_mod, captured=captured)
        d_q, d_k, d_v, *others = attention_backward(q, k, v, o, lse, d_o, **wanted, **options)
        return (*_by_rows(layout, d_q=d_q, d_k=d_k, d_v=d_v), *others)
    seed, offset = options.pop("dropout_seed", None), options.pop("dropout_offset", None)
    given = of_call.given("attention_backward", options)
    for name, wanted in (("bias", grad_bias), ("sink", grad_sink)):
        if wanted and name not in given:
            raise Error(f"grad_{name}: True without {name}, accepted only with it")
    if "dropout_p" in given and seed is None and "dropout_state" not in given:
        seed = 0  # the library's default: the forward pass determines it
    _add_dropout(given, q, seed, offset)
    inputs = (q, k, v, o, lse, d_o, d_lse, lse_low, *given.values())
    if "sink" in given:
        given["sink"] = _sink(given["sink"])
    bound = score_programs.bind(score_mod, mask_mod, captured)
    if bound is not None or grad_captured is not False:
        if lse_low is not None:
            given["lse_low"] = lse_low
        return score_programs.attention_backward(
            d_o, d_lse, q, k, v, o, lse, grad_bias, grad_sink, grad_captured, given, bound
        )
    if kernels.seen_by_others(*(x for x in inputs if isinstance(x, Tensor))) or not all(map(kernels.has_data, inputs)):
        operator = ops.FirstDerivative.apply if torch.is_grad_enabled() else ops.attention_backward
        bias = given.get("bias")
        given.update({name: x[(None,) * (4 - x.dim())] for name, x in given.items() if name in ("bias", "mask")})
        found = operator(d_o, d_lse, q, k, v, o, lse, lse_low, grad_bias, grad_sink, *of_call.pack(given))
        d_q, d_k, d_v, d_bias, d_sink = found
        return d_q, d_k, d_v, d_bias.reshape(bias.shape) if grad_bias else None, d_sink if grad_sink else None, None
    if lse_low is not None:
        given["lse_low"] = lse_low
    gradients = kernels.backward(d_o, d_lse, q, k, v, o, lse, grad_bias, grad_sink, given)
    return (*ops.refuse_second_derivatives(gradients, *inputs), None)
