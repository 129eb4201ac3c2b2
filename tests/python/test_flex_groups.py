"""tessera.torch.flex_attention by the groups of FlexAttention's own tests that test_flex_attention.py does not have: on
a GPU in bfloat16 where there is one, otherwise on the CPU in float64. docs/guide/score-programs.md lists the groups."""

import functools
import math

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: E402

import tessera  # noqa: E402
from tessera.torch import create_block_mask, flex_attention  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float64
CAPTURED = torch.float32 if DEVICE == "cuda" else torch.float64
# Of a tensor, relative, as a root mean square. Captured gradients are sums of rounded terms.
MOST_ERROR = 1e-2 if DEVICE == "cuda" else 1e-9
B, H, S, D = 2, 4, 40, 16


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def draw(*shape, dtype=DTYPE, learned=True):
    x = torch.randn(*shape, dtype=torch.float64).to(dtype).to(DEVICE)
    return x.requires_grad_(learned)


def captured(*shape, learned=True):
    return draw(*shape, dtype=CAPTURED, learned=learned)


def rows(*shape):
    """q, k and v of one shape."""
    return tuple(draw(*shape) for _ in range(3))


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def scores_of(q, k, scale=None):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return q.double() @ k.double().mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)


def programmed(s, score_mod, mask_mod):
    """The functions on all scores; -inf where a key is hidden."""
    at = [torch.arange(n, device=DEVICE) for n in s.shape]
    with TransformGetItemToIndex():
        if score_mod is not None:
            s = flex._vmap_for_bhqkv(score_mod, prefix=(0,))(s, *at)
        if mask_mod is not None:
            s = s.masked_fill(~flex._vmap_for_bhqkv(mask_mod, prefix=())(*at), -math.inf)
    return s


