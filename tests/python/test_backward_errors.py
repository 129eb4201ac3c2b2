"""bench/backward_errors.py on a CPU: every kind of inputs."""

import csv
import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import backward_errors  # noqa: E402


def test_errors_of_drawn_and_recorded_inputs(tmp_path, capsys):
    head_dim, file = 192, tmp_path / "errors.csv"
    arguments = ["--device", "cpu", "--length", "80", "--steps", "1", "--draws", "2"]
    assert backward_errors.main([*arguments, "--head-dims", str(head_dim), "--csv", str(file)]) == 0
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    kinds = {(row["data"], row["mask"]) for row in rows}
    assert kinds == {*((data, mask) for data in ("normal", "outliers") for mask in ("full", "causal")),
                     *((f"layer {n}", "causal") for n in (0, 3, 5))}  # fmt: skip
    drawn = {(*kind, draw) for kind in kinds for draw in ("0", "1")}
    least = {(row["data"], row["mask"], row["draw"]): row for row in rows if row["contestant"] == backward_errors.LEAST}
    found = [row for row in rows if row["contestant"] == "tessera"]
    assert least.keys() == drawn and len(found) == len(drawn)
    for row in found:
        assert row["kernel"] and int(row["head_dim"]) == head_dim
        for name in backward_errors.GRADIENTS:
            # O's own error is at most twice its rounding to bfloat16; P, dS and the gradient are rounded too. A model
            # of one step has values that are nearly alike, so dP - delta cancels, and O's rounding counts a hundred
            # times in dQ.
            rounding_of_o = float(least[row["data"], row["mask"], row["draw"]][name])
            assert 0 < float(row[name]) < math.hypot(2 * rounding_of_o, 8e-3), (name, row)
    assert "layers recorded" in capsys.readouterr().out


def test_says_what_is_wrong(capsys):
    with pytest.raises(SystemExit):
        backward_errors.parse(["--csv", "x", "--head-dims", "80"])
    assert "--head-dims" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        backward_errors.parse(["--csv", "x", "--device", "cpu", "--contestants", "cudnn"])
    assert "on a CPU there is tessera alone" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        backward_errors.parse(["--csv", "x", "--draws", "0"])
    assert "accepted is 1 or more" in capsys.readouterr().err
