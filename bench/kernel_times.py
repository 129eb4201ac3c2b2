"""Where the time of a call goes: every kernel of one forward and one backward pass, by PyTorch's profiler, and the
host's time.

    python bench/kernel_times.py sparse --csv FILE      block masks beside FlexAttention: lists, rows, products
    python bench/kernel_times.py document --csv FILE    a long document's mask, in the kernels' possible orders
    python bench/kernel_times.py gpt2 --csv FILE        a training step of GPT-2: its kernels, by kind
    python bench/kernel_times.py layer --csv FILE       the host's time of one layer's attention, and of its parts
    python bench/kernel_times.py host --csv FILE        the host's time of such a step, with so few tokens (128)
                                                        that the GPU waits

host also writes cProfile's table of a step's functions beside FILE. gpt2, layer and host need Transformers.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import csv
import io
import pstats
import re
import sys
import time
from pathlib import Path

import torch

from cuda_bench import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/gpt2"))

COLUMNS = ("subject", "case", "direction", "contestant", "kernel", "calls", "us")


def kernels(call, repeats=5):
    """{kernel: (launches, microseconds)} of one call, the mean of some."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found = collections.defaultdict(lambda: [0, 0.0])
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = re.sub(r"^void |<.*|\(.*", "", event.name)
            found[name][0] += 1
            found[name][1] += event.device_time
    return {name: (calls / repeats, us / repeats) for name, (calls, us) in found.items()}


class Table:
    def __init__(self):
        self.rows = []

    def add(self, subject, case, direction, contestant, times):
        for name, (calls, us) in sorted(times.items(), key=lambda item: -item[1][1]):
            self.rows.append((subject, case, direction, contestant, name, f"{calls:g}", f"{us:.1f}"))
        whole = sum(us for _, us in times.values())
        parts = ", ".join(
            f"{name[:28]} {us:.0f}" for name, (_, us) in sorted(times.items(), key=lambda item: -item[1][1])[:6]
        )
        print(f"{subject} {case} {direction} {contestant}: {whole:.0f} us; {parts}", flush=True)

    def write(self, path):
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(self.rows)


# ---- block masks -----------------------------------------------------------------------------------------------------


def sparse(table, options):
    import block_sparse
    import tessera.torch

    given = argparse.Namespace(length=16384, head_dim=128, heads=16, batch=1, block=128, no_flex=options.no_flex)
    calls = block_sparse.Calls(given)
    for direction in ("backward", "forward"):
        table.add("sparse", "no mask", direction, "tessera", kernels(calls.tessera(direction, None)))
        for name in ("random 1/32", "random 1/4", "local+global", "all"):
            mask = tessera.torch.block_mask(block_sparse.PATTERNS[name], given.length, given.length)
            calls.use(mask)
            table.add("sparse", name, direction, "tessera", kernels(calls.tessera(direction, calls.mask())))
            if direction == "backward" and tessera.plan(calls.q, calls.k, calls.v, direction=direction,
                                                        deterministic=True, as_dict=True,
                                                        block_mask=calls.mask(),
                                                        mask_block=(128, 128))["kernel"] == "bwd_sm90":  # fmt: skip
                times = kernels(calls.tessera(direction, calls.mask(), deterministic=True))
                table.add("sparse", name, direction, "tessera, deterministic", times)
            if not options.no_flex:
                table.add("sparse", name, direction, "flex", kernels(calls.flex_call(direction)))


# ---- a long document -------------------------------------------------------------------------------------------------


