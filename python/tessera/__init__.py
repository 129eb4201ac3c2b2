"""Tessera: exact, IO-aware attention that never stores the Sq x Sk matrix of scores.

Accepts arrays of any framework, on the CPU or a GPU, by DLPack or the buffer protocol, without copies::

    o = tessera.attention(q, k, v, causal=True)              # [B, S, H, D], in q's framework: NumPy, PyTorch, JAX ...
    o, lse = tessera.attention(q, k, v, return_lse=True)
    print(tessera.plan(q, k, v, causal=True))                # which kernel, why, and what it costs

``tessera.attention`` documents what is computed, and lists every option.
"""

from tessera._attention import Gradients, append, attention, attention_backward, combine, plan
from tessera._core import Error, device
from tessera._core import version as __version__
from tessera._quantize import quantize, rotate

__all__ = [
    "Error", "Gradients", "__version__", "append", "attention", "attention_backward", "combine", "device", "plan",
    "quantize", "rotate",
]  # fmt: skip
