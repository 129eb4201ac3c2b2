"""The Python examples run as they stand and find their own results right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    "name, needs", [("attention_numpy.py", "numpy"), ("train_pytorch.py", "torch")], ids=["numpy", "pytorch"]
)
def test_example(name, needs):
    pytest.importorskip(needs)
    run = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, env=os.environ)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout
