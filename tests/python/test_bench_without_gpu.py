"""The scripts of bench/ that measure a GPU report in one line that there is none."""

import importlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

COMMANDS = (
    ["backward_errors", "--csv", "unwritten.csv"],
    ["block_sparse", "--csv", "unwritten.csv"],
    ["cuda_against_pytorch"],
    ["cuda_fallback"],
    ["cuda_fp8"],
    ["cuda_rules", "kvcache"],
    ["cuda_serving", "--out", "unwritten"],
    ["kernel_times", "sparse", "--csv", "unwritten.csv"],
    ["long_context", "--csv", "unwritten.csv"],
    ["many_gpus", "--out", "unwritten"],
    ["papers", "speed", "--csv", "unwritten.csv"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_says_that_there_is_no_gpu(command, tmp_path, monkeypatch):
    if command[0] == "backward_errors":
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        importlib.import_module(command[0]).main()
    assert "this measures a GPU" in str(end.value)
    assert not any(tmp_path.iterdir())
