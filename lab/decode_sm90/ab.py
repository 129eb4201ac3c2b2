#!/usr/bin/env python3
"""Versions of decode_sm90 side by side: every folder of build.sh's libraries is a version, in turns, as graph replays.

ab.py OUT FOLDER ...; alone, and (short cells) each call after a kernel of PyTorch's, as an engine's graph has it. Every call's result
is first held against float64."""
import json, os, sys

import torch

import harness

HEADS = [(32, 8), (64, 8), (32, 32)]
# heads, sequences, keys, keys of a page (0: dense), head size
CELLS = [(h, b, sk, 1, 128) for h, b, sk in (((32, 32), 1, 2048), ((32, 8), 1, 8192), ((32, 8), 1, 4096), ((64, 8), 1, 1024), ((32, 8), 64, 2048))]
CELLS += [((64, 8), 8, 8192, 0, 128), ((64, 8), 64, 1024, 0, 128), ((64, 8), 1, 1024, 64, 128), ((32, 32), 1, 2048, 16, 128)]
CELLS += [((32, 8), 1, sk, page, 128) for sk in (1024, 8192) for page in (16, 1, 544)]
CELLS += [((32, 8), b, sk, page, 64) for b, sk in ((64, 8192), (64, 2048), (1, 8192)) for page in (0, 16, 64)]
CELLS += [((32, 8), b, sk, page, 128) for b, sk in ((64, 2048), (16, 4096), (64, 8192), (64, 1024)) for page in (0, 16, 1)]
CELLS += [(h, 1, sk, 0, 128) for sk in (1024, 8192) for h in HEADS] + [((64, 8), 1, sk, 16, 128) for sk in (1024, 8192)]
CELLS += [(h, 1, sk, page, 128) for sk in (2048, 4096) for page in (0, 16) for h in HEADS if h[1] == 8 or page == 0]
CELLS += [((32, 8), 1, 65536, 0, 128), ((64, 8), 64, 2048, 0, 128), ((32, 32), 64, 2048, 0, 128)]


def main():
    out, folders = sys.argv[1], sys.argv[2:]
    file = open(out, "w")
    variants = []
    for folder in folders:
        for name in sorted(n[:-3] for n in os.listdir(folder) if n.endswith(".so")):
            v = harness.Variant(folder, name)
            v.name = f"{os.path.basename(folder)}:{name.removesuffix('_pdl').removeprefix('d128_').removeprefix('d64_')}"
            variants.append(v)
    other = torch.zeros(4096, device=harness.DEV)
    for (hq, hkv), batch, sk, page, d in CELLS:
        if not any(v.d == d and bool(v.paged) == bool(page) for v in variants):
            continue
        if harness.time.time() - harness.START > float(os.environ.get("SECONDS_LEFT", 60)):
            print("out of time", flush=True)
            break
        t = harness.tensors(batch, 1, sk, hq, hkv, d, 5, page=page)
        if not page:
            t.pop("seqused", None)
        o, lse = harness.reference(t, 0, -1) if batch * sk * hq <= 2**22 else (None, None)
        calls = {} if page else {"cudnn": harness.sdpa(t, harness.SDPBackend.CUDNN_ATTENTION)}
        forms = [(v, n, 0) for v in variants for n in ((8, 16) if v.invariant else (4, 8) if sk == 1024 else (4,))]
        forms += [(v, 4, team) for v in variants for team in (4, 2) if "_team" in v.name]  # blocks with neighbouring heads side by side
        for v, least, team in forms:
            if v.d != d or bool(v.paged) != bool(page) or (v.tma and page % v.block_n):
                continue
            try:
                call = v.bind(t, min_tiles=least, team=team)
                t["o"].fill_(float("nan"))
                call()
            except RuntimeError as failure:
                print(failure, flush=True)
                continue
            torch.cuda.synchronize()
            error = float((t["o"].double() - o).norm() / o.norm()) if o is not None else 0.0
            if not error < 4e-3 and "_nc" not in v.name:
                print(f"WRONG {v.name} {hq}/{hkv} {batch}x{sk} page {page}: {error:.2e}", flush=True)
                continue
            calls[v.name + ("" if least == 4 else f"@{least}") + (f"@t{team}" if team else "")] = call
        size = 4 * batch * sk * hkv * d
        rows = harness.contest(calls, size, 3, 0.006)
        after = {}
        if batch * sk <= 8192 and hkv == 8:

            def both(call):
                other.add_(1)
                call()

            after = harness.contest({"alone": lambda: other.add_(1), **{n: (lambda call=call: both(call)) for n, call in calls.items()}}, size, 3, 0.006)
            alone = after.pop("alone")
            after = {n: x - alone for n, x in after.items()}
        file.write(json.dumps(dict(cell=[hq, hkv, batch, sk, page, d], us=rows, after=after)) + "\n")
        file.flush()
        print(f"{hq}/{hkv} {batch}x{sk} p{page} D{d}: " + "  ".join(f"{n} {x:.1f}" + (f" (+{after[n]:.1f})" if n in after else "") for n, x in rows.items()), flush=True)
        del t, calls
        torch.cuda.empty_cache()


main()
