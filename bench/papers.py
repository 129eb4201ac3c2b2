"""The papers' comparisons on one GPU: Tessera, the first FlashAttention's schedule, standard attention, PyTorch's eager
attention.

    python bench/papers.py speed   --csv FILE      time over length, head sizes, masks, dropout
    python bench/papers.py lengths --lengths 1024 4096 16384 65536 262144 --csv FILE
                                                   one sequence, 16 heads, up to where nothing else fits
    python bench/papers.py blocks  --csv FILE      the first schedule's block size and its time (first paper, figure 2)
    ncu ... python bench/papers.py traffic         one call of each kernel, for the hardware's counters
                                                   (scripts/gpu_papers.sh)
    python bench/papers.py counted NCU_CSV --csv FILE      their counts as a table

speed: 16384 tokens and 2048 / D heads in all, as the second paper's benchmark. traffic, blocks: GPT-2 medium of the
first paper's table, N 1024, D 64, 16 heads, batch 64. FLOPs: 4 B H N^2 D, halved when causal, times 2.5 backward.
standard and fa1 are Tessera's kernels for comparison (docs/reference/kernels/comparison.md); standard's backward pass
computes P again, which eager keeps from its forward pass. eager: three calls of PyTorch in bfloat16, gradients by its
autograd. Every result is compared with eager in float32 on one head before it is timed; exit status 1: a relative error
is above 2 %.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import threading
from dataclasses import asdict, dataclass

NAMES = ("tessera", "fa1", "standard", "eager")
MOST_ERROR = 0.02


@dataclass(frozen=True)
class Setting:
    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool = False
    dropout: float = 0.0
    mask: bool = False

    def flops(self, direction: str) -> float:
        forward = 4 * self.batch * self.heads * self.length**2 * self.head_dim / (2 if self.causal else 1)
        return forward * (2.5 if direction == "backward" else 1)


GPT2_MEDIUM = Setting(64, 16, 1024, 64)


class Contest:
    """The calls of one setting, on the same tensors."""

    def __init__(self, setting: Setting):
        import tessera
        import torch

        self.s, self.tessera, self.torch = setting, tessera, torch
        torch.manual_seed(0)
        shape = (setting.batch, setting.length, setting.heads, setting.head_dim)
        self.q, self.k, self.v, self.d_o = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.options = {"causal": setting.causal}
        self.hidden = None
        if setting.mask:  # a random half of the keys, beside each query's own
            mask = torch.rand(setting.length, setting.length, device="cuda") < 0.5
            self.options["mask"] = mask.fill_diagonal_(True)
            self.hidden = ~mask
        if setting.causal:
            above = torch.ones(setting.length, setting.length, device="cuda", dtype=torch.bool).triu_(1)
            self.hidden = above if self.hidden is None else self.hidden | above
        if setting.dropout:
            self.options.update(dropout_p=setting.dropout, dropout_seed=1)
        self.o, self.lse = tessera.attention(self.q, self.k, self.v, return_lse=True, **self.options)

    def kernel(self, name: str, direction: str) -> str:
        return "auto" if name == "tessera" else f"{'fwd' if direction == 'forward' else 'bwd'}_{name}"

    def eager(self, q, k, v, dropout: float):
        """q, k, v: [B, H, N, D]."""
        scores = (q * self.s.head_dim**-0.5) @ k.transpose(-1, -2)
        if self.hidden is not None:
            scores = scores.masked_fill_(self.hidden, float("-inf"))
        p = self.torch.softmax(scores, -1)
        return (self.torch.nn.functional.dropout(p, dropout) if dropout else p) @ v

    def call(self, name: str, direction: str):
        """The call to be timed. Raises if it does not fit or is refused."""
        if name != "eager":
            options = dict(self.options, kernel=self.kernel(name, direction))
            if direction == "forward":
                return lambda: self.tessera.attention(self.q, self.k, self.v, **options)
            return lambda: self.tessera.attention_backward(
                self.q, self.k, self.v, self.o, self.lse, self.d_o, **options
            )
        q, k, v = (x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v))
        if direction == "forward":

            def forward():
                with self.torch.no_grad():
                    return self.eager(q, k, v, self.s.dropout)

            return forward
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o, d_o = self.eager(*leaves, self.s.dropout), self.d_o.transpose(1, 2).contiguous()
        return lambda: self.torch.autograd.grad(o, leaves, d_o, retain_graph=True)

    def extra_bytes(self, name: str, direction: str) -> int:
        """Memory beyond inputs and outputs: the workspace; for eager, the allocator's peak."""
        if name != "eager":
            options = dict(self.options, kernel=self.kernel(name, direction))
            return self.tessera.plan(self.q, self.k, self.v, direction=direction, as_dict=True, **options)[
                "workspace_bytes"
            ]
        self.torch.cuda.reset_peak_memory_stats()
        before = self.torch.cuda.memory_allocated()
        call = self.call(name, direction)
        call()
        return self.torch.cuda.max_memory_allocated() - before

    def error(self, name: str, direction: str) -> float:
        """Relative RMS error of one head, against eager in float32."""
        torch = self.torch
        leaves = [x[:1, :, :1].transpose(1, 2).float().requires_grad_() for x in (self.q, self.k, self.v)]
        with torch.enable_grad():
            o = self.eager(*leaves, 0.0)
        exact = [o]
        if direction == "backward":
            exact = torch.autograd.grad(o, leaves, self.d_o[:1, :, :1].transpose(1, 2).float())
        got = self.call(name, direction)()
        got = [got] if direction == "forward" else list(got)[:3]
        if name != "eager":
            got = [x.transpose(1, 2) for x in got]
        return max(
            ((a[:1, :1].float() - b).square().mean() / b.square().mean()).sqrt().item() for a, b in zip(got, exact)
        )


