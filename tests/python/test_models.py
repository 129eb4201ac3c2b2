"""Whole models, unchanged, on Tessera by PyTorch's registry: outputs and all gradients beside PyTorch's own."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

from torch import nn  # noqa: E402

import tessera.torch  # noqa: E402
from torch_reference import check, random  # noqa: E402
from torch_registry import AVAILABLE, calls, on_tessera, restored  # noqa: E402, F401

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
import models  # noqa: E402

if not AVAILABLE:
    pytest.skip("this release of PyTorch has no torch.library.get_kernel", allow_module_level=True)


def model_results(model, dtype, forward):
    """Output and the gradients of all parameters."""
    model = model.to(dtype)
    model.zero_grad()
    output = forward(model, dtype)
    (output * torch.arange(output.shape[-1], dtype=dtype).sin()).sum().backward()
    return [output, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def compare_models(model, forward, calls, layers=1, compiler=None, dtype=torch.float32):
    """The model on Tessera beside itself on PyTorch's kernels, both held against float64; each layer must have run
    here.

    `compiler` compiles it once Tessera is active, and PyTorch's own stays eager.
    """
    exact = model_results(model, torch.float64, forward)
    own = model_results(model, dtype, forward)
    on_tessera()
    if compiler is not None:
        torch.compiler.reset()
        model.compile(backend=compiler, fullgraph=True)
    ours = model_results(model, dtype, forward)
    assert calls == {"forward": layers, "backward": layers} and tessera.torch.fallback_reasons() == {}
    assert len(ours) == len(own) == len(exact)
    for i, (a, b, c) in enumerate(zip(ours, own, exact)):
        check(f"result {i}", a, b, c)


@pytest.mark.parametrize("masked", ["none", "causal", "padding"])
def test_multihead_attention(device, calls, masked):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(64, 4, batch_first=True)
    x = random(3, 21, 64, requires_grad=False)
    padding = torch.arange(21) >= torch.tensor([[21], [10], [5]])

    def forward(model, dtype):
        options = {}
        if masked == "causal":
            options = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(21, dtype=dtype), "is_causal": True}
        elif masked == "padding":
            options = {"key_padding_mask": padding}
        y = x.to(dtype)
        return model(y, y, y, need_weights=False, **options)[0]

    compare_models(model, forward, calls)


@pytest.mark.parametrize("masked", ["none", "causal", "padding"])
def test_transformer_encoder(device, calls, masked):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = random(3, 21, 64, requires_grad=False)
    padding = torch.arange(21) >= torch.tensor([[21], [10], [5]])

    def forward(model, dtype):
        options = {}
        if masked == "causal":
            options = {"mask": nn.Transformer.generate_square_subsequent_mask(21, dtype=dtype), "is_causal": True}
        elif masked == "padding":
            options = {"src_key_padding_mask": padding}
        return model(x.to(dtype), **options)

    compare_models(model, forward, calls, layers=2)


# Eager, by the compiler's own code, and by its graphs alone, which needs a tenth of the time.
@pytest.mark.parametrize("compiler", [None, "inductor", "aot_eager"])
def test_vision_transformer(device, calls, compiler):
    torch.manual_seed(0)
    model = models.VisionTransformer(side=32, patch=4, width=64, depth=2, heads=2, classes=10)  # S = 65
    images = random(2, 3, 32, 32, requires_grad=False)
    compare_models(model, lambda model, dtype: model(images.to(dtype)), calls, layers=2, compiler=compiler)


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_gpt2(device, calls, compiler):
    torch.manual_seed(0)
    model = models.Gpt2(vocabulary=97, length=64, width=64, depth=2, heads=4)
    tokens = torch.randint(97, (2, 50))
    compare_models(model, lambda model, dtype: model(tokens), calls, layers=2, compiler=compiler)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_gpt2_of_transformers(device, calls, padded, compiler):
    """The class that programs load their weights into, with attn_implementation="sdpa"; a second sequence may be
    padded."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=64, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(97, (2, 50))
    mask = (torch.arange(50) < torch.tensor([[50], [31]])).long() if padded else None

    def forward(model, dtype):
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        return logits if mask is None else logits * mask[..., None]  # outputs of padding are never read

    compare_models(model, forward, calls, layers=2, compiler=compiler)
