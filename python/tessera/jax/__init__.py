"""Tessera in JAX: `attention` under jit, grad and vmap, and `jax.nn.dot_product_attention` on Tessera.

    import tessera.jax
    o = tessera.jax.attention(q, k, v, causal=True)                  # [B, S, H, D], under any of JAX's transformations

    o = tessera.jax.dot_product_attention(q, k, v, is_causal=True)   # jax.nn's own arguments
    tessera.jax.activate()                                           # jax.nn.dot_product_attention, unchanged programs
    tessera.jax.restore()                                            # JAX's own again

    nnx.MultiHeadAttention(..., attention_fn=tessera.jax.flax_attention)     # a layer of Flax, dropout with it

XLA calls the library by its foreign function interface: nothing is computed in Python, and nothing leaves the device.
"""

from .api import attention
from .nn import activate, dot_product_attention, flax_attention, restore

__all__ = ["activate", "attention", "dot_product_attention", "flax_attention", "restore"]
