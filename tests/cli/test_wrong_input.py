"""Wrong input: one line on standard error that names the argument, an exit code, and no file."""

import json
import struct

import numpy as np
import pytest

GOOD = {"q": (1, 8, 4, 16), "k": (1, 8, 2, 16), "v": (1, 8, 2, 16)}
INPUTS = ("run", "q.npy", "k.npy", "v.npy", "-o", "out.npy")


@pytest.fixture
def good(folder, random):
    folder.save(**{name: random.standard_normal(shape).astype(np.float32) for name, shape in GOOD.items()})
    return folder


def refused(folder, arguments, *named, code=2):
    before = folder.files()
    outcome = folder.tessera(*arguments)
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    assert len(outcome.error_lines) == 1, outcome.err
    for name in named:
        assert name in outcome.err
    assert folder.files() == before
    return outcome.err


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_missing_file(good):
    refused(good, ("run", "nowhere.npy", "k.npy", "v.npy", "-o", "out.npy"), "q", "nowhere.npy")


def test_directory_as_file(good):
    (good.path / "folder.npy").mkdir()
    refused(good, ("run", "q.npy", "folder.npy", "v.npy", "-o", "out.npy"), "k", "folder.npy")


@pytest.mark.parametrize("left", (0, 3, 9, 60, 128, 200, -1))
def test_truncated_npy(good, left):
    whole = (good.path / "k.npy").read_bytes()
    (good.path / "k.npy").write_bytes(whole[:left])
    refused(good, INPUTS, "k k.npy")


def test_npy_with_too_much(good):
    with open(good.path / "k.npy", "ab") as file:
        file.write(b"more")
    refused(good, INPUTS, "k k.npy", "too long")


def npy(header, data=b"", version=1):
    text = header.encode("latin1")
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


@pytest.mark.parametrize(
    "content",
    (
        b"this is no array",
        npy("", b""),
        npy("{", b""),
        npy("{'descr': '<f4', 'fortran_order': False, }"),
        npy("{'descr': '<f4', 'fortran_order': Maybe, 'shape': (1,), }", b"1234"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", b"1234"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1 2), }", b"1234"),
        npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", b"1234"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", b"1234", version=9),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        npy("\xff" * 60),
    ),
)
def test_garbled_npy(good, content):
    (good.path / "q.npy").write_bytes(content)
    refused(good, INPUTS, "q q.npy")


@pytest.mark.parametrize("extent", (2**31, 2**62, 2**63, 10**30))
def test_npy_shape_that_overflows(good, extent):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({extent}, {extent}, 4, 16), }}"
    (good.path / "q.npy").write_bytes(npy(header, b"1234"))
    refused(good, INPUTS, "q q.npy")


@pytest.mark.parametrize("dtype", ("<c8", ">f4", "<i2", "|O", "<U3"))
def test_npy_of_another_type(good, dtype):
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (1,), }}"
    (good.path / "v.npy").write_bytes(npy(header, b"12345678"))
    refused(good, INPUTS, "v v.npy", dtype)


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [1, 1, 1, 2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    (
        b"",
        b"1234",
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 1000) + b"{}",
        safetensors(b"not json"),
        safetensors(b"[1, 2]"),
        safetensors({"other": ENTRY}, bytes(8)),
        safetensors({"q": ENTRY}, bytes(4)),
        safetensors({"q": {**ENTRY, "data_offsets": [0, 4]}}, bytes(8)),
        safetensors({"q": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8)),
        safetensors({"q": {**ENTRY, "data_offsets": [-8, 0]}}, bytes(8)),
        safetensors({"q": {**ENTRY, "data_offsets": "none"}}, bytes(8)),
        safetensors({"q": {**ENTRY, "shape": [2**62, 2**62]}}, bytes(8)),
        safetensors({"q": {**ENTRY, "shape": [-1, -2]}}, bytes(8)),
        safetensors({"q": {**ENTRY, "dtype": "F8_E4M3"}}, bytes(8)),
        safetensors({"q": {"dtype": 3}}, bytes(8)),
        safetensors({"q": 3}, bytes(8)),
    ),
)
def test_garbled_safetensors(good, content):
    (good.path / "m.safetensors").write_bytes(content)
    refused(good, ("run", "m.safetensors", "k.npy", "v.npy", "-o", "out.npy"), "q m.safetensors")


