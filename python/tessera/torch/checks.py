"""Checks of every PyTorch call before it computes."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from tessera import _core


def check_tensor(name: str, tensor: Tensor) -> None:
    """Refuses anything but a dense tensor."""
    if not isinstance(tensor, Tensor):
        raise _core.Error(f"{name}: {type(tensor).__module__}.{type(tensor).__name__}, accepted a PyTorch tensor")
    if tensor.layout is not torch.strided:
        raise _core.Error(f"{name}: layout {tensor.layout}, accepted torch.strided; packed sequences have cu_seqlens")
    if tensor.is_nested:
        raise _core.Error(f"{name}: a nested tensor, accepted a dense one; packed sequences have cu_seqlens")


def scores_view(name: str, tensor: Optional[Tensor], seqlen_k: Optional[int]) -> Optional[Tensor]:
    """A bias or mask as a view [B|1, Hq|1, Sq|1, Sk]: leading dimensions are added, a last one of 1 is expanded."""
    if tensor is None:
        return None
    if not 1 <= tensor.dim() <= 4:
        raise _core.Error(f"{name}: rank {tensor.dim()}, accepted [B|1, Hq|1, Sq|1, Sk] and its last dimensions")
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    if seqlen_k is not None and tensor.shape[-1] == 1 and seqlen_k != 1:
        tensor = tensor.expand(*tensor.shape[:-1], seqlen_k)
    return tensor
