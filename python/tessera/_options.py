"""The options that attention, attention_backward and plan share, for type checkers; `tessera.attention` explains.

Made by scripts/make_options.py from src/core/fields.hpp.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class Options(TypedDict, total=False):
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    page_table: Any
    page_indptr: Any
    page_indices: Any
    seqused_k: Any
    causal_seqs: Any
    tree_mask: Any
    prefix_groups: Any
    prefix_lens: Any
    bias: Any
    mask: Any
    block_mask: Any
    alibi_slopes: Any
    sink: Any
    dropout_state: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    places: Any
    scale: float | None
    causal: bool
    top_left: bool
    window: tuple[int, int]
    softcap: float
    dropout_p: float
    dropout_seed: int
    dropout_offset: int
    mask_block: tuple[int, int]
    max_seqlen_q: int
    max_seqlen_k: int
    max_prefix_k: int
    max_suffix_k: int
    list_capacity: int
    place_q: tuple[int, int]
    place_k: tuple[int, int]
    place_heads: tuple[int, int]
    total_heads_kv: int
    first_sequence: int
    deterministic: bool
    batch_invariant: bool
    kernel: Literal["auto", "decode", "tiled", "shared_prefix", "reference", "decode_sm90", "mixed_sm90", "fwd_sm90", "fwd_sm90_fp8", "fwd_sm80", "bwd_sm90", "bwd_sm80", "fwd_fa1", "bwd_fa1", "fwd_standard", "bwd_standard"]
    threads: int
    layout: Literal["bshd", "bhsd"]
    openmp: bool


class BackwardOptions(Options, total=False):
    d_lse: Any
    d_bias: Any
    d_sink: Any
