"""Score programs in JAX, if it is installed: texts and traced functions under jit, grad and vmap."""

import os

os.environ.setdefault(
    "XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
)  # fmt: skip

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import tessera  # noqa: E402
import tessera.jax  # noqa: E402
from tessera._score import bind  # noqa: E402

B, S, H, D = 2, 24, 4, 16


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def arrays(random):
    return [jnp.asarray(random.standard_normal((B, S, H, D)).astype(np.float32)) for _ in range(3)]


@pytest.fixture
def table(random):
    return jnp.asarray(random.standard_normal((H, 2 * S)).astype(np.float32))


def plain(q, k, v, score_mod=None, mask_mod=None):
    """The functions on whole arrays."""
    s = jnp.einsum("bihd,bjhd->bhij", q, k) / D**0.5
    at = jnp.meshgrid(*map(jnp.arange, s.shape), indexing="ij")
    s = s if score_mod is None else score_mod(s, *at)
    s = s if mask_mod is None else jnp.where(mask_mod(*at), s, -jnp.inf)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v)


def close(own, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=3e-5, rtol=3e-5), own, expected)


def test_a_text_and_its_gradients_under_jit(arrays, table):
    gain = jnp.float32(1.5) * jnp.ones(())

    def loss(q, k, v, table, gain):
        o, lse = tessera.jax.attention(
            q, k, v, score_mod="c * tanh(s * gain[] / c) + table[h, i - j + 24]", mask_mod="j <= i",
            captured={"table": table, "gain": gain, "c": 2.5}, return_lse=True,
        )  # fmt: skip
        return (o * jnp.cos(o)).sum() + lse.sum()

    def expected(q, k, v, table, gain):
        s = jnp.einsum("bihd,bjhd->bhij", q, k) / D**0.5
        i, j = jnp.arange(S)[:, None], jnp.arange(S)
        s = jnp.where(j <= i, 2.5 * jnp.tanh(s * gain / 2.5) + table[:, i - j + 24], -jnp.inf)
        o = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v)
        return (o * jnp.cos(o)).sum() + jax.scipy.special.logsumexp(s, axis=-1).sum()

    given = (*arrays, table, gain)
    own, theirs = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3, 4)))(*given) for f in (loss, expected))
    np.testing.assert_allclose(own[0], theirs[0], rtol=1e-5)
    close(own[1], theirs[1])


DOC = jnp.arange(S) // 7
FUNCTIONS = {
    "tanh and where": (lambda s, b, h, i, j: jnp.where(i >= j, 3 * jnp.tanh(s / 3), s), None),
    "documents": (None, lambda b, h, i, j: (DOC[i] == DOC[j]) & (i >= j)),
    "nn and lax": (lambda s, b, h, i, j: jax.nn.silu(s) + jax.lax.rsqrt(1.0 + abs(i - j)), None),
    "ALiBi": (lambda s, b, h, i, j: s - jnp.exp2(-(h + 1.0)) * jnp.abs(i - j), lambda b, h, i, j: j <= i + 3),
    "types": (lambda s, b, h, i, j: s.astype(jnp.float32) + (i // 2 == j // 2).astype(jnp.float32), None),
    "clipped": (lambda s, b, h, i, j: jnp.clip(s, -1.0, 1.0) + jnp.minimum(i, j) / S, None),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_jax(arrays, name):
    score_mod, mask_mod = FUNCTIONS[name]
    o = jax.jit(lambda *x: tessera.jax.attention(*x, score_mod=score_mod, mask_mod=mask_mod))(*arrays)
    close(o, plain(*arrays, score_mod, mask_mod))
    own = jax.grad(lambda q: tessera.jax.attention(q, *arrays[1:], score_mod=score_mod, mask_mod=mask_mod).sum())
    close(own(arrays[0]), jax.grad(lambda q: plain(q, *arrays[1:], score_mod, mask_mod).sum())(arrays[0]))


def test_what_a_function_captures_is_traced_and_has_a_gradient(arrays, table):
    traced = []

    @jax.jit
    def loss(table, offset):
        traced.append(table.shape)

        def score_mod(s, b, h, i, j):
            return s + table[h, i - j + offset[0]]

        return (tessera.jax.attention(*arrays, score_mod=score_mod) ** 2).sum()

    def expected(table, offset):
        s = lambda s, b, h, i, j: s + table[h, i - j + offset[0]]  # noqa: E731
        return (plain(*arrays, s) ** 2).sum()

    for start in (24, 23):
        offset = jnp.array([start])
        close(jax.grad(loss)(table, offset), jax.grad(expected)(table, offset))
        np.testing.assert_allclose(loss(table, offset), expected(table, offset), rtol=1e-5)
    assert len(traced) == 1  # other values need no other program
    assert bind(lambda s, b, h, i, j: s + table[h, i], None, None).program.score == "s + table[h, i]"


def test_mapped_programs(arrays, table):
    tables = jnp.stack([table, 2 * table, -table])

    def o(table):
        return tessera.jax.attention(*arrays, score_mod=lambda s, b, h, i, j: s + table[h, j] * b)

    close(jax.vmap(o)(tables), jnp.stack([o(x) for x in tables]))
    own = jax.vmap(jax.grad(lambda table: (o(table) ** 2).sum()))(tables)
    close(own, jnp.stack([jax.grad(lambda table: (o(table) ** 2).sum())(x) for x in tables]))


def test_tensors_of_every_type(arrays):
    for dtype in (jnp.int8, jnp.int16, jnp.int32, jnp.uint8, jnp.bool_, jnp.bfloat16, jnp.float16):
        values = (jnp.arange(S) % 2).astype(dtype)
        text = "s + x[j]" if jnp.issubdtype(dtype, jnp.floating) else "s + float(x[j])"
        o = tessera.jax.attention(*arrays, score_mod=text, captured={"x": values})
        close(o, plain(*arrays, lambda s, b, h, i, j, values=values: s + values[j].astype(jnp.float32)))


def test_refusals(arrays, table):
    q, k, v = arrays
    with pytest.raises(tessera.Error, match="score, column 5: 'tabel' is no name here"):
        tessera.jax.attention(q, k, v, score_mod="s + tabel[h, i]", captured={"table": table})
    with pytest.raises(tessera.Error, match="`.*jnp.arctan.*`: jax.arctan of a traced value"):
        tessera.jax.attention(q, k, v, score_mod=lambda s, b, h, i, j: jnp.arctan(s))
    with pytest.raises(tessera.Error, match="captured: given without score_mod and mask_mod"):
        tessera.jax.attention(q, k, v, captured={"table": table})
    with pytest.raises(NotImplementedError, match="second derivative"):
        f = lambda t: tessera.jax.attention(q, k, v, score_mod="s + t[h]", captured={"t": t}).sum()  # noqa: E731
        jax.grad(lambda t: jax.grad(f)(t).sum())(jnp.ones(H))
    with pytest.raises(Exception, match="captured .t.*outside|t: .*index"):
        jax.block_until_ready(tessera.jax.attention(q, k, v, score_mod="s + t[i]", captured={"t": table[0, :5]}))
