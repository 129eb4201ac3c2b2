"""Tessera: exact, IO-aware attention."""

from tessera._core import Error
from tessera._core import version as __version__

__all__ = ["Error", "__version__"]
