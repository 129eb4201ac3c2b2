"""Results held against float64 on a few heads: whole heads, so that rows at every place of a tile are seen."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_bench.problem import Inputs, Problem

_ROWS = 1024  # of S, held at once in float64


def _slices(problem: Problem) -> list[tuple[int, int, int]]:
    """(sequence, first row, end row): dense, the first sequence and the last; packed, the longest and the shortest."""
    if not problem.lengths:
        return [(0, 0, 0), (problem.batch - 1, 0, 0)]
    order = sorted(range(len(problem.lengths)), key=problem.lengths.__getitem__)
    starts = [sum(problem.lengths[:b]) for b in order]
    return [(b, start, start + problem.lengths[b]) for b, start in ((order[i], starts[i]) for i in (-1, 0))]


class Exact:
    """The exact o, or d_q, d_k, d_v, of a KV head (the first or last) and its query heads, in two sequences."""

    def __init__(self, problem: Problem, inputs: Inputs, direction: str):
        self._problem, self._options = problem, inputs.options
        names = ("o",) if direction == "forward" else ("d_q", "d_k", "d_v")
        self._samples: list[dict[str, tuple[tuple, Tensor]]] = []
        k, v = inputs.keys_and_values()
        for which, (b, start, end) in enumerate(_slices(problem)):
            kv_head = 0 if which == 0 else problem.heads_kv - 1
            group = problem.heads // problem.heads_kv
            heads = slice(kv_head * group, (kv_head + 1) * group)
            rows = (slice(start, end),) if problem.lengths else (b, slice(None))
            at_q, at_k = (*rows, heads), (*rows, kv_head)
            d_o = None if direction == "forward" else inputs.d_o[at_q]
            results = self._heads(inputs.q[at_q], k[at_k], v[at_k], d_o, kv_head * group)
            self._samples.append({name: (at_k if name in ("d_k", "d_v") else at_q, results[name]) for name in names})

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, d_o: Tensor | None, first_head: int) -> dict[str, Tensor]:
        """q, d_o [Sq, G, D] of the heads from first_head on, k [Sk, D], v [Sk, Dv] -> o, d_q [Sq, G, D], d_k, d_v."""
        k, v = k.double(), v.double()
        o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=torch.float64, device=q.device)
        d_q = torch.empty(q.shape, dtype=torch.float64, device=q.device)
        d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
        scale = q.shape[-1] ** -0.5
        for head in range(q.shape[1]):
            for first in range(0, q.shape[0], _ROWS):
                rows = slice(first, min(first + _ROWS, q.shape[0]))
                q_rows = q[rows, head].double()
                s = (q_rows @ k.T).mul_(scale)
                slope = self._apply_options(s, first_head + head, rows, k.shape[0] - q.shape[0])
                self._hide(s, first, k.shape[0] - q.shape[0])
                p = s.softmax(-1)
                o[rows, head] = p @ v
                if d_o is None:
                    continue
                d_o_rows = d_o[rows, head].double()
                d_s = (d_o_rows @ v.T).sub_((d_o_rows * o[rows, head]).sum(-1, keepdim=True)).mul_(p).mul_(scale)
                if slope is not None:
                    d_s.mul_(slope)
                d_q[rows, head] = d_s @ k
                d_k += d_s.T @ q_rows
                d_v += p.T @ d_o_rows
        return {"o": o, "d_q": d_q, "d_k": d_k, "d_v": d_v}

    def _apply_options(self, s: Tensor, head: int, rows: slice, shift: int) -> Tensor | None:
        """Softcap, bias, ALiBi and mask, in place; the softcap's slope, None without one."""
        slope = None
        for name, option in self._options.items():
            if name == "softcap":
                s.div_(option).tanh_()
                slope = 1 - s.square()
                s.mul_(option)
            elif name == "bias":
                s.add_(option[0, head, rows])
            elif name == "mask":
                s.masked_fill_(~option[0, 0, rows], float("-inf"))
            elif name == "alibi_slopes":
                i, j = (torch.arange(n, device=s.device) for n in (rows.stop, s.shape[1]))
                s.sub_((i[rows, None] + shift - j).abs() * option[head].double())
            else:
                raise ValueError(f"{name}: not known exactly")
        return slope

    def _hide(self, s: Tensor, first: int, shift: int) -> None:
        """-inf where key j is not visible to query i: j > i + shift, or further left than the window."""
        if not self._problem.causal:
            return
        i = torch.arange(first, first + s.shape[0], device=s.device)[:, None] + shift
        j = torch.arange(s.shape[1], device=s.device)
        hidden = j > i
        if self._problem.window >= 0:
            hidden |= j < i - self._problem.window
        s.masked_fill_(hidden, float("-inf"))

    def error(self, results: dict[str, Tensor]) -> float:
        """The relative RMS error of the result that has the largest. NaN or infinity anywhere in them, sampled or not: NaN."""
        if not all(bool(x.isfinite().all()) for x in results.values()):
            return float("nan")
        squares: dict[str, list[float]] = {}  # of the difference, of the exact result
        for sample in self._samples:
            for name, (at, exact) in sample.items():
                sums = squares.setdefault(name, [0.0, 0.0])
                sums[0] += float((results[name][at].double() - exact).square().sum())
                sums[1] += float(exact.square().sum())
        return max((difference / exact) ** 0.5 for difference, exact in squares.values())
