"""tessera.attention on JAX arrays, if JAX is installed."""

import ctypes
import functools
import json
import os
import re
import subprocess
import sys

# XLA's own code is compiled without optimisation: the tests compile hundreds of programs, and run each once.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
)  # fmt: skip

import numpy as np
import pytest
from conftest import Problem

jax = pytest.importorskip("jax")

import tessera  # noqa: E402


CPU = jax.devices("cpu")[-1]  # where JAX has a GPU, or several devices, not its own choice


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Also where JAX has a GPU, for which test_jax_cuda.py is."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_same_as_numpy(random, dtype):
    problem = Problem(random, dtype)
    arrays = [jax.device_put(x, CPU) for x in problem.arrays]
    o, lse = tessera.attention(*arrays, causal=True, return_lse=True)
    assert isinstance(o, jax.Array) and o.dtype == arrays[0].dtype and isinstance(lse, jax.Array)
    assert o.devices() == lse.devices() == {CPU}
    expected, expected_lse = tessera.attention(*problem.arrays, causal=True, return_lse=True)
    np.testing.assert_array_equal(np.asarray(o), expected)
    np.testing.assert_array_equal(np.asarray(lse), expected_lse)
    gradients = tessera.attention_backward(*arrays, o, lse, jax.device_put(problem.d_o, CPU), causal=True)
    again = tessera.attention_backward(*problem.arrays, expected, expected_lse, problem.d_o, causal=True)
    for gradient, other in zip(gradients[:3], again[:3]):
        np.testing.assert_array_equal(np.asarray(gradient), other)


@pytest.mark.skipif(
    len(jax.devices("cpu")) < 2, reason="JAX has one CPU (XLA_FLAGS=--xla_force_host_platform_device_count=4)"
)
def test_an_array_on_several_devices(random):
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], "b")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b"))
    q, k, v = (jax.device_put(jax.numpy.zeros((2, 4, 1, 8)), sharding) for _ in range(3))
    with pytest.raises(tessera.Error, match="^q: a JAX array on 2 devices, accepted those on one"):
        tessera.attention(q, k, v)


def test_heads_first(random):
    problem = Problem(random)
    arrays = [jax.device_put(x.swapaxes(1, 2), CPU) for x in problem.arrays]
    o, lse = tessera.attention(*arrays, causal=True, return_lse=True, layout="bhsd")
    expected, expected_lse = tessera.attention(*problem.arrays, causal=True, return_lse=True)
    np.testing.assert_array_equal(np.asarray(o).swapaxes(1, 2), expected)
    np.testing.assert_array_equal(np.asarray(lse), expected_lse)


def test_a_traced_array(random):
    problem = Problem(random)
    with pytest.raises(tessera.Error, match="^q: traced by a JAX transformation"):
        jax.jit(tessera.attention)(*problem.arrays)


# ---- tessera.jax ----------------------------------------------------------------------------------------------------

import tessera.jax  # noqa: E402

jnp = jax.numpy
attention = tessera.jax.attention
GRADIENTS = ("d_q", "d_k", "d_v", "d_bias", "d_sink")


def normal(random, *shape, dtype="float32"):
    return random.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def dense(random, dtype="float32", batch=2, sq=37, sk=45, heads=4, heads_kv=2, size=16):
    return tuple(
        normal(random, batch, s, h, size, dtype=dtype) for s, h in ((sq, heads), (sk, heads_kv), (sk, heads_kv))
    )


def equal(ours, other):
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(other))


def options_of(random):
    """Each option, and some together: name -> options."""
    flags = lambda *shape: random.random(shape) < 0.7  # noqa: E731
    bias = normal(random, 1, 4, 37, 45)
    return {
        "none": {},
        "causal": {"causal": True},
        "top_left": {"causal": True, "top_left": True},
        "window": {"window": (7, 3), "softcap": 5.0},
        "scale": {"scale": 0.3, "causal": True},
        "bias": {"bias": bias, "causal": True},
        "small bias": {"bias": normal(random, 45)},
        "sink": {"sink": normal(random, 4), "bias": normal(random, 2, 1, 1, 45)},
        "mask": {"mask": flags(2, 1, 37, 45)},
        "block_mask": {"block_mask": flags(1, 4, 3, 3), "mask_block": (16, 16)},
        "alibi": {"alibi_slopes": normal(random, 2, 4), "causal": True},
        "alibi of heads": {"alibi_slopes": normal(random, 4)},
        "lengths": {"seqused_k": np.array([45, 11], np.int32), "causal": True},
        "causal_seqs": {"causal_seqs": np.array([True, False])},
        "place": {"place_q": (9, 60), "place_k": (32, 90), "causal": True, "alibi_slopes": normal(random, 4)},
        "places": {"places": np.array([[9, 60, 32, 90], [0, 37, 0, 45]], np.int32), "window": (20, 4)},
        "place of heads": {
            "place_heads": (4, 12), "total_heads_kv": 6, "first_sequence": 3, "dropout_p": 0.2, "dropout_seed": 5,
        },
        "dropout": {"dropout_p": 0.3, "dropout_seed": 2**40 + 7, "dropout_offset": 3},
        "execution": {
            "kernel": "tiled", "threads": 1, "deterministic": True, "batch_invariant": True, "list_capacity": 7,
        },
    }


NAMES = tuple(options_of(np.random.default_rng(0)))


def test_every_option_is_tried(random):
    tried = {name for options in options_of(random).values() for name in options}
    elsewhere = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "page_table", "page_indptr", "layout"}
    elsewhere |= {
        "page_indices", "tree_mask", "prefix_groups", "prefix_lens", "max_prefix_k", "max_suffix_k", "dropout_state",
        "q_descale", "k_descale", "v_descale",
    }  # fmt: skip
    fields = {f["name"] for f in tessera._core.option_fields() if f["kind"] != "backward tensor"}
    assert fields - {"openmp", "lse_low"} == tried | elsewhere
    import inspect

    own = {"q", "k", "v", "return_lse", "score_mod", "mask_mod", "captured"}  # programs: test_jax_programs.py
    assert set(inspect.signature(attention).parameters) - own == tried | elsewhere


@pytest.mark.parametrize("jit", (False, True), ids=("eager", "jit"))
@pytest.mark.parametrize("name", NAMES)
def test_bits_and_gradients_are_the_library_s(random, name, jit):
    arrays, options = dense(random), options_of(random)[name]
    tensors = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    values = {n: x for n, x in options.items() if n not in tensors}
    d_o, d_lse = normal(random, 2, 37, 4, 16), normal(random, 2, 4, 37)

    def run(arrays, tensors):
        return attention(*arrays, return_lse=True, **tensors, **values)

    def loss(arrays, tensors):
        o, lse = run(arrays, tensors)
        return (o * d_o).sum() + jnp.where(lse > -jnp.inf, lse * d_lse, 0).sum()

    floating = {n: x for n, x in tensors.items() if n in ("bias", "sink")}
    fixed = {n: x for n, x in tensors.items() if n not in floating}
    gradient = jax.grad(lambda arrays, floating: loss(arrays, {**floating, **fixed}), argnums=(0, 1))
    if jit:
        run, gradient = jax.jit(run), jax.jit(gradient)
    o, lse = run(arrays, tensors)
    expected, expected_lse = tessera.attention(*arrays, return_lse=True, **options)
    equal(o, expected)
    equal(lse, expected_lse)
    d_lse = np.where(expected_lse > -np.inf, d_lse, 0).astype(np.float32)
    given = {f"grad_{n}": True for n in floating}
    others = tessera.attention_backward(*arrays, expected, expected_lse, d_o, d_lse=d_lse, **given, **options)
    ours, of_options = gradient(arrays, floating)
    for a, b in zip(ours, others[:3]):
        equal(a, b)
    for n, a in of_options.items():
        equal(a, getattr(others, f"d_{n}"))


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_o_alone_and_its_dtype(random, dtype):
    arrays = dense(random, dtype)
    o = jax.jit(lambda *x: attention(*x, causal=True))(*arrays)
    assert o.dtype == arrays[0].dtype
    equal(o, tessera.attention(*arrays, causal=True))


