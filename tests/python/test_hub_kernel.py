"""scripts/make_hub_kernel.py: the folder that it makes of the wheel, and what the package `kernels` does with it."""

import ast
import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/make_hub_kernel.py"
MACHINE = platform.machine()


def make(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def wheel():
    (path,) = Path(os.environ["TESSERA_WHEELS"]).glob("*.whl")
    return path


@pytest.fixture(scope="module")
def folder(wheel, tmp_path_factory):
    out = tmp_path_factory.mktemp("hub")
    process = make(wheel, "--out", out, "--version", 3, "--any-abi")
    assert process.returncode == 0, process.stderr
    return out


def variants(folder):
    return {path.name: path for path in (folder / "build").iterdir()}


def test_layout(folder):
    names = [f"torch-stable-abi29-{toolkit}-{MACHINE}-linux" for toolkit in ("cpu", "cu120", "cu130")]
    assert sorted(variants(folder)) == names
    for name, path in variants(folder).items():
        metadata = json.loads((path / "metadata.json").read_text())
        backend = "cpu" if "-cpu-" in name else "cuda"
        assert re.fullmatch(rf"_tessera_attention_{backend}_[0-9a-f]{{12}}", metadata["id"])
        assert (metadata["name"], metadata["version"], metadata["license"]) == ("tessera-attention", 3, "BSD-3-Clause")
        assert metadata["backend"]["type"] == backend and ("archs" in metadata["backend"]) == (backend == "cuda")
        files = {str(p.relative_to(path)): p for p in path.rglob("*") if p.is_file() and p.name != "metadata.json"}
        hashes = {n: base64.b64encode(hashlib.sha256(p.read_bytes()).digest()).decode() for n, p in files.items()}
        assert metadata["digest"] == {"algorithm": "sha256", "files": hashes}
        sources = {n: p.read_text() for n, p in files.items() if n.endswith(".py")}
        assert {"__init__.py", "tessera_attention/__init__.py", "torch/ops.py"} <= set(sources)
        for source in sources.values():  # nothing of an installed Tessera, and no operator by its names
            for node in ast.walk(ast.parse(source)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module]
                assert not any(re.match(r"(tessera|flash_attn)\b", name) for name in names), ast.unparse(node)
            assert '"tessera::' not in source


def test_refusals(wheel, folder, tmp_path):
    assert "build exists, accepted a folder without it" in make(wheel, "--out", folder, "--any-abi").stderr
    other = tmp_path / "something-1-py3-none-any.whl"
    assert "accepted wheels for Linux, of one architecture" in make(other, "--out", tmp_path / "a").stderr


def test_rules_of_native_modules(wheel, tmp_path):
    """A library of this machine's newest C library and one of a foreign library are refused, each by its reason."""
    sys.path.insert(0, str(SCRIPT.parent))
    from make_hub_kernel import NEWEST, violations

    (tmp_path / "foreign.c").write_text("int zero(void) { return 0; }")
    (tmp_path / "main.c").write_text("int zero(void); int one(void) { return zero() + 1; }")
    cc = os.environ.get("CC", "cc")
    run = lambda *c: subprocess.run([cc, "-shared", "-fPIC", *c], cwd=tmp_path, check=True, timeout=60)  # noqa: E731
    run("foreign.c", "-o", "libforeign.so", "-Wl,-soname,libforeign.so.1")
    run("main.c", "-o", "main.so", "-L.", "-lforeign", "-Wl,--no-as-needed", "-lm")
    assert violations(tmp_path / "main.so") == ["needs libforeign.so.1"]
    newest, NEWEST["GLIBC"] = NEWEST["GLIBC"], (2, 1)
    try:
        assert any(
            re.match(r"asks for GLIBC_2[.0-9]+, accepted 2.1 and older", v) for v in violations(tmp_path / "main.so")
        )
    finally:
        NEWEST["GLIBC"] = newest


LOADED = """
import json, os, sys
import torch
from kernels import get_local_kernel
from pathlib import Path
if sys.argv[2] == "beside":
    import tessera, tessera.torch
kernel = get_local_kernel(Path(sys.argv[1]))
assert kernel.__name__.startswith("_tessera_attention_")
assert ("tessera" in sys.modules) == (sys.argv[2] == "beside")
q, k, v = (torch.randn(2, 37, 4, 24, requires_grad=True) for _ in range(3))
reference = lambda: torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
for out in (kernel.attention(q, k, v, causal=True), kernel.flash_attn_func(q, k, v, causal=True)):
    torch.testing.assert_close(out, reference(), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    for ours, theirs in zip(gradients, torch.autograd.grad(reference().square().sum(), (q, k, v))):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
try:
    kernel.attention(q, k, v, causal=True, window=(1,))
except kernel.Error as error:
    print(error)
if sys.argv[2] == "beside":
    torch.testing.assert_close(tessera.attention(q, k, v, causal=True), reference(), rtol=1e-5, atol=1e-5)
"""


@pytest.mark.parametrize("installed", ["alone", "beside"])
def test_kernels_loads_it(folder, installed):
    """From its folder, alone and beside an installed Tessera."""
    pytest.importorskip("torch")
    pytest.importorskip("kernels")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOADED, folder, installed]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    assert "window" in process.stdout and "nanobind" not in process.stderr


def test_kernels_reads_the_same_metadata(folder):
    pytest.importorskip("kernels")
    from kernels._rust import Digest, Metadata

    for path in variants(folder).values():
        metadata = Metadata.read_from_file(path / "metadata.json")
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, path))


TRANSFORMERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=97, max_position_embeddings=64)
model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
tokens = torch.randint(0, 97, (2, 21))
logits = {}
with torch.no_grad():
    for name in ("sdpa", "example/tessera-attention"):
        model.set_attn_implementation(name)
        logits[name] = model(tokens).logits.float()
a, b = logits.values()
assert (a - b).abs().max() < 0.05 * a.abs().max(), (a - b).abs().max()
print("calls", model.config._attn_implementation)
"""


def test_transformers_takes_it(folder):
    """By the name of a repository, which is a folder here."""
    for name in ("torch", "kernels", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    import transformers

    if not transformers.utils.import_utils.is_kernels_available():
        found = importlib.metadata.version("kernels")
        pytest.skip(f"Transformers {transformers.__version__} does not support kernels {found}, only other releases")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"example/tessera-attention={folder}"}
    process = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    assert "calls example/tessera-attention" in process.stdout
