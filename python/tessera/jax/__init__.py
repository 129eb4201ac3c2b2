"""Tessera in JAX: `attention` under jit, grad and vmap, and `jax.nn.dot_product_attention` on Tessera.

    import tessera.jax
    o = tessera.jax.attention(q, k, v, causal=True)                  # [B, S, H, D], under all of JAX's transformations

    o = tessera.jax.dot_product_attention(q, k, v, is_causal=True)   # the arguments of jax.nn's function
    tessera.jax.activate()                                           # replaces jax.nn.dot_product_attention
    tessera.jax.restore()                                            # restores JAX's own

    nnx.MultiHeadAttention(..., attention_fn=tessera.jax.flax_attention)     # a layer of Flax, with its dropout

    tessera.jax.ring_attention(q, k, v, axis_name="ring", causal=True)       # one sequence over devices, in shard_map
    tessera.jax.append(k, v, k_cache, v_cache, lengths)                      # new keys and values into donated caches

XLA calls the library through its foreign function interface: nothing is computed in Python, and no data leave the
device.
"""

from .activation import activate, restore
from .api import attention
from .cache import Appended, append
from .nn import dot_product_attention, flax_attention
from .ring import ring_attention, ring_positions

__all__ = [
    "Appended", "activate", "append", "attention", "dot_product_attention", "flax_attention", "restore",
    "ring_attention", "ring_positions",
]  # fmt: skip
