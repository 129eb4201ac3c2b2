"""Attention and its gradients in NumPy, as the library's interface defines them, in any precision.

`Plain` in float64 is what results are held against; in float32, with products' inputs rounded to a half precision where
that is the dtype, it is the plain computation whose error bounds that of the program.
"""

import numpy as np


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

    def __init__(self, q, k, v, *, dtype="float64", scale=None, causal=False, top_left=False, window=(-1, -1),
                 softcap=0.0, bias=None, mask=None, alibi=None, sink=None):
        self.work = np.float64 if dtype == "float64" else np.float32
        self.round = ROUND[dtype]
        q, k, v = (np.asarray(x, self.work) for x in (q, k, v))
        self.group = q.shape[2] // k.shape[2]
        self.bias_shape = None if bias is None else bias.shape
        # [B, H, S, D]
        self.q = q.transpose(0, 2, 1, 3)
        self.k, self.v = (np.repeat(x.transpose(0, 2, 1, 3), self.group, axis=1) for x in (k, v))
        self.scale = self.work(1 / np.sqrt(q.shape[-1]) if scale is None else scale)
        self.softcap = self.work(softcap)
        heads, rows, keys = self.q.shape[1], self.q.shape[2], self.k.shape[2]

        s = self.scale * product(self.q, self.k.swapaxes(-1, -2))
        self.tanh = np.tanh(s / self.softcap) if softcap else None
        if softcap:
            s = self.softcap * self.tanh
        if bias is not None:
            s = s + np.asarray(bias, self.work)
        i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
        if alibi is not None:
            slopes = np.asarray(alibi, self.work).reshape(-1, heads, 1, 1)
            s = s - slopes * np.abs(i + keys - rows - j).astype(self.work)
        diagonal = i + (0 if top_left else keys - rows)
        visible = np.ones((rows, keys), bool)
        if causal:
            visible &= j <= diagonal
        if window[0] >= 0:
            visible &= j >= diagonal - window[0]
        if window[1] >= 0:
            visible &= j <= diagonal + window[1]
        if mask is not None:
            visible = visible & mask
        s = np.where(visible, s, -np.inf)
        columns = s
        if sink is not None:
            logit = np.broadcast_to(np.asarray(sink, self.work).reshape(1, -1, 1, 1), s.shape[:3] + (1,))
            columns = np.concatenate([s, logit], axis=-1)
        largest = columns.max(-1, keepdims=True, initial=-np.inf)
        largest = np.where(np.isfinite(largest), largest, 0)
        with np.errstate(divide="ignore"):
            self.lse = (largest + np.log(np.exp(columns - largest).sum(-1, keepdims=True)))[..., 0]
        finite = np.where(np.isfinite(self.lse), self.lse, 0)[..., None]
        self.p = np.exp(s - finite)
        self.p_sink = None if sink is None else np.exp(logit - finite)[..., 0]
        self.o = self.round(product(self.round(self.p), self.v).transpose(0, 2, 1, 3))

    def _of_keys(self, gradient):
        b, h, s, d = gradient.shape
        return self.round(gradient.reshape(b, h // self.group, self.group, s, d).sum(2).transpose(0, 2, 1, 3))

    def gradients(self, d_o, d_lse=None):
        d_o = np.asarray(d_o, self.work).transpose(0, 2, 1, 3)
        d_lse = self.work(0) if d_lse is None else np.asarray(d_lse, self.work)[..., None]
        d_p = product(d_o, self.v.swapaxes(-1, -2))
        delta = (self.p * d_p).sum(-1, keepdims=True) - d_lse
        d_s = self.p * (d_p - delta)
        result = {"dv": self._of_keys(product(self.round(self.p).swapaxes(-1, -2), d_o))}
        if self.bias_shape is not None:
            shape = (1,) * (4 - len(self.bias_shape)) + self.bias_shape
            axes = tuple(a for a in range(4) if shape[a] == 1 and d_s.shape[a] != 1)
            result["dbias"] = d_s.sum(axes, keepdims=True).reshape(self.bias_shape)
        if self.p_sink is not None:
            result["dsink"] = (-self.p_sink * delta[..., 0]).sum((0, 2))
        if self.tanh is not None:
            d_s = d_s * (1 - self.tanh**2)
        d_s = self.round(d_s)
        result["dq"] = self.round((self.scale * product(d_s, self.k)).transpose(0, 2, 1, 3))
        result["dk"] = self._of_keys(self.scale * product(d_s.swapaxes(-1, -2), self.q))
        return result


def assert_close(result, exact, plain, dtype, ulps=4):
    """The largest and the RMS error against float64 at most twice those of the plain computation, and a few units in the
    last place of the result's magnitude."""
    result, exact, plain = (np.asarray(x, np.float64) for x in (result, exact, plain))
    assert result.shape == exact.shape
    hidden = np.isneginf(exact)
    assert (np.isneginf(result) == hidden).all()
    result, exact, plain = (np.where(hidden, 0, x) for x in (result, exact, plain))
    assert np.isfinite(result).all()
    for measure in (lambda x: np.abs(x).max(initial=0), lambda x: np.sqrt(np.mean(x**2)) if x.size else 0.0):
        bound = 2 * measure(plain - exact) + ulps * EPSILON[dtype] * measure(exact)
        assert measure(result - exact) <= bound
