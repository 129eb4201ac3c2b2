"""Cells as Markdown: rates, ratios and their summaries."""

from __future__ import annotations

import math
from statistics import geometric_mean

# In the order of the tables. The sm80 family is not listed twice if a plan chooses it.
TITLES = {
    "tessera": "Tessera", "sm80": "sm80", "sm90": "sm90", "flash": "FA2", "flash4": "FA4", "cudnn": "cuDNN",
    "efficient": "efficient",
}  # fmt: skip
# Which contestants are compared.
RATIOS = (("tessera", "flash"), ("tessera", "flash4"), ("tessera", "cudnn"), ("sm80", "flash"), ("sm90", "tessera"),
          ("sm90", "flash"), ("sm90", "cudnn"), ("tessera", "efficient"))  # fmt: skip


def seconds_of(cell: dict, name: str) -> float | None:
    if name == "sm80" and cell.get("kernel", "").endswith("_sm80"):
        name = "tessera"
    return cell["seconds"].get(name)


def ratio(cell: dict, ours: str, peer: str) -> float | None:
    """How many times as fast as the peer; None if one of them was not measured, or Tessera was wrong."""
    mine, theirs = seconds_of(cell, ours), cell["seconds"].get(peer)
    return None if cell["wrong"] or mine is None or theirs is None else theirs / mine


def _ratio_title(ours: str, peer: str) -> str:
    return f"{'' if ours == 'tessera' else TITLES[ours] + ' '}/ {TITLES[peer]}"


def _entered(cells: list[dict]) -> tuple[list[str], list[tuple[str, str]]]:
    """The measured contestants, and their ratios."""
    names = [name for name in TITLES if any(seconds_of(cell, name) is not None for cell in cells)]
    return names, [(ours, peer) for ours, peer in RATIOS if ours in names and peer in names]


def rate(cell: dict, name: str) -> float | None:
    """TFLOP/s, decode: TB/s of keys and values read."""
    seconds = seconds_of(cell, name)
    if seconds is None:
        return None
    return (cell["kv_bytes"] if cell["case"] == "decode" else cell["flops"]) * 1e-12 / seconds


def _number(value: float | None, form: str = ".0f") -> str:
    return "–" if value is None else format(value, form)


def _rate_text(cell: dict, name: str) -> str:
    if cell["case"] != "decode":
        return _number(rate(cell, name))
    seconds = seconds_of(cell, name)
    return "–" if seconds is None else f"{seconds * 1e6:.1f} ({rate(cell, name):.2f})"


def cell_line(cell: dict) -> str:
    """One line of the running table."""
    rates = " ".join(f"{_rate_text(cell, name):>13}" for name in TITLES)
    ratios = " ".join(f"{_number(ratio(cell, *pair), '.2f'):>11}" for pair in RATIOS)
    errors = " ".join(f"{_number(cell['errors'].get(name), '.1e'):>8}" for name in TITLES)
    notes = [cell.get("kernel", "")] + cell["reasons"].get("tessera", "").splitlines()[:1]
    if cell["wrong"]:
        notes.append("WRONG")
    return f"{cell['name']:58} {rates} {ratios}  {errors}  {'; '.join(filter(None, notes))}".rstrip()


def heading_line(case: str) -> str:
    unit = "us (TB/s)" if case == "decode" else "TFLOP/s"
    names = " ".join(f"{title:>13}" for title in TITLES.values())
    ratios = " ".join(f"{_ratio_title(*pair):>11}" for pair in RATIOS)
    return f"{unit:58} {names} {ratios}  relative RMS errors, same order; Tessera's kernel"


def summary(cells: list[dict]) -> list[str]:
    """A line for each direction and pair."""
    lines = []
    for case in dict.fromkeys(cell["case"] for cell in cells):
        for direction in dict.fromkeys(cell["direction"] for cell in cells if cell["case"] == case):
            chosen = [cell for cell in cells if cell["case"] == case and cell["direction"] == direction]
            for ours, peer in RATIOS:
                rated = [(ratio(cell, ours, peer), cell["name"]) for cell in chosen]
                rated = [(value, name) for value, name in rated if value is not None]
                if not rated:
                    continue
                values = [value for value, _ in rated]
                least, where = min(rated)
                lines.append(
                    f"{case} {direction}, {TITLES[ours]} / {TITLES[peer]}, {len(rated)} of {len(chosen)} cells: "
                    "geometric mean "
                    f"{geometric_mean(values):.3f}, least {least:.2f} ({where}), {sum(v < 1 for v in values)} below 1"
                )
            wrong = [cell["name"] for cell in chosen if cell["wrong"]]
            if wrong:
                lines.append(f"{case} {direction}: WRONG in {len(wrong)} cells: {', '.join(wrong)}")
    return lines


