"""`torch.nn.attention.flex_attention` on Tessera, with its signatures: [B, H, S, D]."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from tessera import _core
from tessera._replacements import Replacements

from . import kernels
from .api import attention
from .checks import check_tensor

_CHANGE_THE_RESULT = ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")  # of kernel_options; all others tune
_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")  # PyTorch's: which of its kernels serves a call


class BlockMask(NamedTuple):
    """What `create_block_mask` makes: a function, and the shape that it is for. Nothing of Q_LEN x KV_LEN is stored;
    each call bounds the function over its own blocks of keys, and skips those that it hides."""

    mask_mod: Callable
    shape: Tuple[Optional[int], Optional[int], int, int]  # B, H, Q_LEN, KV_LEN; None or 1: any

    def to(self, device: Any) -> BlockMask:
        """The same; the tensors that mask_mod captures have to be where q is."""
        return self


def create_block_mask(
    mask_mod: Callable, B: Optional[int], H: Optional[int], Q_LEN: int, KV_LEN: int, device: Any = None,
    BLOCK_SIZE: Union[int, Tuple[int, int]] = 128, _compile: bool = False, **tuning: Any,
) -> BlockMask:  # fmt: skip
    """PyTorch's `create_block_mask` for `tessera.torch.flex_attention`. mask_mod(b, h, q_idx, kv_idx) says which keys
    are visible, and is traced at each call. device, BLOCK_SIZE and what follows tune PyTorch's lists: they are
    ignored."""
    if not callable(mask_mod):
        raise _core.Error(f"mask_mod: {type(mask_mod).__name__}, accepted mask_mod(b, h, q_idx, kv_idx)")
    for name, length in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if length < 0:
            raise _core.Error(f"{name}: {length}, accepted 0 and more")
    return BlockMask(mask_mod, (B, H, Q_LEN, KV_LEN))


def _of_shape(block_mask: BlockMask, q: Tensor, k: Tensor) -> Dict[str, Any]:
    """As options, if it is for tensors of these shapes. It may be for longer ones, as PyTorch's."""
    batch, heads, rows, keys = block_mask.shape
    fits = batch in (None, 1, q.shape[0]) and heads in (None, 1, q.shape[1])
    if not fits or q.shape[2] > rows or k.shape[2] > keys:
        raise _core.Error(
            f"block_mask: made for {list(block_mask.shape)}, accepted one for B, H, Sq, Sk = "
            f"{[q.shape[0], q.shape[1], q.shape[2], k.shape[2]]}"
        )
    return {"mask_mod": block_mask.mask_mod}


def _listed(count: Tensor, indices: Tensor, blocks_q: int, blocks_k: int) -> Tensor:
    """Lists of blocks, [B, H, rows] and [B, H, rows, N], as bool [B, H, blocks_q, blocks_k]; rows >= blocks_q, and N is
    any number that the counts do not exceed."""
    is_entry = torch.arange(indices.shape[-1], device=indices.device) < count.unsqueeze(-1)
    # What is no entry, or after the last key, goes into a column of its own.
    columns = torch.where(is_entry, indices, blocks_k).clamp(max=blocks_k).long()
    listed = torch.zeros((*columns.shape[:-1], blocks_k + 1), dtype=torch.bool, device=indices.device)
    return listed.scatter_(-1, columns, True)[..., :blocks_q, :blocks_k]


