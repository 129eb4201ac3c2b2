#!/usr/bin/env python3
"""bwd_sm90 by hand: checks dQ, dK, dV of every variant against float64 and times it beside cuDNN in the steady state.

harness.py FOLDER OUT [--check] [--time] [--variants a b] [--lengths ...]; FOLDER holds build.sh's libraries. A worker
process does the work, and is replaced if it says nothing for a while, so that a kernel that hangs costs its own variant alone.
OUT gets results.jsonl (everything) and results.csv (a line for each cell and contestant); --time ends with a table, which --table shows again. A variant with
`_det` in its name is compared with the bits of its own dQ, too. --skip-wrong leaves out of --time what --check found wrong.
"""
import argparse, ctypes, json, math, os, select, subprocess, sys, time

ARROWS = {  # best peer as a ratio to cuDNN, 512 ... 16384 (the H200 grid)
    (64, 0): [1.18, 1.16, 1.12, 1.14, 1.17, 1.18], (64, 1): [1.28, 1.25, 1.19, 1.19, 1.23, 1.22],
    (128, 0): [1.06, 1.12, 1.09, 1.10, 1.10, 1.15], (128, 1): [1.16, 1.32, 1.21, 1.19, 1.12, 1.12],
    (256, 0): [1.21, 1.21, 1.17, 1.16, 1.25, 1.41], (256, 1): [1.11, 1.17, 1.18, 1.18, 1.17, 1.21],
}
REPEATS = 50  # whose bits are compared
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
POINTERS = ["q", "k", "v", "o", "d_o", "d_q", "d_k", "d_v", "lse", "acc", "row_lse", "row_delta", "turns"]
INTS = ["batch", "sq", "sk", "heads_q", "heads_kv", "causal", "section_heads", "pdl", "parts"]


class Args(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in POINTERS] + [(n, ctypes.c_int) for n in INTS] + [("scale", ctypes.c_float)]


