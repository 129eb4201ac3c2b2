"""The problems that are timed, and their tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# Options that change a score or its weight.
OPTIONS = ("softcap", "ALiBi", "dropout", "bias", "bias and its gradient", "mask")


@dataclass(frozen=True)
class Problem:
    """Attention of q [B, Sq, Hq, D] to k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]; packed [T, H, D] with `lengths`; k and v
    in pages [pages, page_size, Hkv, D] with `page_size`, a divisor of Sk."""

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    dtype: str = "bfloat16"
    window: int = -1  # keys left of the diagonal; with causal
    lengths: tuple[int, ...] = ()  # of packed sequences, queries and keys alike
    deterministic: bool = False
    page_size: int = 0
    option: str = ""  # of OPTIONS

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def has_scores(self) -> bool:
        """A tensor with an entry for each score."""
        return self.option.startswith("bias") or self.option == "mask"

    @property
    def bias_gradient(self) -> bool:
        return self.option == "bias and its gradient"

    def visible(self) -> float:
        """Pairs of a query and a key that it sees, of one head. Causal counts as half, as in the papers."""
        if self.lengths:
            return sum(n * n for n in self.lengths) * (0.5 if self.causal else 1.0)
        if self.window >= 0:
            # The first `window` queries see as many keys as there are before them.
            full = max(0, self.seqlen_q - self.window)
            return self.batch * (full * (self.window + 1) + (self.seqlen_q - full) * (self.seqlen_q - full + 1) / 2)
        return self.batch * self.seqlen_q * self.seqlen_k * (0.5 if self.causal else 1.0)

    def flops(self, direction: str) -> float:
        """2 products forward, 5 backward, of which S, dQ, dK are over D and O (dP, dV) over Dv."""
        over_d, over_dv = (1, 1) if direction == "forward" else (3, 2)
        return 2.0 * self.visible() * self.heads * (over_d * self.head_dim + over_dv * self.head_dim_v)

    def kv_bytes(self) -> int:
        rows = sum(self.lengths) if self.lengths else self.batch * self.seqlen_k
        return rows * self.heads_kv * (self.head_dim + self.head_dim_v) * DTYPES[self.dtype].itemsize


@dataclass
class Inputs:
    """Standard normal tensors; cu_seqlens int32 [B + 1] where packed; page_table int32 [B, Sk / page_size], in no
    order, and seqused_k int32 [B] where keys and values are in pages; and the tensors of `option`, by Tessera's
    names."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor | None
    cu_seqlens: Tensor | None = None
    page_table: Tensor | None = None
    seqused_k: Tensor | None = None
    options: dict[str, float | Tensor] = field(default_factory=dict)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """k and v as [B, Sk, Hkv, D], also where they are in pages; packed [T, Hkv, D]."""
        if self.page_table is None:
            return self.k, self.v
        return tuple(x[self.page_table].flatten(1, 2) for x in (self.k, self.v))

    @staticmethod
    def of(problem: Problem, with_gradient: bool, device: str = "cuda") -> Inputs:
        generator = torch.Generator(device).manual_seed(7)

        def normal(rows: int, heads: int, dim: int) -> Tensor:
            shape = (sum(problem.lengths), heads, dim) if problem.lengths else (problem.batch, rows, heads, dim)
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[problem.dtype])

        p = problem
        cu_seqlens = None
        if p.lengths:
            cu_seqlens = torch.tensor([0, *p.lengths], device=device).cumsum(0).to(torch.int32)
        q = normal(p.seqlen_q, p.heads, p.head_dim)
        k, v = (normal(p.seqlen_k, p.heads_kv, dim) for dim in (p.head_dim, p.head_dim_v))
        page_table = seqused_k = None
        if p.page_size:
            k, v = (x.view(-1, p.page_size, *x.shape[2:]) for x in (k, v))
            order = torch.randperm(len(k), generator=generator, device=device, dtype=torch.int32)
            page_table = order.view(p.batch, -1)
            seqused_k = torch.full((p.batch,), p.seqlen_k, device=device, dtype=torch.int32)
        d_o = normal(p.seqlen_q, p.heads, p.head_dim_v) if with_gradient else None
        return Inputs(q, k, v, d_o, cu_seqlens, page_table, seqused_k, _option(p, generator))


def _option(p: Problem, generator: torch.Generator) -> dict[str, float | Tensor]:
    """A bias [1, H, Sq, Sk], of all sequences, a mask [1, 1, Sq, Sk] that shows nine keys in ten, slopes [H]."""
    on = {"generator": generator, "device": generator.device}
    if p.option.startswith("bias"):
        return {"bias": torch.randn((1, p.heads, p.seqlen_q, p.seqlen_k), dtype=DTYPES[p.dtype], **on)}
    if p.option == "mask":
        return {"mask": torch.rand((1, 1, p.seqlen_q, p.seqlen_k), **on) < 0.9}
    if p.option == "ALiBi":
        return {"alibi_slopes": torch.rand(p.heads, **on)}
    return {"softcap": {"softcap": 30.0}, "dropout": {"dropout_p": 0.1, "dropout_seed": 1}}.get(p.option, {})


TOKENS = 16384
WIDTH = 2048  # heads times head size


