"""Score programs on one GPU: Tessera with a program, beside the nearest built-in options and FlexAttention with that
function.

    python bench/cuda_programs.py [--csv FILE] [--lengths 4096 16384] [--head-dims 64 128] [--programs NAME ...]
                                  [--directions forward backward deterministic decode lists] [--no-flex]

bfloat16, batch 1, 16 heads. deterministic: backward, without FlexAttention, which has none. lists: of one head, the
kernels alone that list the blocks which a mask shows, say with `--lengths 1048576 --programs documents`. FlexAttention
is compiled by torch.compile; its results are compared with Tessera's before it is timed (relative RMS error, at most
1 %). Milliseconds, and the ratios of FlexAttention's time and of the built-in's to the program's.
"""

from __future__ import annotations

import argparse
import csv
import sys
from typing import Callable, Optional

import kernel_times
import tessera
import tessera.torch
import torch
from cuda_bench import timing

MOST_DIFFERENCE = 0.01
HEADS = 16


class Program:
    """A text, what it captures, the same for FlexAttention, and the options that cost least beside it."""

    def __init__(self, score="", mask="", captured=None, flex_score=None, flex_mask=None, gradients=(), **nearest):
        self.score, self.mask, self.captured, self.gradients = score or None, mask or None, captured or {}, gradients
        self.flex_score, self.flex_mask, self.nearest = flex_score, flex_mask, nearest


