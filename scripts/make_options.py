"""Writes python/tessera/_options.py, the options' types for type checkers, from the library's table of fields.

    PYTHONPATH=<where tessera is installed> python scripts/make_options.py [--check]
"""

import argparse
import pathlib
import sys

from tessera import _core

TARGET = pathlib.Path(__file__).parent.parent / "python/tessera/_options.py"
HEADER = '''\
"""The options that attention, attention_backward and plan share, for type checkers; `tessera.attention` explains.

Made by scripts/make_options.py from src/core/fields.hpp.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict
'''


def typed_dict(name: str, base: str, kinds: set[str]) -> str:
    fields = [f for f in _core.option_fields() if f["kind"] in kinds]
    lines = "".join(f"    {f['name']}: {f['annotation']}\n" for f in fields)
    return f"\n\nclass {name}({base}, total=False):\n{lines}"


def text() -> str:
    return (
        HEADER
        + typed_dict("Options", "TypedDict", {"tensor", "value", "execution"})
        + typed_dict("BackwardOptions", "Options", {"backward tensor"})
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    if parser.parse_args().check:
        sys.exit(0 if TARGET.read_text() == text() else f"{TARGET.name} is out of date: run scripts/make_options.py")
    TARGET.write_text(text())
