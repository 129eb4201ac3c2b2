"""The costs of two rules on a GPU: clearing rows that belong to no sequence, and the checks of flash_attn_with_kvcache
before it writes.

    python bench/cuda_rules.py packed HERE OTHER [--json FILE]     HERE, OTHER: PYTHONPATH of each of two builds
    python bench/cuda_rules.py kvcache [--json FILE]

packed: causal calls of flash_attn_varlen_func, bfloat16, 16 heads, graph replays, three alternating rounds, medians.
OTHER is a build of a copy of the sources in which clear_unowned_outputs, clear_unowned_gradients and clear_unused_keys
return at once (kernels/tessera/attention/unowned_rows.cuh, kernels/tessera/bwd_sm80/rows.cuh). kvcache: one query and
one new token a sequence, 32 / 8 heads of 128, with and without the check, wall time of consecutive calls, six
alternating rounds, medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch

from cuda_bench import machine

PACKED = (
    ("8 x 2048, D 128", [2048] * 8, 128),
    ("16 x 512, D 64", [512] * 16, 64),
    ("64 x 128, D 128", [128] * 64, 128),
    ("64 to 2000, D 128", [64, 300, 1024, 77, 2000, 512, 900, 1111], 128),
)
CACHES = ((1, 1024, 256), (16, 4096, 256), (64, 2048, 256), (64, 2048, 16), (64, 2048, None))  # batch, keys, page


def replayed(call, calls=20, replays=15):
    """Microseconds of a call within a CUDA graph."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for replay in range(10 + replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1000)
    return statistics.median(times[10:])


def packed():
    from flash_attn import flash_attn_varlen_func

    result = {}
    for name, lengths, head_dim in PACKED:
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
        shape = (sum(lengths), 16, head_dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        d_o = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        def forward():
            return flash_attn_varlen_func(q, k, v, bounds, bounds, max(lengths), max(lengths), causal=True)

        result[f"{name}, forward"] = replayed(torch.no_grad()(forward))
        result[f"{name}, forward and backward"] = replayed(lambda: torch.autograd.grad(forward(), (q, k, v), d_o))
    return result


def both_packed(here, other):
    def child(path):
        command = [sys.executable, __file__, "packed"]
        output = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, check=True, stdout=subprocess.PIPE
        ).stdout
        return json.loads(output.splitlines()[-1])

    rounds = [(child(here), child(other)) for _ in range(3)]
    result = {}
    for cell in rounds[0][0]:
        clears, without = (statistics.median(one[build][cell] for one in rounds) for build in (0, 1))
        result[cell] = {"clears_us": clears, "without_us": without, "ratio": clears / without}
    return result


def kvcache():
    from flash_attn import _extent, flash_attn_with_kvcache

    check, result = _extent.check, {}
    for batch, length, page in CACHES:
        q = torch.randn(batch, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        new = torch.randn(batch, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
        lengths = torch.full((batch,), length - 1, dtype=torch.int32, device="cuda")
        rows, room = (batch * length // page, page) if page else (batch, length)
        k, v = (torch.randn(rows, room, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        table = torch.arange(rows, device="cuda", dtype=torch.int32).view(batch, -1) if page else None
        times = {"checked": [], "unchecked": []}
        for _ in range(6):
            for kind, samples in times.items():
                _extent.check = check if kind == "checked" else lambda *_: None
                for call in range(120):
                    if call == 20:
                        torch.cuda.synchronize()
                        begin = time.perf_counter()
                    flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lengths, block_table=table, causal=True)
                torch.cuda.synchronize()
                samples.append((time.perf_counter() - begin) / 100 * 1e6)
        _extent.check = check
        name = f"{batch} x {length}, " + (f"pages of {page}" if page else "dense")
        result[name] = {f"{kind}_us": statistics.median(samples) for kind, samples in times.items()}
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("packed", "kvcache"))
    parser.add_argument("builds", nargs="*", metavar="HERE OTHER")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file, too")
    options = parser.parse_args()
    machine.need_gpu()
    if options.what == "packed" and len(options.builds) == 2:
        result = both_packed(*options.builds)
    else:
        result = packed() if options.what == "packed" else kvcache()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), options.what: result}, file, indent=1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