def measure(
    setting: Setting, names, directions=("forward", "backward"), lead_ms=40.0, measure_ms=60.0, check=True
) -> list[dict]:
    import torch
    from cuda_bench import timing

    contest = Contest(setting)
    rows = []
    for direction in directions:
        for name in names:
            row = dict(
                asdict(setting), direction=direction, contestant=name, ms="", tflops="", extra_mib="", error="", why=""
            )
            rows.append(row)
            try:
                if check and not setting.dropout:  # eager's dropped entries are unknown
                    row["error"] = f"{contest.error(name, direction):.2e}"
                row["extra_mib"] = f"{contest.extra_bytes(name, direction) / 2**20:.1f}"
                call = {name: contest.call(name, direction)}
                seconds = timing.contest(call, timing.Steadiness(lead_ms, measure_ms, 1))[name].seconds
                row["ms"], row["tflops"] = f"{seconds * 1e3:.4f}", f"{setting.flops(direction) / seconds * 1e-12:.1f}"
            except (RuntimeError, ValueError) as error:  # does not fit; is refused
                row["why"] = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
                torch.cuda.synchronize()
            call = None
            torch.cuda.empty_cache()
        show(rows[-len(names) :])
    return rows


def show(rows: list[dict]) -> None:
    first = rows[0]
    what = ", ".join(word for word in ("causal" if first["causal"] else "full", "mask" if first["mask"] else "",
                                       f"dropout {first['dropout']}" if first["dropout"] else "") if word)  # fmt: skip
    texts = [f"{row['contestant']} {row['ms'] or row['why'][:40]} ms ({row['tflops']}; {row['error']})" for row in rows]
    print(f"{first['direction']:8s} D {first['head_dim']:3d} N {first['length']:7d} B {first['batch']:3d} "
          f"{what}: " + "  ".join(texts),
          flush=True)  # fmt: skip


