"""Serving on a GPU: Tessera's kernels beside cuDNN and FlashAttention-2, in CUDA graph replays, one run.

    python bench/cuda_serving.py [--cases decode dims lengths mixed trees few tokens codes ...] [--only PATTERN]
                                 [--out FOLDER] [--seconds S] [--rounds 5]
    python bench/cuda_serving.py --dry-run                   the cells, without a GPU
    python bench/cuda_serving.py --summary FOLDER/cells.json  targets and measurements

decode: the peers' cells of one query token a sequence and shorter ones, dense and in pages. dims: D 64 and 256.
lengths: 64 sequences of log-normal lengths. mixed: a step of an engine, packed queries against pages: sequences with
one token beside chunks of a prompt, compared with two separate calls. trees: drafted tokens with a tree mask and
causal. few: a few queries a sequence, by the plan's choice and by every kernel that supports them. tokens: 1 to 16
queries a sequence of many and few KV heads; chunks: of a prompt, over many more keys. codes: keys and values of
float8_e4m3 beside bfloat16, with scales of heads, of 128 keys and of tokens in pages. prefix: keys that
all sequences share, read once and for each. append: rotation and writing to the cache, beside a copy of as many bytes.
short: few keys, by every kernel that supports them, to find where a plan should choose decode_sm90. Every result is
first compared with float64 on one head of one sequence. Medians of alternating rounds, microseconds; "read" is a kernel
that only reads as many bytes as keys and values have; "cudnn" and "fa2" read dense ones. FlashAttention-2 supports only
pages of multiples of 256 keys: its own column.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import statistics
import sys
import time

import serving_cells
from serving_cells import CASES, DENSE, Cell

DEVICE = "cuda"
MOST_ERROR = 1e-2  # relative, of bfloat16's O
FA2_PAGE = 256  # FlashAttention-2 needs multiples of it


@functools.cache
def fa2():
    """FlashAttention-2's package, and not Tessera's drop-in of the same name, which has no module of kernels; None if
    it is not installed."""
    try:
        import flash_attn
        import flash_attn_2_cuda
    except ImportError:
        return None
    has_kernels = any(value is flash_attn_2_cuda for value in vars(flash_attn.flash_attn_interface).values())
    return flash_attn if has_kernels else None


def normal(generator, *shape):
    import torch

    return torch.randn(*shape, device=DEVICE, generator=generator, dtype=torch.bfloat16)


def in_pages(kv, size, generator):
    """[2, B, S, H, D] as pages in random order, S padded to whole pages; page_table int32 [B, pages of a sequence]."""
    import torch
    import torch.nn.functional as F

    _, batch, keys, heads, dim = kv.shape
    per = -(-keys // size)
    table = torch.randperm(batch * per, device=DEVICE, generator=generator).to(torch.int32).view(batch, per)
    pages = torch.empty(2, batch * per, size, heads, dim, device=DEVICE, dtype=kv.dtype)
    for n in range(2):
        pages[n][table.flatten().long()] = F.pad(kv[n], (0, 0, 0, 0, 0, per * size - keys)).view(-1, size, heads, dim)
    return *pages, table


def error(o, q, k, v, hidden=None):
    """Relative, of head 0. q [Sq, H, D], k [S, Hkv, D]; causal at the bottom right, and `hidden` [Sq, Sq] of the last
    keys."""
    import torch

    s = q[:, 0].double() @ k[:, 0].double().T / math.sqrt(q.shape[-1])
    rows, keys = s.shape
    unseen = torch.arange(keys, device=DEVICE)[None] > torch.arange(rows, device=DEVICE)[:, None] + keys - rows
    if hidden is not None:
        unseen[:, keys - rows :] |= hidden
    exact = s.masked_fill(unseen, -math.inf).softmax(-1) @ v[:, 0].double()
    return float((o[:, 0].double() - exact).norm() / exact.norm())


class Contest:
    """Calls that are first compared with float64, then timed alternately."""

    def __init__(self, cell: Cell):
        self.cell, self.calls, self.errors = cell, {}, {}

    def add(self, name, call, right=None):
        """right: the error of the call's results."""
        import torch

        try:
            o = call()
            if right is not None:
                self.errors[name] = right(o)
                if not self.errors[name] <= MOST_ERROR:
                    print(f"WRONG: {self.cell.name}, {name}: error {self.errors[name]:.2e}", flush=True)
            self.calls[name] = call
        except (ValueError, RuntimeError) as refusal:
            torch.cuda.synchronize()  # raises unless it was a refusal: this process cannot use the GPU any more
            print(f"   {self.cell.name}, {name}: {str(refusal)[:200]}", flush=True)

    def add_reading(self, tensor):
        """A kernel that reads as many of its bytes as the cell's keys and values have, and does nothing else."""
        from cuda_bench import reader

        self.add("read", functools.partial(reader.read, tensor, self.cell.bytes))

    def times(self, rounds, span_ms):
        import torch

        estimate = max(8e-6, self.cell.bytes / 3e12)
        graphs, times = {}, {name: [] for name in self.calls}
        count = max(2, min(200, math.ceil(2e-3 / estimate)))
        stream = torch.cuda.Stream()
        for name, call in self.calls.items():
            with torch.cuda.stream(stream):
                call()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                for _ in range(count):
                    call()
        replays = max(2, math.ceil(span_ms * 1e-3 / (count * estimate)))
        for number in range(rounds):
            for name in list(graphs)[:: 1 if number % 2 else -1]:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graphs[name].replay()
                start.record()
                for _ in range(replays):
                    graphs[name].replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3 / replays / count)
        return {name: statistics.median(each) for name, each in times.items()}


