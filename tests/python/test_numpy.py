"""tessera.attention and its gradients on NumPy arrays, against float64."""

import ctypes
import gc
import inspect
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tessera
from conftest import Problem, assert_close
from reference import Plain

DTYPES = ["float32", "float16", "bfloat16", "float64"]
GRADIENTS = {"d_q": "dq", "d_k": "dk", "d_v": "dv", "d_bias": "dbias", "d_sink": "dsink"}


def check(problem, arrays=None, d_o=None, grad_bias=False, grad_sink=False, reference=None, **options):
    """Forward, LSE and gradients of `options`; `reference` has the reference's names for them."""
    arrays = arrays or problem.arrays
    reference = options if reference is None else reference
    exact, plain = (Plain(*problem.rounded, dtype=dtype, **reference) for dtype in ("float64", problem.dtype))
    o, lse = tessera.attention(*arrays, return_lse=True, **options)
    assert o.dtype == arrays[0].dtype and lse.dtype == np.float32
    assert_close(o, exact.o, plain.o, problem.dtype)
    assert_close(lse, exact.lse, plain.lse, "float32")

    d_o = problem.d_o if d_o is None else d_o
    d_lse = problem.random.standard_normal(lse.shape).astype(np.float32)
    gradients = tessera.attention_backward(
        *arrays, o, lse, d_o, d_lse=d_lse, grad_bias=grad_bias, grad_sink=grad_sink, **options
    )
    d_o = np.asarray(problem.d_o, np.float64)
    exact, plain = (x.gradients(d_o, d_lse) for x in (exact, plain))
    for name, key in GRADIENTS.items():
        gradient = getattr(gradients, name)
        assert (gradient is not None) == (key in exact)
        if gradient is not None:
            assert_close(gradient, exact[key], plain[key], problem.dtype)


# ---- dtypes and memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_every_dtype(random, dtype, causal):
    check(Problem(random, dtype), causal=causal)


def test_any_strides(random):
    for _ in range(20):
        problem = Problem(random, sq=int(random.integers(1, 40)), sk=int(random.integers(1, 70)))
        arrays = [scattered(random, x) for x in (*problem.arrays, problem.d_o)]
        check(problem, arrays[:3], arrays[3])


def scattered(random, array):
    """Equal to `array`, elsewhere in memory: axes in any order, gaps filled with NaN, some axes run backwards. The last
    dimension stays contiguous."""
    order = [*random.permutation(array.ndim - 1), array.ndim - 1]
    steps = [int(random.integers(1, 4)) for _ in order[:-1]] + [1]
    room = np.full([array.shape[axis] * step for axis, step in zip(order, steps)], np.nan, array.dtype)
    view = room[tuple(slice(None, None, step) for step in steps)]
    view = view[tuple(slice(None, None, random.choice([-1, 1])) for _ in order[:-1])]
    view = view.transpose(np.argsort(order))
    view[...] = array
    return view


def test_head_major_memory_is_a_stride_order(problem):
    arrays = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in problem.arrays]
    assert not any(x.flags.c_contiguous for x in arrays)
    check(problem, arrays)


def test_read_only_inputs(problem):
    for array in problem.arrays:
        array.flags.writeable = False
    check(problem)


@pytest.mark.parametrize("empty", [{"b": 0}, {"sq": 0}, {"sk": 0}])
def test_zero_size(random, empty):
    problem = Problem(random, **empty)
    o, lse = tessera.attention(*problem.arrays, return_lse=True)
    assert o.shape == problem.d_o.shape and (o == 0).all() and np.isneginf(lse).all()
    gradients = tessera.attention_backward(*problem.arrays, o, lse, problem.d_o)
    for gradient, twin in zip(gradients, problem.arrays):
        assert gradient.shape == twin.shape and (gradient == 0).all()


def test_strides_that_are_never_taken(random):
    """Along an axis of one element, or in an array of none, a stride may be anything."""
    problem = Problem(random, b=1, hkv=1, d=1, dv=1)
    arrays = [odd_strides(x) for x in problem.arrays]
    check(problem, arrays, odd_strides(problem.d_o))
    empty = [odd_strides(x[:0]) for x in problem.arrays]
    assert tessera.attention(*empty).shape == (0, 37, 4, 1)


