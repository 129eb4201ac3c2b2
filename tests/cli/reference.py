"""Attention and its gradients in NumPy, as the library's interface defines them, in any precision:
python/tessera/compare/float64.py for whole tensors.

`Plain` in float64 is the reference for results. In float32, with the inputs of products rounded to the half-precision
dtype if there is one, it is the plain computation whose error bounds the program's error.
"""

import importlib.util
import pathlib

import numpy as np

# The program's tests need no Python package: the one file is enough.
_FLOAT64 = pathlib.Path(__file__).resolve().parents[2] / "python" / "tessera" / "compare" / "float64.py"
_spec = importlib.util.spec_from_file_location("float64", _FLOAT64)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
attend = _module.attend


def to_bfloat16(x):
    """Rounded to the nearest bfloat16, in float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


def bfloat16_bits(x):
    return (to_bfloat16(x).view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16_bits(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


ROUND = {
    "float32": lambda x: x,
    "float64": lambda x: x,
    "float16": lambda x: x.astype(np.float16).astype(np.float32),
    "bfloat16": to_bfloat16,
}
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def product(a, b):
    """a @ b: by NumPy in float64, term after term in float32, as a plain loop does it."""
    if a.dtype == np.float64:
        return a @ b
    total = np.zeros(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2], b.shape[-1]), np.float32)
    for i in range(a.shape[-1]):
        total += a[..., :, i, None] * b[..., i, None, :]
    return total


class Plain:
    """q [B, Sq, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]."""

    def __init__(
        self, q, k, v, *, dtype="float64", scale=None, top_left=False, bias=None, alibi=None, sink=None, **options
    ):
        self.work = work = np.float64 if dtype == "float64" else np.float32
        self.round = ROUND[dtype]
        q, k, v = (np.asarray(x, work).transpose(0, 2, 1, 3) for x in (q, k, v))
        heads, rows, keys = q.shape[1], q.shape[2], k.shape[2]
        self.group = heads // k.shape[1]
        self.bias_shape = None if bias is None else bias.shape
        diagonal = np.arange(rows) + (0 if top_left else keys - rows)
        self._inputs = (q, *(np.repeat(x, self.group, axis=1) for x in (k, v)), diagonal)
        self._options = dict(
            options, scale=work(1 / np.sqrt(q.shape[-1]) if scale is None else scale), product=product,
            stored=self.round,
            bias=None if bias is None else np.asarray(bias, work),
            slope=None if alibi is None else np.asarray(alibi, work).reshape(-1, heads, 1, 1),
            sink=None if sink is None else np.asarray(sink, work).reshape(1, -1, 1, 1),
        )  # fmt: skip
        results = attend(np, *self._inputs, **self._options)
        self.p, self.lse, self.o = results.p, results.lse, self.round(results.o.transpose(0, 2, 1, 3))

    def _of_keys(self, gradient):
        b, h, s, d = gradient.shape
        return self.round(gradient.reshape(b, h // self.group, self.group, s, d).sum(2).transpose(0, 2, 1, 3))

    def gradients(self, d_o, d_lse=None):
        d_o = np.asarray(d_o, self.work).transpose(0, 2, 1, 3)
        d_lse = self.work(0) if d_lse is None else np.asarray(d_lse, self.work)[..., None]
        results = attend(np, *self._inputs, d_o=d_o, d_lse=d_lse, **self._options)
        gradients = {
            "dq": self.round(results.d_q.transpose(0, 2, 1, 3)),
            "dk": self._of_keys(results.d_k),
            "dv": self._of_keys(results.d_v),
        }
        if self.bias_shape is not None:
            shape = (1,) * (4 - len(self.bias_shape)) + self.bias_shape
            axes = tuple(a for a in range(4) if shape[a] == 1 and results.d_s.shape[a] != 1)
            gradients["dbias"] = results.d_s.sum(axes, keepdims=True).reshape(self.bias_shape)
        if results.d_sink is not None:
            gradients["dsink"] = results.d_sink.sum((0, 2))
        return gradients


def assert_close(result, exact, plain, dtype, ulps=4):
    """The largest and the RMS error against float64 at most twice those of the plain computation, and a few units in
    the last place of the result's magnitude."""
    result, exact, plain = (np.asarray(x, np.float64) for x in (result, exact, plain))
    assert result.shape == exact.shape
    hidden = np.isneginf(exact)
    assert (np.isneginf(result) == hidden).all()
    result, exact, plain = (np.where(hidden, 0, x) for x in (result, exact, plain))
    assert np.isfinite(result).all()
    for measure in (lambda x: np.abs(x).max(initial=0), lambda x: np.sqrt(np.mean(x**2)) if x.size else 0.0):
        bound = 2 * measure(plain - exact) + ulps * EPSILON[dtype] * measure(exact)
        error = measure(result - exact)
        assert error <= bound, f"error {error:.3g}, accepted {bound:.3g}; of the plain one {measure(plain - exact):.3g}"
