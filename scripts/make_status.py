"""Writes docs/status.md: the committed results in bench/results, with date, commit and machine of each.

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

A peer is what ran beside Tessera in the same run. A figure with a star did not run there: it is cuDNN's rate in the
run times the ratio that it had to cuDNN on an H200 on {gpu_results.PEERS_DATE}
([the table](../bench/results/{gpu_results.PEERS.name})).
"""
PEER, STARRED = "peer of the run", "starred figure"
LISTED = ("beyond", "pages", "options", "decode")
GROUPS = ((PEER, gpu_results.PEERS_OF_A_RUN), (STARRED, gpu_results.CARRIED))
ELSEWHERE = [
    "| [GPT-2 in training](../examples/gpt2), 4096 tokens, attention alone exchanged | H100 "
    "| 2.7 Transformers' eager attention, 1.02 SDPA; compiled by `torch.compile` 1.24 SDPA "
    "([all settings](reference/papers.md)) |",
    "| the same, 16384 tokens, where eager does not fit, with dropout and without | H100 | 1.07 SDPA |",
    "| [block-sparse masks](reference/kernels/block_lists.md), made from a rule, blocks of 128 × 128 | H100 "
    "| FlexAttention: 1.6 to 2.4 forward, 1.1 to 1.5 backward |",
    "| the same, blocks of 64 × 64 | H100 | FlexAttention: 1.5 to 6.9 forward, 1.4 to 3.6 backward |",
    "| forward and backward on one core, [AMX](reference/kernels/amx.md), 512 to 8192 tokens | Xeon "
    "| PyTorch: 3.4; 2.2 in the weakest of 32 cells (512 tokens, D 128) |",
]
TITLES = {
    "tessera": "Tessera", "sm80": "bwd_sm80", "cudnn": "cuDNN", "flash": "FA2", "flash4": "FA4", "fa2": "FA2*",
    "fa3": "FA3*", "fa4": "FA4*"
}  # fmt: skip


def run_text(machine: dict, file: str) -> str:
    return (
        f"{machine['gpu']}, {machine['date']}, commit {machine['commit']}, PyTorch {machine['pytorch']}, cuDNN "
        f"{machine['cudnn']}: [{file}](../bench/results/{file})"
    )


def sources(cells: list[dict]) -> list[str]:
    runs = {cell["file"]: cell["machine"] for cell in cells}
    return [f"- {run_text(machine, file)}" for file, machine in runs.items()]


def where(cell: dict) -> str:
    return f"D {cell['head_dim']}, {cell['mask']}, {cell['length']}"


def grid_ratios(direction: str) -> dict[str, dict[str, float]]:
    """For each cell of the grid, Tessera's speed relative to the best of the run's peers, and to the best starred
    figure."""
    table = gpu_results.peers()
    ratios: dict[str, dict[str, float]] = {PEER: {}, STARRED: {}}
    for cell in gpu_results.latest_cells("grid", direction):
        rates = gpu_results.grid_row(cell, table)
        for title, names in GROUPS:
            others = [rates[name] for name in names if name in rates]
            if others and "tessera" in rates:
                ratios[title][where(cell)] = rates["tessera"] / max(others)
    return ratios


def mean_and_least(ratios: dict[str, float]) -> str:
    least = min(ratios, key=ratios.__getitem__)
    mean = statistics.geometric_mean(ratios.values())
    return f"{mean:.2f}, {ratios[least]:.2f} in the weakest of {len(ratios)} cells ({least})"


def grid(direction: str) -> list[str]:
    cells = gpu_results.latest_cells("grid", direction)
    if not cells:
        return []
    table = gpu_results.peers()
    rows = [(cell, gpu_results.grid_row(cell, table)) for cell in cells]
    names = [name for name in TITLES if any(name in rates for _, rates in rows)]
    ratios = {title: of for title, of in grid_ratios(direction).items() if of}
    lines = [
        f"## The grid, {direction}, {cells[0]['dtype']}",
        "",
        *sources(cells),
        "",
        "TFLOP/s; 16384 tokens, 2048 / D heads.",
        "",
    ]
    lines += [
        f"| D | mask | length | {' | '.join(TITLES[n] for n in names)} | "
        f"{' | '.join(f'Tessera / best {title}' for title in ratios)} |"
    ]
    lines += ["|" + " --- |" * (3 + len(names) + len(ratios))]
    for cell, rates in rows:
        texts = [f"{rates[n]:.0f}" if n in rates else "–" for n in names]
        texts += [f"{of[where(cell)]:.2f}" if where(cell) in of else "–" for of in ratios.values()]
        lines.append(f"| {cell['head_dim']} | {cell['mask']} | {cell['length']} | {' | '.join(texts)} |")
    for title, of in ratios.items():
        lines += ["", f"Tessera / best {title}, geometric mean: {mean_and_least(of)}."]
    return lines + [""]


