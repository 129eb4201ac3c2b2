"""The lines of the AMX issue in one process: builds of the library, PyTorch and the ceilings, called in turn.

    targets.py PART OUT.csv SECONDS name=LIBRARY ...     PART: one, options, heads, f32, two, all; SECONDS a subject of a cell

Each turn times one call of every subject and a short sample of both ceilings, so that shares and ratios are of neighbours in
time: the medians of the paired quotients. "one" and what else has one thread runs on the core whose products are the fastest
at the start.
"""

import ctypes as C
import math
import os
import statistics
import sys
import time

part, out, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
libraries = [argument.split("=") for argument in sys.argv[4:]]
FLOAT32, BFLOAT16 = 0, 2
THREADS = {"two": 2, "all": min(16, len(os.sched_getaffinity(0)))}.get(part, 1)

ab = C.CDLL(os.path.abspath("libab.so"))
P, L, I = C.c_void_p, C.c_int64, C.c_int
ab.ab_case.restype, ab.ab_case.argtypes = P, [I, I, L, L, L, L, L, L, I, L, C.c_char_p, I, I]
ab.ab_bind.restype, ab.ab_bind.argtypes = P, [P, C.c_char_p, C.c_char_p]
for function in (ab.ab_run, ab.ab_isa, ab.ab_unbind, ab.ab_free):
    function.argtypes = [P]
ab.ab_fma.restype = ab.ab_amx.restype = ab.ab_amx_sample.restype = C.c_double


def ceilings(threads):
    """GFLOP/s of the products: of zeros, of numbers."""
    return ab.ab_amx(threads, 1), ab.ab_amx(threads, 0)


have_amx = ceilings(1)[0] > 0
if THREADS == 1:
    cpus = sorted(os.sched_getaffinity(0))
    rates = {}
    for cpu in cpus if have_amx else cpus[:1]:
        os.sched_setaffinity(0, {cpu})
        rates[cpu] = max(ab.ab_amx_sample(0) for _ in range(8)) if have_amx else 1
    chosen = max(rates, key=rates.get)
    os.sched_setaffinity(0, {chosen})
    print(f"core {chosen}; products of numbers by core:", " ".join(f"{rates[c]:.0f}" for c in rates), flush=True)
else:
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:THREADS]))
os.environ["GOMP_SPINCOUNT"] = "0"  # its threads would spin beside the next subject
import torch  # noqa: E402  after the affinity, which its threads inherit

torch.set_num_threads(THREADS)


class Call:
    """One call of one subject: flops and run()."""

    def __init__(self, name, back, N, D, causal, B, H, option="none", dtype=BFLOAT16, threads=THREADS, Hkv=None,
                 library=None):
        self.name, self.t = name, []
        window = 1023 if option == "window" else -1
        N, causal = (4096, 1) if window >= 0 else (N, causal)
        pairs = N * N if not causal else N * (N + 1) / 2
        if window >= 0:
            pairs = sum(min(i + 1, window + 1) for i in range(N))
        self.flops = (10 if back else 4) * B * H * D * pairs
        self.case = self.bound = None
        self.isa = 0
        if library:
            self.case = ab.ab_case(back, dtype, B, N, N, H, Hkv or H, D, causal, window,
                                   b"none" if option == "window" else option.encode(), threads, 0)
            self.bound = ab.ab_bind(self.case, os.path.abspath(library).encode(), b"")
            self.isa = ab.ab_isa(self.bound)
            self.run = lambda: ab.ab_run(self.bound)
            return
        kind = torch.float32 if dtype == FLOAT32 else torch.bfloat16
        q, k, v = (torch.randn(B, h, N, D).to(kind).requires_grad_(bool(back)) for h in (H, Hkv or H, Hkv or H))
        attention = torch.nn.functional.scaled_dot_product_attention
        expand = H // (Hkv or H)
        if expand > 1:
            k, v = (x.repeat_interleave(expand, 1) for x in (k, v))
        if back:
            o = attention(q, k, v, is_causal=bool(causal))
            d_o = torch.randn_like(o)
            self.run = lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)
        else:

            def run():
                with torch.no_grad():
                    attention(q, k, v, is_causal=bool(causal))

            self.run = run
            run()

    def close(self):
        if self.bound:
            ab.ab_unbind(self.bound)
            ab.ab_free(self.case)


file = open(out, "w", encoding="utf-8")
print("part,cell,subject,isa,threads,best_gflops,median_gflops,calls,zeros_median,numbers_median,of_zeros,of_numbers,"
      "of_first", file=file)
summary = {}


