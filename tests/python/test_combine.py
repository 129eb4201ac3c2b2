"""tessera.combine on PyTorch's tensors: values, gradients, and PyTorch's transformations of operators."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

import tessera  # noqa: E402
import tessera.torch  # noqa: E402
import torch_reference as reference  # noqa: E402
from torch_reference import at, check, random  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def plain(o_parts, lse_parts):
    """The definition in PyTorch's operators, in one dtype throughout."""
    lse = torch.logsumexp(lse_parts, 0)
    weights = torch.exp(lse_parts - lse).transpose(-1, -2)[..., None]
    return (weights.to(o_parts.dtype) * o_parts).sum(0), lse


def parts_of(dtype=torch.float32, parts=3):
    """o_parts [N, 2, 5, 4, 24] and lse_parts [N, 2, 4, 5]."""
    return random(parts, 2, 5, 4, 24, dtype=dtype, seed=1), random(parts, 2, 4, 5, seed=2)


def program(o_parts, lse_parts):
    o, lse = tessera.combine(o_parts, lse_parts, return_lse=True)
    return o.float().sin().sum() + lse.cos().sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(device, dtype):
    inputs = parts_of(dtype)
    runs = {}
    for name, (o_parts, lse_parts) in (
        ("ours", inputs),
        ("plain", inputs),
        ("exact", at(torch.float64, *inputs)),
    ):
        merge = (lambda *parts: tessera.combine(*parts, return_lse=True)) if name == "ours" else plain
        o, lse = merge(o_parts, lse_parts)
        loss = o.to(lse.dtype).sin().sum() + lse.cos().sum()
        runs[name] = [o, lse, *torch.autograd.grad(loss, (o_parts, lse_parts))]
    assert runs["ours"][0].dtype == dtype and runs["ours"][0].device.type == device
    for name, ours, rounded, exact in zip(("o", "lse", "d_o_parts", "d_lse_parts"), *runs.values()):
        check(name, ours, rounded, exact)


def test_parts_of_the_keys_merge_into_the_whole(device):
    """Also their gradients: attention to all keys, and to three parts of them that are merged."""
    q, k, v = random(2, 9, 4, 32, seed=3), random(2, 40, 2, 32, seed=4), random(2, 40, 2, 32, seed=5)

    def in_parts(q, k, v):
        parts = [
            tessera.attention(q, k[:, at], v[:, at], return_lse=True)
            for at in (slice(0, 7), slice(7, 8), slice(8, 40))
        ]
        return tessera.combine(
            torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts]), return_lse=True
        )

    runs = []
    for attend, dtype in ((in_parts, q.dtype), (reference.attention, q.dtype), (reference.attention, torch.float64)):
        leaves = at(dtype, q, k, v)
        o, lse = attend(*leaves)
        runs.append([o, lse, *torch.autograd.grad(o.sin().sum() + lse.cos().sum(), leaves)])
    for name, *values in zip(("o", "lse", "d_q", "d_k", "d_v"), *runs):
        check(name, *values)


def test_parts_that_saw_nothing_do_not_count(device):
    o_parts, lse_parts = (t.detach() for t in parts_of())
    o_parts[1, 0, 2, 3] = math.nan
    lse_parts[1, 0, 3, 2] = -math.inf
    lse_parts[:, 1, 0, 0] = -math.inf
    leaves = o_parts.requires_grad_(), lse_parts.requires_grad_()
    o, lse = tessera.combine(*leaves, return_lse=True)
    assert torch.all(o[1, 0, 0] == 0) and lse[1, 0, 0] == -math.inf
    expected, _ = plain(o_parts[::2], lse_parts[::2])
    torch.testing.assert_close(o[0, 2, 3], expected[0, 2, 3])
    d_o_parts, d_lse_parts = torch.autograd.grad(o.sum() + lse[torch.isfinite(lse)].sum(), leaves)
    assert torch.all(d_o_parts[1, 0, 2, 3] == 0) and d_lse_parts[1, 0, 3, 2] == 0
    assert not d_o_parts.isnan().any() and not d_lse_parts.isnan().any()


def test_strides(device):
    o_parts, lse_parts = (t.detach() for t in parts_of())
    expected = tessera.combine(o_parts, lse_parts)
    columns_first = o_parts.transpose(-1, -2).contiguous().transpose(-1, -2)
    parts_last = lse_parts.movedim(0, -1).contiguous().movedim(-1, 0)
    assert torch.equal(tessera.combine(columns_first, parts_last), expected)
    every_other = torch.stack((o_parts, torch.full_like(o_parts, math.nan)), 2)[:, :, 0]
    assert torch.equal(tessera.combine(every_other, lse_parts), expected)