def decode(cell: Cell, generator) -> Contest:
    """One query a sequence, equal lengths: every layout, batch_invariant, cuDNN, and reading alone."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import tessera.torch

    contest = Contest(cell)
    kv = normal(generator, 2, cell.batch, cell.keys, cell.heads_kv, cell.dim)
    q = normal(generator, cell.batch, 1, cell.heads, cell.dim)
    used = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=DEVICE)

    def add(name, k, v, kernel, **more):
        call = functools.partial(tessera.torch.attention, q, k, v, kernel=kernel, **more)
        contest.add(name, call, lambda o: error(o[0], q[0], kv[0, 0], kv[1, 0]))

    for layout in cell.layouts:
        for kernel in cell.kernels:
            if layout == DENSE:
                add(kernel, kv[0], kv[1], kernel)
                continue
            if 8 * cell.bytes > torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() and layout != 16:
                continue
            k, v, table = in_pages(kv, layout, generator)
            add(f"{kernel} pages of {layout}", k, v, kernel, page_table=table, seqused_k=used)
    if cell.invariant:
        add("decode_sm90 invariant", kv[0], kv[1], "decode_sm90", batch_invariant=True)
    contest.add_reading(kv)
    a, b, c = (x.transpose(1, 2) for x in (q, kv[0], kv[1]))

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(a, b, c, enable_gqa=cell.heads != cell.heads_kv)

    contest.add("cudnn", cudnn)
    if fa2():

        def right(o):
            return error(o[0], q[0], kv[0, 0], kv[1, 0])

        contest.add("fa2", functools.partial(fa2().flash_attn_with_kvcache, q, kv[0], kv[1]), right)
        if 8 * cell.bytes <= torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved():
            k, v, table = in_pages(kv, FA2_PAGE, generator)
            contest.add(
                f"fa2 pages of {FA2_PAGE}",
                functools.partial(fa2().flash_attn_with_kvcache, q, k, v, cache_seqlens=used, block_table=table),
                right,
            )
    return contest


def lengths(cell: Cell, generator) -> Contest:
    """One query a sequence, different lengths, in pages; and reading alone."""
    import torch

    import tessera.torch

    contest = Contest(cell)
    q = normal(generator, cell.batch, 1, cell.heads, cell.dim)
    used = torch.tensor(cell.lengths, dtype=torch.int32, device=DEVICE)
    longest = cell.lengths.index(max(cell.lengths))
    for size in cell.layouts:
        counts = [-(-length // size) for length in cell.lengths]
        k, v = kv = normal(generator, 2, sum(counts), size, cell.heads_kv, cell.dim)
        order = torch.randperm(sum(counts), device=DEVICE, generator=generator).to(torch.int32)
        table = torch.full((cell.batch, max(counts)), -1, dtype=torch.int32, device=DEVICE)
        for row, entries in zip(table, order.split(counts)):
            row[: len(entries)] = entries
        own = [x[table[longest].long()].flatten(0, 1)[: cell.keys] for x in (k, v)]
        call = functools.partial(
            tessera.torch.attention, q, k, v, kernel="decode_sm90", page_table=table, seqused_k=used
        )
        contest.add(f"decode_sm90 pages of {size}", call, lambda o, own=own: error(o[longest], q[longest], *own))
        if fa2() and size % FA2_PAGE == 0:
            call = functools.partial(fa2().flash_attn_with_kvcache, q, k, v, cache_seqlens=used, block_table=table)
            contest.add(f"fa2 pages of {size}", call, lambda o, own=own: error(o[longest], q[longest], *own))
    contest.add_reading(kv)
    return contest


def packed(cell: Cell, generator, rows, lengths):
    """Packed queries against pages: q, k, v, page_table and seqused_k."""
    import torch

    size = cell.layouts[0]
    per = -(-max(lengths) // size)
    k, v = (normal(generator, len(rows) * per, size, cell.heads_kv, cell.dim) for _ in "kv")
    table = torch.randperm(len(rows) * per, device=DEVICE, generator=generator).to(torch.int32).view(-1, per)
    used = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return normal(generator, sum(rows), cell.heads, cell.dim), k, v, table, used


def offsets(rows):
    import torch

    return torch.tensor([0, *rows], device=DEVICE).cumsum(0).to(torch.int32)


def mixed(cell: Cell, generator) -> Contest:
    """A step's tokens and chunks in one call and in two."""
    import tessera.torch

    contest, (chunks, tokens, chunk_keys) = Contest(cell), cell.chunks
    rows = [1] * cell.batch + [tokens] * chunks
    lengths = [cell.keys] * cell.batch + [chunk_keys] * chunks
    q, k, v, table, used = packed(cell, generator, rows, lengths)

    def add(name, first, last, kernel="auto"):
        part, n = q[sum(rows[:first]) : sum(rows[:last])], last - 1
        call = functools.partial(
            tessera.torch.attention, part, k, v, cu_seqlens_q=offsets(rows[first:last]), page_table=table[first:last],
            seqused_k=used[first:last], causal=True, max_seqlen_q=max(rows[first:last]), max_seqlen_k=max(lengths),
            kernel=kernel,
        )  # fmt: skip
        own = [x[table[n].long()].flatten(0, 1)[: lengths[n]] for x in (k, v)]
        contest.add(name, call, lambda o: error(o[-rows[n] :], part[-rows[n] :], *own))

    add("both", 0, len(rows))
    for kernel in cell.kernels:
        add(f"both by {kernel}", 0, len(rows), kernel)
    add("tokens alone", 0, cell.batch)
    add("chunks alone", cell.batch, len(rows))
    return contest


