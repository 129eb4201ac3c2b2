"""Compares results with float64 on a sample: some rows of some heads and, if that is fast, all rows of one head."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tessera.compare.float64 import Rows, attend
from tessera.compare.frameworks import NumPy, PyTorch
from tessera.compare.shape import Shape

_HEADS, _ROWS = 2, 256  # sampled
_KEY_SCORES = 1 << 26  # size of the score matrix up to which a key head's gradients are computed: seconds
_CHUNK_SCORES = 1 << 22  # computed at once: 32 MiB


class Error(NamedTuple):
    """Error of a result against float64, over the elements of the sample."""

    max: float
    rms: float
    elements: int


class Exact:
    """A sample of the exact results for q, k, v (and d_o) [B, S, H, D], each stored with its index in the result."""

    def __init__(self, shape: Shape, framework: NumPy | PyTorch, q: Any, k: Any, v: Any, d_o: Any | None):
        self._shape, self._framework = shape, framework
        self._inputs = {"q": q, "k": k, "v": v, "d_o": d_o}
        self._expected: dict[str, list[tuple[tuple[Any, ...], np.ndarray]]] = {}
        random = np.random.default_rng(1)
        items = shape.batch * shape.heads
        for item in sorted(random.choice(items, min(_HEADS, items), replace=False)):
            b, h = divmod(int(item), shape.heads)
            rows = np.sort(random.choice(shape.length, min(_ROWS, shape.length), replace=False))
            self._sample_rows(b, h, rows)
        group = shape.heads // shape.heads_kv
        if shape.backward and group * shape.length**2 <= _KEY_SCORES:
            self._sample_key_head(int(random.integers(shape.batch)), int(random.integers(shape.heads_kv)), group)

    def errors(self, results: dict[str, Any]) -> dict[str, Error]:
        """Errors of results [B, S, H, D] by name: o forward; d_q, d_k, d_v backward."""
        errors = {}
        for name, places in self._expected.items():
            differences = np.concatenate(
                [(self._framework.float64(results[name][place]) - expected).ravel() for place, expected in places]
            )
            rms = float(np.sqrt(np.mean(differences**2)))
            errors[name] = Error(float(np.abs(differences).max()), rms, differences.size)
        return errors

    def _head(self, name: str, b: int, h: int) -> np.ndarray:
        return self._framework.float64(self._inputs[name][b, :, h])

    def _attend(self, b: int, h: int, rows: np.ndarray, k: np.ndarray, v: np.ndarray) -> Rows:
        q = self._head("q", b, h)[rows]
        d_o = self._head("d_o", b, h)[rows] if self._shape.backward else None
        return attend(np, q, k, v, rows, scale=self._shape.scale, d_o=d_o, causal=self._shape.causal)

    def _sample_rows(self, b: int, h: int, rows: np.ndarray) -> None:
        h_kv = h // (self._shape.heads // self._shape.heads_kv)
        results = self._attend(b, h, rows, self._head("k", b, h_kv), self._head("v", b, h_kv))
        name, expected = ("d_q", results.d_q) if self._shape.backward else ("o", results.o)
        self._expected.setdefault(name, []).append(((b, rows, h), expected))

    def _sample_key_head(self, b: int, h_kv: int, group: int) -> None:
        k, v = self._head("k", b, h_kv), self._head("v", b, h_kv)
        d_k, d_v = np.zeros_like(k), np.zeros_like(v)
        step = max(1, _CHUNK_SCORES // self._shape.length)
        for h in range(h_kv * group, (h_kv + 1) * group):
            for start in range(0, self._shape.length, step):
                rows = np.arange(start, min(start + step, self._shape.length))
                results = self._attend(b, h, rows, k, v)
                d_k += results.d_k
                d_v += results.d_v
        self._expected["d_k"] = [((b, slice(None), h_kv), d_k)]
        self._expected["d_v"] = [((b, slice(None), h_kv), d_v)]
