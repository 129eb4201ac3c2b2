"""Charts of the papers' claims, from the committed bench/results/<date>-<gpu>-papers-<subject>.csv
(scripts/gpu_papers.sh)."""

from __future__ import annotations

import csv
import pathlib

import matplotlib.pyplot as plt

plt.rcParams["savefig.bbox"] = "tight"  # the picture includes the text below the axes
FOLDER = pathlib.Path(__file__).resolve().parent.parent / "bench/results"
INK, PALE = "#343a40", "#dee2e6"
WAYS = {  # of computing attention: title, colour, marker
    "tessera": ("Tessera", "#0b7285", "o"),
    "fa1": ("first algorithm", "#862e9c", "d"),
    "standard": ("standard attention", "#e8590c", "s"),
    "eager": ("PyTorch, eager", "#868e96", "v"),
    "sdpa": ("PyTorch, SDPA", "#495057", "^"),
}


def latest(subject: str) -> tuple[list[dict], str]:
    """The rows of the latest result, and its date and GPU as text; empty if none is committed."""
    files = sorted(FOLDER.glob(f"*-papers-{subject}.csv"))
    if not files:
        return [], ""
    date, gpu = files[-1].name[:10], files[-1].name[11:].split("-papers-")[0].upper()
    with files[-1].open() as file:
        return list(csv.DictReader(file)), f"{gpu}, {date}"


def _log_lengths(axis, lengths):
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    shown = [n for n in lengths if n // 1024 not in (32, 128)]  # labels of all lengths would collide
    axis.set_xticks(shown, [f"{n // 1024}k" for n in shown])
    axis.set_xticks(lengths, minor=True, labels=[])
    axis.set_xlabel("tokens of one sequence")
    axis.grid(color=PALE)


def draw_lengths(out: pathlib.Path) -> None:
    """Time and memory over the length, up to where only Tessera fits."""
    rows, where = latest("lengths")
    if not rows:
        return
    lengths = sorted({int(row["length"]) for row in rows})
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6))
    columns = (("forward", "ms", "forward, ms"), ("backward", "ms", "backward, ms"),
               ("backward", "extra_mib", "backward, extra memory in MiB"))  # fmt: skip
    for axis, (direction, column, title) in zip(axes, columns):
        for name, (label, colour, mark) in WAYS.items():
            points = [(int(row["length"]), float(row[column])) for row in rows
                      if (row["contestant"], row["direction"]) == (name, direction) and row["ms"]]  # fmt: skip
            if points:
                axis.plot(*zip(*points), mark + "-", color=colour, label=label, markersize=5)
        _log_lengths(axis, lengths)
        axis.set_title(title)
    axes[0].legend(frameon=False, fontsize=8)
    first = rows[0]
    figure.text(0.5, -0.04, f"one sequence, {first['heads']} heads, D {first['head_dim']}, full, bfloat16, {where}. "
                            "Extra: beyond inputs and "
                "outputs. Where a line ends, the next length did not fit or was refused.", ha="center", fontsize=8,
                color=INK)  # fmt: skip
    figure.tight_layout()
    figure.savefig(out / "papers_lengths.png")


def draw_traffic(out: pathlib.Path) -> None:
    """Bytes and time counted by the hardware, for GPT-2 medium's shape; and over the first algorithm's block size."""
    rows, where = latest("traffic")
    if not rows:
        return
    gib: dict[tuple, float] = {}
    ms: dict[tuple, float] = {}
    for row in rows:
        key = (row["direction"], row["contestant"], int(row["block_n"]))
        gib[key] = gib.get(key, 0) + (float(row["read_mib"]) + float(row["written_mib"])) / 1024
        ms[key] = ms.get(key, 0) + float(row["us"]) / 1000
    names = ("standard", "fa1", "tessera")
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    for axis, of, title in ((axes[0], gib, "memory traffic, GiB"), (axes[1], ms, "time under the profiler, ms")):
        for at, direction in enumerate(("forward", "backward")):
            for n, name in enumerate(names):
                value = of[direction, name, 0]
                axis.bar(
                    at + (n - 1) * 0.27, value, 0.25, color=WAYS[name][1], label=WAYS[name][0] if at == 0 else None
                )
                axis.text(at + (n - 1) * 0.27, value, f"{value:.3g}", ha="center", va="bottom", fontsize=8)
        axis.set_xticks((0, 1), ("forward", "backward"))
        axis.set_title(title)
    axes[0].set_ylim(top=axes[0].get_ylim()[1] * 1.3)
    axes[0].legend(frameon=False, fontsize=8)
    axis, keys = axes[2], sorted(key for _, _, key in gib if key)
    axis.plot(keys, [gib["forward", "fa1", key] for key in keys], "d--", color=INK, label="memory traffic, GiB")
    axis.plot(keys, [ms["forward", "fa1", key] for key in keys], "d-", color=WAYS["fa1"][1], label="time, ms")
    axis.set_xscale("log", base=2)
    axis.set_xticks(keys, keys)
    axis.set_ylim(bottom=0)
    axis.set_title("first algorithm, over a block's keys")
    axis.legend(frameon=False, fontsize=8)
    figure.text(0.5, -0.04, f"GPT-2 medium's attention: N 1024, D 64, 16 heads, batch 64, full, bfloat16, {where}; "
                "by the hardware's counters. On the right forward alone",
                ha="center", fontsize=8, color=INK)  # fmt: skip
    figure.tight_layout()
    figure.savefig(out / "papers_traffic.png")


