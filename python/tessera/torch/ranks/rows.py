"""Rows of chunks in tensors [B, rows, H, D], and what accumulates in them."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..merge import combine
from .schedule import Chunk


class Block:
    """Tensors whose rows are those of some chunks, in the order of the chunks' numbers."""

    def __init__(self, chunks: Sequence[Chunk], numbers: Sequence[int], tensors: Tuple[Tensor, ...]):
        self.numbers = tuple(sorted(numbers))
        self.tensors = tensors
        self._chunks = chunks
        self._rows: Dict[int, int] = {}
        self.rows = 0
        for number in self.numbers:
            self._rows[number] = self.rows
            self.rows += chunks[number].length

    def has(self, first: int, count: int) -> bool:
        return all(number in self._rows for number in range(first, first + count))

    def row(self, number: int, position: int) -> int:
        """Of a position in a sequence, which lies in a run of chunks that begins with `number`."""
        return self._rows[number] + position - self._chunks[number].begin

    def ranges(self, numbers: Sequence[int]) -> List[Tuple[int, int]]:
        """Rows of some chunks, neighbours joined."""
        result: List[Tuple[int, int]] = []
        for number in sorted(numbers):
            begin = self._rows[number]
            end = begin + self._chunks[number].length
            if result and result[-1][1] == begin:
                result[-1] = (result[-1][0], end)
            else:
                result.append((begin, end))
        return result

    @staticmethod
    def merged(blocks: Sequence[Block]) -> Block:
        """One block of the chunks of several."""
        chunks = blocks[0]._chunks
        where = {number: block for block in blocks for number in block.numbers}
        parts = [
            [tensor[:, begin:end] for tensor in where[number].tensors]
            for number in sorted(where)
            for begin, end in where[number].ranges([number])
        ]
        return Block(chunks, tuple(where), tuple(torch.cat(column, 1) for column in zip(*parts)))


def take(tensor: Tensor, ranges: Sequence[Tuple[int, int]], heads: slice, dim: int = 1) -> Tensor:
    """A contiguous tensor of some rows and heads, for sending: the tensor itself where it is that already. dim: of rows; heads have
    the other one of 1 and 2."""
    if heads != slice(0, tensor.shape[3 - dim]):
        tensor = tensor.narrow(3 - dim, heads.start, heads.stop - heads.start)
    parts = [tensor.narrow(dim, begin, end - begin) for begin, end in ranges]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim)).contiguous()


def put(tensor: Tensor, ranges: Sequence[Tuple[int, int]], first_head: int, value: Tensor, add: bool, dim: int = 1) -> None:
    """Writes or adds `value`, whose rows are those of `ranges`."""
    heads = tensor.narrow(3 - dim, first_head, value.shape[3 - dim])
    row = 0
    for begin, end in ranges:
        target, source = heads.narrow(dim, begin, end - begin), value.narrow(dim, row, end - begin)
        target.add_(source) if add else target.copy_(source)
        row += end - begin


class Gradient:
    """A sum over calls, in float32. One call that covers all rows is the sum itself."""

    def __init__(self, like: Tensor):
        self._like = like
        self.sum: Optional[Tensor] = None

    def add(self, row: int, value: Tensor) -> None:
        if self.sum is None:
            if value.shape[1] == self._like.shape[1]:
                self.sum = value.float()
                return
            self.sum = torch.zeros_like(self._like, dtype=torch.float32, memory_format=torch.contiguous_format)
        self.sum[:, row : row + value.shape[1]].add_(value)

    def total(self) -> Tensor:
        """All rows, zeros where nothing was added."""
        if self.sum is None:
            self.sum = torch.zeros_like(self._like, dtype=torch.float32, memory_format=torch.contiguous_format)
        return self.sum


class Partial:
    """(o, lse) of rows over the keys so far: exact merges in float32, in the order of the calls."""

    def __init__(self, shape: Tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
        self._shape, self._dtype, self._device = shape, dtype, device
        self.o: Optional[Tensor] = None  # [B, rows, H, Dv]
        self.lse: Optional[Tensor] = None  # [B, H, rows]
        self._filled: List[Tuple[int, int]] = []

    def _spread(self) -> None:
        """Room for all rows, in float32."""
        batch, rows, heads, _ = self._shape
        if self.o is None:
            self.o = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
            self.lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=self._device)
        else:
            self.o = self.o.float()

    def add(self, row: int, o: Tensor, lse: Tensor) -> None:
        end = row + o.shape[1]
        if self.o is None and o.shape[1] == self._shape[1]:
            self.o, self.lse, self._filled = o, lse, [(row, end)]
            return
        self._spread()
        o_rows, lse_rows = self.o[:, row:end], self.lse[:, :, row:end]
        if any(row < b and a < end for a, b in self._filled):
            o, lse = combine(torch.stack((o_rows, o.float())), torch.stack((lse_rows, lse)), return_lse=True)
        o_rows.copy_(o)
        lse_rows.copy_(lse)
        self._filled.append((row, end))

    def finished(self) -> Tuple[Tensor, Tensor]:
        if self.o is None:
            self._spread()
        return self.o.to(self._dtype), self.lse

    def join_sink(self, sink: Tensor) -> None:
        """A logit of each head joins the denominator: once, after all keys."""
        self._spread()
        lse = torch.logaddexp(self.lse, sink.float()[None, :, None])
        self.o = self.o * torch.exp(self.lse - lse).transpose(1, 2)[..., None]
        self.lse = lse
