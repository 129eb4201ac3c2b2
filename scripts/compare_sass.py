#!/usr/bin/env python3
"""Compares the machine code of two commits: every prebuilt row, by NVRTC, for every architecture. Needs no GPU.

  scripts/compare_sass.py BASE [HEAD] [--arch 80 90] [--kernel fwd_sm90]

HEAD defaults to the working tree. Each commit lists its own rows (`tessera_aot --sources`), so that names, files and
fields of configs may differ between the two. A row is compared with the row of the same number or, where rows were
added, dropped or moved, with a row of the same code.

Compared are every instruction with its operands and control bits, registers, stack, shared memory, threads and
clusters. Names are not compared, nor are the offsets of parameters if those of one commit map one to one to the
other's.

Compiled rows are cached in TESSERA_SASS_CACHE (~/.cache/tessera-sass) under the hash of the tokens that the compiler
sees, so that a commit that moves lines or changes comments compiles nothing again.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import nvrtc

ROOT = Path(subprocess.run(["git", "rev-parse", "--show-toplevel"], cwd=Path(__file__).parent, check=True,
                           capture_output=True, text=True).stdout.strip())  # fmt: skip
CACHE = Path(os.environ.get("TESSERA_SASS_CACHE", Path.home() / ".cache" / "tessera-sass"))
NVDISASM = "nvidia-cuda-nvdisasm==13.5.37"  # reads the code of older compilers; earliest on PyPI is 13.2
OPTIONS = ("-std=c++20", "-default-device", "--ptxas-options=-v")
VERSION = "1"  # of the cached data


def run(*command: str | Path, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise SystemExit(f"compare_sass: {' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def sha(*texts: str | bytes) -> str:
    hasher = hashlib.sha256()
    for text in texts:
        data = text.encode() if isinstance(text, str) else text
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()[:32]


def keep(path: Path, data: bytes) -> None:
    """Writes a file atomically: others may use the cache at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


# ---- a commit: its tree, its rows ----


def tree_of(commit: str | None) -> str:
    if commit:
        return run("git", "rev-parse", "--verify", f"{commit}^{{tree}}", cwd=ROOT).strip()
    with tempfile.TemporaryDirectory() as folder:  # the working tree, including files that git does not track yet
        environment = {**os.environ, "GIT_INDEX_FILE": f"{folder}/index"}
        run("git", "read-tree", "HEAD", cwd=ROOT, env=environment)
        run("git", "add", "--all", cwd=ROOT, env=environment)
        return run("git", "write-tree", cwd=ROOT, env=environment).strip()


def export(tree: str, folder: Path) -> None:
    archive = subprocess.run(["git", "archive", tree], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)


def host_key(tree: str) -> str:
    """A hash of everything that determines the rows: the host's code and the headers that it shares with kernels."""
    listing = run("git", "ls-tree", "-r", tree, "CMakeLists.txt", "CMakePresets.json", "cmake", "src", "include",
                  "kernels", cwd=ROOT)  # fmt: skip
    return sha(VERSION, *(line for line in listing.splitlines() if not line.endswith((".cuh", ".md"))))


