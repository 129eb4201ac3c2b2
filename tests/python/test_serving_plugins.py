"""The classes that vLLM and SGLang load, run as the engines run them: in the packages where they are installed, else in
their stand-ins."""

import inspect
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
tessera = pytest.importorskip("tessera")

import engine_stand_ins  # noqa: E402
import test_serving  # noqa: E402
from tessera.serving import sglang, vllm  # noqa: E402
from test_serving import D, HEADS, HEADS_KV, LAYOUTS, SCALE, STEPS, SglangEngine, VllmEngine  # noqa: E402


@pytest.fixture
def backend():
    """What vLLM's registry loads by the name TESSERA."""
    engine_stand_ins.provide("vllm")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for _ in range(2):
        vllm.register()
    return AttentionBackendEnum["TESSERA"].get_class()


class PluginEngine(VllmEngine):
    """vLLM's runner around the classes of the back end."""

    def __init__(self, backend, layout="LBNHC", **options):
        super().__init__(layout, **options)
        self.impl = backend.get_impl_cls()(HEADS, D, SCALE, HEADS_KV, None, None, "auto", None, "decoder", None)
        spec = SimpleNamespace(block_size=self.size)
        self.builder = backend.get_builder_cls()(spec, ["a layer"], None, torch.device("cpu"))

    def metadata(self, common):
        return self.builder.build(0, common)


def test_vllm_runs_a_layer(backend):
    layouts = backend.supported_kv_cache_layouts()
    assert {layout.name: layout.stride_order for layout in layouts} == LAYOUTS
    for layout in layouts:
        engine = PluginEngine(backend, layout.name)
        for counts in STEPS:
            engine.check(counts, *engine.step(counts))


def test_vllm_metadata_of_every_kind(backend):
    engine, built = PluginEngine(backend), []
    engine.metadata = lambda common: built.append(common) or engine.builder.build(0, common)
    engine.step([20, 5])
    (common,) = built
    plain = engine.builder.build(common_prefix_len=0, common_attn_metadata=common, fast_build=True)
    builder = engine.builder
    others = [builder.build_for_cudagraph_capture(common), builder.build_for_drafting(common, draft_index=1)]
    assert all(vars(other).keys() == vars(plain).keys() for other in others)
    for other in others:
        assert all(value is vars(other)[name] or value == vars(other)[name] for name, value in vars(plain).items())
    engine.builder.update_draft_decode_metadata(plain)
    table, slots = common.block_table_tensor + 1, common.slot_mapping + 1
    moved = engine.builder.update_block_table(plain, table, slots)
    assert moved.block_table is table and moved.slot_mapping is slots and moved.seq_lens is plain.seq_lens
    assert plain.block_table is common.block_table_tensor


def test_vllm_what_is_declared_is_supported(backend):
    assert backend.get_name() == "TESSERA" and not backend.forward_includes_kv_cache_update
    for name in backend.supported_kv_cache_dtypes:
        assert backend.get_impl_cls()(HEADS, D, SCALE, kv_cache_dtype=name).kv_cache_dtype == name
    for dtype in backend.supported_dtypes:
        engine = PluginEngine(backend, dtype=dtype)
        for counts in STEPS[:2]:
            engine.check(counts, *engine.step(counts))
    assert [backend.supports_head_size(n) for n in (0, 1, 80, 512, 513)] == [False, True, True, True, False]
    for head_size in (1, 80, 512):
        q, k_cache = torch.randn(2, 1, head_size), torch.randn(1, 1, 4, 2 * head_size)
        index = torch.tensor([0, 2], dtype=torch.int32)
        step = vllm.Metadata(2, 2, index, 2, index[1:], index[None, :1], torch.tensor([0, 1]))
        impl = backend.get_impl_cls()(1, head_size, SCALE)
        out = impl.forward(None, q, None, None, k_cache, step, torch.full_like(q, float("nan")))
        torch.testing.assert_close(out[0, 0], k_cache[0, 0, 0, head_size:])  # the first query sees the first key alone
    assert {"fp8", "fp8_e4m3", "fp8_e5m2"} <= set(backend.supported_kv_cache_dtypes)
    assert backend.supports_combination(D, torch.bfloat16, "fp8", 16) is None
    assert "accepted with float16" in backend.supports_combination(D, torch.float32, "fp8", block_size=16)
    capability = lambda major: SimpleNamespace(major=major, minor=0)  # noqa: E731
    assert not backend.supports_compute_capability(capability(7)) and backend.supports_compute_capability(capability(8))


