"""`tessera.torch.attention`: one call for eager, compiled, exported and mapped programs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal, Optional, Tuple, Union, overload

import torch
from torch import Tensor

from tessera import _core
from tessera._core import Error
from tessera._hints import with_options

from . import dropout, kernels, ops
from . import options as of_call
from .checks import check_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tessera._options import Options


def _scores(name: str, tensor: Optional[Tensor], seqlen_k: Optional[int]) -> Optional[Tensor]:
    """A bias or mask as [B|1, Hq|1, Sq|1, Sk] without copying: leading dimensions appear, a last one of 1 expands."""
    if tensor is None:
        return None
    if not 1 <= tensor.dim() <= 4:
        raise Error(f"{name}: rank {tensor.dim()}, accepted [B|1, Hq|1, Sq|1, Sk] and its last dimensions")
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    if seqlen_k is not None and tensor.shape[-1] == 1 and seqlen_k != 1:
        tensor = tensor.expand(*tensor.shape[:-1], seqlen_k)
    return tensor


def _autocast(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]
) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    """In the dtype of autocast, where that is on."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type) or q.dtype == torch.float64:
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(device_type)
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        bias = bias.to(dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype), bias


def check(q: Tensor, k: Tensor, v: Tensor, *, dropout_state: Optional[Tensor] = None, **options) -> None:
    """Raises what `attention` would for these arguments, whose names are `tessera.attention`'s, but for what data tell."""
    q, k, v, _ = _autocast(q, k, v, None)
    _core.check("forward", kernels.rows(q), kernels.rows(k), kernels.rows(v), **of_call.given("attention", options))


def _add_dropout(given: of_call.Options, q: Tensor, seed: Optional[int] = None, offset: int = 0) -> None:
    if "dropout_p" not in given:
        given.pop("dropout_state", None)
    elif "dropout_state" not in given:
        drawn = seed is None
        given["dropout_state"] = dropout.new_state(q.device) if drawn else dropout.given_state(seed, offset, q.device)


_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _watched(*tensors: Optional[Tensor]) -> bool:
    """Whether more than autograd wants to see the call."""
    return tensors[0].is_meta or dropout.traced() or not _PLAIN_TYPES.issuperset(map(type, tensors))


