"""Traces `score_mod(score, b, h, q_idx, kv_idx)` and `mask_mod(b, h, q_idx, kv_idx)`: Python functions of one (query,
key) pair become the text of a score program.

Arrays that a function captures (in closures, globals, attributes, defaults) become named tensors; numbers become named
scalars, so that a new value needs no new program; only literals are constants.
"""

from __future__ import annotations

import dis
import functools
import itertools
import linecache
import math
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from tessera._core import Error

_HERE = os.path.dirname(os.path.abspath(__file__))
_MOST_INT = 2**31 - 1
_RESERVED = frozenset("s b h h_kv i j q_pos len_q len_k g true false inf nan".split())


# ---- refusals -------------------------------------------------------------------------------------------------------


def _place() -> str:
    """Where the traced function is: "line 7 of model.py, `if score > 0:`"."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if os.path.dirname(os.path.abspath(path)) != _HERE and f"{os.sep}torch{os.sep}" not in path:
            line = linecache.getline(path, frame.f_lineno).strip()
            return f"line {frame.f_lineno} of {os.path.basename(path)}" + (f", `{line}`" if line else "")
        frame = frame.f_back
    return "the traced function"


def _refuse(what: str) -> NoReturn:
    raise Error(f"{_place()}: {what}")


# ---- traced values --------------------------------------------------------------------------------------------------


class Traced:
    """A float, an int or a bool of a pair that is being traced."""

    __slots__ = ("_arguments", "_number", "_text", "_type")
    __array_priority__ = 1000
    shape = ()
    ndim = 0
    device = None

    def __init__(self, type_: str, text: str, arguments: tuple = (), number: Any = None):
        self._type, self._text, self._arguments = type_, text, arguments  # "{} + {}", of the arguments' names
        self._number = number  # the value of a captured number

    # Where Python itself needs a value: a captured number has one, and becomes a constant there.
    def _value(self, what: str, accepted: str) -> Any:
        if self._number is None:
            _refuse(f"{what} of a traced value, which differs from pair to pair; accepted {accepted}")
        return self._number

    def __bool__(self) -> bool:
        return bool(self._value("the truth (an `if`, `and`, `or`, `not`)", "where(condition, a, b), & | ~"))

    def __index__(self) -> int:
        return self._value("a Python integer", "an index of a captured array, arithmetic").__index__()

    def __int__(self) -> int:
        return int(self._value("a Python integer", ".to(int) or tessera.score.int"))

    def __float__(self) -> float:
        return float(self._value("a Python number (math's functions need one)", "torch's, NumPy's or tessera.score's"))

    def __iter__(self) -> NoReturn:
        _refuse("a loop over a traced value, accepted one value")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f".{name} of a traced value, accepted operators and the functions of tessera.score")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Traced.__slots__:
            return object.__setattr__(self, name, value)
        _refuse(f".{name} is set: a side effect, accepted a function without any")

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse("an index of a traced value, which is one number; accepted one of a captured array")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        _refuse("an element is set: a side effect, accepted a function without any")

    def __repr__(self) -> str:
        return f"<traced {self._type}>"

    __hash__ = object.__hash__

    # PyTorch's methods of values.
    def new_ones(self, size: Any = (), dtype: Any = None, **_: Any) -> Traced:
        return _full(self, size, 1, dtype)

    def new_zeros(self, size: Any = (), dtype: Any = None, **_: Any) -> Traced:
        return _full(self, size, 0, dtype)

    def new_full(self, size: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Traced:
        return _full(self, size, fill_value, dtype)

    @property
    def dtype(self) -> _Dtype:
        return _Dtype(self._type)

    def to(self, dtype: Any, *_: Any, **__: Any) -> Traced:
        name = lift(dtype)._type if isinstance(dtype, (Traced, Captured)) else str(dtype).rpartition(".")[2]
        if "float" in name:
            return to_float(self)
        if name.startswith("int"):
            return to_int(self)
        if name == "bool":
            return self if self._type == "bool" else not_equal(self, 0)
        _refuse(f"to({name}), accepted floating-point types, integers and bool")

    type_as = astype = to

    def float(self) -> Traced:
        return to_float(self)

    def int(self) -> Traced:
        return to_int(self)

    long = int

    def bool(self) -> Traced:
        return self.to("bool")

    # NumPy's and PyTorch's functions of traced values.
    def __array_ufunc__(self, ufunc: Any, method: str, *arguments: Any, **keywords: Any) -> Any:
        if method != "__call__" or keywords:
            _refuse(f"numpy.{ufunc.__name__}.{method}, accepted a call without keywords")
        return _by_name(f"numpy.{ufunc.__name__}", ufunc.__name__)(*arguments)

    def __array_function__(self, function: Any, types_: Any, arguments: Any, keywords: Any) -> Any:
        return _by_name(f"numpy.{function.__name__}", function.__name__)(*arguments, **keywords)

    @classmethod
    def __torch_function__(cls, function: Any, types_: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.__name__
        return _by_name(f"torch.{name}", name.strip("_"))(*arguments, **(keywords or {}))


class _Dtype:
    """The dtype of a traced value, for `.to` and the like: float, int or bool, of no width."""

    def __init__(self, name: str):
        self._name = name

    def __str__(self) -> str:
        return self._name

    def __eq__(self, other: object) -> NoReturn:
        _refuse(f"the dtype of a traced value is compared, which is {self._name} of no width; accepted .to(x.dtype)")

    __hash__ = object.__hash__


def _full(x: Traced, size: Any, value: Any, dtype: Any) -> Traced:
    if tuple(size if isinstance(size, (tuple, list)) else (size,)) != ():
        _refuse(f"a new tensor of shape {size}, accepted () : a traced value is one number")
    return full_like(x, value, dtype)


def literal(value: Any) -> Traced:
    if isinstance(value, bool):
        return Traced("bool", "true" if value else "false")
    if isinstance(value, int) and -_MOST_INT <= value <= _MOST_INT:
        return Traced("int", str(value))
    value = float(value)
    return Traced("float", "nan" if math.isnan(value) else repr(value) if math.isfinite(value) else str(value))


def _is_array(value: Any) -> bool:
    if isinstance(value, (type, Traced, Captured, Elements, _Attributes)):
        return False
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _is_numpy_scalar(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ != "ndarray"


def lift(value: Any) -> Traced:
    """A number, a rank-0 array or a traced value as a traced value."""
    if isinstance(value, Traced):
        return value
    if isinstance(value, Captured):
        return value._element()
    if isinstance(value, Elements):
        _refuse(f"an array of shape {list(value.shape)}, accepted one value: a sum over it, an element of it")
    if isinstance(value, (bool, int, float)):
        return literal(value)
    if _is_array(value) and tuple(value.shape) == () and not getattr(value, "requires_grad", False):
        return literal(value.item())  # made within the function
    if _is_array(value):
        _refuse(f"an array of shape {list(value.shape)} that is not captured by name, accepted captured ones, indexed")
    _refuse(f"{type(value).__name__}, accepted numbers, traced values and indexed captured arrays")


# ---- operations -----------------------------------------------------------------------------------------------------


def to_float(x: Any) -> Traced:
    x = lift(x)
    return x if x._type == "float" else Traced("float", "float({})", (x,))


def to_int(x: Any) -> Traced:
    """Towards zero."""
    x = lift(x)
    return x if x._type == "int" else Traced("int", "int({})", (x,))


def _number(x: Any) -> Traced:
    x = lift(x)
    return to_int(x) if x._type == "bool" else x


def _numbers(*values: Any) -> list[Traced]:
    """All int, or all float."""
    numbers = [_number(x) for x in values]
    return numbers if all(x._type == "int" for x in numbers) else [to_float(x) for x in numbers]


def _truth(x: Any) -> Traced:
    x = lift(x)
    if x._type != "bool":
        _refuse(f"{x._type} where a condition is needed, accepted bool: compare it")
    return x


def _arithmetic(text: str) -> Callable[[Any, Any], Traced]:
    def operation(a: Any, b: Any) -> Traced:
        a, b = _numbers(a, b)
        return Traced(a._type, text, (a, b))

    return operation


def _comparison(text: str) -> Callable[[Any, Any], Traced]:
    def operation(a: Any, b: Any) -> Traced:
        a, b = lift(a), lift(b)
        if not (a._type == b._type == "bool" and ("==" in text or "!=" in text)):
            a, b = _numbers(a, b)
        return Traced("bool", text, (a, b))

    return operation


def _bits(text: str) -> Callable[[Any, Any], Traced]:
    def operation(a: Any, b: Any) -> Traced:
        a, b = lift(a), lift(b)
        if a._type == b._type == "bool":
            return Traced("bool", text, (a, b))
        a, b = _numbers(a, b)
        if a._type != "int":
            _refuse(f"`{text.split()[1]}` of floats, accepted of ints and of bools")
        return Traced("int", text, (a, b))

    return operation


def _logic(text: str) -> Callable[[Any, Any], Traced]:
    return lambda a, b: Traced("bool", text, (_truth(a), _truth(b)))


def _function(text: str) -> Callable[[Any], Traced]:
    return lambda x: Traced("float", text, (to_float(x),))


add, subtract, multiply = _arithmetic("{} + {}"), _arithmetic("{} - {}"), _arithmetic("{} * {}")
minimum, maximum = _arithmetic("min({}, {})"), _arithmetic("max({}, {})")
less, less_equal, equal, not_equal = map(_comparison, ("{} < {}", "{} <= {}", "{} == {}", "{} != {}"))
bitwise_and, bitwise_or, bitwise_xor = map(_bits, ("{} & {}", "{} | {}", "{} ^ {}"))
logical_and, logical_or, logical_xor = map(_logic, ("{} && {}", "{} || {}", "{} ^ {}"))
exp, exp2, log, sqrt, rsqrt, tanh, sigmoid, sin, cos, floor, sign = map(
    _function,
    [f"{name}({{}})" for name in "exp exp2 log sqrt rsqrt tanh sigmoid sin cos floor sign".split()],
)


def greater(a: Any, b: Any) -> Traced:
    return less(b, a)


def greater_equal(a: Any, b: Any) -> Traced:
    return less_equal(b, a)


def divide(a: Any, b: Any) -> Traced:
    return Traced("float", "{} / {}", (to_float(a), to_float(b)))


def floor_divide(a: Any, b: Any) -> Traced:
    a, b = _numbers(a, b)
    return Traced("int", "{} // {}", (a, b)) if a._type == "int" else floor(divide(a, b))


def remainder(a: Any, b: Any) -> Traced:
    """With the sign of b, as Python's."""
    a, b = _numbers(a, b)
    return Traced("int", "{} % {}", (a, b)) if a._type == "int" else subtract(a, multiply(b, floor(divide(a, b))))


