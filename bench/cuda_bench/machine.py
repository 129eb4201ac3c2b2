"""The machine of the measurements, and its two ceilings."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import tessera

_PRODUCT_SIZE = 8192
_COPY_BYTES = 4 << 30


def _answer(*command: str) -> str:
    """The first line that a program prints, "unknown" if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"


def _gpu_fact(query: str) -> str:
    return _answer("nvidia-smi", "--id=0", f"--query-gpu={query}", "--format=csv,noheader")


def need_gpu() -> None:
    """Ends the program with a message if PyTorch has no GPU."""
    if not torch.cuda.is_available():
        sys.exit(f"this measures a GPU, and PyTorch {torch.__version__} sees none (torch.cuda.is_available())")


def commit() -> str:
    """Of the repository that this file is in."""
    return _answer("git", "rev-parse", "--short", "HEAD")


def facts() -> dict:
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _gpu_fact("driver_version"),
        "clocks": _gpu_fact("clocks.max.sm,clocks.max.mem,power.limit"),
        "pytorch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "tessera": tessera.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def heading(facts: dict) -> str:
    return (
        f"{facts['gpu']} (driver {facts['driver']}; at most {facts['clocks']}), PyTorch {facts['pytorch']}, "
        f"CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, Tessera {facts['tessera']}, commit {facts['commit']}, "
        f"{facts['date']}"
    )


def clocks_under(call: Callable[[], object]) -> str:
    """SM clock and power draw while the call runs repeatedly."""
    for _ in range(600):
        call()
    answer = _gpu_fact("clocks.sm,power.draw")
    torch.cuda.synchronize()
    return answer


def ceiling_calls() -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """A large product and a large copy, and the TFLOP, or TB read and written, of one call."""
    a, b = (torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.zeros(_COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    calls = {"product": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}
    return calls, {"product": 2e-12 * _PRODUCT_SIZE**3, "copy": 2e-12 * _COPY_BYTES}
