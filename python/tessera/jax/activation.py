"""Tessera in programs as they are: `activate` replaces the attention functions that they call."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from tessera._core import Error
from tessera._replacements import Replacements

from . import api, nn

_replaced = Replacements()


def _equinox_attention(
    own: Callable[..., Any], query: Any, key_: Any, value: Any, mask: Any = None, dropout: Any = None, *,
    key: Any = None, inference: bool | None = None,
) -> Any:  # fmt: skip
    """Equinox's function of one head, [S, D], which its layers map over heads: one call of all heads. With dropout it
    is Equinox's own, whose random numbers are those of its keys."""
    if dropout is not None:
        inference = dropout.inference if inference is None else inference
        if not inference and not (isinstance(dropout.p, (int, float)) and dropout.p == 0):
            return own(query, key_, value, mask, dropout, key=key, inference=inference)
    if mask is not None and mask.shape != (query.shape[0], key_.shape[0]):
        return own(query, key_, value, mask)  # its error
    q, k, v = (jnp.asarray(x)[None, :, None, :] for x in (query, key_, value))
    return api.attention(q, k, v, mask=None if mask is None else mask[None, None])[0, :, 0, :]


def _replacements() -> list[tuple[Any, Any]]:
    """(its own function, Tessera's), of the libraries that are imported."""
    pairs: list[tuple[Any, Any]] = [(nn.own, nn.dot_product_attention)]
    equinox = getattr(sys.modules.get("equinox.nn._attention"), "dot_product_attention", None)
    if equinox is not None and not isinstance(equinox, functools.partial):
        pairs.append((equinox, functools.partial(_equinox_attention, equinox)))
    return pairs


def activate(*, implementations: Sequence[str | None] = (None,)) -> list[str]:
    """Replaces `jax.nn.dot_product_attention` by Tessera's, in jax.nn and in every imported module that holds JAX's own
    under some name ("from jax.nn import dot_product_attention"), and likewise the function that Equinox's layers call.

    Args:
        implementations: values of jax.nn's `implementation` that mean Tessera. Others mean JAX's own. A program that
            names one in its calls, as MaxText does with "cudnn", needs (None, "cudnn").

    Returns:
        The replaced names, as "module.name". Functions compiled before keep the function that they were compiled with.

    Raises:
        tessera.Error: (a ValueError) an unknown implementation.
    """
    for name in implementations:
        if name not in (None, "xla", "cudnn"):
            raise Error(f'implementations: {name!r}, accepted None, "xla" and "cudnn"')
    nn.of_tessera = frozenset(implementations)
    for own, ours in _replacements():
        _replaced.replace(own, ours, except_in=nn)
    if not _replaced:
        warnings.warn("tessera.jax.activate: no imported module holds jax.nn.dot_product_attention", stacklevel=2)
    return _replaced.names()


def restore() -> None:
    """Restores the libraries' own functions, except where they were replaced again since."""
    nn.of_tessera = frozenset((None,))
    _replaced.restore()