def negative(x: Any) -> Traced:
    x = _number(x)
    return Traced(x._type, "-{}", (x,))


def absolute(x: Any) -> Traced:
    x = _number(x)
    return Traced(x._type, "abs({})", (x,))


def invert(x: Any) -> Traced:
    x = lift(x)
    if x._type == "float":
        _refuse("`~` of a float, accepted of ints and of bools")
    return Traced(x._type, "!{}" if x._type == "bool" else "~{}", (x,))


def logical_not(x: Any) -> Traced:
    return invert(_truth(x))


def isnan(x: Any) -> Traced:
    return Traced("bool", "isnan({})", (to_float(x),))


def shift(text: str) -> Callable[[Any, Any], Traced]:
    def operation(a: Any, b: Any) -> Traced:
        a, b = _numbers(a, b)
        if a._type != "int":
            _refuse(f"`{text.split()[1]}` of floats, accepted of ints")
        return Traced("int", text, (a, b))

    return operation


left_shift, right_shift = shift("{} << {}"), shift("{} >> {}")


def square(x: Any) -> Traced:
    x = _number(x)
    return multiply(x, x)


def reciprocal(x: Any) -> Traced:
    return divide(1.0, x)


_MOST_POWER = 8


def power(x: Any, n: Any) -> Traced:
    n = n._number if isinstance(n, Traced) else n
    known = {0.5: sqrt, -0.5: rsqrt, -1: reciprocal}
    if isinstance(n, (int, float)) and n in known:
        return known[n](x)
    if not isinstance(n, (int, float)) or n != int(n) or not 0 <= n <= _MOST_POWER:
        _refuse(f"a power of {n}, accepted 0 .. {_MOST_POWER}, 0.5, -0.5 and -1; exp(n * log(x)) is any other")
    x = _number(x)
    result = literal(1 if x._type == "int" else 1.0)
    for _ in range(int(n)):
        result = x if result._text in ("1", "1.0") else multiply(result, x)
    return result


