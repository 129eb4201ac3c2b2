"""Every program of the table of definitions (tests/unit/core/score/definitions.cpp, whose meanings in C++ the oracle is
held to) through NumPy, PyTorch, JAX and the command-line program."""

import functools
import importlib
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import tessera

TABLE = (Path(__file__).resolve().parents[1] / "unit/core/score/definitions.cpp").read_text()
DEFINITIONS = re.findall(r'^ +\{"([^"]+)", "([^"]*)", "([^"]*)", ', TABLE, re.MULTILINE)
SCALARS = {name: float(value) for name, value in re.findall(r'\{"(\w+)", ([\d.]+)\}', TABLE)}
B, H, HKV, SQ, SK, D = 2, 4, 2, 40, 56, 8
MOST = max(SQ, SK)
RANDOM = np.random.default_rng(7)


def drawn():
    """{name: array} of the names that the table's programs read."""
    sizes = {"batch": B, "heads": H, "len_q": SQ, "len_k": SK, "most": MOST}
    own = {
        "cap": lambda shape: np.full(shape, 5.0), "slope": lambda shape: 2.0 ** -np.arange(1, shape[0] + 1),
        "decay": lambda shape: 1 - 2.0 ** -np.arange(5, 5 + shape[0]), "used": lambda shape: np.array([20, 50]),
        "doc": lambda shape: np.cumsum(RANDOM.random(shape) < 0.2, -1),
        "keep": lambda shape: RANDOM.random(shape) < 0.5,
        "span": lambda shape: np.zeros(shape) + np.arange(shape[1]) // 5 * (np.arange(shape[1]) // 5 % 3 == 0),
        "id": lambda shape: RANDOM.integers(0, 7, shape),
    }  # fmt: skip
    dtypes = {"Float": np.float32, "Int": np.int32, "Bool": np.bool_}
    found = {}
    for name, kind, shape in re.findall(r'add\("(\w+)", Type::k(\w+), \{([^}]*)\}', TABLE):
        shape = tuple(eval(extent, {}, sizes) for extent in shape.split(",") if extent.strip())
        values = own[name](shape) if name in own else 0.5 + np.abs(RANDOM.standard_normal(shape))
        found[name] = np.asarray(values).astype(dtypes[kind])
    return found


ARRAYS = drawn()
Q, K, V, D_O = (
    RANDOM.standard_normal(shape).astype(np.float32).astype(np.float64)
    for shape in ((B, SQ, H, D), (B, SK, HKV, D), (B, SK, HKV, D), (B, SQ, H, D))
)


def options_of(definition):
    _, score, mask = definition
    words = set(re.findall(r"\w+", score + " " + mask))
    captured = {name: x for name, x in ARRAYS.items() if name in words}
    captured.update((name, x if name == "t" else int(x)) for name, x in SCALARS.items() if name in words)
    return {"score_mod": score or None, "mask_mod": mask or None, "captured": captured or None}


def in_double(captured):
    return {n: x.astype(np.float64) if getattr(x, "dtype", None) == np.float32 else x for n, x in captured.items()}


def exact(definition):
    """o, lse, gradients in float64."""
    options = options_of(definition)
    options["captured"] = in_double(options["captured"] or {}) or None
    o, lse = tessera.attention(Q, K, V, return_lse=True, **options)
    return o, lse, tessera.attention_backward(Q, K, V, o, lse, D_O, grad_captured=True, **options)


def close(own, expected, tolerance):
    own, expected = np.asarray(own), np.asarray(expected)
    assert np.abs(own - expected).max(initial=0) <= tolerance * max(1, np.abs(expected).max(initial=0))


