"""Arguments of PyTorch programs: none is dropped, writes in place are visible, transforms behave like PyTorch's own."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

import tessera  # noqa: E402
import tessera.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch_reference import random  # noqa: E402

attention = tessera.torch.attention


def normal(*shape, seed=0):
    return random(*shape, seed=seed, requires_grad=False)


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


# ---- numbers --------------------------------------------------------------------------------------------------------

Q = (1, 9, 2, 8)


@pytest.mark.parametrize(
    "given", [1.5, 2**64, -1, "x", b"1", [1], torch.tensor(1.5), torch.tensor([1, 2]), torch.tensor(-1), np.float64(1)]
)
@pytest.mark.parametrize("name", ["dropout_seed", "dropout_offset"])
def test_seeds_that_are_none(name, given):
    q = normal(*Q)
    options = {"dropout_seed": 1, "dropout_p": 0.5, name: given}
    for call in (attention, tessera.attention):
        with pytest.raises(tessera.Error, match=f"^{name}: "):
            call(q, q, q, **options)
    o, lse = attention(q, q, q, return_lse=True)
    with pytest.raises(tessera.Error, match=f"^{name}: "):
        tessera.attention_backward(q, q, q, o, lse, o, **options)


@pytest.mark.parametrize("given", [0, 2**63, 2**64 - 1, np.uint64(2**64 - 1), np.int32(7), torch.tensor(7)])
def test_seeds_of_every_kind(given):
    q = normal(*Q)
    expected = tessera.attention(
        q.numpy(), q.numpy(), q.numpy(), dropout_p=0.5, dropout_seed=int(given), dropout_offset=3
    )
    found = attention(q, q, q, dropout_p=0.5, dropout_seed=given, dropout_offset=3)
    assert torch.equal(found, torch.from_numpy(expected))


def test_dropout_states():
    q = normal(*Q)
    run = lambda **given: attention(q, q, q, dropout_p=0.5, **given)  # noqa: E731
    assert torch.equal(run(dropout_state=torch.tensor([5, -1])), run(dropout_seed=5, dropout_offset=2**64 - 1))
    for name in ("dropout_seed", "dropout_offset"):
        with pytest.raises(tessera.Error, match=f"^{name}: given with dropout_state"):
            run(dropout_state=torch.tensor([1, 2]), **{name: 5})
    with pytest.raises(tessera.Error, match="^dropout_offset: given without dropout_seed"):
        run(dropout_offset=5)
    for state in (
        torch.tensor([1, 2, 3]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([[1, 2]]),
        torch.tensor(1),
        i32([1, 2]),
    ):
        with pytest.raises(tessera.Error, match="^dropout_state: "):
            run(dropout_state=state)


@pytest.mark.parametrize("options", [
    dict(scale=np.float32(0.3)), dict(scale=torch.tensor(0.3)), dict(softcap=np.float64(5)),
    dict(window=(np.int64(2), torch.tensor(0))),
    dict(window=[2, 0]), dict(threads=np.int32(1)),
], ids=str)  # fmt: skip
def test_numbers_of_numpy_and_tensors_of_rank_0(options):
    q = normal(*Q)
    plain = {
        name: tuple(map(int, value)) if name == "window" else value.item() for name, value in options.items()
    }  # fmt: skip
    expected = attention(q, q, q, **plain)
    assert torch.equal(attention(q, q, q, **options), expected)
    compiled = torch.compile(lambda q: attention(q, q, q, **options), backend="eager")
    assert torch.equal(compiled(q), expected)


def test_what_is_no_number():
    q = normal(*Q)
    learned = torch.tensor(0.3, requires_grad=True)
    for options in (
        dict(scale="x"), dict(scale=learned), dict(scale=torch.ones(2)), dict(softcap=learned), dict(dropout_p=learned),
        dict(window=(1.5, 0)), dict(window=3), dict(window="12"), dict(causal=1), dict(causal=torch.tensor(True)),
        dict(max_seqlen_q=1.5), dict(kernel=1), dict(threads="1"),
    ):  # fmt: skip
        (name,) = options
        with pytest.raises(tessera.Error, match=f"^{name}: "):
            attention(q, q, q, **options)
    with torch.no_grad():
        assert torch.equal(attention(q, q, q, scale=learned), attention(q, q, q, scale=0.3))
    with pytest.raises(tessera.Error, match="^scale: a tensor that requires a gradient"):
        torch.func.grad(lambda s: attention(q, q, q, scale=s).sum())(torch.tensor(0.3))
    with pytest.raises(tessera.Error, match="^scale: mapped over by vmap"):
        torch.func.vmap(lambda s: attention(q, q, q, scale=s))(torch.ones(3))


def test_gradients_that_no_kernel_computes():
    q = normal(*Q)
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(tessera.Error, match="^alibi_slopes: requires a gradient"):
        attention(q, q, q, alibi_slopes=slopes)
    with torch.no_grad():
        attention(q, q, q, alibi_slopes=slopes)


# ---- compiled programs ----------------------------------------------------------------------------------------------


def graphs_of(function, calls, **options):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend="eager", **options)
    for arguments in calls:
        assert torch.equal(compiled(*arguments), function(*arguments))
    return counters["stats"]["unique_graphs"]


def test_a_longest_length_in_a_tensor_compiles_once():
    def packed(q, cu, longest):
        return attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)

    calls = [(normal(30, 2, 8), i32([0, a, 30]), torch.tensor(30 - a)) for a in range(3, 9)]
    assert graphs_of(packed, calls, fullgraph=True) == 1


# ---- without data: meta and fake tensors ----------------------------------------------------------------------------

SHAPES = {
    "3 key heads for 4": ((2, 9, 4, 16), (2, 12, 3, 16), (2, 12, 3, 16)),
    "v shorter than k": ((2, 9, 4, 16), (2, 12, 4, 16), (2, 7, 4, 16)),
    "another head size": ((2, 9, 4, 16), (2, 12, 4, 8), (2, 12, 4, 16)),
    "another batch": ((2, 9, 4, 16), (3, 12, 4, 16), (3, 12, 4, 16)),
    "head size 600": ((2, 9, 4, 600),) * 3,
    "rank 5": ((1, 2, 9, 4, 16),) * 3,
}
OPTIONS = {
    "bias": lambda make: dict(bias=make(2, 4, 9, 11)),
    "mask of numbers": lambda make: dict(mask=make(9, 12)),
    "slopes": lambda make: dict(alibi_slopes=make(3)),
    "sink": lambda make: dict(sink=make(5)),
    "window": lambda make: dict(window=(-2, 0)),
    "dropout": lambda make: dict(dropout_p=1.5, dropout_seed=1),
    "scale": lambda make: dict(scale=1e30),
    "lengths": lambda make: dict(seqused_k=make(3)),
    "kernel": lambda make: dict(kernel="nothing"),
}


def refusal(call):
    with pytest.raises(tessera.Error) as caught:
        call()
    return str(caught.value)


def everywhere(call):
    """call(make) with tensors that have data, that are fake and that are meta: each is refused in the same words."""
    expected = refusal(lambda: call(torch.zeros))
    with FakeTensorMode():
        assert refusal(lambda: call(torch.empty)) == expected
    assert refusal(lambda: call(lambda *shape, **given: torch.empty(*shape, device="meta", **given))) == expected


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_without_data(shapes):
    everywhere(lambda make: attention(*(make(*shape) for shape in shapes)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_without_data(options):
    everywhere(lambda make: attention(make(2, 9, 4, 16), make(2, 12, 4, 16), make(2, 12, 4, 16), **options(make)))


def test_dtypes_without_data():
    everywhere(lambda make: attention(*(make(2, 9, 4, 16, dtype=torch.int32) for _ in range(3))))
    everywhere(
        lambda make: attention(
            *(make(2, 9, 4, 16, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float16))
        )
    )
    everywhere(lambda make: attention(*(make(2, 9, 4, 16, dtype=torch.complex64) for _ in range(3))))


def test_other_calls_without_data():
    everywhere(
        lambda make: tessera.attention_backward(*(make(1, 5, 2, 8) for _ in range(4)), make(1, 2, 6), make(1, 5, 2, 8))
    )
    everywhere(
        lambda make: tessera.attention_backward(*(make(1, 5, 2, 8) for _ in range(4)), make(1, 2, 5), make(1, 5, 3, 8))
    )
    everywhere(lambda make: tessera.combine(make(3, 1, 5, 2, 8), make(3, 1, 2, 6)))
    everywhere(
        lambda make: tessera.append(
            *(make(1, 1, 2, 8) for _ in range(2)), make(1, 9, 2, 8), make(1, 9, 3, 8), make(1).int()
        )
    )
    everywhere(lambda make: tessera.plan(make(1, 5, 2, 8), make(1, 5, 2, 7), make(1, 5, 2, 8)))
    with FakeTensorMode():
        x, lse = torch.empty(1, 5, 2, 8), torch.empty(1, 2, 5)
        gradients = tessera.attention_backward(x, x, x, x, lse, x, sink=torch.empty(2), grad_sink=True)
        assert [g if g is None else tuple(g.shape) for g in gradients] == [(1, 5, 2, 8)] * 3 + [None, (2,), None]
        tessera.append(x, x, *(torch.empty(1, 9, 2, 8) for _ in range(2)), torch.empty(1).int())
        assert tessera.plan(x, x, x).startswith("")


def test_exported_programs_have_dynamic_shapes():
    class Model(torch.nn.Module):
        def forward(self, q, k):
            return attention(q, k, k, causal=True)

    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(
        Model(), (normal(1, 9, 2, 8), normal(1, 12, 2, 8)), dynamic_shapes=({}, {1: length}), strict=False
    )
    q, k = normal(1, 9, 2, 8), normal(1, 33, 2, 8, seed=1)
    assert torch.equal(program.module()(q, k), attention(q, k, k, causal=True))


# ---- what is written in place ---------------------------------------------------------------------------------------


def moves(tensor, call):
    before = tensor._version
    call()
    return tensor._version > before


def test_writes_in_place_move_versions():
    from tessera.serving import paged, vllm

    k, v, lengths = normal(1, 1, 2, 8), normal(1, 1, 2, 8), i32([4])
    caches = torch.zeros(2, 1, 16, 2, 8)
    append = lambda **given: tessera.append(k, v, *caches.unbind(0), lengths, **given)  # noqa: E731
    assert moves(caches, append), "of what the caches are views of, too"
    q, rotated, angles = (
        normal(1, 1, 2, 8),
        torch.zeros(1, 1, 2, 8),
        dict(cos=torch.ones(16, 4), sin=torch.zeros(16, 4)),
    )
    assert moves(rotated, lambda: append(q=q, q_out=rotated, **angles)) and not moves(
        q, lambda: append(q=q, q_out=rotated, **angles)
    )
    assert moves(q, lambda: append(q=q, **angles))
    assert moves(caches, lambda: paged.write_slots(k[0], v[0], *caches.unbind(0), torch.tensor([3])))
    implementation = vllm.Attention(2, 8, 0.3)
    cache = torch.zeros(1, 2, 16, 16)  # [blocks, Hkv, block_size, D + Dv]
    assert moves(cache, lambda: implementation.do_kv_cache_update(None, k[0], v[0], cache, torch.tensor([3])))
    assert moves(caches, lambda: implementation.do_kv_cache_update(None, k[0], v[0], caches, torch.tensor([3])))
    step = vllm.Metadata(1, 1, i32([0, 1]), 16, lengths, i32([[0]]), torch.zeros(0, dtype=torch.int64))
    out = torch.zeros(1, 2, 8)
    assert moves(out, lambda: implementation.forward(None, q[0], None, None, cache, step, out))
    of_one, of_two = torch.zeros_like(out), torch.zeros_like(out)  # the same keys and values in vLLM's earlier layout
    implementation.forward(None, q[0], None, None, cache, step, of_one)
    stacked = torch.stack(implementation._caches(cache))
    assert torch.equal(implementation.forward(None, q[0], None, None, stacked, step, of_two), of_one)

    w = torch.ones(16, requires_grad=True)
    y = (w * caches[0, 0, :, 0, 0]).sum()
    append()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        inference = torch.zeros(2, 1, 16, 2, 8)
        tessera.append(k, v, *inference.unbind(0), lengths)
    tessera.append(k, v, *inference.unbind(0), lengths)


def test_gradients_of_what_is_written_in_place_are_refused():
    from tessera.serving import paged

    k, v, caches, lengths = normal(1, 1, 2, 8), normal(1, 1, 2, 8), torch.zeros(2, 1, 16, 2, 8), i32([4])
    learned = k.clone().requires_grad_()
    with pytest.raises(tessera.Error, match="^k: requires a gradient, which tessera.append does not compute"):
        tessera.append(learned, v, *caches.unbind(0), lengths)
    with torch.no_grad():
        tessera.append(learned, v, *caches.unbind(0), lengths)
    attend = lambda q: paged.attend(  # noqa: E731
        q, *caches.unbind(0), torch.zeros(1, 2, 8), cu_seqlens_q=i32([0, 1]), seqused_k=lengths, max_seqlen_q=1,
        max_seqlen_k=16, page_table=i32([[0]]),
    )  # fmt: skip
    with pytest.raises(tessera.Error, match="^q: requires a gradient, which tessera.serving does not compute"):
        attend(learned[0])
    with torch.no_grad():
        attend(learned[0])


# ---- transforms -----------------------------------------------------------------------------------------------------


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


KINDS = {
    "plain": {},
    "bias": dict(bias=normal(1, 2, 5, 7), causal=True),
    "sink": dict(sink=normal(2)),
    "dropout": dict(dropout_p=0.3, dropout_seed=5),
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_batched_gradients(options):
    """torch.autograd.grad(is_grads_batched=True), with which jacobian(vectorize=True) and gradcheck work as well."""
    inputs = [normal(2, n, 2, 8, seed=n).requires_grad_() for n in (5, 7, 7)]
    learned = {
        name: value.clone().requires_grad_() for name, value in options.items() if isinstance(value, torch.Tensor)
    }
    outputs = attention(*inputs, **{**options, **learned}, return_lse=True)
    inputs += learned.values()
    cotangents = [torch.randn(3, *x.shape) for x in outputs]
    batched = torch.autograd.grad(outputs, inputs, cotangents, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(outputs, inputs, [c[i] for c in cotangents], retain_graph=True) for i in range(3)]
    for found, expected in zip(batched, zip(*single)):
        close(found, torch.stack(expected))


def test_jacobians_and_gradcheck():
    q, k, v = (normal(1, n, 2, 4, seed=n) for n in (3, 4, 4))
    jacobian = torch.autograd.functional.jacobian
    for f, x in (
        (lambda q: attention(q, k, v), q),
        (lambda q: attention(q, k, v, return_lse=True)[1], q),
        (lambda bias: attention(q, k, v, bias=bias), torch.zeros(3, 4)),
        (lambda sink: attention(q, k, v, sink=sink), torch.zeros(2)),
        (lambda k: attention(q.transpose(1, 2).transpose(1, 2), k, v), k),
    ):
        close(jacobian(f, x, vectorize=True), jacobian(f, x))
        close(torch.func.jacrev(f)(x), jacobian(f, x))
    assert torch.autograd.gradcheck(
        lambda q: attention(q, k.double(), v.double()), q.double().requires_grad_(), check_batched_grad=True
    )


def test_vmap_over_attention_backward():
    q, k, v = (normal(2, n, 2, 8, seed=n) for n in (5, 7, 7))
    o, lse = attention(q, k, v, return_lse=True, sink=torch.zeros(2))
    cotangents = torch.randn(3, *o.shape)
    backward = lambda d_o: tuple(  # noqa: E731
        tessera.attention_backward(
            q, k, v, o, lse, d_o, sink=torch.zeros(2), grad_sink=True, bias=torch.zeros(7), grad_bias=True
        )[:5]
    )
    for found, expected in zip(torch.func.vmap(backward)(cotangents), zip(*map(backward, cotangents))):
        close(found, torch.stack(expected))


def dropped(o):
    """Of queries that weigh all keys alike, over the identity for values."""
    return o == 0


def test_randomness_of_vmap():
    """As torch.func.vmap documents it, and like PyTorch's own attention."""
    q, v = torch.zeros(3, 2, 9, 1, 8), torch.eye(9).repeat(2, 1, 1)[:, :, None]
    f = lambda q: attention(q, q, v, dropout_p=0.5)  # noqa: E731
    same = dropped(torch.func.vmap(f, randomness="same")(q))
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2]) and not torch.equal(same[0, 0], same[0, 1])
    different = dropped(torch.func.vmap(f, randomness="different")(q))
    assert len({tuple(x.flatten().tolist()) for x in different}) == 3
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(f)(q)
    given = lambda q: attention(q, q, v, dropout_p=0.5, dropout_seed=7)  # noqa: E731
    assert torch.equal(torch.func.vmap(given)(q), torch.stack([given(x) for x in q])), "nothing is random there"

    learned = q + 0.1
    gradient = torch.func.grad(lambda q: f(q).sin().sum())
    for randomness, alike in (("same", True), ("different", False)):
        d_q = torch.func.vmap(gradient, randomness=randomness)(learned[:1].expand(3, *q.shape[1:]).contiguous())
        assert torch.equal(d_q[0], d_q[1]) == alike