def where(condition: Any, a: Any, b: Any) -> Traced:
    a, b = lift(a), lift(b)
    if not a._type == b._type == "bool":
        a, b = _numbers(a, b)
    return Traced(a._type, "where({}, {}, {})", (_truth(condition), a, b))


def full_like(x: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Traced:
    return lift(fill_value).to(lift(x) if dtype is None else dtype)


def ones_like(x: Any, dtype: Any = None, **_: Any) -> Traced:
    return full_like(x, 1, dtype)


def zeros_like(x: Any, dtype: Any = None, **_: Any) -> Traced:
    return full_like(x, 0, dtype)


def masked_fill(x: Any, mask: Any, value: Any) -> Traced:
    return where(mask, full_like(x, value), x)


def add_multiple(a: Any, b: Any, alpha: Any = 1) -> Traced:
    return add(a, b if _is_one(alpha) else multiply(b, alpha))


def subtract_multiple(a: Any, b: Any, alpha: Any = 1) -> Traced:
    return subtract(a, b if _is_one(alpha) else multiply(b, alpha))


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, int) and alpha == 1


def divide_rounded(a: Any, b: Any, rounding_mode: Any = None) -> Traced:
    if rounding_mode not in (None, "floor"):
        _refuse(f"rounding_mode {rounding_mode!r}, accepted 'floor' and None")
    return divide(a, b) if rounding_mode is None else floor_divide(a, b)


