"""Writes docs/status.md: what the committed results in bench/results say, with date, commit and machine of each.

    python scripts/make_status.py [--check]        --check: write nothing, exit 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys

import gpu_results

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/status.md"
sys.path.insert(0, str(ROOT / "bench"))

INTRODUCTION = f"""# Status

This page lists what was measured, when, and at which commit. `scripts/make_status.py` writes it from the results in
[bench/results](../bench/results); the other pages hold facts that do not change with each run.

FlashAttention-3 and -4 are not run beside Tessera. Their columns, and that of FlashAttention-2 where it is marked with a star, are
cuDNN's rate in the same run times their ratio to cuDNN on an H200 on {gpu_results.PEERS_DATE} ([the table](../bench/results/{gpu_results.PEERS.name})).
"""
TITLES = {
    "tessera": "Tessera", "sm80": "bwd_sm80", "best": "best peer", "cudnn": "cuDNN", "flash": "FA2", "fa2": "FA2*", "fa3": "FA3", "fa4": "FA4"
}  # fmt: skip


def run_text(machine: dict, file: str) -> str:
    return (
        f"{machine['gpu']}, {machine['date']}, commit {machine['commit']}, PyTorch {machine['pytorch']}, cuDNN "
        f"{machine['cudnn']}: [{file}](../bench/results/{file})"
    )


def sources(cells: list[dict]) -> list[str]:
    runs = {cell["file"]: cell["machine"] for cell in cells}
    return [f"- {run_text(machine, file)}" for file, machine in runs.items()]


def grid(direction: str) -> list[str]:
    cells = gpu_results.latest_cells("grid", direction)
    if not cells:
        return []
    table = gpu_results.peers()
    rows = [(cell, gpu_results.grid_row(cell, table)) for cell in cells]
    names = [name for name in TITLES if any(name in rates for _, rates in rows)]
    lines = [f"## The grid, {direction}, {cells[0]['dtype']}", "", *sources(cells), "", "TFLOP/s; 16384 tokens, 2048 / D heads.", ""]
    lines += [f"| D | mask | length | {' | '.join(TITLES[n] for n in names)} | Tessera / best peer |"]
    lines += ["|" + " --- |" * (len(names) + 4)]
    ratios = []
    for cell, rates in rows:
        ratio = rates["tessera"] / rates["best"] if "best" in rates and "tessera" in rates else None
        if ratio:
            ratios.append(ratio)
        texts = [f"{rates[n]:.0f}" if n in rates else "–" for n in names] + [f"{ratio:.2f}" if ratio else "–"]
        lines.append(f"| {cell['head_dim']} | {cell['mask']} | {cell['length']} | {' | '.join(texts)} |")
    if ratios:
        lines += ["", f"Of the best peer: geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.2f}."]
    return lines + [""]


def listed(case: str, direction: str) -> list[str]:
    from cuda_bench import tables

    cells = gpu_results.latest_cells(case, direction)
    if not cells:
        return []
    rows = tables.list_of(cells, case)[2:]
    return [f"## {case.capitalize()}, {direction}, {cells[0]['dtype']}", "", *sources(cells), "", *rows, ""]


def serving() -> list[str]:
    import serving_cells

    cells = sorted(gpu_results.latest_serving(), key=lambda cell: cell["case"])
    lines = ["## Decoding, bfloat16", "", *sources(cells), "", "Microseconds of a call in CUDA graph replays, one query a sequence; cuDNN reads dense keys.", ""]
    names = {"cudnn": "cuDNN", "decode_sm90": "dense", **{f"decode_sm90 pages of {n}": f"pages of {n}" for n in serving_cells.PAGES},
             "decode_sm90 invariant": "batch_invariant", "fa2": "FA2", "fa2 pages of 256": "FA2, pages of 256"}  # fmt: skip
    names = {name: title for name, title in names.items() if any(name in cell["us"] for cell in cells)}
    lines += [f"| heads, sequences x keys | {' | '.join(names.values())} |", "|" + " --- |" * (len(names) + 1)]
    for cell in cells:
        if cell["case"] in ("decode", "dims"):
            texts = [f"{cell['us'][name]:.1f}" if name in cell["us"] else "" for name in names]
            lines.append(f"| {cell['name'].removeprefix(cell['case'] + ' ')} | {' | '.join(texts)} |")
    lines += ["", "## A step's batch, bfloat16", "", "| cell | microseconds |", "| --- | --- |"]
    for cell in cells:
        if cell["case"] not in ("decode", "dims"):
            lines.append(f"| {cell['name']} | {', '.join(f'{name} {us:.1f}' for name, us in cell['us'].items())} |")
    lines += ["", "Targets over all these cells:", "", "| goal | target | measured | where | |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(goal.row())} |" for goal in serving_cells.goals(cells)]
    return lines + [""]


def page() -> str:
    lines = [INTRODUCTION]
    for direction in ("forward", "backward"):
        lines += grid(direction)
    for case in ("beyond", "pages", "options", "decode"):
        for direction in ("forward", "backward"):
            lines += listed(case, direction)
    lines += serving()
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        sys.exit(0 if PAGE.exists() and PAGE.read_text() == page() else f"{PAGE.name} is out of date: run scripts/make_status.py")
    PAGE.write_text(page())
