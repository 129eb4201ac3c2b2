"""Score programs on one GPU: Tessera with a program, beside the nearest built-in options and FlexAttention with that
function.

    python bench/cuda_programs.py [--csv FILE] [--lengths 4096 16384] [--head-dims 64 128] [--programs NAME ...]
                                  [--directions forward backward decode deterministic lists] [--no-flex]
                                  [--processes 14] [--prepare-seconds 250] [--seconds 400]

bfloat16, batch 1, 16 heads. deterministic: backward. lists: of one head, the kernels alone that list the blocks which a
mask shows, which may take 50 ms (--lengths 1048576 --programs documents "dilated window"). FlexAttention is compiled by
torch.compile; its results are compared with Tessera's before it is timed (relative RMS error, at most 1 %). Cells are
prepared by --processes at once, for at most --prepare-seconds, then timed one by one, up to --seconds; what has no
result then is counted. For each cell: the program's milliseconds, and the ratios of FlexAttention's time (x) and of the
program's to the built-in's (/). The last lines say which cells miss their bounds.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import os
import sys
from typing import Any, Callable, NamedTuple, Optional

import kernel_times
import torch
from cuda_bench import machine, taking_turns, timing
from score_programs import Call, Calls, Program, difference, programs

MOST_DIFFERENCE = 0.01
HEADS = 16
DIRECTIONS = ("forward", "backward", "decode", "deterministic", "lists")
MOST_MS_OF_LISTS = 50


class Cell(NamedTuple):
    direction: str
    program: str
    length: int
    head_dim: int
    with_flex: bool

    def is_measured(self) -> bool:
        if self.program == "dense bias":
            return self.direction == "forward" and self.length <= 4096
        if "gradient" in self.program:
            return self.direction in ("backward", "deterministic")
        return self.program != "temperature" or self.direction not in ("backward", "deterministic")


def compiled_flex(cell: Cell, program: Program, lock: Any) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = None
    if program.flex_mask is not None:
        with lock:
            block_mask = create_block_mask(program.flex_mask, None, None, cell.length, cell.length, device="cuda")
            torch.cuda.empty_cache()
    call = functools.partial(flex_attention, score_mod=program.flex_score, block_mask=block_mask)
    return torch.compile(call, dynamic=False)


def calls_of(cell: Cell, program: Program, flex: Optional[Callable]) -> Calls:
    heads = 1 if cell.direction == "lists" else HEADS
    return Calls(program, Call(cell.direction, cell.length, heads, cell.head_dim, torch.bfloat16, "cuda"), flex)


def ms_of_lists(call: Callable) -> float:
    times = kernel_times.kernels(call)
    return sum(times[name][1] for name in ("tessera_program_bounds", "tessera_program_lists") if name in times) / 1e3


def prepare(cell: Cell, lock: Any) -> Callable[[], dict]:
    torch._dynamo.config.recompile_limit = 1000
    program = programs(cell.length, HEADS, "cuda")[cell.program]()
    has_function = program.flex_score is not None or program.flex_mask is not None
    flex = compiled_flex(cell, program, lock) if cell.with_flex and has_function else None
    if cell.direction == "lists":
        return lambda: {"program_ms": ms_of_lists(calls_of(cell, program, None).programmed())}
    calls = calls_of(cell, program, flex).all()
    made = {name: call() for name, call in calls.items() if name != "flex"}
    result = {}
    if flex is not None:
        try:
            made["flex"] = calls["flex"]()
        except Exception as error:  # FlexAttention's kernels cannot do every cell
            result["flex_error"], flex = str(error).splitlines()[0][:120], None
    if flex is not None:
        result["difference"] = difference(made["program"], made["flex"], cell.direction)
    del calls, made
    torch.cuda.empty_cache()

    def measure() -> dict:
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # FlexAttention's backward pass can be captured there
            timed = timing.contest(calls_of(cell, program, flex).all(), timing.Steadiness(30, 60, 1))
        result.update({f"{name}_ms": one.seconds * 1e3 for name, one in timed.items()})
        torch.cuda.empty_cache()
        return result

    return measure


def bounds(cell: Cell) -> dict[str, float]:
    """The least of FlexAttention's time and the most of the program's, beside the program's and the built-in's."""
    if cell.program == "dense bias":
        return {"flex": 1.1}
    if cell.direction == "deterministic":
        return {"builtin": float("inf")}
    if cell.direction == "backward":
        return {"flex": 1.25 if cell.length < 16384 else 1.6, "builtin": 1.1}
    return {"flex": 1.5, "builtin": 1.1}


def missed(cell: Cell, line: dict) -> list[str]:
    if "error" in line:
        return [line["error"]]
    found = []
    if line.get("difference", 0) > MOST_DIFFERENCE:
        found.append(f"differs by {line['difference']:.4f}")
    if cell.direction == "lists":
        return [f"{line['program_ms']:.0f} ms > {MOST_MS_OF_LISTS}"] if line["program_ms"] > MOST_MS_OF_LISTS else []
    of_cell = bounds(cell)
    if "flex_ms" in line and line["flex_ms"] / line["program_ms"] < of_cell["flex"]:
        found.append(f"x {line['flex_ms'] / line['program_ms']:.2f} < {of_cell['flex']}")
    if "builtin_ms" in line and line["program_ms"] / line["builtin_ms"] > of_cell["builtin"]:
        found.append(f"/ {line['program_ms'] / line['builtin_ms']:.2f} > {of_cell['builtin']}")
    return found


def text_of(line: Optional[dict]) -> str:
    if line is None or "program_ms" not in line:
        return f"{'-' if line is None else 'error':>24}"
    flex = f"x{line['flex_ms'] / line['program_ms']:5.2f}" if "flex_ms" in line else ""
    flex = "x none" if "flex_error" in line else flex
    builtin = f"/{line['program_ms'] / line['builtin_ms']:5.2f}" if "builtin_ms" in line else ""
    return f"{line['program_ms']:9.3f} {flex:6} {builtin:6} "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS[:3], choices=DIRECTIONS)
    parser.add_argument("--programs", nargs="+")
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--prepare-seconds", type=float, default=250)
    parser.add_argument("--processes", type=int, default=14)
    options = parser.parse_args()
    machine.need_gpu()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes are enough
    names = options.programs or list(programs(16, HEADS, "cuda"))
    kinds = list(itertools.product(options.directions, options.lengths, names))
    drawn = [
        Cell(direction, name, n, d, not options.no_flex and direction in ("forward", "backward"))
        for direction, n, name in kinds
        for d in options.head_dims
    ]
    # What is not prepared in time is of the last head dimension.
    cells = sorted((c for c in drawn if c.is_measured()), key=lambda c: (-c.head_dim, DIRECTIONS.index(c.direction)))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; program ms, x FlexAttention's, / built-in's")
    lines: dict[Cell, dict] = {}
    for number, line in taking_turns.measure(
        prepare, cells, options.processes, options.prepare_seconds, options.seconds
    ):
        cell = cells[number]
        lines[cell] = line
        print(f"{cell.direction:8} {cell.length:6} {cell.program:25} D {cell.head_dim:3}{text_of(line)}", flush=True)
    print(f"{'':41}" + "".join(f"{'D ' + str(d):>12}{'':12}" for d in options.head_dims))
    for direction, n, name in kinds:
        of_kind = [cell for cell in cells if (cell.direction, cell.length, cell.program) == (direction, n, name)]
        if any(cell in lines for cell in of_kind):
            print(f"{direction:8} {n:6} {name:25}" + "".join(text_of(lines.get(cell)) for cell in of_kind))
    failed = {cell: missed(cell, line) for cell, line in lines.items() if missed(cell, line)}
    for cell, why in failed.items():
        print(f"{cell.direction} {cell.program}, {cell.length}, D {cell.head_dim}: {', '.join(why)}")
    print(f"{len(lines) - len(failed)} of {len(cells)} cells hold, {len(cells) - len(lines)} not measured")
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            columns = ["program_ms", "builtin_ms", "flex_ms", "difference", "flex_error", "error"]
            writer = csv.DictWriter(file, [*Cell._fields[:4], *columns])
            writer.writeheader()
            for cell, line in lines.items():
                writer.writerow({**dict(list(cell._asdict().items())[:4]), **line})
    return 1 if failed or len(lines) < len(cells) else 0


if __name__ == "__main__":
    sys.exit(main())
