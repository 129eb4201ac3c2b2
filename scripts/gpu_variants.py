#!/usr/bin/env python3
"""Compares this tree with variants of its kernels on one GPU: which is faster, and by more than the noise of runs?

    scripts/gpu_variants.py FOLDER ... [--rounds 3] [-- OPTION ...]
    scripts/gpu_variants.py build/q_in_registers -- --head-dims 128 --lead-ms 100 --measure-ms 100

A variant is a folder of files that replace those in kernels/ (tessera/fwd_sm90/kernel.cuh). The options are those of
bench/cuda_against_pytorch.py, after --direction forward --contestants tessera cudnn. Every tree is built
(scripts/gpu_python.sh) and compiles its kernels in parallel with the others. Then the trees are measured alternately,
each round in the opposite order; the first round compares results with float64. Prints by what factor a variant is
faster than this tree, per cell and overall, and the results of every run, whose spread is the noise. Two trees, three
rounds of 12 cells: three minutes, one and a half of them for 100 ms.

Writes JSON files and logs to $OUT, otherwise to build/variants/logs. Exit status 1: a result was wrong, or a run
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
from cuda_bench.tables import RATIOS, ratio  # noqa: E402

TREES = ROOT / "build/variants"
HERE = "this tree"


def replaced(variant: Path, kernels: Path) -> list[Path]:
    """The files of a tree's kernels/ that a variant replaces."""
    if not variant.is_dir():
        raise SystemExit(f"{variant}: no such folder")
    files = [path.relative_to(variant) for path in sorted(variant.rglob("*")) if path.is_file()]
    if not files:
        raise SystemExit(f"{variant}: has no files")
    for file in files:
        if not (kernels / file).is_file():
            raise SystemExit(f"{variant}: {file} takes the place of nothing in kernels/")
    return files


def overlay(variant: Path, kernels: Path) -> None:
    """Copies a variant's files into a tree's kernels/."""
    for file in replaced(variant, kernels):
        shutil.copy(variant / file, kernels / file)


def copy_of_tree(name: str) -> Path:
    tree = TREES / name
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns("build", "out", ".git"))
    return tree


def speed(cell: dict) -> float:
    """The ratio to a peer if one was measured, which cancels changes of the machine; otherwise 1 / seconds."""
    against = [found for pair in RATIOS if (found := ratio(cell, *pair)) is not None]
    return against[0] if against else 1 / min(cell["seconds"].values())


def summary(runs: dict[str, list[list[dict]]]) -> str:
    """The table of ratios from each tree's runs, which are lists of the same cells."""
    speeds = {tree: [[speed(cell) for cell in run] for run in of_tree] for tree, of_tree in runs.items()}
    variants = [tree for tree in runs if tree != HERE]

    def mean(tree: str, cells: slice) -> float:
        return geometric_mean([one for run in speeds[tree] for one in run[cells]])

    lines = [f"{'times as fast as this tree':<44}" + "".join(f"{tree:>16}" for tree in variants)]
    rows = [(cell["name"], slice(index, index + 1)) for index, cell in enumerate(runs[HERE][0])]
    for name, cells in [*rows, ("all", slice(None))]:
        gains = (mean(tree, cells) / mean(HERE, cells) for tree in variants)
        lines.append(f"{name:<44}" + "".join(f"{gain:16.4f}" for gain in gains))
    for tree, of_tree in speeds.items():
        means = ", ".join(f"{geometric_mean(run):.4g}" for run in of_tree)
        lines.append(f"{tree}, each run by itself, over the peer or 1 / seconds: {means}")
    return "\n".join(lines)


def main() -> int:
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(sys.argv[1:cut])
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds}, accepted 1 or more")
    names = [variant.name for variant in options.variants]
    if len({*names, "logs"}) <= len(names):
        parser.error(f"FOLDER: {', '.join(names)}, accepted names that differ, none of them logs")
    for variant in options.variants:
        replaced(variant, ROOT / "kernels")
    bench = ["--direction", "forward", "--contestants", "tessera", "cudnn", *sys.argv[cut + 1 :]]
    logs = Path(os.environ.get("OUT", TREES / "logs"))
    logs.mkdir(parents=True, exist_ok=True)

    trees = {HERE: ROOT}
    for variant in options.variants:
        trees[variant.name] = copy_of_tree(variant.name)
        overlay(variant, trees[variant.name] / "kernels")

    def build(tree: Path) -> str:
        done = subprocess.run([tree / "scripts/gpu_python.sh"], stdout=subprocess.PIPE, check=True, text=True)
        return done.stdout.strip()

    with ThreadPoolExecutor() as pool:
        paths = dict(zip(trees, pool.map(build, trees.values())))

    def run(name: str, label: str, *flags: str) -> list[dict]:
        results = logs / f"{name.replace(' ', '-')}.{label}.json"
        environment = os.environ | {"PYTHONPATH": paths[name], "TESSERA_CACHE_DIR": str(TREES / f"{name}.cache")}
        with open(results.with_suffix(".log"), "w", encoding="utf-8") as log:
            command = [sys.executable, ROOT / "bench/cuda_against_pytorch.py", *bench, "--json", results, *flags]
            status = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
        if status:
            raise SystemExit(f"{name}: status {status}, {log.name}")
        return json.loads(results.read_text(encoding="utf-8"))["cells"]

    quick = ("--no-check", "--lead-ms", "0", "--measure-ms", "1", "--rounds", "1")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: run(name, "compiles", *quick), trees))
    runs: dict[str, list[list[dict]]] = {name: [] for name in trees}
    for number in range(options.rounds):
        for name in list(trees)[:: -1 if number % 2 else 1]:
            runs[name].append(run(name, str(number), *(["--no-check"] if number else [])))
    print(summary(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
