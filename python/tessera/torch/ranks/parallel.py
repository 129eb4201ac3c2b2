"""`tessera.torch.context_parallel`: one batch on the processes of a group, each with a part of every sequence's
rows."""

from __future__ import annotations

import functools
from typing import Any, Dict, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from tessera import _core
from tessera._core import Error
from tessera._ranks.schedule import Chunk, head_ranks, schedule
from tessera._score import Bound, Mod

from .. import options as of_call
from .. import program_ops, score_programs
from ..checks import check_tensor, scores_view
from .attention import Placed, Setting, SharedGradients, backward, forward
from .exchange import Agreement
from .program import Program, program

_ACCEPTED = (
    "scale", "causal", "window", "softcap", "sink", "bias", "mask", "alibi_slopes", "dropout_p", "dropout_seed",
    "dropout_offset", "deterministic", "threads",
)  # fmt: skip


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, setting: Setting, bias, *captured):
        o, lse, saved = forward(setting.with_tensors(bias, captured), q, k, v, sink)
        ctx.setting, ctx.shapes = setting, (q.shape, k.shape, v.shape)
        ctx.save_for_backward(sink, bias, *captured, *saved)
        ctx.num_captured = len(captured)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o, d_lse):
        sink, bias, *rest = ctx.saved_tensors
        captured, tensors = rest[: ctx.num_captured], tuple(rest[ctx.num_captured :])
        shared = SharedGradients((bias, *captured), ctx.needs_input_grad[5:])
        if not tensors:  # no rows
            like = d_o if d_o is not None else d_lse
            empty = tuple(like.new_empty(shape) for shape in ctx.shapes)
            return *empty, None if sink is None else torch.zeros_like(sink), None, *shared.finished()
        if d_o is None:  # every rank executes the whole list, even if it needs no gradient
            d_o = tensors[3].new_zeros((*ctx.shapes[0][:3], ctx.shapes[2][3]))
        setting = ctx.setting.with_tensors(bias, captured)
        *gradients, d_sink = backward(setting, tensors, d_o, d_lse, sink, ctx.shapes, shared)
        return *gradients, None if d_sink is None else d_sink.to(sink.dtype), None, *shared.finished()


