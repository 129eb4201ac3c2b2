#!/usr/bin/env python3
"""decode_sm90 by hand: holds every variant against float64 and times it beside cuDNN, FlashAttention-2 and a kernel that only
reads, as CUDA graph replays in turns.

harness.py FOLDER OUT [--check] [--time] [--streams] [--seconds S]; FOLDER holds build.sh's libraries."""
import argparse, ctypes, json, math, os, statistics, time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

POINTERS = ["q", "k", "v", "o", "lse", "workspace", "seqused", "page_table", "cu_seqlens_q"]
INTS = ["batch", "sq", "sk", "heads_q", "heads_kv", "head_dim", "causal", "window_left", "page_size", "pages", "max_pages", "blocks",
        "min_tiles", "rows_q", "team"]  # fmt: skip
ROWS = 16
START = time.time()
DEV = "cuda"


class Args(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in POINTERS] + [(n, ctypes.c_int) for n in INTS] + [("scale", ctypes.c_float)]


class Variant:
    def __init__(self, folder, name):
        self.name, self.lib = name, ctypes.CDLL(os.path.join(folder, name + ".so"))
        out = (ctypes.c_int * 10)()
        self.lib.describe(out)
        self.d, self.block_n, self.warps, self.stages, self.smem, self.float16, self.paged, self.min_blocks, self.varlen, self.invariant = out
        self.workspace, self.tma = None, "tma" in name

    def bind(self, t, causal=0, window=-1, min_tiles=4, team=0, waves=1):
        q, k = t["q"], t["k"]
        packed = t.get("cu_seqlens_q") is not None
        a = Args(**{n: t[n].data_ptr() if t.get(n) is not None else None for n in POINTERS if n != "workspace"})
        a.batch, a.sq, a.sk, a.rows_q = t["batch"], t["sq"], t["sk"], q.shape[0] if packed else 0
        a.heads_q, a.heads_kv, a.head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
        a.causal, a.window_left = causal, window
        if self.paged:
            a.page_size, a.pages, a.max_pages = k.shape[1], k.shape[0], t["page_table"].shape[1]
        a.blocks = torch.cuda.get_device_properties(0).multi_processor_count * self.min_blocks * waves
        a.min_tiles = min_tiles
        heads = range(a.heads_kv, 0, -1)
        a.team = team or next(n for n in heads if a.heads_kv % n == 0 and a.blocks // n * n >= 0.96 * a.blocks)
        size = a.blocks * (8 + (16 if self.invariant else 2) * ROWS * (a.head_dim + 2) * 4) + 512
        if self.workspace is None or self.workspace.numel() * 4 < size:  # what memory holds at first is anything
            self.workspace = torch.randint(0, 4, (size // 4 + 64,), dtype=torch.int32, device=DEV)
        workspace = self.workspace
        a.workspace = workspace.data_ptr()
        a.scale = 1 / math.sqrt(a.head_dim)
        run = self.lib.run

        def call():
            error = run(ctypes.byref(a), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
            if error:
                raise RuntimeError(f"{self.name}: error {error}")

        call.keep = a, t, workspace
        return call


def tensors(batch, sq, sk, hq, hkv, d, seed, page=0, lengths=None, rows=None):
    """rows: of each sequence, packed. lengths: keys in use; what lies past them is NaN."""
    g = torch.Generator(device=DEV).manual_seed(seed)
    r = lambda *s: torch.randn(*s, device=DEV, generator=g, dtype=torch.bfloat16)
    t = dict(batch=batch, sq=sq, sk=sk)
    t["q"] = r(batch, sq, hq, d) if rows is None else r(sum(rows) + 3, hq, d)
    if rows is not None:
        t["cu_seqlens_q"] = torch.tensor([1] + [1 + sum(rows[: i + 1]) for i in range(batch)], dtype=torch.int32, device=DEV)
    t["o"] = torch.full_like(t["q"], float("nan"))
    shape = (batch, hq, sq) if rows is None else (hq, t["q"].shape[0])
    t["lse"] = torch.full(shape, float("nan"), device=DEV)
    if lengths is not None:
        t["seqused"] = torch.tensor(lengths, dtype=torch.int32, device=DEV)
    used = lengths or [sk] * batch
    t["used"], t["rows"] = used, rows or [sq] * batch
    if not page:
        t["k"], t["v"] = r(batch, sk, hkv, d), r(batch, sk, hkv, d)
        for b in range(batch):
            t["k"][b, used[b] :] = t["v"][b, used[b] :] = float("nan")
        return t
    per = (sk + page - 1) // page
    t["sk"] = per * page
    pages = batch * per + 7
    t["k"], t["v"] = r(pages, page, hkv, d), r(pages, page, hkv, d)
    order = torch.randperm(pages, device=DEV, generator=g)[: batch * per].to(torch.int32)
    t["page_table"] = order.view(batch, per).contiguous()
    if "seqused" not in t:
        t["seqused"] = torch.tensor(used, dtype=torch.int32, device=DEV)
    for b in range(batch):
        n = used[b]
        flat = t["page_table"][b].long()
        if n % page and n < sk + page:
            t["k"][flat[n // page], n % page :] = float("nan")
            t["v"][flat[n // page], n % page :] = float("nan")
        rest = flat[(n + page - 1) // page :]
        t["k"][rest] = t["v"][rest] = float("nan")
    return t


def reference(t, causal, window):
    q, hq, hkv, d = t["q"], t["q"].shape[-2], t["k"].shape[-2], t["q"].shape[-1]
    o, lse = torch.zeros_like(q, dtype=torch.float64), torch.full_like(t["lse"], float("-inf"), dtype=torch.float64)
    begin = 1
    for b in range(t["batch"]):
        rows, n = t["rows"][b], t["used"][b]
        qb = q[begin : begin + rows] if "cu_seqlens_q" in t else q[b]
        if "page_table" in t:
            kb, vb = (t[x][t["page_table"][b].long()].flatten(0, 1)[:n] for x in "kv")
        else:
            kb, vb = t["k"][b, :n], t["v"][b, :n]
        if rows and n:
            kb, vb = (x.double().repeat_interleave(hq // hkv, 1) for x in (kb, vb))
            s = torch.einsum("qhd,khd->hqk", qb.double(), kb) / math.sqrt(d)
            i, j = torch.arange(rows, device=DEV)[:, None] + n - rows, torch.arange(n, device=DEV)[None]
            if causal:
                s = s.masked_fill(j > i, float("-inf"))
            if window >= 0:
                s = s.masked_fill(j < i - window, float("-inf"))
            l = torch.logsumexp(s, -1)
            p = torch.exp(s - torch.where(l == float("-inf"), 0.0, l)[..., None])
            ob = torch.einsum("hqk,khd->qhd", p, vb)
            if "cu_seqlens_q" in t:
                o[begin : begin + rows], lse[:, begin : begin + rows] = ob, l
            else:
                o[b], lse[b] = ob, l
        begin += rows
    return o, lse


# name, arguments of tensors, causal, window
CHECKS = [
    ("1x8192", dict(batch=1, sq=1, sk=8192, hq=32, hkv=8), 0, -1),
    ("1x1024 mha", dict(batch=1, sq=1, sk=1024, hq=8, hkv=8), 0, -1),
    ("3x777", dict(batch=3, sq=1, sk=777, hq=32, hkv=8), 0, -1),
    ("64x100", dict(batch=64, sq=1, sk=100, hq=64, hkv=8), 0, -1),
    ("1x1", dict(batch=1, sq=1, sk=1, hq=8, hkv=8), 0, -1),
    ("4 tokens", dict(batch=2, sq=4, sk=1000, hq=16, hkv=8), 1, -1),
    ("8 tokens of 4 heads", dict(batch=2, sq=8, sk=300, hq=32, hkv=8), 1, -1),
    ("window", dict(batch=2, sq=3, sk=5000, hq=16, hkv=4), 1, 700),
    ("lengths", dict(batch=6, sq=1, sk=4000, hq=16, hkv=4, lengths=[0, 1, 17, 4000, 333, 64]), 0, -1),
    ("lengths of 300", dict(batch=300, sq=1, sk=500, hq=8, hkv=2, lengths=[(i * 97) % 501 for i in range(300)]), 0, -1),
    ("packed", dict(batch=5, sq=4, sk=900, hq=16, hkv=4, lengths=[900, 0, 31, 640, 2], rows=[1, 2, 0, 4, 3]), 1, -1),
    ("mqa 1x20000", dict(batch=1, sq=1, sk=20000, hq=16, hkv=1), 0, -1),
]
PAGES = [1, 16, 64, 544]


def check(variants, say):
    failed = 0
    for v in variants:
        worst = 0.0
        for name, shape, causal, window in CHECKS:
            if not v.varlen and ({"lengths", "rows"} & set(shape)):
                continue
            for page in PAGES[v.tma :] if v.paged else [0]:
                t = tensors(d=v.d, seed=len(name) + page, page=page, **shape)
                o, lse = reference(t, causal, window)
                call = v.bind(t, causal, window, min_tiles=1 + page % 3, team=page % 2, waves=1 + len(name) % 2)
                v.workspace.random_(0, 4)  # counts nobody prepared
                call()
                torch.cuda.synchronize()
                first = t["o"].clone(), t["lse"].clone()
                got, norm = t["o"].double(), max(float(o.norm()), 1e-30)
                error = float((got - o).norm() / norm)
                finite = torch.isfinite(lse)
                lse_error = float((t["lse"].double() - lse)[finite].abs().max()) if finite.any() else 0.0
                same_inf = bool((t["lse"][~finite] == float("-inf")).all())
                repeat = True
                for _ in range(30):
                    call()
                torch.cuda.synchronize()
                repeat = torch.equal(first[0], t["o"]) and torch.equal(first[1], t["lse"])
                good = error < 4e-3 and lse_error < 1e-4 and same_inf and repeat
                failed += not good
                worst = max(worst, error if error == error else 9.9)
                say(dict(check=v.name, case=name, page=page, error=error, lse_error=lse_error, same_inf=same_inf, repeat=repeat, good=good))
                if not good:
                    print(f"WRONG {v.name} {name} page {page}: error {error:.2e} lse {lse_error:.1e} inf {same_inf} repeat {repeat}", flush=True)
        failed += bool(v.invariant) and not same_in_any_batch(v)
        print(f"{v.name:22} checked, worst error {worst:.2e}, smem {v.smem}", flush=True)
    return failed


def same_in_any_batch(v):
    """The bits of a sequence alone and among others, where parts of keys do not depend on the batch."""
    lengths = [3000, 70, 20000, 0, 1234, 9999, 128, 5000, 260, 17]
    t = tensors(len(lengths), 1, 20032, 16, 4, v.d, 3, page=16 if v.paged else 0, lengths=lengths)
    v.bind(t)()
    torch.cuda.synchronize()
    good = True
    for b in range(len(lengths)):
        one = dict(t, batch=1, used=lengths[b : b + 1], rows=[1])
        for n in ("q", "seqused") + (("page_table",) if v.paged else ("k", "v")):
            one[n] = t[n][b : b + 1].contiguous()
        one["o"], one["lse"] = torch.full_like(one["q"], float("nan")), torch.full_like(t["lse"][b : b + 1], float("nan"))
        v.bind(one)()
        torch.cuda.synchronize()
        good &= torch.equal(one["o"], t["o"][b : b + 1]) and torch.equal(one["lse"], t["lse"][b : b + 1])
    if not good:
        print(f"WRONG {v.name}: bits depend on the batch", flush=True)
    return good


def graph_of(call, estimate):
    n = max(4, min(200, math.ceil(2e-3 / estimate)))
    call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(n):
            call()
    return graph, n


def timed(graph, n, seconds):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    count = max(2, math.ceil(seconds / (start.elapsed_time(end) * 1e-3)))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / count / n  # us


def contest(calls, bytes_, rounds, span):
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = graph_of(call, max(5e-6, bytes_ / 4e12))
        except Exception as error:
            print(name, str(error)[:200], flush=True)
    times = {n: [] for n in graphs}
    for r in range(rounds):
        for name in list(graphs)[:: 1 if r % 2 else -1]:
            times[name].append(timed(*graphs[name], span))
    return {n: statistics.median(x) for n, x in times.items()}


def sdpa(t, backend):
    q, k, v = (t[n].transpose(1, 2) for n in "qkv")

    def call():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    return call


HEADS = [(32, 8), (64, 8), (32, 32)]
SHORT = [(1, 1024), (1, 2048), (1, 4096), (1, 8192)]
LONG = [(1, 65536), (8, 8192), (16, 4096), (64, 2048), (64, 8192), (1, 524288)]
WAVES = ("d128_16x8x2_tma", "d128_16x8x1_tma")
PAGED = [(1, 1024), (1, 8192), (1, 65536), (16, 4096), (64, 8192)]


def measure(variants, reader, say, a):
    out = torch.zeros(16, dtype=torch.int32, device=DEV)
    dims = sorted({v.d for v in variants}, key=lambda d: d != 128)
    cells = [(d, hq, hkv, batch, sk) for d in dims for hq, hkv in (HEADS if d == 128 and not a.few else HEADS[:1])
             for batch, sk in (SHORT + LONG if d == 128 else [(1, 8192), (8, 8192), (64, 8192)])]  # fmt: skip
    for d, hq, hkv, batch, sk in sorted(cells, key=lambda c: (c[2] != 8, c[1] != 32, c[0] != 128)):
        bytes_ = 4 * batch * sk * hkv * d
        if time.time() - START > a.seconds:
            print("out of time", flush=True)
            return
        if bytes_ > 5e9:
            continue
        t = tensors(batch, 1, sk, hq, hkv, d, 5)
        t.pop("seqused", None)
        calls = {"cudnn": sdpa(t, SDPBackend.CUDNN_ATTENTION)}
        if a.fa2:
            calls["fa2"] = sdpa(t, SDPBackend.FLASH_ATTENTION)
        kv = torch.empty(bytes_, dtype=torch.uint8, device=DEV)
        calls["read"] = lambda: reader.read_bytes(ctypes.c_void_p(kv.data_ptr()), ctypes.c_longlong(bytes_), ctypes.c_void_p(out.data_ptr()), 132 * 4, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        for v in variants:
            if v.d != d or v.paged:
                continue
            calls[v.name] = v.bind(t)
            if v.name in WAVES and sk * batch > 8192:
                calls.update({f"{v.name}@w{n}": v.bind(t, waves=n) for n in (2,)})
            if v.name in WAVES and sk <= 8192 and batch == 1:
                calls.update({f"{v.name}@m{n}": v.bind(t, min_tiles=n) for n in (2, 8)})
        rows = contest(calls, bytes_, a.rounds, a.span)
        report(say, d, hq, hkv, batch, sk, 0, bytes_, rows)
        for v in variants:
            if "trace" in v.name and v.d == d and v.name in calls and (batch, sk) in [(1, 1024), (1, 8192), (64, 8192)]:
                show_trace(v, calls[v.name], say)
        base = rows["cudnn"]
        del t, calls, kv
        paged = [v for v in variants if v.d == d and v.paged]
        for page in ([1, 16, 64, 544] if paged and (batch, sk) in PAGED and (hq, hkv) == (32, 8) else []):
            t = tensors(batch, 1, sk, hq, hkv, d, 5, page=page)
            rows = contest({v.name: v.bind(t) for v in paged if page > 1 or not v.tma}, bytes_, a.rounds, a.span)
            report(say, d, hq, hkv, batch, sk, page, bytes_, dict(cudnn=base, **rows))
            del t


def show_trace(v, call, say):
    """When blocks start and end, in ns from the first one's start."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    blocks = min(1056, call.keep[0].blocks)
    marks = (ctypes.c_longlong * (1056 * 4))()
    v.lib.trace(marks)
    rows = [list(marks[4 * b : 4 * b + 4]) for b in range(blocks)]
    first = min(r[0] for r in rows)
    rows = [[r[0] - first, r[1] - first, r[2], r[3]] for r in rows]
    say(dict(trace=v.name, batch=call.keep[0].batch, sk=call.keep[0].sk, blocks=rows))
    busy = [r for r in rows if r[1] - r[0] > 2000] or rows
    some = lambda x: f"{min(x)} {statistics.median(x)} {max(x)}"
    print(f"   {v.name}: ns, least, median, most: start {some([r[0] for r in busy])}; end {some([r[1] for r in busy])}; clocks {some([r[2] for r in busy])}; {len(busy)} blocks", flush=True)


def lognormal(variants, reader, say, a, out):
    g = torch.Generator().manual_seed(1)
    lengths = (torch.randn(64, generator=g) * 1.1 + math.log(4096)).exp().clamp(16, 65536).int().tolist()
    hkv, d = 8, 128
    for page in (16,):
        t = tensors(64, 1, max(lengths), 32, hkv, d, 5, page=page, lengths=lengths)
        bytes_ = 4 * sum(lengths) * hkv * d
        kv = torch.empty(bytes_, dtype=torch.uint8, device=DEV)
        calls = {v.name: v.bind(t) for v in variants if v.d == d and v.paged}
        calls["read"] = lambda: reader.read_bytes(ctypes.c_void_p(kv.data_ptr()), ctypes.c_longlong(bytes_), ctypes.c_void_p(out.data_ptr()), 132 * 4, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        rows = contest(calls, bytes_, a.rounds, a.span)
        report(say, d, 32, hkv, "64 lognormal", max(lengths), page, bytes_, dict(cudnn=rows["read"], **rows))


def streams(lib, reader, say, a):
    """What an order of addresses gives, with nothing computed: stream.cu. Tiles of 16 keys in order and in random order ("r"), modes as there,
    m4: a key at a time; "l1": the L2 cache fetches 128 bytes at once, not 256."""
    out = torch.zeros(16, dtype=torch.int32, device=DEV)
    ptr = lambda x: ctypes.c_void_p(x.data_ptr())
    promotions = {"": 3, "l1": 2}
    for tiles, heads, dim in [(64 * 512, 8, 128), (64 * 512, 8, 64), (64 * 128, 8, 128)]:
        k, v = (torch.randn(tiles, 16, heads, dim, device=DEV, dtype=torch.bfloat16) for _ in "kv")
        bytes_ = 4 * tiles * 16 * heads * dim
        kv = torch.empty(bytes_, dtype=torch.uint8, device=DEV)
        stream = lambda: ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        calls = {"read": lambda: reader.read_bytes(ptr(kv), ctypes.c_longlong(bytes_), ptr(out), 132 * 4, stream())}
        orders = {"": torch.arange(tiles, device=DEV), "r": torch.randperm(tiles, device=DEV)}
        keys = {name: table[:, None] * 16 + torch.arange(16, device=DEV) for name, table in orders.items()}
        keys["rk"] = torch.randperm(tiles * 16, device=DEV)
        forms = [(mode, order, warps, stages, "") for mode in (0, 1, 2) for order in orders for warps, stages in ((8, 1), (8, 2), (8, 3)) if warps * dim * 64 * stages <= 3 << 16]
        forms += [(0, order, 8, 2, "l1") for order in orders] + [(4, order, 8, stages, "") for order in keys for stages in (1, 2)]
        for mode, order, warps, stages, promotion in forms:
            table = (keys if mode == 4 else orders)[order].to(torch.int32).flatten().contiguous()

            def call(mode=mode, table=table, warps=warps, stages=stages, promotion=promotion):
                e = lib.stream_run(ptr(k), ptr(v), ptr(table), ctypes.c_longlong(tiles), heads, dim, mode, warps, stages, 128, 0, promotions[promotion], ptr(out), stream())
                if e:
                    raise RuntimeError(f"stream: error {e}")

            calls[f"m{mode}{order}w{warps}s{stages}{promotion}"] = call
        rows = contest(calls, bytes_, 3, a.span)
        say(dict(stream=[tiles, heads, dim], us=rows, bytes=bytes_))
        print(f"stream {tiles} tiles, {heads} heads, D {dim}: " + "  ".join(f"{n} {x:.1f} ({bytes_ / x * 1e-6:.2f})" for n, x in rows.items()), flush=True)
        if time.time() - START > a.seconds:
            return


def report(say, d, hq, hkv, batch, sk, page, bytes_, rows):
    say(dict(time=[d, hq, hkv, batch, sk, page], us=rows, bytes=bytes_))
    base = rows["cudnn"]
    short = lambda n: n.replace(f"d{d}_", "").replace("_p", "") if page else n.replace(f"d{d}_", "")
    print(f"D{d} {hq}/{hkv} {batch}x{sk} p{page}: " + "  ".join(f"{short(n)} {x:.1f} ({bytes_ / x * 1e-6:.2f}, {base / x:.2f})" for n, x in rows.items()), flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder")
    p.add_argument("out")
    p.add_argument("--check", action="store_true")
    p.add_argument("--time", action="store_true")
    p.add_argument("--streams", action="store_true", help="what stream.cu reads alone")
    p.add_argument("--fa2", action="store_true")
    p.add_argument("--few", action="store_true", help="32 heads over 8 alone")
    p.add_argument("--variants", nargs="*")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--span", type=float, default=0.015)
    p.add_argument("--seconds", type=float, default=150)
    a = p.parse_args()
    names = a.variants or sorted(n[:-3] for n in os.listdir(a.folder) if n.endswith(".so") and n not in ("reader.so", "stream.so"))
    variants = [Variant(a.folder, n) for n in names]
    os.makedirs(a.out, exist_ok=True)
    file = open(os.path.join(a.out, "results.jsonl"), "a")

    def say(row):
        file.write(json.dumps(row) + "\n")
        file.flush()

    failed = check(variants, say) if a.check else 0
    if (a.time or a.streams) and os.path.exists(os.path.join(a.folder, "stream.so")):
        streams(ctypes.CDLL(os.path.join(a.folder, "stream.so")), ctypes.CDLL(os.path.join(a.folder, "reader.so")), say, a)
    if a.time:
        measure(variants, ctypes.CDLL(os.path.join(a.folder, "reader.so")), say, a)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