def odd_strides(array):
    strides = [s if n > 1 and array.size else 52 for n, s in zip(array.shape, array.strides)]
    return np.lib.stride_tricks.as_strided(array, strides=strides)


def test_outputs_are_written_in_place(problem):
    o = np.full(problem.d_o.shape, np.nan, np.float32)
    room = np.full((2, 4, 74), np.nan, np.float32)
    lse = room[:, :, ::2]
    tessera._core.forward(*problem.arrays, o, lse)
    expected, expected_lse = tessera.attention(*problem.arrays, return_lse=True)
    np.testing.assert_array_equal(o, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    assert np.isnan(room[:, :, 1::2]).all()


def test_arrays_are_not_kept(problem):
    """A call leaves no reference behind, whether it succeeds or not."""
    import sys

    counts = [sys.getrefcount(x) for x in (problem.q, problem.k, problem.v)]
    for _ in range(100):
        tessera.attention(problem.q, problem.k, problem.v)
        with pytest.raises(tessera.Error):
            tessera.attention(problem.q, problem.k, problem.v, softcap=-1.0)
    gc.collect()
    assert [sys.getrefcount(x) for x in (problem.q, problem.k, problem.v)] == counts


def test_arrays_freed_while_in_use(random):
    """The caller drops its last reference, and fills memory anew, while another thread computes."""
    shape = (1, 1500, 4, 64)
    made = random.standard_normal((3, *shape)).astype(np.float32)
    expected = tessera.attention(*made)
    box = [x.copy() for x in made]
    result, started = [], threading.Event()

    def compute():
        q, k, v = box
        box.clear()
        started.set()
        result.append(tessera.attention(q, k, v))

    thread = threading.Thread(target=compute)
    thread.start()
    started.wait()
    while thread.is_alive():
        np.full(shape, np.nan, np.float32)
        gc.collect()
    thread.join()
    np.testing.assert_array_equal(result[0], expected)


# ---- options --------------------------------------------------------------------------------------------------------


def visible_blocks(random, rows, keys, block):
    blocks = random.random((1, 1, -(-rows // block[0]), -(-keys // block[1]))) < 0.6
    return blocks, blocks.repeat(block[0], 2).repeat(block[1], 3)[:, :, :rows, :keys]


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"scale": None, "causal": True, "top_left": True},
        {"window": (5, 3)},
        {"window": [0, -1], "causal": False},
        {"softcap": 1.5},
        {"causal": True, "window": (9, -1), "softcap": 2, "scale": np.float32(0.4)},
        {"deterministic": True, "batch_invariant": True, "threads": 1},
        {"kernel": "tiled", "threads": 2},
    ],
    ids=str,
)
def test_values(problem, options):
    known = ("scale", "causal", "top_left", "window", "softcap")
    check(problem, reference={k: v for k, v in options.items() if k in known}, **options)


@pytest.mark.parametrize(
    "shape", [(2, 4, 37, 45), (1, 4, 1, 45), (2, 1, 37, 45), (4, 37, 45), (4, 1, 45), (37, 45), (45,)]
)
def test_bias(problem, shape):
    check(problem, bias=problem.normal(*shape), grad_bias=True)


@pytest.mark.parametrize("shape", [(2, 4, 37, 1), (4, 1, 1), (37, 1), (1,)])
def test_bias_that_is_one_for_all_keys(problem, shape):
    bias = problem.normal(*shape)
    given, written_out = (
        tessera.attention(*problem.arrays, bias=each) for each in (bias, np.broadcast_to(bias, (2, 4, 37, 45)))
    )
    assert given.tobytes() == written_out.tobytes()


def test_bias_of_strides_nought(problem):
    bias = problem.normal(1, 4, 1, 45)
    check(problem, bias=np.broadcast_to(bias, (2, 4, 37, 45)), grad_bias=True)


def test_mask(problem, random):
    mask = random.random((2, 1, 37, 45)) < 0.5
    mask[:, :, 3] = False  # a query that sees nothing
    check(problem, mask=mask, causal=True)


@pytest.mark.parametrize("shape", [(4, 37, 45), (37, 45), (45,), (37, 1)])
def test_mask_of_fewer_axes(problem, random, shape):
    check(problem, mask=random.random(shape) < 0.5)


def test_block_mask(problem, random):
    blocks, mask = visible_blocks(random, 37, 45, (8, 16))
    check(problem, block_mask=blocks, mask_block=(8, 16), reference={"mask": mask})


def test_alibi(problem):
    slopes = np.float32([0.5, 0.25, 0.1, 0.05])
    check(problem, alibi_slopes=slopes, reference={"alibi": slopes})


def test_sink(problem):
    check(problem, sink=problem.normal(4), grad_sink=True, causal=True)


def test_all_together(problem, random):
    options = {"bias": problem.normal(2, 4, 37, 45), "mask": random.random((1, 4, 37, 45)) < 0.8,
               "sink": problem.normal(4), "causal": True, "window": (20, 5), "softcap": 3.0, "scale": 0.2}
    slopes = np.float32([0.5, 0.25, 0.1, 0.05])
    check(
        problem, alibi_slopes=slopes, grad_bias=True, grad_sink=True, reference={**options, "alibi": slopes}, **options
    )


def test_dropout(problem):
    """v = identity shows the softmax after dropout: entries are 0 or p / (1 - rate), and the gradients agree."""
    rate, keys = 0.25, 16
    q, k = problem.q, problem.k[:, :keys]
    identity = np.ascontiguousarray(np.broadcast_to(np.eye(keys, dtype=np.float32)[None, :, None], (2, keys, 2, keys)))
    options = {"dropout_p": rate, "dropout_seed": 2**63 + 5, "dropout_offset": 7}
    p = tessera.attention(q, k, identity)
    o, lse = tessera.attention(q, k, identity, return_lse=True, **options)
    kept = o != 0
    np.testing.assert_allclose(o[kept], p[kept] / (1 - rate), rtol=1e-5)
    deviation = np.sqrt(rate * (1 - rate) / kept.size)
    assert abs(kept.mean() - (1 - rate)) < 5 * deviation
    d_o = problem.normal(*o.shape)
    d_v = tessera.attention_backward(q, k, identity, o, lse, d_o, **options).d_v
    heads = np.einsum("bihj,bihd->bjhd", o.astype(np.float64), d_o.astype(np.float64))
    np.testing.assert_allclose(d_v, heads.reshape(2, keys, 2, 2, keys).sum(3), rtol=1e-4, atol=1e-5)
    other, _ = tessera.attention(q, k, identity, return_lse=True, **{**options, "dropout_seed": 6})
    assert (other != o).any()


def packed(random, lengths_q, lengths_k):
    problem = Problem(random, b=1, sq=sum(lengths_q), sk=sum(lengths_k))
    offsets = {f"cu_seqlens_{x}": np.int32([0, *np.cumsum(n)]) for x, n in (("q", lengths_q), ("k", lengths_k))}
    return problem, [x[0] for x in problem.arrays], offsets


def test_packed(random):
    lengths = ([5, 0, 31, 1], [9, 4, 20, 1])
    problem, arrays, offsets = packed(random, *lengths)
    options = {"causal": True, "max_seqlen_q": 31, "max_seqlen_k": 20}
    o, lse = tessera.attention(*arrays, return_lse=True, **offsets, **options)
    gradients = tessera.attention_backward(*arrays, o, lse, problem.d_o[0], **offsets, **options)
    names = ("o", "lse", "dq", "dk", "dv")
    results = dict(zip(names, (o, lse.T, *gradients)))
    exact, plain = ({name: np.zeros(x.shape) for name, x in results.items()} for _ in range(2))
    for b in range(4):
        rows, keys = (slice(offsets[f"cu_seqlens_{x}"][b], offsets[f"cu_seqlens_{x}"][b + 1]) for x in "qk")
        parts = [x[None, at] for x, at in zip(arrays, (rows, keys, keys))]
        for whole, dtype in ((exact, "float64"), (plain, "float32")):
            part = Plain(*parts, dtype=dtype, causal=True)
            whole["o"][rows], whole["lse"][rows] = part.o[0], part.lse[0].T
            part = part.gradients(problem.d_o[:, rows])
            whole["dq"][rows], whole["dk"][keys], whole["dv"][keys] = part["dq"][0], part["dk"][0], part["dv"][0]
    for name in names:
        assert_close(results[name], exact[name], plain[name], "float32")


def test_key_lengths(problem):
    lengths = np.int32([45, 12])
    problem.k[1, 12:] = problem.v[1, 12:] = np.nan  # padding never reaches the output
    o = tessera.attention(*problem.arrays, seqused_k=lengths)
    for b, n in enumerate(lengths):
        parts = [problem.q[b, None], problem.k[b, None, :n], problem.v[b, None, :n]]
        exact, plain = (Plain(*parts, dtype=dtype) for dtype in ("float64", "float32"))
        assert_close(o[b, None], exact.o, plain.o, "float32")


@pytest.mark.parametrize("kernel", ["auto", "decode", "reference"])
def test_paged(random, kernel):
    problem = Problem(random, b=2, sq=1, sk=64)
    pages = random.permutation(20)[: 2 * 8].reshape(2, 8).astype(np.int32)
    room = [np.full((20, 8, *x.shape[2:]), np.nan, np.float32) for x in problem.arrays[1:]]
    for b in range(2):
        for x, paged in zip(problem.arrays[1:], room):
            paged[pages[b]] = x[b].reshape(8, 8, *x.shape[2:])
    lengths = np.int32([64, 33])
    o = tessera.attention(problem.q, *room, page_table=pages, seqused_k=lengths, kernel=kernel)
    for b, n in enumerate(lengths):
        parts = [problem.q[b, None], problem.k[b, None, :n], problem.v[b, None, :n]]
        exact, plain = (Plain(*parts, dtype=dtype) for dtype in ("float64", "float32"))
        assert_close(o[b, None], exact.o, plain.o, "float32")


def test_combine(problem):
    parts = [tessera.attention(problem.q, problem.k[:, at], problem.v[:, at], return_lse=True)
             for at in (slice(0, 10), slice(10, 11), slice(11, 45))]
    o, lse = tessera.combine(np.stack([x for x, _ in parts]), np.stack([x for _, x in parts]), return_lse=True)
    exact, plain = (Plain(*problem.arrays, dtype=dtype) for dtype in ("float64", "float32"))
    assert_close(o, exact.o, plain.o, "float32")
    assert_close(lse, exact.lse, plain.lse, "float32")
    alone = tessera.combine(np.stack([x for x, _ in parts]), np.stack([x for _, x in parts]))
    np.testing.assert_array_equal(alone, o)


def test_plan(problem):
    text = tessera.plan(*problem.arrays, causal=True)
    assert "causal" in text and "tiled" in text and "workspace" in text
    plan = tessera.plan(*problem.arrays, direction="backward", as_dict=True)
    assert isinstance(plan, dict) and "backward" in str(plan)
    assert "reference" in tessera.plan(*problem.arrays, kernel="reference")


def test_device():
    device = tessera.device()
    assert device == tessera.device("cpu")
    assert device["cores"] >= 1 and device["threads"] >= 1 and device["isa"]


# ---- threads --------------------------------------------------------------------------------------------------------


def test_the_gil_is_released(random):
    """While one thread computes, another runs Python."""
    q, k, v = random.standard_normal((3, 1, 3000, 8, 64)).astype(np.float32)
    during = []

    def compute():
        begin = time.perf_counter()
        tessera.attention(q, k, v, threads=1)
        during.append((begin, time.perf_counter()))

    thread = threading.Thread(target=compute)
    ticks = []
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0)
    begin, end = during[0]
    # A lock that is held from begin to end would leave ticks at the ends alone.
    third = (end - begin) / 3
    assert any(begin + third < tick < end - third for tick in ticks)


