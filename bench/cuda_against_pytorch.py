"""Tessera beside PyTorch's flash (FA2) and cuDNN backends and FlashAttention-4 on a GPU: one run, the steady state,
results checked.

    python bench/cuda_against_pytorch.py [--cases grid beyond pages options decode] [--direction forward] [--json FILE]
    python bench/cuda_against_pytorch.py --contestants sm80 flash       # the kernels of every GPU against FA2
    python bench/cuda_against_pytorch.py --contestants tessera cudnn    # the best kernel against cuDNN
    python bench/cuda_against_pytorch.py --contestants tessera flash4 cudnn   # with the package flash-attn-4 installed
    python bench/cuda_against_pytorch.py --lead-ms 30 --measure-ms 50 --rounds 1     # a quick look, not for reports
    python bench/cuda_against_pytorch.py --table FILE ...               # the contents of such files, as Markdown

grid: D 64, 128, 256, full and causal, 512 .. 16384 tokens a sequence, 16384 tokens and 2048 / D heads in all. beyond:
other head sizes, GQA, windows, packed sequences, deterministic gradients. pages: keys and values in pages. options:
softcap, ALiBi, dropout, a bias, a mask; these also against PyTorch's memory-efficient backend. decode: one query token
a sequence, microseconds and TB/s of keys and values read, large batches also in pages. FLOPs: 4 B H Sq Sk D, halved
when causal, times 2.5 backward. A cell takes 0.8 s a contestant: the whole grid about five minutes, one direction
against one peer about one.

"sm80" are the mma.sync kernels, requested by name; where a plan chooses them anyway, they are measured once, as
Tessera. "sm90" are Hopper's backward and decoding kernels, requested likewise in the cells that they support.

Before it is timed, each result is compared with float64 on a few heads; Tessera's error may be at most twice that of
the worst peer. Exit status 1: it was larger somewhere, not finite, or a call failed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time

CASES = ("grid", "beyond", "pages", "options", "decode")
CONTESTANTS = ("tessera", "sm80", "sm90", "flash", "flash4", "cudnn", "efficient")
OURS, PEERS = CONTESTANTS[:3], CONTESTANTS[3:]
OFFERED = ("tessera", "sm80")  # in every cell


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["grid"])
    parser.add_argument("--direction", choices=("forward", "backward", "both"), default="both")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256], help="of the grid")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384],
                        help="of the grid")  # fmt: skip
    parser.add_argument("--lead-ms", type=float, default=200, help="each contestant runs so long before it is timed")
    parser.add_argument("--measure-ms", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--filter", default="", help="only cells whose name contains this")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after so many seconds")
    parser.add_argument("--no-check", action="store_true", help="hold nothing against float64")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file, too, after every cell")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="measure nothing: print these results as Markdown")
    options = parser.parse_args(arguments)
    for name in ("lead_ms", "measure_ms"):
        if getattr(options, name) < 0:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)}, accepted 0 or more")
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds}, accepted 1 or more")
    return options


def problems_of(case: str, options: argparse.Namespace):
    """(problem, direction) of every cell."""
    from cuda_bench import problem

    if case == "grid":
        problems = problem.grid(options.head_dims, options.lengths, options.dtype)
    else:
        problems = getattr(problem, case)(options.dtype)
    directions = ("forward", "backward") if options.direction == "both" else (options.direction,)
    for direction in directions:
        for one in problems:
            # A deterministic forward pass is any, as is one of a bias with a gradient; training takes no single tokens,
            # or on pages.
            of_backward = one.deterministic or one.bias_gradient
            if (of_backward and direction == "forward") or (case in ("pages", "decode") and direction == "backward"):
                continue
            if options.filter in problem.short_name(one, direction):
                yield one, direction


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def measure(case: str, problem, direction: str, options: argparse.Namespace) -> dict:
    """One cell."""
    import torch

    from cuda_bench import timing
    from cuda_bench.contestants import Tessera, enter
    from cuda_bench.exact import Exact
    from cuda_bench.problem import Inputs, short_name

    cell = dict(case=case, direction=direction, dtype=problem.dtype, name=short_name(problem, direction),
                head_dim=problem.head_dim, length=problem.seqlen_k, mask=problem.mask,
                flops=problem.flops(direction), kv_bytes=problem.kv_bytes(), seconds={}, rounds={}, graph={}, errors={},
                how={}, wrong=False)  # fmt: skip
    inputs = Inputs.of(problem, direction == "backward")
    try:
        cell["kernel"] = Tessera(problem, inputs, direction).plan()["kernel"]
    except ValueError:
        cell["kernel"] = ""  # the call will say why
    names = set(options.contestants)
    if "sm80" in names and cell["kernel"].endswith("_sm80"):
        names.add("tessera")  # which is the same
    contestants, cell["reasons"] = enter(problem, inputs, direction, names)
    known = problem.option != "dropout"  # each library drops different weights
    exact = Exact(problem, inputs, direction) if known and not options.no_check else None
    calls = {}
    for contestant in contestants:
        try:
            call, results = contestant.call()
            returned = results(call())
            torch.cuda.synchronize()
            if exact is not None:
                cell["errors"][contestant.name] = exact.error(returned)
            calls[contestant.name] = call
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            torch.cuda.synchronize()  # raises if the context is lost
            cell["reasons"][contestant.name] = _first_line(error)
        if contestant.how:
            cell["how"][contestant.name] = contestant.how
    del exact
    if exact_failed(cell, torch.finfo(getattr(torch, problem.dtype)).eps):
        cell["wrong"] = True
    torch.cuda.empty_cache()
    steadiness = timing.Steadiness(options.lead_ms, options.measure_ms, options.rounds)
    for name, timed in (timing.contest(calls, steadiness) if calls else {}).items():
        cell["seconds"][name] = timed.seconds
        cell["rounds"][name] = timed.rounds
        cell["graph"][name] = timed.graph
    return cell


def exact_failed(cell: dict, epsilon: float) -> bool:
    """Not finite, or more than twice the worst peer's; without peers, more than the output's own rounding explains."""
    errors = cell["errors"]
    peers = [errors[name] for name in PEERS if math.isfinite(errors.get(name, math.nan))]
    most = 2 * max(peers) if peers else 2 * epsilon
    return any(not errors[name] <= most for name in OURS if name in errors)


def measure_ceilings(options: argparse.Namespace) -> dict:
    from cuda_bench import machine, timing

    calls, amounts = machine.ceiling_calls()
    steadiness = timing.Steadiness(options.lead_ms, options.measure_ms, options.rounds)
    ceilings = {name: amounts[name] / timed.seconds for name, timed in timing.contest(calls, steadiness).items()}
    return {**ceilings, "product_clocks": machine.clocks_under(calls["product"])}


def notes(cells: list[dict]) -> list[str]:
    """Measurements that differ from the usual ones."""
    lines = {}
    for cell in cells:
        for name, how in cell["how"].items():
            lines.setdefault(f"{name}: backward {how}", cell["name"])
        for name, graph in cell["graph"].items():
            if any(cell["graph"].values()) and not graph:
                lines.setdefault(f"{name}: cannot be captured, launched singly", cell["name"])
    return [f"{line} (first: {name})" for line, name in lines.items()]


def main() -> int:
    options = parse()
    from cuda_bench import tables

    if options.table:
        from cuda_bench.machine import heading

        results = []
        for name in options.table:
            with open(name, encoding="utf-8") as file:
                results.append(json.load(file))
        print(tables.markdown(results, "; ".join(dict.fromkeys(heading(result["machine"]) for result in results))))
        return 0

    import torch

    from cuda_bench import machine

    machine.need_gpu()
    started = time.monotonic()
    result = {"machine": machine.facts(), "ceilings": measure_ceilings(options), "cells": [],
              "lead_ms": options.lead_ms, "measure_ms": options.measure_ms, "rounds": options.rounds}  # fmt: skip
    torch.cuda.empty_cache()
    print(machine.heading(result["machine"]))
    ceilings = result["ceilings"]
    print(f"ceilings: product {ceilings['product']:.0f} TFLOP/s (at {ceilings['product_clocks']}), copy "
          f"{ceilings['copy']:.2f} TB/s (read + write); lead-in {options.lead_ms:g} ms, measured "
          f"{options.measure_ms:g} ms, {options.rounds} rounds")  # fmt: skip

    status = 0
    for case in options.cases:
        print(tables.heading_line(case), flush=True)
        for problem, direction in problems_of(case, options):
            if time.monotonic() - started > options.seconds:
                print(f"stopped after {options.seconds:g} s")
                break
            try:
                cell = measure(case, problem, direction, options)
            except torch.cuda.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                print(f"{problem.name}: {_first_line(error)}")
                status = 1
                continue
            result["cells"].append(cell)
            if cell["wrong"] or any(tables.seconds_of(cell, n) is None for n in OFFERED if n in options.contestants):
                status = 1
            print(tables.cell_line(cell), flush=True)
            if options.json:
                with open(options.json, "w", encoding="utf-8") as file:
                    json.dump(result, file, indent=1)
    cells = result["cells"]
    for line in notes(cells) + tables.ratio_tables(cells) + tables.summary(cells):
        print(line)
    print(f"{time.monotonic() - started:.0f} s in all")
    return status


if __name__ == "__main__":
    sys.exit(main())
