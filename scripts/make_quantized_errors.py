"""Writes docs/reference/quantized-errors.md: the errors of 8 bits in bench/results, with date, commit and machine.

python scripts/make_quantized_errors.py [--check]        --check: write nothing, exit 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/quantized-errors.md"
FOLDER = ROOT / "bench/results"

INTRODUCTION = """# Errors of 8 bits

This page lists what [8 bits](../guide/eight-bits.md) cost: the relative RMS of o against float64 on q, k and v before
they were quantised. `scripts/make_quantized_errors.py` writes it from the results in
[bench/results](../../bench/results). The inputs are standard normal; with outliers, N(0, 1) + N(0, 100) of one element
in a thousand; recorded, q, k and v of the first, a middle and the last layer of a small GPT-2 that is trained for a few
steps. Masks are causal.
"""
KINDS = {
    ("bfloat16", "float8_e4m3"): "An e4m3 cache, queries of bfloat16",
    ("float8_e4m3", "float8_e4m3"): "q, k and v of e4m3",
    ("bfloat16", "float8_e5m2"): "An e5m2 cache, queries of bfloat16",
    ("bfloat16", "int8"): "An int8 cache, queries of bfloat16",
}
SCHEMES = ("tensor", "head", "block", "token")
ROTATED = ("", "k", "k and v")
DATA = ("normal", "outliers", "recorded", "V of mean 1", "smooth V")
# What is rounded, and the ratio that was predicted for normal inputs before it was computed.
WAYS = {
    "nearest": ("to nearest; the sum of weights before rounding: the kernel", "1.11 to 1.14"),
    "rounded sums": ("the sum of the rounded weights", "no change: V has no mean"),
    "448": ("the largest weight becomes 448, e4m3's largest number, instead of 256", "± 0.01"),
    "best factor": ("for each row the factor in [1, 2) that rounds it best", "0.01 less"),
    "feedback": ("a weight's rounding error is added to the next key's weight", "1.25, near 1 with a smooth V"),
    "stochastic": ("up or down at random, right on average", "1.25"),
    "two terms": ("a second e4m3 product for what rounding left", "1.00"),
    "two terms, half": ("the same for every second group of 32 keys, an instruction's step", "1.07"),
    "mended, 32": ("the largest of each 32 keys' weights exact", "–"),
    "baseline": (
        "P − c to nearest, c the mean weight of the row's first 128 keys, and c times the sum of V's rows",
        "1.09",
    ),
    "baseline, sums": ("the same with the sum of the rounded weights", "1.09"),
}


def read(name: str) -> tuple[list[dict], list[str]]:
    """Rows of all results that have `name`, later ones in place of earlier ones, and the files' lines."""
    rows, sources = {}, []
    for path in sorted(FOLDER.glob("*.json")):
        result = json.loads(path.read_text())
        if name not in result:
            continue
        machine = result["machine"]
        sources.append(
            f"- {machine['processor']}, {machine['isa']}, {machine['date']}, commit {machine['commit']}, "
            f"`{machine['command']}`: [{path.name}](../../bench/results/{path.name})"
        )
        for row in result[name]:
            rows[tuple(value for value in row.values() if not isinstance(value, float))] = row
    ordered = sorted(rows.values(), key=lambda row: (DATA.index(row["data"]), row["head_dim"], row["length"]))
    return ordered, sources


