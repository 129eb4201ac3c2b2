"""Checks of every PyTorch call before it computes."""

from __future__ import annotations

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
