"""The source distribution: its contents, and that it builds without git, by CMake alone and by pip."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, folder):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.run([*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True,
                             timeout=900)  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def build_sdist(source, folder):
    program = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    run(sys.executable, "-c", program, folder=source)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    archive = build_sdist(ROOT, folder)
    assert archive.stat().st_size < 2e6
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    assert not (source / ".git").exists()
    return source


def test_content(unpacked, tmp_path):
    names = {path.name for path in unpacked.iterdir()}
    assert names >= {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO"}
    assert {path.name for path in unpacked.iterdir() if path.is_dir()} == {
        "cli", "cmake", "include", "kernels", "peers", "python", "src", "third_party"}  # fmt: skip
    again = build_sdist(unpacked, tmp_path)  # without git, the same
    with tarfile.open(again) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert names == {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}


def test_plain_cmake(unpacked, tmp_path, monkeypatch):
    build = unpacked / "build" / "plain"  # by relative paths the same to ccache as build/release
    monkeypatch.setenv("CCACHE_BASEDIR", str(unpacked))
    for language in ("C", "CXX"):
        monkeypatch.setenv(f"CMAKE_{language}_COMPILER_LAUNCHER", shutil.which("ccache") or "")
    run("cmake", "-S", unpacked, "-B", build, "-G", "Ninja", f"-DCMAKE_INSTALL_PREFIX={tmp_path}", folder=unpacked)
    run("cmake", "--build", build, folder=unpacked)
    run("cmake", "--install", build, folder=unpacked)
    assert re.match(r"tessera +[0-9.]+\n", run(tmp_path / "bin/tessera", "info", folder=tmp_path))


def test_cmake_without_the_programs_packages(unpacked, tmp_path):
    """The library needs none."""
    said = run("cmake", "-S", unpacked, "-B", tmp_path, "-DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON", folder=unpacked)
    assert "The program tessera is not built, for want of fmt " in said
    assert "TESSERA_BUILD_CLI:BOOL=OFF" in (tmp_path / "CMakeCache.txt").read_text()
