#!/usr/bin/env python3
"""Finds bwd_sm90's tiles for the GPU at hand and writes src/cuda/families/bwd_sm90_tiles.inc, in one run of under two minutes.

    scripts/search_bwd_sm90.py [--head-dims 64 96]      on a GPU of compute capability 9.0
    scripts/search_bwd_sm90.py --dry-run                no GPU: the candidates and ptxas' words

For each head size, without options and with a bias (as any option): takes every tile that fits shared memory, compiles it by NVRTC and
drops those whose wgmma ptxas serialises or that spill, then measures the others against each other and cuDNN in the steady state
(bench/cuda_bench/timing.py), full and causal. A wrong result drops a tile, too. A row gets the tile with the best geometric mean.

Wants this tree's tessera_tiles, and the package tessera with its library (PYTHONPATH=$(scripts/gpu_python.sh) builds both),
PyTorch and NVRTC; the dry run tessera_tiles and NVRTC, if that (TESSERA_NVRTC, or pip's nvidia-cuda-nvrtc).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "bench")]
import fwd_sm90_model as model  # noqa: E402
import fwd_sm90_ptxas as ptxas  # noqa: E402
import nvrtc  # noqa: E402

TABLE = ROOT / "src/cuda/families/bwd_sm90_tiles.inc"
FORCED = "TESSERA_BWD_SM90_TILE"  # src/cuda/families/bwd_sm90_tiles.hpp
LENGTHS = (512, 2048, 8192)
TOKENS = 16384
HIDDEN = 2048  # heads times head size
FIELDS = ("block_m", "stages", "alternate", "staged_dq")  # in the rows' order
BLOCK_N = 128
THREADS = 512
ERROR_BOUND = 1.5  # times cuDNN's


@dataclass(frozen=True)
class Row:
    """What a row of the table is for."""

    head_dim: int
    options: bool

    @property
    def name(self) -> str:
        return f"D {self.head_dim}{', a bias' if self.options else ''}"

    @property
    def masks(self) -> tuple[bool, ...]:
        return (False,) if self.options else (False, True)  # scaled_dot_product_attention takes a bias or is causal


@dataclass(frozen=True)
class Tile:
    values: tuple[int, ...]  # of FIELDS

    @property
    def text(self) -> str:
        """What FORCED takes."""
        return ",".join(map(str, self.values))

    @property
    def cpp(self) -> str:
        return ", ".join(str(v) if n < 2 else str(bool(v)).lower() for n, v in enumerate(self.values))


@lru_cache
def library() -> dict:
    return model.tables()["bwd_sm90"]


def tiles_of(key: str) -> dict[Row, list[Tile]]:
    """`key`: candidates or rows."""
    found: dict[Row, list[Tile]] = {}
    for entry in library()[key]:
        tile = Tile(tuple(int(entry[name]) for name in FIELDS))
        found.setdefault(Row(entry["head_dim"], entry["options"]), []).append(tile)
    return found


# ---- compile ----


def config_text(row: Row, tile: Tile) -> str:
    chosen = dict(zip(FIELDS, tile.values))
    dtype = f"tessera::Dtype{{{ptxas.BFLOAT16}}}"
    values = {
        "dtype": dtype,
        "head_dim": row.head_dim,
        "block_n": BLOCK_N,
        "ds_stages": chosen["stages"],
        "score": f"{{.bias = true, .bias_dtype = {dtype}}}" if row.options else "{}",
        **dict.fromkeys(("window", "varlen", "deterministic", "d_bias", "block_mask"), "false"),
        **{name: value if name in ("block_m", "stages") else str(bool(value)).lower() for name, value in chosen.items()},
    }
    unknown = [name for name in library()["config_fields"] if name not in values]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: a field of BwdSm90Config that this script has no value for")
    fields = ", ".join(f".{name} = {values[name]}" for name in library()["config_fields"])
    return f"tessera::BwdSm90Config{{{fields}}}"


def compile_tile(row: Row, tile: Tile) -> ptxas.Report:
    source = (
        '#include "tessera/bwd_sm90/kernel.cuh"\n'
        f'extern "C" __global__ void __launch_bounds__({THREADS}, 1)\n'
        "tessera_bwd_sm90(const __grid_constant__ tessera::BwdSm90Params p) {\n"
        f"  tessera::bwd_sm90<{config_text(row, tile)}>(p);\n}}\n"
    )
    _, log, status = nvrtc.compile_program(source, ptxas.options())
    return ptxas.read_log(log, status)


def compilable(rows: list[Row]) -> dict[Row, list[Tile]]:
    """The candidates that ptxas takes well. Prints what it says of each."""
    jobs = [(row, tile) for row in rows for tile in tiles_of("candidates")[row]]
    if nvrtc.library() is None:
        print("NVRTC: not found, so nothing is known of registers, spills and serialised wgmma")
        reports = [None for _ in jobs]
    else:
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:  # NVRTC compiles one at a time in each
            reports = pool.starmap(compile_tile, jobs, chunksize=1)
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

    heads = max(1, HIDDEN // row.head_dim)
    return Problem(row.name, TOKENS // length, length, length, heads, heads, row.head_dim, row.head_dim, causal,
                   option="bias" if row.options else "")  # fmt: skip


def make_forced(problem, inputs, tile: Tile, number: int):
    """Tessera with one tile. The package keeps plans by problem: a scale off in the 40th bit gives each its own."""
    from cuda_bench.contestants import Tessera

    class Forced(Tessera):
        kernel = "bwd_sm90"

        def options(self) -> dict:
            return {**super().options(), "scale": problem.head_dim**-0.5 * (1 + number * 2.0**-40)}

        def backward(self):
            os.environ[FORCED] = tile.text
            call, results = super().backward()

            def forced():
                os.environ[FORCED] = tile.text
                return call()

            return forced, results

    return Forced(problem, inputs, "backward")


def warm(job: tuple[Row, Tile]) -> None:
    """In a process of its own: compiles one tile into the library's cache."""
    import torch

    from cuda_bench.problem import Inputs

    row, tile = job
    problem = make_problem(row, LENGTHS[0], False)
    make_forced(problem, Inputs.of(problem, True), tile, 0).backward()[0]()
    torch.cuda.synchronize()