def test_safetensors_lists_what_it_has(good):
    (good.path / "m.safetensors").write_bytes(safetensors({"wq": ENTRY}, bytes(8)))
    refused(good, ("run", "m.safetensors:query", "k.npy", "v.npy", "-o", "out.npy"), "query", "wq")


def test_output_in_a_folder_that_is_not_there(good):
    refused(good, ("run", "q.npy", "k.npy", "v.npy", "-o", "nowhere/out.npy"), "--out", "nowhere")


def test_output_that_is_a_folder(good):
    (good.path / "out.npy").mkdir()
    refused(good, INPUTS, "--out out.npy")


def test_two_results_in_one_file(good):
    refused(good, (*INPUTS, "--lse", "out.npy"), "--lse out.npy", "--out")


# ---- shapes and dtypes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, shape",
    (
        ("k", (1, 8, 2, 17)),  # D differs
        ("k", (2, 8, 2, 16)),  # B differs
        ("v", (1, 9, 2, 16)),  # Sk differs
        ("v", (1, 8, 1, 16)),  # Hkv differs
        ("k", (8, 2, 16)),
        ("q", (8, 16)),
        ("q", (1, 1, 8, 4, 16)),
        ("q", (1, 8, 4, 0)),
    ),
)
def test_shapes_that_do_not_match(good, name, shape):
    good.save(**{name: ones(*shape)})
    refused(good, INPUTS, f"{name}.npy")


def test_single_number(good):
    good.save(q=np.float32(1))
    refused(good, INPUTS, "q q.npy")


def test_heads_that_do_not_divide(good):
    good.save(k=ones(1, 8, 3, 16), v=ones(1, 8, 3, 16))
    message = refused(good, INPUTS)
    assert "4" in message and "3" in message


def test_head_dim_beyond_the_limit(good):
    good.save(q=ones(1, 2, 1, 577), k=ones(1, 2, 1, 577), v=ones(1, 2, 1, 512))
    refused(good, INPUTS, "q.npy", "576")


def test_dtype_mixture(good):
    good.save(k=ones(*GOOD["k"], dtype=np.float16))
    refused(good, INPUTS, "k.npy", "float16", "float32")


def test_integers_as_queries(good):
    good.save(q=ones(*GOOD["q"], dtype=np.int64))
    refused(good, INPUTS, "q.npy", "int64")


def test_bits_without_dtype(good):
    good.save(q=ones(*GOOD["q"], dtype=np.uint16))
    refused(good, INPUTS, "q.npy", "--dtype bfloat16")


def test_dtype_that_does_not_hold(good):
    refused(good, (*INPUTS, "--dtype", "float16"), "--dtype", "q.npy", "float32")


def test_bias_that_does_not_match(good):
    good.save(bias=ones(1, 4, 8, 9))
    refused(good, (*INPUTS, "--bias", "bias.npy"), "--bias", "bias.npy")


def test_mask_of_numbers(good):
    good.save(mask=ones(1, 1, 8, 8))
    refused(good, (*INPUTS, "--mask", "mask.npy"), "--mask", "mask.npy", "float32")


def test_mask_of_other_numbers(good):
    good.save(mask=np.full((1, 1, 8, 8), 2, np.uint8))
    refused(good, (*INPUTS, "--mask", "mask.npy"), "--mask", "mask.npy", "2")


