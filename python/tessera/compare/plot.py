"""The chart of a comparison: memory and speed at each length, by matplotlib, from a report of `tessera compare
--report` or `python -m tessera compare --json`.

    python -m tessera plot REPORT.json PICTURE.png        or, if the package is not installed, run this file instead
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

SIDES = {  # sides of a report's cells: title, colour
    "tessera": ("Tessera", "#0b7285"),
    "standard": ("standard attention", "#e8590c"),
    "pytorch": ("PyTorch's own", "#6940a5"),
}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_TITLE_WIDTH = 120  # characters


def check_file(file: str, argument: str) -> None:
    """Raises a one-line ValueError if the file cannot be written, before anything is measured."""
    folder = Path(os.path.realpath(file)).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{argument}: '{file}', accepted is a file in a folder that exists and can be written")
    target = Path(file)
    # Permissions do not stop root from writing a read-only file, so the mode itself is checked.
    if target.exists() and not (target.stat().st_mode & 0o222 and os.access(target, os.W_OK)):
        raise ValueError(f"{argument}: '{file}' is there and read-only, accepted is a file that may be written")


def check_plot(file: str, argument: str) -> None:
    """The same for a chart."""
    if not file.endswith((".png", ".svg")):
        raise ValueError(f"{argument}: '{file}', accepted is a file that ends in .png or .svg")
    check_file(file, argument)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(f"{argument}: needs matplotlib, which is not installed (pip install matplotlib)") from None


def draw_report(report_file: str, file: str) -> None:
    """Raises a one-line ValueError if the file is not a report."""
    try:
        report = json.loads(Path(report_file).read_text(encoding="utf-8"))
        drawable = bool(report["cells"]) and all(cell["tessera"] for cell in report["cells"]) and report["title"]
    except (ValueError, KeyError, TypeError):
        drawable = False
    if not drawable:
        raise ValueError(f"{report_file}: no report of a comparison, accepted is what tessera compare --json writes")
    draw_plot(file, report)


def draw_plot(file: str, report: dict[str, Any]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    cells = report["cells"]
    directions = list(dict.fromkeys(cell["direction"] for cell in cells))
    sides = [side for side in SIDES if side in cells[0]]
    lengths = len({cell["length"] for cell in cells})
    width = max(12, 0.75 * lengths * len(sides))  # room for the numbers on the bars
    figure = Figure(figsize=(width, 1.1 + 3.9 * len(directions)), layout="constrained")
    busy = textwrap.wrap(report.get("busy", ""), _TITLE_WIDTH)
    figure.suptitle("\n".join([_in_lines(report["title"]), *busy]), fontsize=10)
    axes = figure.subplots(len(directions), 2, squeeze=False)
    for (memory, speed), direction in zip(axes, directions):
        chosen = sorted((cell for cell in cells if cell["direction"] == direction), key=lambda cell: cell["length"])
        _draw_memory(memory, f"Memory beyond inputs and outputs, {direction}", chosen, sides, report)
        _draw_speed(speed, direction, chosen, sides)
    marks = [Patch(color=SIDES[side][1], label=SIDES[side][0]) for side in sides]
    figure.legend(handles=marks, loc="outside lower center", ncol=len(marks), frameon=False)
    target = os.path.realpath(file)  # resolves links
    partial = f"{target}.{os.getpid()}.partial"
    try:
        figure.savefig(partial, format=file[-3:], dpi=110)
        if os.path.exists(target):
            shutil.copymode(target, partial)
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)


def _in_lines(heading: str) -> str:
    """Fills lines with the parts of the heading."""
    lines: list[str] = []
    for part in heading.split(" · "):
        if lines and len(lines[-1]) + 3 + len(part) <= _TITLE_WIDTH:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def _bytes_text(value: float) -> str:
    unit = min(int(math.log(max(value, 1), 1024)), len(_UNITS) - 1)
    return f"{value / 1024**unit:.3g} {_UNITS[unit]}"


def _seconds_text(seconds: float) -> str:
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _draw_bars(
    axes: Any, side: str, sides: list[str], heights: list[float | None], texts: list[str], **style: Any
) -> None:
    """One bar per length, if there is a height, with a text above it."""
    width = 0.86 / len(sides)
    shown = [(n + (sides.index(side) + 0.5) * width - 0.43, height, text)
             for n, (height, text) in enumerate(zip(heights, texts)) if height]  # fmt: skip
    if not shown:
        return
    places, tall, words = zip(*shown)
    bars = axes.bar(places, tall, width * 0.94, color=SIDES[side][1], **style)
    axes.bar_label(bars, words, fontsize=7, padding=1)


def _finish(axes: Any, title: str, ticks: list[str], xlabel: str) -> None:
    axes.set_xticks(range(len(ticks)), ticks)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(ticks) - 0.4)
    axes.set(title=title, xlabel=xlabel)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_memory(axes: Any, title: str, cells: list[dict[str, Any]], sides: list[str], report: dict[str, Any]) -> None:
    """On a logarithmic axis; a hollow bar if a side was not run because it needs too much memory."""
    axes.set_yscale("log", base=2)
    for side in sides:
        held = [cell[side]["extra_bytes"] if cell[side] else None for cell in cells]
        _draw_bars(axes, side, sides, held, [_bytes_text(x or 0) for x in held])
        needs = [None if cell[side] else cell[f"{side}_needs_bytes"] for cell in cells]
        _draw_bars(
            axes, side, sides, needs, [f"{_bytes_text(x or 0)},\nnot run" for x in needs], alpha=0.25, hatch="//"
        )
    known = [bar.get_height() for bar in axes.patches]
    low, high = (min(known), max(known)) if known else (1.0, 2.0)
    if report["memory_bytes"] is not None:
        memory = report["memory_bytes"]
        axes.axhline(memory, color="#666666", linewidth=1, linestyle=":")
        axes.annotate(f"memory of {report['memory_of']}", (0.01, memory), (0, 2), xycoords=("axes fraction", "data"),
                      textcoords="offset points", fontsize=7, color="#666666")  # fmt: skip
        high = max(high, memory)
    axes.set_ylim(low / 4, high * (high / low) ** 0.12)
    _mark_bytes(axes)
    _finish(axes, title, [str(cell["length"]) for cell in cells], "sequence length")


def _draw_speed(axes: Any, direction: str, cells: list[dict[str, Any]], sides: list[str]) -> None:
    """A peer's bars are labelled with Tessera's speed-up."""
    for side in sides:
        ran = [cell[side] for cell in cells]
        rates = [one["gflops"] if one else None for one in ran]
        longer = [one["ms"] / cell["tessera"]["ms"] if one else 0 for one, cell in zip(ran, cells)]
        texts = [f"{rate or 0:.3g}" + (f"\n{times:.3g} ×" if side != "tessera" else "")
                 for rate, times in zip(rates, longer)]  # fmt: skip
        _draw_bars(axes, side, sides, rates, texts)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.12)
    ticks = [f"{cell['length']}\n{_seconds_text(cell['tessera']['ms'] * 1e-3)}" for cell in cells]
    _finish(
        axes,
        f"Speed in GFLOP/s, {direction}",
        ticks,
        "sequence length, and Tessera's time; ×: how many times as long",
    )


def _mark_bytes(axes: Any) -> None:
    """Ticks at powers of 32: 32 KiB, 1 MiB, 32 MiB."""
    low, high = axes.get_ylim()
    first = 5 * math.ceil(math.log2(max(low, 1)) / 5)
    powers = range(first, math.floor(math.log2(high)) + 1, 5)
    axes.set_yticks(
        [2.0**power for power in powers], [f"{2 ** (power % 10)} {_UNITS[power // 10]}" for power in powers]
    )
    axes.minorticks_off()


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise ValueError(f"plot: {len(arguments)} arguments, accepted REPORT.json and PICTURE.png or .svg")
    check_plot(arguments[1], "plot")
    draw_report(*arguments)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as refusal:
        sys.exit(f"plot.py: {refusal}")
