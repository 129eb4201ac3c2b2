"""Tessera: exact, IO-aware attention that never stores the Sq x Sk matrix of scores.

Arrays of any framework, on the CPU or a GPU, crossing by DLPack or the buffer protocol, never copied::

    o = tessera.attention(q, k, v, causal=True)              # [B, S, H, D]; what goes in comes out: NumPy, PyTorch, JAX
    o, lse = tessera.attention(q, k, v, return_lse=True)
    print(tessera.plan(q, k, v, causal=True))                # which kernel, why, and what it costs

``tessera.attention`` says exactly what is computed, and lists every option.
"""

from tessera._attention import Gradients, append, attention, attention_backward, combine, plan
from tessera._core import Error, device
from tessera._core import version as __version__

__all__ = ["Error", "Gradients", "__version__", "append", "attention", "attention_backward", "combine", "device", "plan"]
