"""scripts/check_flex_attention.py on a few tests of ours in PyTorch's manner: what it counts, and how it sorts."""

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch.nn.attention.flex_attention")

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/check_flex_attention.py"
TESTS = '''
import unittest

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import FileCheck


class Tests(unittest.TestCase):
    def setUp(self):
        self.qkv = [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3)]

    def test_forward(self):
        flex_attention(*self.qkv, score_mod=lambda s, b, h, i, j: s * 2)

    def test_backward(self):
        flex_attention(*self.qkv).sum().backward()

    def test_compiled(self):
        program = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
        program(*self.qkv, score_mod=lambda s, b, h, i, j: s - j).sum().backward()

    def test_lists(self):
        create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device="cpu")

    @unittest.skipUnless(torch.backends.mps.is_available(), "needs another device")
    def test_device(self):
        pass

    @unittest.expectedFailure
    def test_expected(self):
        self.assertTrue(False)

    def test_code(self):
        FileCheck().check("a kernel").run(str(flex_attention(*self.qkv)))

    def test_words(self):
        q, k, v = self.qkv
        with self.assertRaisesRegex(ValueError, "the same number of heads"):
            flex_attention(q, k[:, :1], v[:, :1])

    def test_type(self):
        q, k, v = self.qkv
        with self.assertRaisesRegex(NotImplementedError, "4D tensors"):
            flex_attention(q[0], k[0], v[0])

    def test_refused(self):
        flex_attention(*self.qkv, kernel_options={"OUTPUT_MAX": True})

    def test_wrong(self):
        torch.testing.assert_close(flex_attention(*self.qkv), torch.zeros(1, 2, 16, 8))

    def test_accepted(self):
        with self.assertRaises(RuntimeError):
            flex_attention(*self.qkv)
'''
KINDS = {
    "forward": ("passed, Tessera called", 1, 0),
    "backward": ("passed, Tessera called", 1, 1),
    "compiled": ("passed, Tessera called", 1, 1),
    "lists": ("passed, Tessera not called", 0, 0),
    "device": ("skipped", 0, 0),
    "expected": ("failed, as PyTorch expects", 0, 0),
    "code": ("failed, of PyTorch's kernels alone", 1, 0),
    "words": ("refused, in other words", 0, 0),
    "type": ("refused, in other words", 0, 0),
    "refused": ("refused by Tessera alone", 0, 0),
    "wrong": ("failed", 1, 0),
    "accepted": ("accepted, where PyTorch refuses", 1, 0),
}


def run(*options):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, options)], capture_output=True, text=True, timeout=300
    )


def test_every_outcome_is_sorted_and_its_calls_counted(tmp_path):
    (tmp_path / "test_flex_attention.py").write_text(TESTS)
    done = run("--tests", tmp_path, "--json", tmp_path / "results.json")
    assert done.returncode == 1, done.stdout + done.stderr
    found = {
        result["test"].rpartition("test_")[2]: (result["kind"], result["forward"], result["backward"])
        for result in json.loads((tmp_path / "results.json").read_text())
    }
    assert found == KINDS, done.stdout
    assert "3 passed, Tessera called: 3 forward and 2 backward calls" in done.stdout
    assert "1 x needs another device" in done.stdout
    assert "Tests::test_wrong: Tensor-likes are not close!" in done.stdout
    chosen = run("--tests", tmp_path, "-k", "forward or words")
    assert chosen.returncode == 0 and "1 passed, Tessera called" in chosen.stdout, chosen.stdout + chosen.stderr


def test_a_folder_without_tests_is_refused(tmp_path):
    done = run("--tests", tmp_path)
    assert done.returncode == 1 and f"--tests {tmp_path}: accepted a folder with test_flex_attention.py" in done.stderr
