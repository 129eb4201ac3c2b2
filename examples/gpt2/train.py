"""Transformers' GPT-2, trained with three attentions and no other change: eager, sdpa, tessera.

    python examples/gpt2/train.py                                            # small, 1024 tokens, on a GPU if present
    python examples/gpt2/train.py --length 4096 --batch 8 --dropout 0.1 --csv gpt2.csv
    python examples/gpt2/train.py --model medium --text ~/books --attention sdpa tessera --steps 500
    python examples/gpt2/train.py --compile --fused --attention eager tessera            # and a fused optimizer
    python examples/gpt2/train.py --attention tessera --profile                          # where the host's time goes

Every run starts from the same weights and reads the same tokens. It prints tokens a second, the peak of the GPU's
memory and the loss; --csv keeps the loss of every step. --text: a file, or a folder of .txt, .md and .py files, read
byte by byte; without it a random chain, in which each token has eight successors, so that the loss falls from ln 50257
towards ln 8.
"""

import argparse
import csv
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

SIZES = {  # layers, heads, width
    "tiny": (2, 2, 32),
    "small": (12, 12, 768),
    "medium": (24, 16, 1024),
}
ATTENTIONS = ("eager", "sdpa", "tessera")
VOCABULARY, CHAIN_TOKENS, SUCCESSORS = 50257, 4096, 8


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence (1024)")
    parser.add_argument("--batch", type=int, help="sequences of a step (32768 tokens' worth; on a CPU 2)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not timed (5)")
    parser.add_argument("--dropout", type=float, default=0.0, help="of attention, residuals and embeddings (0)")
    parser.add_argument("--text", type=Path, help="a file or a folder to read")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--autocast", action="store_true", help="float32 weights, products in bfloat16; else all in bfloat16 on a GPU"
    )
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    parser.add_argument("--fused", action="store_true", help="AdamW in one kernel")
    parser.add_argument("--profile", action="store_true", help="print what the host spends its time on")
    parser.add_argument("--csv", type=Path, help="the loss of every step")
    options = parser.parse_args(arguments)
    for name, least in (("length", 2), ("steps", 1), ("warm_up", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)}, accepted {least} or more")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout: {options.dropout}, accepted 0 .. below 1")
    if options.text and not options.text.exists():
        parser.error(f"--text: {options.text}: no such file or folder")
    if options.batch is None:
        options.batch = 2 if options.device == "cpu" else max(1, 32768 // options.length)
    return options


# ---- data ----------------------------------------------------------------------------------------------------------


def text_tokens(path):
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".md", ".py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8).astype(np.int64)


def chain_tokens(count, random):
    """A random walk: each token has eight possible successors, chosen once."""
    successors = random.integers(CHAIN_TOKENS, size=(CHAIN_TOKENS, SUCCESSORS))
    choices = random.integers(SUCCESSORS, size=count)
    tokens = np.empty(count, np.int64)
    tokens[0] = 0
    for n in range(1, count):
        tokens[n] = successors[tokens[n - 1], choices[n]]
    return tokens


class Reader:
    """Batches [B, S], the same for the same seed."""

    def __init__(self, options):
        self.random, self.options = np.random.default_rng(options.seed), options
        self.tokens = (
            text_tokens(options.text) if options.text else chain_tokens(max(1 << 18, options.length + 1), self.random)
        )
        if len(self.tokens) <= options.length:
            raise SystemExit(
                f"train.py: --text: {options.text}: {len(self.tokens)} bytes, more than --length {options.length} are "
                "needed"
            )

    def batch(self):
        starts = self.random.integers(len(self.tokens) - self.options.length, size=self.options.batch)
        rows = np.stack([self.tokens[at : at + self.options.length] for at in starts])
        return torch.from_numpy(rows).to(self.options.device, non_blocking=True)


# ---- a run ----------------------------------------------------------------------------------------------------------


def make_model(attention, options):
    if attention == "tessera":
        import tessera.transformers  # noqa: F401  registers the name
    layers, heads, width = SIZES[options.model]
    config = GPT2Config(
        n_layer=layers, n_head=heads, n_embd=width, n_positions=options.length, vocab_size=VOCABULARY, use_cache=False,
        attn_pdrop=options.dropout, resid_pdrop=options.dropout, embd_pdrop=options.dropout,
        attn_implementation=attention)  # fmt: skip
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = GPT2LMHeadModel(config).train()
    return model if options.autocast or options.device == "cpu" else model.to(torch.bfloat16)


def train(attention, options):
    """Losses of all steps, tokens a second after the warm-up, bytes of memory at the peak."""
    cuda = options.device.startswith("cuda")
    model, reader = make_model(attention, options), Reader(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=options.fused or None)
    run = torch.compile(model) if options.compile else model
    torch.manual_seed(options.seed)
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def finish():
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    losses, begun, timed_from = [], finish(), 0
    for step in range(options.steps):
        if step == min(options.warm_up, options.steps - 1):
            begun, timed_from = finish(), step
        tokens = reader.batch()
        with torch.autocast(options.device.split(":")[0], torch.bfloat16, enabled=options.autocast):
            loss = run(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # read at the end, so that the host does not wait
    seconds = finish() - begun
    losses = torch.stack(losses).float().tolist()
    rate = (options.steps - timed_from) * options.batch * options.length / seconds
    return losses, rate, torch.cuda.max_memory_allocated() if cuda else 0


def profiled(attention, options):
    activities = [torch.profiler.ProfilerActivity.CPU]
    if options.device.startswith("cuda"):
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        train(attention, options)
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60))


COLUMNS = ("model", "length", "batch", "dropout", "attention", "compiled", "tokens_per_s", "peak_gib", "step", "loss")


def compare(options):
    """Trains once by each attention and prints a line for each; rows of COLUMNS. Raises ArithmeticError: a loss is not
    finite."""
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    print(f"GPT-2 {options.model} · {options.batch} x {options.length} tokens a step · dropout {options.dropout} · "
          f"{where}"
          + " · torch.compile" * options.compile + " · fused AdamW" * options.fused)  # fmt: skip
    results = {}
    for attention in options.attention:
        try:
            losses, rate, peak = results[attention] = train(attention, options)
        except torch.OutOfMemoryError:
            print(f"{attention:8s} does not fit into the GPU's memory", flush=True)
            continue
        finally:
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()
        first = next(iter(results.values()))
        apart = max(abs(a - b) for a, b in zip(losses, first[0]))
        print(f"{attention:8s} {rate:10.0f} tokens/s ({rate / first[1]:.2f} x)  {peak / 2**30:6.2f} GiB  loss "
              f"{losses[0]:.3f} -> "
              f"{losses[-1]:.3f}  furthest from {next(iter(results))} {apart:.3f}", flush=True)  # fmt: skip
        if not all(math.isfinite(loss) for loss in losses):
            raise ArithmeticError(f"{attention}: the loss is not finite")
    return [
        (options.model, options.length, options.batch, options.dropout, attention, options.compile, f"{rate:.0f}",
         f"{peak / 2**30:.3f}",
         step, f"{loss:.5f}")
        for attention, (losses, rate, peak) in results.items() for step, loss in enumerate(losses)
    ]  # fmt: skip


def write(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)


def main(arguments=None):
    options = parse(arguments)
    if options.profile:
        for attention in options.attention:
            profiled(attention, options)
        return 0
    try:
        rows = compare(options)
    except ArithmeticError as error:
        print(error)
        return 1
    if options.csv:
        write(options.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