class ContextParallel:
    """Made by `tessera.torch.context_parallel`, which documents it."""

    def __init__(self, group: dist.ProcessGroup, layout: str, strategy: str, head_ranks: int, members: Dict[str, Any]):
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._members = {
            "layout": layout,
            "strategy": strategy,
            "head_ranks": head_ranks,
            "ranks": self.ranks,
            **members,
        }
        self._agreement = Agreement(group)
        _core.ranks_plan([0], -1, heads_q=1, heads_kv=1, head_dim=1, **{**self._members, "strategy": "ring"})
        if strategy not in ("ring", "all_gather"):  # only the name is checked: heads are not known yet
            _core.ranks_plan([0], -1, heads_q=self.ranks, heads_kv=self.ranks, head_dim=1, **self._members)

    def __repr__(self) -> str:
        return (
            f"ContextParallel(rank {self.rank} of {self.ranks}, layout {self._members['layout']}, "
            f"strategy {self._members['strategy']})"
        )

    # ---- rows -------------------------------------------------------------------------------------------------------

    def chunks(
        self, length: Optional[int] = None, cu_seqlens: Union[None, Tensor, Sequence[int]] = None
    ) -> Tuple[Chunk, ...]:
        """The rows of each rank, as parts of one sequence of `length`, or of packed sequences."""
        return self._layout(_lengths(length, cu_seqlens))

    def shard(self, x: Tensor, dim: int = 1, cu_seqlens: Union[None, Tensor, Sequence[int]] = None) -> Tensor:
        """This rank's rows of `x`, which has all rows along `dim`. Differentiable."""
        lengths = _lengths(x.shape[dim], cu_seqlens)
        if sum(lengths) != x.shape[dim]:
            raise Error(f"cu_seqlens: ends at {sum(lengths)}, x has {x.shape[dim]} rows along dim {dim}")
        starts = _starts(lengths)
        parts = [
            x.narrow(dim, starts[chunk.sequence] + chunk.begin, chunk.length)
            for chunk in self._layout(lengths)
            if chunk.rank == self.rank
        ]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    @torch.no_grad()
    def unshard(self, x: Tensor, dim: int = 1, cu_seqlens: Union[None, Tensor, Sequence[int]] = None) -> Tensor:
        """All rows on every rank, in order, from each rank's own rows along `dim`: for inspection, without a
        gradient."""
        lengths = _lengths(x.shape[dim] * self.ranks, cu_seqlens)
        mine = x.movedim(dim, 0).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(everyone, mine, group=self.group)
        result = mine.new_empty((self.ranks * mine.shape[0], *mine.shape[1:]))
        starts = _starts(lengths)
        for chunk in self._layout(lengths):
            first = starts[chunk.sequence] + chunk.begin
            result[first : first + chunk.length] = everyone[chunk.rank].narrow(0, chunk.row, chunk.length)
        return result.movedim(0, dim)

    def position_ids(
        self, length: Optional[int] = None, cu_seqlens: Union[None, Tensor, Sequence[int]] = None, device: Any = None
    ) -> Tensor:
        """int64 [rows]: the positions of this rank's rows in their sequences, for instance for rotary embeddings."""
        parts = [
            torch.arange(chunk.begin, chunk.begin + chunk.length, device=device)
            for chunk in self.chunks(length, cu_seqlens)
            if chunk.rank == self.rank
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)

    # ---- attention --------------------------------------------------------------------------------------------------

    @_disable_dynamo  # torch.compiler.disable, but imports the compiler only at the first call
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens: Union[None, Tensor, Sequence[int]] = None,
        return_lse: bool = False,
        score_mod: Mod = None,
        mask_mod: Mod = None,
        captured: Optional[Dict[str, Any]] = None,
        **options: Any,
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        """Exact attention of all rows: each rank passes its own rows and gets their O, with gradients for q, k, v,
        sink, bias and a program's tensors.

        Every rank of the group must call it, with the same options and shapes. Ranks that disagree get an error at the
        first call of each problem. In the backward pass, every rank takes part as well.

        Args:
            q, k, v: this rank's rows, in the order of `shard`: [B, S / N, Hq, D], [B, S / N, Hkv, D], [B, S / N, Hkv,
                Dv]; with cu_seqlens [T / N, H, D].
            cu_seqlens: [n + 1], of the whole packed batch, on the CPU (on another device, the call waits for it).
            return_lse: also return LSE, float32 [B, Hq, S / N] or [Hq, T / N].
            scale, causal, window, softcap, deterministic, threads: as in `tessera.torch.attention`.
            alibi_slopes: float32 [Hq] or [B, Hq], the same on all ranks.
            dropout_p, dropout_seed, dropout_offset: as in `tessera.torch.attention`, the same on all ranks; with a
                probability the seed is required. The entries that one process would drop are dropped. Chunks must be
                multiples of 32 rows.
            sink: [Hq], the same on all ranks. Its gradient is this rank's part: sum over the ranks, as for any
                parameter.
            bias, mask: [B|1, Hq|1, S|1, S] and its last dimensions, of all rows and keys, the same on all ranks: S^2
                entries, for which a program is better where one says the same. Of a packed batch B is the number of
                sequences and S the longest. The gradient of bias is this rank's part, as the sink's.
            score_mod, mask_mod, captured: a program of one (query, key) pair, as in `tessera.torch.attention`, with the
                b, h, i, j, q_pos and lengths of the whole; of a packed batch b is the sequence. The tensors that it
                names are whole and the same on all ranks; a gradient is this rank's part, as the sink's. The schedule
                knows `causal` and `window` alone: what only a program's mask hides is exchanged all the same.

        Raises:
            tessera.Error: (a ValueError) an argument is wrong or not accepted here; one line names it.
            RuntimeError: a peer was lost; the message names the step and the awaited message.
        """
        bound = score_programs.bind(score_mod, mask_mod, captured)
        setting, packed, bias = self._setting(q, k, v, cu_seqlens, options, bound)
        sink = options.get("sink")
        if packed:
            q, k, v = q[None], k[None], v[None]
        o, lse = _Attention.apply(q, k, v, sink, setting, bias, *(() if bound is None else bound.arrays))
        if packed:
            o, lse = o[0], lse[0]
        return (o, lse) if return_lse else o

    def plan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        direction: str = "forward",
        cu_seqlens: Union[None, Tensor, Sequence[int]] = None,
        **options: Any,
    ) -> str:
        """Describes what `attention` would do on this rank: the strategy and why, and this rank's steps."""
        lengths, members, _ = self._problem(q, k, v, cu_seqlens, options)
        words = [_core.ranks_plan(list(lengths), rank, direction=direction, **members) for rank in (-1, self.rank)]
        return "\n".join(words)

    def _problem(self, q, k, v, cu_seqlens, options) -> Tuple[Tuple[int, ...], Dict[str, Any], bool]:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, tensor)
        refused = [
            name
            for name, value in options.items()
            if name not in _ACCEPTED and name in of_call.NAMES and value is not None
        ]
        if refused:
            raise Error(
                f"{refused[0]}: not accepted by context_parallel yet, where each rank has a part of the rows; "
                f"accepted {', '.join(_ACCEPTED)}"
            )
        packed = cu_seqlens is not None
        if q.dim() != (3 if packed else 4):
            accepted = (
                "[T / N, Hq, D] with cu_seqlens" if packed else "[B, S / N, Hq, D], or [T / N, Hq, D] with cu_seqlens"
            )
            raise Error(f"q: rank {q.dim()}, accepted {accepted}")
        for name, tensor in (("k", k), ("v", v)):
            if tensor.dim() != q.dim() or tensor.shape[:-2] != q.shape[:-2]:
                raise Error(
                    f"{name}: shape {list(tensor.shape)}, q has {list(q.shape)}: accepted this rank's same rows"
                )
            if tensor.dtype != q.dtype or tensor.device != q.device:
                raise Error(
                    f"{name}: {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}: accepted one for all"
                )
        if k.shape[-2] != v.shape[-2] or k.shape[-1] != q.shape[-1]:
            raise Error(
                f"k: shape {list(k.shape)}, q has {list(q.shape)}, v {list(v.shape)}: accepted D of q and Hkv of v"
            )
        lengths = _lengths(q.shape[-3] * self.ranks, cu_seqlens)
        if sum(lengths) != q.shape[-3] * self.ranks:
            raise Error(
                f"cu_seqlens: ends at {sum(lengths)}, {self.ranks} ranks with {q.shape[-3]} rows each have "
                f"{q.shape[-3] * self.ranks}: accepted that of the whole batch"
            )
        window = options.get("window") or (-1, -1)
        members = {
            **self._members,
            "causal": int(bool(options.get("causal"))),
            "window_left": window[0],
            "window_right": window[1],
            "batch": 1 if packed else max(q.shape[0], 1),
            "heads_q": q.shape[-2],
            "heads_kv": k.shape[-2],
            "head_dim": q.shape[-1],
            "head_dim_v": v.shape[-1],
            "dtype": str(q.dtype).rpartition(".")[2],
        }
        return lengths, members, packed

    def _setting(self, q, k, v, cu_seqlens, options, bound: Optional[Bound]) -> Tuple[Setting, bool, Optional[Tensor]]:
        lengths, members, packed = self._problem(q, k, v, cu_seqlens, options)
        bias, mask = (_entries(name, options.get(name), lengths, members) for name in ("bias", "mask"))
        tensors = [t for t in (q, k, v, bias, *(() if bound is None else bound.arrays)) if t is not None]
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        directions = ("forward", "backward") if differentiable else ("forward",)
        members["head_ranks"] = head_ranks(lengths, directions, **members)
        what = f"q {list(q.shape)}, k {list(k.shape)}, {q.dtype}"

        one_batch = packed or q.shape[0] == 1
        options = dict(options)
        dropout = {name: options.pop(name) for name in ("dropout_seed", "dropout_offset") if name in options}
        given = of_call.given("context_parallel.attention", options)
        dropout = {**dropout, "dropout_p": given["dropout_p"]} if given.get("dropout_p") else {}
        placed = None
        if dropout or any(x is not None for x in (bound, bias, mask, given.get("alibi_slopes"))):
            ranges = {name: given[name] for name in ("causal", "window") if name in given}
            placed = Placed(lengths, (q.shape[-2], k.shape[-2]), ranges, given.get("alibi_slopes"), mask)
        if dropout:
            self._check_dropout(dropout, lengths)

        several = one_batch if placed is None else packed and _packs(placed, bias, dropout, bound)

        def agreed(direction: str) -> Program:
            made = program(lengths, self.rank, several, placed is not None, direction=direction, **members)
            self._agreement.check(made.schedule, what, q.device, 0 if bound is None else bound.program.hash)
            return made

        of_each_call = {n: x for n, x in given.items() if n in ("scale", "softcap", "deterministic", "threads")}
        of_each_call.update(dropout)
        setting = Setting(
            agreed("forward"),
            functools.partial(agreed, "backward"),
            self.group,
            of_each_call,
            placed,
            None if bound is None else program_ops.of_bound(bound)._replace(captured=()),
        )
        return setting, packed, bias

    def _check_dropout(self, dropout: Dict[str, Any], lengths: Tuple[int, ...]) -> None:
        if "dropout_seed" not in dropout:
            raise Error("dropout_seed: absent with dropout_p, accepted an integer, the same on all ranks")
        for chunk in self._layout(lengths):
            if chunk.begin % 32 != 0:
                raise Error(
                    f"dropout_p: with a chunk that begins at row {chunk.begin} of its sequence, accepted lengths whose "
                    "chunks are multiples of 32 rows"
                )

    def _layout(self, lengths: Tuple[int, ...]) -> Tuple[Chunk, ...]:
        return schedule(
            lengths,
            self.rank,
            **{**self._members, "strategy": "ring", "head_ranks": 0},
            heads_q=1,
            heads_kv=1,
            head_dim=1,
        ).chunks


