#!/usr/bin/env python3
"""What a fixed order of dQ's additions costs, by a model: blocks in the order in which they start, a step's time, and the time from
one block's addition to the next one's. Also whether each order is one (every tile gets the turns 0, 1, ... once) and ends.

dq_order.py [--head-dim 128]. Orders: free (any, the longest blocks first), index (without a mask by key block, causal from the last
keys on), rotate (without a mask: each block begins with the query tiles at its own keys: BwdSm90Config::rotate of the variants).
`ahead`: steps that a block computes before the first of them is added: 4 with a thread that adds (two tiles of dQ, two of dS), else 1.
"""
import argparse, heapq

MULTIPROCESSORS, BLOCK_N, BLOCK_US = 132, 128, 5.0  # keys of a block; what it costs beside its steps


def steps_of(order, causal, kb, blocks, tiles):
    """The tiles of queries of key block kb in its order, and its turn at each."""
    per_block = tiles // blocks
    first = kb * per_block if causal else 0
    if order == "rotate" and not causal:
        walk = [(kb * per_block + n) % tiles for n in range(tiles)]
        return [(t, (t // per_block - kb) % blocks) for t in walk]
    if causal:
        return [(t, t // per_block - kb) for t in range(first, tiles)]
    return [(t, kb) for t in range(tiles)]


def check(order, causal, blocks, tiles):
    seen = {}
    for kb in range(blocks):
        for t, turn in steps_of(order, causal, kb, blocks, tiles):
            assert turn not in seen.setdefault(t, set()), (order, causal, kb, t)
            seen[t].add(turn)
    assert all(turns == set(range(len(turns))) for turns in seen.values())


def makespan(order, causal, heads, blocks, tiles, section, step, passing, adding, ahead):
    free = [0.0] * MULTIPROCESSORS
    heapq.heapify(free)
    tickets = []
    for s in range(0, heads, section):
        width = min(section, heads - s)
        for slot in range(blocks):
            kb = blocks - 1 - slot if causal and order != "free" else slot
            tickets += [(h, kb) for h in range(s, s + width)]
    added = {}  # (head, tile) -> time of each turn's addition, by turn
    at = 0
    while at < len(tickets):
        # Blocks that may wait for each other: a head's (rotate), else one.
        count = blocks if order == "rotate" and not causal else 1
        group = tickets[at:at + count]
        at += count
        begin = [heapq.heappop(free) + BLOCK_US for _ in group]
        walks = [steps_of(order, causal, kb, blocks, tiles) for _, kb in group]
        computed, adds = [[] for _ in group], [[] for _ in group]
        for n in range(max(map(len, walks))):
            for i, (h, kb) in enumerate(group):
                if n >= len(walks[i]):
                    continue
                c = (computed[i][-1] if n else begin[i]) + step
                if n >= ahead:
                    c = max(c, adds[i][n - ahead])
                computed[i].append(c)
                a = max(c, adds[i][-1] + adding if n else 0.0)
                t, turn = walks[i][n]
                if order != "free" and turn > 0:
                    a = max(a, added[h, t, turn - 1] + passing)
                adds[i].append(a)
                added[h, t, turn] = a
        for a in adds:
            heapq.heappush(free, a[-1] if a else 0.0)
    return max(free)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--head-dim", type=int, default=128)
    a = p.parse_args()
    d = a.head_dim
    block_m, step = (64, 2.42) if d == 128 else (128, 2.72)  # us: the rates measured at 16384
    print(f"D {d}: time over that without an order")
    for causal in (0, 1):
        for length in (512, 1024, 2048, 4096, 16384):
            heads, blocks, tiles = 16384 // length * (2048 // d), length // BLOCK_N, length // block_m
            section = max(1, int(24e6 // (length * d * 8))) if causal else 1
            base = makespan("free", causal, heads, blocks, tiles, section, step, 0.0, 0.0, 4)
            line = f"  {'causal' if causal else 'full':6} {length:6}"
            for order, passing, adding, ahead, label in (
                ("index", 2.0, 1.7, 4, "index, thread"), ("index", 3.0, 1.7, 4, "index, slow"),
                ("rotate", 2.0, 1.7, 4, "rotate, thread"), ("rotate", 3.0, 1.7, 4, "rotate, slow")):
                if causal and order == "rotate":
                    continue
                check(order, causal, blocks, tiles)
                line += f"  {label} {makespan(order, causal, heads, blocks, tiles, section, step, passing, adding, ahead) / base:.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
