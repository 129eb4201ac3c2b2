"""A schedule as kernel calls on one device, made once per problem: which rows, in which block of keys."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from tessera._ranks.calls import Call, Rectangle, calls
from tessera._ranks.schedule import Pair, Schedule, schedule

from .rows import Block, Rows


class PlannedCall(NamedTuple):
    call: Call
    keys: Tuple[int, ...]  # the chunks of the block that contains its keys


class Program(NamedTuple):
    schedule: Schedule
    steps: Tuple[Tuple[PlannedCall, ...], ...]
    kept: Tuple[Tuple[int, ...], ...]  # chunks of other ranks still needed after each step
    depth: int  # the most calls for a single query; forward, if it is 1, the last call that writes a row computes it


@functools.lru_cache(maxsize=256)
def program(lengths: Tuple[int, ...], rank: int, packed: bool, placed: bool = False, **members: Any) -> Program:
    """packed: several sequences can be one call. placed: calls are told their place in the sequence. Raises
    tessera.Error, which names the member that breaks a rule."""
    made = schedule(lengths, rank, **members)
    own = Block(made.chunks, made.chunks_of(made.group), ())
    last_use = {
        number: n
        for n, step in enumerate(made.steps)
        for pair in step.pairs
        for number in range(pair.k_chunk, pair.k_chunk + pair.k_chunks)
    }
    forward = members.get("direction", "forward") == "forward"  # backward, calls add to sums
    each_row_once = forward and _depth(_steps(made, own, last_use, packed, placed, None)[0], spans=False) <= 1
    steps, kept = _steps(made, own, last_use, packed, placed, [] if each_row_once else None)
    return Program(made, steps, kept, 1 if each_row_once else _depth(steps, spans=True))


def _steps(
    made: Schedule,
    own: Block,
    last_use: Dict[int, int],
    packed: bool,
    placed: bool,
    written: Optional[List[Tuple[int, int]]],
) -> Tuple[Tuple[Tuple[PlannedCall, ...], ...], Tuple[Tuple[int, ...], ...]]:
    """Each step's calls, and the chunks of other ranks that are kept after it. written: as `calls` has it."""
    fetched: List[Block] = []
    steps, kept = [], []
    for n, step in enumerate(made.steps):
        steps.append(tuple(_planned(step.pairs, own, fetched, packed, placed, written)))
        fetched += [
            Block(made.chunks, m.chunks, ())
            for m in step.messages
            if m.receive and m.travels == "K, V" and made.chunks[m.chunks[0]].rank not in made.group
        ]
        fetched = [block for block in fetched if any(last_use.get(number, -1) > n for number in block.numbers)]
        kept.append(tuple(number for block in fetched for number in block.numbers))
    return tuple(steps), tuple(kept)


def _depth(steps: Tuple[Tuple[PlannedCall, ...], ...], spans: bool) -> int:
    """The most calls for a single query; spans: those count whose queries include it between their rectangles."""
    rows = Rows()
    for call in (planned.call for step in steps for planned in step):
        ranges = [(call.q_row, call.q_row + call.q_length)] if spans else [(r.q_row, r.q_end) for r in call.rectangles]
        for begin, end in ranges:
            rows.place(begin, end)
    return len(rows.layers)


# A call with a place and dropout begins at a multiple of this many keys.
_DROPOUT_KEYS = 32


def _planned(
    pairs: Tuple[Pair, ...],
    own: Block,
    fetched: List[Block],
    packed: bool,
    placed: bool,
    written: Optional[List[Tuple[int, int]]],
) -> List[PlannedCall]:
    blocks = [own, *fetched]
    if not all(any(block.has(pair.k_chunk, pair.k_chunks) for block in blocks) for pair in pairs):
        needed = {number for pair in pairs for number in range(pair.k_chunk, pair.k_chunk + pair.k_chunks)}
        blocks = [Block.merged(blocks, tuple(needed))]  # keys of several ranks in one call
    rectangles: Dict[Tuple[int, ...], List[Rectangle]] = {}
    for pair in pairs:
        block = next(block for block in blocks if block.has(pair.k_chunk, pair.k_chunks))
        before = pair.k_begin % _DROPOUT_KEYS  # keys that the mask hides
        if placed and block.begin(pair.k_chunk) <= pair.k_begin - before:
            pair = pair._replace(k_begin=pair.k_begin - before, k_length=pair.k_length + before)
        rectangle = Rectangle(
            pair.sequence,
            own.row(pair.q_chunk, pair.q_begin),
            pair.q_length,
            block.row(pair.k_chunk, pair.k_begin),
            pair.k_length,
            pair.window_left,
            pair.window_right,
            pair.q_begin,
            pair.k_begin,
        )
        rectangles.setdefault(block.numbers, []).append(rectangle)
    return [
        PlannedCall(call, keys)
        for keys, listed in rectangles.items()
        for call in calls(listed, packed, placed, written)
    ]
