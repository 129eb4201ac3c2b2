"""SGLang's attention interface, without importing SGLang."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional

import torch
from torch import Tensor

from tessera._core import Error

from .paged import attend, key_lengths, write_slots


class Step(NamedTuple):
    cu_seqlens_q: Tensor  # int32 [B + 1]
    seqused_k: Tensor  # int32 [B]
    pages: Dict[str, Tensor]  # page_table int32 [B, pages of the longest]; page_indptr [B + 1] and page_indices
    max_seqlen_q: int
    max_seqlen_k: int
    page_size: int
    tree_mask: Optional[Tensor] = None  # for drafted tokens to verify


class Backend:
    """Attention of all layers of a model, as SGLang calls it (AttentionBackend).

    Reads from the model runner: req_to_token_pool.req_to_token [requests, context], token_to_kv_pool (get_key_buffer,
    get_value_buffer: [slots, Hkv, D]), model_config.context_len, page_size. Drafting and verifying trees of tokens are
    supported; extending a draft is refused.
    """

    def __init__(self, model_runner: Any) -> None:
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        if hasattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa"):
            raise Error("token_to_kv_pool: layers with a window have slots of their own, accepted one set for all")
        self.max_context_len = model_runner.model_config.context_len
        self.page_size = model_runner.page_size
        self.device = self.req_to_token.device
        self.step: Optional[Step] = None
        self._table: Optional[Tensor] = None  # for CUDA graphs, sized for the largest batch

    # ---- a step's metadata -------------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        batch, spec = forward_batch, forward_batch.spec_info
        _refuse_attributes("forward_batch", batch, _BATCH_REFUSED)
        decoding = batch.forward_mode.is_decode_or_idle()
        if batch.forward_mode.is_target_verify():
            self._verify(batch, spec.custom_mask, spec.draft_token_num)
            return
        _refuse_speculation(decoding, spec)
        if getattr(spec, "kv_indptr", None) is not None:
            # Drafting: several sequences per request, each with a list of its keys.
            lengths = key_lengths(spec.kv_indptr, None, page_size=1)
            pages = {"page_indptr": spec.kv_indptr.to(torch.int32), "page_indices": spec.kv_indices.to(torch.int32)}
            self.step = Step(self._one_each(lengths.shape[0]), lengths, pages, 1, self.max_context_len, page_size=1)
            return
        longest = self.max_context_len if batch.seq_lens_cpu is None else _longest(batch.seq_lens_cpu)
        self.step = Step(
            self._one_each(batch.batch_size) if decoding else _running_sum(batch.extend_seq_lens),
            batch.seq_lens.to(torch.int32),
            {"page_table": self._pages(batch.req_pool_indices, longest)},
            1 if decoding else _longest(batch.extend_seq_lens_cpu),
            longest,
            self.page_size,
        )

    def _verify(self, batch: Any, custom_mask: Tensor, tokens: int) -> None:
        """`tokens` drafted tokens of each request follow its seq_lens keys."""
        lengths = (batch.seq_lens + tokens).to(torch.int32)
        longest = self.max_context_len if batch.seq_lens_cpu is None else _longest(batch.seq_lens_cpu) + tokens
        self.step = Step(
            self._one_each(batch.batch_size) * tokens, lengths,
            {"page_table": self._pages(batch.req_pool_indices, longest)},
            tokens, longest, self.page_size, tree_bits(custom_mask, lengths, tokens),
        )  # fmt: skip

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pages = -(-self.max_context_len // self.page_size)
        self._lengths = torch.zeros(max_bs, dtype=torch.int32, device=self.device)
        self._table = torch.zeros(max_bs, pages, dtype=torch.int32, device=self.device)
        self._offsets = self._one_each(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Called before a graph of decoding is captured and before it is replayed: fills the buffers that the graph
        reads. The plan does not depend on their values."""
        batch = forward_batch
        _refuse_attributes("forward_batch", batch, _BATCH_REFUSED)
        self._fill(batch.batch_size, batch.req_pool_indices, batch.seq_lens, batch.forward_mode, batch.spec_info)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing is computed from the buffers."""

    # Called by releases before init_forward_metadata_out_graph instead.
    def init_forward_metadata_capture_cuda_graph(
        self, bs: int, num_tokens: int, req_pool_indices: Tensor, seq_lens: Tensor, encoder_lens: Any,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:  # fmt: skip
        self._fill(bs, req_pool_indices, seq_lens, forward_mode, spec_info)

    def init_forward_metadata_replay_cuda_graph(
        self, bs: int, req_pool_indices: Tensor, seq_lens: Tensor, seq_lens_sum: int, encoder_lens: Any,
        forward_mode: Any,
        spec_info: Any, seq_lens_cpu: Optional[Tensor] = None,
    ) -> None:  # fmt: skip
        self._fill(bs, req_pool_indices, seq_lens, forward_mode, spec_info)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0  # a padded sequence has no key

    def _fill(self, bs: int, req_pool_indices: Tensor, seq_lens: Tensor, forward_mode: Any, spec_info: Any) -> None:
        if self._table is None:
            raise Error("init_forward_metadata_out_graph: before init_cuda_graph_state, accepted after it")
        decoding = forward_mode.is_decode_or_idle()
        _refuse_speculation(decoding, spec_info)
        if not decoding or spec_info is not None:
            raise Error("forward_mode: a CUDA graph of prompts or drafts, accepted one of decoding")
        self._lengths[:bs].copy_(seq_lens[:bs])
        self._table[:bs].copy_(self._pages(req_pool_indices[:bs], self.max_context_len))
        pages = {"page_table": self._table[:bs]}
        self.step = Step(self._offsets[: bs + 1], self._lengths[:bs], pages, 1, self.max_context_len, self.page_size)

    def _pages(self, req_pool_indices: Tensor, longest: int) -> Tensor:
        """The page-table rows of the requests: their slots or, with pages, the page of every page_size-th slot."""
        slots = self.req_to_token[req_pool_indices.to(torch.int64), : max(longest, 1) : self.page_size]
        if self.page_size > 1:
            slots = torch.div(slots, self.page_size, rounding_mode="floor")
        return slots.to(torch.int32)

    def _one_each(self, batch: int) -> Tensor:
        return torch.arange(batch + 1, dtype=torch.int32, device=self.device)

    # ---- a layer -----------------------------------------------------------------------------------------------------

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        sinks: Optional[Tensor] = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """q [T, Hq D], k and v [T, Hkv D] -> [T, Hq Dv]. Decoding, prompts and mixtures of both are one call."""
        _refuse_attributes("layer", layer, _LAYER_REFUSED)
        _refuse_attributes("forward_batch", forward_batch, _BATCH_REFUSED)
        for name, value in kwargs.items():
            if value is not None and value is not False:
                raise Error(f"{name}: given, accepted None: tessera.serving.sglang has q, k, v and sinks")
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        step, pool = self.step, self.token_to_kv_pool
        buffers = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        k_cache, v_cache = (buffer.unflatten(0, (-1, step.page_size)) for buffer in buffers)
        if save_kv_cache and k is not None:
            new_k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            new_v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            write_slots(new_k, new_v, k_cache, v_cache, forward_batch.out_cache_loc)
        causal, window = _is_causal(layer), getattr(layer, "sliding_window_size", None)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), k_cache, v_cache,
            out.view(-1, layer.tp_q_head_num, layer.v_head_dim),
            cu_seqlens_q=step.cu_seqlens_q, seqused_k=step.seqused_k, **step.pages,
            max_seqlen_q=step.max_seqlen_q, max_seqlen_k=step.max_seqlen_k,
            scale=layer.scaling, causal=causal and step.tree_mask is None, tree_mask=step.tree_mask,
            softcap=getattr(layer, "logit_cap", 0) or None,
            window=None if window is None or window < 0 else (window, 0 if causal else window), sink=sinks,
        )  # fmt: skip
        return out

    forward_decode = forward
    forward_extend = forward


def tree_bits(custom_mask: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """`tree_mask` int32 [B tokens, W] from a mask of all keys. A request's rows, of lengths[b] bytes each, follow those
    of the previous request, and their last `tokens` columns are the drafted tokens'. Waits for no GPU."""
    rows = lengths.to(torch.int64)[:, None]
    token = torch.arange(tokens, device=lengths.device)
    begins = torch.cumsum(rows, 0) * tokens - rows * tokens
    at = (begins + rows * token + rows - tokens)[..., None] + token  # [B, row, column]
    seen = custom_mask[at].to(torch.int64).flatten(0, 1)
    words = -(-tokens // 32)
    seen = torch.nn.functional.pad(seen, (0, 32 * words - tokens)).view(-1, words, 32)
    return (seen << torch.arange(32, device=lengths.device)).sum(-1).to(torch.int32)


# Attributes that change the result, the only supported value of each, and its description.
_LAYER_REFUSED = (
    ("is_cross_attention", False, "the queries' own keys"),
    ("k_scale", None, "a cache that is not quantised"),
    ("v_scale", None, "a cache that is not quantised"),
    ("use_irope", False, "attention that is not in chunks"),
    ("pos_encoding_mode", "NONE", "positions in q and k"),
    ("logit_capping_method", "tanh", "logit_cap tanh(s / logit_cap)"),
    ("xai_temperature_len", -1, "one scale for all positions"),
)
_BATCH_REFUSED = (
    ("encoder_lens", None, "decoders"),
    ("cross_attention_custom_mask", None, "decoders"),
    ("attn_attend_prefix_cache", None, "all keys of a sequence in one call"),
    ("mha_return_lse", None, "the output alone"),
    ("dcp_kv_mask", None, "a sequence's keys on one device"),
    ("attn_cp_metadata", None, "a sequence's keys on one device"),
    ("multi_item_delimiter_indices", None, "one item a sequence"),
)


def _refuse_attributes(what: str, given: Any, refused: tuple) -> None:
    for name, neutral, accepted in refused:
        value = getattr(given, name, neutral)
        if value is None or value is False or value is neutral:
            continue
        if isinstance(value, Tensor) or value != neutral:
            text = "a tensor" if isinstance(value, Tensor) else repr(value)[:40]
            raise Error(f"{what}.{name}: {text}, accepted {neutral}: {accepted}")


def _longest(lengths: Any) -> int:
    """The maximum of a list or of a tensor on the CPU."""
    values = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    return int(max(values, default=0))


def _is_causal(layer: Any) -> bool:
    """False for layers whose queries also see later keys, as given by attn_type (an enum of strings)."""
    kind = getattr(layer, "attn_type", "decoder")
    kind = getattr(kind, "value", kind)
    if kind not in ("decoder", "decoder_bidirectional", "encoder_only"):
        raise Error(f"layer.attn_type: '{kind}', accepted 'decoder', 'decoder_bidirectional' and 'encoder_only'")
    return kind == "decoder"


def _refuse_speculation(decoding: bool, spec_info: Any) -> None:
    """Drafting (by decoding) is supported, and verifying outside of graphs; extending drafts is not."""
    if spec_info is not None and (not decoding or getattr(spec_info, "custom_mask", None) is not None):
        raise Error("spec_info: given to extend a draft, accepted None, one that decodes, or one that verifies a draft")


def _running_sum(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).to(torch.int32)
