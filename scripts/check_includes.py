#!/usr/bin/env python3
"""Checks which folders of src/ and of kernels/tessera/ include which: every arrow of docs/reference/architecture.md
points one way, and no kernel includes another's files. Fails if a file includes a file of a folder that its own folder
may not include.

    scripts/check_includes.py
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
KERNELS = ROOT / "kernels" / "tessera"
MAY_INCLUDE = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "cuda": {"core", "cuda"},
    "distributed": {"core", "distributed"},
    "api": {"core", "cpu", "cuda", "distributed", "api"},
}
# The folders of kernels/tessera/ that are no kernel's, and the two kernels whose results others read by their configs.
SHARED = {
    "ptx": {"ptx"},
    "tile": {"ptx", "tile"},
    "attention": {"ptx", "tile", "attention", "block_lists", "live_tiles"},
}
# Of a kernel: its own folder, SHARED, and what its lists and launches are described by.
OF_A_KERNEL = {*SHARED, "block_lists", "live_tiles"}
# What others are compared with is made of their parts.
ALSO = {"comparison": {"fwd_sm80", "bwd_sm80"}}


def kernel_failures() -> tuple[int, list[str]]:
    """How many files there are in folders of kernels/tessera/, and the includes that are not allowed."""
    failures, files = [], sorted(path for path in KERNELS.rglob("*") if path.suffix in {".cuh", ".hpp"})
    files = [file for file in files if file.parent != KERNELS]  # config.hpp has every kernel's config, for the host
    for file in files:
        folder = file.relative_to(KERNELS).parts[0]
        accepted = SHARED.get(folder, OF_A_KERNEL | ALSO.get(folder, set())) | {folder}
        for name in re.findall(r'^#include "tessera/([^"]+)"', file.read_text(), re.MULTILINE):
            if "/" in name and name.split("/")[0] not in accepted:
                where = f"kernels/tessera/{file.relative_to(KERNELS)}"
                failures.append(f"{where}: includes {name}, accepted {', '.join(sorted(accepted))}")
    return len(files), failures


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    files, failures = kernel_failures()
    for file in sorted(path for path in SRC.rglob("*") if path.suffix in {".cpp", ".hpp", ".inc"}):
        folder = file.relative_to(SRC).parts[0]
        if folder not in MAY_INCLUDE:
            failures.append(f"{file.relative_to(SRC)}: lies in no folder of {', '.join(MAY_INCLUDE)}")
            continue
        files += 1
        for name in re.findall(r'^#include "([^/"]+)/[^"]+"', file.read_text(), re.MULTILINE):
            if name in MAY_INCLUDE and name not in MAY_INCLUDE[folder]:
                failures.append(
                    f"{file.relative_to(SRC)}: includes {name}/, accepted {', '.join(sorted(MAY_INCLUDE[folder]))}"
                )
    for failure in failures:
        print(f"check_includes: {failure}", file=sys.stderr)
    print(f"check_includes: {files} files, {len(failures)} includes that the table does not allow")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
