"""Long contexts on one GPU: 16k to 1M tokens, forward and backward, compared with float64 on sampled rows and keys.

    python bench/long_context.py [--lengths 16384 131072 ...] [--head-dim 128] [--heads 4] [--samples 64] [--csv FILE]

The matrix of scores of one head of 1M tokens would take 2 TiB; the memory used here grows linearly, and is printed. For
each length: the rate (FLOPs 4 B H N^2 D, halved when causal, times 2.5 backward), the memory beyond inputs and outputs,
and the relative RMS errors of o and dQ on sampled queries and of dK and dV on sampled keys, the larger of the first and
the last head. The gradients are compared with their formula from the o and LSE that the forward pass stored. Three
numbers are printed: the error of each row by itself, RMS over the rows; the error of all rows together, which under a
causal mask is that of the first two keys (docs/lab/bwd_sm90.md), since these have weights of 1, 1/2, 1/3 ... where most
of a million tokens have 1e-6; and by how much all rows together are too short, 1 - got . exact / exact . exact, which
grows with each step of a sum that is not rounded to the nearest. The shortest length is the reference: exit status 1 if
an error of either kind is over 1.5 times its error, or not finite.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time

AT_ONCE = 64  # sampled rows; float64 needs some matrices of their scores
NAMES = ("o", "dq", "dk", "dv")
MEASURED = 0.5  # seconds of calls, at least one


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 131072, 262144, 524288, 1048576])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--samples", type=int, default=64, help="queries, and keys, of a head that are held against float64, at least 4"
    )
    parser.add_argument("--lead", type=float, default=1.0, help="seconds of calls before those that are timed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no length after so many seconds")
    parser.add_argument("--kernel", default="auto", help="the backward kernel")
    parser.add_argument("--csv", metavar="FILE")
    return parser.parse_args(arguments)


class RowErrors:
    """For rows the squares of their errors and of the exact values, and the products of exact values and results."""

    def __init__(self):
        self.wrong, self.exact, self.along = [], [], []

    def add(self, got, exact):
        self.wrong.append((got.double() - exact).square().sum(-1))
        self.exact.append(exact.square().sum(-1))
        self.along.append((got.double() * exact).sum(-1))

    def relative(self) -> tuple[float, float, float]:
        """RMS errors of each row by itself and of all together, and by how much these are too short."""
        import torch

        wrong, exact, along = torch.cat(self.wrong), torch.cat(self.exact), torch.cat(self.along)
        return (
            (wrong / exact).mean().sqrt().item(),
            (wrong.sum() / exact.sum()).sqrt().item(),
            (1 - along.sum() / exact.sum()).item(),
        )


class Sampled:
    """Attention in float64 of sampled queries and keys. Tensors are [B, N, H, D]."""

    def __init__(self, tensors: dict, causal: bool, samples: int):
        import torch

        self.t, self.causal = tensors, causal
        length = tensors["q"].shape[1]
        # Both ends, and random ones between.
        drawn = torch.randint(length, (samples - 4,), generator=torch.Generator().manual_seed(1))
        device = tensors["q"].device
        self.rows = torch.cat([torch.tensor([0, 1, length - 2, length - 1]), drawn]).to(device)
        self.places = torch.arange(length, device=device)
        self.scale = tensors["q"].shape[-1] ** -0.5
        self.heads = sorted({(0, 0), (tensors["q"].shape[0] - 1, tensors["q"].shape[2] - 1)})

    def of(self, name: str, head: tuple):
        return self.t[name][head[0], :, head[1]]

    def errors(self) -> dict:
        """RowErrors by name, of the worse head."""
        heads = [self.head_errors(head) for head in self.heads]
        return {name: tuple(map(max, zip(*(errors[name].relative() for errors in heads)))) for name in NAMES}

    def head_errors(self, head: tuple) -> dict:
        import torch

        errors = {name: RowErrors() for name in NAMES}
        q, k, v, o, d_o = (self.of(name, head) for name in ("q", "k", "v", "o", "d_o"))
        lse = self.t["lse"][head[0], head[1]].double()
        delta = (d_o.double() * o.double()).sum(-1)
        for rows in self.rows.split(AT_ONCE):
            scores = q[rows].double() @ k.double().T * self.scale
            if self.causal:
                scores.masked_fill_(self.places > rows[:, None], -math.inf)
            errors["o"].add(o[rows], torch.softmax(scores, -1) @ v.double())
            p = torch.exp(scores - lse[rows, None])
            d_q = (p * (d_o[rows].double() @ v.double().T - delta[rows, None])) @ k.double() * self.scale
            some = rows > 0 if self.causal else rows >= 0  # dQ is 0 for a query that sees one key
            errors["dq"].add(self.of("d_q", head)[rows[some]], d_q[some])
            del scores, p
            scores = k[rows].double() @ q.double().T * self.scale  # of sampled keys, all queries
            if self.causal:
                scores.masked_fill_(self.places < rows[:, None], -math.inf)
            p = torch.exp(scores - lse)
            errors["dv"].add(self.of("d_v", head)[rows], p @ d_o.double())
            d_s = p * (v[rows].double() @ d_o.double().T - delta)
            errors["dk"].add(self.of("d_k", head)[rows], d_s @ q.double() * self.scale)
            del scores, p, d_s
        return errors


def seconds_of(call, lead: float) -> float:
    """The mean of half a second's calls after `lead` seconds of them: an idle GPU is up to 15 % faster in its first 50
    ms, in which only short calls would be timed."""
    import torch

    def timed(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    call()  # compiles
    each = timed(1)
    for _ in range(math.ceil(lead / each)):
        call()
    return timed(math.ceil(MEASURED / each))


def measure(length: int, options: argparse.Namespace) -> dict:
    import tessera
    import torch

    causal = not options.full
    batch = max(1, 65536 // length)  # fills the GPU at the shortest length
    shape = (batch, length, options.heads, options.head_dim)
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape, device="cuda", dtype=getattr(torch, options.dtype)) for name in ("q", "k", "v", "d_o")
    }
    flops = 4 * batch * options.heads * length * length * options.head_dim / (2 if causal else 1)
    q, k, v, d_o = tensors.values()
    row = {
        "length": length, "batch": batch, "heads": options.heads, "head_dim": options.head_dim, "causal": int(causal),
    }  # fmt: skip
    o, lse = tessera.attention(q, k, v, causal=causal, return_lse=True)
    row["forward_s"] = seconds_of(lambda: tessera.attention(q, k, v, causal=causal), options.lead)
    gradients = tessera.attention_backward(q, k, v, o, lse, d_o, causal=causal, kernel=options.kernel)
    row["backward_s"] = seconds_of(
        lambda: tessera.attention_backward(q, k, v, o, lse, d_o, causal=causal, kernel=options.kernel),
        options.lead)  # fmt: skip
    row["forward_tflops"] = flops / row["forward_s"] * 1e-12
    row["backward_tflops"] = 2.5 * flops / row["backward_s"] * 1e-12
    for name, call in (("forward", {}), ("backward", {"direction": "backward", "kernel": options.kernel})):
        plan = tessera.plan(q, k, v, as_dict=True, causal=causal, **call)
        row[f"{name}_kernel"], row[f"{name}_extra_mib"] = plan["kernel"], plan["workspace_bytes"] / 2**20
    row["standard_gib"] = 4 * batch * options.heads * length * length / 2**30  # P and dP
    tensors.update(o=o, lse=lse, d_q=gradients.d_q, d_k=gradients.d_k, d_v=gradients.d_v)
    row["samples"] = options.samples
    for name, (by_row, together, short) in Sampled(tensors, causal, options.samples).errors().items():
        row[f"error_{name}"], row[f"error_together_{name}"], row[f"short_{name}"] = by_row, together, short
    return row


def main() -> int:
    options = parse()
    import torch

    from cuda_bench import machine

    machine.need_gpu()
    print(f"{torch.cuda.get_device_name()} · {options.dtype} · D {options.head_dim}, H {options.heads}, "
          f"{'full' if options.full else 'causal'}")  # fmt: skip
    rows, failed, begun = [], False, time.monotonic()
    for length in options.lengths:
        if time.monotonic() - begun > options.seconds:
            print(f"{length:8d}  not run: {options.seconds:.0f} s have passed")
            continue
        row = measure(length, options)
        torch.cuda.empty_cache()
        rows.append(row)
        first = rows[0]
        errors = {name: row[f"error_{name}"] for name in NAMES}
        wrong = [f"{kind}_{name}" for name in NAMES for kind in ("error", "error_together")
                 if not row[f"{kind}_{name}"] <= 1.5 * first[f"{kind}_{name}"]]  # fmt: skip
        failed |= bool(wrong)
        print(f"{length:8d}  forward {row['forward_s'] * 1e3:9.2f} ms {row['forward_tflops']:6.1f} TFLOP/s "
              f"({row['forward_tflops'] / first['forward_tflops']:.3f})  backward {row['backward_s'] * 1e3:9.2f} ms "
              f"{row['backward_tflops']:6.1f} ({row['backward_tflops'] / first['backward_tflops']:.3f})  extra "
              f"{row['forward_extra_mib']:.1f}, {row['backward_extra_mib']:.0f} MiB, standard "
              f"{row['standard_gib']:.0f} GiB  errors "
              + ", ".join(f"{name} {error:.2e} ({row[f'error_together_{name}']:.2e}, "
                          f"{row[f'short_{name}']:.1e})" for name, error in errors.items())
              + (f"  WRONG: {', '.join(wrong)}" if wrong else ""), flush=True)  # fmt: skip
        if options.csv:
            write(options.csv, rows)  # partial results, in case the time runs out
    return int(failed)


def write(path: str, rows: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