def drafted(cell: Cell, generator):
    """A few queries of each sequence, packed, and causal: (the call's q, k, v), its options, and the keys of the last
    sequence."""
    queries = cell.queries
    q, k, v, table, used = packed(cell, generator, [queries] * cell.batch, [cell.keys] * cell.batch)
    options = dict(cu_seqlens_q=offsets([queries] * cell.batch), page_table=table, seqused_k=used, causal=True,
                   max_seqlen_q=queries, max_seqlen_k=cell.keys)  # fmt: skip
    return (q, k, v), options, [x[table[-1].long()].flatten(0, 1)[: cell.keys] for x in (k, v)]


def trees(cell: Cell, generator) -> Contest:
    """Drafted tokens, each with a random parent before it: the tree's mask, by the cell's kernels and by the plan's
    choice, and causal alone."""
    import torch

    import tessera.torch

    contest, queries = Contest(cell), cell.queries
    qkv, shared, own = drafted(cell, generator)
    sees = torch.eye(queries, dtype=torch.bool)
    parents = torch.Generator().manual_seed(6)
    for t in range(1, queries):
        parent = int(torch.randint(0, t, (1,), generator=parents))
        sees[t] |= sees[parent]
    words = (
        (sees.long() << torch.arange(queries)).sum(-1, keepdim=True).to(torch.int32).repeat(cell.batch, 1).to(DEVICE)
    )
    calls = [
        ("causal", "auto", None),
        ("tree", "auto", words),
        *((f"tree by {kernel}", kernel, words) for kernel in cell.kernels),
    ]
    for name, kernel, mask in calls:
        more = {} if mask is None else {"tree_mask": mask}
        call = functools.partial(tessera.torch.attention, *qkv, kernel=kernel, **shared, **more)
        hidden = None if mask is None else ~sees.to(DEVICE)
        contest.add(name, call, lambda o, hidden=hidden: error(o[-queries:], qkv[0][-queries:], *own, hidden=hidden))
    return contest


