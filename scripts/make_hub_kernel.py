#!/usr/bin/env python3
"""The folder of a kernel for the Hub of Hugging Face, as its package `kernels` loads one, from this project's wheels.

    scripts/make_hub_kernel.py WHEEL... --out FOLDER [--version N] [--any-abi]

WHEEL: what `make wheels` wrote, of one architecture, one for each Python. FOLDER/build then has a variant for PyTorch's
builds for the CPU, CUDA 12 and CUDA 13: its metadata.json, and the Python package with relative imports and operators
under names of their own, so that it loads beside an installed Tessera. The package also has the interface of
flash_attn, by which Transformers calls it.

The native module is checked by the Hub's rules: no symbols newer than GLIBC 2.28, GLIBCXX 3.4.24, CXXABI 1.3.11 and
GCC 7, no libraries but the C library's. One rule is not met: it asks for Python's stable ABI of 3.9, and the module has
that of 3.12, beside modules for 3.10 and 3.11. --any-abi leaves the checks out, for a wheel that is only tried on this
machine.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "tessera-attention"
MODULE = NAME.replace("-", "_")
# The native module uses nothing of PyTorch: arrays cross by DLPack. 2.9 is the oldest release that variants name.
TORCH = "torch-stable-abi29"
BACKENDS = {"cpu": "cpu", "cu120": "cuda", "cu130": "cuda"}  # CUDA's libraries are loaded when they are needed
# Prebuilt, or compiled when they are needed by the NVRTC that PyTorch for CUDA brings, as PTX would be.
ARCHS = ["8.0", "8.6", "8.9", "9.0a", "10.0", "12.0", "8.0+PTX"]
# Of the wheel: all but what serves other frameworks or engines, and programs.
LEFT_OUT = re.compile(r"(compare|jax|transformers|serving/(?!paged))|(__init__|__main__|doctor|megatron)\.py$")
KEPT = re.compile(r"tessera/(?P<path>.*\.py|_core.*\.so)")
PREBUILT = re.compile(r"tessera/aot/[^/]+")
FLASH_ATTN = ("_append", "_call", "_dmask", "_extent", "_kvcache", "flash_attn_interface", "layers/rotary")
EXPORTED = {
    "_attention": ["Gradients", "append", "attention", "attention_backward", "combine", "plan"],
    "_core": ["Error", "device"],
    "flash_attn.flash_attn_interface": [
        "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
    ],
}  # fmt: skip
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = re.compile(r"(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux[-\w]*)\.so(\.\d+)*")


def fail(reason: str) -> None:
    raise SystemExit(f"make_hub_kernel.py: {reason}")


def violations(library: Path) -> list[str]:
    """By which of the Hub's rules a native module is refused."""
    found = []
    run = lambda *options: subprocess.run(
        ["readelf", *options, library], check=True, capture_output=True, text=True
    ).stdout  # noqa: E731
    for name in re.findall(r"\(NEEDED\).*\[(.*)\]", run("--dynamic", "--wide")):
        if not LIBRARIES.fullmatch(name):
            found.append(f"needs {name}")
    for name, number in sorted(set(re.findall(r"Name: (\w+?)_([0-9.]+) ", run("--version-info", "--wide")))):
        version = tuple(map(int, number.split(".")))
        if name in NEWEST and version > NEWEST[name]:
            found.append(f"asks for {name}_{number}, accepted {'.'.join(map(str, NEWEST[name]))} and older")
    return found


