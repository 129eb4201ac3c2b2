"""Tessera in HuggingFace Transformers: small models with random weights against `eager`, and both against float64."""

import copy
import importlib
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "AttentionInterface"):
    pytest.skip("this release of Transformers has no AttentionInterface", allow_module_level=True)
pytest.importorskip("tessera.transformers", exc_type=ImportError)

from torch.overrides import TorchFunctionMode  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM, masking_utils  # noqa: E402

import tessera.transformers  # noqa: E402
from tessera.transformers import Pattern  # noqa: E402
from torch_reference import check  # noqa: E402

layer = importlib.import_module("tessera.transformers.attention")

VOCABULARY = 61
WINDOW = 6
COMMON = dict(vocab_size=VOCABULARY, num_hidden_layers=2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
GQA = dict(hidden_size=48, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, **GQA),
    "gpt2": lambda: transformers.GPT2Config(**COMMON, n_embd=48, n_head=4, n_positions=64),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON, **GQA, head_dim=20, query_pre_attn_scalar=20, sliding_window=WINDOW, attn_logit_softcapping=2.0
    ),
    # Every expert is chosen: a choice that tips over would be no error of attention.
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON, **GQA, head_dim=16, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=2
    ),
}  # fmt: skip
ENCODERS = {
    "bert": lambda: transformers.BertConfig(**COMMON, hidden_size=48, intermediate_size=64, num_attention_heads=4),
    "modernbert": lambda: transformers.ModernBertConfig(
        **COMMON, hidden_size=48, intermediate_size=64, num_attention_heads=4, local_attention=2 * WINDOW,
        cls_token_id=None, sep_token_id=None, reference_compile=False,
    ),
}  # fmt: skip
PADDED = {"full": [0, 0], "left": [5, 0], "right": [0, -4]}
# Position ids restart: sequences of 7, 1 and 13 tokens in one row.
PACKED = torch.cat([torch.arange(n) for n in (7, 1, 13)])[None]


class InFloat64(TorchFunctionMode):
    """Models compute norms, rotations and the softmax in float32, whatever their dtype; the exact one must not."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def exact(value):
            return torch.float64 if value is torch.float32 else value

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(exact, args), **{name: exact(value) for name, value in (kwargs or {}).items()})


class ShuffledSums(TorchFunctionMode):
    """Sums of products in a random order given by `seed`: the same result in exact arithmetic, with other roundings."""

    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def shuffled(a, b, dim):
            order = torch.randperm(a.shape[-1], generator=self.generator, device="cpu").to(a.device)
            return a[..., order], b.index_select(dim, order)

        if function in (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__):
            args = shuffled(*args[:2], -2)
        elif function is torch.nn.functional.linear:
            args = (*shuffled(*args[:2], -1), *args[2:])
        elif function is torch.addmm:
            args = (args[0], *shuffled(*args[1:], -2))
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are tiny: threads would do nothing but wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def calls(monkeypatch):
    """The queries' shapes of the calls that reached Tessera."""
    shapes = []

    def watch(name, shape_of):
        original = getattr(layer, name)
        monkeypatch.setattr(layer, name, lambda q, *a, **b: shapes.append(shape_of(q)) or original(q, *a, **b))

    watch("attention", lambda q: tuple(q.shape))
    watch("attention_by_heads", lambda q: tuple(q.transpose(1, 2).shape))
    return shapes


def make(name, dtype=torch.float32, device="cpu"):
    torch.manual_seed(3)
    config = {**DECODERS, **ENCODERS}[name]()
    auto = AutoModelForCausalLM if name in DECODERS else AutoModel
    model = auto.from_config(config, attn_implementation="eager").to(device, dtype).eval()
    if name == "gpt_oss":
        model.set_experts_implementation("eager")  # the others are not for float64
    with torch.no_grad():
        for parameter in model.parameters():  # scores and sinks of a size that matters
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(device, batch=2, length=21):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator, device="cpu").to(device)


def padding(kind, ids):
    mask = torch.ones_like(ids)
    for row, count in zip(mask, PADDED[kind]):
        row[: max(count, 0)] = 0
        row[len(row) + min(count, 0) :] = 0
    return mask


