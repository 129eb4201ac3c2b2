"""PyTorch's own flash attention on Tessera, by PyTorch's registry of implementations.

`torch.nn.attention.activate_flash_attention_impl("Tessera")` puts the kernels below in the dispatcher's place for the
CPU; `restore_flash_attention_impl()` takes them out. What Tessera refuses goes to the kernel that stood there before.
"""

from __future__ import annotations

import collections
import logging
import warnings
from typing import Dict, Optional

import torch
import torch.nn.attention
from torch import Tensor

from tessera import _core

from . import kernels

_NAME = "Tessera"
_logger = logging.getLogger("tessera.torch")
_fallbacks: collections.Counter = collections.Counter()
_REFUSALS = (ValueError, TypeError, NotImplementedError)


def fallback_reasons(reset: bool = False) -> Dict[str, int]:
    """Why calls went to PyTorch's own kernel since activation (or the last reset), and how many each.

    The logger "tessera.torch" says each one at level INFO when it happens.
    """
    reasons = dict(_fallbacks)
    if reset:
        _fallbacks.clear()
    return reasons


def _refused(reason: str) -> None:
    _fallbacks[reason] += 1
    _logger.info("PyTorch's own kernel runs: %s", reason)


def _refusal(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, attn_mask: Optional[Tensor]) -> Optional[str]:
    """What is known before a kernel is asked."""
    if query.dtype == torch.float64:
        return "query: dtype float64, which Tessera serves by its slow reference kernel"
    if value.shape[-1] != query.shape[-1]:
        return "value: a head size other than query's"
    if dropout_p != 0.0:
        return "dropout_p: not 0"
    if attn_mask is not None and attn_mask.dim() not in (2, 4):
        return f"attn_mask: rank {attn_mask.dim()}"
    return None


def _options(query: Tensor, key: Tensor, is_causal: bool, attn_mask: Optional[Tensor], scale: Optional[float]) -> dict:
    options: dict = {"threads": torch.get_num_threads(), "openmp": True}
    if is_causal:
        options.update(causal=True, top_left=query.shape[2] != key.shape[2])
    if scale is not None:
        options["scale"] = scale
    if attn_mask is not None:
        scores = attn_mask.detach()
        scores = scores if scores.dim() == 4 else scores[None, None]
        options["mask" if scores.dtype == torch.bool else "bias"] = scores.expand(
            *scores.shape[:-1], key.shape[2]
        )
    return options


def _by_rows(tensor: Tensor) -> Tensor:
    """[B, H, S, D] as [B, S, H, D] with contiguous rows."""
    return kernels.rows(tensor.detach().transpose(1, 2))


class _Activation:
    """The kernels in the dispatcher, for as long as PyTorch's registry keeps this handle."""

    def __init__(self) -> None:
        self._original = {
            name: torch.library.get_kernel(f"aten::{name}", "CPU")
            for name in (
                "_scaled_dot_product_flash_attention_for_cpu",
                "_scaled_dot_product_flash_attention_for_cpu_backward",
            )
        }
        self._library = torch.library.Library("aten", "IMPL", "CPU")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            self._register()
        _fallbacks.clear()

    def _register(self) -> None:
        for name, kernel in (
            ("_scaled_dot_product_flash_attention_for_cpu", self._sdpa_forward),
            ("_scaled_dot_product_flash_attention_for_cpu_backward", self._sdpa_backward),
        ):
            self._library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
        for name, kernel in (
            ("_flash_attention_forward", _flash_forward),
            ("_flash_attention_forward_no_dropout_inplace", _flash_forward_into),
            ("_flash_attention_backward", _flash_backward),
        ):
            self._library.impl(name, kernel, "CPU")

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _sdpa_forward(
        self, keyset, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None
    ):  # fmt: skip
        reason = _refusal(query, key, value, dropout_p, attn_mask)
        if reason is None:
            batch, heads, seqlen_q, _ = query.shape
            o = torch.empty_like(query)
            lse = query.new_empty((batch, seqlen_q, heads), dtype=torch.float32).transpose(1, 2)
            if o.stride(-1) != 1:
                o = query.new_empty(query.shape)
            options = _options(query, key, is_causal, attn_mask, scale)
            try:
                _core.forward(
                    _by_rows(query), _by_rows(key), _by_rows(value), o.detach().transpose(1, 2), lse, **options
                )
                return o, lse
            except _REFUSALS as error:
                reason = str(error)
        _refused(reason)
        return self._original["_scaled_dot_product_flash_attention_for_cpu"].call_boxed(
            keyset, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )

    def _sdpa_backward(
        self, keyset, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
    ):  # fmt: skip
        reason = _refusal(query, key, value, dropout_p, attn_mask)
        if reason is None:
            gradients = [
                torch.empty_permuted(t.shape, (0, 2, 1, 3), dtype=t.dtype, device=t.device) for t in (query, key, value)
            ]
            inputs = [_by_rows(t) for t in (query, key, value, out)]
            options = _options(query, key, is_causal, attn_mask, scale)
            try:
                _core.backward(
                    *inputs,
                    logsumexp.detach(),
                    _by_rows(grad_out),
                    *(t.transpose(1, 2) for t in gradients),
                    **options,
                )
                return tuple(gradients)
            except _REFUSALS as error:
                reason = str(error)
        _refused(reason)
        return self._original["_scaled_dot_product_flash_attention_for_cpu_backward"].call_boxed(
            keyset, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )


# ---- torch.nn.attention.varlen: these operators have no CPU kernel of PyTorch's ---------------------------------------


def _varlen_options(
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, left, right, seqused_k, alibi_slopes, block_table
) -> tuple:  # fmt: skip
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p: {dropout_p}, accepted 0 on the CPU")
    if block_table is not None:
        cum_seq_k = None
    state = (None, None, None, None, alibi_slopes, cum_seq_q, cum_seq_k, seqused_k, block_table, None)
    window = (-1 if left is None else left, -1 if right is None else right)
    lengths = (0, 0) if cum_seq_q is None else (max_q, max_k)
    return (*state, scale, is_causal, False, *window, 0.0, 0, 0, 0.0, *lengths, False, False, "auto", 0)


def _flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    options = _varlen_options(
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, window_size_left, window_size_right, seqused_k,
        alibi_slopes, block_table,
    )  # fmt: skip
    o, lse = kernels.forward(query, key, value, *options)
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return o, lse, rng_state, query.new_empty(0), query.new_empty(0)


def _flash_forward_into(out, query, key, value, *arguments, **options):
    o, lse, *_ = _flash_forward(query, key, value, *arguments, **options)
    out.copy_(o)
    return lse


def _flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    options = _varlen_options(
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, window_size_left, window_size_right, None, None,
        None,
    )  # fmt: skip
    d_q, d_k, d_v, _, _ = kernels.backward(
        grad_out, None, query, key, value, out, logsumexp, False, False, *options
    )
    return d_q, d_k, d_v


def register() -> bool:
    """Tells PyTorch's registry the name "Tessera". False in releases without a registry. Activates nothing."""
    add = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is None or not hasattr(torch.library, "get_kernel"):
        return False
    add(_NAME, register_fn=_Activation)
    return True
