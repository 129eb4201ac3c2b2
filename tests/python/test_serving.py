"""tessera.serving: engines' steps, as vLLM and SGLang pass them, against attention of each sequence in float64."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tessera = pytest.importorskip("tessera")

from tessera.serving import paged, sglang, vllm  # noqa: E402

HEADS, HEADS_KV, D = 4, 2, 16
SCALE = 0.3


def normal(*shape, dtype=torch.float32, seed=None):
    generator = torch.Generator().manual_seed(0 if seed is None else seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(dtype).to(torch.get_default_device())


def alone(q, k, v, causal=True, window=None, softcap=None, sink=None, slopes=None, right=None):
    """q [n, Hq, D], k, v [s, Hkv, D] of one sequence, whose last keys are the queries' own."""
    n, s = q.shape[0], k.shape[0]
    q, k, v = (x.double().cpu() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * SCALE
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(n, device="cpu")[:, None] + s - n, torch.arange(s, device="cpu")
    if slopes is not None:
        scores = scores - slopes.double().cpu()[:, None, None] * (i - j).abs()
    hidden = (j > i) if causal else torch.zeros(n, s, dtype=torch.bool, device="cpu")
    if window is not None:
        hidden = hidden | (j <= i - window)
    if right is not None:
        hidden = hidden | (j >= i + right)
    scores = scores.masked_fill(hidden, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double().cpu()[:, None, None].expand(-1, n, 1)], dim=-1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :s], v)


def assert_rows(out, expected, dtype):
    """Twice the rounding of the result, in float32 that of a sum of some hundred terms."""
    tolerance = 2.0**-17 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        out.double().cpu(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
    )


# ---- vLLM -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class CommonAttentionMetadata:
    """The fields that vLLM's own has."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True


# vLLM's KVCacheLayout: the order of the logical dimensions layer, block, head, slot, content in memory.
LAYOUTS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "LHBNC": (0, 2, 1, 3, 4), "BLHNC": (1, 0, 2, 3, 4),
           "BLNHC": (1, 0, 3, 2, 4), "BHLNC": (1, 2, 0, 3, 4)}  # fmt: skip


def cache_of(layout, blocks, size, dtype):
    """[blocks, Hkv, size, 2 D], the second of three layers, as vLLM's runner views memory; unwritten keys are NaN."""
    order, shape = LAYOUTS[layout], (3, blocks, HEADS_KV, size, 2 * D)
    memory = torch.full([shape[axis] for axis in order], math.nan, dtype=dtype)
    return memory.permute([order.index(axis) for axis in range(5)])[1]


def in_8_bits(x, code_dtype, scale):
    """x as an 8-bit cache with this scale holds it: saturated."""
    most = torch.finfo(code_dtype).max
    return (x.float() / scale).clamp(-most, most).to(code_dtype).float() * scale


class VllmEngine:
    """What vLLM's runner does around its layers: blocks, slots, padded batches."""

    def __init__(self, layout="LBNHC", size=16, dtype=torch.float32, **options):
        self.size, self.dtype = size, dtype
        self.stored_k = self.stored_v = lambda x: x
        self.layer = SimpleNamespace(_k_scale=None, _v_scale=None)
        self.impl = vllm.Attention(HEADS, D, SCALE, HEADS_KV, **options)
        self.max_blocks = -(-100 // size)
        self.kv_cache = cache_of(layout, 1 + 3 * self.max_blocks, size, dtype)
        self.free = [b for b in torch.randperm(3 * self.max_blocks, device="cpu").tolist()]
        self.blocks = [[], [], []]
        self.keys = [normal(0, HEADS_KV, D, dtype=dtype)] * 3
        self.values = list(self.keys)
        self.seed = 0

    def metadata(self, common):
        return vllm.Metadata.of(common)

    def step(self, counts, padded_reqs=3, padding=0, causal=True, host_counts=None):
        """counts[b] new tokens of sequence b -> (out [T, Hq, D], q); the host believes in host_counts."""
        device = torch.get_default_device()
        total = sum(counts)
        self.seed += 1
        q, k, v = (
            normal(total + padding, heads, D, dtype=self.dtype, seed=10 * self.seed + n)
            for n, heads in enumerate((HEADS, HEADS_KV, HEADS_KV))
        )
        slots, starts, lengths = [], [0], []
        table = torch.full((padded_reqs, self.max_blocks), 2**30, dtype=torch.int32, device="cpu")
        for b, count in enumerate(counts):
            begin, end = starts[-1], starts[-1] + count
            for place in range(len(self.keys[b]), len(self.keys[b]) + count):
                if place % self.size == 0:
                    self.blocks[b].append(self.free.pop())
                slots.append(self.blocks[b][-1] * self.size + place % self.size)
            self.keys[b] = torch.cat([self.keys[b], self.stored_k(k[begin:end])])
            self.values[b] = torch.cat([self.values[b], self.stored_v(v[begin:end])])
            table[b, : len(self.blocks[b])] = torch.tensor(self.blocks[b], device="cpu")
            starts.append(end)
            lengths.append(len(self.keys[b]))
        starts += [total] * (padded_reqs - len(counts))
        lengths += [0] * (padded_reqs - len(counts))
        host_counts = host_counts or counts
        host = [0, *torch.tensor(host_counts, device="cpu").cumsum(0).tolist()]
        common = CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(host, dtype=torch.int32, device="cpu"),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=padded_reqs,
            num_actual_tokens=host[-1],
            max_query_len=max(host_counts),
            max_seq_len=max(lengths) + sum(host_counts) - total,
            block_table_tensor=table.to(device),
            slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
            causal=causal,
        )
        metadata = self.metadata(common)
        out = torch.full_like(q, math.nan)
        layer = self.layer
        self.impl.do_kv_cache_update(layer, k, v, self.kv_cache, metadata.slot_mapping)
        assert self.impl.forward(layer, q, k, v, self.kv_cache, metadata, output=out) is out
        return out, q

    def check(self, counts, out, q, **options):
        begin = 0
        for b, count in enumerate(counts):
            if count:
                rows = slice(begin, begin + count)
                assert_rows(out[rows], alone(q[rows], self.keys[b], self.values[b], **options), self.dtype)
            begin += count
        assert not out[begin:].any(), "rows of padding"


