"""PyTorch's own attention operators, computed by Tessera: their arguments, their outputs and the outputs' layouts.

Each function has an operator's arguments and returns the outputs of its kernels, as defined by PyTorch's shape
functions. Dense tensors are [B, H, S, D] here. Unsupported arguments raise `Refused`, or the library's own error.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from tessera import _core

from . import dropout, kernels
from . import options as of_call

# Memory-efficient attention pads the rows of its LSE, and those of the gradient of its bias, to full vectors.
_LSE_ALIGNMENT = 32
_BIAS_ALIGNMENT = 16
_BY_ROWS = (0, 2, 1, 3)  # memory in the order [B, S, H, D]

# An LSE computed here has this storage offset in elements; PyTorch's own never do. By this a backward operator knows
# which implementation computed the forward pass, whatever is active by then, without waiting for a GPU.
_LSE_OFFSET = 16


def is_ours(lse: Tensor, offset: Optional[Tensor] = None) -> bool:
    """True if Tessera computed the forward pass that returned `lse` and `offset` of dropout's state.

    Hooks on saved tensors may have copied the LSE; the offset of a state on the host is then used."""
    marked = lse.storage_offset() == _LSE_OFFSET
    return marked or (offset is not None and offset.numel() > 0 and dropout.is_ours(offset) is True)


def _new_lse(query: Tensor, shape: tuple, order: Optional[tuple] = None) -> Tensor:
    """Uninitialised, float32; `order`: its axes in memory, the outermost first."""
    strides, elements = [0] * len(shape), 1
    for axis in reversed(order or range(len(shape))):
        strides[axis] = elements
        elements *= shape[axis]
    memory = query.new_empty((elements + _LSE_OFFSET,), dtype=torch.float32)
    return memory.as_strided(shape, strides, _LSE_OFFSET)


class Refused(NotImplementedError):
    """Raised if PyTorch's own kernel must compute the call."""


def _check(query: Tensor, return_debug_mask: bool = False) -> None:
    if query.dtype == torch.float64:
        raise Refused("query: dtype float64, which Tessera serves by its slow reference kernel")
    if return_debug_mask:
        raise Refused("return_debug_mask: True, accepted False")


def _check_no_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise Refused("dropout_p: not 0, in an operator that returns no seed")


def _check_first_derivative(*tensors: Optional[Tensor]) -> None:
    """PyTorch's own node refuses a second derivative wherever autograd records the backward operator."""
    if kernels.in_detached_double_backward(*tensors):
        raise RuntimeError("scaled_dot_product_attention: a second derivative was asked for, accepted is the first")


def _check_head_sizes(query: Tensor, value: Tensor) -> None:
    if value.shape[-1] != query.shape[-1]:
        raise Refused("value: a head size other than query's")


def _new_state(query: Tensor, dropout_p: float) -> Optional[Tensor]:
    return dropout.new_state(query.device) if dropout_p else None


def _saved_state(dropout_p: float, seed: Tensor, offset: Tensor) -> Optional[Tensor]:
    """Dropout's state of the forward pass."""
    return torch.stack((seed.view(torch.int64), offset.view(torch.int64))) if dropout_p else None


def _round_up(length: int, alignment: int) -> int:
    return (length + alignment - 1) // alignment * alignment


def _transposed(tensor: Tensor) -> Tensor:
    """[B, H, S, D] as [B, S, H, D] with contiguous rows."""
    return kernels.rows(tensor.detach().transpose(1, 2))


def _twin(tensor: Tensor) -> Tensor:
    """Uninitialised, with the same shape, dtype, device and, if rows are contiguous there, the same order in memory."""
    twin = torch.empty_like(tensor)
    return twin if twin.stride(-1) == 1 else tensor.new_empty(tensor.shape)


def _permuted(tensor: Tensor, shape: tuple, order: tuple = _BY_ROWS) -> Tensor:
    return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)


def _options(
    query: Tensor, key: Tensor, scores: Optional[Tensor], is_causal: bool, top_left: bool, scale: Optional[float],
    dropout_p: float, state: Optional[Tensor],
) -> dict:  # fmt: skip
    options: dict = {}
    if state is not None:
        options["dropout_p"] = dropout_p
        kernels.add_dropout(options, query, state)
    if is_causal:
        options.update(causal=True, top_left=top_left and query.shape[2] != key.shape[2])
    if scale is not None:
        options["scale"] = scale
    if scores is not None:
        scores = scores.detach()
        if not 1 <= scores.dim() <= 4:
            raise Refused(f"attn_mask: rank {scores.dim()}")
        while scores.dim() < 4:
            scores = scores.unsqueeze(0)
        options["mask" if scores.dtype == torch.bool else "bias"] = scores.expand(*scores.shape[:-1], key.shape[2])
    kernels.add_place(options, query)
    return options


