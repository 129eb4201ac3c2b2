"""tessera.quantize, rotate, and attention of 8-bit arrays with their scales, in NumPy, PyTorch and JAX."""

import ml_dtypes
import numpy as np
import pytest

import tessera

LARGEST = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
STEP = {"float8_e4m3": 2**-4, "float8_e5m2": 2**-3}  # half a step, relative


def frameworks():
    yield pytest.param(lambda x: x, id="numpy")
    for name in ("torch", "jax"):
        yield pytest.param(name, id=name)


def maker(framework):
    if callable(framework):
        return framework
    if framework == "torch":
        torch = pytest.importorskip("torch")
        return lambda x: torch.from_numpy(np.ascontiguousarray(x))
    jax = pytest.importorskip("jax")
    return jax.numpy.asarray


def numbers(x):
    """float32 in NumPy."""
    if type(x).__module__ == "torch":
        return x.float().numpy()
    return np.asarray(x).astype(np.float32)


def spread(scale, shape, tokens):
    """Scales for each element of [B, S, H, D]."""
    scale = numbers(scale)
    if scale.ndim == 3:
        scale = np.repeat(scale, tokens, axis=1)[:, : shape[1]]
    return np.broadcast_to(scale[..., None], (*shape[:3], 1))


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("scheme, shape, tokens", [
    ("tensor", (1,), 1), ("head", (3,), 1), ("block", (2, 2, 3), 128), ("token", (2, 150, 3), 1),
])  # fmt: skip
def test_codes_are_the_nearest_of_their_scale(framework, dtype, scheme, shape, tokens):
    x = np.random.default_rng(1).standard_normal((2, 150, 3, 40)).astype(np.float32)
    codes, scale = tessera.quantize(maker(framework)(x), dtype, scheme=scheme)
    assert tuple(scale.shape) == shape and tuple(codes.shape) == x.shape
    each = spread(scale, x.shape, tokens)
    magnitude = np.abs(x / each).max()
    np.testing.assert_allclose(magnitude, LARGEST[dtype], rtol=1e-5)
    error = np.abs(numbers(codes) - x / each)
    least = {"float8_e4m3": 2.0**-10, "float8_e5m2": 2.0**-17}.get(dtype, 0.5)
    allowed = np.maximum(np.abs(x / each) * STEP.get(dtype, 0), least)
    assert (error <= 1.0001 * allowed).all()


def bits(codes):
    """As uint8, in NumPy."""
    if type(codes).__module__ == "torch":
        import torch

        return codes.view(torch.uint8).numpy()
    return np.asarray(codes).view(np.uint8)


def all_codes(dtype):
    """(codes of the finite numbers from the least to the largest, their numbers), 0 as -0 and 0."""
    codes = np.arange(256).astype(np.uint8)
    if dtype == "int8":
        codes = codes[codes != 128]
        exact = codes.view(np.int8).astype(np.float32)
    else:
        exact = codes.view(getattr(ml_dtypes, dtype.replace("e4m3", "e4m3fn"))).astype(np.float32)
        codes, exact = codes[np.isfinite(exact)], exact[np.isfinite(exact)]
    order = np.lexsort((~np.signbit(exact), exact))
    return codes[order], exact[order]


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("dtype", LARGEST)
def test_every_code_comes_back_and_every_tie_becomes_even(framework, dtype):
    """The largest number is among them, so the scale is 1."""
    codes, exact = all_codes(dtype)
    assert len(codes) == {"float8_e4m3": 254, "float8_e5m2": 248, "int8": 255}[dtype]
    middles = (exact[1:] + exact[:-1]) / 2
    even = np.where(codes[1:] % 2 == 0, codes[1:], codes[:-1])
    down, up = np.nextafter(middles, exact[:-1]), np.nextafter(middles, exact[1:])
    distinct = exact[1:] != exact[:-1]  # not between -0 and 0
    x = np.concatenate([exact, *(part[distinct] for part in (middles, down, up))])
    expected = np.concatenate([codes, *(part[distinct] for part in (even, codes[:-1], codes[1:]))])
    quantized = tessera.quantize(maker(framework)(x.reshape(1, 1, 1, -1)), dtype, scheme="tensor")
    assert list(numbers(quantized.scale)) == [1.0]
    found = bits(quantized.codes).reshape(-1)
    wrong = found != expected
    assert not wrong.any(), [(x[n], found[n], expected[n]) for n in np.flatnonzero(wrong)[:5]]


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("dtype", LARGEST)
def test_attention_reads_every_code(framework, dtype):
    """One key, so o is its value."""
    codes = np.arange(256).astype(np.uint8)
    typed = codes.view(np.int8 if dtype == "int8" else getattr(ml_dtypes, dtype.replace("e4m3", "e4m3fn")))
    values = typed.astype(np.float32)
    make = maker(framework)
    if framework == "torch":
        import torch

        v = make(codes).view(getattr(torch, dtype.replace("e4m3", "e4m3fn"))).reshape(1, 1, 1, 256)
        q = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)
    else:
        v, q = make(typed.reshape(1, 1, 1, 256)), make(np.zeros((1, 1, 1, 16), ml_dtypes.bfloat16))
    o = numbers(tessera.attention(q, v[..., :16], v)).reshape(-1)
    np.testing.assert_array_equal(o, values)


