"""Tessera in Megatron: attention for megatron-core's layers, by a ModuleSpec.

    import tessera.megatron
    spec = tessera.megatron.with_attention(get_gpt_layer_local_spec())       # a copy of a spec, with this attention
    model = GPTModel(config, transformer_layer_spec=spec, ...)

The functions that megatron-core imports from flash_attn for decoding and dynamic batching come from the drop-in, if it
is installed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any, Optional

from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

import tessera.torch
from tessera._core import Error

__all__ = ["TesseraAttention", "with_attention"]

# Megatron's cp_comm_type.
_STRATEGIES = {None: "auto", "p2p": "ring", "a2a": "all_to_all", "all_gather": "all_gather", "a2a+p2p": "mesh"}

_CAUSAL = (AttnMaskType.causal, AttnMaskType.causal_bottom_right, AttnMaskType.padding_causal)


class TesseraAttention(DotProductAttention):
    """megatron-core's DotProductAttention, its parameters and its checkpoints, without the matrix of scores.

    It also supports packed sequences (`packed_seq_params` in the thd format), a bias, query groups without copies of
    their keys, and context parallelism (dense, without masks, bias and dropout). As in Megatron, a mask hides where it
    is True; a causal layer is causal in addition, with the last query aligned with the last key. A mask that is only
    causal costs time; Megatron's --no-create-attention-mask-in-dataloader avoids it.
    """

    def __init__(self, config: Any, *args: Any, cp_comm_type: Optional[str] = None, **options: Any):
        alone = config
        if config.context_parallel_size > 1:  # the parent refuses it
            alone = copy.copy(config)
            alone.context_parallel_size = 1
        super().__init__(alone, *args, **options)
        self.config = config
        self.parallel = None
        if config.context_parallel_size > 1:
            group = getattr(options.get("pg_collection"), "cp", None) or parallel_state.get_context_parallel_group()
            strategy = _STRATEGIES.get(cp_comm_type)
            if strategy is None:
                accepted = ", ".join(map(repr, _STRATEGIES))
                raise Error(f"cp_comm_type: {cp_comm_type!r}, accepted {accepted}")
            # Megatron assigns chunks r and 2N - 1 - r of 2N to rank r.
            self.parallel = tessera.torch.context_parallel(group, layout="zig_zag", strategy=strategy)

    def forward(
        self,
        query: Tensor,  # [Sq, B, H, D], or packed [T, H, D]
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor],  # [B|1, 1, Sq|1, Sk], True: hidden
        attn_mask_type: Optional[AttnMaskType] = None,
        attention_bias: Optional[Tensor] = None,
        packed_seq_params: Optional[Any] = None,
    ) -> Tensor:  # [Sq, B, H Dv], or packed [T, H Dv]
        options = self._options(attn_mask_type, attention_mask, attention_bias)
        if self.parallel is not None:
            return self._over_ranks(query, key, value, packed_seq_params, options)
        if packed_seq_params is not None:
            options.update(_packed(packed_seq_params))
        else:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))  # [B, S, H, D]
        with self._random(query, options):
            o = tessera.torch.attention(query, key, value, **options)
        return (o if packed_seq_params is not None else o.transpose(0, 1)).flatten(-2)

    def _over_ranks(self, query: Tensor, key: Tensor, value: Tensor, packed: Optional[Any], options: dict) -> Tensor:
        """With context parallelism: each rank has its rows of every sequence."""
        if packed is not None:
            raise Error("packed_seq_params: given with context_parallel_size > 1, accepted None there")
        if "mask" in options:
            raise Error(
                "attention_mask: given with context_parallel_size > 1, accepted None there: "
                "--no-create-attention-mask-in-dataloader"
            )
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        return self.parallel.attention(query, key, value, **options).transpose(0, 1).flatten(-2)

    def _options(self, mask_type: Optional[AttnMaskType], mask: Optional[Tensor], bias: Optional[Tensor]) -> dict:
        scale = self.softmax_scale
        if self.config.apply_query_key_layer_scaling:
            scale *= self.layer_number  # the parent divides by it, and its softmax multiplies by it
        if getattr(self.config, "qk_clip", False):
            raise Error("config.qk_clip: True, accepted False: the largest scores are not returned")
        options: dict = {"scale": scale}
        # After the prompt, Megatron passes no_mask for one query that sees all keys; a causal layer sees them as well.
        if self.attn_mask_type in _CAUSAL or mask_type in _CAUSAL:
            options["causal"] = True
        window = self.scale_mask_softmax.window_size
        if window is not None:
            options["window"] = tuple(window)
        if mask is not None:
            options["mask"] = ~mask
        if bias is not None:
            options["bias"] = bias
        if self.softmax_offset is not None:
            options["sink"] = self.softmax_offset
        if self.training and self.attention_dropout.p > 0:
            options["dropout_p"] = self.attention_dropout.p
        return options

    def _random(self, query: Tensor, options: dict) -> contextlib.AbstractContextManager:
        """The generator of this rank for dropout's seed: ranks that share a sequence's heads must drop
        independently."""
        if "dropout_p" in options and query.is_cuda and not self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()


def _packed(params: Any) -> dict:
    if params.qkv_format != "thd":
        raise Error(f"packed_seq_params.qkv_format: '{params.qkv_format}', accepted 'thd'")
    for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        if getattr(params, name, None) is not None:
            raise Error(f"packed_seq_params.{name}: given, accepted None: sequences lie one after another")
    if (getattr(params, "local_cp_size", None) or 1) > 1:
        raise Error(f"packed_seq_params.local_cp_size: {params.local_cp_size}, accepted 1: a sequence is on one device")
    return {
        "cu_seqlens_q": params.cu_seqlens_q,
        "cu_seqlens_k": params.cu_seqlens_kv,
        "max_seqlen_q": params.max_seqlen_q,
        "max_seqlen_k": params.max_seqlen_kv,
    }


def with_attention(spec: Any) -> Any:
    """A copy of a layer's or a block's spec with TesseraAttention wherever it names a core attention.

    Raises:
        tessera.Error: the spec names none.
    """
    spec = copy.deepcopy(spec)
    if _exchange(spec) == 0:
        raise Error(f"spec: {type(spec).__name__} without a core_attention, accepted a spec of layers with attention")
    return spec


def _exchange(part: Any) -> int:
    if isinstance(part, (list, tuple)):
        return sum(map(_exchange, part))
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return 0
    found = 0
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name == "core_attention":
            kept = value.params if isinstance(value, ModuleSpec) else {}
            setattr(part, field.name, ModuleSpec(module=TesseraAttention, params=kept) if kept else TesseraAttention)
            found += 1
        else:
            found += _exchange(value)
    return found
