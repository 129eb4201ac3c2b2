"""Trust in loaded code: NVRTC planted where the program searches for it (docs/reference/cuda.md, "Whose code runs")."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

OF_THIS_MACHINE = [path for path in Path("/usr/local/cuda/lib64").glob("libnvrtc.so.1[23]")]
pytestmark = pytest.mark.skipif(OF_THIS_MACHINE != [], reason=f"{OF_THIS_MACHINE} would be found instead")
STRANGER = 23456
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which root alone may")


class Installation:
    """A copy of the program and the library at `library`, and the file that a planted NVRTC makes when it is opened."""

    def __init__(self, root: Path, library: str):
        self.root = root
        self.library = root / library
        self.library.mkdir(parents=True)
        shutil.copy(os.environ["TESSERA_LIBRARY"], self.library / Path(os.environ["TESSERA_SONAME"]).name)
        shutil.copy(os.environ["TESSERA_PROGRAM"], root / "tessera")
        self.opened = root / "opened"

    def plant(self, folder, named=True):
        """NVRTC, with a file beside it `named` after its version; without that file it must be opened to get its
        version."""
        place = self.root / folder
        place.mkdir(parents=True)
        shutil.copy(os.environ["FAKE_NVRTC"], place / "libnvrtc.so.13")
        if named:
            shutil.copy(os.environ["FAKE_NVRTC"], place / "libnvrtc-builtins.so.13.0")
        return place

    def run(self, *arguments, **environment):
        clean = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(self.library), "HOME": str(self.root)}
        process = subprocess.run(
            [self.root / "tessera", *arguments],
            env={**clean, "FAKE_NVRTC_OPENED": str(self.opened), **environment},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return process.stdout + process.stderr

    def info(self, **environment):
        return json.loads(self.run("info", "--json", **environment))["cuda"]

    def compile(self, **environment):
        return self.run("cache", "warm", "--arch", "90", **environment)


@pytest.fixture
def elsewhere(tmp_path):
    return Installation(tmp_path, "opt/lib")


@pytest.fixture
def python(tmp_path):
    return Installation(tmp_path, "lib/python3.12/site-packages/tessera")


SITE = "lib/python3.12/site-packages"
NVIDIA = f"{SITE}/nvidia/cu13/lib"


def test_beside_a_library_outside_python_nothing_is_looked_for(elsewhere):
    elsewhere.plant("opt/nvidia/cu13/lib")
    elsewhere.plant("opt/nvidia/cuda_nvrtc/lib", named=False)
    assert str(elsewhere.root / "opt") not in elsewhere.info()["nvrtc"]
    elsewhere.compile()
    assert not elsewhere.opened.exists()


def test_in_python_it_is_found_and_info_does_not_open_it(python):
    place = python.plant(NVIDIA)
    assert python.info()["nvrtc"] == f"13.0, {place}/libnvrtc.so.13"
    assert not python.opened.exists()
    assert "NVRTC 13.0" in python.compile()
    assert python.opened.read_text() == "opened\n" * 2, "and the library beside it"


def test_info_opens_none_whose_name_does_not_tell_its_version(python):
    place = python.plant(NVIDIA, named=False)
    assert python.info()["nvrtc"] == f"version not told by its name, {place}/libnvrtc.so.13"
    assert not python.opened.exists()
    python.compile()
    assert python.opened.exists()


def test_a_folder_that_pip_was_told_is_a_python_installation(elsewhere):
    place = elsewhere.plant("opt/nvidia/cu13/lib")
    (elsewhere.root / "opt" / "tessera_attention-0.1.0.dist-info").mkdir()
    assert elsewhere.info()["nvrtc"] == f"13.0, {place}/libnvrtc.so.13"


@pytest.mark.parametrize("part", (SITE, f"{SITE}/nvidia", f"{SITE}/nvidia/cu13", NVIDIA, f"{NVIDIA}/libnvrtc.so.13"))
def test_what_everybody_may_write_is_not_opened(python, part):
    python.plant(NVIDIA)
    (python.root / part).chmod(0o1777)  # sticky or not
    reason = f"{python.root / part} may be written by everybody (mode 1777)"
    info = python.info()
    assert not info["nvrtc_found"] and reason in info["nvrtc"]
    assert reason in python.compile()
    assert not python.opened.exists()


def test_links_are_followed_and_what_they_lead_through_is_looked_at(python):
    place, shared = python.plant(NVIDIA), python.root / "shared"
    shared.mkdir()
    (place / "libnvrtc.so.13").rename(shared / "nvrtc")
    (place / "libnvrtc.so.13").symlink_to(shared / "nvrtc")
    assert python.info()["nvrtc"] == f"13.0, {place}/libnvrtc.so.13"
    shared.chmod(0o777)
    assert f"{shared} may be written by everybody (mode 0777)" in python.info()["nvrtc"]
    assert f"{shared} may be written by everybody (mode 0777)" in python.compile()
    assert not python.opened.exists()


def test_the_library_that_it_opens_itself_is_looked_at_too(python):
    (python.plant(NVIDIA) / "libnvrtc-builtins.so.13.0").chmod(0o666)
    python.compile()
    assert python.opened.read_text() == "opened\n", "NVRTC and nothing else"


@needs_root
@pytest.mark.parametrize("part", (f"{SITE}/nvidia", NVIDIA, f"{NVIDIA}/libnvrtc.so.13"))
def test_a_strangers_is_not_opened(python, part):
    python.plant(NVIDIA)
    os.chown(python.root / part, STRANGER, 0)
    reason = f"{python.root / part} belongs to user {STRANGER}"
    assert reason in python.info()["nvrtc"]
    assert reason in python.compile()
    assert not python.opened.exists()
    os.chown(python.library, STRANGER, 0)  # the library's owner is trusted
    assert python.info()["nvrtc_found"]


@needs_root
def test_a_group_that_owns_the_installation_is_no_stranger(python):
    place = python.plant(NVIDIA)
    os.chown(place, 0, STRANGER)
    place.chmod(0o2775)
    assert f"{place} may be written by group {STRANGER} (mode 2775)" in python.info()["nvrtc"]
    os.chown(python.library, 0, STRANGER)
    python.library.chmod(0o2775)
    assert python.info()["nvrtc_found"]


@needs_root
@pytest.mark.parametrize("variable", ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "VIRTUAL_ENV", "TESSERA_NVRTC"))
def test_what_the_environment_names_is_its_owners(elsewhere, variable):
    below = {"CUDA_HOME": "lib64", "CUDA_PATH": "lib64", "CONDA_PREFIX": "lib", "TESSERA_NVRTC": ""}
    place = elsewhere.plant(Path("named") / below.get(variable, NVIDIA))
    named = elsewhere.root / "named"
    environment = {variable: str(named)}
    for path in (named, *named.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
        path.chmod(0o775)
    assert elsewhere.info(**environment)["nvrtc"] == f"13.0, {place}/libnvrtc.so.13"
    named.chmod(0o777)
    assert f"{named} may be written by everybody (mode 0777)" in elsewhere.info(**environment)["nvrtc"]
    elsewhere.compile(**environment)
    assert not elsewhere.opened.exists()


def test_relative_paths_are_refused(elsewhere):
    elsewhere.plant("named/lib64")
    assert "is a relative path, accepted an absolute one" in elsewhere.info(CUDA_HOME="named")["nvrtc"]
    for given in ("named/lib64", "named/lib64/libnvrtc.so.13"):
        assert "is a relative path, accepted an absolute one" in elsewhere.compile(TESSERA_NVRTC=given)
    message = "TESSERA_CACHE_DIR: 'kernels' is relative, accepted an absolute path"
    assert message in elsewhere.compile(TESSERA_CACHE_DIR="kernels")
    assert elsewhere.info(TESSERA_CACHE_DIR="kernels")["cache_refusal"] == message
    assert not elsewhere.opened.exists() and not (elsewhere.root / "kernels").exists()


def test_a_prebuilt_set_that_everybody_may_write_is_not_loaded(elsewhere):
    assert elsewhere.info()["prebuilt_folder"] == ""
    place = elsewhere.library / "tessera" / "aot"
    place.mkdir(parents=True)
    assert elsewhere.info()["prebuilt_folder"] == str(place)
    assert elsewhere.info()["prebuilt_refusal"] == ""
    place.chmod(0o777)
    assert elsewhere.info()["prebuilt_refusal"] == f"{place} may be written by everybody (mode 0777)"
