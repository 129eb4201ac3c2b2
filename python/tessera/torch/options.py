"""A call's options as a dict of those that differ from the default, and flat, as in an operator's schema.

Names, kinds and defaults are the library's own (src/core/fields.hpp, by `_core.option_fields`). Operators have
dropout's seed and offset only as a tensor, `dropout_state`.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, Dict, NamedTuple, Tuple, Union

import torch
from torch import Tensor

from tessera import _core
from tessera._hints import unexpected_option

from .checks import check_tensor

Options = Dict[str, Any]


class Field(NamedTuple):
    name: str
    schema: str  # its type in an operator's schema
    default: Any


_SCHEMAS = {"bool": "bool", "float": "float", "float | None": "float?", "int": "SymInt", "tuple[int, int]": "SymInt[2]"}


def _fields() -> Tuple[Field, ...]:
    differentiable, tensors, values = [], [], []
    for field in _core.option_fields():
        name, kind = field["name"], field["kind"]
        if kind == "tensor":
            (differentiable if name in DIFFERENTIABLE else tensors).append(Field(name, "Tensor?", None))
        elif kind in ("value", "execution") and name not in ("dropout_seed", "dropout_offset", "openmp", "layout"):
            values.append(Field(name, _SCHEMAS.get(field["annotation"], "str"), field["default"]))
    return (*differentiable, *tensors, *values)


DIFFERENTIABLE = ("bias", "sink")  # the options that have gradients
# The flat order: options with a gradient, the other tensors, then values.
FIELDS = _fields()
NUM_TENSORS = sum(field.schema == "Tensor?" for field in FIELDS)
NAMES = tuple(field.name for field in FIELDS)
SCHEMA = ", ".join(f"{field.schema} {field.name}" for field in FIELDS)
_BY_NAME = {field.name: field for field in FIELDS}


# ---- values: a call's arguments, converted to the types that the library and an operator's schema expect
# --------------


def _refusal(name: str, value: Any, accepted: str) -> _core.Error:
    return _core.Error(f"{name}: {repr(value)[:80]} of type {type(value).__name__}, accepted {accepted}")


def _without_gradient(name: str, value: Any, accepted: str) -> None:
    """A tensor in place of a number is read, which hides it from autograd and from torch.func."""
    if not isinstance(value, Tensor):
        return
    if value.dim() != 0:
        raise _core.Error(f"{name}: a tensor of shape {list(value.shape)}, accepted {accepted} or a tensor of rank 0")
    if value.requires_grad and torch.is_grad_enabled():
        raise _core.Error(f"{name}: a tensor that requires a gradient, accepted {accepted}: {name} has no gradient")
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(value):
        raise _core.Error(f"{name}: mapped over by vmap, accepted {accepted}, one for all")


# In a compiled program, a node that reads the tensor; the program is the same for all of its values.
@torch.library.custom_op("tessera::integer", mutates_args=(), schema="(Tensor value) -> SymInt")
def _read(value: Tensor) -> int:
    return int(value)


@_read.register_fake
def _(value: Tensor) -> int:
    return torch.library.get_ctx().new_dynamic_size()


def number(name: str, value: Any) -> float:
    """From Python, NumPy, or a tensor of rank 0."""
    if isinstance(value, (float, int)):
        return value
    _without_gradient(name, value, "a number")
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise _refusal(name, value, "a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _refusal(name, value, "a number") from None


def integer(name: str, value: Any) -> int:
    """From Python, NumPy, or a tensor of rank 0 with an integer dtype."""
    if isinstance(value, (int, torch.SymInt)):
        return value
    _without_gradient(name, value, "an integer")
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            raise _core.Error(f"{name}: a tensor of dtype {value.dtype}, accepted an integer")
        return _read(value) if torch.compiler.is_compiling() else int(value)
    if isinstance(value, float) or not hasattr(value, "__index__"):
        raise _refusal(name, value, "an integer")
    if torch.compiler.is_compiling():  # NumPy's scalars are tensors there
        return torch.as_tensor(value).item()
    try:
        return operator.index(value)
    except TypeError:
        raise _refusal(name, value, "an integer") from None


def _pair(name: str, value: Any) -> Tuple[int, int]:
    if isinstance(value, Tensor) and value.shape == (2,):
        value = value.unbind()
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise _core.Error(f"{name}: {repr(value)[:80]}, accepted a pair of integers")
    return integer(name, value[0]), integer(name, value[1])


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, torch.SymBool)):
        raise _refusal(name, value, "True or False")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        accepted = ", ".join(f'"{kernel}"' for kernel in _core.kernel_names())
        raise _refusal(name, value, accepted)
    return value


def _tensor(name: str, value: Any) -> Tensor:
    check_tensor(name, value)
    return value


_TAKE: Dict[str, Callable[[str, Any], Any]] = {
    "Tensor?": _tensor, "float": number, "float?": number, "SymInt": integer, "SymInt[2]": _pair, "bool": _flag,
    "str": _text,
}  # fmt: skip

_MOST_UNSIGNED = (1 << 64) - 1


def unsigned(name: str, value: Any) -> Union[int, Tensor]:
    """A seed or an offset of dropout. A tensor on a GPU or under tracing stays a tensor: reading it would wait."""
    if isinstance(value, Tensor):
        _without_gradient(name, value, "an integer, 0 .. 2^64 - 1")
        if value.dtype.is_floating_point or value.dtype.is_complex:
            raise _core.Error(f"{name}: a tensor of dtype {value.dtype}, accepted an integer, 0 .. 2^64 - 1")
        if value.is_cuda or torch.compiler.is_compiling() or type(value) is not Tensor:
            return value
    value = integer(name, value)
    if not 0 <= value <= _MOST_UNSIGNED:
        raise _core.Error(f"{name}: {value}, accepted an integer, 0 .. 2^64 - 1")
    return value


def given(function: str, options: Options) -> Options:
    """The options that differ from their defaults. TypeError for an unknown name, Error for a wrong value."""
    result = {}
    for name, value in options.items():
        field = _BY_NAME.get(name)
        if field is None:
            raise TypeError(unexpected_option(function, name))
        if value is None:
            continue
        read = isinstance(value, Tensor)
        value = _TAKE[field.schema](name, value)
        if not read and value == field.default:
            continue
        result[name] = value
    return result


def refuse_gradients(options: Options) -> None:
    """Refuses tensors among `options` that require a gradient which no kernel computes."""
    if not torch.is_grad_enabled():
        return
    for name, value in options.items():
        if isinstance(value, Tensor) and value.requires_grad and name not in DIFFERENTIABLE:
            raise _core.Error(f"{name}: requires a gradient, accepted a tensor that does not: {name} has no gradient")


def pack(options: Options) -> Tuple[Any, ...]:
    """As flat arguments of an operator."""
    return tuple(options.get(name, default) for name, _, default in FIELDS)


def unpack(flat: Tuple[Any, ...]) -> Options:
    """The inverse of `pack`."""
    options = {}
    for (name, schema, default), value in zip(FIELDS, flat):
        if value is None:
            continue
        if schema == "SymInt[2]":
            value = tuple(value)
        if isinstance(value, (Tensor, torch.SymInt)) or value != default:
            options[name] = value
    return options