def _square(name: str, batch: int, length: int, heads: int, heads_kv: int, dim: int, dim_v: int, causal: bool,
            **more) -> Problem:  # fmt: skip
    return Problem(name, batch, length, length, heads, heads_kv, dim, dim_v, causal, **more)


def grid(head_dims: list[int], lengths: list[int], dtype: str) -> list[Problem]:
    """16384 tokens, 2048 / D heads."""
    return [
        _square(f"D {dim}", max(1, TOKENS // length), length, WIDTH // dim, WIDTH // dim, dim, dim, causal, dtype=dtype)
        for dim in head_dims
        for causal in (False, True)
        for length in lengths
    ]


def long_tailed_lengths(count: int = 48, total: int = 51116, longest: int = 6648) -> tuple[int, ...]:
    """Log-normal lengths of so many sequences, about `total` tokens, none above `longest`; the same each time."""
    draw = random.Random(11)
    shape = [draw.lognormvariate(0, 1.1) for _ in range(count)]
    scale = total / sum(shape)
    return tuple(min(longest, max(16, round(scale * x))) for x in shape)


def beyond(dtype: str) -> list[Problem]:
    """4 x 4096 tokens unless the name says otherwise; the grid's plain case first, to compare the others with."""
    rows = [
        ("D 128, 16 heads", 16, 16, 128, 128),
        ("D 96, 20 heads", 20, 20, 96, 96),
        ("GQA 32 / 8, D 128", 32, 8, 128, 128),
        ("D 192, 10 heads", 10, 10, 192, 192),
        ("D 192, Dv 128, 16 heads", 16, 16, 192, 128),
    ]
    problems = [
        _square(name, 4, 4096, *shape, causal, dtype=dtype) for name, *shape in rows for causal in (False, True)
    ]
    problems.append(_square("window 1024 of 32768, D 128, 16 heads", 1, 32768, 16, 16, 128, 128, True, dtype=dtype,
                            window=1024))  # fmt: skip
    lengths = long_tailed_lengths()
    tokens = f"{len(lengths)} log-normal lengths, {sum(lengths)} tokens, longest {max(lengths)}"
    problems += [
        _square(
            f"{name}, {tokens}, D {dim}, {WIDTH // dim} heads", len(lengths), max(lengths), WIDTH // dim, WIDTH // dim,
            dim, dim, causal, dtype=dtype, lengths=lengths,
        )
        for name, dim in (("packed", 128), ("packed at D 256", 256))
        for causal in (False, True)
    ]  # fmt: skip
    problems += [
        _square(f"D {dim}, {WIDTH // dim} heads, deterministic", 4, 4096, WIDTH // dim, WIDTH // dim, dim, dim, causal,
                dtype=dtype, deterministic=True)
        for dim in (64, 128, 256)
        for causal in (False, True)
    ]  # fmt: skip
    problems += [
        _square(f"GQA 64 / 8, D 128, {length}", max(1, TOKENS // length), length, 64, 8, 128, 128, True, dtype=dtype)
        for length in (2048, 8192, 32768)
    ]
    problems += [_square("D 192, Dv 128, 128 heads", 1, 4096, 128, 128, 192, 128, causal, dtype=dtype)
                 for causal in (False, True)]  # fmt: skip
    problems.append(_square("window 128 of 16384, D 64, 128 heads", 1, 16384, 128, 128, 64, 64, True, dtype=dtype,
                            window=128))  # fmt: skip
    return problems


PAGE_SIZES = (16, 64, 256)


def pages(dtype: str) -> list[Problem]:
    """4 x 4096 tokens, keys and values together, and in pages."""
    return [
        _square(f"D {dim}, " + (f"pages of {size}" if size else "no pages"), 4, 4096, WIDTH // dim, WIDTH // dim, dim,
                dim,
                causal, dtype=dtype, page_size=size)
        for dim in (64, 128, 256)
        for causal in (False, True)
        for size in (0, *PAGE_SIZES)
    ]  # fmt: skip


def options(dtype: str) -> list[Problem]:
    """4 x 4096 tokens."""
    return [
        _square(f"D {dim}, {option}", 4, 4096, WIDTH // dim, WIDTH // dim, dim, dim, causal, dtype=dtype, option=option)
        for option in OPTIONS
        for dim in (64, 128, 256)
        for causal in (False, True)
    ]


def decode(dtype: str) -> list[Problem]:
    """One query token a sequence, D 128; keys and values together, and for large batches also in pages."""
    sizes = ((1, 8192), (1, 65536), (1, 524288), (8, 8192), (16, 4096), (64, 2048), (64, 8192))
    return [
        Problem(f"{heads}/{heads_kv}" + (f", pages of {size}," if size else ""), batch, 1, length, heads, heads_kv, 128,
                128,
                False, dtype=dtype, page_size=size)
        for heads, heads_kv in ((32, 8), (32, 32), (64, 8))
        for batch, length in sizes
        for size in (0, *(PAGE_SIZES if batch == 64 else ()))
    ]  # fmt: skip


def short_name(problem: Problem, direction: str) -> str:
    if problem.seqlen_q == 1:
        return f"decode {problem.name} B {problem.batch} Sk {problem.seqlen_k}"
    length = "" if problem.lengths or problem.window >= 0 else f" N {problem.seqlen_k}"
    return f"{direction} {problem.name.split(', longest')[0]} {problem.mask}{length}"