def _packs(placed: Placed, bias: Optional[Tensor], dropout: Dict[str, Any], bound: Optional[Bound]) -> bool:
    """True if pairs of several sequences can be one packed call: their scores depend on places, not on which sequences
    they are of, nor on tensors with an entry for each score."""
    of_sequence = bound is not None and "b" in bound.program.inputs
    of_batch = placed.slopes is not None and placed.slopes.dim() > 1
    return not (of_sequence or of_batch or dropout or placed.entries is not None or bias is not None)


def _entries(
    name: str, tensor: Optional[Tensor], lengths: Tuple[int, ...], members: Dict[str, Any]
) -> Optional[Tensor]:
    """A bias or mask as a view [B|1, Hq|1, S|1, S]."""
    if tensor is None:
        return None
    check_tensor(name, tensor)
    rows, heads = max(lengths, default=0), members["heads_q"]
    batch = len(lengths) if len(lengths) > 1 else members["batch"]
    view = scores_view(name, tensor, rows)
    if any(size not in (1, full) for size, full in zip(view.shape, (batch, heads, rows))) or view.shape[3] != rows:
        raise Error(
            f"{name}: shape {list(tensor.shape)}, accepted [{batch}|1, {heads}|1, {rows}|1, {rows}|1] and its last "
            "dimensions: of all rows and keys, whole on every rank"
        )
    return view