def weighted(s, v):
    hidden = s.isneginf().all(-1, keepdim=True)
    weights = torch.where(hidden, 0.0, torch.where(hidden, 0.0, s).softmax(-1))
    return weights @ v.double().repeat_interleave(s.shape[1] // v.shape[1], 1)


def expected_of(q, k, v, score_mod=None, mask_mod=None, scale=None):
    return weighted(programmed(scores_of(q, k, scale), score_mod, mask_mod), v)


def close(own, theirs, what="", most=MOST_ERROR):
    assert own.shape == theirs.shape
    own, theirs = own.detach().double(), theirs.detach().double()
    assert own.isfinite().all(), what
    error = (own - theirs).square().mean().sqrt() / theirs.square().mean().sqrt().clamp(min=1e-3)
    assert error <= most, f"{what}: {error:.2e}"


def check(call, arguments, expected, leaves=(), most=MOST_ERROR):
    """The result, and the gradients of `leaves`, which are among the arguments or captured."""
    o = call(*arguments)
    assert o.dtype == DTYPE
    close(o, expected, "o")
    if leaves:
        d_o = draw(*o.shape, learned=False)
        own = torch.autograd.grad(o, leaves, d_o)
        theirs = torch.autograd.grad(expected, leaves, d_o.to(expected.dtype), retain_graph=True)
        for n, (mine, other) in enumerate(zip(own, theirs)):
            assert mine.dtype == other.dtype
            close(mine, other, f"gradient {n}", most)


def both(call, **options):
    """The call as it is, and compiled."""
    return call, torch.compile(call, fullgraph=True, backend="aot_eager" if DEVICE == "cpu" else "inductor", **options)


def lists(mask_mod, *shape, **given):
    return flex.create_block_mask(mask_mod, *shape, device=DEVICE, **{"BLOCK_SIZE": 16, **given})


def causal(b, h, i, j):
    return i >= j


def hides(s, b, h, i, j):
    return torch.where(i >= j, s, float("-inf"))


# ---- block masks: how they are made and cut --------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 128, 256, 24, (8, 32), (128, 16), (1, 64)])
@pytest.mark.parametrize("length", [40, 41, 128])
def test_sizes_of_blocks(block, length):
    q, k, v = rows(B, H, length, D)
    mask = lists(causal, B, H, length, length, BLOCK_SIZE=block)
    for call in both(flex_attention):
        check(functools.partial(call, block_mask=mask), (q, k, v), expected_of(q, k, v, None, causal), (q, k, v))


@pytest.mark.parametrize("with_full", [False, True])
def test_lists_made_by_hand(with_full):
    """Lists are not sorted, entries after their count are anything, and the lists win over mask_mod."""
    q, k, v = rows(1, H, 32, D)
    count = ints([1, 2]).view(1, 1, 2)
    indices = ints([1, -1], [1, 0]).view(1, 1, 2, 2)
    full = (ints([1, 0]).view(1, 1, 2), ints([0, -1], [-1, -1]).view(1, 1, 2, 2)) if with_full else (None, None)
    mask_mod = lambda b, h, i, j: (i + j) % 3 != 0  # noqa: E731
    mask = flex.BlockMask.from_kv_blocks(
        count, indices, *full, BLOCK_SIZE=16, mask_mod=mask_mod, seq_lengths=(32, 32)
    )

    def seen(b, h, i, j):
        shown = mask_mod(b, h, i, j) & ((i >= 16) | (j >= 16))
        return shown | ((i < 16) & (j < 16)) if with_full else shown

    for call in both(flex_attention):
        check(functools.partial(call, block_mask=mask), (q, k, v), expected_of(q, k, v, None, seen), (q, k, v))


def test_lists_without_a_function():
    q, k, v = rows(1, H, 32, D)
    mask = flex.BlockMask.from_kv_blocks(
        ints([1, 2]).view(1, 1, 2), ints([0, 0], [1, 0]).view(1, 1, 2, 2), BLOCK_SIZE=16, seq_lengths=(32, 32)
    )
    seen = lambda b, h, i, j: i // 16 >= j // 16  # noqa: E731
    for call in both(flex_attention):
        check(functools.partial(call, block_mask=mask), (q, k, v), expected_of(q, k, v, None, seen), (q, k, v))


def test_lists_of_keys_alone():
    """Those of queries, which PyTorch's backward reads, are not needed."""
    q, k, v = rows(B, H, S, D)
    mask = lists(causal, 1, 1, S, S)
    for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
        setattr(mask, name, None)
    for call in both(flex_attention):
        check(functools.partial(call, block_mask=mask), (q, k, v), expected_of(q, k, v, None, causal), (q, k, v))


def test_masks_that_are_cut_by_batch_head_and_rows():
    q, k, v = rows(4, H, 64, D)
    reach = ints(3, 9, 27, 81)
    mask_mod = lambda b, h, i, j: i - j < reach[b] + h  # noqa: E731
    whole = lists(mask_mod, 4, H, 64, 64)

    def cut(index, mask_mod):
        mask = whole[index]
        with pytest.raises(tessera.Error, match="block_mask: sliced"):
            flex_attention(q, k, v, block_mask=mask)
        mask.mask_mod = mask_mod
        return mask

    at = (q[1:3, :2], k[1:3, :2], v[1:3, :2])
    second = lambda b, h, i, j: mask_mod(b + 1, h, i, j)  # noqa: E731
    mask = cut((slice(1, 3), slice(0, 2)), second)
    check(functools.partial(flex_attention, block_mask=mask), at, expected_of(*at, None, second), (q, k, v))

    one = lambda b, h, i, j: mask_mod(b + 2, h + 3, i, j)  # noqa: E731
    at = (q[2:3, 3:], k[2:3, 3:], v[2:3, 3:])
    mask = cut((2, 3), one)
    check(functools.partial(flex_attention, block_mask=mask), at, expected_of(*at, None, one), (q, k, v))

    # Decoding: the rows of one block of queries.
    late = lambda b, h, i, j: mask_mod(b, h, i + 48, j)  # noqa: E731
    mask = cut((slice(None), slice(None), ints(3)), late)
    mask.seq_lengths = (16, 64)
    at = (q[:, :, 48:], k, v)
    for call in both(flex_attention):
        check(functools.partial(call, block_mask=mask), at, expected_of(*at, None, late), (q, k, v))


def test_a_mask_that_is_adjusted_to_shorter_inputs():
    whole = lists(causal, B, None, 64, 64)
    q, k, v = draw(B, H, 24, D), draw(B, H, 40, D), draw(B, H, 40, D)
    with pytest.raises(tessera.Error, match="block_mask: made for 64 queries and 64 keys"):
        flex_attention(q, k, v, block_mask=whole)
    mask = whole._adjust(24, 40)
    mask.seq_lengths = (24, 40)
    check(functools.partial(flex_attention, block_mask=mask), (q, k, v), expected_of(q, k, v, None, causal), (q, k, v))


def test_masks_of_another_batch_or_number_of_heads_are_refused():
    q, k, v = rows(B, H, S, D)
    for shape in ((B + 1, None), (None, H + 1), (B, 2)):
        for make in (lists, create_block_mask):
            mask = make(causal, *shape, S, S)
            for call in both(flex_attention):
                with pytest.raises(Exception, match="block_mask: .*accepted"):
                    call(q, k, v, block_mask=mask)


def test_masks_on_another_device():
    q, k, v = rows(B, H, S, D)
    mask = lists(causal, B, None, S, S)
    with pytest.raises(tessera.Error, match="block_mask: on device meta"):
        flex_attention(q, k, v, block_mask=mask.to("meta"))
    back = mask.to("cpu").to(DEVICE)
    check(functools.partial(flex_attention, block_mask=back), (q, k, v), expected_of(q, k, v, None, causal))


def test_functions_that_PyTorch_combines():
    q, k, v = rows(B, H, S, D)
    near = lambda b, h, i, j: i - j < 9  # noqa: E731
    first = lambda b, h, i, j: j < 5  # noqa: E731
    mask_mod = flex.or_masks(flex.and_masks(causal, near), first)
    seen = lambda b, h, i, j: (causal(b, h, i, j) & near(b, h, i, j)) | first(b, h, i, j)  # noqa: E731
    for make in (lists, create_block_mask):
        mask = make(mask_mod, None, None, S, S)
        for call in both(flex_attention):
            check(functools.partial(call, block_mask=mask), (q, k, v), expected_of(q, k, v, None, seen), (q, k, v))
    nothing = lists(flex.and_masks(causal, lambda b, h, i, j: i < j), None, None, S, S)
    assert (flex_attention(q, k, v, block_mask=nothing) == 0).all()


def test_masks_made_by_a_compiled_function():
    documents = (torch.arange(S, device=DEVICE) // 13).int()
    mask_mod = lambda b, h, i, j: causal(b, h, i, j) & (documents[i] == documents[j])  # noqa: E731
    q, k, v = rows(1, H, S, D)
    make = torch.compile(flex.create_block_mask, backend="aot_eager")
    mask = make(mask_mod, 1, 1, S, S, device=DEVICE, BLOCK_SIZE=16)
    for call in both(flex_attention):
        check(functools.partial(call, block_mask=mask), (q, k, v), expected_of(q, k, v, None, mask_mod), (q, k, v))


def test_a_mask_made_and_used_in_a_model_that_compiles_both():
    """As a model of padded batches does, whose batch and length change."""
    make = torch.compile(flex.create_block_mask, dynamic=True, backend="aot_eager")
    attend = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend="aot_eager")

    def padded(b, h, i, j, lengths):
        return (i < lengths[b]) & (j < lengths[b])

    for batch, length in ((3, 24), (5, 31), (2, 40)):
        lengths = torch.randint(1, length, (batch,), device=DEVICE)
        q, k, v = rows(batch, H, length, D)
        mask_mod = functools.partial(padded, lengths=lengths)
        mask = make(mask_mod, batch, None, length, length, device=DEVICE)
        o = attend(query=q, key=k, value=v, block_mask=mask)
        close(o, expected_of(q, k, v, None, mask_mod))
        assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), (q, k, v)))


