"""Split query groups by parts: microseconds of each kernel of a backward call, and the whole beside cuDNN's. python groups.py CSV"""
import csv, sys
from pathlib import Path
import torch
sys.path[:0] = [str(Path.cwd() / "bench")]
from cuda_bench.contestants import enter
from cuda_bench.problem import Inputs, Problem
from kernel_times import kernels

SHAPES = ((1, 2048, 32, 1), (1, 4096, 32, 1), (4, 1024, 16, 1), (1, 1024, 8, 2), (1, 2048, 32, 8))
rows = []
for batch, length, heads, heads_kv in SHAPES:
    for causal in (False, True):
        problem = Problem("groups", batch, length, length, heads, heads_kv, 128, 128, causal)
        inputs = Inputs.of(problem, True)
        for contestant in enter(problem, inputs, "backward", ["tessera", "cudnn"])[0]:
            try:
                call, _ = contestant.call()
                for _ in range(200):
                    call()
            except RuntimeError as error:
                print(contestant.name, str(error).splitlines()[0][:120])
                continue
            times = kernels(call, 20)
            whole = sum(us for _, us in times.values())
            parts = contestant.plan()["num_splits"] if contestant.name == "tessera" else ""
            print(f"{batch} x {length} {heads}/{heads_kv} {problem.mask} {contestant.name} {parts}: {whole:.0f} us;",
                  ", ".join(f"{name[:24]} {us:.1f}" for name, (_, us) in times.items()), flush=True)
            rows += [(batch, length, heads, heads_kv, problem.mask, contestant.name, parts, name, f"{us:.2f}") for name, (_, us) in times.items()]
            with open(sys.argv[1], "w", newline="") as file:
                csv.writer(file).writerows([("batch", "length", "heads", "heads_kv", "mask", "contestant", "parts", "kernel", "us"), *rows])