class Variant:
    def __init__(self, folder, name):
        self.name, self.lib = name, ctypes.CDLL(os.path.join(folder, name + ".so"))
        out = (ctypes.c_int * 5)()
        self.lib.describe(out)
        self.d, self.block_m, self.block_n, self.float16, self.smem = out

    def bind(self, torch, t, causal, section=0, pdl=1, parts=7):
        b, sq, hq, d = t["q"].shape
        sk, hkv = t["k"].shape[1], t["k"].shape[2]
        tiles = b * hq * ((sq + self.block_m - 1) // self.block_m)
        rows = tiles * self.block_m
        if "acc" not in t or t["acc"].numel() < rows * d:
            t["acc"] = torch.full((rows * d,), float("nan"), device="cuda")
        for n in ("row_lse", "row_delta"):
            if n not in t or t[n].numel() < rows:
                t[n] = torch.full((rows,), float("nan"), device="cuda")
        words = 1 + tiles  # the ticket, and a semaphore a tile of queries
        if "turns" not in t or t["turns"].numel() < words:
            t["turns"] = torch.full((words,), -1, dtype=torch.int32, device="cuda")
        a = Args(**{n: t[n].data_ptr() for n in POINTERS})
        a.batch, a.sq, a.sk, a.heads_q, a.heads_kv, a.causal = b, sq, sk, hq, hkv, causal
        # Q, dO and dQ's accumulator of a head, 8 bytes an element, should lie in L2 with those of its section.
        a.section_heads = section or (max(1, int(24e6 // (sq * d * 8 * (hq // hkv)))) if causal else 1)
        a.pdl, a.parts, a.scale = pdl, parts, 1 / math.sqrt(d)
        stream = torch.cuda.current_stream().cuda_stream
        run = self.lib.run

        def call():
            error = run(ctypes.byref(a), ctypes.c_void_p(stream))
            if error:
                raise RuntimeError(f"{self.name}: error {error}")
        call.args = a, t
        return call


def tensors(torch, b, sq, sk, hq, hkv, d, dtype, seed):
    g = torch.Generator(device="cuda").manual_seed(seed)
    r = lambda s, h: torch.randn(b, s, h, d, device="cuda", generator=g).to(dtype)
    t = {"q": r(sq, hq), "k": r(sk, hkv), "v": r(sk, hkv), "d_o": r(sq, hq)}
    for n, of in (("d_q", "q"), ("d_k", "k"), ("d_v", "v")):
        t[n] = torch.full_like(t[of], float("nan"))
    return t


def reference(torch, t, causal, dtype):
    """Fills in o and lse (o rounded, as a forward gives it), returns float64 dQ, dK, dV."""
    q, k, v, d_o = (t[n].double().transpose(1, 2) for n in ("q", "k", "v", "d_o"))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    sq, sk, scale = q.shape[2], k.shape[2], 1 / math.sqrt(q.shape[3])
    s = q @ k.transpose(2, 3) * scale
    if causal:
        i = torch.arange(sq, device="cuda")[:, None] + sk - sq
        s = s.masked_fill(torch.arange(sk, device="cuda")[None] > i, float("-inf"))
    lse = torch.logsumexp(s, -1)
    p = torch.nan_to_num(torch.exp(s - lse[..., None]), nan=0.0)
    o = p @ v
    t["o"] = o.transpose(1, 2).to(dtype).contiguous()
    t["lse"] = lse.float().contiguous()
    dp = d_o @ v.transpose(2, 3)
    ds = p * (dp - (d_o * o).sum(-1, keepdim=True))
    fold = lambda x: x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)
    return [x.transpose(1, 2) for x in (ds @ k * scale, fold(ds.transpose(2, 3) @ q * scale), fold(p.transpose(2, 3) @ d_o))]


def rms(torch, x, ref):
    x = x.double()
    if not torch.isfinite(x).all():
        return float("nan")
    return float((x - ref).norm() / ref.norm())


def cudnn(torch, t, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v = (t[n].transpose(1, 2).detach().requires_grad_() for n in ("q", "k", "v"))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))
    d_o = t["d_o"].transpose(1, 2)
    name = out.grad_fn.name()
    call = lambda: torch.autograd.grad(out, (q, k, v), d_o, retain_graph=True)
    call.name = name
    return call


CASES = [  # b, sq, sk, hq, hkv, causal
    (2, 512, 512, 2, 2, 0), (2, 512, 512, 2, 2, 1), (1, 1024, 1024, 4, 4, 1), (1, 129, 129, 2, 2, 1), (1, 127, 191, 2, 2, 0),
    (1, 191, 127, 2, 2, 1), (2, 65, 1000, 2, 2, 1), (1, 333, 777, 4, 2, 1), (1, 640, 640, 8, 1, 1), (1, 2048, 2048, 1, 1, 0),
    (1, 4096, 4096, 8, 8, 0), (1, 4096, 4096, 8, 8, 1),
]


def check(torch, variant, say, cases=CASES):
    dtype = torch.float16 if variant.float16 else torch.bfloat16
    for n, (b, sq, sk, hq, hkv, causal) in enumerate(cases):
        t = tensors(torch, b, sq, sk, hq, hkv, variant.d, dtype, 1000 + n + int(time.time()) % 1000)
        ref = reference(torch, t, causal, dtype)
        say({"about_to": f"{variant.name} {b} {sq} {sk} {hq} {hkv} {causal}"})
        call = variant.bind(torch, t, causal)
        call()
        torch.cuda.synchronize()
        errors = [rms(torch, t[x], r) for x, r in zip(("d_q", "d_k", "d_v"), ref)]
        row = {"check": variant.name, "case": [b, sq, sk, hq, hkv, causal], "errors": errors}
        if sq == sk and hq == hkv and sq >= 512:
            row["cudnn"] = [rms(torch, x.transpose(1, 2), r) for x, r in zip(cudnn(torch, t, causal)(), ref)]
            names = ("d_k", "d_v", "d_q") if "_det" in variant.name else ("d_k", "d_v")
            first, same = [t[x].clone() for x in names], True
            for _ in range(REPEATS):
                call()
                same = same and all(torch.equal(a, t[x]) for a, x in zip(first, names))
            row["repeat"] = same
        # Every peer measured has 2.2e-3 to 2.6e-3.
        row["right"] = all(e < 3e-3 for e in errors) and row.get("repeat", True)
        say(row)


def lse_of(torch, t, causal):
    q, k, v = (t[n].transpose(1, 2) for n in ("q", "k", "v"))
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, bool(causal), False)
    t["o"], t["lse"] = out[0].transpose(1, 2).contiguous(), out[1].contiguous()


def steady(torch, call, lead, span):
    def loop(ms):
        start, n = time.perf_counter(), 0
        while (time.perf_counter() - start) * 1e3 < ms:
            for _ in range(4):
                call()
            n += 4
            if n % 8 == 0:
                e = torch.cuda.Event()
                e.record()
                e.synchronize()
        return n
    n = loop(lead)
    count = max(4, int(n * span / lead))
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(4):
        call()
    a.record()
    for _ in range(count):
        call()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / count


def measure(torch, folder, names, lengths, masks, lead, span, rounds, say, options, head_dims, done):
    for d in head_dims:
        variants = [Variant(folder, n) for n in names]
        variants = [v for v in variants if v.d == d]
        if not variants:
            continue
        for causal in masks:
            for s in lengths:
                if (d, causal, s) in done:
                    continue
                b, h = 16384 // s, 2048 // d
                t = tensors(torch, b, s, s, h, h, d, torch.bfloat16, s + d)
                lse_of(torch, t, causal)
                calls = {"cudnn": cudnn(torch, t, causal)}
                for v in variants:
                    for label, option in options:
                        say({"about_to": f"{v.name} {label} {s} {causal}"})
                        c = v.bind(torch, t, causal, **option)
                        c()
                        torch.cuda.synchronize()
                        calls[v.name + label] = c
                times = {n: [] for n in calls}
                for r in range(rounds):
                    order = list(calls)[r % len(calls):] + list(calls)[:r % len(calls)]
                    for n in order:
                        say({"about_to": f"{n} {s} {causal}"})
                        times[n].append(steady(torch, calls[n], lead, span))
                flops = 10 * b * h * s * s * d / (2 if causal else 1)
                rate = {n: flops / (sorted(x)[len(x) // 2] if len(x) % 2 else sum(x) / len(x)) / 1e9 for n, x in times.items()}
                arrow = ARROWS.get((d, causal), [math.nan] * len(LENGTHS))[LENGTHS.index(s)]
                say({"time": [d, causal, s], "tflops": rate, "ms": times,
                     "to_best": {n: x / rate["cudnn"] / arrow for n, x in rate.items()}})
                del t, calls
                torch.cuda.empty_cache()


def rows_of(out):
    with open(os.path.join(out, "results.jsonl"), "a+") as file:
        file.seek(0)
        return [json.loads(line) for line in file]


def worker(a):
    import torch
    out = open(os.path.join(a.out, "results.jsonl"), "a")

    def say(row):
        out.write(json.dumps(row) + "\n")
        out.flush()
        print(json.dumps(row), flush=True)
    # What an earlier worker, or an earlier call with the same OUT, has done is not done again.
    rows = rows_of(a.out)
    if a.check:
        for name in a.variants:
            if sum(r.get("check") == name for r in rows) < a.cases:
                check(torch, Variant(a.folder, name), say, CASES[:a.cases])
    if a.skip_wrong:
        wrong = {r["check"] for r in rows_of(a.out) if "check" in r and not r["right"]}
        a.variants = [v for v in a.variants if v not in wrong]
    if a.time:
        options = [("", {})] if not a.options else [(o, eval(f"dict({o})")) for o in a.options]
        done = {tuple(r["time"]) for r in rows if "time" in r}
        measure(torch, a.folder, a.variants, a.lengths, a.masks, a.lead, a.span, a.rounds, say, options, a.head_dims, done)


def summarise(out):
    """Rates of all cells as CSV, and for each contestant the geometric means of its ratios to cuDNN and to the first variant of its
    head size, up to 2048 and beyond."""
    rows = rows_of(out)
    cells = {tuple(r["time"]): r for r in rows if "time" in r}
    wrong = sorted({r["check"] for r in rows if "check" in r and not r["right"]})
    with open(os.path.join(out, "results.csv"), "w") as file:
        file.write("head_dim,causal,length,contestant,tflops,to_cudnn,to_best_peer\n")
        for (d, causal, s), r in sorted(cells.items()):
            for n, x in r["tflops"].items():
                file.write(f"{d},{causal},{s},{n},{x:.1f},{x / r['tflops']['cudnn']:.4f},{r['to_best'][n]:.4f}\n")
    mean = lambda x: math.exp(sum(map(math.log, x)) / len(x)) if x else float("nan")
    for d in sorted({c[0] for c in cells}):
        names = list(next(r for c, r in cells.items() if c[0] == d)["tflops"])
        base = names[1] if len(names) > 1 else names[0]
        print(f"D {d}: ratio to cuDNN, best peer, then to {base}: full to 2048, beyond; causal to 2048, beyond")
        for n in names:
            own = [(c, r) for c, r in cells.items() if c[0] == d and n in r["tflops"]]
            parts = [mean([r["tflops"][n] / r["tflops"][base] for c, r in own if c[1] == causal and (c[2] <= 2048) == short])
                     for causal in (0, 1) for short in (True, False)]
            print(f"  {n:22} {mean([r['tflops'][n] / r['tflops']['cudnn'] for _, r in own]):.3f} "
                  f"{mean([r['to_best'][n] for _, r in own]):.3f} | " + " ".join(f"{x:.3f}" for x in parts))
    if wrong:
        print("WRONG:", *wrong)


def show(row):
    if "check" in row:
        f = lambda e: " ".join(f"{x * 1e3:.2f}" for x in e)
        print(row["check"], row["case"], "errors e-3", f(row["errors"]), "cudnn " + f(row["cudnn"]) if "cudnn" in row else "",
              row.get("repeat", ""), flush=True)
    elif "time" in row:
        print(row["time"], " ".join(f"{n} {x:.0f} ({row['to_best'][n]:.3f})" for n, x in row["tflops"].items()), flush=True)
    elif "about_to" not in row:
        print(row, flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder")
    p.add_argument("out")
    p.add_argument("--check", action="store_true")
    p.add_argument("--time", action="store_true")
    p.add_argument("--worker", action="store_true")
    p.add_argument("--variants", nargs="*")
    p.add_argument("--options", nargs="*")
    p.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    p.add_argument("--masks", nargs="*", type=int, default=[0, 1])
    p.add_argument("--head-dims", nargs="*", type=int, default=[64, 128, 256])
    p.add_argument("--lead", type=float, default=200)
    p.add_argument("--span", type=float, default=200)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--patience", type=float, default=25)
    p.add_argument("--cases", type=int, default=len(CASES))
    p.add_argument("--skip-wrong", action="store_true")
    p.add_argument("--table", action="store_true")
    a = p.parse_args()
    os.makedirs(a.out, exist_ok=True)
    if a.table:
        return summarise(a.out)
    a.variants = a.variants or sorted(n[:-3] for n in os.listdir(a.folder) if n.endswith(".so"))
    if a.worker:
        return worker(a)
    variants = a.variants
    base = [x for x in sys.argv[1:]]
    while variants:
        cut = base[:base.index("--variants")] if "--variants" in base else base
        rest = []
        if "--variants" in base:
            tail = base[base.index("--variants") + 1:]
            rest = tail[next((i for i, x in enumerate(tail) if x.startswith("--")), len(tail)):]
        child = subprocess.Popen([sys.executable, __file__, *cut, *rest, "--worker", "--variants", *variants],
                                 stdout=subprocess.PIPE, stderr=sys.stderr, text=True, bufsize=1)
        last, current = time.time(), None
        while True:
            ready, _, _ = select.select([child.stdout], [], [], 1.0)
            if ready:
                line = child.stdout.readline()
                if not line:
                    break
                last = time.time()
                try:
                    row = json.loads(line)
                except ValueError:
                    print(line, end="", flush=True)
                    continue
                current = row.get("about_to", current)
                show(row)
            elif time.time() - last > a.patience:
                print("HANGS:", current, flush=True)
                child.kill()
                break
        code = child.wait()
        if code == 0:
            break
        bad = current.split()[0] if current else variants[0]
        print("left out:", bad, "exit", code, flush=True)
        variants = [v for v in variants if v != bad]
    if a.time:
        summarise(a.out)


if __name__ == "__main__":
    main()
