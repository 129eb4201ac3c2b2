"""Barriers of a kernel as a model. Its roles are processes that a random schedule interleaves; reads and writes of each
stage are recorded as intervals. A schedule finds deadlocks, overwritten stages and stale data. It proves nothing about
memory ordering, nor that a model transcribes its kernel faithfully."""

import random

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
        return self.phase % 2 != parity  # as try_wait.parity: a waiter two phases behind waits forever


class Place:
    def __init__(self):
        self.data, self.readers, self.writers = None, 0, 0


class Schedule:
    """Processes are generators that yield a barrier and a parity to wait for, or None. `drop` names a wait that is left
    out."""

    def __init__(self, seed, drop):
        self.rng, self.drop, self.running = random.Random(seed), drop, []

    def start(self, process):
        self.running.append(process)

    def wait(self, name, barrier, parity):
        while name != self.drop and not barrier.done(parity):
            yield barrier, parity
        yield None

    def write(self, place, value, old=None):
        if place.readers or place.writers:
            raise Fault(f"{value} overwrites what is in use")
        if old is not None and place.data != old:
            raise Fault(f"{value} overwrites {place.data}, not {old}")
        place.writers += 1
        yield None
        place.data, place.writers = value, place.writers - 1

    def read(self, place, value):
        if place.writers or place.data != value:
            raise Fault(f"{value} is read, and {place.data} is there")
        place.readers += 1
        yield None
        place.readers -= 1

    def run(self):
        rng, running, speed, blocked = self.rng, self.running, {}, {}
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


def fault(model, seed, drop=None):
    """What one schedule of the processes that model(schedule) starts finds wrong, or None."""
    schedule = Schedule(seed, drop)
    try:
        model(schedule)
        schedule.run()
    except Fault as found:
        return str(found)
    return None


def first_fault(model, seeds, drop=None):
    return next((f"seed {seed}: {found}" for seed in range(seeds) if (found := fault(model, seed, drop))), None)
