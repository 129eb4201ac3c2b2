"""A progress bar on standard error, shown only if that is a terminal."""

from __future__ import annotations

import os
import sys


class Progress:
    def __init__(self, total: float):
        self._total, self._done = total, 0.0
        self._shown = sys.stderr.isatty()

    def advance(self, amount: float) -> None:
        self._done += amount

    def show(self, *what: str) -> None:
        if self._shown:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            share = min(1.0, self._done / self._total) if self._total else 1.0
            length = min(32, columns // 4)
            filled = int(share * length)
            line = f"{'█' * filled}{'░' * (length - filled)} {share:4.0%}  {''.join(what)}"
            if len(line) >= columns:  # a wrapped line could not be erased
                line = line[: columns - 2] + "…"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
