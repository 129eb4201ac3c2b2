"""SGLang's attention contract. SGLang is imported by `register` alone, and by sglang_backend.py."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from tessera._core import Error

from .paged import attend, descales_of, key_lengths, write_slots

NAME = "tessera"  # --attention-backend tessera


def register() -> None:
    """The entry point of SGLang's plug-ins (group sglang.srt.plugins): makes `tessera` one of its attention back ends
    and a choice of --attention-backend. SGLang calls it once in each of its processes; a second call changes
    nothing."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_backend_of)


def _backend_of(model_runner: Any) -> Any:
    from .sglang_backend import Backend as SglangsBackend

    return SglangsBackend(model_runner)


class Step(NamedTuple):
    cu_seqlens_q: Tensor  # int32 [B + 1]
    seqused_k: Tensor  # int32 [B]
    pages: Dict[str, Tensor]  # page_table int32 [B, pages of the longest]; page_indptr [B + 1] and page_indices
    max_seqlen_q: int
    max_seqlen_k: int
    page_size: int
    tree_mask: Optional[Tensor] = None  # of drafted tokens that are verified


class Backend:
    """Attention of all layers of a model, as SGLang calls it (AttentionBackend).

    Takes of the model runner: req_to_token_pool.req_to_token [requests, context], token_to_kv_pool (get_key_buffer,
    get_value_buffer: [slots, Hkv, D]), model_config.context_len, page_size. Drafting and verifying trees of tokens are
    supported, verifying in CUDA graphs, too; extending a draft is refused.
    """

    def __init__(self, model_runner: Any) -> None:
        if getattr(model_runner, "use_mla_backend", False):
            raise Error("model_runner.use_mla_backend: True, accepted False: keys and values in pools of their own")
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        if hasattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa"):
            raise Error("token_to_kv_pool: layers with a window have slots of their own, accepted one set for all")
        self.max_context_len = model_runner.model_config.context_len
        self.page_size = model_runner.page_size
        self.device = self.req_to_token.device
        self.step: Optional[Step] = None
        self._table: Optional[Tensor] = None  # for CUDA graphs, of the largest batch
        self._trees: Dict[int, Tuple[Tensor, Tensor]] = {}  # by the number of drafted tokens of a request

    # ---- a step's metadata --------------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        batch, spec = forward_batch, forward_batch.spec_info
        _refuse_attributes("forward_batch", batch, _BATCH_REFUSED)
        decoding = batch.forward_mode.is_decode_or_idle()
        if batch.forward_mode.is_target_verify():
            _refuse_attributes("spec_info", spec, _VERIFY_REFUSED)
            self._verify(batch, spec.custom_mask, spec.draft_token_num)
            return
        _refuse_speculation(decoding, spec)
        if getattr(spec, "kv_indptr", None) is not None:
            # Drafting: several sequences a request, each with a list of its keys.
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

    def _verify(self, batch: Any, custom_mask: Optional[Tensor], tokens: int) -> None:
        """`tokens` drafted ones of each request after its seq_lens keys; without a mask they are a chain."""
        lengths = (batch.seq_lens + tokens).to(torch.int32)
        longest = self.max_context_len if batch.seq_lens_cpu is None else _longest(batch.seq_lens_cpu) + tokens
        self.step = Step(
            self._one_each(batch.batch_size) * tokens, lengths,
            {"page_table": self._pages(batch.req_pool_indices, longest)},
            tokens, longest, self.page_size,
            None if custom_mask is None else tree_bits(custom_mask, lengths, tokens),
        )  # fmt: skip

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pages = -(-self.max_context_len // self.page_size)
        self._lengths = torch.zeros(max_bs, dtype=torch.int32, device=self.device)
        self._table = torch.zeros(max_bs, pages, dtype=torch.int32, device=self.device)
        self._offsets = self._one_each(max_bs)
        self._trees = {}

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a graph of decoding or of verifying is captured and before it is replayed: fills in the buffers that
        it reads. Nothing of the plan depends on what they hold."""
        batch, mode, spec = forward_batch, forward_batch.forward_mode, forward_batch.spec_info
        _refuse_attributes("forward_batch", batch, _BATCH_REFUSED)
        if self._table is None:
            raise Error("init_forward_metadata_out_graph: before init_cuda_graph_state, accepted after it")
        if not mode.is_target_verify() and (not mode.is_decode_or_idle() or spec is not None):
            raise Error("forward_mode: a CUDA graph of prompts or drafts, accepted one of decoding or verifying")
        tokens = spec.draft_token_num if mode.is_target_verify() else 0
        if tokens:
            _refuse_attributes("spec_info", spec, _VERIFY_REFUSED)
        bs = batch.batch_size
        lengths, table, offsets, tree = self._lengths[:bs], self._table[:bs], self._offsets[: bs + 1], None
        torch.add(batch.seq_lens[:bs], tokens, out=lengths)
        table.copy_(self._pages(batch.req_pool_indices[:bs], self.max_context_len))
        if tokens:
            tree, offsets = self._verified(tokens, bs)
            if spec.custom_mask is None:
                tree = None
            elif not in_capture:  # a capture's mask holds nothing yet
                tree.copy_(tree_bits(spec.custom_mask, lengths, tokens))
        self.step = Step(
            offsets, lengths, {"page_table": table}, tokens or 1, self.max_context_len, self.page_size, tree
        )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing is computed from the buffers."""

    def _verified(self, tokens: int, bs: int) -> Tuple[Tensor, Tensor]:
        """Buffers of graphs that verify `tokens` drafted ones of each of bs requests: tree_mask [bs tokens, W] and
        cu_seqlens_q [bs + 1]."""
        if tokens not in self._trees:
            rows = self._lengths.shape[0] * tokens
            bits = torch.zeros(rows, -(-tokens // 32), dtype=torch.int32, device=self.device)
            self._trees[tokens] = bits, self._offsets * tokens
        bits, offsets = self._trees[tokens]
        return bits[: bs * tokens], offsets[: bs + 1]

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0  # a padded sequence has no key

    def _pages(self, req_pool_indices: Tensor, longest: int) -> Tensor:
        """Rows of the requests: their slots, or with pages every page_size-th slot's page."""
        slots = self.req_to_token[req_pool_indices.to(torch.int64), : max(longest, 1) : self.page_size]
        if self.page_size > 1:
            slots = torch.div(slots, self.page_size, rounding_mode="floor")
        return slots.to(torch.int32)

    def _one_each(self, batch: int) -> Tensor:
        return torch.arange(batch + 1, dtype=torch.int32, device=self.device)

    # ---- a layer ------------------------------------------------------------------------------------------------------

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        sinks: Optional[Tensor] = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """q [T, Hq D], k and v [T, Hkv D] -> [T, Hq Dv]: decoding, prompts and a mixture of both are one call."""
        _refuse_attributes("layer", layer, _LAYER_REFUSED)
        _refuse_attributes("forward_batch", forward_batch, _BATCH_REFUSED)
        for name, value in kwargs.items():
            if value is not None and value is not False:
                raise Error(f"{name}: given, accepted None: tessera.serving.sglang has q, k, v and sinks")
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        step, pool = self.step, self.token_to_kv_pool
        buffers = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        descales = {}
        if buffers[0].element_size() == 1:
            descales = descales_of(getattr(layer, "k_scale", None), getattr(layer, "v_scale", None), q.device)
        else:
            _refuse_attributes("layer", layer, _SCALES)
        k_cache, v_cache = (buffer.unflatten(0, (-1, step.page_size)) for buffer in buffers)
        if save_kv_cache and k is not None:
            new_k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            new_v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            write_slots(new_k, new_v, k_cache, v_cache, forward_batch.out_cache_loc, descales)
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
            **descales,
        )  # fmt: skip
        return out

    forward_decode = forward
    forward_extend = forward


def tree_bits(custom_mask: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """`tree_mask` int32 [B tokens, W] of a mask of all keys, a request's rows of lengths[b] bytes after another's,
    whose last `tokens` columns are the drafted tokens'. Requests after the mask's end, a CUDA graph's padding, have any
    bits. Waits for no GPU."""
    rows = lengths.to(torch.int64)[:, None]
    token = torch.arange(tokens, device=lengths.device)
    begins = torch.cumsum(rows, 0) * tokens - rows * tokens
    at = (begins + rows * token + rows - tokens)[..., None] + token  # [B, row, column]
    seen = custom_mask[at.clamp(max=custom_mask.numel() - 1)].to(torch.int64).flatten(0, 1)
    words = -(-tokens // 32)
    seen = torch.nn.functional.pad(seen, (0, 32 * words - tokens)).view(-1, words, 32)
    return (seen << torch.arange(32, device=lengths.device)).sum(-1).to(torch.int32)


# Attributes that change what is computed, what they say where they do not, and the only values that are served.
_LAYER_REFUSED = (
    ("is_cross_attention", False, "the queries' own keys"),
    ("use_irope", False, "attention that is not in chunks"),
    ("pos_encoding_mode", "NONE", "positions in q and k"),
    ("logit_capping_method", "tanh", "logit_cap tanh(s / logit_cap)"),
    ("xai_temperature_len", -1, "one scale for all positions"),
)
_SCALES = (("k_scale", None, "a cache of 16 or 32 bits"), ("v_scale", None, "a cache of 16 or 32 bits"))
_BATCH_REFUSED = (
    ("encoder_lens", None, "decoders"),
    ("cross_attention_custom_mask", None, "decoders"),
    ("attn_attend_prefix_cache", None, "all keys of a sequence in one call"),
    ("mha_return_lse", None, "the output alone"),
    ("dcp_kv_mask", None, "a sequence's keys on one device"),
    ("attn_cp_metadata", None, "a sequence's keys on one device"),
    ("multi_item_delimiter_indices", None, "one item a sequence"),
)


_VERIFY_REFUSED = (("ragged_verify_layout", None, "as many drafted tokens of each request"),)


def _refuse_attributes(what: str, given: Any, refused: tuple) -> None:
    for name, neutral, accepted in refused:
        value = getattr(given, name, neutral)
        if value is None or value is False or value is neutral:
            continue
        if isinstance(value, Tensor) or value != neutral:
            text = "a tensor" if isinstance(value, Tensor) else repr(value)[:40]
            raise Error(f"{what}.{name}: {text}, accepted {neutral}: {accepted}")


def _longest(lengths: Any) -> int:
    """Of a list or a tensor on the CPU."""
    values = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    return int(max(values, default=0))


def _is_causal(layer: Any) -> bool:
    """False for layers whose queries see the keys after them, too, as attn_type (an enum of strings) says."""
    kind = getattr(layer, "attn_type", "decoder")
    kind = getattr(kind, "value", kind)
    if kind not in ("decoder", "decoder_bidirectional", "encoder_only"):
        raise Error(f"layer.attn_type: '{kind}', accepted 'decoder', 'decoder_bidirectional' and 'encoder_only'")
    return kind == "decoder"


def _refuse_speculation(decoding: bool, spec_info: Any) -> None:
    """Drafting, which decodes, is supported; extending drafts is not."""
    if spec_info is not None and (not decoding or getattr(spec_info, "custom_mask", None) is not None):
        raise Error("spec_info: given to extend a draft, accepted None, one that decodes, or one that verifies a draft")


def _running_sum(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).to(torch.int32)