@pytest.mark.parametrize("framework", frameworks())
def test_infinities_saturate_and_a_nan_stays(framework):
    x = np.ones((1, 4, 2, 8), np.float32)
    x[0, 1, 0, 3], x[0, 2, 0, 4], x[0, 3, 1, 5] = np.inf, -np.inf, np.nan
    codes, scale = tessera.quantize(maker(framework)(x), "float8_e4m3", scheme="tensor")
    codes = numbers(codes)
    assert numbers(scale)[0] == np.float32(1 / 448)
    assert codes[0, 1, 0, 3] == 448 and codes[0, 2, 0, 4] == -448
    assert np.isnan(codes[0, 3, 1, 5]) and np.isnan(codes).sum() == 1
    scale = numbers(tessera.quantize(maker(framework)(x), "int8", scheme="token").scale)
    assert np.isnan(scale[0, 3, 1]) and np.isnan(scale).sum() == 1
    zero = tessera.quantize(maker(framework)(0 * np.ones_like(x)), "int8")
    assert (numbers(zero.scale) == 1).all() and (numbers(zero.codes) == 0).all()


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("head_dim", [64, 96])
def test_rotation_keeps_products(framework, head_dim):
    rng = np.random.default_rng(2)
    q, k = (rng.standard_normal((1, 5, 2, head_dim)).astype(np.float32) for _ in range(2))
    k[..., 7] *= 100
    turned_q, turned_k = (numbers(tessera.rotate(maker(framework)(x))) for x in (q, k))
    products = np.einsum("bihd,bjhd->bhij", q, k)
    np.testing.assert_allclose(np.einsum("bihd,bjhd->bhij", turned_q, turned_k), products, atol=2e-3)
    assert np.abs(turned_k).max() < 0.5 * np.abs(k).max()


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("head_dim", [64, 96])
def test_the_inverse_rotates_back(framework, head_dim):
    x = np.random.default_rng(5).standard_normal((2, 7, 3, head_dim)).astype(np.float32)
    rotated = tessera.rotate(maker(framework)(x))
    assert np.abs(numbers(rotated) - x).max() > 0.5
    np.testing.assert_allclose(numbers(tessera.rotate(rotated, inverse=True)), x, atol=2e-6)
    back = tessera.rotate(maker(framework)(x.astype(np.float16)), inverse=True)
    assert str(back.dtype).endswith("float16") and tuple(back.shape) == x.shape


@pytest.mark.parametrize("dtype, most", [("int8", 0.5), ("float8_e4m3", 0.75)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotated_keys_and_values_stand_outliers(dtype, most, head_dim):
    """Against one scale of the tensor, by the inputs of "FlashAttention-3"; e4m3 rounds v alone by 2.6 %."""
    rng = np.random.default_rng(6)
    errors = {"tensor": [], "block": []}
    for _ in range(4):
        q, k, v = (rng.standard_normal((1, rows, heads, head_dim)) for rows, heads in ((8, 4), (512, 2), (512, 2)))
        for x in (k, v):
            x += (rng.random(x.shape) < 1e-3) * 10 * rng.standard_normal(x.shape)
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        expected = tessera.attention(q, k, v)
        q = q.astype(np.float16)
        for scheme, found in errors.items():
            rotates = scheme == "block"
            (k8, k_scale), (v8, v_scale) = (tessera.quantize(x, dtype, scheme=scheme, rotate=rotates) for x in (k, v))
            o = tessera.attention(tessera.rotate(q) if rotates else q, k8, v8, k_descale=k_scale, v_descale=v_scale)
            o = tessera.rotate(o, inverse=True) if rotates else o
            found.append(np.square(o.astype(np.float64) - expected).mean())
    assert np.sqrt(np.mean(errors["block"]) / np.mean(errors["tensor"])) < most


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("scheme", ["tensor", "head", "block"])
@pytest.mark.parametrize("rows", [2, 70])
def test_attention_reads_a_cache(framework, dtype, scheme, rows):
    if framework == "jax" and rows > 2:
        pytest.skip("skipped: the same path")
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, rows, 4, 64)).astype(ml_dtypes.bfloat16)
    k, v = (rng.standard_normal((2, 200, 2, 64)).astype(np.float32) for _ in range(2))
    make = maker(framework)
    k8, v8 = (tessera.quantize(make(x), dtype, scheme=scheme) for x in (k, v))
    values = [(numbers(x.codes) * spread(x.scale, k.shape, 128)).astype(np.float64) for x in (k8, v8)]
    expected = tessera.attention(q.astype(np.float64), *values, causal=True)
    if type(k8.codes).__module__ == "torch":
        import torch

        q = torch.from_numpy(q.astype(np.float32)).bfloat16()
    elif framework == "jax":
        q = make(q)
    o = tessera.attention(q, k8.codes, v8.codes, causal=True, k_descale=k8.scale, v_descale=v8.scale)
    assert str(o.dtype).endswith("bfloat16")
    error = np.sqrt(np.mean((numbers(o) - expected) ** 2) / np.mean(expected**2))
    assert error < 4e-3  # bfloat16's own is 2e-3


