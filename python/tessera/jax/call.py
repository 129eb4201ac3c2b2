"""The two calls into XLA, forward and backward: operands and attributes, gradients, and vmap."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tessera import _core, _score
from tessera._core import Error
from tessera._frameworks import output_dtype
from tessera._shapes import is_tensor, way_to_fold

from . import sharding

Tensors = dict[str, Any]  # by the names of a problem's tensors: q, k, v and the options that are arrays
Layouts = tuple[tuple[str, str, tuple[int, ...]], ...]  # of tensors: name, dtype, shape

_TARGET = "tessera_attention"
_FIELDS = {field["name"]: field for field in _core.option_fields()}
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")
# Tensors that number sequences or rows of keys; a batch within a batch would need another numbering.
_NUMBERING = (
    "cu_seqlens_q", "cu_seqlens_k", "page_table", "page_indptr", "page_indices", "prefix_groups", "prefix_lens",
)  # fmt: skip

for _target, _handlers in _core.jax_handlers().items():
    for _platform, _handler in _handlers.items():
        jax.ffi.register_ffi_target(_target, _handler, platform=_platform)


class Program(NamedTuple):
    """A score program, without its arrays: those are "captured0", "captured1" … of a call's tensors."""

    score: str
    mask: str
    declared: tuple[tuple[str, str, int], ...]  # (name, type, rank), of arrays, then of numbers
    numbers: tuple[float, ...]


class Settings(NamedTuple):
    """Constants of a traced program: the options that are not arrays and differ from their defaults."""

    options: tuple[tuple[str, Any], ...] = ()
    heads_first: bool = False  # q, k, v and o are [B, H, S, D]
    program: Program | None = None

    def get(self, name: str) -> Any:
        return dict(self.options).get(name)


def settings_of(options: dict[str, Any], program: Program | None = None) -> Settings:
    """Refuses an invalid value of an option, and a tracer where an option must be concrete."""
    given = []
    for name, value in options.items():
        field = _FIELDS[name]
        if isinstance(value, jax.core.Tracer):
            raise Error(
                f"{name}: traced by a JAX transformation, accepted a Python value (static_argnames holds it fast)"
            )
        if isinstance(value, (np.generic, np.ndarray, jax.Array)) and value.ndim == 0:
            value = value.item()
        if isinstance(value, list):
            value = tuple(value)
        if value is not None and value != field["default"]:
            given.append((name, value))
    heads_first = ("layout", "bhsd") in given
    return Settings(tuple(sorted(pair for pair in given if pair[0] != "layout")), heads_first, program)


def _attributes(settings: Settings) -> dict[str, Any]:
    """As the XLA handler expects them: 64-bit integers, or doubles."""
    attributes: dict[str, Any] = {"heads_first": np.int64(settings.heads_first)}
    for name, value in settings.options:
        annotation = _FIELDS[name]["annotation"]
        if name == "kernel":
            attributes[name] = np.int64(_core.kernel_names().index(value))
        elif annotation.startswith("float"):
            attributes[name] = np.float64(value)
        elif annotation.startswith("tuple"):
            attributes[name] = np.array(value, np.int64)
        else:
            attributes[name] = np.int64(value)
    if settings.program is not None:
        score, mask, declared, numbers = settings.program
        attributes |= {"score": score, "mask": mask, "declared": " ".join(f"{n} {kind} {r}" for n, kind, r in declared)}
        if numbers:
            attributes |= {"scalars": np.array(numbers, np.float64), "scalar_count": np.int64(len(numbers))}
    return attributes


def _is_captured(name: str) -> bool:
    return name.startswith("captured")


def _is_differentiable(name: str) -> bool:
    return name in _DIFFERENTIABLE or _is_captured(name)


def check(settings: Settings, tensors: Tensors) -> None:
    """Raises the library's errors while the program is traced, without a device."""
    q, v = tensors["q"].shape, tensors["v"].shape
    if len(q) < 3 or len(v) < 3:
        name, rank = ("q", len(q)) if len(q) < 3 else ("v", len(v))
        raise Error(f"{name}: rank {rank}, accepted [B, S, H, D], or packed [T, H, D]")
    o = jax.ShapeDtypeStruct((*q[:-1], v[-1]), output_dtype(tensors["q"]))
    _core.check_layouts(False, _layouts({**tensors, "o": o}), **_keywords(settings))


