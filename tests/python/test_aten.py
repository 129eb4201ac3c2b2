"""PyTorch's operators for CUDA, computed by Tessera, one by one: outputs as defined by its shape functions, and
gradients.

On the CPU, where PyTorch lacks kernels for them, a library of the test registers the same functions.
"""

import inspect

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import tessera.torch  # noqa: E402
from tessera.torch import aten, sdpa  # noqa: E402
from torch_reference import at, attention, check, random  # noqa: E402
from torch_registry import AVAILABLE, calls, on_tessera, restored  # noqa: E402, F401

if not AVAILABLE:
    pytest.skip("this release of PyTorch has no torch.library.get_kernel", allow_module_level=True)


@pytest.fixture
def operators(device):
    if device == "cuda":
        on_tessera()
        yield torch.ops.aten
        return
    library = torch.library.Library("aten", "IMPL")
    for name, ours in sdpa._KERNELS["CUDA"].items():
        library.impl(name, ours, "CPU", allow_override=True)
    yield torch.ops.aten
    library._destroy()


def leaves_in(layout, dtype, seqlen_q=33, seqlen_k=45, head_dim=32, value_dim=32, heads=4):
    """q, k, v [B, H, S, D], contiguous, or in the memory order of [B, S, H, D]."""
    shapes = ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, value_dim))
    if layout == "heads":
        return [random(2, heads, s, d, dtype=dtype, seed=i) for i, (s, d) in enumerate(shapes)]
    return [
        random(2, s, heads, d, dtype=dtype, seed=i).detach().transpose(1, 2).requires_grad_()
        for i, (s, d) in enumerate(shapes)
    ]


def described(outputs):
    """Shape, dtype and layout. PyTorch's shape functions put what dropout alone needs nowhere ("meta")."""
    return [
        (t.shape, t.dtype, t.stride() if t.numel() else None) if isinstance(t, torch.Tensor) else t for t in outputs
    ]


def reference(leaves, bias=None, **options):
    q, k, v = (t.transpose(1, 2) for t in leaves)
    o, lse = attention(q, k, v, bias=bias, **options)
    return o.transpose(1, 2), lse


@pytest.mark.parametrize("layout", ["heads", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name, causal, extra, value_dim",
    [
        ("flash", {}, (), 32),
        ("flash", {"causal": True}, (), 32),
        ("efficient", {"causal": True, "top_left": True}, (None, True), 48),
        ("cudnn", {"causal": True, "top_left": True}, (None, True), 48),
        ("efficient", {}, (None, True), 32),
        ("cudnn", {}, (None, True), 32),
    ],
    ids=str,
)
def test_dense(device, operators, calls, name, causal, extra, value_dim, dtype, layout):
    if device == "cuda" and name == "cudnn" and dtype == torch.float32:
        pytest.skip("cuDNN's operator is for float16 and bfloat16")
    operator = getattr(operators, f"_scaled_dot_product_{name}_attention")
    leaves = leaves_in(layout, dtype, value_dim=value_dim)
    arguments = (*extra, 0.0, bool(causal))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        expected = described(operator(*(mode.from_tensor(t) for t in leaves), *arguments, scale=0.2))
    outputs = operator(*leaves, *arguments, scale=0.2)
    assert described(outputs) == expected
    o, lse = outputs[:2]
    d_o = random(*o.shape, seed=4, requires_grad=False)
    gradients = torch.autograd.grad(o, leaves, d_o.to(dtype))
    assert calls == {"forward": 1, "backward": 1}

    results = []
    for precision in (dtype, torch.float64):
        copies = at(precision, *leaves)
        o_reference, lse_reference = reference(copies, scale=0.2, **causal)
        d_reference = torch.autograd.grad(o_reference, copies, d_o.to(dtype).to(precision))
        results.append([o_reference, lse_reference, *d_reference])
    seqlen_q = leaves[0].shape[2]
    lse = lse.squeeze(-1) if name == "cudnn" else lse[..., :seqlen_q]
    for part, ours, plain, exact in zip(("o", "lse", "d_q", "d_k", "d_v"), (o, lse, *gradients), *results):
        check(part, ours, plain, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 33, 45), (1, 4, 33, 45), (2, 1, 1, 45)], ids=str)
