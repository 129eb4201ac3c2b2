"""Converts the pairs of a step to kernel calls on one device: few calls, each on neighbouring rows.

A call measures causal masks and windows from the bottom-right corner of its own queries and keys, and a pair's window
is given in the same way, so any pair can be a call. Neighbouring pairs that one call can compute are joined, and in
packed batches calls on different rows become sequences of one packed call.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

Place = Tuple[int, int, int, int]  # first query, queries, first key and keys of a whole


class Rectangle(NamedTuple):
    """Rows of the queries' buffer with rows of the keys' buffer."""

    sequence: int
    q_row: int
    q_length: int
    k_row: int
    k_length: int
    window_left: int
    window_right: int
    q_begin: int = 0  # the first query and key in their sequence
    k_begin: int = 0

    @property
    def q_end(self) -> int:
        return self.q_row + self.q_length

    @property
    def k_end(self) -> int:
        return self.k_row + self.k_length

    @property
    def full(self) -> bool:
        return self.window_left < 0 and self.window_right < 0

    @property
    def causal(self) -> bool:
        return self.window_left < 0 and self.window_right == 0


class Call(NamedTuple):
    """Rows [q_row, q_row + q_length) with keys: one rectangle, or several as a packed call, including the rows between
    them."""

    q_row: int
    q_length: int
    k_row: int
    k_length: int
    rectangles: Tuple[Rectangle, ...]
    packed: bool

    def options(self) -> Dict[str, Any]:
        """The options of the call; tensors as lists."""
        first = self.rectangles[0]
        if not self.packed:
            return _mask(first)
        options = self.packing()
        if not all(r.full or r.causal for r in self.rectangles):
            return {**options, **_mask(first)}
        if any(r.causal for r in self.rectangles):
            options["causal"] = True
            if any(r.full for r in self.rectangles):
                options["places"] = self.places(_place_in_causal)
        return options

    def packing(self) -> Dict[str, Any]:
        """The lengths of a packed call's sequences; tensors as lists."""
        cu_q, cu_k = [0], [0]
        for q_length, k_length, _ in self._sequences():
            cu_q.append(cu_q[-1] + q_length)
            cu_k.append(cu_k[-1] + k_length)
        longest = {
            name: max(b - a for a, b in zip(cu, cu[1:]))
            for name, cu in (("max_seqlen_q", cu_q), ("max_seqlen_k", cu_k))
        }
        return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **longest}

    def places(self, place_of: Callable[[Rectangle], Place]) -> List[Place]:
        """The places of a packed call's sequences, by those of its rectangles."""
        return [
            (0, q_length, 0, k_length) if r is None else place_of(r) for q_length, k_length, r in self._sequences()
        ]

    def _sequences(self) -> Iterator[Tuple[int, int, Optional[Rectangle]]]:
        """Queries, keys and rectangle of each sequence; rows between rectangles are queries without keys, or keys
        without queries, of no rectangle."""
        q_row, k_row = self.q_row, self.k_row
        for r in self.rectangles:
            if r.q_row > q_row:
                yield r.q_row - q_row, 0, None
            if r.k_row > k_row:
                yield 0, r.k_row - k_row, None
            yield r.q_length, r.k_length, r
            q_row, k_row = r.q_end, r.k_end


def _place_in_causal(r: Rectangle) -> Place:
    """The place in which a causal call lets a rectangle see what it sees: the whole, or the last queries after all of
    its keys."""
    if r.causal:
        return 0, r.q_length, 0, r.k_length
    return r.k_length, r.k_length + r.q_length, 0, r.k_length + r.q_length


def _mask(r: Rectangle) -> Dict[str, Any]:
    if r.full:
        return {}
    return {"causal": True} if r.causal else {"window": (r.window_left, r.window_right)}


