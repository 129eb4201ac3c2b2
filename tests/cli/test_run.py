"""tessera run: results against NumPy in float64."""

import json
import os
import struct

import numpy as np
import pytest

from reference import Plain, assert_close, bfloat16_bits, from_bfloat16_bits, to_bfloat16

INPUTS = ("run", "q.npy", "k.npy", "v.npy", "-o", "out.npy")


def tensors(random, *, b=2, sq=65, sk=97, h=4, hkv=2, d=40, dv=24):
    shapes = {"q": (b, sq, h, d), "k": (b, sk, hkv, d), "v": (b, sk, hkv, dv)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


# The additions of a case to q, k, v: (tensors of the reference, flags).
def options(random, name):
    if name == "bias":
        bias = random.standard_normal((1, 4, 65, 97)).astype(np.float32)
        return {"bias": bias}, ("--bias", "bias.npy")
    if name == "bias_of_rank_2":
        bias = random.standard_normal((65, 97)).astype(np.float32)
        return {"bias": bias}, ("--bias", "bias.npy")
    if name == "mask_of_rank_3":
        return {"mask": random.random((4, 65, 1)) < 0.7}, ("--mask", "mask.npy")
    if name == "mask":
        mask = random.random((2, 1, 65, 97)) < 0.7
        mask[1, 0, 5] = False  # a query that sees nothing
        return {"mask": mask}, ("--mask", "mask.npy")
    if name == "alibi":
        return {"alibi": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)}, ("--alibi", "alibi.npy")
    if name == "sink":
        return {"sink": random.standard_normal(4).astype(np.float32)}, ("--sink", "sink.npy")
    return {
        "plain": ({}, ()),
        "scale": ({"scale": 0.3}, ("--scale", 0.3)),
        "causal": ({"causal": True}, ("--causal",)),
        "top_left": ({"causal": True, "top_left": True}, ("--causal", "--top-left")),
        "window": ({"window": (20, 3)}, ("--window", 20, 3)),
        "window_left": ({"window": (20, -1)}, ("--window", 20, -1)),
        "softcap": ({"softcap": 1.5}, ("--softcap", 1.5)),
    }[name]


CASES = ("plain", "scale", "causal", "top_left", "window", "window_left", "softcap", "bias", "bias_of_rank_2", "mask",
         "mask_of_rank_3", "alibi", "sink")


def save(folder, inputs, extra):
    folder.save(**inputs, **{name: value for name, value in extra.items() if isinstance(value, np.ndarray)})


@pytest.mark.parametrize("case", CASES)
def test_forward(folder, random, case):
    inputs = tensors(random)
    extra, flags = options(random, case)
    save(folder, inputs, extra)
    folder.succeeds(*INPUTS, "--lse", "lse.npy", *flags)
    exact, plain = Plain(**inputs, **extra), Plain(**inputs, **extra, dtype="float32")
    assert_close(folder.load("out"), exact.o, plain.o, "float32")
    assert folder.load("lse").dtype == np.float32
    assert_close(folder.load("lse"), exact.lse, plain.lse, "float32")


@pytest.mark.parametrize("case", CASES)
def test_gradients(folder, random, case):
    inputs = tensors(random)
    extra, flags = options(random, case)
    save(folder, inputs, extra)
    d_o = random.standard_normal((2, 65, 4, 24)).astype(np.float32)
    d_lse = random.standard_normal((2, 4, 65)).astype(np.float32)
    folder.save(dout=d_o, dlse=d_lse)
    wanted = ["dq", "dk", "dv"] + [name for name in ("dbias", "dsink") if name[1:] in extra]
    outputs = [argument for name in wanted for argument in (f"--{name}", f"{name}.npy")]
    folder.succeeds(*INPUTS, *flags, "--grad", "dout.npy", "--dlse", "dlse.npy", *outputs)
    exact = Plain(**inputs, **extra).gradients(d_o, d_lse)
    plain = Plain(**inputs, **extra, dtype="float32").gradients(d_o, d_lse)
    for name in wanted:
        assert_close(folder.load(name), exact[name], plain[name], "float32")


