"""Score programs from text and from traced functions, against plain NumPy and PyTorch's FlexAttention."""

import math

import numpy as np
import pytest

import tessera
from tessera import _core
from tessera._score import bind

B, S, H, D = 2, 24, 4, 8


@pytest.fixture
def arrays(random):
    return [random.standard_normal((B, S, H, D)) for _ in range(4)]


def attention_of(scores, v):
    """o of scores [B, H, Sq, Sk]."""
    highest = scores.max(-1, keepdims=True)
    p = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    return np.einsum("bhij,bjhd->bihd", p / np.maximum(p.sum(-1, keepdims=True), 1e-300), v)


def products(q, k):
    return np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D)


I, J = np.arange(S)[:, None], np.arange(S)[None, :]


def test_text_with_named_arrays_and_numbers(arrays, random):
    q, k, v, _ = arrays
    bias = random.standard_normal((H, 2 * S)).astype(np.float32)
    doc = np.repeat(np.arange(B * 3), S // 3).reshape(B, S)
    o = tessera.attention(
        q, k, v, score_mod="c * tanh(s / c) + bias[h, i - j + 24]", mask_mod="j <= q_pos && doc[b, i] == doc[b, j]",
        captured={"bias": bias, "c": 2.5, "doc": doc},
    )  # fmt: skip
    scores = 2.5 * np.tanh(products(q, k) / 2.5) + bias[:, I - J + 24]
    visible = (J <= I) & (doc[:, :, None] == doc[:, None, :])
    np.testing.assert_allclose(o, attention_of(np.where(visible[:, None], scores, -np.inf), v), atol=1e-12)


def test_a_traced_function_captures_arrays_and_numbers(arrays, random):
    q, k, v, _ = arrays
    table, width = random.standard_normal((H, 2 * S)), 7

    def score_mod(score, b, h, q_idx, kv_idx):
        return np.where(q_idx >= kv_idx, score * 0.5 + table[h, q_idx - kv_idx + S], score)

    def mask_mod(b, h, q_idx, kv_idx):
        return abs(q_idx - kv_idx) < width

    o = tessera.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)
    s = products(q, k)
    scores = np.where(I >= J, s * 0.5 + table[:, I - J + S], s)
    np.testing.assert_allclose(o, attention_of(np.where(abs(I - J) < width, scores, -np.inf), v), atol=1e-12)
    bound = bind(score_mod, mask_mod, None)
    assert bound.program.score == "where(j <= i, s * 0.5 + table[h, i - j + S], s)"  # S is a number of this module
    assert bound.program.mask == "abs(i - j) < width"
    assert bound.names == ("table",) and sorted(bound.numbers) == [7, S]
    hash_of = bound.program.hash
    width = 3  # another number is the same program
    assert bind(score_mod, mask_mod, None).program.hash == hash_of


@pytest.mark.parametrize(
    "score, mask, inputs",
    (
        ("", "", ["s"]),
        ("", "j <= q_pos", ["s", "j", "q_pos"]),
        ("s + t[b, i]", "", ["s", "b", "i"]),
        ("t[h_kv, 0] * 1.0", "b != len_k", ["b", "h_kv", "len_k"]),
        ("s + t[h, 0] * 0.0 * (b - b)", "len_q > 0", ["s", "b", "h", "len_q"]),  # an infinite t makes it NaN
    ),
)
def test_the_inputs_of_a_program(score, mask, inputs):
    assert _core.ScoreProgram(score, mask, (("t", "float", 2),)).inputs == inputs