# ---- one implementation for both passes -----------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """The calls of the library's kernels, and PyTorch's own attention at the end."""
    from tessera.torch import aten, kernels

    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("this PyTorch's kernels cannot be found once they are replaced")
    calls = []

    class Counted:
        def __getattr__(self, name):
            function = getattr(tessera._core, name)
            if name not in ("forward", "backward"):
                return function
            return lambda *arguments, **options: (calls.append(name), function(*arguments, **options))[1]

    for module in (aten, kernels):
        monkeypatch.setattr(module, "_core", Counted())
    yield calls
    tessera.torch.restore()


def test_both_passes_of_a_call_stay_with_one_implementation(counted):
    q, k, v = (normal(1, 2, n, 8, seed=n).requires_grad_() for n in (5, 7, 7))

    def run(before, between):
        counted.clear()
        before()
        o = F.scaled_dot_product_attention(q, k, v)
        between()
        gradients = torch.autograd.grad(o.sin().sum(), (q, k, v))
        tessera.torch.restore()
        return list(counted), gradients

    nothing, activate, restore = lambda: None, tessera.torch.activate, tessera.torch.restore
    plain, of_pytorch = run(nothing, nothing)
    assert plain == []
    both, ours = run(activate, nothing)
    assert both == ["forward", "backward"]
    for between in (restore, lambda: (restore(), activate()), activate):
        calls, gradients = run(activate, between)
        assert calls == both and all(map(torch.equal, gradients, ours))
    calls, gradients = run(nothing, activate)
    assert calls == [] and all(map(torch.equal, gradients, of_pytorch))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        calls, gradients = run(activate, nothing)  # a copy carries no mark: either may compute it
    close(gradients, ours)


