"""The committed measurements in bench/results: the latest of each cell, and the peers of a dated run.

Results are the files that bench/cuda_against_pytorch.py --json and bench/cuda_serving.py write, named
<date>-<gpu>-<cases>.json. FlashAttention-3, which is not run beside Tessera, and -2 and -4, which some runs lack, are
in peers-<date>.csv beside the cuDNN of their own run: here they are a result's cuDNN times their ratio to cuDNN in the
dated run.
"""

from __future__ import annotations

import csv
import json
import pathlib

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "bench/results"
PEERS_DATE = "2026-11-21"
PEERS = FOLDER / f"peers-{PEERS_DATE}.csv"
PEERS_OF_A_RUN = ("cudnn", "flash", "flash4")
CARRIED = ("fa2", "fa3", "fa4")


def results() -> list[dict]:
    """Every committed result, oldest first, each with its file name."""
    loaded = []
    for path in sorted(FOLDER.glob("*.json")):
        result = json.loads(path.read_text())
        if "cells" in result:
            loaded.append({**result, "file": path.name})
    return loaded


def latest_cells(case: str, direction: str) -> list[dict]:
    """The latest measurement of each cell, with the machine that it was measured on."""
    cells = {}
    for result in results():
        for cell in result["cells"]:
            if (cell.get("case"), cell.get("direction")) == (case, direction):
                cells[cell["name"]] = {**cell, "machine": result["machine"], "file": result["file"]}
    return list(cells.values())


def latest_serving() -> list[dict]:
    """The latest measurement of each cell of bench/cuda_serving.py, with the machine that it was measured on."""
    cells = {}
    for result in results():
        for cell in result["cells"]:
            if "us" in cell:
                cells[cell["name"]] = {**cell, "machine": result["machine"], "file": result["file"]}
    return list(cells.values())


def peers() -> dict[tuple, dict[str, float]]:
    """(direction, head size, mask, length) -> TFLOP/s of each peer in the dated run."""
    with PEERS.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    keys = ("direction", "head_dim", "mask", "length")
    table = {}
    for row in rows:
        key = (row["direction"], int(row["head_dim"]), row["mask"], int(row["length"]))
        table[key] = {name: float(value) for name, value in row.items() if name not in keys}
    return table


def rate(cell: dict, name: str) -> float | None:
    """TFLOP/s."""
    seconds = cell["seconds"].get(name)
    return cell["flops"] * 1e-12 / seconds if seconds else None


def grid_row(cell: dict, table: dict[tuple, dict[str, float]]) -> dict[str, float]:
    """TFLOP/s of a cell of the grid: measured in one run (tessera, sm80, PEERS_OF_A_RUN), and by the dated ratio
    (CARRIED; fa2 and fa4 unless flash and flash4 were measured)."""
    rates = {name: rate(cell, name) for name in ("tessera", *PEERS_OF_A_RUN) if rate(cell, name)}
    if rate(cell, "sm90"):  # requested by name: a plan chose bwd_sm80 then
        rates |= {"tessera": rate(cell, "sm90"), "sm80": rates["tessera"]}
    dated = table.get((cell["direction"], cell["head_dim"], cell["mask"], cell["length"]))
    if dated and "cudnn" in rates:
        if "flash" not in rates:
            rates["fa2"] = rates["cudnn"] * dated["flash_attention_2"] / dated["cudnn"]
        rates["fa3"] = rates["cudnn"] * dated["flash_attention_3"] / dated["cudnn"]
        if "flash4" not in rates:
            rates["fa4"] = rates["cudnn"] * dated["flash_attention_4"] / dated["cudnn"]
    return rates
