"""Shows which package `import flash_attn` uses in this environment, and how to use the other. Status 1: not
Tessera's."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path


def main() -> int:
    folder = Path(__file__).resolve().parent
    if not (folder / "flash_attn").exists():  # in the source tree the two are side by side
        folder = folder.parent
    spec = importlib.util.find_spec("flash_attn")
    taken = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if taken == folder / "flash_attn" / "__init__.py":
        print(f"flash_attn: Tessera's, {taken}")
        return 0
    try:
        other = f"that of the distribution flash-attn {importlib.metadata.version('flash-attn')}"
    except importlib.metadata.PackageNotFoundError:
        other = "another one"
    print(
        f"flash_attn: {other}, {taken}. Tessera's stands back: uninstall the other, or set TESSERA_FLASH_ATTN=1 and "
        f"PYTHONPATH={folder}"
    )
    return 1


sys.exit(main())
