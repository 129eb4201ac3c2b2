"""`tessera.torch.attention`: one call for eager, compiled, exported and mapped programs."""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from tessera import _core
from tessera._core import Error

from . import kernels, ops


def _scores(name: str, tensor: Optional[Tensor], seqlen_k: Optional[int]) -> Optional[Tensor]:
    """A bias or mask as [B|1, Hq|1, Sq|1, Sk] without copying: leading dimensions appear, a last one of 1 expands."""
    if tensor is None:
        return None
    kernels.check_tensor(name, tensor)
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


def _check_pair(name: str, pair: Tuple[int, int]) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise Error(f"{name}: {pair!r}, accepted a pair of integers")


def new_dropout_state(device: torch.device) -> Tensor:
    """A seed and an offset from PyTorch's generator: int64 [2], repeated by torch.manual_seed."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def check(q: Tensor, k: Tensor, v: Tensor, *, dropout_state: Optional[Tensor] = None, **options) -> None:
    """Raises what `attention` would for these arguments, whose names are `tessera.attention`'s, but for what data tell."""
    q, k, v, _ = _autocast(q, k, v, None)
    given = {name: value for name, value in options.items() if value is not None}
    _core.check("forward", kernels.rows(q), kernels.rows(k), kernels.rows(v), **given)


_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _traced() -> bool:
    """Whether a tracer or a mode must see the call."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: Optional[float] = None,
    causal: bool = False,
    top_left: bool = False,
    window: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    block_mask: Optional[Tensor] = None,
    mask_block: Tuple[int, int] = (0, 0),
    alibi_slopes: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    dropout_seed: Optional[int] = None,
    dropout_offset: int = 0,
    dropout_state: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    deterministic: bool = False,
    batch_invariant: bool = False,
    kernel: str = "auto",
    threads: int = 0,
    return_lse: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Exact attention, O = softmax(scale * Q K^T + ...) V, with gradients for q, k, v, bias and sink, through O and LSE.

    Shapes: q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], with Hq a multiple of Hkv; packed [T, H, D] with
    `cu_seqlens_q`, `cu_seqlens_k` (int32, [B + 1]); paged k, v [pages, page_size, Hkv, D] with `page_table` (int32,
    [B, max_pages]) and `seqused_k` (int32, [B]); paged keys have no gradient. Dtypes: float32, float16, bfloat16, and
    float64 by the reference kernel. Any strides; a last dimension that is not contiguous is copied. Under autocast
    q, k, v take autocast's dtype.

    For query i and key j: s = scale * (q_i . k_j); softcap c > 0: s = c tanh(s / c); s += bias; ALiBi:
    s -= slope |i + Sk - Sq - j|; s = -inf where j is not visible.

    Args:
        scale: of the scores; 1 / sqrt(D) by default.
        causal: key j is visible to query i if j <= i + Sk - Sq, or j <= i with `top_left`.
        window: keys visible left and right of that diagonal, -1 = all.
        softcap: 0 = none.
        bias: [B|1, Hq|1, Sq|1, Sk] or its last dimensions, float32 or q's dtype.
        mask: bool, as bias, True = visible.
        block_mask: bool [B|1, Hq|1, ceil(Sq / mask_block[0]), ceil(Sk / mask_block[1])], True = visible.
        alibi_slopes: float32 [Hq] or [B, Hq].
        sink: [Hq], a logit that joins the denominator and the LSE.
        dropout_p: 0 <= p < 1. Seed and offset come from torch's generator, unless `dropout_seed` or `dropout_state`
            (int64 [2]: seed, offset) gives them.
        max_seqlen_q, max_seqlen_k: longest packed sequence, 0 = unknown; required with bias or masks on packed input.
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
        kernels.check_tensor(name, tensor)
    _check_pair("window", window)
    _check_pair("mask_block", mask_block)
    compiling = torch.compiler.is_compiling()
    if compiling or torch._C._is_any_autocast_enabled():
        q, k, v, bias = _autocast(q, k, v, bias)
    # Only dense keys tell Sk.
    seqlen_k = k.shape[1] if k.dim() == 4 and page_table is None else None
    if bias is not None:
        bias = _scores("bias", bias, seqlen_k)
    if mask is not None:
        mask = _scores("mask", mask, seqlen_k)
    if sink is not None:
        kernels.check_tensor("sink", sink)
        if not sink.is_floating_point():
            raise Error(f"sink: dtype {sink.dtype}, accepted floating-point ones")
        sink = sink.float()
    if dropout_p == 0.0:
        dropout_state = None
    elif dropout_state is not None:
        kernels.check_tensor("dropout_state", dropout_state)
    else:
        if dropout_seed is None:
            dropout_state = new_dropout_state(q.device)
        else:
            signed = [x - 2**64 if x >= 2**63 else x for x in (dropout_seed, dropout_offset)]
            dropout_state = torch.tensor(signed, dtype=torch.int64, device=q.device)
    tensors = (
        mask, block_mask, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, dropout_state
    )  # fmt: skip
    settings = (
        scale, causal, top_left, window[0], window[1], softcap, mask_block[0], mask_block[1], dropout_p, max_seqlen_q,
        max_seqlen_k, deterministic, batch_invariant, kernel, threads,
    )  # fmt: skip
    if not compiling and torch._C._functorch.peek_interpreter_stack() is not None:
        o, lse = ops.Transformable.apply(q, k, v, bias, sink, *tensors, *settings)
    elif q.is_meta or _traced() or not _PLAIN_TYPES.issuperset((type(q), type(k), type(v), type(bias), type(sink))):
        o, lse = ops.attention_forward(q, k, v, bias, sink, *tensors, *settings)
    elif torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
    ):
        return ops.apply_eager(q, k, v, bias, sink, (tensors, settings), return_lse)
    else:
        o, lse = kernels.forward(q, k, v, bias, sink, *tensors, *settings, want_lse=return_lse)
    return (o, lse) if return_lse else o
