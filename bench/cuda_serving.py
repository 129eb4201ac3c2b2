"""Decoding and mixed batches on a GPU: Tessera's kernels beside cuDNN, in CUDA graph replays, one run.

    python bench/cuda_serving.py [--cases decode short mixed] [--json FILE] [--seconds S] [--rounds 5]

decode: the cells of one query token a sequence, dense and in pages. short: few keys, by every kernel that takes them: where a
plan should take decode_sm90. mixed: a step of an engine, packed queries against pages: sequences with one token beside chunks
of a prompt, held against the two apart. Every result is first held against float64 on one head. Medians of rounds in turns,
microseconds; "read" is a kernel of PyTorch's that reads keys and values alone (their sum).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera
import tessera.torch
from cuda_bench import machine

HEADS = ((32, 8), (64, 8), (32, 32))
DECODE = ((1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 65536), (8, 8192), (16, 4096), (64, 2048), (64, 8192), (1, 524288))
SHORT = tuple((batch, keys) for batch in (1, 8, 64) for keys in (128, 256, 512, 1024, 2048, 4096))
PAGES = (0, 1, 16, 64, 544)
# Sequences with one token, keys of each; chunks, tokens of each, keys of each.
MIXED = ((16, 4096, 1, 512, 4096), (64, 8192, 1, 512, 8192), (64, 2048, 4, 256, 2048), (16, 1024, 1, 32, 1024), (128, 1024, 2, 1024, 8192))


def normal(generator, *shape):
    return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16)


def in_pages(k, v, size, generator):
    """[B, S, H, D] as pages in no order, S padded to whole pages; page_table int32 [B, pages of a sequence]."""
    batch, keys, heads, dim = k.shape
    per = -(-keys // size)
    table = torch.randperm(batch * per, device="cuda", generator=generator).to(torch.int32).view(batch, per)
    pages = []
    for x in (k, v):
        whole = F.pad(x, (0, 0, 0, 0, 0, per * size - keys)).view(batch * per, size, heads, dim)
        out = torch.empty_like(whole)
        out[table.flatten().long()] = whole
        pages.append(out)
    return *pages, table


def graph_of(call, estimate):
    count = max(2, min(200, math.ceil(2e-3 / estimate)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    return graph, count


def contest(calls, bytes_, options):
    graphs = {name: graph_of(call, max(8e-6, bytes_ / 3e12)) for name, call in calls.items()}
    times = {name: [] for name in graphs}
    for number in range(options.rounds):
        for name in list(graphs)[:: 1 if number % 2 else -1]:
            graph, count = graphs[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            replays = max(2, math.ceil(options.span_ms * 1e-3 / (count * max(8e-6, bytes_ / 3e12))))
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / replays / count)
    return {name: statistics.median(rounds) for name, rounds in times.items()}


def error(o, q, k, v):
    """Relative, of head 0 of the first sequence. q [Sq, H, D], k [S, Hkv, D]; causal at the bottom right."""
    s = q[:, 0].double() @ k[:, 0].double().T / math.sqrt(q.shape[-1])
    rows, keys = s.shape
    hidden = torch.arange(keys, device="cuda")[None] > torch.arange(rows, device="cuda")[:, None] + keys - rows
    exact = s.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, 0].double()
    return float((o[:, 0].double() - exact).norm() / exact.norm())


def decode(options, kernels, cells, pages):
    generator = torch.Generator("cuda").manual_seed(3)
    for heads, heads_kv in HEADS:
        for batch, keys in cells:
            bytes_ = 4 * batch * keys * heads_kv * 128
            if bytes_ > 5e9:
                continue
            q, k, v = normal(generator, batch, 1, heads, 128), *(normal(generator, batch, keys, heads_kv, 128) for _ in "kv")
            calls, errors = {}, {}

            def add(name, kernel, k, v, **more):
                call = lambda: tessera.torch.attention(q, k, v, kernel=kernel, **more)  # noqa: E731
                try:
                    errors[name] = error(call()[0], q[0], here[0], here[1])
                    calls[name] = call
                except (ValueError, RuntimeError) as refusal:
                    print(f"   {name}: {str(refusal)[:150]}")

            here = k[0], v[0]
            with torch.no_grad():
                for size in pages:
                    for kernel in kernels:
                        if size and kernel == "fwd_sm80":
                            continue
                        if not size:
                            add(kernel, kernel, k, v)
                            continue
                        paged_k, paged_v, table = in_pages(k, v, size, generator)
                        used = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
                        add(f"{kernel} pages of {size}", kernel, paged_k, paged_v, page_table=table, seqused_k=used)
                if options.invariant:
                    add("invariant", "decode_sm90", k, v, batch_invariant=True)
                whole = torch.cat([k.view(-1), v.view(-1)]).view(torch.int32) if bytes_ < 2e9 else None
                if whole is not None:
                    calls["read"] = lambda: whole.sum()
                a, b, c = (x.transpose(1, 2) for x in (q, k, v))

                def cudnn():
                    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                        return F.scaled_dot_product_attention(a, b, c, enable_gqa=heads != heads_kv)

                calls["cudnn"] = cudnn
                yield {"case": "decode", "heads": [heads, heads_kv], "batch": batch, "keys": keys, "bytes": bytes_,
                       "errors": errors, "us": contest(calls, bytes_, options)}  # fmt: skip


def mixed(options):
    generator = torch.Generator("cuda").manual_seed(4)
    size, heads, heads_kv = 16, 32, 8
    for ones, keys, chunks, tokens, chunk_keys in MIXED:
        rows = [1] * ones + [tokens] * chunks
        lengths = [keys] * ones + [chunk_keys] * chunks
        per = -(-max(lengths) // size)
        k, v = (normal(generator, len(rows) * per, size, heads_kv, 128) for _ in "kv")
        table = torch.randperm(len(rows) * per, device="cuda", generator=generator).to(torch.int32).view(-1, per)
        used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        q = normal(generator, sum(rows), heads, 128)
        calls, errors = {}, {}

        def add(name, first, last, kernel="auto"):
            cu = torch.tensor([0, *rows[first:last]], device="cuda").cumsum(0).to(torch.int32)
            part = q[sum(rows[:first]) : sum(rows[:last])]
            call = lambda: tessera.torch.attention(  # noqa: E731
                part, k, v, cu_seqlens_q=cu, page_table=table[first:last], seqused_k=used[first:last], causal=True,
                max_seqlen_q=max(rows[first:last]), max_seqlen_k=max(lengths), kernel=kernel,
            )  # fmt: skip
            try:
                o, n = call(), last - 1
                own = (x[table[n].long()].flatten(0, 1)[: lengths[n]] for x in (k, v))
                errors[name] = error(o[-rows[n] :], part[-rows[n] :], *own)
                calls[name] = call
            except (ValueError, RuntimeError) as refusal:
                print(f"   {name}: {str(refusal)[:150]}")

        with torch.no_grad():
            add("both", 0, len(rows))
            add("both by fwd_sm90", 0, len(rows), "fwd_sm90")
            add("decode alone", 0, ones)
            add("prefill alone", ones, len(rows))
            us = contest(calls, 4 * sum(lengths) * heads_kv * 128, options)
        apart = us.get("decode alone", math.nan) + us.get("prefill alone", math.nan)
        yield {"case": "mixed", "batch": [ones, keys, chunks, tokens, chunk_keys], "errors": errors, "us": us,
               "both / apart": us.get("both", math.nan) / apart}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=("decode", "short", "mixed"), default=["decode", "short", "mixed"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--span-ms", type=float, default=15)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after so many seconds")
    parser.add_argument("--no-pages", action="store_true")
    parser.add_argument("--invariant", action="store_true", help="decode and short: batch_invariant, too")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cells, started, result = [], time.monotonic(), {"machine": machine.facts()}
    print(machine.heading(result["machine"]))
    runs = {
        "mixed": lambda: mixed(options),
        "short": lambda: decode(options, ("decode_sm90", "fwd_sm80"), SHORT, (0,)),
        "decode": lambda: decode(options, ("decode_sm90", "fwd_sm80"), DECODE, (0,) if options.no_pages else PAGES),
    }
    for case in options.cases:
        for cell in runs[case]():
            cells.append(cell)
            us = cell["us"]
            where = cell.get("heads", ""), cell["batch"], cell.get("keys", "")
            worst = max(cell["errors"].values(), default=math.nan)
            print(case, *where, " ".join(f"{name} {x:.1f};" for name, x in us.items()), f"error {worst:.1e}",
                  f"both / apart {cell['both / apart']:.3f}" if case == "mixed" else "", flush=True)  # fmt: skip
            if options.json:
                with open(options.json, "w", encoding="utf-8") as file:
                    json.dump(result | {"cells": cells}, file, indent=1)
            if time.monotonic() - started > options.seconds:
                print("out of time")
                return


if __name__ == "__main__":
    main()
