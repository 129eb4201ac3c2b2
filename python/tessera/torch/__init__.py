"""Tessera in PyTorch: `attention` with gradients, and PyTorch's own flash attention on Tessera.

    import tessera.torch
    o = tessera.torch.attention(q, k, v, causal=True)               # [B, S, H, D], differentiable

    torch.nn.attention.activate_flash_attention_impl("Tessera")      # F.scaled_dot_product_attention uses Tessera
    torch.nn.attention.restore_flash_attention_impl()                # restores PyTorch's own

`activate()` and `restore()` do the same, also in releases of PyTorch without that registry.

    parallel = tessera.torch.context_parallel(group)                 # one batch over many processes, by rows
    o = parallel.attention(q, k, v, causal=True)

Importing this module registers the name "Tessera" and activates nothing.
"""

from .api import attention
from .blocks import block_mask
from .flex import activate_flex_attention, create_block_mask, flex_attention, restore_flex_attention
from .merge import combine
from .sdpa import activate, fallback_reasons, register, restore

register()

__all__ = [
    "activate", "activate_flex_attention", "attention", "block_mask", "combine", "context_parallel",
    "create_block_mask", "fallback_reasons", "flex_attention", "register", "restore", "restore_flex_attention",
]  # fmt: skip


def __getattr__(name: str):
    if name == "context_parallel":  # some builds of PyTorch lack torch.distributed
        from .ranks import context_parallel

        return context_parallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
