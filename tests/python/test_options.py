"""What Python knows of the options is what the library's table of fields says."""

import inspect
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
    tessera_torch = pytest.importorskip("tessera.torch")
    parameters = set(inspect.signature(tessera_torch.attention).parameters)
    assert names("tensor", "value") <= parameters
