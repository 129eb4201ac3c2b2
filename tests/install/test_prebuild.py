"""cmake/prebuild_kernels.cmake: which NVRTC compiles the kernels of a wheel. A program that prints its arguments
replaces the one that compiles.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "cmake/prebuild_kernels.cmake"


@pytest.fixture
def prebuild(tmp_path):
    program = tmp_path / "aot"
    program.write_text('#!/bin/sh\necho "$TESSERA_NVRTC $*"\n')
    program.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python3*/site-packages")

    def run(*libraries, **environment):
        for library in libraries:
            (site / library).parent.mkdir(parents=True, exist_ok=True)
            (site / library).touch()
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TESSERA_NVRTC", "VIRTUAL_ENV")}
        python = tmp_path / "venv/bin/python"
        command = ["cmake", f"-DAOT={program}", "-DFOLDER=kernels", "-DARCHS=80;90", f"-DPYTHON={python}", "-P", SCRIPT]
        process = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, timeout=50)
        assert process.returncode == 0, process.stderr
        return process.stdout.replace(str(site), "SITE")

    return run


def test_of_the_environment(prebuild):
    assert prebuild() == " kernels 80 90\n"  # none: the library looks for it
    before_13, of_13 = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "nvidia/cu13/lib/libnvrtc.so.13"
    assert prebuild(before_13) == f"SITE/{before_13} kernels 80 90\n"
    assert prebuild(before_13, of_13) == f"SITE/{of_13} kernels 80 90\n"


def test_the_one_that_is_named(prebuild):
    given = prebuild("nvidia/cu13/lib/libnvrtc.so.13", TESSERA_NVRTC="/opt/libnvrtc.so.13")
    assert given == "/opt/libnvrtc.so.13 kernels 80 90\n"
