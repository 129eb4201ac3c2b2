"""Tessera in PyTorch: `attention` with gradients, and PyTorch's own flash attention on Tessera.

    import tessera.torch
    o = tessera.torch.attention(q, k, v, causal=True)               # [B, S, H, D], differentiable

    torch.nn.attention.activate_flash_attention_impl("Tessera")      # F.scaled_dot_product_attention, unchanged programs
    torch.nn.attention.restore_flash_attention_impl()                # PyTorch's own again

`activate()` and `restore()` do the same, in releases of PyTorch without that registry too.

    parallel = tessera.torch.context_parallel(group)                 # one batch over many processes, by rows
    o = parallel.attention(q, k, v, causal=True)

Importing this module registers the name "Tessera" and activates nothing.
"""

from .api import attention
from .blocks import block_mask
from .merge import combine
from .sdpa import activate, fallback_reasons, register, restore

register()

__all__ = [
    "activate", "attention", "block_mask", "combine", "context_parallel", "fallback_reasons", "register", "restore",
]  # fmt: skip


def __getattr__(name: str):
    if name == "context_parallel":  # torch.distributed is not in every build of PyTorch
        from .ranks import context_parallel

        return context_parallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
