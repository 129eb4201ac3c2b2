"""tessera.torch.attention beside PyTorch's own scaled_dot_product_attention on the CPU: forward and backward, one run.

    python bench/against_pytorch.py [--threads 1 2] [--lengths 512 2048 8192] [--json FILE]
    python bench/against_pytorch.py --table FILE ...        # the contents of such files, as Markdown

B is 1, and H falls with the length, from 4 heads to 2, so that the long cells stay quick. Each gets its preferred
layout ([B, S, H, D] for Tessera, [B, H, S, D] for PyTorch) and the same values, and they alternate; a cell is the
median of the paired ratios. Needs the wheel and PyTorch.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

import tessera
import tessera.torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def heads_of(length):
    return min(4, max(2, 8192 // length))  # PyTorch's backward pass works on whole heads: one for each of two threads


def seconds(call):
    start = time.perf_counter()
    call()
    elapsed = time.perf_counter() - start
    # Linux stops a real-time process (chrt) after 95 % of each second.
    time.sleep(0.08 * elapsed)
    return elapsed


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
        seconds(call)
    pairs = [[seconds(call) for call in calls] for _ in range(repetitions)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs))
    return ours, theirs, statistics.median(pair[1] / pair[0] for pair in pairs)


def summary(cells):
    ratios = [cell["ratio"] for cell in cells]
    below = sum(ratio < 1.1 for ratio in ratios)
    mean = statistics.geometric_mean(ratios)
    return f"{len(ratios)} cells: least {min(ratios):.2f}, geometric mean {mean:.2f}, {below} below 1.1"


def table(cells):
    """Rows of Markdown: ratios full / causal, a column for each length."""
    lengths = sorted({cell["length"] for cell in cells})
    ratio = {tuple(cell[key] for key in ("threads", "direction", "dtype", "head_dim", "length", "mask")): cell["ratio"]
             for cell in cells}  # fmt: skip
    print("| times as fast, full / causal | " + " | ".join(f"N = {length}" for length in lengths) + " |")
    print("| --- |" + " --- |" * len(lengths))
    for row in dict.fromkeys(key[:4] for key in ratio):
        threads, direction, dtype, head_dim = row
        columns = ["{:.2f} / {:.2f}".format(*(ratio.get((*row, n, mask), float("nan")) for mask in ("full", "causal")))
                   for n in lengths]  # fmt: skip
        print(f"| {dtype} {direction}, D {head_dim}, threads {threads} | " + " | ".join(columns) + " |")
    print("\n" + summary(cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="write the results to this file, too")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="measure nothing: print these results as Markdown")
    options = parser.parse_args()
    if options.table:
        cells = []
        for name in options.table:
            with open(name, encoding="utf-8") as file:
                cells += json.load(file)
        table(cells)
        return

    cells = []
    print(f"Tessera {tessera.__version__} against PyTorch {torch.__version__}")
    print(
        f"{'':8} {'dtype':9} {'threads':>7} {'D':>4} {'length':>6} {'mask':6} {'Tessera ms':>11} {'PyTorch ms':>11} "
        "ratio"
    )
    for threads in options.threads:
        torch.set_num_threads(threads)
        for direction, calls_of in (("forward", forward_calls), ("backward", backward_calls)):
            for name, dtype in DTYPES.items():
                for head_dim in (64, 128):
                    for length in options.lengths:
                        for causal in (False, True):
                            q, k, v = (
                                torch.randn(1, length, heads_of(length), head_dim, dtype=dtype) for _ in range(3)
                            )
                            ours, theirs, ratio = measure(calls_of(q, k, v, causal), options.repetitions)
                            mask = "causal" if causal else "full"
                            cells.append(dict(direction=direction, dtype=name, threads=threads, head_dim=head_dim,
                                              length=length, mask=mask, tessera_ms=ours * 1e3, pytorch_ms=theirs * 1e3,
                                              ratio=ratio))
                            print(
                                f"{direction:8} {name:9} {threads:7} {head_dim:4} {length:6} {mask:6} "
                                f"{ours * 1e3:11.2f} "
                                f"{theirs * 1e3:11.2f} {ratio:5.2f}",
                                flush=True,
                            )
    print(summary(cells))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(cells, file, indent=2)


if __name__ == "__main__":
    main()
