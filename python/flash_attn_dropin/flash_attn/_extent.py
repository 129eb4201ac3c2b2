"""The extent of a cache of keys and values: checks that lengths and indices are within it, and writes that stay within
it.

Lengths, page indices and the like are data. On the CPU they are checked before anything is written. On a GPU they are
checked as well, which waits for its stream. While the stream is captured into a CUDA graph, waiting is impossible:
indices are clamped and writes out of range are dropped, so that a replay never accesses other memory.
"""

import dataclasses
from typing import List, Optional, Tuple, Union

import torch
from tessera.torch.options import integer
from torch import Tensor


def tracing() -> bool:
    """True if a tracer, a mode or a transformation sees the call, whose tensors may have no data."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclasses.dataclass(frozen=True)
class Extent:
    """The extent of a cache [num_pages, page_size, Hkv, D]. A sequence has one row, or as many pages as the index has
    columns."""

    num_pages: int
    page_size: int
    room: int  # keys that a sequence can hold
    is_block_table: bool
    num_new: int
    num_rotated: int  # positions from a sequence's length on that are rotated
    num_angles: int  # rows of rotary_cos
    clamps: bool = False  # whether values out of range are clamped

    @staticmethod
    def clamped_on(cache: Tensor) -> bool:
        # A compiled program may be captured later, and cannot check that.
        return (cache.is_cuda and torch.compiler.is_compiling()) or _capturing(cache)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def checked(
        self, cache_seqlens: Union[None, int, Tensor], pages: Optional[Tensor], leftpad: Optional[Tensor], q: Tensor
    ) -> Tensor:
        """Keys already in the cache, int32 [B]. Raises an error if lengths or indices are out of range."""
        if isinstance(cache_seqlens, Tensor):
            lengths = cache_seqlens
        else:
            length = self.room if cache_seqlens is None else integer("cache_seqlens", cache_seqlens)
            self.refuse_lengths(length, length)
            lengths = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
            if pages is None and leftpad is None:
                return lengths
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or lengths.is_meta:
            sizes = (self.num_pages, self.page_size, self.room, self.is_block_table, self.num_new, self.num_rotated)
            lengths = _checked(lengths, pages, leftpad, *sizes, self.num_angles)
        else:
            check(self, lengths, pages, leftpad)
        return lengths.to(torch.int32)

    def refuse_lengths(self, least: int, most: int) -> None:
        if least < 0:
            raise ValueError(f"cache_seqlens: {least}, accepted 0 and more")
        # Messages are formatted only when needed, since formatting turns a symbolic length into a constant.
        if most + self.num_new > self.room:
            keys = f"{self.num_new} new keys after {most}" if self.num_new else f"{most} keys"
            if self.is_block_table:
                columns = self.room // max(self.page_size, 1)
                raise RuntimeError(
                    f"block_table: {keys}, accepted at most {self.room} in all, in its {columns} pages of "
                    f"{self.page_size}"
                )
            name = "k" if self.num_new else "cache_seqlens"
            raise ValueError(f"{name}: {keys}, accepted at most {self.room} in all, the cache's room")
        if self.num_rotated and most + self.num_rotated > self.num_angles:
            raise ValueError(
                f"rotary_cos: {self.num_rotated} new keys after {most}, accepted at most {self.num_angles} in all, its "
                "rows"
            )

    def refuse_pages(self, least: int, most: int) -> None:
        if least >= 0 and most < max(self.num_pages, 1):
            return
        page = least if least < 0 else most
        if self.is_block_table:
            raise RuntimeError(f"block_table: page {page}, accepted 0 .. {self.num_pages - 1}")
        raise ValueError(f"cache_batch_idx: {page}, accepted 0 .. {self.num_pages - 1}")

    # ---- values within range, captured or not
    # ----------------------------------------------------------------------------

    def within_rotary(self, rows: Tensor) -> Tensor:
        return rows.clamp(0, self.num_angles - 1) if self.clamps else rows

    def within(self, lengths: Tensor, pages: Optional[Tensor], leftpad: Optional[Tensor]):
        if not self.clamps:
            return lengths, pages, leftpad
        return (
            lengths.clamp(0, self.room),
            None if pages is None else pages.clamp(0, max(self.num_pages - 1, 0)),
            None if leftpad is None else leftpad.clamp(min=0),
        )

    def slots(self, lengths: Tensor, pages: Optional[Tensor]) -> Tensor:
        """The index of each new token among the cache's keys, int64 [B * num_new]; -1 if it is out of range."""
        rows = lengths[:, None].to(torch.int64) + torch.arange(self.num_new, device=lengths.device)
        at = rows.clamp(0, max(self.room - 1, 0))
        if pages is None:
            page = torch.arange(rows.shape[0], device=rows.device)[:, None].expand_as(rows)
        else:
            page = torch.gather(pages.to(torch.int64), 1, at // self.page_size)
        within = (rows == at) & (page >= 0) & (page < self.num_pages)
        return torch.where(within, page * self.page_size + at % self.page_size, -1).flatten()


_MOST_COPIED = 2048  # page indices to copy from a GPU; more are reduced on the GPU


def check(extent: Extent, lengths: Tensor, pages: Optional[Tensor], leftpad: Optional[Tensor]) -> None:
    """Raises an error if lengths or indices are out of range. On a GPU this waits for its stream once, except under
    capture."""
    if _capturing(lengths) or lengths.numel() == 0:
        return
    many = lengths.is_cuda and pages is not None and pages.numel() > _MOST_COPIED
    of_lengths, of_pages, of_leftpad = (_bounds_on_gpu if many else _bounds)(extent, lengths, pages, leftpad)
    extent.refuse_lengths(*of_lengths)
    extent.refuse_pages(*of_pages)
    if of_leftpad[0] < 0:
        raise ValueError(f"cache_leftpad: {of_leftpad[0]}, accepted 0 and more")


def _bounds(
    extent: Extent, lengths: Tensor, pages: Optional[Tensor], leftpad: Optional[Tensor]
) -> List[Tuple[int, int]]:
    """Minimum and maximum of lengths, of the pages in use, and of leftpad; (0, 0) for an absent tensor. For small
    sizes, lists (copied from a GPU if necessary) are faster than a dozen operators."""
    counts = lengths.tolist()
    used = [0]
    if pages is not None:
        for row, count in zip(pages.tolist(), counts):
            used += row[: max(0, -(-(count + extent.num_new) // max(extent.page_size, 1)))]
    padding = [0] if leftpad is None else leftpad.tolist()
    return [(min(values), max(values)) for values in (counts, used, padding)]


def _bounds_on_gpu(
    extent: Extent, lengths: Tensor, pages: Optional[Tensor], leftpad: Optional[Tensor]
) -> List[Tuple[int, int]]:  # fmt: skip
    """The same on the GPU: copies only the results."""
    tensors = {"lengths": lengths}
    if pages is not None and pages.numel() > 0:
        starts = torch.arange(0, extent.room, max(extent.page_size, 1), device=pages.device)
        tensors["pages"] = torch.where(starts < (lengths + extent.num_new)[:, None], pages, 0)
    if leftpad is not None:
        tensors["leftpad"] = leftpad
    values = torch.stack([x.to(torch.int64) for tensor in tensors.values() for x in tensor.aminmax()]).tolist()
    found = dict(zip(tensors, zip(values[::2], values[1::2])))
    return [found.get(name, (0, 0)) for name in ("lengths", "pages", "leftpad")]


# For compiled programs: a node that checks when the program runs; everything else depends on its result.
@torch.library.custom_op("tessera_flash_attn::checked_lengths", mutates_args=())
def _checked(
    lengths: Tensor, pages: Optional[Tensor], leftpad: Optional[Tensor], num_pages: int, page_size: int, room: int,
    is_block_table: bool, num_new: int, num_rotated: int, num_angles: int,
) -> Tensor:  # fmt: skip
    extent = Extent(num_pages, page_size, room, is_block_table, num_new, num_rotated, num_angles)
    check(extent, lengths, pages, leftpad)
    return lengths.clone()


@_checked.register_fake
def _(lengths, *_arguments):
    return torch.empty_like(lengths)
