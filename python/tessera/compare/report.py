"""The table, with the program's own layout, in colours if rich is installed; and the JSON."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Any

import tessera
from tessera import _core
from tessera.compare.cell import Cell, Measured, Settings

_SHORT = {"Tessera": "Tessera", "standard": "standard", "pytorch": "PyTorch"}


def title(cells: list[Cell], settings: Settings, product_gflops: float) -> str:
    shape = cells[0].shape
    directions = " and ".join(dict.fromkeys(cell.shape.direction for cell in cells))
    heads = f"H {shape.heads}" if shape.heads == shape.heads_kv else f"H {shape.heads}/{shape.heads_kv}"
    visible = "causal" if shape.causal else "full"
    dropout = f", dropout {shape.dropout_p:g}" if shape.dropout_p else ""
    return (
        f"Exact attention, {directions} · {shape.dtype} · B {shape.batch}, {heads}, D {shape.head_dim}, "
        f"{visible}{dropout}"
        f" · {settings.device.describe()} · {settings.framework.name} {settings.framework.version}"
        f" · a large matrix product {product_gflops:.0f} GFLOP/s"
    )


def notes(cells: list[Cell], settings: Settings) -> str:
    """Notes below the table, in addition to the table's own."""
    lines = [settings.busy] if settings.busy else []
    if any(side.name == "pytorch" for side in cells[0].sides):
        lines.append("PyTorch's own extra is as measured.")
    if settings.framework.name == "NumPy" and cells[0].shape.dtype != "float32":
        lines.append("Standard attention is in float32: NumPy has no matrix product in half precision.")
    if not settings.framework.threads_are_set:
        lines.append(
            "Standard attention has NumPy's own number of threads (OPENBLAS_NUM_THREADS): no threadpoolctl here."
        )
    return " ".join(lines)


def _numbers(cell: Cell, side: Measured) -> dict[str, Any]:
    keys = ("seconds", "extra_bytes", "max_error", "rms_error", "needs_bytes", "kernel")
    return {**{key: getattr(side, key) for key in keys}, "gflops": cell.gflops(side)}


def plain_table(cells: list[Cell], settings: Settings, width: int | None = None) -> tuple[str, str]:
    """The table in lines of at most `width` characters if possible, and the text below it."""
    sides = [(side.title, _SHORT[side.name], side.name == "pytorch") for side in cells[0].sides]
    table = _core.ComparisonTable(sides, settings.device.name == "cuda", width)
    lines = table.header()
    for cell in cells:
        lines += table.row(cell.shape.direction, cell.shape.length, [_numbers(cell, side) for side in cell.sides])
    queries_alone = any(cell.shape.backward and len(cell.sides[0].errors) == 1 for cell in cells)
    return lines.rstrip("\n"), table.legend(queries_alone, notes(cells, settings))


def print_table(cells: list[Cell], heading: str, settings: Settings) -> None:
    """As wide as the terminal, in colours by rich if it is installed; otherwise with all columns."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    plain, below = plain_table(cells, settings, width)
    if width is not None:
        heading = textwrap.fill(heading, width, break_long_words=False)
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
    """The keys of the program's `tessera compare --json`, and PyTorch's side."""
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
        "busy": settings.busy,
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