def write(rows: list[dict], path: str | None) -> None:
    if not path or not rows:
        return
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def run_speed(options) -> list[dict]:
    rows = []
    for head_dim in options.head_dims:
        for causal in (False, True):
            for length in options.lengths:
                rows += measure(Setting(16384 // length, 2048 // head_dim, length, head_dim, causal), NAMES)
        for more in ({"dropout": 0.1}, {"mask": True}, {"causal": True, "dropout": 0.1}):
            rows += measure(Setting(8, 2048 // head_dim, 2048, head_dim, **more), NAMES)
    return rows + measure(GPT2_MEDIUM, NAMES)


def run_lengths(options) -> list[dict]:
    rows = []
    for length in options.lengths:
        # The float32 check needs a head's whole matrix; bench/long_context.py compares long ones with float64.
        names = NAMES if length <= 32768 else ("tessera", "standard", "eager") if length <= 131072 else ("tessera",)
        few = {} if length <= 16384 else {"check": False, "lead_ms": 0, "measure_ms": 1}
        rows += measure(Setting(1, 16, length, 64), names, **few)
    return rows


BLOCKS = (32, 64, 128, 256)


def with_keys(keys: int, run):
    """Calls run() with tiles of this many keys in the first schedule; 0: those of its table. Only a new plan reads the
    environment, and a thread keeps its plans, so this runs in a thread of its own."""
    given: list = []

    def body():
        try:
            given.append(run())
        except BaseException as error:  # raised below
            given.append(error)

    if keys:
        os.environ["TESSERA_FA1_KEYS"] = str(keys)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    os.environ.pop("TESSERA_FA1_KEYS", None)
    if isinstance(given[0], BaseException):
        raise given[0]
    return given[0]


def planned_keys() -> int:
    """The keys of a tile of the first schedule, by this thread's plan."""
    contest = Contest(GPT2_MEDIUM)
    return contest.tessera.plan(contest.q, contest.k, contest.v, direction="forward", kernel="fwd_fa1", as_dict=True)[
        "block_n"
    ]


def run_blocks(options) -> list[dict]:
    rows = []
    for keys in BLOCKS:
        used, measured = with_keys(keys, lambda: (planned_keys(), measure(GPT2_MEDIUM, ("fa1",), ("forward",))))
        if used != keys:
            raise RuntimeError(f"a tile of {used} keys where {keys} were asked for")
        rows += [dict(row, block_n=keys) for row in measured]
    return rows


def counted_calls():
    """(direction, contestant, keys of a tile or 0) of every call that is counted, in order."""
    for direction in ("forward", "backward"):
        for name in NAMES:
            yield direction, name, 0
    for keys in BLOCKS:
        yield "forward", "fa1", keys


def run_traffic(options) -> list[dict]:
    import torch

    contest = Contest(GPT2_MEDIUM)

    def count(direction, name):
        call = contest.call(name, direction)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.arange(7, device="cuda")  # marks the start of a call
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del call
        torch.cuda.empty_cache()

    for direction, name, keys in counted_calls():
        with_keys(keys, lambda: count(direction, name))
    return []


def run_counted(options) -> list[dict]:
    """ncu's raw CSV page -> bytes of each call and of each of its kernels."""
    with open(options.ncu) as file:
        lines = [line for line in file if line.startswith('"')]
    table = list(csv.DictReader(lines))[1:]  # after the units
    calls, rows = counted_calls(), []
    for kernel in table:
        name = kernel["Kernel Name"]
        if "arange" in name:
            direction, contestant, keys = next(calls)
            continue
        number = {key: float(kernel[key].replace(",", "")) for key in METRICS}
        rows.append({"direction": direction, "contestant": contestant, "block_n": keys, "kernel": name[:60],
                     "read_mib": f"{number[METRICS[0]] / 2**20:.1f}",
                     "written_mib": f"{number[METRICS[1]] / 2**20:.1f}",
                     "us": f"{number[METRICS[2]] / 1e3:.1f}"})  # fmt: skip
    sums: dict[tuple, list[float]] = {}
    for row in rows:
        total = sums.setdefault((row["direction"], row["contestant"], row["block_n"]), [0, 0, 0])
        for n, column in enumerate(("read_mib", "written_mib", "us")):
            total[n] += float(row[column])
    for (direction, contestant, keys), (read, written, us) in sums.items():
        print(
            f"{direction:8s} {contestant:8s} {keys or '':>4}  read {read:9.1f} MiB, written {written:9.1f} MiB, "
            f"{us:9.1f} us"
        )
    return rows


METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "lengths", "blocks", "traffic", "counted"))
    parser.add_argument("ncu", nargs="?", help="counted: the raw CSV page of ncu, --print-units base")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args()
    if (options.what == "counted") != (options.ncu is not None):
        parser.error("NCU_CSV: given with counted, and with nothing else")
    if options.what != "counted":
        from cuda_bench import machine

        machine.need_gpu()
    rows = globals()[f"run_{options.what}"](options)
    write(rows, options.csv)
    wrong = [row for row in rows if row.get("error") and not float(row["error"]) <= MOST_ERROR]
    for row in wrong:
        print(f"WRONG: {row}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
