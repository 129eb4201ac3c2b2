"""How the two calls are divided among devices under jit: by batch and by heads, without a gather of what is sharded so.

A tensor's axes have roles. Axes of one role are divided alike; axes without a role are whole on every device. The
gradient of what all devices of a role read (a bias for all sequences, the keys of one head) is summed over them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Literal, Optional

import jax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from tessera._shapes import axes_of, is_tensor

Role = Optional[Literal["batch", "heads_q", "heads_kv"]]
Roles = tuple[Role, ...]

# What numbers sequences across the batch: none of them is divided.
_ACROSS = ("page_indptr", "page_indices", "prefix_groups", "prefix_lens")
_SCALES = ("q_descale", "k_descale", "v_descale")


class Division:
    """Of one call: `roles_of(name, shape)` gives the roles of the axes of an operand, a result, or a gradient. A batch
    of 1 is not divided."""

    def __init__(self, batch: int, heads_q: int, heads_kv: int, roles_of: Callable[[str, tuple[int, ...]], list[Role]]):
        self._batch, self._heads_q, self._heads_kv, self._roles_of = batch, heads_q, heads_kv, roles_of

    def roles(self, name: str, shape: tuple[int, ...]) -> Roles:
        found = self._roles_of(name, shape)
        return tuple(None if extent == 1 else role for role, extent in zip(found, shape))

    def rule(self, names: list[str], shapes: list[tuple[int, ...]], operands: int) -> SdyShardingRule:
        """For Shardy: axes of one role are divided alike, and those of all heads where each has its own keys. Groups of
        query heads are a factor of their own: KV heads times a group would split the mesh's axes."""
        same = self._heads_q == self._heads_kv

        def factor(n: int, axis: int, role: Role) -> str:
            return f"whole_{n}_{axis}" if role is None else "heads_q" if same and role == "heads_kv" else role

        mappings = tuple(
            ArrayMapping(*(factor(n, axis, role) for axis, role in enumerate(self.roles(name, shape))))
            for n, (name, shape) in enumerate(zip(names, shapes))
        )
        return SdyShardingRule(mappings[:operands], mappings[operands:])

    def axes(self, mesh: Any, names: list[str], arguments: Any) -> dict[str, tuple[str, ...]]:
        """The mesh's axes that divide each role, of what the arguments are divided by: what divides evenly."""
        extents = {"batch": self._batch, "heads": self._heads_kv if self._heads_kv > 1 else self._heads_q}
        result: dict[str, tuple[str, ...]] = {"batch": (), "heads": ()}
        for kind, extent in extents.items():
            taken = {axis for axes in result.values() for axis in axes}
            for name, argument in zip(names, arguments):
                kinds = [_kind(role) for role in self.roles(name, argument.shape)]
                found = _axes_of(argument, kinds.index(kind)) if kind in kinds else ()
                if found and not taken & set(found) and extent % math.prod(mesh.shape[axis] for axis in found) == 0:
                    result[kind] = found
                    break
        return result


def of_attention(shapes: dict[str, tuple[int, ...]], heads_first: bool, by_number: bool) -> Division:
    """`shapes`: those of the operands. `by_number`: the result depends on the numbers of sequences and heads, which
    begin at 0 on every device: then nothing is divided."""
    packed, paged = len(shapes["q"]) == 3, "page_table" in shapes
    batch = 1 if packed else shapes["q"][0]
    head_axis = -3 if heads_first else -2
    heads_q, heads_kv = (shapes[name][head_axis] for name in ("q", "k"))
    whole = by_number or any(name in shapes for name in _ACROSS)

    def roles_of(name: str, shape: tuple[int, ...]) -> list[Role]:
        name = name.removeprefix("d_")
        found: list[Role] = [None] * len(shape)
        if whole:
            return found
        if name in ("q", "k", "v", "o"):
            found[head_axis] = "heads_kv" if name in ("k", "v") else "heads_q"
            if not packed and not (name in ("k", "v") and paged):
                found[0] = "batch"
        elif name in ("lse", "lse_low"):
            found[-2] = "heads_q"
            if not packed:
                found[0] = "batch"
        elif name in _SCALES:
            found[-1] = "heads_kv"
            if len(shape) == 2 or (len(shape) == 3 and not (paged and name != "q_descale")):
                found[0] = "batch"
        elif is_tensor(name):  # or its last axes
            extents: dict[str, tuple[Role, int]] = {"B": ("batch", batch), "Hq": ("heads_q", heads_q)}
            symbols = axes_of(name, len(shape))
            for axis, symbol in enumerate(symbols[len(symbols) - len(shape) :]):
                role, extent = extents.get(symbol.removesuffix("|1"), (None, 0))
                if symbol in extents or shape[axis] == extent:
                    found[axis] = role
        return found

    return Division(batch, heads_q, heads_kv, roles_of)