def test_sink_of_another_length(good):
    good.save(sink=ones(3))
    refused(good, (*INPUTS, "--sink", "sink.npy"), "--sink", "sink.npy")


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    (
        ("--window", -2, 0),
        ("--window", 0, -7),
        ("--dropout", 1),
        ("--dropout", 1.5),
        ("--dropout", -0.1),
        ("--dropout", "nan"),
        ("--scale", "nan"),
        ("--scale", "inf"),
        ("--softcap", -1),
        ("--softcap", "nan"),
        ("--scale", "wide"),
        ("--window", 1),
        ("--window", 99999999999999999999, 0),
        ("--seed", -1),
        ("--threads", 0),
        ("--threads", -3),
        ("--isa", "mmx"),
        ("--kernel", "fastest"),
        ("--dtype", "int8"),
        ("--layout", "sbhd"),
        ("--mask-block", 0, 16),
    ),
)
def test_options_out_of_range(good, flags):
    good.save(blocks=np.ones((1, 1, 1, 1), bool))
    more = ("--block-mask", "blocks.npy") if flags[0] == "--mask-block" else ()
    refused(good, (*INPUTS, *flags, *more), flags[0])


def test_unknown_flag(good):
    refused(good, (*INPUTS, "--cuasal"), "--cuasal")


def test_missing_argument(good):
    refused(good, ("run", "q.npy", "k.npy", "-o", "out.npy"), "v")


def test_no_command(folder):
    refused(folder, ())


def test_unknown_command(folder):
    refused(folder, ("attend",), "attend")


@pytest.mark.parametrize("flag", ("--dq", "--dk", "--dv", "--dbias", "--dsink", "--dlse"))
def test_gradient_without_cotangent(good, flag):
    refused(good, (*INPUTS, flag, "x.npy"), flag, "--grad")


def test_cotangent_without_gradient(good):
    good.save(dout=ones(*GOOD["q"]))
    refused(good, (*INPUTS, "--grad", "dout.npy"), "--grad")


def test_cotangent_of_another_shape(good):
    good.save(dout=ones(1, 8, 4, 15))
    refused(good, (*INPUTS, "--grad", "dout.npy", "--dq", "dq.npy"), "--grad", "dout.npy")


def test_float64_by_a_fast_kernel(good):
    good.save(**{name: ones(*shape, dtype=np.float64) for name, shape in GOOD.items()})
    refused(good, (*INPUTS, "--kernel", "tiled"), "float64")


# ---- what the index tensors hold ------------------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", ([0, 5, 3, 8], [0, 5, 9], [-1, 5, 8], [0, 2**31, 8]))
@pytest.mark.parametrize("side", ("q", "k"))
def test_offsets(folder, offsets, side):
    good = np.linspace(0, 8, len(offsets)).astype(np.int32)
    folder.save(q=ones(8, 4, 16), k=ones(8, 2, 16), v=ones(8, 2, 16), good=good, bad=np.array(offsets))
    other = "k" if side == "q" else "q"
    refused(folder, (*INPUTS, f"--cu-seqlens-{side}", "bad.npy", f"--cu-seqlens-{other}", "good.npy"),
            f"--cu-seqlens-{side}", "bad.npy")


@pytest.mark.parametrize("index", (6, -1, 2**30))
def test_page_index_out_of_range(folder, index):
    folder.save(q=ones(1, 1, 2, 16), k=ones(6, 4, 2, 16), v=ones(6, 4, 2, 16), table=np.array([[0, index]], np.int32),
                used=np.array([8], np.int32))
    refused(folder, (*INPUTS, "--page-table", "table.npy", "--seqused-k", "used.npy"), "--page-table", "table.npy")


@pytest.mark.parametrize("used", (9, -1))
def test_key_length_out_of_range(folder, used):
    folder.save(q=ones(1, 8, 4, 16), k=ones(1, 8, 2, 16), v=ones(1, 8, 2, 16), used=np.array([used], np.int32))
    refused(folder, (*INPUTS, "--seqused-k", "used.npy"), "--seqused-k", "used.npy")


def test_index_of_floats(folder):
    folder.save(q=ones(8, 4, 16), k=ones(8, 2, 16), v=ones(8, 2, 16), cu=np.array([0.0, 8.0]))
    refused(folder, (*INPUTS, "--cu-seqlens-q", "cu.npy", "--cu-seqlens-k", "cu.npy"), "--cu-seqlens-q", "float64")