def test_heads_first_under_jit(random):
    arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in dense(random)]
    run = jax.jit(lambda *x: attention(*x, causal=True, layout="bhsd", return_lse=True))
    for a, b in zip(run(*arrays), tessera.attention(*arrays, causal=True, layout="bhsd", return_lse=True)):
        equal(a, b)
    for bias in (normal(random, 1, 4, 1, 1), normal(random, 37, 1)):
        gradient = jax.grad(lambda b: attention(*arrays, bias=b, layout="bhsd", return_lse=True)[1].sum())(bias)
        np.testing.assert_allclose(gradient.sum(), 2 * 4 * 37, rtol=1e-5)  # one per row, since its weights sum to 1


def test_packed_paged_trees_and_prefixes(random):
    q, k, v = normal(random, 7, 4, 16), normal(random, 9, 2, 16), normal(random, 9, 2, 16)
    cu = {"cu_seqlens_q": np.array([0, 3, 7], np.int32), "cu_seqlens_k": np.array([0, 4, 9], np.int32)}
    bounds = {"max_seqlen_q": 4, "max_seqlen_k": 5}
    tree = {"tree_mask": np.full((2, 3, 1), 5, np.int32)}
    pages = [normal(random, 3, 4, 2, 16) for _ in "kv"]
    table = {"page_table": np.array([[2, 0], [1, 1]], np.int32), "seqused_k": np.array([6, 2], np.int32)}
    csr = {"page_indptr": np.array([0, 2, 3], np.int32), "page_indices": np.array([2, 0, 1], np.int32)}
    csr["seqused_k"] = table["seqused_k"]
    prefix = {"prefix_groups": np.array([0, 2], np.int32), "prefix_lens": np.array([4], np.int32)}
    same = [np.repeat(normal(random, 1, 9, 2, 16), 2, axis=0) for _ in "kv"]
    queries = normal(random, 2, 3, 4, 16)
    for arrays, tensors, values in (
        ((q, k, v), cu, {"causal": True, **bounds}),
        ((queries, *pages), table, {}),
        ((queries, *pages), csr, {}),
        ((queries, *same), tree, {"causal": True}),
        ((queries, *same), prefix, {"max_prefix_k": 4, "max_suffix_k": 5}),
    ):
        ours = jax.jit(lambda arrays, tensors, values=values: attention(*arrays, **tensors, **values))(arrays, tensors)
        equal(ours, tessera.attention(*arrays, **tensors, **values))
    loss = lambda q: attention(q, k, v, causal=True, **cu).sum()  # noqa: E731
    o, lse = tessera.attention(q, k, v, causal=True, return_lse=True, **cu)
    equal(jax.grad(loss)(q), tessera.attention_backward(q, k, v, o, lse, np.ones_like(o), causal=True, **cu).d_q)
    with pytest.raises(NotImplementedError, match="^page_table: a gradient was asked for"):
        jax.grad(lambda q: attention(q, *pages, **table).sum())(queries)


@pytest.mark.parametrize("dtype", ("float8_e4m3fn", "float8_e5m2", "int8"))
def test_keys_of_8_bits(random, dtype):
    """Under jit the library's bits, with scales of the array, of heads, of blocks and, in pages, of tokens."""
    q, k, v = dense(random, "bfloat16", sk=150, size=32)
    pages = [normal(random, 3, 16, 2, 32, dtype="bfloat16") for _ in "kv"]
    table = {"page_table": np.array([[2, 0], [1, 1]], np.int32), "seqused_k": np.array([29, 9], np.int32)}
    for scheme in ("tensor", "head", "block", "token"):
        given, tensors = (pages, table) if scheme == "token" else ((k, v), {})
        codes = [tessera.quantize(x, dtype.removesuffix("fn"), scheme=scheme) for x in given]
        scales = {f"{name}_descale": x.scale for name, x in zip("kv", codes)}
        run = jax.jit(lambda q, k, v, tensors: attention(q, k, v, **tensors))
        ours = run(q, *(x.codes for x in codes), {**scales, **tensors})
        equal(ours, tessera.attention(q, *(x.codes for x in codes), **scales, **tensors))
    if dtype != "int8":  # all three of 8 bits
        codes = [tessera.quantize(x, dtype.removesuffix("fn"), scheme="head").codes for x in (q, k, v)]
        ours = jax.jit(attention)(*codes)
        assert ours.dtype == jnp.bfloat16
        equal(ours, tessera.attention(*codes))


def on_a_gpu(function, *arguments):
    """The program of a GPU, lowered without one."""
    import jax.export

    unchecked = [jax.export.DisabledSafetyCheck.custom_call("tessera_attention")]
    return jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=unchecked)(*arguments).mlir_module()


def test_scratch_memory_is_a_result_on_a_gpu(random):
    """Its size is known while the program is traced, without a driver: XLA's command buffers need it."""
    q, k, v = dense(random, "bfloat16", sq=4, sk=4096, heads=4, size=64)
    run = lambda *x: attention(*x, causal=True)  # noqa: E731
    shape = lambda x: tuple(("bfloat16", x.shape))  # noqa: E731
    layouts = [(name, *shape(x)) for name, x in zip("qkvo", (q, k, v, q))]
    size = tessera._core.workspace_on_gpus(False, layouts, causal=True)
    parts = 4 * q.size  # float32 partial results of one part of the keys
    assert 2 * parts < size < 1 << 24
    text = on_a_gpu(run, q, k, v)
    (call,) = re.findall(r"custom_call @tessera_attention.*", text)
    assert 'results = "o workspace"' in call and f"tensor<{size}xui8>" in call
    own = jax.jit(run).lower(q, k, v)
    assert 'results = "o"' in own.as_text() and "ui8" not in own.as_text()
    assert "conditional" not in own.compile().as_text()
    backward = on_a_gpu(jax.grad(lambda *x: run(*x).sum()), q, k, v)
    assert backward.count("@tessera_attention") == 2
    assert re.search(r'results = "d_q d_k d_v workspace"', backward)
    d_q = 4 * q.size  # of which at least the float32 sums are kept
    found = [int(n) for n in re.findall(r"tensor<(\d+)xui8>", backward)]
    assert max(found) >= d_q


@pytest.mark.skipif("TESSERA_PROGRAM" not in os.environ, reason="TESSERA_PROGRAM: absent, the program")
@pytest.mark.parametrize("direction, rows", (("forward", 1), ("forward", 300), ("backward", 300)))
def test_scratch_memory_suffices_on_gpus_that_exist(direction, rows):
    """Whatever their number of multiprocessors: A100, A30, A40, A10, L40S, L4, H100 (SXM, PCIe), H20, B200, RTX 50."""
    q, k = (3, rows, 16, 128), (3, 9000, 4, 128)
    layouts = [(name, "bfloat16", shape) for name, shape in zip("qkvo", (q, k, k, q))]
    if direction == "backward":
        layouts += [("lse", "float32", (3, 16, rows)), ("d_o", "bfloat16", q)]
        layouts += [(f"d_{name}", "bfloat16", shape) for name, shape in zip("qkv", (q, k, k))]
    size = tessera._core.workspace_on_gpus(direction == "backward", layouts, causal=True)
    shape = f"-B 3 --sq {rows} --sk 9000 -H 16 --kv-heads 4 -D 128 --dtype bfloat16 --causal --direction {direction}"
    known = {80: (108, 56), 86: (84, 72), 89: (142, 58), 90: (132, 114, 78), 100: (148,), 120: (188, 170, 84)}
    for arch, all_cores in known.items():
        for cores in all_cores:
            gpu = ["plan", "--json", "--arch", str(arch), "--multiprocessors", str(cores)]
            run = [os.environ["TESSERA_PROGRAM"], *gpu, *shape.split()]
            plan = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
            assert plan["workspace_bytes"] <= size, (arch, cores)


def test_the_handlers_of_a_gpu_are_fit_for_command_buffers():
    """As XLA asks when a handler is registered: by a frame with one extension, for the handler's metadata."""

    class Version(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_size_t), ("next", ctypes.c_void_p), ("major", ctypes.c_int)]
        _fields_ += [("minor", ctypes.c_int)]

    class Metadata(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_size_t), ("version", Version), ("traits", ctypes.c_uint32)]

    class Extension(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p)]
        _fields_ += [("metadata", ctypes.POINTER(Metadata))]

    class Frame(ctypes.Structure):  # its first members
        _fields_ = [("bytes", ctypes.c_size_t), ("extension", ctypes.POINTER(Extension)), ("rest", ctypes.c_char * 256)]

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    found = {}
    for target, handlers in tessera._core.jax_handlers().items():
        for platform, capsule in handlers.items():
            metadata = Metadata(ctypes.sizeof(Metadata))
            extension = Extension(ctypes.sizeof(Extension), 1, None, ctypes.pointer(metadata))  # 1: metadata
            frame = Frame(ctypes.sizeof(Frame), ctypes.pointer(extension))
            handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(pointer(capsule, None))
            assert handler(ctypes.addressof(frame)) is None
            assert (metadata.version.major, metadata.version.minor) == (0, 1)
            found[target, platform] = metadata.traits
    targets = ("tessera_attention", "tessera_append")
    assert found == {(t, platform): traits for t in targets for platform, traits in (("cpu", 0), ("CUDA", 1))}


