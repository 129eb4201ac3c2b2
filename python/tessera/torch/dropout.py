"""Dropout's seed and offset. They come from PyTorch's generator of the device, as in its own kernels, so that
torch.manual_seed, activation checkpointing and Megatron's per-rank generators repeat or separate the right calls.

A state is an int64 tensor [2]: seed, offset. An eager call for a GPU generates it on the host. All other calls generate
it on the device by a PyTorch operator, so that a captured CUDA graph gets a new state at each replay, and vmap's
`randomness` applies.
"""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from tessera._core import Error

_UINT64 = 1 << 64
_OURS = 1 << 62  # set in every offset generated here: distinguishes Tessera's states from those of PyTorch's kernels
_MOST = (1 << 63) - 1
_DRAW = 4  # how far a call advances a CUDA generator's offset, a multiple of 4
_KEY = 0x74657373657261  # gives other bits than PyTorch's kernels for the same seed


def traced() -> bool:
    """True if a tracer or a mode must see the call."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0


def _on_host(device: torch.device) -> bool:
    """True if the host may read a GPU's generator."""
    return (
        device.type == "cuda"
        and not traced()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.cuda.is_current_stream_capturing()
    )


def _signed(value: int) -> int:
    return value - _UINT64 if value >= _UINT64 // 2 else value


def new_state(device: torch.device) -> Tensor:
    """A seed and an offset, int64 [2], on `device`; on the CPU for a GPU whose generator the host may read."""
    if not _on_host(device):
        return torch.randint(_OURS, _MOST, (2,), dtype=torch.int64, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    offset = generator.get_offset()
    generator.set_offset(offset + _DRAW)
    return torch.tensor((_signed(generator.initial_seed() % _UINT64 ^ _KEY), offset % _OURS | _OURS), dtype=torch.int64)


def given_state(seed: Union[int, Tensor], offset: Union[int, Tensor], device: torch.device) -> Tensor:
    """The caller's own seed and offset, checked by `options.unsigned`."""
    if isinstance(seed, Tensor) or isinstance(offset, Tensor):
        whole = {"dtype": torch.int64, "device": device}
        parts = (x if isinstance(x, Tensor) else torch.full((), _signed(x), **whole) for x in (seed, offset))
        return torch.stack([part.to(**whole) for part in parts])
    return torch.tensor((_signed(seed), _signed(offset)), dtype=torch.int64, device=device if traced() else "cpu")


def check_state(state: Tensor, seed: object, offset: object) -> None:
    """Refuses a state of the wrong form, and a seed or an offset beside a state."""
    for name, value in (("dropout_seed", seed), ("dropout_offset", offset)):
        if value is not None:
            raise Error(f"{name}: given with dropout_state, accepted is one of them")
    if tuple(state.shape) != (2,) or state.dtype != torch.int64:
        raise Error(f"dropout_state: {state.dtype} {list(state.shape)}, accepted int64 [2]: seed and offset")


def seed_and_offset(state: Tensor) -> Tuple[int, int]:
    """Waits for the GPU if the state is there."""
    seed, offset = state.tolist()
    return seed % _UINT64, offset % _UINT64


def is_ours(offset: Tensor) -> Optional[bool]:
    """True if the state was generated here, by its offset; None if it is on a GPU, to avoid waiting."""
    return bool(int(offset) & _OURS) if offset.device.type == "cpu" else None
