"""PyTorch's own registry: unchanged programs on Tessera, and back."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

import torch.nn.functional as F  # noqa: E402

import tessera.torch  # noqa: E402
from torch_reference import at, check, random  # noqa: E402
from torch_registry import calls, on_tessera, registry, restored  # noqa: E402, F401

if not hasattr(registry, "activate_flash_attention_impl"):
    pytest.skip("this release of PyTorch has no registry of implementations", allow_module_level=True)


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


def test_importing_activates_nothing():
    program = "import torch.nn.attention as a, tessera.torch; assert a.current_flash_attention_impl() is None"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert "Tessera" in registry.list_flash_attention_impls()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_sdpa(calls, dtype, options):
    compare(heads(dtype), calls, **options)


@pytest.mark.parametrize("lengths", [(7, 33), (33, 7), (2, 40)], ids=str)
def test_causal_is_top_left(calls, lengths):
    compare(heads(seqlen_q=lengths[0], seqlen_k=lengths[1]), calls, is_causal=True)


@pytest.mark.parametrize("shape", [(33, 33), (2, 1, 33, 33), (1, 4, 33, 33), (2, 1, 1, 33), (33, 1)], ids=str)
@pytest.mark.parametrize("kind", ["float", "bool", "infinite"])
def test_masks(calls, shape, kind):
    scores = random(*shape, seed=5, requires_grad=False)
    if kind == "bool":
        scores = scores > -1
        scores[..., 0] = True
    elif kind == "infinite":
        scores = torch.where(scores > 1, -torch.inf, scores)
        scores[..., 0] = 0
    compare(heads(), calls, attn_mask=scores)


def test_a_row_without_keys(calls):
    mask = torch.ones(33, 33, dtype=torch.bool)
    mask[3] = False
    leaves = heads()
    on_tessera()
    o, *gradients = run(leaves, attn_mask=mask)
    assert calls["forward"] == 1 and torch.all(o[:, :, 3] == 0)
    assert not any(t.isnan().any() for t in gradients) and torch.all(gradients[0][:, :, 3] == 0)


def test_strides_and_zero_sizes(calls):
    q, k, v = heads()
    by_rows = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    columns_first = [t.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for t in (q, k, v)]
    on_tessera()
    expected = run((q, k, v), is_causal=True)
    for ours, first in zip(run(by_rows, is_causal=True), expected):
        assert torch.equal(ours, first)
    for ours, first in zip(run(columns_first, is_causal=True), expected):
        torch.testing.assert_close(ours, first)
    assert F.scaled_dot_product_attention(q[:0], k[:0], v[:0]).shape == (0, 4, 33, 32)


def test_restore(calls):
    leaves = heads()
    own = run(leaves, is_causal=True)
    for _ in range(2):
        on_tessera()
        assert registry.current_flash_attention_impl() == "Tessera"
        run(leaves, is_causal=True)
        registry.restore_flash_attention_impl()
        assert registry.current_flash_attention_impl() is None
    before = dict(calls)
    for ours, expected in zip(run(leaves, is_causal=True), own):
        assert torch.equal(ours, expected)
    assert calls == before == {"forward": 2, "backward": 2}


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


def test_under_autocast(calls):
    leaves = heads()
    on_tessera()
    with torch.autocast("cpu", torch.bfloat16):
        o = F.scaled_dot_product_attention(*leaves, is_causal=True)
    gradients = torch.autograd.grad(o.float().sum(), leaves)
    assert o.dtype == torch.bfloat16 and gradients[0].dtype == torch.float32
    assert calls == {"forward": 1, "backward": 1}


def test_under_compile(calls):
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


def test_varlen_attn():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    cu = torch.tensor([0, 7, 30], dtype=torch.int32)
    q, k, v = (random(30, 4, 32, seed=s) for s in (1, 2, 3))
    on_tessera()
    o = varlen.varlen_attn(q, k, v, cu, cu, 23, 23, window_size=(-1, 0))
    gradients = torch.autograd.grad(o.sin().sum(), (q, k, v))
    expected = tessera.torch.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    assert torch.equal(o, expected)
    for ours, first in zip(gradients, torch.autograd.grad(expected.sin().sum(), (q, k, v))):
        assert torch.equal(ours, first)
