"""tessera.jax on a GPU beside cuDNN and XLA (jax.nn.dot_product_attention), tokamax and Tessera through PyTorch.

    python bench/cuda_jax.py [--head-dims 64 128 256] [--lengths 2048 8192] [--json FILE]
    python bench/cuda_jax.py --platform cpu [--threads N]      # beside XLA on the CPU

bfloat16, 16384 tokens and 2048 / D heads in all, full and causal, forward, and forward with backward. On the CPU
bfloat16 and float32, 4096 tokens and 512 / D heads. A call is a jitted function; calls are dispatched one after another
for at least --measure-ms, and the last is waited for. Contestants alternate, in the opposite order every other round,
each after a lead-in; the median of the rounds is reported. Tessera through PyTorch runs in this process where PyTorch
has a GPU. XLA's attention, which keeps all scores, runs where they take at most --most-gib. "first" is the time of a
contestant's first call, with compilation.

Before they are timed, results are compared with Tessera's on a few heads (relative RMS difference at most 2 %). Exit
status 1: they differ more somewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs some, too

TOKENS, WIDTH = 16384, 2048
CPU_TOKENS, CPU_WIDTH = 4096, 512
MOST_DIFFERENCE = 0.02
DIRECTIONS = ("forward", "both")

Call = Callable[[], Any]


class Contestant:
    """`launch` starts one call and returns its results; `wait` waits for the last of them."""

    def __init__(self, launch: Call, wait: Callable[[Any], None], values: Callable[[Any], list]):
        self.launch, self.wait, self.values = launch, wait, values
        start = time.perf_counter()
        self.results = self.launch()
        self.wait(self.results)
        self.first_s = time.perf_counter() - start

    def seconds(self, least_s: float) -> float:
        """Of one call among as many as take `least_s`."""
        count, spent = 1, 0.0
        while True:
            start = time.perf_counter()
            for _ in range(count):
                last = self.launch()
            self.wait(last)
            spent = time.perf_counter() - start
            if spent >= 0.8 * least_s:
                return spent / count
            count = max(count + 1, math.ceil(1.1 * count * least_s / spent))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--head-dims", type=int, nargs="+", default=None, help="64 128 256; on the CPU 64 128")
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="2048 8192; on the CPU 2048 4096")
    parser.add_argument("--dtypes", nargs="+", default=None, help="bfloat16; on the CPU float32 too")
    parser.add_argument("--threads", type=int, default=0, help="of Tessera on the CPU; XLA takes the process's cores")
    parser.add_argument("--lead-ms", type=float, default=200)
    parser.add_argument("--measure-ms", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--most-gib", type=float, default=16, help="of scores, for XLA's attention")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after so many seconds")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    on_cpu = options.platform == "cpu"
    options.head_dims = options.head_dims or ([64, 128] if on_cpu else [64, 128, 256])
    options.lengths = options.lengths or ([2048, 4096] if on_cpu else [2048, 8192])
    options.dtypes = options.dtypes or (["bfloat16", "float32"] if on_cpu else ["bfloat16"])
    return options


def some(x: Any) -> Any:
    return x[:1, :, :2]


def jax_contestant(attend: Callable, arrays: tuple, both: bool) -> Contestant:
    """arrays: q, k, v, d_o."""
    import jax
    import numpy as np

    def forward(q, k, v, d_o):
        return (attend(q, k, v),)

    def forward_and_backward(q, k, v, d_o):
        o, pull = jax.vjp(attend, q, k, v)
        return (o, *pull(d_o))

    run = jax.jit(forward_and_backward if both else forward)
    values = lambda results: [np.asarray(some(x), np.float32) for x in results]  # noqa: E731
    return Contestant(lambda: run(*arrays), jax.block_until_ready, values)


def torch_contestant(arrays: tuple, causal: bool, both: bool) -> Contestant:
    import numpy as np
    import tessera.torch
    import torch

    def copied(x):
        bits = {"bfloat16": np.int16}.get(str(x.dtype), x.dtype)  # NumPy's bfloat16 is unknown to PyTorch
        return torch.from_numpy(np.array(x).view(bits)).view(getattr(torch, str(x.dtype))).to("cuda")

    q, k, v, d_o = map(copied, arrays)
    leaves = [x.requires_grad_(both) for x in (q, k, v)]

    def launch():
        o = tessera.torch.attention(*leaves, causal=causal)
        return (o, *torch.autograd.grad(o, leaves, d_o)) if both else (o,)

    values = lambda results: [some(x).detach().float().cpu().numpy() for x in results]  # noqa: E731
    return Contestant(launch, lambda _: torch.cuda.synchronize(), values)


def tokamax_contestant(arrays: tuple, causal: bool, both: bool) -> Contestant:
    """Google's kernels for Hopper, where the package is installed."""
    import tokamax

    return jax_contestant(
        lambda *x: tokamax.dot_product_attention(*x, is_causal=causal, implementation="mosaic"), arrays, both
    )


