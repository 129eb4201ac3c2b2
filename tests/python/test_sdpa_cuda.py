"""Features that only a GPU has: PyTorch's choice of backends, dropout there, CUDA graphs, streams, the caching
allocator."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import tessera.torch  # noqa: E402
from torch_reference import at, check, random  # noqa: E402
from torch_registry import AVAILABLE, calls, on_tessera, restored  # noqa: E402, F401

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
import models  # noqa: E402
from test_models import compare_models  # noqa: E402

if not AVAILABLE:
    pytest.skip("this release of PyTorch has no torch.library.get_kernel", allow_module_level=True)
pytestmark = pytest.mark.parametrize("device", ["cuda"], indirect=True)

FLASH, EFFICIENT, CUDNN = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
)  # fmt: skip
SLEEP_CYCLES = 200_000_000  # about a tenth of a second


def heads(dtype=torch.float32, seqlen_q=33, seqlen_k=33, kv_heads=4, head_dim=64):
    return (
        random(2, 4, seqlen_q, head_dim, dtype=dtype, seed=1),
        random(2, kv_heads, seqlen_k, head_dim, dtype=dtype, seed=2),
        random(2, kv_heads, seqlen_k, head_dim, dtype=dtype, seed=3),
    )


def run(leaves, **options):
    o = F.scaled_dot_product_attention(*leaves, **options)
    d_o = random(*o.shape, seed=4, requires_grad=False).to(o.dtype)
    return [o, *torch.autograd.grad(o, leaves, d_o)]


def gpt2(**sizes):
    torch.manual_seed(0)
    return models.Gpt2(vocabulary=97, length=64, **{"width": 128, "depth": 2, "heads": 4, **sizes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [FLASH, EFFICIENT, CUDNN], ids=lambda b: b.name)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}, {"attn_mask": True}], ids=str)
def test_backends(device, calls, backend, dtype, options):
    """Whichever fused kernel PyTorch would take, Tessera runs in its place."""
    options = dict(options)
    if dtype == torch.float32 and backend != EFFICIENT:
        pytest.skip("PyTorch takes this backend for float16 and bfloat16")
    if "enable_gqa" in options and backend == EFFICIENT or "attn_mask" in options and backend == FLASH:
        pytest.skip("PyTorch does not take this backend for it")
    leaves = heads(dtype, seqlen_k=33, kv_heads=2 if "enable_gqa" in options else 4)
    exact_options = dict(options)
    if "attn_mask" in options:
        mask = random(2, 1, 33, 33, dtype=dtype, seed=5, requires_grad=False)
        options["attn_mask"], exact_options["attn_mask"] = mask, mask.double()
    exact = run(at(torch.float64, *leaves), **exact_options)
    with sdpa_kernel(backend):
        own = run(leaves, **options)
        on_tessera()
        ours = run(leaves, **options)
    assert calls == {"forward": 1, "backward": 1} and tessera.torch.fallback_reasons() == {}
    for name, a, b, c in zip(("o", "d_q", "d_k", "d_v"), ours, own, exact):
        check(name, a, b, c)


@pytest.mark.parametrize("backend", [FLASH, EFFICIENT, CUDNN], ids=lambda b: b.name)
def test_dropout(device, calls, backend):
    """By the GPU's generator, which nothing waits for; bits, gradients and what torch.cuda.manual_seed repeats."""
    leaves = heads(torch.bfloat16)
    d_o = random(2, 4, 33, 64, dtype=torch.bfloat16, seed=4, requires_grad=False)
    on_tessera()
    with sdpa_kernel(backend):
        other = run(leaves, dropout_p=0.3)
        torch.cuda.manual_seed(3)
        torch.cuda.set_sync_debug_mode("error")
        try:
            o = F.scaled_dot_product_attention(*leaves, dropout_p=0.3)
            ours = [o, *torch.autograd.grad(o, leaves, d_o)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert calls == {"forward": 2, "backward": 2} and tessera.torch.fallback_reasons() == {}
    torch.cuda.manual_seed(3)
    q, k, v = (t.transpose(1, 2) for t in leaves)
    o = tessera.torch.attention(q, k, v, dropout_p=0.3).transpose(1, 2)
    assert torch.equal(ours[0], o) and not torch.equal(ours[0], other[0])
    for a, b in zip(ours[1:], torch.autograd.grad(o, leaves, d_o)):
        torch.testing.assert_close(a, b)


def probabilities(dtype=torch.bfloat16, heads=2, length=64):
    """q, k, v [B, H, S, D] for which o is the softmax after dropout: v is the identity. d_v is then o^T d_o."""
    q, k = (random(1, heads, length, length, dtype=dtype, seed=n) for n in (1, 2))
    v = torch.eye(length, dtype=dtype).expand(1, heads, length, length).contiguous().requires_grad_()
    return q, k, v


def assert_drops_alike(o, d_v, d_o):
    """The backward pass drops what the forward pass dropped."""
    expected = o.float().transpose(-1, -2) @ d_o.float()
    torch.testing.assert_close(d_v.float(), expected, rtol=2e-2, atol=2e-2)


def captured(step, warm_ups=3):
    """A graph of step(), and what it returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@pytest.mark.parametrize("backend", [FLASH, EFFICIENT, CUDNN], ids=lambda b: b.name)
def test_dropout_in_a_cuda_graph(device, calls, backend):
    """A training step: each replay gets a new state from PyTorch's generator, and both passes drop the same entries."""
    q, k, v = probabilities()
    d_o = random(*q.shape, dtype=q.dtype, seed=4, requires_grad=False)
    on_tessera()

    def step():
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return (o, *torch.autograd.grad(o, (q, k, v), d_o))

    with sdpa_kernel(backend):
        torch.cuda.manual_seed(3)
        graph, (o, *_, d_v) = captured(step)
        before, replays = dict(calls), []
        for _ in range(3):
            graph.replay()
            replays.append(o.detach().clone())
            assert_drops_alike(o, d_v, d_o)
            dropped = (o == 0).float().mean().item()
            assert 0.25 < dropped < 0.35
    assert tessera.torch.fallback_reasons() == {} and calls == before and calls["forward"] == calls["backward"] == 4
    assert not torch.equal(replays[0], replays[1]) and not torch.equal(replays[1], replays[2])
    torch.rand(1)  # the generator is whole


def test_a_dropout_state_in_a_cuda_graph(device):
    """Read when the kernels run: what it holds at a replay decides."""
    # Leaves: autograd would wait for the stream on which a view was made, which a capture does not allow.
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in probabilities())
    state = torch.tensor([5, 7], dtype=torch.int64)
    d_o = random(*q.shape, dtype=q.dtype, seed=4, requires_grad=False)

    def step(**given):
        o = tessera.torch.attention(q, k, v, dropout_p=0.3, deterministic=True, **given)
        return (o, *torch.autograd.grad(o, (q, k, v), d_o))

    graph, results = captured(lambda: step(dropout_state=state))
    for seed, offset in ((5, 7), (2**64 - 1, 3), (0, 2**63)):
        state.copy_(torch.tensor([x - 2**64 if x >= 2**63 else x for x in (seed, offset)], dtype=torch.int64))
        graph.replay()
        for ours, expected in zip(results, step(dropout_seed=seed, dropout_offset=offset)):
            assert torch.equal(ours, expected)


