"""bench/backward_errors.py on a CPU: every kind of inputs."""

import csv
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import backward_errors  # noqa: E402


def test_errors_of_drawn_and_recorded_inputs(tmp_path, capsys):
    head_dim, file = 192, tmp_path / "errors.csv"
    arguments = ["--device", "cpu", "--contestants", "tessera", "--length", "80", "--steps", "1"]
    assert backward_errors.main([*arguments, "--head-dims", str(head_dim), "--csv", str(file)]) == 0
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    kinds = {(row["data"], row["mask"]) for row in rows}
    assert kinds == {*((data, mask) for data in ("normal", "outliers") for mask in ("full", "causal")),
                     *((f"layer {n}", "causal") for n in (0, 3, 5))}  # fmt: skip
    for row in rows:
        assert row["kernel"] and int(row["head_dim"]) == head_dim
        # bfloat16. A model of one step has values that are nearly alike, so dP - delta cancels, and O's rounding counts fifty times in dQ.
        most = dict.fromkeys(backward_errors.GRADIENTS, 8e-3)
        if row["data"].startswith("layer"):
            most |= {"d_q": 0.2, "d_k": 0.2}
        assert all(0 < float(row[name]) < most[name] for name in backward_errors.GRADIENTS), row
    assert "layers recorded" in capsys.readouterr().out


def test_says_what_is_wrong(capsys):
    with pytest.raises(SystemExit):
        backward_errors.parse(["--csv", "x", "--head-dims", "80"])
    assert "--head-dims" in capsys.readouterr().err
