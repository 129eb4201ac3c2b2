"""Makes the pictures in docs/images from the output and measurements of the tessera program, and from bench/results.

    make docs        or        python scripts/make_figures.py --tessera build/release/cli/tessera --out docs/images
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import gpu_results
import paper_figures
import ranks_figure

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python/tessera/compare"))
import plot  # only this file: the package need not be built

INK, PALE = "#343a40", "#dee2e6"
TESSERA, STANDARD = (plot.SIDES[side][1] for side in ("tessera", "standard"))
plt.rcParams.update({
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK,
    "axes.titlesize": 11, "axes.titlelocation": "left", "figure.dpi": 150, "savefig.bbox": "tight",
})


def run(tessera, *arguments):
    command = [str(tessera), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


# ---- tiles ----------------------------------------------------------------------------------------------------------

EMPTY, EDGE, FULL = 0, 1, 2


def classify_tiles(length, block_m, block_n, causal, window_left):
    """A kernel's work for each (query tile, key block): none, with a mask on every entry, or without a mask."""
    rows = -(-length // block_m)
    cols = -(-length // block_n)
    kinds = np.empty((rows, cols), dtype=int)
    for tile in range(rows):
        query = np.arange(tile * block_m, min(length, (tile + 1) * block_m))[:, None]
        for block in range(cols):
            key = np.arange(block * block_n, min(length, (block + 1) * block_n))[None, :]
            visible = np.ones((query.size, key.size), dtype=bool)
            if causal:
                visible &= key <= query
            if window_left >= 0:
                visible &= key >= query - window_left
            kinds[tile, block] = FULL if visible.all() else EDGE if visible.any() else EMPTY
    return kinds


def draw_tiles(tessera, out):
    length, window = 1536, 511
    plan = json.loads(run(tessera, "plan", "--sq", length, "-H", 1, "-D", 128, "--causal", "--json"))
    block_m, block_n = plan["steps"][0]["block_m"], plan["steps"][0]["block_n"]
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.9), sharey=True)
    cases = [("full", False, -1), ("causal", True, -1), (f"window of {window + 1}", True, window)]
    for axis, (title, causal, window_left) in zip(axes, cases):
        kinds = classify_tiles(length, block_m, block_n, causal, window_left)
        axis.pcolormesh(np.arange(kinds.shape[1] + 1), np.arange(kinds.shape[0] + 1), kinds, vmin=0, vmax=2,
                        cmap=ListedColormap(["#ffffff", "#74c0cf", TESSERA]), edgecolors=PALE, linewidth=0.6)
        axis.invert_yaxis()
        axis.set_title(f"{title}: {np.count_nonzero(kinds)} of {kinds.size} tiles")
        axis.set_xlabel(f"blocks of {block_n} keys")
        axis.set_xticks(range(0, kinds.shape[1] + 1, 4))
        axis.set_yticks(range(0, kinds.shape[0] + 1, 8))
    axes[0].set_ylabel(f"tiles of {block_m} queries")
    figure.legend(handles=[Patch(facecolor=TESSERA, label="all visible: nothing is compared"),
                           Patch(facecolor="#74c0cf", label="on the edge: every entry is compared"),
                           Patch(facecolor="white", edgecolor=INK, label="nothing visible: never visited")],
                  loc="lower center", bbox_to_anchor=(0.5, -0.13), ncol=3, frameon=False)
    figure.savefig(out / "tiles.png")


# ---- the online softmax ---------------------------------------------------------------------------------------------

def online_softmax(scores, block):
    """The running maximum and sum after each block of keys."""
    maximum, total, history = -np.inf, 0.0, []
    for first in range(0, len(scores), block):
        tile = scores[first:first + block]
        new_maximum = max(maximum, tile.max())
        total = np.exp(maximum - new_maximum) * total + np.exp(tile - new_maximum).sum()
        maximum = new_maximum
        history.append((maximum, total))
    return np.array(history).T


