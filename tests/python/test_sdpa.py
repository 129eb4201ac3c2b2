"""PyTorch's own registry: unchanged programs on Tessera, and back."""

import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

import torch.nn.functional as F  # noqa: E402

import tessera.torch  # noqa: E402
from torch_reference import at, check, random  # noqa: E402
from torch_registry import AVAILABLE, calls, on_tessera, registry, restored  # noqa: E402, F401

if not AVAILABLE:
    pytest.skip("this release of PyTorch has no torch.library.get_kernel", allow_module_level=True)
REGISTRY = hasattr(registry, "restore_flash_attention_impl")


def heads(dtype=torch.float32, batch=2, seqlen_q=33, seqlen_k=33, num=4, head_dim=32):
    return (
        random(batch, num, seqlen_q, head_dim, dtype=dtype, seed=1),
        random(batch, num, seqlen_k, head_dim, dtype=dtype, seed=2),
        random(batch, num, seqlen_k, head_dim, dtype=dtype, seed=3),
    )


def run(leaves, **options):
    o = F.scaled_dot_product_attention(*leaves, **options)
    d_o = random(*o.shape, seed=4, requires_grad=False).to(o.dtype)
    return [o, *torch.autograd.grad(o, leaves, d_o)]


def compare(leaves, calls, **options):
    def in_float64(value):
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    exact = run(at(torch.float64, *leaves), **{n: in_float64(value) for n, value in options.items()})
    own = run(leaves, **options)
    on_tessera()
    ours = run(leaves, **options)
    assert calls == {"forward": 1, "backward": 1} and tessera.torch.fallback_reasons() == {}
    for name, a, b, c in zip(("o", "d_q", "d_k", "d_v"), ours, own, exact):
        check(name, a, b, c)


def same(ours, expected):
    """The same bits on the CPU; a GPU's gradients may add up in another order."""
    if ours.is_cuda:
        torch.testing.assert_close(ours, expected)
    else:
        assert torch.equal(ours, expected)


@pytest.mark.skipif(not REGISTRY, reason="this release of PyTorch has no registry of implementations")
def test_importing_activates_nothing():
    program = "import torch.nn.attention as a, tessera.torch; assert a.current_flash_attention_impl() is None"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert "Tessera" in registry.list_flash_attention_impls()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_sdpa(device, calls, dtype, options):
    compare(heads(dtype), calls, **options)


@pytest.mark.parametrize("lengths", [(7, 33), (33, 7), (2, 40)], ids=str)
def test_causal_is_top_left(device, calls, lengths):
    compare(heads(seqlen_q=lengths[0], seqlen_k=lengths[1]), calls, is_causal=True)


@pytest.mark.parametrize("shape", [(33, 33), (2, 1, 33, 33), (1, 4, 33, 33), (2, 1, 1, 33)], ids=str)
@pytest.mark.parametrize("kind", ["float", "bool", "infinite"])
def test_masks(device, calls, shape, kind):
    scores = random(*shape, seed=5, requires_grad=False)
    if kind == "bool":
        scores = scores > -1
        scores[..., 0] = True
    elif kind == "infinite":
        scores = torch.where(scores > 1, -torch.inf, scores)
        scores[..., 0] = 0
    compare(heads(), calls, attn_mask=scores)


def test_a_mask_of_one_column(calls):
    compare(heads(), calls, attn_mask=random(33, 1, seed=5, requires_grad=False))


def test_a_row_without_keys(device, calls):
    mask = torch.ones(33, 33, dtype=torch.bool)
    mask[3] = False
    leaves = heads()
    on_tessera()
    o, *gradients = run(leaves, attn_mask=mask)
    assert calls["forward"] == 1 and torch.all(o[:, :, 3] == 0)
    assert not any(t.isnan().any() for t in gradients) and torch.all(gradients[0][:, :, 3] == 0)


def test_strides_and_zero_sizes(device, calls):
    q, k, v = heads()
    by_rows = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    columns_first = [t.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for t in (q, k, v)]
    on_tessera()
    expected = run((q, k, v), is_causal=True)
    for ours, first in zip(run(by_rows, is_causal=True), expected):
        same(ours, first)
    for ours, first in zip(run(columns_first, is_causal=True), expected):
        torch.testing.assert_close(ours, first)
    assert F.scaled_dot_product_attention(q[:0], k[:0], v[:0]).shape == (0, 4, 33, 32)


def activate_by_registry():
    registry.activate_flash_attention_impl("Tessera")
    assert registry.current_flash_attention_impl() == "Tessera"


