"""The flash_attn interface: its signatures, and its meaning where it differs from Tessera's own."""

import inspect
import math
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

_DROPIN = pathlib.Path(__file__).resolve().parents[2] / "python" / "flash_attn_dropin"
sys.path.insert(0, str(_DROPIN))
try:
    import flash_attn
except ImportError as refusal:
    pytest.skip(str(refusal), allow_module_level=True)
finally:
    sys.path.remove(str(_DROPIN))
if pathlib.Path(flash_attn.__file__).parent.parent != _DROPIN and not hasattr(flash_attn, "_call"):
    pytest.skip("another flash_attn is installed", allow_module_level=True)

import tessera.torch  # noqa: E402
import torch_reference as reference  # noqa: E402
from flash_attn import _call, _extent, _kvcache, bert_padding  # noqa: E402
from flash_attn import flash_attn_interface as interface  # noqa: E402
from flash_attn.layers.rotary import apply_rotary_emb  # noqa: E402
from tessera.compare import float64  # noqa: E402
from torch_reference import at, check, random  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")

T = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, " \
    "deterministic=False, return_attn_probs=False"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, {T}, *, s_aux=None)",
    "flash_attn_kvpacked_func": f"(q, kv, {T})",
    "flash_attn_qkvpacked_func": f"(qkv, {T})",
    "flash_attn_varlen_func": f"(q, k, v, {LENGTHS}, {T}, block_table=None, *, s_aux=None)",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {LENGTHS}, {T})",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {T})",
    "flash_attn_with_kvcache": "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert getattr(interface, name) is getattr(flash_attn, name)
    signature = inspect.signature(getattr(flash_attn, name))
    bare = signature.replace(parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()])
    assert str(bare) == SIGNATURES[name]


def dense(dtype=torch.float32, seqlen_q=21, seqlen_k=30, head_dim=20):
    return (
        random(2, seqlen_q, 4, head_dim, dtype=dtype, seed=1),
        random(2, seqlen_k, 2, head_dim, dtype=dtype, seed=2),
        random(2, seqlen_k, 2, head_dim, dtype=dtype, seed=3),
    )


OPTIONS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (5, 2), "softmax_scale": 0.3}, {"window": (5, 2), "scale": 0.3}),
    ({"window_size": (6, 6), "causal": True, "softcap": 4.0}, {"window": (6, 6), "causal": True, "softcap": 4.0}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options, plain_options", OPTIONS, ids=lambda o: str(o))
def test_func(dtype, options, plain_options):
    leaves = dense(dtype)
    slopes = random(4, seed=4, requires_grad=False).abs()
    runs = []
    for name, leaf_dtype in (("ours", dtype), ("plain", dtype), ("exact", torch.float64)):
        copies = at(leaf_dtype, *leaves)
        if name == "ours":
            out, lse, dmask = flash_attn.flash_attn_func(
                *copies, **options, alibi_slopes=slopes, return_attn_probs=True
            )
            assert dmask.numel() == 0 and lse.dtype == torch.float32
        else:
            out, lse = reference.attention(*copies, **plain_options, alibi_slopes=slopes)
        d_out = random(*out.shape, seed=5, requires_grad=False).to(out.dtype)
        runs.append([out, lse, *torch.autograd.grad(out, copies, d_out)])
    for name, ours, plain, exact in zip(("out", "lse", "dq", "dk", "dv"), *runs):
        check(name, ours, plain, exact)


def test_sink():
    leaves, sink = dense(), random(4, seed=6)
    out = flash_attn.flash_attn_func(*leaves, causal=True, s_aux=sink)
    assert torch.equal(out, tessera.torch.attention(*leaves, causal=True, sink=sink))
    assert torch.autograd.grad(out.sum(), sink)[0].abs().sum() > 0


def test_rows_that_see_nothing():
    q, k, v = dense(seqlen_q=9, seqlen_k=4)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.all(lse[:, :, :5] == math.inf) and torch.isfinite(lse[:, :, 5:]).all()
    assert torch.all(out[:, :5] == 0)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert not any(g.isnan().any() for g in gradients) and torch.all(gradients[0][:, :5] == 0)


def test_packed_forms_agree():
    qkv = random(2, 17, 3, 4, 16, seed=1)
    q, k, v = qkv.unbind(2)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), expected)
    cu = torch.tensor([0, 17, 34], dtype=torch.int32)
    rows, longest = qkv.flatten(0, 1), torch.tensor(17)  # lengths may arrive as 0-d tensors
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(rows, cu, longest, causal=True)
    torch.testing.assert_close(packed.unflatten(0, (2, 17)), expected)
    q, k, v = rows.unbind(1)
    forms = (
        flash_attn.flash_attn_varlen_kvpacked_func(q, rows[:, 1:], cu, cu, longest, longest, causal=True),
        flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 17, 17, causal=True),
    )
    assert all(torch.equal(form, packed) for form in forms)


