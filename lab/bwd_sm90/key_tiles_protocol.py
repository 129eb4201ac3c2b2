#!/usr/bin/env python3
"""bwd_sm90's barriers where a block takes one tile of keys after another (key_tiles.cuh), as a model (protocol.py).
key_tiles_protocol.py [schedules] [--mutate]"""
import random

from protocol import Barrier, Place, check

TILES, STAGES, WARPS = 6, 2, 2  # WARPS: of each warpgroup, in the place of four
SLOTS = 2 * STAGES


def model(s):
    rng = random.Random(s.rng.random())
    # Of each tile of keys the steps, each with the score warpgroup that skips it, or none.
    tiles = [[rng.choice((0, 1, None, None)) for _ in range(rng.choice((0, 1, 2, 3, 7)))] for _ in range(TILES)]
    ring = lambda count, consumers: ([Barrier(count) for _ in range(STAGES)], [Barrier(consumers) for _ in range(STAGES)])
    q_full, q_empty = ring(1, 2 * WARPS)
    do_full, do_empty = ring(1, 2 * WARPS)
    ds_full, ds_empty = ring(2 * WARPS, WARPS)
    tile_full, tile_empty = ring(1, 3 * WARPS)
    k_full, v_full, keys_empty = Barrier(1), Barrier(1), Barrier(WARPS)
    q, d_o, blocks = ([Place() for _ in range(STAGES)] for _ in range(3))
    d_s = [[[Place() for _ in range(WARPS)] for _ in range(2)] for _ in range(STAGES)]
    k, v, slots = Place(), Place(), [Place() for _ in range(SLOTS)]
    out = [[Place() for _ in range(WARPS)] for _ in range(2)]

    def load(place, value, full):
        yield from s.write(place, value)
        full.bytes(1)

    def producer():
        step, first_slot, keys = 0, 0, 0
        for n in range(TILES + 1):
            stage, parity = n % 2, n // 2 % 2
            yield from s.wait("tile empty", tile_empty[stage], parity ^ 1)
            yield from s.write(blocks[stage], n)
            steps = len(tiles[n]) if n < TILES else 0
            first_slot = (first_slot + SLOTS - steps % SLOTS) % SLOTS
            tile_full[stage].arrive()
            if n == TILES:
                return
            if steps:
                yield from s.wait("keys empty", keys_empty, keys % 2 ^ 1)
                keys += 1
            for i in range(steps):
                at, round_ = step % STAGES, step // STAGES % 2
                if i == 0:
                    k_full.arrive(1)
                    s.start(load(k, n, k_full))
                yield from s.wait("Q empty", q_empty[at], round_ ^ 1)
                yield from s.write(slots[(steps - i + first_slot) % SLOTS], (n, i))
                q_full[at].arrive(1)
                s.start(load(q[at], (n, i), q_full[at]))
                if i == 0:
                    v_full.arrive(1)
                    s.start(load(v, n, v_full))
                yield from s.wait("dO empty", do_empty[at], round_ ^ 1)
                do_full[at].arrive(1)
                s.start(load(d_o[at], (n, i), do_full[at]))
                step += 1
                yield None

    def store(place, value):  # TMA reads what was staged
        yield from s.read(place, value)

    stored = {}

    def watched(key, process):
        yield from process
        stored[key] -= 1

    def scores(group, warp):
        key, step, keys = (group, warp), 0, 0
        stored[key] = 0
        for n in range(TILES):
            stage, parity = n % 2, n // 2 % 2
            yield from s.wait("tile", tile_full[stage], parity)
            yield from s.read(blocks[stage], n)
            if tiles[n]:
                yield from s.wait("K", k_full, keys % 2)
                yield from s.wait("V", v_full, keys % 2)
                keys += 1
            for i, skipped_by in enumerate(tiles[n]):
                at, round_ = step % STAGES, step // STAGES % 2
                yield from s.wait("Q", q_full[at], round_)
                yield from s.wait("dO", do_full[at], round_)
                if skipped_by == group:
                    do_empty[at].arrive()
                    q_empty[at].arrive()
                else:
                    yield from s.read(q[at], (n, i))
                    yield from s.read(k, n)
                    yield from s.read(d_o[at], (n, i))
                    yield from s.read(v, n)
                yield from s.wait("dS empty", ds_empty[at], round_ ^ 1)
                yield from s.write(d_s[at][group][warp], (n, i))
                ds_full[at].arrive()
                if skipped_by != group:
                    do_empty[at].arrive()
                    q_empty[at].arrive()
                step += 1
                yield None
            for what in ("dV", "dK"):
                while stored[key]:
                    yield None
                yield from s.write(out[group][warp], (what, n))
                stored[key] += 1
                s.start(watched(key, store(out[group][warp], (what, n))))
            yield from s.read(blocks[stage], n)
            tile_empty[stage].arrive()

    def dq(warp):
        step = first_slot = keys = 0
        for n in range(TILES):
            stage, parity = n % 2, n // 2 % 2
            yield from s.wait("tile", tile_full[stage], parity)
            yield from s.read(blocks[stage], n)
            steps = len(tiles[n])
            if steps:
                yield from s.wait("K", k_full, keys % 2)
                keys += 1
            first_slot = (first_slot + SLOTS - steps % SLOTS) % SLOTS
            for i in range(steps):
                at, round_ = step % STAGES, step // STAGES % 2
                yield from s.wait("dS", ds_full[at], round_)
                yield from s.read(slots[(steps - i + first_slot) % SLOTS], (n, i))
                for group in range(2):
                    for other in range(WARPS):
                        yield from s.read(d_s[at][group][other], (n, i))
                yield from s.read(k, n)
                ds_empty[at].arrive()
                step += 1
                yield None
            if steps:
                keys_empty.arrive()
            tile_empty[stage].arrive()
            yield None

    s.start(producer())
    for warp in range(WARPS):
        s.start(dq(warp))
        for group in range(2):
            s.start(scores(group, warp))


check(model, ["tile empty", "keys empty", "Q empty", "dS empty", "tile", "K", "V", "Q", "dO", "dS"], 300)
