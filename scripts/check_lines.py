#!/usr/bin/env python3
"""Checks that no line of a source is longer than 120 columns. `make format-check` runs it.

    scripts/check_lines.py

Three kinds of lines may be longer: rows of a table, which stand between "clang-format off" and "clang-format on"; lines
that one long word makes long, such as a URL or a regular expression; and generated files.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 120
LONG_WORD = 72  # characters
SOURCES = ("*.c", "*.cpp", "*.cu", "*.cuh", "*.h", "*.hpp", "*.inc", "*.py", "*.pyi", "*.sh", "*.cmake",
           "CMakeLists.txt",
           "Makefile")  # fmt: skip
GENERATED = ("python/tessera/_options.py",)


def one_word_is_long(line: str) -> bool:
    word = max(line.split(), key=len, default="")
    return len(word) >= LONG_WORD and len(line) - len(word) <= COLUMNS


def long_lines(text: str) -> list[tuple[int, int]]:
    """(number, columns) of each line that is too long."""
    found, in_table = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if "clang-format off" in line or "clang-format on" in line:
            in_table = "clang-format off" in line
        if len(line.expandtabs(4)) > COLUMNS and not in_table and not one_word_is_long(line):
            found.append((number, len(line.expandtabs(4))))
    return found


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SOURCES, ":!third_party"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = [name for name in listed.stdout.splitlines() if name not in GENERATED]
    files = [name for name in names if (ROOT / name).exists()]
    too_long = [
        f"{name}:{number}: {columns} columns, accepted {COLUMNS}"
        for name in files
        for number, columns in long_lines((ROOT / name).read_text(encoding="utf-8"))
    ]
    print("\n".join(too_long) if too_long else f"lines: {len(files)} files have lines of at most {COLUMNS} columns")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
