"""tessera.jax on each of JAX's platforms against float64: on a GPU, with XLA's streams and scratch memory."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX takes most of a GPU's memory otherwise

import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import reference  # the path is conftest's
from conftest import assert_close

jax = pytest.importorskip("jax")
jnp = jax.numpy

import tessera  # noqa: E402
import tessera.jax  # noqa: E402

attention = tessera.jax.attention
B, SQ, SK, H, HKV, D = 2, 70, 130, 4, 2, 64


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def platform(request):
    """Arrays without another device are on this one."""
    if request.param == "cuda":
        try:
            jax.devices("cuda")
            tessera.device("cuda")
        except (RuntimeError, tessera.Error) as refusal:
            pytest.skip(str(refusal))
    device = jax.devices(request.param)[0]
    with jax.default_device(device):
        yield request.param


def normal(random, *shape, dtype="float32"):
    return random.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def dense(random, dtype="float32", sq=SQ, sk=SK):
    return tuple(normal(random, B, s, h, D, dtype=dtype) for s, h in ((sq, H), (sk, HKV), (sk, HKV)))


def on(platform, x):
    """`x`, checked to be there."""
    assert {device.platform for device in x.devices()} == {"gpu" if platform == "cuda" else platform}
    return np.asarray(x)


def library(arrays, d_o, **options):
    """o, lse, d_q, d_k, d_v, then d_bias and d_sink, by the library on the CPU in the dtype of `arrays`."""
    o, lse = tessera.attention(*arrays, return_lse=True, **options)
    wanted = {f"grad_{name}": True for name in ("bias", "sink") if name in options}
    gradients = tessera.attention_backward(*arrays, o, lse, d_o.astype(o.dtype), **wanted, **options)
    return [o, lse, *gradients[:3], *(getattr(gradients, name.replace("grad", "d")) for name in wanted)]


def check_all(platform, ours, arrays, d_o, dtype, **options):
    exact = library([x.astype(np.float64) for x in arrays], d_o, **options)
    plain = library(arrays, d_o, **options)
    assert len(ours) == len(exact)
    names = ("o", "lse", "d_q", "d_k", "d_v", *(f"d_{name}" for name in ("bias", "sink") if name in options))
    for name, a, b, c in zip(names, ours, exact, plain):
        given = on(platform, a).astype(np.float64), b, np.asarray(c, np.float64)
        try:
            if name == "d_bias" and dtype != "float32":  # bwd_sm90 keeps P in float16: half a unit of a term
                reference.assert_close(*given, "float16", 0.5)
            else:
                assert_close(*given, dtype if a.dtype == jnp.dtype(dtype) else "float32")
        except AssertionError as wrong:
            pytest.fail(f"{name}: {wrong}")


def o_lse_and_gradients(arrays, d_o, options):
    """By JAX, as `library`."""
    floating = {name: options[name] for name in ("bias", "sink") if name in options}
    tensors = {n: x for n, x in options.items() if isinstance(x, np.ndarray) and n not in floating}
    values = {n: x for n, x in options.items() if n not in tensors and n not in floating}

    @jax.jit
    def run(arrays, floating, tensors, d_o):
        def loss(arrays, floating):
            o, lse = attention(*arrays, return_lse=True, **floating, **tensors, **values)
            return (o * d_o.astype(o.dtype)).astype(jnp.float32).sum(), (o, lse)

        gradients, (o, lse) = jax.grad(loss, argnums=(0, 1), has_aux=True)(arrays, floating)
        return [o, lse, *gradients[0], *gradients[1].values()]

    return run(arrays, dict(sorted(floating.items())), tensors, d_o)


def options_of(random):
    flags = random.random((B, 1, SQ, SK)) < 0.7
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (20, 9), "softcap": 5.0},
        "bias": {"bias": normal(random, 1, H, SQ, SK)},
        "sink": {"sink": normal(random, H), "causal": True},
        "mask": {"mask": flags},
        "ALiBi and lengths": {
            "alibi_slopes": normal(random, B, H), "seqused_k": np.array([SK, 81], np.int32), "causal": True,
        },
        "dropout": {"dropout_p": 0.3, "dropout_seed": 2**40 + 7},
        "deterministic": {"deterministic": True, "causal": True},
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("name", tuple(options_of(np.random.default_rng(0))))
def test_values_and_gradients(random, platform, name, dtype):
    arrays, d_o, options = dense(random, dtype), normal(random, B, SQ, H, D, dtype=dtype), options_of(random)[name]
    check_all(platform, o_lse_and_gradients(arrays, d_o, options), arrays, d_o, dtype, **options)


def test_packed_sequences(random, platform):
    arrays = tuple(normal(random, n, h, D, dtype="bfloat16") for n, h in ((90, H), (150, HKV), (150, HKV)))
    cu = {"cu_seqlens_q": np.array([0, 31, 90], np.int32), "cu_seqlens_k": np.array([0, 70, 150], np.int32)}
    bounds, d_o = {"max_seqlen_q": 59, "max_seqlen_k": 80, "causal": True}, normal(random, 90, H, D, dtype="bfloat16")
    ours = o_lse_and_gradients(arrays, d_o, {**cu, **bounds})
    check_all(platform, ours, arrays, d_o, "bfloat16", **cu, **bounds)


def test_pages(random, platform):
    """Values of pages that hold the keys of one sequence out of order."""
    q, pages = normal(random, B, 1, H, D, dtype="bfloat16"), [normal(random, 5, 16, HKV, D, dtype="bfloat16")] * 2
    tensors = {"page_table": np.array([[4, 0], [2, 1]], np.int32), "seqused_k": np.array([30, 9], np.int32)}
    o = jax.jit(lambda q, k, v, tensors: attention(q, k, v, **tensors))(q, *pages, tensors)
    exact = tessera.attention(*(x.astype(np.float64) for x in (q, *pages)), **tensors)
    plain = tessera.attention(q, *pages, **tensors)
    assert_close(on(platform, o).astype(np.float64), exact, np.asarray(plain, np.float64), "bfloat16")


def test_transformations(random, platform):
    """vmap, checkpoint, scan, and vmap of dropout by one entry after another, are the calls themselves."""
    arrays, d_o = dense(random, "bfloat16"), normal(random, B, SQ, H, D)
    options = {"causal": True, "deterministic": True, "batch_invariant": True}
    loss = lambda *x: (attention(*x, **options) * d_o).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    alone = gradient(*arrays)
    for a, b in zip(jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2)))(*arrays), alone):
        np.testing.assert_array_equal(on(platform, a), on(platform, b))
    stack = [np.stack([x, -x]) for x in arrays]
    for a, b in zip(jax.jit(jax.vmap(gradient))(*stack), alone):
        np.testing.assert_array_equal(on(platform, a)[0], on(platform, b))
    dropped = jax.jit(lambda seed: attention(*arrays, dropout_p=0.4, dropout_seed=seed))
    for n, a in enumerate(on(platform, jax.vmap(dropped)(jnp.arange(3)))):
        np.testing.assert_array_equal(a, dropped(n))
    step = lambda x: attention(x, *arrays[1:], causal=True)  # noqa: E731
    looped = jax.jit(lambda x: jax.lax.scan(lambda x, _: (step(x), None), x, length=3)[0])(arrays[0])
    np.testing.assert_array_equal(on(platform, looped), step(step(step(arrays[0]))))


def test_many_calls_without_waiting(random, platform):
    """Calls of several shapes in one stream, from two threads: scratch memory that is returned is written in order."""
    problems = [dense(random, "bfloat16", sq=sq, sk=900) for sq in (3, 70, 300)]
    run = jax.jit(lambda *x: attention(*x, causal=True))
    expected = [np.asarray(run(*x)) for x in problems]
    wrong = []

    def work():
        with jax.default_device(jax.devices(platform)[0]):
            results = [run(*problems[n % 3]) for n in range(60)]
        wrong.extend(n for n, o in enumerate(results) if not np.array_equal(np.asarray(o), expected[n % 3]))

    threads = [threading.Thread(target=work) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


@pytest.mark.parametrize("paged", (False, True), ids=("dense", "paged"))
def test_append_into_donated_caches(random, platform, paged):
    k, v = (normal(random, B, 3, HKV, D, dtype="bfloat16") for _ in "kv")
    shape = (5, 16, HKV, D) if paged else (B, 32, HKV, D)
    caches, lengths = [normal(random, *shape, dtype="bfloat16") for _ in "kv"], np.array([3, 20], np.int32)
    tensors = {"page_table": np.array([[4, 0], [2, 1]], np.int32)} if paged else {}
    expected = [x.copy() for x in caches]
    tessera.append(k, v, *expected, lengths, **tensors)
    step = jax.jit(tessera.jax.append, donate_argnames=("k_cache", "v_cache"))
    given = [jnp.array(x) for x in caches]
    before = [x.unsafe_buffer_pointer() for x in given]
    out = step(k, v, k_cache=given[0], v_cache=given[1], seqused_k=lengths, **tensors)
    assert [x.unsafe_buffer_pointer() for x in out[:2]] == before and given[0].is_deleted()
    for a, b in zip(out[:2], expected):
        np.testing.assert_array_equal(on(platform, a), b)


CALLS_IN_COMMAND_BUFFERS = """
import functools, sys
import jax, numpy as np
import jax.numpy as jnp
import tessera.jax