def test_drawn_dropout_in_a_cuda_graph(device):
    q, k, v = (t.transpose(1, 2).detach() for t in probabilities())
    graph, o = captured(lambda: tessera.torch.attention(q, k, v, dropout_p=0.3))
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(o.clone())
    assert not torch.equal(*replays)


@pytest.mark.parametrize("route", ["sdpa", "tessera"])
def test_dropout_under_inductor_s_cuda_graphs(device, calls, route):
    q, k, v = probabilities()
    d_o = random(*q.shape, dtype=q.dtype, seed=4, requires_grad=False)
    on_tessera()

    def attend(q, k, v):
        if route == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return tessera.torch.attention(q, k, v, dropout_p=0.3).transpose(1, 2)

    torch.compiler.reset()
    compiled, outputs = torch.compile(attend, mode="reduce-overhead", fullgraph=True), []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        o = compiled(q, k, v)
        (d_v,) = torch.autograd.grad(o, v, d_o)
        assert_drops_alike(o.detach(), d_v, d_o)
        outputs.append(o.detach().clone())
    assert tessera.torch.fallback_reasons() == {}
    assert all(not torch.equal(a, b) for a, b in zip(outputs, outputs[1:]))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("backend", [FLASH, EFFICIENT, CUDNN], ids=lambda b: b.name)
