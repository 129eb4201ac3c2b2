#!/usr/bin/env python3
"""How much there is to read of each GPU kernel, in lines, comments among them: its own folder, what it includes of tile/ and attention/ and
of other kernels, and beside these the wrappers of single instructions, ptx/. Fails where a file is too long; what a kernel has in all,
without ptx/, should stay about 2500.

    scripts/check_kernel_size.py
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "kernels"
MOST_LINES = 500  # of a file


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
    print(f"{'kernel':<24}{'own':>6}{'shared':>8}{'in all':>8}{'ptx/':>6}")
    for kernel in sorted(ROOT.glob("tessera/**/kernel.cuh")):
        files = closure(kernel)
        ptx = [file for file in files if file.parent.name == "ptx"]
        own = [file for file in files if file.parent == kernel.parent]
        shared = [file for file in files if file not in ptx and file not in own]
        total = lines(own) + lines(shared)
        print(f"{kernel.parent.name:<24}{lines(own):>6}{lines(shared):>8}{total:>8}{lines(ptx):>6}")
    for failure in failures:
        print(f"check_kernel_size: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
