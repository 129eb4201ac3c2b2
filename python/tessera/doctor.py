"""What runs on this machine, why the rest does not, and a command that fixes each: ``tessera doctor``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
from typing import Any, NamedTuple

from tessera import _core

_OLDEST_MAJOR = 12  # of CUDA


class Row(NamedTuple):
    subject: str
    works: bool
    finding: str
    mend: str = ""  # one command; "": nothing to fix, or no command does


def _module(name: str) -> dict[str, Any]:
    """Information about a framework: its version, or why it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        return {"version": None, "error": None if missing.name == name else str(missing)}
    except Exception as error:  # an installation may be broken in any way
        return {"version": None, "error": f"{type(error).__name__}: {error}"}
    facts: dict[str, Any] = {"version": getattr(module, "__version__", "of an unknown version"), "error": None}
    if name == "torch":
        facts["cuda"] = module.version.cuda
        facts["gpus"] = module.cuda.device_count() if module.version.cuda else 0
    return facts


def facts() -> dict[str, Any]:
    """Information about this machine: the program's info, the files of the prebuilt set, the frameworks."""
    found: dict[str, Any] = json.loads(_core.info(True))
    folder = found["cuda"]["prebuilt_folder"]
    found["cuda"]["prebuilt_kernels"] = len(os.listdir(folder)) if folder else 0
    found["python"] = platform.python_version()
    found["modules"] = {name: _module(name) for name in ("numpy", "torch", "jax")}
    return found


def _major(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdigit() else 0


def _driver(cuda: dict[str, Any]) -> Row:
    if cuda["driver"]:
        return Row("driver", True, f"CUDA {cuda['driver']}")
    reason = cuda["reason"].partition("CUDA: ")[2] or cuda["reason"]
    if "older" in reason or "accepted 12.0" in reason:
        return Row("driver", False, reason, "apt-get install --only-upgrade nvidia-driver, then restart")
    if "forked" in reason or "cannot be started" in reason:
        return Row("driver", False, reason)
    mend = "docker run --gpus all" if os.path.exists("/.dockerenv") else "apt-get install nvidia-driver"
    return Row("driver", False, f"none: {reason}", f"{mend} (a GPU of NVIDIA's is needed)")


def _gpus(found: dict[str, Any]) -> Row:
    gpus, reason = found["gpus"], found["cuda"]["reason"]
    if not gpus:
        return Row("GPUs", False, reason if found["cuda"]["driver"] else "none: the CPU's kernels serve every call")
    texts = []
    for gpu in gpus:
        major, minor = divmod(gpu["arch"], 10)
        kernels = "the kernels of Hopper and of Ampere" if major == 9 else "the kernels of Ampere"
        texts.append(f"{gpu['name']} ({major}.{minor}): {kernels}")
    return Row("GPUs", True, "; ".join([*dict.fromkeys(texts), *([reason] if reason else [])]))


def _nvrtc(found: dict[str, Any]) -> Row:
    cuda = found["cuda"]
    if not cuda["nvrtc_found"]:
        needed = "kernels that are not prebuilt cannot be compiled" if found["gpus"] else "needed by a GPU alone"
        package = "nvidia-cuda-nvrtc" + ("-cu12" if _major(cuda["driver"]) == _OLDEST_MAJOR else "")
        return Row("NVRTC", False, f"not found: {needed}", f"pip install {package}")
    if cuda["driver"] and _major(cuda["nvrtc"]) > _major(cuda["driver"]):
        finding = f"{cuda['nvrtc']}: newer than the driver's CUDA {cuda['driver']}, which may refuse its kernels"
        return Row("NVRTC", False, finding, "pip install nvidia-cuda-nvrtc-cu12")
    return Row("NVRTC", True, cuda["nvrtc"])


def _prebuilt(cuda: dict[str, Any]) -> Row:
    if cuda["prebuilt_refusal"]:
        return Row("prebuilt", False, f"not loaded: {cuda['prebuilt_refusal']}",
                   f"chmod -R go-w {cuda['prebuilt_folder']}")  # fmt: skip
    if not cuda["prebuilt_folder"]:
        return Row("prebuilt", False, "none in this build: a GPU's kernels are compiled at their first call, and kept",
                   "pip install . -C cmake.define.TESSERA_PREBUILD_KERNELS=ON")  # fmt: skip
    return Row("prebuilt", True, f"{cuda['prebuilt_kernels']} kernels in {cuda['prebuilt_folder']}")


def _cache(cuda: dict[str, Any]) -> Row:
    if cuda["cache_refusal"]:
        return Row("kernel cache", False, f"in memory alone: {cuda['cache_refusal']}",
                   "export TESSERA_CACHE_DIR=/a/folder/of/yours")  # fmt: skip
    return Row("kernel cache", True, cuda["cache_folder"])


def _framework(name: str, title: str, module: dict[str, Any], use: str) -> Row:
    if module["error"]:
        return Row(title, False, f"cannot be imported: {' '.join(module['error'].split())[:160]}",
                   f"pip install --force-reinstall {name}")  # fmt: skip
    if not module["version"]:
        return Row(title, False, "not installed", f"pip install {name}")
    return Row(title, True, f"{module['version']}: {use}")


def _torch(found: dict[str, Any]) -> Row:
    module = found["modules"]["torch"]
    use = "tensors on the CPU and the GPU" if module.get("gpus") else "tensors on the CPU"
    row = _framework("torch", "PyTorch", module, use)
    if row.works and found["gpus"] and not module["cuda"]:
        return Row("PyTorch", False, f"{module['version']}: built without CUDA", "pip install --force-reinstall torch")
    if row.works and found["gpus"] and not module["gpus"]:
        finding = f"{module['version']}: of CUDA {module['cuda']}, sees no GPU"
        return Row("PyTorch", False, finding, "nvidia-smi (says why)")
    return row


def rows(found: dict[str, Any]) -> list[Row]:
    cpu, cuda = found["cpu"], found["cuda"]
    return [
        Row("tessera", True, f"{found['version']}, Python {found['python']}"),
        Row("CPU", True, f"{cpu['name']}: {cpu['isa']}, {cpu['threads']} threads ({cpu['isa_reason']})"),
        _driver(cuda),
        _gpus(found),
        _nvrtc(found),
        _prebuilt(cuda),
        _cache(cuda),
        _framework("numpy", "NumPy", found["modules"]["numpy"], "arrays on the CPU"),
        _torch(found),
        _framework("jax", "JAX", found["modules"]["jax"], "arrays on the CPU, and tessera.jax under jit"),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> None:
    table = rows(facts())
    if options.json:
        print(json.dumps([row._asdict() for row in table], indent=2, ensure_ascii=False))
        return
    for row in table:
        mend = f"  -> {row.mend}" if row.mend else ""
        print(f"{'yes' if row.works else 'no ':<4} {row.subject:<13} {row.finding}{mend}")
