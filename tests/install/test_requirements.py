"""The pinned Python packages, resolved for every supported version of Python: wheels exist, no pin excludes another."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TESTS = "tests/requirements.txt"
SETS = ((TESTS, "tests/python/requirements-torch.txt"), (TESTS, "tests/python/requirements-jax.txt"),
        ("docs/requirements.txt",))  # fmt: skip
NO_INDEX = re.compile("error sending request|failed to fetch|dns error|could not connect|timed out", re.IGNORECASE)

# pip evaluates a pin's conditions for the Python that runs it, whatever --python-version says.
if not importlib.util.find_spec("uv"):
    pytest.skip("uv, which resolves for another version of Python, is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def resolutions(tmp_path_factory):
    """All at a time: they wait for the index."""
    index = os.environ.get("PIP_INDEX_URL")

    def start(version, requirements):
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--only-binary", ":all:",
                   "--python-version", version, "--output-file", tmp_path_factory.mktemp("resolved") / "all.txt",
                   *(["--index-url", index] if index else []), *(ROOT / name for name in requirements)]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    return {(version, requirements): start(version, requirements) for version in VERSIONS for requirements in SETS}


@pytest.mark.parametrize("requirements", SETS, ids=lambda files: files[-1])
@pytest.mark.parametrize("version", VERSIONS)
def test_resolves(resolutions, version, requirements):
    process = resolutions[version, requirements]
    errors = process.communicate(timeout=300)[1]
    if process.returncode != 0 and NO_INDEX.search(errors):
        pytest.skip("no package index can be reached")
    assert process.returncode == 0, errors


def test_all_supported_versions_are_resolved():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={VERSIONS[0]}"' in text
