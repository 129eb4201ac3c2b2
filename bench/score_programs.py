"""The score programs of bench/cuda_programs.py and bench/cpu_programs.py, and their calls."""

from __future__ import annotations

import functools
from typing import Callable, NamedTuple, Optional

import tessera
import tessera.torch
import torch


class Program:
    """A text, what it captures, the same for FlexAttention, and the options that cost least beside it."""

    def __init__(self, score="", mask="", captured=None, flex_score=None, flex_mask=None, gradients=(), **nearest):
        self.score, self.mask, self.captured, self.gradients = score or None, mask or None, captured or {}, gradients
        self.flex_score, self.flex_mask, self.nearest = flex_score, flex_mask, nearest


def generator(device: str) -> torch.Generator:
    """One of its own: a capture of a CUDA graph that fails leaves the default one unusable."""
    return torch.Generator(device).manual_seed(0)


def programs(n: int, heads: int, device: str) -> dict[str, Callable[[], Program]]:
    """Of n tokens; what they capture is of `heads` heads."""
    random = generator(device)
    relative = torch.randn(heads, 2 * n, device=device, generator=random) / 4
    slopes = torch.exp2(-torch.arange(1, heads + 1, device=device) / 2).float()
    temperature = 1 + torch.rand(heads, device=device, generator=random)
    doc = (torch.arange(n, device=device, dtype=torch.int32) // 1000).repeat(1, 1)
    ends = torch.tensor([*range(0, n, 1000), n], device=device, dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
    with_relative = functools.partial(
        Program, score="s + relative[h, i - j + len_k]", captured={"relative": relative},
        flex_score=lambda s, b, h, i, j: s + relative[h, i - j + n],
    )  # fmt: skip

    def as_dense() -> dict:
        """The relative bias as an option: on a GPU, where it fits in memory."""
        if n > 4096 or device == "cpu":
            return {}
        at = torch.arange(n, device=device)
        return {"bias": relative[:, at[:, None] - at + n].to(torch.bfloat16)[None]}

    with_temperature = functools.partial(
        Program, score="s * temperature[h]", captured={"temperature": temperature},
        flex_score=lambda s, b, h, i, j: s * temperature[h],
    )  # fmt: skip
    return {
        "causal": lambda: Program(mask="j <= q_pos", flex_mask=lambda b, h, i, j: j <= i, causal=True),
        "window": lambda: Program(
            mask="j <= q_pos && q_pos - j < 1024", flex_mask=lambda b, h, i, j: (j <= i) & (i - j < 1024),
            window=(1023, 0),
        ),  # fmt: skip
        "documents": lambda: Program(
            mask="j <= q_pos && doc[b, i] == doc[b, j]", captured={"doc": doc},
            flex_mask=lambda b, h, i, j: (j <= i) & (doc[0, i] == doc[0, j]), **packed,
        ),  # fmt: skip
        "prefix": lambda: Program(
            mask="j < 1024 || j <= q_pos", flex_mask=lambda b, h, i, j: (j < 1024) | (j <= i), causal=True
        ),
        "ALiBi": lambda: Program(
            score="s + slope[h] * (j - i)", captured={"slope": slopes},
            flex_score=lambda s, b, h, i, j: s + slopes[h] * (j - i), alibi_slopes=slopes,
        ),  # fmt: skip
        "ALiBi, both ways": lambda: Program(  # the built-in's, whose rows' LSEs do not grow with the length
            score="s - slope[h] * abs(i - j)", captured={"slope": slopes},
            flex_score=lambda s, b, h, i, j: s - slopes[h] * torch.abs(i - j), alibi_slopes=slopes,
        ),  # fmt: skip
        "softcap": lambda: Program(
            score="50 * tanh(s / 50)", flex_score=lambda s, b, h, i, j: 50 * torch.tanh(s / 50), softcap=50.0
        ),
        "softcap by a scalar": lambda: Program(score="c * tanh(s / c)", captured={"c": 50.0}, softcap=50.0),
        "relative": lambda: with_relative(**as_dense()),
        "relative, its gradient": lambda: with_relative(gradients=("relative",), **as_dense()),
        "temperature": with_temperature,
        "temperature, its gradient": lambda: with_temperature(gradients=("temperature",)),
        "dilated window": lambda: Program(
            mask="(q_pos - j) % 16 == 0 && abs(q_pos - j) < 1024",
            flex_mask=lambda b, h, i, j: ((i - j) % 16 == 0) & (torch.abs(i - j) < 1024), window=(1023, 1023),
        ),  # fmt: skip
        "neighbours in an image": lambda: Program(
            mask="abs(q_pos // 64 - j // 64) <= 3 && abs(q_pos % 64 - j % 64) <= 3",
            flex_mask=lambda b, h, i, j: (torch.abs(i // 64 - j // 64) <= 3) & (torch.abs(i % 64 - j % 64) <= 3),
            window=(195, 195),
        ),  # fmt: skip
        "three at once": lambda: Program(
            score="50 * tanh((s + relative[h, i - j + len_k]) / 50)", mask="j <= q_pos && doc[b, i] == doc[b, j]",
            captured={"relative": relative, "doc": doc},
            flex_score=lambda s, b, h, i, j: 50 * torch.tanh((s + relative[h, i - j + n]) / 50),
            flex_mask=lambda b, h, i, j: (j <= i) & (doc[0, i] == doc[0, j]), softcap=50.0, **packed,
        ),  # fmt: skip
        "a mask a head": lambda: Program(mask="h % 2 == 0 ? j <= q_pos : abs(i - j) <= 512", causal=True),
        "dense bias": lambda: dense_bias(n, heads, device),
    }


def dense_bias(n: int, heads: int, device: str) -> Program:
    bias = torch.randn(1, heads, n, n, device=device, dtype=torch.bfloat16, generator=generator(device))
    return Program(flex_score=lambda s, b, h, i, j: s + bias[0, h, i, j], bias=bias)


class Call(NamedTuple):
    direction: str
    length: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: str


class Calls:
    """Inputs, and what is called with them."""

    def __init__(self, program: Program, call: Call, flex: Optional[Callable]):
        random = generator(call.device)
        self.program, self.direction, self.flex = program, call.direction, flex
        queries = 1 if call.direction == "decode" else call.length
        shapes = [(1, rows, call.heads, call.head_dim) for rows in (queries, call.length, call.length, queries)]
        self.rows = [torch.randn(s, device=call.device, dtype=call.dtype, generator=random) for s in shapes]

    def ours(self, options: dict, gradients=()) -> Callable:
        is_packed = "cu_seqlens_q" in options and self.direction != "decode"
        if not is_packed:
            options = {name: value for name, value in options.items() if not name.startswith("cu_")}
        if "bias" in options and self.direction == "decode":
            options = {**options, "bias": options["bias"][:, :, -1:]}
        q, k, v, d_o = (x[0] for x in self.rows) if is_packed else self.rows
        if self.direction not in ("backward", "deterministic"):
            return lambda: tessera.attention(q, k, v, **options)
        o, lse = tessera.attention(q, k, v, return_lse=True, **options)
        more: dict = {"grad_captured": list(gradients)} if gradients else {}
        if self.direction == "deterministic":
            more["deterministic"] = True
        return lambda: tessera.attention_backward(q, k, v, o, lse, d_o, **options, **more)

    def programmed(self) -> Callable:
        p = self.program
        if p.score is None and p.mask is None:
            return self.ours(p.nearest)
        captured = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in p.captured.items()}
        return self.ours({"score_mod": p.score, "mask_mod": p.mask, "captured": captured}, p.gradients)

    def theirs(self) -> Callable:
        q, k, v, d_o = (x.transpose(1, 2).contiguous() for x in self.rows)
        if self.direction != "backward":

            def forward():
                with torch.no_grad():
                    return self.flex(q, k, v)

            return forward
        captured = [self.program.captured[name].requires_grad_() for name in self.program.gradients]
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = self.flex(*leaves)
        return lambda: torch.autograd.grad(o, leaves + captured, d_o, retain_graph=True)

    def all(self) -> dict[str, Callable]:
        calls = {"program": self.programmed()}
        if self.program.score or self.program.mask:
            calls["builtin"] = self.ours(self.program.nearest)
        if self.flex is not None:
            calls["flex"] = self.theirs()
        return calls


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
