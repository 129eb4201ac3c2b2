"""Efficiency against the number of GPUs: measured, from the committed bench/results/<date>-<gpu>-ranks.csv, beside the
model's prediction, by the tessera program."""

from __future__ import annotations

import csv
import json
import pathlib

import matplotlib.pyplot as plt

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "bench/results"
INK, PALE = "#343a40", "#dee2e6"
LENGTHS = {32768: "#e8590c", 131072: "#0b7285", 1048576: "#862e9c"}
GPUS = [2**n for n in range(11)]
PROBLEM = ("--causal", "--dtype", "bfloat16", "-H", 32, "--kv-heads", 8, "-D", 128)  # bench/many_gpus.py's


def measured() -> tuple[dict[tuple[int, int], float], str]:
    """(rows, GPUs) -> the share of the ideal that `auto` reached, forward with backward, from the latest result of
    each number of GPUs; and which results these are."""
    shares, files = {}, {}
    for file in sorted(FOLDER.glob("*-ranks.csv")):
        for row in csv.DictReader(file.open()):
            if (row["what"], row["strategy"], row["direction"]) == ("dense", "auto", "both"):
                shares[int(row["rows"]), int(row["ranks"])] = float(row["of_ideal"])
                files[int(row["ranks"])] = f"{row['ranks']} x {row['gpu']}, {file.name[:10]}"
    return shares, "; ".join(files[ranks] for ranks in sorted(files))


def predicted(run, tessera, rows: int, gpus: int) -> tuple[float, str, str] | None:
    """The share of the ideal, forward with backward, and the strategies of both passes; None if the rows do not divide.
    Both passes divide the heads over the same number of GPUs."""
    if rows % (2 * gpus) or rows // (2 * gpus) < 128:
        return None
    ideal, passes = 0.0, []
    for direction in ("forward", "backward"):
        words = ("--sq", rows, *PROBLEM, "--ranks", gpus, "--direction", direction, "--json")
        plan = json.loads(run(tessera, "plan", *words))
        ideal += plan["ideal_us"]
        fastest = {}
        for one in plan["strategies"]:
            if one["accepted"]:
                fastest.setdefault(one["head_ranks"], []).append((one["predicted_us"], one["strategy"]))
        passes.append({count: min(times) for count, times in fastest.items()})
    count = min(set(passes[0]) & set(passes[1]), key=lambda n: passes[0][n][0] + passes[1][n][0])
    names = [f"mesh of {count}" if name == "mesh" else name for _, name in (one[count] for one in passes)]
    return ideal / sum(one[count][0] for one in passes), *names


def draw_ranks(run, tessera, out: pathlib.Path) -> None:
    shares, source = measured()
    figure, axis = plt.subplots(figsize=(7, 3.6))
    for rows, colour in LENGTHS.items():
        points = [(gpus, found[0]) for gpus in GPUS[1:] if (found := predicted(run, tessera, rows, gpus))]
        axis.plot(*zip(*points), "--", color=colour, linewidth=1.2, label=f"{rows} rows, prediction")
        points = [(1, 1.0)] + [(gpus, share) for (of, gpus), share in sorted(shares.items()) if of == rows]
        if len(points) > 1:
            axis.plot(*zip(*points), "o-", color=colour, linewidth=2, label=f"{rows} rows, measured")
    axis.set_xscale("log", base=2)
    axis.set_xticks(GPUS, [str(n) for n in GPUS])
    axis.set_ylim(0, 1.05)
    axis.set_xlabel("GPUs")
    axis.set_ylabel("share of the ideal")
    axis.grid(color=PALE)
    axis.legend(frameon=False, loc="lower left", fontsize=8)
    figure.text(
        0.5, -0.06,
        f"Forward with backward, causal, bfloat16, 32 query and 8 KV heads of 128. Measured: {source}.\n"
        "Dashed: the model alone (hosts of 8 GPUs, 237 GB/s within a host, 45 assumed between hosts).",
        ha="center", fontsize=8, color=INK,
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(out / "many_gpus.png", bbox_inches="tight")