def relu(x: Any) -> Traced:
    return maximum(x, 0)


def tan(x: Any) -> Traced:
    return divide(sin(x), cos(x))


def silu(x: Any, inplace: bool = False) -> Traced:
    x = to_float(x)
    return multiply(x, sigmoid(x))


def log2(x: Any) -> Traced:
    return multiply(log(x), 1 / math.log(2))


def log10(x: Any) -> Traced:
    return multiply(log(x), 1 / math.log(10))


def clip(x: Any, min: Any = None, max: Any = None) -> Traced:
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


_NAMES: dict[str, Callable[..., Any]] = {
    "add": add_multiple, "sub": subtract_multiple, "subtract": subtract_multiple,
    "rsub": lambda a, b: subtract(b, a), "mul": multiply, "multiply": multiply, "div": divide_rounded,
    "divide": divide_rounded, "true_divide": divide, "truediv": divide,
    "rdiv": lambda a, b: divide(b, a), "floor_divide": floor_divide, "floordiv": floor_divide,
    "remainder": remainder, "mod": remainder, "neg": negative, "negative": negative, "pow": power, "power": power,
    "abs": absolute, "absolute": absolute, "fabs": absolute, "square": square, "reciprocal": reciprocal,
    "min": minimum, "minimum": minimum, "max": maximum, "maximum": maximum, "clamp": clip, "clip": clip, "relu": relu,
    "exp": exp, "exp2": exp2, "log": log, "sqrt": sqrt, "rsqrt": rsqrt, "tanh": tanh, "sigmoid": sigmoid, "sin": sin,
    "cos": cos, "tan": tan, "silu": silu, "log2": log2, "log10": log10,
    "floor": floor, "sign": sign, "where": where, "isnan": isnan, "masked_fill": masked_fill,
    "full_like": full_like, "ones_like": ones_like, "zeros_like": zeros_like,
    "logical_and": logical_and, "logical_or": logical_or, "logical_xor": logical_xor, "logical_not": logical_not,
    "bitwise_and": bitwise_and, "and": bitwise_and, "bitwise_or": bitwise_or, "or": bitwise_or,
    "bitwise_xor": bitwise_xor, "xor": bitwise_xor, "bitwise_not": invert, "invert": invert,
    "left_shift": left_shift, "bitwise_left_shift": left_shift, "right_shift": right_shift,
    "bitwise_right_shift": right_shift,
    "less": less, "lt": less, "less_equal": less_equal, "le": less_equal, "greater": greater, "gt": greater,
    "greater_equal": greater_equal, "ge": greater_equal, "equal": equal, "eq": equal, "not_equal": not_equal,
    "ne": not_equal,
}  # fmt: skip


def _by_name(full: str, name: str) -> Callable[..., Any]:
    if name in _SUMS:
        return _SUMS[name]
    if name not in _NAMES:
        functions = "abs, clip, cos, exp, exp2, floor, log, log2, log10, maximum, minimum, relu, rsqrt, sigmoid, sign"
        functions += ", silu, sin, sqrt, tan, tanh, where"
        _refuse(f"{full} of a traced value, accepted operators, {functions}, comparisons and logic")
    return _by_element(_NAMES[name])


def _by_element(function: Callable[..., Traced]) -> Callable[..., Any]:
    """The function of values, also of arrays of values, element by element."""

    def of_any(*arguments: Any, **keywords: Any) -> Any:
        values = [_whole(x) for x in arguments]
        arrays = [x for x in values if isinstance(x, Elements)]
        if not arrays:
            return function(*arguments, **keywords)
        shape = functools.reduce(lambda found, x: x._shape_with(found), arrays, ())
        return _of_shape(
            shape, lambda at: function(*(x._at(at) if isinstance(x, Elements) else x for x in values), **keywords)
        )

    return of_any


def _whole(x: Any) -> Any:
    """The elements of a part of a captured array; anything else as it is."""
    if not isinstance(x, Captured) or not x._is_part():
        return x
    return _of_shape(x.shape, x.__getitem__)