def cell(name, calls, threads=THREADS, least=3):
    """Times the calls in turn; of_first: the median of this one's rate over the first one's, turn by turn."""
    zeros, numbers = [], []
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(calls[0].t) < least:
        if threads == 1 and have_amx:
            zeros.append(ab.ab_amx_sample(1))
            numbers.append(ab.ab_amx_sample(0))
        for call in calls:
            if THREADS > 1:
                time.sleep(0.003)  # until the last subject's threads have gone to sleep
            start = time.perf_counter()
            call.run()
            call.t.append(time.perf_counter() - start)
    median = statistics.median
    line = []
    for call in calls:
        rates = [call.flops * 1e-9 / t for t in call.t]
        first = [calls[0].flops * 1e-9 / t for t in calls[0].t]
        of_first = median(a / b for a, b in zip(rates, first))
        of = [median(a / b for a, b in zip(rates, c)) if c else 0 for c in (zeros, numbers)]
        print(f"{part},{name},{call.name},{call.isa},{threads},{max(rates):.1f},{median(rates):.1f},{len(rates)},"
              f"{median(zeros) if zeros else 0:.0f},{median(numbers) if numbers else 0:.0f},{of[0]:.3f},{of[1]:.3f},"
              f"{of_first:.3f}", file=file, flush=True)
        summary[name, call.name] = median(rates), of, of_first
        line.append(f"{call.name} {median(rates):.0f}" + (f" x{of_first:.2f}" if call is not calls[0] else ""))
        call.close()
    shares = f" of zeros {summary[name, calls[0].name][1][0]:.3f} numbers {summary[name, calls[0].name][1][1]:.3f}"
    print(name, " ".join(line), shares if zeros else "", flush=True)


def heads(N, D, causal, flops=5e9):
    n = math.ceil(flops / (4.0 * N * N * D / (2 if causal else 1)))
    H = min(n, 8)
    return math.ceil(n / H), H


def ours(*arguments, **keywords):
    return [Call(name, *arguments, library=path, **keywords) for name, path in libraries]


def report_ceilings(when):
    for threads in sorted({1, THREADS}):
        print(f"ceilings {when}, {threads} threads: zeros, numbers", *(f"{x:.0f}" for x in ceilings(threads)), "fma",
              f"{ab.ab_fma(threads):.0f}", flush=True)


def geometric_means():
    for direction in ("fwd", "bwd"):
        ratios = [1 / of for (name, subject), (_, _, of) in summary.items()
                  if subject == "pytorch" and name.startswith(direction)]
        if ratios:
            print(f"{part} {direction} x pytorch: least {min(ratios):.2f} geometric mean "
                  f"{statistics.geometric_mean(ratios):.2f} of {len(ratios)} cells", flush=True)


report_ceilings("before")
MASKS = ((0, "full"), (1, "causal"))
if part in ("one", "two"):
    lengths = (512, 2048, 8192) if part == "one" else (512, 2048)
    order = [(back, N, D) for N in lengths for back in (0, 1) for D in (64, 128)]
    for back, N, D in order:
        for causal, mask in MASKS:
            B, H = heads(N, D, causal)
            if part == "two":
                B, H = B * 2, H
            arguments = back, N, D, causal, B, H
            cell(f"{'bwd' if back else 'fwd'}/{N}/{D}/{mask}", ours(*arguments) + [Call("pytorch", *arguments)],
                 least=2)
    geometric_means()
if part == "options":
    for back, D in ((0, 64), (0, 128), (1, 64), (1, 128)):
        B, H = heads(2048, D, 0)
        B, H = 1, max(2, B * H)
        for name, path in libraries:
            options = ("none", "bias", "dropout", "softcap", "alibi", "window")
            cell(f"{'bwd' if back else 'fwd'}/2048/{D}/{name}",
                 [Call(option, back, 2048, D, 0, B, H, option, library=path) for option in options])
if part == "heads":
    for back in (0, 1):
        for name, path in libraries:
            sizes = (64, 40, 80, 96, 128, 192, 256)
            cell(f"{'bwd' if back else 'fwd'}/2048/{name}",
                 [Call(f"D{D}", back, 2048, D, 0, 1, max(1, 256 // D), library=path) for D in sizes])
if part == "f32":
    for N, D in ((2048, 128), (512, 64), (512, 128), (2048, 64), (8192, 128)):
        for causal, mask in MASKS:
            B, H = heads(N, D, causal, 1.5e9)
            arguments = 0, N, D, causal, B, H
            fma = ab.ab_fma(1)
            calls = ours(*arguments, dtype=FLOAT32) + [Call("pytorch", *arguments, dtype=FLOAT32)]
            cell(f"fwd/{N}/{D}/{mask}", calls)
            print(f"   of the fma peak {fma:.0f}: {summary[f'fwd/{N}/{D}/{mask}', calls[0].name][0] / fma:.3f}", flush=True)
    geometric_means()
if part == "all":
    arguments = 0, 4096, 128, 1, 1, 32
    cell("prefill/32:8/4096/128/causal", ours(*arguments, Hkv=8) + [Call("pytorch", *arguments, Hkv=8)])
    for back in (0, 1):
        for D in (128, 64):
            for causal, mask in MASKS:
                name, path = libraries[0]
                gain = [ceilings(n) for n in (1, THREADS)]
                arguments = back, 2048, D, causal, 1, 32
                calls = [Call(f"{n}", *arguments, threads=n, library=path) for n in (1, THREADS)]
                cell(f"{'bwd' if back else 'fwd'}/2048/{D}/{mask}", calls)
                print("   the ceilings gain", *(f"{b / a if a else 0:.2f}" for a, b in zip(*gain)), flush=True)
report_ceilings("after")
