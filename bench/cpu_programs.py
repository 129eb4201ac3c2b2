"""Score programs on the CPU: Tessera with a program, beside the nearest built-in options and FlexAttention with that
function.

    python bench/cpu_programs.py [--csv FILE] [--length 2048] [--head-dim 64] [--threads 2] [--programs NAME ...]
                                 [--directions forward backward] [--dtypes float32 bfloat16] [--no-flex]
                                 [--repetitions 15] [--processor-time]

Batch 1, 4 heads. FlexAttention is compiled by torch.compile (it has no backward pass on the CPU); its results are
compared with Tessera's before it is timed (relative RMS error, at most 1 %). The three alternate; the time of each is
the least of its calls, as other programs of the machine only add to it; with --processor-time it is the time of all
threads on processors, divided by their number, for a machine that others keep busy (there with OMP_WAIT_POLICY=PASSIVE,
as threads that wait would count). For each cell: the program's milliseconds, and
the ratios of FlexAttention's time (x) and of the program's to the built-in's (/). The last line says how many cells
miss their bounds: half of FlexAttention's time, 1.5 of the built-in's.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import sys
import time
from typing import Callable, Optional

import tessera
import torch
from score_programs import Call, Calls, Program, difference, programs

MOST_DIFFERENCE = 0.01
HEADS = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def seconds(call: Callable, options: argparse.Namespace) -> float:
    clock = time.process_time if options.processor_time else time.perf_counter
    start = clock()
    call()
    elapsed = clock() - start
    time.sleep(0.08 * elapsed)  # Linux stops a real-time process (chrt) after 95 % of each second
    return elapsed / options.threads if options.processor_time else elapsed


def least_ms(calls: dict[str, Callable], options: argparse.Namespace) -> dict[str, float]:
    repetitions = options.repetitions
    rounds = [{name: seconds(call, options) for name, call in calls.items()} for _ in range(1 + repetitions)]
    return {f"{name}_ms": 1e3 * min(one[name] for one in rounds[1:]) for name in calls}


def compiled_flex(program: Program, n: int) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    mask = None
    if program.flex_mask is not None:
        mask = create_block_mask(program.flex_mask, None, None, n, n, device="cpu")
    call = functools.partial(flex_attention, score_mod=program.flex_score, block_mask=mask)
    return torch.compile(call, dynamic=False)


def measure(program: Program, call: Call, options: argparse.Namespace) -> dict:
    has_function = program.flex_score is not None or program.flex_mask is not None
    with_flex = has_function and not options.no_flex and call.direction == "forward"
    flex: Optional[Callable] = compiled_flex(program, call.length) if with_flex else None
    calls = Calls(program, call, flex).all()
    result = {}
    if flex is not None:
        result["difference"] = difference(calls["program"](), calls["flex"](), call.direction)
    return {**result, **least_ms(calls, options)}


def missed(line: dict) -> list[str]:
    if "error" in line:
        return [line["error"]]
    found = []
    if line.get("difference", 0) > MOST_DIFFERENCE:
        found.append(f"differs by {line['difference']:.4f}")
    if line.get("flex_ms", float("inf")) < 2 * line["program_ms"]:
        found.append("x < 2")
    if line.get("builtin_ms", float("inf")) * 1.5 < line["program_ms"]:
        found.append("/ > 1.5")
    return found


def text_of(line: dict) -> str:
    text = f"{line['direction']:8} {line['dtype']:8} {line['program']:25}"
    if "program_ms" in line:
        text += f" {line['program_ms']:8.2f}"
        text += f"  x {line['flex_ms'] / line['program_ms']:5.2f}" if "flex_ms" in line else " " * 9
        text += f"  / {line['program_ms'] / line['builtin_ms']:5.2f}" if "builtin_ms" in line else " " * 9
    return text + "  " + ", ".join(missed(line))


def is_measured(direction: str, name: str) -> bool:
    return direction == "backward" or "gradient" not in name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"], choices=["forward", "backward"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--programs", nargs="+", default=list(programs(16, HEADS, "cpu")))
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = []
    print(f"Tessera {tessera.__version__}, torch {torch.__version__}, {options.threads} threads, length "
          f"{options.length}, D {options.head_dim}; program ms, x FlexAttention's, / built-in's")  # fmt: skip
    for direction, dtype, name in itertools.product(options.directions, options.dtypes, options.programs):
        if not is_measured(direction, name):
            continue
        call = Call(direction, options.length, HEADS, options.head_dim, DTYPES[dtype], "cpu")
        line = {"direction": direction, "dtype": dtype, "program": name}
        try:
            program = programs(options.length, HEADS, "cpu")[name]()
            line |= measure(program, call, options)
        except Exception as error:  # noqa: BLE001, the other cells are still of interest
            line["error"] = str(error).splitlines()[0][:200]
        lines.append(line)
        print(text_of(line), flush=True)
    failed = sum(bool(missed(line)) for line in lines)
    print(f"{len(lines) - failed} of {len(lines)} cells hold")
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            columns = ["program_ms", "builtin_ms", "flex_ms", "difference", "error"]
            writer = csv.DictWriter(file, ["direction", "dtype", "program", *columns])
            writer.writeheader()
            writer.writerows(lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
