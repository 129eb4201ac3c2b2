"""Where dropout's seed and offset come from: PyTorch's generator of the device, as its own kernels' do, so that
torch.manual_seed, activation checkpointing and Megatron's generators a rank repeat or tell apart what they should."""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

_UINT64 = 1 << 64
_OURS = 1 << 62  # in every offset that is drawn here: it tells a state of Tessera's from one of PyTorch's own kernels
_DRAW = 4  # what a call takes of a CUDA generator's offset, which goes in fours
_KEY = 0x74657373657261  # other bits than PyTorch's kernels make of the same seed


def traced() -> bool:
    """Whether a tracer or a mode must see the call."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0


def _state(seed: int, offset: int, device="cpu") -> Tensor:
    signed = [x - _UINT64 if x >= _UINT64 // 2 else x for x in (seed, offset)]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def new_state(device: torch.device) -> Tensor:
    """A seed and an offset, int64 [2]. In a traced program it lies on `device`, else on the CPU: nothing waits for a GPU.

    Raises:
        NotImplementedError: the call is being captured into a CUDA graph, whose every replay would drop the same entries.
    """
    if device.type != "cuda" or traced():
        drawn = torch.randint(0, _OURS, (2,), dtype=torch.int64, device=device)
        return drawn | torch.tensor((0, _OURS), dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "dropout_p: a call that is captured into a CUDA graph would drop the same entries at every replay; accepted with "
            "dropout_seed, which says so"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    offset = generator.get_offset()
    generator.set_offset(offset + _DRAW)
    return _state(generator.initial_seed() % _UINT64 ^ _KEY, offset % _OURS | _OURS)


def given_state(seed: int, offset: int, device: torch.device) -> Tensor:
    """The caller's own."""
    return _state(seed, offset, device if traced() else "cpu")


def seed_and_offset(state: Tensor) -> Tuple[int, int]:
    """Waits for the GPU if the state lies there."""
    seed, offset = state.tolist()
    return seed % _UINT64, offset % _UINT64


def is_ours(seed: Tensor, offset: Tensor) -> bool:
    """Whether the state was drawn here, and lies where it can be read without waiting."""
    return seed.device.type == "cpu" and offset.device.type == "cpu" and bool(int(offset) & _OURS)
