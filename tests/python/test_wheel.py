"""The wheel in an empty environment: no PyTorch, no NumPy, nothing but the C and C++ libraries."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))

LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
VERSIONS = re.compile(r"@@?(GLIBC|GLIBCXX|CXXABI|GCC)_[0-9.]+$")


@pytest.fixture(scope="module")
def wheel():
    (path,) = Path(os.environ["TESSERA_WHEELS"]).glob("*.whl")
    return path


def run(*command):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    process = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_name(wheel):
    """One wheel for all of Python from 3.12 on, by the stable ABI; before, one for this version."""
    minor = sys.version_info.minor
    tag = "cp312-abi3" if minor >= 12 else f"cp3{minor}-cp3{minor}"
    assert re.fullmatch(rf"tessera_attention-[0-9.]+-{tag}-linux_\w+\.whl", wheel.name)


def test_content(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packaged = [name for name in names if ".dist-info/" not in name]
    assert all(name.startswith("tessera/") for name in packaged)
    assert {"tessera/py.typed", "tessera/_core.pyi", "tessera/__init__.py"} <= set(packaged)
    assert sum(name.endswith(".so") for name in packaged) == 1
    assert not any(name.endswith((".a", ".h", ".hpp", ".cpp", ".pyc")) for name in names)


def requirements(metadata):
    return [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]


def metadata_of(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return archive.read(name).decode()


def test_engines_find_their_plugins(wheel):
    """What they load exists, and importing it imports neither engine: PyTorch alone."""
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
    points = archive.read(name).decode()
    for group, module in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        assert f"[{group}]\ntessera = tessera.serving.{module}:register\n" in points
        assert "\ndef register() -> None:" in archive.read(f"tessera/serving/{module}.py").decode()


REGISTERED = {"numpy", "rich", "matplotlib", "threadpoolctl", "torch"}  # on PyPI, by those whom everybody knows


def test_metadata(wheel):
    """Distributions named by its extras are registered, so that no one else can register those names."""
    metadata = metadata_of(wheel)
    assert re.search("^Name: tessera-attention$", metadata, re.MULTILINE)
    names = requirements(metadata)
    assert all("extra ==" in name for name in names)  # none without an extra
    assert {re.match("[a-z-]+", name).group() for name in names} <= REGISTERED
    assert re.findall("^Provides-Extra: (.*)$", metadata, re.MULTILINE) == ["compare"]


def test_page_of_an_index(wheel, monkeypatch):
    """Links in the metadata work from elsewhere: they are absolute, or there are none."""
    metadata = metadata_of(wheel)
    links = re.compile(r"\]\((?!https://|#)")
    assert "Description-Content-Type: text/markdown\n" in metadata and "\n# Tessera\n" in metadata
    assert not links.search(metadata)
    assert (
        "\nAuthor: " in metadata
        and f"\nClassifier: Programming Language :: Python :: 3.{sys.version_info.minor}\n" in metadata
    )

    import package_metadata

    address = "https://example.org/people/tessera"
    for given in (f"{address}.git", f"{address}/"):
        monkeypatch.setenv("TESSERA_HOME", given)
        assert package_metadata.dynamic_metadata("urls")["Source"] == address
        text = package_metadata.dynamic_metadata("readme")["text"]
        assert f"({address}/blob/HEAD/docs/status.md)" in text and f"({address}/raw/HEAD/docs/images/" in text
        assert not links.search(text)
    monkeypatch.setenv("TESSERA_HOME", "/home/somebody/tessera")
    assert package_metadata.dynamic_metadata("urls") == {}
    assert package_metadata.readme("`[a](b)` [`c`](d) ![e](f)", "") == "`[a](b)` `c` "


def test_license(wheel):
    assert "License-Expression: BSD-3-Clause\n" in metadata_of(wheel)
    archive = zipfile.ZipFile(wheel)
    (license,) = [name for name in archive.namelist() if re.search(r"\.dist-info/(licenses/)?LICENSE$", name)]
    assert "the Tessera authors" in archive.read(license).decode()


def test_needs_nothing_but_the_c_and_cpp_libraries(wheel, tmp_path):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".so")]
    extension = archive.extract(name, tmp_path)
    dynamic = run("readelf", "--dynamic", "--wide", extension)
    assert set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)) <= LIBRARIES
    foreign = []
    for line in run("nm", "--dynamic", "--undefined-only", extension).splitlines():
        kind, symbol = line.split()
        python = re.match(r"_?Py[A-Z_]", symbol)  # the interpreter that loads it
        if kind == "U" and not python and not VERSIONS.search(symbol):
            foreign.append(symbol)
    assert not foreign
    exported = [line.split()[-1] for line in run("nm", "--dynamic", "--defined-only", extension).splitlines()]
    assert "PyInit__core" in exported
    assert not any("tessera" in symbol for symbol in exported)  # nor would another copy of the library answer for it


def test_size(wheel):
    """Without prebuilt kernels, as pip builds it from source."""
    assert wheel.stat().st_size < 2e6


def test_in_an_empty_environment(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python, program = tmp_path / "venv/bin/python", tmp_path / "venv/bin/tessera"
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", wheel)
    # README's check, by the command and by the module.
    assert re.match(r"tessera +[0-9.]+\nCPU +", run(program, "info"))
    assert run(python, "-m", "tessera", "--version") == run(program, "--version") != ""
    assert "Hopper (9.0)" in run(program, "support")
    assert "fwd_sm90" in run(program, "plan", "--sq", "4096", "-D", "128", "--dtype", "bfloat16", "--arch", "90")
    program = """
