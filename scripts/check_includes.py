#!/usr/bin/env python3
"""Checks which folders of src/ include which: every arrow of docs/reference/architecture.md points one way. Fails if a
file includes a file of a folder that its own folder may not include.

    scripts/check_includes.py
"""

import argparse
import re
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src"
MAY_INCLUDE = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "cuda": {"core", "cuda"},
    "distributed": {"core", "distributed"},
    "api": {"core", "cpu", "cuda", "distributed", "api"},
}


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    failures, files = [], 0
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
