"""The cost if the stale max fails in every tile of keys (docs/reference/kernels/fwd_sm90.md).

    python bench/cuda_fallback.py [--head-dims 64 128 256] [--length 4096] [--dtype bfloat16] [--json FILE]

Beside normal inputs: inputs whose scores rise by a factor of 2 from each key to the next, or from each key to the one
before. A kernel processes its tiles in one of these orders; in that order each tile passes all earlier ones by more
than the bound, so that the fallback runs in each, and in the other order it never runs. cuDNN has no such path: its
changes show the effect of the inputs alone (power). Errors are relative RMS errors against float64.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

RISE_LOG2 = 1.0  # from key to key: 64 keys pass the bound of bfloat16, 2^40, and that of float16, 2^14
QUERY = 16.0
TOKENS, WIDTH = 16384, 2048
CONTESTANTS = ("tessera", "cudnn")


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--lead-ms", type=float, default=200)
    parser.add_argument("--measure-ms", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


def climb(inputs, head_dim: int, rising: bool):
    """Inputs in which two columns of q and k encode a key's position: two, since one would round it to 8 bits."""
    import copy

    import torch

    climbing = copy.copy(inputs)
    climbing.q, climbing.k = inputs.q.clone(), inputs.k.clone()
    keys = inputs.k.shape[1]
    place = torch.arange(keys, device=inputs.k.device, dtype=torch.float64)
    if not rising:
        place = place.flip(0)
    # s scale log2(e) = RISE_LOG2 place
    wanted = place * (RISE_LOG2 * math.sqrt(head_dim) * math.log(2) / QUERY)
    coarse = wanted.to(inputs.k.dtype)
    fine = (wanted - coarse.double()).to(inputs.k.dtype)
    climbing.q[..., :2] = QUERY
    climbing.k[..., 0] = coarse[None, :, None]
    climbing.k[..., 1] = fine[None, :, None]
    return climbing


def measure(head_dim: int, causal: bool, options: argparse.Namespace) -> dict:
    """One cell: {inputs: {contestant: (TFLOP/s, error)}}."""
    import torch

    from cuda_bench import timing
    from cuda_bench.contestants import enter
    from cuda_bench.exact import Exact
    from cuda_bench.problem import Inputs, Problem

    heads, batch = WIDTH // head_dim, max(1, TOKENS // options.length)
    problem = Problem("fallback", batch, options.length, options.length, heads, heads, head_dim, head_dim, causal,
                      dtype=options.dtype)  # fmt: skip
    normal = Inputs.of(problem, False)
    kinds = {"normal": normal, "rising": climb(normal, head_dim, True), "falling": climb(normal, head_dim, False)}
    calls, errors = {}, {}
    for kind, inputs in kinds.items():
        exact = Exact(problem, inputs, "forward")
        for contestant in enter(problem, inputs, "forward", list(CONTESTANTS))[0]:
            call, results = contestant.call()
            try:
                errors[kind, contestant.name] = exact.error(results(call()))
            except RuntimeError as error:
                print(f"{contestant.name}: {str(error).splitlines()[0]}")
                continue
            calls[kind, contestant.name] = call
        del exact
        torch.cuda.empty_cache()
    timed = timing.contest(calls, timing.Steadiness(options.lead_ms, options.measure_ms, options.rounds))
    flops = problem.flops("forward")
    return {
        "head_dim": head_dim, "mask": problem.mask, "length": options.length,
        "cells": {kind: {name: (flops * 1e-12 / timed[kind, name].seconds, errors[kind, name])
                         for name in CONTESTANTS if (kind, name) in timed} for kind in kinds},
    }  # fmt: skip


def line(cell: dict) -> str:
    texts = []
    for kind, rates in cell["cells"].items():
        for name, (rate, error) in rates.items():
            normal = cell["cells"]["normal"][name][0]
            texts.append(f"{kind} {name} {rate:.0f} ({rate / normal:.2f}; {error:.1e})")
    return f"D {cell['head_dim']} {cell['mask']} {cell['length']}: " + ", ".join(texts)


def main() -> int:
    options = parse()
    from cuda_bench import machine

    machine.need_gpu()
    facts = machine.facts()
    print(machine.heading(facts))
    print("TFLOP/s (of normal inputs'; error)", flush=True)
    cells = []
    for head_dim in options.head_dims:
        for causal in (False, True):
            cells.append(measure(head_dim, causal, options))
            print(line(cells[-1]), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": facts, "cells": cells}, file, indent=1)
    errors = [error for cell in cells for rates in cell["cells"].values() for _, error in rates.values()]
    return 0 if all(math.isfinite(error) for error in errors) else 1


if __name__ == "__main__":
    sys.exit(main())
