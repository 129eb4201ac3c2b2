#!/usr/bin/env python3
"""Finds fwd_sm90's tiles for the GPU of this machine and writes src/cuda/families/fwd_sm90_tiles.inc, in one run of
less than nine minutes.

    scripts/search_fwd_sm90.py [--head-dims 64 128 192,128] [--areas full]    on a GPU of compute capability 9.0
    scripts/search_fwd_sm90.py --dry-run                          no GPU: tiles that fit, predictions, ptxas's report

For each pair of head sizes, full, causal, with a window (whose tiles also serve packed batches) and with a bias
(standing for any option), it enumerates the tiles that fit shared memory and registers, predicts their speed by a small
model (fwd_sm90_model.py), compiles the most promising by NVRTC and drops those whose wgmma ptxas serialises or that
spill, screens the others on the GPU, then measures the best of each length against each other and cuDNN in the steady
state (bench/cuda_bench/timing.py). A wrong result also drops a tile. Rows that are not measured are unchanged. A pair
of head sizes takes 75 to 90 seconds.

Needs this tree's tessera_tiles, the package tessera with its library (PYTHONPATH=$(scripts/gpu_python.sh) builds both),
PyTorch and NVRTC. The dry run needs tessera_tiles, and uses NVRTC if present (TESSERA_NVRTC, or pip's
nvidia-cuda-nvrtc).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "bench")]
import fwd_sm90_model as model  # noqa: E402
import fwd_sm90_ptxas as ptxas  # noqa: E402
import tile_search  # noqa: E402
from fwd_sm90_model import Shape, Tile  # noqa: E402

TABLE = ROOT / "src/cuda/families/fwd_sm90_tiles.inc"
FORCED = "TESSERA_FWD_SM90_TILE"  # src/cuda/families/fwd_sm90_tiles.hpp
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))  # in the order of the table
SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)
# With a window: the keys that a query sees.
LENGTHS = {"full": SEQUENCES, "causal": SEQUENCES, "window": (256, 1024, 4096), "options": (512, 1024, 4096)}
TOKENS = 16384
MOST_SPILL_BYTES = {"options": 160}  # the limit of cuda_compile_test; otherwise none
COMPILED = 10  # tiles per shape
FINALISTS = 2  # per length
KEEP_WITHIN = 0.03  # the difference between two measurements of one tile; a row serves a length if it loses no more
ERROR_BOUND = 2.0  # times cuDNN's


def parse_dims(text: str) -> tuple[int, int]:
    dims = tuple(int(part) for part in text.split(","))
    return dims if len(dims) == 2 else (dims[0], dims[0])


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", nargs="+", type=parse_dims, default=list(HEAD_DIMS), metavar="D[,DV]")
    parser.add_argument("--areas", nargs="+", choices=model.AREAS, default=list(model.AREAS))
    parser.add_argument("--quick", action="store_true", help="half the lengths, short runs; a table by --output only")
    parser.add_argument("--dry-run", action="store_true", help="stop before the GPU is needed")
    parser.add_argument("--seconds", type=float, default=520, help="start no measurement after so many")
    parser.add_argument("--multiprocessors", type=int, default=132, help="that the model spreads work tiles over")
    parser.add_argument("--output", metavar="FILE", help="instead of the table in the sources")
    parser.add_argument("--log", metavar="FILE", help="everything that was measured, as JSON")
    options = parser.parse_args(arguments)
    unknown = [dims for dims in options.head_dims if dims not in HEAD_DIMS]
    if unknown:
        parser.error(f"--head-dims: {unknown[0]}, accepted {', '.join(map(str, HEAD_DIMS))}")
    return options


# ---- compile ----


def lengths_of(shape: Shape, quick: bool) -> list[int]:
    return list(LENGTHS[shape.area][:: 2 if quick else 1])


def compilable(shapes: list[Shape], multiprocessors: int, quick: bool) -> dict[Shape, list[Tile]]:
    """The promising tiles, and those of the table, that ptxas compiles well. Prints its report on each."""
    table = table_tiles()
    predicted = {}
    for shape in shapes:
        lengths = lengths_of(shape, quick)
        predicted[shape] = model.best(shape, lengths, TOKENS, multiprocessors, COMPILED)
        chosen = [tile for tile, _ in predicted[shape]]
        alike = [row for other, rows in table.items() for row in rows if dims_of(other) == dims_of(shape)]
        for tile in dict.fromkeys(model.taken_by(shape, row) for row in alike):
            if tile not in chosen and model.fits(shape, tile):
                predicted[shape].append((tile, model.predict_rates(shape, tile, lengths, TOKENS, multiprocessors)))
    jobs = [(shape, tile) for shape, tiles in predicted.items() for tile, _ in tiles]
    reports = dict(zip(jobs, tile_search.compile_jobs(ptxas.compile_tile, jobs)))
    kept: dict[Shape, list[Tile]] = {shape: [] for shape in shapes}
    fields = ", ".join(model.tuned_fields())
    print(f"{'':16} {fields:50} KiB  accumulators  {'predicted TFLOP/s':>28}  registers, spilled bytes")
    for shape, tiles in predicted.items():
        for tile, rates in tiles:
            report = reports[shape, tile]
            reason = report.reason(MOST_SPILL_BYTES.get(shape.area, 0)) if report else ""
            if not reason:
                kept[shape].append(tile)
            print(f"{shape.name:16} {tile.text:50} {model.layout(shape, tile).smem_bytes >> 10:3} "
                  f"{model.accumulator_registers(shape, tile):13} {', '.join(f'{rate:.0f}' for rate in rates):>28}  "
              f"{report or ''} {reason}")  # fmt: skip
    return kept


# ---- measure ----


def make_problem(shape: Shape, length: int):
    from cuda_bench.problem import Problem

    batch, rows = shape.batch(length, TOKENS)
    window = length - 1 if shape.area == "window" else -1
    return Problem(shape.name, batch, rows, rows, shape.heads, shape.heads, shape.head_dim, shape.head_dim_v,
                   shape.area in ("causal", "window"), window=window,
                   option="bias" if shape.area == "options" else "")  # fmt: skip


def make_forced(problem, inputs, tile: Tile, number: int):
    return tile_search.make_forced("fwd_sm90", FORCED, "forward", problem, inputs, tile, number)


def warm(job: tuple[Shape, Tile]) -> None:
    """In a separate process: compiles one tile into the library's cache."""
    import torch

    from cuda_bench.problem import Inputs

    shape, tile = job
    problem = make_problem(shape, LENGTHS[shape.area][0])
    tile_search.contestant_call(make_forced(problem, Inputs.of(problem, False), tile, 0))[0]()
    torch.cuda.synchronize()


