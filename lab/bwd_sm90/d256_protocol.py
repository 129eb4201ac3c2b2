#!/usr/bin/env python3
"""bwd_sm90_d256's barriers as a model: the roles of both blocks as processes that a random schedule interleaves, reads and
writes of every stage recorded as intervals. Finds deadlocks, overwritten stages and stale data. It proves nothing about
memory ordering or the code's transcription of it. d256_protocol.py [schedules]; --mutate drops one wait or release at a time, each of
which must be found, and a word less for the steps of a block mask."""
import random
import sys


class Fault(Exception):
    pass


class Barrier:
    def __init__(self, count):
        self.count, self.pending, self.tx, self.phase = count, count, 0, 0

    def settle(self):
        if self.pending < 0:
            raise Fault("more arrivals than a phase takes")
        if self.pending == 0 and self.tx == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def arrive(self, expect=0):
        self.pending, self.tx = self.pending - 1, self.tx + expect
        self.settle()

    def bytes(self, n):
        self.tx -= n
        self.settle()

    def done(self, parity):
        return self.phase % 2 != parity  # what try_wait.parity sees: two phases ahead it waits forever


class Place:
    def __init__(self):
        self.data, self.readers, self.writers = None, 0, 0


def model(rng, steps, slots, stages, drop):
    words = stages + (2 + slots + 2 - 1) // 4 + 1 - (drop == "word")  # bwd_sm90_d256_steps
    free = [Barrier(8) for _ in range(stages)]
    p_full = [[Barrier(1) for _ in range(stages)] for _ in range(2)]
    ds_full = [[Barrier(1) for _ in range(stages)], [Barrier(8) for _ in range(stages)]]
    slots = [slots + 2, slots]
    half_full = [[Barrier(1) for _ in range(n)] for n in slots]
    half_empty = [[Barrier(8) for _ in range(n)] for n in slots]
    halves = [[Place() for _ in range(n)] for n in slots]
    stats = [[Place() for _ in range(3)] for _ in range(2)]
    step_words = [[Place() for _ in range(words)] for _ in range(2)]
    # A stage of the exchange in 8 warps' parts, since P and dS of a warp have the same words.
    tiles = [[[Place() for _ in range(8)] for _ in range(stages)] for _ in range(2)]
    for s in range(stages):
        ds_full[0][s].arrive(8)
        for w in range(2):
            p_full[w][s].arrive(4)

    def wait(name, barrier, parity):
        while name != drop and not barrier.done(parity):
            yield barrier, parity
        yield None

    def write(place, value, old=None):
        if place.readers or place.writers:
            raise Fault(f"{value} overwrites what is in use")
        if old is not None and place.data != old:
            raise Fault(f"{value} overwrites {place.data}, not {old}")
        place.writers += 1
        yield None
        place.data, place.writers = value, place.writers - 1

    def read(place, value):
        if place.writers or place.data != value:
            raise Fault(f"wanted {value}, found {place.data}")
        place.readers += 1
        yield None
        place.readers -= 1

    def load(rank, i, stat):
        j, n = divmod(i, 4)
        yield from write(halves[rank][i % slots[rank]], (j, n))
        if stat:
            yield from write(stats[rank][j % 3], j)
        half_full[rank][i % slots[rank]].bytes(2 if stat else 1)

    def producer(rank):
        for i in range(4 * steps):
            s, round_ = i % slots[rank], i // slots[rank]
            yield from wait("empty", half_empty[rank][s], round_ % 2 ^ 1)
            if i % 4 == 0:
                yield from write(step_words[rank][i // 4 % words], i // 4)
            half_full[rank][s].arrive(2 if i % 4 == 0 else 1)
            start(load(rank, i, i % 4 == 0))
            yield None

    def use(rank, j, first):
        items = [4 * j + first, 4 * j + first + 1]
        for i in items:
            s = i % slots[rank]
            yield from wait("full", half_full[rank][s], i // slots[rank] % 2)
            yield from read(halves[rank][s], (j, i % 4))
        for i in items:
            half_empty[rank][i % slots[rank]].arrive()

    def send_p(w, j):
        s = j % stages
        yield from write(tiles[1][s][w], ("P", j))
        p_full[w // 4][s].bytes(1)

    def key_warp(rank, w):
        for j in range(steps):
            s, parity = j % stages, j // stages % 2
            yield from use(rank, j, 0)
            yield from read(step_words[rank][j % words], j)
            if rank == 0:
                yield from read(stats[0][j % 3], j)
                yield from wait("free", free[s], parity ^ 1)
                start(send_p(w, j))
            else:
                yield from wait("p_full", p_full[w // 4][s], parity)
                if w % 4 == 0:
                    p_full[w // 4][s].arrive(4)
                yield from read(stats[1][j % 3], j)
                yield from read(tiles[1][s][w], ("P", j))
                yield from write(tiles[1][s][w], ("dS", j), ("P", j))
                ds_full[1][s].arrive()
            yield from use(rank, j, 2)

    def copy(j):
        s = j % stages
        for w in range(8):
            yield from read(tiles[1][s][w], ("dS", j))
            yield from write(tiles[0][s][w], ("dS", j))
        ds_full[0][s].bytes(8)

    def sender():
        for j in range(steps):
            yield from wait("ds_full_1", ds_full[1][j % stages], j // stages % 2)
            start(copy(j))
            yield None

    def dq_warp(rank, w):
        for j in range(steps):
            s = j % stages
            yield from wait(f"ds_full_{rank}", ds_full[rank][s], j // stages % 2)
            if rank == 0 and w == 0:
                ds_full[0][s].arrive(8)
            yield from read(step_words[rank][j % words], j)
            for part in range(8):
                yield from read(tiles[rank][s][part], ("dS", j))
            if drop != f"release_{rank}" or w:
                free[s].arrive()
            yield None

    running = []

    def start(process):
        running.append(process)

    for rank in range(2):
        start(producer(rank))
        for w in range(8):
            start(key_warp(rank, w))
        for w in range(4):
            start(dq_warp(rank, w))
    start(sender())
    speed = {}
    blocked = {}
    while running:
        ready = [x for x in running if id(x) not in blocked or blocked[id(x)][0].done(blocked[id(x)][1])]
        if not ready:
            raise Fault("deadlock")
        weights = [speed.setdefault(id(x), 4 ** rng.uniform(-3, 3)) for x in ready]
        for _ in range(8):
            x = rng.choices(ready, weights)[0]
            if x not in running or (id(x) in blocked and not blocked[id(x)][0].done(blocked[id(x)][1])):
                continue
            blocked.pop(id(x), None)
            try:
                state = next(x)
                if state:
                    blocked[id(x)] = state
            except StopIteration:
                running.remove(x)
                speed.pop(id(x), None)


def main():
    mutate = "--mutate" in sys.argv
    counts = [int(x) for x in sys.argv[1:] if x.isdigit()]
    for name in ["empty", "full", "free", "p_full", "ds_full_0", "ds_full_1", "release_0", "release_1", "word"] if mutate else [None]:
        found = None
        for seed in range(counts[0] if counts else 100):
            for slots, stages in ((6, 2), (5, 3)):
                try:
                    model(random.Random(seed), 9, slots, stages, name)
                except Fault as fault:
                    found = f"slots {slots}, stages {stages}, seed {seed}: {fault}"
                    break
            if found:
                break
        print(f"without {name}: {found or 'NOT FOUND'}" if name else found or "no fault")
        if bool(found) != bool(name):
            sys.exit(1)


main()