def document(table, options):
    import tessera
    from long_document import BLOCK, document_blocks

    heads, head_dim = 8, 128
    for length in (16384, 65536, 131072):
        torch.manual_seed(0)
        q, k, v, d_o = (
            torch.randn((1, length, heads, head_dim), device="cuda", dtype=torch.bfloat16) for _ in range(4)
        )
        causal = document_blocks(8, 16, "cuda", length)
        number = torch.arange(causal.shape[2], device="cuda")
        # As many visible blocks, but every listed column is seen by all rows: the long lists process the same queries
        # at the same time.
        together = ((number[:, None] - number[None, :]).abs() < 4) | (number[None, :] % 32 == 31)
        # The causal mask's blocks without its positions: whether the mask inside the diagonal costs anything.
        masks = {
            "document": (causal, True), "its blocks, not causal": (causal, False), "columns side by "
                                                                                   "side": (together[None, None],
                                                                                            False),
            "neighbours alone": (((number[:, None] - number[None, :]).abs() < 4)[None, None], False),
            "all, causal": (None, True),
        }  # fmt: skip
        for name, (mask, is_causal) in masks.items():
            given = {"causal": is_causal}
            if mask is not None:
                given |= {"block_mask": mask, "mask_block": (BLOCK, BLOCK)}
            elif length > 65536:
                continue
            o, lse = tessera.attention(q, k, v, return_lse=True, **given)
            blocks = int(mask.sum()) if mask is not None else causal.shape[2] * (causal.shape[2] + 1) // 2
            case = f"{name}, {length} tokens, {blocks} blocks"
            plan = tessera.plan(q, k, v, direction="backward", as_dict=True, **given)
            print(f"{case}: {plan['kernel']}", flush=True)
            table.add("document", case, "forward", "tessera", kernels(lambda: tessera.attention(q, k, v, **given), 2))
            backward = lambda: tessera.attention_backward(q, k, v, o, lse, d_o, **given)  # noqa: E731
            table.add("document", case, "backward", "tessera", kernels(backward, 2))


# ---- GPT-2 -----------------------------------------------------------------------------------------------------------

KINDS = (
    ("attention", r"fwd_sm90|bwd_sm90|fwd_sm80|bwd_sm80|flash|fmha|sdpa|attention|cudnn::fusion"),
    ("products", r"gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("optimizer", r"multi_tensor"),
    ("loss", r"nll|softmax|SoftMax"),
    ("normalisation", r"layer_norm|LayerNorm|GammaBeta"),
    ("copies", r"copy|Memcpy|CatArray"),
)


def kind_of(name):
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "elementwise and others")