attention = functools.partial(tessera.jax.attention, causal=True, deterministic=True)
q, k, v, d_o = (jax.random.normal(key, (2, 200, 4, 64), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4))

@jax.jit
def train(q):
    def step(q, _):
        o, pull = jax.vjp(lambda q: attention(q, k, v), q)
        return q + 0.1 * pull(d_o)[0], o.sum()

    return jax.lax.scan(step, q, length=3)

@functools.partial(jax.jit, donate_argnums=(1, 2))
def decode(q, k_cache, v_cache, lengths):  # few queries of many keys, which are divided: parts are in scratch memory
    cache = tessera.jax.append(q, 2 * q, k_cache, v_cache, lengths)
    o = attention(q, *cache[:2], seqused_k=lengths)
    return o, cache.k_cache, cache.v_cache

found = []
for n in range(6):  # other arrays each time
    q, sums = train(q)
    found += [q, sums]
caches = [jax.random.normal(jax.random.key(n), (2, 4096, 4, 64), jnp.bfloat16) for n in range(2)]
for n in range(12):
    o, *caches = decode(found[0][:, n : n + 1], *caches, jnp.array([3000 + n, 70 + n], jnp.int32))
    found.append(o)
np.savez(sys.argv[1], *(np.asarray(x, np.float32) for x in found))
"""


def test_calls_within_command_buffers(tmp_path, platform):
    """XLA captures the calls into its graphs, and replays them with other arrays: the bits without graphs."""
    if platform != "cuda":
        pytest.skip("only a GPU has command buffers")
    results, buffers = [], []
    for name, commands in (("without", ""), ("within", "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,DYNAMIC_SLICE_FUSION")):
        folder = tmp_path / name
        flags = {
            "xla_gpu_enable_command_buffer": commands, "xla_gpu_graph_min_graph_size": 1, "xla_dump_to": folder,
            "xla_dump_hlo_as_text": "true",
        }  # fmt: skip
        xla_flags = " ".join(f"--{flag}={value}" for flag, value in flags.items())
        command = [sys.executable, "-c", CALLS_IN_COMMAND_BUFFERS, str(tmp_path / f"{name}.npz")]
        run = subprocess.run(command, env={**os.environ, "XLA_FLAGS": xla_flags}, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-3000:]
        texts = [path.read_text(errors="replace") for path in folder.glob("*.txt")]
        buffers.append(sum(bool(re.search("kCommandBuffer|%command_buffer", text)) for text in texts))
        results.append(np.load(tmp_path / f"{name}.npz"))
    assert buffers[0] == 0 and buffers[1] > 0, buffers
    assert all(np.isfinite(x).all() for x in results[0].values())
    for name, expected in results[0].items():
        np.testing.assert_array_equal(results[1][name], expected)


def test_a_score_program(random, platform):
    """A function that captures a traced table, and the table's gradient, against the bias that it is."""
    arrays, table, d_o = dense(random), normal(random, H, SK), normal(random, B, SQ, H, D)

    def loss(q, k, v, table):
        o = attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, j])
        return (o * d_o).sum(), o

    gradients, o = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays, table)
    bias = np.ascontiguousarray(np.broadcast_to(table[None, :, None], (1, H, SQ, SK)))
    exact = library([x.astype(np.float64) for x in arrays], d_o, bias=bias)
    plain = library(arrays, d_o, bias=bias)
    for a, b, c in zip((o, *gradients[:3]), (exact[0], *exact[2:5]), (plain[0], *plain[2:5])):
        assert_close(on(platform, a).astype(np.float64), b, np.asarray(c, np.float64), "float32")
    d_table = exact[5].sum((0, 2))
    np.testing.assert_allclose(on(platform, gradients[3]), d_table, atol=2e-5 * np.abs(d_table).max())