def test_varlen_block_table():
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 3, 8], [0, 20, 45]))
    q, k, v = (random(n, h, 16, seed=n, requires_grad=False) for n, h in ((8, 4), (45, 2), (46, 2)))
    v = v[:45]
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    pages_k, pages_v = (torch.full((4, 16, 2, 16), math.nan) for _ in range(2))
    for b, (first, last) in enumerate(((0, 20), (20, 45))):
        for j in range(last - first):
            pages_k[table[b, j // 16], j % 16] = k[first + j]
            pages_v[table[b, j // 16], j % 16] = v[first + j]
    expected = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 25, causal=True)
    paged = flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 5, 25, causal=True, block_table=table)
    torch.testing.assert_close(paged, expected)


def test_alibi_slopes_of_each_sequence():
    leaves, slopes = dense(), random(2, 4, seed=4, requires_grad=False).abs()
    out = flash_attn.flash_attn_func(*leaves, causal=True, alibi_slopes=slopes)
    alone = []
    for b in range(2):
        sequence = [t[b : b + 1] for t in leaves]
        alone.append(flash_attn.flash_attn_func(*sequence, causal=True, alibi_slopes=slopes[b]))
    torch.testing.assert_close(out, torch.cat(alone))


@pytest.mark.parametrize("seqused", [False, True])
def test_leftpad_of_the_private_varlen_forward(seqused, monkeypatch):
    """The same as if the padding had not been there; what it holds never counts."""
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 3, 8], [0, 20, 45]))
    q, k, v = (random(n, h, 16, seed=s, requires_grad=False) for s, (n, h) in enumerate(((8, 4), (45, 2), (45, 2))))
    first, last = [6, 0], [18, 40] if seqused else [20, 45]
    k[:6] = v[:6] = math.nan
    values, attention = [], _call.attention
    monkeypatch.setattr(_call, "attention", lambda q, k, v, **b: values.append(v) or attention(q, k, v, **b))
    slopes = random(4, seed=4, requires_grad=False).abs()
    options = dict(dropout_p=0.0, softmax_scale=None, causal=True, window_size_left=7, alibi_slopes=slopes)
    out, lse, _, _ = interface._flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, 5, 25, leftpad_k=torch.tensor(first, dtype=torch.int32),
        seqused_k=torch.tensor([18, 20], dtype=torch.int32) if seqused else None, **options,
    )  # fmt: skip
    kept = [torch.cat([t[6 : last[0]], t[20 : last[1]]]) for t in (k, v)]
    cu_kept = torch.tensor([0, last[0] - 6, last[0] - 6 + last[1] - 20], dtype=torch.int32)
    expected, expected_lse, _, _ = interface._flash_attn_varlen_forward(q, *kept, cu_q, cu_kept, 5, 25, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    # A copy, for 0 * NaN is NaN in a product of whole tiles; the caller's tensor stays as it was.
    assert not values[0][:6].any() and torch.equal(values[0][6:], v[6:]) and v[:6].isnan().all()
    with pytest.raises(ValueError, match="^leftpad_k: given together with block_table"):
        interface._flash_attn_varlen_forward(
            q, k, v, cu_q, cu_k, 5, 25, leftpad_k=cu_q[1:], block_table=cu_q[None], **options
        )


BLOCKS = [(20, 128), (64, 64), (80, 64), (128, 32), (160, 64), (256, 64), (300, 64)]


@pytest.mark.parametrize("head_dim, keys", BLOCKS)
def test_block_sizes(device, head_dim, keys, monkeypatch):
    """The forward kernel's table of flash_attn, with dropout; A100 and H100 alike, and the CPU as they."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    assert interface._get_block_size_n(device, head_dim, True, False) == keys
    assert interface._get_block_size_n("cuda", head_dim, True, True) == keys
    without = {64: 128, 128: 64}.get(head_dim, keys)
    assert interface._get_block_size_n("cuda", head_dim, False, True) == without
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 9))
    assert interface._get_block_size_n("cuda", 128, False, True) == 64
    assert interface._get_block_size_n("cuda", 128, False, False) == 32


def softmax_of(dmask, scores, block):
    """What flash_attn's tests make of S_dmask: a block's entries are exp(s - m), where m is the maximum over its own
    keys and all keys after it. Times exp(m - lse), they are the softmax. scores [B, H, Sq, Sk] are float64, -inf where
    unseen."""
    lse = torch.logsumexp(scores, -1, keepdim=True)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    parts = []
    for first in range(0, scores.shape[-1], block):
        maximum = scores[..., first:].amax(-1, keepdim=True)
        parts.append(dmask[..., first : first + block].abs().double() * torch.exp(maximum - lse))
    return torch.cat(parts, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (40, 3), "softcap": 4.0, "softmax_scale": 0.4},
        {"causal": True, "window_size": (9, 0), "alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.0])},
        {"softmax_scale": 20.0},  # the softmax of most entries is below the least number of float32
        {"packed": True, "causal": True, "alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.0])},
    ],
    ids=str,
)
def test_s_dmask_is_undone_block_by_block(device, dtype, options):
    p, head_dim, packed = 0.25, 72, options.get("packed", False)
    lengths_q, lengths_k = ([21, 13], [150, 70]) if packed else ([21, 21], [150, 150])
    q, k, v = dense(dtype, seqlen_q=21, seqlen_k=150, head_dim=head_dim)
    q, k, v = (t.detach() for t in (q, k, v))
    options = {n: x.to(device) if torch.is_tensor(x) else x for n, x in options.items() if n != "packed"}
    torch.manual_seed(7)
    if packed:
        cu_q, cu_k = (torch.tensor([0, n[0], sum(n)], dtype=torch.int32) for n in (lengths_q, lengths_k))
        rows = [
            torch.cat([t[b, : n[b]] for b in range(2)]) for t, n in zip((q, k, v), (lengths_q, lengths_k, lengths_k))
        ]
        out, _, dmask = flash_attn.flash_attn_varlen_func(
            *rows, cu_q, cu_k, 21, 150, p, return_attn_probs=True, **options
        )  # fmt: skip
        out = torch.nn.utils.rnn.pad_sequence(out.split(lengths_q), batch_first=True)
    else:
        out, _, dmask = flash_attn.flash_attn_func(q, k, v, p, return_attn_probs=True, **options)
    assert dmask.shape == (2, 4, 128, 256) and dmask.dtype == dtype  # rounded up to whole 128
    assert not dmask[:, :, 21:].any() and not dmask[..., 150:].any()
    dmask = dmask[:, :, :21, :150]

    theirs = {"softmax_scale": "scale", "window_size": "window"}
    plain = {theirs.get(name, name): value for name, value in options.items()}
    scores = torch.full((2, 4, 21, 150), -math.inf, dtype=torch.float64)
    for b, (rows, keys) in enumerate(zip(lengths_q, lengths_k)):
        one = q[b : b + 1, :rows].double(), k[b : b + 1, :keys].double()
        scores[b, :, :rows, :keys] = float64.scores(torch, *reference.heads_of(*one), **reference.terms(*one, **plain))[
            0
        ]
    assert not dmask[scores == -math.inf].any()
    expected = torch.softmax(scores, -1).nan_to_num()
    error = (softmax_of(dmask, scores, interface._get_block_size_n(device, head_dim, True, False)) - expected).abs()
    of_scores = torch.finfo(torch.float32).eps * scores[scores != -math.inf].abs().max()  # what they are rounded by
    assert error.max() < torch.finfo(dtype).eps + 4 * of_scores

    dropped = torch.signbit(dmask)[scores != -math.inf]
    assert abs(dropped.double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / dropped.numel())
    # The signs are what the call has dropped.
    kept = expected.masked_fill(torch.signbit(dmask), 0.0) / (1 - p)
    exact = torch.einsum("bhij,bjhd->bihd", kept, v.double().repeat_interleave(2, 2))
    assert (out.double() - exact).abs().max() < (2 * torch.finfo(dtype).eps + 8 * of_scores) * exact.abs().max()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("packed", [False, True])
def test_private_pair(dropout_p, packed):
    q, k, v = dense(seqlen_q=30)
    q, k, v = (t.detach() for t in (q, k, v))
    cu = torch.tensor([0, 30, 60], dtype=torch.int32)
    if packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        lengths = (cu, cu, 30, 30)
        forward, backward = interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward
        public = interface.flash_attn_varlen_func
    else:
        lengths = ()
        forward, backward = interface._flash_attn_forward, interface._flash_attn_backward
        public = interface.flash_attn_func
    torch.manual_seed(3)
    out, lse, _, state = forward(
        q, k, v, *lengths, dropout_p=dropout_p, softmax_scale=0.2, causal=True, window_size_left=-1,
        window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    d_out = random(*out.shape, seed=8, requires_grad=False)
    gradients = [torch.full_like(t, math.nan) for t in (q, k, v)]
    softmax_d = backward(
        d_out, q, k, v, out, lse, *gradients, *lengths, dropout_p, 0.2, True, -1, -1, 0.0, None, True, rng_state=state
    )  # fmt: skip
    torch.testing.assert_close(softmax_d, (d_out * out).sum(-1).transpose(-1, -2))
    leaves = at(torch.float32, *(t.requires_grad_() for t in (q, k, v)))
    torch.manual_seed(3)
    expected = public(*leaves, *lengths, dropout_p=dropout_p, softmax_scale=0.2, causal=True, deterministic=True)
    assert torch.equal(out, expected)
    # The pair carries an LSE alone, and so its rounding; the public function saves what that leaves out, too.
    for ours, first in zip(gradients, torch.autograd.grad(expected, leaves, d_out)):
        torch.testing.assert_close(ours, first, rtol=1e-5, atol=1e-5)


def test_num_splits_of_the_private_varlen_forward():
    q, cache = random(2, 4, 16, requires_grad=False), random(4, 16, 2, 16, requires_grad=False)
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 1, 2], [0, 20, 45]))
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    call = dict(max_seqlen_q=1, max_seqlen_k=25, dropout_p=0.0, softmax_scale=None, causal=True, block_table=table)
    expected = interface._flash_attn_varlen_forward(q, cache, cache, cu_q, cu_k, **call)[0]
    assert torch.equal(
        interface._flash_attn_varlen_forward(q, cache, cache, cu_q, cu_k, **call, num_splits=0)[0], expected
    )
    with pytest.raises(RuntimeError, match="^num_splits: 2, num_splits > 1 is not supported with block_table"):
        interface._flash_attn_varlen_forward(q, cache, cache, cu_q, cu_k, **call, num_splits=2)


@pytest.mark.parametrize("form", ["dense", "packed", "private"])
def test_second_derivatives_are_refused(form):
    q = random(9, 2, 16) if form == "packed" else random(1, 9, 2, 16)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    if form == "packed":
        out = flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 5, 5)
    else:
        out = flash_attn.flash_attn_func(q, q, q)
    y = (out * random(*q.shape, seed=1, requires_grad=False)).sum()
    if form == "private":  # like a custom backward pass called with create_graph=True
        gradient = torch.empty_like(q, requires_grad=False)
        lse = torch.zeros(1, 2, 9)
        interface._flash_attn_backward(
            torch.ones_like(q), q, q, q, out, lse, gradient, None, None, 0.0, None, False, -1, -1, 0.0, None, False
        )
    else:
        (gradient,) = torch.autograd.grad(y, q, create_graph=True)
    with pytest.raises(NotImplementedError, match="a second derivative was asked for, accepted is the first$"):
        torch.autograd.grad(y + 10 * gradient.pow(2).sum(), q)


def plain_rotary(x, cos, sin, positions, interleaved):
    """x [B, S, H, D] as complex numbers, turned."""
    rotary_dim = 2 * cos.shape[-1]
    head, tail = x[..., :rotary_dim].double(), x[..., rotary_dim:]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    turn = torch.complex(cos.double(), sin.double())[positions][:, :, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat((turned.flatten(-2).to(x.dtype), tail), -1)


def angles(seqlen=64, rotary_dim=16):
    angle = torch.arange(seqlen)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved):
    cos, sin = angles()
    x = random(2, 9, 3, 24, requires_grad=False)
    offsets = torch.tensor([4, 11], dtype=torch.int32)
    expected = plain_rotary(x, cos, sin, torch.arange(9) + offsets[:, None], interleaved)
    ours = apply_rotary_emb(x, cos, sin, interleaved=interleaved, seqlen_offsets=offsets)
    torch.testing.assert_close(ours, expected)
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    packed = apply_rotary_emb(x.flatten(0, 1), cos, sin, interleaved, False, offsets, cu, 9)
    torch.testing.assert_close(packed.unflatten(0, (2, 9)), expected)
    copy = x.clone()
    assert apply_rotary_emb(copy, cos, sin, interleaved, inplace=True, seqlen_offsets=offsets) is copy
    assert torch.equal(copy, ours)


@pytest.mark.parametrize("kind", ["leaf", "view of a leaf", "result"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_in_place_with_gradients(kind, interleaved):
    cos, sin = angles()
    leaf = random(2, 9, 2, 24)
    plain = leaf.detach().clone().requires_grad_()
    weights = random(2, 9, 2, 24, seed=1, requires_grad=False)
    expected = apply_rotary_emb(plain, cos, sin, interleaved)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), plain)
    x = leaf if kind == "leaf" else leaf[:] if kind == "view of a leaf" else leaf * 1
    out = apply_rotary_emb(x, cos, sin, interleaved, inplace=True)
    assert out.data_ptr() == x.data_ptr() and torch.equal(out, expected) and torch.equal(x, expected)
    (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["rows", "int", "batch_idx", "leftpad", "pages"])
@pytest.mark.parametrize("rotary", [False, True])
def test_kvcache(causal, layout, rotary):
    cos, sin = angles()
    used = torch.tensor([13, 13] if layout == "int" else [13, 30], dtype=torch.int32)
    q = random(2, 4, 4, 24, seed=1, requires_grad=False)
    new_k, new_v = (random(2, 4, 2, 24, seed=s, requires_grad=False) for s in (2, 3))
    k, v = (random(2, 48, 2, 24, seed=s, requires_grad=False) for s in (4, 5))  # each sequence's own keys
    options, leftpad = {}, torch.zeros(2, dtype=torch.int32)
    if layout == "batch_idx":
        index = torch.tensor([3, 1], dtype=torch.int32)
        cache_k, cache_v = (torch.full((5, 48, 2, 24), math.nan) for _ in range(2))
        cache_k[index], cache_v[index] = k, v
        options["cache_batch_idx"] = index
    elif layout == "pages":
        table = torch.tensor([[5, 1, 0], [2, 6, 3]], dtype=torch.int32)
        cache_k, cache_v = (torch.full((7, 16, 2, 24), math.nan) for _ in range(2))
        cache_k[table], cache_v[table] = k.unflatten(1, (3, 16)), v.unflatten(1, (3, 16))
        options["block_table"] = table
    else:
        cache_k, cache_v = k.clone(), v.clone()
        if layout == "leftpad":
            leftpad = torch.tensor([5, 0], dtype=torch.int32)
            options["cache_leftpad"] = leftpad
    if rotary:
        options.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, cache_k, cache_v, new_k, new_v, cache_seqlens=13 if layout == "int" else used, causal=causal,
        return_softmax_lse=True, **options,
    )  # fmt: skip

    steps = used[:, None].long() + torch.arange(4)
    if rotary:
        q = plain_rotary(q, cos, sin, steps if causal else steps[:, :1].expand(-1, 4), False)
        new_k = plain_rotary(new_k, cos, sin, steps, False)
    for b in range(2):
        k[b, steps[b]], v[b, steps[b]] = new_k[b], new_v[b]
    gathered = [
        c[options["block_table"]].flatten(1, 2) if layout == "pages"
        else c[options["cache_batch_idx"]] if layout == "batch_idx" else c
        for c in (cache_k, cache_v)
    ]  # fmt: skip
    torch.testing.assert_close(gathered[0], k)  # appended in place
    assert torch.equal(gathered[1], v)
    mask = (torch.arange(48) >= leftpad[:, None])[:, None, None]
    runs = [
        reference.attention(*(t.to(d) for t in (q, k, v)), causal=causal, seqused_k=used + 4, mask=mask)
        for d in (torch.float32, torch.float64)
    ]
    check("out", out, runs[0][0], runs[1][0])
    check("lse", lse, runs[0][1], runs[1][1])


@pytest.mark.parametrize("layout", ["rows", "batch_idx", "slices", "heads_first", "unlike", "expanded"])
def test_kvcache_never_reads_the_left_padding(layout, monkeypatch):
    """It may hold NaN, for any memory order of the cache, and nothing in the cache is written or copied."""
    leftpad, used = (torch.tensor(t, dtype=torch.int32) for t in ([5, 0, 7], [23, 30, 7]))
    q = random(3, 2, 4, 24, seed=1, requires_grad=False)
    k, v = (random(3, 32, 2, 24, seed=s, requires_grad=False) for s in (2, 3))
    if layout == "expanded":
        k, v = (t[:1].expand(3, -1, -1, -1) for t in (k, v))
        leftpad, used = torch.full_like(leftpad, 5), torch.full_like(used, 23)
    clean = k.clone(), v.clone()
    for b in range(1 if layout == "expanded" else 3):
        k[b, : leftpad[b]] = v[b, : leftpad[b]] = math.nan
    cache_k, cache_v = k, v
    options = {}
    if layout == "batch_idx":
        index = torch.tensor([3, 1, 4], dtype=torch.int32)
        cache_k, cache_v = (torch.full((5, 32, 2, 24), math.nan) for _ in range(2))
        cache_k[index], cache_v[index] = k, v
        options["cache_batch_idx"] = index
    elif layout == "slices":
        cache_k, cache_v = (torch.full((3, 40, 3, 24), math.nan)[:, 3:35, 1:] for _ in range(2))
        cache_k[:], cache_v[:] = k, v
    elif layout in ("heads_first", "unlike"):
        cache_v = v.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "heads_first":
            cache_k = k.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            cache_k = torch.full((3 * 33 * 48 + 5,), math.nan).as_strided(k.shape, (33 * 48 + 5, 48, 24, 1)).copy_(k)
    seen, attention = [], _kvcache.attention
    monkeypatch.setattr(_kvcache, "attention", lambda *a, **b: seen.append((a, b)) or attention(*a, **b))
    slopes = random(4, seed=4, requires_grad=False).abs()
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, cache_k, cache_v, cache_seqlens=used, cache_leftpad=leftpad, causal=True, window_size=(9, 0),
        alibi_slopes=slopes, return_softmax_lse=True, **options,
    )  # fmt: skip
    (_, pages_k, pages_v), given = seen[0]
    assert given.get("mask") is None
    assert layout == "unlike" or (pages_k.data_ptr(), pages_v.data_ptr()) == (cache_k.data_ptr(), cache_v.data_ptr())
    mask = (torch.arange(32) >= leftpad[:, None])[:, None, None]
    runs = [
        reference.attention(*(t.to(d) for t in (q, *clean)), causal=True, window=(9, 0), alibi_slopes=slopes,
                            seqused_k=used, mask=mask)
        for d in (torch.float32, torch.float64)
    ]  # fmt: skip
    check("out", out, runs[0][0], runs[1][0])
    unseen = runs[1][1] == -math.inf
    assert torch.all(lse[unseen] == math.inf)
    check("lse", lse[~unseen], *(run[1][~unseen] for run in runs))


def cache_call(layout, **changes):
    """Two sequences with room for 12 keys, lengths 5 and 9, and two new keys each."""
    caches = [random(*((6, 4) if layout == "pages" else (3, 12)), 2, 16, seed=s, requires_grad=False) for s in (1, 2)]
    q, k, v = (random(2, 2, h, 16, seed=s, requires_grad=False) for s, h in ((3, 4), (4, 2), (5, 2)))
    call = dict(
        q=q, k_cache=caches[0], v_cache=caches[1], k=k, v=v, cache_seqlens=torch.tensor([5, 9], dtype=torch.int32)
    )
    if layout == "pages":
        call["block_table"] = torch.tensor([[5, 1, -1], [2, 0, 3]], dtype=torch.int32)  # -1: not in use
    else:
        call["cache_batch_idx"] = torch.tensor([2, 0], dtype=torch.int32)
    for name, change in changes.items():
        call[name] = change(call.get(name)) if callable(change) else change
    return call


def entry(at, value):
    def changed(tensor):
        tensor = tensor.clone()
        tensor[at] = value
        return tensor

    return changed


def angles_of(rows):
    return {name: lambda _, x=x: x for name, x in zip(("rotary_cos", "rotary_sin"), angles(seqlen=rows))}


REFUSED_CACHES = [
    (
        "pages", {"cache_seqlens": entry(1, 11)}, RuntimeError,
        "block_table: 2 new keys after 11, accepted at most 12 in all",
    ),
    ("pages", {"cache_seqlens": 11}, RuntimeError, "block_table: 2 new keys after 11, accepted at most 12 in all"),
    (
        "pages", {"cache_seqlens": entry(0, 13), "k": None, "v": None}, RuntimeError,
        "block_table: 13 keys, accepted at most 12",
    ),
    ("pages", {"block_table": entry((0, 1), -1)}, RuntimeError, "block_table: page -1, accepted 0 .. 5"),
    ("pages", {"block_table": entry((1, 0), 6)}, RuntimeError, "block_table: page 6, accepted 0 .. 5"),
    ("pages", {"cache_seqlens": entry(0, -1)}, ValueError, "cache_seqlens: -1, accepted 0 and more"),
    ("pages", {"block_table": lambda t: t.long()}, ValueError, "block_table: dtype torch.int64, accepted torch.int32"),
    ("pages", {"block_table": lambda t: t[:1]}, ValueError, r"block_table: shape \(1, 3\), accepted \(2, 3\)"),
    (
        "rows", {"cache_seqlens": entry(1, 11)}, ValueError,
        "k: 2 new keys after 11, accepted at most 12 in all, the cache's room",
    ),
    (
        "rows", {"cache_seqlens": 13, "k": None, "v": None}, ValueError,
        "cache_seqlens: 13 keys, accepted at most 12 in all",
    ),
    ("rows", {"cache_seqlens": 3.5}, ValueError, "cache_seqlens: 3.5 of type float, accepted an integer"),
    ("rows", {"cache_seqlens": lambda t: t + 0.5}, ValueError, "cache_seqlens: dtype torch.float32, accepted"),
    ("rows", {"cache_batch_idx": lambda t: t.double()}, ValueError, "cache_batch_idx: dtype torch.float64, accepted"),
    ("rows", {"cache_leftpad": torch.tensor([0.0, 2.9])}, ValueError, "cache_leftpad: dtype torch.float32, accepted"),
    ("rows", {"cache_batch_idx": entry(0, -1)}, ValueError, "cache_batch_idx: -1, accepted 0 .. 2"),
    ("rows", {"cache_batch_idx": entry(0, 3)}, ValueError, "cache_batch_idx: 3, accepted 0 .. 2"),
    ("rows", {"cache_leftpad": torch.tensor([0, -2])}, ValueError, "cache_leftpad: -2, accepted 0 and more"),
    ("rows", angles_of(10), ValueError, "rotary_cos: 2 new keys after 9, accepted at most 10 in all, its rows"),
    ("rows", {"k": lambda t: t[:, :, :1]}, ValueError, r"k: shape \(2, 2, 1, 16\), accepted \(2, 2, 2, 16\)"),
    ("rows", {"v": lambda t: t.half()}, ValueError, "v: dtype torch.float16, accepted torch.float32"),
    ("rows", {"q": lambda t: t.half()}, ValueError, "k: dtype float32"),
    ("rows", {"q": lambda t: t[:, :, :3]}, ValueError, "k: 2 heads with q's 3"),
    ("rows", {"softmax_scale": math.nan}, ValueError, "scale: "),
    ("rows", {"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes: "),
]  # fmt: skip


@pytest.mark.parametrize(
    "layout, changes, error, message", REFUSED_CACHES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_kvcache_is_untouched_by_what_is_refused(device, layout, changes, error, message):
    call = {n: x.to(device) if torch.is_tensor(x) else x for n, x in cache_call(layout, **changes).items()}
    before = call["k_cache"].clone(), call["v_cache"].clone()
    with pytest.raises(error, match=f"^({message})"):
        flash_attn.flash_attn_with_kvcache(**call)
    assert torch.equal(call["k_cache"], before[0]) and torch.equal(call["v_cache"], before[1])


def test_bounds_of_the_gpu_are_those_of_the_cpu(device):
    """Both ways of finding the least and the most, on whatever device."""
    for pages in (None, torch.tensor([[5, 1, -9], [2, 0, 3]], dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32)):
        extent = _extent.Extent(6, 4, 0 if pages is None else 4 * pages.shape[1], True, 2, 0, 0)
        for lengths in ([5, 9], [0, 0], [6, 7], [40, -3]):
            for leftpad in (None, torch.tensor([3, -1], dtype=torch.int32)):
                arguments = (extent, torch.tensor(lengths, dtype=torch.int32), pages, leftpad)
                ours, gpu = _extent._bounds(*arguments), _extent._bounds_on_gpu(*arguments)
                assert [(min(0, a), max(0, b)) for a, b in ours] == [(min(0, a), max(0, b)) for a, b in gpu]


def test_kvcache_under_autocast(device):
    call = cache_call("pages")
    for name in ("k_cache", "v_cache", "k", "v"):
        call[name] = call[name].bfloat16()
    with torch.autocast(device, torch.bfloat16):
        out = flash_attn.flash_attn_with_kvcache(**call)  # q is float32
    expected = flash_attn.flash_attn_with_kvcache(**{**call, "q": call["q"].bfloat16()})
    assert torch.equal(out, expected)


def test_kvcache_up_to_its_last_key():
    call = cache_call("pages", cache_seqlens=entry(1, 10))
    out = flash_attn.flash_attn_with_kvcache(**call)
    assert torch.equal(call["k_cache"][3, 2:], call["k"][1]) and not out.isnan().any()


@pytest.mark.parametrize("where", ["clamped", "captured"])
def test_kvcache_drops_what_is_out_of_range_under_capture(device, where, monkeypatch):
    """Where nothing may be waited for: writes out of range are dropped, reads stay within, the rest is as it should
    be."""
    if where == "captured" and device == "cpu":
        pytest.skip("the CPU captures nothing")
    if where == "clamped":
        monkeypatch.setattr(_extent, "_capturing", lambda tensor: True)
    call = cache_call("pages", cache_seqlens=torch.tensor([2, 10], dtype=torch.int32))
    call["block_table"] = torch.tensor([[5, 1, 4], [2, 0, 3]], dtype=torch.int32)
    changes = [
        {"cache_seqlens": [2, 11]},  # the second of two new keys
        {"cache_seqlens": [2, 40]},  # both of them
        {"cache_seqlens": [2, -1]},
        {"cache_seqlens": [40, 50]},  # all
        {"block_table": [[-3, 1, 4], [2, 0, 3]]},
        {"block_table": [[5, 1, 4], [2, 0, 99]]},
        {"block_table": [[99, 1, 4], [2, 0, -1]]},
    ]
    static = {name: call[name].clone() for name in ("cache_seqlens", "block_table", "k_cache", "v_cache")}
    run = lambda: flash_attn.flash_attn_with_kvcache(**call)  # noqa: E731
    if where == "captured":
        run()  # compiled before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
    for change in changes:
        for name, value in static.items():
            call[name].copy_(torch.tensor(change[name], dtype=torch.int32) if name in change else value)
        lengths, table = call["cache_seqlens"].tolist(), call["block_table"].tolist()
        if where == "captured":
            graph.replay()
        else:
            out = run()
        for name, new in (("k_cache", call["k"]), ("v_cache", call["v"])):
            expected = static[name].clone()
            for b in range(2):
                for i in range(2):
                    at = lengths[b] + i
                    if 0 <= at < 12 and 0 <= table[b][at // 4] < 6:
                        expected[table[b][at // 4], at % 4] = new[b, i]
            assert torch.equal(call[name], expected), (change, name)
        assert out.isfinite().all()
        if change == changes[0]:  # the sequence beside is as if alone
            alone = {name: call[name][:1] for name in ("q", "block_table")}
            caches, lengths = (call["k_cache"], call["v_cache"]), torch.tensor([4], dtype=torch.int32)
            expected = flash_attn.flash_attn_with_kvcache(
                alone["q"], *caches, cache_seqlens=lengths, block_table=alone["block_table"]
            )
            torch.testing.assert_close(out[:1], expected)


@pytest.mark.parametrize("layout", ["pages", "rows"])
def test_kvcache_reads_nothing_back_under_capture(layout, monkeypatch):
    """Tensors without data replace those of a captured stream: neither can be read back."""
    monkeypatch.setattr(_extent, "_capturing", lambda tensor: True)
    call = cache_call(layout, **angles_of(64))
    if layout == "rows":
        call["cache_leftpad"] = torch.tensor([0, 2], dtype=torch.int32)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in call.items()}
        assert flash_attn.flash_attn_with_kvcache(**fake, causal=True).shape == (2, 2, 4, 16)
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            fake["q"].flatten()[fake["cache_seqlens"][0]]  # an index without dimensions is read back


def test_kvcache_in_a_compiled_program():
    """In one graph: no value of a tensor is read."""
    q, new = random(2, 1, 4, 16, seed=1, requires_grad=False), random(2, 1, 2, 16, seed=2, requires_grad=False)
    used, leftpad = (torch.tensor(t, dtype=torch.int32) for t in ([5, 9], [2, 0]))
    results = []
    for compiled in (False, True):
        k, v = (random(2, 16, 2, 16, seed=s, requires_grad=False) for s in (3, 4))
        call = flash_attn.flash_attn_with_kvcache
        call = torch.compile(call, fullgraph=True) if compiled else call
        out = call(q, k, v, new, new, cache_seqlens=used, cache_leftpad=leftpad, causal=True)
        results.append((out, k, v))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected)


def test_kvcache_of_a_compiled_program_is_checked():
    call = cache_call("pages", cache_seqlens=entry(1, 11))
    before = call["k_cache"].clone()
    compiled = torch.compile(lambda **call: flash_attn.flash_attn_with_kvcache(**call), fullgraph=True)
    with pytest.raises(RuntimeError, match="block_table: 2 new keys after 11, accepted at most 12 in all"):
        compiled(**call)
    assert torch.equal(call["k_cache"], before)


def test_bert_padding():
    x = random(3, 7, 5)
    mask = torch.arange(7) < torch.tensor([[7], [0], [4]])
    unused = (torch.arange(7) == 5) & torch.tensor([[False], [False], [True]])
    rows, indices, cu, longest, lengths = bert_padding.unpad_input(x, mask, unused)
    kept = mask | unused
    assert torch.equal(rows, x[kept]) and torch.equal(indices, kept.flatten().nonzero().flatten())
    assert cu.dtype == torch.int32 and cu.tolist() == [0, 7, 7, 12] and longest == 7 and lengths.tolist() == [7, 0, 4]
    back = bert_padding.pad_input(rows, indices, 3, 7)
    assert torch.equal(back, x * kept[..., None])
    (gradient,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(gradient, kept[..., None].float().expand_as(x))
    in_length = torch.tensor([[2, 3, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]])
    rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, in_length)
    assert cu.tolist() == [0, 2, 5, 12, 13, 14, 15] and longest == 7
    assert torch.equal(rows, torch.cat((x[0, :5], x[1], x[2, :3])))
    taken, residual = bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(taken, rows) and torch.equal(residual, x.flatten(0, 1))


def run_python(program, path, **environment):
    path = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def test_says_which_one_is_taken_from_the_source_tree():
    said = run_python("import runpy; runpy.run_module('tessera_flash_attn', run_name='__main__')", [_DROPIN])
    assert said.returncode == 0 and said.stdout == f"flash_attn: Tessera's, {_DROPIN / 'flash_attn' / '__init__.py'}\n"


def test_never_shadows_by_surprise(tmp_path):
    installed = tmp_path / "flash_attn-2.8.3.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    path = [_DROPIN, tmp_path]
    refused = run_python("import flash_attn", path)
    assert "would shadow the installed flash-attn 2.8.3" in refused.stderr
    program = "import flash_attn; print(flash_attn.__version__)"
    assert run_python(program, path, TESSERA_FLASH_ATTN="1").stdout == "2.8.4\n"


# ---- calls of existing programs --------------------------------------------------------------------------------------


def _graphs_of(function, calls, **options):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend="eager", **options)
    for arguments in calls:
        assert torch.equal(compiled(*arguments), function(*arguments))
    return counters["stats"]["unique_graphs"]


def test_lengths_compile_once():
    caches = [torch.randn(2, 64, 4, 16) for _ in range(2)]
    rows = lambda: torch.randn(2, 1, 4, 16)  # noqa: E731

    def step(q, k, v, length):
        return flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=length, causal=True)

    calls = [(rows(), rows(), rows(), length) for length in range(3, 9)]
    assert _graphs_of(step, calls, fullgraph=True) <= 2 and _graphs_of(step, calls, fullgraph=True, dynamic=True) == 1

    def packed(q, cu, longest):
        return flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, longest, longest)

    bounds = lambda n: torch.tensor([0, n, 30], dtype=torch.int32)  # noqa: E731
    calls = [(torch.randn(30, 2, 8), bounds(n), torch.tensor(30 - n)) for n in range(3, 9)]
    assert _graphs_of(packed, calls, fullgraph=True) == 1


def test_a_gradient_of_a_cache_is_refused():
    q, k, v = (torch.randn(1, 1, 2, 16) for _ in range(3))
    caches = [torch.randn(1, 9, 2, 16) for _ in range(2)]
    learned = q.clone().requires_grad_()
    out, lse = flash_attn.flash_attn_with_kvcache(learned, *caches, k, v, cache_seqlens=3, return_softmax_lse=True)
    expected = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=3)
    assert torch.equal(out, expected) and not expected.requires_grad
    for result in (out, lse):
        with pytest.raises(NotImplementedError, match="^flash_attn_with_kvcache: a gradient was asked for"):
            result.sum().backward(retain_graph=True)
    slopes = torch.ones(2, requires_grad=True)
    out = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=3, alibi_slopes=slopes)
    with pytest.raises(NotImplementedError, match="^flash_attn_with_kvcache: a gradient was asked for"):
        out.sum().backward()
    with pytest.raises(ValueError, match="^k_cache: requires a gradient"):
        flash_attn.flash_attn_with_kvcache(q, caches[0].requires_grad_(), caches[1], k, v, cache_seqlens=3)


def test_writes_to_a_cache_move_its_version():
    caches = torch.zeros(2, 1, 9, 2, 16)
    before = caches._version
    q, k, v = torch.randn(3, 1, 1, 2, 16)
    flash_attn.flash_attn_with_kvcache(q, *caches.unbind(0), k, v, cache_seqlens=3)
    assert caches._version > before


def test_the_private_pair_is_operators():
    """With fakes as flash_attn's are: what a tracer knows of their results is what they are."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    options = (0.3, True, -1, -1, 0.0, None)
    dense = lambda p: ((2, 5, 4, 8), (2, 7, 2, 8), (p, *options, p > 0))  # noqa: E731
    packed = lambda p: ((12, 4, 8), (12, 2, 8), (cu, cu, 7, 7, p, *options, p > 0))  # noqa: E731

    def run(name, shape_q, shape_k, arguments):
        q, k, v = torch.randn(shape_q), torch.randn(shape_k), torch.randn(shape_k)
        out, lse, dmask, state = forward = getattr(interface, f"_flash_attn_{name}forward")(q, k, v, *arguments)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        lengths, p = arguments[:-8], arguments[-8]
        softmax_d = getattr(interface, f"_flash_attn_{name}backward")(
            torch.ones_like(out), q, k, v, out, lse, *gradients, *lengths, p, *options, False, state
        )
        return [(x.shape, x.dtype, x.device) for x in (*forward, softmax_d, *gradients)]

    for name, case in (("", dense), ("varlen_", packed)):
        for p in (0.0, 0.4):
            expected = run(name, *case(p))
            with FakeTensorMode(allow_non_fake_inputs=True):
                assert run(name, *case(p)) == expected
    with FakeTensorMode():
        q = torch.empty(1, 5, 3, 8)
        with pytest.raises(tessera.Error, match="^k: 2 heads with q's 3"):
            interface._flash_attn_forward(q, q[:, :, :2], q[:, :, :2], 0.0, *options, False)
    q = torch.randn(1, 5, 2, 8)
    forward = lambda q: interface._flash_attn_forward(q, q, q, 0.0, *options, False)[:2]  # noqa: E731
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(compiled(q), torch.ops.flash_attn._flash_attn_forward(q, q, q, 0.0, *options, False)):
        assert torch.equal(ours, expected)
    gradients = [torch.empty_like(q) for _ in range(3)]
    before = gradients[0]._version
    out, lse, *_ = interface._flash_attn_forward(q, q, q, 0.0, *options, False)
    interface._flash_attn_backward(out, q, q, q, out, lse, *gradients, 0.0, *options, False)
    assert gradients[0]._version > before
