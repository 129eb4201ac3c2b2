"""The barriers of bwd_sm90 with late_dq as a model: a producer, eight score warps that make dQ one step late and, when
deterministic, threads that add it."""

import pytest
from barriers import Barrier, Place, first_fault
from headers import constant

STAGES = 2  # of Q, dO and dS
DQ_STAGES = constant("kBwdDqStages")
THREADS = 2  # that add dQ, each every second step
# Not "do_empty": the producer waits for Q's stage first, which is released after dO's.
WAITS = ["q_empty", "q_full", "do_full", "ds_empty", "ds_full", "released"]


def model(schedule, steps, deterministic, skips=False):
    """skips: the first step is hidden from the second warpgroup's keys."""
    start, wait, write, read = schedule.start, schedule.wait, schedule.write, schedule.read
    full = {ring: [Barrier(1) for _ in range(STAGES)] for ring in ("q", "do")}
    empty = {ring: [Barrier(8) for _ in range(STAGES)] for ring in ("q", "do", "ds")}
    ds_full = [Barrier(8) for _ in range(STAGES)]
    dq_full, dq_empty = [Barrier(8) for _ in range(DQ_STAGES)], [Barrier(1) for _ in range(DQ_STAGES)]
    tiles = {ring: [Place() for _ in range(STAGES)] for ring in ("q", "do")}
    gradients = [[Place() for _ in range(8)] for _ in range(STAGES)]  # dS, a warp's keys each
    staged = [[Place() for _ in range(8)] for _ in range(DQ_STAGES)]  # dQ, a warp's part each

    def load(ring, j):
        yield from write(tiles[ring][j % STAGES], j)
        full[ring][j % STAGES].bytes(1)

    def producer():
        for j in range(steps):
            for ring in ("q", "do"):
                yield from wait(f"{ring}_empty", empty[ring][j % STAGES], j // STAGES % 2 ^ 1)
                full[ring][j % STAGES].arrive(1)
                start(load(ring, j))
                yield None

    def use(ring, j):
        yield from wait(f"{ring}_full", full[ring][j % STAGES], j // STAGES % 2)
        yield from read(tiles[ring][j % STAGES], j)

    def make_dq(j):
        yield from wait("ds_full", ds_full[j % STAGES], j // STAGES % 2)
        for part in range(8):
            yield from read(gradients[j % STAGES][part], j)

    def add_dq(w, j):
        empty["ds"][j % STAGES].arrive()
        if deterministic:
            s = j % DQ_STAGES
            yield from wait("dq_empty", dq_empty[s], j // DQ_STAGES % 2 ^ 1)
            yield from write(staged[s][w], j)
            dq_full[s].arrive()

    def store_keys(w):
        for j in range(steps, steps + STAGES):
            yield from wait("released", empty["q"][j % STAGES], j // STAGES % 2 ^ 1)
        if w == 0:  # the warps' rows differ
            for place in tiles["q"]:
                yield from write(place, "dK")

    def skip_step():
        yield from wait("do_full", full["do"][0], 0)
        empty["do"][0].arrive()
        empty["q"][0].arrive()

    def score_warp(w):
        first = int(skips and w >= 4)
        if first:
            yield from wait("q_full", full["q"][0], 0)
            yield from skip_step()
            yield from write(gradients[0][w], 0)
            ds_full[0].arrive()
        yield from use("q", first)
        for j in range(first, steps):
            yield from use("do", j)  # dP
            yield from wait("ds_empty", empty["ds"][j % STAGES], j // STAGES % 2 ^ 1)
            yield from write(gradients[j % STAGES][w], j)
            ds_full[j % STAGES].arrive()
            yield from read(tiles["do"][j % STAGES], j)  # dV
            empty["do"][j % STAGES].arrive()
            if j > 0:
                yield from make_dq(j - 1)
            if j < steps - 1:
                yield from use("q", j + 1)  # S of the next step
            yield from read(tiles["q"][j % STAGES], j)  # dK
            empty["q"][j % STAGES].arrive()
            if j > 0:
                yield from add_dq(w, j - 1)
        yield from store_keys(w)
        yield from make_dq(steps - 1)
        yield from add_dq(w, steps - 1)

    def dq_thread(thread):
        for j in range(thread, steps, THREADS):
            s = j % DQ_STAGES
            yield from wait("dq_full", dq_full[s], j // DQ_STAGES % 2)
            for part in range(8):
                yield from read(staged[s][part], j)
            dq_empty[s].arrive()
            yield None

    start(producer())
    for w in range(8):
        start(score_warp(w))
    for thread in range(THREADS if deterministic else 0):
        start(dq_thread(thread))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_no_schedule_finds_a_fault(steps, deterministic):
    assert first_fault(lambda schedule: model(schedule, steps, deterministic), 12) is None


@pytest.mark.parametrize("steps", [2, 3, 8])
def test_no_schedule_finds_a_fault_where_a_warpgroup_skips_a_step(steps):
    assert first_fault(lambda schedule: model(schedule, steps, True, True), 12) is None


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_is_left_out_is_found(wait):
    assert first_fault(lambda schedule: model(schedule, 8, False), 200, wait)


@pytest.mark.parametrize("wait", [*WAITS, "dq_empty", "dq_full"])
def test_a_wait_that_is_left_out_is_found_deterministic(wait):
    assert first_fault(lambda schedule: model(schedule, 8, True), 200, wait)
