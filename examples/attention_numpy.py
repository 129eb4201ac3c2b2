"""Attention on NumPy arrays, forward and backward, beside the three lines that it replaces."""

import numpy as np
import tessera

random = np.random.default_rng(0)
B, S, H, D = 2, 500, 4, 64
q, k, v, d_o = (random.standard_normal((B, S, H, D), dtype=np.float32) for _ in range(4))

o, lse = tessera.attention(q, k, v, causal=True, return_lse=True)
gradients = tessera.attention_backward(q, k, v, o, lse, d_o, causal=True)

scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(D) + np.triu(np.full((S, S), -np.inf), 1)  # S x S
weights = np.exp(scores - scores.max(-1, keepdims=True))
expected = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)

print(tessera.plan(q, k, v, causal=True))
print("largest difference:", abs(o - expected).max())
print("gradients:", *(f"{name} {array.shape}" for name, array in gradients._asdict().items() if array is not None))
assert abs(o - expected).max() < 1e-5
