"""Constants and constexpr functions as the library's sources define them, so that a model has each number from the code
that it models."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".hpp", ".cuh", ".cpp")
FILES = sorted(file for folder in ("kernels", "src") for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES)
TEXTS = [file.read_text(encoding="utf-8") for file in FILES]


def matches(pattern: str) -> list[re.Match]:
    return [match for text in TEXTS for match in re.finditer(pattern, text, re.DOTALL)]


def constant(name: str, owner: str = "") -> float:
    """`name` = number, of `struct owner` where one is named. Every definition must have the same value."""
    start = rf"struct {re.escape(owner)} \{{(?:(?!\n\}}).)*?" if owner else ""
    texts = {match[1] for match in matches(rf"{start}\bconstexpr \w+ {name} = ([\w.]+);")}
    assert len(texts) == 1, f"{owner} {name}: defined as {sorted(texts)}, one value is needed"
    text = texts.pop().rstrip("f")
    return float.fromhex(text) if text.startswith("0x") else float(text) if "." in text else int(text)


def function(name: str):
    """A constexpr function of integers whose body is one return statement."""
    found = matches(rf"constexpr \w+ {name}\(([^)]*)\) \{{\s*return ([^;]*);\s*\}}")
    assert len(found) == 1, f"{name}: {len(found)} definitions, one is needed"
    names = [parameter.split()[-1].lstrip("&") for parameter in found[0][1].split(",")]
    body = found[0][2].replace("/", "//").replace("&&", " and ")
    body = re.sub(r"([^()?:]+)\?([^()?:]+):([^()?:]+)", r"((\2) if (\1) else (\3))", " ".join(body.split()))
    calls = {call: function(call) for call in re.findall(r"(\w+)\(", body)}
    return lambda *values: eval(body, {**calls, **dict(zip(names, values, strict=True))})


def config(**fields) -> SimpleNamespace:
    """What such a function reads of a config."""
    return SimpleNamespace(**fields)
