"""Decoding on the CPU from caches of 8 bits beside one of bfloat16: how many times as fast, from memory.

    python bench/cpu_codes.py [--isas auto avx512 avx2] [--threads 1 2] [--head-dims 64 128] [--json FILE]

One new token against one long sequence, with bfloat16 queries. The bfloat16 keys and values are --mib large, and should
be four times the last-level cache; codes are half of that. `dense`: contiguous, a scale a head; `pages`: pages of 16 in
random order, a scale a head or a scale a token and head. Each repetition calls every dtype once, so that a change of
the machine's speed meets all of them; of each, the time is the --quantile of the repetitions, and the number is
bfloat16's time over that of the codes. --clock cpu: the process's time over its threads, for a machine that is busy.
`auto` is the instruction set that Tessera chooses.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

PAGE = 16
CODES = {"float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "int8": torch.int8}
DTYPES = ("bfloat16", *CODES)
CASES = (("dense", "head"), ("pages", "head"), ("pages", "token"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isas", nargs="+", default=["auto"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--heads", nargs="+", default=["8/8", "32/8"], help="query heads / KV heads")
    parser.add_argument("--mib", type=int, default=512, help="of the bfloat16 keys and values together")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--quantile", type=float, default=0.5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the instruction set of this process
    return parser.parse_args()


def caches(numbers: torch.Tensor, times: int) -> dict[str, torch.Tensor]:
    """By dtype, the numbers `times` times in a row; codes use most of their format's range."""
    codes = (numbers.float() * 25).clamp(-127, 127)
    found = {"bfloat16": numbers} | {name: codes.to(dtype) for name, dtype in CODES.items()}
    return {name: x.view(torch.uint8).repeat(times, 1, 1, 1).view(x.dtype) for name, x in found.items()}


def calls(dim: int, heads: list[tuple[int, int]], mib: int) -> Iterator[tuple[dict, dict[str, Callable]]]:
    import tessera

    generator = torch.Generator().manual_seed(0)
    heads_kv = heads[0][1]
    times = (mib << 20) // (2 * 2 * heads_kv * dim * PAGE) // 256
    pages = times * 256
    some = torch.randn(256, PAGE, heads_kv, dim, generator=generator).bfloat16()
    k, v = (caches(some.roll(shift, 0), times) for shift in (0, 1))
    table = torch.randperm(pages, generator=generator).to(torch.int32)[None]
    paged = {"page_table": table, "seqused_k": torch.tensor([pages * PAGE], dtype=torch.int32)}
    of_head = torch.rand(heads_kv, generator=generator) * 0.01 + 0.01
    of_token = torch.rand(pages, PAGE, heads_kv, generator=generator) * 0.01 + 0.01
    for heads_q, _ in heads:
        q = torch.randn(1, 1, heads_q, dim, generator=generator).bfloat16()
        for layout, scale in CASES:
            options = paged if layout == "pages" else {}
            by_dtype = {}
            for dtype in DTYPES:
                here_k, here_v = k[dtype], v[dtype]
                if layout == "dense":
                    here_k, here_v = (x.view(1, pages * PAGE, heads_kv, dim) for x in (here_k, here_v))
                scales = of_token if scale == "token" else of_head
                named = {} if dtype == "bfloat16" else {"k_descale": scales, "v_descale": scales}

                def call(q=q, k=here_k, v=here_v, options=options | named):
                    return tessera.attention(q, k, v, **options)

                by_dtype[dtype] = call
            yield {"heads": f"{heads_q}/{heads_kv}", "layout": layout, "scale": scale}, by_dtype


def measure(options: argparse.Namespace) -> None:
    """Prints a line of JSON for each case, with milliseconds by dtype."""
    import tessera

    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    heads = [tuple(map(int, text.split("/"))) for text in options.heads]
    isa = tessera.device()["isa"]
    for dim in options.head_dims:
        for case, by_dtype in calls(dim, heads, options.mib):
            seconds = {dtype: [] for dtype in by_dtype}
            for repetition in range(options.repetitions + 1):
                for dtype, call in by_dtype.items():
                    start = clock()
                    call()
                    if repetition > 0:
                        seconds[dtype].append(clock() - start)
            ms = {
                dtype: 1e3 * float(torch.tensor(all_of).double().quantile(options.quantile))
                for dtype, all_of in seconds.items()
            }
            print(json.dumps({"isa": isa, "threads": options.threads[0], "dim": dim, **case, "ms": ms}), flush=True)


def main() -> None:
    options = parse()
    if options.one:
        measure(options)
        return
    processor = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "unknown",
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()
    facts = {
        "processor": processor,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": shlex.join(["python", *sys.argv]),
    }
    print(f"{processor}, {facts['date']}, commit {commit}; bfloat16 in ms, codes times as fast")
    rows = []
    for isa in options.isas:
        for threads in options.threads:
            command = [sys.executable, __file__, "--one", isa, "--threads", str(threads)]
            for name in ("head_dims", "heads", "mib", "repetitions", "quantile", "clock"):
                value = getattr(options, name)
                command += ["--" + name.replace("_", "-"), *map(str, value if isinstance(value, list) else [value])]
            with_isa = {} if isa == "auto" else {"TESSERA_ISA": isa}
            environment = os.environ | {"TESSERA_NUM_THREADS": str(threads)} | with_isa
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            for line in process.stdout:
                row = {"asked": isa, **json.loads(line)}
                rows.append(row)
                ms = row["ms"]
                ratios = "  ".join(f"{dtype} {ms['bfloat16'] / ms[dtype]:.2f}" for dtype in CODES)
                case = f"D {row['dim']:3} {row['heads']:>5} {row['layout']} {row['scale']:5}"
                print(f"{isa} ({row['isa']}) x{threads} {case} {ms['bfloat16']:7.2f}  {ratios}", flush=True)
            if process.wait() != 0:
                print(f"{isa}, {threads} threads: exit {process.returncode}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