def test_vllm_s_own_layer(backend):
    """Of the package: its layer, its configuration and its forward context around the back end, on the CPU."""
    if engine_stand_ins.is_stand_in("vllm"):
        pytest.skip("vLLM is not installed")
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.attention.backend import CommonAttentionMetadata

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        options = dict(prefix="layers.0", attn_backend=backend, per_layer_sliding_window=9)
        layer = Attention(HEADS, D, SCALE, HEADS_KV, **options)
        spec = layer.get_kv_cache_spec(config)
        builder = backend.get_builder_cls()(spec, ["layers.0"], config, torch.device("cpu"))
    layer.kv_cache = test_serving.cache_of("BLNHC", 8, 16, torch.float32)
    tokens, starts = 20, torch.tensor([0, 20], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=starts[1:], num_reqs=1, num_actual_tokens=tokens,
        max_query_len=tokens, max_seq_len=tokens, block_table_tensor=torch.tensor([[3, 5]], dtype=torch.int32),
        slot_mapping=torch.cat([torch.arange(48, 64), torch.arange(80, 84)]),
    )  # fmt: skip
    q, k, v = (test_serving.normal(tokens, heads * D, seed=heads) for heads in (HEADS, HEADS_KV, HEADS_KV + 1))
    v = v[:, : HEADS_KV * D].contiguous()
    slots = {"layers.0": common.slot_mapping}
    with set_forward_context({"layers.0": builder.build(0, common)}, config, slot_mapping=slots):
        out = layer(q, k, v)
    rows = [x.view(tokens, -1, D) for x in (q, k, v)]
    test_serving.assert_rows(out.view(tokens, HEADS, D), test_serving.alone(*rows, window=9), torch.float32)


def test_vllm_batch_invariance_is_the_engine_s(backend, monkeypatch):
    from vllm import envs

    for wanted in (False, True):
        monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", wanted, raising=False)
        assert backend.get_impl_cls()(HEADS, D, SCALE).options["batch_invariant"] is wanted


def test_vllm_s_reasons(backend):
    """Of the package: what its selection says of layers that are not supported."""
    if engine_stand_ins.is_stand_in("vllm"):
        pytest.skip("vLLM is not installed")
    from vllm.platforms.interface import DeviceCapability

    def reasons(**changed):
        layer = dict(
            head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=True,
            use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False,
            device_capability=DeviceCapability(9, 0), attn_type="decoder", has_sliding_window=True, use_non_causal=True,
            use_batch_invariant=True, use_kv_connector=True, use_adaptive_verification=True,
        )  # fmt: skip
        return backend.validate_configuration(**{**layer, **changed})

    assert reasons() == []
    for changed, reason in (
        (dict(head_size=576), "head_size"), (dict(dtype=torch.float64), "dtype"),
        (dict(kv_cache_dtype="fp8_inc"), "kv_cache_dtype"), (dict(use_mla=True), "MLA"),
        (dict(use_sparse=True), "sparse"),
        (dict(use_mm_prefix=True), "multimodal"), (dict(device_capability=DeviceCapability(7, 5)), "capability"),
        (dict(attn_type="encoder_only"), "attention type"), (dict(use_dcp=True), "DCP"), (dict(use_rswa=True), "R-SWA"),
    ):  # fmt: skip
        (said,) = reasons(**changed)
        assert reason in said
    assert reasons(kv_cache_dtype="fp8") == []
    (said,) = reasons(kv_cache_dtype="fp8", dtype=torch.float32)
    assert said == "kv_cache_dtype fp8 with float32, accepted with float16 and bfloat16"


def test_sglang_runs_a_layer():
    engine_stand_ins.provide("sglang")
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    for _ in range(2):
        sglang.register()
    assert ATTENTION_BACKEND_CHOICES.count("tessera") == 1
    engine = SglangEngine(page_size=16, make=ATTENTION_BACKENDS["tessera"])
    assert isinstance(engine.backend, AttentionBackend) and isinstance(engine.backend, sglang.Backend)
    engine.step("extend", [2, 0], [33, 20])
    engine.step("decode", [0, 2], [1, 1])
    runner = engine.pool.runner()
    runner.use_mla_backend = True
    with pytest.raises(tessera.Error, match="^model_runner.use_mla_backend: True, accepted False"):
        ATTENTION_BACKENDS["tessera"](runner)


def accepts(method, base):
    """Whether `method` can be called in every way in which `base` can."""
    ours = inspect.signature(method).parameters
    anything = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in ours.values())
    named = [p.name for p in ours.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    theirs = inspect.signature(base).parameters.values()
    asked = [p.name for p in theirs if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return anything or named[: len(asked)] == asked


def test_signatures_are_the_engines_own(backend):
    """Each method that the engines' classes have and ours overrides has the same arguments in the same order."""
    engine_stand_ins.provide("sglang")
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    from tessera.serving.sglang_backend import Backend

    pairs = [(backend, backend.__mro__[1]), (Backend, AttentionBackend)]
    pairs += [(backend.get_builder_cls(), backend.get_builder_cls().__mro__[1])]
    impl = backend.get_impl_cls()
    pairs += [(impl, next(base for base in impl.__mro__ if base.__name__ == "AttentionImpl"))]
    for ours, theirs in pairs:
        assert not inspect.isabstract(ours), ours
        for name, base in inspect.getmembers(theirs, callable):
            method = getattr(ours, name)
            if name.startswith("__") and name != "__init__" or method is base:
                continue
            if inspect.isroutine(method) and inspect.isroutine(base):
                assert accepts(method, base), f"{ours.__name__}.{name}"
