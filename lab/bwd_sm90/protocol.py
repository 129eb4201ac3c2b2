"""Barriers of a kernel as a model: roles as processes that a random schedule interleaves, reads and writes of every stage recorded
as intervals. Finds deadlocks, overwritten stages and stale data. It proves nothing about memory ordering or a model's transcription
of the code."""
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


class Schedule:
    """Processes are generators: what they yield is a barrier and a parity to wait for, or None. `drop` is the name of a wait that is
    left out."""

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
            raise Fault(f"wanted {value}, found {place.data}")
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


def check(model, drops, default=100):
    """model(schedule) starts the processes. Arguments: how many schedules; --mutate drops each of `drops` in turn, which must be
    found."""
    counts = [int(x) for x in sys.argv[1:] if x.isdigit()]
    mutate = "--mutate" in sys.argv
    for name in drops if mutate else [None]:
        found = None
        for seed in range(counts[0] if counts else default):
            schedule = Schedule(seed, name)
            try:
                model(schedule)
                schedule.run()
            except Fault as fault:
                found = f"seed {seed}: {fault}"
                break
        print(f"without {name}: {found or 'NOT FOUND'}" if name else found or "no fault")
        if bool(found) != bool(name):
            sys.exit(1)