STEPS = [[37, 20], [24, 1, 5], [1, 1, 1], [1, 8, 1], [30, 1, 1]]  # prompts in chunks, decoding, drafted tokens


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 16, 48])
def test_vllm_steps(device, layout, size):
    engine = VllmEngine(layout, size)
    for counts in STEPS:
        engine.check(counts, *engine.step(counts))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_vllm_dtypes(device, dtype):
    engine = VllmEngine(dtype=dtype)
    for counts in STEPS:
        engine.check(counts, *engine.step(counts))


@pytest.mark.parametrize("name, code_dtype", [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_vllm_caches_of_8_bits(device, name, code_dtype, dtype):
    """vLLM declares their memory as bytes, and a layer has a scale for its keys and one for its values."""
    k_scale, v_scale = torch.tensor(0.0625), torch.tensor(0.25)
    engine = VllmEngine(dtype=dtype, kv_cache_dtype=name)
    engine.kv_cache = torch.full(engine.kv_cache.shape, 0x7F, dtype=torch.uint8)  # NaN
    engine.layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
    engine.stored_k = lambda x: in_8_bits(x, code_dtype, k_scale)
    engine.stored_v = lambda x: in_8_bits(x, code_dtype, v_scale)
    for counts in STEPS:
        engine.check(counts, *engine.step(counts, padding=2))


def test_vllm_padded_to_the_shape_of_a_graph(device):
    engine = VllmEngine()
    engine.step([20])
    for counts in ([1], [1, 30], [1, 1]):
        engine.check(counts, *engine.step(counts, padded_reqs=8, padding=5))


def test_vllm_options(device):
    sinks, slopes = normal(HEADS), [0.5, 0.25, 0.1, 0.05]
    for given, expected in (
        (dict(sinks=sinks), dict(sink=sinks)),
        (dict(logits_soft_cap=2.0), dict(softcap=2.0)),
        (dict(logits_soft_cap=0.0), dict()),
    ):
        engine = VllmEngine(**given)
        for counts in STEPS:
            engine.check(counts, *engine.step(counts), **expected)
    engine = VllmEngine()
    engine.impl = vllm.Attention(HEADS, D, SCALE, HEADS_KV, slopes, 9, "auto")
    for counts in STEPS:
        engine.check(counts, *engine.step(counts), window=9, slopes=torch.tensor(slopes))


def test_vllm_fewer_queries_than_the_host_believes(device):
    """Drafts are dropped on the device after the host has planned the step."""
    engine = VllmEngine()
    engine.step([20, 9, 33])
    for counts, host in (([1, 3, 2], [4, 4, 4]), ([4, 1, 1], [4, 2, 2])):
        engine.check(counts, *engine.step(counts, padding=sum(host) - sum(counts), host_counts=host))


@pytest.mark.parametrize("window", [None, 7])
def test_vllm_a_causal_flag_each(device, window):
    """A window of one that is not causal reaches as far to both sides."""
    engine = VllmEngine(sliding_window=window) if window else VllmEngine()
    for flags in (torch.tensor([True, False]), False):
        out, q = engine.step([20, 30], padded_reqs=2, causal=flags)
        for rows, b in ((slice(0, 20), 0), (slice(20, 50), 1)):
            causal = isinstance(flags, torch.Tensor) and b == 0
            reach = dict(window=window, right=None if causal else window)
            expected = alone(q[rows], engine.keys[b], engine.values[b], causal=causal, **reach)
            assert_rows(out[rows], expected, torch.float32)


def test_vllm_profiling_and_shared_caches(device):
    impl = vllm.Attention(HEADS, D, SCALE, HEADS_KV, kv_sharing_target_layer_name="layers.0")
    out = torch.full((3, HEADS, D), math.nan)
    assert not impl.forward(None, out, None, None, None, None, out).any()
    impl.do_kv_cache_update(None, normal(3, HEADS_KV, D), normal(3, HEADS_KV, D), None, None)  # another layer's


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(kv_cache_dtype="fp8_inc"), "^kv_cache_dtype: 'fp8_inc', accepted"),
        (dict(attn_type="encoder_only"), "^attn_type: 'encoder_only', accepted"),
    ],
)
def test_vllm_refusals(given, message):
    with pytest.raises(tessera.Error, match=message):
        vllm.Attention(HEADS, D, SCALE, HEADS_KV, **given)


# ---- SGLang -----------------------------------------------------------------------------------------------------------


class Mode:
    def __init__(self, name):
        self.name = name

    def is_decode(self):
        return self.name == "decode"

    def is_idle(self):
        return self.name == "idle"

    def is_decode_or_idle(self):
        return self.name in ("decode", "idle")

    def is_target_verify(self):
        return self.name == "target_verify"