# ---- functions and what they capture ---------------------------------------------------------------------------------


def test_what_a_function_captures_may_be_made_in_the_compiled_program():
    q, k, v = rows(B, H, S, D)
    slope = captured(H)

    def program(q, k, v, slope):
        place = torch.arange(S, device=DEVICE) * 2
        bias = (2 * slope)[:, None] * place
        view = bias.view(H, S // 8, 8).transpose(1, 2)
        return flex_attention(q.sin(), k, v, score_mod=lambda s, b, h, i, j: s + view[h, j % 8, j // 8]).cos()

    bias = (2 * slope)[:, None] * torch.arange(S, device=DEVICE) * 2
    expected = expected_of(q.double().sin(), k, v, lambda s, b, h, i, j: s + bias[h, j]).cos()
    for call in both(program):
        check(call, (q, k, v, slope), expected, (q, k, v, slope))


def test_a_captured_tensor_that_depends_on_the_query():
    q, k, v = rows(B, H, S, D)
    table = captured(8, D)

    def program(q, k, v):
        part = torch.einsum("bhqd,rd->bhqr", q.to(CAPTURED), table)
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + part[b, h, i, j // 5])

    part = torch.einsum("bhqd,rd->bhqr", q.double(), table.double())
    expected = expected_of(q, k, v, lambda s, b, h, i, j: s + part[b, h, i, j // 5])
    for call in both(program):
        check(call, (q, k, v), expected, (q, k, v, table))


VIEWS = (lambda x: x.mT, lambda x: x[:, ::2], lambda x: x.expand(3, -1, -1)[1], lambda x: x[1:])


@pytest.mark.parametrize("make", VIEWS)
def test_views_of_captured_tensors(make):
    q, k, v = rows(1, H, 20, D)
    table = captured(S, S)
    view = make(table)
    score_mod = lambda s, b, h, i, j: s + view[j, i]  # noqa: E731
    expected = expected_of(q, k, v, score_mod)
    for call in both(flex_attention):
        check(functools.partial(call, score_mod=score_mod), (q, k, v), expected, (q, k, v, table))


def test_captured_tensors_of_other_types():
    q, k, v = rows(B, H, S, D)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        table = draw(H, S, dtype=dtype)
        number = torch.tensor(0.5, dtype=dtype, device=DEVICE, requires_grad=True)
        score_mod = lambda s, b, h, i, j: s * number + table[h, i] + table[h, j]  # noqa: E731
        expected = expected_of(q, k, v, score_mod)
        o = flex_attention(q, k, v, score_mod=score_mod)
        close(o, expected)
        own, theirs = (torch.autograd.grad(x.sum(), (table, number)) for x in (o * o, expected * expected))
        for mine, other in zip(own, theirs):
            assert mine.dtype == dtype
            error = (mine.double() - other.double()).norm() / other.double().norm()
            assert error < (2e-2 if dtype != torch.float32 or DEVICE == "cuda" else 1e-5)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        flags = torch.arange(S, device=DEVICE).remainder(2).to(dtype)
        mask_mod = lambda b, h, i, j: (flags[i] == flags[j]) | (i == j)  # noqa: E731
        mask = create_block_mask(mask_mod, None, None, S, S)
        close(flex_attention(q, k, v, block_mask=mask), expected_of(q, k, v, None, mask_mod))


def test_only_what_is_captured_is_learned():
    q, k, v = (x.detach() for x in rows(B, H, S, D))
    reach = captured(2 * S)
    score_mod = lambda s, b, h, i, j: s + reach[torch.abs(i - j)]  # noqa: E731
    for call in both(flex_attention):
        check(functools.partial(call, score_mod=score_mod), (q, k, v), expected_of(q, k, v, score_mod), (reach,))


def test_functions_of_other_forms():
    """A partial, a method, a module with parameters, an object with __call__, a list and a dict of tensors."""
    q, k, v = rows(B, H, S, D)
    tables = [captured(H), captured(S)]
    named = {"row": tables[1]}

    class Bias(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Parameter(tables[0].detach().clone())

        def forward(self, s, b, h, i, j):
            return s * torch.sigmoid(self.gate[h])

        def window(self, b, h, i, j):
            return (i - j).abs() < 11

    class Called:
        def __init__(self, table):
            self.table = table

        def __call__(self, s, b, h, i, j):
            return s + self.table[j]

    def scaled(factor, s, b, h, i, j, table=None):
        return s * factor + table[i]

    module = Bias()
    for score_mod, learned in (
        (functools.partial(scaled, 0.5, table=tables[1]), tables[1:]),
        (module, [module.gate]),
        (Called(tables[1]), tables[1:]),
        (lambda s, b, h, i, j: s * tables[0][h] + tables[1][j], tables),
        (lambda s, b, h, i, j: s + named["row"][i], tables[1:]),
    ):
        mask = create_block_mask(module.window, None, None, S, S)
        expected = expected_of(q, k, v, score_mod, module.window)
        for call in both(flex_attention):
            given = dict(score_mod=score_mod, block_mask=mask)
            check(functools.partial(call, **given), (q, k, v), expected, (q, k, v, *learned))
            torch.compiler.reset()


def test_a_function_whose_branch_changes():
    q, k, v = rows(B, H, S, D)
    one = torch.ones((), dtype=torch.int32, device=DEVICE) * 2
    adds = True

    def score_mod(s, b, h, i, j):
        return s + one if adds else s * one

    calls = both(functools.partial(flex_attention, score_mod=score_mod))
    for adds in (True, False, True):
        for call in calls:
            check(call, (q, k, v), expected_of(q, k, v, score_mod), (q, k, v))


def test_sizes_that_a_function_captures_do_not_compile_again():
    def program(x):
        batch, _, length, _ = x.shape
        return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s + (i - j) * batch / length)

    call = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (2, 4, 6):
        x = draw(batch, H, S, D)
        # In float64, which a quotient of PyTorch's integers is not.
        score_mod = lambda s, b, h, i, j: s + (i - j).to(s.dtype) * batch / S  # noqa: E731
        check(call, (x,), expected_of(x, x, x, score_mod), (x,))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_lengths_that_change_compile_twice():
    """As any compiled function of PyTorch: once with the first lengths, once with lengths that may be any."""
    call = torch.compile(flex_attention, backend="aot_eager")
    for n in range(4):
        q, k, v = draw(B, H, 1, D), draw(B, H, S + n, D), draw(B, H, S + n, D)
        check(functools.partial(call, score_mod=hides), (q, k, v), expected_of(q, k, v, hides))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == min(n + 1, 2)


def test_several_calls_in_one_program():
    q, k, v = rows(B, H, S, D)
    near = lambda b, h, i, j: causal(b, h, i, j) & (i <= j + 7)  # noqa: E731
    masks = [lists(x, 1, None, S, S) for x in (causal, near)]
    shifted = lambda s, b, h, i, j: s + (i - j) / 8  # noqa: E731

    def program(q, k, v):
        first = flex_attention(q, k, v, shifted, masks[0])
        return flex_attention(first, k, v, block_mask=masks[1]) + flex_attention(q, first, v, shifted)

    first = expected_of(q, k, v, shifted, causal).to(DTYPE)
    expected = expected_of(first, k, v, None, near) + expected_of(q, first, v, shifted)
    for call in both(program):
        check(call, (q, k, v), expected, (q, k, v))


def test_functions_of_other_modules():
    """A scalar tensor made in score_mod, a number of Python's math, and an autograd.Function, which is refused."""

    class Hide(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(s, shown):
            return torch.where(shown, s, -float("inf"))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.mark_non_differentiable(inputs[1])

        @staticmethod
        def backward(ctx, d_s):
            return d_s, None

    q, k, v = rows(B, H, S, D)
    made = lambda s, b, h, i, j: s * math.log(3) * torch.tensor(0.5, device=DEVICE) + (i - j) / 8  # noqa: E731
    for call in both(flex_attention):
        check(functools.partial(call, score_mod=made), (q, k, v), expected_of(q, k, v, made), (q, k, v))
    # Its backward is its own, not the derivative.
    with pytest.raises(tessera.Error, match="score_mod: Hide: an autograd.Function"):
        flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: Hide.apply(s, i >= j))


def test_distances_of_points():
    """Arithmetic of the rows of a captured matrix, and a sum over their few elements."""
    q, k, v = rows(B, H, S, D)
    points, widths = captured(S, 3), captured(H)

    def score_mod(s, b, h, i, j):
        distance = ((points[i] - points[j]) ** 2).sum(-1)
        return s * torch.exp(-distance / (1 + widths[h] ** 2))

    def plain(s, b, h, i, j):
        distance = sum((points[i, n] - points[j, n]) ** 2 for n in range(3))
        return s * torch.exp(-distance / (1 + widths[h] ** 2))

    expected = expected_of(q, k, v, plain)
    for call in both(flex_attention):
        check(functools.partial(call, score_mod=score_mod), (q, k, v), expected, (q, k, v, points, widths))


def test_parts_of_captured_tensors():
    q, k, v = rows(B, H, S, D)
    points, matrices = captured(S, 3), captured(S, 2, 2)

    def unpacked(s, b, h, i, j):
        x, y, z = points[i]
        return s + x * points[j][1] - y.abs() + z

    # PyTorch has no gradient of a part, so that the expected values are from elements.
    for score_mod, plain, learned in (
        (unpacked, lambda s, b, h, i, j: s + points[i, 0] * points[j, 1] - points[i, 1].abs() + points[i, 2], [points]),
        (lambda s, b, h, i, j: s + torch.sum(points[i] * points[j], dim=-1) / points.shape[1],
         lambda s, b, h, i, j: s + sum(points[i, n] * points[j, n] for n in range(3)) / 3, [points]),
        (lambda s, b, h, i, j: s + (matrices[i] * points[j, 0]).sum(0)[1] + matrices[j].sum() / 4,
         lambda s, b, h, i, j: s + (matrices[i, 0, 1] + matrices[i, 1, 1]) * points[j, 0]
         + sum(matrices[j, m, n] for m in range(2) for n in range(2)) / 4, [points, matrices]),
        (lambda s, b, h, i, j: s + torch.where(2 * points[i] > 0, points[j], 0.0).amax(-1),
         lambda s, b, h, i, j: s + functools.reduce(
             torch.maximum, [torch.where(points[i, n] > 0, points[j, n], 0.0) for n in range(3)]), [points]),
    ):  # fmt: skip
        expected = expected_of(q, k, v, plain)
        for call in both(flex_attention):
            check(functools.partial(call, score_mod=score_mod), (q, k, v), expected, (q, k, v, *learned))
            torch.compiler.reset()
    for score_mod, words in (
        (lambda s, b, h, i, j: s + points[i], r"array of shape \[3\]"),
        (lambda s, b, h, i, j: s + (points[i] - matrices[j]).sum(), r"shapes \[3\] and \[2, 2\]"),
        (lambda s, b, h, i, j: s + points.sum(), "'points' as a whole"),
    ):
        with pytest.raises(tessera.Error, match=words):
            flex_attention(q, k, v, score_mod=score_mod)


def test_a_sum_over_many_elements_is_refused():
    q, k, v = rows(1, H, S, D)
    points = captured(S, 256)
    for call in both(flex_attention):
        with pytest.raises(Exception, match="score_mod|points"):
            call(q, k, v, score_mod=lambda s, b, h, i, j: s - (points[i] - points[j]).abs().sum(-1))


def test_what_is_hidden_does_no_harm():
    """Scores, derivatives and captured elements that are not numbers, where a mask hides them and beyond the batch."""
    q, k, v = rows(1, H, 57, D)
    mask = create_block_mask(causal, None, None, 57, 57)
    table = torch.full((2, 57, 57), math.nan, dtype=CAPTURED, device=DEVICE)
    table[0] = torch.where(torch.ones(57, 57, dtype=torch.bool).tril(), 0.5, math.nan)
    table.requires_grad_()
    below = lambda s, b, h, i, j: s + 1 / (i - j + torch.where(i >= j, 1, 0))  # noqa: E731
    for score_mod, learned in (
        (lambda s, b, h, i, j: s + table[b, i, j], [table]),
        (below, []),
        (lambda s, b, h, i, j: s + torch.sqrt(torch.where(i >= j, 2.0, -1.0)) * torch.log(i - j + 1), []),
        (lambda s, b, h, i, j: torch.where(s > 0, torch.log(s), s), []),
    ):
        for call in both(flex_attention):
            o = call(q, k, v, score_mod, mask)
            gradients = torch.autograd.grad(o.float().sum(), (q, k, v, *learned))
            assert all(x.isfinite().all() for x in (o, *gradients))
            torch.compiler.reset()


def test_a_mask_of_some_heads():
    kinds = torch.tensor([True, False, True, False], device=DEVICE)
    mask_mod = lambda b, h, i, j: kinds[h] & (i >= j)  # noqa: E731
    q, k, v = draw(B, H, S, D), draw(B, 2, S, D), draw(B, 2, S, D)
    for make in (lists, create_block_mask):
        mask = make(mask_mod, 1, H, S, S)
        for call in both(flex_attention):
            given = dict(score_mod=lambda s, b, h, i, j: s + (i - j) / 8, block_mask=mask, enable_gqa=True)
            expected = expected_of(q, k, v, given["score_mod"], mask_mod)
            check(functools.partial(call, **given), (q, k, v), expected, (q, k, v))


def test_numbers_of_heads_and_lengths_that_change():
    def program(q, k, v, scale):
        reach = (q.shape[2] // 8 + k.shape[2] // 8) * 4
        mask = create_block_mask(lambda b, h, i, j: j < reach, None, None, q.shape[2], k.shape[2])
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * scale[h], block_mask=mask)

    call = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    for heads, queries, keys in ((4, 24, 40), (8, 40, 24), (4, 16, 32)):
        q, k, v = draw(B, heads, queries, D), draw(B, heads, keys, D), draw(B, heads, keys, D)
        scale, reach = captured(heads), (queries // 8 + keys // 8) * 4
        expected = expected_of(q, k, v, lambda s, b, h, i, j: s * scale[h], lambda b, h, i, j: j < reach)
        check(call, (q, k, v, scale), expected, (q, k, v, scale))


# ---- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dims", [(4, 4), (16, 8), (8, 16), (17, 17), (94, 121)])
def test_head_dimensions(head_dims):
    q, k, v = draw(B, H, S, head_dims[0]), draw(B, H, S, head_dims[0]), draw(B, H, S, head_dims[1])
    for call in both(flex_attention):
        check(functools.partial(call, score_mod=hides), (q, k, v), expected_of(q, k, v, hides), (q, k, v))


@pytest.mark.parametrize("heads", [(16, 1), (8, 2), (4, 4)])
@pytest.mark.parametrize("batch_k", [1, 3])
def test_decoding_steps(heads, batch_k):
    """One and three queries, heads in groups, a batch of one key, an offset, and a table of keys."""
    offset, table = ints(23)[0], captured(S, learned=False)
    mask_mod = lambda b, h, i, j: j <= i + offset  # noqa: E731
    score_mod = lambda s, b, h, i, j: s + table[j]  # noqa: E731
    for queries in (1, 3):
        q, k, v = draw(3, heads[0], queries, D), draw(batch_k, heads[1], S, D), draw(batch_k, heads[1], S, D)
        wide = [x.expand(3, -1, -1, -1) for x in (k, v)]
        expected = expected_of(q, *wide, score_mod, mask_mod)
        mask = lists(mask_mod, 3, None, queries, S, BLOCK_SIZE=(1, 16))
        for call in both(flex_attention):
            given = dict(score_mod=score_mod, block_mask=mask, enable_gqa=True)
            check(functools.partial(call, **given), (q, k, v), expected, (q, k, v))


def test_rows_whose_places_in_memory_are_shared_or_odd():
    """Batches that begin an element apart, rows with a gap, elements of a row that are not neighbours."""
    memory = draw(4 * B * H * S * D, learned=False)
    gap = (B + 1) * (H + 1) * D
    k = torch.as_strided(memory, (B, H, S, D), (1, D, gap, 1), 97)
    v = torch.as_strided(memory, (B, H, S, D), (S * (D + 1), B * S * (D + 1), D + 1, 1), 293)
    q = draw(1, H, B, D, learned=False).transpose(0, 2)
    across = draw(B, H, D, S).mT
    for call in both(flex_attention):
        for at in ((q, k, v), (across, k, across), (across, across, v)):
            check(functools.partial(call, score_mod=hides), at, expected_of(*at, hides))
        check(functools.partial(call, score_mod=hides), (across,) * 3, expected_of(*(across,) * 3, hides), (across,))


def test_a_model_that_splits_one_projection():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(H * D, 3 * H * D)

        def forward(self, x):
            q, k, v = self.project(x).view(B, S, 3, H, D).permute(2, 0, 3, 1, 4)
            return flex_attention(q, k, v, hides).transpose(1, 2).reshape(B, S, H * D)

    model, x = Model().to(DEVICE, DTYPE), draw(B, S, H * D)
    q, k, v = model.project(x).view(B, S, 3, H, D).permute(2, 0, 3, 1, 4)
    expected = expected_of(q, k, v, hides).transpose(1, 2).reshape(B, S, H * D)
    for call in both(model):
        o = call(x)
        close(o, expected)
        own, theirs = (torch.autograd.grad(y.double().sum(), list(model.parameters()), retain_graph=True)
                       for y in (o, expected))  # fmt: skip
        for mine, other in zip(own, theirs):
            close(mine, other)


def test_inputs_without_elements():
    for queries, keys in ((0, S), (S, 0), (0, 0)):
        q, k, v = draw(B, H, queries, D), draw(B, H, keys, D), draw(B, H, keys, D)
        o = flex_attention(q, k, v, score_mod=hides)
        assert o.shape == q.shape and (o == 0).all()
        assert all((x == 0).all() for x in torch.autograd.grad(o.sum(), (q, k, v)))


def test_wrong_inputs_are_refused_by_name():
    q, k, v = rows(B, H, S, D)
    for given, words in (
        ((q, k.to("meta"), v), "k: .*device"),
        ((q, k[..., :8], v), "k: "),
        ((q, k[:, :2], v[:, :2]), "enable_gqa=True"),
        ((q[:, :3], k[:, :2], v[:, :2], None, None, None, True), "q: .*heads|Hq|multiple"),
        ((q, k, v[:, :, :9]), "v: "),
        ((q[0], k[0], v[0]), "query: rank 3"),
        ((q, k.to(torch.float16), v), "k: dtype"),
        ((q.int(), k.int(), v.int()), "q: dtype"),
    ):
        for call in both(flex_attention):
            with pytest.raises(Exception, match=words):
                call(*given)
    away = torch.zeros(H, device="meta")
    with pytest.raises(tessera.Error, match="captured"):
        flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + away[h])
    table = captured(B, 8)
    with pytest.raises(tessera.Error, match="score_mod: .*table"):
        flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table)
    with pytest.raises(tessera.Error, match="BACKEND.*FORCE_USE_FLEX_ATTENTION"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True})


# ---- the log-sum-exp, and the calls around ---------------------------------------------------------------------------


def test_the_lse_alone_and_two_parts_that_are_merged():
    q, k, v = rows(B, H, S, D)
    near = lambda b, h, i, j: (i >= j) & (i - j <= 9)  # noqa: E731
    far = lambda b, h, i, j: (i >= j) & (i - j > 9)  # noqa: E731

    def program(q, k, v):
        parts = [flex_attention(q, k, v, block_mask=create_block_mask(x, None, None, S, S), return_lse=True)
                 for x in (near, far)]  # fmt: skip
        most = torch.maximum(parts[0][1], parts[1][1])
        weights = [torch.exp(lse - most)[..., None] for _, lse in parts]
        merged = sum(o.to(w.dtype) * w for (o, _), w in zip(parts, weights)) / sum(weights)
        return merged.to(q.dtype)

    def only(q, k, v):
        return 2 * flex_attention(q, k, v, hides, return_lse=True)[1]

    s = programmed(scores_of(q, k), hides, None)
    for call, lse in zip(both(program), both(only)):
        # The gradient of an LSE is float32.
        check(call, (q, k, v), weighted(s, v), (q, k, v), most=max(MOST_ERROR, 1e-6))
        mine = lse(q, k, v)
        own, theirs = (torch.autograd.grad(x.sum(), (q, k), retain_graph=True) for x in (mine, 2 * s.logsumexp(-1)))
        torch.testing.assert_close(mine.double(), 2 * s.logsumexp(-1), atol=1e-3, rtol=1e-3)
        for mine, other in zip(own, theirs):
            close(mine, other, "gradient of the LSE", max(MOST_ERROR, 1e-6))


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("score_mod", [None, hides, lambda s, b, h, i, j: s * s - (i - j) / 4])
def test_pages(size, score_mod):
    """Pages of PyTorch's class, of a larger batch, in any order, with grouped heads and the LSE."""
    experimental = pytest.importorskip("torch.nn.attention.experimental._paged_attention")
    batch, length = 3, 32
    cache = experimental.PagedAttention(length // size * 8, size, batch + 2, device=DEVICE)
    for lengths in ((9, 16, 5), (9, 32, 20), (32, 32, 32)):
        for b, n in enumerate(lengths):
            cache.reserve(torch.tensor(b, device=DEVICE), torch.tensor(n, device=DEVICE))
    q, k, v = (draw(batch, h, length, D, learned=False) for h in (H, 2, 2))
    k_cache, v_cache = (torch.zeros(1, 2, length * 8, D, dtype=DTYPE, device=DEVICE) for _ in range(2))
    at = torch.arange(length, device=DEVICE).expand(batch, length)
    cache.assign(torch.arange(batch, device=DEVICE), at, k, v, k_cache, v_cache)
    of_pages = cache.convert_logical_block_mask(lists(causal, batch, 1, length, length, BLOCK_SIZE=size))
    s = programmed(scores_of(q, k), score_mod, causal)
    for call in both(flex_attention):
        given = dict(block_mask=of_pages, enable_gqa=True, return_lse=True)
        o, lse = call(q, k_cache, v_cache, cache.get_score_mod(score_mod), **given)
        close(o, weighted(s, v))
        torch.testing.assert_close(lse.double(), s.logsumexp(-1), atol=1e-2, rtol=1e-2)


def test_decoding_from_pages_at_places_of_their_own():
    experimental = pytest.importorskip("torch.nn.attention.experimental._paged_attention")
    size, lengths = 8, (5, 30, 17)
    cache = experimental.PagedAttention(16, size, 3, device=DEVICE)
    k_cache, v_cache = (torch.zeros(1, H, 16 * size, D, dtype=DTYPE, device=DEVICE) for _ in range(2))
    filled = []
    for b, n in enumerate(lengths):
        cache.reserve(torch.tensor(b, device=DEVICE), torch.tensor(32, device=DEVICE))
        k, v = (draw(1, H, n, D, learned=False) for _ in range(2))
        at = torch.arange(n, device=DEVICE).view(1, n)
        cache.assign(torch.tensor([b], device=DEVICE), at, k, v, k_cache, v_cache)
        filled.append((k, v))
    q, places = draw(3, H, 1, D, learned=False), torch.tensor(lengths, device=DEVICE)
    shown = lists(lambda b, h, i, j: j < places[b], 3, 1, 1, 32, BLOCK_SIZE=size)
    of_pages = cache.convert_logical_block_mask(shown, kv_len=places)
    for score_mod in (None, lambda s, b, h, i, j: s - j / 8):
        expected = torch.cat([expected_of(q[b : b + 1], k, v, score_mod) for b, (k, v) in enumerate(filled)])
        for call in both(flex_attention):
            given = dict(score_mod=cache.get_score_mod(score_mod, kv_len=places), block_mask=of_pages)
            check(functools.partial(call, **given), (q, k_cache, v_cache), expected)


def test_what_return_aux_asks_for():
    q, k, v = rows(B, H, S, D)
    for call in both(flex_attention):
        o, aux = call(q, k, v, hides, return_aux=flex.AuxRequest())
        assert aux == flex.AuxOutput(lse=None, max_scores=None)
        close(o, expected_of(q, k, v, hides))
        torch.compiler.reset()
        with pytest.raises(Exception, match="max_scores is not computed"):
            call(q, k, v, hides, return_aux=flex.AuxRequest(max_scores=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="a limit of GPUs' grids")
def test_more_batches_and_heads_than_a_grid_has_rows():
    q, k, v = (torch.randn(22720, 3, 64, 32, dtype=torch.float16, device=DEVICE, requires_grad=True) for _ in range(3))
    o = flex_attention(q, k, v, score_mod=hides)
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    some = [x[-1:].detach().requires_grad_() for x in (q, k, v)]
    close(o[-1:], expected_of(*some, hides))
    of_some = torch.autograd.grad(expected_of(*some, hides).sum(), some)
    for mine, other in zip(gradients, of_some):
        close(mine[-1:], other)


def test_checkpoints_and_inference():
    from torch.utils.checkpoint import checkpoint

    q, k, v = rows(B, H, S, D)
    table = captured(S)
    score_mod = lambda s, b, h, i, j: s + table[j]  # noqa: E731
    expected = expected_of(q, k, v, score_mod)
    again = lambda q, k, v: checkpoint(flex_attention, q, k, v, score_mod, use_reentrant=False)  # noqa: E731
    for call in both(again):
        check(call, (q, k, v), expected, (q, k, v, table))
    with torch.inference_mode():
        close(flex_attention(q, k, v, score_mod), expected)


def test_programs_that_call_PyTorchs_function():
    q, k, v = rows(B, H, S, D)

    def program(q, k, v):
        return torch.nn.attention.flex_attention.flex_attention(q, k, v, score_mod=hides)

    assert "torch.nn.attention.flex_attention.flex_attention" in tessera.torch.activate_flex_attention()
    try:
        for call in both(program):
            check(call, (q, k, v), expected_of(q, k, v, hides), (q, k, v))
    finally:
        tessera.torch.restore_flex_attention()
