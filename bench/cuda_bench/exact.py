"""Compares results with float64 on a few whole heads, so that rows at every place of a tile are included."""

from __future__ import annotations

from typing import Any

import torch
from tessera.compare.float64 import attend
from torch import Tensor

from cuda_bench.problem import Inputs, Problem

_ROWS = 1024  # of S in float64 at a time


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
        self._problem, self._inputs, self._direction = problem, inputs, direction
        self._samples = self._computed(round_o=False)

    def _computed(self, round_o: bool) -> list[dict[str, tuple[tuple, Tensor]]]:
        """Yields by name a result's index in its tensor, and the result. round_o: for delta = rowsum(dO ∘ O) with O
        rounded to the inputs' type."""
        problem, inputs = self._problem, self._inputs
        names = ("o",) if self._direction == "forward" else ("d_q", "d_k", "d_v")
        samples: list[dict[str, tuple[tuple, Tensor]]] = []
        k, v = inputs.keys_and_values()
        for which, (b, start, end) in enumerate(_slices(problem)):
            kv_head = 0 if which == 0 else problem.heads_kv - 1
            group = problem.heads // problem.heads_kv
            heads = slice(kv_head * group, (kv_head + 1) * group)
            rows = (slice(start, end),) if problem.lengths else (b, slice(None))
            at_q, at_k = (*rows, heads), (*rows, kv_head)
            d_o = None if self._direction == "forward" else inputs.d_o[at_q]
            results = self._heads(inputs.q[at_q], k[at_k], v[at_k], d_o, kv_head * group, round_o)
            samples.append({name: (at_k if name in ("d_k", "d_v") else at_q, results[name]) for name in names})
        return samples

    def _heads(
        self, q: Tensor, k: Tensor, v: Tensor, d_o: Tensor | None, first_head: int, round_o: bool
    ) -> dict[str, Tensor]:
        """q, d_o [Sq, G, D] of the heads from first_head on, k [Sk, D], v [Sk, Dv] -> o, d_q [Sq, G, D], d_k, d_v."""
        dtype, k, v = k.dtype, k.double(), v.double()
        o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=torch.float64, device=q.device)
        d_q = torch.empty(q.shape, dtype=torch.float64, device=q.device)
        d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
        for head in range(q.shape[1]):
            for first in range(0, q.shape[0], _ROWS):
                rows = slice(first, min(first + _ROWS, q.shape[0]))
                diagonal = torch.arange(rows.start, rows.stop, device=q.device) + k.shape[0] - q.shape[0]
                one = d_o[rows, head].double() if d_o is not None else None

                def attended(d_lse: Tensor | float = 0.0):
                    return attend(
                        torch, q[rows, head].double(), k, v, diagonal, scale=q.shape[-1] ** -0.5, d_o=one, d_lse=d_lse,
                        causal=self._problem.causal, window=(self._problem.window if self._problem.causal else -1, -1),
                        **self._options_of(first_head + head, rows),
                    )  # fmt: skip

                results = attended()
                if round_o:  # delta - d_lse, with the rounded O's delta
                    results = attended((one * (results.o - results.o.to(dtype).double())).sum(-1, keepdim=True))
                o[rows, head] = results.o
                if d_o is None:
                    continue
                d_q[rows, head] = results.d_q
                d_k += results.d_k
                d_v += results.d_v
        return {"o": o, "d_q": d_q, "d_k": d_k, "d_v": d_v}

    def _options_of(self, head: int, rows: slice) -> dict[str, Any]:
        """One head's options for `attend`."""
        of_head: dict[str, Any] = {}
        for name, option in self._inputs.options.items():
            if name == "softcap":
                of_head["softcap"] = option
            elif name == "bias":
                of_head["bias"] = option[0, head, rows].double()
            elif name == "mask":
                of_head["mask"] = option[0, 0, rows]
            elif name == "alibi_slopes":
                of_head["slope"] = option[head].double()
            else:
                raise ValueError(f"{name}: not known exactly")
        return of_head

    def error(self, results: dict[str, Tensor]) -> float:
        """The largest relative RMS error of the results; NaN if any element, sampled or not, is NaN or infinite."""
        if not all(bool(x.isfinite().all()) for x in results.values()):
            return float("nan")
        return max(self.errors(results).values())

    def errors(self, results: dict[str, Tensor]) -> dict[str, float]:
        """Each result's relative RMS error."""
        return self._errors([{name: results[name][at] for name, (at, _) in sample.items()} for sample in self._samples])

    def error_of(self, other: Exact) -> float:
        """The largest relative RMS error of the exact results of other inputs to the same problem."""
        found = [{name: x for name, (_, x) in sample.items()} for sample in other._samples]
        return max(self._errors(found).values())

    def errors_by_rounding_o(self) -> dict[str, float]:
        """Errors of gradients that are exact except for delta, which every backward pass computes from an O of the
        inputs' type."""
        return self._errors([{name: x for name, (_, x) in sample.items()} for sample in self._computed(round_o=True)])

    def _errors(self, found: list[dict[str, Tensor]]) -> dict[str, float]:
        squares: dict[str, list[float]] = {}  # of the difference, of the exact result
        for sample, values in zip(self._samples, found):
            for name, (_, exact) in sample.items():
                sums = squares.setdefault(name, [0.0, 0.0])
                sums[0] += float((values[name].double() - exact).square().sum())
                sums[1] += float(exact.square().sum())
        return {name: (difference / exact) ** 0.5 for name, (difference, exact) in squares.items()}