def test_a_bias_alone_requires_a_gradient(counted):
    """PyTorch's memory-efficient operator is asked for no LSE then, and its backward pass for what needs one."""
    from tessera.torch import aten

    q, k, v, bias = (
        normal(2, 3, 5, 8),
        normal(2, 3, 7, 8, seed=1),
        normal(2, 3, 7, 8, seed=2),
        normal(2, 3, 5, 7).requires_grad_(),
    )
    o, lse, seed, offset = aten.efficient(q, k, v, bias, False)
    assert lse.shape[-1] == 0 and aten.is_ours(lse)
    d_o = torch.randn_like(o)
    *_, d_bias = aten.efficient_backward(d_o, q, k, v, bias, o, lse, seed, offset, 0.0, [False, False, False, True])
    (expected,) = torch.autograd.grad((F.scaled_dot_product_attention(q, k, v, bias) * d_o).sum(), bias)
    close(d_bias, expected)


# ---- what an LSE's rounding leaves out ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_rows_whose_scores_share_a_large_number(dtype):
    """q = k = v = c: each of 50 keys weighs 1 / 50, though the LSE, 8 c^2 and more, lacks the digits to show it."""
    d_o = normal(1, 50, 2, 64).to(dtype)
    expected = d_o.double().mean(1, keepdim=True).expand(d_o.shape)
    routes = {
        "eager": lambda x: attention(*x),
        "compiled": torch.compile(lambda x: attention(*x), backend="aot_eager"),
        "operator": lambda x: torch.ops.tessera.attention_forward(*x, *tessera.torch.options.pack({}))[0],
        "by heads": lambda x: tessera.torch.api.attention_by_heads(*(t.transpose(1, 2) for t in x)),
    }
    for name, run in routes.items():
        leaves = [torch.full((1, 50, 2, 64), 3000.0, dtype=dtype, requires_grad=True) for _ in range(3)]
        run(leaves).backward(d_o)
        torch.testing.assert_close(
            leaves[2].grad.double(), expected, rtol=1e-2, atol=1e-2, msg=lambda m: f"{name}: {m}"
        )
    plain = torch.full((1, 50, 2, 64), 3000.0, dtype=dtype)
    o, lse, low = attention(plain, plain, plain, return_lse_low=True)
    assert low.shape == lse.shape and (low != 0).any()
    gradients = tessera.attention_backward(plain, plain, plain, o, lse, d_o, lse_low=low)
    torch.testing.assert_close(gradients.d_v.double(), expected, rtol=1e-2, atol=1e-2)