def run(model, counted, **inputs):
    """What comes out at the tokens that count, and the gradients of each module's own parameters in one vector.

    Together, for the gradient of some biases is nothing but rounding: that of all keys moves no probability.
    """
    out = model(**inputs)[0][counted]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), device="cpu").to(out)
    model.zero_grad()
    (out * weights).sum().backward()
    results = {"out": out.detach()}
    for name, module in model.named_modules():
        gradients = [p.grad.flatten() for p in module.parameters(recurse=False) if p.grad is not None]
        if gradients:
            results[name] = torch.cat(gradients)
    return results


def compare(model, implementation, counted, **inputs):
    """Within twice eager's error, the largest of five: how far one computation's roundings carry in a whole model is
    chance.

    With one only, two that differ in nothing but the order of their sums failed once in 75 models; Tessera's algorithm
    for GPUs, emulated, in 4 of 60 (BERT, padded on the right), with products in float32 instead of three of TF32 in 2.
    With five, none did.
    """
    with InFloat64():
        exact = run(copy.deepcopy(model).double(), counted, **inputs)
    eagers = [run(model, counted, **inputs)]
    for seed in range(4):
        with ShuffledSums(seed):
            eagers.append(run(model, counted, **inputs))
    model.set_attn_implementation(implementation)
    # Of some releases this does not reach parts whose configuration is a copy of the model's own: T5's two stacks.
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel) and part.config is not model.config:
            part.set_attn_implementation(implementation)
    ours = run(model, counted, **inputs)
    assert ours.keys() == eagers[0].keys() == exact.keys()
    for name in exact:
        plain = max((eager[name] for eager in eagers), key=lambda x: (x - exact[name]).abs().nan_to_num().max())
        check(name, ours[name], plain, exact[name])


# ---- "tessera": logits and gradients --------------------------------------------------------------------------------


def test_importing_registers_the_name_and_changes_no_model():
    program = (
        "import transformers.masking_utils as m, transformers as t, tessera, tessera.torch\n"
        "assert 'tessera' not in t.AttentionInterface() and 'tessera' not in m.AttentionMaskInterface()\n"
        "import tessera.transformers\n"
        "assert 'tessera' in t.AttentionInterface() and 'tessera' in m.AttentionMaskInterface()\n"
        "model = t.AutoModel.from_config(t.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8,"
        " num_hidden_layers=1, num_attention_heads=1))\n"
        "assert model.config._attn_implementation == 'sdpa'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_equal_to_eager(name, kind, device, calls):
    model, ids = make(name, device=device), tokens(device)
    mask = padding(kind, ids)
    compare(model, "tessera", mask.bool(), input_ids=ids, attention_mask=mask)
    assert len(calls) == 2  # one a layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_half_precision(name, dtype, device):
    ids = tokens(device)
    mask = padding("left", ids)
    compare(make(name, dtype, device), "tessera", mask.bool(), input_ids=ids, attention_mask=mask)


# GPT-OSS builds its masks without the positions: eager attends across sequences.
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_packed(name, device, calls):
    ids = tokens(device, 1)
    whole = torch.ones_like(ids, dtype=torch.bool)
    inputs = dict(input_ids=ids, position_ids=PACKED.to(device), use_cache=False)
    compare(make(name, device=device), "tessera", whole, **inputs)
    assert all(len(shape) == 3 for shape in calls)  # rows, not a matrix of what sees what


@pytest.mark.parametrize("name", DECODERS)
def test_packed_by_keywords(name, device, calls):
    """The output of DataCollatorWithFlattening(return_flash_attn_kwargs=True): each sequence as if it were alone."""
    model, ids = make(name, device=device), tokens(device, 1)
    lengths = torch.tensor([0, 7, 8, 21], device=device)
    keywords = dict(cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=13, max_length_k=13)
    alone = [model(ids[:, first:last], use_cache=False).logits for first, last in zip(lengths, lengths[1:])]
    model.set_attn_implementation("tessera")
    packed = model(ids, position_ids=PACKED.to(device), use_cache=False, **keywords).logits
    torch.testing.assert_close(packed, torch.cat(alone, 1))
    assert [len(shape) for shape in calls] == [3, 3]


def test_named_when_a_model_is_made(device, calls):
    model = AutoModelForCausalLM.from_config(DECODERS["llama"](), attn_implementation="tessera").to(device)
    assert model(tokens(device)).logits.isfinite().all() and len(calls) == 2


def test_a_mask_of_the_users_own(device):
    """A boolean matrix, and numbers to add: all that there is to know, no causality beside it."""
    ids = tokens(device)
    generator = torch.Generator().manual_seed(1)
    allowed = torch.rand(2, 1, 21, 21, generator=generator, device="cpu").to(device) < 0.5
    allowed = allowed | torch.eye(21, dtype=torch.bool, device=device)
    added = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    model = make("llama", device=device)
    whole = torch.ones_like(ids, dtype=torch.bool)
    compare(model, "tessera", whole, input_ids=ids, attention_mask=added)
    by_bool = model(ids, attention_mask=allowed).logits
    torch.testing.assert_close(by_bool, model(ids, attention_mask=added).logits)


def test_position_bias_and_cross_attention(device, calls):
    if not hasattr(importlib.import_module("transformers.models.t5.modeling_t5"), "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("this release of Transformers has a T5 with an attention of its own")
    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    model = AutoModel.from_config(config, attn_implementation="eager").to(device).eval()
    ids = tokens(device)
    mask = padding("right", ids)
    whole = torch.ones(2, 9, dtype=torch.bool, device=device)
    compare(model, "tessera", whole, input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :9])
    assert len(calls) == 6


def test_dropout(device, calls):
    config = DECODERS["llama"]()
    config.attention_dropout = 0.3
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tessera").to(device).train()
    ids = tokens(device)

    def trained(seed):
        torch.manual_seed(seed)
        return model(ids).logits

    assert torch.equal(trained(1), trained(1)) and not torch.equal(trained(1), trained(2))
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


def test_probabilities_are_refused(device):
    model = make("llama", device=device)
    model.set_attn_implementation("tessera")
    with pytest.raises(ValueError, match="^output_attentions: True, accepted False"):
        model(tokens(device), output_attentions=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, device):
    model, ids = make("gemma2", device=device).train(), tokens(device)
    model.set_attn_implementation("tessera")
    mask = padding("left", ids)
    inputs = dict(input_ids=ids, attention_mask=mask, use_cache=False)
    expected = run(model, mask.bool(), **inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for name, values in run(model, mask.bool(), **inputs).items():
        torch.testing.assert_close(values, expected[name], msg=name)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled(name, device):
    """In one graph; which backend compiles it makes no difference to attention."""
    model, ids = make(name, device=device), tokens(device)
    model.set_attn_implementation("tessera")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for kind in ("full", "left"):
        mask = padding(kind, ids)
        ours, expected = (run(m, mask.bool(), input_ids=ids, attention_mask=mask) for m in (compiled, model))
        torch.testing.assert_close(ours["out"], expected["out"])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "modernbert"])