def test_many_threads_at_once(random):
    problems = [Problem(random, sq=n, sk=2 * n) for n in (1, 17, 64, 90)]
    expected = [tessera.attention(*p.arrays, causal=True) for p in problems]
    wrong = []

    def compute():
        for _ in range(50):
            for p, o in zip(problems, expected):
                if not np.array_equal(tessera.attention(*p.arrays, causal=True), o):
                    wrong.append(p)

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_after_one_that_had_no_memory():
    """A thread's workspace is kept between calls: one that could not be had leaves nothing behind."""
    program = """
import resource
import numpy as np
import tessera

def call(length, threads):
    q = np.lib.stride_tricks.as_strided(np.ones(64, np.float32), (1, length, 16, 64), (0, 0, 0, 4))
    o = np.empty(q.shape, np.float32)
    return lambda: (tessera._core.forward(q, q, q, o, threads=threads), o)[1]

small, large = call(64, 1), call(16384, 1024)  # a share of the workspace each: 0.1 MiB and 120
expected = small().copy()
pages = int(open("/proc/self/statm").read().split()[0])
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (32 << 20), hard))
for _ in range(2):
    try:
        large()
    except MemoryError:
        pass
    else:
        raise AssertionError("there was memory")
    np.testing.assert_array_equal(small(), expected)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
np.testing.assert_array_equal(small(), expected)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---- what is refused, in one line that names the argument ------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": 1}, "q: int"),
        ({"k": None}, "k: absent"),
        ({"q": [[1.0]]}, "q: list"),
        (
            {"q": np.zeros((2, 37, 4, 24), np.int64)},
            "q: dtype int64, accepted float32, float16, bfloat16, float64 or (forward) 8 bits",
        ),
        ({"k": np.zeros((2, 45, 2, 24), np.float16)}, "k: dtype float16"),
        ({"q": np.zeros((2, 37, 4, 24), ">f4")}, "q: ndarray of dtype >f4"),
        ({"q": np.zeros((2, 37, 4, 24, 1, 1), np.float32)}, "q: rank 6"),
        ({"q": np.zeros((37, 24), np.float32)}, "q: rank 2"),
        ({"q": np.zeros((2, 37, 4, 48), np.float32)[..., ::2]}, "q: "),
        ({"v": np.zeros((2, 44, 2, 16), np.float32)}, "v: shape"),
        ({"mask": np.ones((2, 1, 37, 45), np.uint8)}, "mask: dtype uint8, accepted bool"),
        ({"seqused_k": np.int64([1, 2])}, "seqused_k: dtype int64, accepted int32"),
        ({"seqused_k": np.int32([46, 2])}, "seqused_k[0]: 46"),
        ({"scale": "x"}, "scale: 'x' of type str, accepted a number or None"),
        ({"scale": float("nan")}, "scale: "),
        ({"causal": 1}, "causal: 1 of type int, accepted True or False"),
        ({"window": 3}, "window: 3 of type int, accepted a pair of integers"),
        ({"window": (1, 2, 3)}, "window: (1, 2, 3), accepted a pair of integers"),
        ({"window": (-2, 0)}, "window"),
        ({"softcap": -1.0}, "softcap: "),
        ({"dropout_p": 1.0}, "dropout_p: 1"),
        ({"dropout_seed": -1}, "dropout_seed: -1"),
        ({"kernel": "fast"}, 'kernel: "fast", accepted "auto"'),
        ({"kernel": "fwd_sm80"}, "no kernel supports this problem: "),
        ({"threads": -1}, "threads: -1"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_refusals(problem, change, message):
    arguments = {"q": problem.q, "k": problem.k, "v": problem.v, **change}
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(tessera.Error) as refusal:
        tessera.attention(q, k, v, **arguments)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)
    assert isinstance(refusal.value, ValueError)


def forms_of(array):
    """Values that are not arrays, and arrays whose memory is not their whole state."""
    record = np.zeros(array.shape, [("x", "<f4")]).view(np.recarray)
    return {"recarray": record, "masked": np.ma.masked_array(array, array > 1), "memoryview": memoryview(array),
            "bytes": array.tobytes(), "list": array.tolist(), "object": array.astype(object),
            "scalar": array.flat[0]}  # fmt: skip


@pytest.mark.parametrize("form", forms_of(np.zeros(1, np.float32)))
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sink", "d_o", "o_parts", "lse_parts"])
def test_what_is_no_array_is_named(problem, form, name):
    call = {"q": problem.q, "k": problem.k, "v": problem.v}
    o, lse = tessera.attention(**call, return_lse=True)
    if name.endswith("_parts"):
        function, call = tessera.combine, {"o_parts": o[None], "lse_parts": lse[None]}
    elif name == "d_o":
        function, call = tessera.attention_backward, {**call, "o": o, "lse": lse, "d_o": problem.d_o}
    else:
        function = tessera.attention
    array = {"bias": np.zeros((2, 4, 37, 45), np.float32), "sink": np.zeros(4, np.float32), **call}[name]
    call[name] = forms_of(array)[form]
    for run in (function, tessera.plan) if function is tessera.attention else (function,):
        with pytest.raises(tessera.Error, match=f"^{name}: ") as refusal:
            run(**call)
        assert "accepted" in str(refusal.value) and "\n" not in str(refusal.value)
        if form in ("masked", "memoryview", "bytes"):
            assert {"masked": "masked array", "memoryview": "memoryview", "bytes": "bytes"}[form] in str(refusal.value)


def test_subclasses_that_are_plain_arrays(problem, tmp_path):
    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=problem.q.shape)
    mapped[:] = problem.q
    expected = tessera.attention(*problem.arrays)
    np.testing.assert_array_equal(tessera.attention(mapped, problem.k, problem.v), expected)
    np.testing.assert_array_equal(tessera.attention(problem.q, problem.k.view(np.recarray), problem.v), expected)


def test_two_frameworks(problem):
    """Each framework would apply its own rules to gradients, streams and outputs."""
    standard = {name: StandardArray(x) for name, x in zip("qkv", problem.arrays)}
    plain = dict(zip("qkv", problem.arrays))
    with pytest.raises(tessera.Error, match="^k: of StandardArray, q is of NumPy: accepted: one framework for all$"):
        tessera.attention(**{**plain, "k": standard["k"]})
    with pytest.raises(tessera.Error, match="^sink: of NumPy, q is of StandardArray: accepted: one framework for all$"):
        tessera.attention(**standard, sink=np.zeros(4, np.float32))
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(x) for name, x in plain.items()}
    for name in "kv":
        with pytest.raises(
            tessera.Error, match=f"^{name}: of PyTorch, q is of NumPy: accepted: one framework for all$"
        ):
            tessera.attention(**{**plain, name: tensors[name].requires_grad_()})
        with pytest.raises(tessera.Error, match=f"^{name}: numpy.ndarray, accepted a PyTorch tensor$"):
            tessera.attention(**{**tensors, name: plain[name]})
    o, lse = tessera.attention(**plain, return_lse=True)
    with pytest.raises(tessera.Error, match="^d_o: of PyTorch, q is of NumPy"):
        tessera.attention_backward(**plain, o=o, lse=lse, d_o=torch.from_numpy(problem.d_o))
    with pytest.raises(tessera.Error, match="^lse_parts: of PyTorch, o_parts is of NumPy"):
        tessera.combine(o[None], torch.from_numpy(lse[None]))
    with pytest.raises(tessera.Error, match="^mask: of PyTorch, q is of NumPy"):
        tessera.plan(**plain, mask=torch.ones(1, 1, 37, 45, dtype=torch.bool))


def test_an_option_of_another_name(problem):
    def says(text, **option):
        text = f"attention() got an unexpected keyword argument '{next(iter(option))}': {text}"
        with pytest.raises(TypeError, match=f"^{re.escape(text)}"):
            tessera.attention(*problem.arrays, **option)

    says("did you mean causal?", casual=True)
    says("help(tessera.attention) lists", nothing_like_it=1)
    says("attention_backward computes it with grad_bias=True", d_bias=problem.q)
    says("SDPA's is_causal is causal here", is_causal=True)
    says("SDPA's attn_mask is mask here where it is bool", attn_mask=None)
    says("flash_attn's softmax_scale is scale here", softmax_scale=1.0)
    with pytest.raises(TypeError, match=r"^plan\(\) got .*: SDPA's is_causal is causal here"):
        tessera.plan(*problem.arrays, is_causal=True)


def test_hints_name_options():
    hints = tessera._hints
    options = {f["name"] for f in tessera._core.option_fields() if f["kind"] != "backward tensor"} | {"return_lse"}
    for name, hint in hints._ELSEWHERE.items():
        assert name not in options
        assert (options | {"Hq", "grad_bias", "grad_sink"}) & set(re.findall(r"\w+", hint)), (name, hint)


@pytest.mark.parametrize("function", [tessera.attention, tessera.attention_backward, tessera.plan])
def test_signatures_show_every_option(function):
    shown = inspect.signature(function).parameters
    assert all(p.kind is not p.VAR_KEYWORD for p in shown.values())
    for field in tessera._core.option_fields():
        if field["kind"] in ("tensor", "value", "execution"):
            assert shown[field["name"]].default == field["default"]


def heads_first(array):
    """The same entries, contiguous as [B, H, S, D] or [H, T, D]."""
    return np.ascontiguousarray(array.swapaxes(-3, -2))


def test_heads_first(problem):
    arrays = [heads_first(x) for x in problem.arrays]
    o, lse = tessera.attention(*arrays, causal=True, return_lse=True, layout="bhsd")
    expected, expected_lse = tessera.attention(*problem.arrays, causal=True, return_lse=True, layout="bshd")
    assert o.flags.c_contiguous
    np.testing.assert_array_equal(o, heads_first(expected))
    np.testing.assert_array_equal(lse, expected_lse)
    np.testing.assert_array_equal(tessera.attention(*arrays, causal=True, layout="bhsd"), o)
    gradients = tessera.attention_backward(*arrays, o, lse, heads_first(problem.d_o), causal=True, layout="bhsd")
    others = tessera.attention_backward(*problem.arrays, expected, expected_lse, problem.d_o, causal=True)
    for gradient, other in zip(gradients[:3], others[:3]):
        np.testing.assert_array_equal(gradient, heads_first(other))
    plan = tessera.plan(*arrays, causal=True, layout="bhsd", as_dict=True)
    assert plan["workspace_bytes"] == tessera.plan(*problem.arrays, causal=True, as_dict=True)["workspace_bytes"]


def test_heads_first_packed_and_paged(random):
    q, k, v = (random.standard_normal(shape, np.float32) for shape in ((7, 4, 16), (9, 2, 16), (9, 2, 16)))
    cu = {"cu_seqlens_q": np.array([0, 3, 7], np.int32), "cu_seqlens_k": np.array([0, 4, 9], np.int32)}
    o, lse = tessera.attention(q, k, v, return_lse=True, **cu)
    again, again_lse = tessera.attention(*map(heads_first, (q, k, v)), return_lse=True, layout="bhsd", **cu)
    np.testing.assert_array_equal(again, heads_first(o))
    np.testing.assert_array_equal(again_lse, lse)
    k, v = (random.standard_normal((3, 4, 2, 16), np.float32) for _ in "kv")
    pages = {"page_table": np.array([[2, 0]], np.int32), "seqused_k": np.array([6], np.int32)}
    o = tessera.attention(q[None], k, v, **pages)
    np.testing.assert_array_equal(
        tessera.attention(*map(heads_first, (q[None], k, v)), layout="bhsd", **pages), heads_first(o)
    )


def test_a_wrong_layout(problem):
    with pytest.raises(tessera.Error, match=r'^layout: "sbhd", accepted "bshd", \[B, S, H, D\], or "bhsd"'):
        tessera.attention(*problem.arrays, layout="sbhd")
    with pytest.raises(tessera.Error, match=r"^layout: 1 of type int, accepted"):
        tessera.attention(*problem.arrays, layout=1)
    three, two = (np.zeros((1, n, 8, 4), np.float32) for n in (3, 2))
    with pytest.raises(tessera.Error, match='^k: 8 heads with.*; of .* arrays, layout="bhsd" says so$'):
        tessera.attention(np.zeros((1, 4, 3, 4), np.float32), three.copy(), three)


def test_read_only_outputs(problem):
    o = np.zeros_like(problem.d_o)
    o.flags.writeable = False
    with pytest.raises(tessera.Error, match="^o: read-only, accepted a writable array$"):
        tessera._core.forward(*problem.arrays, o)
    assert (o == 0).all()


def test_gradients_of_what_is_absent(problem):
    o, lse = tessera.attention(*problem.arrays, return_lse=True)
    with pytest.raises(tessera.Error, match="^grad_bias: True without bias"):
        tessera.attention_backward(*problem.arrays, o, lse, problem.d_o, grad_bias=True)


class Producer:
    """An array known only by DLPack, as CuPy's are, that tells its device."""

    def __init__(self, array, device_type=1, device_id=0):
        self.array, self.place = array, (device_type, device_id)
        self.shape, self.dtype = array.shape, array.dtype
        self.asked = []

    def __dlpack_device__(self):
        return self.place

    def __dlpack__(self, *, stream=None, **options):
        self.asked.append(stream)
        capsule = self.array.__dlpack__()
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = get_pointer(capsule, b"dltensor")
        ctypes.cast(address + ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int32 * 2))[0][:] = self.place
        return capsule


