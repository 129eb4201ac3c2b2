"""One batch on several GPUs of one host: whether `tessera.torch.context_parallel` is correct, and its speed relative to
the ideal.

    python bench/many_gpus.py [--ranks N] [--lengths 32768,131072,262144] [--out FOLDER] [--seconds S] [--device cpu]

The ideal is a GPU's part without any exchange or merge: all rows of 1 / N of the heads. Rates are TFLOP/s per GPU,
causal, bfloat16, 32 query and 8 KV heads of 128: forward, and forward with backward (3.5 times the products). Every
time is that of the slowest rank, the median of several calls. "model" is the prediction of `tessera plan --ranks` for
the strategy that auto chooses.

Writes ranks.csv into the folder. --device cpu runs the same by gloo with small sizes, to try the script, not to
measure. Exit status 0: the results are correct.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import tessera.torch
from tessera import _core
from tessera.compare.float64 import attend
from tessera._ranks.schedule import head_ranks

STRATEGIES = ("auto", "ring", "all_gather", "all_to_all")
HEADS, HEADS_KV, DIM = 32, 8, 128
# Of the norm of a row: bfloat16's rounding of P and dS is 2^-9 of each term.
MOST_OF_A_ROW = 2.0**-6
COLUMNS = (
    "what",
    "strategy",
    "layout",
    "ranks",
    "rows",
    "direction",
    "ms",
    "tflops",
    "of_ideal",
    "model_ms",
    "taken",
    "gpu",
)


class Bench:
    def __init__(self, rank: int, ranks: int, options: argparse.Namespace):
        self.rank, self.ranks, self.options = rank, ranks, options
        self.cuda = options.device == "cuda"
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.started = time.monotonic()
        self.rows: list[dict] = []
        self.failed = False
        self.gpu = torch.cuda.get_device_name(self.device) if self.cuda else "CPU"

    # ---- operations on all ranks ------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"{time.monotonic() - self.started:5.0f} s  {text}", flush=True)

    def in_time(self) -> bool:
        """The same result on every rank."""
        late = torch.tensor(
            [time.monotonic() - self.started > self.options.seconds], device=self.device, dtype=torch.int32
        )
        dist.broadcast(late, 0)
        return not late.item()

    def slowest(self, value: float) -> float:
        tensor = torch.tensor([value], device=self.device, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()

    def milliseconds(self, call) -> float:
        """The slowest rank's time; the median of calls, after warm-up calls."""

        def once() -> float:
            dist.barrier()
            if not self.cuda:
                begun = time.perf_counter()
                call()
                return 1e3 * (time.perf_counter() - begun)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end)

        once()
        first = self.slowest(once())
        calls = max(3, min(20, int(1500 / max(first, 1e-3)))) if self.cuda else 1
        return statistics.median([self.slowest(once()) for _ in range(calls)])

    def tensors(self, shape: tuple, heads: int, heads_kv: int, seed: int, scale: float = 1.0) -> list:
        """q, k, v and d_o; each rank gets the same numbers on every call."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)
        of = lambda h: (  # noqa: E731
            torch.randn(*shape, h, DIM, generator=generator, device=self.device, dtype=torch.float32) * scale
        ).to(torch.bfloat16)
        return [of(heads), of(heads_kv), of(heads_kv), of(heads)]

    # ---- correctness ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compares o, dQ, dK, dV with float64, beside the results of one device; and checks for the same bits twice."""
        length = 2048 if self.cuda else 128
        heads, heads_kv = max(8, self.ranks), max(2, self.ranks)
        generator = torch.Generator(self.device).manual_seed(7)
        full = [
            torch.randn(1, length, h, DIM, generator=generator, device=self.device).to(torch.bfloat16)
            for h in (heads, heads_kv, heads_kv, heads)
        ]
        names = ("o", "d_q", "d_k", "d_v")
        exact = _exact(*full)

        def rms(tensors):
            return [(t.double() - e).square().mean().sqrt().item() for t, e in zip(tensors, exact)]

        q, k, v = (t.clone().requires_grad_() for t in full[:3])
        o = tessera.torch.attention(q, k, v, causal=True)
        alone = rms([o.detach(), *torch.autograd.grad(o, (q, k, v), full[3])])
        for strategy in (*STRATEGIES, *(("mesh",) if self.ranks == 4 else ())):
            for layout in ("zig_zag", "contiguous"):
                parallel = tessera.torch.context_parallel(layout=layout, strategy=strategy)
                runs = []
                for _ in range(2):
                    q, k, v = (parallel.shard(t).clone().requires_grad_() for t in full[:3])
                    o = parallel.attention(q, k, v, causal=True, deterministic=True)
                    gradients = torch.autograd.grad(o, (q, k, v), parallel.shard(full[3]))
                    runs.append([parallel.unshard(t.detach()) for t in (o, *gradients)])
                ratios = [a / b for a, b in zip(rms(runs[0]), alone)]
                same = all(torch.equal(a, b) for a, b in zip(*runs))
                right = same and max(ratios) < 2
                self.failed |= not right
                numbers = ", ".join(f"{name} {ratio:.3f}" for name, ratio in zip(names, ratios))
                self.say(
                    f"{strategy}, {layout}: error over one device's: {numbers}; "
                    f"{'the same bits twice' if same else 'OTHER BITS the second time'}{'' if right else '  WRONG'}"
                )

    # ---- speed ------------------------------------------------------------------------------------------------------

    def measure(self, what: str, strategy: str, layout: str, lengths: list[int], make) -> None:
        """make(): (attend(q, k, v), q, k, v, d_o). The ideal has strategy "ideal"."""
        rows = sum(lengths)
        window = self.options.window if what == "window" else -1
        pairs = sum(_area(n, window) for n in lengths)
        attend_rows, q, k, v, d_o = make()
        leaves = [t.requires_grad_() for t in (q, k, v)]

        def forward() -> None:
            with torch.no_grad():
                attend_rows(*leaves)

        def both() -> None:
            torch.autograd.grad(attend_rows(*leaves), leaves, d_o)

        for direction, call, factor in (("forward", forward, 1.0), ("both", both, 3.5)):
            ms = self.milliseconds(call)
            tflops = factor * 4 * DIM * HEADS * pairs / self.ranks / ms * 1e-9
            ideal = next(
                (
                    r
                    for r in self.rows
                    if (r["what"], r["rows"], r["direction"], r["strategy"]) == (what, rows, direction, "ideal")
                ),
                None,
            )
            predicted, taken = self.model(strategy, layout, lengths, window, direction)
            self.rows.append(
                dict(
                    what=what, strategy=strategy, layout=layout, ranks=self.ranks, rows=rows, direction=direction,
                    ms=f"{ms:.4g}", tflops=f"{tflops:.4g}", of_ideal=f"{float(ideal['ms']) / ms:.4f}" if ideal else "",
                    model_ms=predicted, taken=taken, gpu=self.gpu,
                )
            )  # fmt: skip
        rates = ", ".join(f"{r['tflops']} {r['direction']}" for r in self.rows[-2:])
        self.say(f"{what}, {rows} rows, {strategy} {layout}: {rates}")

    def model(self, strategy: str, layout: str, lengths: list[int], window: int, direction: str) -> tuple[str, str]:
        if strategy == "ideal":
            return "", ""
        members = dict(
            ranks=self.ranks, strategy=strategy, layout=layout, causal=1, window_left=window, heads_q=HEADS,
            heads_kv=HEADS_KV, head_dim=DIM, head_ranks=0,
        )  # fmt: skip
        passes = ("forward", "backward") if direction == "both" else ("forward",)
        members["head_ranks"] = head_ranks(tuple(lengths), passes, **members)
        total, taken = 0.0, []
        for one in passes:
            plan = json.loads(_core.ranks_plan_json(lengths, -1, direction=one, **members))
            total += plan["predicted_us"] * 1e-3
            taken.append(plan["strategy"])
        return f"{total:.4g}", "+".join(taken)

    def dense(self, length: int) -> None:
        shape = (1, length)
        share = (1, length // self.ranks)
        self.measure("dense", "ideal", "", [length], lambda: self._ideal(shape))
        for strategy in STRATEGIES:
            if self.in_time():
                self.measure("dense", strategy, "zig_zag", [length], lambda: self._parallel(strategy, "zig_zag", share))

    def windowed(self, length: int) -> None:
        window = {"window": (self.options.window, 0)}
        self.measure("window", "ideal", "", [length], lambda: self._ideal((1, length), **window))
        for strategy, layout in (
            ("auto", "zig_zag"),
            ("ring", "zig_zag"),
            ("all_gather", "zig_zag"),
            ("auto", "contiguous"),
        ):
            if self.in_time():
                self.measure(
                    "window", strategy, layout, [length],
                    lambda: self._parallel(strategy, layout, (1, length // self.ranks), **window),
                )  # fmt: skip

    def packed(self, length: int) -> None:
        """48 sequences with log-normal lengths."""
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(48, generator=generator).exp()
        lengths = (weights / weights.sum() * length).long().tolist()
        lengths[-1] += length - sum(lengths)
        cu_seqlens = [0]
        for n in lengths:
            cu_seqlens.append(cu_seqlens[-1] + n)
        on_device = torch.tensor(cu_seqlens, dtype=torch.int32, device=self.device)
        longest = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
        self.measure(
            "packed", "ideal", "", lengths,
            lambda: self._ideal((length,), cu_seqlens_q=on_device, cu_seqlens_k=on_device, **longest),
        )  # fmt: skip
        for strategy in STRATEGIES:
            if self.in_time():
                self.measure(
                    "packed", strategy, "planned", lengths,
                    lambda: self._parallel(strategy, "planned", (length // self.ranks,), cu_seqlens=cu_seqlens),
                )  # fmt: skip

    def longest(self, length: int) -> None:
        """Forward and backward once, and sampled rows of o and of all gradients compared with float64."""
        parallel = tessera.torch.context_parallel()
        q, k, v, d_o = self.tensors((1, length // self.ranks), HEADS, HEADS_KV, 5)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        dist.barrier()
        begun = time.perf_counter()
        o, lse = parallel.attention(*leaves, causal=True, return_lse=True)
        d_q, d_k, d_v = torch.autograd.grad(o, leaves, d_o)
        if self.cuda:
            torch.cuda.synchronize()
        seconds = self.slowest(time.perf_counter() - begun)
        q, k, v, o, lse = (t.detach()[0] for t in (q, k, v, o, lse))
        keys, values = (parallel.unshard(t[None])[0] for t in (k, v))
        positions = parallel.position_ids(length, device=self.device)
        worst = {name: 0.0 for name in ("o", "d_q", "d_k", "d_v")}

        def compare(name: str, found: torch.Tensor, exact: torch.Tensor) -> None:
            worst[name] = max(worst[name], ((found.double() - exact).norm() / exact.norm()).item())

        for row in torch.linspace(0, positions.numel() - 1, 8).long().tolist():
            seen = int(positions[row]) + 1
            if seen < 128:
                continue
            for head in range(0, HEADS, 7):
                kv = head * HEADS_KV // HEADS
                some_k, some_v = keys[:seen, kv].double(), values[:seen, kv].double()
                p = torch.softmax(some_k @ q[row, head].double() / DIM**0.5, 0)
                exact, d_p = p @ some_v, some_v @ d_o[0, row, head].double()
                compare("o", o[row, head], exact)
                d_s = p * (d_p - exact @ d_o[0, row, head].double())
                compare("d_q", d_q[0, row, head], d_s @ some_k / DIM**0.5)
        # A key's gradients are sums over the queries of all ranks.
        for key in torch.linspace(length // 16, length - length // 8, 4).long().tolist():
            kv = key % HEADS_KV
            exact_k, exact_v = torch.zeros(2, DIM, dtype=torch.float64, device=self.device)
            for head in range(kv * HEADS // HEADS_KV, (kv + 1) * HEADS // HEADS_KV):
                of_q, of_o = q[:, head].double(), d_o[0, :, head].double()
                s = of_q @ keys[key, kv].double() / DIM**0.5
                p = torch.where(positions >= key, torch.exp(s - lse[head].double()), 0.0)
                delta = (of_o * o[:, head].double()).sum(-1)
                exact_v += p @ of_o
                exact_k += (p * (of_o @ values[key, kv].double() - delta)) @ of_q / DIM**0.5
            dist.all_reduce(exact_k)
            dist.all_reduce(exact_v)
            mine = (positions == key).nonzero().flatten().tolist()
            for row in mine:
                compare("d_k", d_k[0, row, kv], exact_k)
                compare("d_v", d_v[0, row, kv], exact_v)
        worst = {name: self.slowest(error) for name, error in worst.items()}
        wrong = not all(0 < error <= MOST_OF_A_ROW for error in worst.values())
        self.failed |= wrong
        tflops = 3.5 * 4 * DIM * HEADS * _area(length, -1) / self.ranks / seconds * 1e-12
        self.rows.append(
            dict(what="longest", strategy="auto", layout="zig_zag", ranks=self.ranks, rows=length, direction="both",
                 ms=f"{1e3 * seconds:.4g}", tflops=f"{tflops:.4g}", of_ideal="", model_ms="", taken="", gpu=self.gpu)
        )  # fmt: skip
        errors = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
        self.say(
            f"{length} rows, forward and backward once, the first call: {seconds:.1f} s, {tflops:.0f} TFLOP/s a GPU; "
            f"largest relative error of sampled rows: {errors}{'  WRONG' if wrong else ''}"
        )

    def _ideal(self, shape: tuple, **options):
        tensors = self.tensors(shape, HEADS // self.ranks, max(HEADS_KV // self.ranks, 1), 3)
        mask = options if "window" in options else {"causal": True, **options}
        return lambda q, k, v: tessera.torch.attention(q, k, v, **mask), *tensors

    def _parallel(self, strategy: str, layout: str, shape: tuple, **options):
        parallel = tessera.torch.context_parallel(layout=layout, strategy=strategy)
        mask = options if "window" in options else {"causal": True, **options}
        return lambda q, k, v: parallel.attention(q, k, v, **mask), *self.tensors(shape, HEADS, HEADS_KV, 3)

    # ---- report -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        if self.rank != 0:
            return
        out = Path(self.options.out)
        out.mkdir(parents=True, exist_ok=True)
        with open(out / "ranks.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)
        print(f"\n{self.ranks} x {self.gpu}: TFLOP/s a GPU (share of the ideal), model in ms beside measured")
        titles = ("", "rows", "strategy", "forward", "with backward", "ms", "model", "taken by the model")
        line = "{:8} {:>8}  {:22} {:>14} {:>16}   {:>8} {:>8}  {}"
        print(line.format(*titles))
        for one, two in zip(self.rows[::2], self.rows[1::2]):  # the longest has no pair
            print(
                line.format(
                    one["what"], one["rows"], f"{one['strategy']} {one['layout']}", _share(one), _share(two), two["ms"],
                    two["model_ms"], two["taken"],
                )
            )  # fmt: skip


def _share(row: dict) -> str:
    return f"{row['tflops']} ({float(row['of_ideal']):.2f})" if row["of_ideal"] else row["tflops"]


def _area(length: int, window: int) -> int:
    """Visible pairs, causal."""
    reach = length if window < 0 else min(window + 1, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def _exact(q, k, v, d_o):
    """o and the gradients in float64, one query head at a time."""
    group = q.shape[2] // k.shape[2]
    o, d_q = (torch.empty(t.shape, dtype=torch.float64, device=q.device) for t in (q, q))
    d_k, d_v = (torch.zeros(t.shape, dtype=torch.float64, device=q.device) for t in (k, v))
    diagonal = torch.arange(q.shape[1], device=q.device)
    for h in range(q.shape[2]):
        heads = (q[0, :, h].double(), k[0, :, h // group].double(), v[0, :, h // group].double())
        rows = attend(torch, *heads, diagonal=diagonal, scale=DIM**-0.5, causal=True, d_o=d_o[0, :, h].double())
        o[0, :, h], d_q[0, :, h] = rows.o, rows.d_q
        d_k[0, :, h // group] += rows.d_k
        d_v[0, :, h // group] += rows.d_v
    return o, d_q, d_k, d_v


def run(rank: int, ranks: int, options: argparse.Namespace, store: str) -> None:
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
        **({"device_id": torch.device("cuda", rank)} if options.device == "cuda" else {}),
    )  # fmt: skip
    bench = Bench(rank, ranks, options)
    try:
        bench.check()
        for length in options.lengths:
            if bench.in_time():
                bench.dense(length)
        middle = options.lengths[len(options.lengths) // 2]
        for part in (bench.packed, bench.windowed):
            if bench.in_time():
                part(middle)
        if options.longest and bench.in_time():
            bench.longest(options.longest)
    finally:
        bench.finish()
    dist.destroy_process_group()
    sys.exit(1 if bench.failed else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=0, help="processes, one a GPU (0: all GPUs)")
    parser.add_argument(
        "--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[32768, 131072, 262144]
    )
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--longest", type=int, default=0, help="rows of one more sequence, computed once")
    parser.add_argument("--seconds", type=float, default=360, help="nothing is begun after so many")
    parser.add_argument("--out", default=os.environ.get("OUT", "build/gpu/ranks"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("this measures a GPU, and PyTorch sees none (--device cpu tries the script)")
    ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(run, (ranks, options, f"{folder}/store"), nprocs=ranks)


if __name__ == "__main__":
    main()