@pytest.mark.parametrize("inputs", ["positions", "packed", "padded"])
def test_compiled_models_skip_what_is_beyond_the_diagonal(name, inputs, device):
    """Values of positions and padding cannot be read while a model is traced, so its mask is a matrix: causal models
    say so besides."""
    model, ids = make(name, device=device), tokens(device)
    model.set_attn_implementation("tessera")
    given = {"input_ids": ids[:1, :21]} if inputs == "packed" else {"input_ids": ids}
    if inputs == "packed":
        given["position_ids"] = PACKED.to(device)
    if inputs == "padded":
        given["attention_mask"] = padding("left", ids)
    if name in DECODERS:
        given["use_cache"] = False
    torch._dynamo.reset()
    seen = []

    def backend(graph, _):
        for node in graph.graph.nodes:
            if node.op == "call_function" and "tessera" in str(node.target):
                names = [argument.name for argument in node.target._schema.arguments]
                seen.append(dict(zip(names, node.args)) | node.kwargs)
        return graph

    output = "logits" if name in DECODERS else "last_hidden_state"
    expected = getattr(model(**given), output)
    ours = getattr(torch.compile(model, fullgraph=True, backend=backend)(**given), output)
    counted = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    torch.testing.assert_close(ours[counted], expected[counted])
    assert len(seen) == model.config.num_hidden_layers
    assert {call["causal"] for call in seen} == {name in DECODERS}
    assert all(call["mask"] is not None for call in seen)


def test_exported(device):
    model, ids = make("gemma2", device=device), tokens(device)
    model.set_attn_implementation("tessera")
    inputs = dict(input_ids=ids, attention_mask=padding("left", ids), use_cache=False)
    exported = torch.export.export(model, (), inputs).module()
    counted = inputs["attention_mask"].bool()
    torch.testing.assert_close(exported(**inputs).logits[counted], model(**inputs).logits[counted])


# ---- the masks ------------------------------------------------------------------------------------------------------

