"""What ptxas says of one tile of fwd_sm90, by NVRTC on this tree's headers. No GPU, no library."""

from __future__ import annotations

import re
from dataclasses import dataclass

import fwd_sm90_model as model
import nvrtc
from fwd_sm90_model import Shape, Tile

# What ptxas says where products wait for each other, or setmaxnreg is ignored.
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


def config_text(shape: Shape, tile: Tile) -> str:
    values = {
        "dtype": f"tessera::Dtype{{{BFLOAT16}}}",
        "head_dim": -(-shape.head_dim // 16) * 16,
        "head_dim_v": model.output_width(shape),
        "o_chunks": model.layout(shape, tile).output_chunks,
        "page_rows": 0,
        "causal": str(shape.area == "causal").lower(),
        "varlen": str(shape.area == "window").lower(),  # its rows are packed batches', too
        "block_mask": "false",
        "live_tiles": "false",
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
        '#include "tessera/fwd_sm90/kernel.cuh"\n'
        f"static_assert(sizeof(tessera::FwdSm90SharedMemory<{config}>) <= {model.library()['smem_limit_bytes']});\n"
        f'extern "C" __global__ void __launch_bounds__({threads}, 1){cluster}\n'
        "tessera_fwd_sm90(const __grid_constant__ tessera::FwdSm90Params p) {\n"
        f"  tessera::fwd_sm90<{config}>(p);\n}}\n"
    )


def options() -> list[str]:
    return ["--gpu-architecture=sm_90a", "-std=c++20", "-default-device", "--ptxas-options=-v",
            f"--include-path={model.ROOT / 'kernels'}"]  # fmt: skip


def compile_tile(shape: Shape, tile: Tile) -> Report:
    _, log, status = nvrtc.compile_program(source(shape, tile), options())
    return read_log(log, status)


def read_log(log: str, status: int) -> Report:
    if status != 0:
        error = re.search(r"error.*", log)
        return Report(0, 0, "", error.group(0) if error else "no reason given")
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    loss = next((words for words in LOSSES if words in log), "")
    return Report(int(registers.group(1)) if registers else 0, sum(map(int, spills)), loss)
