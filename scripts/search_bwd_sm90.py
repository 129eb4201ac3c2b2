#!/usr/bin/env python3
"""Finds bwd_sm90's tiles for the GPU of this machine and writes src/cuda/families/bwd_sm90_tiles.inc, in one run of
about five minutes. A row is written as soon as it is measured.

    scripts/search_bwd_sm90.py [--head-dims 64 96]      on a GPU of compute capability 9.0
    scripts/search_bwd_sm90.py --dry-run                no GPU: the candidates and ptxas's report

For each head size, without options and with a bias (standing for any option), it enumerates every tile that fits shared
memory, compiles it by NVRTC and drops those whose wgmma ptxas serialises or that spill, then measures the others
against each other and cuDNN in the steady state (bench/cuda_bench/timing.py), full and causal. A wrong result also
drops a tile. A row gets the tile with the best geometric mean.

Needs this tree's tessera_tiles, the package tessera with its library (PYTHONPATH=$(scripts/gpu_python.sh) builds both),
PyTorch and NVRTC. The dry run needs tessera_tiles, and uses NVRTC if present (TESSERA_NVRTC, or pip's
nvidia-cuda-nvrtc).
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "bench")]
import tile_search  # noqa: E402

TABLE = ROOT / "src/cuda/families/bwd_sm90_tiles.inc"
FORCED = "TESSERA_BWD_SM90_TILE"  # src/cuda/families/bwd_sm90_tiles.hpp
LENGTHS = (512, 2048, 8192)
TOKENS = 16384
HIDDEN = 2048  # heads times head size
FIELDS = ("block_m", "stages", "alternate", "staged_dq")  # in the order of a row
BLOCK_N = 128
MOST_HEAD_DIM_V = 128  # of V, with which Q and K may have 192
THREADS = 512
ERROR_BOUND = 1.5  # times cuDNN's


@dataclass(frozen=True)
class Row:
    """The key of a row of the table."""

    head_dim: int
    options: bool

    @property
    def name(self) -> str:
        return f"D {self.head_dim}{', a bias' if self.options else ''}"

    @property
    def masks(self) -> tuple[bool, ...]:
        return (False,) if self.options else (False, True)  # scaled_dot_product_attention accepts a bias or is causal


@dataclass(frozen=True)
class Tile:
    values: tuple[int, ...]  # of FIELDS

    @property
    def text(self) -> str:
        """The value of FORCED."""
        return ",".join(map(str, self.values))

    @property
    def cpp(self) -> str:
        return ", ".join(str(v) if n < 2 else str(bool(v)).lower() for n, v in enumerate(self.values))


def library() -> dict:
    return tile_search.tables()["bwd_sm90"]


def tiles_of(key: str) -> dict[Row, list[Tile]]:
    """`key`: candidates or rows."""
    found: dict[Row, list[Tile]] = {}
    for entry in library()[key]:
        tile = Tile(tuple(int(entry[name]) for name in FIELDS))
        found.setdefault(Row(entry["head_dim"], entry["options"]), []).append(tile)
    return found


# ---- compile ----


def config_text(row: Row, tile: Tile, number: int) -> str:
    """`number`: of the dtype."""
    chosen = dict(zip(FIELDS, tile.values))
    dtype = f"tessera::Dtype{{{number}}}"
    values = {
        "dtype": dtype,
        "head_dim": row.head_dim,
        "block_n": BLOCK_N,
        "ds_stages": chosen["stages"],
        "score": f"{{.bias = true, .bias_dtype = {dtype}}}" if row.options else "{}",
        **dict.fromkeys(
            (
                "window", "varlen", "deterministic", "d_bias", "d_captured", "d_factor", "d_diagonal", "block_mask",
                "split_group", "sums", "whole_head",
            ),
            "false",
        ),  # fmt: skip
        **{
            name: value if name in ("block_m", "stages") else str(bool(value)).lower() for name, value in chosen.items()
        },
    }
    return tile_search.config_text("BwdSm90Config", library()["config_fields"], values)


def compile_tile(row: Row, tile: Tile) -> tile_search.Report:
    """In the dtype that ptxas handles worse: a row serves both."""
    reports = [
        tile_search.compile_source(
            '#include "tessera/bwd_sm90/kernel.cuh"\n'
            f'extern "C" __global__ void __launch_bounds__({THREADS}, 1)\n'
            "tessera_bwd_sm90(const __grid_constant__ tessera::BwdSm90Params p) {\n"
            f"  tessera::bwd_sm90<{config_text(row, tile, dtype)}>(p);\n}}\n"
        )
        for dtype in (tile_search.BFLOAT16, tile_search.FLOAT16)
    ]
    return max(reports, key=lambda report: (report.failure, report.loss, report.spill_bytes))


def compilable(rows: list[Row]) -> dict[Row, list[Tile]]:
    """The candidates that ptxas compiles well. Prints its report on each."""
    jobs = [(row, tile) for row in rows for tile in tiles_of("candidates")[row]]
    reports = tile_search.compile_jobs(compile_tile, jobs)
    kept: dict[Row, list[Tile]] = {row: [] for row in rows}
    print(f"{'':16} {', '.join(FIELDS):40} registers, spilled bytes")
    for (row, tile), report in zip(jobs, reports):
        reason = report.reason(0) if report else ""
        if not reason:
            kept[row].append(tile)
        print(f"{row.name:16} {tile.text:40} {report or ''} {reason}")
    return kept


# ---- measure ----


def make_problem(row: Row, length: int, causal: bool):
    from cuda_bench.problem import Problem

    heads, head_dim_v = max(1, HIDDEN // row.head_dim), min(row.head_dim, MOST_HEAD_DIM_V)
    return Problem(row.name, TOKENS // length, length, length, heads, heads, row.head_dim, head_dim_v, causal,
                   option="bias" if row.options else "")  # fmt: skip


def make_forced(problem, inputs, tile: Tile, number: int):
    return tile_search.make_forced("bwd_sm90", FORCED, "backward", problem, inputs, tile, number)


def warm(job: tuple[Row, Tile]) -> None:
    """In a separate process: compiles one tile into the library's cache."""
    import torch

    from cuda_bench.problem import Inputs

    row, tile = job
    problem = make_problem(row, LENGTHS[0], False)
    tile_search.contestant_call(make_forced(problem, Inputs.of(problem, True), tile, 0))[0]()
    torch.cuda.synchronize()


