"""Memory traffic counted by the GPU: Tessera beside standard attention, forward and backward.

    python bench/cuda_io.py [--batch 64 --heads 16 --length 1024 --head-dim 64] [--causal] [--json FILE]

The FlashAttention paper's table: GFLOPs, bytes of HBM read and written (Nsight Compute's dram__bytes_read.sum and
dram__bytes_write.sum over every kernel of the call), run time; beside them the bytes that the plan predicts. Standard
attention is PyTorch's matrix product, softmax, matrix product, and their gradients by autograd. Caches are as the
previous call left them, clocks are free; run times come from runs without the profiler. Needs `ncu`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
SIDES = ("standard", "tessera")
DIRECTIONS = ("forward", "backward")


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--lead-ms", type=float, default=200)
    parser.add_argument("--measure-ms", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--profiled", nargs=2, metavar=("SIDE", "DIRECTION"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def problem_of(options: argparse.Namespace):
    from cuda_bench.problem import Problem

    o = options
    return Problem("io", o.batch, o.length, o.length, o.heads, o.heads, o.head_dim, o.head_dim, o.causal, dtype=o.dtype)


def standard_calls(problem, inputs):
    """Forward without gradients, and backward alone."""
    import torch

    hidden = None
    if problem.causal:
        hidden = torch.ones(problem.seqlen_q, problem.seqlen_k, dtype=torch.bool, device=inputs.q.device).triu(1)

    def attend(q, k, v):
        s = (q @ k.transpose(-1, -2)) * problem.head_dim**-0.5
        if hidden is not None:
            s = s.masked_fill(hidden, float("-inf"))
        return s.softmax(-1) @ v

    heads_first = [x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v)]

    def forward():
        with torch.no_grad():
            return attend(*heads_first)

    leaves = [x.detach().requires_grad_() for x in heads_first]
    o = attend(*leaves)
    d_o = inputs.d_o.transpose(1, 2).contiguous()
    return {"forward": forward, "backward": lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)}


def tessera_calls(problem, inputs):
    from cuda_bench.contestants import Tessera

    return {direction: Tessera(problem, inputs, direction).call()[0] for direction in DIRECTIONS}


def profiled(options: argparse.Namespace) -> None:
    """The child: one call between the profiler's start and stop."""
    import torch

    from cuda_bench.problem import Inputs

    side, direction = options.profiled
    problem = problem_of(options)
    inputs = Inputs.of(problem, True)
    call = {"standard": standard_calls, "tessera": tessera_calls}[side](problem, inputs)[direction]
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def read_metrics(text: str) -> tuple[dict[str, float], list[str]]:
    """Sums over kernels in bytes, and the kernels' names, from `ncu --csv --print-units base`."""
    rows = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    sums = dict.fromkeys(METRICS, 0.0)
    kernels: dict[str, str] = {}
    for row in rows:
        if row["Metric Name"] in sums:
            if row["Metric Unit"] != "byte":
                raise ValueError(f"ncu: {row['Metric Name']} in {row['Metric Unit']}, accepted byte")
            sums[row["Metric Name"]] += float(row["Metric Value"].replace(",", ""))
            kernels[row["ID"]] = row["Kernel Name"]
    return sums, list(kernels.values())


def find_ncu() -> str:
    for candidate in (shutil.which("ncu"), "/usr/local/cuda/bin/ncu"):
        if candidate and Path(candidate).exists():
            return candidate
    sys.exit("ncu: not on the PATH or in /usr/local/cuda/bin")


