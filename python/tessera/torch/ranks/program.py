"""A schedule as kernel calls on one device, made once per problem: which rows, in which block of keys."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, NamedTuple, Tuple

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
    depth: int  # the most calls for a single query


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
    fetched: List[Block] = []
    steps, kept = [], []
    rows = Rows()
    for n, step in enumerate(made.steps):
        steps.append(tuple(_planned(step.pairs, own, fetched, packed, placed)))
        for planned in steps[-1]:
            rows.place(planned.call.q_row, planned.call.q_row + planned.call.q_length)
        fetched += [
            Block(made.chunks, m.chunks, ())
            for m in step.messages
            if m.receive and m.travels == "K, V" and made.chunks[m.chunks[0]].rank not in made.group
        ]
        fetched = [block for block in fetched if any(last_use.get(number, -1) > n for number in block.numbers)]
        kept.append(tuple(number for block in fetched for number in block.numbers))
    return Program(made, tuple(steps), tuple(kept), len(rows.layers))


# A call with a place and dropout begins at a multiple of this many keys.
_DROPOUT_KEYS = 32


def _planned(
    pairs: Tuple[Pair, ...], own: Block, fetched: List[Block], packed: bool, placed: bool
) -> List[PlannedCall]:
    blocks = [own, *fetched]
    if not all(any(block.has(pair.k_chunk, pair.k_chunks) for block in blocks) for pair in pairs):
        blocks = [Block.merged(blocks)]  # keys of several ranks in one call
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
    return [PlannedCall(call, keys) for keys, listed in rectangles.items() for call in calls(listed, packed, placed)]
