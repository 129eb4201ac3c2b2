"""The name "tessera" in Transformers' two registries: attention functions, and functions that make masks."""

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .attention import attention_forward
from .masks import attention_mask


def register(name: str = "tessera") -> None:
    """Offers Tessera as `attn_implementation=name`. No model changes until it requests that name."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
