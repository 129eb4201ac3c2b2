"""Attention of one sequence over several devices under `shard_map`: keys and values travel around a ring.

Which rows a device has, and which rectangles of queries and keys it computes, is the schedule of the library
(tessera/distributed.h). Parts are merged by (o, lse, lse_low) in float32, which is exact up to the rounding of float32.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tessera import _core
from tessera._core import Error
from tessera._hints import unexpected_option
from tessera._ranks.calls import Call, Rectangle, calls
from tessera._ranks.schedule import Schedule, schedule

from . import call
from .api import _array

# A call sees a part of the rows and not where they are: what depends on that is refused.
_ACCEPTED = ("scale", "causal", "window", "softcap", "sink", "deterministic", "threads")
_LAYOUTS = ("contiguous", "zig_zag")


class Step(NamedTuple):
    """One position of the ring: this device's queries with the keys of the device `offset` before it."""

    offset: int
    programs: tuple[tuple[Call, ...], ...]  # those that differ
    which: tuple[int, ...]  # of each device


class Ring(NamedTuple):
    axis_name: Any
    ranks: int
    steps: tuple[Step, ...]
    values: tuple[tuple[str, Any], ...]  # options of every call


# ---- the schedule ---------------------------------------------------------------------------------------------------


def _check_layout(layout: str) -> None:
    if layout not in _LAYOUTS:
        accepted = " or ".join(f'"{name}"' for name in _LAYOUTS)
        raise Error(f'layout: "{layout}", accepted {accepted}: the rows that each device has')


def _schedule(length: int, rank: int, ranks: int, layout: str, causal: bool, window: tuple[int, int]) -> Schedule:
    return schedule(
        (length,), rank, ranks=ranks, layout=layout, strategy="ring", causal=int(causal), window_left=window[0],
        window_right=window[1], batch=1, heads_q=1, heads_kv=1, head_dim=1,
    )  # fmt: skip


def ring_positions(length: int, ranks: int, layout: str = "zig_zag") -> np.ndarray:
    """Which row of a sequence each row of an array is that `ranks` devices share in equal parts, int32 [length].

        positions = tessera.jax.ring_positions(S, ranks)
        x = x[:, positions]                         # sharded along this axis, each device has its rows of "zig_zag"
        x = x[:, np.argsort(positions)]             # in order again

    Layouts: "contiguous" has rows in order; "zig_zag" gives each device two ranges, one from the front and one from the
    back, so that devices compute equal areas of a causal mask.

    Raises:
        tessera.Error: (a ValueError) the layout is unknown, or its ranges are not equal for this length.
    """
    _check_layout(layout)
    ranges = (2 if layout == "zig_zag" else 1) * ranks
    if ranks < 1 or length < 0 or length % ranges != 0:
        raise Error(f"length: {length}, accepted a multiple of {ranges} for {layout} on {ranks} devices")
    chunks = sorted(_schedule(length, 0, ranks, layout, False, (-1, -1)).chunks, key=lambda c: (c.rank, c.row))
    parts = [np.arange(chunk.begin, chunk.begin + chunk.length, dtype=np.int32) for chunk in chunks]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


@functools.lru_cache(maxsize=256)
def _steps(rows: int, ranks: int, layout: str, causal: bool, window: tuple[int, int]) -> tuple[Step, ...]:
    """Offsets whose keys no device sees are left out."""
    rectangles: dict[tuple[int, int], list[Rectangle]] = {}  # by offset and rank
    for rank in range(ranks):
        made = _schedule(rows * ranks, rank, ranks, layout, causal, window)
        for pair in (pair for step in made.steps for pair in step.pairs):
            q, k = made.chunks[pair.q_chunk], made.chunks[pair.k_chunk]
            rectangle = Rectangle(
                0, q.row + pair.q_begin - q.begin, pair.q_length, k.row + pair.k_begin - k.begin, pair.k_length,
                pair.window_left, pair.window_right,
            )  # fmt: skip
            rectangles.setdefault(((rank - k.rank) % ranks, rank), []).append(rectangle)
    result = []
    for offset in sorted({offset for offset, _ in rectangles}):
        of_ranks = [tuple(calls(rectangles.get((offset, rank), []), packed=False)) for rank in range(ranks)]
        programs = tuple(dict.fromkeys(of_ranks))
        result.append(Step(offset, programs, tuple(programs.index(program) for program in of_ranks)))
    return tuple(result)


