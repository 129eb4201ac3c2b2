"""The problem of one row of the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Self-attention of `length` queries and keys, q [B, S, H, D] and k, v [B, S, Hkv, D]."""

    direction: str  # "forward" or "backward"
    length: int
    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: str
    causal: bool
    dropout_p: float

    @property
    def backward(self) -> bool:
        return self.direction == "backward"

    @property
    def query_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.length, self.heads, self.head_dim)

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.length, self.heads_kv, self.head_dim)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def scores(self) -> int:
        """Entries of the score matrix, B H S^2."""
        return self.batch * self.heads * self.length**2

    @property
    def flops(self) -> float:
        """4 B H S^2 D, half of it if causal, times 2.5 backward."""
        return 4.0 * self.scores * self.head_dim * (0.5 if self.causal else 1) * (2.5 if self.backward else 1)