def few(cell: Cell, generator) -> Contest:
    """A few queries a sequence, causal: by the plan's choice, and by each of the cell's kernels."""
    import tessera.torch

    contest, queries = Contest(cell), cell.queries
    qkv, shared, own = drafted(cell, generator)
    for name, kernel in [("causal", "auto"), *((f"causal by {kernel}", kernel) for kernel in cell.kernels)]:
        call = functools.partial(tessera.torch.attention, *qkv, kernel=kernel, **shared)
        contest.add(name, call, lambda o: error(o[-queries:], qkv[0][-queries:], *own))
    if fa2():
        q, table = qkv[0].view(cell.batch, queries, cell.heads, cell.dim), shared["page_table"]
        dense = [x[table.long()].view(cell.batch, -1, cell.heads_kv, cell.dim)[:, : cell.keys] for x in qkv[1:]]
        call = functools.partial(fa2().flash_attn_with_kvcache, q, *dense, causal=True)
        contest.add("fa2", call, lambda o: error(o[-1], q[-1], *own))
    return contest


def tokens(cell: Cell, generator) -> Contest:
    """Equal numbers of queries of sequences of equal lengths, causal, by each of the cell's kernels; and cuDNN, which
    reads dense keys and sees all of them."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import tessera.torch

    contest = Contest(cell)
    kv = normal(generator, 2, cell.batch, cell.keys, cell.heads_kv, cell.dim)
    q = normal(generator, cell.batch, cell.queries, cell.heads, cell.dim)
    used = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=DEVICE)

    def wrong(o):
        """Of the first and the last query head of the last sequence."""
        return max(error(o[-1, :, h:], q[-1, :, h:], *kv[:, -1, :, h_kv:]) for h, h_kv in ((0, 0), (-1, -1)))

    for layout in cell.layouts:
        k, v, pages = *kv, {}
        if layout != DENSE:
            k, v, table = in_pages(kv, layout, generator)
            pages = dict(page_table=table, seqused_k=used)
        for kernel in cell.kernels:
            name = kernel if layout == DENSE else f"{kernel} pages of {layout}"
            call = functools.partial(tessera.torch.attention, q, k, v, causal=True, kernel=kernel, **pages)
            contest.add(name, call, wrong)
    a, b, c = (x.transpose(1, 2) for x in (q, *kv))

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(a, b, c, enable_gqa=cell.heads != cell.heads_kv)

    contest.add("cudnn", cudnn)
    return contest


def codes(cell: Cell, generator) -> Contest:
    """Queries against bfloat16 keys and values and against their codes, whose errors are those of what they stand for;
    causal. "by head", "by block", "by token": what shares a scale."""
    import torch

    import tessera
    import tessera.torch

    contest = Contest(cell)
    kv = normal(generator, 2, cell.batch, cell.keys, cell.heads_kv, cell.dim)
    q = normal(generator, cell.batch, cell.queries, cell.heads, cell.dim)
    used = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=DEVICE)

    def stands_for(x):
        """Of the first sequence, in float64."""
        numbers, scale = x.codes[: 1 if table is None else None].double(), x.scale.double()
        if scale.dim() == 3 and table is None:
            scale = scale[:1].repeat_interleave(128, 1)[:, : cell.keys]
        return of_first(numbers * scale[..., None])

    def of_first(x):
        return x[0] if table is None else x[table[0].long()].flatten(0, 1)[: cell.keys]

    for layout in cell.layouts:
        (k, v), table, pages = kv, None, {}
        if layout != DENSE:
            k, v, table = in_pages(kv, layout, generator)
            pages = dict(page_table=table, seqused_k=used)
        name = "decode_sm90" if layout == DENSE else f"decode_sm90 pages of {layout}"
        call = functools.partial(tessera.torch.attention, q, causal=True, kernel="decode_sm90", **pages)
        own = [of_first(x) for x in (k, v)]
        contest.add(name, functools.partial(call, k, v), lambda o, own=own: error(o[0], q[0], *own))
        for scheme in ("head", "block" if layout == DENSE else "token"):
            k8, v8 = (tessera.quantize(x, "float8_e4m3", scheme=scheme) for x in (k, v))
            of_codes = functools.partial(call, k8.codes, v8.codes, k_descale=k8.scale, v_descale=v8.scale)
            own = [stands_for(x) for x in (k8, v8)]
            contest.add(f"{name} by {scheme}", of_codes, lambda o, own=own: error(o[0], q[0], *own))
    contest.add_reading(kv)
    return contest


def prefix(cell: Cell, generator) -> Contest:
    """One query a sequence; the first keys of all are in the same pages: read once, and for each."""
    import torch

    import tessera.torch

    contest, size = Contest(cell), cell.layouts[0]
    shared, own = cell.prefix // size, -(-(cell.keys - cell.prefix) // size)
    k, v = (normal(generator, shared + cell.batch * own, size, cell.heads_kv, cell.dim) for _ in "kv")
    order = torch.randperm(len(k), device=DEVICE, generator=generator).to(torch.int32)
    table = torch.cat([order[:shared].expand(cell.batch, -1), order[shared:].view(cell.batch, own)], 1).contiguous()
    used = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=DEVICE)
    q = normal(generator, cell.batch, cell.heads, cell.dim)
    last = [x[table[-1].long()].flatten(0, 1)[: cell.keys] for x in (k, v)]
    once = dict(prefix_groups=offsets([cell.batch]), prefix_lens=torch.tensor([cell.prefix], dtype=torch.int32,
                                                                              device=DEVICE),
                max_prefix_k=cell.prefix, max_suffix_k=cell.keys - cell.prefix)  # fmt: skip
    for name, more in (("each alone", {}), ("read once", once)):
        call = functools.partial(
            tessera.torch.attention, q, k, v, cu_seqlens_q=offsets([1] * cell.batch), page_table=table, seqused_k=used,
            causal=True, max_seqlen_q=1, max_seqlen_k=cell.keys, **more,
        )  # fmt: skip
        contest.add(name, call, lambda o: error(o[-1:], q[-1:], *last))
    return contest


def append(cell: Cell, generator) -> Contest:
    """New tokens of every sequence into dense and paged caches, q and k rotated, of bfloat16 and, in pages, of e4m3;
    and a copy of as many bytes as bfloat16 has."""
    import torch

    import tessera

    contest, tokens = Contest(cell), cell.queries
    q = normal(generator, cell.batch, tokens, cell.heads, cell.dim)
    new = normal(generator, 2, cell.batch, tokens, cell.heads_kv, cell.dim)
    used = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=DEVICE)
    angles = torch.rand(cell.keys, cell.dim // 2, device=DEVICE, generator=generator) * math.tau
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)

    def turned(x):
        """x [tokens, D] at the last places, in float64."""
        c, s = (t[cell.keys - tokens :].double() for t in (cos, sin))
        first, second = x.double().chunk(2, -1)
        return torch.cat([first * c - second * s, first * s + second * c], -1)

    def wrong(q_out, *caches):
        """Of the last sequence's first head; caches: its keys and values."""
        got = torch.cat([q_out[-1, :, 0], *(cache[cell.keys - tokens : cell.keys, 0] for cache in caches)], -1).double()
        exact = torch.cat([turned(q[-1, :, 0]), turned(new[0, -1, :, 0]), new[1, -1, :, 0].double()], -1)
        return float((got - exact).norm() / exact.norm())

    def differing(codes, scales, table, _):
        """The share of the last sequence's codes of the first head that are not the exact values' nearest ones."""
        shares = []
        for x, scale, exact in zip(codes, scales, (turned(new[0, -1, :, 0]), new[1, -1, :, 0].double())):
            new_keys = slice(cell.keys - tokens, cell.keys)
            got = x[table[-1].long()].flatten(0, 1)[new_keys, 0]
            of = scale[0] if scale.dim() == 1 else scale[table[-1].long()].flatten(0, 1)[new_keys, 0, None]
            nearest = (exact / of.double()).float().to(got.dtype)
            shares.append((got.float() != nearest.float()).double().mean())
        return float(max(shares))

    for layout in cell.layouts:
        kv = torch.zeros(2, cell.batch, cell.keys, cell.heads_kv, cell.dim, device=DEVICE, dtype=q.dtype)
        *caches, table = (*kv, None) if layout == DENSE else in_pages(kv, layout, generator)
        q_out = torch.empty_like(q)
        call = functools.partial(
            tessera.append, *new, *caches, used, page_table=table, q=q, q_out=q_out, cos=cos, sin=sin
        )

        def right(_, caches=caches, table=table, q_out=q_out):
            return wrong(q_out, *(x[-1] if table is None else x[table[-1].long()].flatten(0, 1) for x in caches))

        name = "dense" if layout == DENSE else f"pages of {layout}"
        contest.add(name, call, right)
        if layout == DENSE:
            continue
        for scheme in ("head", "token"):
            codes = [x.to(torch.float8_e4m3fn) for x in caches]
            shape = (cell.heads_kv,) if scheme == "head" else (*codes[0].shape[:2], cell.heads_kv)
            scales = [torch.full(shape, 1 / 64, device=DEVICE) for _ in codes]
            of_codes = functools.partial(
                tessera.append, *new, *codes, used, page_table=table, q=q, q_out=q_out, cos=cos, sin=sin,
                k_descale=scales[0], v_descale=scales[1], compute_scales=scheme == "token",
            )  # fmt: skip
            contest.add(f"{name} by {scheme}", of_codes, functools.partial(differing, codes, scales, table))
    source = torch.zeros(cell.bytes, dtype=torch.uint8, device=DEVICE)
    contest.add("copy", functools.partial(torch.empty_like(source).copy_, source))
    return contest


