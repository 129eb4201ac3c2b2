"""Makes docs/explore/data.js, the data of the page docs/explore/index.html, from `tessera trace --json` and, if
Chromium is installed, the page's picture, docs/images/explore.png.

    make explore        or        python scripts/make_explore.py --tessera build/release/cli/tessera
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA, PICTURE = ROOT / "docs/explore/data.js", ROOT / "docs/images/explore.png"
PICTURED = "1024/64/128/64/causal/24"  # a step in the middle
PREFIX = "// Made by `make explore` from `tessera trace --json`.\nwindow.TESSERA_TRACES = "

LENGTHS, HEAD_DIMS = (256, 512, 1024), (64, 128)
BLOCK_MS, BLOCK_NS = (32, 64, 128, 256), (32, 64, 128)
MASKS = {"full": (), "causal": ("--causal",), "window": ("--causal", "--window", "{quarter}", "-1")}
# Rows in the upper half of the sequence whose maximum moves several times.
ROWS = {(256, 64): 172, (256, 128): 164, (512, 64): 335, (512, 128): 365, (1024, 64): 634, (1024, 128): 658}
SHARPNESS = 2  # times 1 / sqrt(D): scores as wide as those of a head with distinct attention
LEVELS = ("registers", "shared_memory", "l2", "hbm")


def configurations():
    """Each key of the page's data, and the options of tessera trace that produce it."""
    for length, head_dim, block_m, block_n, mask in itertools.product(LENGTHS, HEAD_DIMS, BLOCK_MS, BLOCK_NS, MASKS):
        flags = [flag.format(quarter=length // 4 - 1) for flag in MASKS[mask]]
        yield f"{length}/{head_dim}/{block_m}/{block_n}/{mask}", [
            "--length", length, "-D", head_dim, "--block-m", block_m, "--block-n", block_n, *flags,
            "--row", ROWS[length, head_dim], "--scale", SHARPNESS / head_dim**0.5,
        ]  # fmt: skip


def trace(tessera, options):
    command = [str(tessera), "trace", *map(str, options), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def significant(value, digits=7):
    return None if value is None else float(f"{value:.{digits}g}")


def flat(by_level):
    """[registers read, written, shared memory read, ...]"""
    return [by_level[level][way] for level in LEVELS for way in ("read", "written")]


def compact(traced):
    """A trace in the page's format. Steps of one kind that move the same bytes share a row of `moves`: `tiles` has a
    letter for each tile in order, "." if it is skipped."""
    moves, tiles = [], ""
    for step in traced["steps"]:
        if step["kind"] == "skipped":
            tiles += "."
            continue
        move = [step["kind"], *flat(step["bytes"])]
        if move not in moves:
            moves.append(move)
        tiles += chr(ord("A") + moves.index(move))
    rows = [step["row"] for step in traced["steps"] if "row" in step]
    return {
        "tiles": tiles,
        "moves": moves,
        "steps": [[*(significant(row[name]) for name in ("m", "l", "lse", "o_norm")), significant(row["distance"], 3),
                   *map(significant, row["o"])] for row in rows],
        "row": traced["row"]["index"],
        "exact": [significant(traced["row"]["exact_lse"]), *map(significant,
                                                                traced["row"]["exact_o"][: len(rows[0]["o"])])],
        "memory": list(traced["tile_memory"].values()),
        "tiled": flat(traced["bytes"]["tiled"]),
        "standard": flat(traced["bytes"]["standard"]),
        "flops": traced["plan"]["flops"],
        "window": traced["window_left"],
    }  # fmt: skip


def draw_picture():
    chromium = shutil.which("chromium")
    if chromium is None:
        print(f"{PICTURE.name}: left as it is, no chromium here")
        return
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
             "--window-size=1280,765", "--force-device-scale-factor=1.5", f"--screenshot={PICTURE}",
             f"{(ROOT / 'docs/explore/index.html').as_uri()}#{PICTURED}"],
            check=True, capture_output=True,
        )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tessera", type=pathlib.Path, required=True, help="the tessera program")
    arguments = parser.parse_args()
    keys, options = zip(*configurations())
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        traces = dict(zip(keys, pool.map(lambda o: compact(trace(arguments.tessera, o)), options)))
    lines = [f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}" for key, value in traces.items()]
    text = PREFIX + "{\n" + ",\n".join(lines) + "\n};\n"
    DATA.write_text(text, encoding="utf-8")
    print(f"{DATA.name}: {len(traces)} traces, {len(text) / 1000:.0f} kB")
    draw_picture()


if __name__ == "__main__":
    main()