def _operators(target: type) -> type:
    """Python's operators, as methods."""
    binary = {
        "add": add, "sub": subtract, "mul": multiply, "truediv": divide, "floordiv": floor_divide, "mod": remainder,
        "pow": power, "and": bitwise_and, "or": bitwise_or, "xor": bitwise_xor, "lshift": left_shift,
        "rshift": right_shift,
    }  # fmt: skip
    for name, function in binary.items():
        setattr(target, f"__{name}__", _by_element(function))
        setattr(target, f"__r{name}__", _by_element(lambda a, b, f=function: f(b, a)))
    comparisons = {"lt": less, "le": less_equal, "gt": greater, "ge": greater_equal, "eq": equal, "ne": not_equal}
    for name, function in comparisons.items():
        setattr(target, f"__{name}__", _by_element(function))
    unary = {"neg": negative, "pos": _number, "abs": absolute, "invert": invert}
    unary |= {"floor": lambda x: to_int(floor(x)), "trunc": to_int}
    for name, function in unary.items():
        setattr(target, f"__{name}__", _by_element(function))
    # PyTorch's methods of the same names.
    for name in ("abs", "clamp", "cos", "exp", "exp2", "floor", "log", "maximum", "minimum", "relu", "rsqrt", "sigmoid",
                 "sign", "sin", "sqrt", "square", "tan", "tanh", "log2", "log10", "logical_and", "logical_or",
                 "logical_not", "pow", "masked_fill"):  # fmt: skip
        setattr(target, name, _by_element(_NAMES[name]))
    return target


_operators(Traced)


# ---- few values at once ---------------------------------------------------------------------------------------------

_MOST_ELEMENTS = 16  # each is an operation of the program


class Elements:
    """A small array of values: part of a captured array, whose last axes have no index, and what is computed of it."""

    __array_priority__ = 1000

    def __init__(self, shape: tuple[int, ...], values: list[Traced]):
        self.shape, self._values = shape, values

    def _at(self, index: tuple[int, ...]) -> Traced:
        """With a leading part of the index left out, and any number on an axis of 1."""
        at = 0
        for x, n in zip(index[len(index) - len(self.shape) :], self.shape):
            at = at * n + x % n
        return self._values[at]

    def _shape_with(self, other: tuple[int, ...]) -> tuple[int, ...]:
        longest = max(len(other), len(self.shape))
        a, b = ((1,) * (longest - len(x)) + x for x in (other, self.shape))
        if any(m != n and 1 not in (m, n) for m, n in zip(a, b)):
            _refuse(f"arrays of shapes {list(other)} and {list(self.shape)}, accepted shapes that broadcast")
        return tuple(n if m == 1 else m for m, n in zip(a, b))

    def __getitem__(self, index: int) -> Any:
        if not isinstance(index, int) or not -self.shape[0] <= index < self.shape[0]:
            _refuse(f"an index {index} of an array of shape {list(self.shape)}, accepted an integer within it")
        return _of_shape(self.shape[1:], lambda at: self._at((index % self.shape[0], *at)))

    def __iter__(self) -> Any:
        return (self[n] for n in range(self.shape[0]))

    def __bool__(self) -> NoReturn:
        _refuse("the truth of an array, accepted where(condition, a, b)")

    __hash__ = object.__hash__
    __array_ufunc__ = Traced.__array_ufunc__
    __array_function__ = Traced.__array_function__
    __torch_function__ = Traced.__torch_function__


_operators(Elements)


def _of_shape(shape: tuple[int, ...], value: Callable[[tuple[int, ...]], Traced]) -> Any:
    values = [value(at) for at in itertools.product(*map(range, shape))]
    return Elements(shape, values) if shape else values[0]


