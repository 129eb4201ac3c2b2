#!/usr/bin/env python3
"""fwd_sm90_d512 and bwd_sm90_d512 by hand: checked against float64, timed beside the library's kernels in the steady state.

harness.py FOLDER check NAME          every case, one JSON line each; FOLDER holds build.sh's libraries and library.so
harness.py FOLDER time NAME ... [--lengths ...] [--masks 0 1] [--d 512] [--csv FILE]
Names beginning with "lib" are the library's: libfwd80, libbwd80.
"""
import argparse, ctypes, json, math, os, sys, time

import torch

POINTERS = ["q", "k", "v", "o", "lse", "cu_q", "cu_k", "seqused"]
INTS = ["batch", "sq", "sk", "heads_q", "heads_kv", "head_dim", "causal", "window_left", "window_right", "section_heads",
        "total_q", "total_k"]


class Args(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in POINTERS] + [(n, ctypes.c_int) for n in INTS] + [("scale", ctypes.c_float)]


def stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class Forward:
    """A variant of fwd.cu."""

    def __init__(self, folder, name):
        self.name, self.lib = name, ctypes.CDLL(os.path.join(folder, name + ".so"))

    def bind(self, t, causal, window=(-1, -1), section=None):
        a = Args(**{n: t[n].data_ptr() if n in t else None for n in POINTERS})
        a.batch, a.sq, a.sk = t["batch"], t["sq"], t["sk"]
        a.heads_q, a.heads_kv, a.head_dim = t["q"].shape[2], t["k"].shape[2], t["q"].shape[3]
        a.causal, (a.window_left, a.window_right) = causal, window
        group = a.heads_q // a.heads_kv
        a.section_heads = section or max(1, int(24e6 // (a.sk * a.head_dim * 4))) * group
        a.total_q, a.total_k, a.scale = t["q"].shape[1], t["k"].shape[1], 1 / math.sqrt(a.head_dim)

        def call():
            error = self.lib.run(ctypes.byref(a), stream())
            if error:
                raise RuntimeError(f"{self.name}: error {error}")

        call.keep = a, t
        return call


class Backward:
    """A variant of bwd.cu."""

    pointers = ["q", "k", "v", "o", "d_o", "d_q", "d_k", "d_v", "lse", "acc", "row_lse", "row_delta"]
    ints = ["batch", "sq", "sk", "heads_q", "heads_kv", "head_dim", "causal", "section_heads", "pdl", "parts"]
    block_m, head_dim = 64, 512

    class Args(ctypes.Structure):
        pass

    Args._fields_ = [(n, ctypes.c_void_p) for n in pointers] + [(n, ctypes.c_int) for n in ints] + [("scale", ctypes.c_float)]

    def __init__(self, folder, name):
        self.name, self.lib = name, ctypes.CDLL(os.path.join(folder, name + ".so"))

    def bind(self, t, causal, section=None, pdl=1, parts=7):
        b, sq, hq, d = t["q"].shape
        sk, hkv = t["k"].shape[1], t["k"].shape[2]
        rows = b * hq * ((sq + self.block_m - 1) // self.block_m) * self.block_m
        for n, size in (("acc", rows * self.head_dim), ("row_lse", rows), ("row_delta", rows)):
            if n not in t:
                t[n] = torch.full((size,), float("nan"), device="cuda")
        a = self.Args(**{n: t[n].data_ptr() for n in self.pointers})
        a.batch, a.sq, a.sk, a.heads_q, a.heads_kv, a.head_dim, a.causal = b, sq, sk, hq, hkv, d, causal
        # Q, dO and dQ's accumulator of a head, 8 bytes an element, should lie in L2 with those of its section.
        a.section_heads = section or (max(1, int(24e6 // (sq * d * 8 * (hq // hkv)))) if causal else 1)
        a.pdl, a.parts, a.scale = pdl, parts, 1 / math.sqrt(d)

        def call():
            error = self.lib.run(ctypes.byref(a), stream())
            if error:
                raise RuntimeError(f"{self.name}: error {error}")

        call.keep = a, t
        return call


class Library:
    """The library's kernel of that number."""

    kernels = {"libfwd80": (0, 4), "libbwd80": (1, 5), "libfwd": (0, 0), "libbwd": (1, 0)}

    def __init__(self, folder, name):
        self.name, self.lib = name, ctypes.CDLL(os.path.join(folder, "library.so"))
        self.lib.library_plan.restype = ctypes.c_void_p
        self.backward, self.kernel = self.kernels[name]

    def bind(self, t, causal):
        b, sq, hq, d = t["q"].shape
        size = ctypes.c_int64()
        plan = self.lib.library_plan(self.backward, int(t["q"].dtype == torch.float16), b, sq, t["k"].shape[1], hq,
                                     t["k"].shape[2], d, causal, self.kernel, ctypes.byref(size))
        if not plan:
            raise RuntimeError(f"{self.name}: no plan")
        workspace = torch.empty(max(size.value, 1), dtype=torch.uint8, device="cuda")
        p = [ctypes.c_void_p(t[n].data_ptr() if n in t else None) for n in
             ("q", "k", "v", "o", "lse", "d_o", "d_q", "d_k", "d_v")]

        def call():
            if self.lib.library_run(ctypes.c_void_p(plan), *p, ctypes.c_void_p(workspace.data_ptr()), stream()):
                raise RuntimeError(f"{self.name}: failed")

        call.keep = t, workspace
        return call


def variant(folder, name):
    kind = Library if name.startswith("lib") else Backward if name.startswith("b") else Forward
    return kind(folder, name)


def tensors(b, sq, sk, hq, hkv, d, dtype, seed, scale=1.0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    r = lambda s, h: (torch.randn(b, s, h, d, device="cuda", generator=g) * scale).to(dtype)
    t = {"q": r(sq, hq), "k": r(sk, hkv), "v": r(sk, hkv), "batch": b, "sq": sq, "sk": sk}
    t["o"] = torch.full_like(t["q"], float("nan"))
    t["lse"] = torch.full((b, hq, sq), float("nan"), device="cuda")
    return t


def scores(q, k, causal, window, sk=None):
    """[B, H, Sq, Sk] in float64, -inf where nothing is seen; q, k are [B, S, H, D]."""
    q, k = q.double().transpose(1, 2), k.double().transpose(1, 2)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    i = torch.arange(s.shape[2], device="cuda")[:, None] + s.shape[3] - s.shape[2]
    j = torch.arange(s.shape[3], device="cuda")[None]
    if causal:
        s = s.masked_fill(j > i, float("-inf"))
    if window[0] >= 0:
        s = s.masked_fill(j < i - window[0], float("-inf"))
    if window[1] >= 0:
        s = s.masked_fill(j > i + window[1], float("-inf"))
    return s


def reference(q, k, v, causal, window):
    s = scores(q, k, causal, window)
    lse = torch.logsumexp(s, -1)
    p = torch.nan_to_num(torch.exp(s - lse[..., None]), nan=0.0)
    v = v.double().transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], 1)
    return (p @ v).transpose(1, 2), lse


def error(x, ref):
    x = x.double()
    if not torch.isfinite(x).all():
        return float("nan")
    return float((x - ref).norm() / ref.norm().clamp_min(1e-30))


def lse_error(x, ref):
    same = (x.double() == ref) | ((x.double() - ref).abs() < 1e30)
    return float((x.double() - ref)[torch.isfinite(ref)].abs().max()) if same.all() else float("nan")


CASES = [  # b, sq, sk, hq, hkv, causal, window
    (1, 128, 64, 1, 1, 0, (-1, -1)), (1, 128, 512, 1, 1, 0, (-1, -1)), (2, 512, 512, 2, 2, 0, (-1, -1)),
    (2, 512, 512, 2, 2, 1, (-1, -1)), (1, 129, 129, 2, 2, 1, (-1, -1)), (1, 127, 191, 2, 2, 0, (-1, -1)),
    (1, 191, 127, 2, 2, 1, (-1, -1)), (2, 65, 1000, 2, 2, 1, (-1, -1)), (1, 333, 777, 4, 2, 1, (-1, -1)),
    (1, 640, 640, 8, 1, 1, (-1, -1)), (1, 2048, 2048, 2, 1, 0, (-1, -1)), (1, 2048, 2048, 2, 1, 1, (-1, -1)),
    (1, 700, 700, 2, 2, 1, (100, -1)), (1, 700, 700, 2, 2, 0, (30, 50)), (1, 300, 40, 1, 1, 1, (-1, -1)),
]


def say(row):
    print(json.dumps(row), flush=True)


def check_forward(v, dtype, dims):
    worst = 0.0
    for d in dims:
        for n, (b, sq, sk, hq, hkv, causal, window) in enumerate(CASES):
            t = tensors(b, sq, sk, hq, hkv, d, dtype, 1000 + n + int(time.time()) % 1000)
            call = v.bind(t, causal, window)
            call()
            torch.cuda.synchronize()
            o, lse = reference(t["q"], t["k"], t["v"], causal, window)
            first = t["o"].clone()
            repeat = True
            for _ in range(20 if sq >= 600 else 4):
                call()
                torch.cuda.synchronize()
                repeat &= torch.equal(first, t["o"])
            e = error(t["o"], o)
            worst = max(worst, e) if e == e else float("nan")
            say({"check": v.name, "d": d, "case": [b, sq, sk, hq, hkv, causal, window], "o": e,
                 "lse": lse_error(t["lse"], lse), "repeat": repeat})
    say({"worst": v.name, "o": worst})


def check_packed(v, dtype, d):
    lengths_q, lengths_k = [100, 1, 0, 333, 64, 128, 200], [100, 77, 50, 333, 300, 0, 65]
    for causal in (0, 1):
        for used in (False, True):
            cu = lambda n: torch.tensor([0] + torch.tensor(n).cumsum(0).tolist(), dtype=torch.int32, device="cuda") + 3
            cu_q, cu_k = cu(lengths_q), cu(lengths_k)
            total_q, total_k = sum(lengths_q) + 8, sum(lengths_k) + 8
            t = tensors(1, total_q, total_k, 4, 2, d, dtype, 5 + causal)
            t.update(batch=len(lengths_q), sq=max(lengths_q), sk=max(lengths_k), cu_q=cu_q, cu_k=cu_k)
            use = [max(0, n - 13) for n in lengths_k] if used else lengths_k
            if used:
                t["seqused"] = torch.tensor(use, dtype=torch.int32, device="cuda")
            ref_o = torch.zeros(1, total_q, 4, d, dtype=torch.float64, device="cuda")
            ref_lse = torch.full((1, 4, total_q), float("-inf"), dtype=torch.float64, device="cuda")
            seen = torch.zeros(total_k, dtype=torch.bool, device="cuda")
            for i, (n, m) in enumerate(zip(lengths_q, use)):
                a, c = int(cu_q[i]), int(cu_k[i])
                seen[c:c + m] = True
                if n == 0 or m == 0:
                    continue
                o, lse = reference(t["q"][:, a:a + n], t["k"][:, c:c + m], t["v"][:, c:c + m], causal, (-1, -1))
                ref_o[:, a:a + n], ref_lse[:, :, a:a + n] = o, lse
            t["k"][:, ~seen] = float("nan")  # what no sequence has
            t["v"][:, ~seen] = float("nan")
            call = v.bind(t, causal)
            call()
            torch.cuda.synchronize()
            say({"check": v.name, "packed": True, "causal": causal, "used": used, "o": error(t["o"], ref_o),
                 "lse": lse_error(t["lse"], ref_lse)})


def gradients(t, causal):
    """Fills in o and lse (o rounded, as a forward gives it), returns float64 dQ, dK, dV."""
    o, lse = reference(t["q"], t["k"], t["v"], causal, (-1, -1))
    t["o"], t["lse"] = o.to(t["q"].dtype).contiguous(), lse.float().contiguous()
    group = t["q"].shape[2] // t["k"].shape[2]
    q, d_o, k, v = (t[n].double().transpose(1, 2) for n in ("q", "d_o", "k", "v"))
    k, v, scale = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1 / math.sqrt(q.shape[3])
    p = torch.nan_to_num(torch.exp(scores(t["q"], t["k"], causal, (-1, -1)) - lse[..., None]), nan=0.0)
    ds = p * (d_o @ v.transpose(2, 3) - (d_o * o.transpose(1, 2)).sum(-1, keepdim=True))
    fold = lambda x: x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)
    return [x.transpose(1, 2) for x in (ds @ k * scale, fold(ds.transpose(2, 3) @ q * scale), fold(p.transpose(2, 3) @ d_o))]


def add_gradients(t):
    t["d_o"] = torch.randn_like(t["q"])
    for n, of in (("d_q", "q"), ("d_k", "k"), ("d_v", "v")):
        t[n] = torch.full_like(t[of], float("nan"))


def check_backward(v, folder, dtype, dims):
    worst = [0.0] * 3
    for d in dims:
        for n, (b, sq, sk, hq, hkv, causal, window) in enumerate(CASES):
            if window != (-1, -1):
                continue
            t = tensors(b, sq, sk, hq, hkv, d, dtype, 2000 + n + int(time.time()) % 1000)
            add_gradients(t)
            ref = gradients(t, causal)
            call = v.bind(t, causal)
            call()
            torch.cuda.synchronize()
            e = [error(t[x], r) for x, r in zip(("d_q", "d_k", "d_v"), ref)]
            first = [t[x].clone() for x in ("d_k", "d_v")]
            repeat = True
            for _ in range(20 if sq >= 600 else 4):
                call()
                torch.cuda.synchronize()
                repeat &= all(torch.equal(a, t[x]) for a, x in zip(first, ("d_k", "d_v")))
            row = {"check": v.name, "d": d, "case": [b, sq, sk, hq, hkv, causal], "errors": e,
                   "repeat": repeat}
            if not isinstance(v, Library):
                Library(folder, "libbwd80").bind(t, causal)()
                torch.cuda.synchronize()
                row["sm80"] = [error(t[x], r) for x, r in zip(("d_q", "d_k", "d_v"), ref)]
            worst = [max(a, b) if a == a and b == b else float("nan") for a, b in zip(worst, e)]
            say(row)
    say({"worst": v.name, "errors": worst})


def steady(call, lead, span):
    def loop(ms):
        start, n = time.perf_counter(), 0
        while (time.perf_counter() - start) * 1e3 < ms:
            for _ in range(4):
                call()
            n += 4
            e = torch.cuda.Event()
            e.record()
            e.synchronize()
        return n

    n = loop(lead)
    count = max(4, int(n * span / lead))
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(count):
        call()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / count


def measure(folder, names, o):
    rows = []
    variants = [variant(folder, n) for n in names]
    for causal in o.masks:
        for s in o.lengths:
            b, h, d = 16384 // s, max(1, 2048 // o.d), o.d
            t = tensors(b, s, s, h, h, d, torch.bfloat16, s + d)
            if o.backward:
                add_gradients(t)
                Library(folder, "libfwd80").bind(t, causal)()
            calls = {}
            for v in variants:
                calls[v.name] = v.bind(t, causal)
                calls[v.name]()
                torch.cuda.synchronize()
            times = {n: [] for n in calls}
            for r in range(o.rounds):
                for n in list(calls)[:: 1 if r % 2 == 0 else -1]:
                    times[n].append(steady(calls[n], o.lead, o.span))
            flops = 4 * b * h * s * s * d * (0.5 if causal else 1) * (2.5 if o.backward else 1)
            for n, ms in times.items():
                tf = flops / (sorted(ms)[len(ms) // 2] * 1e-3) / 1e12
                rows.append({"d": d, "causal": causal, "length": s, "name": n, "tflops": round(tf, 1),
                             "ms": [round(x, 4) for x in ms]})
            say({"d": d, "causal": causal, "length": s,
                 **{r["name"]: r["tflops"] for r in rows if r["length"] == s and r["causal"] == causal}})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("names", nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--masks", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--dims", type=int, nargs="+", default=[512])
    parser.add_argument("--lead", type=float, default=100)
    parser.add_argument("--span", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--float16", action="store_true")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--json")
    o = parser.parse_args()
    if o.what == "time":
        rows = measure(o.folder, o.names, o)
        if o.json:
            json.dump({"device": torch.cuda.get_device_name(), "date": time.strftime("%F %T"), "command": sys.argv,
                       "rows": rows}, open(o.json, "w"), indent=0)
    else:
        dtype = torch.float16 if o.float16 else torch.bfloat16
        for n in o.names:
            v = variant(o.folder, n)
            if o.packed:
                check_packed(v, dtype, o.d)
            elif getattr(v, "backward", n.startswith("b")):
                check_backward(v, o.folder, dtype, o.dims)
            else:
                check_forward(v, dtype, o.dims)
