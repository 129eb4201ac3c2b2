"""A long document: each block of tokens sees its neighbours, the document's beginning, and every 16th block, before it.
Block-sparse attention, exact on what is visible; hidden blocks are never read.

    python examples/long_document.py                        # 131072 tokens on a GPU if there is one, 4096 on a CPU
    python examples/long_document.py --length 524288 --near 16

Prints the time of a forward and a backward pass beside those of plain causal attention, and compares some rows with
float64.
"""

import argparse
import sys
import time

import tessera.torch
import torch

BLOCK = 128


def document_blocks(near, every, device, length):
    """bool [1, 1, blocks, blocks]: of the blocks up to its own, a block sees `near`, the first, and every
    `every`-th."""
    return tessera.torch.block_mask(
        lambda i, j: (j <= i) & ((i - j < near) | (j == 0) | (j % every == every - 1)), length, length,
        block=(BLOCK, BLOCK), device=device,
    )  # fmt: skip


def seconds(call, cuda):
    call()
    times = []
    for _ in range(3):
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times)


def exact_rows(q, k, v, blocks, rows):
    """O [rows, H, D] of some queries of the first sequence, in float64."""
    keys = torch.arange(k.shape[1], device=q.device)
    found = []
    for row in rows:
        seen = blocks[0, 0, row // BLOCK].repeat_interleave(BLOCK)[: len(keys)] & (keys <= row)
        scores = torch.einsum("hd,khd->hk", q[0, row].double(), k[0, seen].double()) * q.shape[-1] ** -0.5
        found.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[0, seen].double()))
    return torch.stack(found)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--length", type=int, default=131072 if cuda else 4096, help="tokens")
    parser.add_argument("--heads", type=int, default=8 if cuda else 2)
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 32)
    parser.add_argument(
        "--near", type=int, default=8, help=f"blocks of {BLOCK} tokens up to its own that a block sees (8)"
    )
    parser.add_argument("--every", type=int, default=16, help="of all earlier blocks it sees every so-many-th (16)")
    options = parser.parse_args(arguments)
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    torch.manual_seed(0)
    shape = (1, options.length, options.heads, options.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    d_o = torch.randn(shape, device=device, dtype=dtype)
    blocks = document_blocks(options.near, options.every, device, options.length)
    sparse = {"causal": True, "block_mask": blocks, "mask_block": (BLOCK, BLOCK)}

    o = tessera.torch.attention(q, k, v, **sparse)
    rows = [0, options.length // 3, options.length // 2, options.length - 1]
    exact = exact_rows(q.detach(), k.detach(), v.detach(), blocks, rows)
    error = float((o.detach()[0, rows].double() - exact).abs().max() / exact.abs().max())
    visible, causal = int(blocks.sum()), blocks.shape[2] * (blocks.shape[2] + 1) // 2
    print(f"{options.length} tokens, {options.heads} heads of {options.head_dim}: {visible} of {causal} blocks visible "
          f"({visible / causal:.1%}); "
          f"largest error of {len(rows)} rows {error:.1e}")  # fmt: skip
    for name, given in (("these blocks", sparse), ("all of them", {"causal": True})):
        with torch.no_grad():
            forward = seconds(lambda: tessera.torch.attention(q, k, v, **given), cuda)
        o = tessera.torch.attention(q, k, v, **given)
        backward = seconds(lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True), cuda)
        print(f"{name:13s} forward {forward * 1e3:8.2f} ms, backward {backward * 1e3:8.2f} ms", flush=True)
    return 0 if error < (0.02 if cuda else 1e-5) else 1


if __name__ == "__main__":
    sys.exit(main())
