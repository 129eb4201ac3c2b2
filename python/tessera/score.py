"""The functions of score programs, for functions that `tessera.attention` traces as score_mod and mask_mod.

PyTorch's, NumPy's and JAX's functions of the same names may be used, too."""

from tessera._core import ScoreProgram
from tessera._trace import (
    absolute, clip, cos, equal, exp, exp2, floor, isnan, log, logical_and, logical_not, logical_or, logical_xor,
    maximum, minimum, relu, rsqrt, sigmoid, sign, sin, sqrt, tanh, to_float, to_int, where,
)  # fmt: skip

__all__ = [
    "ScoreProgram", "absolute", "clip", "cos", "equal", "exp", "exp2", "floor", "isnan", "log", "logical_and",
    "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "relu", "rsqrt", "sigmoid", "sign", "sin", "sqrt",
    "tanh", "to_float", "to_int", "where",
]  # fmt: skip
