# ab.py MODE OUT.csv SECONDS_A_SUBJECT name=lib.so ...   Subjects are called in turn on one thread; PyTorch beside.
import ctypes as C, math, statistics, sys, time, os
mode, out, each = sys.argv[1], sys.argv[2], float(sys.argv[3])
libs = [(a.split("=")[0], os.path.abspath(a.split("=")[1])) for a in sys.argv[4:]]
from library import ab
try:
    import torch; torch.set_num_threads(1)
except Exception as e: torch = None; print("no torch", e)
BF16, F32 = None, None
import re
DT = dict(f32=int(os.environ["DT_F32"]), bf16=int(os.environ["DT_BF16"]))
def heads(dtype, N, D, causal):
    want = 5e9 if dtype == "bf16" else 2.5e9
    n = math.ceil(want / (4.0 * N * N * D / (2 if causal else 1)))
    h = min(n, 8); return math.ceil(n / h), h
cells = []
if mode == "options":
    for back in (0, 1):
        for D in (64, 128):
            for o in ("none", "bias", "dropout", "alibi", "softcap", "window", "bias_row"):
                cells.append((back, "bf16", 2048, D, 0, o, 0))
if mode == "grid":
    for back in (0, 1):
        for D in (64, 128):
            for N in (512, 2048, 8192):
                for c in (0, 1): cells.append((back, "bf16", N, D, c, "none", 0))
if mode == "forward":
    for D in (64, 128):
        for N in (512, 2048, 8192):
            for c in (0, 1): cells.append((0, "bf16", N, D, c, "none", 0))
        cells.append((0, "bf16", 2048, D, 0, "dropout", 0))
        cells += [(1, "bf16", N, D, c, "none", 0) for N, c in ((512, 0), (2048, 0), (2048, 1))]
if mode == "bias":
    for D in (64, 128): cells += [(0, "bf16", 2048, D, 0, o, 0) for o in ("none", "bias")]
if mode == "f32":
    for N, D in ((512, 64), (512, 128), (2048, 64), (2048, 128), (8192, 128)):
        for c in (0, 1): cells.append((0, "f32", N, D, c, "none", 0))
    for N, D in ((512, 128), (2048, 128)): cells.append((0, "f32", N, D, 0, "none", 8))
if mode == "f32bwd":
    for N, D in ((512, 64), (512, 128), (2048, 64), (2048, 128)):
        for c in (0, 1): cells.append((1, "f32", N, D, c, "none", 0))
f = open(out, "w")
print("direction,dtype,keys,head_dim,causal,option,batch,heads,subject,isa,best_gflops,median_gflops,calls,difference", file=f)
print("ceilings", ab.ab_fma(1), ab.ab_amx(1, 1), ab.ab_amx(1, 0), flush=True)
for back, dt, N, D, causal, option, forced in cells:
    B, H = heads(dt, N, D, causal)
    if forced: B, H = 1, forced
    win = -1
    Ns = N
    if option == "window": Ns, causal_, win = 4096, 1, 1023
    else: causal_ = causal
    case = ab.ab_case(back, DT[dt], B, Ns, Ns, H, H, D, causal_, win, option.encode() if option != "window" else b"none", 1, 0)
    pairs = Ns * Ns
    if causal_ and win < 0: pairs = Ns * (Ns + 1) / 2
    if win >= 0: pairs = sum(min(i + 1, win + 1) for i in range(Ns))
    flops = (10 if back else 4) * B * H * D * pairs
    subjects, first = [], None
    for name, path in libs:
        for var in ("TD_QPI",): os.environ.pop(var, None)
        if "@" in name: os.environ["TD_QPI"] = name.split("@")[1]
        b = ab.ab_bind(case, path.encode(), b"")
        if not b: print("no plan", name, option); continue
        n = B * Ns * H * D; buf = (C.c_uint8 * (n * (4 if dt == "f32" else 2)))()
        ab.ab_output(case, 1 if back else 0, buf, len(buf))
        if torch is not None:
            t = torch.frombuffer(buf, dtype=torch.float32 if dt == "f32" else torch.bfloat16).float()
            if first is None: first = t.clone()
            diff = float((t - first).norm() / first.norm())
        else: diff = -1
        subjects.append((name, (lambda b=b: ab.ab_run(b)), ab.ab_isa(b), diff, [], b))
    if torch is not None and option in ("none",) and mode != "f32bwd" :
        tt = torch.float32 if dt == "f32" else torch.bfloat16
        q, k, v = [torch.randn(B, H, Ns, D).to(tt).requires_grad_(bool(back)) for _ in range(3)]
        fwd = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal_))
        if back:
            o = fwd(); g = torch.randn_like(o)
            run = lambda: torch.autograd.grad(o, (q, k, v), g, retain_graph=True)
        else:
            def run():
                with torch.no_grad(): fwd()
        run(); subjects.append(("pytorch", run, 0, 0, [], None))
    end = time.perf_counter() + each * len(subjects)
    while time.perf_counter() < end or len(subjects[0][4]) < 3:
        for s in subjects:
            t0 = time.perf_counter(); s[1](); s[4].append(time.perf_counter() - t0)
    line = []
    for name, run, isa, diff, t, b in subjects:
        g = flops * 1e-9
        print(f"{'bwd' if back else 'fwd'},{dt},{N},{D},{causal_},{option},{B},{H},{name},{isa},{g/min(t):.1f},{g/statistics.median(t):.1f},{len(t)},{diff:.3g}", file=f, flush=True)
        line.append(f"{name} {g/min(t):.0f}")
        if b: ab.ab_unbind(b)
    ab.ab_free(case)
    print("bwd" if back else "fwd", dt, N, D, "causal" if causal_ else "full", option, " ".join(line), flush=True)
print("ceilings", ab.ab_fma(1), ab.ab_amx(1, 1), ab.ab_amx(1, 0), flush=True)