def _over_axis(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def reduced(x: Any, dim: Any = None, axis: Any = None) -> Any:
        x, dim = _whole(x), axis if dim is None else dim
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        if not isinstance(x, Elements) or not (dim is None or -len(x.shape) <= dim < len(x.shape)):
            _refuse("a sum or extreme, accepted over one axis or all of a captured array's part")
        if dim is None:
            return functools.reduce(operation, x._values)
        first, last = x.shape[: dim % len(x.shape)], x.shape[dim % len(x.shape) :]
        line = range(last[0])
        return _of_shape(
            first + last[1:],
            lambda at: functools.reduce(operation, [x._at((*at[: len(first)], n, *at[len(first) :])) for n in line]),
        )

    return reduced


_SUMS: dict[str, Callable[..., Any]] = {
    "sum": _over_axis(add), "amax": _over_axis(maximum), "amin": _over_axis(minimum)
}  # fmt: skip
for _name, _function in _SUMS.items():
    setattr(Elements, _name, _function)


# ---- what functions capture -----------------------------------------------------------------------------------------


class Captured:
    """A captured array. Indexed down to an element it is a value; with rank 0 it is one itself."""

    __array_priority__ = 1000

    def __init__(self, name: str, array: Any, rank: int, type_: str, indices: tuple = ()):
        self._name, self._array, self._rank, self._type, self._indices = name, array, rank, type_, indices

    def __getitem__(self, index: Any) -> Any:
        given = index if isinstance(index, tuple) else (index,)
        if any(isinstance(x, slice) or x is None or x is Ellipsis for x in given):
            _refuse(f"a slice of '{self._name}': its shape would depend on data; accepted one index for each axis")
        indices = self._indices
        for x in given:
            x = lift(x)
            if x._type != "int":
                _refuse(f"an index of '{self._name}' is {x._type}, accepted int")
            indices += (x,)
        if len(indices) > self._rank:
            _refuse(f"'{self._name}' has {len(indices)} indices, accepted {self._rank}")
        part = Captured(self._name, self._array, self._rank, self._type, indices)
        return part._element() if len(indices) == self._rank else part

    def _is_part(self) -> bool:
        """It has indices, but not of all axes, and few elements."""
        return 0 < len(self._indices) < self._rank and math.prod(self.shape) <= _MOST_ELEMENTS

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)[len(self._indices) :]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __iter__(self) -> Any:
        return (self[n] for n in range(len(self)))

    def _element(self) -> Traced:
        if len(self._indices) != self._rank:
            _refuse(f"'{self._name}' as a whole, accepted an element of it: {self._rank} indices")
        return Traced(self._type, f"{self._name}[{', '.join(['{}'] * self._rank)}]", self._indices)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        _refuse(f"an element of '{self._name}' is set: a side effect, accepted a function without any")

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device"):
            return getattr(self._array, name)
        if name == "size":
            if not callable(self._array.size):  # NumPy's
                return math.prod(self.shape)
            return lambda dim=None: self.shape if dim is None else self.shape[dim]
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_whole(self) if self._is_part() else self._element(), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self._element())

    def __float__(self) -> float:
        return float(self._element())

    __hash__ = object.__hash__
    __array_ufunc__ = Traced.__array_ufunc__
    __array_function__ = Traced.__array_function__
    __torch_function__ = Traced.__torch_function__


_operators(Captured)


class _Attributes:
    """A captured object: its arrays, numbers and methods are captured when they are read."""

    def __init__(self, names: Names, name: str, value: Any):
        object.__setattr__(self, "_of", (names, name, value))

    def __getattr__(self, name: str) -> Any:
        names, own, value = self._of
        return names.capture(name, getattr(value, name))

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(f".{name} is set: a side effect, accepted a function without any")

    def __getitem__(self, index: Any) -> Any:
        names, own, value = self._of
        return names.capture(f"{own}_{index}", value[index])

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        names, own, value = self._of
        call = type(value).__call__
        if call.__module__.startswith("torch."):  # a module of PyTorch, whose hooks are not traced
            call = type(value).forward
        return types.MethodType(names.rebuilt(call), self)(*arguments, **keywords)

    def __len__(self) -> int:
        return len(self._of[2])

    def __bool__(self) -> bool:
        return bool(self._of[2])


def _is_autograd_function(value: Any) -> bool:
    bases = value.__mro__ if isinstance(value, type) else ()
    return any((x.__module__, x.__name__) == ("torch.autograd.function", "Function") for x in bases)


