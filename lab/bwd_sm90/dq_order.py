#!/usr/bin/env python3
"""What a fixed order of dQ's additions costs, by a model: blocks in the order in which they start, a step's time, and a turn's way. Also whether
each order ends.

dq_order.py [--head-dim 128] [--noise 0.2]. Orders: index (without a mask, by key block), rotate (without a mask: each block begins with the query
tiles at its own keys), diagonal (causal, from the last keys on: each block begins with its own diagonal), circles (the same turns, but of
an eighth of what the GPU holds, neighbours, the longest start first; measured, no gain). `threads` share a block's steps: from a look at a tile's semaphore to its
change one takes LOOK + ADD, which is fitted to docs/lab/2026-11-25-bwd-sm90-deterministic.csv and 2026-11-25-bwd-sm90-d256-deterministic.csv.
Printed: the rate over that of the kernel in any order, of whole calls.
"""
import argparse, heapq, random

BLOCK_N, ROWS_US, CLEARING_US = 128, 125.0, 35.0  # keys of a block; what goes before and after, and of it what deterministic has not
LOOK, READ = 0.7, 0.3  # us until a semaphore's answer; until a staged tile has been read
# Head size: queries a step, its us, ADD, us of a block beside its steps, blocks at once, steps ahead of the additions.
KERNELS = {64: (128, 2.65, 2.0, 5, 132, 4), 128: (64, 2.36, 2.0, 5, 132, 4), 256: (64, 2.95, 2.7, 6, 66, 3)}


def starts(order, heads, blocks, section, circle):
    """Groups of (head, key block) that may wait for each other, in the order in which they start."""
    if order == "rotate":
        return [[(h, kb) for kb in range(blocks)] for h in range(heads)]
    groups = []
    for s in range(0, heads, section):
        own = range(s, min(s + section, heads))
        if order == "circles":
            for end in range(blocks, 0, -circle):
                groups += [[(h, kb) for kb in range(max(0, end - circle), end)] for h in own]
        else:
            groups += [[(h, blocks - 1 - n if order == "diagonal" else n)] for n in range(blocks) for h in own]
    return groups


def walk(order, causal, kb, blocks, tiles):
    """The tiles of queries of a key block in its order, and its turn at each."""
    per_block = tiles // blocks
    if causal:
        return [(t, t // per_block - kb) for t in range(kb * per_block, tiles)]
    if order == "rotate":
        return [((kb * per_block + n) % tiles, (n // per_block)) for n in range(tiles)]
    return [(t, kb) for t in range(tiles)]


def makespan(kernel, order, causal, heads, blocks, tiles, section, circle, threads, noise):
    _, step, add, block_us, at_once, ahead = kernel
    rng = random.Random(1)
    around = lambda share: 1 + noise * share * (2 * rng.random() - 1)
    free, passed, end = [0.0] * at_once, {}, 0.0
    for group in starts(order, heads, blocks, section, circle):
        running = []
        for h, kb in group:
            begin = heapq.heappop(free) + block_us * around(2)
            running.append({"head": h, "steps": walk(order, causal, kb, blocks, tiles), "n": 0, "pace": step * around(0.15),
                            "computed": begin, "thread": [begin] * threads, "read": [], "last": begin})
        ready = list(range(len(running)))
        waiting = {}
        while ready:
            b = running[ready.pop()]
            while b["n"] < len(b["steps"]):
                n, (tile, turn) = b["n"], b["steps"][b["n"]]
                before = passed.get((b["head"], tile, turn - 1)) if order != "free" and turn > 0 else -1e9
                if before is None:
                    waiting[b["head"], tile, turn - 1] = running.index(b)
                    break
                computed = b["computed"] + b["pace"] * around(1)
                if order == "free":
                    b["last"] = computed
                else:
                    if n >= ahead:
                        computed = max(computed, b["read"][n - ahead])
                    look = max(b["thread"][n % threads] + LOOK, before + 0.75 * LOOK)
                    added = max(look, computed)
                    b["read"].append(added + READ)
                    b["thread"][n % threads] = passed[b["head"], tile, turn] = added + add
                    b["last"] = max(b["last"], added + 0.5)
                    if (b["head"], tile, turn) in waiting:
                        ready.append(waiting.pop((b["head"], tile, turn)))
                b["computed"], b["n"] = computed, n + 1
        assert not waiting, f"{order}: all wait"
        for b in running:
            heapq.heappush(free, b["last"])
            end = max(end, b["last"])
    return end


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--head-dim", type=int, default=128, choices=KERNELS)
    p.add_argument("--noise", type=float, default=0.0, help="of a step's time; less of a block's pace, more of its start")
    a = p.parse_args()
    kernel, d = KERNELS[a.head_dim], a.head_dim
    at_once, most = kernel[4], kernel[4] // 2
    for causal in (0, 1):
        for length in (512, 2048, 4096, 8192, 16384):
            heads, blocks, tiles = 16384 // length * (2048 // d), length // BLOCK_N, length // kernel[0]
            section = min(heads, max(1, int(24e6 // (length * d * 8)))) if causal else 1
            time = lambda order, threads=1, section=section: makespan(kernel, order, causal, heads, blocks, tiles, section, at_once // 8, threads,
                                                                      a.noise)
            base = time("free") + ROWS_US
            rate = lambda *args: base / (time(*args) + ROWS_US - CLEARING_US)
            order = "diagonal" if causal else "rotate" if blocks <= most else "index"
            line = f"D {d} {'causal' if causal else 'full':6} {length:6} {order}: one thread {rate(order):.3f}, two {rate(order, 2):.3f}"
            if causal and d > 64 and blocks > at_once // 8:
                line += f", two in circles {rate('circles', 2, max(section, min(heads, 8))):.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
