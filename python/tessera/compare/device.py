"""The device of a comparison: whether it is present, its clock and its memory. A new back end is a new class in
DEVICES."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tessera
from tessera.compare.errors import require


class Cpu:
    """This machine's CPU."""

    name = "cpu"
    memory_of = "this machine"
    large_product = 1024  # rows and columns of a matrix product that reaches its peak

    def __init__(self, threads: int | None):
        self.facts: dict[str, Any] = tessera.device()
        self.threads: int = threads or self.facts["threads"]

    @staticmethod
    def is_there() -> bool:
        return True

    def describe(self) -> str:
        plural = "" if self.threads == 1 else "s"
        return f"{self.facts['name']}, {self.threads} thread{plural}, {self.facts['isa']}"

    def as_json(self) -> dict[str, Any]:
        return {"cpu": self.facts["name"], "isa": self.facts["isa"], "threads": self.threads}

    def warm_up(self, call: Callable[[], Any]) -> None:
        """Does one-time work of a first call before timing. Here there is little."""

    def calls_at_once(self, seconds: float) -> int:
        """How many calls of this duration are timed together: one, since the clock is much finer."""
        return 1

    def seconds(self, call: Callable[[], Any], calls: int = 1) -> tuple[float, Any]:
        """The mean time of a number of calls, and the result of the last one."""
        result = None
        start = time.perf_counter()
        for _ in range(calls):
            result = None  # frees its memory for the next call
            result = call()
        return (time.perf_counter() - start) / calls, result

    def growth_bytes(self, call: Callable[[], Any]) -> tuple[int | None, Any]:
        """The largest growth of resident memory during a call (None if the system does not tell), and the call's
        result."""
        _release_freed_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            before = _kibibytes("/proc/self/status", "VmRSS")
        except OSError:
            return None, call()
        result = call()
        return max(0, _kibibytes("/proc/self/status", "VmHWM") - before), result

    def memory_bytes(self) -> int | None:
        """Of the machine; None if the system does not tell."""
        try:
            return _kibibytes("/proc/meminfo", "MemTotal")
        except OSError:
            return None

    def available_bytes(self) -> int | None:
        """Memory that can still be allocated: the machine's, or less within a container."""
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


class Cuda:
    """PyTorch's current GPU, with PyTorch's tensors, stream and events."""

    name = "cuda"
    memory_of = "this GPU"
    large_product = 8192

    def __init__(self, threads: int | None):
        import torch

        self._cuda = torch.cuda
        self._properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.facts: dict[str, Any] = tessera.device(f"cuda:{torch.cuda.current_device()}")
        self.threads: int = threads or tessera.device()["threads"]  # for PyTorch's work on the CPU

    @staticmethod
    def is_there() -> bool:
        try:
            import torch

            if not torch.cuda.is_available():
                return False
            tessera.device(f"cuda:{torch.cuda.current_device()}")
        except (ImportError, tessera.Error):
            return False
        return True

    def describe(self) -> str:
        return f"{self.facts['name']}, {self.facts['cores']} SMs, {self.memory_bytes() / 2**30:.0f} GiB"

    def as_json(self) -> dict[str, Any]:
        facts = self.facts
        return {
            "gpu": facts["name"],
            "arch": facts["arch"],
            "multiprocessors": facts["cores"],
            "memory_bytes": self.memory_bytes(),
        }

    def warm_up(self, call: Callable[[], Any]) -> None:
        """The first launch compiles and loads the kernels."""
        call()
        self._cuda.synchronize()

    def calls_at_once(self, seconds: float) -> int:
        """Enough calls that Python's overhead is hidden if the kernels take longer."""
        return max(1, min(_MOST_CALLS, math.ceil(_LEAST_SECONDS / max(seconds, 1e-9))))

    def seconds(self, call: Callable[[], Any], calls: int = 1) -> tuple[float, Any]:
        """The mean time of a number of consecutive calls by the GPU's events, and the result of the last one."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        result = None
        start.record()
        for _ in range(calls):
            result = None
            result = call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls, result

    def growth_bytes(self, call: Callable[[], Any]) -> tuple[int, Any]:
        """The largest growth of PyTorch's memory on the GPU during a call, and the call's result."""
        self._cuda.synchronize()
        self._cuda.reset_peak_memory_stats()
        before = self._cuda.memory_allocated()
        result = call()
        self._cuda.synchronize()
        return self._cuda.max_memory_allocated() - before, result

    def memory_bytes(self) -> int:
        return int(self._properties.total_memory)

    def available_bytes(self) -> int:
        """Free memory, including freed memory that PyTorch caches."""
        return int(self._cuda.mem_get_info()[0] + self._cuda.memory_reserved() - self._cuda.memory_allocated())


_LEAST_SECONDS = 5e-3  # for calls that are timed together
_MOST_CALLS = 100

# The first one present is the default.
DEVICES: dict[str, type[Cpu] | type[Cuda]] = {"cuda": Cuda, "cpu": Cpu}


def device_named(name: str | None) -> str:
    """`name`, if that device is present; None: the first one present."""
    here = [known for known, device in DEVICES.items() if device.is_there()]
    require(name is None or name in here, "--device", f"'{name}'", "here: " + ", ".join(here))
    return name or here[0]


def _kibibytes(path: str, key: str) -> int:
    """The value of "key:  123 kB" in a file of /proc, in bytes."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path}: no {key}")


def _release_freed_memory() -> None:
    """Returns freed memory that the C library caches to the system; otherwise the next call could reuse it
    unnoticed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