def _lengths(length: Optional[int], cu_seqlens: Union[None, Tensor, Sequence[int]]) -> Tuple[int, ...]:
    if cu_seqlens is None:
        if length is None:
            raise Error("length: none given, accepted the rows of a sequence, or cu_seqlens")
        return (length,)
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if not ends or ends[0] != 0 or any(b < a for a, b in zip(ends, ends[1:])):
        raise Error(f"cu_seqlens: {ends[:4]}…, accepted 0 and then the end of each sequence")
    return tuple(b - a for a, b in zip(ends, ends[1:]))


def _starts(lengths: Sequence[int]) -> Tuple[int, ...]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return tuple(starts)


def context_parallel(
    group: Union[None, dist.ProcessGroup, Any] = None,
    *,
    layout: str = "zig_zag",
    strategy: str = "auto",
    head_ranks: int = 0,
    **model: Any,
) -> ContextParallel:
    """Exact attention of one batch on the processes of a group: each has a part of every sequence's rows (context
    parallelism).

        parallel = tessera.torch.context_parallel(group)
        tokens, positions = parallel.shard(tokens), parallel.position_ids(length)     # layers work on a rank's own rows
        o = parallel.attention(q, k, v, causal=True)                                  # [B, S / N, H, D], differentiable

    Args:
        group: a process group of torch.distributed (NCCL, gloo), None for all processes, or a device mesh: with one
            dimension its group; with two, (ring, heads), ranks along the second divide the heads.
        layout: "zig_zag" (causal areas are equal), "contiguous" (narrow windows), "planned" (packed batches: areas and
            rows are equal).
        strategy: "ring", "all_to_all", "mesh", "all_gather", or "auto": for each problem the one with the shortest
            predicted time.
        head_ranks: for "mesh", how many ranks divide the heads; 0: chosen by the model.
        model: the model's constants: link_gbps, network_gbps, ranks_per_host, tflops_forward, tflops_backward, as in
            `tessera plan --ranks`; and chunk_rows of planned layouts.

    Raises:
        tessera.Error: (a ValueError) a name or number is wrong.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise Error(
            "group: torch.distributed is not initialised, accepted a process group of it: call init_process_group"
        )
    if hasattr(group, "mesh_dim_names"):  # a DeviceMesh; importing its module takes long
        if group.ndim > 2:
            raise Error(f"group: a device mesh of {group.ndim} dimensions, accepted one or two")
        if group.ndim == 2:
            head_ranks = head_ranks or group.size(1)
            group = group._flatten()
        group = group.get_group()
    return ContextParallel(group or dist.group.WORLD, layout, strategy, head_ranks, model)
