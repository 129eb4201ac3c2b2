"""tessera.torch.flex_attention in compiled programs, under transforms, and beside FlexAttention's own tests by idea."""

import math

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: E402

import tessera  # noqa: E402
from tessera.torch import create_block_mask, flex_attention  # noqa: E402

B, H, S, D = 2, 4, 24, 8
DOUBLE = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def draw(*shape, **given):
    return torch.randn(*shape, **{**DOUBLE, **given})


def expected_of(score_mod, mask_mod, q, k, v):
    """The functions on whole tensors."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).expand(q.shape[0], *q.shape[1:2], *x.shape[2:]) for x in (k, v))
    at = [torch.arange(n) for n in (q.shape[0], q.shape[1], q.shape[2], k.shape[2])]
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    with TransformGetItemToIndex():
        if score_mod is not None:
            s = flex._vmap_for_bhqkv(score_mod, prefix=(0,))(s, *at)
        if mask_mod is not None:
            s = s.masked_fill(~flex._vmap_for_bhqkv(mask_mod, prefix=())(*at), -math.inf)
    weights = torch.where(s.isneginf().all(-1, keepdim=True), 0.0, s.softmax(-1))
    return weights @ v


def check(function, arguments, expected, leaves):
    """The result and the gradients of `leaves`, among the arguments or captured."""
    o = function(*arguments)
    torch.testing.assert_close(o, expected, atol=1e-10, rtol=1e-10)
    d_o = torch.randn_like(o)
    own, theirs = (torch.autograd.grad(x, leaves, d_o) for x in (o, expected))
    for mine, other in zip(own, theirs):
        torch.testing.assert_close(mine, other, atol=1e-9, rtol=1e-9)


def leaves_of(*shape):
    return [draw(*shape).requires_grad_() for _ in range(3)]


TABLE = draw(H, 2 * S).requires_grad_()
PLACE = draw(S).requires_grad_()
TEMPERATURE = torch.tensor(1.5, requires_grad=True, **DOUBLE)
DOC = torch.arange(S) // 6
PREFIX = torch.tensor([5, 9])
WIDTH = 7

PROGRAMS = {
    "a table": (lambda s, b, h, i, j: torch.where(i >= j, s + TABLE[h, i - j + S], torch.tanh(s)), None, [TABLE]),
    "one tensor twice": (lambda s, b, h, i, j: s + PLACE[i] * PLACE[j], None, [PLACE]),
    "rank 0": (lambda s, b, h, i, j: s * TEMPERATURE, lambda b, h, i, j: i >= j, [TEMPERATURE]),
    "row by row": (lambda s, b, h, i, j: s + TABLE[h][i], None, [TABLE]),
    "a tensor made from captured ones": (lambda s, b, h, i, j: s * TEMPERATURE.exp() + (TABLE * 2)[h, j], None,
                                         [TEMPERATURE, TABLE]),
    "documents": (None, lambda b, h, i, j: (DOC[i] == DOC[j]) & (i >= j), []),
    "prefix": (None, lambda b, h, i, j: (j < PREFIX[b]) | (i >= j), []),
    "window": (None, lambda b, h, i, j: (i - j).abs() < WIDTH, []),
    "nowhere -inf": (lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")), None, []),
    "methods": (lambda s, b, h, i, j: (s.tanh() * 2).clamp(-1.0, 1.5) - (i - j).abs().to(s.dtype) / 8, None, []),
    "powers": (lambda s, b, h, i, j: s - (i - j) ** 2 / 128, None, []),
    "heads": (lambda s, b, h, i, j: torch.where(h % 2 == 0, s, s.abs()), lambda b, h, i, j: i - j < 8, []),
}  # fmt: skip


# The same where PyTorch, which the expected values are from, has no gradient of a part of a part.
WHOLE_INDEX = {
    "row by row": lambda s, b, h, i, j: s + TABLE[h, i],
    "row after row": lambda s, b, h, i, j: s + LEARNED["square"][i, j],
    "part of a part": lambda s, b, h, i, j: s + LEARNED["many"][0, b, h, i],
    "an index from a tensor": lambda s, b, h, i, j: s + LEARNED["four"][b, h, WHICH, i],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_of_a_compiled_program(name):
    score_mod, mask_mod, captured = PROGRAMS[name]
    leaves = leaves_of(B, H, S, D)
    block_mask = mask_mod and flex.create_block_mask(mask_mod, B, H, S, S, device="cpu", BLOCK_SIZE=16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(q, k, v):
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)

    expected = expected_of(WHOLE_INDEX.get(name, score_mod), mask_mod, *leaves)
    check(program, leaves, expected, [*leaves, *captured])


def test_inductor_and_shapes_that_change():
    bias = draw(H, 64).requires_grad_()

    def call(q, k, v, bias, offset):
        def score_mod(s, b, h, i, j):
            return s * 2 + bias[h, i - j + offset]

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2])
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)

    program = torch.compile(call, fullgraph=True, dynamic=True)
    for length, offset in ((24, 24), (17, 20), (31, 32)):
        leaves = leaves_of(1, H, length, D)
        expected = expected_of(
            lambda s, b, h, i, j: s * 2 + bias[h, i - j + offset], lambda b, h, i, j: i >= j, *leaves
        )  # fmt: skip
        check(program, (*leaves, bias, offset), expected, [*leaves, bias])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1  # lengths and captured integers are no reason to compile again


def test_texts_in_a_compiled_program():
    bias = draw(H, 2 * S).requires_grad_()
    leaves = leaves_of(B, S, H, D)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(q, k, v, bias, offset):
        captured = {"bias": bias, "off": offset, "c": 2.5}
        return tessera.torch.attention(
            q, k, v, score_mod="c * tanh(s / c) + bias[h, i - j + off]", mask_mod="j <= i", captured=captured
        )

    for offset in (24, 23):
        expected = tessera.torch.attention(
            *leaves, score_mod="c * tanh(s / c) + bias[h, i - j + off]", mask_mod="j <= i",
            captured={"bias": bias, "off": offset, "c": 2.5},
        )  # fmt: skip
        check(program, (*leaves, bias, offset), expected, [*leaves, bias])


def test_a_text_beside_a_function():
    bias, leaves = draw(H), leaves_of(B, S, H, D)
    options = dict(score_mod="s + bias[h] * j", mask_mod=lambda b, h, i, j: DOC[i] >= DOC[j], captured={"bias": bias})
    program = torch.compile(tessera.torch.attention, fullgraph=True, backend="aot_eager")
    check(lambda *x: program(*x, **options), leaves, tessera.torch.attention(*leaves, **options), leaves)


def test_a_module_with_a_learned_bias_is_compiled():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.rand(H, **DOUBLE))
            self.reach = 4

        def bias(self, score, b, h, i, j):
            return score - self.slope[h] * (i - j).abs() / self.reach

        def forward(self, x):
            return flex_attention(x, x, x, score_mod=self.bias)

    module, x = Attention(), draw(B, H, S, D)
    expected = module(x)
    (of_eager,) = torch.autograd.grad(expected.square().sum(), [module.slope])
    o = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(o, expected)
    o.square().sum().backward()
    torch.testing.assert_close(module.slope.grad, of_eager)


def test_lse_and_its_gradient_compiled():
    leaves = leaves_of(B, H, S, D)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(q, k, v):
        o, aux = flex_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + TABLE[h, j], return_aux=flex.AuxRequest(lse=True)
        )
        return o.sum() + (aux.lse * 3).sum().double()

    q, k, v = leaves
    s = q @ k.transpose(-1, -2) / math.sqrt(D) + TABLE[:, None, :S]
    expected = (s.softmax(-1) @ v).sum() + 3 * s.logsumexp(-1).sum()
    own, theirs = (torch.autograd.grad(x, [*leaves, TABLE]) for x in (program(*leaves), expected))
    for mine, other in zip(own, theirs):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)


def test_autocast_in_eager_and_compiled_programs():
    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    call = lambda q, k, v: flex_attention(q, k, v, score_mod=PROGRAMS["powers"][0])  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        eager = call(q, k, v)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    assert eager.dtype == compiled.dtype == torch.bfloat16
    assert torch.equal(eager, compiled)
    torch.testing.assert_close(eager.float(), expected_of(PROGRAMS["powers"][0], None, q, k, v), atol=3e-2, rtol=3e-2)


def test_what_a_compiled_program_cannot_trace_is_refused_with_its_line():
    q = draw(1, H, S, D)

    def score_mod(s, b, h, i, j):
        return torch.atan(s)

    with pytest.raises(Exception, match=r"(?s)return torch.atan\(s\).*torch.atan of a traced value"):
        torch.compile(flex_attention, fullgraph=True, backend="aot_eager")(q, q, q, score_mod=score_mod)


def test_second_derivatives_of_a_compiled_program_raise():
    leaves = leaves_of(1, S, H, D)
    score_mod = PROGRAMS["a table"][0]
    program = torch.compile(
        lambda q, k, v: tessera.torch.attention(q * 2, k * 2, v * 2, score_mod=score_mod), fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    (first,) = torch.autograd.grad(program(*leaves).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(first.sum(), leaves)


def test_transforms_of_torch_func():
    q, k, v = leaves_of(B, H, S, D)
    table = TABLE.detach()

    def loss(q, table):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j + S]).square().sum()

    def plain(q, table):
        distance = torch.arange(S)[:, None] - torch.arange(S) + S
        return ((q @ k.mT / math.sqrt(D) + table[:, distance]).softmax(-1) @ v).square().sum()

    k, v, q = k.detach(), v.detach(), q.detach()
    own, theirs = (torch.func.grad(f, argnums=(0, 1))(q, table) for f in (loss, plain))
    for mine, other in zip(own, theirs):
        torch.testing.assert_close(mine, other, atol=1e-9, rtol=1e-9)
    tables, queries = draw(3, H, 2 * S), draw(3, B, H, S, D)
    mapped = torch.func.vmap(loss)(queries, tables)
    torch.testing.assert_close(mapped, torch.stack([plain(*x) for x in zip(queries, tables)]))
    own = torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(None, 0))(q, tables)
    torch.testing.assert_close(own, torch.stack([torch.func.grad(plain, argnums=1)(q, x) for x in tables]))
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(lambda t: torch.func.grad(loss, argnums=1)(q, t).sum())(table)


def test_traced_and_exported_programs():
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = (x.detach() for x in leaves_of(B, H, S, D))
    table = TABLE.detach()

    class Program(torch.nn.Module):
        def forward(self, q, k, v, table):
            return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j + S])

    expected = Program()(q, k, v, table)
    assert torch.equal(make_fx(Program())(q, k, v, table)(q, k, v, table), expected)
    for strict in (False, True):
        exported = torch.export.export(Program(), (q, k, v, table), strict=strict)
        names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
        assert any("program_forward" in name for name in names)
        assert torch.equal(exported.module()(q, k, v, table), expected)


def test_shapes_without_data():
    q = torch.empty(B, H, S, D, device="meta")
    assert flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * 2).shape == q.shape
    with torch._subclasses.fake_tensor.FakeTensorMode():
        q, table = torch.empty(B, H, S, D), torch.empty(H, S)
        assert flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[h, j]).shape == q.shape


def test_wrong_arguments_are_refused_by_name():
    q = draw(1, H, 32, D)
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    for options, words in (
        ({"kernel_options": {"OUTPUT_MAX": True}}, "kernel_options: OUTPUT_MAX changes the result"),
        ({"kernel_options": {"BACKEND": "CUDNN"}}, "kernel_options: BACKEND 'CUDNN', accepted AUTO, TRITON"),
        ({"return_aux": flex.AuxRequest(max_scores=True)}, "return_aux: max_scores is not computed"),
        ({"return_aux": flex.AuxRequest(lse=True), "return_lse": True}, "return_lse: given together with return_aux"),
        ({"block_mask": mask[:, :, :1]}, "block_mask: sliced"),
    ):
        with pytest.raises(tessera.Error, match=words):
            flex_attention(q, q, q, **options)
    for option in ("WRITE_DQ", "PRESCALE_QK", "fwd_BLOCK_M", "FORCE_USE_FLEX_ATTENTION"):
        flex_attention(q, q, q, kernel_options={option: 1})
    with pytest.raises(tessera.Error, match="block_mask: made for 32 queries and 32 keys, accepted one for 16 and 32"):
        flex_attention(q[:, :, :16], q, q, block_mask=mask)
    with pytest.raises(tessera.Error, match="block_mask: on device meta, accepted that of query: cpu"):
        flex_attention(q, q, q, block_mask=mask.to("meta"))
    with pytest.raises(tessera.Error, match="score_mod: .*the dtype of a traced value is compared"):
        flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s if s.dtype == torch.float32 else -s)
    with pytest.raises(tessera.Error, match="score_mod: .*rounding_mode 'trunc', accepted 'floor' and None"):
        flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: torch.div(s, 2, rounding_mode="trunc"))
    nested = torch.nested.nested_tensor([torch.randn(H, 5, D), torch.randn(H, 7, D)], layout=torch.jagged)
    with pytest.raises(tessera.Error, match="query: .*accepted"):
        flex_attention(nested, nested, nested)


# ---- what FlexAttention's own tests are about, in cases of ours -----------------------------------------------------

LEARNED = {
    "head": draw(H), "batch": draw(B), "row": draw(S), "square": draw(S, S), "by head": draw(H, S, S),
    "all": draw(B, H, S, S), "reach": draw(2 * S), "window": draw(17), "four": draw(B, H, 4, S),
    "many": draw(4, B, H, S),
}  # fmt: skip
for _tensor in LEARNED.values():
    _tensor.requires_grad_()
OFFSETS = torch.randint(0, S, (S,))
STARTS = torch.tensor([0, 10, 17])
SEQUENCE = torch.tensor([0] * 10 + [1] * 7 + [2] * 7)
FLAGS = torch.arange(S) >= S // 2
WHICH = torch.tensor(0)
ONE = torch.ones((), dtype=torch.int32)
LAST = torch.tensor([7, 19], dtype=torch.int32)
TRIL = torch.ones(B, 1, S, S, dtype=torch.bool).tril()


def _causal(s, b, h, i, j):
    return torch.where(i >= j, s, float("-inf"))


def _nested(s, b, h, i, j):
    return _causal(s, b, h, i - STARTS[SEQUENCE[i]], j - STARTS[SEQUENCE[j]])


def _neighbours(s, b, h, i, j):
    near = ((i / 6 - j / 6).abs() <= 1) | ((i % 6 - j % 6).abs() <= 1)
    return torch.where(near, s, float("-inf"))


def _video(s, b, h, i, j):
    last = LAST[b]
    return torch.where(((i <= last) & (j <= last)) | (i >= j), s, -float("inf"))


SCORES = {
    "squared": (lambda s, b, h, i, j: s * s, []),
    "inverse causal": (lambda s, b, h, i, j: torch.where(i <= j, s, float("-inf")), []),
    "distance": (lambda s, b, h, i, j: s + (i - j), []),
    "ALiBi of exp2": (lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / H)), []),
    "sine of cosine": (lambda s, b, h, i, j: torch.sin(torch.cos(s)) + torch.tan(b), []),
    "branches": (lambda s, b, h, i, j: torch.cos(s) * torch.sin(s) + torch.tan(b), []),
    "silu": (lambda s, b, h, i, j: torch.nn.functional.silu(s), []),
    "odd keys": (lambda s, b, h, i, j: torch.where(j % 2 == 0, s, float("-inf")), []),
    "composed": (lambda s, b, h, i, j: _causal(s + (i - j), b, h, i, j), []),
    "row after row": (lambda s, b, h, i, j: s + LEARNED["square"][i][j], ["square"]),
    "part of a part": (lambda s, b, h, i, j: s + LEARNED["many"][0][b, h][i], ["many"]),
    "an index from a tensor": (lambda s, b, h, i, j: s + LEARNED["four"][b][h][WHICH, i], ["four"]),
    "all dimensions": (lambda s, b, h, i, j: s + LEARNED["row"][i] + LEARNED["batch"][b] + LEARNED["head"][h],
                       ["row", "batch", "head"]),
    "flags": (lambda s, b, h, i, j: torch.where(FLAGS[i] == FLAGS[j], s, float("-inf")), []),
    "a dense bias": (lambda s, b, h, i, j: s + LEARNED["all"][b, h, i, j], ["all"]),
    "a bias by head, flipped": (lambda s, b, h, i, j: s + LEARNED["by head"][h, j, i], ["by head"]),
    "distance from a table": (lambda s, b, h, i, j: s + LEARNED["reach"][torch.abs(i - j)], ["reach"]),
    "sum of positions": (lambda s, b, h, i, j: s + LEARNED["reach"][i + j], ["reach"]),
    "clamped window": (lambda s, b, h, i, j: s + LEARNED["window"][torch.clamp(i - j + 8, 0, 16)], ["window"]),
    "indirect": (lambda s, b, h, i, j: s + LEARNED["row"][OFFSETS[i]], ["row"]),
    "symmetric": (lambda s, b, h, i, j: s + LEARNED["row"][i] + LEARNED["row"][j], ["row"]),
    "gate": (lambda s, b, h, i, j: s * torch.sigmoid(LEARNED["head"][h].to(torch.float64)), ["head"]),
    "multiplied": (lambda s, b, h, i, j: s * LEARNED["row"][i], ["row"]),
    "nested sequences": (_nested, []),
    "an image's neighbours": (_neighbours, []),
    "bidirectional up to": (_video, []),
    "a number of rank 0": (lambda s, b, h, i, j: s + ONE, []),
    "integer quotient": (lambda s, b, h, i, j: s - i // (1 + j), []),
    "padded": (lambda s, b, h, i, j: torch.where(s <= LAST[b], _causal(s, b, h, i, j), -float("inf")), []),
    "a rounded quotient": (lambda s, b, h, i, j: s + torch.div(i, 3, rounding_mode="floor") - torch.div(j, 4), []),
    "multiples": (lambda s, b, h, i, j: torch.add(s, i, alpha=2) - torch.sub(j, s, alpha=1.5), []),
    "filled": (lambda s, b, h, i, j: s.masked_fill(j > i + 2, -1.5), []),
    "like another": (lambda s, b, h, i, j: torch.where(i >= j, s, torch.full_like(s, -2)) + torch.zeros_like(i)
                     + torch.where(torch.ones_like(j, dtype=torch.bool), s.new_ones(()), h.new_full((), 2.75)), []),
    "the type of another": (lambda s, b, h, i, j: s + (i - j).to(s.dtype) / 7 + (s * 8).type_as(i) // 3, []),
    "bool as a number": (lambda s, b, h, i, j: s + TRIL[b, h.new_zeros(h.shape), i, j], []),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_scores_and_their_gradients(name):
    score_mod, names = SCORES[name]
    leaves = leaves_of(B, H, S, D)
    learned = [LEARNED[each] for each in names]
    expected = expected_of(WHOLE_INDEX.get(name, score_mod), None, *leaves)
    check(lambda *x: flex_attention(*x, score_mod=score_mod), leaves, expected, [*leaves, *learned])


def test_every_score_in_one_compiled_program():
    leaves = leaves_of(B, H, S, D)

    def every(q, k, v):
        return sum(flex_attention(q, k, v, score_mod=score_mod) for score_mod, _ in SCORES.values())

    used = [tensor for name, tensor in LEARNED.items() if any(name in names for _, names in SCORES.values())]
    check(torch.compile(every, fullgraph=True, backend="aot_eager"), leaves, every(*leaves), [*leaves, *used])


def _lists(mask_mod, *shape, **given):
    return flex.create_block_mask(mask_mod, *shape, device="cpu", **{"BLOCK_SIZE": 16, **given})


def _rows_below(b, h, i, j):
    return i < 13


def _late(b, h, i, j):
    return (j < 4) | (j >= 20)


ROWS = {"documents": (None, PROGRAMS["documents"][1]), "few rows": (None, _rows_below), "late keys": (_causal, _late)}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_block_masks_of_pytorch_with_lse(name, compiled):
    score_mod, mask_mod = ROWS[name]
    leaves = leaves_of(B, H, S, D)
    function = torch.compile(flex_attention, fullgraph=True, backend="aot_eager") if compiled else flex_attention
    o, lse = function(*leaves, score_mod, _lists(mask_mod, B, None, S, S), return_lse=True)
    expected = expected_of(score_mod, mask_mod, *leaves)
    torch.testing.assert_close(o, expected, atol=1e-10, rtol=1e-10)
    hidden = ~flex._vmap_for_bhqkv(mask_mod, prefix=())(*map(torch.arange, (1, 1, S, S)))[0, 0].any(-1)
    if name == "few rows":
        assert (o[:, :, hidden] == 0).all() and lse[:, :, hidden].isneginf().all() and hidden.any()
    own = torch.autograd.grad(o.sum() + lse[lse.isfinite()].sum(), leaves)
    assert all(x.isfinite().all() for x in own) and (own[0][:, :, hidden] == 0).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_lists_of_blocks_that_are_as_wide_as_they_must_be(compiled):
    """PyTorch makes a list as wide as all blocks of keys; a caller may leave out the columns that no row uses."""
    mask_mod = lambda b, h, i, j: (i // 8 == j // 8) | ((i - j).abs() <= 2)  # noqa: E731
    whole = _lists(mask_mod, 1, None, 64, 64, BLOCK_SIZE=8)
    names = [f"{full}{axis}" for axis in ("kv", "q") for full in ("", "full_")]
    lists = {}
    for name in names:
        count, indices = getattr(whole, f"{name}_num_blocks"), getattr(whole, f"{name}_indices")
        lists[f"{name}_num_blocks"] = count
        lists[f"{name}_indices"] = indices[..., : max(int(count.max()), 1)].contiguous()
    assert lists["kv_indices"].shape[-1] == 2 and lists["full_kv_indices"].shape[-1] == 1
    narrow = flex.BlockMask(
        seq_lengths=whole.seq_lengths, BLOCK_SIZE=whole.BLOCK_SIZE, mask_mod=whole.mask_mod, **lists
    )
    leaves = leaves_of(1, H, 64, D)
    function = torch.compile(flex_attention, fullgraph=True, backend="aot_eager") if compiled else flex_attention
    check(lambda *x: function(*x, block_mask=narrow), leaves, expected_of(None, mask_mod, *leaves), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_keys_and_values_of_a_narrower_type(dtype):
    q, k, v = leaves_of(B, H, S, D)
    narrow = [x.detach().to(dtype).requires_grad_() for x in (k, v)]
    converted = [x.detach().double().requires_grad_() for x in narrow]
    temperature = lambda s, b, h, i, j: s * LEARNED["head"][h]  # noqa: E731
    o = flex_attention(q, *narrow, temperature)
    expected = expected_of(temperature, None, q, *converted)
    torch.testing.assert_close(o, expected, atol=1e-10, rtol=1e-10)
    d_o = torch.randn_like(o)
    own, theirs = torch.autograd.grad(o, (q, *narrow), d_o), torch.autograd.grad(expected, (q, *converted), d_o)
    torch.testing.assert_close(own[0], theirs[0], atol=1e-9, rtol=1e-9)
    assert all(x.dtype == dtype for x in own[1:])
    with pytest.raises(tessera.Error, match="k: dtype float64, must be that of q: float32"):
        flex_attention(q.float(), k, v)


def test_grouped_heads_and_a_batch_of_one_key():
    q, k, v = draw(3, H, 20, D).requires_grad_(), draw(1, 2, S, D).requires_grad_(), draw(1, 2, S, 5).requires_grad_()
    mask_mod = lambda b, h, i, j: (i + h >= j) | (b == 1)  # noqa: E731
    for block in (16, (8, 32)):
        block_mask = _lists(mask_mod, 3, H, 20, S, BLOCK_SIZE=block)
        expected = expected_of(SCORES["distance"][0], mask_mod, q, k, v)
        given = dict(score_mod=SCORES["distance"][0], block_mask=block_mask, enable_gqa=True)
        check(lambda *x, given=given: flex_attention(*x, **given), (q, k, v), expected, (q, k, v))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_output_has_the_order_of_the_query_in_memory(order, compiled):
    q, k, v = (draw(4, 2, 6, D).permute(order) for _ in range(3))
    function = torch.compile(flex_attention, fullgraph=True, backend="aot_eager") if compiled else flex_attention
    o = function(q, k, v, score_mod=SCORES["distance"][0])
    by_stride = [sorted(range(4), key=x.stride().__getitem__) for x in (o, q)]
    assert by_stride[0] == by_stride[1]
    torch.testing.assert_close(o, expected_of(SCORES["distance"][0], None, q, k, v))


def test_strided_inputs_and_gradients():
    longer = S * (D + 1)
    sizes = [((S * D * H, S * D, D, 1), 997), ((H * D, D, B * H * D, 1), 499), ((longer, B * longer, D + 1, 1), 293)]
    at = lambda n: torch.as_strided(draw(4 * B * H * S * D), (B, H, S, D), *sizes[n]).requires_grad_()  # noqa: E731
    for q_at, k_at, v_at, d_at in ((0, 0, 1, 2), (1, 2, 0, 0), (2, 1, 2, 1)):
        q, k, v, d_o = (at(n) for n in (q_at, k_at, v_at, d_at))
        score_mod = SCORES["ALiBi of exp2"][0]
        own, theirs = flex_attention(q, k, v, score_mod=score_mod), expected_of(score_mod, None, q, k, v)
        for mine, other in zip(*(torch.autograd.grad(x, (q, k, v), d_o.detach()) for x in (own, theirs))):
            torch.testing.assert_close(mine, other)


def test_gradients_and_the_lse_in_float64():
    q, k, v = leaves_of(2, 2, 5, 3)
    score_mod = lambda s, b, h, i, j: torch.where(i >= j, s * s, torch.tanh(s))  # noqa: E731
    assert torch.autograd.gradcheck(lambda *x: flex_attention(*x, score_mod=score_mod), (q, k, v))
    lse = lambda *x: flex_attention(*x, score_mod=score_mod, return_aux=flex.AuxRequest(lse=True))[1].lse  # noqa: E731
    assert lse(q, k, v).dtype == torch.float64
    assert torch.autograd.gradcheck(lse, (q, k, v))


def test_keys_in_pages_of_pytorch():
    experimental = pytest.importorskip("torch.nn.attention.experimental._paged_attention")
    pages, size, batch = 12, 4, 3
    cache = experimental.PagedAttention(pages, size, batch, device="cpu")
    for b, length in enumerate((9, 16, 5)):
        cache.reserve(torch.tensor(b), torch.tensor(length))
        cache.reserve(torch.tensor(b), torch.tensor(16))
    q, k, v = (draw(batch, H, 16, D) for _ in range(3))
    k_cache, v_cache = (torch.zeros(1, H, pages * size, D, **DOUBLE) for _ in range(2))
    cache.assign(torch.arange(batch), torch.arange(16).expand(batch, 16), k, v, k_cache, v_cache)
    mask_mod = lambda b, h, i, j: i >= j  # noqa: E731
    lists = cache.convert_logical_block_mask(_lists(mask_mod, batch, 1, 16, 16, BLOCK_SIZE=size))
    score_mod = cache.get_score_mod(SCORES["distance"][0])
    expected = expected_of(SCORES["distance"][0], mask_mod, q, k, v)
    for function in (flex_attention, torch.compile(flex_attention, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(function(q, k_cache, v_cache, score_mod, lists), expected)


def test_a_block_mask_as_an_argument_of_a_compiled_program():
    flags = torch.rand(6, S) > 0.3
    program = torch.compile(flex_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (2, 4, 6):
        mask_mod = lambda b, h, i, j: flags[b, i] | (i >= j)  # noqa: E731
        q, k, v = (draw(batch, H, S, D) for _ in range(3))
        o = program(q, k, v, block_mask=_lists(mask_mod, batch, None, S, S))
        torch.testing.assert_close(o, expected_of(None, mask_mod, q, k, v))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
