"""Forward by float8_e4m3 q, k and v beside bfloat16: TFLOP/s and errors on a Hopper GPU.

    python bench/cuda_fp8.py [--head-dims 64 128 256] [--lengths 512 1024 2048 4096 8192 16384] [--json FILE]
    python bench/cuda_fp8.py --tiles 128,2,4,3,3,2,64 128,2,4,3,3,2,128 --head-dims 128    # tiles to compare

16384 tokens, 2048 / D heads, full and causal, in the steady state: Tessera by e4m3 with a scale of each head and of 128
tokens, Tessera by bfloat16, and PyTorch's cuDNN backend by bfloat16. --tiles forces each of these tiles in turn
(TESSERA_FWD_SM90_FP8_TILE) in place of the table's. Errors are relative RMS of o: of bfloat16 against float64 on its
inputs; of e4m3 against float64 on what the codes stand for (`kernel`), on the bfloat16 inputs (`in all`), and of
quantisation alone. Exit 1 if an error is not finite.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys

TOKENS, WIDTH = 16384, 2048
SCHEMES = ("head", "block")
FORCED = "TESSERA_FWD_SM90_FP8_TILE"


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--tiles", nargs="+", default=[], metavar="TILE")
    parser.add_argument("--lead-ms", type=float, default=200)
    parser.add_argument("--measure-ms", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


def stand_for(quantized):
    """What codes and scales stand for, in float64."""
    codes, scale = quantized.codes.double(), quantized.scale.double()
    if scale.dim() == 3:
        scale = scale.repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes * scale[..., None]


def contestants(problem, inputs, scheme: str, tiles: list[str]) -> tuple[dict, tuple]:
    """{name: call of e4m3}, and q, k and v quantised. The package keeps plans by problem: a scale that differs in the
    40th bit gives each tile its own plan."""
    import torch

    import tessera
    import tessera.torch

    quantized = tuple(tessera.quantize(x, "float8_e4m3", scheme=scheme) for x in (inputs.q, inputs.k, inputs.v))
    scales = dict(zip(("q_descale", "k_descale", "v_descale"), (x.scale for x in quantized)))
    calls = {}
    for number, tile in enumerate(tiles or [""]):

        def call(number=number, tile=tile):
            if tile:
                os.environ[FORCED] = tile
            with torch.no_grad():
                return tessera.torch.attention(
                    *(x.codes for x in quantized),
                    causal=problem.causal,
                    scale=problem.head_dim**-0.5 * (1 + number * 2.0**-40),
                    **scales,
                )

        calls[f"e4m3 {scheme} {tile}".strip()] = call
    return calls, quantized


def measure(head_dim: int, length: int, causal: bool, options: argparse.Namespace) -> dict:
    """One cell: {contestant: {"tflops", "error" or "kernel", "in all", "quantisation"}}."""
    from cuda_bench import timing
    from cuda_bench.contestants import enter
    from cuda_bench.exact import Exact
    from cuda_bench.problem import Inputs, Problem

    heads, batch = WIDTH // head_dim, max(1, TOKENS // length)
    problem = Problem("fp8", batch, length, length, heads, heads, head_dim, head_dim, causal)
    inputs = Inputs.of(problem, False)
    exact = Exact(problem, inputs, "forward")
    calls, cells = {}, {}
    for contestant in enter(problem, inputs, "forward", ["tessera", "cudnn"])[0]:
        name = f"bf16 {contestant.name}"
        calls[name], results = contestant.call()
        cells[name] = {"error": exact.error(results(calls[name]()))}
    for scheme in SCHEMES:
        # Tiles of other numbers of keys have no scale for each 128.
        tiles = [tile for tile in options.tiles if scheme != "block" or 128 % int(tile.split(",")[0]) == 0]
        if options.tiles and not tiles:
            continue
        fp8, quantized = contestants(problem, inputs, scheme, tiles)
        meant = copy.copy(inputs)
        meant.q, meant.k, meant.v = map(stand_for, quantized)
        of_codes = Exact(problem, meant, "forward")
        quantisation = exact.error_of(of_codes)
        for name, call in fp8.items():
            o = call()
            cells[name] = {"kernel": of_codes.error({"o": o}), "in all": exact.error({"o": o}),
                           "quantisation": quantisation}  # fmt: skip
        calls.update(fp8)
    timed = timing.contest(calls, timing.Steadiness(options.lead_ms, options.measure_ms, options.rounds))
    for name, cell in cells.items():
        if name in timed:
            cell["tflops"] = problem.flops("forward") * 1e-12 / timed[name].seconds
    return {"case": "fp8", "direction": "forward", "head_dim": head_dim, "mask": problem.mask, "length": length,
            "cells": cells}  # fmt: skip


def line(cell: dict) -> str:
    texts = []
    for name, got in cell["cells"].items():
        errors = ", ".join(f"{what} {got[what]:.2e}" for what in got if what != "tflops")
        texts.append(f"{name} {got.get('tflops', math.nan):.0f} ({errors})")
    return f"D {cell['head_dim']} {cell['mask']} {cell['length']}: " + "; ".join(texts)


def main() -> int:
    options = parse()
    from cuda_bench import machine

    machine.need_gpu()
    facts = machine.facts()
    print(machine.heading(facts), flush=True)
    cells = []
    for head_dim in options.head_dims:
        for causal in (False, True):
            for length in options.lengths:
                cells.append(measure(head_dim, length, causal, options))
                print(line(cells[-1]), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": facts, "cells": cells}, file, indent=1)
    numbers = [x for cell in cells for got in cell["cells"].values() for x in got.values()]
    return 0 if all(map(math.isfinite, numbers)) else 1


if __name__ == "__main__":
    sys.exit(main())