def contestants(options: argparse.Namespace, arrays: tuple, causal: bool, both: bool) -> dict[str, Contestant | str]:
    """Those that this machine has, or why one is not there."""
    import jax
    import tessera.jax

    theirs = jax.nn.dot_product_attention
    threads = {"threads": options.threads} if options.threads else {}
    makers: dict[str, Call] = {
        "tessera": lambda: jax_contestant(
            lambda *x: tessera.jax.attention(*x, causal=causal, **threads), arrays, both
        ),
    }  # fmt: skip
    names = ("xla",) if options.platform == "cpu" else ("cudnn", "xla")
    batch, length, heads, _ = arrays[0].shape
    score_gib = batch * heads * length**2 * 4 / 2**30
    for name in names:
        makers[name] = lambda name=name: jax_contestant(
            lambda *x: theirs(*x, is_causal=causal, implementation=name), arrays, both
        )
    if options.platform == "cuda":
        makers["tokamax"] = lambda: tokamax_contestant(arrays, causal, both)
        makers["tessera, PyTorch"] = lambda: torch_contestant(arrays, causal, both)
    found: dict[str, Contestant | str] = {}
    for name, make in makers.items():
        if name == "xla" and score_gib > options.most_gib:
            found[name] = f"its scores take {score_gib:.0f} GiB"
            continue
        try:
            found[name] = make()
        except Exception as error:  # each library has errors of its own; Tessera's end the measurement
            if name == "tessera":
                raise
            found[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    return found


def difference(ours: list, other: list) -> float:
    """The largest relative RMS difference of a result."""
    import numpy as np

    rms = lambda x: float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))  # noqa: E731
    return max(rms(a - b) / rms(b) for a, b in zip(ours, other))


