"""Flax's and Equinox's layers, and a program in the manner of MaxText, with Tessera's attention: the values and the
gradients by their own, and the losses of training. On the CPU and, if JAX has one, on a GPU."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import tessera  # noqa: E402
import tessera.jax  # noqa: E402


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def platform(request):
    if request.param == "cuda":
        try:
            jax.devices("cuda")
            tessera.device("cuda")
        except (RuntimeError, tessera.Error) as refusal:
            pytest.skip(str(refusal))
    with jax.default_device(jax.devices(request.param)[0]), jax.default_matmul_precision("float32"):
        yield request.param


@pytest.fixture
def activated():
    """Calls activate, and restores what it replaced."""
    yield tessera.jax.activate
    tessera.jax.restore()


def calls(function, *arguments):
    """Tessera's calls in a traced function."""
    return str(jax.make_jaxpr(function)(*arguments)).count("name=tessera_attention")


def close(ours, others, limit=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=limit * max(1, np.abs(b).max())), ours, others)


# ---- Flax -----------------------------------------------------------------------------------------------------------


def flax_layer(nnx, **options):
    return nnx.MultiHeadAttention(4, 32, 64, decode=False, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("masked", (False, True), ids=("full", "causal mask"))
def test_nnx_s_layer_takes_the_function(random, masked):
    nnx = pytest.importorskip("flax.nnx")
    x = jnp.asarray(random.standard_normal((2, 40, 32)).astype(np.float32))
    mask = nnx.make_causal_mask(x[..., 0]) if masked else None

    def run(layer, x):
        value = lambda layer, x: (jnp.sin(layer(x, mask=mask))).sum()  # noqa: E731
        return layer(x, mask=mask), nnx.grad(value, argnums=(0, 1))(layer, x)

    ours = flax_layer(nnx, attention_fn=tessera.jax.flax_attention)
    graph, state = nnx.split(ours)
    assert calls(lambda state, x: nnx.merge(graph, state)(x, mask=mask), state, x) > 0
    close(run(ours, x), run(flax_layer(nnx), x))


def test_nnx_s_dropout_is_that_of_the_call(random):
    nnx = pytest.importorskip("flax.nnx")
    x = jnp.asarray(random.standard_normal((2, 40, 32)).astype(np.float32))
    layer = flax_layer(nnx, attention_fn=tessera.jax.flax_attention, dropout_rate=0.4, deterministic=False)
    first, second = (layer(x) for _ in range(2))  # a new key each time
    assert np.abs(first - second).max() > 0.01
    layer.eval()
    close(layer(x), flax_layer(nnx)(x))


def test_linen_s_layer_takes_the_function(random):
    nn = pytest.importorskip("flax.linen")
    x = jnp.asarray(random.standard_normal((2, 40, 32)).astype(np.float32))
    mask = nn.make_causal_mask(x[..., 0])
    layer = functools.partial(nn.MultiHeadDotProductAttention, num_heads=4, deterministic=True)
    parameters = layer().init(jax.random.key(0), x)
    ours = layer(attention_fn=tessera.jax.flax_attention)
    assert calls(lambda x: ours.apply(parameters, x, mask=mask), x) > 0
    close(ours.apply(parameters, x, mask=mask), layer().apply(parameters, x, mask=mask))


def test_a_transformer_of_nnx_trains_alike(random):
    """Two layers that learn to copy the previous token: losses by Tessera, and by XLA in the same layers."""
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    words, length, width = 16, 32, 32
    data = jnp.asarray(random.integers(0, words, (8, length)))

    class Block(nnx.Module):
        def __init__(self, rngs, **options):
            self.attend = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs, **options)
            self.first, self.second = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.up, self.down = nnx.Linear(width, 64, rngs=rngs), nnx.Linear(64, width, rngs=rngs)

        def __call__(self, x, mask):
            x = x + self.attend(self.first(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    class Model(nnx.Module):
        def __init__(self, **options):
            rngs = nnx.Rngs(0)
            self.words, self.places = nnx.Embed(words, width, rngs=rngs), nnx.Embed(length, width, rngs=rngs)
            self.one, self.two = Block(rngs, **options), Block(rngs, **options)
            self.out = nnx.Linear(width, words, rngs=rngs)

        def __call__(self, data):
            mask = nnx.make_causal_mask(data)
            x = self.words(data) + self.places(jnp.arange(length))
            return self.out(self.two(self.one(x, mask), mask))

    def losses(**options):
        graph, state = nnx.split(Model(**options))
        optimizer = optax.adam(3e-3)

        def loss(state):
            logits = nnx.merge(graph, state)(data)[:, 1:]
            return optax.softmax_cross_entropy_with_integer_labels(logits, data[:, :-1]).mean()

        @jax.jit
        def step(state, of_optimizer):
            value, gradient = jax.value_and_grad(loss)(state)
            updates, of_optimizer = optimizer.update(gradient, of_optimizer, state)
            return optax.apply_updates(state, updates), of_optimizer, value

        of_optimizer, seen = optimizer.init(state), []
        for _ in range(20):
            state, of_optimizer, value = step(state, of_optimizer)
            seen.append(float(value))
        return seen

    ours, others = losses(attention_fn=tessera.jax.flax_attention), losses()
    assert ours[-1] < 0.9 * ours[0]
    np.testing.assert_allclose(ours, others, rtol=1e-3)


# ---- activate -------------------------------------------------------------------------------------------------------


def test_activate_reaches_nnx(random, activated):
    nnx = pytest.importorskip("flax.nnx")
    x = jnp.asarray(random.standard_normal((2, 40, 32)).astype(np.float32))
    layer = flax_layer(nnx)
    graph, state = nnx.split(layer)
    run = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    assert calls(run, state, x) == 0
    expected = layer(x)
    assert "jax.nn.dot_product_attention" in activated()
    assert calls(lambda *given: run(*given), state, x) > 0
    close(layer(x), expected)


@pytest.mark.parametrize("mask", ("none", "causal", "of heads"))
def test_activate_reaches_equinox(random, activated, mask):
    equinox = pytest.importorskip("equinox")
    layer = equinox.nn.MultiheadAttention(4, 32, key=jax.random.key(0))
    x = jnp.asarray(random.standard_normal((3, 20, 32)).astype(np.float32))
    visible = np.tril(np.ones((20, 20), bool))
    visible = {"none": None, "causal": visible, "of heads": np.stack([visible, visible, visible.T, visible.T])}[mask]

    def run(x):  # sequences are mapped, as Equinox's programs do
        value = lambda x: jax.vmap(lambda x: layer(x, x, x, mask=visible))(x)  # noqa: E731
        return value(x), jax.grad(lambda x: jnp.sin(value(x)).sum())(x)

    expected = run(x)
    assert "equinox.nn._attention.dot_product_attention" in activated()
    traced = jax.make_jaxpr(lambda x: run(x))(x)
    assert "tessera_attention" in str(traced) and "while" not in str(traced)  # heads and sequences are one batch
    close(run(x), expected)
    tessera.jax.restore()
    assert calls(lambda x: run(x), x) == 0


def test_equinox_s_dropout_is_its_own(random, activated):
    equinox = pytest.importorskip("equinox")
    layer = equinox.nn.MultiheadAttention(4, 32, dropout_p=0.5, key=jax.random.key(0))
    x = jnp.asarray(random.standard_normal((20, 32)).astype(np.float32))
    run = lambda **options: layer(x, x, x, **options)  # noqa: E731
    expected = run(key=jax.random.key(1)), run(inference=True)
    activated()
    np.testing.assert_array_equal(run(key=jax.random.key(1)), expected[0])
    close(run(inference=True), expected[1])
    assert calls(lambda: run(inference=True)) > 0


def test_activate_reaches_calls_that_name_cudnn(random, activated):
    """As MaxText calls it: by name from jax.nn, with implementation="cudnn", within checkpointed layers of a scan."""
    x = jnp.asarray(random.standard_normal((2, 40, 4, 32)).astype(np.float32))
    scales = jnp.array([0.5, 1.0, 0.25])

    def loss(attend, x):
        @jax.checkpoint
        def block(x, scale):
            return x + scale * attend(x, x, x), None

        return jnp.sin(jax.lax.scan(block, x, scales)[0]).sum()

    def named(*x):
        return jax.nn.dot_product_attention(*x, is_causal=True, scale=0.2, implementation="cudnn")

    def plain(q, k, v):
        s = jnp.where(np.tril(np.ones((40, 40), bool)), 0.2 * jnp.einsum("bihd,bjhd->bhij", q, k), -jnp.inf)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v)

    with pytest.raises(tessera.Error, match="^implementations: 'flash', accepted None, \"xla\" and \"cudnn\""):
        activated(implementations=("flash",))
    activated(implementations=(None, "cudnn"))
    assert calls(functools.partial(loss, named), x) > 0
    close(*(jax.value_and_grad(functools.partial(loss, f))(x) for f in (named, plain)))
    tessera.jax.restore()
    jax.clear_caches()
    assert tessera.jax.nn.of_tessera == {None}
    assert jax.nn.dot_product_attention is not tessera.jax.dot_product_attention