def measure_cell(row: Row, length: int, causal: bool, tiles: list[Tile], steadiness) -> dict:
    """TFLOP/s of each right tile, and of cuDNN."""
    import torch

    from cuda_bench import timing
    from cuda_bench.contestants import Cudnn, NotOffered
    from cuda_bench.exact import Exact
    from cuda_bench.problem import Inputs

    problem = make_problem(row, length, causal)
    inputs = Inputs.of(problem, True)
    exact = Exact(problem, inputs, "backward")
    calls, bound = {}, ERROR_BOUND * torch.finfo(torch.bfloat16).eps
    try:
        call, results = Cudnn(problem, inputs, "backward").backward()
        bound = ERROR_BOUND * exact.error(results(call()))
        calls["cudnn"] = call
    except (NotOffered, RuntimeError) as error:
        print(f"{row.name} {length}: cudnn: {str(error).splitlines()[0]}")
    for number, tile in enumerate(tiles):
        try:
            call, results = make_forced(problem, inputs, tile, number).backward()
            error = exact.error(results(call()))
        except (RuntimeError, ValueError) as failure:  # what the library says of it
            print(f"{row.name} {length}: {tile.text} dropped: {str(failure).splitlines()[0]}")
            continue
        if error <= bound:
            calls[tile] = call
        else:
            print(f"{row.name} {length}: {tile.text} dropped: relative RMS error {error:.1e}, at most {bound:.1e}")
    timed = timing.contest(calls, steadiness)
    torch.cuda.empty_cache()
    return {name: problem.flops("backward") / result.seconds * 1e-12 for name, result in timed.items()}


def measure(kept: dict[Row, list[Tile]], options: argparse.Namespace, started: float) -> dict[Row, dict]:
    """{row: {(causal, length): rates}}; only whole rows."""
    from cuda_bench.timing import Steadiness

    measured = {}
    for row, tiles in kept.items():
        cells = {}
        for causal in row.masks:
            for length in LENGTHS:
                if time.monotonic() - started > options.seconds:
                    print(f"{row.name}: out of time, its row stays as it is")
                    break
                cells[causal, length] = measure_cell(row, length, causal, tiles, Steadiness(options.lead_ms, options.measure_ms, 2))
                texts = [f"{getattr(name, 'text', name)} {rate:.0f}" for name, rate in cells[causal, length].items()]
                print(f"{row.name} {'causal' if causal else 'full'} {length}: {'; '.join(texts)}", flush=True)
        if len(cells) == len(row.masks) * len(LENGTHS):
            measured[row] = cells
    return measured