@pytest.mark.parametrize("framework", frameworks())
def test_queries_of_8_bits_give_bfloat16(framework):
    rng = np.random.default_rng(4)
    shapes = [(1, 30, 4, 32), (1, 90, 2, 32), (1, 90, 2, 32)]
    x = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    q, k, v = (tessera.quantize(maker(framework)(y), scheme="head", heads_kv=2) for y in x)
    o = tessera.attention(
        q.codes, k.codes, v.codes, q_descale=q.scale, k_descale=k.scale, v_descale=v.scale, softcap=20
    )
    assert str(o.dtype).endswith("bfloat16") and tuple(o.shape) == (1, 30, 4, 32)
    each = [np.repeat(numbers(y.scale), y.codes.shape[2] // 2)[:, None] for y in (q, k, v)]
    values = [(numbers(y.codes) * scale).astype(np.float64) for y, scale in zip((q, k, v), each)]
    expected = tessera.attention(*values, softcap=20)
    assert np.sqrt(np.mean((numbers(o) - expected) ** 2) / np.mean(expected**2)) < 4e-3


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_append_computes_scales_that_attention_reads(framework):
    rng = np.random.default_rng(5)
    k, v = (rng.standard_normal((2, 20, 2, 32)).astype(np.float32) for _ in range(2))
    page_table, used = np.array([[3, 1], [0, 2]], np.int32), np.array([20, 20], np.int32)
    cache = np.zeros((4, 16, 2, 32), ml_dtypes.float8_e4m3fn)
    scales = np.zeros((4, 16, 2), np.float32)
    arrays = [k, v, cache, cache.copy(), used, page_table, scales, scales.copy()]
    q = rng.standard_normal((2, 1, 4, 32)).astype(np.float32)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        to = {"float8_e4m3fn": torch.float8_e4m3fn}
        arrays = [torch.from_numpy(x.view(np.uint8)).view(to[str(x.dtype)]) if str(x.dtype) in to else torch.tensor(x)
                  for x in arrays]  # fmt: skip
    k_new, v_new, k_cache, v_cache, used, page_table, k_scales, v_scales = arrays
    tessera.append(
        k_new, v_new, k_cache, v_cache, used, page_table=page_table, k_descale=k_scales, v_descale=v_scales,
        compute_scales=True,
    )  # fmt: skip
    half = q.astype(np.float16) if framework == "numpy" else torch.tensor(q).half()
    o = tessera.attention(
        half, k_cache, v_cache, page_table=page_table, seqused_k=used, k_descale=k_scales, v_descale=v_scales
    )
    expected = tessera.attention(q.astype(np.float64), k.astype(np.float64), v.astype(np.float64))
    assert np.sqrt(np.mean((numbers(o) - expected) ** 2) / np.mean(expected**2)) < 0.1  # e4m3's own error


def test_refusals_are_in_words():
    x = np.zeros((1, 4, 2, 8), np.float32)
    with pytest.raises(tessera.Error, match="dtype: 'int4', accepted float8_e4m3"):
        tessera.quantize(x, "int4")
    with pytest.raises(tessera.Error, match="scheme: 'row', accepted tensor"):
        tessera.quantize(x, scheme="row")
    with pytest.raises(tessera.Error, match="heads_kv: 3, accepted a divisor of x's 2 heads"):
        tessera.quantize(x, heads_kv=3)
    with pytest.raises(tessera.Error, match="x: rank 3"):
        tessera.rotate(x[0])
    codes, scale = tessera.quantize(x)
    with pytest.raises(tessera.Error, match="k: dtype float8_e4m3, must be that of q: float32"):
        tessera.attention(x, codes, codes, k_descale=scale)
    with pytest.raises(tessera.Error, match="v_descale: shape"):
        tessera.attention(x.astype(np.float16), codes, codes, v_descale=np.zeros((1, 2, 2), np.float32))
