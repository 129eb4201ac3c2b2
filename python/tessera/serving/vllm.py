"""vLLM's attention contract (its V1 engine). vLLM is imported by `register` alone.

vllm_backend.py has the classes that vLLM's registry loads; what they compute is here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor

from tessera._core import Error

from .paged import attend, descales_of, write_slots

NAME = "TESSERA"  # vllm serve --attention-backend TESSERA
CACHE_DTYPES = ("auto", "float16", "bfloat16")  # vLLM's names; "auto" is the model's dtype
# Of 8 bits, in memory that vLLM declares as uint8.
FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Of a step: what changes the result and is not supported.
_REFUSED = (
    "dcp_context_kv_lens", "dcp_local_seq_lens", "encoder_seq_lens", "mm_prefix_range", "mm_req_doc_ranges",
    "rswa_prefix_lens",
)  # fmt: skip


def register() -> None:
    """The entry point of vLLM's plug-ins (group vllm.general_plugins): makes TESSERA one of its attention back ends.
    vLLM calls it once in each of its processes; a second call changes nothing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, "tessera.serving.vllm_backend.Backend")


def _refuse_attributes(what: str, step: Any) -> None:
    for name in _REFUSED:
        value = getattr(step, name, None)
        if value is not None and (isinstance(value, Tensor) or value):
            raise Error(f"{what}.{name}: given, accepted None: decoders whose keys are in one cache")


@dataclasses.dataclass
class Metadata:
    """A step, as vLLM describes it: tensors of the device, bounds of the host."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # int32 [B + 1]
    max_seq_len: int
    seq_lens: Tensor  # int32 [B], keys with the new ones
    block_table: Tensor  # int32 [B, max_blocks]
    slot_mapping: Tensor  # int64 [T]
    causal: Union[bool, Tensor] = True  # or bool [B]

    @classmethod
    def of(cls, common: Any) -> Metadata:
        """From CommonAttentionMetadata: what an AttentionMetadataBuilder's build() answers. Only its tensors on the
        device tell lengths: a sequence may have fewer queries there than query_start_loc_cpu says. max_query_len and
        max_seq_len are bounds."""
        _refuse_attributes("common", common)
        return cls(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )


class Attention:
    """A layer's attention, as vLLM makes and calls it (AttentionImpl).

    q, k, v are float32, float16 or bfloat16, and the cache has their dtype; or, of the latter two, 8 bits with the
    layer's scales _k_scale and _v_scale. The cache is [blocks, Hkv, block_size,
    D + Dv]: a token's key in the first D of its last dimension, its value in the rest. Any block size and any strides
    of the other dimensions are accepted, so every layout of vLLM's KVCacheLayout; and keys and values one after the
    other, [2, blocks, block_size, Hkv, D], as earlier releases of vLLM have them. do_kv_cache_update writes the cache,
    forward does not.
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
        batch_invariant: bool = False,
    ) -> None:
        if kv_cache_dtype not in CACHE_DTYPES and kv_cache_dtype not in FP8_DTYPES:
            accepted = ", ".join(map(repr, (*CACHE_DTYPES, *FP8_DTYPES)))
            raise Error(f"kv_cache_dtype: '{kv_cache_dtype}', accepted {accepted}")
        if attn_type != "decoder":
            served = "tessera.attention serves the others, without a cache"
            raise Error(f"attn_type: '{attn_type}', accepted 'decoder': {served}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.sinks = sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.options = {"scale": scale, "softcap": logits_soft_cap or None, "batch_invariant": batch_invariant}

    def _caches(self, kv_cache: Tensor) -> Tuple[Tensor, Tensor]:
        """k [blocks, block_size, Hkv, D] and v [blocks, block_size, Hkv, Dv], views of kv_cache."""
        if self.kv_cache_dtype in FP8_DTYPES:
            kv_cache = kv_cache.view(FP8_DTYPES[self.kv_cache_dtype])
        if kv_cache.dim() == 5:
            return kv_cache[0], kv_cache[1]
        cache = kv_cache.transpose(1, 2)
        return cache[..., : self.head_size], cache[..., self.head_size :]

    def _descales(self, layer: Any, device: torch.device) -> Dict[str, Tensor]:
        if self.kv_cache_dtype not in FP8_DTYPES:
            return {}
        return descales_of(getattr(layer, "_k_scale", None), getattr(layer, "_v_scale", None), device)

    def _window(self, causal: Union[bool, Tensor]) -> Optional[Tuple[int, int]]:
        """A window of n keys is the query's own and n - 1 before it; a sequence that is not causal sees n - 1 after it,
        too."""
        if self.sliding_window is None:
            return None
        reach = self.sliding_window - 1
        return (reach, 0) if causal is True else (reach, reach)

    def forward(
        self,
        layer: Any,
        query: Tensor,  # [T, Hq, D]
        key: Optional[Tensor],  # in the cache already
        value: Optional[Tensor],
        kv_cache: Tensor,  # [blocks, Hkv, block_size, D + Dv]
        attn_metadata: Any,  # Metadata, or what has its attributes; None while vLLM measures its memory
        output: Tensor,  # [T, Hq, Dv]
        output_scale: Optional[Tensor] = None,
        output_block_scale: Optional[Tensor] = None,
    ) -> Tensor:
        """Writes output; its rows after the last sequence's become 0."""
        if output_scale is not None or output_block_scale is not None:
            raise Error("output_scale, output_block_scale: given, accepted None: outputs are not quantised")
        if attn_metadata is None:
            return output.zero_()
        step = attn_metadata
        _refuse_attributes("attn_metadata", step)
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        k_cache, v_cache = self._caches(kv_cache)
        a_flag_each = isinstance(step.causal, Tensor)
        attend(
            query.view(-1, self.num_heads, self.head_size), k_cache, v_cache,
            output.view(-1, self.num_heads, v_cache.shape[-1]),
            cu_seqlens_q=step.query_start_loc, seqused_k=step.seq_lens, page_table=step.block_table,
            max_seqlen_q=step.max_query_len, max_seqlen_k=step.max_seq_len,
            causal=None if a_flag_each else step.causal, causal_seqs=step.causal if a_flag_each else None,
            window=self._window(step.causal), alibi_slopes=self.alibi_slopes, sink=self.sinks, **self.options,
            **self._descales(layer, query.device),
        )  # fmt: skip
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Optional[Tensor], value: Optional[Tensor], kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes key [T, Hkv, D] and value [T, Hkv, Dv] to their slots; slot -1 writes nothing."""
        if self.kv_sharing_target_layer_name is not None or key is None or value is None:
            return
        write_slots(key, value, *self._caches(kv_cache), slot_mapping, self._descales(layer, key.device))
