"""A call's options in their one form, a dict of what differs from the default, and flat, as an operator's schema has them.

Names, kinds and defaults are the library's own (src/core/fields.hpp, by `_core.option_fields`). Operators have dropout's seed
and offset as a tensor alone, `dropout_state`.
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Tuple

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


def given(function: str, options: Options) -> Options:
    """Those that are not left at their default. TypeError for a name that there is not, Error for a wrong pair or tensor."""
    result = {}
    for name, value in options.items():
        field = _BY_NAME.get(name)
        if field is None:
            raise TypeError(unexpected_option(function, name))
        if value is None:
            continue
        if field.schema == "Tensor?":
            check_tensor(name, value)
        elif field.schema == "SymInt[2]":
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise _core.Error(f"{name}: {value!r}, accepted a pair of integers")
            if tuple(value) == field.default:
                continue
        elif value == field.default:
            continue
        result[name] = value
    return result


def pack(options: Options) -> Tuple[Any, ...]:
    """Flat, for an operator."""
    return tuple(options.get(name, default) for name, _, default in FIELDS)


def unpack(flat: Tuple[Any, ...]) -> Options:
    """The other way round."""
    options = {}
    for (name, schema, default), value in zip(FIELDS, flat):
        if value is None:
            continue
        if schema == "SymInt[2]":
            value = tuple(value)
        if isinstance(value, Tensor) or value != default:
            options[name] = value
    return options
