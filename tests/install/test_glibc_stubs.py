"""scripts/glibc_stubs.py: programs linked against its libraries need no newer C library, and run."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Functions that glibc has renewed or moved since 2.28: threads, files, exp, random numbers; and exceptions.
LIBRARY = """
#include <cmath>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <sys/stat.h>
#include <thread>
extern "C" int work(const char* file, double one) {
  double sum = 0;
  std::thread([&] { sum = std::exp(one - 1) + std::log(one) + std::pow(one, 2); }).join();
  struct stat info;
  std::string word;
  std::ifstream(file) >> word;
  if (sum != 2 || stat(file, &info) != 0 || info.st_size != 6 || word != "words") return 1;
  std::random_device random;
  if (random() == random() && random() == random()) return 2;
  try {
    throw std::runtime_error("thrown");
  } catch (const std::exception& error) {
    return error.what() == std::string("thrown") ? 0 : 3;
  }
}
"""


def run(*command):
    process = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=50)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def linked(tmp_path, prefix, version):
    cc, cxx = (shutil.which(prefix + name) for name in ("gcc", "g++"))
    if not cxx:
        pytest.skip(f"no {prefix}g++ here")
    run(sys.executable, ROOT / "scripts/glibc_stubs.py", cc, version, tmp_path / "stubs")
    (tmp_path / "library.cpp").write_text(LIBRARY)
    run(cc, "-O2", "-fPIC", "-c", ROOT / "cmake/older_glibc.c", "-o", tmp_path / "older.o")
    library = tmp_path / "library.so"
    run(cxx, "-O2", "-std=c++20", "-fPIC", "-shared", "-static-libstdc++", tmp_path / "library.cpp",
        tmp_path / "older.o", f"-L{tmp_path}/stubs", "-o", library)  # fmt: skip
    versions = re.findall(r"@GLIBC_([0-9.]+)", run("nm", "--dynamic", "--undefined-only", library))
    assert versions and max(map(numbers, versions)) <= numbers(version)
    # Nor for anything that no version tells of.
    assert not re.search(r" GLOBAL +\w+ +UND [^@\s]+$", run("readelf", "--dyn-syms", "--wide", library), re.MULTILINE)
    return library


def numbers(version):
    return tuple(map(int, version.split(".")))


def test_no_newer_symbols(tmp_path):
    library = linked(tmp_path, "", "2.28")
    (tmp_path / "file").write_text("words\n")
    work = ctypes.CDLL(str(library)).work
    assert work(str(tmp_path / "file").encode(), ctypes.c_double(1)) == 0


def test_of_another_architecture(tmp_path):
    linked(tmp_path, "aarch64-linux-gnu-", "2.28")
