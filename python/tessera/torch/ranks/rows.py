"""Rows of chunks in tensors [B, rows, H, D], and sums over them."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from tessera._ranks.schedule import Chunk

from ..merge import combine


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

    def begin(self, number: int) -> int:
        """The position of a chunk's first row in its sequence."""
        return self._chunks[number].begin

    def row(self, number: int, position: int) -> int:
        """The row of a position in a sequence, within a run of chunks that begins with `number`."""
        return self._rows[number] + position - self._chunks[number].begin

    def ranges(self, numbers: Sequence[int]) -> List[Tuple[int, int]]:
        """The ranges of rows of some chunks; neighbouring ranges are joined."""
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
    def merged(blocks: Sequence[Block], numbers: Sequence[int]) -> Block:
        """One block with some chunks of several blocks."""
        where = {number: block for block in blocks for number in block.numbers}
        parts = [
            [tensor[:, begin:end] for tensor in where[number].tensors]
            for number in sorted(numbers)
            for begin, end in where[number].ranges([number])
        ]  # without tensors if the blocks have none, as in a program
        return Block(blocks[0]._chunks, numbers, tuple(torch.cat(column, 1) for column in zip(*parts)))


def take(tensor: Tensor, ranges: Sequence[Tuple[int, int]], heads: slice, dim: int = 1) -> Tensor:
    """A contiguous tensor of some rows and heads, for sending: the tensor itself if it is that already. dim: the
    dimension of rows; heads have the other one of 1 and 2."""
    if heads != slice(0, tensor.shape[3 - dim]):
        tensor = tensor.narrow(3 - dim, heads.start, heads.stop - heads.start)
    parts = [tensor.narrow(dim, begin, end - begin) for begin, end in ranges]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim)).contiguous()


def put(
    tensor: Tensor, ranges: Sequence[Tuple[int, int]], first_head: int, value: Tensor, add: bool, dim: int = 1
) -> None:
    """Writes or adds `value` to the rows of `ranges`."""
    heads = tensor.narrow(3 - dim, first_head, value.shape[3 - dim])
    row = 0
    for begin, end in ranges:
        target, source = heads.narrow(dim, begin, end - begin), value.narrow(dim, row, end - begin)
        target.add_(source) if add else target.copy_(source)
        row += end - begin


class Gradient:
    """A sum over calls, in float32. If one call covers all rows, its result is used as the sum."""

    def __init__(self, like: Tensor):
        self._like = like
        self.sum: Optional[Tensor] = None

    def rows(self, row: int, count: int) -> Tensor:
        """The rows to which a call that accumulates adds."""
        return self.total()[:, row : row + count]

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


class Rows:
    """Layers of ranges of rows; no two ranges of a layer overlap."""

    def __init__(self, first: int = 0):
        self.layers: List[List[Tuple[int, int]]] = [[] for _ in range(first)]

    def place(self, begin: int, end: int, first: int = 0) -> int:
        """Adds a range to the first layer, from number `first` on, where it overlaps no other; returns the layer's
        number."""
        for n in range(first, len(self.layers)):
            if all(end <= a or b <= begin for a, b in self.layers[n]):
                self.layers[n].append((begin, end))
                return n
        self.layers.append([(begin, end)])
        return len(self.layers) - 1


class Partial:
    """(o, lse) of rows over the keys so far: parts in layers, merged exactly, all at once, in the order of the layers.

    Where calls accumulate, they all merge into one layer, in float32. Elsewhere, up to MOST layers have the dtype of
    the calls' results; beyond that, they are merged on the way, in float32.
    """

    MOST = 8

    def __init__(
        self, shape: Tuple[int, int, int, int], depth: int, dtype: torch.dtype, device: torch.device, accumulates: bool
    ):
        batch, rows, heads, _ = shape
        self.accumulates = accumulates
        self._once = depth == 1  # calls may write rows that a later call writes, too
        layers = 1 if self.accumulates else min(depth, self.MOST)
        self._dtype = dtype
        wide = self.accumulates or depth > self.MOST
        make = torch.zeros if self.accumulates else torch.empty
        self._o = make((layers, *shape), dtype=torch.float32 if wide else dtype, device=device)
        self._lse = torch.full((layers, batch, heads, rows), -torch.inf, dtype=torch.float32, device=device)
        self._low = torch.zeros_like(self._lse)  # the rounding error of lse
        self._rows = Rows()
        self._first = 0  # 1: layer 0 holds the merged result

    def place(self, row: int, count: int) -> Tuple[Tensor, Tensor, Tensor]:
        """The tensors to which a call writes its o, lse and lse_low, or with which it merges them; o is float32 if
        parts are merged on the way."""
        if self.accumulates or self._once:
            rows = slice(row, row + count)
            return self._o[0, :, rows], self._lse[0, :, :, rows], self._low[0, :, :, rows]
        layer = self._rows.place(row, row + count, self._first)
        if layer == self._o.shape[0]:
            o, lse, low = self._merged()
            self._lse.fill_(-torch.inf)
            self._low.zero_()
            self._o[0], self._lse[0], self._low[0] = o, lse, low
            self._rows, self._first = Rows(1), 1
            layer = self._rows.place(row, row + count, self._first)
        rows = slice(row, row + count)
        return self._o[layer, :, rows], self._lse[layer, :, :, rows], self._low[layer, :, :, rows]

    def _tensors(self) -> Tuple[Tensor, Tensor, Tensor]:
        return self._o, self._lse, self._low

    def _merged(self) -> Tuple[Tensor, Tensor, Tensor]:
        return combine(self._o, self._lse, self._low, return_lse=True, return_lse_low=True)

    def join_sink(self, sink: Tensor) -> None:
        """Adds a logit of each head to the denominator, as one more part whose values are 0: once, after all keys, and
        not in rows that see none."""
        if self.accumulates:  # a second layer
            self._o, self._lse, self._low = (t.new_empty((2, *t.shape[1:])).copy_(t) for t in self._tensors())
            o, lse, low = (t[1] for t in self._tensors())
        else:
            o, lse, low = self.place(0, self._o.shape[2])
        o.zero_()
        low.zero_()
        sees_none = (self._lse[:1] if self.accumulates else self._lse).amax(0) == -torch.inf
        lse.copy_(torch.where(sees_none, -torch.inf, sink.float()[None, :, None]))

    def finished(self) -> Tuple[Tensor, Tensor, Tensor]:
        if self._o.shape[0] == 1:
            return self._o[0].to(self._dtype), self._lse[0], self._low[0]
        o, lse, low = self._merged()
        return o.to(self._dtype), lse, low
