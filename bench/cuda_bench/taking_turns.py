"""Cells whose contestants take seconds to compile: prepared by many processes at once, timed by one after another.

Each process keeps what it compiled. Nothing runs on the GPU beside what is timed.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

# prepare(cell, lock) returns a function without arguments that measures the cell: a dict. `lock` is held by one process
# at a time, for what takes much memory.
Prepare = Callable[[Any, Any], Callable[[], dict]]


def _work(prepare: Prepare, cells: Any, lock: Any, parent: Connection, until: float) -> None:
    prepared = []
    while time.time() < until:
        try:
            number, cell = cells.get_nowait()
        except queue.Empty:
            break
        try:
            prepared.append((number, prepare(cell, lock)))
        except Exception:  # the other cells are still of interest
            parent.send((number, {"error": traceback.format_exc().strip().splitlines()[-1][:200]}))
    parent.send(None)
    parent.recv()  # its turn
    for number, measure in prepared:
        try:
            parent.send((number, measure()))
        except Exception:
            parent.send((number, {"error": traceback.format_exc().strip().splitlines()[-1][:200]}))
    parent.send(None)


def _messages(connection: Connection) -> Iterator[Any]:
    """Until the process says that it is done, or ends."""
    try:
        while (message := connection.recv()) is not None:
            yield message
    except EOFError:
        return


def measure(
    prepare: Prepare, cells: Sequence[Any], processes: int, prepare_seconds: float, seconds: float
) -> dict[int, dict]:
    """Results by the cells' places. A cell that is not begun within prepare_seconds has none, nor has one whose process
    has no turn within `seconds`. Cells that take long to prepare should come first."""
    begun = time.time()
    context = multiprocessing.get_context("spawn")
    remaining, lock = context.Queue(), context.Lock()
    for entry in enumerate(cells):
        remaining.put(entry)
    workers = {}
    for _ in range(min(processes, len(cells))):
        here, there = context.Pipe()
        worker = context.Process(
            target=_work, args=(prepare, remaining, lock, there, begun + prepare_seconds), daemon=True
        )
        worker.start()
        there.close()  # so that its end is seen here
        workers[here] = worker
    found: dict[int, dict] = {}
    preparing = set(workers)
    ready = []
    while preparing and time.time() < begun + seconds:
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
                found[message[0]] = message[1]
    for connection in preparing:
        workers[connection].terminate()
    for connection in ready:
        if time.time() < begun + seconds:
            try:
                connection.send(None)
            except BrokenPipeError:
                continue
            found.update(_messages(connection))
    for worker in workers.values():
        worker.terminate()
    remaining.cancel_join_thread()
    return found