def test_without_queries_nothing_is_called(random):
    """XLA cannot capture a call that launches nothing."""
    q, k, v = dense(random, sq=0)
    bias = normal(random, 1, 4, 1, 45)

    def loss(q, k, v, bias):
        o, lse = attention(q, k, v, bias=bias, return_lse=True)
        return o.sum() + lse.sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    assert "tessera_attention" not in gradient.lower(q, k, v, bias).as_text()
    for a, x in zip(gradient(q, k, v, bias), (q, k, v)):
        equal(a, np.zeros_like(x))
    assert attention(q, k, v).shape == (2, 0, 4, 16)


@pytest.mark.parametrize("name", NAMES)
def test_vmap_is_each_entry(random, name):
    """Values and gradients of every option, mapped and shared in all ways: what a loop over the entries gives."""
    stacks = [np.stack([x, x + 0.5, x - 0.5]) for x in dense(random)]
    options = options_of(random)[name]
    tensors = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    values = {n: x for n, x in options.items() if n not in tensors}

    def layer(q, k, v, tensors):
        return attention(q, k, v, return_lse=True, **tensors, **values)

    def loss(q, k, v, floating, fixed):
        o, lse = layer(q, k, v, {**floating, **fixed})
        return jnp.sin(o).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

    floating = {n: x for n, x in tensors.items() if n in ("bias", "sink")}
    fixed = {n: x for n, x in tensors.items() if n not in floating}
    mapped = {n: np.stack([x, x[..., ::-1], x]) for n, x in floating.items()}
    fixed_mapped = {n: np.stack([x, x, np.roll(x, 1, 0)]) for n, x in fixed.items()}
    for keys_shared, options_shared in ((False, True), (True, False)):
        args = [stacks[0], *(x[0] if keys_shared else x for x in stacks[1:])]
        args += [floating, fixed] if options_shared else [mapped, fixed_mapped]
        axes = (0, *(None if keys_shared else 0,) * 2, *(None if options_shared else 0,) * 2)
        take = lambda x, axis, n: x if axis is None else jax.tree.map(lambda y: y[n], x)  # noqa: E731
        entries = [[take(x, axis, n) for x, axis in zip(args, axes)] for n in range(3)]
        both = lambda q, k, v, floating, fixed: layer(q, k, v, {**floating, **fixed})  # noqa: E731
        for ours, other in zip(jax.vmap(both, axes)(*args), zip(*(both(*entry) for entry in entries))):
            np.testing.assert_allclose(ours, np.stack(other), atol=2e-6)
        gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
        ours = jax.jit(jax.vmap(gradient, axes))(*args)
        each = [gradient(*entry) for entry in entries]
        jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, np.stack(b), atol=2e-5), ours, *each)
        total = jax.grad(lambda *args: jax.vmap(loss, axes)(*args).sum(), argnums=(1, 3))(*args)
        for n, ours in zip((1, 3), total):
            other = jax.tree.map(lambda *b: sum(b) if axes[n] is None else np.stack(b), *(entry[n] for entry in each))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5), ours, other)


def test_vmap_makes_one_call(random):
    """No loop: the mapped axis is in the batch; vmap of vmap, too."""
    stack = [np.stack([np.stack([x, x])] * 3) for x in dense(random)]
    run = jax.vmap(jax.vmap(lambda q, k, v: attention(q, k, v, causal=True)))
    text = str(jax.make_jaxpr(run)(*stack))
    assert "scan" not in text and "while" not in text and "f32[12,37,4,16] = ffi_call" in text
    assert jax.jit(run).lower(*stack).as_text().count("@tessera_attention") == 1
    equal(run(*stack)[2, 1], attention(*(x[2, 1] for x in stack), causal=True))


def test_vmap_of_packed_sequences(random):
    q, k, v = (normal(random, 3, n, 2, 16) for n in (7, 9, 9))
    cu = {"cu_seqlens_q": np.array([0, 3, 7], np.int32), "cu_seqlens_k": np.array([0, 4, 9], np.int32)}
    mapped = jax.vmap(lambda q, k, v: attention(q, k, v, **cu))(q, k, v)
    for n in range(3):
        equal(mapped[n], tessera.attention(q[n], k[n], v[n], **cu))


def test_dropout_s_seed_is_traced(random):
    arrays = dense(random)
    run = jax.jit(lambda seed: attention(*arrays, dropout_p=0.4, dropout_seed=seed))
    equal(run(5), tessera.attention(*arrays, dropout_p=0.4, dropout_seed=5))
    equal(run(6), tessera.attention(*arrays, dropout_p=0.4, dropout_seed=6))
    assert run._cache_size() == 1
    key = jax.random.key(3)
    by_key = attention(*arrays, dropout_p=0.4, dropout_seed=key)
    equal(by_key, jax.jit(lambda key: attention(*arrays, dropout_p=0.4, dropout_seed=key))(key))
    low, high = (int(half) for half in jax.random.key_data(key))
    equal(by_key, tessera.attention(*arrays, dropout_p=0.4, dropout_seed=low + (high << 32)))
    seeds = jnp.arange(3)  # mapped: each entry drops what it drops alone
    equal(jax.vmap(run)(seeds), np.stack([run(seed) for seed in seeds]))
    state = jnp.array([5, 0, 0, 0], jnp.uint32)
    equal(attention(*arrays, dropout_p=0.4, dropout_state=state), run(5))
    with pytest.raises(tessera.Error, match="^dropout_seed: absent with dropout_p"):
        attention(*arrays, dropout_p=0.4)
    with pytest.raises(tessera.Error, match="^dropout_seed: float32 of shape"):
        attention(*arrays, dropout_p=0.4, dropout_seed=0.5)


def test_refused_while_traced(random):
    q, k, v = dense(random)

    def refused(text, function, *arguments):
        with pytest.raises(tessera.Error, match=text):
            jax.jit(function).lower(*arguments)  # nothing runs

    refused("^k: dtype float16, must be that of q: float32", lambda q: attention(q, k.astype(np.float16), v), q)
    refused("^q: dtype int32, accepted", lambda q: attention(q.astype(int), k, v), q)
    refused("^q: dtype complex64, accepted", lambda q: attention(q + 1j, k, v), q)
    refused("^v: shape .*, accepted .B, Sk, Hkv, Dv.", lambda v: attention(q, k, v[:, 1:]), v)
    refused("^q: rank 2, accepted", lambda q: attention(q[0, 0], k, v), q)
    refused("^mask: dtype float32, accepted bool", lambda m: attention(q, k, v, mask=m), np.ones((37, 45), np.float32))
    refused("^seqused_k: shape", lambda n: attention(q, k, v, seqused_k=n), np.ones(3, np.int32))
    refused("^scale: traced by a JAX transformation, accepted", lambda s: attention(q, k, v, scale=s), 0.5)
    refused("^window: .*, accepted a pair", lambda q: attention(q, k, v, window=3), q)
    refused('^kernel: "fast", accepted', lambda q: attention(q, k, v, kernel="fast"), q)
    refused("^bias: list, accepted an array", lambda q: attention(q, k, v, bias=[1.0]), q)
    with pytest.raises(TypeError, match="'attn_mask': SDPA's attn_mask is mask here"):
        attention(q, k, v, attn_mask=None)