def _triangle(rectangles: List[Rectangle]) -> Optional[Rectangle]:
    """Several neighbouring chunks, each with itself and all chunks before it, joined to one causal call."""
    diagonal = sorted((r for r in rectangles if r.causal), key=lambda r: r.q_row)
    if len(diagonal) < 2 or any((r.q_row, r.q_length) != (r.k_row, r.k_length) for r in diagonal):
        return None
    if any(a.q_end != b.q_row for a, b in zip(diagonal, diagonal[1:])):
        return None
    below = {(q.q_row, q.q_length, k.k_row, k.k_length) for n, q in enumerate(diagonal) for k in diagonal[:n]}
    others = [(r.q_row, r.q_length, r.k_row, r.k_length) for r in rectangles if r.full]
    if len(diagonal) + len(others) != len(rectangles) or sorted(others) != sorted(below):
        return None
    first, rows = diagonal[0], sum(r.q_length for r in diagonal)
    return first._replace(q_length=rows, k_length=rows)


def _join_full(rectangles: List[Rectangle]) -> List[Rectangle]:
    """Joins full rectangles of the same queries with neighbouring keys, then of neighbouring queries with the same
    keys."""
    result = [r for r in rectangles if not r.full]
    full = [r for r in rectangles if r.full]
    for same, side, length in (("q_row q_length", "k_row", "k_length"), ("k_row k_length", "q_row", "q_length")):
        key = [*same.split(), side]
        full.sort(key=lambda r: [getattr(r, name) for name in key])
        joined: List[Rectangle] = []
        for r in full:
            last = joined[-1] if joined else None
            alike = last is not None and all(getattr(last, n) == getattr(r, n) for n in ("sequence", *same.split()))
            if alike and getattr(last, side) + getattr(last, length) == getattr(r, side):
                joined[-1] = last._replace(**{length: getattr(last, length) + getattr(r, length)})
            else:
                joined.append(r)
        full = joined
    return sorted(result + full, key=lambda r: (r.q_row, r.k_row))


def _joined(rectangles: Sequence[Rectangle]) -> List[Rectangle]:
    by_sequence: Dict[int, List[Rectangle]] = {}
    for r in rectangles:
        by_sequence.setdefault(r.sequence, []).append(r)
    joined: List[Rectangle] = []
    for of_sequence in by_sequence.values():
        triangle = _triangle(of_sequence)
        joined += [triangle] if triangle else _join_full(of_sequence)
    return joined


def _goes_with(last: Rectangle, r: Rectangle, placed: bool) -> bool:
    """True if one packed call can compute both; the rows of `r` follow those of `last`. placed: its mask is that of the
    whole, and each sequence has its place."""
    same_mask = placed or (last.full or last.causal) and (r.full or r.causal) or last[5:7] == r[5:7]
    return same_mask and r.q_row >= last.q_end and r.k_row >= last.k_end


def calls(
    rectangles: Sequence[Rectangle],
    packed: bool,
    placed: bool = False,
    written: Optional[List[Tuple[int, int]]] = None,
) -> List[Call]:
    """packed: the batch is packed, so several sequences can be one call. placed: each rectangle has its place in its
    sequence, so none are joined. written: the ranges of queries of earlier calls, to which those of these calls are
    added; no call then includes such queries between its rectangles, so that each call may write all of its rows."""
    joined = list(rectangles) if placed else _joined(rectangles)
    groups: List[List[Rectangle]] = []
    for r in sorted(joined, key=lambda r: (r.q_row, r.k_row)):
        before = list(written or ())
        for group in groups:
            begin, end = group[-1].q_end, r.q_row
            keeps = written is None or not any(a < end and begin < b for a, b in before)
            if packed and _goes_with(group[-1], r, placed) and keeps:
                group.append(r)
                break
            before += [(of_group.q_row, of_group.q_end) for of_group in group]
        else:
            groups.append([r])
    if written is not None:
        written += [(r.q_row, r.q_end) for r in joined]
    return [
        Call(g[0].q_row, g[-1].q_end - g[0].q_row, g[0].k_row, g[-1].k_end - g[0].k_row, tuple(g), len(g) > 1)
        for g in groups
    ]
