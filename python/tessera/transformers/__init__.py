"""Tessera in HuggingFace Transformers.

    import tessera.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tessera")
    model.set_attn_implementation("tessera")                        # or an existing model

    tessera.transformers.activate_flash_attention_2()               # "flash_attention_2" by the drop-in, CPU included
    tessera.transformers.restore_flash_attention_2()

    parallel = tessera.torch.context_parallel(group)                # a model on many processes
    model.set_attn_implementation(tessera.transformers.context_parallel(parallel))

Importing this module registers the name "tessera" with Transformers and changes no model.
"""

from .attention import attention_forward
from .context_parallel import context_parallel
from .flash_attention_2 import activate_flash_attention_2, restore_flash_attention_2
from .masks import Pattern, attention_mask
from .registry import register

register()

__all__ = [
    "Pattern",
    "activate_flash_attention_2",
    "attention_forward",
    "attention_mask",
    "context_parallel",
    "register",
    "restore_flash_attention_2",
]
