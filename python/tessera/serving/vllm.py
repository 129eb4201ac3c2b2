"""The attention interface of vLLM's V1 engine, without importing vLLM."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Union

import torch
from torch import Tensor

from tessera._core import Error

from .paged import Prefix, attend, common_prefix, write_slots


_CACHE_DTYPES = ("auto", "float16", "half", "bfloat16", "float32", "float")
# Attributes of a step that change the result and are not supported.
_REFUSED = ("dcp_context_kv_lens", "dcp_local_seq_lens", "encoder_seq_lens", "mm_prefix_range", "mm_req_doc_ranges")


def _refuse_attributes(what: str, step: Any) -> None:
    for name in _REFUSED:
        value = getattr(step, name, None)
        if value is not None and (isinstance(value, Tensor) or value):
            raise Error(f"{what}.{name}: given, accepted None: decoders whose keys are in one cache")


@dataclasses.dataclass
class Metadata:
    """A step as described by vLLM: tensors on the device, bounds on the host."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # int32 [B + 1]
    max_seq_len: int
    seq_lens: Tensor  # int32 [B], keys including the new ones
    block_table: Tensor  # int32 [B, max_blocks]
    slot_mapping: Tensor  # int64 [T]
    causal: Union[bool, Tensor] = True  # or bool [B]
    prefix: Optional[Prefix] = None

    @classmethod
    def of(cls, common: Any, common_prefix_len: int = 0, block_size: int = 1) -> Metadata:
        """From CommonAttentionMetadata, like an AttentionMetadataBuilder's build(). The full blocks of a common prefix
        are read once for all sequences."""
        _refuse_attributes("common", common)
        prefix = None
        if common_prefix_len > 0:
            prefix = common_prefix(common_prefix_len, seqused_k=common.seq_lens, page_size=block_size)
        return cls(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            prefix=prefix,
        )


class Attention:
    """A layer's attention with the interface of vLLM's AttentionImpl.

    q, k, v are float32, float16 or bfloat16, and the cache has the same dtype. Any block size, NHD and HND layout,
    blocks in any order in memory. The cache is written by do_kv_cache_update, not by forward.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: Optional[int] = None,
        alibi_slopes: Optional[List[float]] = None,
        sliding_window: Optional[int] = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Optional[float] = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: Optional[str] = None,
        sinks: Optional[Tensor] = None,
    ) -> None:
        if kv_cache_dtype not in _CACHE_DTYPES:
            raise Error(f"kv_cache_dtype: '{kv_cache_dtype}', accepted 'auto', 'float16', 'bfloat16' and 'float32'")
        if attn_type != "decoder":
            raise Error(
                f"attn_type: '{attn_type}', accepted 'decoder': tessera.attention serves the others, without a cache"
            )
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.options = {
            "scale": scale,
            "softcap": logits_soft_cap or None,
            # A window of n keys is the query's own key and n - 1 keys before it.
            "window": None if sliding_window is None else (sliding_window - 1, 0),
        }

    def forward(
        self,
        layer: Any,
        query: Tensor,  # [T, Hq, D]
        key: Optional[Tensor],  # already in the cache
        value: Optional[Tensor],
        kv_cache: Tensor,  # [2, blocks, block_size, Hkv, D]
        attn_metadata: Any,  # Metadata, or an object with its attributes, such as vLLM's FlashAttentionMetadata
        output: Tensor,  # [T, Hq, D]
        output_scale: Optional[Tensor] = None,
        output_block_scale: Optional[Tensor] = None,
    ) -> Tensor:
        """Writes output; its rows from num_actual_tokens on become 0."""
        if output_scale is not None or output_block_scale is not None:
            raise Error("output_scale, output_block_scale: given, accepted None: outputs are not quantised")
        if attn_metadata is None:  # vLLM's profiling run
            return output.zero_()
        step = attn_metadata
        _refuse_attributes("attn_metadata", step)
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        k_cache, v_cache = kv_cache.unbind(0)
        a_flag_each = isinstance(step.causal, Tensor)
        attend(
            query.view(-1, self.num_heads, self.head_size), k_cache, v_cache,
            output.view(-1, self.num_heads, self.head_size),
            cu_seqlens_q=step.query_start_loc, seqused_k=step.seq_lens, page_table=step.block_table,
            max_seqlen_q=step.max_query_len, max_seqlen_k=step.max_seq_len,
            causal=None if a_flag_each else step.causal, causal_seqs=step.causal if a_flag_each else None,
            alibi_slopes=self.alibi_slopes, sink=self.sinks, prefix=getattr(step, "prefix", None), **self.options,
        )  # fmt: skip
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Optional[Tensor], value: Optional[Tensor], kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes key and value [T, Hkv, D] to their slots; -1 is skipped."""
        if self.kv_sharing_target_layer_name is not None or key is None or value is None:
            return
        write_slots(key, value, *kv_cache.unbind(0), slot_mapping)
