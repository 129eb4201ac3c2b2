"""The table, plain or by rich where it is installed, and the JSON."""

from __future__ import annotations

import math
from typing import Any

import tessera
from tessera.compare.cell import Cell, Measured, Settings

Group = tuple[str, list[str]]  # a title over columns

_SHORT = {"Tessera": "Tessera", "standard": "standard", "pytorch": "PyTorch"}


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
    peers = cell.sides[1:]
    columns = [("", ["", "length"]), ("Tessera", ["ms", "GFLOP/s", "extra"])]
    columns += [(side.title, ["ms", "GFLOP/s", "extra", *(["by"] if side.name == "pytorch" else [])]) for side in peers]
    columns.append(("times as fast as", [_SHORT[side.name] for side in peers]))
    columns.append(("max error against float64", [_SHORT[side.name] for side in cell.sides]))
    return columns


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


def legend(cells: list[Cell], settings: Settings) -> str:
    lines = ["extra: memory beyond inputs and outputs"]
    measured = any(side.name == "pytorch" for side in cells[0].sides)
    lines[0] += ", of PyTorch's own as measured." if measured else "."
    if not cells[0].shape.dropout_p:
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
    return "\n".join(lines)


def plain_table(cells: list[Cell]) -> str:
    head, rows = groups(cells[0]), [row(cell) for cell in cells]
    lines: list[list[str]] = [[], [], []]  # titles, names of columns, rule; then a line for each row
    lines += [[] for _ in rows]
    for g, (heading, names) in enumerate(head):
        full = [r[g] for r in rows if len(r[g]) == len(names)]
        widths = [max(len(texts[c]) for texts in [names, *full]) for c in range(len(names))]
        wide = max(
            sum(widths) + len(widths) - 1,
            len(heading),
            *(len(r[g][0]) for r in rows if len(r[g]) == 1 != len(names)),
            0,
        )
        widths[0] += wide - (sum(widths) + len(widths) - 1)

        def joined(texts: list[str], widths: list[int] = widths) -> str:
            return " ".join(text.rjust(width) for text, width in zip(texts, widths))

        lines[0].append(heading.ljust(wide))
        lines[1].append(joined(names))
        lines[2].append("─" * wide)
        for line, r in zip(lines[3:], rows):
            line.append(joined(r[g]) if len(r[g]) == len(names) else r[g][0].ljust(wide))
    joints = [" │ ", " │ ", "─┼─", *(" │ " for _ in rows)]
    return "\n".join(joint.join(line).rstrip() for joint, line in zip(joints, lines))


def print_table(cells: list[Cell], heading: str, settings: Settings) -> None:
    """By rich in colours where it is installed and a terminal is wide enough, else plain."""
    plain = plain_table(cells)
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(f"{heading}\n\n{plain}\n\n{legend(cells, settings)}")
        return
    console = Console(soft_wrap=True, highlight=False)
    text = Text(plain)
    text.highlight_regex(r"[│┼─]", "dim")
    text.highlight_regex(r"needs [^│]*not run", "yellow")
    text.highlight_regex(r"\d+\.\d\d ×", "bold green")
    lines = text.split("\n")
    lines[0].stylize("bold")
    lines[1].stylize("dim")
    console.print(Text(heading, style="bold"), "", *lines, "", Text(legend(cells, settings), style="dim"), sep="\n")


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