def test_gradients_of_captured_arrays_are_slopes(arrays, random):
    q, k, v, d_o = arrays
    table, gain = random.standard_normal((H, 2 * S)), np.array(1.25)
    options = {"score_mod": "s * gain[] + table[h, i - j + 24]", "captured": {"table": table, "gain": gain}}
    o, lse = tessera.attention(q, k, v, return_lse=True, **options)
    gradients = tessera.attention_backward(q, k, v, o, lse, d_o, grad_captured=True, **options)
    assert gradients.d_captured["gain"].shape == () and gradients.d_captured["table"].shape == table.shape

    def loss():
        return float((tessera.attention(q, k, v, **options) * d_o).sum())

    step = 1e-5
    d_table, d_gain = gradients.d_captured["table"], gradients.d_captured["gain"]
    for array, gradient in ((table, d_table), (gain, d_gain), (q, gradients.d_q)):
        place = tuple(n // 2 for n in array.shape)
        was = array[place]
        array[place] = was + step
        above = loss()
        array[place] = was - step
        below = loss()
        array[place] = was
        np.testing.assert_allclose(gradient[place], (above - below) / (2 * step), atol=1e-8)
    only = tessera.attention_backward(q, k, v, o, lse, d_o, grad_captured=["gain"], **options)
    assert list(only.d_captured) == ["gain"]
    assert tessera.attention_backward(q, k, v, o, lse, d_o, **options).d_captured is None
    with pytest.raises(tessera.Error, match="grad_captured: 'c', accepted table, gain"):
        tessera.attention_backward(q, k, v, o, lse, d_o, grad_captured=["c"], **options)


def test_parts_of_captured_arrays(arrays, random):
    q, k, v, _ = arrays
    points = random.standard_normal((S, 3))

    def score_mod(score, b, h, q_idx, kv_idx):
        x, y, z = points[kv_idx]
        assert points.size == 72 and points[q_idx].shape == (3,) and points[q_idx].size == len(points[q_idx]) == 3
        return score - np.sum((points[q_idx] - points[kv_idx]) ** 2, axis=-1) + x * y * np.maximum(points[q_idx], z)[0]

    squares = ((points[:, None] - points) ** 2).sum(-1)
    more = points[:, 0] * points[:, 1] * np.maximum(points[:, None, 0], points[:, 2])
    scores = np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D) - squares + more
    np.testing.assert_allclose(
        tessera.attention(q, k, v, score_mod=score_mod), attention_of(scores, v), atol=1e-12
    )  # fmt: skip


def test_layouts_and_options_compose(arrays, random):
    q, k, v, _ = arrays
    bias = random.standard_normal((H, S)).astype(np.float32)
    options = dict(captured={"bias": bias}, softcap=3.0, causal=True)
    o = tessera.attention(q, k, v, score_mod="s + bias[h, j]", **options)
    plain = tessera.attention(q, k, v, bias=bias[None, :, None, :], softcap=3.0, causal=True)
    np.testing.assert_allclose(o, plain, atol=1e-12)
    first = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    swapped = tessera.attention(*first, score_mod="s + bias[h, j]", layout="bhsd", **options)
    np.testing.assert_array_equal(swapped.swapaxes(1, 2), o)


def test_plan_says_the_program(arrays):
    q, k, v, _ = arrays
    text = tessera.plan(q, k, v, score_mod=lambda s, b, h, i, j: s * 2.0, mask_mod="j <= i && j != 3")
    assert "s * 2.0" in text and "j != 3" in text and "causal" in text
    said = tessera.plan(q, k, v, score_mod="s + 1", as_dict=True)["program"]
    assert said["score"] == "s + 1.0" and said["mask"] == "" and said["gradient"] == ["d_s = g"]


def test_what_options_can_say_is_served_by_every_kernel(arrays):
    q, k, v = (x.astype(np.float32) for x in arrays[:3])
    mods = dict(score_mod=lambda s, b, h, i, j: 2.5 * np.tanh(s / 2.5), mask_mod="q_pos - j <= 7 && j <= i")
    o = tessera.attention(q, k, v, **mods)
    np.testing.assert_array_equal(o, tessera.attention(q, k, v, softcap=2.5, causal=True, window=(7, 0)))


def test_the_reference_serves_programs_of_every_dtype(arrays):
    q, k, v = (x.astype(np.float32) for x in arrays[:3])
    o = tessera.attention(q, k, v, score_mod="s + 1", kernel="reference")
    np.testing.assert_allclose(o, tessera.attention(q, k, v), atol=1e-5)


CAPTURED = np.zeros((4, 4))


def _if(score, b, h, q_idx, kv_idx):
    if score > 0:
        return score
    return -score


def _slice(score, b, h, q_idx, kv_idx):
    return score + CAPTURED[:q_idx]


def _stores(score, b, h, q_idx, kv_idx):
    CAPTURED[0, 0] = 1
    return score


