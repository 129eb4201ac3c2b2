"""fwd_sm90's rings as a model, with consumers that skip blocks hidden from their rows by a block mask."""

import random

import pytest
from barriers import Barrier, Place, first_fault
from headers import function

TILES = 5
MOST_UNSEEN_V = function("most_unseen_v")
CONFIGS = ((2, 2, 2, 2), (2, 2, 2, 4), (2, 4, 4, 4), (3, 3, 3, 6))  # consumers, stages of K, V and Q
# Waits that are left out, and one unread V more than most_unseen_v() allows while one P V holds back the ring.
FAULTS = ["K empty", "V empty", "Q empty", "K", "V", "Q", "bound"]


class Ring:
    def __init__(self, stages, consumers):
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(consumers) for _ in range(stages)]
        self.places = [Place() for _ in range(stages)]

    def at(self, n):
        stages = len(self.full)
        return n % stages, n // stages % 2


def draw_lists(rng, consumers):
    """The entries of each work tile: which consumers each is hidden from. One consumer alone sees some runs."""
    lists = []
    for _ in range(TILES):
        entries, alone = [], None
        for _ in range(rng.choice((1, 2, 5, 12, 24))):
            if alone is None or rng.random() < 0.15:
                alone = rng.choice((None, *range(consumers)))
            seen = {alone} if alone is not None else {c for c in range(consumers) if rng.random() < 0.5}
            if seen:
                entries.append(set(range(consumers)) - seen)
        lists.append(entries)
    return lists


def model(schedule, consumers, k_stages, v_stages, q_stages):
    start, wait, write, read = schedule.start, schedule.wait, schedule.write, schedule.read
    most = MOST_UNSEEN_V(consumers, k_stages, v_stages, q_stages) + (schedule.drop == "bound")
    lists = draw_lists(random.Random(schedule.rng.random()), consumers)
    k_ring, v_ring, q_ring = Ring(k_stages, consumers), Ring(v_stages, consumers), Ring(q_stages, 1)
    stream = [(t, n) for t, entries in enumerate(lists) for n in range(len(entries))]

    def load(ring, stage, value):
        yield from write(ring.places[stage], value)
        ring.full[stage].bytes(1)

    def producer(name, ring, values):
        for n, value in enumerate(values):
            stage, parity = ring.at(n)
            yield from wait(f"{name} empty", ring.empty[stage], parity ^ 1)
            ring.full[stage].arrive(1)
            start(load(ring, stage, value))
            yield None

    def consumer(c):
        k = v = unseen = 0  # of the stream: the next K, the next V; V whose K was released unread
        met = []

        def skip_v():
            nonlocal v, unseen
            while unseen:
                stage, parity = v_ring.at(v)
                yield from wait("skipped V", v_ring.full[stage], parity)
                v_ring.empty[stage].arrive()
                v, unseen = v + 1, unseen - 1
                yield None

        def next_listed(t, first):
            nonlocal k, unseen
            while k < len(stream) and stream[k][0] == t:
                stage, parity = k_ring.at(k)
                yield from wait("K", k_ring.full[stage], parity)
                yield from read(k_ring.places[stage], stream[k])
                n = stream[k][1]
                last = n == len(lists[t]) - 1
                if c not in lists[t][n] or unseen == most or (first and last):
                    return stream[k]
                k_ring.empty[stage].arrive()
                k, unseen = k + 1, unseen + 1
                yield None
            return None

        def scores(entry, q_stage):
            stage, _ = k_ring.at(k)
            yield from read(k_ring.places[stage], entry)
            yield from read(q_ring.places[q_stage], (entry[0], c))

        def release_k():
            nonlocal k
            k_ring.empty[k_ring.at(k)[0]].arrive()
            k += 1
            yield None

        def output(entry):
            nonlocal v
            stage, parity = v_ring.at(v)
            yield from wait("V", v_ring.full[stage], parity)
            yield from read(v_ring.places[stage], entry)

        def release_v():
            nonlocal v
            v_ring.empty[v_ring.at(v)[0]].arrive()
            v += 1
            yield from skip_v()

        pending = None  # whose P waits for V
        for t in range(TILES):
            if not lists[t]:
                # No keys: P V is not held back while the tile is passed over, its Q's stage is completed empty.
                if pending:
                    yield from output(pending)
                    yield from release_v()
                    pending = None
            q_stage, q_parity = q_ring.at(t * consumers + c)
            yield from wait("Q", q_ring.full[q_stage], q_parity)
            if lists[t]:
                entry = yield from next_listed(t, True)
                if not pending:
                    yield from skip_v()
                while entry:
                    yield from scores(entry, q_stage)
                    if pending:
                        yield from output(pending)
                        yield from release_v()
                    yield from release_k()
                    met.append(entry)
                    pending = entry
                    entry = yield from next_listed(t, False)
            q_ring.empty[q_stage].arrive()
            yield None
        if pending:
            yield from output(pending)
            yield from release_v()
        seen = [(t, n) for t, n in stream if c not in lists[t][n]]
        assert set(seen) <= set(met) and met == sorted(met) and v == k == len(stream)

    start(producer("K", k_ring, stream))
    start(producer("V", v_ring, stream))
    start(producer("Q", q_ring, [(t, c) for t in range(TILES) for c in range(consumers)]))
    for c in range(consumers):
        start(consumer(c))


@pytest.mark.parametrize("config", CONFIGS)
def test_no_schedule_finds_a_fault(config):
    assert first_fault(lambda schedule: model(schedule, *config), 40) is None


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_wait_that_is_left_out_is_found(config, name):
    assert first_fault(lambda schedule: model(schedule, *config), 300, name)
