"""The picture of a comparison: time and memory over length, by matplotlib, from the report that `tessera compare --report`
or `python -m tessera compare --json` wrote.

    python -m tessera plot REPORT.json PICTURE.png        or, where the package is not installed, this file in its place
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

SIDES = {  # of a report's cells: title, colour, mark
    "tessera": ("Tessera", "#0b7285", "o"),
    "standard": ("standard attention", "#e8590c", "s"),
    "pytorch": ("PyTorch's own", "#6940a5", "s"),
}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_ROOM_FOR_LEGEND = 0.45  # of the axis below the line of the machine's memory, above it
_TITLE_WIDTH = 120  # characters


def check_plot(file: str, argument: str) -> None:
    """Refuses what cannot be drawn before anything is measured: ValueError, in one line."""
    if not file.endswith((".png", ".svg")):
        raise ValueError(f"{argument}: '{file}', accepted is a file that ends in .png or .svg")
    folder = Path(os.path.realpath(file)).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{argument}: '{file}', accepted is a file in a folder that exists and can be written")
    target = Path(file)
    # No permission keeps root from a read-only file: the mode itself counts.
    if target.exists() and not (target.stat().st_mode & 0o222 and os.access(target, os.W_OK)):
        raise ValueError(f"{argument}: '{file}' is there and read-only, accepted is a file that may be written")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(f"{argument}: needs matplotlib, which is not installed (pip install matplotlib)") from None


def draw_report(report_file: str, file: str) -> None:
    """Throws ValueError, in one line, where the report is none."""
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

    cells = report["cells"]
    directions = list(dict.fromkeys(cell["direction"] for cell in cells))
    figure = Figure(figsize=(12, 0.8 + 4.4 * len(directions)), layout="constrained")
    figure.suptitle(_in_lines(report["title"]), fontsize=10)
    memory_bytes = report["memory_bytes"]
    axes = figure.subplots(len(directions), 2, squeeze=False)
    for (time, memory), direction in zip(axes, directions):
        chosen = sorted((cell for cell in cells if cell["direction"] == direction), key=lambda cell: cell["length"])
        lengths = [cell["length"] for cell in chosen]
        _panel(time, f"Time, {direction}", lengths)
        _panel(memory, f"Memory beyond inputs and outputs, {direction}", lengths)
        for side in SIDES:
            if side in chosen[0]:
                _curves(time, memory, side, chosen)
        if memory_bytes is not None:
            memory.axhline(
                memory_bytes, color="#666666", linewidth=1, linestyle=":", label=f"memory of {report['memory_of']}"
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


def _curves(time: Any, memory: Any, side: str, cells: list[dict[str, Any]]) -> None:
    """One side over length: what ran as a line; what it would have needed where it did not, as hollow marks."""
    label, colour, mark = SIDES[side]
    style = {"color": colour, "linewidth": 2, "marker": mark, "markersize": 5, "label": label}
    ran = [(cell["length"], cell[side]) for cell in cells if cell[side] is not None]
    time.plot([length for length, _ in ran], [measured["ms"] * 1e-3 for _, measured in ran], **style)
    known = [(length, measured["extra_bytes"]) for length, measured in ran if measured["extra_bytes"]]
    memory.plot([length for length, _ in known], [held for _, held in known], **style)
    missing = [(cell["length"], cell[f"{side}_needs_bytes"]) for cell in cells if cell[side] is None]
    if missing:
        joined = known[-1:] + missing
        memory.plot([x for x, _ in joined], [y for _, y in joined], color=colour, linestyle="--", linewidth=1.5)
        memory.plot([x for x, _ in missing], [y for _, y in missing], linestyle="none", marker="s", markersize=7,
                    markerfacecolor="none", color=colour, label=f"{label}, not run")  # fmt: skip


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
