"""What ptxas says of one tile of fwd_sm90, by NVRTC on this tree's headers. No GPU, no library."""

from __future__ import annotations

import ctypes
import glob
import os
import re
import site
import sysconfig
from dataclasses import dataclass
from functools import lru_cache

import fwd_sm90_model as model
from fwd_sm90_model import Shape, Tile

SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
# What ptxas says where products wait for each other, or registers are not dealt anew.
LOSSES = ("wgmma.mma_async instructions are serialized", "warpgroup.wait is injected", "'setmaxnreg' ignored")
BFLOAT16 = 2  # tessera::Dtype


@dataclass(frozen=True)
class Report:
    registers: int
    spill_bytes: int  # stored and loaded
    loss: str  # of LOSSES
    failure: str = ""

    def __str__(self) -> str:
        return "" if self.failure else f"{self.registers}, {self.spill_bytes}"

    def reason(self, most_spill_bytes: int) -> str:
        """Why the tile is not worth measuring, "" where it is."""
        if self.failure:
            return f"does not compile: {self.failure}"
        return self.loss or ("spills" if self.spill_bytes > most_spill_bytes else "")


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
        # Opened by NVRTC by its bare name.
        for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so.*.*")):
            ctypes.CDLL(builtins)
        return ctypes.CDLL(path)
    for name in SONAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def config_text(shape: Shape, tile: Tile) -> str:
    values = {
        "dtype": f"tessera::Dtype{{{BFLOAT16}}}",
        "head_dim": -(-shape.head_dim // 16) * 16,
        "head_dim_v": model.output_width(shape),
        "o_chunks": model.output_chunks(shape, tile),
        "page_rows": 0,
        "causal": str(shape.area == "causal").lower(),
        "uneven": str(shape.area == "window").lower(),  # its rows are packed batches', too
        "score": f"{{.bias = true, .bias_dtype = tessera::Dtype{{{BFLOAT16}}}}}" if shape.area == "options" else "{}",
        **dict(zip(model.tuned_fields(), tile.values)),
    }
    unknown = [name for name in model.config_fields() if name not in values]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: a field of FwdSm90Config that this script has no value for")
    fields = ", ".join(f".{name} = {values[name]}" for name in model.config_fields())
    return f"tessera::FwdSm90Config{{{fields}}}"


def source(shape: Shape, tile: Tile) -> str:
    """As src/cuda/runtime/codegen.cpp has it."""
    threads = (tile.consumers + 1) * 128
    cluster = f" __cluster_dims__({tile.cluster}, 1, 1)" if tile.cluster > 1 else ""
    config = config_text(shape, tile)
    return (
        '#include "tessera/fwd_sm90.cuh"\n'
        f"static_assert(sizeof(tessera::FwdSm90SharedMemory<{config}>) <= {model.SMEM_BYTES});\n"
        f'extern "C" __global__ void __launch_bounds__({threads}, 1){cluster}\n'
        "tessera_fwd_sm90(const __grid_constant__ tessera::FwdSm90Params p) {\n"
        f"  tessera::fwd_sm90<{config}>(p);\n}}\n"
    )


def compile_tile(shape: Shape, tile: Tile) -> Report:
    nvrtc = library()
    options = ["--gpu-architecture=sm_90a", "-std=c++20", "-default-device", "--ptxas-options=-v",
               f"--include-path={model.ROOT / 'kernels'}"]  # fmt: skip
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if major.value >= 13:
        options.append("--no-cache")  # what it has kept itself it says nothing about
    program = ctypes.c_void_p()
    text = source(shape, tile).encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"tessera_fwd_sm90.cu", 0, None, None) != 0:
        return Report(0, 0, "", "NVRTC takes no program")
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return read_log(log.value.decode(), status)


def read_log(log: str, status: int) -> Report:
    if status != 0:
        error = re.search(r"error.*", log)
        return Report(0, 0, "", error.group(0) if error else "no reason given")
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    loss = next((words for words in LOSSES if words in log), "")
    return Report(int(registers.group(1)) if registers else 0, sum(map(int, spills)), loss)
