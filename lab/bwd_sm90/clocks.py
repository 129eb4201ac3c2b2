#!/usr/bin/env python3
"""Does the power limit decide? Energy, clocks and cycles of a call of bwd_sm90, of cuDNN's backward pass and of a matrix product.

    PYTHONPATH=$(scripts/gpu_python.sh) python3 lab/bwd_sm90/clocks.py --csv FILE        about 25 s on a GPU

Each runs for a second after a lead-in of half a one. NVML (libnvidia-ml) is asked for the energy before and after, and every 20 ms for the SM
clock and for what holds it down. Zeros in the place of normal numbers switch fewer transistors: the same instructions, less power. Where power
decides, they run at a higher clock in the same number of cycles.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from cuda_bench.contestants import Cudnn, Tessera  # noqa: E402
from cuda_bench.problem import Inputs, Problem  # noqa: E402

TOKENS = 16384
HIDDEN = 2048  # heads times head size
CHUNK_MS = 20
SM_CLOCK = 1  # nvmlClockType_t
POWER, THERMAL = 0x4 | 0x80, 0x8 | 0x20 | 0x40  # nvmlClocksEventReasons: the power cap, its brake; slowdowns
COLUMNS = ("contestant", "head_dim", "length", "data", "calls", "ms", "tflops", "joules", "watts", "mhz", "mhz_least", "mhz_most",
           "mcycles", "power_capped", "thermal")  # fmt: skip


class Nvml:
    """This process' GPU, by libnvidia-ml."""

    def __init__(self):
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(self._device))

    def _ask(self, function: str, *arguments) -> None:
        error = getattr(self._library, function)(*arguments)
        if error:
            raise RuntimeError(f"{function}: error {error}")

    def _number(self, function: str, kind, *arguments) -> int:
        value = kind()
        self._ask(function, self._device, *arguments, ctypes.byref(value))
        return value.value

    def joules(self) -> float:
        """Since the driver was loaded."""
        return self._number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) * 1e-3

    def mhz(self) -> int:
        return self._number("nvmlDeviceGetClockInfo", ctypes.c_uint, SM_CLOCK)

    def reasons(self) -> int:
        return self._number("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)


def run_for(seconds: float, call: Callable, a_chunk: int, look: Callable) -> tuple[int, float]:
    """Keeps a chunk of calls queued behind the one that runs; (calls, seconds they took)."""
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    ends, began = [], time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(a_chunk):
            call()
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        look()
        if len(ends) > 1:
            ends[-2].synchronize()
    ends[-1].synchronize()
    return len(ends) * a_chunk, start.elapsed_time(ends[-1]) * 1e-3


def measure(nvml: Nvml, call: Callable, seconds: float) -> dict:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    a_chunk = max(1, round(CHUNK_MS * 5e-3 / (time.perf_counter() - began)))
    clocks, reasons = [], []

    def look() -> None:
        clocks.append(nvml.mhz())
        reasons.append(nvml.reasons())

    run_for(seconds / 2, call, a_chunk, lambda: None)
    before = nvml.joules()
    calls, took = run_for(seconds, call, a_chunk, look)
    joules = nvml.joules() - before
    mhz = statistics.mean(clocks)
    share = lambda bits: round(sum(bool(r & bits) for r in reasons) / len(reasons), 3)  # noqa: E731
    return {
        "calls": calls, "ms": round(took / calls * 1e3, 4), "joules": round(joules / calls, 5), "watts": round(joules / took, 1),
        "mhz": round(mhz, 1), "mhz_least": min(clocks), "mhz_most": max(clocks), "mcycles": round(took / calls * mhz, 4),
        "power_capped": share(POWER), "thermal": share(THERMAL),
    }  # fmt: skip


def backward_calls(head_dim: int, length: int, zeros: bool):
    heads = HIDDEN // head_dim
    problem = Problem(f"D {head_dim}", TOKENS // length, length, length, heads, heads, head_dim, head_dim, False)
    inputs = Inputs.of(problem, True)
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.d_o) if zeros else ():
        tensor.zero_()
    flops = problem.flops("backward")
    for contestant in (Tessera, Cudnn):
        yield contestant.name, contestant(problem, inputs, "backward").backward()[0], flops


def product_call(zeros: bool, size: int = 8192):
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if zeros:
        a.zero_(), b.zero_()
    out = torch.empty_like(a)
    yield "product", lambda: torch.mm(a, b, out=out), 2.0 * size**3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    nvml = Nvml()
    cells = [(0, 0, zeros) for zeros in (False, True)]
    cells += [(head_dim, length, False) for head_dim in (128, 64) for length in (4096, 16384)]
    cells += [(head_dim, 4096, True) for head_dim in (128, 64)]
    with open(options.csv, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for head_dim, length, zeros in cells:
            for name, call, flops in backward_calls(head_dim, length, zeros) if head_dim else product_call(zeros):
                row = measure(nvml, call, options.seconds)
                where = {"contestant": name, "head_dim": head_dim, "length": length, "data": "zeros" if zeros else "normal"}
                table.writerow({**where, "tflops": round(flops / row["ms"] * 1e-9, 1), **row})
                file.flush()
                print(f"{name:8} D {head_dim:3} {length:5} {where['data']:6} {flops / row['ms'] * 1e-9:5.0f} TFLOP/s {row['ms']:.3f} ms "
                      f"{row['joules']:.3f} J {row['watts']:.0f} W {row['mhz']:.0f} MHz ({row['mhz_least']} to {row['mhz_most']}) "
                      f"{row['mcycles']:.3f} Mcycles, power {row['power_capped']:.2f}", flush=True)  # fmt: skip
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
