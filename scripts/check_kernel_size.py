#!/usr/bin/env python3
"""Counts the files, and the lines including comments, that a reader of each GPU kernel has to read: those of its own
folder, those that it includes from tile/ and attention/ and, counted separately, the wrappers of single instructions in
ptx/. Fails if a file is too long; a kernel should stay at about 35 files.

    scripts/check_kernel_size.py
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "kernels"
MOST_LINES = 500  # per file


def includes(file: Path) -> list[Path]:
    return [ROOT / name for name in re.findall(r'^#include "(tessera/[^"]+)"', file.read_text(), re.MULTILINE)]


def closure(file: Path) -> set[Path]:
    found, ahead = set(), [file]
    while ahead:
        file = ahead.pop()
        if file not in found:
            found.add(file)
            ahead += includes(file)
    return found


def lines(files: list[Path]) -> int:
    return sum(file.read_text().count("\n") for file in files)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    failures = []
    for file in sorted(ROOT.rglob("*.*")):
        if lines([file]) > MOST_LINES:
            failures.append(f"{file.relative_to(ROOT)}: {lines([file])} lines, accepted {MOST_LINES}")
    print(f"{'kernel':<24}{'own':>6}{'shared':>8}{'in all':>8}{'ptx/':>6}{'files':>7}")
    for kernel in sorted(ROOT.glob("tessera/**/kernel.cuh")):
        files = closure(kernel)
        ptx = [file for file in files if file.parent.name == "ptx"]
        own = [file for file in files if file.parent == kernel.parent]
        shared = [file for file in files if file not in ptx and file not in own]
        total = lines(own) + lines(shared)
        print(f"{kernel.parent.name:<24}{lines(own):>6}{lines(shared):>8}{total:>8}{lines(ptx):>6}{len(files):>7}")
    for failure in failures:
        print(f"check_kernel_size: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