import array, importlib.util, struct
assert not importlib.util.find_spec("torch") and not importlib.util.find_spec("numpy")
import tessera
print(tessera.__version__, tessera.device()["isa"])
# The buffer protocol needs no NumPy: one query of two ones, one key, one value.
row = lambda *x: memoryview(struct.pack("2f", *x)).cast("B").cast("f", (1, 1, 1, 2))
o = memoryview(bytearray(8)).cast("f", (1, 1, 1, 2))
tessera._core.forward(row(1, 1), row(1, 2), row(3, 4), o)
assert o.tolist() == [[[[3.0, 4.0]]]], o.tolist()
try:
    tessera.attention(row(1, 1), row(1, 2), row(3, 4))
except tessera.Error as error:
    assert "NumPy" in str(error)
else:
    raise AssertionError("an output was made without NumPy")
"""
    assert re.match(r"[0-9.]+ \w+", run(python, "-c", program))


def test_the_flash_attn_drop_in_stands_back(tmp_path):
    """Beside another flash_attn nothing of it is overwritten and it is imported; alone, Tessera's is."""
    source = Path(__file__).resolve().parents[2] / "python" / "flash_attn_dropin"
    shutil.copytree(source, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    build = ("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", tmp_path)
    run(sys.executable, *pip, *build, tmp_path / "source")
    (dropin,) = tmp_path.glob("*.whl")
    assert dropin.name == "tessera_flash_attn-2.8.4-py3-none-any.whl"
    assert requirements(metadata_of(dropin)) == ["torch"]
    names = zipfile.ZipFile(dropin).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "tessera_flash_attn",
        "tessera_flash_attn.pth",
    }
    assert "tessera_flash_attn/flash_attn/layers/rotary.py" in names

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    other, metadata = site / "flash_attn", site / "flash_attn-2.8.3.dist-info"
    for folder, name, text in (
        (other, "__init__.py", '__version__ = "2.8.3"\n'),
        (metadata, "METADATA", "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n"),
    ):
        folder.mkdir()
        (folder / name).write_text(text)
    run(python, *pip, "install", "--no-index", "--no-deps", dropin)
    assert (other / "__init__.py").read_text() == '__version__ = "2.8.3"\n'
    assert run(python, "-c", "import flash_attn; print(flash_attn.__version__)") == "2.8.3\n"
    said = subprocess.run([python, "-m", "tessera_flash_attn"], capture_output=True, text=True)
    assert said.returncode == 1 and said.stdout.startswith("flash_attn: that of the distribution flash-attn 2.8.3")

    shutil.rmtree(other)
    shutil.rmtree(metadata)
    assert run(python, "-m", "tessera_flash_attn").startswith("flash_attn: Tessera's")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    alone = subprocess.run([python, "-c", "import flash_attn"], env=environment, capture_output=True, text=True)
    assert (
        "ImportError: flash_attn: Tessera's drop-in needs Tessera (the distribution tessera-attention)" in alone.stderr
    )