def test_gradient_of_a_bias(device, operators, calls, dtype, shape):
    leaves = leaves_in("heads", dtype)
    bias = random(*shape, dtype=dtype, seed=5)
    d_o = random(2, 4, 33, 32, seed=4, requires_grad=False)

    def padded(bias):
        """Expanded, with aligned rows, as F.scaled_dot_product_attention passes it."""
        return torch.nn.functional.pad(bias, (0, 3))[..., :45].expand(2, 4, 33, 45)

    o = operators._scaled_dot_product_efficient_attention(*leaves, padded(bias), True)[0]
    ours = [o, *torch.autograd.grad(o, [*leaves, bias], d_o.to(dtype))]
    assert calls == {"forward": 1, "backward": 1}
    results = []
    for precision in (dtype, torch.float64):
        *copies, bias_copy = at(precision, *leaves, bias)
        o_reference, _ = reference(copies, bias=bias_copy.expand(2, 4, 33, 45))
        d_reference = torch.autograd.grad(o_reference, [*copies, bias_copy], d_o.to(dtype).to(precision))
        results.append([o_reference, *d_reference])
    for part, a, b, c in zip(("o", "d_q", "d_k", "d_v", "d_bias"), ours, *results):
        check(part, a, b, c)


def test_layout_of_a_bias_gradient(device, operators):
    leaves = leaves_in("heads", torch.float32)
    bias = random(2, 4, 33, 48, seed=5, requires_grad=False)[..., :45]
    o, lse, seed, offset = operators._scaled_dot_product_efficient_attention(*leaves, bias, True)
    arguments = [torch.ones_like(o), *leaves, bias, o, lse, seed, offset]
    backward = operators._scaled_dot_product_efficient_attention_backward
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        expected = described(backward(*(mode.from_tensor(t) for t in arguments), 0.0, [True] * 4))
    with torch.no_grad():
        assert described(backward(*arguments, 0.0, [True] * 4)) == expected
        assert backward(*arguments, 0.0, [True, True, True, False])[3] is None