def of_append(shapes: dict[str, tuple[int, ...]]) -> Division:
    """Pages are all sequences', and `dropped` counts tokens of all: then devices divide the heads alone."""
    by_sequence = len(shapes["k"]) == 4 and "page_table" not in shapes and "dropped" not in shapes
    heads_kv = shapes["k"][-2]

    def roles_of(name: str, shape: tuple[int, ...]) -> list[Role]:
        found: list[Role] = [None] * len(shape)
        if name in ("k", "v", "k_cache", "v_cache", "q", "q_out"):
            found[-2] = "heads_q" if name in ("q", "q_out") else "heads_kv"
        elif name in ("k_descale", "v_descale"):  # [1], [Hkv], [B, Hkv] or, of pages, [pages, page_size, Hkv]
            found[-1] = "heads_kv"
            if len(shape) == 1:
                return found
        elif name not in ("seqused_k", "positions_q", "positions_k"):
            return found
        if by_sequence:
            found[0] = "batch"
        return found

    heads_q = shapes["q"][-2] if "q" in shapes else heads_kv
    return Division(shapes["k"][0] if by_sequence else 1, heads_q, heads_kv, roles_of)


def _kind(role: Role) -> str | None:
    return None if role is None else "batch" if role == "batch" else "heads"


def _axes_of(argument: Any, place: int) -> tuple[str, ...]:
    """The mesh's axes along which an argument's axis is divided."""
    spec = getattr(argument.sharding, "spec", ())
    if place >= len(spec) or spec[place] is None:
        return ()
    return spec[place] if isinstance(spec[place], tuple) else (spec[place],)


def divided(
    run: Callable[..., list[Any]], division: Division, operands: list[str], results: list[str], backward: bool
) -> Callable[..., list[Any]]:
    """`run(*arrays)`, a list of arrays from arrays of any shapes, as XLA may divide it."""

    def place(mesh: Any, arguments: Any, found: Any) -> tuple[dict[str, tuple[str, ...]], list[Any], list[Any]]:
        axes = division.axes(mesh, operands, arguments)

        def sharding(name: str, x: Any) -> NamedSharding:
            roles = division.roles(name, x.shape)
            entries = [axes[kind] or None if (kind := _kind(role)) else None for role in roles]
            return NamedSharding(mesh, PartitionSpec(*entries))

        return axes, [sharding(*pair) for pair in zip(operands, arguments)], [sharding(*p) for p in zip(results, found)]

    def partition(mesh: Any, arguments: Any, found: Any) -> Any:
        axes, of_arguments, of_results = place(mesh, arguments, found)
        summed = [_summed(division.roles(name, x.shape), axes) if backward else () for name, x in zip(results, found)]

        def on_each(*arrays: Any) -> list[Any]:
            return [jax.lax.psum(x, over) if over else x for x, over in zip(run(*arrays), summed)]

        return mesh, on_each, of_results, tuple(of_arguments)

    def infer(mesh: Any, arguments: Any, found: Any) -> Any:  # without Shardy
        return place(mesh, arguments, found)[2]

    @functools.wraps(run)
    def call(*arrays: Any) -> list[Any]:
        shapes = [x.shape for x in (*arrays, *jax.eval_shape(run, *arrays))]
        partitioned = custom_partitioning(run)
        partitioned.def_partition(
            partition, infer_sharding_from_operands=infer,
            sharding_rule=division.rule([*operands, *results], shapes, len(operands)),
        )  # fmt: skip
        return partitioned(*arrays)

    return call


def _summed(roles: Roles, axes: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    kinds = {_kind(role) for role in roles}
    return tuple(axis for kind, of_kind in axes.items() if kind not in kinds for axis in of_kind)
