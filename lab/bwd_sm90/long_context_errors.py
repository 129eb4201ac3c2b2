#!/usr/bin/env python3
"""What bench/long_context.py's errors of dK and dV depend on, by NumPy, no GPU: the length, by float32's sums, rounded one way or another;
the sampled keys, by how much of the sum of squares each has; the draw, by the spread over seeds. long_context_errors.py [seeds] [length]"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from inputs import bfloat16 as bf16

D, SAMPLES = 128, 64


def f16(x):
    return np.float32(x).astype(np.float16).astype(np.float32)


def toward(x, direction):
    """float64 to float32, not to the nearest: toward zero, or down."""
    nearest = np.float32(x)
    over = np.abs(nearest) > np.abs(x) if direction == "zero" else nearest > x
    return np.where(over, np.nextafter(nearest, np.float32(0 if direction == "zero" else -np.inf)), nearest)


def sums():
    """dV of the first key of a causal head, whose weights are about 1 / i, by float32's sums of 16 products at a time, as wgmma has them."""
    print("length: relative error of the sums alone, rounded to the nearest, toward zero, down; with bfloat16's weights and result, the same")
    for length in (16384, 131072, 524288, 1048576):
        rng = np.random.default_rng(1)
        weights = np.exp(rng.standard_normal(length) - 0.5) / np.arange(1, length + 1) * 2.0**15
        d_o = bf16(rng.standard_normal((length, D)))
        exact = weights @ d_o.astype(float)
        text = f"{length:8d}:"
        for rounded in (False, True):
            used = bf16(weights).astype(float) if rounded else weights
            steps = np.einsum("sk,skd->sd", used.reshape(-1, 16), d_o.reshape(-1, 16, D).astype(float))
            for direction in ("nearest", "zero", "down"):
                total = np.zeros(D, np.float32)
                for step in steps:
                    total = np.float32(total + step) if direction == "nearest" else toward(total + step, direction)
                got = bf16(total) if rounded else total
                text += f" {np.sqrt(((got - exact) ** 2).sum() / (exact**2).sum()):.1e}"
        print(text)


def head(rng, length):
    """Errors and exact values of dK and dV at sampled keys: as bwd_sm90 makes them, and in float64 from the same O and LSE."""
    q, k, v, d_o = (bf16(rng.standard_normal((length, D))) for _ in range(4))
    scale = D**-0.5
    rows = np.concatenate([[0, 1, length - 2, length - 1], rng.integers(length, size=SAMPLES - 4)])
    lse, o = np.empty(length), np.empty((length, D), np.float32)
    for i in range(0, length, 512):
        end = i + 512
        s = (q[i:end] @ k[:end].T) * np.float32(scale)
        s[np.arange(i, end)[:, None] < np.arange(end)] = -np.inf
        top = s.max(1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(1, keepdims=True)
        lse[i:end] = (top + np.log(total))[:, 0]
        o[i:end] = bf16((p @ v[:end]) / total)
    lse = lse.astype(np.float32).astype(float)
    delta = (d_o.astype(float) * o).sum(1)
    s = (k[rows].astype(float) @ q.T.astype(float)) * scale
    p = np.where(np.arange(length) < rows[:, None], 0.0, np.exp(s - lse))
    d_p = v[rows].astype(float) @ d_o.T.astype(float) - delta
    rounded_p = f16(p * 2.0**15) * 2.0**-15
    return {
        "dV": (bf16(bf16(rounded_p) @ d_o), p @ d_o),
        "dK": (bf16((bf16(rounded_p * d_p.astype(np.float32)) @ q) * np.float32(scale)), (p * d_p) @ q * scale),
    }


def draws(seeds, length):
    pooled, by_row, share = {"dV": [], "dK": []}, {"dV": [], "dK": []}, {"dV": [], "dK": []}
    for seed in range(seeds):
        for name, (got, exact) in head(np.random.default_rng(seed), length).items():
            wrong, norms = ((got - exact) ** 2).sum(1), (exact**2).sum(1)
            pooled[name].append(np.sqrt(wrong.sum() / norms.sum()))
            by_row[name].append(np.sqrt((wrong / norms)[norms > 0].mean()))
            share[name].append(norms[:2].sum() / norms.sum())
    print(f"{seeds} heads of {length} tokens, causal, {SAMPLES} keys of each: share of the first two keys in the sum of squares; errors, e-3")
    for name in ("dV", "dK"):
        text = lambda x: f"{1e3 * np.mean(x):.2f} ({1e3 * np.min(x):.2f} to {1e3 * np.max(x):.2f})"
        worst = lambda x: [max(a, b) for a, b in zip(x[::2], x[1::2])]  # of two heads, as the script has it
        two = worst(pooled[name])
        above = np.mean([b > 1.5 * a for a in two for b in two])
        print(f"  {name}: {np.mean(share[name]):.4f}; all keys together {text(pooled[name])}, each key by itself {text(by_row[name])}; "
              f"of two runs of two heads one is 1.5 times the other in {2 * above:.1%}, by keys in "
              f"{2 * np.mean([b > 1.5 * a for a in worst(by_row[name]) for b in worst(by_row[name])]):.1%}")  # fmt: skip


def first_keys(seeds, length=512):
    """The pooled error where the first two keys are all of it, as at a million tokens: of a few hundred numbers."""
    pooled = {"dV": [], "dK": []}
    for seed in range(seeds):
        for name, (got, exact) in head(np.random.default_rng(1000 + seed), length).items():
            pooled[name].append(np.sqrt(((got - exact)[:2] ** 2).sum() / (exact[:2] ** 2).sum()))
    for name, errors in pooled.items():
        two = [max(a, b) for a, b in zip(errors[::2], errors[1::2])]
        low, middle, high, most = 1e3 * np.quantile(two, (0.05, 0.5, 0.95, 1))
        above = 2 * np.mean([b > 1.5 * a for a in two for b in two])
        print(f"{name} of the first two keys, the worse of two heads, {seeds // 2} times: {middle:.2f}e-3 (5 %: {low:.2f}, 95 %: {high:.2f}, most "
              f"{most:.2f}); of two runs one is 1.5 times the other in {above:.1%}")  # fmt: skip


if __name__ == "__main__":
    arguments = [int(x) for x in sys.argv[1:]]
    sums()
    draws(*(arguments or [40, 4096]))
    first_keys(400)
