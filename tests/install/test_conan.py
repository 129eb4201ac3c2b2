"""conanfile.py: `conan create` builds the package, and a program with it, in a Conan folder of its own."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IN_VENV = ROOT / "build/conan-venv/bin/conan"
CONAN = str(IN_VENV) if IN_VENV.exists() else shutil.which("conan")
pytestmark = pytest.mark.skipif(not CONAN, reason="no Conan here (make build/conan-venv/.done)")
VERSION = re.search(r"project\(tessera VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]


@pytest.fixture(scope="module")
def conan():
    home = ROOT / "build" / "conan"  # below the folder whose relative paths ccache knows
    shutil.rmtree(home, ignore_errors=True)
    environment = {**os.environ, "CONAN_HOME": str(home)}
    environment.pop("LD_LIBRARY_PATH", None)

    def run(*command):
        process = subprocess.run([CONAN, *map(str, command)], cwd=ROOT, env=environment, text=True, timeout=1500,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        return process.returncode, process.stdout

    status, output = run("profile", "detect")
    assert status == 0, output
    yield run
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize("shared", (False, True))
def test_a_program_uses_the_package(conan, shared):
    # Without Conan's -m64, the objects are those of the other builds to ccache.
    blocks = ["generic_system", "cmake_flags_init", "cppstd", "shared", "fpic", "user_toolchain", "variables",
              "preprocessor", "find_paths", "output_dirs"]  # fmt: skip
    status, output = conan("create", ".", "--no-remote", "-s", "compiler.cppstd=20", "-o", f"*:shared={shared}",
                           "--test-folder", "tests/install/consumer",
                           "-c", f"tools.cmake.cmaketoolchain:enabled_blocks={blocks}",
                           "-c", "tools.cmake.cmaketoolchain:generator=Ninja",
                           "-c", f"tools.cmake.cmake_layout:test_folder={ROOT}/build/conan/test")  # fmt: skip
    assert status == 0, output
    assert f"\ntessera {VERSION}: 2.5\n" in output, output


def test_an_older_standard_is_refused(conan):
    status, output = conan("create", ".", "--no-remote", "-s", "compiler.cppstd=17")
    assert status != 0 and "is lower than the required" in output, output