def test_errors_of_data_and_of_derivatives(random):
    q, k, v = dense(random)
    with pytest.raises(Exception, match=r"seqused_k\[1\]: 99, accepted 0 .. 45"):  # XLA's status, with the one line
        jax.jit(lambda n: attention(q, k, v, seqused_k=n))(np.array([1, 99], np.int32)).block_until_ready()
    with pytest.raises(NotImplementedError, match="a second derivative was asked for, accepted is the first"):
        jax.grad(lambda x: jax.grad(lambda x: attention(x * q, k, v).sum())(x))(1.0)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention(q, k, v), (q,), (q,))
    slopes = np.ones(4, np.float32)
    with pytest.raises(
        NotImplementedError, match="^alibi_slopes: its gradient was asked for, accepted jax.lax.stop_grad"
    ):
        jax.grad(lambda s: attention(q, k, v, alibi_slopes=s).sum())(slopes)
    jax.grad(lambda q: attention(q, k, v, alibi_slopes=slopes).sum())(q)


def test_other_transformations(random):
    q, k, v = dense(random)
    loss = lambda q: jnp.sin(attention(q, k, v, causal=True)).sum()  # noqa: E731
    equal(jax.grad(jax.checkpoint(loss))(q), jax.grad(loss)(q))
    looped = jax.lax.scan(lambda x, _: (attention(x, k, v, causal=True), None), q, length=2)[0]
    equal(looped, attention(attention(q, k, v, causal=True), k, v, causal=True))
    run = lambda q: attention(q, k, v, causal=True)  # noqa: E731
    equal(jax.jit(run).lower(q).compile()(q), run(q))


def test_shard_map_over_batch_heads_and_queries(random):
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map
    arrays = dense(random)
    batch, heads, whole = (jax.sharding.PartitionSpec(*axes) for axes in (("shards",), (None, None, "shards"), ()))
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("shards",))
    for specs in ((batch,) * 3, (heads,) * 3, (jax.sharding.PartitionSpec(None, "shards"), whole, whole)):
        run = shard_map(
            lambda *x: attention(*x, causal=specs[1] != whole), mesh=mesh, in_specs=specs, out_specs=specs[0]
        )
        alone = lambda *x: attention(*x, causal=specs[1] != whole)  # noqa: E731
        given = arrays if specs[1] != whole else (arrays[0][:, :36], *arrays[1:])
        np.testing.assert_allclose(jax.jit(run)(*given), alone(*given), atol=1e-6)
        gradient = jax.grad(lambda *x: jnp.sin(jax.jit(run)(*x)).sum(), argnums=(0, 1, 2))(*given)
        expected = jax.grad(lambda *x: jnp.sin(alone(*x)).sum(), argnums=(0, 1, 2))(*given)
        for a, b in zip(gradient, expected):
            np.testing.assert_allclose(a, b, atol=1e-5)


# ---- jit with sharded arrays ----------------------------------------------------------------------------------------

P, NamedSharding = jax.sharding.PartitionSpec, jax.sharding.NamedSharding
four_devices = pytest.mark.skipif(
    len(jax.devices("cpu")) < 4, reason="JAX has fewer than 4 CPUs (XLA_FLAGS=--xla_force_host_platform_device_count=4)"
)


def mesh_of(**axes):
    count = int(np.prod([*axes.values()]))
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:count]).reshape(*axes.values()), tuple(axes))


def collectives(compiled):
    names = r" (all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter)[a-z-]*\("
    return set(re.findall(names, compiled.as_text()))


def divided_cases(random):
    """name -> heads, KV heads, how q and k are divided, options, what the gradient exchanges."""
    slopes, lengths = normal(random, 4, 4), np.array([45, 3, 11, 20], np.int32)
    mask, bias = random.random((4, 1, 37, 45)) < 0.7, normal(random, 1, 4, 37, 45)
    both, batch, heads = P("x", None, "y"), P(("x", "y")), P(None, None, ("x", "y"))
    return {
        "batch and heads": (4, 4, both, both, {"causal": True}, set()),
        "grouped heads": (8, 2, both, both, {"causal": True, "window": (9, -1)}, set()),
        "batch": (4, 2, batch, batch, {"seqused_k": lengths, "alibi_slopes": slopes, "mask": mask}, set()),
        "heads": (4, 4, heads, heads, {"causal": True, "softcap": 3.0}, set()),
        "one KV head": (4, 1, both, P("x"), {"causal": True}, {"all-reduce"}),
        "bias and sink": (4, 2, both, both, {"bias": bias, "sink": normal(random, 4)}, {"all-reduce"}),
        "bias of keys": (4, 2, both, both, {"bias": normal(random, 45)}, {"all-reduce"}),
        "bias of each": (4, 2, both, both, {"bias": normal(random, 4, 4, 37, 45)}, set()),
        "heads first": (4, 2, P("x", "y"), P("x", "y"), {"layout": "bhsd", "causal": True}, set()),
    }


@four_devices
@pytest.mark.parametrize("shardy", (True, False), ids=("Shardy", "GSPMD"))
@pytest.mark.parametrize("name", tuple(divided_cases(np.random.default_rng(0))))
def test_sharded_arrays_are_not_gathered(random, name, shardy):
    """Values and gradients of one device, without an exchange but the sums of what all devices read."""
    heads, heads_kv, of_q, of_k, options, exchanged = divided_cases(random)[name]
    arrays = dense(random, batch=4, heads=heads, heads_kv=heads_kv)
    if options.get("layout") == "bhsd":
        arrays = tuple(np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays)
    tensors = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    values = {n: x for n, x in options.items() if n not in tensors}
    floating = {n: x for n, x in tensors.items() if n in ("bias", "sink")}

    def run(arrays, floating):
        return attention(*arrays, return_lse=True, **{**tensors, **floating}, **values)

    def loss(arrays, floating):
        o, lse = run(arrays, floating)
        return jnp.sin(o).sum() + lse.sum()

    mesh = mesh_of(x=2, y=2)
    placed = tuple(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (of_q, of_k, of_k)))
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        forward = jax.jit(run).lower(placed, floating).compile()
        backward = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(placed, floating).compile()
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    assert collectives(forward) == set() and collectives(backward) == exchanged
    o, lse = forward(placed, floating)
    assert o.sharding.is_equivalent_to(NamedSharding(mesh, of_q), 4)
    for a, b in zip((o, lse), run(arrays, floating)):
        np.testing.assert_allclose(a, b, atol=2e-6)
    gradients = backward(placed, floating)
    for x, s in zip(gradients[0], (of_q, of_k, of_k)):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, s), 4)
    expected = jax.grad(loss, argnums=(0, 1))(arrays, floating)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradients, expected)


@four_devices
def test_sharded_pages_packed_sequences_and_vmap(random):
    mesh = mesh_of(x=2, y=2)

    def check(function, *pairs):
        arrays = [x for x, _ in pairs]
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
        compiled = jax.jit(function).lower(*placed).compile()
        assert collectives(compiled) == set()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), compiled(*placed), function(*arrays))

    pages, tables = normal(random, 5, 4, 2, 16), np.array([[0, 1], [2, 3], [4, 0], [1, 2]], np.int32)
    paged = lambda q, k, v, table, n: attention(q, k, v, page_table=table, seqused_k=n)  # noqa: E731
    lengths, of_pages = np.array([5, 6, 7, 8], np.int32), P(None, None, "y")
    queries = normal(random, 4, 1, 4, 16)
    numbers = (tables, P("x")), (lengths, P("x"))
    check(paged, (queries, P("x", None, "y")), (pages, of_pages), (pages + 1, of_pages), *numbers)

    cu = {"cu_seqlens_q": np.array([0, 3, 37], np.int32), "cu_seqlens_k": np.array([0, 20, 45], np.int32)}
    q, k, v = dense(random, batch=4)
    packed = jax.grad(lambda q, k, v: jnp.sin(attention(q, k, v, causal=True, **cu)).sum(), argnums=(0, 1, 2))
    check(packed, *((x[0], P(None, "y")) for x in (q, k, v)))

    mapped = jax.vmap(lambda q, k, v: attention(q, k, v, causal=True))
    check(mapped, *((np.stack([x, x + 1]), P("x", None, None, "y")) for x in (q, k, v)))


