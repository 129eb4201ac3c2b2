"""tessera.torch.flex_attention in compiled programs, under transforms, and beside FlexAttention's own tests by idea."""

import math

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

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
    at = torch.meshgrid(*map(torch.arange, (q.shape[0], q.shape[1], q.shape[2], k.shape[2])), indexing="ij")
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    s = s if score_mod is None else score_mod(s, *at)
    return (s if mask_mod is None else s.masked_fill(~mask_mod(*at), -math.inf)).softmax(-1) @ v


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


def _element(table, h, i):
    return table[h][i] if h.dim() == 0 else table[h, i]  # of one pair, or of all at once


PROGRAMS = {
    "a table": (lambda s, b, h, i, j: torch.where(i >= j, s + TABLE[h, i - j + S], torch.tanh(s)), None, [TABLE]),
    "one tensor twice": (lambda s, b, h, i, j: s + PLACE[i] * PLACE[j], None, [PLACE]),
    "rank 0": (lambda s, b, h, i, j: s * TEMPERATURE, lambda b, h, i, j: i >= j, [TEMPERATURE]),
    "row by row": (lambda s, b, h, i, j: s + _element(TABLE, h, i), None, [TABLE]),
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


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_of_a_compiled_program(name):
    score_mod, mask_mod, captured = PROGRAMS[name]
    leaves = leaves_of(B, H, S, D)
    block_mask = mask_mod and flex.create_block_mask(mask_mod, B, H, S, S, device="cpu", BLOCK_SIZE=16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(q, k, v):
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)

    check(program, leaves, expected_of(score_mod, mask_mod, *leaves), [*leaves, *captured])


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
        return expected_of(lambda s, b, h, i, j: s + table[h, i - j + S], None, q, k, v).square().sum()

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
    nested = torch.nested.nested_tensor([torch.randn(H, 5, D), torch.randn(H, 7, D)], layout=torch.jagged)
    with pytest.raises(tessera.Error, match="query: .*accepted"):
        flex_attention(nested, nested, nested)
