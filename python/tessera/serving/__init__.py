"""Tessera in inference engines: adaptors for the attention interfaces of vLLM and SGLang, by PyTorch.

    tessera.serving.vllm.Attention        vLLM's AttentionImpl: forward, do_kv_cache_update
    tessera.serving.vllm.Metadata         a step's metadata, from vLLM's CommonAttentionMetadata
    tessera.serving.sglang.Backend        SGLang's AttentionBackend
    tessera.serving.paged                 used by both: one call on pages, and a write by slot mapping

Neither engine is imported: the adaptors accept any object with the attributes of the engine's objects. Nothing here
waits for a GPU, and everything can be captured into a CUDA graph. docs/reference/serving.md documents the interfaces
line by line.
"""

from . import paged, sglang, vllm

__all__ = ["paged", "sglang", "vllm"]
