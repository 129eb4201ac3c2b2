"""The lines of the AMX issue in one process: builds of the library, PyTorch and the ceilings, called in turn.

    targets.py PART OUT.csv SECONDS name=LIBRARY ...     PART: one, options, builds, heads, f32, two, all; SECONDS a subject of a
                                                         cell; in the environment LENGTHS and DIRECTIONS ("0 1") of "one" and
                                                         "two", OPTIONS of "builds"; a name that ends in -lse: O alone

With one thread every call stands between two samples of the products of numbers, which say whether the core runs at its full
rate or at less than half (docs/lab/2026-11-25-amx.md): medians are of calls of the same state. A cell begins on a core at its
full rate, if there is one.
"""

import math
import os
import statistics
import sys
import time

from library import ab

part, out, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
libraries = [argument.split("=") for argument in sys.argv[4:]]
FLOAT32, BFLOAT16 = 0, 2
THREADS = {"two": 2, "all": min(16, len(os.sched_getaffinity(0)))}.get(part, 1)



def ceilings(threads):
    """GFLOP/s of the products: of zeros, of numbers."""
    return ab.ab_amx(threads, 1), ab.ab_amx(threads, 0)


have_amx = ceilings(1)[0] > 0
told_by_state = have_amx and THREADS == 1 and part != "f32"  # vectors hardly have states, and samples would heat their core
cpus = sorted(os.sched_getaffinity(0))[:THREADS if THREADS > 1 else None]
os.sched_setaffinity(0, set(cpus))
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
            option = ("none" if option == "window" else option) + ("-lse" if name.endswith("-lse") else "")
            self.case = ab.ab_case(back, dtype, B, N, N, H, Hkv or H, D, causal, window, option.encode(), threads, 0)
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
print("part,cell,subject,isa,threads,state,calls,best_gflops,median_gflops,numbers_gflops,zeros_gflops,of_numbers,of_first",
      file=file)
summary = {}
FULL, SLOW = 1500, 900  # GFLOP/s of products of numbers of one core: above, it runs at its full rate, below, at less than half


def choose_core():
    """The one whose products are the fastest now."""
    if not told_by_state:
        return
    rates = {}
    for cpu in cpus:
        os.sched_setaffinity(0, {cpu})
        rates[cpu] = max(ab.ab_amx_sample(0) for _ in range(2))
        if rates[cpu] > FULL:
            break
    os.sched_setaffinity(0, {max(rates, key=rates.get)})


def state_of(before, after):
    if not told_by_state:
        return "any"
    return "full" if min(before, after) > FULL else "slow" if max(before, after) < SLOW else "mixed"


def cell(name, calls, threads=THREADS, least=3):
    """Times the calls in turn, each between two samples of the products of numbers: medians by the core's state."""
    choose_core()
    sample = (lambda: ab.ab_amx_sample(0)) if told_by_state else lambda: 0
    times = {call: [] for call in calls}  # (state, seconds, GFLOP/s of numbers)
    zeros = []
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(zeros) < least:
        zeros.append(ab.ab_amx_sample(1) if sample() else 0)
        before = sample()
        for call in calls:
            if THREADS > 1:
                time.sleep(0.003)  # until the last subject's threads have gone to sleep
            start = time.perf_counter()
            call.run()
            taken = time.perf_counter() - start
            after = sample()
            times[call].append((state_of(before, after), taken, (before + after) / 2))
            before = after
    median = statistics.median
    for state in ("full", "slow", "any"):
        line, first, share = [], None, 0
        for call in calls:
            mine = [(t, numbers) for s, t, numbers in times[call] if s == state]
            if not mine:
                continue
            rates = [call.flops * 1e-9 / t for t, _ in mine]
            of_numbers = median(r / n for r, (_, n) in zip(rates, mine)) if mine[0][1] else 0
            if call is calls[0]:
                first, share = median(rates), of_numbers
            of_first = median(rates) / first if first else 0
            print(f"{part},{name},{call.name},{call.isa},{threads},{state},{len(mine)},{max(rates):.1f},{median(rates):.1f},"
                  f"{median(n for _, n in mine):.0f},{median(zeros):.0f},{of_numbers:.3f},{of_first:.3f}", file=file, flush=True)
            summary[name, call.name, state] = median(rates), of_first
            line.append(f"{call.name} {median(rates):.0f}" + (f" x{of_first:.2f}" if call is not calls[0] else ""))
        if line:
            print(state, name, " ".join(line), f" of numbers {share:.3f}" if share else "", flush=True)
    for call in calls:
        call.close()


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
        for state in ("full", "slow", "any"):
            ratios = [1 / of for (name, subject, at), (_, of) in summary.items()
                      if subject == "pytorch" and at == state and of and name.startswith(direction)]
            if ratios:
                print(f"{part} {direction} {state} x pytorch: least {min(ratios):.2f} geometric mean "
                      f"{statistics.geometric_mean(ratios):.2f} of {len(ratios)} cells", flush=True)


report_ceilings("before")
MASKS = ((0, "full"), (1, "causal"))
if part in ("one", "two"):
    lengths = [int(n) for n in os.environ.get("LENGTHS", "512 2048 8192").split()]
    directions = [int(back) for back in os.environ.get("DIRECTIONS", "0 1").split()]
    order = [(back, N, D) for N in lengths for back in directions for D in (64, 128)]
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
if part == "builds":  # the same option of several builds, after the first one's plain call
    for option in os.environ.get("OPTIONS", "bias dropout").split():
        for D in (64, 128):
            H = 4 if D == 64 else 2
            plain = "none-lse" if libraries[0][0].endswith("-lse") else "none"
            calls = [Call(plain, 0, 2048, D, 0, 1, H, library=libraries[0][1])]
            cell(f"fwd/2048/{D}/{option}",
                 calls + [Call(f"{option}-{name}", 0, 2048, D, 0, 1, H, option, library=path) for name, path in libraries])
if part == "heads":
    for back in (0, 1):
        for name, path in libraries:
            sizes = (64, 32, 40, 80, 96, 128, 192, 256)
            cell(f"{'bwd' if back else 'fwd'}/2048/{name}",
                 [Call(f"D{D}" + ("-lse" if name.endswith("-lse") else ""), back, 2048, D, 0, 1, max(1, 256 // D), library=path)
                  for D in sizes])
if part == "f32":
    for N, D in ((2048, 128), (512, 64), (512, 128), (2048, 64), (8192, 128)):
        for causal, mask in MASKS:
            B, H = heads(N, D, causal, 1.5e9)
            arguments = 0, N, D, causal, B, H
            fma = ab.ab_fma(1)
            calls = ours(*arguments, dtype=FLOAT32) + [Call("pytorch", *arguments, dtype=FLOAT32)]
            cell(f"fwd/{N}/{D}/{mask}", calls)
            rate = summary[f"fwd/{N}/{D}/{mask}", calls[0].name, "any"][0]
            print(f"   of the fma peak {fma:.0f}: {rate / fma:.3f}", flush=True)
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
