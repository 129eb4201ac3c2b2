"""Time and memory over length, by matplotlib, into a file."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

from tessera.compare.cell import Cell, Measured
from tessera.compare.device import Cpu, Cuda
from tessera.compare.errors import WrongUse

_COLOURS = {"Tessera": "#0b6e99", "standard": "#d9730d", "pytorch": "#6940a5"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_ROOM_FOR_LEGEND = 0.45  # of the axis below the line of the machine's memory, above it
_TITLE_WIDTH = 120  # characters


def check_plot(file: str) -> None:
    """Refuses what cannot be drawn before anything is measured."""
    if not file.endswith((".png", ".svg")):
        raise WrongUse(f"--plot: '{file}', accepted is a file that ends in .png or .svg")
    folder = Path(os.path.realpath(file)).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise WrongUse(f"--plot: '{file}', accepted is a file in a folder that exists and can be written")
    target = Path(file)
    # No permission keeps root from a file that nobody may write: the mode itself counts.
    if target.exists() and not (target.stat().st_mode & 0o222 and os.access(target, os.W_OK)):
        raise WrongUse(f"--plot: '{file}' is there and read-only, accepted is a file that may be written")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise WrongUse("--plot: needs matplotlib, which is not installed (pip install matplotlib)") from None


def draw_plot(file: str, cells: list[Cell], heading: str, device: Cpu | Cuda) -> None:
    from matplotlib.figure import Figure

    directions = list(dict.fromkeys(cell.shape.direction for cell in cells))
    figure = Figure(figsize=(12, 0.8 + 4.4 * len(directions)), layout="constrained")
    figure.suptitle(_in_lines(heading), fontsize=10)
    memory_bytes = device.memory_bytes()
    axes = figure.subplots(len(directions), 2, squeeze=False)
    for (time, memory), direction in zip(axes, directions):
        chosen = sorted((c for c in cells if c.shape.direction == direction), key=lambda c: c.shape.length)
        lengths = [cell.shape.length for cell in chosen]
        _panel(time, f"Time, {direction}", lengths)
        _panel(memory, f"Memory beyond inputs and outputs, {direction}", lengths)
        for sides in zip(*(cell.sides for cell in chosen)):
            _curves(time, memory, lengths, sides)
        if memory_bytes is not None:
            memory.axhline(
                memory_bytes, color="#666666", linewidth=1, linestyle=":", label=f"memory of {device.memory_of}"
            )
            low, high = memory.get_ylim()
            memory.set_ylim(top=high * (high / low) ** _ROOM_FOR_LEGEND)
        _mark_seconds(time)
        _mark_bytes(memory)
        time.legend(frameon=False, loc="upper left")
        memory.legend(frameon=False, loc="upper left")
    target = os.path.realpath(file)  # through links
    partial = f"{target}.{os.getpid()}.partial"
    try:
        figure.savefig(partial, format=file[-3:], dpi=110)
        if os.path.exists(target):
            shutil.copymode(target, partial)
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)


def _in_lines(heading: str) -> str:
    """The heading's parts, as many on a line as there is room for."""
    lines: list[str] = []
    for part in heading.split(" · "):
        if lines and len(lines[-1]) + 3 + len(part) <= _TITLE_WIDTH:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def _panel(axes: Any, title: str, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / 1.4, lengths[-1] * 1.4)  # a single length has an extent, too
    axes.set(title=title, xlabel="sequence length")
    axes.grid(color="#dddddd")


def _mark_seconds(axes: Any) -> None:
    """Whole decades, marked at each, or at 1, 2 and 5 where these are few."""
    low, high = (edge(math.log10(value)) for edge, value in zip((math.floor, math.ceil), axes.get_ylim()))
    steps = (1,) if high - low > 2 else (1, 2, 5)
    marks = [step * 10.0**decade for decade in range(low, high + 1) for step in steps]

    def label(seconds: float) -> str:
        if seconds < 0.9999e-3:
            return f"{seconds * 1e6:.4g} µs"
        return f"{seconds * 1e3:.4g} ms" if seconds < 0.9999 else f"{seconds:.12g} s"

    axes.set_yticks(marks, [label(mark) for mark in marks])
    axes.minorticks_off()
    axes.set_ylim(10.0**low, 10.0**high)


def _mark_bytes(axes: Any) -> None:
    """Marked at powers of 32: 32 KiB, 1 MiB, 32 MiB."""
    low, high = axes.get_ylim()
    low = 32.0 ** math.floor(math.log(max(low, 1), 32))
    powers = range(round(math.log2(low)), math.floor(math.log2(high)) + 1, 5)
    axes.set_yticks([2.0**power for power in powers], [f"{2 ** (power % 10)} {_UNITS[power // 10]}" for power in powers])
    axes.minorticks_off()
    axes.set_ylim(low, high)


def _curves(time: Any, memory: Any, lengths: list[int], sides: tuple[Measured, ...]) -> None:
    """One side over length: what ran as a line; what it would have needed where it did not, as hollow marks."""
    side = sides[0]
    style = {
        "color": _COLOURS[side.name],
        "linewidth": 2,
        "marker": "o" if side.name == "Tessera" else "s",
        "markersize": 5,
    }
    ran = [(length, s) for length, s in zip(lengths, sides) if s.seconds is not None]
    label = side.title
    time.plot([length for length, _ in ran], [s.seconds or 0.0 for _, s in ran], label=label, **style)
    known = [(length, s.extra_bytes) for length, s in ran if s.extra_bytes]
    memory.plot([length for length, _ in known], [held for _, held in known], label=label, **style)
    missing = [(length, s.needs_bytes) for length, s in zip(lengths, sides) if s.seconds is None]
    if missing:
        joined = known[-1:] + missing
        memory.plot([x for x, _ in joined], [y for _, y in joined], color=style["color"], linestyle="--", linewidth=1.5)
        memory.plot([x for x, _ in missing], [y for _, y in missing], linestyle="none", marker="s", markersize=7,
                    markerfacecolor="none", color=style["color"], label=f"{label}, not run")  # fmt: skip
