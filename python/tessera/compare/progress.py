"""A progress bar on standard error, shown only where that is a terminal."""

from __future__ import annotations

import sys


class Progress:
    def __init__(self, total: float):
        self._total, self._done = total, 0.0
        self._shown = sys.stderr.isatty()

    def advance(self, amount: float) -> None:
        self._done += amount

    def show(self, *what: str) -> None:
        if self._shown:
            share = min(1.0, self._done / self._total) if self._total else 1.0
            filled = int(share * 32)
            print(
                f"\r\033[K{'█' * filled}{'░' * (32 - filled)} {share:4.0%}  {''.join(what)}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def clear(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
