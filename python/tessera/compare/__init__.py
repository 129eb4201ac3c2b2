"""Tessera beside standard attention and PyTorch's own, on this machine: ``python -m tessera compare``.

Time, memory and the error against float64 over a range of lengths, as a table, as JSON, as a picture. PyTorch is a peer
where it is installed; NumPy is needed, rich and matplotlib are for looks (the extra ``compare``).
"""

from tessera.compare.command import add_arguments, run

__all__ = ["add_arguments", "run"]