class Cell:
    """One shape and length: its inputs, and the timed calls."""

    def __init__(self, shape: Shape, length: int, tiles: list[Tile]):
        from cuda_bench.problem import Inputs

        self.problem = make_problem(shape, length)
        inputs, contestants = Inputs.of(self.problem, False), {}

        def forced(tile: Tile, number: int):
            contestants[tile] = make_forced(self.problem, inputs, tile, number)
            return contestants[tile]

        self.peer, self.calls, self.dropped = tile_search.right_calls(
            self.problem, inputs, "forward", ERROR_BOUND, forced, tiles
        )
        for tile in list(self.calls):
            block_n = contestants[tile].plan()["block_n"]
            if block_n != tile.block_n:
                self.dropped[tile] = f"the library runs {block_n} keys a tile: it is not of this tree"
                del self.calls[tile]

    def rates(self, tiles: list[Tile], peer: bool, steadiness) -> dict:
        """TFLOP/s."""
        calls = {tile: self.calls[tile] for tile in tiles} | (self.peer if peer else {})
        return tile_search.rates(self.problem, "forward", calls, steadiness)


def measure(kept: dict[Shape, list[Tile]], options: argparse.Namespace, started: float) -> dict:
    """{shape: {length: rates of the finalists and cuDNN}}; only complete shapes."""
    import torch

    from cuda_bench.timing import Steadiness

    screening = Steadiness(20, 30, 1)
    final = Steadiness(60, 80, 1) if options.quick else Steadiness(200, 200, 2)
    measured = {}
    for shape, tiles in kept.items():
        cells, lengths = {}, lengths_of(shape, options.quick)
        for length in lengths:
            if time.monotonic() - started > options.seconds:
                print(f"{shape.name}: out of time, its rows stay as they are")
                break
            cell = Cell(shape, length, tiles)
            tile_search.say_dropped(f"{shape.name} {length}", cell.dropped)
            tiles = [tile for tile in tiles if tile in cell.calls]
            if not tiles:
                break
            rough = cell.rates(tiles, False, screening)
            finalists = sorted(tiles, key=lambda tile: -rough[tile])[:FINALISTS]
            # Adds the tile of the next shorter length, so that a row may serve both.
            before = [winner(cells[length_before]) for length_before in list(cells)[-1:]]
            finalists += [tile for tile in before if tile in tiles and tile not in finalists]
            cells[length] = cell.rates(finalists, True, final)
            print(f"{shape.name} {length}: {tile_search.texts_of(cells[length])}", flush=True)
            torch.cuda.empty_cache()
        if len(cells) == len(lengths):
            measured[shape] = cells
    return measured


def winner(rates: dict) -> Tile:
    return max((name for name in rates if isinstance(name, Tile)), key=rates.__getitem__)


# ---- the table ----