@four_devices
def test_what_cannot_be_divided_is_gathered(random):
    """And right: dropout, whose bits are of global places, heads that devices do not divide, and a batch of 3."""
    q, k, v = dense(random, batch=4)
    mesh = mesh_of(x=2, y=2)
    place = lambda spec, *arrays: [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]  # noqa: E731
    dropped = lambda *x: attention(*x, dropout_p=0.3, dropout_seed=3)  # noqa: E731
    equal(jax.jit(dropped)(*place(P("x"), q, k, v)), dropped(q, k, v))
    causal = lambda *x: attention(*x, causal=True)  # noqa: E731
    equal(jax.jit(causal)(*place(P(None, None, ("x", "y")), q), k, v), causal(q, k, v))

    def of_three(q, k, v):
        q = jax.lax.with_sharding_constraint(q, NamedSharding(mesh, P("x")))
        return jax.grad(lambda q, k: causal(q, k, v).sum(), argnums=(0, 1))(q, k)

    three = [x[:3] for x in (q, k, v)]
    expected = jax.grad(lambda q, k: causal(q, k, three[2]).sum(), argnums=(0, 1))(*three[:2])
    for a, b in zip(jax.jit(of_three)(*place(P(), *three)), expected):
        np.testing.assert_allclose(a, b, atol=1e-5)


# ---- ring_attention -------------------------------------------------------------------------------------------------


def shard_mapped(function, **specs):
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map
    return shard_map(function, **specs)


def ring_of(ranks, layout, length, return_lse=True, **options):
    """ring_attention of whole arrays: (q, k, v) or (q, k, v, sink) -> o, lse, rows in order."""
    positions = tessera.jax.ring_positions(length, ranks, layout)
    order = np.argsort(positions)
    rows, of_lse = P(None, "ring"), P(None, None, "ring")

    def on_each(q, k, v, *sink):
        given = dict(zip(("sink",), sink))
        return tessera.jax.ring_attention(
            q, k, v, axis_name="ring", layout=layout, return_lse=return_lse, **given, **options
        )

    def run(q, k, v, *sink):
        specs = (rows,) * 3 + (P(),) * len(sink)
        outputs = (rows, of_lse) if return_lse else rows
        mapped = shard_mapped(on_each, mesh=mesh_of(ring=ranks), in_specs=specs, out_specs=outputs)
        out = mapped(*(x[:, positions] for x in (q, k, v)), *sink)
        return (out[0][:, order], out[1][:, :, order]) if return_lse else out[:, order]

    return run


RINGS = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (9, -1)},
    "both sides": {"window": (5, 3)},
    "sink": {"causal": True, "softcap": 5.0, "scale": 0.3, "sink": True},
}


def errors_of(ours, exact):
    return [float(np.max(np.abs(np.asarray(a, np.float64) - b))) for a, b in zip(ours, exact)]


@four_devices
@pytest.mark.parametrize(
    "name, layout, ranks",
    [(name, "contiguous", 4) for name in RINGS] + [(name, "zig_zag", 2) for name in RINGS]
    + [("causal", "contiguous", 2), ("causal", "zig_zag", 4)],
)  # fmt: skip
def test_a_ring_is_one_device(random, name, layout, ranks):
    """O, LSE and gradients against float64: as close as those of one device."""
    options = dict(RINGS[name])
    arrays = list(dense(random, sq=40, sk=40))
    if options.pop("sink", False):
        arrays.append(normal(random, 4))
    d_o, d_lse = normal(random, 2, 40, 4, 16), normal(random, 2, 4, 40)

    def all_of(run):
        def both(*arrays):
            out, pull = jax.vjp(run, *arrays)
            return out, pull((d_o, d_lse))

        (o, lse), gradients = jax.jit(both)(*arrays)
        return [o, lse, *gradients]

    def alone(q, k, v, *sink):
        return attention(q, k, v, return_lse=True, **dict(zip(("sink",), sink)), **options)

    wide, given = [x.astype(np.float64) for x in arrays[:3]], dict(zip(("sink",), arrays[3:]))
    o, lse = tessera.attention(*wide, return_lse=True, **given, **options)
    wanted = {"grad_sink": True} if given else {}
    gradients = tessera.attention_backward(
        *wide, o, lse, d_o.astype(np.float64), d_lse=d_lse, **wanted, **given, **options
    )
    exact = [o, lse, *gradients[:3], *([gradients.d_sink] if given else [])]
    of_ring = errors_of(all_of(ring_of(ranks, layout, 40, **options)), exact)
    for ours, one in zip(of_ring, errors_of(all_of(alone), exact)):
        assert ours <= 2 * one + 1e-6


@four_devices
@pytest.mark.parametrize("layout", ("contiguous", "zig_zag"))
def test_a_ring_merges_scores_that_share_a_large_number(random, layout):
    """Scores of 2^20, exact in float32, whose LSE float32 rounds to 1/8: merged with what the rounding leaves out."""
    q, k = (random.integers(-2, 3, (1, 32, 2, 16)).astype(np.float32) for _ in "qk")
    v, d_o = normal(random, 1, 32, 2, 16), normal(random, 1, 32, 2, 16)
    q[..., 0] = k[..., 0] = 2048
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k) / 4
    scores = np.where(np.tri(32, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = np.einsum("bhqk,bkhd->bqhd", p, v)
    d_p = np.einsum("bqhd,bkhd->bhqk", d_o, v)
    d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True)) / 4
    exact = [o, np.einsum("bhqk,bkhd->bqhd", d_s, k), np.einsum("bhqk,bqhd->bkhd", d_s, q)]
    run = ring_of(4, layout, 32, return_lse=False, causal=True)
    ours, pull = jax.vjp(jax.jit(run), q, k, v)
    d_q, d_k, d_v = pull(d_o)
    for a, b in zip((ours, d_q[..., 1:], d_k[..., 1:]), (exact[0], exact[1][..., 1:], exact[2][..., 1:])):
        np.testing.assert_allclose(a, b, atol=2e-5)
    np.testing.assert_allclose(d_v, np.einsum("bhqk,bqhd->bkhd", p, d_o), atol=2e-5)


@four_devices
def test_a_ring_sends_keys_to_those_that_see_them(random):
    """A narrow window's keys travel one place, all rows of keys N - 1: no gather. Batch and heads on other axes."""
    arrays = dense(random, sq=40, sk=40)

    def permutes(layout, **options):
        compiled = jax.jit(ring_of(4, layout, 40, return_lse=False, **options)).lower(*arrays).compile()
        return compiled.as_text().count(" collective-permute(") + compiled.as_text().count(" collective-permute-start(")

    narrow, causal = permutes("contiguous", window=(9, -1), causal=True), permutes("contiguous", causal=True)
    assert (narrow, causal) == (2, 6)

    mesh, rows = mesh_of(x=2, ring=2), P("x", "ring")
    attend = functools.partial(tessera.jax.ring_attention, axis_name="ring", causal=True)
    run = jax.jit(shard_mapped(attend, mesh=mesh, in_specs=rows, out_specs=rows))
    compiled = run.lower(*(jax.device_put(x, NamedSharding(mesh, rows)) for x in arrays)).compile()
    assert collectives(compiled) == {"collective-permute"}
    np.testing.assert_allclose(run(*arrays), attention(*arrays, causal=True), atol=2e-6)


@four_devices
def test_a_ring_of_bfloat16_and_its_transformations(random):
    """vmap and checkpoint of a ring; parts are rounded to bfloat16, their sum once more."""
    arrays = dense(random, "bfloat16", sq=40, sk=40)
    run = ring_of(4, "zig_zag", 40, return_lse=False, causal=True)
    exact = tessera.attention(*(x.astype(np.float64) for x in arrays), causal=True)
    ours = jax.jit(run)(*arrays)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(ours, np.float64), exact, atol=2**-8 * np.abs(exact).max())
    stack = [np.stack([x, -x]) for x in arrays]
    equal(jax.jit(jax.vmap(run))(*stack)[1], jax.jit(run)(*(x[1] for x in stack)))
    loss = lambda q: jnp.sin(run(q, *arrays[1:]).astype(np.float32)).sum()  # noqa: E731
    equal(jax.jit(jax.grad(jax.checkpoint(loss)))(arrays[0]), jax.jit(jax.grad(loss))(arrays[0]))


