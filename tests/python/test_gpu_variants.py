"""scripts/gpu_variants.py without a GPU: which files are replaced, and the report on runs."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("gpu_variants", ROOT / "scripts/gpu_variants.py")
variants = importlib.util.module_from_spec(spec)
spec.loader.exec_module(variants)


def cells(*seconds, peer=None):
    return [
        {"name": f"cell {index}", "wrong": False, "seconds": {"tessera": one} | ({"cudnn": peer} if peer else {})}
        for index, one in enumerate(seconds)
    ]


def test_ratios():
    text = variants.summary(
        {variants.HERE: [cells(2.0, 4.0), cells(2.0, 4.0)], "q": [cells(1.0, 4.0), cells(1.0, 4.0)]}
    )
    lines = text.splitlines()
    assert lines[1].split() == ["cell", "0", "2.0000"] and lines[2].split() == ["cell", "1", "1.0000"]
    assert lines[3].split() == ["all", "1.4142"]
    assert "1 / seconds: 0.3536, 0.3536" in lines[4] and lines[5].startswith("q,")


def test_a_peer_takes_out_what_the_machine_does():
    """The second round was twice as slow, for everybody."""
    slow = cells(4.0, peer=8.0)
    text = variants.summary({variants.HERE: [cells(2.0, peer=4.0), slow], "q": [cells(2.0, peer=4.0), slow]})
    assert "1 / seconds: 2, 2" in text and text.splitlines()[1].split()[-1] == "1.0000"


def test_overlay(tmp_path):
    kernels, variant = tmp_path / "kernels", tmp_path / "variant"
    (kernels / "tessera").mkdir(parents=True)
    (kernels / "tessera/a.cuh").write_text("old")
    with pytest.raises(SystemExit, match="no such folder"):
        variants.overlay(variant, kernels)
    variant.mkdir()
    with pytest.raises(SystemExit, match="has no files"):
        variants.overlay(variant, kernels)
    (variant / "tessera").mkdir()
    (variant / "tessera/a.cuh").write_text("new")
    variants.overlay(variant, kernels)
    assert (kernels / "tessera/a.cuh").read_text() == "new"
    (variant / "tessera/b.cuh").write_text("misnamed")
    with pytest.raises(SystemExit, match="b.cuh takes the place of nothing"):
        variants.overlay(variant, kernels)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--rounds", "0", "q"], "--rounds: 0, accepted 1 or more"),
        (["a/q", "b/q"], "accepted names that differ"),
        (["logs"], "none of them logs"),
        (["nowhere"], "nowhere: no such folder"),
    ],
)
def test_wrong_arguments(arguments, complaint, tmp_path):
    command = [sys.executable, ROOT / "scripts/gpu_variants.py", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and complaint in done.stderr