def _mask_options(block_mask: Any, seqlen_q: int, seqlen_k: int, device: torch.device) -> Dict[str, Any]:
    """A BlockMask as options: its lists win over its mask_mod, which holds in partial blocks alone."""
    from torch.nn.attention import flex_attention as own

    if block_mask.mask_mod is getattr(own, "_sliced_mask_mod_error", None):
        raise _core.Error(
            "block_mask: sliced, which has no mask_mod, accepted one whose mask_mod was set after it was sliced"
        )
    if block_mask.kv_num_blocks.device != device:
        raise _core.Error(f"block_mask: on device {block_mask.kv_num_blocks.device}, accepted that of query: {device}")
    block_q, block_k = block_mask.BLOCK_SIZE
    whole = block_q == block_k == own._LARGE_SPARSE_BLOCK_SIZE
    made_for = tuple(block_mask.shape[-2:])
    if not whole and made_for != (seqlen_q, seqlen_k):
        raise _core.Error(
            f"block_mask: made for {made_for[0]} queries and {made_for[1]} keys, accepted one for {seqlen_q} and "
            f"{seqlen_k}, those of q and k"
        )
    blocks_q, blocks_k = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    seen = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, blocks_q, blocks_k)
    mask_mod = block_mask.mask_mod
    full = None
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks_q, blocks_k)
        seen = seen | full
    options = {"block_mask": seen, "mask_block": (block_q, block_k), "mask_mod": mask_mod}
    if full is None or not (torch.compiler.is_compiling() or full.any()):
        return options
    of_batch, of_head = int(full.shape[0] > 1), int(full.shape[1] > 1)

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return full[b * of_batch, h * of_head, q_idx // block_q, kv_idx // block_k] | mask_mod(b, h, q_idx, kv_idx)

    return {**options, "mask_mod": visible}


def _at_precision_of(query: Tensor, key: Tensor, value: Tensor) -> Tuple[Tensor, Tensor]:
    """Keys and values of a narrower floating-point type than the query's, as PyTorch takes them, in that type."""
    lower = key.dtype == value.dtype and key.is_floating_point() and key.dtype.itemsize < query.dtype.itemsize
    return (key.to(query.dtype), value.to(query.dtype)) if lower else (key, value)


def _in_the_order_of(query: Tensor, o: Tensor) -> Tensor:
    """o with its axes in the order in memory of query's, as PyTorch returns it. With a program it has it already."""
    order = kernels.order_in_memory(query)
    if kernels.order_in_memory(o) == order:
        return o
    outermost_first = order[::-1]
    inverse = [outermost_first.index(axis) for axis in range(3)]
    return o.permute(*outermost_first, 3).contiguous().permute(*inverse, 3)


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Optional[Callable] = None, block_mask: Any = None,
    scale: Optional[float] = None, enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: Optional[Dict[str, Any]] = None, *, return_aux: Any = None,
) -> Union[Tensor, Tuple[Any, ...]]:  # fmt: skip
    """PyTorch's `flex_attention`: query [B, Hq, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv], with gradients of
    them and of what score_mod captures, on the CPU, too. Keys and values of a narrower type than the query's are
    converted to it.

    Args:
        score_mod: score_mod(score, b, h, q_idx, kv_idx), as `tessera.attention` traces it.
        block_mask: what `create_block_mask` made, or PyTorch's BlockMask, whose lists say which blocks are visible, and
            whose mask_mod holds in those that are not full.
        scale: 1 / sqrt(D) by default.
        enable_gqa: key and value may have fewer heads.
        return_lse, return_aux: return (o, LSE), or (o, AuxOutput) with its lse.
        kernel_options: what tunes PyTorch's kernels is ignored; what changes the result is refused.

    Raises:
        tessera.Error: an argument is wrong; for a program, no kernel serves it (`tessera.plan` says why).
    """
    for name, setting in (kernel_options or {}).items():
        if name in _CHANGE_THE_RESULT:
            raise _core.Error(f"kernel_options: {name} changes the result, accepted are options that tune")
        if name == "BACKEND" and setting not in _BACKENDS:
            raise _core.Error(f"kernel_options: BACKEND {setting!r}, accepted {', '.join(_BACKENDS)}")
        if name == "BACKEND" and kernel_options.get("FORCE_USE_FLEX_ATTENTION"):
            raise _core.Error("kernel_options: BACKEND with FORCE_USE_FLEX_ATTENTION, accepted one of them")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
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
    key, value = _at_precision_of(query, key, value)
    if key.shape[0] == 1 and query.shape[0] != 1:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    options: Dict[str, Any] = {}
    if isinstance(block_mask, BlockMask):
        options = _of_shape(block_mask, query, key)
    elif block_mask is not None:
        options = _mask_options(block_mask, query.shape[2], key.shape[2], query.device)
    # The LSE of float64 tensors is float64.
    in_double = wants_lse and query.dtype == torch.float64
    found = attention(
        query, key, value, scale=scale, score_mod=score_mod, layout="bhsd", return_lse=wants_lse,
        return_lse_low=in_double, **options,
    )  # fmt: skip
    o, *lse = found if wants_lse else (found,)
    o = _in_the_order_of(query, o)
    if in_double:
        lse = [sum(x.double() for x in lse)]
    if return_aux is None:
        return (o, *lse) if wants_lse else o
    from torch.nn.attention.flex_attention import AuxOutput

    return o, AuxOutput(lse=lse[0] if wants_lse else None)


_replaced = Replacements()


def activate_flex_attention() -> List[str]:
    """Replaces PyTorch's `flex_attention` by Tessera's in torch.nn.attention.flex_attention and in every imported
    module that holds it under some name. PyTorch's `create_block_mask` stays: its BlockMasks are taken.

    Returns:
        The replaced names, as "module.name". Functions compiled before keep the function that they were compiled with.
    """
    from torch.nn.attention.flex_attention import flex_attention as own

    if own is flex_attention:
        return _replaced.names()
    _replaced.replace(own, flex_attention, except_in=sys.modules[__name__])
    if not _replaced:
        warnings.warn("tessera.torch.activate_flex_attention: no imported module holds flex_attention", stacklevel=2)
    return _replaced.names()


def restore_flex_attention() -> None:
    """Restores PyTorch's own, except where it was replaced again since."""
    _replaced.restore()