def test_what_a_ring_refuses(random):
    arrays = dense(random, sq=40, sk=40)

    def refused(text, arrays=arrays, **options):
        attend = functools.partial(tessera.jax.ring_attention, axis_name="ring", **options)
        rows = P(None, "ring")
        with pytest.raises(tessera.Error, match=text):
            jax.jit(shard_mapped(attend, mesh=mesh_of(ring=2), in_specs=rows, out_specs=rows)).lower(*arrays)

    positions = "not accepted by ring_attention, whose calls see a part of the rows"
    refused(f"^bias: {positions}", bias=normal(random, 1, 4, 20, 20))
    refused(f"^mask: {positions}", mask=np.ones((20, 20), bool))
    refused(f"^alibi_slopes: {positions}", alibi_slopes=np.ones(4, np.float32))
    refused(f"^dropout_p: {positions}", dropout_p=0.1, dropout_seed=1)
    refused(f"^cu_seqlens_q: {positions}", cu_seqlens_q=np.array([0, 40], np.int32))
    refused("^k: shape .2, 24, 2, 16., q has .2, 20, 4, 16.", arrays=dense(random, sq=40, sk=48))
    refused("^window: .*, accepted a pair", window=3)
    refused("^q: 21 rows on each device, accepted an even number", arrays=dense(random, sq=42, sk=42), layout="zig_zag")
    with pytest.raises(TypeError, match="is_causal"):
        jax.jit(ring_of(2, "contiguous", 40, is_causal=True)).lower(*arrays)
    with pytest.raises(tessera.Error, match='^layout: "bhsd", accepted "contiguous" or "zig_zag"'):
        tessera.jax.ring_attention(*arrays, axis_name="ring", layout="bhsd")
    with pytest.raises(tessera.Error, match="^axis_name: 'ring', accepted an axis of the mesh"):
        tessera.jax.ring_attention(*arrays, axis_name="ring")
    with pytest.raises(tessera.Error, match="^length: 42, accepted a multiple of 4 for zig_zag on 2 devices"):
        tessera.jax.ring_positions(42, 2)
    equal(tessera.jax.ring_positions(8, 2), [0, 1, 6, 7, 2, 3, 4, 5])


# ---- append ---------------------------------------------------------------------------------------------------------


def appended(k, v, k_cache, v_cache, seqused_k, q=None, **options):
    """As the library writes it: k_cache, v_cache, and q if it is given."""
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    q_out = None if q is None else np.empty_like(q)
    tessera.append(k, v, k_cache, v_cache, seqused_k, q=q, q_out=q_out, **options)
    return [x for x in (k_cache, v_cache, q_out) if x is not None]


def caches(random, dtype="float32"):
    """name -> k, v, k_cache, v_cache, seqused_k, and tensors by their names."""
    new, pages = (normal(random, 2, 3, 2, 16, dtype=dtype) for _ in "kv"), (5, 8, 2, 16)
    k, v = new
    cos, sin = normal(random, 32, 8), normal(random, 32, 8)
    rotated = {"q": normal(random, 2, 3, 4, 16, dtype=dtype), "cos": cos, "sin": sin}
    cu, table = np.array([0, 1, 3], np.int32), np.array([[4, 0], [2, 1]], np.int32)
    lengths, dense_cache = np.array([3, 12], np.int32), [normal(random, 2, 16, 2, 16, dtype=dtype) for _ in "kv"]
    paged_cache = [normal(random, *pages, dtype=dtype) for _ in "kv"]
    positions = {f"positions_{x}": np.array([[5, 6, 7], [0, 1, 31]], np.int32) for x in "qk"}
    packed = {"cu_seqlens": cu, "page_table": table, **rotated, "q": rotated["q"][0]}
    return {
        "dense": (k, v, *dense_cache, lengths, {}),
        "rotated": (k, v, *dense_cache, lengths, {**rotated, **positions}),
        "pages": (k, v, *paged_cache, lengths, {"page_table": table, **rotated}),
        "packed": (k[0], v[0], *paged_cache, lengths, packed),
    }


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("name", ("dense", "rotated", "pages", "packed"))
def test_append_writes_where_the_cache_is(random, name, dtype):
    """The library's bits; under jit with donated caches in the caches' own memory, and without a copy."""
    *arrays, tensors = caches(random, dtype)[name]
    expected = appended(*arrays, **tensors)
    for a, b in zip(tessera.jax.append(*arrays, **tensors), expected):
        equal(a, b)
    k, v, k_cache, v_cache, seqused_k = (jnp.array(x) for x in arrays)
    step = jax.jit(tessera.jax.append, donate_argnames=("k_cache", "v_cache"))
    compiled = step.lower(k, v, k_cache, v_cache, seqused_k, **tensors).compile().as_text()
    assert " copy(" not in compiled and "output_to_operand_aliasing" in compiled
    before = [x.unsafe_buffer_pointer() for x in (k_cache, v_cache)]
    out = step(k, v, k_cache=k_cache, v_cache=v_cache, seqused_k=seqused_k, **tensors)
    assert [x.unsafe_buffer_pointer() for x in out[:2]] == before
    assert k_cache.is_deleted() and v_cache.is_deleted()
    for a, b in zip(out, expected):
        equal(a, b)
    kept = [jnp.array(x) for x in arrays]  # without donation the caches that are given stay as they are
    jax.jit(tessera.jax.append)(*kept, **tensors).k_cache.block_until_ready()
    for a, b in zip(kept, arrays):
        equal(a, b)


@pytest.mark.parametrize("codes", ("float8_e4m3fn", "float8_e5m2", "int8"))
@pytest.mark.parametrize("form", ("scales of heads", "scales of sequences", "computed"))
def test_append_into_a_cache_of_8_bits(random, codes, form):
    """The library's codes, and its computed scales, in the memory of the donated arrays, and attention over them."""
    name = "pages" if form == "computed" else "rotated"
    k, v, *own_caches, lengths, tensors = caches(random, "bfloat16")[name]
    tensors.pop("q", None), tensors.pop("positions_q", None)
    of_codes = [np.zeros(x.shape, jnp.dtype(codes)) for x in own_caches]
    shape = {"computed": (5, 8, 2), "scales of heads": (2,)}.get(form, (2, 2))
    scales = {f"{name}_descale": np.abs(normal(random, *shape)) + 0.1 for name in "kv"}
    expected = [x.copy() for x in (*of_codes, *scales.values())]
    computed = {"compute_scales": form == "computed"}
    tessera.append(k, v, *expected[:2], lengths, k_descale=expected[2], v_descale=expected[3], **tensors, **computed)

    written = ("k_cache", "v_cache", *(scales if form == "computed" else ()))
    step = jax.jit(tessera.jax.append, static_argnames="compute_scales", donate_argnames=written)
    given = {name: jnp.array(x) for name, x in zip(("k_cache", "v_cache", *scales), (*of_codes, *scales.values()))}
    before = [given[name].unsafe_buffer_pointer() for name in written]
    out = step(k, v, seqused_k=lengths, **given, **tensors, **computed)
    assert [getattr(out, name).unsafe_buffer_pointer() for name in written] == before
    for a, b in zip(out[:2], expected):
        equal(jnp.asarray(a).view(jnp.uint8), b.view(np.uint8))
    if form == "computed":
        equal(out.k_descale, expected[2])
        equal(out.v_descale, expected[3])
    else:
        assert out.k_descale is out.v_descale is None

    q = normal(random, 2, 3, 4, 16, dtype="bfloat16")
    read = dict(zip(scales, expected[2:]), seqused_k=lengths, causal=True)
    if form == "computed":
        read["page_table"] = tensors["page_table"]
        scales = {name: getattr(out, name) for name in scales}
    ours = attention(q, *out[:2], **{**read, **scales})
    equal(ours, tessera.attention(q, *expected[:2], **read))


def test_append_and_attention_decode(random):
    """A loop of steps whose cache is its carry, which is not copied: each token attends to all before it."""
    q, k, v = dense(random, sq=6, sk=6)
    cos, sin = np.ones((8, 8), np.float32), np.zeros((8, 8), np.float32)

    def step(cache, new):
        q, k, v, n = new
        lengths = jnp.full(2, n + 1, np.int32)
        out = tessera.jax.append(k[:, None], v[:, None], *cache, lengths, q=q[:, None], cos=cos, sin=sin)
        return out[:2], attention(out.q, *out[:2], seqused_k=lengths, causal=True)[:, 0]

    news = (*(jnp.swapaxes(x, 0, 1) for x in (q, k, v)), jnp.arange(6))
    cache = tuple(jnp.zeros((2, 8, 2, 16)) for _ in "kv")
    loop = jax.jit(lambda cache, news: jax.lax.scan(step, cache, news), donate_argnums=0).lower(cache, news).compile()
    assert not re.search(r"f32\[2,8,2,16\]\S* copy\(", loop.as_text())
    _, o = loop(cache, news)
    np.testing.assert_allclose(jnp.swapaxes(o, 0, 1), attention(q, k, v, causal=True), atol=2e-6)