# ---- parts ----------------------------------------------------------------------------------------------------------


class Partial(NamedTuple):
    """Rows over the keys so far."""

    o: Any  # [B, S, H, Dv], float32, or float64 where q is
    lse: Any  # [B, H, S], float32
    low: Any  # what the rounding of lse leaves out


def _by_row(x: Any) -> Any:
    return jnp.swapaxes(x, 1, 2)[..., None]  # [B, H, S] as [B, S, H, 1]


def _merge(a: Partial, b: Partial) -> Partial:
    """LSE = m + log sum_n exp(LSE_n - m) with m the larger, o = sum_n exp(LSE_n - LSE) o_n. -inf: it saw nothing."""
    wide = a.o.dtype
    of_a, of_b = (x.lse.astype(wide) + x.low.astype(wide) for x in (a, b)) if wide == np.float64 else (a.lse, b.lse)
    largest = jnp.maximum(of_a, of_b)
    sees = largest > -jnp.inf
    base = jnp.where(sees, largest, 0)
    # In float32 the digits below LSE's own join the difference, not the LSE, whose rounding would lose them.
    low_a, low_b = (jnp.zeros_like(base),) * 2 if wide == np.float64 else (a.low, b.low)
    w_a, w_b = (jnp.exp((x - base) + low) for x, low in ((of_a, low_a), (of_b, low_b)))
    total = jnp.where(sees, w_a + w_b, 1)
    above = jnp.log(total)
    lse = (base + above).astype(np.float32)
    rounded = lse.astype(wide) - base  # the error of the sum (Knuth's two-sum)
    low = (base - (lse.astype(wide) - rounded)) + (above - rounded)
    o = _by_row(w_a / total) * a.o + _by_row(w_b / total) * b.o
    return Partial(o, jnp.where(sees, lse, -jnp.inf), jnp.where(sees, low, 0).astype(np.float32))


def _rows(x: Any, first: int, count: int, axis: int = 1) -> Any:
    return x if count == x.shape[axis] else jax.lax.slice_in_dim(x, first, first + count, axis=axis)


def _put(x: Any, rows: Any, first: int, axis: int = 1) -> Any:
    return rows if rows.shape == x.shape else jax.lax.dynamic_update_slice_in_dim(x, rows, first, axis=axis)


def _added(total: Any, part: Any, first: int) -> Any:
    return _put(total, _rows(total, first, part.shape[1]) + part.astype(total.dtype), first)


# ---- around the ring ------------------------------------------------------------------------------------------------


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, np.float32)


def _axes(*arrays: Any) -> frozenset:
    return frozenset().union(*(call._varying(x) for x in arrays))


def _shift(ring: Ring, arrays: Any, by: int) -> Any:
    """What the device `by` places before this one has."""
    if by % ring.ranks == 0:
        return arrays
    places = [(rank, (rank + by) % ring.ranks) for rank in range(ring.ranks)]
    return tuple(jax.lax.ppermute(x, ring.axis_name, places) for x in arrays)


def _choose(ring: Ring, step: Step, run: Callable[[tuple[Call, ...], Any], Any], state: Any) -> Any:
    """`run(calls, state)` with this device's calls."""
    if len(step.programs) == 1:
        return run(step.programs[0], state)
    which = jnp.asarray(step.which, np.int32)[jax.lax.axis_index(ring.axis_name)]
    return jax.lax.switch(which, [functools.partial(run, program) for program in step.programs], state)


def _settings(ring: Ring, planned: Call) -> call.Settings:
    return call.settings_of({**dict(ring.values), **planned.options()})


