"""Tensors of a second GPU while the first is current: the same bits, nothing else current afterwards, mixtures
refused."""

import threading

import pytest

torch = pytest.importorskip("torch")
tessera = pytest.importorskip("tessera")

import tessera.torch  # noqa: E402
from torch_reference import random  # noqa: E402

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
if torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
    pytest.skip("needs two GPUs of one kind, which give the same bits", allow_module_level=True)

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
SLEEP_CYCLES = 200_000_000  # about a tenth of a second


def inputs(device, seqlen_q=300, seqlen_k=300, heads=8, heads_kv=2, head_dim=64, dtype=torch.bfloat16):
    """q, k, v and d_o on a device; the same values on every one."""
    shapes = [(seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv), (seqlen_q, heads)]
    return [
        random(2, rows, count, head_dim, seed=seed, dtype=dtype, requires_grad=False).to(device)
        for seed, (rows, count) in enumerate(shapes)
    ]


def forward_and_backward(device, **shape):
    q, k, v, d_o = inputs(device, **shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = tessera.torch.attention(*leaves, causal=True, deterministic=True)
    return [o.detach(), *torch.autograd.grad(o, leaves, d_o)]


def decode_on_pages(device):
    q, k, v, _ = inputs(device, seqlen_q=1, seqlen_k=2048, head_dim=128)
    pages = [x.view(-1, 16, *x.shape[2:]) for x in (k, v)]
    order = torch.randperm(len(pages[0]), generator=torch.Generator().manual_seed(9))
    table = torch.empty_like(order)
    table[order] = torch.arange(len(order))
    options = {
        "page_table": table.view(2, -1).to(torch.int32).to(device),
        "seqused_k": torch.tensor([2000, 1], dtype=torch.int32, device=device),
    }
    return [tessera.torch.attention(q, *(x[order.to(device)] for x in pages), **options)]


CALLS = {
    "D 64": forward_and_backward,
    "D 128": lambda device: forward_and_backward(device, head_dim=128),
    "float32": lambda device: forward_and_backward(device, head_dim=40, dtype=torch.float32),
    "decode": decode_on_pages,
}


@pytest.fixture(params=CALLS.values(), ids=CALLS.keys())
def call(request):
    with torch.cuda.device(FIRST):
        yield request.param


def assert_same(results, expected, device):
    for result, there in zip(results, expected, strict=True):
        assert result.device == device
        assert torch.equal(result.to(there.device), there)


def test_calls_in_turn(call):
    expected = call(FIRST)
    assert all(x.isfinite().all() and x.any() for x in expected)
    for _ in range(3):
        for device in (SECOND, FIRST):
            assert_same(call(device), expected, device)
            assert torch.cuda.current_device() == FIRST.index


def test_a_thread_for_each(call):
    expected, failures = call(FIRST), []

    def work(device):
        try:
            for _ in range(10):
                assert_same(call(device), expected, device)
        except BaseException as failure:  # noqa: BLE001
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(device,)) for device in (FIRST, SECOND)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_the_second_s_streams():
    """The call runs in the current stream of the tensors' GPU, after the previous work."""
    q, k, v, _ = inputs(SECOND)
    expected = tessera.torch.attention(q, k, v)
    stream, late = torch.cuda.Stream(SECOND), torch.zeros_like(q)
    torch.cuda.synchronize(SECOND)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        late.copy_(q)
        with torch.cuda.device(FIRST):
            o = tessera.torch.attention(late, k, v)
    stream.synchronize()
    assert torch.equal(o, expected)


def test_a_graph_of_the_second():
    q, k, v, _ = inputs(SECOND)
    with torch.cuda.device(SECOND):
        expected = tessera.torch.attention(q, k, v)
        static = torch.zeros_like(q)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = tessera.torch.attention(static, k, v)
        static.copy_(q)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.parametrize("moved, named", [(0, "k"), (1, "k"), (2, "v")])
def test_mixed_devices_are_refused(moved, named):
    tensors = inputs(FIRST)[:3]
    expected = tessera.torch.attention(*tensors)
    mixed = list(tensors)
    mixed[moved] = mixed[moved].to(SECOND)
    with pytest.raises(
        ValueError, match=f"^{named}: on device cuda:[01], q is on cuda:[01]: accepted: one device for all$"
    ):
        tessera.torch.attention(*mixed)
    with pytest.raises(ValueError, match=f"^{named}: on device "):
        tessera.attention(*mixed)
    assert torch.equal(tessera.torch.attention(*tensors), expected)