class Pool:
    """SGLang's pools: slots of keys and values, and each request's slots. Slot 0 is the padding's."""

    def __init__(self, page_size, requests=4, context=96):
        slots = (requests * context // page_size + 1) * page_size
        self.k, self.v = (torch.full((slots, HEADS_KV, D), math.nan) for _ in range(2))
        self.k[0], self.v[0] = 0, 0
        self.free = [1 + p for p in torch.randperm(requests * context // page_size, device="cpu").tolist()]
        self.req_to_token = torch.zeros(requests, context, dtype=torch.int32)
        self.page_size, self.context = page_size, context
        self.lengths = [0] * requests

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v

    def allocate(self, request, count):
        slots = []
        for place in range(self.lengths[request], self.lengths[request] + count):
            if place % self.page_size == 0:
                self.page = self.free.pop() * self.page_size
            else:
                before = int(self.req_to_token[request, place - 1])
                self.page = before // self.page_size * self.page_size
            slots.append(self.page + place % self.page_size)
            self.req_to_token[request, place] = slots[-1]
        self.lengths[request] += count
        return slots

    def runner(self):
        return SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            token_to_kv_pool=self,
            model_config=SimpleNamespace(context_len=self.context),
            page_size=self.page_size,
        )


def layer_of(**given):
    shape = dict(tp_q_head_num=HEADS, tp_k_head_num=HEADS_KV, tp_v_head_num=HEADS_KV, qk_head_dim=D, v_head_dim=D)
    return SimpleNamespace(**shape, layer_id=0, scaling=SCALE, logit_cap=0.0, sliding_window_size=-1, **given)


def batch_of(pool, mode, requests, counts, spec_info=None):
    lengths = [pool.lengths[r] for r in requests]
    extends = None if mode == "decode" else counts
    return SimpleNamespace(
        forward_mode=Mode(mode),
        batch_size=len(requests),
        req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths, device="cpu"),
        extend_seq_lens=extends and torch.tensor(extends, dtype=torch.int32),
        extend_seq_lens_cpu=extends,
        spec_info=spec_info,
    )


class SglangEngine:
    def __init__(self, page_size=1, make=sglang.Backend):
        self.pool = Pool(page_size)
        self.backend = make(self.pool.runner())
        self.seed = 0

    def inputs(self, count):
        self.seed += 1
        return [normal(count, h * D, seed=10 * self.seed + n) for n, h in enumerate((HEADS, HEADS_KV, HEADS_KV))]

    def keys(self, request):
        slots = self.pool.req_to_token[request, : self.pool.lengths[request]].long()
        return self.pool.k[slots], self.pool.v[slots]

    def step(self, mode, requests, counts, layer=None, check=None):
        slots = sum((self.pool.allocate(r, n) for r, n in zip(requests, counts)), [])
        q, k, v = self.inputs(len(slots))
        batch = batch_of(self.pool, mode, requests, counts)
        batch.out_cache_loc = torch.tensor(slots)
        self.backend.init_forward_metadata(batch)
        out = self.backend.forward(q, k, v, layer or layer_of(), batch)
        assert torch.equal(self.pool.k[batch.out_cache_loc], k.view(-1, HEADS_KV, D))
        begin = 0
        for r, n in zip(requests, counts):
            rows = slice(begin, begin + n)
            expected = alone(q[rows].view(n, HEADS, D), *self.keys(r), **(check or {}))
            assert_rows(out[rows].view(n, HEADS, D), expected, torch.float32)
            begin += n


@pytest.mark.parametrize("page_size", [1, 16])
def test_sglang_extends_and_decodes(device, page_size):
    engine = SglangEngine(page_size)
    engine.step("extend", [2, 0], [33, 20])
    engine.step("decode", [0, 2], [1, 1])
    engine.step("extend", [3, 2, 0], [17, 9, 1])  # with prefixes in the cache
    engine.step("decode", [0, 3, 2], [1, 1, 1])


@pytest.mark.parametrize("code_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("scales", [(0.0625, 0.25), (None, None)])
def test_sglang_caches_of_8_bits(device, code_dtype, scales):
    """A layer's scales are numbers or tensors; without them they are 1."""
    engine = SglangEngine(page_size=16)
    pool = engine.pool
    pool.k, pool.v = (torch.full(x.shape, math.nan).to(code_dtype) for x in (pool.k, pool.v))
    layer = layer_of(k_scale=scales[0], v_scale=None if scales[1] is None else torch.tensor(scales[1]))
    k_scale, v_scale = (scale or 1.0 for scale in scales)
    keys, values = {}, {}
    for mode, requests, counts in (("extend", [2, 0], [33, 20]), ("decode", [0, 2], [1, 1]), ("extend", [2], [9])):
        slots = sum((engine.pool.allocate(r, n) for r, n in zip(requests, counts)), [])
        q, k, v = (x.to(torch.bfloat16) for x in engine.inputs(len(slots)))
        batch = batch_of(engine.pool, mode, requests, counts)
        batch.out_cache_loc = torch.tensor(slots)
        engine.backend.init_forward_metadata(batch)
        out = engine.backend.forward(q, k, v, layer, batch)
        begin = 0
        for r, n in zip(requests, counts):
            rows = slice(begin, begin + n)
            new = in_8_bits(k[rows], code_dtype, k_scale), in_8_bits(v[rows], code_dtype, v_scale)
            for of, x in zip((keys, values), new):
                of[r] = torch.cat([of.get(r, x[:0].view(0, HEADS_KV, D)), x.view(n, HEADS_KV, D)])
            expected = alone(q[rows].view(n, HEADS, D), keys[r], values[r])
            assert_rows(out[rows].view(n, HEADS, D), expected, torch.bfloat16)
            begin += n


def test_sglang_layers(device):
    engine = SglangEngine()
    capped, windowed = layer_of(), layer_of()
    capped.logit_cap, windowed.sliding_window_size = 2.0, 8
    engine.step("extend", [1, 2], [20, 30], capped, dict(softcap=2.0))
    engine.step("decode", [2, 1], [1, 1], windowed, dict(window=9))  # the query's own key and 8 before it


@pytest.mark.parametrize("page_size", [1, 16])
def test_sglang_graph_of_decoding(device, page_size):
    """One capture; replays with other batches, of fewer sequences. On the CPU the graph's calls are made again."""
    engine, padded = SglangEngine(page_size), 3
    engine.step("extend", [0, 1, 2, 3], [20, 11, 3, 30])
    backend, pool, layer = engine.backend, engine.pool, layer_of()
    backend.init_cuda_graph_state(max_bs=6, max_num_tokens=6)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    q, k, v = engine.inputs(padded)
    batch = batch_of(pool, "decode", [0] * padded, [1] * padded)
    batch.seq_lens = torch.full((padded,), fill)
    batch.out_cache_loc = torch.zeros(padded, dtype=torch.int64)

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    graph, out = None, backend.forward(q, k, v, layer, batch)
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.forward(q, k, v, layer, batch)
    for requests in ([3], [1, 2], [0, 3, 1]):
        slots = sum((pool.allocate(r, 1) for r in requests), [])
        for x, fresh in zip((q, k, v), engine.inputs(padded)):
            x.copy_(fresh)
        rest = padded - len(requests)
        batch.req_pool_indices.copy_(torch.tensor(requests + [0] * rest))
        batch.seq_lens.copy_(torch.tensor([pool.lengths[r] for r in requests] + [fill] * rest))
        batch.out_cache_loc.copy_(torch.tensor(slots + [0] * rest))
        backend.init_forward_metadata_out_graph(batch)
        if graph is not None:
            graph.replay()
        else:
            out = backend.forward(q, k, v, layer, batch)
        for row, r in enumerate(requests):
            expected = alone(q[row].view(1, HEADS, D), *engine.keys(r))
            assert_rows(out[row].view(1, HEADS, D), expected, torch.float32)
        assert not out[len(requests) :].any()


def test_sglang_drafts_have_keys_of_their_own(device):
    """Two continuations of each request, which share its keys and differ in their last."""
    engine = SglangEngine()
    engine.step("extend", [0, 1], [12, 7])
    pool = engine.pool
    lists = [[*pool.req_to_token[r, : pool.lengths[r]].tolist(), pool.free.pop()] for r in (0, 0, 1, 1)]
    q, k, v = engine.inputs(4)
    spec = SimpleNamespace(
        kv_indptr=torch.tensor(
            [0, *torch.tensor([len(x) for x in lists], device="cpu").cumsum(0).tolist()], dtype=torch.int32
        ),
        kv_indices=torch.tensor(sum(lists, []) + [0] * 9),  # of a buffer with room for more
    )
    batch = batch_of(pool, "decode", [0, 1], [1, 1], spec)
    batch.out_cache_loc = torch.tensor([x[-1] for x in lists])
    engine.backend.init_forward_metadata(batch)
    out = engine.backend.forward(q, k, v, layer_of(), batch)
    for row, slots in enumerate(lists):
        expected = alone(q[row].view(1, HEADS, D), pool.k[slots], pool.v[slots])
        assert_rows(out[row].view(1, HEADS, D), expected, torch.float32)


def drafts_of(pool, requests, tokens, seed):
    """`tokens` drafted ones of each request, children before parents among them: masks [tokens, keys], the batch."""
    prompts = [pool.lengths[r] for r in requests]
    slots = sum((pool.allocate(r, tokens) for r in requests), [])
    generator = torch.Generator().manual_seed(seed)
    trees = [torch.rand(tokens, tokens, generator=generator, device="cpu") < 0.4 for _ in prompts]
    for tree in trees:
        tree.fill_diagonal_(True)
    masks = [
        torch.cat([torch.ones(tokens, n, dtype=torch.bool, device="cpu"), tree], 1) for n, tree in zip(prompts, trees)
    ]
    spec = SimpleNamespace(
        custom_mask=torch.cat([m.flatten() for m in masks]).to(torch.get_default_device()), draft_token_num=tokens
    )
    batch = batch_of(pool, "target_verify", requests, [tokens] * len(requests), spec)
    batch.seq_lens, batch.seq_lens_cpu = torch.tensor(prompts), torch.tensor(prompts, device="cpu")
    batch.out_cache_loc = torch.tensor(slots)
    return masks, batch


def check_drafts(engine, requests, tokens, masks, q, out):
    for n, (r, mask) in enumerate(zip(requests, masks)):
        keys, values = (x.double().cpu().repeat_interleave(HEADS // HEADS_KV, dim=1) for x in engine.keys(r))
        rows = q[n * tokens : (n + 1) * tokens].view(tokens, HEADS, D).double().cpu()
        scores = (torch.einsum("ihd,jhd->hij", rows, keys) * SCALE).masked_fill(~mask, -math.inf)
        expected = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values)
        assert_rows(out[n * tokens : (n + 1) * tokens].view(tokens, HEADS, D), expected, torch.float32)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("tokens", [4, 37])
def test_sglang_verifies_trees(device, page_size, tokens):
    """Drafted tokens see the prompt, themselves and some others, children before parents among them."""
    engine = SglangEngine(page_size)
    engine.step("extend", [1, 3], [12, 7])
    masks, batch = drafts_of(engine.pool, [1, 3], tokens, seed=4)
    q, k, v = engine.inputs(2 * tokens)
    engine.backend.init_forward_metadata(batch)
    check_drafts(engine, [1, 3], tokens, masks, q, engine.backend.forward(q, k, v, layer_of(), batch))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("tokens", [4, 33])
def test_sglang_graph_of_verifying(device, page_size, tokens):
    """One capture with room for three requests; replays with other drafts, of fewer requests than it has room for."""
    engine, padded = SglangEngine(page_size), 3
    engine.step("extend", [0, 1, 2, 3], [20, 11, 3, 30])
    backend, pool, layer = engine.backend, engine.pool, layer_of()
    backend.init_cuda_graph_state(max_bs=6, max_num_tokens=6 * tokens)
    q, k, v = engine.inputs(padded * tokens)
    spec = SimpleNamespace(custom_mask=torch.zeros(9, dtype=torch.bool), draft_token_num=tokens)
    batch = batch_of(pool, "target_verify", [0] * padded, [tokens] * padded, spec)
    batch.seq_lens = torch.full((padded,), backend.get_cuda_graph_seq_len_fill_value())
    batch.out_cache_loc = torch.zeros(padded * tokens, dtype=torch.int64)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    step, results = backend.step, {}

    def run():
        results["out"] = backend.forward(q, k, v, layer, batch)

    replay = captured(run, device)
    for seed, requests in enumerate(([3], [1, 2], [0])):
        masks, here = drafts_of(pool, requests, tokens, seed)
        for x, fresh in zip((q, k, v), engine.inputs(padded * tokens)):
            x.copy_(fresh)
        rest = padded - len(requests)
        batch.req_pool_indices.copy_(torch.tensor(requests + [0] * rest))
        batch.seq_lens.copy_(torch.cat([here.seq_lens, torch.zeros(rest, dtype=torch.int64)]))
        batch.out_cache_loc.zero_()
        batch.out_cache_loc[: here.out_cache_loc.shape[0]] = here.out_cache_loc
        batch.spec_info = here.spec_info
        backend.init_forward_metadata_out_graph(batch)
        assert backend.step.tree_mask.data_ptr() == step.tree_mask.data_ptr()
        replay()
        check_drafts(engine, requests, tokens, masks, q, results["out"])


def test_sglang_verifies_a_chain_without_a_mask(device):
    engine = SglangEngine()
    engine.step("extend", [1, 3], [12, 7])
    _, batch = drafts_of(engine.pool, [1, 3], 5, seed=1)
    batch.spec_info.custom_mask = None
    q, k, v = engine.inputs(10)
    engine.backend.init_forward_metadata(batch)
    chain = [torch.ones(5, n, dtype=torch.bool, device="cpu").tril(n - 5) for n in (17, 12)]
    check_drafts(engine, [1, 3], 5, chain, q, engine.backend.forward(q, k, v, layer_of(), batch))
    batch.spec_info.ragged_verify_layout = object()
    with pytest.raises(tessera.Error, match="^spec_info.ragged_verify_layout: "):
        engine.backend.init_forward_metadata(batch)


def test_sglang_refusals():
    backend = SglangEngine().backend
    tree = SimpleNamespace(custom_mask=torch.ones(4, dtype=torch.bool))
    batch = batch_of(Pool(1), "extend", [0], [1], tree)
    with pytest.raises(tessera.Error, match="^spec_info: given to extend a draft"):
        backend.init_forward_metadata(batch)
    with pytest.raises(tessera.Error, match="before init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(batch_of(Pool(1), "decode", [0], [1]))
    scaled = layer_of(k_scale=1.5)
    with pytest.raises(tessera.Error, match="^layer.k_scale: 1.5, accepted None"):
        backend.forward(*[normal(1, 4)] * 3, scaled, batch)


def test_sglang_refuses_what_changes_the_result():
    engine = SglangEngine()
    batch = batch_of(Pool(1), "decode", [0], [1])
    rows = [normal(1, HEADS * D), normal(1, HEADS_KV * D), normal(1, HEADS_KV * D)]
    for name, value in (
        ("use_irope", True), ("pos_encoding_mode", "ROPE_LLAMA"), ("logit_capping_method", "rational"),
        ("xai_temperature_len", 1024), ("is_cross_attention", True), ("v_scale", torch.ones(())),
        ("attn_type", "encoder"),
    ):  # fmt: skip
        with pytest.raises(tessera.Error, match=f"^layer.{name}: "):
            engine.backend.init_forward_metadata(batch)
            engine.backend.forward(*rows, layer_of(**{name: value}), batch, save_kv_cache=False)
    for name, value in (
        ("encoder_lens", torch.ones(1)), ("attn_attend_prefix_cache", True), ("mha_return_lse", True),
        ("cross_attention_custom_mask", torch.ones(1)), ("multi_item_delimiter_indices", [torch.ones(1)]),
    ):  # fmt: skip
        with pytest.raises(tessera.Error, match=f"^forward_batch.{name}: "):
            engine.backend.init_forward_metadata(SimpleNamespace(**vars(batch), **{name: value}))
    for name in ("q_rope", "k_rope", "cos_sin_cache"):
        with pytest.raises(tessera.Error, match=f"^{name}: given, accepted None"):
            engine.backend.forward(*rows, layer_of(), batch, **{name: torch.ones(1)})
    pool = Pool(1)
    pool.translate_loc_from_full_to_swa = lambda slots: slots
    with pytest.raises(tessera.Error, match="^token_to_kv_pool: "):
        sglang.Backend(pool.runner())


def test_sglang_layers_of_encoders(device):
    """Each query sees the keys after it, too, and a window is one on both sides."""
    engine = SglangEngine()
    slots = engine.pool.allocate(0, 20)
    q, k, v = engine.inputs(20)
    batch = batch_of(engine.pool, "extend", [0], [20])
    batch.out_cache_loc = torch.tensor(slots)
    engine.backend.init_forward_metadata(batch)
    layer = layer_of(attn_type="encoder_only")
    for window in (-1, 4):
        layer.sliding_window_size = window
        out = engine.backend.forward(q, k, v, layer, batch).view(1, 20, HEADS, D)
        rows = [x.view(1, 20, -1, D) for x in (q, k, v)]
        expected = tessera.attention(*rows, scale=SCALE, window=(window, window))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_sglang_lengths_of_either_kind(kind):
    """Its own tests pass extend_seq_lens_cpu as a tensor."""
    engine = SglangEngine()
    batch = batch_of(engine.pool, "extend", [0, 1], [3, 5])
    if kind == "tensor":
        batch.extend_seq_lens_cpu = torch.tensor(batch.extend_seq_lens_cpu, device="cpu")
    else:
        batch.seq_lens_cpu = batch.seq_lens_cpu.tolist()
    engine.backend.init_forward_metadata(batch)
    assert engine.backend.step.max_seqlen_q == 5 and type(engine.backend.step.max_seqlen_q) is int


def test_vllm_refuses_what_changes_the_result():
    for cache in ("fp8_inc", "int8", "nvfp4", "fp8_per_token_head"):
        with pytest.raises(tessera.Error, match="^kv_cache_dtype: "):
            vllm.Attention(HEADS, D, SCALE, kv_cache_dtype=cache)
    step, q, pages = SimpleNamespace(dcp_context_kv_lens=torch.ones(1)), normal(1, HEADS, D), normal(2, 1, 16, HEADS, D)
    with pytest.raises(tessera.Error, match="^attn_metadata.dcp_context_kv_lens: "):
        vllm.Attention(HEADS, D, SCALE).forward(None, q, None, None, pages.flatten(0, 1), step, torch.empty_like(q))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_sinks_in_the_model_s_dtype(dtype):
    """gpt-oss has bfloat16 ones."""
    sinks = normal(HEADS).to(torch.bfloat16).to(dtype)
    q, pages = normal(2, HEADS, D), normal(4, HEADS_KV, 16, 2 * D)
    table, lengths = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32), torch.tensor([20, 25], dtype=torch.int32)
    starts, slots = torch.tensor([0, 1, 2], dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    step = vllm.Metadata(2, 1, starts, 32, lengths, table, slots)
    run = lambda sinks: vllm.Attention(HEADS, D, SCALE, HEADS_KV, sinks=sinks).forward(  # noqa: E731
        None, q, None, None, pages, step, torch.empty_like(q)
    )
    assert torch.equal(run(sinks), run(sinks.float())) and not torch.equal(run(sinks), run(None))

    engine = SglangEngine()
    slots = engine.pool.allocate(0, 3)
    batch = batch_of(engine.pool, "extend", [0], [3])
    batch.out_cache_loc = torch.tensor(slots)
    engine.backend.init_forward_metadata(batch)
    inputs = engine.inputs(3)
    run = lambda sinks: engine.backend.forward(*inputs, layer_of(), batch, sinks=sinks)  # noqa: E731
    assert torch.equal(run(sinks), run(sinks.float())) and not torch.equal(run(sinks), run(None))


# ---- what both stand on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_csr_page_tables(device, page_size):
    """Against a rectangular table of the same pages. Entries of no sequence and keys past the last page's length hold
    anything."""
    counts, kept = [0, 3, 1, 5, 0], [0, 2, 4, 1, 0]
    indptr = torch.tensor([2, 2, 5, 6, 11, 11], dtype=torch.int32)
    pages = torch.randperm(9, generator=torch.Generator().manual_seed(3), device="cpu").to(torch.int32)
    indices = torch.cat(
        [torch.tensor([-5, 99], dtype=torch.int32), pages.to(device), torch.tensor([-1], dtype=torch.int32)]
    )
    last = torch.tensor(kept, dtype=torch.int32).clamp(max=page_size)
    lengths = paged.key_lengths(indptr, None if page_size == 1 else last, page_size)
    assert lengths.dtype == torch.int32
    assert lengths.tolist() == [0 if n == 0 else (n - 1) * page_size + int(end) for n, end in zip(counts, last)]
    table = torch.full((5, 6), -7, dtype=torch.int32)
    for b, count in enumerate(counts):
        table[b, :count] = indices[indptr[b] : indptr[b] + count]
    k_cache, v_cache = (normal(9, page_size, HEADS_KV, D, seed=seed) for seed in (1, 2))
    q, outs = normal(5, HEADS, D), [torch.full((5, HEADS, D), float("nan")) for _ in range(2)]
    common = dict(
        cu_seqlens_q=torch.arange(6, dtype=torch.int32), seqused_k=lengths, max_seqlen_q=1, max_seqlen_k=6 * page_size,
        scale=SCALE,
    )  # fmt: skip
    paged.attend(q, k_cache, v_cache, outs[0], **common, page_table=table)
    paged.attend(q, k_cache, v_cache, outs[1], **common, page_indptr=indptr, page_indices=indices)
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size, keys", [(16, 64), (16, 70), (1, 37), (48, 96)])
def test_a_prefix_read_once(device, dtype, size, keys):
    """Decoding, drafts and a chunk of a prompt after common keys, padded with a sequence without tokens and rows of no
    sequence."""
    counts, owns, shared = [1, 5, 1, 20, 0], [9, 5, 1, 33, 0], keys // size
    lengths = [keys + own for own in owns[:-1]] + [0]
    each = -(-max(lengths) // size)
    pool = normal(2, shared + 5 * (each - shared), size, HEADS_KV, D, dtype=dtype)
    table = torch.full((5, each), 2**30, dtype=torch.int32, device="cpu")
    for b in range(4):
        table[b, :shared] = torch.arange(shared, device="cpu")
        table[b, shared:] = shared + b * (each - shared) + torch.arange(each - shared, device="cpu")
    starts = [0, *torch.tensor(counts, device="cpu").cumsum(0).tolist()]
    step = dict(
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32), seqused_k=torch.tensor(lengths, dtype=torch.int32),
        page_table=table.to(torch.get_default_device()),
    )  # fmt: skip
    prefix = paged.common_prefix(keys, seqused_k=step["seqused_k"], page_size=size)
    q, sinks = normal(starts[-1] + 3, HEADS, D, dtype=dtype, seed=5), normal(HEADS, seed=6)
    for options in (dict(), dict(sink=sinks, softcap=2.0), dict(window=(11, 0))):
        out = torch.full_like(q, math.nan)
        lse = paged.attend(
            q, *pool, out, **step, prefix=prefix, max_seqlen_q=20, max_seqlen_k=max(lengths), causal=True, scale=SCALE,
            return_lse=True, **options,
        )  # fmt: skip
        plain = torch.full_like(q, math.nan)
        expected_lse = paged.attend(
            q,
            *pool,
            plain,
            **step,
            max_seqlen_q=20,
            max_seqlen_k=max(lengths),
            causal=True,
            scale=SCALE,
            return_lse=True,
            **options,
        )
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
        for b, (count, length) in enumerate(zip(counts, lengths)):
            if not count:
                continue
            rows = slice(starts[b], starts[b] + count)
            k, v = (x[table[b].to(x.device)].flatten(0, 1)[:length] for x in pool)
            window = 12 if "window" in options else None  # a query's own and 11 before it
            kept = {name: value for name, value in options.items() if name != "window"}
            assert_rows(out[rows], alone(q[rows], k, v, window=window, **kept), dtype)
        assert not out[starts[-1] :].any(), "rows of no sequence"
    assert paged.common_prefix(size - 1, seqused_k=step["seqused_k"], page_size=size) is None


def test_metadata_waits_for_no_gpu():
    """Fake tensors have no data: what would read any, as a GPU is waited for, raises."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    with FakeTensorMode():
        lengths = paged.key_lengths(torch.zeros(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), 16)
        assert lengths.shape == (4,)
        with pytest.raises(DataDependentOutputException):
            int(lengths.max())  # so it would show
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 64, dtype=torch.int32)),
            token_to_kv_pool=None, model_config=SimpleNamespace(context_len=64), page_size=16,
        )  # fmt: skip
        backend = sglang.Backend(runner)
        lengths = torch.zeros(3, dtype=torch.int64)
        for mode, extends in (("decode", None), ("extend", [3, 1, 2])):
            batch = SimpleNamespace(
                forward_mode=Mode(mode), batch_size=3, req_pool_indices=lengths, seq_lens=lengths, seq_lens_cpu=None,
                extend_seq_lens=lengths, extend_seq_lens_cpu=extends, spec_info=None,
            )  # fmt: skip
            backend.init_forward_metadata(batch)
            assert backend.step.pages["page_table"].shape == (3, 4) and backend.step.cu_seqlens_q.shape == (4,)
        backend.init_cuda_graph_state(8, 8)
        batch.forward_mode = Mode("decode")
        backend.init_forward_metadata_out_graph(batch)
        assert backend.step.pages["page_table"].shape == (3, 4)


def captured(step, device):
    """Runs `step` once; on a GPU answers what replays a graph of it, on the CPU itself."""
    step()
    if device != "cuda":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_capture_serves_a_hundred_batches(device, dtype):
    """A plan and a graph of bounds: 1 to 6 sequences of one token, some or a chunk, padded with empty ones whose
    rows of the table hold anything. On the CPU, where there is no graph, the same call is made again."""
    random = torch.Generator().manual_seed(5)
    batch, tokens, longest, max_pages, size = 6, 150, 80, 40, 16

    def between(low, high):
        return int(torch.randint(low, high + 1, (), generator=random, device="cpu"))

    k_cache, v_cache = (normal(batch * max_pages, size, HEADS_KV, D, dtype=dtype, seed=seed) for seed in (1, 2))
    q, out = normal(tokens, HEADS, D, dtype=dtype, seed=3), torch.empty(tokens, HEADS, D, dtype=dtype)
    index = dict(
        cu_seqlens_q=torch.zeros(batch + 1, dtype=torch.int32),
        seqused_k=torch.zeros(batch, dtype=torch.int32),
        page_table=torch.zeros(batch, max_pages, dtype=torch.int32),
    )

    def step():
        paged.attend(
            q,
            k_cache,
            v_cache,
            out,
            **index,
            max_seqlen_q=longest,
            max_seqlen_k=max_pages * size,
            causal=True,
            scale=SCALE,
        )

    step = captured(step, device)
    caches = k_cache.cpu(), v_cache.cpu()
    for n in range(100):
        used, starts, lengths = between(1, batch), [0], []
        for b in range(batch):
            most = (1, 1, 8, longest)[between(0, 3)] if b < used else 0
            starts.append(starts[-1] + min(most if most <= 1 else between(0, most), tokens - starts[-1]))
            lengths.append(between(starts[-1] - starts[-2], max_pages * size) if b < used else 0)
        here = dict(
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device="cpu"),
            seqused_k=torch.tensor(lengths, dtype=torch.int32, device="cpu"),
            page_table=torch.randperm(batch * max_pages, generator=random, device="cpu")
            .view(batch, -1)
            .to(torch.int32),
        )
        here["page_table"][used:] = 2**30
        for name, tensor in here.items():
            index[name].copy_(tensor)
        q.copy_(normal(tokens, HEADS, D, dtype=dtype, seed=n + 4))
        out.fill_(math.nan)
        step()
        exact = tessera.attention(q.cpu(), *caches, **here, causal=True, scale=SCALE, kernel="reference")
        assert_rows(out, exact.double(), dtype)


def test_one_capture_serves_other_prefixes(device):
    """Two groups of six sequences, generated for every replay of one graph: their sequences, prefixes, pages and
    lengths."""
    random = torch.Generator().manual_seed(6)
    batch, max_pages, size = 6, 12, 16

    def between(low, high):
        return int(torch.randint(low, high + 1, (), generator=random, device="cpu"))

    pool = [normal(batch * max_pages, size, HEADS_KV, D, seed=seed) for seed in (1, 2)]
    q, out = normal(batch, HEADS, D, seed=3), torch.empty(batch, HEADS, D)
    index = dict(
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32), seqused_k=torch.ones(batch, dtype=torch.int32),
        page_table=torch.zeros(batch, max_pages, dtype=torch.int32), prefix_groups=torch.zeros(3, dtype=torch.int32),
        prefix_lens=torch.zeros(2, dtype=torch.int32),
    )  # fmt: skip

    def step():
        paged.attend(q, *pool, out, **index, max_seqlen_q=1, max_seqlen_k=max_pages * size, causal=True, scale=SCALE)

    step = captured(step, device)
    caches = [cache.cpu() for cache in pool]
    for n in range(30):
        ends = sorted(between(0, batch) for _ in range(3))
        table = torch.randperm(batch * max_pages, generator=random, device="cpu").view(batch, -1).to(torch.int32)
        lens = [between(0, (max_pages - 1) * size) for _ in range(2)]
        used = [between(1, max_pages * size) for _ in range(batch)]
        for begin, end, keys in zip(ends, ends[1:], lens):
            for b in range(begin, end):
                used[b] = between(max(keys, 1), max_pages * size)
                table[b, : -(-keys // size)] = table[begin, : -(-keys // size)]
        here = dict(seqused_k=used, page_table=table, prefix_groups=ends, prefix_lens=lens)
        for name, value in here.items():
            index[name].copy_(torch.as_tensor(value, dtype=torch.int32, device="cpu"))
        q.copy_(normal(batch, HEADS, D, seed=n + 4))
        out.fill_(math.nan)
        step()
        apart = {name: index[name].cpu() for name in ("cu_seqlens_q", "seqused_k", "page_table")}
        exact = tessera.attention(q.cpu(), *caches, **apart, causal=True, scale=SCALE, kernel="reference")
        assert_rows(out, exact.double(), torch.float32)


def test_few_plans_serve_all_steps():
    assert [paged.bound(n, 100) for n in (0, 1, 2, 3, 33, 64, 65, 100, 101)] == [1, 1, 2, 4, 64, 64, 100, 100, 100]


def test_a_slot_may_be_left_out(device):
    """-1 in the middle: on a GPU the kernel passes over it, on the CPU it is taken out first."""
    k, v = normal(4, HEADS_KV, D, seed=1), normal(4, HEADS_KV, D, seed=2)
    k_cache, v_cache = torch.zeros(3, 4, HEADS_KV, D), torch.zeros(3, 4, HEADS_KV, D)
    paged.write_slots(k, v, k_cache, v_cache, torch.tensor([5, -1, 11, 0]))
    for cache, new in ((k_cache, k), (v_cache, v)):
        expected = torch.zeros(12, HEADS_KV, D)
        expected[5], expected[11], expected[0] = new[0], new[2], new[3]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_a_cache_is_never_copied():
    cache = torch.zeros(2, 4, HEADS_KV, 2 * D)[..., ::2]
    with pytest.raises(tessera.Error, match="^k_cache, v_cache: a last dimension that is not contiguous"):
        index = torch.zeros(2, dtype=torch.int32)
        paged.attend(
            normal(1, HEADS, D), cache, cache, torch.empty(1, HEADS, D), cu_seqlens_q=index, seqused_k=index[:1],
            page_table=index[:1, None], max_seqlen_q=1, max_seqlen_k=8,
        )  # fmt: skip
