"""`tessera.jax.attention`: one call for eager, compiled, differentiated and mapped programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from tessera import _core, _score
from tessera._core import Error
from tessera._hints import unexpected_option, with_options
from tessera._score import Mod

from . import call

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tessera._options import Options

_TENSORS = frozenset(field["name"] for field in _core.option_fields() if field["kind"] == "tensor") - {"lse_low"}
_VALUES = frozenset(field["name"] for field in _core.option_fields() if field["kind"] in ("value", "execution")) - {
    "openmp"
}


def _array(name: str, value: Any) -> Any:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise Error(f"{name}: {type(value).__name__}, accepted an array (jax.numpy.asarray makes one)")
    return jnp.asarray(value)


def _halves(name: str, value: Any) -> Any:
    """A 64-bit integer as two 32-bit ones, which JAX always supports, the lower half first."""
    if isinstance(value, (int, np.integer)):
        if not 0 <= value < 2**64:
            raise Error(f"{name}: {value}, accepted an integer, 0 .. 2^64 - 1")
        return jnp.array([value & 0xFFFFFFFF, value >> 32], jnp.uint32)
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if value.shape == (2,) and value.dtype == np.uint32:  # the data of a key
        return value
    if value.shape == () and jnp.issubdtype(value.dtype, jnp.integer):
        upper = (value >> 32).astype(jnp.uint32) if value.dtype.itemsize == 8 else jnp.uint32(0)
        return jnp.stack([value.astype(jnp.uint32), upper])
    raise Error(f"{name}: {value.dtype} of shape {value.shape}, accepted an integer, or a key of jax.random")


def _program(
    score_mod: Mod, mask_mod: Mod, captured: dict[str, Any] | None, tensors: dict[str, Any]
) -> call.Program | None:  # fmt: skip
    """The program of a call, whose arrays join `tensors`."""
    bound = _score.bind(score_mod, mask_mod, captured)
    if bound is None:
        return None
    for n, (name, array) in enumerate(zip(bound.names, bound.arrays)):
        tensors[f"captured{n}"] = _array(f"captured ({name})", array)
    return call.Program(bound.score, bound.mask, bound.declared, bound.numbers)


def _along_keys(bias: Any, tensors: dict[str, Any], values: dict[str, Any]) -> Any:
    """The kernels compute no gradient for a bias that is the same for all keys; repeated along the keys, it has one."""
    dense = tensors["k"].ndim == 4 and "page_table" not in tensors and "page_indices" not in tensors
    if not dense or bias.ndim == 0 or bias.shape[-1] != 1:
        return bias
    return jnp.broadcast_to(bias, (*bias.shape[:-1], tensors["k"].shape[2 if values.get("layout") == "bhsd" else 1]))


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> jax.Array: ...


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[jax.Array, jax.Array]: ...
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, score_mod: Mod = None, mask_mod: Mod = None,
    captured: dict[str, Any] | None = None, **options: Unpack[Options],
) -> Any:  # fmt: skip
    """Exact attention of JAX arrays, O = softmax(scale * Q K^T + ...) V, with gradients for q, k, v, bias and sink,
    through O and LSE, under jit, grad, vmap and combinations of them.

    Shapes, dtypes and options are those of `tessera.attention`. Options that are arrays may be traced; the others are
    Python values and constants of a compiled program. Differences:

        dropout_seed: an integer, a key of jax.random, or a traced integer; required with dropout_p. For a seed per
            step, use jax.random.fold_in(key, step). dropout_offset: an integer, traced or not. dropout_state: uint32
            [4], seed and offset as lower and upper halves, or int64 [2].
        lse_low, openmp: not available.
        score_mod, mask_mod, captured: a program of one (query, key) pair, as in `tessera.attention`: a text, or a
            function, whose calls of jax.numpy, jax.nn and jax.lax are traced. Arrays that it captures may be traced and
            have gradients; numbers that it captures are constants of a compiled program. A negative index is outside
            its array, and does not count from its end.

    Paged keys, tree masks and shared prefixes have no gradient. There is no second derivative and no forward mode.

    vmap: the mapped axis joins the batch of dense q, k, v. Entries are computed one after another where that is
    impossible: for packed and paged sequences, dropout (each entry drops what it would drop alone), and a sink that is
    mapped or whose gradient is requested.

    Returns:
        O, or with `return_lse` the pair (O, LSE), float32.

    Raises:
        tessera.Error: (a ValueError) an argument is wrong; raised with one line while the program is traced. An error
            that depends on data, such as an index out of range, is an XLA error with the same line when the program
            runs.
    """
    tensors = {"q": _array("q", q), "k": _array("k", k), "v": _array("v", v)}
    values: dict[str, Any] = {}
    seed, offset = options.pop("dropout_seed", None), options.pop("dropout_offset", 0)
    for name, value in options.items():
        if name in _TENSORS:
            if value is not None:
                tensors[name] = _array(name, value)
        elif name in _VALUES:
            values[name] = value
        else:
            raise TypeError(unexpected_option("attention", name))
    if "sink" in tensors and jnp.issubdtype(tensors["sink"].dtype, jnp.floating):
        tensors["sink"] = tensors["sink"].astype(jnp.float32)
    if "bias" in tensors:
        tensors["bias"] = _along_keys(tensors["bias"], tensors, values)
    if values.get("dropout_p"):
        if "dropout_state" not in tensors:
            if seed is None:
                raise Error("dropout_seed: absent with dropout_p, accepted an integer or a key of jax.random")
            tensors["dropout_state"] = jnp.concatenate(
                [_halves("dropout_seed", seed), _halves("dropout_offset", offset)]
            )
    else:
        tensors.pop("dropout_state", None)
    program = _program(score_mod, mask_mod, captured, tensors)
    settings = call.settings_of(values, program)
    call.check(settings, tensors)
    return call.o_and_lse(settings, tensors) if return_lse else call.o_alone(settings, tensors)


with_options(attention, without=("lse_low", "openmp"))