class StandardArray(Producer):
    """As the array API standard has it: with a namespace that makes more of them."""

    device = "here"
    float32 = np.dtype(np.float32)

    def __array_namespace__(self):
        return StandardArray

    @staticmethod
    def empty(shape, *, dtype, device):
        assert device == "here"
        return StandardArray(np.empty(shape, dtype))


@pytest.mark.parametrize("kind", [2, 13], ids=["cuda", "cuda managed"])
def test_a_cuda_array_where_there_is_no_such_gpu(problem, kind):
    q, k, v = (Producer(x, kind, 99) for x in problem.arrays)
    with pytest.raises(tessera.Error, match="^q: on device cuda:99, accepted the CPU: .+"):
        tessera.attention(q, k, v)
    # DLPack's None and 1: its work comes before that of CUDA's default stream. -1 would be no order at all.
    assert set(q.asked) <= {None, 1}


def test_devices_by_name():
    with pytest.raises(tessera.Error, match="^name: on device cuda:99, accepted the CPU: "):
        tessera.device("cuda:99")
    for name in ("", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1 ", "cuda99"):
        with pytest.raises(tessera.Error, match='^name: ".*", accepted "cpu"'):
            tessera.device(name)


def test_host_memory_of_a_gpu(problem):
    """Pinned memory is the CPU's."""
    pinned = [Producer(x, 3) for x in problem.arrays]
    np.testing.assert_array_equal(tessera.attention(*pinned), tessera.attention(*problem.arrays))


def test_two_devices(problem):
    k = Producer(problem.k, 2, 0)
    with pytest.raises(tessera.Error, match="^k: on device cuda:0, q is on cpu: accepted: one device for all$"):
        tessera.attention(problem.q, k, problem.v)
    with pytest.raises(tessera.Error, match="^lse_parts: on device cuda:0, o_parts is on cpu"):
        tessera.combine(problem.q[None], Producer(np.zeros((1, 2, 4, 37), np.float32), 2))


def test_arrays_of_an_unknown_framework(problem):
    wrapped = [Producer(x) for x in problem.arrays]
    o = tessera.attention(*wrapped)
    np.testing.assert_array_equal(o, tessera.attention(*problem.arrays))
    assert all(x.asked and set(x.asked) == {None} for x in wrapped)


def test_arrays_of_the_array_api_standard(problem):
    """Outputs are of the same framework, on the same device."""
    o, lse = tessera.attention(*(StandardArray(x) for x in problem.arrays), return_lse=True)
    assert isinstance(o, StandardArray) and isinstance(lse, StandardArray)
    expected, expected_lse = tessera.attention(*problem.arrays, return_lse=True)
    np.testing.assert_array_equal(o.array, expected)
    np.testing.assert_array_equal(lse.array, expected_lse)


# ---- the cost of a call ---------------------------------------------------------------------------------------------


def test_call_overhead():
    """At most 5 us through NumPy for a tiny problem, where a sum of NumPy's arrays takes a third of one: the best of
    many, on a machine that has other work too."""
    q, k, v = np.ones((3, 1, 4, 1, 8), np.float32)

    def seconds(call):
        begin = time.perf_counter()
        for _ in range(100):
            call()
        return (time.perf_counter() - begin) / 100

    best = of_sum = np.inf
    end = time.perf_counter() + 10
    while best >= max(6e-6, 18 * of_sum) and time.perf_counter() < end:
        best, of_sum = min(best, seconds(lambda: tessera.attention(q, k, v))), min(of_sum, seconds(lambda: q + k))
    # The library's own call is about a microsecond of it.
    assert best < max(6e-6, 18 * of_sum)