def _layouts(tensors: Tensors) -> Layouts:
    def layout(name: str, x: Any) -> tuple[str, str, tuple[int, ...]]:
        if name == "dropout_state":
            return name, "int64", (2,)
        return name, str(x.dtype).removesuffix("fn"), tuple(x.shape)  # float8_e4m3fn is the library's float8_e4m3

    return tuple(layout(name, x) for name, x in tensors.items())


def _keywords(settings: Settings) -> dict[str, Any]:
    """Options as `tessera.attention` takes them."""
    keywords = dict(settings.options)
    if settings.heads_first:
        keywords["layout"] = "bhsd"
    if settings.program is not None:
        keywords["program"] = _score.program(*settings.program[:3])
    return keywords


@functools.lru_cache(maxsize=256)
def _workspace_bytes(settings: Settings, backward: bool, layouts: Layouts) -> int:
    return _core.workspace_on_gpus(backward, layouts, **_keywords(settings))


def _lse_shape(settings: Settings, q: Any) -> tuple[int, ...]:
    rows, heads = q.shape[-3:-1]
    return (*q.shape[:-3], *((rows, heads) if settings.heads_first else (heads, rows)))


def _call(settings: Settings, backward: bool, operands: Tensors, results: Tensors) -> Tensors:
    """`results`: those that are wanted, with the shape and dtype that each has for operands of any shapes."""
    attributes = {"backward": np.int64(backward), **_attributes(settings)}

    def ffi_call(named: Tensors, *arrays: Any) -> list[Any]:
        call = jax.ffi.ffi_call(_TARGET, list(named.values()), vmap_method="sequential")
        return list(call(*arrays, operands=" ".join(operands), results=" ".join(named), **attributes))

    def run(*arrays: Any) -> list[Any]:
        given = dict(zip(operands, arrays))
        named = {name: shape_of(given) for name, shape_of in results.items()}
        if given["q"].size == 0:  # XLA captures no call that launches nothing
            return [jnp.zeros(x.shape, x.dtype) for x in named.values()]
        # On a GPU scratch memory is one more result: XLA then knows it when it records a command buffer.
        scratch = _workspace_bytes(settings, backward, _layouts({**given, **named}))
        if scratch == 0:
            return ffi_call(named, *arrays)
        with_scratch = {**named, "workspace": jax.ShapeDtypeStruct((scratch,), np.uint8)}
        return jax.lax.platform_dependent(
            *arrays, cpu=functools.partial(ffi_call, named), cuda=lambda *x: ffi_call(with_scratch, *x)[:-1]
        )

    shapes = {name: x.shape for name, x in operands.items()}
    by_number = bool(settings.get("dropout_p")) or settings.program is not None
    division = sharding.of_attention(shapes, settings.heads_first, by_number)
    call = sharding.divided(run, division, list(operands), list(results), backward)
    return dict(zip(results, call(*operands.values())))


# ---- shard_map ------------------------------------------------------------------------------------------------------


def _varying(x: Any) -> frozenset:
    """The mesh axes along which shards of `x` differ, as known to shard_map; empty in releases without that
    information."""
    if not hasattr(jax, "typeof"):
        return frozenset()
    kind = jax.typeof(x)
    of_axes = getattr(kind, "manual_axis_type", None)  # JAX 0.10; earlier `vma`
    return getattr(kind, "vma", frozenset()) if of_axes is None else of_axes.varying


def _vary(x: Any, axes: frozenset) -> Any:
    missing = tuple(axes - _varying(x))
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)


def _vary_with(tensors: Tensors, results: Tensors) -> Tensors:
    """Marks results as varying along every axis along which a tensor varies; the transformations of the calls lose
    this."""
    axes = frozenset().union(*map(_varying, tensors.values()))
    return {name: _vary(x, axes) for name, x in results.items()}


# ---- vmap -----------------------------------------------------------------------------------------------------------


def _map_in_turn(function: Any, tensors: Tensors, batched: dict[str, bool]) -> Any:
    """Computes one entry after another, where entries cannot be joined."""
    mapped = {name: x for name, x in tensors.items() if batched[name]}
    shared = {name: x for name, x in tensors.items() if not batched[name]}
    return jax.lax.map(lambda entry: function({**shared, **entry}), mapped)