def summary() -> list[str]:
    """The ratios in one table, and the cells where they are below one."""
    lines = [
        "## In one table",
        "",
        "bfloat16, each beside its peer in the same run: times as fast, geometric means.",
        "",
    ]
    lines += ["| what | on | times as fast as |", "| --- | --- | --- |"]
    slower = []
    for direction in ("forward", "backward"):
        cells = gpu_results.latest_cells("grid", direction)
        if not cells:
            continue
        # Cells of different runs may come from different GPUs; the one of most cells first.
        gpus = [cell["machine"]["gpu"].split()[1] for cell in cells]
        gpu = ", ".join(sorted(set(gpus), key=gpus.count, reverse=True))
        for title, of in grid_ratios(direction).items():
            if not of:
                continue
            what = f"{direction}, head sizes 64, 128 and 256, up to 16384 tokens, full and causal"
            lines.append(f"| {what} | {gpu} | best {title}: {mean_and_least(of)} |")
            slower.append((f"{direction}, the grid", f"best {title}", of))
    lines += [*ELSEWHERE, ""]
    decoding = [
        cell for cell in gpu_results.latest_serving() if cell["case"] in ("decode", "dims") and "cudnn" in cell["us"]
    ]
    for what, chosen in (
        ("decoding, dense keys", lambda name: name == "decode_sm90"),
        ("decoding, keys in pages", lambda name: " pages of " in name),
    ):
        of = {
            f"{cell['name']}, {name}": cell["us"]["cudnn"] / us
            for cell in decoding
            for name, us in cell["us"].items()
            if chosen(name)
        }
        slower.append((what, "cuDNN on dense keys", of))
    for case in LISTED:
        for direction in ("forward", "backward"):
            of = {f"{cell['name']}, {TITLES[name]}": cell["seconds"][name] / cell["seconds"]["tessera"]
                  for cell in gpu_results.latest_cells(case, direction)
                  for name in gpu_results.PEERS_OF_A_RUN if name in cell["seconds"]}  # fmt: skip
            slower.append((f"{case}, {direction}", PEER, of))
    lines += ["## Where it is slower", "", "| what | than | in | the weakest |", "| --- | --- | --- | --- |"]
    for what, than, of in slower:
        below = {name: ratio for name, ratio in of.items() if ratio < 1}
        if below:
            least = min(below, key=below.__getitem__)
            lines.append(f"| {what} | {than} | {len(below)} of {len(of)} cells | {below[least]:.2f} ({least}) |")
    return [
        *lines,
        "",
        "In no other cell of the grid, of decoding and of the lists below a peer of the run is faster. On CPUs: [their "
        "page](reference/kernels/cpu.md), [AMX](reference/kernels/amx.md).",
        "",
    ]


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
    lines = [
        "## Decoding, bfloat16",
        "",
        *sources(cells),
        "",
        "Microseconds of a call in CUDA graph replays, one query a sequence; cuDNN reads dense keys.",
        "",
    ]
    names = {"cudnn": "cuDNN", "decode_sm90": "dense",
             **{f"decode_sm90 pages of {n}": f"pages of {n}" for n in serving_cells.PAGES},
             "decode_sm90 invariant": "batch_invariant", "fa2": "FA2",
             "fa2 pages of 256": "FA2, pages of 256"}  # fmt: skip
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
    lines += [
        "",
        "Targets over all these cells:",
        "",
        "| goal | target | measured | where | |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {' | '.join(goal.row())} |" for goal in serving_cells.goals(cells)]
    return lines + [""]


def page() -> str:
    lines = [INTRODUCTION, *summary()]
    for direction in ("forward", "backward"):
        lines += grid(direction)
    for case in LISTED:
        for direction in ("forward", "backward"):
            lines += listed(case, direction)
    lines += serving()
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        sys.exit(
            0
            if PAGE.exists() and PAGE.read_text() == page()
            else f"{PAGE.name} is out of date: run scripts/make_status.py"
        )
    PAGE.write_text(page())