def sources_of(tree: str, name: str) -> dict[str, dict[str, str]]:
    """{"sm_90a": {"0001-fwd_sm90": text}}"""
    kept = CACHE / "sources" / f"{host_key(tree)}.json"
    if not kept.exists():
        if "--sources" not in run("git", "show", f"{tree}:src/cuda/aot.cpp", cwd=ROOT):
            raise SystemExit(f"compare_sass: {name} is older than tessera_aot --sources, which says what its rows are")
        print(f"{name}: building tessera_aot for its rows", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            export(tree, Path(folder))
            # In a folder laid out like a working tree, so that the compiler's cache recognises equal files.
            environment = {**os.environ, "CCACHE_BASEDIR": folder, "CCACHE_NOHASHDIR": "1"}
            if shutil.which("ccache"):
                environment |= {"CMAKE_C_COMPILER_LAUNCHER": "ccache", "CMAKE_CXX_COMPILER_LAUNCHER": "ccache"}
            run("cmake", "--preset", "release", cwd=folder, env=environment)
            run("nice", "cmake", "--build", "--preset", "release", "--target", "tessera_aot", "--parallel",
                str(os.cpu_count()), cwd=folder, env=environment)  # fmt: skip
            out = Path(folder) / "sources"
            run(Path(folder) / "build/release/src/tessera_aot", "--sources", out)
            rows = {arch.name: {row.stem: row.read_text() for row in sorted(arch.iterdir())}
                    for arch in sorted(out.iterdir())}  # fmt: skip
        keep(kept, json.dumps(rows).encode())
    return json.loads(kept.read_text())


class Headers:
    """The device code of a commit, on disk for the compiler and as tokens for the cache's key."""

    def __init__(self, tree: str):
        kernels = run("git", "rev-parse", f"{tree}:kernels", cwd=ROOT).strip()
        self.folder = CACHE / "kernels" / kernels
        if not self.folder.exists():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder.parent) as folder:
                export(kernels, Path(folder))
                try:
                    os.rename(folder, self.folder)
                    os.makedirs(folder)  # for the clean-up
                except OSError:
                    pass  # it exists from another run

    @lru_cache(maxsize=None)
    def tokens(self, path: str) -> tuple[str, tuple[str, ...]]:
        """A header's tokens, and the headers that it includes."""
        file = self.folder / path
        if not file.exists():
            return "", ()  # one of the compiler's own
        return tokens_of(file.read_text())

    def closure(self, source: str) -> str:
        """The tokens of a source and of everything that it includes, each header once and without its path."""
        text, includes = tokens_of(source)
        seen, parts = set(), [text]

        def visit(path: str) -> None:
            if path in seen:
                return
            seen.add(path)
            text, includes = self.tokens(path)
            for include in includes:
                visit(include)
            parts.append(text)

        for include in includes:
            visit(include)
        return "\n".join(parts)


COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\w+|[-+*/%&|^=<>!:.]+|\S')


def tokens_of(text: str) -> tuple[str, tuple[str, ...]]:
    text = COMMENT_OR_TEXT.sub(lambda found: found[0] if found[0][0] == '"' else " ", text)
    includes = tuple(INCLUDE.findall(text))
    lines, code = [], []
    for line in text.replace("\\\n", " ").split("\n"):
        if line.lstrip().startswith("#"):
            if not INCLUDE.match(line) and not line.lstrip().startswith("#pragma once"):
                lines += [" ".join(code), " ".join(TOKEN.findall(line))]
                code = []
        else:
            code += TOKEN.findall(line)
    return "\n".join([*lines, " ".join(code)]), includes


# ---- compiling and reading a row ----


def nvdisasm() -> Path:
    folder = CACHE / "tools" / NVDISASM
    program = folder / "nvidia" / "cu13" / "bin" / "nvdisasm"
    if not program.exists():
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, NVDISASM)
    return program


LABEL = re.compile(r"^(\.L_\w+|\.text\.\w+):$")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?;)\s+/\* (0x[0-9a-f]{16}) \*/$")
ENCODING = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/$")
SYMBOL = re.compile(r"\.L_\w+|\$?\b(?:tessera_|_Z)\w+(?:\$\w+)*")
CONTROL_SHIFT, CONTROL_MASK = 41, (1 << 21) - 1  # of an instruction's upper 64 bits: stall, yield, scoreboards, reuse


def sections(cubin: bytes) -> list[tuple[str, int, bytes]]:
    """(name, size, content) of an ELF64 file."""
    table, = struct.unpack_from("<Q", cubin, 40)
    entry, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(count)]
    strings = headers[names][4]
    found = []
    for name, kind, _, _, offset, size in headers:
        text = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        found.append((text, size, b"" if kind == 8 else cubin[offset : offset + size]))  # 8: SHT_NOBITS
    return found


