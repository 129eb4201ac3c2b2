"""Tessera under an inference engine: adaptors of the attention contracts of vLLM and SGLang, by PyTorch.

    tessera.serving.vllm.Attention        what vLLM calls an AttentionImpl: forward, do_kv_cache_update
    tessera.serving.vllm.Metadata         of a step, from its CommonAttentionMetadata
    tessera.serving.sglang.Backend        what SGLang calls an AttentionBackend
    tessera.serving.paged                 what both stand on: one call over pages, a write by slots

Neither engine is imported: the adaptors take what has the attributes of their objects. Nothing here waits for a GPU, and all
of it can be captured into a CUDA graph. docs/reference/serving.md maps the contracts line by line.
"""

from . import paged, sglang, vllm

__all__ = ["paged", "sglang", "vllm"]
