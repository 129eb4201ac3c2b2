"""One row of the table: every side is measured on the same inputs, one after another, and compared with float64."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tessera.compare.device import Cpu, Cuda
from tessera.compare.exact import Error, Exact
from tessera.compare.frameworks import NumPy, PyTorch
from tessera.compare.shape import Shape
from tessera.compare.sides import Inputs, PyTorchAttention, Side, Standard, Tessera

_BUDGET_SECONDS = 1.0  # for the timed calls of one side
_SHARE_OF_AVAILABLE = 0.9  # fraction of available memory that a side may need


@dataclass
class Measured:
    """One side of a cell; `seconds` is None if it was not run because `needs_bytes` of memory are not available."""

    name: str
    title: str
    kernel: str
    needs_bytes: int
    seconds: float | None = None
    extra_bytes: int | None = None  # in addition to inputs and outputs
    resident_bytes: int | None = None  # the same, measured during a call: resident pages or PyTorch's count
    errors: dict[str, Error] = field(default_factory=dict)

    @property
    def max_error(self) -> float | None:
        return max(error.max for error in self.errors.values()) if self.errors else None

    @property
    def rms_error(self) -> float | None:
        if not self.errors:
            return None
        elements = sum(error.elements for error in self.errors.values())
        return (sum(error.rms**2 * error.elements for error in self.errors.values()) / elements) ** 0.5


@dataclass
class Cell:
    shape: Shape
    sides: list[Measured]  # Tessera first

    def gflops(self, side: Measured) -> float | None:
        return None if side.seconds is None else self.shape.flops / side.seconds * 1e-9

    def speed_up(self, side: Measured) -> float | None:
        """How many times faster Tessera was than `side`."""
        ours = self.sides[0].seconds
        return None if side.seconds is None or ours is None else side.seconds / ours


@dataclass(frozen=True)
class Settings:
    """Settings common to all cells."""

    device: Cpu | Cuda
    framework: NumPy | PyTorch
    kernel: str
    repeat: int
    limit_bytes: int | None  # that a peer may need; None: the available memory
    busy: str = ""  # a sentence, if other processes use the machine's processors


def measure_cell(shape: Shape, settings: Settings, report: Callable[[str], None]) -> Cell:
    framework = settings.framework
    report("random inputs")
    inputs = Inputs(shape, framework)
    exact = None
    if not shape.dropout_p:  # each side drops other entries, so there is no common result
        report("float64 reference on a sample")
        exact = Exact(shape, framework, inputs.q, inputs.k, inputs.v, inputs.d_o)
    makers: list[Callable[[], Side]] = [
        lambda: Tessera(shape, framework, inputs, settings.device.threads, settings.kernel),
        lambda: Standard(shape, framework, inputs),
    ]
    if isinstance(framework, PyTorch):
        makers.append(lambda: PyTorchAttention(shape, framework, inputs))
    sides = []
    for make in makers:
        side = make()
        report(side.title)
        sides.append(_measure_side(side, settings, exact))
        del side  # frees its matrices before the next side's memory is measured
    return Cell(shape, sides)


def _measure_side(side: Side, settings: Settings, exact: Exact | None) -> Measured:
    needs = side.needs_bytes()
    measured = Measured(side.name, side.title, side.kernel, needs)
    limits = [settings.limit_bytes] if settings.limit_bytes is not None else []
    available = settings.device.available_bytes()
    if available is not None:
        limits.append(int(available * _SHARE_OF_AVAILABLE))
    if needs and any(needs > limit for limit in limits):
        return measured

    side.prepare()
    settings.device.warm_up(side.call)
    growth, (first, returned) = settings.device.growth_bytes(lambda: settings.device.seconds(side.call))
    if growth is not None:
        outputs = sum(settings.framework.nbytes(x) for x in side.results(returned).values())
        measured.resident_bytes = max(0, growth - outputs)
    measured.kernel = side.kernel
    known = side.extra_bytes()
    measured.extra_bytes = measured.resident_bytes if known is None else known
    if exact is not None:
        measured.errors = exact.errors(side.results(returned))
    del returned
    measured.seconds = _median_seconds(side.call, first, settings)
    return measured


def _median_seconds(call: Callable[[], Any], first: float, settings: Settings) -> float:
    """Median of up to `repeat` calls, fewer if they are long. The first call only warms up, unless it was so long that
    warming up is negligible."""
    if first >= _BUDGET_SECONDS:
        return first
    seconds: list[float] = []
    calls = settings.device.calls_at_once(first)
    while len(seconds) < settings.repeat and sum(seconds) * calls < _BUDGET_SECONDS:
        seconds.append(settings.device.seconds(call, calls)[0])
    return statistics.median(seconds)