def relative(source: str, depth: int, what: str) -> str:
    """With imports of tessera and flash_attn relative to a module that is `depth` packages below the kernel's."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(
            re.match(r"(tessera|flash_attn)\b", alias.name) for alias in node.names
        ):
            fail(f"{what}:{node.lineno}: {ast.unparse(node)}, accepted from ... import ...")
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        root, _, rest = node.module.partition(".")
        if root not in ("tessera", "flash_attn"):
            continue
        target = node.module if root == "flash_attn" else rest
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = re.sub(
            rf"\bfrom {re.escape(node.module)} import", f"from {'.' * (depth + 1)}{target} import", line
        )
        if lines[node.lineno - 1] == line:
            fail(f"{what}:{node.lineno}: {line.strip()}, accepted an import of one line")
    return "".join(lines)


def package(wheels: list[Path], folder: Path, any_abi: bool) -> None:
    """The files that all variants share, and in aot/ what those for CUDA have besides."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                kept = KEPT.fullmatch(name)
                if kept and LEFT_OUT.match(kept["path"]) or not kept and not PREBUILT.fullmatch(name):
                    continue
                path = folder / name.removeprefix("tessera/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))
    libraries = sorted(folder.glob("_core*.so"))
    if not libraries:
        fail(f"{', '.join(wheel.name for wheel in wheels)}: no tessera/_core*.so, accepted this project's wheels")
    for library in libraries:
        for violation in [] if any_abi else violations(library):
            fail(f"{library.name} {violation}")
    for name in FLASH_ATTN:
        path = folder / "flash_attn" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "python/flash_attn_dropin/flash_attn" / f"{name}.py", path)
    for name, summary in (("serving", "Attention over pages."), ("flash_attn", "The interface of flash_attn."),
                          ("flash_attn/layers", "Rotary embedding.")):  # fmt: skip
        (folder / name / "__init__.py").write_text(f'"""{summary}"""\n')
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    names = [name for exported in EXPORTED.values() for name in exported]
    imports = "".join(f"from .{module} import {', '.join(exported)}\n" for module, exported in EXPORTED.items())
    (folder / "__init__.py").write_text(
        f'"""Tessera: exact, IO-aware attention, and the interface of flash_attn on it."""\n\n{imports}\n'
        f"__all__ = {json.dumps(names)}\n"
    )
    # For releases of `kernels` that look for a package of the repository's name in the variant.
    compatible = folder / MODULE / "__init__.py"
    compatible.parent.mkdir()
    compatible.write_text(
        "import importlib.util\nimport sys\nfrom pathlib import Path\n\n"
        '_file = Path(__file__).parents[1] / "__init__.py"\n'
        '_spec = importlib.util.spec_from_file_location(f"{__name__}_flat", _file)\n'
        "_module = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)\n"
        "_spec.loader.exec_module(_module)\n__all__ = _module.__all__\n"
        "globals().update({name: getattr(_module, name) for name in __all__})\n"
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_variant(shared: Path, variant: Path, backend: str, version: int) -> None:
    aot = shutil.ignore_patterns("aot") if backend == "cpu" else None
    shutil.copytree(shared, variant, ignore=aot)
    content = hashlib.sha256(b"".join(name.encode() + data for name, data in files_of(variant).items())).hexdigest()
    unique = f"_{MODULE}_{backend}_{content[:12]}"
    for path in variant.rglob("*.py"):
        where = path.relative_to(variant)
        source = relative(path.read_text(), len(where.parts) - 1, str(where))
        path.write_text(re.sub(r'(?<=")tessera::', f"{unique}::", source))  # PyTorch's operators
    digests = {
        name: base64.b64encode(hashlib.sha256(data).digest()).decode() for name, data in files_of(variant).items()
    }
    metadata = {
        "name": NAME, "id": unique, "version": version, "license": "BSD-3-Clause", "python-depends": [],
        "backend": {"type": backend} | ({"archs": ARCHS} if backend == "cuda" else {}),
        "digest": {"algorithm": "sha256", "files": digests},
    }  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="A kernel for the Hub of Hugging Face, from wheels.")
    parser.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--version", type=int, default=1, help="of the kernel's interface, a whole number")
    parser.add_argument("--any-abi", action="store_true", help="a wheel for this machine alone")
    options = parser.parse_args()
    platforms = {
        match[1] for wheel in options.wheels if (match := re.search(r"linux_(?:\d+_\d+_)?(\w+)\.whl$", wheel.name))
    }
    if len(platforms) != 1:
        fail(f"{', '.join(wheel.name for wheel in options.wheels)}: accepted wheels for Linux, of one architecture")
    (platform,) = platforms
    build = options.out / "build"
    if build.exists():
        fail(f"--out: {build} exists, accepted a folder without it")
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder) / "shared"
        shared.mkdir()
        package(options.wheels, shared, options.any_abi)
        for toolkit, backend in BACKENDS.items():
            write_variant(shared, build / f"{TORCH}-{toolkit}-{platform}-linux", backend, options.version)
    (options.out / "README.md").write_text(
        "---\nlibrary_name: kernels\nlicense: bsd-3-clause\n---\n\n# Tessera\n\n"
        "Exact, IO-aware attention, forward and backward, for CPUs and NVIDIA GPUs from capability 8.0 on.\n"
    )
    print(f"{options.out}: {', '.join(sorted(path.name for path in build.iterdir()))}")


if __name__ == "__main__":
    sys.exit(main())
