"""Messages of a schedule by torch.distributed: a step posts all of its messages at once, and waits for them at its
end."""

from __future__ import annotations

from typing import Callable, List, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from tessera._core import Error
from tessera._ranks.schedule import Message, Schedule


Tensors = Tuple[Tensor, ...]


class Exchange:
    """The messages of one step in flight; `wait` delivers the received ones."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        step: str,
        messages: Sequence[Message],
        send: Callable[[Message], Tensors],
        buffers: Callable[[Message], Tensors],
    ):
        self._step = step
        self._received: List[Tuple[Message, Tensors]] = []
        self._kept: List[Tensors] = []  # kept alive until they are sent
        operations, self._peers = [], []
        for message in messages:
            tensors = buffers(message) if message.receive else send(message)
            (self._received.append((message, tensors)) if message.receive else self._kept.append(tensors))
            peer = dist.get_global_rank(group, message.peer)
            for tensor in tensors:
                operations.append(dist.P2POp(dist.irecv if message.receive else dist.isend, tensor, peer, group))
                self._peers.append(f"{message.travels} {'from' if message.receive else 'to'} rank {message.peer}")
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self, deliver: Callable[[Message, Tensors], None]) -> None:
        for n, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as error:
                # NCCL has one work object for all of them.
                what = self._peers[n] if len(self._works) == len(self._peers) else ", ".join(self._peers)
                raise RuntimeError(f"tessera.torch.context_parallel: {self._step}, {what}: {error}") from error
        for message, tensors in self._received:
            deliver(message, tensors)
        self._received, self._kept, self._works = [], [], []


class Agreement:
    """Checks once per plan and score program that they are the same on all ranks: ranks that disagree would wait for
    each other, or add inconsistent data."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._known = set()

    def check(self, schedule: Schedule, what: str, device: torch.device, score_hash: int = 0) -> None:
        """score_hash: of the score program, 0 without one."""
        unsigned = schedule.hash ^ score_hash
        if schedule.ranks == 1 or unsigned in self._known:
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        signed = unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned
        mine = torch.tensor([signed], dtype=torch.int64, device=device)
        hashes = [torch.empty_like(mine) for _ in range(schedule.ranks)]
        dist.all_gather(hashes, mine, group=self._group)
        others = [rank for rank, value in enumerate(hashes) if value.item() != signed]
        if others:
            raise Error(
                f"tessera.torch.context_parallel: the problem of rank {schedule.rank} ({what}) is another than that of "
                f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}; accepted the same shapes, dtype, "
                "masks, score program, layout, strategy and lengths on all"
            )
        self._known.add(unsigned)
