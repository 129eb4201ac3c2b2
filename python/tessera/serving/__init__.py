"""Tessera under an inference engine: attention back ends of vLLM and SGLang, by PyTorch.

Both engines find them by the package's entry points, so installing it is enough:

    vllm serve MODEL --attention-backend TESSERA
    python -m sglang.launch_server --model-path MODEL --attention-backend tessera

    tessera.serving.vllm      what vLLM calls an AttentionImpl, and a step's metadata; vllm_backend: its three classes
    tessera.serving.sglang    what SGLang calls an AttentionBackend; sglang_backend: the class that it makes
    tessera.serving.paged     what both stand on: one call over pages, a write by slots

Importing this package imports neither engine. Nothing here waits for a GPU, and all of it can be captured into a CUDA
graph.
docs/reference/serving.md maps the contracts line by line.
"""

from . import paged, sglang, vllm

__all__ = ["paged", "sglang", "vllm"]
