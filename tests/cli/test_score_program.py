"""tessera run and plan with score programs."""

import json

import numpy as np
import pytest

INPUTS = ("run", "q.npy", "k.npy", "v.npy", "-o", "out.npy")
SIZES = ("plan", "--sq", 32, "-H", 4, "--dtype", "float64")


@pytest.fixture
def inputs(folder, random):
    arrays = {name: random.standard_normal((1, 24, 4, 8)) for name in ("q", "k", "v", "dout")}
    arrays["bias"] = random.standard_normal((4, 24)).astype(np.float32)
    arrays["doc"] = np.repeat(np.arange(3), 8)
    folder.save(**arrays)
    return arrays


def test_a_program_is_the_option_that_it_means(folder, inputs):
    np.save(folder.path / "dense.npy", inputs["bias"][None, :, None, :])
    np.save(folder.path / "mask.npy", inputs["doc"][:, None] == inputs["doc"][None, :])
    gradients = ("--grad", "dout.npy", "--dq", "dq.npy")
    options = ("--softcap", 2, "--bias", "dense.npy", "--mask", "mask.npy", "--dbias", "db.npy")
    done = folder.tessera(*INPUTS, *gradients, *options)
    assert done.code == 0, done.err
    expected, d_q, d_bias = folder.load("out"), folder.load("dq"), folder.load("db")
    program = ("--score-mod", "c * tanh(s / c) + bias[h, j]", "--mask-mod", "doc[i] == doc[j]")
    binds = ("--bind", "c=2.0", "bias=bias.npy", "doc=doc.npy", "--dbind", "bias=db.npy")
    done = folder.tessera(*INPUTS, *gradients, *program, *binds, "--check", "--json")
    assert done.code == 0, done.err
    np.testing.assert_allclose(folder.load("out"), expected, atol=1e-12)
    np.testing.assert_allclose(folder.load("dq"), d_q, atol=1e-12)
    np.testing.assert_allclose(folder.load("db"), d_bias[0, :, 0], atol=1e-6)
    said = json.loads(done.out)
    assert {"name": "d_bias", "file": "db.npy", "dtype": "float32", "shape": [4, 24]} in said["outputs"]
    assert said["passed"] and "d_bias" in [check["name"] for check in said["checks"]]


def test_plan_prints_the_program_and_its_derivative(folder):
    program = ("--score-mod", "s*c + bias[h, i-j + 32]", "--mask-mod", "(j<=q_pos) && j != 3")
    done = folder.tessera(*SIZES, *program, "--bind", "bias=float32[4,64]", "c=0.5", "--direction", "backward")
    assert done.code == 0, done.err
    for line in ("score      s * c + bias[h, i - j + 32]", "mask       j != 3", "causal", "gradient   d_s = g * c",
                 "d_bias[h, i - j + 32] += g", "bias float32 [4, 64], with its gradient",
                 "c, a scalar: float"):  # fmt: skip
        assert line in done.out


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--score-mod", "s + bais[h, j]", "--bind", "bias=bias.npy"), "score, column 5: 'bais' is no name here"),
        (("--bind", "c=1"), "--bind c=1: given without a program, accepted with --score-mod or --mask-mod"),
        (("--grad", "dout.npy", "--dbind", "c=d"), "--dbind c=d: given without a program, accepted with --score-mod"),
        (("--score-mod", "s", "--bind", "c"), "--bind: 'c', accepted NAME=VALUE"),
        (("--score-mod", "s", "--bind", "bias=none.npy"), "none.npy"),
        (("--score-mod", "s + bias[h, j]", "--bind", "bias=bias.npy", "--dbind", "bias=db.npy"), "without --grad"),
        (("--score-mod", "s + bias[h, j + 30]", "--bind", "bias=bias.npy"), "index 1 of bias[h, j + 30] is 30 .. 53"),
        (("--score-mod", "s + bias[h, j + 8]", "--bind", "bias=bias.npy"), "is 24 for b 0, h 0, i 0, j 16"),
    ],
)
def test_wrong_programs_are_refused(folder, inputs, flags, words):
    done = folder.tessera(*INPUTS, *flags)
    assert done.code == 2 and words in done.err, done.err
    assert "out.npy" not in folder.files()
