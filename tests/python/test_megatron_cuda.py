"""tessera.megatron on a GPU: one training step of a small GPT and a decoding step, against Megatron's unfused
attention."""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
tessera = pytest.importorskip("tessera")
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)
try:
    tessera.device("cuda")
except tessera.Error as refusal:
    pytest.skip(str(refusal), allow_module_level=True)
_DROPIN = pathlib.Path(__file__).resolve().parents[2] / "python" / "flash_attn_dropin"
sys.path.insert(0, str(_DROPIN))
try:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import parallel_state
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
finally:
    sys.path.remove(str(_DROPIN))
import tessera.megatron  # noqa: E402

VOCABULARY, LENGTH, BATCH, LAYERS = 96, 200, 3, 2


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(7)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def calls(monkeypatch):
    """The kernels that Tessera planned for what it was called with, on a GPU."""
    heard = []
    attention = tessera.torch.attention

    def spy(query, key, value, **options):
        assert query.is_cuda
        heard.append(options)
        return attention(query, key, value, **options)

    monkeypatch.setattr(tessera.torch, "attention", spy)
    return heard


def model(spec, dtype):
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=256, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=128,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0, masked_softmax_fusion=False,
        attention_softmax_in_fp32=True, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        params_dtype=dtype, bf16=dtype == torch.bfloat16)  # fmt: skip
    gpt = GPTModel(
        config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=256,
        position_embedding_type="rope",
    )  # fmt: skip
    return gpt.cuda().to(dtype)


def pair(dtype):
    """Megatron's own, and the same weights with Tessera's attention."""
    local = get_gpt_layer_local_spec(normalization="LayerNorm")
    own, ours = model(local, dtype), model(tessera.megatron.with_attention(local), dtype)
    ours.load_state_dict(own.state_dict())
    return own, ours


def tokens():
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=random).cuda()
    return ids, torch.arange(LENGTH, device="cuda").expand(BATCH, -1)


def step(gpt):
    """Loss, and the gradient of every parameter, in float32."""
    ids, positions = tokens()
    loss = gpt(ids, positions, None, labels=ids.roll(-1, 1)).float().mean()
    loss.backward()
    return loss.detach(), {name: parameter.grad.float() for name, parameter in gpt.named_parameters()}


def distance(a, b):
    return float((a - b).square().mean().sqrt())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_training_step(dtype, calls):
    own, ours = pair(dtype)
    loss, gradients = step(own)
    assert calls == []
    our_loss, our_gradients = step(ours)
    assert len(calls) == LAYERS and all(options["causal"] for options in calls)
    exact = gradients
    # The same weights before rounding: the reference for both errors.
    if dtype != torch.float32:
        precise, _ = pair(torch.float32)
        precise.load_state_dict(own.state_dict())
        exact = step(precise)[1]
    torch.testing.assert_close(our_loss, loss, rtol=1e-5 if dtype == torch.float32 else 5e-3, atol=0)
    for name, gradient in exact.items():
        size = float(gradient.square().mean().sqrt())
        allowed = 1e-5 * size if dtype == torch.float32 else 2 * distance(gradients[name], gradient) + 1e-3 * size
        assert distance(our_gradients[name], gradient) <= allowed, name


def decode(gpt, prompt):
    """The logits of each token from the prompt's last on, by Megatron's cache."""
    gpt.eval()
    ids, positions = tokens()
    context, logits = StaticInferenceContext(BATCH, LENGTH), []
    with torch.no_grad():
        for begin, end in ((0, prompt), *((at, at + 1) for at in range(prompt, LENGTH))):
            part = gpt(
                ids[:, begin:end], positions[:, begin:end], None, inference_context=context, runtime_gather_output=True
            )
            logits.append(part[:, -1])
            context.sequence_len_offset = end
            context.enable_decode_mode()
    return torch.stack(logits, 1)


def test_decoding(calls):
    own, ours = pair(torch.float32)
    steps = 4
    got = decode(ours, LENGTH - steps)
    assert len(calls) == LAYERS * (1 + steps)
    expected = decode(own, LENGTH - steps)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
