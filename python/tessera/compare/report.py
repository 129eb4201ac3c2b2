"""The table, plain or by rich where it is installed, and the JSON."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import tessera
from tessera.compare.cell import Cell, Measured, Settings

@dataclass
class Column:
    name: str
    rank: int = 0  # what is left out first where a terminal has no room: the greatest; 0 stays


@dataclass
class Group:
    """Columns under a title, which is the brief one where some are left out."""

    title: str
    brief: str
    columns: list[Column]


_SHORT = {"Tessera": "Tessera", "standard": "standard", "pytorch": "PyTorch"}
_DIRECTION = Column("", 3)  # left out, it stands on a line of its own
_EXTRA_RANK, _ERRORS_RANK, _MOST_RANK = 1, 5, 6


def number(value: float | None) -> str:
    """Three significant digits, no exponent: 0.0123, 1.23, 12.3, 123, 12345."""
    if value is None:
        return ""
    digits = math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(max(2 - digits, 0), 4)}f}"


def bytes_text(value: float | None) -> str:
    if value is None:
        return ""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 100 or units[0] == "B" else f"{number(value)} {units[0]}"


def title(cells: list[Cell], settings: Settings, product_gflops: float) -> str:
    shape = cells[0].shape
    directions = " and ".join(dict.fromkeys(cell.shape.direction for cell in cells))
    heads = f"H {shape.heads}" if shape.heads == shape.heads_kv else f"H {shape.heads}/{shape.heads_kv}"
    visible = "causal" if shape.causal else "full"
    dropout = f", dropout {shape.dropout_p:g}" if shape.dropout_p else ""
    return (
        f"Exact attention, {directions} · {shape.dtype} · B {shape.batch}, {heads}, D {shape.head_dim}, {visible}{dropout}"
        f" · {settings.device.describe()} · {settings.framework.name} {settings.framework.version}"
        f" · a large matrix product {number(product_gflops)} GFLOP/s"
    )


def groups(cell: Cell) -> list[Group]:
    def side_group(side: Measured) -> Group:
        own = side is cell.sides[0]
        columns = [Column("ms"), Column("GFLOP/s", 4), Column("extra", _EXTRA_RANK if own else 2)]
        if side.name == "pytorch":
            columns.append(Column("by", 6))
        return Group(side.title, _SHORT[side.name], columns)

    peers = cell.sides[1:]
    return [
        Group("", "", [_DIRECTION, Column("length")]),
        *(side_group(side) for side in cell.sides),
        Group("times as fast as", "speed-up over", [Column(_SHORT[side.name]) for side in peers]),
        Group("max error against float64", "max error", [Column(_SHORT[side.name], _ERRORS_RANK) for side in cell.sides]),
    ]


def row(cell: Cell) -> list[list[str]]:
    """The cells of each group; one text for a whole group where a side was not run."""
    cells = [[cell.shape.direction, str(cell.shape.length)]]
    for side in cell.sides:
        if side.seconds is None:
            cells.append([f"needs {bytes_text(side.needs_bytes)}: not run"])
            continue
        texts = [number(side.seconds * 1e3), number(cell.gflops(side)), bytes_text(side.extra_bytes)]
        cells.append([*texts, *([side.kernel] if side.name == "pytorch" else [])])
    ratios = [cell.speed_up(side) for side in cell.sides[1:]]
    cells.append(["" if ratio is None else f"{ratio:.2f} ×" for ratio in ratios])
    cells.append(["" if side.max_error is None else f"{side.max_error:.1e}" for side in cell.sides])
    return cells


def legend(cells: list[Cell], settings: Settings, rank: int) -> str:
    """What stands below the table: of the columns that are shown at this rank."""
    lines = []
    if rank >= _EXTRA_RANK:
        measured = any(side.name == "pytorch" for side in cells[0].sides)
        lines.append("extra: memory beyond inputs and outputs" + (", of PyTorch's own as measured." if measured else "."))
    if not cells[0].shape.dropout_p and rank >= _ERRORS_RANK:
        text = "Errors: of sampled rows of the output (forward) or of the gradients (backward)."
        if any(cell.shape.backward and len(cell.sides[0].errors) == 1 for cell in cells):
            text += " At the greatest lengths that of the queries alone."
        lines.append(text)
    if settings.framework.name == "NumPy" and cells[0].shape.dtype != "float32":
        lines.append("Standard attention is in float32: NumPy has no matrix product in half precision.")
    if not settings.framework.threads_are_set:
        lines.append(
            "Standard attention has NumPy's own number of threads (OPENBLAS_NUM_THREADS): no threadpoolctl here."
        )
    if rank < _MOST_RANK:
        lines.append("A wider terminal shows more columns, --json all numbers.")
    return "\n".join(lines)


def _not_run(text: str, room: int) -> str:
    """`needs 8.00 GiB: not run`, or what of it fits."""
    needs, _, not_run = text.partition(": ")
    return next((part for part in (text, needs) if len(part) <= room), not_run)


def _table(cells: list[Cell], rank: int) -> list[str]:
    """The lines of the table without the columns that may be left out at this rank."""
    head, rows = groups(cells[0]), [row(cell) for cell in cells]
    lines: list[list[str]] = [[], [], []]  # titles, names of columns, rule; then a line for each row
    lines += [[] for _ in rows]
    for g, group in enumerate(head):
        kept = [c for c, column in enumerate(group.columns) if column.rank <= rank]
        if not kept:
            continue
        names = [group.columns[c].name for c in kept]
        title = group.title if rank == _MOST_RANK else group.brief
        # A side that was not run has one text for all of the group's columns.
        texts = [[r[g][c] for c in kept] if len(r[g]) == len(group.columns) else None for r in rows]
        widths = [max(len(line[c]) for line in (names, *(t for t in texts if t))) for c in range(len(kept))]
        wide = max(sum(widths) + len(widths) - 1, len(title))
        if rank == _MOST_RANK:
            wide = max(wide, *(len(r[g][0]) if t is None else 0 for r, t in zip(rows, texts)))
        widths[0] += wide - (sum(widths) + len(widths) - 1)

        def joined(parts: list[str], widths: list[int] = widths) -> str:
            return " ".join(part.rjust(width) for part, width in zip(parts, widths))

        lines[0].append(title.ljust(wide))
        lines[1].append(joined(names))
        lines[2].append("─" * wide)
        for line, r, t in zip(lines[3:], rows, texts):
            line.append(_not_run(r[g][0], wide).ljust(wide) if t is None else joined(t))
    joints = [" │ ", " │ ", "─┼─", *(" │ " for _ in rows)]
    table = [joint.join(line).rstrip() for joint, line in zip(joints, lines)]
    if rank >= _DIRECTION.rank:
        return table
    directions = [cell.shape.direction for cell in cells]
    before = [None, *directions]
    headed = [[*([d] if d != b else []), line] for d, b, line in zip(directions, before, table[3:])]
    return [*table[:3], *(line for pair in headed for line in pair)]


def plain_table(cells: list[Cell], width: int | None = None) -> tuple[str, int]:
    """The table in lines of at most `width` characters where that can be, and the rank up to which columns stand there."""
    for rank in range(_MOST_RANK, -1, -1):
        lines = _table(cells, rank)
        if width is None or max(map(len, lines)) <= width:
            break
    return "\n".join(lines), rank


def print_table(cells: list[Cell], heading: str, settings: Settings) -> None:
    """As wide as the terminal, in colours by rich where it is installed; elsewhere with all columns."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    plain, rank = plain_table(cells, width)
    below = legend(cells, settings, rank)
    if width is not None:
        heading, below = (
            "\n".join(textwrap.fill(line, width, break_long_words=False) for line in text.splitlines())
            for text in (heading, below)
        )
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(f"{heading}\n\n{plain}\n\n{below}")
        return
    console = Console(soft_wrap=True, highlight=False)
    text = Text(plain)
    text.highlight_regex(r"[│┼─]", "dim")
    text.highlight_regex(r"(needs [^│]*)?not run", "yellow")
    text.highlight_regex(r"\d+\.\d\d ×", "bold green")
    lines = text.split("\n")
    lines[0].stylize("bold")
    lines[1].stylize("dim")
    console.print(Text(heading, style="bold"), "", *lines, "", Text(below, style="dim"), sep="\n")


