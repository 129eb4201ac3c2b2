"""Where a comparison runs: what is there, its clock and its memory. A backend is one more class in DEVICES."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tessera


class Cpu:
    """This machine's CPU."""

    name = "cpu"

    def __init__(self, threads: int | None):
        self.facts: dict[str, Any] = tessera.device()
        self.threads = threads or self.facts["threads"]

    @staticmethod
    def is_there() -> bool:
        return True

    def describe(self) -> str:
        plural = "" if self.threads == 1 else "s"
        return f"{self.facts['name']}, {self.threads} thread{plural}, {self.facts['isa']}"

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """How long a call took, and what it returned."""
        start = time.perf_counter()
        result = call()
        return time.perf_counter() - start, result

    def growth_bytes(self, call: Callable[[], Any]) -> tuple[int | None, Any]:
        """The greatest growth of resident memory while a call ran (None where the system does not say), its result."""
        _release_freed_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            before = _kibibytes("/proc/self/status", "VmRSS")
        except OSError:
            return None, call()
        result = call()
        return max(0, _kibibytes("/proc/self/status", "VmHWM") - before), result

    def memory_bytes(self) -> int | None:
        """Of the machine, None where the system does not say."""
        try:
            return _kibibytes("/proc/meminfo", "MemTotal")
        except OSError:
            return None

    def available_bytes(self) -> int | None:
        """What may still be taken: the machine's, or less within a container."""
        try:
            available = _kibibytes("/proc/meminfo", "MemAvailable")
        except OSError:
            return None
        group = Path("/sys/fs/cgroup")
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            try:
                available = min(available, int((group / limit).read_text()) - int((group / used).read_text()))
            except (OSError, ValueError):  # no such file, or "max"
                continue
        return available


# The first that is there is the default.
DEVICES: dict[str, type[Cpu]] = {"cpu": Cpu}


def default_device() -> str:
    return next(name for name, device in DEVICES.items() if device.is_there())


def _kibibytes(path: str, key: str) -> int:
    """The value of "key:  123 kB" in a file of /proc, in bytes."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path}: no {key}")


def _release_freed_memory() -> None:
    """Gives what the C library keeps of freed memory back, or the next call would grow into it unseen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