def _rows(cells: list[dict]) -> tuple[list[int], list[tuple[int, str, dict[int, dict]]]]:
    """The grid's lengths, and its rows: head size, mask, and the cell of each length."""
    rows: dict[tuple, dict[int, dict]] = {}
    for cell in cells:
        rows.setdefault((cell["head_dim"], cell["mask"]), {})[cell["length"]] = cell
    order = sorted(rows, key=lambda row: (row[0], row[1] == "causal"))
    return sorted({cell["length"] for cell in cells}), [(*row, rows[row]) for row in order]


def ratio_tables(cells: list[dict]) -> list[str]:
    """Of the grid: a small table for each direction and pair."""
    lines = []
    for direction in ("forward", "backward"):
        chosen = [cell for cell in cells if cell["case"] == "grid" and cell["direction"] == direction]
        for ours, peer in RATIOS:
            if all(ratio(cell, ours, peer) is None for cell in chosen):
                continue
            lengths, rows = _rows(chosen)
            lines.append(
                f"{direction}, {TITLES[ours]} / {TITLES[peer]}".ljust(26) + "".join(f"{n:>7}" for n in lengths)
            )
            for head_dim, mask, columns in rows:
                texts = (_number(ratio(columns[n], ours, peer), ".2f") if n in columns else "" for n in lengths)
                lines.append(f"  D {head_dim} {mask}".ljust(26) + "".join(f"{text:>7}" for text in texts))
    return lines


def _grid(cells: list[dict], direction: str) -> list[str]:
    lengths, rows = _rows(cells)
    names, pairs = _entered(cells)
    lines = [
        f"### {direction.capitalize()}, {cells[0]['dtype']}, TFLOP/s: {' · '.join(TITLES[name] for name in names)} "
        f"({', '.join(_ratio_title(*pair) for pair in pairs)})",
        "",
        "| D | mask | " + " | ".join(map(str, lengths)) + " |",
        "| --- | --- |" + " --- |" * len(lengths),
    ]
    for head_dim, mask, columns in rows:
        texts = []
        for length in lengths:
            cell = columns.get(length)
            if cell is None:
                texts.append("")
                continue
            rates = " · ".join(_rate_text(cell, name) for name in names)
            ratios = ", ".join(_number(ratio(cell, *pair), ".2f") for pair in pairs)
            texts.append(f"{rates} ({ratios})")
        lines.append(f"| {head_dim} | {mask} | " + " | ".join(texts) + " |")
    return lines


def list_of(cells: list[dict], case: str) -> list[str]:
    unit = "µs (TB/s of K and V read)" if case == "decode" else "TFLOP/s on the visible area"
    names, pairs = _entered(cells)
    titles = [TITLES[name] for name in names] + [_ratio_title(*pair) for pair in pairs]
    lines = [
        f"### {case.capitalize()}: {cells[0]['direction']}, {cells[0]['dtype']}, {unit}",
        "",
        f"| case | {' | '.join(titles)} |",
        "| --- |" + " --- |" * len(titles),
    ]
    for cell in cells:
        texts = [_rate_text(cell, name) for name in names]
        texts += [_number(ratio(cell, *pair), ".2f") for pair in pairs]
        lines.append(f"| {cell['name']} | " + " | ".join(texts) + " |")
    return lines


def _ceilings(results: list[dict]) -> str:
    texts = [
        f"{result['ceilings']['product']:.0f} TFLOP/s, {result['ceilings']['copy']:.2f} TB/s"
        for result in results
    ]
    return "Ceilings, an 8192³ bf16 product and a device copy (read + write): " + "; ".join(texts)


def markdown(results: list[dict], heading: str) -> str:
    """The contents of such files, as Markdown. Of a cell measured again the last measurement counts."""
    latest = {}
    for result in results:
        for cell in result["cells"]:
            latest[cell["case"], cell["direction"], cell["dtype"], cell["name"]] = cell
    cells = list(latest.values())
    blocks = [[heading], [_ceilings(results)]]
    for case in dict.fromkeys(cell["case"] for cell in cells):
        for dtype in dict.fromkeys(cell["dtype"] for cell in cells if cell["case"] == case):
            for direction in ("forward", "backward"):
                chosen = [c for c in cells if (c["case"], c["dtype"], c["direction"]) == (case, dtype, direction)]
                if chosen:
                    blocks.append(_grid(chosen, direction) if case == "grid" else list_of(chosen, case))
    blocks.append([f"- {line}" for line in summary(cells)])
    errors = [c["errors"]["tessera"] for c in cells if c["errors"].get("tessera") is not None]
    finite = [e for e in errors if not math.isnan(e)]
    if finite:
        blocks.append([f"Relative RMS error against float64: at most {max(finite):.1e}."])
    return "\n\n".join("\n".join(block) for block in blocks if any(block))
