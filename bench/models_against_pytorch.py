"""Whole models on PyTorch's own attention and, unchanged, on Tessera through PyTorch's registry, on the CPU, in one
run.

    python bench/models_against_pytorch.py [--threads 1] [--dtypes float32 bfloat16] [--repetitions 5] [--json FILE]

Sizes are those of well-known models, with fewer layers to save time; weights are random. The two alternate; a row has
the median of each and of the paired ratios. Attention is only a part of a model: the last column is its fraction of
PyTorch's time, by which the ratio can be judged. Needs the wheel and PyTorch 2.13 or later.
"""

import argparse
import json
import statistics

import torch
from against_pytorch import DTYPES, seconds
from models import Gpt2, VisionTransformer
from torch import nn

import tessera
import tessera.torch


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(768, 12, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def encoder():
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# Name, sizes, model, input.
MODELS = (
    ("nn.MultiheadAttention", "width 768, 12 heads, S 1024, B 1", SelfAttention, lambda: torch.randn(1, 1024, 768)),
    ("nn.TransformerEncoder", "2 layers of the same, B 1", encoder, lambda: torch.randn(1, 1024, 768)),
    ("ViT-B/16", "4 of 12 layers, S 197, B 4", lambda: VisionTransformer(depth=4), lambda: torch.randn(4, 3, 224, 224)),
    ("GPT-2 small", "4 of 12 layers, S 1024, B 1, 8192 words", lambda: Gpt2(8192, depth=4),
     lambda: torch.randint(8192, (1, 1024))),
)  # fmt: skip


def forward_call(model, data):
    def call():
        with torch.no_grad():
            model(data)

    return call


def training_call(model, data):
    def call():
        model.zero_grad()
        model(data).square().mean().backward()

    return call


def attention_share(call):
    """The time of PyTorch's flash attention operators as a fraction of PyTorch's own run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    events = profile.key_averages()
    attention = sum(e.self_cpu_time_total for e in events if "flash_attention" in e.key)
    return attention / sum(e.self_cpu_time_total for e in events)


def on_tessera(call):
    """Seconds of a call on Tessera. Raises an error if any part of it fell through to PyTorch's kernel."""
    torch.nn.attention.activate_flash_attention_impl("Tessera")
    try:
        taken = seconds(call)
        if tessera.torch.fallback_reasons():
            raise RuntimeError(f"PyTorch's own attention ran instead: {tessera.torch.fallback_reasons()}")
        return taken
    finally:
        torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


def measure(call, repetitions):
    """Median seconds on Tessera and on PyTorch's own, and the median of the paired ratios."""
    seconds(call)
    on_tessera(call)
    pairs = [(on_tessera(call), seconds(call)) for _ in range(repetitions)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs))
    return ours, theirs, statistics.median(pair[1] / pair[0] for pair in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="write the results to this file, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"Tessera {tessera.__version__}, PyTorch {torch.__version__}, threads {options.threads}\n")
    print("| model | | dtype | | PyTorch ms | Tessera ms | times as fast | attention's share |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for name, size, build, inputs in MODELS:
        for dtype in options.dtypes:
            torch.manual_seed(0)
            model, data = build().to(DTYPES[dtype]), inputs()
            data = data.to(DTYPES[dtype]) if data.is_floating_point() else data
            for direction, call_of in (("forward", forward_call), ("forward and backward", training_call)):
                call = call_of(model, data)
                ours, theirs, ratio = measure(call, options.repetitions)
                share = attention_share(call)
                rows.append(dict(model=name, size=size, dtype=dtype, direction=direction, tessera_ms=ours * 1e3,
                                 pytorch_ms=theirs * 1e3, ratio=ratio, attention_share=share))  # fmt: skip
                print(f"| {name} | {size} | {dtype} | {direction} | {theirs * 1e3:.1f} | {ours * 1e3:.1f} | "
                      f"{ratio:.2f} | "
                      f"{share:.0%} |", flush=True)  # fmt: skip
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
