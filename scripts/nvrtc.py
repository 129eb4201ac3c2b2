"""NVRTC by ctypes: the library named by TESSERA_NVRTC, or that of the Python environment or of the toolkit."""

from __future__ import annotations

import ctypes
import glob
import os
import site
import sysconfig
from functools import lru_cache

SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


def _candidates() -> list[str]:
    given = os.environ.get("TESSERA_NVRTC")
    if given:
        return [given, *(os.path.join(given, name) for name in SONAMES)]
    folders = [f"{root}/nvidia/{package}/lib" for root in [sysconfig.get_path("purelib"), *site.getsitepackages()]
               for package in ("cu13", "cuda_nvrtc")]  # fmt: skip
    folders += [os.path.join(os.environ[name], "lib64") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders.append("/usr/local/cuda/lib64")
    return [f"{folder}/{name}" for name in SONAMES for folder in folders]


@lru_cache
def library() -> ctypes.CDLL | None:
    for path in filter(os.path.isfile, _candidates()):
        # NVRTC opens it by its bare name.
        for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so.*.*")):
            ctypes.CDLL(builtins)
        return ctypes.CDLL(path)
    for name in SONAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_program(source: str, options: list[str]) -> tuple[bytes, str, int]:
    """Returns the cubin, the compiler's log, and 0 if it compiles."""
    nvrtc, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    if version() >= (13, 0):
        options = [*options, "--no-cache"]  # with a kernel from its own cache, NVRTC prints no log
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None) != 0:
        return b"", "error: NVRTC takes no program", 1
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value if status == 0 else 0)
    if status == 0:
        nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw, log.value.decode(), status
