"""tessera.megatron: a small GPT of megatron-core on the CPU: one training step and decoding, against Megatron's unfused
attention."""

import contextlib
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")
_DROPIN = pathlib.Path(__file__).resolve().parents[2] / "python" / "flash_attn_dropin"
sys.path.insert(0, str(_DROPIN))
try:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions import fused_softmax
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import attention as megatron_attention
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig
finally:
    sys.path.remove(str(_DROPIN))
import tessera  # noqa: E402
import tessera.megatron  # noqa: E402

VOCABULARY, LENGTH, BATCH = 96, 40, 3


class NoTracker:
    def fork(self, *_):
        return contextlib.nullcontext()


def on_cpu(make_mask):
    """Megatron's own masks, which it makes on "cuda"."""

    def made(*sizes):
        ones = torch.ones
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "ones", lambda *shape, device=None, **options: ones(*shape, **options))
            return make_mask.__wrapped__(*sizes) if hasattr(make_mask, "__wrapped__") else make_mask(*sizes)

    return made


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    """A group of one, and replacements on the CPU for Megatron's CUDA calls."""
    patch = pytest.MonkeyPatch()
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(tensor_parallel, "get_cuda_rng_tracker", NoTracker)
    patch.setattr(dot_product_attention.tensor_parallel, "get_cuda_rng_tracker", NoTracker)
    for name in ("get_default_causal_mask", "get_sliding_window_causal_mask"):
        patch.setattr(fused_softmax, name, on_cpu(getattr(fused_softmax, name)))
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    patch.undo()


@pytest.fixture
def calls(monkeypatch):
    """How often Tessera's attention ran, and with which options."""
    heard = []
    attention = tessera.torch.attention

    def spy(*tensors, **options):
        heard.append(options)
        return attention(*tensors, **options)

    monkeypatch.setattr(tessera.torch, "attention", spy)
    return heard


def config(**options):
    return TransformerConfig(**{
        "num_layers": 2, "hidden_size": 96, "num_attention_heads": 6, "num_query_groups": 2, "ffn_hidden_size": 64,
        "use_cpu_initialization": True, "attention_dropout": 0.0, "hidden_dropout": 0.0, "masked_softmax_fusion": False,
        "bias_dropout_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False, **options,
    })  # fmt: skip


def model(spec, **options):
    torch.manual_seed(5)
    return GPTModel(config(**options), transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=64,
                    position_embedding_type="rope")  # fmt: skip


def pair(**options):
    """Megatron's own, and the same weights with Tessera's attention."""
    local = get_gpt_layer_local_spec(normalization="LayerNorm")
    own, ours = model(local, **options), model(tessera.megatron.with_attention(local), **options)
    ours.load_state_dict(own.state_dict())
    return own, ours


def tokens():
    random = torch.Generator().manual_seed(3)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=random), torch.arange(LENGTH).expand(BATCH, -1)


def step(gpt, mask=None):
    """Loss, and the gradient of every parameter."""
    ids, positions = tokens()
    loss = gpt(ids, positions, mask, labels=ids.roll(-1, 1)).mean()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in gpt.named_parameters()}