# ---- the table ----


def winner(cells: dict) -> Tile:
    """The best geometric mean of those that are right everywhere."""
    right = set.intersection(*({name for name in cell if isinstance(name, Tile)} for cell in cells.values()))
    return max(sorted(right, key=lambda tile: tile.values), key=lambda tile: sum(math.log(cell[tile]) for cell in cells.values()))


def lines_of(row: Row, cells: dict) -> list[str]:
    tile, texts = winner(cells), []
    for causal in row.masks:
        rates = []
        for length in LENGTHS:
            rate, peer = cells[causal, length][tile], cells[causal, length].get("cudnn")
            rates.append(f"{length}: {rate:.0f}" + (f" ({rate / peer:.2f})" if peer else ""))
        texts.append(f"{'causal' if causal else 'full'} {', '.join(rates)}")
    return [f"// {'; '.join(texts)}", f"{{{row.head_dim}, {str(row.options).lower()}, {tile.cpp}}},"]


def read_rows(text: str) -> dict[Row, list[str]]:
    """Of each row its lines, comments above it; the heading ends with an empty line."""
    blocks: dict[Row, list[str]] = {}
    comments: list[str] = []
    for line in text.partition("\n\n")[2].splitlines():
        if not line.startswith("{"):
            comments.append(line)
            continue
        head_dim, options = (part.strip() for part in line[1:].split(",")[:2])
        blocks[Row(int(head_dim), options == "true")] = [*comments, line]
        comments = []
    return blocks


def table_text(before: str, measured: dict[Row, dict], gpu: str) -> str:
    """The file: rows that were measured anew, the others as they were."""
    heading = before.partition("\n\n")[0]
    blocks = read_rows(before)
    for row, cells in measured.items():
        blocks[row] = [f"// {gpu}", *lines_of(row, cells)]
    return "\n".join([heading, "", *(line for block in blocks.values() for line in block)]) + "\n"


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", nargs="+", type=int, default=sorted({row.head_dim for row in tiles_of("rows")}))
    parser.add_argument("--dry-run", action="store_true", help="stop before the GPU is needed")
    parser.add_argument("--lead-ms", type=float, default=100)
    parser.add_argument("--measure-ms", type=float, default=100)
    parser.add_argument("--seconds", type=float, default=300, help="start no measurement after so many")
    parser.add_argument("--output", metavar="FILE", help="instead of the table in the sources")
    return parser.parse_args(arguments)


def search(options: argparse.Namespace) -> int:
    started = time.monotonic()
    rows = [row for row in tiles_of("rows") if row.head_dim in options.head_dims]
    kept = compilable(rows)  # processes are forked to compile, so before the GPU is touched
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    if options.dry_run:
        return 0

    from cuda_bench import machine

    facts = machine.facts()
    print(machine.heading(facts), flush=True)
    jobs = [(row, tile) for row, tiles in kept.items() for tile in tiles]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=spawn) as pool:
        failures = [future.exception() for future in [pool.submit(warm, job) for job in jobs]]
    for (row, tile), failure in zip(jobs, failures):
        if failure:
            print(f"{row.name} {tile.text}: {failure}")
    print(f"in the library's cache after {time.monotonic() - started:.0f} s", flush=True)
    measured = measure(kept, options, started)
    gpu = f"{facts['gpu']}, driver {facts['driver']}, cuDNN {facts['cudnn']}, commit {facts['commit']}, {facts['date']}"
    text = table_text(TABLE.read_text(encoding="utf-8"), measured, gpu)
    target = Path(options.output) if options.output else TABLE
    target.write_text(text, encoding="utf-8")
    print(f"{target}:\n{text}{time.monotonic() - started:.0f} s in all")
    return 1 if len(measured) < len(rows) else 0


if __name__ == "__main__":
    sys.exit(search(parse()))