OVERLAYS = {
    "causal": masking_utils.causal_mask_function,
    "sliding": masking_utils.sliding_window_causal_mask_function(WINDOW),
    "bidirectional": masking_utils.bidirectional_mask_function,
    "sliding both ways": masking_utils.sliding_window_bidirectional_mask_function(WINDOW),
}
#          Sq, Sk, positions of the first query and the first key
LAYOUTS = {
    "prompt": (11, 11, 0, 0),
    "dynamic cache": (4, 11, 7, 0),
    "one token": (1, 11, 10, 0),
    "static cache": (5, 16, 3, 0),
    "empty static cache": (5, 16, 0, 0),
    "sliding cache": (3, WINDOW + 2, 9, 9 - WINDOW + 1),
}


def visible(mask, batch, sq, sk):
    """The effect of a mask in attention_forward, as bool [B, 1, Sq, Sk]."""
    if isinstance(mask, torch.Tensor):
        return mask.expand(batch, 1, sq, sk)
    mask = Pattern(True) if mask is None else mask
    keys = sk if mask.keys is None else mask.keys
    i, j = torch.arange(sq)[:, None] + keys - sq, torch.arange(sk)
    seen = (j < keys).expand(sq, sk)
    if mask.causal:
        seen = seen & (j <= i)
    left, right = mask.window
    if left >= 0:
        seen = seen & (j >= i - left)
    if right >= 0:
        seen = seen & (j <= i + right)
    seen = seen.expand(batch, 1, sq, sk).clone()
    if mask.padding is not None:
        seen[..., :keys] &= mask.padding[:, None, None]
    return seen


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pattern_is_the_mask(overlay, layout, padded):
    sq, sk, q_offset, kv_offset = LAYOUTS[layout]
    causal = overlay in ("causal", "sliding")
    known = None
    if padded:
        known = torch.ones(2, q_offset + sq, dtype=torch.bool)
        known[0, : kv_offset + 2] = False
    arguments = dict(
        batch_size=2, q_length=sq, kv_length=sk, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=OVERLAYS[overlay], attention_mask=known,
    )  # fmt: skip
    mask = tessera.transformers.attention_mask(
        **arguments, allow_is_causal_skip=causal, allow_is_bidirectional_skip=not causal
    )
    exact = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert torch.equal(visible(mask, 2, sq, sk), exact)
    if causal or "static" not in layout or overlay == "bidirectional":
        assert not isinstance(mask, torch.Tensor)


def test_other_functions_become_a_matrix():
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
    arguments = dict(batch_size=2, q_length=9, kv_length=9, mask_function=chunks, local_size=4)
    mask = tessera.transformers.attention_mask(**arguments)
    assert torch.equal(mask, masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False))


# ---- caches ---------------------------------------------------------------------------------------------------------


def generate(model, **options):
    out = model.generate(
        **options, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits), out.past_key_values


