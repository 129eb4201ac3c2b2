"""bwd_sm90_d256's barriers as a model, with the ring of steps that block masks and options use."""

import pytest
from barriers import Barrier, Place, first_fault
from headers import config, constant, function

STEPS = 9
STAT_STAGES = constant("kBwdD256StatStages")
CONFIGS = ((6, 2), (5, 2), (5, 3))  # half slots and exchange stages: the library's two, and one with a third stage
WAITS = ["empty", "full", "free", "p_full", "ds_full_0", "ds_full_1", "release_0", "release_1", "word"]


def model(schedule, slots, stages):
    steps, drop, start = STEPS, schedule.drop, schedule.start
    wait, write, read = schedule.wait, schedule.write, schedule.read
    words = function("bwd_sm90_d256_steps")(config(half_slots=slots, exchange_stages=stages)) - (drop == "word")
    free = [Barrier(8) for _ in range(stages)]
    p_full = [[Barrier(1) for _ in range(stages)] for _ in range(2)]
    ds_full = [[Barrier(1) for _ in range(stages)], [Barrier(8) for _ in range(stages)]]
    slots = [slots + 2, slots]
    half_full = [[Barrier(1) for _ in range(n)] for n in slots]
    half_empty = [[Barrier(8) for _ in range(n)] for n in slots]
    halves = [[Place() for _ in range(n)] for n in slots]
    stats = [[Place() for _ in range(STAT_STAGES)] for _ in range(2)]
    step_words = [[Place() for _ in range(words)] for _ in range(2)]
    # A stage of the exchange in 8 warps' parts, since P and dS of a warp have the same words.
    tiles = [[[Place() for _ in range(8)] for _ in range(stages)] for _ in range(2)]
    for s in range(stages):
        ds_full[0][s].arrive(8)
        for w in range(2):
            p_full[w][s].arrive(4)

    def load(rank, i, stat):
        j, n = divmod(i, 4)
        yield from write(halves[rank][i % slots[rank]], (j, n))
        if stat:
            yield from write(stats[rank][j % STAT_STAGES], j)
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
                yield from read(stats[0][j % STAT_STAGES], j)
                yield from wait("free", free[s], parity ^ 1)
                start(send_p(w, j))
            else:
                yield from wait("p_full", p_full[w // 4][s], parity)
                if w % 4 == 0:
                    p_full[w // 4][s].arrive(4)
                yield from read(stats[1][j % STAT_STAGES], j)
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

    for rank in range(2):
        start(producer(rank))
        for w in range(8):
            start(key_warp(rank, w))
        for w in range(4):
            start(dq_warp(rank, w))
    start(sender())


@pytest.mark.parametrize(("slots", "stages"), CONFIGS)
def test_no_schedule_finds_a_fault(slots, stages):
    assert first_fault(lambda schedule: model(schedule, slots, stages), 12) is None


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(("slots", "stages"), CONFIGS)
def test_a_wait_that_is_left_out_is_found(slots, stages, wait):
    assert first_fault(lambda schedule: model(schedule, slots, stages), 100, wait)
