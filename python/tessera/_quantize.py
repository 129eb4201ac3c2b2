"""8-bit q, k and v with their scales, for `tessera.attention`, in the framework of the array."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from tessera import _core
from tessera._frameworks import is_torch

Scheme = Literal["tensor", "head", "block", "token"]
BLOCK = 128  # tokens that share a scale of the scheme "block"
_LARGEST = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


class Quantized(NamedTuple):
    codes: Any  # the shape of x, 8 bits an element; value = scale * code
    scale: Any  # float32, in a shape that `attention` takes as q_descale, k_descale or v_descale


def quantize(
    x: Any, dtype: str = "float8_e4m3", *, scheme: Scheme = "block", rotate: bool = False, heads_kv: int | None = None
) -> Quantized:
    """x as 8-bit codes and their scales, each the largest finite magnitude of what shares it over the dtype's largest
    number (1 if that is 0). Codes are rounded to nearest, ties to even; infinities saturate, and a NaN stays a NaN (in
    int8 by a scale of NaN).

    Args:
        x: [B, S, H, D], or pages [pages, page_size, H, D]; NumPy (8-bit floats by ml_dtypes), PyTorch or JAX.
        dtype: "float8_e4m3", "float8_e5m2" or "int8".
        scheme: what shares a scale: "tensor" all of x ([1]); "head" a head ([H]); "block" 128 tokens of a sequence and
            a head ([B, ceil(S / 128), H]); "token" a token and head ([pages, page_size, H]), for pages.
        rotate: first multiply each row by an orthogonal matrix, which spreads an outlier over all columns (see
            `rotate`). q . k is unchanged if both are rotated; of a rotated v, o is rotated back.
        heads_kv: for q: the number of KV heads, whose query heads share their scale.

    Returns:
        (codes, scale).

    Raises:
        tessera.Error: an argument is wrong.
    """
    if dtype not in _LARGEST:
        raise _core.Error(f"dtype: {dtype!r}, accepted {', '.join(_LARGEST)}")
    if scheme not in ("tensor", "head", "block", "token"):
        raise _core.Error(f"scheme: {scheme!r}, accepted tensor, head, block and token")
    _check_rank(x)
    xp = _namespace(x)
    batch, rows, heads, head_dim = x.shape
    heads_kv = heads if heads_kv is None else heads_kv
    if heads_kv < 1 or heads % heads_kv:
        raise _core.Error(f"heads_kv: {heads_kv}, accepted a divisor of x's {heads} heads")
    x = xp.to_float32(_rotated(xp, x) if rotate else x)
    # [batch, blocks, tokens, heads_kv, rows of a KV head and token]
    tokens = BLOCK if scheme == "block" else 1 if scheme == "token" else max(rows, 1)
    blocks = -(-rows // tokens)
    padded = xp.pad_rows(x, blocks * tokens - rows)
    grouped = padded.reshape(batch, blocks, tokens, heads_kv, heads // heads_kv * head_dim)
    magnitude = xp.magnitude(grouped)
    axes = {"tensor": (0, 1, 2, 3, 4), "head": (0, 1, 2, 4)}.get(scheme, (2, 4))
    scale = xp.largest(magnitude, axes) / _LARGEST[dtype]
    scale = xp.where(scale > 0, scale, scale * 0 + 1)
    if dtype == "int8":
        scale = xp.where(xp.any_nan(grouped, axes), scale * math.nan, scale)
    codes = xp.encode(grouped / scale, dtype, _LARGEST[dtype])
    codes = codes.reshape(batch, blocks * tokens, heads, head_dim)[:, :rows]
    shape = {"tensor": (1,), "head": (heads_kv,)}.get(scheme, (batch, blocks, heads_kv))
    return Quantized(codes, scale.reshape(shape))


def rotate(x: Any, *, inverse: bool = False) -> Any:
    """x with each row multiplied by an orthogonal matrix: random signs, the same for every call, then a Hadamard matrix
    of the largest power of two that divides the head size, for each such part of a row. q . k is unchanged if both are
    rotated (Shah et al., "FlashAttention-3", 2024, section 3.3). Rotated values give rotated outputs, which the inverse
    rotates back: o = rotate(P rotate(v), inverse=True). Computed in float32; shape, dtype and framework are x's.

    Args:
        x: [B, S, H, D], or pages [pages, page_size, H, D].
        inverse: multiply by the matrix's inverse.

    Raises:
        tessera.Error: x is no array of rank 4.
    """
    _check_rank(x)
    return _rotated(_namespace(x), x, inverse)


def _check_rank(x: Any) -> None:
    rank = len(getattr(x, "shape", ()))
    if rank != 4:
        raise _core.Error(f"x: rank {rank}, accepted [B, S, H, D] or [pages, page_size, H, D]")


def _signs(head_dim: int) -> list[float]:
    state, signs = 0x9E3779B9, []
    for _ in range(head_dim):
        state = (state * 1664525 + 1013904223) % 2**32
        signs.append(1.0 if state >> 31 else -1.0)
    return signs


def _rotated(xp: Any, x: Any, inverse: bool = False) -> Any:
    head_dim = x.shape[-1]
    width = head_dim & -head_dim  # the largest power of two that divides it
    signs = xp.vector(_signs(head_dim), x)
    y = xp.to_float32(x) if inverse else xp.to_float32(x) * signs
    shape = tuple(y.shape)
    step = 1
    while step < width:
        y = y.reshape(*shape[:-1], head_dim // (2 * step), 2, step)
        y = xp.stack([y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]], -2).reshape(shape)
        step *= 2
    y = y * width**-0.5  # a Hadamard matrix of this factor is its own inverse
    return xp.as_dtype_of(y * signs if inverse else y, x)


# ---- frameworks ------------------------------------------------------------------------------------------------------


class _Arrays:
    """NumPy's functions; JAX's have the same names."""

    def __init__(self, module: Any):
        self._np = module
        self.where, self.stack = module.where, module.stack

    def to_float32(self, x: Any) -> Any:
        return x.astype("float32")

    def as_dtype_of(self, y: Any, x: Any) -> Any:
        return y.astype(x.dtype)

    def vector(self, values: list[float], x: Any) -> Any:
        return self._np.asarray(values, dtype="float32")

    def pad_rows(self, x: Any, count: int) -> Any:
        return self._np.pad(x, ((0, 0), (0, count), (0, 0), (0, 0)))

    def magnitude(self, x: Any) -> Any:
        """|x|, 0 where it is not finite."""
        return self._np.where(self._np.isfinite(x), abs(x), 0)

    def largest(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.max(axis=axes, keepdims=True, initial=0)

    def any_nan(self, x: Any, axes: tuple[int, ...]) -> Any:
        return self._np.isnan(x).any(axis=axes, keepdims=True)

    def encode(self, x: Any, dtype: str, largest: float) -> Any:
        import ml_dtypes

        x = self._np.clip(x, -largest, largest)  # keeps NaN
        if dtype == "int8":
            return self._np.nan_to_num(self._np.rint(x)).astype("int8")
        return x.astype(ml_dtypes.float8_e4m3fn if dtype == "float8_e4m3" else ml_dtypes.float8_e5m2)


class _Jax(_Arrays):
    def encode(self, x: Any, dtype: str, largest: float) -> Any:
        if dtype != "int8":  # XLA's own conversion on a CPU rounds twice
            bits, least = (3, -6) if dtype == "float8_e4m3" else (2, -14)
            _, exponent = self._np.frexp(x)
            step = self._np.ldexp(self._np.float32(1), self._np.maximum(exponent - 1, least) - bits)
            x = self._np.rint(x / step) * step
        return super().encode(x, dtype, largest)


class _Torch:
    def __init__(self, module: Any):
        self._torch = module
        self.where, self.stack = module.where, module.stack

    def to_float32(self, x: Any) -> Any:
        return x.to(self._torch.float32)

    def as_dtype_of(self, y: Any, x: Any) -> Any:
        return y.to(x.dtype)

    def vector(self, values: list[float], x: Any) -> Any:
        return self._torch.tensor(values, dtype=self._torch.float32, device=x.device)

    def pad_rows(self, x: Any, count: int) -> Any:
        return self._torch.nn.functional.pad(x, (0, 0, 0, 0, 0, count))

    def magnitude(self, x: Any) -> Any:
        return self._torch.where(x.isfinite(), x.abs(), 0)

    def largest(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.amax(dim=axes, keepdim=True)

    def any_nan(self, x: Any, axes: tuple[int, ...]) -> Any:
        nan = x.isnan()
        for axis in axes:
            nan = nan.any(dim=axis, keepdim=True)
        return nan

    def encode(self, x: Any, dtype: str, largest: float) -> Any:
        x = x.clamp(-largest, largest)  # keeps NaN
        if dtype == "int8":
            return x.round().nan_to_num().to(self._torch.int8)
        return x.to(self._torch.float8_e4m3fn if dtype == "float8_e4m3" else self._torch.float8_e5m2)


def _namespace(x: Any) -> Any:
    if is_torch(x):
        import torch

        return _Torch(torch)
    if type(x).__module__.startswith(("jax", "jaxlib")):
        import jax.numpy

        return _Jax(jax.numpy)
    import numpy

    if not isinstance(x, numpy.ndarray):
        raise _core.Error(f"x: {type(x).__name__}, accepted an array of NumPy, PyTorch or JAX")
    return _Arrays(numpy)