def rows_of(shape: Shape, cells: dict[int, dict]) -> list[str]:
    """Longest first; each row has the tile that is within KEEP_WITHIN of the best down to the shortest length, or the
    fastest of these."""

    def run_of(tile: Tile, lengths: list[int]) -> list[int]:
        return list(
            itertools.takewhile(
                lambda length: cells[length].get(tile, 0.0) >= (1 - KEEP_WITHIN) * cells[length][winner(cells[length])],
                lengths,
            )
        )

    def worth(tile: Tile, run: list[int]) -> tuple[int, float]:
        return len(run), sum(math.log(cells[length][tile]) for length in run)

    runs: list[tuple[Tile, list[int]]] = []
    left = sorted(cells, reverse=True)
    while left:
        candidates = {name: run_of(name, left) for name in cells[left[0]] if isinstance(name, Tile)}
        runs.append(max(candidates.items(), key=lambda item: worth(*item)))
        left = left[len(runs[-1][1]) :]
    lines = []
    for number, (tile, lengths) in enumerate(runs):
        texts = []
        for length in sorted(lengths):
            texts.append(tile_search.length_text(length, cells[length][tile], cells[length].get("cudnn")))
        least = 0 if number == len(runs) - 1 else min(lengths)
        lines.append(f"// {', '.join(texts)}")
        values = ", ".join(map(str, tile.values))
        lines.append(f"{{{shape.head_dim}, {shape.head_dim_v}, Area::{model.AREAS[shape.area]}, {least}, {values}}},")
    return lines


def dims_of(shape: Shape) -> tuple[int, int]:
    return shape.head_dim, shape.head_dim_v


def read_rows(text: str) -> dict[Shape, list[str]]:
    """The rows of each shape, and the comments above them; the heading ends with an empty line."""
    areas = {f"Area::{name}": area for area, name in model.AREAS.items()}

    def shape_of(fields: list[str]) -> Shape:
        head_dim, head_dim_v, area = fields[:3]
        return Shape(int(head_dim), int(head_dim_v), areas[area])

    return tile_search.read_blocks(text, shape_of)


def table_tiles() -> dict[Shape, list[Tile]]:
    """The distinct tiles of each shape in the library."""
    areas = {name: area for area, name in model.AREAS.items()}
    tiles: dict[Shape, dict[Tile, None]] = {}
    for row in model.library()["rows"]:
        shape = Shape(row["head_dim"], row["head_dim_v"], areas[row["area"]])
        tiles.setdefault(shape, {})[Tile(tuple(row[name] for name in model.tuned_fields()))] = None
    return {shape: list(of_shape) for shape, of_shape in tiles.items()}


def table_text(before: str, measured: dict[Shape, dict], gpu: str) -> str:
    """The file's text: newly measured shapes, and the others unchanged."""
    blocks = read_rows(before) | {shape: [f"// {gpu}", *rows_of(shape, cells)] for shape, cells in measured.items()}
    heading = [
        "// Rows of Sm90Tile, written by scripts/search_fwd_sm90.py: head_dim, head_dim_v, area, least rows;",
        f"// {', '.join(model.tuned_fields())}. Above a row its TFLOP/s by length,",
        "// under a window by the keys that a query sees, of options with a bias (ratio to cuDNN in the same run), "
        "bf16.",
        "// clang-format off",
        "",
    ]
    shapes = [Shape(*dims, area) for dims in HEAD_DIMS for area in model.AREAS]
    return "\n".join([*heading, *(line for shape in shapes for line in blocks.get(shape, []))]) + "\n"


def search(options: argparse.Namespace) -> int:
    started = time.monotonic()
    shapes = [Shape(*dims, area) for dims in options.head_dims for area in options.areas]
    # Compiling forks processes, which must happen before the GPU is used; another part of the table has other numbers
    # and tiles.
    kept = compilable(shapes, options.multiprocessors, options.quick)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    if options.dry_run:
        return 0

    import torch

    from cuda_bench import machine

    facts = machine.facts()
    print(machine.heading(facts), flush=True)
    jobs = [(shape, tile) for shape, tiles in kept.items() for tile in tiles]
    tile_search.fill_cache(warm, jobs, 8)
    print(f"in the library's cache after {time.monotonic() - started:.0f} s", flush=True)

    measured = measure(kept, options, started)
    gpu = tile_search.provenance(facts)
    text = table_text(TABLE.read_text(encoding="utf-8"), measured, gpu)
    target = Path(options.output) if options.output else None if options.quick else TABLE
    if target:
        target.write_text(text, encoding="utf-8")
    print(f"{target or 'not written'}:\n{text}{time.monotonic() - started:.0f} s in all")
    if options.log:
        rates = {
            shape.name: {length: {getattr(name, "text", name): rate for name, rate in cell.items()}
                         for length, cell in cells.items()}
            for shape, cells in measured.items()
        }  # fmt: skip
        Path(options.log).write_text(json.dumps({"machine": facts, "tflops": rates}, indent=1), encoding="utf-8")
    missing = [shape.name for shape in shapes if shape not in measured]
    if missing:
        print(f"not measured: {', '.join(missing)}")
    torch.cuda.synchronize()
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(search(parse()))