# The others are decode cells.
CONTESTS = {"lengths": lengths, "mixed": mixed, "trees": trees, "few": few, "tokens": tokens, "chunks": tokens,
            "codes": codes, "prefix": prefix, "append": append}  # fmt: skip


def cells_of(case: str, pattern: str) -> list[Cell]:
    return [cell for cell in CASES[case]() if re.search(pattern, cell.name)]


def measure(options) -> int:
    """Of all cells from number options.first on. After a GPU error a new process continues with the next cell."""
    import torch

    from cuda_bench import machine

    machine.need_gpu()
    started, file = time.monotonic(), f"{options.out}/cells.json"
    os.makedirs(options.out, exist_ok=True)
    record = {"machine": machine.facts(), "cells": [], "failed": []}
    if options.first:
        with open(file, encoding="utf-8") as before:
            record = json.load(before)
    else:
        print(machine.heading(record["machine"]))
    results, failed = record["cells"], record["failed"]

    def keep():
        with open(file, "w", encoding="utf-8") as out:
            json.dump(record, out, indent=1)

    # Alternates between the cases, so that each has numbers if time runs out.
    queues, cells = [cells_of(case, options.only) for case in options.cases], []
    while any(queues):
        cells += [queue.pop(0) for queue in queues if queue]
    for number, cell in list(enumerate(cells))[options.first :]:
        left = options.seconds - (time.monotonic() - started)
        if left < 0:
            print(f"out of time: {len(results)} of {len(cells)} cells")
            break
        try:
            with torch.no_grad():
                contest = CONTESTS.get(cell.case, decode)(cell, torch.Generator(DEVICE).manual_seed(3))
                us = contest.times(options.rounds, options.span_ms)
        except torch.OutOfMemoryError:
            print(f"   {cell.name}: out of memory", flush=True)
            torch.cuda.empty_cache()
            continue
        except RuntimeError as error:
            print(f"FAILED: {cell.name}: {error}", flush=True)
            failed.append(cell.name), keep()
            rest = ["--cases", *options.cases, "--out", options.out, "--rounds", str(options.rounds)]
            rest += [
                "--only", options.only, "--span-ms", str(options.span_ms), "--seconds", str(left), "--first",
                str(number + 1),
            ]  # fmt: skip
            os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), *rest])
        torch.cuda.empty_cache()
        results.append({"case": cell.case, "name": cell.name, "bytes": cell.bytes, "cell": serving_cells.fields(cell),
                        "us": us,
                        "errors": contest.errors})  # fmt: skip
        worst = max(contest.errors.values(), default=math.nan)
        print(cell.name, " ".join(f"{name} {x:.1f};" for name, x in us.items()), f"error {worst:.1e}", flush=True)
        keep()
        serving_cells.write_csv(results, f"{options.out}/cells.csv")
    print(serving_cells.table(results))
    wrong = sum(not x <= MOST_ERROR for result in results for x in result["errors"].values())
    print(f"{wrong} results are wrong" if wrong else "every result is right", *(f"\nFAILED: {name}" for name in failed))
    return 1 if wrong or failed or not results else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=[case for case in CASES if case != "short"])
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="cells in whose names this regular expression is found"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--span-ms", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after so many seconds")
    parser.add_argument(
        "--out", metavar="FOLDER", default="build/serving",
        help="cells.json and cells.csv, written after every cell (build/serving)",
    )  # fmt: skip
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--summary", metavar="JSON")
    options = parser.parse_args()
    if options.summary:
        with open(options.summary, encoding="utf-8") as file:
            print(serving_cells.table(json.load(file)["cells"]))
        return 0
    try:
        chosen = any(cells_of(case, options.only) for case in options.cases)
    except re.error as error:
        parser.error(f"argument --only: {options.only!r} is no regular expression: {error}")
    if not chosen:
        parser.error(
            f"argument --only: {options.only!r} is found in no cell of {', '.join(options.cases)} (--dry-run lists "
            "them)"
        )
    if options.dry_run:
        for case in options.cases:
            for cell in cells_of(case, options.only):
                layouts = ", ".join("dense" if layout == DENSE else f"pages of {layout}" for layout in cell.layouts)
                print(
                    f"{cell.name}: {cell.bytes / serving_cells.MIB:.0f} MiB; "
                    f"{layouts}{'; invariant' if cell.invariant else ''}"
                )
        return 0
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
