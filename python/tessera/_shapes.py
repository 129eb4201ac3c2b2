"""The axes of the options that are tensors, from the library's table of fields: by these they are folded under vmap and
divided among devices."""

from __future__ import annotations

from tessera import _core

_SHAPES = {
    field["name"]: [tuple(shape[1:-1].split(", ")) for shape in field["shapes"]]
    for field in _core.option_fields()
    if "shapes" in field
}


def axes_of(name: str, rank: int) -> tuple[str, ...]:
    """The symbols of an option's axes if it has that rank, such as ("B", "Hq"), or those of its first shape; () for
    what is no tensor among the options. "B|1" is B or 1."""
    shapes = _SHAPES.get(name, [()])
    return next((shape for shape in shapes if len(shape) == rank), shapes[0])


def way_to_fold(name: str) -> str | None:
    """How a batch of batches becomes one batch, [V, B, ...] -> [V * B, ...]: "scores" if its own batch may be 1, or its
    first axes absent; "heads" for [Hq] or [B, Hq]; "dense" if it begins with B; None if all sequences have one in
    common, such as the sink."""
    first = axes_of(name, 4)[:1]
    if first == ("B|1",):
        return "scores"
    if first == ("B",):
        return "dense"
    return "heads" if any(shape[0] == "B" for shape in _SHAPES.get(name, ())) else None


def is_tensor(name: str) -> bool:
    return name in _SHAPES
