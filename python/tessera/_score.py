"""Score programs of a call: from text or from Python functions, with the arrays and numbers that they name."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Union

from tessera import _core
from tessera._trace import Names, kind_of, trace

Mod = Union[str, Callable[..., Any], None]


class Bound(NamedTuple):
    """A program with what it names, by number."""

    program: _core.ScoreProgram
    names: tuple[str, ...]  # of the arrays
    arrays: tuple[Any, ...]  # of rank 0 as [1]
    numbers: tuple[float, ...]
    scalars: frozenset[str]  # the arrays of rank 0
    score: str  # the texts of the program
    mask: str
    declared: tuple[tuple[str, str, int], ...]  # (name, type, rank) of arrays, then of numbers, whose rank is -1

    def array(self, name: str) -> Any:
        return self.arrays[self.names.index(name)]

    def differentiable(self, wanted: bool | Sequence[str] = True) -> list[str]:
        """The arrays of floating-point numbers; of `wanted`, unless it is True, all of which must be among them."""
        found = [name for name, x in zip(self.names, self.arrays) if kind_of(x) == "float"]
        if wanted is True:
            return found
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        for name in names:
            if name not in found:
                accepted = ", ".join(found) or "no name: no captured array is floating-point"
                raise _core.Error(f"grad_captured: {name!r}, accepted {accepted}")
        return names

    def shaped(self, gradients: dict[str, Any]) -> dict[str, Any]:
        """Gradients of arrays of rank 0 with rank 0."""
        return {name: x.reshape(()) if name in self.scalars else x for name, x in gradients.items()}

    def options(self) -> dict[str, Any]:
        """As _core takes it."""
        return {"program": self.program, "captured": self.arrays, "scalars": self.numbers}


@functools.lru_cache(maxsize=256)
def program(score: str, mask: str, names: tuple[tuple[str, str, int], ...]) -> _core.ScoreProgram:
    """One program for the same texts and declarations."""
    return _core.ScoreProgram(score, mask, names)


# Before the interpreter goes, so that no program outlives the module that it belongs to.
atexit.register(program.cache_clear)


def _text(argument: str, mod: Mod, names: Names) -> str:
    if mod is None or isinstance(mod, str):
        return mod or ""
    if not callable(mod):
        raise _core.Error(f"{argument}: {type(mod).__name__}, accepted a text or a function")
    return trace(argument, mod, names)


def bind(score_mod: Mod, mask_mod: Mod, captured: dict[str, Any] | None) -> Bound | None:
    """None: neither is given."""
    if score_mod is None and mask_mod is None:
        if captured:
            raise _core.Error("captured: given without score_mod and mask_mod, accepted with one of them")
        return None
    names = Names(captured)
    score, mask = _text("score_mod", score_mod, names), _text("mask_mod", mask_mod, names)
    declared = names.declared()
    scalars = frozenset(name for name, x in names.arrays.items() if len(x.shape) == 0)
    arrays = tuple(x.reshape(1) if name in scalars else x for name, x in names.arrays.items())
    numbers = tuple(map(float, names.numbers.values()))
    return Bound(
        program(score, mask, declared), tuple(names.arrays), arrays, numbers, scalars, score, mask, declared
    )  # fmt: skip
