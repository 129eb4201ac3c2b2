"""Compares Tessera with standard attention and PyTorch's own on this machine: ``python -m tessera compare``.

Measures time, memory and the error against float64 for a range of lengths, and shows a table, JSON or a chart. PyTorch
is compared if it is installed. NumPy is required; rich and matplotlib are optional (the extra ``compare``).
"""

from tessera.compare.command import add_arguments, run

__all__ = ["add_arguments", "run"]