def draw_gpt2(out: pathlib.Path) -> None:
    """Tokens a second of each setting, and the losses."""
    rows, where = latest("gpt2")
    if not rows:
        return
    runs: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        if row["compiled"] == "False":
            key = (row["model"] != "small", float(row["dropout"]), int(row["length"]), row["model"], int(row["batch"]))
            runs.setdefault(key, {}).setdefault(row["attention"], []).append(row)
    figure, axes = plt.subplots(1, 2, figsize=(12, 3.6), width_ratios=(2.2, 1))
    for at, (_, of) in enumerate(sorted(runs.items())):
        for n, name in enumerate(("eager", "sdpa", "tessera")):
            label = WAYS[name][0] if at == 0 else None
            if name not in of:
                axes[0].text(
                    at + (n - 1) * 0.28, 0, "does not fit", rotation=90, ha="center", va="bottom", fontsize=7, color=INK
                )
                continue
            value = float(of[name][0]["tokens_per_s"]) / 1000
            axes[0].bar(at + (n - 1) * 0.28, value, 0.26, color=WAYS[name][1], label=label)
            axes[0].text(at + (n - 1) * 0.28, value, f"{value:.0f}", ha="center", va="bottom", fontsize=7)
    words = [
        f"{model}\n{length // 1024}k × {batch}\ndropout {dropout:g}"
        for _, dropout, length, model, batch in sorted(runs)
    ]
    axes[0].set_xticks(range(len(runs)), words, fontsize=7)
    axes[0].set_title("thousand tokens a second, training")
    axes[0].legend(frameon=False, fontsize=8, ncol=3)
    axes[0].set_ylim(top=axes[0].get_ylim()[1] * 1.15)
    longest = max((key for key in runs if len(runs[key]) == 3), key=lambda key: (key[2], -key[1]))
    for name, of in runs[longest].items():
        axes[1].plot([int(row["step"]) for row in of], [float(row["loss"]) for row in of], color=WAYS[name][1],
                     label=WAYS[name][0], linestyle="--" if name == "tessera" else "-")  # fmt: skip
    axes[1].set_title(f"loss over steps, {longest[3]}, {longest[2] // 1024}k tokens")
    axes[1].legend(frameon=False, fontsize=8)
    figure.text(0.5, -0.08, "GPT-2, Transformers' own model in bfloat16, attention alone exchanged, "
                            f"{where}", ha="center", fontsize=8,
                color=INK)  # fmt: skip
    figure.tight_layout()
    figure.savefig(out / "papers_gpt2.png")


def draw_sparse(out: pathlib.Path) -> None:
    """Time over the fraction of visible pairs, beside FlexAttention, for blocks of 128 and of 64."""
    rows, where = latest("sparse")
    small, _ = latest("sparse-64")
    if not rows:
        return
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
    for axis, direction in zip(axes, ("forward", "backward")):
        for table, line in ((rows, "-"), (small, "--")):
            of = sorted((row for row in table if row["direction"] == direction), key=lambda row: float(row["share"]))
            for column, label, name, mark in (
                ("tessera_ms", "Tessera", "tessera", "o"),
                ("flex_ms", "FlexAttention", "standard", "s"),
            ):
                points = [(float(row["share"]), float(row[column])) for row in of if row[column]]
                if points:
                    axis.plot(*zip(*points), mark + line, color=WAYS[name][1], label=f"{label}, {of[0]['block']} × "
                                                                                     f"{of[0]['block']}",
                              markersize=5 if line == "-" else 3)  # fmt: skip
        axis.axhline(float(next(row["dense_ms"] for row in rows if row["direction"] == direction)), color=INK,
                     linestyle=":",
                     label="Tessera, no mask")  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks([1 / n for n in (32, 16, 8, 4, 2, 1)], ["1/32", "1/16", "1/8", "1/4", "1/2", "all"])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(f"{direction}, ms over the share that is visible")
        axis.grid(color=PALE)
    axes[0].legend(frameon=False, fontsize=7)
    first = rows[0]
    figure.text(0.5, -0.04, f"N {first['length']}, D {first['head_dim']}, {first['heads']} heads, bfloat16, {where}: "
                            "random, local + global, butterfly, all",
                ha="center", fontsize=8, color=INK)  # fmt: skip
    figure.tight_layout()
    figure.savefig(out / "papers_sparse.png")
