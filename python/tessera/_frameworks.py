"""How each framework creates an output. Only NumPy is imported here, and only if it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from tessera import _core

try:
    import numpy
except ImportError:  # not needed with PyTorch
    numpy = None


class Framework(NamedTuple):
    empty: Callable[..., Any]  # (shape, dtype) -> an array that the library writes
    float32: Any
    finish: Callable[[Any], Any] | None = None  # converts the written array to the framework's own
    attention: Callable[..., Any] | None = None  # the framework's own function, which supports its gradients
    attention_backward: Callable[..., Any] | None = None  # likewise
    combine: Callable[..., Any] | None = None  # likewise
    workspace: Callable[[int], Any] | None = None  # allocates float32 elements, for devices other than the CPU


def framework_of(q: Any, name: str = "q") -> Framework:
    if numpy is not None and type(q) is numpy.ndarray:
        return _NUMPY
    family = _family(name, q)
    if family == "NumPy":
        return _NUMPY
    if family == "PyTorch":
        return _torch(q.device)
    if family == "JAX":
        if any(device.platform != "cpu" for device in q.devices()):
            raise _core.Error(
                f"{name}: a JAX array on {q.devices()}, accepted those on the CPU (jax.device_put moves them)"
            )
        if len(q.devices()) > 1:
            raise _core.Error(f"{name}: a JAX array on {len(q.devices())} devices, accepted those on one")
        return _jax(*q.devices())
    if family is not None:
        return _array_api(q.__array_namespace__(), q.device)
    if numpy is None:
        raise _core.Error(
            f"{name}: {type(q).__name__}, accepted a PyTorch tensor, or any array once NumPy is installed"
        )
    return _ANY_ARRAY


_ARRAYS = frozenset(
    ["k", "v", "o", "lse", "d_o", "lse_low", "lse_parts", "lse_low_parts"]
    + ["k_cache", "v_cache", "cu_seqlens", "q", "q_out", "cos", "sin", "positions_q", "positions_k", "dropped"]
    + ["captured"]
    + [field["name"] for field in _core.option_fields() if field["kind"].endswith("tensor")]
)


def output_dtype(q: Any) -> Any:
    """The dtype of o: q's, or bfloat16 if q has 8 bits."""
    if getattr(q.dtype, "itemsize", 2) > 1:
        return q.dtype
    if is_torch(q):
        return sys.modules["torch"].bfloat16
    import ml_dtypes

    return numpy.dtype(ml_dtypes.bfloat16)


def check_arrays(name: str, first: Any, others: dict[str, Any]) -> None:
    """Checks that all arrays of a call belong to one framework, and that none has state beside its memory."""
    family = _family(name, first)
    for other_name, other in others.items():
        if other is None or other_name not in _ARRAYS:
            continue
        other_family = _family(other_name, other)
        # Arrays known only by DLPack are accepted with any framework.
        if other_family != family and other_family is not None and family is not None:
            raise _core.Error(
                f"{other_name}: of {other_family}, {name} is of {family}: accepted: one framework for all"
            )


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _family(name: str, array: Any) -> str | None:
    """The framework's name; None for an unknown framework whose arrays have __dlpack__."""
    if numpy is not None and isinstance(array, numpy.ndarray):
        masked = sys.modules.get("numpy.ma")
        if masked is not None and isinstance(array, masked.MaskedArray):
            raise _core.Error(f"{name}: a masked array, accepted a plain one (its filled() is), and a mask by name")
        return "NumPy"
    if is_torch(array):
        from tessera.torch.checks import check_tensor

        check_tensor(name, array)
        return "PyTorch"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array):
        if isinstance(array, jax.core.Tracer):
            raise _core.Error(
                f"{name}: traced by a JAX transformation, accepted concrete arrays (tessera.jax.attention takes traced "
                "ones)"
            )
        return "JAX"
    namespace = getattr(array, "__array_namespace__", None)
    if namespace is not None:
        return namespace().__name__
    if hasattr(array, "__dlpack__"):
        return None
    accepted = "an array (numpy.asarray makes one)"
    if numpy is None:
        accepted = "a PyTorch tensor, or any array once NumPy is installed"
    raise _core.Error(f"{name}: {type(array).__name__}, accepted {accepted}")


@cache
def _torch(device: Any) -> Framework:
    import torch

    from tessera import torch as of_torch

    def empty(shape: Any, dtype: Any) -> Any:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    workspace = None if device.type == "cpu" else lambda elements: empty((elements,), torch.float32)
    return Framework(
        empty, torch.float32, attention=of_torch.attention, attention_backward=of_torch.api.attention_backward,
        combine=of_torch.combine, workspace=workspace,
    )  # fmt: skip


@cache
def _jax(device: Any) -> Framework:
    import jax

    return Framework(numpy.empty, numpy.float32, finish=lambda array: jax.device_put(array, device))


def _array_api(namespace: Any, device: Any) -> Framework:
    """Frameworks that follow the array API standard, such as CuPy: they create the outputs, on q's device."""

    def empty(shape: Any, dtype: Any) -> Any:
        return namespace.empty(tuple(shape), dtype=dtype, device=device)

    return Framework(empty, namespace.float32, workspace=lambda elements: empty((elements,), namespace.float32))


def _empty_like_any(shape: Any, dtype: Any) -> Any:
    """For arrays of unknown frameworks whose dtypes have NumPy's names: "float32" or "library.float32"."""
    name = str(dtype).rpartition(".")[2]
    if name == "bfloat16":
        import ml_dtypes

        return numpy.empty(shape, ml_dtypes.bfloat16)
    return numpy.empty(shape, name)


if numpy is not None:
    _NUMPY = Framework(numpy.empty, numpy.float32)
    _ANY_ARRAY = Framework(_empty_like_any, "float32")
