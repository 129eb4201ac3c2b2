"""Python's knowledge of the options equals the library's table of fields."""

import subprocess
import sys
from pathlib import Path

import pytest
import tessera

ROOT = Path(__file__).resolve().parents[2]


def names(*kinds):
    from tessera import _core

    return {field["name"] for field in _core.option_fields() if field["kind"] in kinds}


def test_types_are_up_to_date():
    run = subprocess.run([sys.executable, ROOT / "scripts/make_options.py", "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_docstring_explains_every_option():
    # Of a backward pass: attention_backward has parameters of its own for these.
    missing = [name for name in names("tensor", "value", "execution") if name not in tessera.attention.__doc__]
    assert not missing


def test_pytorch_takes_every_option():
    of_call = pytest.importorskip("tessera.torch.options")
    in_a_tensor = {"dropout_seed", "dropout_offset"}  # dropout_state
    assert names("tensor", "value") - in_a_tensor <= set(of_call.NAMES)
    missing = [name for name in of_call.NAMES if name not in tessera.torch.attention.__doc__]
    assert not missing


def test_flat_and_back():
    of_call = pytest.importorskip("tessera.torch.options")
    options = {"causal": True, "window": (3, -1), "softcap": 2.0}
    assert (
        of_call.unpack(of_call.pack(options)) == options == of_call.given("f", {**options, "scale": None, "threads": 0})
    )
    with pytest.raises(TypeError, match=r"f\(\) got an unexpected keyword argument 'casual'"):
        of_call.given("f", {"casual": True})
    with pytest.raises(tessera.Error, match="window: 3, accepted a pair of integers"):
        of_call.given("f", {"window": 3})


def test_help_has_a_line_for_every_tensor():
    text = tessera._hints._with_other_tensors("Options, by keyword only:\n        bias: of my own.\n\n    Raises:")
    assert "\n        alibi_slopes: float32 [Hq] or [B, Hq]. ALiBi slopes.\n" in text
    assert text.count("bias: ") == 1 and text.endswith(".\n\n    Raises:")


def test_how_tensors_are_folded_under_vmap():
    from tessera._shapes import way_to_fold

    ways = ("scores", "heads", "dense")
    found = {way: {name for name in names("tensor") if way_to_fold(name) == way} for way in ways}
    assert found["scores"] == {"bias", "mask", "block_mask"}
    assert found["heads"] == {"alibi_slopes"}
    descales = {"q_descale", "k_descale", "v_descale"}
    assert found["dense"] == {"seqused_k", "causal_seqs", "tree_mask", "page_table", "places"} | descales