class _JaxModule:
    """jax.numpy, jax.nn or jax.lax as a traced function sees it: its functions of traced values are this module's, as
    JAX's own accept arrays alone."""

    def __init__(self, module: types.ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _of_jax(getattr(self._module, name))

    def __call__(self, *_: Any) -> NoReturn:
        _refuse(f"a call of the module {self._module.__name__}")


_JAX = ("jax", "jax.numpy", "jax.nn", "jax.lax", "jax.scipy.special")
_JAX_NAMES = {"expit": "sigmoid", "logistic": "sigmoid", "select": "where", "swish": "silu", "astype": "to"}


def _of_jax(value: Any) -> Any:
    """JAX's module or function as a traced function calls it; anything else as it is."""
    if isinstance(value, types.ModuleType):
        return _JaxModule(value) if value.__name__ in _JAX else value
    home, name = getattr(value, "__module__", None) or "", getattr(value, "__name__", "")
    if home.split(".")[0] not in ("jax", "jaxlib") or isinstance(value, type) or not callable(value):
        return value
    if _is_array(value):
        return value
    if hasattr(value, "dtype"):  # jax.numpy.float32 is a type and a function
        return value

    def function(*arguments: Any, **keywords: Any) -> Any:
        if not any(isinstance(x, (Traced, Captured, Elements)) for x in (*arguments, *keywords.values())):
            return value(*arguments, **keywords)
        return _by_name(f"jax.{name}", _JAX_NAMES.get(name, name))(*arguments, **keywords)

    return function


_PLAIN = (str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType, complex, slice, range)
_KINDS = {"f": "float", "b": "float", "i": "int", "u": "int"}


def kind_of(array: Any) -> str:
    """float, int or bool."""
    name = str(array.dtype).rpartition(".")[2]
    return "bool" if name == "bool" else _KINDS.get(name[:1], "float")


def kind_of_number(number: Any) -> str:
    """float, int or bool."""
    if isinstance(number, bool):
        return "bool"
    return "int" if isinstance(number, int) or type(number).__name__ == "SymInt" else "float"


class Names:
    """The names of a program: arrays and numbers, each once."""

    def __init__(self, captured: dict[str, Any] | None = None):
        self.arrays: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        self._known: dict[int, Any] = {}  # by id
        self._kept: list[Any] = []  # what has these ids
        for name, value in (captured or {}).items():
            self._declare(name, value)

    def _declare(self, name: str, value: Any) -> None:
        """A name that the caller chose."""
        if not isinstance(name, str):
            raise Error(f"captured: {name!r}, accepted names of arrays and numbers")
        if isinstance(value, (bool, int, float)):
            self.numbers[name] = value
        elif _is_numpy_scalar(value):
            self.numbers[name] = value.item()
        elif _is_array(value):
            self.arrays[name] = value
        else:
            raise Error(f"captured: {name!r} is {type(value).__name__}, accepted arrays and numbers")

    def _own(self, name: str) -> str:
        name = re.sub(r"\W", "_", name, flags=re.ASCII)[:24]
        if not name or name[0].isdigit() or re.fullmatch(r"_\d*", name) or name in _RESERVED or name in _NAMES:
            name = f"c_{name}"
        own, n = name, 2
        while own in self.arrays or own in self.numbers:
            own, n = f"{name}_{n}", n + 1
        return own

    def capture(self, name: str, value: Any) -> Any:
        """`value` as a traced function sees it."""
        if (own := _of_jax(value)) is not value:
            return own
        if isinstance(value, (Traced, Captured, Elements, _Attributes, bool)):
            return value
        if _is_autograd_function(value):
            raise Error(f"{value.__name__}: an autograd.Function, accepted a function whose derivative is computed")
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, (int, float)):
            return self._once((name, type(value), value), lambda: self._capture_number(name, value))
        if _is_array(value):
            if _is_numpy_scalar(value):
                return self.capture(name, value.item())
            return self._once(value, lambda: self._capture_array(name, value))
        if isinstance(value, types.FunctionType):
            module = value.__module__ or ""
            own = module.split(".")[0] in ("torch", "numpy", "jax", "math", "operator")
            return value if own and not value.__closure__ else self._once(value, lambda: self.rebuilt(value))
        if isinstance(value, types.MethodType):
            return types.MethodType(self.rebuilt(value.__func__), self.capture(name, value.__self__))
        if isinstance(value, functools.partial):
            arguments = [self.capture(f"{name}_{n}", x) for n, x in enumerate(value.args)]
            keywords = {key: self.capture(key, x) for key, x in value.keywords.items()}
            return functools.partial(self.capture(name, value.func), *arguments, **keywords)
        if type(value) in (tuple, list):
            return type(value)(self.capture(f"{name}_{n}", x) for n, x in enumerate(value))
        if callable(value) and not hasattr(type(value).__call__, "__code__"):
            return value  # of C
        return self._once(value, lambda: _Attributes(self, name, value))

    def _once(self, value: Any, make: Callable[[], Any]) -> Any:
        key = value if isinstance(value, tuple) else id(value)
        if key not in self._known:
            self._kept.append(value)
            self._known[key] = make()
        return self._known[key]

    def _capture_number(self, name: str, value: Any) -> Traced:
        if isinstance(value, int) and not -_MOST_INT <= value <= _MOST_INT:
            value = float(value)
        own = self._own(name)
        self.numbers[own] = value
        return Traced("int" if isinstance(value, int) else "float", own, (), value)

    def capture_symbolic(self, name: str, value: Any) -> Traced:
        """An integer whose value a compiler does not know."""
        own = self._own(name)
        self.numbers[own] = value
        return Traced("int", own)

    def _capture_array(self, name: str, array: Any) -> Captured:
        own = self._own(name)
        self.arrays[own] = array
        return Captured(own, array, len(array.shape), kind_of(array))

    def rebuilt(self, function: types.FunctionType) -> types.FunctionType:
        """The function with what it captures replaced."""
        code = getattr(function, "__code__", None)
        if code is None:
            return function
        _refuse_side_effects(code)
        wanted = _names_of(code)
        known = function.__globals__
        own_globals = {name: self.capture(name, known[name]) for name in wanted if name in known}
        own_globals["__builtins__"] = function.__globals__.get("__builtins__", __builtins__)
        cells = tuple(
            types.CellType(self.capture(name, cell.cell_contents))
            for name, cell in zip(code.co_freevars, function.__closure__ or ())
        )
        names = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ and tuple(
            self.capture(name, x) for name, x in zip(names[-len(function.__defaults__) :], function.__defaults__)
        )
        result = types.FunctionType(code, own_globals, function.__name__, defaults, cells)
        if function.__kwdefaults__:
            result.__kwdefaults__ = {name: self.capture(name, x) for name, x in function.__kwdefaults__.items()}
        return result

    def declared(self) -> tuple[tuple[str, str, int], ...]:
        """(name, type, rank) of each, -1: a number."""
        of_arrays = [(name, kind_of(x), len(x.shape)) for name, x in self.arrays.items()]
        return (*of_arrays, *((name, kind_of_number(x), -1) for name, x in self.numbers.items()))


