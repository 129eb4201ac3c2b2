"""ptxas's report on one tile of fwd_sm90, by NVRTC on this tree's headers. Needs no GPU and no library."""

from __future__ import annotations

import fwd_sm90_model as model
import tile_search
from fwd_sm90_model import Shape, Tile

_BFLOAT16 = f"tessera::Dtype{{{tile_search.BFLOAT16}}}"


def config_text(shape: Shape, tile: Tile) -> str:
    values = {
        "dtype": _BFLOAT16,
        "head_dim": -(-shape.head_dim // 16) * 16,
        "head_dim_v": model.output_width(shape),
        "o_chunks": model.layout(shape, tile).output_chunks,
        "page_rows": 0,
        "varying_tile_cost": str(shape.area == "causal").lower(),
        "varlen": str(shape.area == "window").lower(),  # its rows also serve packed batches
        "block_mask": "false",
        "live_tiles": "false",
        "pack_gqa": "false",
        "split": "false",
        "merge_blocks": 1,
        "score": f"{{.bias = true, .bias_dtype = {_BFLOAT16}}}" if shape.area == "options" else "{}",
        **dict(zip(model.tuned_fields(), tile.values)),
    }
    return tile_search.config_text("FwdSm90Config", model.config_fields(), values)


def source(shape: Shape, tile: Tile) -> str:
    """As in src/cuda/runtime/codegen.cpp."""
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


def compile_tile(shape: Shape, tile: Tile) -> tile_search.Report:
    return tile_search.compile_source(source(shape, tile))
