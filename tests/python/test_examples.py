"""The Python examples run unchanged and find their own results correct."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    "name, needs",
    [
        ("attention.py", "numpy"),
        ("attention_numpy.py", "numpy"),
        ("train_pytorch.py", "torch"),
        ("train_jax.py", "jax"),
        ("relative_bias.py", "torch"),
        ("long_document.py", "torch"),
    ],
    ids=["lines", "numpy", "pytorch", "jax", "bias", "document"],
)
def test_example(name, needs):
    pytest.importorskip(needs)
    run = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, env=os.environ)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("blocks", ((128, 64), (32, 80), (7, 5), (500, 500)), ids=str)
def test_25_lines_against_the_library(blocks, causal):
    """In float64, by the library's reference kernel: only the order of the sums differs."""
    numpy = pytest.importorskip("numpy")
    import tessera

    example = runpy.run_path(str(EXAMPLES / "attention.py"))
    N, D = 150, 24
    q, k, v, d_o = numpy.random.default_rng(5).standard_normal((4, N, D))
    o, lse = example["forward"](q, k, v, *blocks, causal=causal)
    gradients = example["backward"](q, k, v, o, lse, d_o, *blocks, causal=causal)

    whole = [x[None, :, None] for x in (q, k, v, d_o)]  # [B, S, H, D]
    exact_o, exact_lse = tessera.attention(*whole[:3], causal=causal, return_lse=True)
    exact = tessera.attention_backward(*whole[:3], exact_o, exact_lse, whole[3], causal=causal)
    rounding = N * 2.0**-52  # one for each term of the longest sum
    assert abs(o - exact_o[0, :, 0]).max() < rounding * abs(v).max()
    assert abs(lse[:, 0] - exact_lse[0, 0]).max() <= 2.0**-24 * abs(lse).max()  # float32 there
    for got, name in zip(gradients, ("d_q", "d_k", "d_v")):
        expected = getattr(exact, name)[0, :, 0]
        assert abs(got - expected).max() < rounding * abs(expected).max(), name


def test_25_lines_are_25():
    text = (EXAMPLES / "attention.py").read_text()
    algorithm = text[text.index("def tile") : text.index("if __name__")]
    assert len([line for line in algorithm.splitlines() if line.strip()]) == 25


# ---- README ---------------------------------------------------------------------------------------------------------

README = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", README)


def test_readme_s_code_fits_a_page():
    long = [line for _, text in CODE for line in text.splitlines() if len(line) > 88]
    assert not long


def test_readme_s_first_program_runs():
    """On any machine: it says that a CPU is sufficient."""
    pytest.importorskip("torch")
    program = next(text for language, text in CODE if language == "python")
    check = """
sdpa = torch.nn.functional.scaled_dot_product_attention
exact = sdpa(*(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=True)
assert (o.transpose(1, 2) - exact).abs().max() < 1e-5 and tessera.torch.fallback_reasons(reset=True)  # float64 alone
ours = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
assert (ours - o.transpose(1, 2)).abs().max() < 1e-6 and not tessera.torch.fallback_reasons()
"""
    run = subprocess.run([sys.executable, "-c", program + check], capture_output=True, text=True, env=os.environ)
    assert run.returncode == 0, run.stderr
