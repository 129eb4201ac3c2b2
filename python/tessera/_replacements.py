"""Functions of other libraries, replaced in every imported module that holds them."""

from __future__ import annotations

import sys
from typing import Any


class Replacements:
    """What was replaced, to be restored."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, str, Any, Any]] = []  # (module, name, its own function, ours)

    def __bool__(self) -> bool:
        return bool(self._places)

    def replace(self, own: Any, ours: Any, except_in: Any) -> None:
        """Replaces `own` by `ours` under every name that an imported module has for it, but in module `except_in`."""
        for module in list(sys.modules.values()):
            names = vars(module) if hasattr(module, "__dict__") else {}
            for name, value in list(names.items()):
                if value is own and module is not except_in:
                    setattr(module, name, ours)
                    self._places.append((module, name, own, ours))

    def names(self) -> list[str]:
        """As "module.name"."""
        return sorted(f"{module.__name__}.{name}" for module, name, *_ in self._places)

    def restore(self) -> None:
        """Restores each library's own function, except where it was replaced again since."""
        while self._places:
            module, name, own, ours = self._places.pop()
            if getattr(module, name, None) is ours:
                setattr(module, name, own)