def attention_by_heads(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """`attention` of q, k, v [B, H, S, D], as models have them, and no option that is a tensor: o [B, Sq, Hq, Dv]. Three transposes are
    a fifth of the host's time of a call with gradients; here they are no nodes of autograd's graph."""
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
    _add_dropout(given, q)
    return ops.apply_eager(q, k, v, None, None, given, False, True)


def _heads_first(layout: str, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, options: dict):
    """`attention` of [B, H, S, D], packed [H, T, D]: views of the same memory."""
    if layout != "bhsd":
        raise Error(f'layout: {layout!r}, accepted "bshd", [B, S, H, D], or "bhsd", [B, H, S, D]')
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() < 3:
            raise Error(f"{name}: rank {tensor.dim()}, accepted [B, H, S, D], or packed [H, T, D]")
    q, k, v = (tensor.transpose(-3, -2) for tensor in (q, k, v))
    if not return_lse:
        return attention(q, k, v, **options).transpose(-3, -2)
    o, lse = attention(q, k, v, return_lse=True, **options)
    return o.transpose(-3, -2), lse


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> Tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Union[Tensor, Tuple[Tensor, Tensor]]: ...
@functools.partial(with_options, without=("openmp",))
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[Options]
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Exact attention, O = softmax(scale * Q K^T + ...) V, with gradients for q, k, v, bias and sink, through O and LSE.

    Shapes: q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], with Hq a multiple of Hkv; packed [T, H, D] with
    `cu_seqlens_q`, `cu_seqlens_k` (int32, [B + 1]); paged k, v [pages, page_size, Hkv, D] with `page_table` (int32,
    [B, max_pages], or `page_indptr` [B + 1] and `page_indices`) and `seqused_k` (int32, [B]); paged keys have no gradient.
    Dtypes: float32, float16, bfloat16, and float64 by the reference kernel. Any strides; a last dimension that is not
    contiguous is copied. Under autocast q, k, v take autocast's dtype.

    For query i and key j: s = scale * (q_i . k_j); softcap c > 0: s = c tanh(s / c); s += bias; ALiBi:
    s -= slope |i + Sk - Sq - j|; s = -inf where j is not visible.

    Args:
        options, all by name:
        layout: "bshd", or "bhsd" where q, k, v and O are [B, H, S, D], as SDPA has them (packed [H, T, D], pages
            [pages, Hkv, page_size, D]).
        scale: of the scores; 1 / sqrt(D) by default.
        causal: key j is visible to query i if j <= i + Sk - Sq, or j <= i with `top_left`.
        window: keys visible left and right of that diagonal, -1 = all.
        softcap: 0 = none.
        bias: [B|1, Hq|1, Sq|1, Sk] or its last dimensions, float32 or q's dtype.
        mask: bool, as bias, True = visible.
        block_mask: bool [B|1, Hq|1, ceil(Sq / mask_block[0]), ceil(Sk / mask_block[1])], True = visible.
        alibi_slopes: float32 [Hq] or [B, Hq].
        sink: [Hq], a logit that joins the denominator and the LSE.
        causal_seqs, tree_mask, prefix_groups, prefix_lens, max_prefix_k, max_suffix_k: as `tessera.attention` has them; a tree
            mask and prefixes have no gradient.
        dropout_p: 0 <= p < 1. Seed and offset come from torch's generator, unless `dropout_seed` or `dropout_state`
            (int64 [2]: seed, offset) gives them.
        max_seqlen_q, max_seqlen_k: bounds of a packed sequence, 0 = unknown; required with bias or masks on packed input.
        deterministic: backward repeats its bits. batch_invariant: forward's bits do not depend on the batch.
        kernel: as `tessera.attention` has it; for a call without gradients, where it is one pass's.
        threads: 0 = torch.get_num_threads().
        return_lse: also return LSE, float32 [B, Hq, Sq] or packed [Hq, Tq]; -inf where a query sees nothing.

    Returns:
        O [B, Sq, Hq, Dv] or [Tq, Hq, Dv] in q's dtype; with `return_lse` the pair (O, LSE).

    Raises:
        tessera.Error: (a ValueError) an argument is wrong; one line names it, what was given and what is accepted.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
    layout = options.pop("layout", "bshd")
    if layout != "bshd":
        return _heads_first(layout, q, k, v, return_lse, options)
    seed, offset = options.pop("dropout_seed", None), options.pop("dropout_offset", 0)
    given = of_call.given("attention", options) if options else {}
    bias, sink = given.pop("bias", None), given.pop("sink", None)
    compiling = torch.compiler.is_compiling()
    if compiling or torch._C._is_any_autocast_enabled():
        q, k, v, bias = _autocast(q, k, v, bias)
    # Only dense keys tell Sk.
    seqlen_k = k.shape[1] if k.dim() == 4 and "page_table" not in given and "page_indices" not in given else None
    if bias is not None:
        bias = _scores("bias", bias, seqlen_k)
    if "mask" in given:
        given["mask"] = _scores("mask", given["mask"], seqlen_k)
    if sink is not None:
        if not sink.is_floating_point():
            raise Error(f"sink: dtype {sink.dtype}, accepted floating-point ones")
        sink = sink.float()
    _add_dropout(given, q, seed, offset)
    functorch = not compiling and torch._C._functorch.peek_interpreter_stack() is not None
    if functorch or _watched(q, k, v, bias, sink):
        operator = ops.Transformable.apply if functorch else ops.attention_forward
        o, lse = operator(q, k, v, *of_call.pack({**given, "bias": bias, "sink": sink}))
    elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, bias, sink)):
        return ops.apply_eager(q, k, v, bias, sink, given, return_lse)
    else:
        if bias is not None:
            given["bias"] = bias
        if sink is not None:
            given["sink"] = sink
        o, lse = kernels.forward(q, k, v, given, want_lse=return_lse)
    return (o, lse) if return_lse else o