def _can_fold(settings: Settings, tensors: Tensors, batched: dict[str, bool], inner_q: tuple[int, ...]) -> bool:
    if any(name in tensors for name in (*_NUMBERING, *sharding._SCALES)) or len(inner_q) != 4:
        return False
    # All sequences have one such tensor in common, such as the sink.
    if any(batched[name] and is_tensor(name) and way_to_fold(name) is None for name in tensors):
        return False
    # Dropout depends on (seed, batch, head, row, column), and each entry must get the bits that it would get alone; a
    # program may use its sequence's number.
    if settings.get("dropout_p") or settings.program is not None:
        return False
    return "sink" not in tensors or "d_o" not in tensors


def _fold(n: int, name: str, x: Any, is_batched: bool, batch: int, split: bool) -> Any:
    """[n, B, ...] as [n B, ...]. An unmapped tensor is repeated if its shape distinguishes the entries. `split`: every
    entry needs its own rows, for a gradient."""
    way = way_to_fold(name) if is_tensor(name) else "dense"
    if way is None:
        return x
    if way == "scores":  # [B|1, H|1, ...] or the last axes
        rank = 4
        inner = x.shape[1:] if is_batched else x.shape
        inner = (1,) * (rank - len(inner)) + tuple(inner)
        if not is_batched and inner[0] == 1 and not split:
            return x.reshape(inner)
        x = x.reshape(n, *inner) if is_batched else jnp.broadcast_to(x.reshape(inner), (n, *inner))
        return jnp.broadcast_to(x, (n, batch, *inner[1:])).reshape(n * batch, *inner[1:])
    if way == "heads":  # [Hq] or [B, Hq]
        inner = x.shape[1:] if is_batched else x.shape
        if not is_batched and len(inner) == 1:
            return x
        x = x if is_batched else jnp.broadcast_to(x, (n, *inner))
        x = x[:, None, :] if len(inner) == 1 else x
        return jnp.broadcast_to(x, (n, batch, inner[-1])).reshape(n * batch, inner[-1])
    x = x if is_batched else jnp.broadcast_to(x, (n, *x.shape))
    return x.reshape(n * batch, *x.shape[2:])


def _vmapped(run: Any, settings: Settings, static: Any, axis_size: int, in_batched: Any, tensors: Tensors) -> Any:
    """The rule of both calls: the mapped axis joins the batch."""
    batched = in_batched[0]
    inner_q = tensors["q"].shape[1:] if batched["q"] else tensors["q"].shape

    def function(entry: Tensors) -> Tensors:
        return run(settings, static, entry)

    if not _can_fold(settings, tensors, batched, inner_q):
        out = _map_in_turn(function, tensors, batched)
        return out, {name: True for name in out}
    batch = inner_q[0]
    wants_d_bias = "d_bias" in static
    folded = {
        name: _fold(axis_size, name, x, batched[name], batch, name == "bias" and wants_d_bias)
        for name, x in tensors.items()
    }
    out = {name: x.reshape(axis_size, batch, *x.shape[1:]) for name, x in function(folded).items()}
    if wants_d_bias:
        inner = tensors["bias"].shape[1:] if batched["bias"] else tensors["bias"].shape
        d_bias = out["d_bias"]
        if len(inner) < 4 or inner[0] == 1:  # one bias for the inner batch
            d_bias = d_bias.sum(1, keepdims=True)
        out["d_bias"] = d_bias.reshape(axis_size, *inner)
    return out, {name: True for name in out}


def _mappable(call: Any) -> Any:
    """`call(settings, static, tensors)` with that rule. `static` names its results."""

    def run(settings: Settings, static: Any, tensors: Tensors) -> Tensors:
        return _vary_with(tensors, mapped(settings, static, tensors))

    def mapped(settings: Settings, static: Any, tensors: Tensors) -> Tensors:
        with_rule = jax.custom_batching.custom_vmap(functools.partial(call, settings, static))
        with_rule.def_vmap(functools.partial(rule, settings, static))
        return with_rule(tensors)

    # `mapped`, not `run`: under vmap of shard_map, the `_vary` of the call that it replaces is in the program already.
    def rule(settings: Settings, static: Any, axis_size: int, in_batched: Any, tensors: Tensors) -> Any:
        return _vmapped(mapped, settings, static, axis_size, in_batched, tensors)

    return run


# ---- the two calls --------------------------------------------------------------------------------------------------


