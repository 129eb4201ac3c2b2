"""The barriers of bwd_sm90 with whole_head as a model: a producer and eight score warps that pass over the key tiles of
a head, with V by way of dO's place and dQ one step late."""

import pytest
from barriers import Barrier, Place, first_fault

STAGES = 2  # of Q; dO, dS and K have one
FULL = [4, 4, 4, 4]  # the steps of each key tile
CAUSAL = [4, 3, 2, 1]
UNSEEN = [2, 0, 1, 0]
WAITS = ["q_empty", "q_full", "do_empty", "do_full", "ds_empty", "ds_full", "k_empty", "k_full"]


def model(schedule, steps):
    start, wait, write, read = schedule.start, schedule.wait, schedule.write, schedule.read
    q_full, q_empty = [Barrier(1) for _ in range(STAGES)], [Barrier(8) for _ in range(STAGES)]
    do_full, do_empty, k_full, k_empty = Barrier(1), Barrier(8), Barrier(1), Barrier(8)
    ds_full, ds_empty = Barrier(8), Barrier(8)
    q, d_o, k = [Place() for _ in range(STAGES)], Place(), Place()
    gradients = [Place() for _ in range(8)]  # dS, a warp's keys each

    def load(place, full, value):
        yield from write(place, value)
        full.bytes(1)

    def producer():
        t = tile = loads = 0
        for n, count in enumerate(steps):
            for step in range(count):
                if step == 0:
                    yield from wait("k_empty", k_empty, tile % 2 ^ 1)
                    k_full.arrive(1)
                    start(load(k, k_full, n))
                    tile += 1
                yield from wait("q_empty", q_empty[t % STAGES], t // STAGES % 2 ^ 1)
                q_full[t % STAGES].arrive(1)
                start(load(q[t % STAGES], q_full[t % STAGES], (n, step)))
                for value in [("V", n)] * (step == 0) + [(n, step)]:
                    yield from wait("do_empty", do_empty, loads % 2 ^ 1)
                    do_full.arrive(1)
                    start(load(d_o, do_full, value))
                    loads += 1
                t += 1
                yield None

    def score_warp(w):
        # A kernel's parities: those of dO's place and of dS follow from the stage of Q and the parity of K.
        t = tile = 0

        def make_dq(value):
            yield from wait("ds_full", ds_full, t % STAGES ^ 1)
            for part in gradients:
                yield from read(part, value)

        def scores(n, step):
            yield from wait("q_full", q_full[t % STAGES], t // STAGES % 2)
            yield from read(q[t % STAGES], (n, step))

        for n, count in enumerate(steps):
            if count == 0:
                continue
            yield from wait("do_full", do_full, t % STAGES ^ tile % 2)
            yield from read(d_o, ("V", n))
            do_empty.arrive()
            yield from wait("k_full", k_full, tile % 2)
            yield from read(k, n)
            yield from scores(n, 0)
            for step in range(count):
                if step > 0:
                    yield from make_dq((n, step - 1))
                    yield from read(k, n)
                yield from wait("do_full", do_full, t % STAGES ^ tile % 2 ^ 1)
                if step > 0:
                    ds_empty.arrive()
                yield from read(d_o, (n, step))  # dP
                yield from wait("ds_empty", ds_empty, t % STAGES ^ 1)
                yield from write(gradients[w], (n, step))
                ds_full.arrive()
                yield from read(d_o, (n, step))  # dV
                do_empty.arrive()
                t += 1
                if step + 1 < count:
                    yield from scores(n, step + 1)
                yield from read(q[(t - 1) % STAGES], (n, step))  # dK
                q_empty[(t - 1) % STAGES].arrive()
            yield from make_dq((n, count - 1))
            yield from read(k, n)
            ds_empty.arrive()
            k_empty.arrive()
            tile += 1

    start(producer())
    for w in range(8):
        start(score_warp(w))


@pytest.mark.parametrize("steps", [[1], [2], FULL, CAUSAL, UNSEEN])
def test_no_schedule_finds_a_fault(steps):
    assert first_fault(lambda schedule: model(schedule, steps), 12) is None


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("steps", [FULL, CAUSAL])
def test_a_wait_that_is_left_out_is_found(steps, wait):
    assert first_fault(lambda schedule: model(schedule, steps), 200, wait)