def draw_online_softmax(tessera, out):
    length, head_dim, block = 512, 64, 32
    rng = np.random.default_rng(3)
    # Scores three times as wide as those of normal q and k: attention that prefers some keys.
    q, k, v = (width * rng.standard_normal((1, length, 1, head_dim)).astype(np.float32) for width in (3, 1, 1))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for letter, array in zip("qkv", (q, k, v)):
            np.save(folder / f"{letter}.npy", array)
        run(tessera, "run", *(folder / f"{letter}.npy" for letter in "qkv"), "-o", folder / "o.npy", "--lse",
            folder / "lse.npy")
        all_lse = np.load(folder / "lse.npy")[0, 0]

    all_scores = (q[0, :, 0].astype(float) @ k[0, :, 0].T) / np.sqrt(head_dim)
    row = max(range(length), key=lambda i: len(set(online_softmax(all_scores[i], block)[0])))  # the most rises
    scores, lse = all_scores[row], all_lse[row]
    maxima, sums = online_softmax(scores, block)
    running = maxima + np.log(sums)
    ends = np.arange(block, length + 1, block)
    if abs(running[-1] - lse) > 1e-5 * abs(lse):
        raise SystemExit(f"the running sum ends at {running[-1]}, not at the LSE that tessera wrote, {lse}")

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5.2), sharex=True, height_ratios=[3, 2])
    top.plot(scores, ".", color="#adb5bd", markersize=3, label="scores of the row")
    top.step(ends, maxima, where="post", color=STANDARD, label="running maximum m")
    top.plot(ends, running, "o-", color=TESSERA, markersize=4, label="running m + log ℓ")
    top.axhline(lse, color=INK, linewidth=0.8, linestyle="--", label=f"LSE that tessera wrote: {lse:.4f}")
    top.set_title(f"Row {row} of attention over {length} keys, in blocks of {block}")
    top.legend(frameon=False, fontsize=8, loc="lower center", ncol=4, columnspacing=1.0, handlelength=1.2)
    top.set_ylim(scores.min() - 0.25 * (lse - scores.min()), lse + 1)
    bottom.bar(ends - block / 2, sums, width=block * 0.85, color=TESSERA)
    bottom.set_ylabel("running sum ℓ")
    bottom.set_xlabel("keys seen; the sum shrinks where a new maximum rescales it")
    figure.savefig(out / "online_softmax.png")


# ---- score programs -------------------------------------------------------------------------------------------------

GUIDE = pathlib.Path(__file__).resolve().parent.parent / "docs/guide/score-programs.md"
RAMP = ("soft cap", "learned temperature")  # recipes that need scores of their own


def recipes():
    """(name, score, mask) of the guide's table."""
    table = GUIDE.read_text().split("## Recipes")[1].split("\n\n")[1]
    for line in table.splitlines()[2:]:
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").replace("\\|", "\0").split("|")]
        yield tuple(cell.replace("\0", "|") for cell in cells)