def _forward(
    query: Tensor, key: Tensor, value: Tensor, o: Tensor, lse: Optional[Tensor], scores: Optional[Tensor],
    is_causal: bool, top_left: bool, scale: Optional[float], dropout_p: float = 0.0, state: Optional[Tensor] = None,
) -> None:  # fmt: skip
    options = _options(query, key, scores, is_causal, top_left, scale, dropout_p, state)
    tensors = (_transposed(query), _transposed(key), _transposed(value), o.detach().transpose(1, 2), lse)
    kernels.planned(_core.forward, "forward", tensors, options)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, gradients: tuple,
    scores: Optional[Tensor], is_causal: bool, top_left: bool, scale: Optional[float], dropout_p: float = 0.0,
    state: Optional[Tensor] = None, d_bias: Optional[Tensor] = None,
) -> None:  # fmt: skip
    _check_first_derivative(grad_out, query, key, value, scores)
    options = _options(query, key, scores, is_causal, top_left, scale, dropout_p, state)
    if d_bias is not None:
        options["d_bias"] = d_bias
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    d_q, d_k, d_v = (t.transpose(1, 2) for t in gradients)
    q, k, v, o, d_o = (_transposed(t) for t in (query, key, value, out, grad_out))
    kernels.planned(_core.backward, "backward", (q, k, v, o, lse.detach(), d_o, d_q, d_k, d_v), options)


# ---- _scaled_dot_product_flash_attention_for_cpu ---------------------------------------------------------------------