def test_on_a_stream(device):
    """The work goes where PyTorch's own would."""
    if device == "cpu":
        pytest.skip("the CPU has no streams")
    o_parts, lse_parts = (t.detach() for t in parts_of())
    expected = tessera.combine(o_parts, lse_parts)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = o_parts * 1.0
        merged = tessera.combine(late, lse_parts)
    stream.synchronize()
    assert torch.equal(merged, expected)


def test_opcheck(device):
    torch.library.opcheck(torch.ops.tessera.combine.default, (*parts_of(), None))


def test_compile_whole_graph(device):
    inputs = parts_of()
    compiled = torch.compile(
        lambda *parts: tessera.torch.combine(*parts, return_lse=True)[0].sin().sum(), fullgraph=True
    )
    gradients = torch.autograd.grad(compiled(*inputs), inputs)
    expected = torch.autograd.grad(tessera.combine(*inputs).sin().sum(), inputs)
    for ours, eager in zip(gradients, expected):
        torch.testing.assert_close(ours, eager)


def test_functional_transforms(device):
    stacks = [torch.stack((t, t + 1)).detach() for t in parts_of()]
    gradient = torch.func.grad(program, argnums=(0, 1))
    mapped = torch.func.vmap(gradient)(*stacks)
    in_turn = [torch.stack(both) for both in zip(*(gradient(*entry) for entry in zip(*stacks)))]
    for ours, expected in zip(mapped, in_turn):
        torch.testing.assert_close(ours, expected)
    shared = torch.func.vmap(tessera.combine, in_dims=(0, None))(stacks[0], stacks[1][0])
    assert torch.equal(shared, torch.stack([tessera.combine(entry, stacks[1][0]) for entry in stacks[0]]))


def test_wrong_input_is_named(device):
    o_parts, lse_parts = (t.detach() for t in parts_of())
    with pytest.raises(ValueError, match="^lse_parts: shape"):
        tessera.combine(o_parts, lse_parts[:, :1])
    with pytest.raises(ValueError, match=r"^lse_parts: dtype float16, accepted float32"):
        tessera.combine(o_parts, lse_parts.half())
    with pytest.raises(ValueError, match="^o_parts: dtype float64"):
        tessera.combine(o_parts.double(), lse_parts)
    with pytest.raises(ValueError, match="^lse_parts: numpy.ndarray, accepted a PyTorch tensor$"):
        tessera.combine(o_parts, lse_parts.cpu().numpy())
    if device == "cuda":
        with pytest.raises(ValueError, match="^lse_parts: on device cpu, o_parts is on cuda:0"):
            tessera.combine(o_parts, lse_parts.cpu())


def test_weights_come_from_what_the_parts_know(device):
    """LSEs of 8e6 are multiples of 0.5, and so is the rounded LSE of the result. Lower digits make them exact."""
    high = torch.tensor([8e6, 8e6 + 0.5, 8e6 - 1.0, -math.inf])[:, None, None, None].expand(4, 1, 2, 5).contiguous()
    low = torch.tensor([0.2, -0.1, 0.24, 0.0])[:, None, None, None].expand_as(high).contiguous()
    o_parts = random(4, 1, 5, 2, 8, seed=6)
    d_o = random(1, 5, 2, 8, seed=7, requires_grad=False)
    for lower in (None, low):
        lse_parts = high.clone().requires_grad_()
        exact = (high.double() + (0 if lower is None else lower.double())).requires_grad_()
        leaf = o_parts.detach().double().requires_grad_()
        weights = exact.softmax(0).transpose(-1, -2)[..., None]
        expected = (weights * leaf).sum(0)
        o, lse = tessera.combine(o_parts, lse_parts, lower, return_lse=True)
        torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)
        *same, rest = tessera.combine(o_parts, lse_parts, lower, return_lse_low=True)
        assert torch.equal(same[0], o) and torch.equal(same[1], lse)
        torch.testing.assert_close(lse.double() + rest.double(), exact.logsumexp(0), rtol=0, atol=1e-6)
        ours = torch.autograd.grad((o * d_o).sum() + lse.sum(), (o_parts, lse_parts), retain_graph=True)
        theirs = torch.autograd.grad((expected * d_o).sum() + exact.logsumexp(0).sum(), (leaf, exact))
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_without_data_lower_digits_are_checked_too():
    o_parts, lse_parts = (torch.empty(shape, device="meta") for shape in ((3, 1, 5, 2, 8), (3, 1, 2, 5)))
    o, lse, low = tessera.combine(o_parts, lse_parts, lse_parts, return_lse_low=True)
    assert lse.shape == low.shape == (1, 2, 5)
    with pytest.raises(tessera.Error, match="^lse_low_parts: "):
        tessera.combine(o_parts, lse_parts, lse_parts[:2])