def draw_score_programs(tessera, out):
    length = 512
    rng = np.random.default_rng(1)
    bound = {
        "slope": np.float32([0.05]), "bias": rng.standard_normal((1, 2 * length)).astype(np.float32),
        "temperature": np.float32([0.4]), "doc": np.repeat(np.arange(6), [60, 130, 40, 150, 90, 42])[None],
        "prefix": np.array([150]), "w": 16,
    }
    figure, axes = plt.subplots(2, 5, figsize=(11, 4.9), sharex=True, sharey=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        one = np.ones((1, length, 1, 1), np.float64)
        ramp = np.linspace(-150, 150, length).reshape(one.shape)
        # P is o where V is the identity; P's logarithm and the LSE give the score.
        for file, array in {"one": one, "zero": 0 * one, "ramp": ramp, "v": np.eye(length)[None, :, None]}.items():
            np.save(folder / f"{file}.npy", array)
        for key, value in bound.items():
            if not isinstance(value, int):
                np.save(folder / f"{key}.npy", value)
        for axis, (title, score, mask) in zip(axes.flat, recipes(), strict=True):
            used = [key for key in bound if re.search(rf"\b{key}\b", score + mask)]
            flags = ["--score-mod", score or "s"] + (["--mask-mod", mask] if mask else [])
            if used:
                flags += ["--bind", *(f"{key}={bound[key] if key == 'w' else folder / (key + '.npy')}" for key in used)]
            run(tessera, "run", folder / "one.npy", folder / ("ramp.npy" if title in RAMP else "zero.npy"),
                folder / "v.npy", "-o", folder / "o.npy", "--lse", folder / "lse.npy", "--dtype", "float64", *flags)
            p, lse = np.load(folder / "o.npy")[0, :, 0], np.load(folder / "lse.npy")[0, 0]
            with np.errstate(divide="ignore"):
                scores = np.where(p > 0, np.log(p) + lse[:, None], np.nan)
            flat = np.nanmin(scores) > np.nanmax(scores) - 1e-3  # a mask alone
            axis.imshow(np.where(flat, scores * 0, scores), cmap=ListedColormap([TESSERA]) if flat else "viridis",
                        interpolation="hanning", interpolation_stage="rgba")
            axis.set_title(title, fontsize=10)
            axis.set_xticks([0, 256, 511])
            axis.set_yticks([0, 256, 511])
    figure.supxlabel("keys", fontsize=10)
    figure.supylabel("queries", fontsize=10)
    figure.tight_layout()
    figure.savefig(out / "score_programs.png", dpi=110)


# ---- time and memory over length ------------------------------------------------------------------------------------

def draw_compare(tessera, out):
    # On the CPU, where the program can also run standard attention.
    with tempfile.TemporaryDirectory() as name:
        report = pathlib.Path(name) / "compare.json"
        run(tessera, "compare", "--device", "cpu", "--dtype", "bfloat16", "--causal", "-D", 128,
            "--lengths", "1024,2048,4096,8192", "--report", report)
        plot.draw_report(str(report), str(out / "compare.png"))


# ---- the GPU's grid -------------------------------------------------------------------------------------------------

# Measured in one run, and converted by a dated ratio.
SERIES = {
    "tessera": ("Tessera", TESSERA, "o-", 2.2),
    "cudnn": ("cuDNN", "#495057", "s-", 1.2),
    "flash": ("FlashAttention-2", "#adb5bd", "v-", 1.2),
    "flash4": ("FlashAttention-4", "#862e9c", "d-", 1.2),
    "fa2": ("FlashAttention-2*", "#adb5bd", "v--", 1.2),
    "fa3": ("FlashAttention-3*", STANDARD, "^--", 1.2),
    "fa4": ("FlashAttention-4*", "#862e9c", "d--", 1.2),
}


def draw_grid(direction, out):
    """TFLOP/s over length for each head size and mask, from the committed results."""
    cells = gpu_results.latest_cells("grid", direction)
    if not cells:
        return
    table = gpu_results.peers()
    head_dims = sorted({cell["head_dim"] for cell in cells})
    figure, axes = plt.subplots(2, len(head_dims), figsize=(10, 5.6), sharex=True, sharey=True, squeeze=False)
    for row, mask in enumerate(("full", "causal")):
        for axis, head_dim in zip(axes[row], head_dims):
            chosen = sorted(
                (c for c in cells if (c["head_dim"], c["mask"]) == (head_dim, mask)), key=lambda c: c["length"]
            )
            for name, (title, colour, style, width) in SERIES.items():
                points = [(c["length"], gpu_results.grid_row(c, table).get(name)) for c in chosen]
                points = [(length, value) for length, value in points if value]
                if points:
                    axis.plot(*zip(*points), style, color=colour, label=title, linewidth=width, markersize=4)
            axis.set_xscale("log", base=2)
            axis.set_xticks([c["length"] for c in chosen], [f"{c['length']}" for c in chosen], fontsize=8)
            axis.set_title(f"head size {head_dim}, {mask}")
            axis.grid(axis="y", color=PALE)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    axes[0, 0].set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("tokens a sequence")
    machine = cells[-1]["machine"]
    peers = " and ".join(SERIES[name][0] for name in gpu_results.PEERS_OF_A_RUN
                         if any(name in c["seconds"] for c in cells))  # fmt: skip
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper center", ncol=len(SERIES), frameon=False,
                  bbox_to_anchor=(0.5, 1.0))
    figure.text(
        0.5,
        -0.03,
        f"{direction}, {cells[0]['dtype']}, {machine['gpu']}, {machine['date']}; {peers} in the same run. "
        f"* cuDNN times its ratio of {gpu_results.PEERS_DATE}", ha="center", fontsize=8, color=INK,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(out / f"gpu_{direction}.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tessera", type=pathlib.Path, required=True, help="the tessera program")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the pictures")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for draw in (draw_tiles, draw_online_softmax, draw_score_programs, draw_compare):
        draw(arguments.tessera, arguments.out)
        plt.close("all")
    for direction in ("forward", "backward"):
        draw_grid(direction, arguments.out)
        plt.close("all")
    for draw in (
        paper_figures.draw_lengths, paper_figures.draw_traffic, paper_figures.draw_gpt2, paper_figures.draw_sparse,
    ):  # fmt: skip
        draw(arguments.out)
        plt.close("all")
    ranks_figure.draw_ranks(run, arguments.tessera, arguments.out)


if __name__ == "__main__":
    main()
