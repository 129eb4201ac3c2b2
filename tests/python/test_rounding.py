"""scripts/fwd_sm90_rounding.py: that what it simulates is attention, and that its ways differ as they must."""

import importlib.util
import math
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("fwd_sm90_rounding", ROOT / "scripts/fwd_sm90_rounding.py")
rounding = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = rounding  # where a dataclass looks up its module
spec.loader.exec_module(rounding)


def draw(keys, head_dim_v):
    generator = torch.Generator().manual_seed(keys)
    scores = torch.randn(32, keys, generator=generator, dtype=torch.float64) * 3
    return scores, torch.randn(keys, head_dim_v, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("way", rounding.WAYS)
@pytest.mark.parametrize("growth", [0.0, 2.0, -2.0])
def test_without_rounding_it_is_exact(way, growth):
    """Whatever the references, also where scores grow or fall by thousands from the first key to the last."""
    scores, v = draw(1000, 24)
    scores += growth * torch.arange(1000)
    scores[:, 900:].masked_fill_(torch.arange(100) > torch.arange(32)[:, None], -math.inf)
    exact = torch.softmax(scores * math.log(2), 1) @ v
    torch.testing.assert_close(rounding.attend(way, scores, v, 64, torch.float64).o, exact, rtol=1e-12, atol=1e-12)


def test_even_weights_are_not_done_again():
    v = draw(2048, 8)[1]
    for _, block_n in rounding.TILES:
        for way in rounding.WAYS:
            assert rounding.attend(way, torch.zeros(16, 2048, dtype=torch.float64), v, block_n, torch.bfloat16).again == 0


@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
def test_maxima_in_turns_round_less(outliers):
    of = rounding.errors(2048, (64, 64), torch.bfloat16, causal=False, outliers=outliers, seeds=2)
    assert of["in turns"][0] < of["kept"][0] and of["running"][0] < of["kept"][0]