# ---- the other commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, named",
    (
        (("--sq", 2**62), "--sq"),
        (("--sq", 10**30), "--sq"),
        (("--sq", -1), "--sq"),
        (("--sq", 16, "-H", 6, "--kv-heads", 4), "4"),
        (("--sq", 16, "-D", 513), "512"),
        (("--sq", 2**31 - 1, "-B", 2**31 - 1, "-H", 2**31 - 1), "overflow"),
        (("--sq", 16, "--dtype", "int4"), "--dtype"),
        (("--sq", 16, "--direction", "sideways"), "--direction"),
        (("--sq", 16, "--page-size", 0), "--page-size"),
        (("--sq", 16, "--block-mask"), "--mask-block"),
        (("--sq", 16, "--scale", "nan"), "--scale"),
        (("--sq", 64, "--kernel", "decode", "--sk", 64, "--direction", "backward", "--device", "cpu"), "decode"),
        (("--sq", 64, "--arch", 75), "--arch"),
        (("--sq", 64, "--arch", "hopper"), "--arch"),
        (("--sq", 64, "--arch", "90", "--device", "cpu"), "--arch"),
        (("--sq", 64, "--multiprocessors", 84), "--multiprocessors"),
        (("--sq", 64, "--arch", 90, "--multiprocessors", 0), "--multiprocessors"),
        (("--sq", 64, "--arch", 90, "--dtype", "float64"), "float64"),
        (("--sq", 16, "--direction", "backward", "--dbias"), "--bias"),
        (("--sq", 16, "--sink", "--dsink"), "--direction backward"),
        (("--sq", 16, "--max-seqlen-q", -1), "--max-seqlen-q"),
        ((), "--sq"),
    ),
)
def test_plan(folder, flags, named):
    refused(folder, ("plan", *flags), named)


@pytest.mark.parametrize(
    "flags, said",
    (
        (("--sq", 64, 32), "--sq: followed by '32', accepted one value"),
        (("--sq", 64, "--causal", 5), "--causal: followed by '5', accepted no value"),
        (("--sq", 64, "--window", 1, 64, 64), "--window: "),
    ),
)
def test_value_that_belongs_to_no_flag(folder, flags, said):
    refused(folder, ("plan", *flags), said)


@pytest.mark.parametrize(
    "flags, named",
    (
        (("--lengths", "0"), "--lengths"),
        (("--lengths", "-5"), "--lengths"),
        (("--lengths", "many"), "--lengths"),
        (("-D", 0), "-D"),
        (("-D", 513), "-D"),
        (("-H", 6, "--kv-heads", 4), "--kv-heads"),
        (("--dtype", "float64"), "--dtype"),
        (("--direction", "up"), "--direction"),
        (("--repeat", 0), "--repeat"),
        (("--report", ""), "--report"),
        (("--report", "nowhere/report.json"), "--report"),
        (("--memory-limit", "nan"), "--memory-limit"),
        (("--device", "abacus"), "--device"),
        (("--device", "cpu", "--against", "fa1"), "--against"),
        (("--bind", "slope=0.5"), "--bind slope=0.5: given without a program, accepted with --score-mod"),
        (("--score-mod", "s * slope"), "--score-mod"),
        (("--device", "cpu", "--against", "standard,standard"), "--against"),
    ),
)
def test_compare(folder, flags, named):
    refused(folder, ("compare", *flags), named)


def test_compare_beyond_all_memory(folder):
    refused(folder, ("compare", "--lengths", 2**24, "-B", 2**20, "--json"), "bytes", code=1)


@pytest.mark.parametrize("name, value", (("TESSERA_ISA", "sse9"), ("TESSERA_NUM_THREADS", "none")))
def test_environment(folder, name, value):
    outcome = folder.tessera("info", **{name: value})
    assert outcome.code == 2
    assert len(outcome.error_lines) == 1 and name in outcome.err and value in outcome.err
