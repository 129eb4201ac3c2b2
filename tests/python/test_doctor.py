"""tessera doctor: ten lines, each with a finding and, if it failed, the one command that fixes it."""

import copy
import json

import pytest

import tessera
from tessera import doctor
from tessera.__main__ import main

HOPPER = {"name": "H100", "arch": 90, "ordinal": 0}
WELL = {
    "version": "0.1.0", "python": "3.12.1",
    "cpu": {"name": "a CPU", "isa": "avx2", "threads": 4, "isa_reason": "the best that this CPU has"},
    "gpus": [HOPPER],
    "cuda": {"reason": "", "driver": "13.0", "nvrtc_found": True, "nvrtc": "13.0, /site/libnvrtc.so.13",
             "cache_folder": "/home/me/.cache/tessera", "cache_refusal": "", "prebuilt_folder": "/site/tessera/aot",
             "prebuilt_refusal": "", "prebuilt_kernels": 150},
    "modules": {"numpy": {"version": "2.3.5", "error": None}, "jax": {"version": "0.8.0", "error": None},
                "torch": {"version": "2.13.0", "error": None, "cuda": "13.0", "gpus": 1}},
}  # fmt: skip


def rows_of(**changed):
    """Of a machine where all is well, but for what is changed: "cuda.driver" as cuda__driver."""
    found = copy.deepcopy(WELL)
    for path, value in changed.items():
        *parents, name = path.split("__")
        place = found
        for parent in parents:
            place = place[parent]
        place[name] = value
    return {row.subject: row for row in doctor.rows(found)}


def test_all_is_well():
    rows = rows_of()
    assert len(rows) == 10 and all(row.works and not row.mend and "\n" not in row.finding for row in rows.values())
    assert "Hopper" in rows["GPUs"].finding and "GPU" in rows["PyTorch"].finding


NO_GPU = {"gpus": [], "cuda__driver": ""}


@pytest.mark.parametrize("changed, subject, finding, mend", [
    ({**NO_GPU, "cuda__reason": "CUDA: no driver: libcuda.so.1: cannot open"}, "driver", "no driver",
     "apt-get install nvidia-driver"),
    ({**NO_GPU, "cuda__reason": "CUDA: the driver serves CUDA 11.8, accepted 12.0 and newer"}, "driver", "11.8",
     "--only-upgrade nvidia-driver"),
    ({**NO_GPU, "cuda__reason": "CUDA: cannot be used in a process forked from one"}, "driver", "forked", ""),
    ({"gpus": [], "cuda__reason": "GPU 0: V100 has compute capability 7.0, accepted 8.0"}, "GPUs", "7.0", ""),
    ({"cuda__nvrtc_found": False}, "NVRTC", "cannot be compiled", "pip install nvidia-cuda-nvrtc"),
    ({"cuda__nvrtc_found": False, "cuda__driver": "12.4"}, "NVRTC", "cannot", "pip install nvidia-cuda-nvrtc-cu12"),
    ({"cuda__driver": "12.4"}, "NVRTC", "newer than the driver", "pip install nvidia-cuda-nvrtc-cu12"),
    ({"cuda__prebuilt_folder": ""}, "prebuilt", "none", "TESSERA_PREBUILD_KERNELS=ON"),
    ({"cuda__prebuilt_refusal": "others may write it"}, "prebuilt", "others", "chmod -R go-w /site/tessera/aot"),
    ({"cuda__cache_refusal": "read-only"}, "kernel cache", "read-only", "export TESSERA_CACHE_DIR="),
    ({"modules__numpy__version": None}, "NumPy", "not installed", "pip install numpy"),
    ({"modules__torch": {"version": "2.13.0+cpu", "error": None, "cuda": None, "gpus": 0}}, "PyTorch",
     "without CUDA", "--force-reinstall torch"),
    ({"modules__torch__gpus": 0}, "PyTorch", "sees no GPU", "nvidia-smi"),
    ({"modules__jax": {"version": None, "error": "ImportError: jaxlib\nis missing"}}, "JAX", "jaxlib is missing",
     "--force-reinstall jax"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_each_fault_has_its_line(monkeypatch, changed, subject, finding, mend):
    monkeypatch.setattr(doctor.os.path, "exists", lambda path: False)  # in no container
    row = rows_of(**changed)[subject]
    assert not row.works and finding in row.finding and "\n" not in row.finding
    assert mend in row.mend if mend else row.mend == ""


def test_a_second_gpu_that_is_too_old_is_named():
    row = rows_of(cuda__reason="GPU 1: V100 has compute capability 7.0, accepted 8.0")["GPUs"]
    assert row.works and "H100" in row.finding and "V100" in row.finding


def test_here(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and all(line.startswith(("yes ", "no ")) for line in lines)
    assert tessera.__version__ in lines[0] and tessera.device()["isa"] in lines[1]
    assert main(["doctor", "--json"]) == 0
    assert [row["subject"] for row in json.loads(capsys.readouterr().out)] == list(rows_of())
