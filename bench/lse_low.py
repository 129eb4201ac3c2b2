"""What lse_low costs: forward with the LSE alone and with lse_low, backward without and with it, alternating.

    python bench/lse_low.py                  on a GPU: bfloat16, 16384 tokens in all and 2048 / D heads
    python bench/lse_low.py --device cpu     float32 and bfloat16, one sequence and 4 heads, one thread's CPU time

Each cell once with scores of a few units and once with scores that share 1e4, whose rows the backward pass computes
from both floats. Microseconds a call, and the time with lse_low over that without.
"""

from __future__ import annotations

import argparse
import sys
import time

import tessera
import torch

SHARED = 1e4  # part of every score


def calls(q, k, v, d_o, **options):
    """{direction: {contestant: call}}"""
    o, lse, low = tessera.attention(q, k, v, return_lse_low=True, **options)
    given = (q, k, v, o, lse, d_o)
    return {
        "forward": {
            "lse": lambda: tessera.attention(q, k, v, return_lse=True, **options),
            "lse_low": lambda: tessera.attention(q, k, v, return_lse_low=True, **options),
        },
        "backward": {
            "lse": lambda: tessera.attention_backward(*given, **options),
            "lse_low": lambda: tessera.attention_backward(*given, lse_low=low, **options),
        },
    }


def inputs(shape, dtype, device, shared):
    torch.manual_seed(0)
    q, k, v, d_o = (torch.randn(shape, device=device) for _ in range(4))
    if shared:
        # A dimension of its own: 128 of q meets what adds SHARED to each score after the scale.
        q[..., -1], k[..., -1] = 128, SHARED * shape[-1] ** 0.5 / 128
    return [x.to(dtype) for x in (q, k, v, d_o)]


def gpu_us(contestants, options):
    from cuda_bench import timing

    steadiness = timing.Steadiness(options.lead_ms, options.measure_ms, options.rounds)
    return {name: t.seconds * 1e6 for name, t in timing.contest(contestants, steadiness).items()}


def cpu_us(contestants, options):
    """The least of many alternating calls: other work on the machine only adds."""
    least = dict.fromkeys(contestants, float("inf"))
    for number in range(options.rounds * 20):
        for name in list(contestants)[:: 1 if number % 2 else -1]:
            began = time.process_time()
            contestants[name]()
            least[name] = min(least[name], time.process_time() - began)
    return {name: seconds * 1e6 for name, seconds in least.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lead-ms", type=float, default=60)
    parser.add_argument("--measure-ms", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    threads = {} if on_gpu else {"threads": 1}
    lengths = options.lengths or ([2048, 8192] if on_gpu else [256, 1024])
    print("dtype    D     n    mask    scores  direction      lse us  lse_low us   ratio")
    for dtype in (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16):
        for d in options.head_dims:
            for n in lengths:
                shape = (16384 // n, n, 2048 // d, d) if on_gpu else (1, n, 4, d)
                for causal in (False, True):
                    for shared in (False, True):
                        made = inputs(shape, dtype, options.device, shared)
                        for direction, contestants in calls(*made, causal=causal, **threads).items():
                            us = (gpu_us if on_gpu else cpu_us)(contestants, options)
                            print(
                                f"{str(dtype)[6:]:8} {d:3} {n:5}  {'causal' if causal else 'full':6}"
                                f"  {'shared' if shared else 'usual':6}  {direction:9} {us['lse']:10.1f}"
                                f"  {us['lse_low']:10.1f}  {us['lse_low'] / us['lse']:6.3f}",
                                flush=True,
                            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