@_mappable
def _forward(settings: Settings, results: tuple[str, ...], tensors: Tensors) -> Tensors:
    def of_o(given: Tensors) -> Any:
        return jax.ShapeDtypeStruct((*given["q"].shape[:-1], given["v"].shape[-1]), output_dtype(given["q"]))

    def of_lse(given: Tensors) -> Any:
        return jax.ShapeDtypeStruct(_lse_shape(settings, given["q"]), np.float32)

    return _call(settings, False, tensors, {name: of_o if name == "o" else of_lse for name in results})


@_mappable
def _backward(settings: Settings, results: tuple[str, ...], tensors: Tensors) -> Tensors:
    def twin(name: str, given: Tensors) -> Any:
        source = given[name.removeprefix("d_")]
        return jax.ShapeDtypeStruct(source.shape, np.float32 if name in ("d_bias", "d_sink") else source.dtype)

    return _call(settings, True, tensors, {name: functools.partial(twin, name) for name in results})


def _differentiated_once(run: Any) -> Any:
    """`run` within a differentiation rule, where differentiating it would give a second derivative."""

    def call(settings: Settings, results: tuple[str, ...], tensors: Tensors) -> Tensors:
        return run(settings, results, tensors)

    def refuse(settings: Settings, results: tuple[str, ...], primals: Any, tangents: Any) -> Any:
        raise NotImplementedError("tessera.jax.attention: a second derivative was asked for, accepted is the first")

    checked = jax.custom_jvp(call, nondiff_argnums=(0, 1))
    checked.defjvp(refuse)
    return lambda settings, results, tensors: _vary_with(tensors, checked(settings, results, tensors))


_forward_once, _backward_once = map(_differentiated_once, (_forward, _backward))


# ---- gradients ------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def o_and_lse(settings: Settings, tensors: Tensors) -> tuple[Any, Any]:
    out = _forward(settings, ("o", "lse"), tensors)
    return out["o"], out["lse"]


def _save(settings: Settings, tensors: Tensors) -> Any:
    wanted = {name: () for name in tensors if _is_differentiable(name) and tensors[name].perturbed}
    for name, tensor in tensors.items():
        if tensor.perturbed and not _is_differentiable(name) and jnp.issubdtype(tensor.value.dtype, jnp.floating):
            raise NotImplementedError(f"{name}: its gradient was asked for, accepted jax.lax.stop_gradient of it")
    for name in ("page_table", "page_indices", "tree_mask", "prefix_groups"):
        if name in tensors:
            raise NotImplementedError(f"{name}: a gradient was asked for, accepted is the forward pass alone")
    tensors = {name: tensor.value for name, tensor in tensors.items()}
    out = _forward_once(settings, ("o", "lse"), tensors)
    return (out["o"], out["lse"]), (tensors, out, wanted)


def _differentiate(settings: Settings, saved: Any, cotangents: Any) -> Any:
    tensors, out, wanted = saved
    d_o, d_lse = (None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents)
    operands = {**tensors, **out, "d_o": jnp.zeros_like(out["o"]) if d_o is None else d_o}
    if d_lse is not None:
        operands["d_lse"] = d_lse
    results = ("d_q", "d_k", "d_v", *(f"d_{name}" for name in wanted if name not in ("q", "k", "v")))
    gradients = _backward_once(settings, results, operands)
    return ({name: _cotangent(gradients, name, tensor) for name, tensor in tensors.items()},)


def _cotangent(gradients: Tensors, name: str, tensor: Any) -> Any:
    gradient = gradients.get(f"d_{name}")
    if gradient is None:
        return None
    summed = tuple(_varying(gradient) - _varying(tensor))  # a tensor shared by all shards gets a gradient from each
    return (jax.lax.psum(gradient, summed) if summed else gradient).astype(tensor.dtype)


o_and_lse.defvjp(_save, _differentiate, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def o_alone(settings: Settings, tensors: Tensors) -> Any:
    """Without an LSE if no gradient is requested, which is faster."""
    return _forward(settings, ("o",), tensors)["o"]


def _save_o(settings: Settings, tensors: Tensors) -> Any:
    (o, _), saved = _save(settings, tensors)
    return o, saved


def _differentiate_o(settings: Settings, saved: Any, d_o: Any) -> Any:
    return _differentiate(settings, saved, (d_o, None))


o_alone.defvjp(_save_o, _differentiate_o, symbolic_zeros=True)

# Also outside of jit, a call is traced only once for its settings and shapes.
o_and_lse, o_alone = (jax.jit(function, static_argnums=0, inline=True) for function in (o_and_lse, o_alone))
