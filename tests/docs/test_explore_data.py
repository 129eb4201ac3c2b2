"""The data of docs/explore equal the current output of `tessera trace`, and the page loads nothing from elsewhere."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import make_explore  # noqa: E402

SAMPLED = ("256/64/32/32/full", "256/128/128/64/window", "512/64/128/64/causal", "1024/128/256/128/causal")


def test_data_is_small_and_whole():
    text = make_explore.DATA.read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert set(json.loads(text.removeprefix(make_explore.PREFIX).rstrip(";\n"))) == {
        key for key, _ in make_explore.configurations()
    }


@pytest.mark.parametrize("key", SAMPLED)
def test_data_is_the_programs(key):
    """Bytes and tiles to the last, what was rounded to within that: another machine's exp may differ in its last
    bit."""
    held = json.loads(make_explore.DATA.read_text(encoding="utf-8").removeprefix(make_explore.PREFIX).rstrip(";\n"))[
        key
    ]
    now = make_explore.compact(
        make_explore.trace(os.environ["TESSERA_PROGRAM"], dict(make_explore.configurations())[key])
    )
    steps, expected = held.pop("steps"), now.pop("steps")
    for step, wanted in zip(steps, expected, strict=True):
        distance, wanted_distance = step.pop(4), wanted.pop(4)  # from the exact result: only rounding in the last step
        assert step == pytest.approx(wanted, rel=2e-7, abs=1e-9)
        assert distance == pytest.approx(wanted_distance, rel=6e-3, abs=1e-13)
    assert held.pop("exact") == pytest.approx(now.pop("exact"), rel=2e-7)
    assert held == now


def test_page_stands_alone():
    folder = ROOT / "docs/explore"
    page = (folder / "index.html").read_text(encoding="utf-8")
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {"data.js", "explore.js", "explore.css"} <= set(addresses)
    assert all(address == "data:," or (folder / address).is_file() for address in addresses)
    assert "type=\"module\"" not in page
    for name in ("explore.js", "explore.css"):
        text = (folder / name).read_text(encoding="utf-8")
        assert not re.search(r"\bfetch\(|\bimport\b|XMLHttpRequest|@import|url\(\s*['\"]?http", text), name


def test_the_guides_table_is_the_programs():
    guide = (ROOT / "docs/guide/how-it-works.md").read_text(encoding="utf-8")
    options = re.search(r"`tessera trace (--length[^`]*)`", guide).group(1).split()
    traced = make_explore.trace(os.environ["TESSERA_PROGRAM"], options)["bytes"]
    bandwidths = dict(re.findall(r"(?m)^\| ([\w ]+?) \| [\d.]+ [MG]i?B \| ([\d.]+) TB/s", guide))
    rows = re.findall(
        r"(?m)^\| ([\w ]+?) \| ([\d.]+) MiB \| ([\d.]+) µs \| ([\d.]+) MiB \| ([\d.]+) µs \| ([\d.]+) × less", guide
    )
    assert [row[0] for row in rows] == [name for name in ("registers", "shared memory", "L2", "HBM")]
    for (name, *numbers), level in zip(rows, make_explore.LEVELS):
        moved = [sum(traced[side][level].values()) for side in ("tiled", "standard")]
        seconds = [value / float(bandwidths[name if name != "L2" else "L2 cache"]) * 1e-12 for value in moved]
        expected = [moved[0] / 2**20, seconds[0] * 1e6, moved[1] / 2**20, seconds[1] * 1e6, moved[1] / moved[0]]
        for given, value in zip(numbers, expected):
            digits = len(given.partition(".")[2])
            assert float(given) == pytest.approx(value, abs=0.51 * 10.0**-digits), (name, given, value)