def count_bytes(ncu: str, side: str, direction: str) -> tuple[dict[str, float], list[str]]:
    """Nsight Compute's counts of one call, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        child = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--profiled", side, direction]
        command = [ncu, "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off",
                   "--metrics", ",".join(METRICS), "--csv", "--print-units", "base", "--log-file", str(log),
                   *child]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        text = log.read_text() if log.exists() else ""
    sums, kernels = read_metrics(text)
    if done.returncode != 0 or not kernels:
        notes = [line for line in (text + done.stdout + done.stderr).splitlines() if "==" in line or "Error" in line]
        sys.exit(f"ncu counted nothing for {side} {direction} (status {done.returncode}): {' '.join(notes[-4:])}")
    return sums, kernels


def gflops(problem, side: str, direction: str) -> float:
    """Standard attention keeps P: 4 products backward, where Tessera computes S again and has 5."""
    flops = problem.flops(direction)
    if side == "standard":
        # It computes masked tiles, too.
        flops *= (2 if problem.causal else 1) * (1 if direction == "forward" else 4 / 5)
    return flops * 1e-9


def measure(options: argparse.Namespace) -> dict:
    import torch

    from cuda_bench import machine, timing
    from cuda_bench.contestants import Tessera
    from cuda_bench.problem import Inputs

    ncu = find_ncu()
    problem = problem_of(options)
    inputs = Inputs.of(problem, True)
    plans = {direction: Tessera(problem, inputs, direction).plan() for direction in DIRECTIONS}
    calls = {"standard": standard_calls(problem, inputs), "tessera": tessera_calls(problem, inputs)}
    steadiness = timing.Steadiness(options.lead_ms, options.measure_ms, options.rounds)
    seconds = {
        direction: timing.contest({side: calls[side][direction] for side in SIDES}, steadiness)
        for direction in DIRECTIONS
    }
    del calls, inputs
    torch.cuda.empty_cache()
    rows = []
    for direction in DIRECTIONS:
        for side in SIDES:
            counted, kernels = count_bytes(ncu, side, direction)
            predicted = plans[direction]["standard_bytes" if side == "standard" else "bytes_moved"]
            rows.append(dict(direction=direction, side=side, gflop=gflops(problem, side, direction),
                             read_bytes=counted[METRICS[0]], written_bytes=counted[METRICS[1]],
                             predicted_bytes=predicted, seconds=seconds[direction][side].seconds,
                             kernels=kernels))  # fmt: skip
    return {"machine": machine.facts(), "problem": vars(options), "rows": rows}


def table(rows: list[dict]) -> str:
    lines = [
        "| | GFLOP | HBM read GB | written GB | together GB | plan says GB | measured / plan | ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]

    def line(name: str, of: list[dict]) -> str:
        keys = ("read_bytes", "written_bytes", "predicted_bytes", "gflop", "seconds")
        read, written, predicted, gflop, seconds = (sum(row[key] for row in of) for key in keys)
        moved = read + written
        return (f"| {name} | {gflop:.1f} | {read * 1e-9:.3f} | {written * 1e-9:.3f} | {moved * 1e-9:.3f} "
                f"| {predicted * 1e-9:.3f} | {moved / predicted:.2f} | {seconds * 1e3:.3f} |")  # fmt: skip

    titles = {"standard": "standard attention", "tessera": "Tessera"}
    for direction in DIRECTIONS:
        for row in rows:
            if row["direction"] == direction:
                lines.append(line(f"{titles[row['side']]}, {direction}", [row]))
    for side in SIDES:
        lines.append(line(f"{titles[side]}, both", [row for row in rows if row["side"] == side]))
    return "\n".join(lines)


def main() -> None:
    options = parse()
    if options.profiled:
        profiled(options)
        return
    result = measure(options)
    from cuda_bench.machine import heading

    o = options
    print(heading(result["machine"]))
    print(f"{o.dtype}, B {o.batch}, H {o.heads}, N {o.length}, D {o.head_dim}, {'causal' if o.causal else 'full'}\n")
    print(table(result["rows"]))
    for row in result["rows"]:
        print(f"{row['side']} {row['direction']}: {len(row['kernels'])} kernels: "
              + ", ".join(dict.fromkeys(name[:60] for name in row["kernels"])))  # fmt: skip
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
