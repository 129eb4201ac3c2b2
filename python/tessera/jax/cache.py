"""New keys and values into a cache whose memory is written in place: `tessera.jax.append`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

import jax
import numpy as np

from tessera import _core

from . import call, sharding
from .api import _array

_TARGET = "tessera_append"
_NO_DEVICE = 0  # an array without data that is nowhere yet


class Appended(NamedTuple):
    """The caches with the new keys and values; q after rotation and dropped where they were given, and the scales with
    compute_scales, else None."""

    k_cache: jax.Array
    v_cache: jax.Array
    q: Optional[jax.Array]
    dropped: Optional[jax.Array]
    k_descale: Optional[jax.Array]
    v_descale: Optional[jax.Array]


class Settings(NamedTuple):
    interleaved: bool
    compute_scales: bool


def append(
    k: Any, v: Any, k_cache: Any, v_cache: Any, seqused_k: Any, *, cu_seqlens: Any = None, page_table: Any = None,
    q: Any = None, cos: Any = None, sin: Any = None, positions_q: Any = None, positions_k: Any = None,
    dropped: Any = None, interleaved: bool = False, k_descale: Any = None, v_descale: Any = None,
    compute_scales: bool = False,
) -> Appended:  # fmt: skip
    """Writes new keys and values at each sequence's end in a cache, and rotates q and the new keys on the way (rotary
    position embedding), in one pass. The caches that it returns have the memory of those it is given where XLA may
    write there: with `jax.jit(step, donate_argnames=("k_cache", "v_cache"))` nothing else is copied.

        cache = tessera.jax.append(k, v, k_cache, v_cache, lengths, q=q, cos=cos, sin=sin)
        o = tessera.jax.attention(cache.q, cache.k_cache, cache.v_cache, seqused_k=lengths, causal=True)

    Args:
        k, v: [B, S, Hkv, D], [B, S, Hkv, Dv], or packed [T, Hkv, D], [T, Hkv, Dv].
        k_cache, v_cache: [B, Smax, Hkv, D | Dv], or with page_table [pages, page_size, Hkv, D | Dv].
        seqused_k: int32 [B], keys of each sequence, the new ones included, as `attention` takes it afterwards.
        cu_seqlens: int32 [B + 1]: k, v and q are packed, sequence b's tokens are cu_seqlens[b] .. cu_seqlens[b + 1].
        page_table: int32 [B, max_pages].
        q: [B, Sq, Hq, D] or [T, Hq, D], to be rotated.
        cos, sin: [R, rotary_dim / 2], float32 or k's dtype; columns of q and k from rotary_dim on stay.
        positions_q, positions_k: int32 [B, S] or [T], the rows of cos and sin; by default a new key's place among its
            sequence's keys, and for query i that of new key i.
        dropped: int32 [1], to which a GPU adds the number of tokens that were out of range and wrote nothing.
        interleaved: pairs are neighbouring columns (GPT-J), not those rotary_dim / 2 apart (GPT-NeoX).
        k_descale, v_descale: float32 scales of a cache of float8_e4m3fn, float8_e5m2 or, on the CPU, int8, which stores
            value / scale, rounded to nearest, and saturates: [1], [Hkv] or [B, Hkv].
        compute_scales: with page_table; compute a scale for each new token and head, and write it to k_descale and
            v_descale, [pages, page_size, Hkv], whose memory the scales that are returned have, as the caches do.

    There are no gradients; vmap computes one entry after another. Under jit with sharded arrays, sequences of a dense
    cache and heads stay divided.

    Raises:
        tessera.Error: (a ValueError) while the program is traced: an argument is wrong, in one line. A length or page
            out of range is an error of XLA's on the CPU when the program runs.
    """
    given = {
        "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "seqused_k": seqused_k, "cu_seqlens": cu_seqlens,
        "page_table": page_table, "q": q, "cos": cos, "sin": sin, "positions_q": positions_q,
        "positions_k": positions_k, "dropped": dropped, "k_descale": k_descale, "v_descale": v_descale,
    }  # fmt: skip
    required = ("k", "v", "k_cache", "v_cache", "seqused_k")
    tensors = {name: _array(name, x) for name, x in given.items() if name in required or x is not None}
    described = {name: _described(x) for name, x in tensors.items()}
    if q is not None:
        described["q_out"] = described["q"]
    settings = Settings(bool(interleaved), bool(compute_scales))
    _core.append(**described, **settings._asdict())
    return _append(settings, tensors)


def _described(x: Any) -> _core.ArrayWithoutData:
    strides = [int(np.prod(x.shape[axis + 1 :], dtype=np.int64)) for axis in range(x.ndim)]
    return _core.ArrayWithoutData(str(x.dtype), x.shape, strides, _NO_DEVICE)


def _write(settings: Settings, tensors: call.Tensors) -> call.Tensors:
    scales = ("k_descale", "v_descale") if settings.compute_scales else ()
    written = [name for name in ("k_cache", "v_cache", "dropped", *scales) if name in tensors]
    results = {name: name for name in written}  # each with the operand whose shape it has
    if "q" in tensors:
        results["q_out"] = "q"
    operands = list(tensors)
    aliases = {operands.index(name): list(results).index(name) for name in written}

    def run(*arrays: Any) -> list[Any]:
        twins = dict(zip(operands, arrays))
        shapes = [jax.ShapeDtypeStruct(twins[twin].shape, twins[twin].dtype) for twin in results.values()]
        ffi_call = jax.ffi.ffi_call(_TARGET, shapes, input_output_aliases=aliases)
        names = {"operands": " ".join(operands), "results": " ".join(results)}
        flags = {name: np.int64(value) for name, value in settings._asdict().items()}
        return list(ffi_call(*arrays, **names, **flags))

    division = sharding.of_append({name: x.shape for name, x in tensors.items()})
    divided = sharding.divided(run, division, operands, list(results), backward=False)
    return dict(zip(results, divided(*tensors.values())))


def _mapped(settings: Settings, tensors: call.Tensors) -> call.Tensors:
    with_rule = jax.custom_batching.custom_vmap(functools.partial(_write, settings))
    with_rule.def_vmap(functools.partial(_in_turn, settings))
    return with_rule(tensors)


def _in_turn(settings: Settings, axis_size: int, in_batched: Any, tensors: call.Tensors) -> Any:
    out = call._map_in_turn(functools.partial(_mapped, settings), tensors, in_batched[0])
    return out, {name: True for name in out}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _append(settings: Settings, tensors: call.Tensors) -> Appended:
    out = call._vary_with(tensors, _mapped(settings, tensors))
    return Appended(
        out["k_cache"], out["v_cache"], *(out.get(name) for name in ("q_out", "dropped", "k_descale", "v_descale"))
    )


@_append.defjvp
def _refuse(settings: Settings, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError("tessera.jax.append: a gradient was asked for, accepted jax.lax.stop_gradient")
