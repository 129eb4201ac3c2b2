"""scripts/install_packages.sh with a package manager provided by the test: its visible behaviour."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTS = ("debian-packages-install.txt", "debian-packages.txt")


@pytest.fixture
def install(tmp_path):
    def program(name, text):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(missing=(), fails=""):
        program("dpkg-query", f'for package; do :; done\ncase " {" ".join(missing)} " in *" $package "*) exit 1;; '
                              'esac\n'
                'echo installed')  # fmt: skip
        program("apt-get", f'echo "$DEBIAN_FRONTEND $*" >> "{tmp_path}/calls"\necho "Selecting previously unselected"\n'
                f'echo "apt complains of $1" >&2\ntest "$1" != "{fails}" || exit 100')  # fmt: skip
        program("sudo", '"$@"')
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        process = subprocess.run(["bash", ROOT / "scripts/install_packages.sh", *LISTS], env=environment,
                                 capture_output=True, text=True, timeout=50)  # fmt: skip
        calls = tmp_path / "calls"
        return process, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_nothing_is_missing(install):
    process, calls = install()
    assert (process.returncode, process.stdout, process.stderr, calls) == (0, "", "", [])


def test_what_is_missing_is_installed_quietly(install):
    process, calls = install(missing=("cmake", "libgtest-dev"))
    assert process.returncode == 0 and process.stderr == ""
    assert process.stdout == "Installing missing Debian packages: cmake libgtest-dev\n"
    assert calls == ["noninteractive update",
                     "noninteractive install -y --no-install-recommends cmake libgtest-dev"]  # fmt: skip


@pytest.mark.parametrize("step", ("update", "install"))
def test_a_failure_shows_all(install, step):
    process, calls = install(missing=("cmake",), fails=step)
    assert process.returncode == 100 and f"apt complains of {step}" in process.stderr
    assert "Selecting previously unselected" in process.stderr and "This failed:" in process.stderr
    assert calls[-1].startswith(f"noninteractive {step}")