def test_the_table_is_read_whole():
    rows = re.findall(r'^      \{"', TABLE, re.MULTILINE)
    assert len(DEFINITIONS) == len(rows) >= 40
    assert len(ARRAYS) == TABLE.count('  add("') and len(SCALARS) == 4


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda x: x[0].replace(" ", "_"))
def test_numpy_and_pytorch(definition):
    o, lse, gradients = exact(definition)
    options = options_of(definition)
    q, k, v, d_o = (x.astype(np.float32) for x in (Q, K, V, D_O))
    own, own_lse, low = tessera.attention(q, k, v, return_lse_low=True, **options)
    own_gradients = tessera.attention_backward(
        q, k, v, own, own_lse, d_o, lse_low=low, grad_captured=True, **options
    )  # fmt: skip
    close(own, o, 1e-5)
    for name in ("d_q", "d_k", "d_v"):
        close(getattr(own_gradients, name), getattr(gradients, name), 5e-5)
    assert own_gradients.d_captured.keys() == gradients.d_captured.keys()
    for name, expected in gradients.d_captured.items():
        close(own_gradients.d_captured[name], expected, 1e-4)

    torch = pytest.importorskip("torch")
    attention = importlib.import_module("tessera.torch").attention
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    given = (options["captured"] or {}).items()
    captured = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in given}
    learned = [x.requires_grad_() for x in captured.values() if getattr(x, "dtype", None) == torch.float32]
    of_torch = attention(*leaves, **{**options, "captured": captured or None})
    assert np.array_equal(of_torch.detach().numpy(), own)
    found = torch.autograd.grad(of_torch, [*leaves, *learned], torch.from_numpy(d_o))
    for mine, other in zip(found, (*own_gradients[:3], *own_gradients.d_captured.values())):
        assert np.array_equal(mine.numpy(), other)


def every(attention, q, k, v, arrays):
    """The results of all definitions, whose captured arrays are those of a framework."""
    results = []
    for definition in DEFINITIONS:
        options = options_of(definition)
        captured = {n: arrays.get(n, x) for n, x in (options["captured"] or {}).items()}
        results.append(attention(q, k, v, **{**options, "captured": captured or None}))
    return results


def test_one_compiled_program_of_all():
    torch = pytest.importorskip("torch")
    attention = importlib.import_module("tessera.torch").attention
    tensors = [torch.from_numpy(x) for x in (Q, K, V)]
    arrays = {name: torch.from_numpy(x) for name, x in in_double(ARRAYS).items()}

    compiled = torch.compile(functools.partial(every, attention), fullgraph=True, backend="aot_eager")
    own = compiled(*tensors, arrays)
    for mine, definition in zip(own, DEFINITIONS):
        assert np.array_equal(mine.numpy(), exact(definition)[0]), definition[0]


def test_jax():
    jax = pytest.importorskip("jax")
    attention = importlib.import_module("tessera.jax").attention
    q, k, v = (jax.numpy.asarray(x, np.float32) for x in (Q, K, V))
    arrays = {name: jax.numpy.asarray(x) for name, x in ARRAYS.items()}

    for mine, definition in zip(jax.jit(functools.partial(every, attention))(q, k, v, arrays), DEFINITIONS):
        close(mine, exact(definition)[0], 1e-5)


@pytest.mark.skipif("TESSERA_PROGRAM" not in os.environ, reason="TESSERA_PROGRAM: the program is not built")
def test_the_program(tmp_path):
    for name, array in {"q": Q, "k": K, "v": V, "d_o": D_O, **in_double(ARRAYS)}.items():
        np.save(tmp_path / f"{name}.npy", array)
    for definition in DEFINITIONS:
        options = options_of(definition)
        o, _, gradients = exact(definition)
        command = [os.environ["TESSERA_PROGRAM"], "run", "q.npy", "k.npy", "v.npy", "-o", "out.npy"]
        command += ["--dtype", "float64", "--grad", "d_o.npy", "--dq", "dq.npy"]
        for flag, text in (("--score-mod", options["score_mod"]), ("--mask-mod", options["mask_mod"])):
            command += [flag, text] if text else []
        bound = [f"{n}={n}.npy" if n in ARRAYS else f"{n}={x!r}" for n, x in (options["captured"] or {}).items()]
        command += ["--bind", *bound] if bound else []
        learned = list(gradients.d_captured)
        command += ["--dbind", *(f"{n}=d_{n}.npy" for n in learned)] if learned else []
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, f"{definition[0]}: {run.stderr}"
        assert np.array_equal(np.load(tmp_path / "out.npy"), o), definition[0]
        assert np.array_equal(np.load(tmp_path / "dq.npy"), gradients.d_q), definition[0]
        for name in learned:
            own = np.load(tmp_path / f"d_{name}.npy")
            assert np.array_equal(own, gradients.d_captured[name]), (definition[0], name)