def test_all_options_together(folder, random):
    inputs = tensors(random)
    extra, flags = {}, ()
    for case in ("scale", "window", "softcap", "bias", "mask", "alibi", "sink"):
        more, more_flags = options(random, case)
        extra, flags = {**extra, **more}, (*flags, *more_flags)
    save(folder, inputs, extra)
    d_o = random.standard_normal((2, 65, 4, 24)).astype(np.float32)
    folder.save(dout=d_o)
    folder.succeeds(*INPUTS, *flags, "--grad", "dout.npy", "--dq", "dq.npy", "--dk", "dk.npy", "--dv", "dv.npy",
                    "--dbias", "dbias.npy", "--dsink", "dsink.npy", "--deterministic", "--batch-invariant")
    exact, plain = Plain(**inputs, **extra), Plain(**inputs, **extra, dtype="float32")
    assert_close(folder.load("out"), exact.o, plain.o, "float32")
    exact, plain = exact.gradients(d_o), plain.gradients(d_o)
    for name in ("dq", "dk", "dv", "dbias", "dsink"):
        assert_close(folder.load(name), exact[name], plain[name], "float32")


@pytest.mark.parametrize("kernel", ("tiled", "decode", "reference"))
def test_kernels(folder, random, kernel):
    inputs = tensors(random, sq=1, sk=700)
    folder.save(**inputs)
    outcome = folder.succeeds(*INPUTS, "--kernel", kernel, "--threads", 2, "--json")
    assert json.loads(outcome.out)["forward"]["kernel"] == kernel
    assert_close(folder.load("out"), Plain(**inputs).o, Plain(**inputs, dtype="float32").o, "float32")


def test_baseline_isa(folder, random):
    inputs = tensors(random)
    folder.save(**inputs)
    outcome = folder.succeeds(*INPUTS, "--isa", "baseline", "--json")
    assert json.loads(outcome.out)["forward"]["isa"] == "baseline"
    assert_close(folder.load("out"), Plain(**inputs).o, Plain(**inputs, dtype="float32").o, "float32")


def test_float64(folder, random):
    inputs = {name: x.astype(np.float64) for name, x in tensors(random).items()}
    folder.save(**inputs)
    folder.succeeds(*INPUTS)
    assert folder.load("out").dtype == np.float64
    backwards = Plain(inputs["q"][..., ::-1], inputs["k"][:, ::-1, :, ::-1], inputs["v"][:, ::-1])  # rounds differently
    assert_close(folder.load("out"), Plain(**inputs).o, backwards.o, "float64")


def test_float16(folder, random):
    inputs = {name: x.astype(np.float16) for name, x in tensors(random).items()}
    folder.save(**inputs)
    folder.succeeds(*INPUTS, "--causal")
    assert folder.load("out").dtype == np.float16
    exact, plain = Plain(**inputs, causal=True), Plain(**inputs, causal=True, dtype="float16")
    assert_close(folder.load("out"), exact.o, plain.o, "float16")


