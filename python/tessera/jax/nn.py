"""`jax.nn.dot_product_attention` on Tessera, with its arguments and its errors, and Flax's attention function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tessera._core import Error

from . import api

own = jax.nn.dot_product_attention  # JAX's
of_tessera: frozenset[str | None] = frozenset((None,))  # values of `implementation`; `activate` sets them


def _in_four_axes(array: Any) -> Any:
    array = jnp.asarray(array)
    return array.reshape((1,) * (4 - array.ndim) + array.shape) if array.ndim < 4 else array


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def _within(extent: int, lengths: Any) -> Any:
    """[B, extent], True for positions before their sequence's end. Ranks are equal, for jax_numpy_rank_promotion."""
    return jnp.arange(extent)[None, :] < lengths[:, None]


def _check(name: str, array: Any, shape: tuple[int, ...], dtype: Any = None) -> None:
    """The errors of jax.nn, with its messages. -1: any extent."""
    if array is None:
        return
    _require(array.ndim == len(shape), f"{name} ndim should be {len(shape)}, but got {array.ndim}")
    _require(dtype is None or array.dtype == dtype, f"{name} dtype should be {dtype}, but got {array.dtype}")
    fits = all(wanted in (-1, extent) for wanted, extent in zip(shape, array.shape))
    _require(fits, f"{name} shape should be {list(shape)}: but got {array.shape}")


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention` with Tessera's kernels: the same arguments, [B, T, N, H] or [T, N, H], and errors.

    Causal masks and windows are measured from the first key, as in jax.nn. A query that sees no key gives 0 (XLA gives
    the mean of all values), and a residual of -inf. The residual has the dtype of `key` and no gradient, as in jax.nn:
    `attention` with `return_lse` gives a float32 LSE with a gradient. `implementation` None or "tessera" uses Tessera;
    other values use JAX's own, unless `activate` was told otherwise.
    """
    if implementation != "tessera" and implementation not in of_tessera:
        more = {"return_residual": True} if return_residual else {}
        return own(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
            implementation=implementation, **more,
        )  # fmt: skip
    shape = jnp.shape(query)
    q, k, v = (_in_four_axes(x) for x in (query, key, value))
    bias, mask = (None if x is None else _in_four_axes(x) for x in (bias, mask))
    lengths = [None if x is None else jnp.asarray(x) for x in (query_seq_lengths, key_value_seq_lengths)]
    _require(k.ndim == 4, f"key ndim should be 4, but got {k.ndim}")
    batch, keys, heads, size = k.shape
    _check("value", v, (batch, keys, heads, size), k.dtype)
    _check("query", q, (batch, -1, -1, size), k.dtype)
    _check("mask", mask, (-1,) * 4, np.dtype(bool))
    _check("bias", bias, (-1,) * 4)
    for name, array in zip(("query_seq_lengths", "key_value_seq_lengths"), lengths):
        _check(name, array, (batch,), np.dtype("int32"))
    _require(
        q.shape[2] % heads == 0,
        f"The number of query heads must be a multiple of key/value heads, but got {q.shape[2]} vs {heads}",
    )
    options: dict[str, Any] = {}
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    if local_window_size is not None:
        options["window"] = tuple(int(n) for n in local_window_size)
    if is_causal or local_window_size is not None:
        options.update(causal=bool(is_causal), top_left=True)
    if bias is not None:
        options["bias"] = bias if bias.dtype in (q.dtype, np.float32) else bias.astype(np.float32)
    if mask is not None:
        options["mask"] = mask
    if lengths[1] is not None:
        # With a diagonal measured from the first key, whatever the lengths are: a mask instead of a range of keys.
        if "top_left" in options:
            visible = _within(keys, lengths[1])[:, None, None, :]
            options["mask"] = visible if mask is None else jnp.logical_and(*jnp.broadcast_arrays(mask, visible))
        else:
            options["seqused_k"] = lengths[1]
    if scale is not None:
        scale = float(scale)
    try:
        out = api.attention(q, k, v, scale=scale, return_lse=return_residual, **options)
    except Error as error:
        raise ValueError(str(error)) from None
    o, lse = out if return_residual else (out, None)
    lse = None if lse is None else jax.lax.stop_gradient(lse).astype(k.dtype)
    if lengths[0] is not None:
        inside = _within(q.shape[1], lengths[0])  # [B, T]
        o = jnp.where(inside[:, :, None, None], o, jnp.zeros((), o.dtype))
        lse = None if lse is None else jnp.where(inside[:, None, :], lse, -jnp.inf)
    o = o.reshape(shape)
    return o if lse is None else (o, jnp.swapaxes(lse, 1, 2).reshape(shape[:-1]))


def flax_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    **others: Any,
) -> Any:
    """The attention function for Flax's layers, nnx.MultiHeadAttention(..., attention_fn=tessera.jax.flax_attention):
    query [..., T, N, H], with dropout. Every entry is dropped independently, whatever `broadcast_dropout` says;
    `precision` is that of the kernels (float32 sums). The weights are never stored, so `module`, which would receive
    them, is refused.
    """
    if module is not None:
        raise ValueError("module: given, accepted None: the weights are never stored (sow_weights=False)")
    if others.get("force_fp32_for_softmax") is False:
        others.pop("force_fp32_for_softmax")
    for name in others:
        if name not in ("promote_dtype", "force_fp32_for_softmax", "einsum_dot_general", "einsum",
                        "qk_attn_weights_einsum",
                        "attn_weights_value_einsum"):  # fmt: skip
            raise TypeError(f"flax_attention() got an unexpected keyword argument '{name}'")
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    shape = jnp.shape(query)
    q, k, v = (jnp.asarray(x, dtype).reshape(-1, *jnp.shape(x)[-3:]) for x in (query, key, value))

    def scores(x: Any) -> Any:
        x = jnp.asarray(x)
        return x if x.ndim <= 4 else x.reshape(-1, *x.shape[-3:])

    options: dict[str, Any] = {"causal": is_causal, "top_left": is_causal}
    if bias is not None:
        bias = scores(bias)
        options["bias"] = bias if bias.dtype in (q.dtype, np.float32) else bias.astype(np.float32)
    if mask is not None:
        options["mask"] = scores(mask).astype(bool)
    if dropout_rate and not deterministic:
        options.update(dropout_p=float(dropout_rate), dropout_seed=dropout_rng)
    return api.attention(q, k, v, **options).reshape(*shape[:-1], jnp.shape(value)[-1])