def programs(n: int) -> dict[str, Callable[[], Program]]:
    relative = torch.randn(HEADS, 2 * n, device="cuda") / 4
    slopes = torch.exp2(-torch.arange(1, HEADS + 1, device="cuda") / 2).float()
    temperature = 1 + torch.rand(HEADS, device="cuda")
    doc = (torch.arange(n, device="cuda", dtype=torch.int32) // 1000).repeat(1, 1)
    return {
        "causal": lambda: Program(mask="j <= q_pos", flex_mask=lambda b, h, i, j: j <= i, causal=True),
        "softcap": lambda: Program(
            score="50 * tanh(s / 50)", flex_score=lambda s, b, h, i, j: 50 * torch.tanh(s / 50), softcap=50.0
        ),
        "softcap by a scalar": lambda: Program(
            score="c * tanh(s / c)", captured={"c": 50.0}, flex_score=lambda s, b, h, i, j: 50 * torch.tanh(s / 50),
            softcap=50.0,
        ),  # fmt: skip
        "ALiBi by the distance": lambda: Program(
            score="s + slope[h] * (j - i)", captured={"slope": slopes},
            flex_score=lambda s, b, h, i, j: s + slopes[h] * (j - i), alibi_slopes=slopes,
        ),  # fmt: skip
        "relative": lambda: Program(
            score="s + relative[h, i - j + len_k]", captured={"relative": relative},
            flex_score=lambda s, b, h, i, j: s + relative[h, i - j + n],
        ),  # fmt: skip
        "relative, with its gradient": lambda: Program(
            score="s + relative[h, i - j + len_k]", captured={"relative": relative},
            flex_score=lambda s, b, h, i, j: s + relative[h, i - j + n], gradients=("relative",),
        ),  # fmt: skip
        "temperature, with its gradient": lambda: Program(
            score="s * temperature[h]", captured={"temperature": temperature},
            flex_score=lambda s, b, h, i, j: s * temperature[h], gradients=("temperature",),
        ),  # fmt: skip
        "documents": lambda: Program(
            mask="j <= q_pos && doc[b, i] == doc[b, j]", captured={"doc": doc},
            flex_mask=lambda b, h, i, j: (j <= i) & (doc[0, i] == doc[0, j]), causal=True,
        ),  # fmt: skip
        "prefix": lambda: Program(
            mask="j < 1024 || j <= q_pos", flex_mask=lambda b, h, i, j: (j < 1024) | (j <= i), causal=True
        ),
        "dilated window": lambda: Program(
            mask="(q_pos - j) % 16 == 0 && abs(q_pos - j) < 1024",
            flex_mask=lambda b, h, i, j: ((i - j) % 16 == 0) & (torch.abs(i - j) < 1024),
        ),  # fmt: skip
        "neighbours in an image": lambda: Program(
            mask="abs(i // 64 - j // 64) <= 3 && abs(i % 64 - j % 64) <= 3",
            flex_mask=lambda b, h, i, j: (torch.abs(i // 64 - j // 64) <= 3) & (torch.abs(i % 64 - j % 64) <= 3),
        ),  # fmt: skip
        "a mask a head": lambda: Program(
            mask="h % 2 == 0 ? j <= q_pos : abs(i - j) <= 512",
            flex_mask=lambda b, h, i, j: torch.where(h % 2 == 0, j <= i, torch.abs(i - j) <= 512),
        ),  # fmt: skip
    }


class Calls:
    def __init__(self, program: Program, queries: int, n: int, d: int, flex: Optional[Callable], heads: int = HEADS):
        torch.manual_seed(0)
        self.program, self.flex, self.n = program, flex, n
        shapes = [(1, rows, heads, d) for rows in (queries, n, n, queries)]
        self.q, self.k, self.v, self.d_o = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
        self.swapped = [x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v, self.d_o)]
        self.block_mask = None
        if flex is not None and program.flex_mask is not None:
            from torch.nn.attention.flex_attention import create_block_mask

            self.block_mask = create_block_mask(program.flex_mask, None, None, queries, n, device="cuda")

    def ours(self, direction: str, options: dict, gradients=()) -> Callable:
        if direction not in ("backward", "deterministic"):
            return lambda: tessera.attention(self.q, self.k, self.v, **options)
        o, lse = tessera.attention(self.q, self.k, self.v, return_lse=True, **options)
        more = {"grad_captured": list(gradients)} if gradients else {}
        if direction == "deterministic":
            more["deterministic"] = True
        return lambda: tessera.attention_backward(self.q, self.k, self.v, o, lse, self.d_o, **options, **more)

    def programmed(self, direction: str) -> Callable:
        p = self.program
        return self.ours(direction, {"score_mod": p.score, "mask_mod": p.mask, "captured": p.captured}, p.gradients)

    def theirs(self, direction: str) -> Callable:
        q, k, v, d_o = self.swapped
        options = {"score_mod": self.program.flex_score, "block_mask": self.block_mask}
        if direction != "backward":

            def forward():
                with torch.no_grad():
                    return self.flex(q, k, v, **options)

            return forward
        captured = [self.program.captured[name].requires_grad_() for name in self.program.gradients]
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = self.flex(*leaves, **options)
        return lambda: torch.autograd.grad(o, leaves + captured, d_o, retain_graph=True)


def difference(ours, theirs, direction: str) -> float:
    if direction != "backward":
        pairs = [(ours.transpose(1, 2), theirs)]
    else:
        *rows, captured = ours if isinstance(ours[-1], dict) else (*ours, {})
        pairs = [(a.transpose(1, 2), b) for a, b in zip(rows[:3], theirs)]
        pairs += list(zip(captured.values(), theirs[3:]))
    return max(
        ((a.float() - b.float()).square().mean() / b.float().square().mean()).sqrt().item() for a, b in pairs
    )


def milliseconds_of_lists(call: Callable) -> float:
    times = kernel_times.kernels(call)
    return sum(times[name][1] for name in ("tessera_program_bounds", "tessera_program_lists") if name in times) / 1e3


def milliseconds(call: Callable) -> float:
    return timing.contest({"": call}, timing.Steadiness(30, 60, 1))[""].seconds * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--directions", nargs="+", default=["forward", "backward", "decode"])
    parser.add_argument("--programs", nargs="+")
    parser.add_argument("--no-flex", action="store_true")
    options = parser.parse_args()
    compiled = None
    if not options.no_flex:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = flex_attention
    rows, failed = [], 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms, FlexAttention / program, program / built-in")
    for direction in options.directions:
        for n in options.lengths:
            for name, make in programs(n).items():
                if options.programs and name not in options.programs:
                    continue
                if direction not in ("backward", "deterministic") and "gradient" in name:
                    continue
                if direction == "lists" and not make().mask:
                    continue
                for d in options.head_dims:
                    torch.compiler.reset()
                    beside = compiled is not None and direction in ("forward", "backward")
                    flex = torch.compile(compiled, dynamic=False) if beside else None
                    heads = 1 if direction == "lists" else HEADS
                    calls = Calls(make(), 1 if direction == "decode" else n, n, d, flex, heads)
                    line = {"direction": direction, "program": name, "length": n, "head_dim": d}
                    try:
                        call = calls.programmed(direction)
                        lists = direction == "lists"
                        line["program_ms"] = milliseconds_of_lists(call) if lists else milliseconds(call)
                        if not lists:
                            line["builtin_ms"] = milliseconds(calls.ours(direction, calls.program.nearest))
                        if flex is not None:
                            theirs = calls.theirs(direction)
                            line["difference"] = difference(call(), theirs(), direction)
                            line["flex_ms"] = milliseconds(theirs)
                    except Exception as error:  # noqa: BLE001, the other cells are still of interest
                        line["error"] = str(error).splitlines()[0][:200]
                    failed += "error" in line or line.get("difference", 0) > MOST_DIFFERENCE
                    rows.append(line)
                    print(text_of(line), flush=True)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            names = ["direction", "program", "length", "head_dim", "program_ms", "builtin_ms", "flex_ms", "difference"]
            writer = csv.DictWriter(file, [*names, "error"])
            writer.writeheader()
            writer.writerows(rows)
    return 1 if failed else 0


def text_of(line: dict) -> str:
    text = f"{line['direction']:8} {line['program']:30} {line['length']:6} D {line['head_dim']:3}"
    if "program_ms" in line:
        text += f"  {line['program_ms']:8.3f}"
    if "flex_ms" in line:
        text += f"  x {line['flex_ms'] / line['program_ms']:5.2f}"
    if "builtin_ms" in line:
        text += f"  / {line['program_ms'] / line['builtin_ms']:5.2f}"
    if "difference" in line:
        text += f"  off by {line['difference']:.4f}"
    return text + ("  " + line["error"] if "error" in line else "")


if __name__ == "__main__":
    sys.exit(main())
