#!/usr/bin/env python3
"""Makes an older glibc to link against from the one of this machine.

    scripts/glibc_stubs.py COMPILER VERSION FOLDER      such as aarch64-linux-gnu-gcc 2.28 build/stubs

Writes libraries without code into FOLDER. They have every symbol that COMPILER's glibc has in VERSION or older, with
its newest such version. A program linked with -L FOLDER needs no newer version, and so starts with glibc VERSION and
all later ones. Functions that glibc has only since then remain undefined; cmake/older_glibc.c implements those that are
needed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"\s*\d+: [0-9a-f]+ +(\w+) (\w+) +(?:GLOBAL|WEAK) +DEFAULT.* +(\d+) (\S+?)@@?(GLIBC_([0-9.]+))$")
# Parts of libc since 2.34 that were separate libraries before, by the names of their symbols.
_FORMERLY = (("libdl.so.2", re.compile("dl")), ("libpthread.so.0", re.compile("pthread_|__pthread_|sem_")))


class Symbol(NamedTuple):
    name: str
    kind: str  # FUNC, OBJECT, TLS
    size: int
    version: str


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def run(*command: str | Path, text: str = "") -> str:
    return subprocess.run([*map(str, command)], input=text, check=True, capture_output=True, text=True).stdout


def symbols_of(compiler: list[str], library: str, newest: tuple[int, ...]) -> tuple[list[Symbol], set[str]]:
    """The symbols, each with its newest version up to `newest`, and the names of those that also have a newer one."""
    path = run(*compiler, f"-print-file-name={library}").strip()
    found: dict[str, tuple[tuple[int, ...], Symbol]] = {}
    renewed = set()
    for line in run("readelf", "--dyn-syms", "--wide", path).splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        size, kind, _, name, version, number = match.groups()
        if numbers(number) > newest:
            renewed.add(name)
        elif name not in found or numbers(number) > found[name][0]:
            found[name] = numbers(number), Symbol(name, kind, int(size, 0), version)
    if not found:
        raise SystemExit(f"glibc_stubs.py: {path} has no symbols of glibc {'.'.join(map(str, newest))} or older")
    return [symbol for _, symbol in found.values()], renewed


def write_library(compiler: list[str], folder: Path, soname: str, symbols: list[Symbol]) -> None:
    sections = {"FUNC": ".text", "IFUNC": ".text", "OBJECT": ".data", "TLS": '.section .tdata,"awT",%progbits'}
    kinds = {"FUNC": "function", "IFUNC": "function", "OBJECT": "object", "TLS": "tls_object"}
    assembly = []
    for number, symbol in enumerate(symbols):
        if symbol.kind not in sections:
            continue
        assembly += [sections[symbol.kind], f".globl stub{number}", f".type stub{number}, %{kinds[symbol.kind]}",
                     f".size stub{number}, {max(symbol.size, 8)}", f"stub{number}: .zero {max(symbol.size, 8)}",
                     f".symver stub{number}, {symbol.name}@@{symbol.version}"]  # fmt: skip
    versions = sorted({symbol.version for symbol in symbols}, key=lambda v: numbers(v.partition("_")[2]))
    script = folder / f"{soname}.map"
    nodes = [f"{version} {{ }};\n" for version in versions[:-1]] + [f"{versions[-1]} {{ local: stub*; }};\n"]
    script.write_text("".join(nodes))
    run(*compiler, "-x", "assembler", "-", "-shared", "-nostdlib", f"-Wl,-soname,{soname}",
        f"-Wl,--version-script,{script}", "-o", folder / soname, text="\n".join(assembly) + "\n")  # fmt: skip


def main(compiler_line: str, version: str, folder_name: str) -> None:
    compiler, newest, folder = shlex.split(compiler_line), numbers(version), Path(folder_name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    libc, renewed = symbols_of(compiler, "libc.so.6", newest)
    parts: dict[str, list[Symbol]] = {"libc.so.6": []}
    for symbol in libc:
        formerly = [part for part, name in _FORMERLY if symbol.name in renewed and name.match(symbol.name)]
        parts.setdefault(formerly[0] if formerly else "libc.so.6", []).append(symbol)
    parts["libm.so.6"] = symbols_of(compiler, "libm.so.6", newest)[0]
    loader = re.search(r"\[(ld-linux\S*)\]", run("readelf", "-d", run(*compiler, "-print-file-name=libc.so.6").strip()))
    if not loader:
        raise SystemExit("glibc_stubs.py: the C library names no loader")
    parts[loader[1]] = symbols_of(compiler, loader[1], newest)[0]
    for soname, symbols in parts.items():
        write_library(compiler, folder, soname, symbols)
    # Like the C library's own libc.so and libm.so: the files that the linker finds for -lc and -lm.
    own = run(*compiler, "-print-file-name=libc_nonshared.a").strip()
    others = " ".join(str(folder / part) for part in ("libpthread.so.0", "libdl.so.2", loader[1]) if part in parts)
    (folder / "libc.so").write_text(f"GROUP ( {folder / 'libc.so.6'} {own} AS_NEEDED ( {others} ) )\n")
    (folder / "libm.so").write_text(f"GROUP ( {folder / 'libm.so.6'} )\n")
    for part in filter(None, (re.match(r"lib(pthread|dl)\.so", part) for part in parts)):
        (folder / part[0]).write_text(f"GROUP ( AS_NEEDED ( {folder / part.string} ) )\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
