"""bwd_sm90_d512's barriers as a model."""

import pytest
from barriers import Barrier, Fault, Place, first_fault
from headers import constant


def of_config(name):
    return constant(name, "BwdSm90D512Config")


STEPS = 7
STAGES = of_config("stages")
FACTORS, ACCUMULATED = (of_config(name) // of_config("slot_dim") for name in ("head_dim", "accumulated_dim"))
WAITS = ["factor_empty", "factor_full", "accumulated_empty", "accumulated_full", "p_full_keys", "p_full_values", "free",
         "written", "ds_full", "release_ds"]  # fmt: skip


def model(s):
    barriers = lambda n, count: [[Barrier(count) for _ in range(n)] for _ in range(4)]
    places = lambda n: [[Place() for _ in range(n)] for _ in range(4)]
    factor_full, factor_empty = barriers(FACTORS, 1), barriers(FACTORS, 8)
    accumulated_full, accumulated_empty = barriers(ACCUMULATED, 1), barriers(ACCUMULATED, 8)
    p_full, written = barriers(STAGES, 1), barriers(STAGES, 4)
    free = barriers(STAGES, 16)
    ds_full = [[Barrier(1 if rank < 2 else 5) for _ in range(STAGES)] for rank in range(4)]
    for rank in range(4):
        for stage in range(STAGES):
            p_full[rank][stage].arrive(4)
            ds_full[rank][stage].arrive(8 if rank < 2 else 4)
    # Factors come in two chunks. A stage of dS has a part for each of 8 warps, since P and dS of a warp have the same
    # words. P to the peer is by warps.
    factors = [[[Place(), Place()] for _ in range(FACTORS)] for _ in range(4)]
    accumulated, stats = places(ACCUMULATED), places(STAGES)
    exchange = [[[Place() for _ in range(8)] for _ in range(STAGES)] for _ in range(4)]
    peer = [[[Place() for _ in range(4)] for _ in range(STAGES)] for _ in range(4)]

    ended = [[] for _ in range(4)]  # what a block has waited for the last arrivals of

    def arrive(to, what, barrier):
        if what in ended[to]:
            raise Fault(f"an arrival at block {to}, which may have ended")
        barrier.arrive()

    def load_factor(rank, to, j, slot):
        yield from s.write(factors[to][slot][rank % 2], j)
        factor_full[to][slot].bytes(1)

    def load(place, j, full):
        yield from s.write(place, j)
        full.bytes(1)

    def factors_of(rank):
        for j in range(STEPS):
            for slot in range(FACTORS):
                yield from s.wait("factor_empty", factor_empty[rank][slot], j % 2 ^ 1)
                last = slot == FACTORS - 1
                factor_full[rank][slot].arrive(3 if last else 2)
                for to in (rank, rank ^ 1):
                    s.start(load_factor(rank, to, j, slot))
                if last:
                    s.start(load(stats[rank][j % STAGES], j, factor_full[rank][slot]))
                yield None
        for slot in range(FACTORS):
            yield from s.wait("", factor_empty[rank][slot], STEPS % 2 ^ 1)
        ended[rank].append("factors")

    def accumulated_of(rank):
        for j in range(STEPS):
            for slot in range(ACCUMULATED):
                yield from s.wait("accumulated_empty", accumulated_empty[rank][slot], j % 2 ^ 1)
                accumulated_full[rank][slot].arrive(1)
                s.start(load(accumulated[rank][slot], j, accumulated_full[rank][slot]))
                yield None

    def accumulate(rank, j):
        for slot in range(ACCUMULATED):
            yield from s.wait("accumulated_full", accumulated_full[rank][slot], j % 2)
            yield from s.read(accumulated[rank][slot], j)

    def release_accumulated(rank):
        for slot in range(ACCUMULATED):
            accumulated_empty[rank][slot].arrive()

    def release_factor(rank, slot):
        for to in (rank, rank ^ 1):
            arrive(to, "factors", factor_empty[to][slot])
            yield None

    def send(to, place, value, full):
        yield from s.write(place, value)
        full.bytes(1)

    def score_warp(rank, w):
        values, side = rank < 2, rank % 2
        for j in range(STEPS):
            stage, parity = j % STAGES, j // STAGES % 2
            for slot in range(FACTORS):
                yield from s.wait("factor_full", factor_full[rank][slot], j % 2)
                for chunk in factors[rank][slot]:
                    yield from s.read(chunk, j)
                if slot > 0:
                    yield from release_factor(rank, slot - 1)
            if j > 0:
                yield from accumulate(rank, j - 1)
            yield from s.read(stats[rank][stage], j)
            yield from release_factor(rank, FACTORS - 1)
            part = side * 4 + w
            if not values:
                yield from s.wait("p_full_keys", p_full[rank][stage], parity)
                if w == 0:
                    p_full[rank][stage].arrive(4)
                yield from s.read(exchange[rank][stage][part], ("P", j))
            if j > 0:
                release_accumulated(rank)
            if values:
                yield from s.wait("free", free[rank][stage], parity ^ 1)
                s.start(send(rank ^ 2, exchange[rank ^ 2][stage][part], ("P", j), p_full[rank ^ 2][stage]))
                s.start(send(rank ^ 1, peer[rank ^ 1][stage][w], j, p_full[rank ^ 1][stage]))
            else:
                yield from s.write(exchange[rank][stage][part], ("dS", j), ("P", j))
                written[rank][stage].arrive()
                ds_full[rank][stage].arrive()
        yield from accumulate(rank, STEPS - 1)
        release_accumulated(rank)
        if values:
            for j in range(STEPS, STEPS + STAGES):
                yield from s.wait("", free[rank][j % STAGES], j // STAGES % 2 ^ 1)
            ended[rank].append("free")

    def copy(rank, to, j):
        stage = j % STAGES
        for part in range(rank % 2 * 4, rank % 2 * 4 + 4):
            yield from s.read(exchange[rank][stage][part], ("dS", j))
            yield from s.write(exchange[to][stage][part], ("dS", j))
        ds_full[to][stage].bytes(4)

    def sender(rank):
        for j in range(STEPS):
            yield from s.wait("written", written[rank][j % STAGES], j // STAGES % 2)
            for n in (1, 2, 3):
                s.start(copy(rank, rank ^ n, j))
                yield None

    def multiply(rank, w, j):
        stage = j % STAGES
        yield from s.wait("ds_full", ds_full[rank][stage], j // STAGES % 2)
        if w == 0:
            ds_full[rank][stage].arrive(8 if rank < 2 else 4)
        for part in range(8):
            yield from s.read(exchange[rank][stage][part], ("dS", j))

    def release_ds(j):
        for to in (0, 1):
            arrive(to, "free", free[to][j % STAGES])
            yield None

    def dq_warp(rank, w):
        for j in range(STEPS):
            stage, parity = j % STAGES, j // STAGES % 2
            if rank < 2:
                if j > 0:
                    yield from multiply(rank, w, j - 1)
                yield from s.wait("p_full_values", p_full[rank][stage], parity)
                if w == 0:
                    p_full[rank][stage].arrive(4)
                yield from s.read(peer[rank][stage][w], j)
                yield from accumulate(rank, j)
                if j > 0:
                    yield from release_ds(j - 1)
                release_accumulated(rank)
            else:
                yield from multiply(rank, w, j)
                yield from accumulate(rank, j)
                if s.drop != "release_ds" or w:
                    yield from release_ds(j)
                release_accumulated(rank)
        if rank < 2:
            yield from multiply(rank, w, STEPS - 1)
            yield from release_ds(STEPS - 1)

    for rank in range(4):
        s.start(factors_of(rank))
        s.start(accumulated_of(rank))
        if rank >= 2:
            s.start(sender(rank))
        for w in range(4):
            s.start(score_warp(rank, w))
            s.start(dq_warp(rank, w))


def test_no_schedule_finds_a_fault():
    assert first_fault(model, 15) is None


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_is_left_out_is_found(wait):
    assert first_fault(model, 100, wait)