def test_append_under_vmap_and_refusals(random):
    *arrays, tensors = caches(random)["rotated"]
    k, v, k_cache, v_cache, lengths = arrays
    mapped = jax.vmap(lambda k, cache: tessera.jax.append(k, v, cache, v_cache, lengths))
    out = mapped(np.stack([k, k + 1]), np.stack([k_cache, -k_cache]))
    for a, b in zip(out, appended(k + 1, v, -k_cache, v_cache, lengths)):
        equal(a[1], b)
    with pytest.raises(tessera.Error, match="^k_cache: dtype float16"):
        jax.jit(tessera.jax.append).lower(k, v, k_cache.astype(np.float16), v_cache, lengths)
    with pytest.raises(tessera.Error, match="^v: list, accepted an array"):
        tessera.jax.append(k, [1.0], k_cache, v_cache, lengths)
    with pytest.raises(tessera.Error, match="^sin: "):
        jax.jit(tessera.jax.append).lower(*arrays, cos=tensors["cos"])
    with pytest.raises(Exception, match="seqused_k"):  # XLA's status, with the one line
        jax.block_until_ready(jax.jit(tessera.jax.append)(k, v, k_cache, v_cache, 9 * lengths))
    with pytest.raises(tessera.Error, match="^k_descale: "):
        jax.jit(tessera.jax.append).lower(*arrays, k_descale=np.ones(2, np.float32))
    with pytest.raises(tessera.Error, match="^compute_scales: |^k_descale: "):
        tessera.jax.append(*arrays, compute_scales=True)
    with pytest.raises(NotImplementedError, match="tessera.jax.append: a gradient was asked for"):
        jax.grad(lambda k: tessera.jax.append(k, v, k_cache, v_cache, lengths).k_cache.sum())(k)


@four_devices
def test_a_sharded_cache_of_8_bits_is_not_gathered(random):
    """Computed scales are divided by heads as the pages are."""
    k, v, *_, lengths, tensors = caches(random, "bfloat16")["pages"]
    tensors.pop("q")
    given = [np.zeros((5, 8, 2, 16), jnp.float8_e5m2)] * 2 + [np.ones((5, 8, 2), np.float32)] * 2
    expected = [x.copy() for x in given]
    options = {**tensors, "compute_scales": True}
    tessera.append(k, v, *expected[:2], lengths, k_descale=expected[2], v_descale=expected[3], **options)
    mesh = mesh_of(y=2)
    by_heads = NamedSharding(mesh, P(None, None, "y"))
    new, placed = ([jax.device_put(x, by_heads) for x in arrays] for arrays in ((k, v), given))

    def run(k, v, k_cache, v_cache, of_k, of_v):
        return tessera.jax.append(k, v, k_cache, v_cache, lengths, k_descale=of_k, v_descale=of_v, **options)

    step = jax.jit(run, donate_argnums=(2, 3, 4, 5))
    assert collectives(step.lower(*new, *placed).compile()) == set()
    out = step(*new, *placed)
    assert out.k_descale.sharding.is_equivalent_to(by_heads, 3)
    for a, b in zip((*out[:2], out.k_descale, out.v_descale), expected):
        equal(jnp.asarray(a).astype(np.float32), b.astype(np.float32))


@four_devices
@pytest.mark.parametrize("name", ("rotated", "pages", "packed"))
def test_a_sharded_cache_is_not_gathered(random, name):
    *arrays, tensors = caches(random)[name]
    mesh = mesh_of(x=2, y=2)
    by_heads, by_both = P(None, None, "y"), P("x", None, "y")
    of_new = {"rotated": by_both, "pages": by_heads, "packed": P(None, "y")}[name]
    of_cache = by_both if name == "rotated" else by_heads
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    placed = [place(x, spec) for x, spec in zip(arrays, (of_new, of_new, of_cache, of_cache, P()))]
    placed_tensors = {**tensors, "q": place(tensors["q"], of_new)}
    step = jax.jit(tessera.jax.append, donate_argnames=("k_cache", "v_cache"))
    assert collectives(step.lower(*placed, **placed_tensors).compile()) == set()
    out = step(*placed, **placed_tensors)
    assert out.k_cache.sharding.is_equivalent_to(NamedSharding(mesh, of_cache), 4)
    for a, b in zip(out, appended(*arrays, **tensors)):
        np.testing.assert_allclose(a, b, atol=1e-6)


# ---- jax.nn.dot_product_attention -----------------------------------------------------------------------------------

NN = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.2, "is_causal": True},
    "window": {"local_window_size": (6, 3), "is_causal": True},
    "window of one": {"local_window_size": 5, "mask": np.ones((1, 1, 1, 45), bool)},
    "lengths": {"key_value_seq_lengths": np.array([45, 20], np.int32)},
    "both lengths": {"query_seq_lengths": np.array([12, 37], np.int32),
                     "key_value_seq_lengths": np.array([7, 45], np.int32)},
    "causal lengths": {"is_causal": True, "query_seq_lengths": np.array([12, 37], np.int32),
                       "key_value_seq_lengths": np.array([7, 45], np.int32)},
    "window and lengths": {"local_window_size": (3, 2), "is_causal": True,
                           "query_seq_lengths": np.array([20, 37], np.int32),
                           "key_value_seq_lengths": np.array([20, 45], np.int32)},
    "mask and lengths": {"mask": np.tril(np.ones((1, 1, 37, 45), bool)),
                         "query_seq_lengths": np.array([18, 9], np.int32),
                         "key_value_seq_lengths": np.array([11, 22], np.int32)},
    "mask of keys": {"mask": np.arange(45) < 23},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("name", (*NN, "bias", "bias of bfloat16", "mask", "bias of queries", "bias, causal"))
def test_dot_product_attention_is_jax_nn_s(random, name, dtype):
    """Values and gradients in float64's place: those of XLA in float32."""
    arrays = dense(random, dtype)
    options = dict(NN.get(name, {}))
    if name.startswith("bias"):
        shape = (1, 1, 37, 1) if name.endswith("queries") else (1, 4, 37, 45)
        options["bias"] = normal(random, *shape, dtype="bfloat16" if name.endswith("bfloat16") else "float32")
    if name == "bias, causal":
        options["is_causal"] = True
    if name == "mask":
        options["mask"] = random.random((2, 1, 37, 45)) < 0.7
    bias = options.pop("bias", None)
    d_o = normal(random, 2, 37, 4, 16)

    def run(function, arrays, bias):
        def loss(arrays, bias):
            o = function(*arrays, bias=bias, **options)
            return (o * d_o.astype(o.dtype)).sum(), o

        return jax.value_and_grad(loss, argnums=(0,) if bias is None else (0, 1), has_aux=True)(arrays, bias)

    wide = tuple(x.astype(np.float32) for x in arrays)
    with jax.numpy_rank_promotion("raise"):
        (_, o), gradients = jax.jit(lambda *x: run(tessera.jax.dot_product_attention, *x))(arrays, bias)
    (_, exact), others = run(jax.nn.dot_product_attention, wide, None if bias is None else bias.astype(np.float32))
    assert o.dtype == arrays[0].dtype and o.shape == exact.shape
    limit = 4e-2 if "bfloat16" in (dtype, *name.split()) else 2e-5
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=limit * max(1, np.abs(b).max())),
        (o, gradients), (exact, others),
    )  # fmt: skip


@pytest.mark.parametrize("dtype, heads_kv, mapped", (
    ("float16", 4, False), ("float16", 1, True), ("bfloat16", 1, False), ("bfloat16", 4, True),
))  # fmt: skip
def test_groups_of_heads_are_those_repeated(random, dtype, heads_kv, mapped):
    """Also under vmap over sequences: values and gradients by XLA's attention in float32 with repeated KV heads."""
    arrays, d_o = dense(random, dtype, heads_kv=heads_kv, size=32), normal(random, 2, 37, 4, 32, dtype=dtype)

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 4 // heads_kv, axis=2) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v, implementation="xla")

    def run(function, arrays, d_o):
        o, pull = jax.vjp(function, *arrays)
        return o, *pull(d_o.astype(o.dtype))

    ours = jax.vmap(tessera.jax.dot_product_attention) if mapped else tessera.jax.dot_product_attention
    found = jax.jit(functools.partial(run, ours))(arrays, d_o)
    wide = [x.astype(np.float32) for x in (*arrays, d_o)]
    for a, b in zip(found, run(plain, wide[:3], wide[3])):
        assert a.dtype == jnp.dtype(dtype)
        limit = {"float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
        np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=limit * np.abs(b).max())


