"""One rank's schedule from the library (tessera/distributed.h): plain data, the same for the same problem on every
rank."""

from __future__ import annotations

import functools
import json
from typing import Any, Dict, NamedTuple, Tuple

from tessera import _core


class Chunk(NamedTuple):
    """A contiguous range of rows of one sequence, and its first row among its rank's rows."""

    rank: int
    sequence: int
    begin: int
    length: int
    row: int


class Pair(NamedTuple):
    """Queries [q_begin, q_begin + q_length) of a sequence with keys; the window is that of a call on these ranges."""

    sequence: int
    q_begin: int
    q_length: int
    k_begin: int
    k_length: int
    window_left: int
    window_right: int
    q_chunk: int
    q_chunks: int
    k_chunk: int
    k_chunks: int
    area: int


class Message(NamedTuple):
    """A transfer between this rank and a peer in one step: rows of some chunks, for some heads."""

    receive: bool
    peer: int
    travels: str
    partial: bool
    first_head: int
    num_heads: int
    chunks: Tuple[int, ...]


class Step(NamedTuple):
    pairs: Tuple[Pair, ...]
    messages: Tuple[Message, ...]


class Schedule(NamedTuple):
    rank: int
    ranks: int
    hash: int
    strategy: str
    head_ranks: int
    heads_q: slice  # the query heads that this rank computes
    heads_kv: slice
    chunks: Tuple[Chunk, ...]
    steps: Tuple[Step, ...]

    def chunks_of(self, ranks: range) -> Tuple[int, ...]:
        return tuple(n for n, chunk in enumerate(self.chunks) if chunk.rank in ranks)

    @property
    def group(self) -> range:
        """The ranks that share their rows and divide the heads, including this one."""
        first = self.rank - self.rank % self.head_ranks
        return range(first, first + self.head_ranks)


@functools.lru_cache(maxsize=256)
def head_ranks(lengths: Tuple[int, ...], directions: Tuple[str, ...], **members: Any) -> int:
    """How many ranks divide the heads. It is the same for all passes of a call, since the backward pass reuses what the
    forward pass exchanged. If the strategy leaves it open, the number with the shortest predicted total time is
    chosen."""
    sums: Dict[int, float] = {}
    for n, direction in enumerate(directions):
        fastest: Dict[int, float] = {}
        for answer in json.loads(_core.ranks_plan_json(list(lengths), -1, direction=direction, **members))[
            "strategies"
        ]:
            right = members["strategy"] in ("auto", answer["strategy"])
            right = right and members["head_ranks"] in (0, answer["head_ranks"])
            if right and answer["accepted"]:
                count, time = answer["head_ranks"], answer["predicted_us"]
                fastest[count] = min(time, fastest.get(count, time))
        sums = fastest if n == 0 else {count: time + fastest[count] for count, time in sums.items() if count in fastest}
    return min(sums, key=sums.__getitem__)


def _messages(transfers: list) -> Tuple[Message, ...]:
    """Joins transfers of one kind with one peer to one message."""
    chunks: Dict[tuple, list] = {}
    for t in transfers:
        key = (t["receive"], t["peer"], t["travels"], t["partial"], t["first_head"], t["num_heads"])
        chunks.setdefault(key, []).append(t["chunk"])
    return tuple(Message(*key, tuple(of_key)) for key, of_key in chunks.items())


@functools.lru_cache(maxsize=256)
def schedule(lengths: Tuple[int, ...], rank: int, **members: Any) -> Schedule:
    """Raises tessera.Error, which names the member that breaks a rule."""
    data = json.loads(_core.ranks_plan_json(list(lengths), rank, **members))
    steps = tuple(
        Step(
            tuple(Pair(*(pair[name] for name in Pair._fields)) for pair in step["pairs"]), _messages(step["transfers"])
        )
        for step in data["steps"]
    )
    first_q, first_kv = data["first_head_q"], data["first_head_kv"]
    return Schedule(
        rank,
        data["problem"]["ranks"],
        data["hash"],
        data["strategy"],
        data["problem"]["head_ranks"],
        slice(first_q, first_q + data["num_heads_q"]),
        slice(first_kv, first_kv + data["num_heads_kv"]),
        tuple(Chunk(*(chunk[name] for name in Chunk._fields)) for chunk in data["chunks"]),
        steps,
    )
