"""`torch.nn.attention.flex_attention.flex_attention` on Tessera, with its signature: [B, H, S, D]."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from tessera import _core

from .api import attention

_CHANGE_THE_RESULT = ("WRITE_DQ", "OUTPUT_LOGSUMEXP", "OUTPUT_MAX")  # of kernel_options; all others tune


def _listed(count: Tensor, indices: Tensor, blocks_q: int, blocks_k: int) -> Tensor:
    """Lists of blocks, [B, H, blocks_q] and [B, H, blocks_q, N], as bool [B, H, blocks_q, blocks_k]."""
    is_entry = torch.arange(indices.shape[-1], device=indices.device) < count.unsqueeze(-1)
    columns = torch.where(is_entry, indices, indices.shape[-1]).long()  # what is no entry goes into a column of its own
    listed = torch.zeros((*columns.shape[:-1], indices.shape[-1] + 1), dtype=torch.bool, device=indices.device)
    return listed.scatter_(-1, columns, True)[..., :blocks_q, :blocks_k]


def _mask_options(block_mask: Any, seqlen_q: int, seqlen_k: int) -> Dict[str, Any]:
    """A BlockMask as options: its lists win over its mask_mod, which holds in partial blocks alone."""
    block_q, block_k = block_mask.BLOCK_SIZE
    blocks_q, blocks_k = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    has = (block_mask.kv_num_blocks.shape[-1], block_mask.kv_indices.shape[-1])
    if has[0] < blocks_q or has[1] < blocks_k:
        raise _core.Error(
            f"block_mask: {has[0]} x {has[1]} blocks of {block_q} x {block_k}, accepted at least {blocks_q} x "
            f"{blocks_k}: q has {seqlen_q} rows, k {seqlen_k}"
        )
    seen = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, blocks_q, blocks_k)
    mask_mod = block_mask.mask_mod
    full = None
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks_q, blocks_k)
        seen = seen | full
    options = {"block_mask": seen, "mask_block": (block_q, block_k), "mask_mod": mask_mod}
    if full is None or not full.any():
        return options
    of_batch, of_head = int(full.shape[0] > 1), int(full.shape[1] > 1)

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return full[b * of_batch, h * of_head, q_idx // block_q, kv_idx // block_k] | mask_mod(b, h, q_idx, kv_idx)

    return {**options, "mask_mod": visible}


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Optional[Callable] = None, block_mask: Any = None,
    scale: Optional[float] = None, enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: Optional[Dict[str, Any]] = None, *, return_aux: Any = None,
) -> Union[Tensor, Tuple[Any, ...]]:  # fmt: skip
    """PyTorch's `flex_attention`: query [B, Hq, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv], with gradients of
    them and of what score_mod captures, on the CPU, too.

    Args:
        score_mod: score_mod(score, b, h, q_idx, kv_idx), as `tessera.attention` traces it.
        block_mask: a BlockMask. Its lists say which blocks are visible; its mask_mod holds in those that are not full.
        scale: 1 / sqrt(D) by default.
        enable_gqa: key and value may have fewer heads.
        return_lse, return_aux: return (o, LSE), or (o, AuxOutput) with its lse.
        kernel_options: what tunes PyTorch's kernels is ignored; what changes the result is refused.

    Raises:
        tessera.Error: an argument is wrong; for a program, no kernel serves it (`tessera.plan` says why).
    """
    for name in kernel_options or ():
        if name in _CHANGE_THE_RESULT:
            raise _core.Error(f"kernel_options: {name} changes the result, accepted are options that tune")
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise _core.Error(f"query: rank {query.dim()}, accepted [B, H, S, D] for query, key and value")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise _core.Error(f"key: {key.shape[1]} heads with query's {query.shape[1]}, accepted with enable_gqa=True")
    wants_lse = return_lse
    if return_aux is not None:
        if return_lse:
            raise _core.Error("return_lse: given together with return_aux, accepted one of them")
        if getattr(return_aux, "max_scores", False):
            raise _core.Error("return_aux: max_scores is not computed, accepted lse")
        wants_lse = return_aux.lse
    if key.shape[0] == 1 and query.shape[0] != 1:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    options: Dict[str, Any] = {} if block_mask is None else _mask_options(block_mask, query.shape[2], key.shape[2])
    found = attention(
        query, key, value, scale=scale, score_mod=score_mod, layout="bhsd", return_lse=wants_lse, **options
    )
    if return_aux is None:
        return found
    from torch.nn.attention.flex_attention import AuxOutput

    o, lse = found if wants_lse else (found, None)
    return o, AuxOutput(lse=lse)