@pytest.mark.parametrize("kind", ["full", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache, kind, device, calls):
    model, ids = make(name, device=device), tokens(device, length=9)
    options = dict(inputs=ids, attention_mask=padding(kind, ids), cache_implementation=cache)
    with InFloat64():
        words, exact, _ = generate(copy.deepcopy(model).double(), **options)
    _, eager, _ = generate(model, **options)
    model.set_attn_implementation("tessera")
    ours, logits, layers = generate(model, **options)
    assert torch.equal(ours, words)
    check("logits", logits, eager, exact)
    assert len(calls) == 24 and {shape[1] for shape in calls} == {9, 1}
    sliding = any("SlidingWindow" in type(one).__name__ for one in layers.layers)
    assert sliding == (name in ("gemma2", "gpt_oss"))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_prompt_after_a_cache(name, static, device):
    """A conversation that goes on: several queries after a cache that a window has left behind."""
    model, ids = make(name, device=device), tokens(device)
    model.set_attn_implementation("tessera")
    whole = model(ids, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=40) if static else None
    parts = []
    for first, last in ((0, 9), (9, 10), (10, 21)):
        out = model(ids[:, first:last], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


# ---- "flash_attention_2" --------------------------------------------------------------------------------------------

DROPIN = pathlib.Path(__file__).resolve().parents[2] / "python" / "flash_attn_dropin"


@pytest.fixture
def dropin(monkeypatch):
    """The calls that reached the drop-in."""
    monkeypatch.syspath_prepend(str(DROPIN))
    try:
        call = importlib.import_module("flash_attn._call")
    except ImportError as refusal:
        pytest.skip(str(refusal))
    shapes = []
    original = call.attention
    monkeypatch.setattr(call, "attention", lambda q, *a, **b: shapes.append(tuple(q.shape)) or original(q, *a, **b))
    tessera.transformers.activate_flash_attention_2()
    yield shapes
    tessera.transformers.restore_flash_attention_2()


# For GPT-2 in float32, which contains no nn.Linear, Transformers requests the dtype of an nn.Linear.
FLASH_MODELS = [("llama", torch.float32), ("gpt2", torch.bfloat16), ("gemma2", torch.float32)]


@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("name, dtype", FLASH_MODELS)
def test_flash_attention_2_equal_to_eager(name, dtype, kind, device, dropin):
    model, ids = make(name, dtype, device), tokens(device)
    mask = padding(kind, ids)
    compare(model, "flash_attention_2", mask.bool(), input_ids=ids, attention_mask=mask)
    assert len(dropin) == 2


@pytest.mark.parametrize("name, dtype", FLASH_MODELS)
def test_flash_attention_2_packed(name, dtype, device, dropin):
    ids = tokens(device, 1)
    whole = torch.ones_like(ids, dtype=torch.bool)
    inputs = dict(input_ids=ids, position_ids=PACKED.to(device), use_cache=False)
    compare(make(name, dtype, device), "flash_attention_2", whole, **inputs)
    assert all(len(shape) == 3 for shape in dropin)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_flash_attention_2_generates(name, cache, device, dropin):
    model, ids = make(name, device=device), tokens(device, length=9)
    options = dict(inputs=ids, attention_mask=padding("left", ids), cache_implementation=cache)
    expected = generate(model, **options)[0]
    model.set_attn_implementation("flash_attention_2")
    assert torch.equal(generate(model, **options)[0], expected) and len(dropin) == 24


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_paged_cache(name, device, dropin):
    """Requests of different lengths batched as they come, their keys and values in pages."""
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this release of Transformers has no continuous batching")
    if torch.device(device).type == "cpu" and torch.cuda.is_available():
        pytest.skip("Transformers 5.17 makes a CUDA stream for a model on the CPU where there is a GPU")
    model = make(name, device=device)
    prompts = [tokens(device, 1, n)[0].tolist() for n in (9, 3, 14)]
    config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = [model.generate(torch.tensor([p], device=device), generation_config=config) for p in prompts]
    model.set_attn_implementation("flash_attention_2")
    batching = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    results = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    answers = {tuple(one.prompt_ids): one.generated_tokens for one in results.values()}
    for prompt, sequence in zip(prompts, expected):
        assert answers[tuple(prompt)] == sequence[0, len(prompt) :].tolist()
    # Packed, of any length: on the CPU a batch is as long as its tokens are many, on a GPU filled up to a fixed length.
    assert dropin and all(len(shape) == 3 for shape in dropin)


def test_restored(device, dropin):
    from transformers import modeling_flash_attention_utils as utils

    model = make("llama", device=device)
    model.set_attn_implementation("flash_attention_2")
    tessera.transformers.restore_flash_attention_2()
    entry = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    assert entry["general_availability_check"] is utils.is_flash_attn_2_available
    assert not any(name == "cpu" for _, name in entry["supported_devices"])
    if not utils.is_flash_attn_2_available():
        with pytest.raises(ImportError):
            make("llama", device=device).set_attn_implementation("flash_attention_2")


def test_another_flash_attn_is_refused(tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import tessera.transformers as t\n"
        "try: t.activate_flash_attention_2()\n"
        "except ImportError as error: print(error)"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert printed.startswith("flash_attn: Tessera's drop-in is not what `import flash_attn` finds")


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks", "cache", "head_mask"])
def test_keywords_that_change_the_result_are_refused(name):
    """Of the keys that sparse models choose they make a mask for "eager" and "sdpa" alone."""
    q = torch.randn(1, 2, 5, 8)
    module = torch.nn.Module()
    with pytest.raises(ValueError, match=f"^{name}: given, accepted None"):
        tessera.transformers.attention_forward(module, q, q, q, None, **{name: torch.zeros(1, 5, 2)})
    expected, _ = tessera.transformers.attention_forward(module, q, q, q, None)
    keywords = {"position_ids": torch.arange(5), name: None}
    found, _ = tessera.transformers.attention_forward(module, q, q, q, None, **keywords)
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="^temperature: requires a gradient"):
        tessera.transformers.attention_forward(module, q, q, q, None, temperature=torch.ones(1, requires_grad=True))
