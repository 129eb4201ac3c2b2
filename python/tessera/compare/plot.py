"""Time and memory over length, by matplotlib, into a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tessera.compare.cell import Cell, Measured
from tessera.compare.device import Cpu, Cuda
from tessera.compare.errors import WrongUse

_COLOURS = {"Tessera": "#0b6e99", "standard": "#d9730d", "pytorch": "#6940a5"}
_MIB = 2.0**20
_ROOM_FOR_LEGEND = 200  # above the line of the machine's memory, on a logarithmic axis


def check_plot(file: str) -> None:
    """Refuses what cannot be drawn before anything is measured."""
    if not file.endswith((".png", ".svg")):
        raise WrongUse(f"--plot: '{file}', accepted is a file that ends in .png or .svg")
    folder = Path(file).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise WrongUse(f"--plot: '{file}', accepted is a file in a folder that exists and can be written")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise WrongUse("--plot: needs matplotlib, which is not installed (pip install matplotlib)") from None


def draw_plot(file: str, cells: list[Cell], heading: str, device: Cpu | Cuda) -> None:
    from matplotlib.figure import Figure

    directions = list(dict.fromkeys(cell.shape.direction for cell in cells))
    figure = Figure(figsize=(12, 0.8 + 4.4 * len(directions)), layout="constrained")
    figure.suptitle(heading, fontsize=9, wrap=True)
    memory_bytes = device.memory_bytes()
    axes = figure.subplots(len(directions), 2, squeeze=False)
    for (time, memory), direction in zip(axes, directions):
        chosen = [cell for cell in cells if cell.shape.direction == direction]
        _panel(time, f"Time, {direction}", "milliseconds", [cell.shape.length for cell in chosen])
        _panel(memory, f"Memory beyond inputs and outputs, {direction}", "MiB", [cell.shape.length for cell in chosen])
        for sides in zip(*(cell.sides for cell in chosen)):
            _curves(time, memory, [cell.shape.length for cell in chosen], sides)
        if memory_bytes is not None:
            memory.axhline(
                memory_bytes / _MIB, color="#666666", linewidth=1, linestyle=":", label=f"memory of {device.memory_of}"
            )
            memory.set_ylim(top=memory_bytes / _MIB * _ROOM_FOR_LEGEND)
        time.legend(frameon=False, loc="upper left")
        memory.legend(frameon=False, loc="upper left")
    partial = f"{file}.{os.getpid()}.partial"
    try:
        figure.savefig(partial, format=file[-3:], dpi=110)
        os.replace(partial, file)
    finally:
        Path(partial).unlink(missing_ok=True)


def _panel(axes: Any, title: str, unit: str, lengths: list[int]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}" if unit == "milliseconds" else NullFormatter())
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set(title=title, xlabel="sequence length", ylabel=unit)
    axes.grid(color="#dddddd")


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
    time.plot([length for length, _ in ran], [(s.seconds or 0.0) * 1e3 for _, s in ran], label=label, **style)
    known = [(length, s.extra_bytes / _MIB) for length, s in ran if s.extra_bytes]
    memory.plot([length for length, _ in known], [mib for _, mib in known], label=label, **style)
    missing = [(length, s.needs_bytes / _MIB) for length, s in zip(lengths, sides) if s.seconds is None]
    if missing:
        joined = known[-1:] + missing
        memory.plot([x for x, _ in joined], [y for _, y in joined], color=style["color"], linestyle="--", linewidth=1.5)
        memory.plot([x for x, _ in missing], [y for _, y in missing], linestyle="none", marker="s", markersize=7,
                    markerfacecolor="none", color=style["color"], label=f"{label}, not run")  # fmt: skip
