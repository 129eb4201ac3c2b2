"""The classes that vLLM's registry loads for the back end TESSERA: vLLM 0.33's contract on tessera.serving.vllm."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from vllm import envs
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.kv_cache_layout import KVCacheLayout

from . import vllm


class Impl(vllm.Attention, AttentionImpl):
    """A layer's attention; VLLM_BATCH_INVARIANT makes its bits those of each sequence alone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT), **options)


class Builder(AttentionMetadataBuilder):
    """Metadata of a step. Nothing is computed: a plan holds for all lengths below its bounds, so every batch may be
    replayed from a CUDA graph, and what a graph reads is in the runner's own buffers."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> vllm.Metadata:
        return vllm.Metadata.of(common_attn_metadata)

    def update_block_table(
        self, metadata: vllm.Metadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> vllm.Metadata:
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: vllm.Metadata) -> None:
        """The metadata are the runner's own buffers, which it has updated."""


class Backend(AttentionBackend):
    """What TESSERA supports. A layer with anything else is refused by vLLM with the reason, before it is built."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = [*vllm.CACHE_DTYPES, *vllm.FP8_DTYPES]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return vllm.NAME

    @staticmethod
    def get_impl_cls() -> type:
        return Impl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @classmethod
    def supported_kv_cache_layouts(cls) -> Tuple[KVCacheLayout, ...]:
        """Those whose content, a key and its value, is contiguous. First those in which a head's keys of a block follow
        one another, as the enum has them."""
        return tuple(layout for layout in KVCacheLayout if layout.stride_order[-1] == 4)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= 512

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Optional[str], *others: Any, **named: Any
    ) -> Optional[str]:
        """The reason against a cache of 8 bits under float32 queries."""
        if dtype == torch.float32 and kv_cache_dtype in vllm.FP8_DTYPES:
            return f"kv_cache_dtype {kv_cache_dtype} with float32, accepted with float16 and bfloat16"
        return None

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True
