"""Checks that every relative link of the Markdown pages leads to an existing file, and every anchor to a heading.

    python scripts/check_links.py
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: pathlib.Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: pathlib.Path) -> list[str]:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    faults = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            faults.append(f"{page.relative_to(ROOT)}: {target}: no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            faults.append(f"{page.relative_to(ROOT)}: {target}: no such heading")
    return faults


if __name__ == "__main__":
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    pages = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    faults = [fault for page in pages for fault in broken(page)]
    print("\n".join(faults) if faults else f"links: {len(pages)} pages, all lead somewhere")
    sys.exit(bool(faults))