def test_both_passes_stay_with_one_implementation(device, calls, backend, dropout_p):
    q, k, v = probabilities()
    d_o = random(*q.shape, dtype=q.dtype, seed=4, requires_grad=False)
    with sdpa_kernel(backend):
        for before, between, both in (
            (on_tessera, tessera.torch.restore, 1), (on_tessera, on_tessera, 1), (lambda: None, on_tessera, 0),
        ):  # fmt: skip
            calls.update(forward=0, backward=0)
            before()
            o = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
            between()
            (d_v,) = torch.autograd.grad(o, v, d_o)
            tessera.torch.restore()
            assert calls == {"forward": both, "backward": both}
            assert_drops_alike(o.detach(), d_v, d_o)


def test_a_bias_alone_requires_a_gradient(device, calls):
    q, k, v = (t.detach() for t in heads(torch.bfloat16))
    bias = random(2, 4, 33, 33, dtype=torch.bfloat16, seed=5)
    d_o = random(*q.shape, dtype=q.dtype, seed=4, requires_grad=False)
    exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), attn_mask=bias.double())
    (expected,) = torch.autograd.grad(exact, bias, d_o.double())
    on_tessera()
    with sdpa_kernel(EFFICIENT):
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        (d_bias,) = torch.autograd.grad(o, bias, d_o)
    assert calls == {"forward": 2, "backward": 1}, "the forward pass is asked for no LSE: the backward pass makes it"
    torch.testing.assert_close(d_bias.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_what_is_refused_falls_through(device, calls):
    wide = heads(head_dim=520)
    own = run(wide, is_causal=True)
    on_tessera()
    for a, b in zip(run(wide, is_causal=True), own):
        torch.testing.assert_close(a, b)
    reasons = tessera.torch.fallback_reasons()
    assert sum(reasons.values()) == 2 and any("520" in reason for reason in reasons)
    assert calls == {"forward": 0, "backward": 0}


def test_lower_right_diagonal(device, calls):
    """The flash operator's own diagonal ends at the last key: PyTorch requests it by a bias of its own class."""
    from torch.nn.attention.bias import causal_lower_right

    leaves = heads(torch.bfloat16, seqlen_q=20, seqlen_k=33)
    on_tessera()
    with sdpa_kernel(FLASH):
        ours = run(leaves, attn_mask=causal_lower_right(20, 33))
    assert calls == {"forward": 1, "backward": 1}
    mask = torch.ones(20, 33, dtype=torch.bool).tril(13)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        with sdpa_kernel(SDPBackend.MATH):
            results.append(run(at(dtype, *leaves), attn_mask=mask))
    for name, a, b, c in zip(("o", "d_q", "d_k", "d_v"), ours, *results):
        check(name, a, b, c)


def test_jagged_nested_tensors(device, calls):
    """Sequences of different lengths, packed by PyTorch, come by the flash operator for rows."""
    lengths = (7, 23, 12)
    leaves = [[random(n, 4, 64, dtype=torch.bfloat16, seed=10 * i + n) for n in lengths] for i in range(3)]
    d_o = [random(n, 4, 64, seed=40 + n, requires_grad=False) for n in lengths]

    def dense(dtype):
        copies = [at(dtype, *tensors) for tensors in leaves]
        outputs = [
            F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in qkv), is_causal=True)[0].transpose(0, 1)
            for qkv in zip(*copies)
        ]
        loss = sum((o * d.to(torch.bfloat16).to(dtype)).sum() for o, d in zip(outputs, d_o))
        return [*outputs, *torch.autograd.grad(loss, sum(copies, []))]

    with sdpa_kernel(SDPBackend.MATH):
        exact, plain = dense(torch.float64), dense(torch.bfloat16)
    on_tessera()
    nested = [torch.nested.as_nested_tensor(tensors, layout=torch.jagged).transpose(1, 2) for tensors in leaves]
    with sdpa_kernel(FLASH):
        outputs = F.scaled_dot_product_attention(*nested, is_causal=True).transpose(1, 2).unbind()
    loss = sum((o * d.to(torch.bfloat16)).sum() for o, d in zip(outputs, d_o))
    ours = [*outputs, *torch.autograd.grad(loss, sum(leaves, []))]
    assert calls == {"forward": 1, "backward": 1} and tessera.torch.fallback_reasons() == {}
    for i, results in enumerate(zip(ours, plain, exact)):
        check(f"result {i}", *results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_models_in_half_precision(device, calls, dtype, compiler):
    model = gpt2()
    tokens = torch.randint(97, (2, 50))
    compare_models(model, lambda model, _: model(tokens), calls, layers=2, compiler=compiler, dtype=dtype)


def test_a_model_under_autocast(device, calls):
    model = gpt2()
    tokens = torch.randint(97, (2, 50))
    exact = gpt2().double()(tokens)
    results = []
    for activate in (lambda: None, on_tessera):
        activate()
        with torch.autocast("cuda", torch.bfloat16):
            results.append(model(tokens).float())
    assert calls == {"forward": 2, "backward": 0}
    own, ours = results
    bound = 2 * (own - exact).abs().max() + 4 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= bound
    results[1].sum().backward()
    assert calls == {"forward": 2, "backward": 2}


def assert_repeats(ours, expected):
    """The same computation, with sums possibly in another order."""
    bound = 16 * torch.finfo(ours.dtype).eps * expected.abs().max()
    assert (ours - expected).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_in_a_cuda_graph(device, calls, dtype):
    """Forward and backward of a model, captured once and replayed on other tokens."""
    model = gpt2().to(dtype)
    first, second = (torch.randint(97, (2, 50)) for _ in range(2))
    tokens = first.clone()
    on_tessera()

    def step():
        model.zero_grad(set_to_none=False)
        logits = model(tokens)
        logits.float().square().mean().backward()
        return logits

    def results(logits):
        return [logits.detach().clone(), *(p.grad.clone() for p in model.parameters())]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    captured = dict(calls)
    replayed = []
    for batch in (first, second):
        tokens.copy_(batch)
        graph.replay()
        replayed.append(results(logits))
    assert calls == captured
    assert not torch.equal(replayed[0][0], replayed[1][0])
    for batch, ours in zip((first, second), replayed):
        tokens.copy_(batch)
        for a, b in zip(ours, results(step())):
            assert_repeats(a, b)


def test_inductor_s_cuda_graphs(device, calls):
    model = gpt2().eval()
    tokens = torch.randint(97, (2, 50))
    on_tessera()
    with torch.no_grad():
        exact, plain = gpt2().double()(tokens), model(tokens)
        torch.compiler.reset()
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for _ in range(3):  # warm up, capture, replay
            before = dict(calls)
            torch.compiler.cudagraph_mark_step_begin()
            check("logits", compiled(tokens), plain, exact)
    assert calls == before  # a replay does not come here


def test_a_stream_s_order(device, calls):
    """On a side stream, behind a long kernel and a write: read before, the inputs would be zeros."""
    q, k, v = (t.detach() for t in heads(torch.bfloat16))
    on_tessera()
    expected = F.scaled_dot_product_attention(q, k, v)
    late = torch.zeros_like(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        late.copy_(q)
        o = F.scaled_dot_product_attention(late, k, v)
        assert not side.query(), "the call waited for its stream"
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(o, expected) and calls == {"forward": 2, "backward": 0}


def test_a_backward_pass_runs_on_its_forward_s_stream(device):
    leaves = heads(torch.bfloat16)
    expected = torch.autograd.grad(tessera.torch.attention(*(t.transpose(1, 2) for t in leaves)).sin().sum(), leaves)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = tessera.torch.attention(*(t.transpose(1, 2) for t in leaves)).sin().sum()
    torch.cuda.current_stream().wait_stream(side)
    for ours, first in zip(torch.autograd.grad(loss, leaves), expected):
        torch.testing.assert_close(ours, first)


def test_memory_freed_while_it_is_read(device):
    """Inputs and workspace are dropped with the kernels still queued; what is allocated next is written later."""
    q, k, v = (t.detach().transpose(1, 2).contiguous() for t in heads(torch.bfloat16, seqlen_k=2048))
    expected = tessera.torch.attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    copies = [t.clone() for t in (q, k, v)]
    addresses = {t.data_ptr() for t in copies}
    o = tessera.torch.attention(*copies)
    del copies
    others = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    assert addresses & {t.data_ptr() for t in others}, "no memory was reused: the test shows nothing"
    assert torch.equal(o, expected)


def test_threads_of_the_program(device):
    """Each on a stream of its own, at once."""
    from concurrent.futures import ThreadPoolExecutor

    problems = [[t.detach().transpose(1, 2) for t in heads(torch.bfloat16, seqlen_q=20 + i)] for i in range(8)]
    expected = [tessera.torch.attention(*tensors, causal=True) for tensors in problems]
    torch.cuda.synchronize()

    def compute(tensors):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [tessera.torch.attention(*tensors, causal=True) for _ in range(20)]
        stream.synchronize()
        return results

    with ThreadPoolExecutor(4) as pool:
        for results, first in zip(pool.map(compute, problems), expected):
            assert all(torch.equal(o, first) for o in results)
