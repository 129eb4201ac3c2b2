"""The flash_attn interface: its signatures, and its meaning where Tessera's own differs."""

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
from flash_attn import _call, _kvcache, bert_padding  # noqa: E402
from flash_attn import flash_attn_interface as interface  # noqa: E402
from flash_attn.layers.rotary import apply_rotary_emb  # noqa: E402
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
            out, lse, dmask = flash_attn.flash_attn_func(*copies, **options, alibi_slopes=slopes, return_attn_probs=True)
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


@pytest.mark.parametrize("packed", [False, True])
def test_s_dmask_tells_what_was_dropped(packed):
    q, k, v = dense(seqlen_k=300 if not packed else 21)
    p = 0.25
    torch.manual_seed(7)
    if packed:
        cu = torch.tensor([0, 21, 42], dtype=torch.int32)
        rows = [t.flatten(0, 1) for t in (q, k, v)]
        out, lse, dmask = flash_attn.flash_attn_varlen_func(*rows, cu, cu, 21, 21, p, return_attn_probs=True)
        out = out.unflatten(0, (2, 21))
    else:
        out, lse, dmask = flash_attn.flash_attn_func(q, k, v, p, return_attn_probs=True)
    assert dmask.shape == (2, 4, 21, k.shape[1])
    torch.testing.assert_close(dmask.abs().sum(-1), torch.ones(2, 4, 21))
    dropped = (dmask < 0).double().mean().item()
    deviation = math.sqrt(p * (1 - p) / dmask.numel())
    assert abs(dropped - p) < 5 * deviation
    values = v.repeat_interleave(2, 2)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", dmask.clamp(min=0) / (1 - p), values), out)


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
    for ours, first in zip(gradients, torch.autograd.grad(expected, leaves, d_out)):
        assert torch.equal(ours, first)


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
    """It may hold NaN, however the cache lies in memory, and nothing in the cache is written or copied."""
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


def test_kvcache_refuses_what_has_no_room():
    q = random(1, 2, 2, 16, requires_grad=False)
    cache = torch.zeros(1, 8, 2, 16)
    with pytest.raises(ValueError, match="^k: 2 new keys after 7, accepted at most 8"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=7)
    cos, sin = angles(seqlen=8)
    with pytest.raises(ValueError, match="^rotary_cos: 2 new keys after 7, accepted at most 8"):
        room = torch.zeros(1, 16, 2, 16)
        flash_attn.flash_attn_with_kvcache(q, room, room, q, q, cos, sin, cache_seqlens=7)
    assert torch.all(cache == 0)


def test_kvcache_in_a_compiled_program():
    """In one graph: nothing asks what a tensor holds."""
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


def test_never_shadows_by_surprise(tmp_path):
    installed = tmp_path / "flash_attn-2.8.3.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    path = [_DROPIN, tmp_path]
    refused = run_python("import flash_attn", path)
    assert "would shadow the installed flash-attn 2.8.3" in refused.stderr
    program = "import flash_attn; print(flash_attn.__version__)"
    assert run_python(program, path, TESSERA_FLASH_ATTN="1").stdout == "2.8.4\n"