def span(values: list[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def column(scheme: str, rotated: str) -> str:
    return scheme + (f", {rotated} rotated" if rotated else "")


def cells_of(rows: list[dict], kind: tuple[str, str]) -> dict[tuple, dict]:
    """By (data, head_dim, length) and (scheme, rotated)."""
    return {
        (row["data"], row["head_dim"], row["length"], row["scheme"], row["rotated"]): row
        for row in rows
        if (row["q_dtype"], row["dtype"]) == kind
    }


def summary(rows: list[dict]) -> list[str]:
    """Of all head sizes and lengths."""
    best = ("block", "k and v")
    lines = [
        "Over all head sizes and lengths: the error of one scale a tensor, in per cent; times as large an error with",
        "other scales, of quantisation alone; the kernel's error over the least that o in bfloat16 permits.",
        "",
        "| | inputs | a tensor | head | block | token | block, k and v rotated | token, k and v rotated | kernel |",
        "| --- " * 9 + "|",
    ]
    for kind, title in KINDS.items():
        cells = cells_of(rows, kind)
        for data in dict.fromkeys(key[0] for key in cells):
            places = list(dict.fromkeys(key[:3] for key in cells if key[0] == data))
            texts = [span([100 * cells[(*at, "tensor", "")]["alone"] for at in places], "{:.2f}")]
            for of in (("head", ""), ("block", ""), ("token", ""), best, ("token", "k and v")):
                ratios = [
                    cells[(*at, *of)]["alone"] / cells[(*at, "tensor", "")]["alone"] for at in places
                    if (*at, *of) in cells
                ]  # fmt: skip
                texts.append(span(ratios, "{:.2f}") if ratios else "–")
            texts.append(span([row["kernel"] / row["least"] for key, row in cells.items() if key[0] == data], "{:.2f}"))
            lines.append(f"| {title} | {data} | {' | '.join(texts)} |")
    return [*lines, ""]


FLOOR = 2.6  # per cent: e4m3's own rounding of v, which no scale and no rotation lowers


def halves(rows: list[dict]) -> list[str]:
    """Where block scales and rotation have at most half the error of one scale a tensor, on outliers."""
    lines = [
        "## Outliers: at most half",
        "",
        "The cells with outliers in which block scales with k and v rotated have at most half the error of one scale a",
        "tensor; the others' errors, in per cent. Half is out of reach where one scale has less than twice the error",
        f"that rounding v alone leaves at any scale: {FLOOR} % with e4m3, about twice that with e5m2. Rounding k, as",
        "relative, adds to that.",
        "",
        "| | cells | at most half | elsewhere one scale has | and block scales, rotated |",
        "| --- " * 5 + "|",
    ]
    for kind, title in KINDS.items():
        cells = cells_of(rows, kind)
        places = list(dict.fromkeys(key[:3] for key in cells if key[0] == "outliers"))
        pairs = [
            (100 * cells[(*at, "tensor", "")]["alone"], 100 * cells[(*at, "block", "k and v")]["alone"])
            for at in places
        ]
        others = [pair for pair in pairs if pair[1] > pair[0] / 2]
        texts = [span([pair[n] for pair in others], "{:.2f}") if others else "–" for n in (0, 1)]
        lines.append(f"| {title} | {len(pairs)} | {len(pairs) - len(others)} | {' | '.join(texts)} |")
    return [*lines, ""]


def table(rows: list[dict], kind: tuple[str, str]) -> list[str]:
    cells = cells_of(rows, kind)
    columns = [(scheme, rotated) for rotated in ROTATED for scheme in SCHEMES]
    columns = [of for of in columns if any(key[3:] == of for key in cells)]
    lines = [
        "| inputs | D | keys | " + " | ".join(column(*of) for of in columns) + " |",
        "| --- " * (3 + len(columns)) + "|",
    ]
    for at in dict.fromkeys(key[:3] for key in cells):
        found = (cells[(*at, *of)] for of in columns)
        texts = (f"{100 * row['alone']:.2f} / {100 * row['kernel']:.2f}" for row in found)
        lines.append(f"| {' | '.join(map(str, at))} | {' | '.join(texts)} |")
    return [*lines, ""]


def weights(rows: list[dict]) -> list[str]:
    lines = [
        "| inputs | D | keys | alone, % | " + " | ".join(WAYS) + " |",
        "| --- " * (4 + len(WAYS)) + "|",
    ]
    for row in rows:
        texts = (f"{row[way]:.2f}" for way in WAYS)
        at = f"{row['data']} | {row['head_dim']} | {row['length']} | {100 * row['alone']:.2f}"
        lines.append(f"| {at} | {' | '.join(texts)} |")
    return [*lines, ""]


def page() -> str:
    rows, sources = read("errors")
    lines = [INTRODUCTION, *sources, "", *summary(rows), *halves(rows)]
    for kind, title in KINDS.items():
        lines += [
            f"## {title}",
            "",
            "Per cent, quantisation alone (float64 on the codes' numbers) / the kernel on the CPU, o in bfloat16:",
            "",
            *table(rows, kind),
        ]
    rows, sources = read("weights")
    lines += [
        "## Weights of e4m3",
        "",
        "Tensor cores multiply 8 bits by 8 bits, so fwd_sm90_fp8 rounds the weights of the softmax to e4m3, too. By",
        "float64, q, k and v of e4m3 with a scale a tensor: the error over that of quantisation alone, by how weights",
        "are rounded. V of mean 1 is a normal one plus 1; a smooth V has moving averages of 32 normal rows.",
        "",
        *sources,
        "",
        *weights(rows),
        "| | weights | predicted, normal inputs |",
        "| --- | --- | --- |",
        *(f"| {way} | {text} | {predicted} |" for way, (text, predicted) in WAYS.items()),
        "",
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if the page is out of date")
    options = parser.parse_args()
    text = page()
    if not options.check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.relative_to(ROOT)} is out of date: run scripts/make_quantized_errors.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
