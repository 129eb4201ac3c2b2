"""What the first call with a score program costs on one GPU: compiling its kernels, with nothing kept on disk.

    python bench/cuda_first_calls.py [--head-dims 64 128] [--programs NAME ...] [--csv FILE]

bfloat16, batch 1, 16 heads of 4096 tokens; programs of bench/score_programs.py. For each cell a process of its own with
an empty TESSERA_CACHE_DIR: wall seconds of the first forward call with the program, of the first backward call after
it, and of the same two calls in a second process, which finds the kernels on disk. Calls without a program have run
before, so that what they compile is not counted. Exit status 1: a first call took more than 1.5 s.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time

MOST_SECONDS = 1.5
LENGTH, HEADS = 4096, 16
PROGRAMS = ("ALiBi", "relative", "relative, its gradient", "softcap by a scalar", "documents", "three at once")


def seconds_of_calls(name: str, head_dim: int) -> list[float]:
    """In this process: of the first forward and of the first backward call."""
    import torch
    from score_programs import Call, Calls, programs

    program = programs(LENGTH, HEADS, "cuda")[name]()
    seconds = []
    for direction in ("forward", "backward"):
        calls = Calls(program, Call(direction, LENGTH, HEADS, head_dim, torch.bfloat16, "cuda"), None)
        calls.ours({})()  # backward: makes o and lse without the program, and its own gradients
        programmed = calls.programmed()  # backward: runs the forward pass, which is compiled by now
        torch.cuda.synchronize()
        begun = time.perf_counter()
        programmed()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds


def measured(name: str, head_dim: int, cache: str) -> list[float]:
    command = [sys.executable, __file__, "--cell", name, str(head_dim)]
    done = subprocess.run(command, env={**os.environ, "TESSERA_CACHE_DIR": cache}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return [float(x) for x in done.stdout.split()[-2:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--programs", nargs="+", default=PROGRAMS)
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(*seconds_of_calls(options.cell[0], int(options.cell[1])))
        return 0
    lines = []
    print(f"{'':30}{'first':>8}{'':8}   {'from disk':>9}\n{'':30} forward backward   forward backward, s")
    for head_dim in options.head_dims:
        for name in options.programs:
            with tempfile.TemporaryDirectory() as cache:
                first, later = (measured(name, head_dim, cache) for _ in range(2))
            lines.append([name, head_dim, *first, *later])
            times = "   ".join("".join(f"{x:8.2f}" for x in pair) for pair in (first, later))
            print(f"{name:24} D {head_dim:3} {times}", flush=True)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["program", "head_dim", "forward_s", "backward_s", "forward_again_s", "backward_again_s"])
            writer.writerows(lines)
    return 1 if any(max(line[2:4]) > MOST_SECONDS for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
