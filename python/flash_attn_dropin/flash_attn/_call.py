"""One call of Tessera in flash_attn's terms: arguments, the LSE of empty rows, the private pair of functions."""

import dataclasses
import functools
import math
from typing import Callable, Optional

import torch
from tessera.torch import attention
from tessera.torch import kernels
from tessera.torch.dropout import new_state
from tessera.torch.ops import refuse_second_derivatives
from tessera.torch.options import given, integer
from torch import Tensor

from flash_attn._dmask import s_dmask, s_dmask_shape


@dataclasses.dataclass
class Call:
    """The inputs and results of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict  # those of tessera.torch.attention
    out: Tensor
    lse: Tensor  # -inf if a row sees no key


def window_of(window_size) -> tuple:
    left, right = (-1 if side is None else integer("window_size", side) for side in window_size)
    return (max(left, -1), max(right, -1))


def lse_of(lse: Tensor) -> Tensor:
    """flash_attn's LSE: +inf if a row sees no key."""
    return torch.where(lse == -math.inf, math.inf, lse)


def _slopes(alibi_slopes: Optional[Tensor]) -> Optional[Tensor]:
    return None if alibi_slopes is None else alibi_slopes.float()


def counts_from(leftpad: Tensor, num_keys: int) -> Tensor:
    """True for keys after their sequence's padding: bool [B, 1, 1, num_keys]."""
    return (torch.arange(num_keys, device=leftpad.device) >= leftpad[:, None])[:, None, None, :]


def _without_padding(v: Tensor, cu_seqlens: Tensor, leftpad: Tensor) -> Tensor:
    """A copy of packed v [Tk, Hkv, Dv] with zeros in the first leftpad[b] rows of each sequence.

    A hidden key's probability is 0, but 0 * NaN is NaN when whole tiles are multiplied.
    """
    cu_seqlens = cu_seqlens.to(torch.int64)
    rows = torch.arange(v.shape[0], device=v.device)
    # Rows after the last sequence belong to none, and are never read.
    sequence = torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp(max=leftpad.shape[0] - 1)
    padded = rows < cu_seqlens[sequence] + leftpad[sequence]
    return v.masked_fill(padded[:, None, None], 0)


def options_of(
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, s_aux, dropout_state
) -> dict:  # fmt: skip
    return dict(
        dropout_p=dropout_p,
        dropout_state=dropout_state,
        scale=softmax_scale,
        causal=causal,
        window=window_of(window_size),
        softcap=softcap,
        alibi_slopes=_slopes(alibi_slopes),
        deterministic=deterministic,
        sink=s_aux,
    )


def attend(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic=False, s_aux=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, block_table=None, seqused_k=None,
    leftpad_k=None,
) -> Call:  # fmt: skip
    dropout_state = new_state(q.device) if dropout_p > 0 else None
    options = options_of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, s_aux, dropout_state
    )
    if cu_seqlens_q is not None:
        # The lengths may be 0-d tensors, and remain so in a compiled program.
        longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        if not torch.compiler.is_compiling():
            longest = {name: integer(name, length) for name, length in longest.items()}
        options.update(cu_seqlens_q=cu_seqlens_q, **longest)
        if block_table is None:
            options.update(cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
        else:
            lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1] if seqused_k is None else seqused_k
            options.update(page_table=block_table, seqused_k=lengths)
    if leftpad_k is not None:
        # Causal masks, windows and ALiBi are measured from a sequence's last key, so padding does not change them.
        options["mask"] = counts_from(leftpad_k, integer("max_seqlen_k", max_seqlen_k))
        v = _without_padding(v, cu_seqlens_k, leftpad_k)
    out, lse = attention(q, k, v, return_lse=True, **options)
    return Call(q, k, v, options, out, lse)


def results(call: Call, return_attn_probs: bool):
    return (call.out, lse_of(call.lse), s_dmask(call.q, call.k, call.options)) if return_attn_probs else call.out


# ---- the private pair -----------------------------------------------------------------------------------------------


def operator(mutates_args: tuple, fake: Callable) -> Callable:
    """Also registers a function as an operator, torch.ops.flash_attn.<its name>, for tracers, fake and meta tensors."""

    def decorate(function: Callable) -> Callable:
        seen = torch.library.custom_op(f"flash_attn::{function.__name__}", function, mutates_args=mutates_args)
        seen.register_fake(fake)

        @functools.wraps(function)
        def call(*arguments, **options):
            tensors = (*arguments, *options.values())
            traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
            return (seen if traced or not all(map(kernels.has_data, tensors)) else function)(*arguments, **options)

        return call

    return decorate


def private_forward(call: Call, return_softmax: bool):
    state = call.options["dropout_state"]
    state = torch.zeros(2, dtype=torch.int64, device=call.q.device) if state is None else state.to(call.q.device)
    dmask = s_dmask(call.q, call.k, call.options) if return_softmax else call.q.new_empty(0)
    return call.out, lse_of(call.lse), dmask, state


def private_forward_fake(call: Call, return_softmax: bool):
    dmask = call.q.new_empty(s_dmask_shape(call.q, call.k, call.options) if return_softmax else (0,))
    return call.out, call.lse, dmask, torch.empty(2, dtype=torch.int64, device=call.q.device)


def _backward_options(
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, rng_state, cu_seqlens_q,
    cu_seqlens_k, max_seqlen_q, max_seqlen_k,
) -> dict:  # fmt: skip
    if dropout_p > 0 and rng_state is None:
        raise ValueError("rng_state: None with dropout, accepted is what the forward call returned")
    return given(
        "_flash_attn_backward",
        dict(
            alibi_slopes=_slopes(alibi_slopes), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            dropout_state=rng_state, scale=softmax_scale, causal=causal, window=window_of(window_size), softcap=softcap,
            dropout_p=dropout_p, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, deterministic=deterministic,
        ),
    )  # fmt: skip


def private_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, *options, cu_seqlens=(None,) * 2, longest=(0, 0)
) -> Tensor:
    given = _backward_options(*options, *cu_seqlens, *longest)
    lse = torch.where(softmax_lse == math.inf, -math.inf, softmax_lse)
    gradients = kernels.backward(dout, None, q, k, v, out, lse, False, False, given)
    gradients = refuse_second_derivatives(gradients[:3], dout, q, k, v)
    for target, gradient in zip((dq, dk, dv), gradients):
        if target is not None:
            target.copy_(gradient)
    return (dout.float() * out.float()).sum(dim=-1).transpose(-1, -2).contiguous()


def private_backward_fake(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, *options, cu_seqlens=(None,) * 2, longest=(0, 0)
) -> Tensor:
    given = _backward_options(*options, *cu_seqlens, *longest)
    kernels.check("backward", q, k, v, given, o=out, lse=softmax_lse, d_o=dout)
    return softmax_lse.new_empty(kernels.output_shapes(q, v)[1])
