"""tessera.append: rotation of new tokens and their way into a cache, for arrays of NumPy and PyTorch."""

import numpy as np
import pytest

tessera = pytest.importorskip("tessera")
torch = pytest.importorskip("torch")

PAGE = 4


def step(seed=0, dtype=np.float32):
    """Two sequences with 3 and 1 new tokens, packed; 7 and 5 keys with them, in pages of 4."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.standard_normal(shape).astype(dtype)

    return dict(
        k=normal(4, 2, 8), v=normal(4, 2, 6), k_cache=normal(6, PAGE, 2, 8), v_cache=normal(6, PAGE, 2, 6),
        seqused_k=np.array([7, 5], np.int32), cu_seqlens=np.array([0, 3, 4], np.int32),
        page_table=np.array([[5, 2], [0, 3]], np.int32), q=normal(4, 4, 8),
        cos=normal(16, 3), sin=normal(16, 3),
    )  # fmt: skip


def places():
    """(token, page, slot, position)"""
    return [(0, 2, 0, 4), (1, 2, 1, 5), (2, 2, 2, 6), (3, 3, 0, 4)]


def turned(rows, cos, sin, interleaved):
    out = rows.copy()
    half = len(cos)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    x, y = rows[:, first], rows[:, second]
    out[:, first], out[:, second] = x * cos - y * sin, x * sin + y * cos
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_of_numpy(interleaved, in_place):
    call = step()
    before = {name: array.copy() for name, array in call.items()}
    q_out = None if in_place else np.full_like(call["q"], np.nan)
    assert tessera.append(**call, q_out=q_out, interleaved=interleaved) is None
    result = call["q"] if in_place else q_out
    k_cache, v_cache = before["k_cache"].copy(), before["v_cache"].copy()
    for token, page, slot, position in places():
        cos, sin = before["cos"][position], before["sin"][position]
        k_cache[page, slot] = turned(before["k"][token], cos, sin, interleaved)
        v_cache[page, slot] = before["v"][token]
        np.testing.assert_allclose(
            result[token], turned(before["q"][token], cos, sin, interleaved), rtol=1e-6, atol=1e-6
        )
    np.testing.assert_allclose(call["k_cache"], k_cache, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(call["v_cache"], v_cache)
    np.testing.assert_array_equal(call["k"], before["k"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_of_torch_is_that_of_numpy(dtype, device):
    arrays = {
        n: torch.from_numpy(a).to(dtype) if a.dtype == np.float32 else torch.from_numpy(a) for n, a in step().items()
    }
    exact = {n: a.float().numpy().copy() if a.is_floating_point() else a.numpy() for n, a in arrays.items()}
    there = {n: a.to(device) for n, a in arrays.items()}
    tessera.append(**there)
    tessera.append(**exact)
    for name in ("q", "k_cache", "v_cache"):
        expected = torch.from_numpy(exact[name]).to(dtype)
        if device == "cpu":
            assert torch.equal(there[name], expected), name
        else:  # x cos - y sin may be rounded once or twice in float32
            torch.testing.assert_close(there[name].cpu(), expected)


def test_a_gpu_writes_nothing_of_what_is_out_of_range(device):
    if device == "cpu":
        pytest.skip("skipped: refused on the CPU")
    call = {n: torch.from_numpy(a).to(device) for n, a in step().items()}
    call["page_table"][0, 1] = 6  # all tokens of sequence 0
    expected = {n: a.clone() for n, a in call.items()}
    dropped = torch.full((1,), 2, dtype=torch.int32, device=device)
    tessera.append(**call, dropped=dropped)
    assert dropped.item() == 2 + 3
    assert not torch.equal(call["k_cache"][3, 0], expected["k_cache"][3, 0])
    for name in ("k_cache", "v_cache"):
        expected[name][3, 0] = call[name][3, 0]
        assert torch.equal(call[name], expected[name]), name


def test_attention_sees_what_was_appended():
    call = {n: torch.from_numpy(a) for n, a in step().items()}
    tessera.append(**call)
    lengths = dict(seqused_k=call["seqused_k"], page_table=call["page_table"], cu_seqlens_q=call["cu_seqlens"])
    o = tessera.attention(call["q"], call["k_cache"], call["v_cache"], causal=True, window=(0, 0), **lengths)
    torch.testing.assert_close(o, call["v"].repeat_interleave(2, dim=1))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(seqused_k=np.array([9, 5], np.int32)), r"^seqused_k\[0\]: 9, accepted 3 .. 8"),
        (dict(page_table=np.array([[5, 6], [0, 3]], np.int32)), r"^page_table\[0, 1\]: 6, accepted 0 .. 5"),
        (dict(positions_k=np.array([0, 1, 2, 16], np.int32)), "^positions_k: token 0 of sequence 1 stands at 16"),
        (dict(cos=None), "^cos: absent"),
    ],
)
def test_refusals_write_nothing(change, message):
    call = step() | change
    before = {name: call[name].copy() for name in ("q", "k_cache", "v_cache")}
    with pytest.raises(tessera.Error, match=message):
        tessera.append(**call)
    for name, array in before.items():
        np.testing.assert_array_equal(call[name], array)


def test_a_cache_that_may_not_be_written():
    call = step()
    call["k_cache"].flags.writeable = False
    with pytest.raises(tessera.Error, match="^k_cache: "):
        tessera.append(**call)