def test_training_beside_xla(random, platform):
    """Twelve steps of a causal layer that learns to copy the previous token: the losses by XLA's attention."""
    words, length, heads, size = 16, 48, 2, 64
    data = random.integers(0, words, (8, length))
    start = {name: normal(random, *shape) * 0.3 for name, shape in (
        ("words", (words, size)), ("places", (length, size)), ("qkv", (size, 3 * size)), ("out", (size, words)),
    )}  # fmt: skip

    def losses(attend):
        def loss(p):
            x = p["words"][data] + p["places"]
            q, k, v = jnp.split((x @ p["qkv"]).reshape(*data.shape, heads, -1), 3, axis=-1)
            logits = jax.nn.log_softmax((x + attend(q, k, v, is_causal=True).reshape(x.shape)) @ p["out"])
            return -jnp.take_along_axis(logits[:, 1:], data[:, :-1, None], -1).mean()

        step, p, seen = jax.jit(jax.value_and_grad(loss)), start, []
        for _ in range(12):
            value, gradient = step(p)
            p = jax.tree.map(lambda a, b: a - 0.2 * b, p, gradient)
            seen.append(float(value))
        return seen

    with jax.default_matmul_precision("float32"):
        ours, other = losses(tessera.jax.dot_product_attention), losses(jax.nn.dot_product_attention)
    assert ours[-1] < 0.9 * ours[0]
    np.testing.assert_allclose(ours, other, rtol=1e-3)
