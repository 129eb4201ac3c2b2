"""The description on a package index: README with absolute links, and the project's URLs. Made when the package is
built.

scikit-build-core calls `dynamic_metadata` (pyproject.toml). The project's URL is TESSERA_HOME in the environment,
otherwise the origin of the clone, otherwise that of the source distribution. Without one, README's links become their
text, and there are no URLs.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:)([^)\s]*)\)")


def home() -> str:
    """https://..., without a trailing slash; empty if unknown."""
    url = os.environ.get("TESSERA_HOME", "")
    if not url and (ROOT / ".git").exists():
        asked = subprocess.run(
            ["git", "config", "--get", "remote.origin.url"], cwd=ROOT, capture_output=True, text=True
        )
        url = re.sub(r"^(ssh://)?git@([^:/]+)[:/]", r"https://\2/", asked.stdout.strip())
    if not url and (ROOT / "PKG-INFO").exists():
        found = re.search(r"(?m)^Project-URL: Source, (\S+)$", (ROOT / "PKG-INFO").read_text(encoding="utf-8"))
        url = found[1] if found else ""
    url = re.sub(r"(\.git)?/*$", "", url)
    return url if re.match(r"https?://[^/@]+/", url) else ""  # no local path, no password


def readme(text: str, home: str) -> str:
    """README with absolute links. Code is unchanged."""

    def absolute(link: re.Match[str]) -> str:
        image, words, target = link[1], link[2], link[3]
        if not home:
            return "" if image else words
        kind = "raw" if image else "blob"
        return f"{image}[{words}]({target if target.startswith('#') else f'{home}/{kind}/HEAD/{target}'})"

    parts = re.split(r"(?ms)(^```.*?^```$|`[^`\n]*`)", text)
    protected = [part if n % 2 == 0 else f"\0{n}\0" for n, part in enumerate(parts)]
    linked = _LINK.sub(absolute, "".join(protected))
    return re.sub(r"\0(\d+)\0", lambda at: parts[int(at[1])], linked)


def dynamic_metadata(
    field: str, settings: Mapping[str, Any] | None = None, project: Mapping[str, Any] | None = None
) -> Any:
    address = home()
    if field == "readme":
        return {
            "content-type": "text/markdown",
            "text": readme((ROOT / "README.md").read_text(encoding="utf-8"), address),
        }
    if field != "urls":
        raise RuntimeError(f"{field}: accepted readme and urls")
    if not address:
        return {}
    return {
        "Source": address,
        "Documentation": f"{address}/tree/HEAD/docs",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