def _forward(ring: Ring, tensors: call.Tensors, run: Any) -> Partial:
    q, keys = tensors["q"], (tensors["k"], tensors["v"])
    axes = _axes(q, *keys) | _own_axes(ring, q)
    batch, rows, heads = q.shape[:3]
    empty = Partial(
        jnp.zeros((*q.shape[:3], keys[1].shape[3]), _wide(q.dtype)),
        jnp.full((batch, heads, rows), -jnp.inf, np.float32),
        jnp.zeros((batch, heads, rows), np.float32),
    )
    partial = jax.tree.map(lambda x: call._vary(x, axes), empty)

    def compute(program: tuple[Call, ...], state: Any) -> Partial:
        keys, partial = state
        for planned in program:
            operands = {
                "q": _rows(q, planned.q_row, planned.q_length),
                **{name: _rows(x, planned.k_row, planned.k_length) for name, x in zip("kv", keys)},
            }
            out = run(_settings(ring, planned), ("o", "lse", "lse_low"), operands)
            part = Partial(out["o"].astype(_wide(q.dtype)), out["lse"], out["lse_low"])
            first, count = planned.q_row, planned.q_length
            before = Partial(*(_rows(x, first, count, axis) for x, axis in zip(partial, (1, 2, 2))))
            merged = _merge(before, part)
            partial = Partial(*(_put(x, y, first, axis) for x, y, axis in zip(partial, merged, (1, 2, 2))))
        return jax.tree.map(lambda x: call._vary(x, axes), partial)

    at = 0
    for step in ring.steps:
        keys, at = _shift(ring, keys, step.offset - at), step.offset
        partial = _choose(ring, step, compute, (keys, partial))
    if "sink" in tensors:  # one more part, whose values are 0
        sink = jnp.broadcast_to(tensors["sink"][None, :, None], partial.lse.shape)
        partial = _merge(partial, Partial(jnp.zeros_like(partial.o), sink, jnp.zeros_like(partial.low)))
    return partial


def _own_axes(ring: Ring, like: Any) -> frozenset:
    """The ring's axes, where shard_map tells what differs between devices."""
    names = ring.axis_name if isinstance(ring.axis_name, tuple) else (ring.axis_name,)
    return frozenset(names) & call._varying(jax.lax.axis_index(ring.axis_name))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, tensors: call.Tensors) -> tuple[Any, Any]:
    partial = _forward(ring, tensors, call._forward)
    return partial.o.astype(tensors["q"].dtype), partial.lse


def _save(ring: Ring, tensors: call.Tensors) -> Any:
    partial = _forward(ring, tensors, call._forward_once)
    o = partial.o.astype(tensors["q"].dtype)
    return (o, partial.lse), (tensors, o, partial.lse, partial.low)


def _differentiate(ring: Ring, saved: Any, cotangents: Any) -> Any:
    tensors, o, lse, low = saved
    d_o, d_lse = cotangents
    q, keys = tensors["q"], (tensors["k"], tensors["v"])
    axes = _axes(q, *keys, d_o, d_lse) | _own_axes(ring, q)

    def zeros(x: Any) -> Any:
        return call._vary(jnp.zeros(x.shape, _wide(x.dtype)), axes)

    def compute(program: tuple[Call, ...], state: Any) -> Any:
        keys, d_q, d_keys = state
        for planned in program:
            first, count = planned.q_row, planned.q_length
            operands = {"q": _rows(q, first, count)}
            operands |= {name: _rows(x, planned.k_row, planned.k_length) for name, x in zip("kv", keys)}
            operands |= {name: _rows(x, first, count) for name, x in (("o", o), ("d_o", d_o))}
            of_lse = (("lse", lse), ("lse_low", low), ("d_lse", d_lse))
            operands |= {name: _rows(x, first, count, 2) for name, x in of_lse}
            out = call._backward_once(_settings(ring, planned), ("d_q", "d_k", "d_v"), operands)
            d_q = _added(d_q, out["d_q"], first)
            d_keys = tuple(_added(x, out[name], planned.k_row) for name, x in zip(("d_k", "d_v"), d_keys))
        return jax.tree.map(lambda x: call._vary(x, axes), (d_q, d_keys))

    d_q, d_keys, at = zeros(q), tuple(map(zeros, keys)), 0
    for step in ring.steps:  # the gradients of keys travel with them
        keys, d_keys = (_shift(ring, x, step.offset - at) for x in (keys, d_keys))
        at = step.offset
        d_q, d_keys = _choose(ring, step, compute, (keys, d_q, d_keys))
    d_keys = _shift(ring, d_keys, -at)
    gradients = {"d_q": d_q, "d_k": d_keys[0], "d_v": d_keys[1]}
    if "sink" in tensors:
        delta = jnp.swapaxes((d_o.astype(_wide(o.dtype)) * o.astype(_wide(o.dtype))).sum(-1), 1, 2)
        weight = jnp.exp((tensors["sink"][None, :, None] - lse) - low)
        gradients["d_sink"] = (weight * (d_lse - delta)).sum((0, 2))
    return ({name: call._cotangent(gradients, name, x) for name, x in tensors.items()},)


