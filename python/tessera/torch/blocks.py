"""Block masks from a rule."""

from __future__ import annotations

from typing import Callable, Tuple, Union

import torch
from tessera._core import Error
from torch import Tensor

__all__ = ["block_mask"]


def block_mask(
    visible: Callable[[Tensor, Tensor], Tensor],
    seqlen_q: int,
    seqlen_k: int,
    *,
    block: Tuple[int, int] = (128, 128),
    device: Union[str, torch.device, None] = None,
) -> Tensor:
    """The `block_mask` of `attention`, with ``mask_block=block``, from a rule that is evaluated for all blocks at once
    on the device::

        near = tessera.torch.block_mask(lambda i, j: ((i - j).abs() < 4) | (j == 0), 65536, 65536)
        o = tessera.torch.attention(q, k, v, block_mask=near, mask_block=(128, 128))

    Args:
        visible: a function of block numbers of queries, int64 [rows, 1], and of keys, [1, cols]; returns bool,
            broadcast to [rows, cols]. With leading axes, [B|1, Hq|1, rows, cols], batch entries or heads have their own
            masks.
        block: queries and keys of a block. Hopper's kernels walk lists of blocks for multiples of 64; other kernels
            accept any size.
        device: by default "cuda" if available.

    Returns:
        bool [1, 1, ceil(seqlen_q / block[0]), ceil(seqlen_k / block[1])], True = visible.

    Raises:
        tessera.Error: the rule returned another dtype or shape.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, cols = (-(-length // size) for length, size in zip((seqlen_q, seqlen_k), block))
    given = visible(torch.arange(rows, device=device)[:, None], torch.arange(cols, device=device)[None, :])
    if not isinstance(given, Tensor) or given.dtype != torch.bool or not 2 <= given.dim() <= 4:
        what = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise Error(f"visible: gave {what}, accepted a bool tensor of 2 to 4 axes")
    given = given[(None,) * (4 - given.dim())]
    try:
        return given.expand(*given.shape[:2], rows, cols).contiguous()
    except RuntimeError:
        raise Error(f"visible: gave {list(given.shape)}, accepted what broadcasts to {rows} x {cols} blocks") from None