CASES = {
    "causal": {},
    "window": {"window_size": (9, 0)},
    "window of one layer": {"window_size": (9, 0), "window_attn_skip_freq": 2},
    "layer scaling": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
    "heads without groups": {"num_query_groups": 6},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@pytest.mark.parametrize("case", CASES)
def test_a_training_step(case, calls, monkeypatch):
    if case == "recomputed":  # its random states are CUDA's
        monkeypatch.setattr(tensor_parallel, "checkpoint", lambda function, _, *inputs: function(*inputs))
    own, ours = pair(**CASES[case])
    loss, gradients = step(own)
    assert calls == []
    our_loss, our_gradients = step(ours)
    assert len(calls) == 2 and all(options["causal"] for options in calls)
    torch.testing.assert_close(our_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        bound = 2e-6 * float(gradient.abs().max())
        torch.testing.assert_close(our_gradients[name], gradient, rtol=0, atol=bound, msg=name)


def test_a_mask_hides(calls):
    """Documents that do not see each other: a mask of each sequence's own."""
    document = torch.arange(LENGTH) // 13
    hidden = (document[:, None] != document) | torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask = torch.stack([hidden, torch.ones_like(hidden).triu(1), hidden])[:, None]
    own, ours = pair()
    loss, gradients = step(own, mask)
    our_loss, our_gradients = step(ours, mask)
    assert len(calls) == 2 and all("mask" in options for options in calls)
    torch.testing.assert_close(our_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            our_gradients[name], gradient, rtol=0, atol=2e-6 * float(gradient.abs().max()), msg=name
        )


def core(attn_mask_type=AttnMaskType.causal, **options):
    return tessera.megatron.TesseraAttention(config(**options), 1, attn_mask_type, "self")


def test_packed_sequences(calls):
    """Each as if it were alone."""
    random = torch.Generator().manual_seed(4)
    lengths = [7, 1, 12]
    q, k, v = (torch.randn(sum(lengths), heads, 16, generator=random) for heads in (6, 2, 2))
    offsets = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=12, max_seqlen_kv=12
    )
    module = core()
    o = module(q, k, v, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=params)
    assert o.shape == (20, 96)
    for begin, end in zip(offsets[:-1], offsets[1:]):
        alone = module(*(x[begin:end, None] for x in (q, k, v)), None)
        torch.testing.assert_close(o[begin:end], alone[:, 0])
    params.cu_seqlens_q_padded = offsets
    with pytest.raises(tessera.Error, match="cu_seqlens_q_padded: given, accepted None"):
        module(q, k, v, None, packed_seq_params=params)


def test_masks_by_type(calls):
    q, k, v = (torch.randn(5, 2, heads, 16) for heads in (6, 2, 2))
    core()(q, k, v, None)
    core(AttnMaskType.no_mask)(q, k, v, None)
    hidden = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    hidden[1, ..., 3:] = True
    core(AttnMaskType.padding)(q, k, v, hidden)
    causal, full, padding = calls
    assert causal["causal"] and "causal" not in full and "mask" not in full
    assert "causal" not in padding and (padding["mask"] == ~hidden).all()


def test_dropout_is_for_training(calls):
    q, k, v = (torch.randn(5, 2, heads, 16) for heads in (6, 2, 2))
    module = core(attention_dropout=0.25)
    module(q, k, v, None)
    module.eval()
    module(q, k, v, None)
    assert calls[0]["dropout_p"] == 0.25 and "dropout_p" not in calls[1]


def test_a_sink(calls):
    module = core(softmax_type="learnable")
    assert "softmax_offset" in module.state_dict()
    q, k, v = (torch.randn(5, 2, heads, 16) for heads in (6, 2, 2))
    module(q, k, v, None).sum().backward()
    assert calls[0]["sink"] is module.softmax_offset and module.softmax_offset.grad.abs().max() > 0


def test_specs():
    local = get_gpt_layer_local_spec()
    exchanged = tessera.megatron.with_attention(local)
    assert exchanged.submodules.self_attention.submodules.core_attention is tessera.megatron.TesseraAttention
    assert local.submodules.self_attention.submodules.core_attention is dot_product_attention.DotProductAttention
    with pytest.raises(tessera.Error, match="without a core_attention"):
        tessera.megatron.with_attention(local.submodules.mlp)


def decode(gpt, prompt=33):
    """The logits of each token from the prompt's last on, from Megatron's cache, and those of the whole sequence at
    once."""
    gpt.eval()
    ids, positions = tokens()
    context = StaticInferenceContext(BATCH, LENGTH)
    logits = []
    with torch.no_grad():
        for begin, end in ((0, prompt), *((at, at + 1) for at in range(prompt, LENGTH))):
            part = gpt(
                ids[:, begin:end], positions[:, begin:end], None, inference_context=context, runtime_gather_output=True
            )
            logits.append(part[:, -1])
            context.sequence_len_offset = end
            context.enable_decode_mode()
        whole = gpt(ids, positions, None)[:, prompt - 1 :]
    return torch.stack(logits, 1), whole


def test_decoding(calls):
    own, ours = pair()
    stepwise, whole = decode(ours)
    assert len(calls) == 2 * (1 + LENGTH - 33) + 2
    torch.testing.assert_close(stepwise, whole, rtol=0, atol=2e-5 * float(whole.abs().max()))
    torch.testing.assert_close(stepwise, decode(own)[1], rtol=0, atol=2e-5 * float(whole.abs().max()))


def test_flash_decoding_is_the_drop_in(calls, monkeypatch):
    """Megatron's flash_decode: a token by flash_attn_with_kvcache, the prompt by the layer's own attention."""
    steps = []
    with_kvcache = megatron_attention.flash_attn_with_kvcache

    def spy(*tensors, **options):
        steps.append(options)
        return with_kvcache(*tensors, **options)

    monkeypatch.setattr(megatron_attention, "flash_attn_with_kvcache", spy)
    _, ours = pair(flash_decode=True)
    stepwise, whole = decode(ours)
    assert len(steps) == 2 * (LENGTH - 33)
    torch.testing.assert_close(stepwise, whole, rtol=0, atol=2e-5 * float(whole.abs().max()))


def test_imports_of_flash_attn_are_the_drop_in():
    import flash_attn
    from flash_attn.layers.rotary import apply_rotary_emb

    if not hasattr(flash_attn, "_call"):
        pytest.skip("another flash_attn is installed")
    assert megatron_attention.flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert megatron_attention.flash_attn_with_kvcache is flash_attn.flash_attn_with_kvcache
    assert rope_utils.apply_rotary_emb_flash is apply_rotary_emb