def restore_by_registry():
    registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None


@pytest.mark.parametrize("by_registry", [False, True])
def test_restore(device, calls, by_registry):
    if by_registry and not REGISTRY:
        pytest.skip("this release of PyTorch has no registry of implementations")
    activate = activate_by_registry if by_registry else tessera.torch.activate
    restore = restore_by_registry if by_registry else tessera.torch.restore
    leaves = heads()
    own = run(leaves, is_causal=True)
    for _ in range(2):
        activate()
        activate()  # the same as once
        run(leaves, is_causal=True)
        restore()
    before = dict(calls)
    for ours, expected in zip(run(leaves, is_causal=True), own):
        same(ours, expected)
    assert calls == before == {"forward": 2, "backward": 2}


def test_without_a_registry(calls, monkeypatch):
    for name in ("register_flash_attention_impl", "restore_flash_attention_impl"):
        monkeypatch.delattr(registry, name, raising=False)
    leaves = heads()
    own = run(leaves)
    assert not tessera.torch.register()
    tessera.torch.activate()
    run(leaves)
    tessera.torch.restore()
    assert calls == {"forward": 1, "backward": 1}
    for ours, expected in zip(run(leaves), own):
        same(ours, expected)
    assert calls == {"forward": 1, "backward": 1}


def test_what_is_refused_falls_through(calls, caplog):
    doubles = at(torch.float64, *heads())
    wide = heads(head_dim=520)
    own = [run(doubles), run(wide, is_causal=True)]
    on_tessera()
    with caplog.at_level("INFO", logger="tessera.torch"):
        ours = [run(doubles), run(wide, is_causal=True)]
    for a, b in zip(sum(ours, []), sum(own, [])):
        assert torch.equal(a, b)
    reasons = tessera.torch.fallback_reasons(reset=True)
    assert sum(reasons.values()) == 4 and any("float64" in r for r in reasons) and any("520" in r for r in reasons)
    assert len(caplog.records) == 4 and tessera.torch.fallback_reasons() == {}
    assert calls == {"forward": 0, "backward": 0}


def test_dropout_stays_pytorch_s(calls):
    leaves = heads()
    torch.manual_seed(3)
    own = run(leaves, dropout_p=0.3)
    on_tessera()
    torch.manual_seed(3)
    for ours, expected in zip(run(leaves, dropout_p=0.3), own):
        assert torch.equal(ours, expected)


def test_under_autocast(device, calls):
    leaves = heads()
    on_tessera()
    with torch.autocast(device, torch.bfloat16):
        o = F.scaled_dot_product_attention(*leaves, is_causal=True)
    gradients = torch.autograd.grad(o.float().sum(), leaves)
    assert o.dtype == torch.bfloat16 and gradients[0].dtype == torch.float32
    assert calls == {"forward": 1, "backward": 1}


def test_under_compile(device, calls):
    leaves = heads()
    mask = random(33, 33, seed=6, requires_grad=False)
    on_tessera()

    def program(q, k, v, mask):
        return F.scaled_dot_product_attention(q * 2, k, v, attn_mask=mask).sin()

    expected = torch.autograd.grad(program(*leaves, mask).sum(), leaves)
    before = dict(calls)
    compiled = torch.compile(program, fullgraph=True)
    gradients = torch.autograd.grad(compiled(*leaves, mask).sum(), leaves)
    assert calls == {name: count + 1 for name, count in before.items()}
    for ours, first in zip(gradients, expected):
        torch.testing.assert_close(ours, first)


def test_varlen_attn(device, calls):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    takes_window = "window_size" in inspect.signature(varlen.varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if takes_window else {"is_causal": True}
    cu = torch.tensor([0, 7, 30], dtype=torch.int32)
    q, k, v = (random(30, 4, 32, seed=s) for s in (1, 2, 3))
    on_tessera()
    o = varlen.varlen_attn(q, k, v, cu, cu, 23, 23, **causal)
    gradients = torch.autograd.grad(o.sin().sum(), (q, k, v))
    assert calls == {"forward": 1, "backward": 1} and tessera.torch.fallback_reasons() == {}
    expected = tessera.torch.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    assert torch.equal(o, expected)
    for ours, first in zip(gradients, torch.autograd.grad(expected.sin().sum(), (q, k, v))):
        # PyTorch's operator carries an LSE alone, and so its rounding.
        torch.testing.assert_close(ours, first, rtol=1e-5, atol=1e-5)