def flash_for_cpu(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Optional[Tensor] = None, scale: Optional[float] = None,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """o with query's order in memory, and lse [B, H, Sq] in the order [B, Sq, H]. Causal from the top-left corner."""
    _check(query)
    _check_no_dropout(dropout_p)
    _check_head_sizes(query, value)
    batch, heads, seqlen_q, _ = query.shape
    o = _twin(query)
    lse = _new_lse(query, (batch, heads, seqlen_q), (0, 2, 1))
    _forward(query, key, value, o, lse, attn_mask, is_causal, True, scale)
    return o, lse


def flash_for_cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, *, attn_mask: Optional[Tensor] = None, scale: Optional[float] = None,
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, d_v in the order [B, S, H, D]."""
    _check(query)
    _check_no_dropout(dropout_p)
    _check_head_sizes(query, value)
    gradients = (_permuted(query, query.shape), _permuted(key, key.shape), _permuted(value, value.shape))
    _backward(grad_out, query, key, value, out, logsumexp, gradients, attn_mask, is_causal, True, scale)
    return gradients


# ---- _scaled_dot_product_flash_attention -----------------------------------------------------------------------------


def flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: Optional[float] = None,
) -> tuple:  # fmt: skip
    """o with query's order in memory, lse [B, H, Sq], and dropout's state. Causal from the bottom-right corner."""
    _check(query, return_debug_mask)
    _check_head_sizes(query, value)
    batch, heads, seqlen_q, _ = query.shape
    o = _twin(query)
    lse = _new_lse(query, (batch, heads, seqlen_q))
    state = _new_state(query, dropout_p)
    _forward(query, key, value, o, lse, None, is_causal, False, scale, dropout_p, state)
    return (o, lse, None, None, seqlen_q, key.shape[2], *_random_state(query, state))


def _random_state(query: Tensor, state: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_attn_mask. Without dropout they are never read, so no kernel fills them."""
    if state is None:
        rng_state = torch.empty(2, dtype=torch.uint64, device=query.device)
    else:
        rng_state = state.view(torch.uint64)
    return rng_state, torch.empty((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _of_random_state(dropout_p: float, rng_state: Tensor) -> Optional[Tensor]:
    return rng_state.view(torch.int64) if dropout_p else None


def flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: Optional[float] = None,
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, d_v with the orders in memory of query, key and value."""
    _check(query)
    _check_head_sizes(query, value)
    state = _of_random_state(dropout_p, philox_seed)
    gradients = (_twin(query), _twin(key), _twin(value))
    _backward(grad_out, query, key, value, out, logsumexp, gradients, None, is_causal, False, scale, dropout_p, state)
    return gradients


# ---- _scaled_dot_product_efficient_attention -------------------------------------------------------------------------


def efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: Optional[float] = None,
) -> tuple:  # fmt: skip
    """o in the order [B, Sq, H, Dv], lse [B, H, Sq in full vectors] or [B, H, 0], dropout's seed and offset."""
    _check(query)
    batch, heads, seqlen_q, _ = query.shape
    o = _permuted(query, (batch, heads, seqlen_q, value.shape[-1]))
    padded = _round_up(seqlen_q, _LSE_ALIGNMENT) if compute_log_sumexp else 0
    lse = _new_lse(query, (batch, heads, padded))
    if padded > seqlen_q:
        lse[..., seqlen_q:] = torch.inf  # padding rows have no weights, also in PyTorch's backward
    rows = lse[..., :seqlen_q] if compute_log_sumexp else None
    state = _new_state(query, dropout_p)
    _forward(query, key, value, o, rows, attn_bias, is_causal, True, scale, dropout_p, state)
    return (o, lse, *_philox_state(query, state))


def _philox_state(query: Tensor, state: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    if state is None:
        return query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)
    return state[0].clone(), state[1].clone()


def efficient_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], out: Tensor,
    logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor, dropout_p: float, grad_input_mask: list,
    is_causal: bool = False, *, scale: Optional[float] = None,
) -> tuple:  # fmt: skip
    """d_q, d_k, d_v in the order [B, S, H, D], d_bias in full vectors or None."""
    _check(query)
    state = _saved_state(dropout_p, philox_seed, philox_offset)
    gradients = (_permuted(query, query.shape), _permuted(key, key.shape), _permuted(value, value.shape))
    d_bias = d_bias_exact = None
    if attn_bias is not None and grad_input_mask[3]:
        *leading, seqlen_k = attn_bias.shape
        d_bias = attn_bias.new_empty((*leading, _round_up(seqlen_k, _BIAS_ALIGNMENT)))[..., :seqlen_k]
        d_bias_exact = torch.empty(attn_bias.shape, dtype=torch.float32, device=attn_bias.device)
    lse = logsumexp[..., : query.shape[2]]
    if lse.shape[-1] < query.shape[2]:  # PyTorch omits it if only the bias requires a gradient
        out = _permuted(query, out.shape)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        _forward(query, key, value, out, lse, attn_bias, is_causal, True, scale, dropout_p, state)
    _backward(
        grad_out, query, key, value, out, lse, gradients, attn_bias, is_causal, True, scale, dropout_p, state,
        d_bias_exact
    )  # fmt: skip
    if d_bias is not None and d_bias_exact is not None:
        d_bias.copy_(d_bias_exact)
    return (*gradients, d_bias)


# ---- _scaled_dot_product_cudnn_attention -----------------------------------------------------------------------------


def cudnn(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: Optional[float] = None,
) -> tuple:  # fmt: skip
    """o in query's order of dimensions, lse [B, H, Sq, 1], dropout's seed and offset. Causal from the top-left
    corner."""
    _check(query, return_debug_mask)
    batch, heads, seqlen_q, head_dim = query.shape
    if value.shape[-1] == head_dim:
        o = _twin(query)
    else:
        order = tuple(sorted(range(4), key=query.stride, reverse=True))
        o = _permuted(query, (batch, heads, seqlen_q, value.shape[-1]), order)
    lse = _new_lse(query, (batch, heads, seqlen_q, 1))
    state = _new_state(query, dropout_p)
    _forward(query, key, value, o, lse.squeeze(-1), attn_bias, is_causal, True, scale, dropout_p, state)
    return (o, lse, None, None, seqlen_q, key.shape[2], *_philox_state(query, state), None)


def cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, philox_seed: Tensor,
    philox_offset: Tensor, attn_bias: Optional[Tensor], cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor],
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, *, scale: Optional[float] = None,
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, d_v with the orders in memory of query, key and value."""
    _check(query)
    state = _saved_state(dropout_p, philox_seed, philox_offset)
    gradients = (_twin(query), _twin(key), _twin(value))
    _backward(
        grad_out, query, key, value, out, logsumexp.squeeze(-1), gradients, attn_bias, is_causal, True, scale,
        dropout_p, state
    )  # fmt: skip
    return gradients


# ---- _flash_attention_forward: packed [T, H, D] with cum_seq_q, or [B, S, H, D]; torch.nn.attention.varlen -----------


def _row_options(
    cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, left, right, seqused_k=None, alibi_slopes=None,
    block_table=None, dropout_p=0.0, state=None,
) -> dict:  # fmt: skip
    given = dict(
        dropout_p=dropout_p, dropout_state=state,
        alibi_slopes=alibi_slopes, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k if block_table is None else None,
        seqused_k=seqused_k, page_table=block_table, scale=scale, causal=is_causal,
        window=(-1 if left is None else left, -1 if right is None else right),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    if cum_seq_q is not None:
        given.update(max_seqlen_q=max_q, max_seqlen_k=max_k)
    return of_call.given("_flash_attention_forward", given)


def rows_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
    out=None,
):  # fmt: skip
    """o with query's order in memory, or in `out`; lse [H, Tq] or [B, H, Sq]; and dropout's state."""
    _check(query, return_debug_mask)
    _check_head_sizes(query, value)
    state = _new_state(query, dropout_p)
    given = _row_options(
        cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, window_size_left, window_size_right, seqused_k,
        alibi_slopes, block_table, dropout_p, state,
    )  # fmt: skip
    o = _twin(query) if out is None else out
    lse = _new_lse(query, kernels.output_shapes(query, value)[1])
    kernels.forward(query, key, value, given, o=o.detach(), lse=lse)
    return (o, lse, *_random_state(query, state))


def rows_forward_into(out, *arguments, **options):
    """Returns lse and writes o to `out`. Without dropout, since it does not return dropout's state."""
    lse = rows_forward(*arguments, **options, out=out)[1]
    kernels.mark_written(out)
    return lse


def rows_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """d_q, d_k, d_v, contiguous."""
    _check(query)
    _check_head_sizes(query, value)
    _check_first_derivative(grad_out, query, key, value)
    given = _row_options(
        cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, window_size_left, window_size_right, dropout_p=dropout_p,
        state=_of_random_state(dropout_p, rng_state),
    )  # fmt: skip
    return kernels.backward(grad_out, None, query, key, value, out, logsumexp, False, False, given)[:3]