def _whole(score, b, h, q_idx, kv_idx):
    return score + CAPTURED


def _float_index(score, b, h, q_idx, kv_idx):
    return CAPTURED[score, h]


def _arctan(score, b, h, q_idx, kv_idx):
    return np.arctan(score)


@pytest.mark.parametrize(
    "function, words",
    [
        (_if, r"line \d+ of test_score_programs.py, `if score > 0:`: the truth .* accepted where"),
        (_slice, r"`return score \+ CAPTURED\[:q_idx\]`: a slice of 'CAPTURED'"),
        (_stores, r"`CAPTURED\[0, 0\] = 1`: a side effect"),
        (_whole, r"'CAPTURED' as a whole, accepted an element of it: 2 indices"),
        (_float_index, "an index of 'CAPTURED' is float, accepted int"),
        (_arctan, "numpy.arctan of a traced value"),
        (lambda score: score, "it is called with score, b, h, q_idx, kv_idx"),
        (lambda score, b, h, q_idx, kv_idx: CAPTURED, "its result is 'CAPTURED' as a whole"),
        (lambda score, b, h, q_idx, kv_idx: math.tanh(score), r"a Python number \(math's functions need one\)"),
        (5, "score_mod: int, accepted a text or a function"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_its_line(arrays, function, words):
    with pytest.raises(tessera.Error, match=words):
        tessera.attention(*arrays[:3], score_mod=function)


def test_wrong_programs_are_refused(arrays):
    q, k, v, _ = arrays
    with pytest.raises(tessera.Error, match="score, column 5: 'bais' is no name here"):
        tessera.attention(q, k, v, score_mod="s + bais[h, j]", captured={"bias": CAPTURED})
    with pytest.raises(tessera.Error, match="captured: given without score_mod and mask_mod"):
        tessera.attention(q, k, v, captured={"bias": CAPTURED})
    with pytest.raises(tessera.Error, match="captured: 'bias' is str, accepted arrays and numbers"):
        tessera.attention(q, k, v, score_mod="s", captured={"bias": "x"})
    with pytest.raises(tessera.Error, match="mask_mod: its result is int, accepted bool"):
        tessera.attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx)


# ---- PyTorch --------------------------------------------------------------------------------------------------------


@pytest.fixture
def flex():
    pytest.importorskip("torch")
    return pytest.importorskip("torch.nn.attention.flex_attention")


def _mods(torch):
    """(name, score_mod, mask_mod, captured tensors with gradients) as users of FlexAttention write them."""
    slopes = torch.rand(H, dtype=torch.float64, requires_grad=True)
    table = torch.randn(H, 2 * S, dtype=torch.float64, requires_grad=True)
    place = torch.randn(S, dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    doc = torch.arange(S) // 6
    prefix = torch.tensor([5, 9])

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < 8

    return [
        ("softcap", lambda s, b, h, i, j: 3 * torch.tanh(s / 3), None, []),
        ("ALiBi", lambda s, b, h, i, j: s + slopes[h] * (j - i), causal, [slopes]),
        ("relative bias", lambda s, b, h, i, j: s + table[h, i - j + S], None, [table]),
        ("twice", lambda s, b, h, i, j: s + place[i] * place[j], None, [place]),
        ("temperature", lambda s, b, h, i, j: s * temperature, causal, [temperature]),
        ("documents", None, lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j), []),
        ("prefix", None, lambda b, h, i, j: (j < prefix[b]) | (i >= j), []),
        ("checkerboard", lambda s, b, h, i, j: torch.where((i + j) % 2 == 0, s, s * 0.5), None, []),
        ("heads", lambda s, b, h, i, j: torch.where(h % 2 == 0, s, s.abs()), window, []),
        ("powers", lambda s, b, h, i, j: s - (i - j) ** 2 / 128, None, []),
    ]


def _by_broadcasting(torch, score_mod, mask_mod, q, k, v):
    """The same functions on whole tensors; FlexAttention has no gradients on the CPU."""
    b, h, i, j = torch.meshgrid(*map(torch.arange, (B, H, S, S)), indexing="ij")
    s = q @ k.transpose(-1, -2) / math.sqrt(D)
    s = s if score_mod is None else score_mod(s, b, h, i, j)
    if mask_mod is not None:
        s = s.masked_fill(~mask_mod(b, h, i, j), -math.inf)
    return s.softmax(-1) @ v


def test_means_what_flex_attention_means(flex):
    import torch

    torch.manual_seed(0)
    q, k, v, d_o = (torch.randn(B, H, S, D, dtype=torch.float64) for _ in range(4))
    for name, score_mod, mask_mod, captured in _mods(torch):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        block_mask = None
        if mask_mod is not None:
            block_mask = flex.create_block_mask(mask_mod, B, H, S, S, device="cpu")
        with torch.no_grad():
            of_flex = flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)
        expected = _by_broadcasting(torch, score_mod, mask_mod, *leaves)
        torch.testing.assert_close(of_flex, expected, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        theirs = torch.autograd.grad(expected, [*leaves, *captured], d_o)
        ours = [x.clone().requires_grad_() for x in (q, k, v)]
        o = tessera.attention(*ours, score_mod=score_mod, mask_mod=mask_mod, layout="bhsd")
        torch.testing.assert_close(o, expected, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        own = torch.autograd.grad(o, [*ours, *captured], d_o)
        for mine, other in zip(own, theirs):
            torch.testing.assert_close(mine, other, atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_masks_of_flex_attention_compose(flex):
    near = flex.or_masks(lambda b, h, i, j: i - j < 4, lambda b, h, i, j: j < 2)
    both = flex.and_masks(lambda b, h, i, j: i >= j, near)
    assert bind(None, both, None).program.mask == "j <= i && (i - j < 4 || j < 2)"


def test_modules_and_their_parameters(flex):
    import torch

    class Bias(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.ones(H, dtype=torch.float64))
            self.reach = 4

        def forward(self, score, b, h, q_idx, kv_idx):
            return score - self.slope[h] * torch.abs(q_idx - kv_idx) / self.reach

    module = Bias()
    bound = bind(module, None, None)
    assert bound.program.score == "s - slope[h] * float(abs(i - j)) / float(reach)"
    assert bind(module.forward, None, None).program.hash == bound.program.hash
    q = torch.randn(B, S, H, D, dtype=torch.float64)
    tessera.attention(q, q, q, score_mod=module).sum().backward()
    assert module.slope.grad.abs().min() > 0


def test_second_derivatives_raise(flex):
    import torch

    gain = torch.ones(H, dtype=torch.float64, requires_grad=True)
    q = torch.randn(B, S, H, D, dtype=torch.float64, requires_grad=True)
    o = tessera.attention(q, q, q, score_mod="s * gain[h]", captured={"gain": gain})
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(o.sum(), [gain], create_graph=True)
    with torch.no_grad():
        o, lse = tessera.attention(q, q, q, score_mod="s * gain[h]", captured={"gain": gain}, return_lse=True)
        gradients = tessera.attention_backward(
            q, q, q, o, lse, torch.ones_like(o), score_mod="s * gain[h]", captured={"gain": gain}, grad_captured=True
        )
    assert gradients.d_captured["gain"].shape == (H,)


def test_flex_attention_by_its_signature(flex):
    import torch
    from tessera.torch import flex_attention

    torch.manual_seed(1)
    q = torch.randn(B, H, 40, D, dtype=torch.float64)
    k, v = (torch.randn(B, 2, 56, D, dtype=torch.float64) for _ in range(2))
    slope = torch.rand(H, dtype=torch.float64)
    score_mod = lambda s, b, h, i, j: s - slope[h] * (i - j).abs()  # noqa: E731
    doc = torch.arange(56) // 20
    masks = {
        "none": None,
        "causal": lambda b, h, i, j: i >= j,
        "documents a head": lambda b, h, i, j: (doc[i] == doc[j]) & (h != 1),
        "a batch": lambda b, h, i, j: i >= j + b * 3,
    }
    for name, mask_mod in masks.items():
        shape = (B if name == "a batch" else None, H if name == "documents a head" else None, 40, 56)
        block_mask = mask_mod and flex.create_block_mask(mask_mod, *shape, device="cpu", BLOCK_SIZE=16)
        given = dict(score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
        expected, lse = flex.flex_attention(q, k, v, return_lse=True, **given)
        o, own = flex_attention(q, k, v, return_lse=True, kernel_options={"BLOCK_M": 64}, **given)
        torch.testing.assert_close(o, expected, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(own, lse, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(flex_attention(q, k, v, scale=0.3, **given), flex_attention(q, k, v, scale=0.3, **given))


def test_a_block_mask_without_lists(flex):
    import torch
    from tessera.torch import create_block_mask, flex_attention

    torch.manual_seed(2)
    q, k = torch.randn(B, H, 40, D, dtype=torch.float64), torch.randn(B, H, 56, D, dtype=torch.float64)
    doc = torch.randint(0, 3, (B, 56))
    mask_mod = lambda b, h, i, j: (doc[b, i] == doc[b, j]) & (i >= j - h)  # noqa: E731
    visible = mask_mod(*torch.meshgrid(*map(torch.arange, (B, H, 40, 56)), indexing="ij"))
    expected = tessera.attention(q, k, k, mask=visible, layout="bhsd")
    own = create_block_mask(mask_mod, B, H, 40, 56, device="cpu", BLOCK_SIZE=64, _compile=True)
    torch.testing.assert_close(flex_attention(q, k, k, block_mask=own), expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(
        flex_attention(q[:, :, :9], k, k, block_mask=own), expected[:, :, :9], atol=1e-10, rtol=1e-10
    )
    with pytest.raises(tessera.Error, match=r"block_mask: made for \[2, 4, 40, 56\], accepted one for B, H, Sq, Sk"):
        flex_attention(k, k, k, block_mask=own)
    huge = create_block_mask(mask_mod, None, None, 1 << 20, 1 << 20)  # stores nothing
    assert huge.to("cpu").shape == (None, None, 1 << 20, 1 << 20)


def test_flex_attention_is_replaced_where_programs_hold_it(flex):
    import sys
    import types

    import tessera.torch

    own, program = flex.flex_attention, types.ModuleType("a_program_with_flex_attention")
    program.attend = own
    sys.modules[program.__name__] = program
    try:
        replaced = tessera.torch.activate_flex_attention()
        assert {"torch.nn.attention.flex_attention.flex_attention", f"{program.__name__}.attend"} <= set(replaced)
        assert flex.flex_attention is program.attend is tessera.torch.flex_attention
        assert tessera.torch.activate_flex_attention() == replaced
        tessera.torch.restore_flex_attention()
        assert flex.flex_attention is program.attend is own
    finally:
        tessera.torch.restore_flex_attention()
        del sys.modules[program.__name__]


def test_the_lists_of_a_block_mask_win_over_its_function(flex):
    import torch
    from tessera.torch import flex_attention

    q = torch.randn(1, H, 32, D, dtype=torch.float64)
    count = torch.tensor([[[1, 1]]], dtype=torch.int32)
    partial = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    causal = lambda b, h, i, j: i >= j  # noqa: E731
    block_mask = flex.BlockMask.from_kv_blocks(count, partial, count, 1 - partial, BLOCK_SIZE=16, mask_mod=causal)
    i, j = torch.arange(32)[:, None], torch.arange(32)[None, :]
    visible = (i // 16 != j // 16) | (i >= j)  # the blocks beside the diagonal are full
    plain = tessera.attention(q, q, q, mask=visible, layout="bhsd")
    torch.testing.assert_close(flex_attention(q, q, q, block_mask=block_mask), plain, atol=1e-12, rtol=0)
    with pytest.raises(tessera.Error, match="block_mask: made for 32 queries and 32 keys, accepted one for 33 and 33"):
        longer = torch.randn(1, H, 33, D, dtype=torch.float64)
        flex_attention(longer, longer, longer, block_mask=block_mask)
    with pytest.raises(tessera.Error, match="kernel_options: OUTPUT_MAX changes the result"):
        flex_attention(q, q, q, kernel_options={"OUTPUT_MAX": True})
    with pytest.raises(tessera.Error, match="key: 2 heads with query's 4, accepted with enable_gqa=True"):
        flex_attention(q, q[:, :2], q[:, :2])