_ring.defvjp(_save, _differentiate)


# ---- the call -------------------------------------------------------------------------------------------------------


def _size_of(axis_name: Any) -> int:
    try:
        return int(jax.lax.psum(1, axis_name))
    except NameError:
        raise Error(f"axis_name: {axis_name!r}, accepted an axis of the mesh of the shard_map around it") from None


def ring_attention(
    q: Any, k: Any, v: Any, *, axis_name: Any, layout: str = "contiguous", return_lse: bool = False, **options: Any
) -> Any:
    """Exact attention of sequences whose rows are divided among the devices of a mesh's axis, under `jax.shard_map`:
    each device calls it with its rows, and keys and values travel around the ring. Differentiable in q, k, v and sink,
    through O and LSE.

        rows = jax.sharding.PartitionSpec(None, "ring")
        attend = functools.partial(tessera.jax.ring_attention, axis_name="ring", causal=True)
        o = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows))(q, k, v)

    Args:
        q, k, v: this device's rows, [B, S / N, Hq, D], [B, S / N, Hkv, D], [B, S / N, Hkv, Dv].
        axis_name: the mesh's axis, or a tuple of axes, of N devices.
        layout: the rows that each device has: "contiguous", as an array that is sharded along its rows has them, or
            "zig_zag", which `ring_positions` makes: with `causal`, devices compute equal areas.
        return_lse: also return LSE, float32 [B, Hq, S / N].
        scale, causal, window, softcap, deterministic, threads: as `tessera.jax.attention` has them, over the whole
            sequence.
        sink: [Hq], the same on all devices.

    A part's O is rounded to the dtype of q before it is merged; merging, and the sums of gradients on their way around
    the ring, are in float32.

    Raises:
        tessera.Error: (a ValueError) while the program is traced: an argument is wrong, or not accepted here (bias,
            masks, alibi_slopes, dropout and what else depends on where rows are); one line names it.
    """
    _check_layout(layout)
    for name, value in options.items():
        if name not in _ACCEPTED and name not in call._FIELDS:
            raise TypeError(unexpected_option("ring_attention", name))
        is_default = value is None or not hasattr(value, "shape") and value == call._FIELDS[name]["default"]
        if name not in _ACCEPTED and not is_default:
            raise Error(
                f"{name}: not accepted by ring_attention, whose calls see a part of the rows and not where they are; "
                f"accepted {', '.join(_ACCEPTED)}"
            )
    tensors = {name: _array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, x in tensors.items():
        if x.ndim != 4:
            raise Error(f"{name}: rank {x.ndim}, accepted [B, S / N, H, D]")
        if x.shape[:2] != tensors["q"].shape[:2]:
            raise Error(
                f"{name}: shape {list(x.shape)}, q has {list(tensors['q'].shape)}: accepted this device's same rows"
            )
    settings = call.settings_of({name: x for name, x in options.items() if name in _ACCEPTED and name != "sink"})
    if options.get("sink") is not None:
        tensors["sink"] = _array("sink", options["sink"]).astype(np.float32)
    call.check(settings, tensors)
    ranks, rows = _size_of(axis_name), tensors["q"].shape[1]
    if layout == "zig_zag" and rows % 2 != 0:
        raise Error(f"q: {rows} rows on each device, accepted an even number with zig_zag")
    values = dict(settings.options)
    steps = _steps(rows, ranks, layout, values.pop("causal", False), values.pop("window", (-1, -1)))
    o, lse = _ring(Ring(axis_name, ranks, steps, tuple(sorted(values.items()))), tensors)
    return (o, lse) if return_lse else o