def measure_cell(row: Row, length: int, causal: bool, tiles: list[Tile], steadiness) -> dict:
    """TFLOP/s of each correct tile, and of cuDNN."""
    import torch

    from cuda_bench.problem import Inputs

    problem = make_problem(row, length, causal)
    inputs = Inputs.of(problem, True)
    peer, calls, dropped = tile_search.right_calls(problem, inputs, "backward", ERROR_BOUND,
                                                   lambda tile, number: make_forced(problem, inputs, tile, number),
                                                   tiles)  # fmt: skip
    tile_search.say_dropped(f"{row.name} {length}", dropped)
    rates = tile_search.rates(problem, "backward", peer | calls, steadiness)
    torch.cuda.empty_cache()
    return rates


def measure(kept: dict[Row, list[Tile]], options: argparse.Namespace, started: float) -> Iterator[tuple[Row, dict]]:
    """Yields each row and {(causal, length): rates} as soon as it is complete."""
    from cuda_bench.timing import Steadiness

    steadiness = Steadiness(options.lead_ms, options.measure_ms, options.rounds)
    with open(options.csv, "w", encoding="utf-8") as file:
        print("head_dim,options,mask,length,contestant,tflops", file=file)
        for row, tiles in kept.items():
            cells: dict = {}
            for causal, length in itertools.product(row.masks, LENGTHS):
                if time.monotonic() - started > options.seconds:
                    print(f"{row.name}: out of time, its row stays as it is")
                    return
                cell = cells[causal, length] = measure_cell(row, length, causal, tiles, steadiness)
                mask = "causal" if causal else "full"
                print(f"{row.name} {mask} {length}: {tile_search.texts_of(cell)}", flush=True)
                for name, rate in cell.items():
                    text = getattr(name, "text", name).replace(",", " ")
                    print(f"{row.head_dim},{row.options},{mask},{length},{text},{rate:.1f}", file=file, flush=True)
            yield row, cells


