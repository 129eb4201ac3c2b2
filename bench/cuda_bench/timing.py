"""Seconds a call, in the steady state.

A power-limited GPU runs up to 15 % faster for its first 50 ms after idle, and takes about 0.4 s to settle after a
change of kernel: bursts flatter the contestant that runs first. So each contestant is kept running for a lead-in, then
timed by events over many consecutive calls. Contestants alternate, in the opposite order every other round, and the
median is reported.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]

# Below this a call's Python code may take longer than its kernels: calls are then replayed as a CUDA graph.
_SHORT_MS = 0.25
# The length of one replay, so that launching graphs costs nothing either.
_REPLAY_MS = 2.0
_MOST_CALLS_A_GRAPH = 200


@dataclass(frozen=True)
class Steadiness:
    """Milliseconds and rounds; reported numbers must use the defaults."""

    lead_ms: float = 200.0
    measure_ms: float = 200.0
    rounds: int = 2


@dataclass
class Runner:
    """Something that puts `calls` calls into the current stream."""

    launch: Call
    calls: int
    launch_ms: float  # about
    graph: bool


def _elapsed_ms(launch: Call, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _estimate_ms(call: Call) -> float:
    call()  # compiles, allocates
    torch.cuda.synchronize()
    few = _elapsed_ms(call, 3) / 3
    return few if few > 5 else _elapsed_ms(call, 20) / 20


def _as_graph(call: Call, call_ms: float) -> Runner | None:
    """None if the call cannot be captured. A backward pass of autograd runs on the stream of its forward pass: it can
    be captured where this stream is the current one, and not the default stream."""
    calls = max(1, min(_MOST_CALLS_A_GRAPH, math.ceil(_REPLAY_MS / call_ms)))
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    stream = current if current != torch.cuda.default_stream() else torch.cuda.Stream()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            call()  # the set-up of a first call on a stream must not be captured
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        graph.replay()
        torch.cuda.synchronize()
    except Exception:
        torch.cuda.synchronize()  # raises if more than the capture is lost
        return None
    return Runner(graph.replay, calls, _elapsed_ms(graph.replay, 3) / 3, True)


def _runners(calls: dict[str, Call]) -> dict[str, Runner]:
    estimates = {name: _estimate_ms(call) for name, call in calls.items()}
    runners = {}
    if min(estimates.values()) < _SHORT_MS:
        graphs = {name: _as_graph(call, estimates[name]) for name, call in calls.items()}
        runners = {name: graph for name, graph in graphs.items() if graph is not None}
    for name, call in calls.items():
        runners.setdefault(name, Runner(call, 1, estimates[name], False))
    return {name: runners[name] for name in calls}


def _round_ms(runner: Runner, steadiness: Steadiness) -> float:
    """Milliseconds a call. Lead-in and measurement follow each other without a gap."""
    for _ in range(math.ceil(steadiness.lead_ms / runner.launch_ms)):
        runner.launch()
    count = max(3, math.ceil(steadiness.measure_ms / runner.launch_ms))
    return _elapsed_ms(runner.launch, count) / count / runner.calls


@dataclass
class Timed:
    seconds: float  # the median of the rounds
    rounds: list[float]
    graph: bool  # replayed as a CUDA graph, otherwise launched one by one


def contest(calls: dict[str, Call], steadiness: Steadiness) -> dict[str, Timed]:
    """All contestants of one cell, in one state of the GPU."""
    runners = _runners(calls)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(steadiness.rounds):
        order = list(runners) if number % 2 == 0 else list(runners)[::-1]
        for name in order:
            seconds[name].append(_round_ms(runners[name], steadiness) * 1e-3)
    return {name: Timed(statistics.median(rounds), rounds, runners[name].graph) for name, rounds in seconds.items()}