def test_the_lse_s_padding(device, operators):
    leaves = [t.detach() for t in leaves_in("heads", torch.float32)]
    lse = operators._scaled_dot_product_efficient_attention(*leaves, None, True)[1]
    assert lse.shape == (2, 4, 64) and torch.isinf(lse[..., 33:]).all() and torch.isfinite(lse[..., :33]).all()
    assert operators._scaled_dot_product_efficient_attention(*leaves, None, False)[1].shape == (2, 4, 0)


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn", "rows"])
def test_dropout(device, operators, calls, name):
    """By PyTorch's generator; the backward pass drops what the forward pass dropped, by the state that it returned."""
    if device == "cuda" and name == "cudnn":
        pytest.skip("cuDNN's operator is for float16 and bfloat16")
    leaves = leaves_in("rows", torch.float32)
    transposed = [t.transpose(1, 2) for t in leaves]  # views, through which gradients come
    own = {"flash": "_scaled_dot_product_flash_attention", "rows": "_flash_attention_forward"}
    operator = getattr(operators, own.get(name, f"_scaled_dot_product_{name}_attention"))

    def call():
        if name == "rows":
            outputs = operator(*transposed, None, None, 33, 45, 0.3, False, False)
            return outputs[0].transpose(1, 2), outputs
        outputs = operator(*leaves, *(() if name == "flash" else (None, True)), 0.3)
        return outputs[0], outputs

    torch.manual_seed(3)
    runs = [call() for _ in range(2)]
    torch.manual_seed(3)
    runs.append(call())
    first, second, again = (o for o, _ in runs)
    assert torch.equal(first, again) and not torch.equal(first, second)
    torch.manual_seed(3)
    expected = tessera.torch.attention(*transposed, dropout_p=0.3).transpose(1, 2)
    assert torch.equal(first, expected)
    d_o = random(*first.shape, seed=4, requires_grad=False)
    # ATen's operators carry an LSE alone, and so its rounding; `attention` saves what that leaves out, too.
    for ours, theirs in zip(torch.autograd.grad(first, leaves, d_o), torch.autograd.grad(expected, leaves, d_o)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_whose_forward_pass_it_was(operators):
    """Decided by the LSE and, if a hook on saved tensors copied it, by a state of dropout on the host."""
    leaves = [t.detach() for t in leaves_in("heads", torch.float32)]
    o, lse, seed, offset = operators._scaled_dot_product_efficient_attention(*leaves, None, True, 0.3)
    assert aten.is_ours(lse) and aten.is_ours(lse.detach()) and not aten.is_ours(lse.clone())
    assert aten.is_ours(lse.clone(), offset) and not aten.is_ours(lse.clone(), torch.tensor(8, device="cpu"))
    assert not aten.is_ours(lse.clone(), torch.tensor(8, device="meta")), "nothing waits for a GPU to read one"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows(device, operators, calls, packed, dtype):
    """_flash_attention_forward on packed sequences, and on [B, S, H, D], beside Tessera's own interface."""
    shape = (30, 4, 32) if packed else (2, 15, 4, 32)
    q, k, v = leaves = [random(*shape, dtype=dtype, seed=s) for s in (1, 2, 3)]
    cu = torch.tensor([0, 7, 30], dtype=torch.int32) if packed else None
    arguments = (cu, cu, 23 if packed else 15, 23 if packed else 15, 0.0, True, False)
    window = {"window_size_left": 5, "window_size_right": 0}
    forward = operators._flash_attention_forward
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(t) for t in (*leaves, *(() if cu is None else (cu, cu)))]
        expected = described(forward(*fake, *arguments[len(fake) - 3 :], **window))
    outputs = forward(*leaves, *arguments, **window)
    assert described(outputs) == expected
    o, lse = outputs[:2]
    gradients = torch.autograd.grad(o.sin().sum(), leaves)
    assert calls == {"forward": 1, "backward": 1}
    own, own_lse = tessera.torch.attention(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, window=(5, 0), return_lse=True
    )
    # Tessera's own call saves the LSE in two floats, and its first is rounded once.
    assert torch.equal(o, own)
    torch.testing.assert_close(lse, own_lse, rtol=2**-22, atol=2**-24)
    for ours, first in zip(gradients, torch.autograd.grad(own.sin().sum(), leaves)):
        torch.testing.assert_close(ours, first)


def test_into_an_output(device, operators, calls):
    if not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
        pytest.skip("this release of PyTorch has no such operator")
    leaves = [random(2, 15, 4, 32, seed=s, requires_grad=False) for s in (1, 2, 3)]
    out = torch.empty(2, 4, 15, 32).transpose(1, 2)
    lse = operators._flash_attention_forward_no_dropout_inplace(
        out, *leaves, None, None, 15, 15, 0.0, True, False
    )  # fmt: skip
    assert calls["forward"] == 1
    own, own_lse = tessera.torch.attention(*leaves, causal=True, return_lse=True)
    assert torch.equal(out, own) and torch.equal(lse, own_lse)


def test_arguments_are_those_of_the_operators():
    """Names may differ, as they do between releases; places and keywords must not."""
    for replaced in sdpa._KERNELS.values():
        for name, ours in replaced.items():
            if not hasattr(torch.ops.aten, name):
                continue
            schema = getattr(torch.ops.aten, name).default._schema
            signature = inspect.signature(ours)
            positional = [a for a in schema.arguments if not a.kwarg_only]
            keywords = {a.name: None for a in schema.arguments if a.kwarg_only}
            signature.bind(*positional, **keywords)