# ---- the table ----


def winner(cells: dict) -> Tile:
    """The best geometric mean of the tiles that are correct everywhere."""
    right = set.intersection(*({name for name in cell if isinstance(name, Tile)} for cell in cells.values()))
    return max(
        sorted(right, key=lambda tile: tile.values),
        key=lambda tile: sum(math.log(cell[tile]) for cell in cells.values()),
    )


def lines_of(row: Row, cells: dict) -> list[str]:
    tile, texts = winner(cells), []
    for causal in row.masks:
        rates = [
            tile_search.length_text(length, cells[causal, length][tile], cells[causal, length].get("cudnn"))
            for length in LENGTHS
        ]
        texts.append(f"{'causal' if causal else 'full'} {', '.join(rates)}")
    return [f"// {'; '.join(texts)}", f"{{{row.head_dim}, {str(row.options).lower()}, {tile.cpp}}},"]


def read_rows(text: str) -> dict[Row, list[str]]:
    return tile_search.read_blocks(text, lambda fields: Row(int(fields[0]), fields[1] == "true"))


def table_text(before: str, measured: dict[Row, dict], gpu: str) -> str:
    """The file's text: newly measured rows, and the others unchanged."""
    heading = before.partition("\n\n")[0]
    blocks = read_rows(before)
    for row, cells in measured.items():
        blocks[row] = [f"// {gpu}", *lines_of(row, cells)]
    return "\n".join([heading, "", *(line for block in blocks.values() for line in block)]) + "\n"


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    head_dims = sorted({row.head_dim for row in tiles_of("rows")})
    parser.add_argument("--head-dims", nargs="+", type=int, choices=head_dims, default=head_dims)
    parser.add_argument("--dry-run", action="store_true", help="stop before the GPU is needed")
    parser.add_argument("--lead-ms", type=float, default=100)
    parser.add_argument("--measure-ms", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=4, help="their median counts: one round may be off by 10 %%")
    parser.add_argument("--seconds", type=float, default=600, help="start no measurement after so many")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=TABLE, help="instead of the table in the sources"
    )
    parser.add_argument("--csv", metavar="FILE", default="/dev/null", help="every rate, as it is measured")
    return parser.parse_args(arguments)


def search(options: argparse.Namespace) -> int:
    started = time.monotonic()
    rows = [row for row in tiles_of("rows") if row.head_dim in options.head_dims]
    kept = compilable(rows)  # compiling forks processes, which must happen before the GPU is used
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    if options.dry_run:
        return 0

    from cuda_bench import machine

    facts = machine.facts()
    print(machine.heading(facts), flush=True)
    jobs = [(row, tile) for row, tiles in kept.items() for tile in tiles]
    tile_search.fill_cache(warm, jobs, 16)
    print(f"in the library's cache after {time.monotonic() - started:.0f} s", flush=True)
    gpu, before, measured = tile_search.provenance(facts), TABLE.read_text(encoding="utf-8"), {}
    for row, cells in measure(kept, options, started):
        measured[row] = cells
        options.output.write_text(table_text(before, measured, gpu), encoding="utf-8")
    print(f"{options.output}: {len(measured)} of {len(rows)} rows, {time.monotonic() - started:.0f} s in all")
    print("\n".join(line for row, cells in measured.items() for line in lines_of(row, cells)))
    return 1 if len(measured) < len(rows) else 0


if __name__ == "__main__":
    sys.exit(search(parse()))