def read_row(cubin: bytes, log: str, program: Path) -> str:
    """A row's resources, then its machine code: one instruction per line with its control bits, symbols by number."""
    lines = []
    for line in log.splitlines():
        if "bytes stack frame" in line or " registers" in line:
            lines.append(re.sub(r", \d+ bytes cmem\[\d+\]", "", line.split("ptxas info    : ")[-1].strip()))
    for name, size, content in sections(cubin):
        if name.startswith((".nv.constant", ".nv.global", ".nv.shared")) and not name.startswith(".nv.constant0"):
            lines.append(f"{re.sub(r'(tessera|_Z).*', '', name)} {size} bytes {sha(content)}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = run(program, "-c", "-hex", file.name)
    symbols: dict[str, str] = {}
    numbered = partial(SYMBOL.sub, lambda found: symbols.setdefault(found[0], f"@{len(symbols)}"))
    for line in text.splitlines():
        if found := INSTRUCTION.match(line):
            lines.append(numbered(re.sub(r"\s+", " ", found[1])))
        elif found := ENCODING.match(line):
            lines[-1] += f" {int(found[1], 16) >> CONTROL_SHIFT & CONTROL_MASK:#x}"
        elif found := LABEL.match(line):
            lines.append(numbered(found[1]) + ":")
    return "\n".join(lines)


def build_row(job: tuple[str, str, str, Path, Path]) -> str:
    """Returns "", or why it does not compile."""
    source, arch, key, include, program = job
    options = [f"--gpu-architecture={arch}", *OPTIONS, f"--include-path={include}"]
    cubin, log, status = nvrtc.compile_program(source, options)
    if status != 0:
        return log[:1500]
    keep(CACHE / "rows" / f"{key}.gz", gzip.compress(read_row(cubin, log, program).encode(), 6))
    return ""


@dataclass(frozen=True)
class Row:
    arch: str
    name: str  # "0007-fwd_sm90"
    source: str
    key: str

    @property
    def kernel(self) -> str:
        return self.name.split("-", 1)[1]

    @lru_cache(maxsize=None)
    def code(self) -> tuple[str, ...]:
        text = gzip.decompress((CACHE / "rows" / f"{self.key}.gz").read_bytes()).decode()
        lines = text.split("\n")
        if "c[0x4]" not in text:  # constants and variables of headers that no instruction reads
            lines = [line for line in lines if not line.startswith((".nv.constant4", ".nv.global"))]
        return (self.source.split("\n", 1)[0], *lines)  # facts of the launch first


def rows_of(commit: str | None, archs: list[str], kernels: list[str]) -> list[Row]:
    name, tree = commit or "the working tree", tree_of(commit)
    sources = sources_of(tree, name)
    headers, program, compiler = Headers(tree), nvdisasm(), str(nvrtc.version())
    rows = []
    for arch in archs or [name for name in sources if name.startswith("sm_")]:  # PTX is compiled on another machine
        for row, source in sources[arch].items():
            if not kernels or any(kernel in row for kernel in kernels):
                key = sha(VERSION, compiler, NVDISASM, *OPTIONS, arch, headers.closure(source))
                rows.append(Row(arch, row, source, key))
    jobs = {row.key: (row.source, row.arch, row.key, headers.folder, program)
            for row in rows if not (CACHE / "rows" / f"{row.key}.gz").exists()}  # fmt: skip
    failures = 0
    with ProcessPoolExecutor(max(1, min(os.cpu_count() or 1, len(jobs))), initializer=os.nice, initargs=(10,)) as pool:
        for done, failure in enumerate(pool.map(build_row, jobs.values()), 1):
            print(f"\r{name}: compiled {done} of {len(jobs)}", end="", file=sys.stderr)
            if failure:
                failures += 1
                if failures == 1:
                    print(f"\n{list(jobs.values())[done - 1][0]}{failure}", file=sys.stderr)
    if jobs:
        print(file=sys.stderr)
    if failures:
        raise SystemExit(f"compare_sass: {failures} rows of {name} do not compile")
    return rows


# ---- two rows ----

CONSTANT = re.compile(r"c\[0x0\]\[(?:[^\]]*\+)?(0x[0-9a-f]+)\]")
NUMBER = re.compile(r"0x[0-9a-f]+")
FIRST_PARAMETER = {"sm_80": 0x160, "sm_86": 0x160, "sm_89": 0x160, "sm_90a": 0x210}  # in constant bank 0
FIRST_PARAMETER_BLACKWELL = 0x380


class Offsets:
    """A one-to-one map from the offsets of one kernel's parameters to the other's."""

    def __init__(self, arch: str):
        self.first = FIRST_PARAMETER.get(arch, FIRST_PARAMETER_BLACKWELL)
        self.forth: dict[int, int] = {}
        self.back: dict[int, int] = {}

    def maps(self, a: int, b: int) -> bool:
        if a < self.first or b < self.first:
            return a == b
        return self.forth.setdefault(a, b) == b and self.back.setdefault(b, a) == a


def same_but_for_offsets(a: tuple[str, ...], b: tuple[str, ...], arch: str) -> bool:
    if len(a) != len(b):
        return False
    offsets = Offsets(arch)
    for x, y in zip(a, b):
        for one, other in zip(CONSTANT.findall(x), CONSTANT.findall(y)):
            if not offsets.maps(int(one, 16), int(other, 16)):
                return False
        if x == y:
            continue
        if CONSTANT.sub("c", x) == CONSTANT.sub("c", y):
            continue
        # The address of a parameter, such as a tensor map's, is an offset added to that of the constants.
        if "IADD" not in x or NUMBER.sub("n", x) != NUMBER.sub("n", y):
            return False
        numbers = [[int(number, 16) for number in NUMBER.findall(line)] for line in (x, y)]
        if not all(map(offsets.maps, *numbers)):
            return False
    return True


def same(a: Row, b: Row) -> bool:
    return a.key == b.key and a.code()[0] == b.code()[0] or same_but_for_offsets(a.code(), b.code(), a.arch)


def difference(a: Row, b: Row, lines: int) -> str:
    text = [CONSTANT.sub("c[0x0][parameter]", line).rsplit(" 0x", 1)[0] for line in a.code()]
    other = [CONSTANT.sub("c[0x0][parameter]", line).rsplit(" 0x", 1)[0] for line in b.code()]
    changed = [line for line in difflib.unified_diff(text, other, lineterm="", n=0) if line[:1] in "+-"][2:]
    facts = "; ".join(f"{x} -> {y}" for x, y in zip(a.code()[:6], b.code()[:6]) if x != y and ";" not in x)
    size = f"{len(text)} -> {len(other)} lines, {len(changed)} of the diff" + (f"; {facts}" if facts else "")
    return "\n      ".join([size, *changed[:lines]])


def compare(base: list[Row], head: list[Row], lines: int) -> int:
    differing = 0
    for arch in dict.fromkeys(row.arch for row in base + head):
        ours = [row for row in base if row.arch == arch]
        theirs = [row for row in head if row.arch == arch]
        if len(ours) == len(theirs):
            pairs = list(zip(ours, theirs))
        else:
            pairs = []
        left = [(a, b) for a, b in pairs if not same(a, b)]
        equal = len(pairs) - len(left)
        # Rows that moved are matched by their code.
        rest_a = [a for a, _ in left] if pairs else ours
        rest_b = [b for _, b in left] if pairs else theirs
        moved = 0
        for a in list(rest_a):
            match = next((b for b in rest_b if same(a, b)), None)
            if match:
                rest_a.remove(a)
                rest_b.remove(match)
                moved += 1
        print(f"{arch}: {equal + moved} rows the same" + (f" ({moved} of another number)" if moved else ""))
        by_kernel = list(zip(rest_a, rest_b))
        for a, b in by_kernel:
            print(f"  differs: {a.name} -> {b.name}: {difference(a, b, lines)}")
            print(f"    {config_of(a)}\n    {config_of(b)}")
        for row in rest_a[len(by_kernel):]:
            print(f"  only in the base: {row.name} {config_of(row)}")
        for row in rest_b[len(by_kernel):]:
            print(f"  only in the head: {row.name} {config_of(row)}")
        differing += max(len(rest_a), len(rest_b))
    print("the same machine code" if differing == 0 else f"{differing} rows differ")
    return differing


def config_of(row: Row) -> str:
    return re.sub(r"tessera::", "", row.source.rsplit("<", 1)[1].rsplit(">", 1)[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE")
    parser.add_argument("head", metavar="HEAD", nargs="?", help="the working tree unless given")
    parser.add_argument("--arch", nargs="+", type=int, default=[], help="80 90 ..., all unless given")
    parser.add_argument("--kernel", nargs="+", default=[], help="rows with one of these in their kernel's name")
    parser.add_argument("--lines", type=int, default=0, help="how much of each difference to print")
    given = parser.parse_args()
    if nvrtc.library() is None:
        parser.error("no NVRTC: install nvidia-cuda-nvrtc or set TESSERA_NVRTC")
    CACHE.mkdir(parents=True, exist_ok=True)
    archs = [f"sm_{arch}" + ("a" if arch == 90 else "") for arch in given.arch]
    base = rows_of(given.base, archs, given.kernel)
    head = rows_of(given.head, archs, given.kernel)
    return 1 if compare(base, head, given.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
