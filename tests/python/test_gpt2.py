"""examples/gpt2: the three attentions of Transformers' GPT-2 train alike, on a CPU."""

import csv
import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
_spec = importlib.util.spec_from_file_location(
    "gpt2_train", Path(__file__).resolve().parents[2] / "examples/gpt2/train.py"
)
train = importlib.util.module_from_spec(_spec)  # pathfinder's is called train, too
_spec.loader.exec_module(train)

SMALL = ("--model", "tiny", "--device", "cpu", "--length", "48", "--batch", "2", "--steps", "4", "--warm-up", "1")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return folder


def test_attentions_train_alike(tmp_path, text, capsys):
    curve = tmp_path / "curve.csv"
    assert train.main([*SMALL, "--text", str(text), "--csv", str(curve)]) == 0
    printed = capsys.readouterr().out
    losses = {}
    with curve.open() as file:
        for row in csv.DictReader(file):
            losses.setdefault(row["attention"], []).append(float(row["loss"]))
            assert float(row["tokens_per_s"]) > 0
    assert set(losses) == set(train.ATTENTIONS)
    for attention in train.ATTENTIONS:
        assert attention in printed and len(losses[attention]) == 4
        assert losses[attention] == pytest.approx(losses["eager"], abs=1e-3)
    assert losses["tessera"][-1] < losses["tessera"][0]


def test_tessera_is_what_runs(monkeypatch):
    import tessera.torch

    calls, kernels = [], tessera.torch.kernels
    forward = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *given, **options: calls.append(1) or forward(*given, **options))
    assert train.main([*SMALL, "--attention", "tessera", "--dropout", "0.1"]) == 0
    assert len(calls) >= 4 * train.SIZES["tiny"][0]


@pytest.mark.parametrize(
    "flags", (("--length", "1"), ("--dropout", "1"), ("--text", "nowhere"), ("--attention", "flash"))
)
def test_says_what_is_wrong(flags, capsys):
    with pytest.raises(SystemExit):
        train.parse([*SMALL, *flags])
    assert flags[0] in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        train.parse(["--help"])
    assert ended.value.code == 0 and "--attention" in capsys.readouterr().out
