#!/usr/bin/env python3
"""Writes docs/reference/support.md, from `tessera support --markdown`, and its first table into README.md, between two
marker comments.

    scripts/make_support.py TESSERA
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- tessera support -->\n", "<!-- end -->\n"


def table_of(page: str) -> str:
    """The text below "In short"."""
    return re.search(r"## In short\n\n(.*?)\n## ", page, re.DOTALL)[1]


def with_table(readme: str, table: str) -> str:
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"make_support.py: README.md has no {BEGIN.strip()} ... {END.strip()}")
    return before + BEGIN + table + END + after


def main(tessera: str) -> None:
    page = subprocess.run([tessera, "support", "--markdown"], check=True, capture_output=True, text=True).stdout
    (ROOT / "docs/reference/support.md").write_text(page)
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(), table_of(page)))


if __name__ == "__main__":
    main(sys.argv[1])
