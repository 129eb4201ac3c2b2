"""Block-sparse attention on one GPU (first FlashAttention paper, section 3.3): time over the number of visible blocks,
Tessera beside FlexAttention with the same mask, and Tessera without a mask.

    python bench/block_sparse.py --csv FILE [--direction forward backward] [--length 16384] [--head-dim 128]
                                 [--block 128] [--no-flex]

Patterns: local + global (9 blocks about the diagonal, the first two rows and columns), butterfly (blocks whose numbers
differ in one bit, and the diagonal), random at 1/2 ... 1/32, all blocks. Per pattern the milliseconds, and last the
line a + b blocks through Tessera's, with a relative to the time without a mask. FlexAttention is compiled by
torch.compile; its results are compared with Tessera's before it is timed (relative RMS error, at most 1 %).
"""

from __future__ import annotations

import argparse
import csv
import sys

import numpy as np
import tessera
import tessera.torch
import torch
from cuda_bench import machine, timing

MOST_DIFFERENCE = 0.01
FLEX_BLOCK = 128  # its smallest block: smaller blocks of the mask are rules within listed blocks


def local_global(i, j):
    return ((i - j).abs() <= 4) | (i < 2) | (j < 2)


def butterfly(i, j):
    differ = i ^ j
    return (differ & (differ - 1)) == 0


def random_share(share):
    def visible(i, j):
        generator = torch.Generator(i.device).manual_seed(share)
        drawn = torch.rand(len(i), j.shape[1], device=i.device, generator=generator) < 1 / share
        return drawn | (i == j)

    return visible


PATTERNS = {
    "local+global": local_global,
    "butterfly": butterfly,
    **{f"random 1/{share}": random_share(share) for share in (2, 4, 8, 16, 32)},
    "all": lambda i, j: (i >= 0) & (j >= 0),
}


class Calls:
    """The contestants' calls on one problem."""

    def __init__(self, options):
        torch.manual_seed(0)
        n, d = options.length, options.head_dim
        self.block = options.block
        shape = (options.batch, n, options.heads, d)
        self.q, self.k, self.v, self.d_o = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.swapped = [x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v, self.d_o)]
        self.blocks = torch.zeros(-(-n // self.block), -(-n // self.block), dtype=torch.bool, device="cuda")
        self.flex = None
        if not options.no_flex:
            from torch.nn.attention.flex_attention import flex_attention

            self.flex = torch.compile(flex_attention, dynamic=False)

            blocks, block = self.blocks, self.block

            def visible(b, h, i, j):
                return blocks[i // block, j // block]

            self.visible = visible  # one function for all patterns, so that it is compiled once

    def use(self, mask):
        from torch.nn.attention.flex_attention import create_block_mask

        self.blocks.copy_(mask[0, 0])
        n = self.q.shape[1]
        if self.flex is not None:
            size = max(self.block, FLEX_BLOCK)
            self.flex_mask = create_block_mask(self.visible, None, None, n, n, device="cuda", BLOCK_SIZE=size)

    def tessera(self, direction, mask, **more):
        options = more if mask is None else {"block_mask": mask, "mask_block": (self.block, self.block), **more}
        if direction == "forward":
            return lambda: tessera.attention(self.q, self.k, self.v, **options)
        o, lse = tessera.attention(self.q, self.k, self.v, return_lse=True, **options)
        return lambda: tessera.attention_backward(self.q, self.k, self.v, o, lse, self.d_o, **options)

    def kernel(self, direction, mask):
        options = {"block_mask": mask, "mask_block": (self.block, self.block)}
        return tessera.plan(self.q, self.k, self.v, direction=direction, as_dict=True, **options)["kernel"]

    def flex_call(self, direction):
        q, k, v, d_o = self.swapped
        if direction == "forward":

            def forward():
                with torch.no_grad():
                    return self.flex(q, k, v, block_mask=self.flex_mask)

            return forward
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = self.flex(*leaves, block_mask=self.flex_mask)
        return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)

    def difference(self, direction):
        ours, theirs = self.tessera(direction, self.mask())(), self.flex_call(direction)()
        ours, theirs = ([ours], [theirs]) if direction == "forward" else (list(ours)[:3], list(theirs))
        return max(((a.transpose(1, 2).float() - b.float()).square().mean() / b.float().square().mean()).sqrt().item()
                   for a, b in zip(ours, theirs))  # fmt: skip

    def mask(self):
        return self.blocks[None, None]


def milliseconds(call):
    return timing.contest({"": call}, timing.Steadiness(60, 80, 1))[""].seconds * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direction", nargs="+", choices=("forward", "backward"), default=["forward", "backward"])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--block", type=int, default=128, choices=(64, 128))
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args()
    machine.need_gpu()
    calls, rows, wrong = Calls(options), [], 0
    for direction in options.direction:
        dense = milliseconds(calls.tessera(direction, None))
        print(f"{direction}, no mask: {dense:.3f} ms", flush=True)
        points = []
        for name, pattern in PATTERNS.items():
            mask = tessera.torch.block_mask(
                pattern, options.length, options.length, block=(options.block, options.block)
            )
            calls.use(mask)
            blocks = int(mask.sum())
            row = {"direction": direction, "pattern": name, "length": options.length, "head_dim": options.head_dim,
                   "heads": options.heads,
                   "batch": options.batch, "block": options.block, "blocks": blocks,
                   "share": f"{blocks / mask.numel():.4f}",
                   "kernel": calls.kernel(direction, calls.mask()),
                   "tessera_ms": milliseconds(calls.tessera(direction, calls.mask())),
                   "flex_ms": "", "difference": "", "dense_ms": f"{dense:.4f}"}  # fmt: skip
            if calls.flex is not None:
                difference = calls.difference(direction)
                wrong += not difference <= MOST_DIFFERENCE
                row["difference"], row["flex_ms"] = f"{difference:.2e}", milliseconds(calls.flex_call(direction))
            points.append((blocks, row["tessera_ms"]))
            ratio = (
                f"FlexAttention {row['flex_ms']:.3f} ms, {row['flex_ms'] / row['tessera_ms']:.2f} x; "
                if row["flex_ms"]
                else ""
            )
            print(f"{direction:8s} {name:13s} {blocks:6d} blocks ({row['share']}): {row['kernel']} "
                  f"{row['tessera_ms']:.3f} ms; {ratio}"
                  f"difference {row['difference']}", flush=True)  # fmt: skip
            rows.append({key: f"{value:.4f}" if isinstance(value, float) else value for key, value in row.items()})
        slope, start = np.polyfit(*np.array(points).T, 1)
        print(
            f"{direction}: {start * 1e3:.0f} us + {slope * 1e3:.3f} us a block; a is {start / dense:.1%} of the time "
            "without a mask"
        )
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
