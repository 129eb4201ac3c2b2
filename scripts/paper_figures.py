"""Pictures of what the papers claim, from the committed bench/results/<date>-<gpu>-papers-<subject>.csv (scripts/gpu_papers.sh)."""

from __future__ import annotations

import csv
import pathlib

import matplotlib.pyplot as plt

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "bench/results"
INK, PALE = "#343a40", "#dee2e6"
WAYS = {  # of computing attention: title, colour, mark
    "tessera": ("Tessera", "#0b7285", "o"),
    "fa1": ("first algorithm", "#862e9c", "d"),
    "standard": ("standard attention", "#e8590c", "s"),
    "eager": ("PyTorch, eager", "#868e96", "v"),
    "sdpa": ("PyTorch, SDPA", "#495057", "^"),
}


def latest(subject: str) -> tuple[list[dict], str]:
    """The rows of the last result, and its date and GPU in words; nothing where none is committed."""
    files = sorted(FOLDER.glob(f"*-papers-{subject}.csv"))
    if not files:
        return [], ""
    date, gpu = files[-1].name[:10], files[-1].name[11:].split("-papers-")[0].upper()
    with files[-1].open() as file:
        return list(csv.DictReader(file)), f"{gpu}, {date}"


def _log_lengths(axis, lengths):
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
    axis.set_xlabel("tokens of one sequence")
    axis.grid(color=PALE)


def draw_lengths(out: pathlib.Path) -> None:
    """Time and memory over the length, until nothing but Tessera fits."""
    rows, where = latest("lengths")
    if not rows:
        return
    lengths = sorted({int(row["length"]) for row in rows})
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6))
    columns = (("forward", "ms", "forward, ms"), ("backward", "ms", "backward, ms"),
               ("backward", "extra_mib", "backward, MiB beyond inputs and outputs"))  # fmt: skip
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
    figure.text(0.5, -0.04, f"one sequence, {first['heads']} heads, D {first['head_dim']}, full, bfloat16, {where}. Where a line ends, "
                "the next length did not fit or was refused.", ha="center", fontsize=8, color=INK)  # fmt: skip
    figure.tight_layout()
    figure.savefig(out / "papers_lengths.png")


def draw_traffic(out: pathlib.Path) -> None:
    """Bytes that the hardware counted and time, GPT-2 medium's shape; and over the first algorithm's block size."""
    traffic, where = latest("traffic")
    speed, _ = latest("speed")
    blocks, _ = latest("blocks")
    if not (traffic and speed and blocks):
        return
    bytes_of: dict[tuple, float] = {}
    for row in traffic:
        key = (row["direction"], row["contestant"], int(row["block_n"]))
        bytes_of[key] = bytes_of.get(key, 0) + (float(row["read_mib"]) + float(row["written_mib"])) / 1024
    shape = {key: blocks[0][key] for key in ("batch", "heads", "length", "head_dim")}
    time_of = {(row["direction"], row["contestant"]): float(row["ms"]) for row in speed
               if row["ms"] and row["causal"] == "False" and row["mask"] == "False" and row["dropout"] == "0.0"
               and all(row[key] == value for key, value in shape.items())}  # fmt: skip
    names = [name for name in ("standard", "fa1", "tessera") if ("forward", name) in time_of]
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    for axis, what, title in ((axes[0], lambda d, n: bytes_of[d, n, 0], "memory traffic, GiB"),
                              (axes[1], lambda d, n: time_of[d, n], "time, ms")):  # fmt: skip
        for at, direction in enumerate(("forward", "backward")):
            for n, name in enumerate(names):
                value = what(direction, name)
                axis.bar(at + (n - 1) * 0.27, value, 0.25, color=WAYS[name][1], label=WAYS[name][0] if at == 0 else None)
                axis.text(at + (n - 1) * 0.27, value, f"{value:.3g}", ha="center", va="bottom", fontsize=8)
        axis.set_xticks((0, 1), ("forward", "backward"))
        axis.set_title(title)
    axes[0].set_ylim(top=axes[0].get_ylim()[1] * 1.3)
    axes[0].legend(frameon=False, fontsize=8)
    axis, keys = axes[2], [int(row["block_n"]) for row in blocks]
    axis.plot(keys, [float(row["ms"]) for row in blocks], "d-", color=WAYS["fa1"][1], label="time, ms")
    axis.plot(keys, [bytes_of["forward", "fa1", key] for key in keys], "d--", color=INK, label="memory traffic, GiB")
    axis.set_xscale("log", base=2)
    axis.set_xticks(keys, keys)
    axis.set_ylim(bottom=0)
    axis.set_title("first algorithm over its block's keys")
    axis.legend(frameon=False, fontsize=8)
    figure.text(0.5, -0.04, f"N {shape['length']}, D {shape['head_dim']}, {shape['heads']} heads, batch {shape['batch']}, full, bfloat16, "
                f"{where}; traffic by the hardware's counters", ha="center", fontsize=8, color=INK)  # fmt: skip
    figure.tight_layout()
    figure.savefig(out / "papers_traffic.png")


def draw_gpt2(out: pathlib.Path) -> None:
    """Tokens a second of each length, and the losses."""
    rows, where = latest("gpt2")
    if not rows:
        return
    runs: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        runs.setdefault((int(row["length"]), float(row["dropout"])), {}).setdefault(row["attention"], []).append(row)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
    for at, ((length, dropout), of) in enumerate(sorted(runs.items())):
        for n, name in enumerate(("eager", "sdpa", "tessera")):
            if name in of:
                value = float(of[name][0]["tokens_per_s"]) / 1000
                axes[0].bar(at + (n - 1) * 0.27, value, 0.25, color=WAYS[name][1], label=WAYS[name][0] if at == 0 else None)
                axes[0].text(at + (n - 1) * 0.27, value, f"{value:.0f}", ha="center", va="bottom", fontsize=8)
    axes[0].set_xticks(range(len(runs)), [f"{length} tokens\ndropout {dropout:g}" for length, dropout in sorted(runs)], fontsize=8)
    axes[0].set_title("thousand tokens a second")
    axes[0].legend(frameon=False, fontsize=8, ncol=3)
    axes[0].set_ylim(top=axes[0].get_ylim()[1] * 1.15)
    longest = max(runs)
    for name, of in runs[longest].items():
        axes[1].plot([int(row["step"]) for row in of], [float(row["loss"]) for row in of], color=WAYS[name][1],
                     label=WAYS[name][0], linestyle="--" if name == "tessera" else "-")  # fmt: skip
    axes[1].set_title(f"loss over steps, {longest[0]} tokens, dropout {longest[1]:g}")
    axes[1].legend(frameon=False, fontsize=8)
    figure.text(0.5, -0.04, f"GPT-2 {rows[0]['model']}, Transformers' own model, attention alone exchanged, {where}", ha="center",
                fontsize=8, color=INK)  # fmt: skip
    figure.tight_layout()
    figure.savefig(out / "papers_gpt2.png")
