"""Cells as Markdown: rates and ratios, and what they come to."""

from __future__ import annotations

import math

from cuda_bench.problem import geometric_mean

PEERS = (("flash", "FA2"), ("cudnn", "cuDNN"))


def ratio(cell: dict, peer: str) -> float | None:
    """How many times as fast as the peer Tessera was; None where one was not measured, or Tessera was wrong."""
    seconds = cell["seconds"]
    if cell["wrong"] or "tessera" not in seconds or peer not in seconds:
        return None
    return seconds[peer] / seconds["tessera"]


def rate(cell: dict, name: str) -> float | None:
    """TFLOP/s, decode: TB/s of keys and values read."""
    seconds = cell["seconds"].get(name)
    if seconds is None:
        return None
    return (cell["kv_bytes"] if cell["case"] == "decode" else cell["flops"]) * 1e-12 / seconds


def _number(value: float | None, form: str = ".0f") -> str:
    return "–" if value is None else format(value, form)


def _rate_text(cell: dict, name: str) -> str:
    if cell["case"] != "decode":
        return _number(rate(cell, name))
    seconds = cell["seconds"].get(name)
    return "–" if seconds is None else f"{seconds * 1e6:.1f} ({rate(cell, name):.2f})"


def cell_line(cell: dict) -> str:
    """One line of the running table."""
    rates = " ".join(f"{_rate_text(cell, name):>13}" for name in ("tessera", "flash", "cudnn"))
    ratios = " ".join(f"{_number(ratio(cell, peer), '.2f'):>7}" for peer, _ in PEERS)
    errors = " ".join(f"{_number(cell['errors'].get(name), '.1e'):>8}" for name in ("tessera", "flash", "cudnn"))
    notes = list(cell["reasons"].get("tessera", "").splitlines()[:1]) + (["WRONG"] if cell["wrong"] else [])
    return f"{cell['name']:58} {rates} {ratios}  {errors}  {'; '.join(notes)}".rstrip()


def heading_line(case: str) -> str:
    unit = "us (TB/s)" if case == "decode" else "TFLOP/s"
    return (
        f"{unit:58} {'Tessera':>13} {'FA2':>13} {'cuDNN':>13} {'/ FA2':>7} {'/ cuDNN':>7}  "
        "relative RMS errors, same order"
    )


def summary(cells: list[dict]) -> list[str]:
    """A line for each direction and peer."""
    lines = []
    for case in dict.fromkeys(cell["case"] for cell in cells):
        for direction in dict.fromkeys(cell["direction"] for cell in cells if cell["case"] == case):
            chosen = [cell for cell in cells if cell["case"] == case and cell["direction"] == direction]
            for peer, title in PEERS:
                rated = [(ratio(cell, peer), cell["name"]) for cell in chosen if ratio(cell, peer) is not None]
                if not rated:
                    continue
                values = [value for value, _ in rated]
                least, where = min(rated)
                lines.append(
                    f"{case} {direction} / {title}, {len(rated)} of {len(chosen)} cells: geometric mean "
                    f"{geometric_mean(values):.3f}, least {least:.2f} ({where}), {sum(v < 1 for v in values)} below 1"
                )
            wrong = [cell["name"] for cell in chosen if cell["wrong"]]
            if wrong:
                lines.append(f"{case} {direction}: WRONG in {len(wrong)} cells: {', '.join(wrong)}")
    return lines


def _grid(cells: list[dict], direction: str) -> list[str]:
    lengths = sorted({cell["length"] for cell in cells})
    rows = {}
    for cell in cells:
        rows.setdefault((cell["head_dim"], cell["mask"]), {})[cell["length"]] = cell
    lines = [
        f"### {direction.capitalize()}, {cells[0]['dtype']}, TFLOP/s: Tessera · FA2 · cuDNN (Tessera / FA2, / cuDNN)",
        "",
        "| D | mask | " + " | ".join(map(str, lengths)) + " |",
        "| --- | --- |" + " --- |" * len(lengths),
    ]
    for (head_dim, mask), columns in sorted(rows.items(), key=lambda row: (row[0][0], row[0][1] == "causal")):
        texts = []
        for length in lengths:
            cell = columns.get(length)
            if cell is None:
                texts.append("")
                continue
            rates = " · ".join(_rate_text(cell, name) for name in ("tessera", "flash", "cudnn"))
            ratios = ", ".join(_number(ratio(cell, peer), ".2f") for peer, _ in PEERS)
            texts.append(f"{rates} ({ratios})")
        lines.append(f"| {head_dim} | {mask} | " + " | ".join(texts) + " |")
    return lines


def _list(cells: list[dict], case: str) -> list[str]:
    unit = "µs (TB/s of K and V read)" if case == "decode" else "TFLOP/s on the visible area"
    lines = [
        f"### {case.capitalize()}: {cells[0]['direction']}, {cells[0]['dtype']}, {unit}",
        "",
        "| case | Tessera | FA2 | cuDNN | / FA2 | / cuDNN |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        texts = [_rate_text(cell, name) for name in ("tessera", "flash", "cudnn")]
        texts += [_number(ratio(cell, peer), ".2f") for peer, _ in PEERS]
        lines.append(f"| {cell['name']} | " + " | ".join(texts) + " |")
    return lines


def _ceilings(results: list[dict]) -> str:
    texts = [
        f"{result['ceilings']['product']:.0f} TFLOP/s, {result['ceilings']['copy']:.2f} TB/s"
        for result in results
    ]
    return "Ceilings, an 8192³ bf16 product and a device copy (read + write): " + "; ".join(texts)


def markdown(results: list[dict], heading: str) -> str:
    """What such files hold, as Markdown. A cell measured again counts as it was last."""
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
                    blocks.append(_grid(chosen, direction) if case == "grid" else _list(chosen, case))
    blocks.append([f"- {line}" for line in summary(cells)])
    errors = [c["errors"]["tessera"] for c in cells if c["errors"].get("tessera") is not None]
    finite = [e for e in errors if not math.isnan(e)]
    if finite:
        blocks.append([f"Relative RMS error against float64: at most {max(finite):.1e}."])
    return "\n\n".join("\n".join(block) for block in blocks if any(block))