@functools.lru_cache(maxsize=256)
def _names_of(code: types.CodeType) -> frozenset[str]:
    inner = [_names_of(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=256)
def _refuse_side_effects(code: types.CodeType) -> None:
    for step in dis.get_instructions(code):
        name = step.opname
        writes = name in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR")
        if writes or (name == "STORE_DEREF" and step.argval in code.co_freevars):
            lines = [n for start, _, n in code.co_lines() if n and start <= step.offset]
            line = lines[-1] if lines else code.co_firstlineno
            text = linecache.getline(code.co_filename, line).strip()
            place = f"line {line} of {os.path.basename(code.co_filename)}, `{text}`"
            raise Error(f"{place}: a side effect, accepted a function without any")
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            _refuse_side_effects(inner)


# ---- the text -------------------------------------------------------------------------------------------------------


def _text_of(root: Traced) -> str:
    """A statement for each operation: the program's canonical form leaves out those that it does not need."""
    statements: list[str] = []
    names: dict[int, str] = {}
    stack = [root]
    while stack:
        value = stack[-1]
        missing = [x for x in value._arguments if id(x) not in names]
        if id(value) in names or not missing:
            stack.pop()
            if id(value) in names:
                continue
            text = value._text.format(*(names[id(x)] for x in value._arguments))
            names[id(value)] = text
            if value._arguments and value is not root:
                names[id(value)] = f"_{len(statements)}"
                statements.append(f"_{len(statements)} = {text}; ")
        else:
            stack.extend(missing)
    return "".join(statements) + names[id(root)]


_INPUTS = {"s": "float", "b": "int", "h": "int", "i": "int", "j": "int"}


def input_named(name: str) -> Traced:
    """s, b, h, i or j of the pair."""
    return Traced(_INPUTS[name], name)


def text_of_result(argument: str, result: Any) -> str:
    """The text of what score_mod (`argument`) or mask_mod returned."""
    if isinstance(result, Captured) and result._rank > len(result._indices):
        raise Error(f"its result is '{result._name}' as a whole, accepted one value")
    if isinstance(result, Elements):
        raise Error(f"its result is an array of shape {list(result.shape)}, accepted one value")
    result = lift(result)
    if argument == "mask_mod" and result._type != "bool":
        raise Error(f"its result is {result._type}, accepted bool: whether the key is visible")
    return _text_of(to_float(result) if argument == "score_mod" else result)


def trace(argument: str, function: Callable[..., Any], names: Names) -> str:
    """The text of score_mod (`argument`) or mask_mod; what it captures joins `names`."""
    inputs = [input_named(name) for name in _INPUTS if name != "s" or argument == "score_mod"]
    try:
        return text_of_result(argument, names.capture(argument, function)(*inputs))
    except Error as error:
        raise Error(f"{argument}: {error}") from None
    except TypeError as error:
        accepted = ", ".join(("score", "b", "h", "q_idx", "kv_idx")[5 - len(inputs) :])
        raise Error(f"{argument}: {error} (it is called with {accepted})") from error
