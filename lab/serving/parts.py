#!/usr/bin/env python3
"""The parts of a call: each kernel that it launches, when it begins and how long it runs, as a graph's replays have them.

    python lab/serving/parts.py [--only TEXT] [--csv FILE]

Of the cells of bench/cuda_serving.py whose kernels are several or short: shared prefixes, the mixed batch of 4 x 65536 keys and a chunk of
32 queries, and one sequence of 1024 keys with batch_invariant and without. Microseconds, medians of the replays: a kernel's begin counts from
the begin of the call's first; `gap` is from the end of all kernels before it, below 0 where it begins early or beside them. The last column is the
call's time in graph replays without the profiler."""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import torch

import cuda_serving
from serving_cells import CASES, Cell

CALLS, REPLAYS = 4, 8  # calls of a graph; replays of it


def cells() -> list[Cell]:
    mixed = [cell for cell in CASES["mixed"]() if cell.chunks == (1, 32, 65536)]
    short = [cell for cell in CASES["decode"]() if (cell.batch, cell.keys) in ((1, 1024), (8, 8192)) and (cell.heads, cell.heads_kv) == (32, 8)]
    return CASES["prefix"]() + mixed + short


def timeline(call) -> list[tuple[str, float, float]]:
    """(kernel, begin, microseconds) of one call, in the order of their begins."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPLAYS):
            graph.replay()
            torch.cuda.synchronize()
    events = sorted(
        (event.time_range.start, event.time_range.elapsed_us(), re.sub(r"^void |<.*|\(.*", "", event.name))
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    a_call = len(events) // (CALLS * REPLAYS)
    if a_call * CALLS * REPLAYS != len(events):
        raise RuntimeError(f"{len(events)} kernels in {CALLS * REPLAYS} calls")
    calls = [events[n : n + a_call] for n in range(0, len(events), a_call)]
    return [
        (calls[0][n][2], statistics.median(call[n][0] - call[0][0] for call in calls), statistics.median(call[n][1] for call in calls))
        for n in range(a_call)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cells with this in their name")
    parser.add_argument("--csv", type=argparse.FileType("w"), default=sys.stdout)
    options = parser.parse_args()
    rows = csv.writer(options.csv)
    rows.writerow(("cell", "call", "kernel", "begin", "gap", "us", "call in replays"))
    for cell in cells():
        if options.only not in cell.name:
            continue
        contest = cuda_serving.CONTESTS.get(cell.case, cuda_serving.decode)(cell, torch.Generator("cuda").manual_seed(3))
        contest.calls = {name: call for name, call in contest.calls.items() if name != "read" and not name.startswith("fa2")}
        whole = contest.times(rounds=3, span_ms=5)
        for name, call in contest.calls.items():
            ended = 0.0
            for kernel, begin, us in timeline(call):
                rows.writerow((cell.name, name, kernel, f"{begin:.1f}", f"{begin - ended:.1f}", f"{us:.1f}", f"{whole[name]:.1f}"))
                ended = max(ended, begin + us)
            options.csv.flush()
        del contest
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