@pytest.mark.parametrize("batch, mapped", ((1, False), (3, False), (3, True)))
def test_a_bias_s_gradient_of_each_sequence(random, batch, mapped):
    """One array is query, key and value; a bias of [B, N, S, S] in bfloat16, and a mask of three axes."""
    x, bias = normal(random, batch, 24, 4, 32, dtype="bfloat16"), normal(random, batch, 4, 24, 24, dtype="bfloat16")
    mask = np.ones((1, 1, 24), bool)

    def run(function, x, bias):
        attend = lambda x, bias: function(x, x, x, bias, mask)  # noqa: E731
        o, pull = jax.vjp(jax.vmap(attend) if mapped else attend, x, bias)
        return o, *pull(x)

    ours = jax.jit(functools.partial(run, tessera.jax.dot_product_attention))(x, bias)
    wide = (x.astype(np.float32), bias.astype(np.float32))
    for a, b, given in zip(ours, run(jax.nn.dot_product_attention, *wide), (x, x, bias)):
        assert a.dtype == given.dtype
        np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=2e-2 * np.abs(b).max())


def test_residuals_and_three_axes(random):
    q, k, v = (x[0] for x in dense(random))
    o, lse = tessera.jax.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert o.shape == q.shape and lse.shape == q.shape[:-1] and lse.dtype == np.float32
    np.testing.assert_allclose(o, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5)
    scores = np.einsum("tnh,snh->tns", q, np.repeat(k, 2, axis=1)) / 4
    scores = np.where(np.arange(45) <= np.arange(37)[:, None, None], scores, -np.inf)
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(-1)), atol=1e-5)


def test_a_residual_is_jax_nn_s(random):
    """The dtype of key, and no gradient."""
    arrays = dense(random, "float16", heads_kv=4)
    d_o, d_lse = normal(random, 2, 37, 4, 16, dtype="float16"), normal(random, 2, 37, 4, dtype="float16")
    run = lambda *x: tessera.jax.dot_product_attention(*x, return_residual=True)  # noqa: E731
    (o, lse), pull = jax.vjp(run, *arrays)
    assert lse.dtype == np.float16
    equal(lse, np.swapaxes(attention(*arrays, return_lse=True)[1], 1, 2).astype(np.float16))
    for a, b in zip(pull((d_o, d_lse)), jax.vjp(lambda *x: run(*x)[0], *arrays)[1](d_o)):
        equal(a, b)


def test_transformations_of_dot_product_attention(random):
    """vmap over some of the arguments, a shared bias's gradient, and a Jacobian, where only cotangents are mapped."""
    q, k, v = dense(random, batch=2, sq=4, sk=6, size=8)
    bias, mask = normal(random, 1, 4, 4, 6), np.ones((1, 1, 6), bool)
    stack = np.stack([q, q + 1, q - 1])

    def mapped(function, q, stack, bias):
        gradient = jax.grad(lambda q, bias: jnp.sin(function(q, k, v, bias, mask)).sum(), argnums=(0, 1))
        return (
            jax.vmap(function, (0, None, None, None, None))(stack, k, v, bias, mask),
            jax.vmap(gradient, (0, None))(stack, bias),
            jax.jacobian(lambda q: function(q, k, v, is_causal=True))(q),
            jax.jacobian(lambda bias: function(q, k, v, bias))(bias),
        )

    ours, other = (
        jax.jit(functools.partial(mapped, f))(q, stack, bias)
        for f in (tessera.jax.dot_product_attention, jax.nn.dot_product_attention)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), ours, other)


def test_errors_are_jax_nn_s(random):
    q, k, v = dense(random)
    for arguments, options in (
        ((q, k, v[:, 1:]), {}),
        ((q, k, v.astype(np.float16)), {}),
        ((q[:1], k, v), {}),
        ((q, k, v), {"mask": np.ones((1, 1, 37, 45), np.float32)}),
        ((q, k, v), {"key_value_seq_lengths": np.ones(3, np.int32)}),
        ((q[:, :, :3], k, v), {}),
        ((q, k, v), {"implementation": "none such"}),
    ):
        texts = []
        for function in (tessera.jax.dot_product_attention, jax.nn.dot_product_attention):
            with pytest.raises(ValueError) as error:
                function(*arguments, **options)
            texts.append(str(error.value))
        other = texts[1].replace("<class 'jax.numpy.bool'>", "bool")  # JAX 0.6
        assert texts[0].replace("(", "[").replace(")", "]") == other.replace("(", "[").replace(")", "]")


def test_activate_and_restore(random):
    import types

    arrays = dense(random)
    own = jax.nn.dot_product_attention
    module = types.ModuleType("somebody")
    module.attend = own
    sys.modules["somebody"] = module
    try:
        replaced = tessera.jax.activate()
        assert {"somebody.attend", "jax.nn.dot_product_attention"} <= set(replaced)
        assert jax.nn.dot_product_attention is module.attend is tessera.jax.dot_product_attention
        text = str(jax.make_jaxpr(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True))(*arrays))
        assert "tessera_attention" in text
        np.testing.assert_allclose(
            jax.nn.dot_product_attention(*arrays, implementation="xla"), own(*arrays), atol=1e-6
        )
    finally:
        tessera.jax.restore()
        del sys.modules["somebody"]
    assert jax.nn.dot_product_attention is own and module.attend is own


def test_what_flax_calls(random):
    q, k, v = (normal(random, 2, 3, 9, 4, 16) for _ in range(3))  # two axes of sequences
    mask = np.tril(np.ones((2, 3, 1, 9, 9), np.float32))
    passed = {"broadcast_dropout": True, "dtype": None, "precision": None, "module": None, "promote_dtype": None}
    fold = lambda x: x.reshape(6, *x.shape[2:])  # noqa: E731
    o = tessera.jax.flax_attention(q, k, v, mask=mask, dropout_rng=None, dropout_rate=0.5, deterministic=True, **passed)
    np.testing.assert_allclose(fold(o), attention(fold(q), fold(k), fold(v), causal=True), atol=1e-6)
    key = jax.random.key(1)
    o = tessera.jax.flax_attention(q, k, v, is_causal=True, dropout_rng=key, dropout_rate=0.5, **passed)
    equal(fold(o), attention(fold(q), fold(k), fold(v), causal=True, dropout_p=0.5, dropout_seed=key))
    assert tessera.jax.flax_attention(q, k, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="^module: given"):
        tessera.jax.flax_attention(q, k, v, module=object())


def test_a_transformer_trains_alike(random):
    """Two layers on a sequence to be copied: the losses by Tessera are those by XLA's attention."""
    width, heads, length, words = 32, 4, 24, 11
    data = random.integers(0, words, (8, length))

    def parameters():
        draw = lambda *shape: jnp.array(
            np.random.default_rng(len(shape) + shape[0]).normal(0, 0.2, shape), jnp.float32
        )  # noqa: E731
        layer = lambda: {
            "qkv": draw(width, 3 * width), "out": draw(width, width), "up": draw(width, 2 * width),
            "down": draw(2 * width, width),
        }  # noqa: E731, E501  # fmt: skip
        return {"words": draw(words, width), "places": draw(length, width), "layers": [layer(), layer()]}

    def loss(attend, p, data):
        x = p["words"][data] + p["places"]
        for layer in p["layers"]:
            q, k, v = jnp.split((x @ layer["qkv"]).reshape(8, length, heads, -1), 3, axis=-1)
            x = x + attend(q, k, v, is_causal=True).reshape(x.shape) @ layer["out"]
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        logits = jax.nn.log_softmax((x @ p["words"].T)[:, :-1])
        return -jnp.take_along_axis(logits, data[:, 1:, None], -1).mean()

    losses = []
    for attend in (tessera.jax.dot_product_attention, jax.nn.dot_product_attention):
        step = jax.jit(jax.value_and_grad(lambda p, data, attend=attend: loss(attend, p, data)))
        p, seen = parameters(), []
        for _ in range(12):
            value, gradient = step(p, data)
            p = jax.tree.map(lambda a, b: a - 0.3 * b, p, gradient)
            seen.append(float(value))
        losses.append(seen)
    assert losses[0][-1] < 0.9 * losses[0][0]
    np.testing.assert_allclose(*losses, rtol=1e-4)
