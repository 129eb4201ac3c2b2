"""The command: the options of the program's `tessera compare`, checked once, and the run."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from tessera import _core
from tessera.compare.errors import WrongUse, require
from tessera.compare.shape import Shape

_GIB = 2**30
_SMALL_PRODUCT, _GFLOPS_FOR_LARGE = 256, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", nargs="+", default=["512,1024,2048,4096,8192,16384"], metavar="INT",
        help="sequence lengths, by commas or spaces (512,1024,2048,4096,8192,16384)")  # fmt: skip
    add("--direction", choices=("forward", "backward", "both"), default="both", help="(both)")
    add("-B", "--batch", type=int, default=1, metavar="INT", help="sequences (1)")
    add("-H", "--heads", type=int, default=8, metavar="INT", help="query heads (8)")
    add("--kv-heads", type=int, metavar="INT", help="key and value heads (-H)")
    add("-D", "--head-dim", type=int, default=64, metavar="INT", help="head size (64)")
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="(float32)")
    add("--causal", action="store_true", help="a query sees no key right of the diagonal")
    add("--dropout", type=float, default=0.0, metavar="P",
        help="probability that an entry is dropped, below 1: without errors, since each side drops other "
             "entries")  # fmt: skip
    add("--repeat", type=int, default=5, metavar="INT",
        help="timed calls of each, fewer when they are long; the median counts (5)")  # fmt: skip
    add("--memory-limit", type=float, metavar="GIB", help="what a peer may take (what is available)")
    add("--json", action="store_true", help="the numbers as JSON, and nothing else")
    add("--report", metavar="FILE", help="write the JSON into this file, too")
    add(
        "--plot",
        metavar="FILE",
        help="draw memory and speed over length into this .png or .svg file (needs matplotlib)",
    )


def run(options: argparse.Namespace) -> None:
    """Measures, then prints the table or the JSON, then draws the plot."""
    lengths = _lengths(options.lengths)
    _check(options, lengths)
    try:
        import numpy as np
    except ImportError:
        raise WrongUse("compare: needs NumPy, which is not installed (pip install numpy)") from None

    from tessera.compare import plot, report
    from tessera.compare.cell import Settings, measure_cell
    from tessera.compare.device import DEVICES, device_named
    from tessera.compare.frameworks import installed
    from tessera.compare.progress import Progress

    name = device_named(options.device)
    for file, argument, check in (
        (options.plot, "--plot", plot.check_plot),
        (options.report, "--report", plot.check_file),
    ):
        try:
            if file is not None:
                check(file, argument)
        except ValueError as refusal:
            raise WrongUse(str(refusal)) from None
    device = DEVICES[name](options.threads)
    framework = installed(device.threads, name)
    framework.dtype(options.dtype)
    limit = None if options.memory_limit is None else int(options.memory_limit * _GIB)
    busy = _core.busy_text(device.threads) if name == "cpu" else ""
    settings = Settings(device, framework, options.kernel, options.repeat, limit, busy)

    directions = ("forward", "backward") if options.direction == "both" else (options.direction,)
    shapes = [
        Shape(direction, length, options.batch, options.heads, options.kv_heads or options.heads, options.head_dim,
              options.dtype, options.causal, options.dropout)
        for direction in directions for length in lengths
    ]  # fmt: skip
    progress = Progress(sum(shape.flops for shape in shapes))
    cells = []
    try:
        progress.show("warming up")
        for direction in directions:  # code loaded at its first use would count as memory
            measure_cell(replace(shapes[0], direction=direction, length=64), settings, lambda what: None)

        def product_gflops_of(size: int) -> float:
            square = framework.heads_first(framework.array(np.ones((1, size, 1, size), np.float32), options.dtype))
            return 2 * size**3 * 1e-9 / min(device.seconds(lambda: square @ square)[0] for _ in range(3))

        product_gflops = product_gflops_of(_SMALL_PRODUCT)
        # On a CPU without half-precision instructions, the large product takes a minute.
        size = device.large_product if product_gflops > _GFLOPS_FOR_LARGE else _SMALL_PRODUCT
        for shape in shapes:
            # Measured again for each cell, keeping the best of this run, since the clock and other load vary.
            product_gflops = max(product_gflops, product_gflops_of(size))
            where = f"{shape.direction}, length {shape.length}: "
            cells.append(measure_cell(shape, settings, partial(progress.show, where)))
            progress.advance(shape.flops)
    finally:
        progress.clear()

    heading = report.title(cells, settings, product_gflops)
    numbers = report.as_json(cells, settings, product_gflops)
    if options.json:
        print(json.dumps(numbers, indent=2))
    else:
        report.print_table(cells, heading, settings)
    if options.report is not None:
        Path(options.report).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot.draw_plot(options.plot, numbers)
        if not options.json:
            print(f"\n{options.plot} shows memory and speed over length.")


def _lengths(texts: list[str]) -> list[int]:
    lengths = []
    for text in ",".join(texts).split(","):
        try:
            lengths.append(int(text))
        except ValueError:
            raise WrongUse(f"--lengths: '{text}', accepted is a whole number") from None
    return lengths


def _check(options: argparse.Namespace, lengths: list[int]) -> None:
    heads_kv = options.heads if options.kv_heads is None else options.kv_heads
    sizes = [
        ("-B", options.batch),
        ("-H", options.heads),
        ("--kv-heads", heads_kv),
        *(("--lengths", n) for n in lengths),
    ]
    for flag, size in sizes:
        require(1 <= size <= 2**24, flag, size, "1 .. 2^24")
    require(1 <= options.head_dim <= 512, "-D", options.head_dim, "1 .. 512")
    require(options.heads % heads_kv == 0, "--kv-heads", heads_kv, f"a divisor of -H, {options.heads}")
    require(0 <= options.dropout < 1, "--dropout", options.dropout, "0 <= P < 1")
    require(1 <= options.repeat <= 1000, "--repeat", options.repeat, "1 .. 1000")
    limit = 0 if options.memory_limit is None else options.memory_limit
    require(0 <= limit < 1e6, "--memory-limit", limit, "0 GiB and more")