@pytest.mark.parametrize("name", ("float8_e4m3", "float8_e5m2", "int8"))
def test_8_bit_cache(folder, random, name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = {"float8_e4m3": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}[name]
    inputs = tensors(random)
    codes = {n: (inputs[n] * 20).astype(dtype) for n in ("k", "v")}
    k_scales, v_scales = np.float32([0.05]), (0.04 + 0.02 * random.random((2, 1, 2))).astype(np.float32)
    for as_saved in (True, False):  # as NumPy saves its type, and as uint8
        bits = {n: x if as_saved or name == "int8" else x.view(np.uint8) for n, x in codes.items()}
        folder.save(q=inputs["q"].astype(np.float16), k_scales=k_scales, v_scales=v_scales, **bits)
        folder.succeeds(*INPUTS, "--dtype-kv", name, "--k-descale", "k_scales.npy", "--v-descale", "v_scales.npy")
        given = {"q": inputs["q"].astype(np.float16).astype(np.float32),
                 "k": codes["k"].astype(np.float32) * k_scales,
                 "v": codes["v"].astype(np.float32) * v_scales[..., None]}  # fmt: skip
        assert folder.load("out").dtype == np.float16
        assert_close(folder.load("out"), Plain(**given).o, Plain(**given, dtype="float16").o, "float16")


def test_bfloat16_bits(folder, random):
    inputs = tensors(random)
    folder.save(**{name: bfloat16_bits(x) for name, x in inputs.items()})
    folder.succeeds(*INPUTS, "--dtype", "bfloat16")
    assert folder.load("out").dtype == np.uint16
    rounded = {name: to_bfloat16(x) for name, x in inputs.items()}
    exact, plain = Plain(**rounded), Plain(**rounded, dtype="bfloat16")
    assert_close(from_bfloat16_bits(folder.load("out")), exact.o, plain.o, "bfloat16")


def test_heads_first(folder, random):
    inputs = tensors(random)
    folder.save(**{name: x.transpose(0, 2, 1, 3).copy() for name, x in inputs.items()})
    folder.succeeds(*INPUTS, "--layout", "bhsd")
    result = folder.load("out").transpose(0, 2, 1, 3)
    assert_close(result, Plain(**inputs).o, Plain(**inputs, dtype="float32").o, "float32")


def test_column_major_file(folder, random):
    inputs = tensors(random)
    folder.save(**{name: np.asfortranarray(x) for name, x in inputs.items()})
    folder.succeeds(*INPUTS)
    assert_close(folder.load("out"), Plain(**inputs).o, Plain(**inputs, dtype="float32").o, "float32")


def test_packed(folder, random):
    lengths_q, lengths_k = [3, 0, 65, 17], [50, 9, 65, 0]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]) for x in (lengths_q, lengths_k))
    q = random.standard_normal((cu_q[-1], 4, 32)).astype(np.float32)
    k, v = (random.standard_normal((cu_k[-1], 2, 32)).astype(np.float32) for _ in range(2))
    folder.save(q=q, k=k, v=v, cu_q=cu_q, cu_k=cu_k.astype(np.int32))  # int64 and int32 alike
    folder.succeeds(*INPUTS, "--causal", "--lse", "lse.npy", "--cu-seqlens-q", "cu_q.npy", "--cu-seqlens-k", "cu_k.npy")
    out, lse = folder.load("out"), folder.load("lse")
    assert out.shape == q.shape and lse.shape == (4, cu_q[-1])
    for b in range(len(lengths_q)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = {"q": q[None, rows], "k": k[None, keys], "v": v[None, keys], "causal": True}
        exact, plain = Plain(**one), Plain(**one, dtype="float32")
        assert_close(out[None, rows], exact.o, plain.o, "float32")
        assert_close(lse[None, :, rows], exact.lse, plain.lse, "float32")


def test_packed_with_a_bias(folder, random):
    """Its shape is that of the longest sequence, which only the caller knows."""
    cu = np.array([0, 3, 20])
    q, k, v = (random.standard_normal((20, 2, 32)).astype(np.float32) for _ in range(3))
    bias = random.standard_normal((17, 17)).astype(np.float32)
    folder.save(q=q, k=k, v=v, cu=cu, bias=bias)
    flags = ("--cu-seqlens-q", "cu.npy", "--cu-seqlens-k", "cu.npy", "--bias", "bias.npy")
    folder.succeeds(*INPUTS, *flags, "--max-seqlen-q", 17, "--max-seqlen-k", 17)
    for first, end in zip(cu, cu[1:]):
        length = end - first
        one = {name: x[None, first:end] for name, x in (("q", q), ("k", k), ("v", v))}
        one["bias"] = bias[None, None, :length, :length]
        exact, plain = Plain(**one), Plain(**one, dtype="float32")
        assert_close(folder.load("out")[None, first:end], exact.o, plain.o, "float32")


def test_paged(folder, random):
    page_size, used = 16, [33, 5]
    table = np.array([[3, 0, 4], [1, 2, 5]], np.int32)
    q = random.standard_normal((2, 7, 4, 32)).astype(np.float32)
    k, v = (np.full((6, page_size, 2, 32), np.nan, np.float32) for _ in range(2))
    whole = []
    for b, length in enumerate(used):
        one = {name: random.standard_normal((length, 2, 32)).astype(np.float32) for name in ("k", "v")}
        for j in range(length):
            k[table[b, j // page_size], j % page_size] = one["k"][j]
            v[table[b, j // page_size], j % page_size] = one["v"][j]
        whole.append(one)
    folder.save(q=q, k=k, v=v, table=table, used=np.array(used, np.int32))
    folder.succeeds(*INPUTS, "--page-table", "table.npy", "--seqused-k", "used.npy")
    for b, one in enumerate(whole):
        case = {"q": q[b : b + 1], "k": one["k"][None], "v": one["v"][None]}
        exact, plain = Plain(**case), Plain(**case, dtype="float32")
        assert_close(folder.load("out")[b : b + 1], exact.o, plain.o, "float32")


def test_a_shared_prefix(folder, random):
    case, prefix = tensors(random, b=3), 30
    for keys in (case["k"], case["v"]):
        keys[1:, :prefix] = keys[0, :prefix]
    folder.save(**case, groups=np.array([0, 3], np.int32), lens=np.array([prefix], np.int32))
    shared = ("--prefix-groups", "groups.npy", "--prefix-lens", "lens.npy")
    folder.succeeds(*INPUTS, "--causal", *shared, "--check")
    exact, plain = Plain(**case, causal=True), Plain(**case, causal=True, dtype="float32")
    assert_close(folder.load("out"), exact.o, plain.o, "float32")
    folder.save(lens=np.array([98], np.int32))
    assert "prefix_lens[0]: 98, accepted 0 .. 97" in folder.tessera(*INPUTS, *shared).err


def test_block_mask(folder, random):
    inputs = tensors(random)
    blocks = random.random((1, 1, 5, 4)) < 0.6  # of 16 queries and 32 keys
    folder.save(**inputs, blocks=blocks)
    folder.succeeds(*INPUTS, "--block-mask", "blocks.npy", "--mask-block", 16, 32)
    mask = blocks.repeat(16, axis=2).repeat(32, axis=3)[:, :, :65, :97]
    exact, plain = Plain(**inputs, mask=mask), Plain(**inputs, mask=mask, dtype="float32")
    assert_close(folder.load("out"), exact.o, plain.o, "float32")


def test_dropout_drops_and_scales(folder, random):
    inputs = tensors(random, h=2, hkv=2, sk=64)
    inputs["v"] = np.broadcast_to(np.eye(64, dtype=np.float32)[None, :, None, :], (2, 64, 2, 64)).copy()
    folder.save(**inputs)
    folder.succeeds(*INPUTS, "--dropout", 0.25, "--seed", 11)
    dropped = folder.load("out")  # values are the identity: the output is the matrix of probabilities
    p = Plain(**inputs).p.transpose(0, 2, 1, 3)
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], p[kept] / 0.75, rtol=2e-6)
    deviation = np.sqrt(0.25 * 0.75 / kept.size)
    assert abs(kept.mean() - 0.75) < 5 * deviation
    folder.succeeds(*INPUTS, "--dropout", 0.25, "--seed", 11)
    np.testing.assert_array_equal(folder.load("out"), dropped)
    folder.succeeds(*INPUTS, "--dropout", 0.25, "--seed", 12)
    assert (folder.load("out") != dropped).any()
    folder.succeeds(*INPUTS, "--dropout", 0.25, "--seed", 11, "--offset", 1)
    assert (folder.load("out") != dropped).any()


def write_safetensors(path, arrays, types):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        raw = array.tobytes()
        header[name] = {"dtype": types[name], "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def test_safetensors(folder, random):
    inputs = tensors(random)
    types = {name: "F32" for name in inputs}
    write_safetensors(folder.path / "m.safetensors", inputs, types)
    folder.succeeds("run", "m.safetensors", "m.safetensors:k", "m.safetensors", "-o", "out.npy")
    assert_close(folder.load("out"), Plain(**inputs).o, Plain(**inputs, dtype="float32").o, "float32")


def test_safetensors_bfloat16_in_and_out(folder, random):
    inputs = tensors(random)
    write_safetensors(folder.path / "m.safetensors", {name: bfloat16_bits(x) for name, x in inputs.items()},
                      {name: "BF16" for name in inputs})
    folder.succeeds("run", *["m.safetensors"] * 3, "-o", "r.safetensors:result")
    header, data = read_safetensors(folder.path / "r.safetensors")
    assert header["result"]["dtype"] == "BF16"
    result = from_bfloat16_bits(np.frombuffer(data, np.uint16)).reshape(header["result"]["shape"])
    rounded = {name: to_bfloat16(x) for name, x in inputs.items()}
    assert_close(result, Plain(**rounded).o, Plain(**rounded, dtype="bfloat16").o, "bfloat16")


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_check_passes(folder, random, dtype):
    inputs = {**tensors(random), "dout": random.standard_normal((2, 65, 4, 24)).astype(np.float32)}
    encode = {"float32": lambda x: x, "float16": lambda x: x.astype(np.float16), "bfloat16": bfloat16_bits}[dtype]
    folder.save(**{name: encode(x) for name, x in inputs.items()})
    outcome = folder.succeeds(*INPUTS, "--dtype", dtype, "--lse", "lse.npy", "--grad", "dout.npy", "--dq", "dq.npy",
                              "--dk", "dk.npy", "--dv", "dv.npy", "--dropout", 0.1, "--causal", "--check", "--json")
    report = json.loads(outcome.out)
    assert report["passed"] is True
    assert [check["name"] for check in report["checks"]] == ["o", "lse", "d_q", "d_k", "d_v"]
    for check in report["checks"]:
        assert 0 < check["max_error"] <= check["max_error_allowed"]


def test_check_takes_nan_for_nan(folder, random):
    inputs = tensors(random)
    inputs["q"][0, 3] = np.nan
    folder.save(**inputs)
    report = json.loads(folder.succeeds(*INPUTS, "--check", "--json").out)
    assert report["passed"] is True and np.isnan(folder.load("out")[0, 3]).all()


def test_empty_sequences(folder):
    folder.save(q=np.zeros((1, 3, 2, 8), np.float32), k=np.zeros((1, 0, 2, 8), np.float32),
                v=np.zeros((1, 0, 2, 8), np.float32))
    folder.succeeds(*INPUTS, "--lse", "lse.npy")
    np.testing.assert_array_equal(folder.load("out"), np.zeros((1, 3, 2, 8), np.float32))
    assert np.isneginf(folder.load("lse")).all()


def test_nothing_but_the_results_is_left(folder, random):
    folder.save(**tensors(random))
    folder.succeeds(*INPUTS, "--lse", "lse.npy")
    assert folder.files() == {"q.npy", "k.npy", "v.npy", "out.npy", "lse.npy"}


def test_result_replaces_a_file_and_follows_a_link(folder, random):
    inputs = tensors(random)
    folder.save(**inputs)
    (folder.path / "real.npy").write_text("old")
    os.symlink("real.npy", folder.path / "out.npy")
    folder.succeeds(*INPUTS)
    assert (folder.path / "out.npy").is_symlink()
    assert_close(folder.load("real"), Plain(**inputs).o, Plain(**inputs, dtype="float32").o, "float32")


def test_dev_null_stays_a_device(folder, random):
    folder.save(**tensors(random))
    folder.succeeds("run", "q.npy", "k.npy", "v.npy", "-o", "/dev/null")
    assert os.path.exists("/dev/null") and not os.path.isfile("/dev/null")