def _side_json(cell: Cell, side: Measured, product_gflops: float) -> dict[str, Any] | None:
    if side.seconds is None:
        return None
    gflops = cell.gflops(side) or 0.0
    return {
        "kernel": side.kernel,
        "ms": side.seconds * 1e3,
        "gflops": gflops,
        "share_of_product": gflops / product_gflops,
        "extra_bytes": side.extra_bytes,
        "resident_growth_bytes": side.resident_bytes,
        "max_error": side.max_error,
        "rms_error": side.rms_error,
        "errors": {name: error._asdict() for name, error in side.errors.items()},
    }


def as_json(cells: list[Cell], settings: Settings, product_gflops: float) -> dict[str, Any]:
    """The keys of the program `tessera compare --json`, and PyTorch's side."""
    shape = cells[0].shape
    entries = []
    for cell in cells:
        entry: dict[str, Any] = {
            "direction": cell.shape.direction,
            "length": cell.shape.length,
            "flops": cell.shape.flops,
            "kernel": cell.sides[0].kernel,
        }
        for side in cell.sides:
            entry[side.name.lower()] = _side_json(cell, side, product_gflops)
        for side in cell.sides[1:]:
            entry[f"{side.name}_needs_bytes"] = side.needs_bytes
        entry["speed_up"] = cell.speed_up(cell.sides[1])
        for side in cell.sides[2:]:
            entry[f"speed_up_{side.name}"] = cell.speed_up(side)
        entries.append(entry)
    return {
        "version": tessera.__version__,
        "title": title(cells, settings, product_gflops),
        "memory_bytes": settings.device.memory_bytes(),
        "memory_of": settings.device.memory_of,
        "device": settings.device.name,
        **settings.device.as_json(),
        "arrays": f"{settings.framework.name} {settings.framework.version}",
        "product_gflops": product_gflops,
        "dtype": shape.dtype,
        "batch": shape.batch,
        "heads": shape.heads,
        "heads_kv": shape.heads_kv,
        "head_dim": shape.head_dim,
        "causal": shape.causal,
        "dropout_p": shape.dropout_p,
        "cells": entries,
    }