def test_lower_digits_of_numpy_arrays():
    q = np.full((1, 50, 2, 64), 3000.0)
    o, lse, low = tessera.attention(q, q, q, return_lse_low=True)
    d_o = np.random.default_rng(0).standard_normal(q.shape)
    d_v = tessera.attention_backward(q, q, q, o, lse, d_o, lse_low=low).d_v
    np.testing.assert_allclose(d_v, np.broadcast_to(d_o.mean(1, keepdims=True), q.shape), rtol=1e-2, atol=1e-2)


def test_a_partial_result_is_merged_in_place():
    q, k, v = normal(1, 4, 2, 8), normal(1, 9, 2, 8, seed=1), normal(1, 9, 2, 8, seed=2)
    partial = tessera.attention(q, k, v, partial=True)
    for n, tensor in enumerate(partial):
        assert moves(tensor, lambda: tessera.attention(q, k, v, partial=partial)), n
    for n in (1, 2):
        assert moves(partial[n], lambda: tessera.attention(q, k, v, partial=partial, finish=True)), n


@pytest.mark.parametrize("name", ["bias", "sink", "slope", "o", "lse", "lse_low"])
def test_a_partial_result_has_no_gradients(name):
    q, k = normal(1, 4, 2, 8), normal(1, 9, 2, 8, seed=1)
    tensors = {"bias": torch.zeros(1, 1, 4, 9), "sink": torch.zeros(2), "slope": torch.zeros(2)}
    tensors |= dict(zip(("o", "lse", "lse_low"), tessera.attention(q, k, k, partial=True)))
    tensors[name].requires_grad_()
    partial = tuple(tensors[n] for n in ("o", "lse", "lse_low"))
    program = {"score_mod": "s + slope[h]", "captured": {"slope": tensors["slope"]}}
    argument = re.escape("captured['slope']" if name == "slope" else name)
    with pytest.raises(tessera.Error, match=f"^{argument}: requires a gradient, which a partial result does not"):
        tessera.attention(q, k, k, partial=partial, bias=tensors["bias"], sink=tensors["sink"], **program)
    with torch.no_grad():
        tessera.attention(q, k, k, partial=partial, bias=tensors["bias"], **program)