def measure(options: argparse.Namespace, dtype: str, size: int, length: int, causal: bool, direction: str) -> dict:
    import jax

    tokens, width = (CPU_TOKENS, CPU_WIDTH) if options.platform == "cpu" else (TOKENS, WIDTH)
    batch, heads = max(1, tokens // length), max(1, width // size)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = tuple(jax.random.normal(key, (batch, length, heads, size), dtype) for key in keys)
    flops = 4 * batch * heads * length**2 * size * (3.5 if direction == "both" else 1) / (2 if causal else 1)
    cell: dict[str, Any] = {
        "dtype": dtype, "head_dim": size, "length": length, "mask": "causal" if causal else "full",
        "direction": direction, "flops": flops, "seconds": {}, "rounds": {}, "first_s": {}, "difference": {},
        "absent": {},
    }  # fmt: skip
    found = contestants(options, arrays, causal, direction == "both")
    cell["absent"] = {name: x for name, x in found.items() if isinstance(x, str)}
    running = {name: x for name, x in found.items() if isinstance(x, Contestant)}
    ours = running["tessera"].values(running["tessera"].results)
    for name, contestant in running.items():
        cell["first_s"][name] = contestant.first_s
        if name != "tessera":
            cell["difference"][name] = difference(contestant.values(contestant.results), ours)
        del contestant.results
    for turn in range(options.rounds):
        for name in list(running)[:: 1 if turn % 2 == 0 else -1]:
            running[name].seconds(options.lead_ms / 1e3)
            cell["rounds"].setdefault(name, []).append(running[name].seconds(options.measure_ms / 1e3))
    cell["seconds"] = {name: statistics.median(times) for name, times in cell["rounds"].items()}
    return cell


def facts(options: argparse.Namespace) -> dict:
    import datetime

    import jax
    import jaxlib
    import tessera

    known = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "tessera": tessera.__version__}
    known |= {"device": jax.devices(options.platform)[0].device_kind, "date": datetime.date.today().isoformat()}
    if options.platform == "cpu":
        return {**known, "cores": len(os.sched_getaffinity(0))}
    try:
        from cuda_bench import machine

        return {**machine.facts(), **known}
    except (ImportError, RuntimeError):  # no PyTorch, or one that does not go with JAX's cuDNN
        return known


def row(cell: dict) -> str:
    ours = cell["seconds"]["tessera"]
    texts = [f"{cell['dtype']} D {cell['head_dim']} S {cell['length']} {cell['mask']} {cell['direction']}"]
    texts.append(f"{ours * 1e3:.3f} ms, {cell['flops'] / ours * 1e-12:.3g} TFLOP/s")
    texts.append("first " + ", ".join(f"{name} {t:.1f} s" for name, t in cell["first_s"].items()))
    texts += [f"{name} x {t / ours:.2f}" for name, t in cell["seconds"].items() if name != "tessera"]
    return " | ".join(texts)


def means(cells: list[dict]) -> list[str]:
    """Geometric means of the ratios by contestant, direction and head size."""
    lines = []
    for direction in DIRECTIONS:
        groups: dict[tuple, list[float]] = {}
        for cell in cells:
            for name, t in cell["seconds"].items():
                if cell["direction"] == direction and name != "tessera":
                    group = groups.setdefault((name, cell["dtype"], cell["head_dim"]), [])
                    group.append(t / cell["seconds"]["tessera"])
        for (name, dtype, size), ratios in sorted(groups.items()):
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            lines.append(f"| {direction} | {dtype} | {size} | {name} | {mean:.2f} | {min(ratios):.2f} |")
    return lines


def main() -> int:
    options = parse()
    import jax

    try:
        jax.config.update("jax_default_device", jax.devices(options.platform)[0])
    except RuntimeError:
        sys.exit(f"this measures a GPU, and JAX {jax.__version__} sees none (jax.devices('cuda'))")
    began, cells, known = time.perf_counter(), [], facts(options)
    print(", ".join(f"{name} {value}" for name, value in known.items()), flush=True)
    for dtype in options.dtypes:
        for size in options.head_dims:
            for length in options.lengths:
                for causal in (False, True):
                    for direction in DIRECTIONS:
                        if time.perf_counter() - began > options.seconds:
                            continue
                        cells.append(measure(options, dtype, size, length, causal, direction))
                        print(row(cells[-1]), flush=True)
                        if options.json:
                            with open(options.json, "w", encoding="utf-8") as file:
                                json.dump({"machine": known, "cells": cells}, file, indent=1)
    for reason in sorted({f"{name}: {why}" for cell in cells for name, why in cell["absent"].items()}):
        print(reason)
    print("\n| direction | dtype | D | beside | its time / Tessera's, mean | least |")
    print("| --- | --- | --- | --- | --- | --- |")
    print("\n".join(means(cells)))
    return int(any(d > MOST_DIFFERENCE for cell in cells for d in cell["difference"].values()))


if __name__ == "__main__":
    sys.exit(main())
