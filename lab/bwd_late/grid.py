#!/usr/bin/env python3
"""The two forms of bwd_sm90 at head sizes 64 and 128 beside cuDNN and, where it is installed, FlashAttention-4, in one
run: results against float64, then the steady state.

    grid.py CSV [--lengths 512 ...] [--head-dims 64 128] [--lead-ms 150] [--measure-ms 150] [--rounds 2] [--seconds 200]
"""

import argparse
import math
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "bench")]
import tile_search  # noqa: E402
import torch  # noqa: E402
from cuda_bench import timing  # noqa: E402
from cuda_bench.contestants import Cudnn  # noqa: E402
from cuda_bench.exact import Exact  # noqa: E402
from cuda_bench.problem import Inputs, Problem  # noqa: E402

FORCED = "TESSERA_BWD_SM90_TILE"
FORMS = {
    64: {"late": "128,2,0,1,1", "dq_warpgroup": "128,2,1,1,0"},
    128: {"late": "64,2,0,1,1", "dq_warpgroup": "64,2,1,1,0"},
}


class Form:
    def __init__(self, text):
        self.text = text


def fa4_call(x, causal):
    from flash_attn.cute import flash_attn_func

    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    o = flash_attn_func(*leaves, causal=causal)
    o = o[0] if isinstance(o, tuple) else o
    return lambda: torch.autograd.grad(o, leaves, x.d_o, retain_graph=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 16384, 2048, 4096, 8192])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lead-ms", type=float, default=150)
    parser.add_argument("--measure-ms", type=float, default=150)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=200)
    options = parser.parse_args()
    started = time.monotonic()
    steadiness = timing.Steadiness(options.lead_ms, options.measure_ms, options.rounds)
    print(torch.cuda.get_device_name(), flush=True)
    over: dict = {}
    with open(options.csv, "w", encoding="utf-8") as file:
        print("gpu,head_dim,mask,length,contestant,tflops,rounds_ms,error", file=file)
        for length in options.lengths:
            for head_dim in options.head_dims:
                for causal in (True, False):
                    if time.monotonic() - started > options.seconds:
                        print("out of time")
                        break
                    heads = 2048 // head_dim
                    problem = Problem("", 16384 // length, length, length, heads, heads, head_dim, head_dim, causal)
                    inputs = Inputs.of(problem, True)
                    exact = Exact(problem, inputs, "backward") if length <= 2048 else None
                    pairs = {}
                    for number, (name, text) in enumerate(FORMS[head_dim].items()):
                        pairs[name] = tile_search.contestant_call(
                            tile_search.make_forced("bwd_sm90", FORCED, "backward", problem, inputs,
                                                    Form(text), number))  # fmt: skip
                    pairs["cudnn"] = tile_search.contestant_call(Cudnn(problem, inputs, "backward"))
                    try:
                        pairs["fa4"] = fa4_call(inputs, causal), lambda g: dict(zip(("d_q", "d_k", "d_v"), g))
                    except ImportError:
                        pass
                    errors = {n: exact.error(r(c())) if exact else math.nan for n, (c, r) in pairs.items()}
                    timed = timing.contest({n: c for n, (c, _) in pairs.items()}, steadiness)
                    mask = "causal" if causal else "full"
                    rates = {n: problem.flops("backward") / t.seconds * 1e-12 for n, t in timed.items()}
                    for n, t in timed.items():
                        rounds = " ".join(f"{s * 1e3:.4f}" for s in t.rounds)
                        print(torch.cuda.get_device_name(), head_dim, mask, length, n, f"{rates[n]:.1f}", rounds,
                              f"{errors[n]:.3e}", sep=",", file=file, flush=True)  # fmt: skip
                    peer = max(r for n, r in rates.items() if n in ("cudnn", "fa4"))
                    over.setdefault(head_dim, []).append((rates["late"] / rates["dq_warpgroup"], rates["late"] / peer))
                    print(f"D {head_dim} {mask} {length}: " + ", ".join(f"{n} {r:.0f}" for n, r in rates.items()),
                          f"| late over dq_warpgroup {rates['late'] / rates['dq_warpgroup']:.3f}, over the better peer "
                          f"{rates['late'] / peer:.3f} | error e-3", {n: f"{e * 1e3:.3f}" for n, e in errors.items()},
                          flush=True)  # fmt: skip
                    del pairs, exact, inputs
                    torch.cuda.empty_cache()
    for head_dim, pairs in over.items():
        means = [math.exp(sum(map(math.log, x)) / len(x)) for x in zip(*pairs)]
        print(f"D {head_dim}, geometric means: over dq_warpgroup {means[0]:.3f}, over the better peer {means[1]:.3f}")


if __name__ == "__main__":
    main()
