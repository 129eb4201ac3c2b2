"""Cells whose contestants take seconds to compile: prepared by many processes at once, timed by one after another.

Each process keeps what it compiled. Nothing runs on the GPU beside what is timed.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

# prepare(cell, lock) returns a function without arguments that measures the cell: a dict. `lock` is held by one process
# at a time, for what takes much memory.
_GRACE = 8.0  # seconds

Prepare = Callable[[Any, Any], Callable[[], dict]]


class _TooLong(BaseException):
    """Preparing has to end; not an Exception, which a compiler might catch."""


def _stop(*_: Any) -> None:
    raise _TooLong


def _reason() -> dict:
    return {"error": traceback.format_exc().strip().splitlines()[-1][:200]}


def _work(prepare: Prepare, cells: Any, lock: Any, parent: Connection, until: float) -> None:
    prepared = []
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, max(until - time.time(), 0.01))
    try:
        while True:
            number, cell = cells.get_nowait()
            try:
                prepared.append((number, prepare(cell, lock)))
            except Exception:  # the other cells are still of interest
                parent.send((number, _reason()))
    except (queue.Empty, _TooLong):
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    parent.send(None)
    parent.recv()  # its turn
    for number, measure in prepared:
        try:
            parent.send((number, measure()))
        except Exception:
            parent.send((number, _reason()))
    parent.send(None)


def measure(
    prepare: Prepare, cells: Sequence[Any], processes: int, prepare_seconds: float, seconds: float
) -> Iterator[tuple[int, dict]]:
    """(a cell's place, its result), in any order. What is not prepared within prepare_seconds has no result, nor has
    what is not measured within `seconds`."""
    begun = time.time()
    context = multiprocessing.get_context("spawn")
    remaining, lock = context.Queue(), context.Lock()
    for entry in enumerate(cells):
        remaining.put(entry)
    workers = {}
    for _ in range(min(processes, len(cells))):
        here, there = context.Pipe()
        arguments = (prepare, remaining, lock, there, begun + prepare_seconds)
        worker = context.Process(target=_work, args=arguments, daemon=True)
        worker.start()
        there.close()  # so that its end is seen here
        workers[here] = worker
    preparing, ready = set(workers), []
    # A step of a compiler that does not return to Python ends a little later.
    while preparing and time.time() < begun + prepare_seconds + _GRACE:
        for connection in wait(preparing, timeout=1.0):
            try:
                message = connection.recv()
            except EOFError:  # it crashed; its cells have no results
                preparing.remove(connection)
                continue
            if message is None:
                preparing.remove(connection)
                ready.append(connection)
            else:
                yield message
    for connection in preparing:
        workers[connection].terminate()
    for connection in ready:
        try:
            connection.send(None)
            while connection.poll(max(begun + seconds - time.time(), 0)) and (message := connection.recv()) is not None:
                yield message
        except (EOFError, BrokenPipeError):
            continue
        if time.time() >= begun + seconds:
            break
    for worker in workers.values():
        worker.terminate()
    remaining.cancel_join_thread()
