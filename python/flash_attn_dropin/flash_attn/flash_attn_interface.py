"""The functions of flash_attn 2.8.4, on Tessera.

Where Tessera's own meaning differs, flash_attn's applies: the LSE of a row that sees no key is +inf, and with dropout a
third value S_dmask shows what was dropped (_dmask.py).
"""

from typing import Optional, Tuple, Union

import torch

from flash_attn._call import (
    attend,
    operator,
    private_backward,
    private_backward_fake,
    private_forward,
    private_forward_fake,
    results,
)
from flash_attn._dmask import block_size_n as _get_block_size_n  # noqa: F401  (its tests read S_dmask by it)
from flash_attn._kvcache import attend_cache

USE_TRITON_ROCM = False


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    s_aux=None,
):
    """Attention of q [B, Sq, Hq, D] with k, v [B, Sk, Hkv, D]; causal and window are bottom-right aligned.

    s_aux [Hq] is a logit that joins each head's denominator. Returns out [B, Sq, Hq, D], or with return_attn_probs out,
    LSE [B, Hq, Sq] and S_dmask.
    """
    call = attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, s_aux
    )  # fmt: skip
    return results(call, return_attn_probs)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """flash_attn_func with kv [B, Sk, 2, Hkv, D]."""
    k, v = kv.unbind(dim=2)
    call = attend(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return results(call, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """flash_attn_func with qkv [B, S, 3, H, D]."""
    q, k, v = qkv.unbind(dim=2)
    call = attend(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return results(call, return_attn_probs)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    *,
    s_aux=None,
):
    """Packed sequences: q [Tq, Hq, D], k, v [Tk, Hkv, D], cu_seqlens int32 [B + 1].

    With block_table int32 [B, max_pages], k and v are [pages, page_size, Hkv, D]. Returns out [Tq, Hq, D], or with
    return_attn_probs out, LSE [Hq, Tq] and S_dmask.
    """
    call = attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, s_aux,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table,
    )  # fmt: skip
    return results(call, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """flash_attn_varlen_func with kv [Tk, 2, Hkv, D]."""
    k, v = kv.unbind(dim=1)
    call = attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, None,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    return results(call, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """flash_attn_varlen_func with qkv [T, 3, H, D]."""
    q, k, v = qkv.unbind(dim=1)
    call = attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, None,
        cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
    )  # fmt: skip
    return results(call, return_attn_probs)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens: Optional[Union[int, torch.Tensor]] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Attention of q [B, Sq, Hq, D] with a cache, to which k, v [B, S_new, Hkv, D] are first appended in place.

    k_cache, v_cache [B_cache, Sk, Hkv, D], or [pages, page_size, Hkv, D] with block_table int32 [B, max_pages].
    cache_seqlens: an int or int32 [B], the number of keys already in the cache. cache_batch_idx int32 [B]: the cache
    row of each sequence. cache_leftpad int32 [B]: the first key in use. rotary_cos, rotary_sin [S_max, rotary_dim / 2]
    rotate k at positions cache_seqlens + i, and q at the same positions if causal or windowed, otherwise all of q at
    cache_seqlens. num_splits is a hint that the plan does not need. No gradients. Returns out [B, Sq, Hq, D], or with
    return_softmax_lse out and LSE [B, Hq, Sq].
    """
    out, lse = attend_cache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


# ---- functions for frameworks with their own backward pass -----------------------------------------------------------


def _attend(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
) -> tuple:  # fmt: skip
    """The arguments of the next function as a call, and return_softmax."""
    window_size = (window_size_left, window_size_right)
    return attend(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes), return_softmax


@operator((), lambda *arguments: private_forward_fake(*_attend(*arguments)))
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: Optional[float],
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    return_softmax: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, LSE, S_dmask, rng_state (int64 [2])."""
    return private_forward(
        *_attend(
            q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            return_softmax,
        )
    )  # fmt: skip


def _attend_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0,
) -> tuple:  # fmt: skip
    """The arguments of the next function as a call, and return_softmax."""
    if block_table is not None and num_splits > 1:
        raise RuntimeError(
            f"num_splits: {num_splits}, num_splits > 1 is not supported with block_table: accepted 0 and 1"
        )
    if leftpad_k is not None and block_table is not None:
        raise ValueError("leftpad_k: given together with block_table, accepted is one of them")
    call = attend(
        q, k, v, dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes, False,
        None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k, leftpad_k,
    )  # fmt: skip
    return call, return_softmax


@operator((), lambda *arguments: private_forward_fake(*_attend_varlen(*arguments)))
def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: Optional[float],
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, LSE, S_dmask, rng_state (int64 [2]). leftpad_k int32 [B]: the first key of each sequence in use.

    num_splits is a hint that the plan does not need; as in flash_attn, more than one is refused with block_table.
    """
    return private_forward(
        *_attend_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size_left, window_size_right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k,
            seqused_k, zero_tensors, num_splits,
        )
    )  # fmt: skip


def _backward_arguments(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
) -> tuple:  # fmt: skip
    return (
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        (window_size_left, window_size_right), softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip


@operator(("dq", "dk", "dv"), lambda *arguments: private_backward_fake(*_backward_arguments(*arguments)))
def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Optional[torch.Tensor],
    dk: Optional[torch.Tensor],
    dv: Optional[torch.Tensor],
    dropout_p: float,
    softmax_scale: Optional[float],
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    deterministic: bool,
    rng_state: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Writes dq, dk, dv; returns softmax_d, the row sums of dout * out, float32 [B, Hq, Sq]."""
    return private_backward(
        *_backward_arguments(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
            window_size_right, softcap, alibi_slopes, deterministic, rng_state,
        )
    )  # fmt: skip


def _varlen_backward_fake(*arguments) -> torch.Tensor:
    first, cu_seqlens, longest, rest = arguments[:9], arguments[9:11], arguments[11:13], arguments[13:22]
    return private_backward_fake(*_backward_arguments(*first, *rest), cu_seqlens=cu_seqlens, longest=longest)


@operator(("dq", "dk", "dv"), _varlen_backward_fake)
def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Optional[torch.Tensor],
    dk: Optional[torch.Tensor],
    dv: Optional[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: Optional[float],
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    deterministic: bool,
    rng_state: Optional[torch.Tensor] = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Writes dq, dk, dv; returns softmax_d, float32 [Hq, Tq]."""
    arguments = _backward_arguments(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip
    cu_seqlens, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return private_backward(*arguments, cu_seqlens=cu_seqlens, longest=longest)
