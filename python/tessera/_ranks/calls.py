"""Converts the pairs of a step to kernel calls on one device: few calls, each on neighbouring rows.

A call measures causal masks and windows from the bottom-right corner of its own queries and keys, and a pair's window
is given in the same way, so any pair can be a call. Neighbouring pairs that one call can compute are joined, and in
packed batches calls on different rows become sequences of one packed call.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple


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
        if not self.packed:
            return _mask(self.rectangles[0])
        cu_q, cu_k, causal = [0], [0], []
        # (first query, queries, first key, keys) of the whole as which each sequence sees what it does in a causal
        # call: itself, or the last queries after all of its keys.
        places: List[Tuple[int, int, int, int]] = []

        def add(q_end: int, k_end: int, is_causal: bool) -> None:
            q_length, k_length = q_end - self.q_row - cu_q[-1], k_end - self.k_row - cu_k[-1]
            before = 0 if is_causal else k_length
            total_k = k_length if is_causal else k_length + q_length
            cu_q.append(q_end - self.q_row)
            cu_k.append(k_end - self.k_row)
            causal.append(is_causal)
            places.append((before, before + q_length, 0, total_k))

        for r in self.rectangles:  # for the rows before it: queries without keys, keys without queries
            if r.q_row > cu_q[-1] + self.q_row:
                add(r.q_row, cu_k[-1] + self.k_row, r.causal)
            if r.k_row > cu_k[-1] + self.k_row:
                add(r.q_row, r.k_row, r.causal)
            add(r.q_end, r.k_end, r.causal)
        first = self.rectangles[0]
        mask = {} if first.full or first.causal else _mask(first)
        if not mask and any(causal):
            mask = {"causal": True} if all(causal) else {"causal": True, "places": places}
        longest = {
            name: max(b - a for a, b in zip(cu, cu[1:]))
            for name, cu in (("max_seqlen_q", cu_q), ("max_seqlen_k", cu_k))
        }
        return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **longest, **mask}


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


def _goes_with(last: Rectangle, r: Rectangle) -> bool:
    """True if one packed call can compute both; the rows of `r` follow those of `last`."""
    same_mask = (last.full or last.causal) and (r.full or r.causal) or last[5:7] == r[5:7]
    return same_mask and r.q_row >= last.q_end and r.k_row >= last.k_end


def calls(rectangles: Sequence[Rectangle], packed: bool, placed: bool = False) -> List[Call]:
    """packed: the batch is packed, so several sequences can be one call. placed: each call has one place in its
    sequence, so no rectangles are joined."""
    if placed:
        return [
            Call(r.q_row, r.q_length, r.k_row, r.k_length, (r,), False)
            for r in sorted(rectangles, key=lambda r: (r.q_row, r.k_row))
        ]
    by_sequence: Dict[int, List[Rectangle]] = {}
    for r in rectangles:
        by_sequence.setdefault(r.sequence, []).append(r)
    joined: List[Rectangle] = []
    for of_sequence in by_sequence.values():
        triangle = _triangle(of_sequence)
        joined += [triangle] if triangle else _join_full(of_sequence)
    groups: List[List[Rectangle]] = []
    for r in sorted(joined, key=lambda r: (r.q_row, r.k_row)):
        group = next((g for g in groups if packed and _goes_with(g[-1], r)), None)
        if group is None:
            groups.append([r])
        else:
            group.append(r)
    return [
        Call(g[0].q_row, g[-1].q_end - g[0].q_row, g[0].k_row, g[-1].k_end - g[0].k_row, tuple(g), len(g) > 1)
        for g in groups
    ]
