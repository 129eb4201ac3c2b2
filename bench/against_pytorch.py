"""tessera.torch.attention beside PyTorch's own scaled_dot_product_attention on the CPU: forward and backward, one run.

    python bench/against_pytorch.py [--threads 1 2] [--lengths 512 2048 8192] [--json FILE]

Both get the layout that suits them ([B, S, H, D] here, [B, H, S, D] there) and the same values, and take turns; a cell is
the median of the paired ratios. Needs the wheel and PyTorch.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

import tessera
import tessera.torch

HEADS = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def forward_calls(q, k, v, causal):
    """Both forward passes without autograd. q, k, v: [B, S, H, D]."""
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def ours():
        with torch.no_grad():
            tessera.torch.attention(q, k, v, causal=causal)

    def theirs():
        with torch.no_grad():
            F.scaled_dot_product_attention(*heads_first, is_causal=causal)

    return ours, theirs


def backward_calls(q, k, v, causal):
    """Both backward passes alone: the graph is built once and kept."""

    def graph(inputs, attention):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        o = attention(*leaves)
        d_o = torch.randn_like(o)
        return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)

    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    ours = graph((q, k, v), lambda *x: tessera.torch.attention(*x, causal=causal))
    theirs = graph(heads_first, lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal))
    return ours, theirs


def measure(calls, repetitions):
    """Median seconds of each, and the median of the paired ratios."""
    for call in calls:
        call()
    pairs = [[seconds(call) for call in calls] for _ in range(repetitions)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs))
    return ours, theirs, statistics.median(pair[1] / pair[0] for pair in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="write the results to this file, too")
    options = parser.parse_args()

    cells = []
    print(f"Tessera {tessera.__version__} against PyTorch {torch.__version__}, B 1, H {HEADS}")
    print(f"{'':8} {'dtype':9} {'threads':>7} {'D':>4} {'length':>6} {'mask':6} {'Tessera ms':>11} {'PyTorch ms':>11} ratio")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for direction, calls_of in (("forward", forward_calls), ("backward", backward_calls)):
            for name, dtype in DTYPES.items():
                for head_dim in (64, 128):
                    for length in options.lengths:
                        for causal in (False, True):
                            q, k, v = (torch.randn(1, length, HEADS, head_dim, dtype=dtype) for _ in range(3))
                            ours, theirs, ratio = measure(calls_of(q, k, v, causal), options.repetitions)
                            mask = "causal" if causal else "full"
                            cells.append(dict(direction=direction, dtype=name, threads=threads, head_dim=head_dim,
                                              length=length, mask=mask, tessera_ms=ours * 1e3, pytorch_ms=theirs * 1e3,
                                              ratio=ratio))
                            print(f"{direction:8} {name:9} {threads:7} {head_dim:4} {length:6} {mask:6} {ours * 1e3:11.2f} "
                                  f"{theirs * 1e3:11.2f} {ratio:5.2f}", flush=True)
    ratios = [cell["ratio"] for cell in cells]
    print(f"least {min(ratios):.2f}, geometric mean {statistics.geometric_mean(ratios):.2f}, {len(ratios)} cells")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(cells, file, indent=2)


if __name__ == "__main__":
    main()