def step_of(train, attention, options):
    model, reader = train.make_model(attention, options), train.Reader(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=options.fused or None)
    run = torch.compile(model) if options.compile else model
    tokens = reader.batch()

    def step():
        loss = run(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def wall_us(step, repeats):
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / repeats * 1e6


def layer(table, options=None):
    """The host's time of attention alone: small enough that the GPU waits."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    import tessera.torch
    from tessera.transformers.attention import attention_forward

    module = torch.nn.Module()
    q, k, v = (torch.randn(1, 12, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    d_o = torch.randn(1, 12, 128, 64, device="cuda", dtype=torch.bfloat16)
    calls = {
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        "tessera": lambda: tessera.torch.attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True
        ).transpose(1, 2),
        # As in a Transformers model: a layer's inputs, and its output as [B, S, H, D].
        "sdpa, as in a model": lambda: sdpa_attention_forward(module, q, k, v, None, is_causal=True)[0],
        "tessera, as in a model": lambda: attention_forward(module, q, k, v, None, is_causal=True)[0],
    }
    for name, call in calls.items():
        with torch.no_grad():
            table.add(
                "gpt2", "host, one layer's attention", "forward, no gradients", name, {"host": (1, wall_us(call, 500))}
            )
        table.add("gpt2", "host, one layer's attention", "forward", name, {"host": (1, wall_us(call, 500))})
        cotangent = d_o.transpose(1, 2) if "model" in name else d_o
        both = lambda: torch.autograd.grad(call(), (q, k, v), cotangent)  # noqa: B023, E731
        table.add(
            "gpt2", "host, one layer's attention", "forward and backward", name, {"host": (1, wall_us(both, 500))}
        )
        with torch.autograd.set_multithreading_enabled(False):  # backward in the calling thread
            table.add(
                "gpt2", "host, one layer's attention", "forward and backward, one thread", name,
                {"host": (1, wall_us(both, 500))},
            )  # fmt: skip
    layer_parts(table, q, k, v, d_o)


class Nothing(torch.autograd.Function):
    """As many tensors as attention saves and returns, and no kernel."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, d_o):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def layer_parts(table, q, k, v, d_o):
    """The cost of autograd and the allocations without kernels, and of the kernels' calls without autograd."""
    from tessera.torch import kernels

    by_rows = [x.detach().transpose(1, 2) for x in (q, k, v, d_o)]
    o, lse = kernels.forward(*by_rows[:3], {"causal": True})
    parts = {
        "a product by autograd": lambda: torch.autograd.grad(q * k, (q, k), d_o),
        "an autograd.Function of nothing": lambda: torch.autograd.grad(Nothing.apply(q, k, v), (q, k, v), d_o),
        "kernels.forward": lambda: kernels.forward(*by_rows[:3], {"causal": True}),
        "kernels.backward": lambda: kernels.backward(
            by_rows[3], None, *by_rows[:3], o, lse, False, False, {"causal": True}
        ),
        "torch.empty": lambda: torch.empty(4096, device="cuda"),
    }
    for name, call in parts.items():
        table.add("gpt2", "host, one layer's attention", "part", name, {"host": (1, wall_us(call, 500))})


def host(table, options):
    import train

    layer(table)
    torch.cuda.empty_cache()
    for attention in ("sdpa", "tessera"):
        step = step_of(train, attention, train.parse(["--length", "128", "--batch", "1"]))
        table.add("gpt2", "host, 128 tokens a step", "step", attention, {"host": (1, wall_us(step, 30))})
        profile = cProfile.Profile()
        profile.runcall(lambda: [step() for _ in range(10)])  # noqa: B023
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(35)
        Path(options.csv).with_name(f"host-{attention}.txt").write_text(text.getvalue())


def gpt2(table, options):
    import train

    for setting in options.settings:
        length, batch, *compiled = setting.split(",")
        flags = ["--compile", "--fused"] if compiled else []
        given = train.parse(["--length", length, "--batch", batch, *flags])
        for attention in ("sdpa", "tessera"):
            torch.cuda.empty_cache()
            step = step_of(train, attention, given)
            wall, found = wall_us(step, 12), kernels(step, 3)
            kinds = collections.defaultdict(lambda: [0, 0.0])
            for name, (calls, us) in found.items():
                kinds[kind_of(name)][0] += calls
                kinds[kind_of(name)][1] += us
            case = f"{batch} x {length} tokens{', compiled' if compiled else ''}"
            table.add("gpt2", case, "step, by kind", attention, kinds)
            table.add("gpt2", case, "step", attention, found)
            busy = sum(us for _, us in found.values())
            print(f"gpt2 {case} {attention}: {wall:.0f} us a step, {int(batch) * int(length) / wall * 1e6:.0f} "
                  "tokens/s, "
                  f"GPU busy {busy / wall:.1%}", flush=True)  # fmt: skip
            table.rows.append(("gpt2", case, "step", attention, "wall clock", "1", f"{wall:.1f}"))
            table.write(options.csv)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=("sparse", "document", "gpt2", "layer", "host"))
    parser.add_argument("--csv", required=True, metavar="FILE")
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument(
        "--settings", nargs="+", default=["1024,32", "4096,8"], metavar="LENGTH,BATCH[,compiled]", help="of gpt2"
    )
    options = parser.parse_args()
    machine.need_gpu()
    table = Table()
    try:
        {"sparse": sparse, "document": document, "gpt2": gpt2, "layer": layer, "host": host}[options.subject](
            table, options
        )
    finally:
        table.write(options.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
