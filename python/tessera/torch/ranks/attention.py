"""Forward and backward of one rank, which execute the steps of the schedule.

A step posts its messages, computes its pairs from the data present when it began, and waits: on a GPU the exchange runs
in its own stream, concurrently with the computation. Received data are used from the next step on. Sums are in float32,
in the order of the list, so that their bits do not depend on when a message arrives.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from tessera._ranks.calls import Call, Place, Rectangle
from tessera._ranks.schedule import Message

from .. import kernels, program_ops
from .exchange import Exchange, Tensors
from .program import Program
from .rows import Block, Gradient, Partial, put, take


class Placed(NamedTuple):
    lengths: Tuple[int, ...]
    heads: Tuple[int, int]  # query and KV heads of the whole
    mask: Dict[str, Any]
    slopes: Optional[Tensor]  # [Hq] or [B, Hq]
    entries: Optional[Tensor] = None  # the mask of entries; as bias
    bias: Optional[Tensor] = None  # [B|1, Hq|1, S|1, S], of all rows; B: the sequences of a packed batch

    def part(self, whole: Tensor, call: Call, heads: slice) -> Tensor:
        """The entries of a call on some heads."""
        pair = call.rectangles[0]
        if len(self.lengths) > 1 and whole.shape[0] > 1:
            whole = whole.narrow(0, pair.sequence, 1)
        if whole.shape[1] > 1:
            whole = whole[:, heads]
        if whole.shape[2] > 1:
            whole = whole.narrow(2, pair.q_begin, pair.q_length)
        return whole.narrow(3, pair.k_begin, pair.k_length)

    def place_of(self, pair: Rectangle) -> Place:
        length = self.lengths[pair.sequence]
        return pair.q_begin, length, pair.k_begin, length

    def options(self, call: Call, heads: slice) -> Dict[str, Any]:
        """The options of a call on some heads, in place of its own mask."""
        options = {**self.mask, "place_heads": (heads.start, self.heads[0]), "total_heads_kv": self.heads[1]}
        if call.packed:  # nothing asks which sequences these are
            options.update(call.packing(), places=call.places(self.place_of))
        else:
            first_q, total_q, first_k, total_k = self.place_of(call.rectangles[0])
            options.update(place_q=(first_q, total_q), place_k=(first_k, total_k))
            options["first_sequence"] = call.rectangles[0].sequence
        if self.slopes is not None:
            options["alibi_slopes"] = self.slopes[..., heads]
        for name, whole in (("bias", self.bias), ("mask", self.entries)):
            if whole is not None:
                options[name] = self.part(whole, call, heads)
        return options


class Setting(NamedTuple):
    """Data shared by both passes: this rank's programs, its processes, and the options of every call."""

    forward: Program
    backward: Callable[[], Program]  # made, and compared between ranks, on first use
    group: dist.ProcessGroup
    options: Dict[str, Any]
    # For scores that depend on positions: the sequences' lengths, the mask of the whole, and the options that have an
    # element for each head. None: every call has the mask of its own rows and keys.
    placed: Optional[Placed] = None
    score: Optional[program_ops.Given] = None  # the score program, without its tensors

    def with_tensors(self, bias: Optional[Tensor], captured: Sequence[Tensor]) -> Setting:
        """With the bias, and the score program with its tensors, among the options of the calls."""
        setting = self if bias is None else self._replace(placed=self.placed._replace(bias=bias))
        if self.score is None:
            return setting
        score = self.score._replace(captured=captured)
        return setting._replace(options=program_ops.with_program(self.options, score))


@functools.lru_cache(maxsize=1024)
def _constant(values: Tuple[Any, ...], device: torch.device) -> Tensor:
    """int32. Cached: a copy to a GPU would wait for the work in its stream."""
    return torch.tensor(values, dtype=torch.int32, device=device)


class _Walk:
    """The data of a rank during a pass: its own rows (or those of its group, if heads are divided), and keys of
    others."""

    def __init__(self, program: Program, setting: Setting, q: Tensor, k: Tensor, v: Tensor, gathered: bool):
        """q, k, v: this rank's rows or, with `gathered`, its group's rows of the heads that it computes."""
        self.program, self.setting = program, setting
        self.schedule = schedule = program.schedule
        self.local = schedule.chunks_of(range(schedule.rank, schedule.rank + 1))
        self.own = schedule.chunks_of(schedule.group)
        self.divided = schedule.head_ranks > 1
        self.whole = Block(schedule.chunks, self.local, (q, k, v))  # this rank's rows, all heads
        if self.divided and not gathered:
            q, k, v = (
                self.gather(x, heads)
                for x, heads in ((q, schedule.heads_q), (k, schedule.heads_kv), (v, schedule.heads_kv))
            )
        self.q = Block(schedule.chunks, self.own, (q,))
        self.keys = Block(schedule.chunks, self.own, (k, v))
        self.fetched: List[Block] = []

    def gather(self, x: Tensor, heads: slice) -> Tensor:
        """A tensor for the group's rows of the heads that this rank computes, with its own rows filled in."""
        block = Block(self.schedule.chunks, self.own, ())
        result = x.new_empty((x.shape[0], block.rows, heads.stop - heads.start, x.shape[3]))
        put(result, block.ranges(self.local), 0, x[:, :, heads], add=False)
        return result

    def in_group(self, number: int) -> bool:
        return self.schedule.chunks[number].rank in self.schedule.group

    def rows_of(self, message: Message) -> int:
        return sum(self.schedule.chunks[number].length for number in message.chunks)

    def walk(self, compute: Callable[[int, List[Tuple[Call, Block]]], None], send, buffers, deliver) -> None:
        for n, step in enumerate(self.schedule.steps):
            name = f"step {n + 1} of {len(self.schedule.steps)}"
            exchange = Exchange(self.setting.group, name, step.messages, send, buffers)
            if step.pairs:
                compute(n, [(planned.call, self.block_of(planned.keys)) for planned in self.program.steps[n]])
            exchange.wait(deliver)
            self.fetched = [b for b in self.fetched if set(b.numbers) <= set(self.program.kept[n])]

    def block_of(self, keys: Tuple[int, ...]) -> Block:
        blocks = [self.keys, *self.fetched]
        block = next((block for block in blocks if block.numbers == keys), None)
        if block is None:
            block = Block.merged(blocks, keys)
            self.fetched.append(block)
        return block

    def accumulates(self, direction: str) -> bool:
        """True if calls can add to partial results. This is asked for the first one: the others have other lengths."""
        call = next(planned.call for step in self.program.steps for planned in step)
        rows = (call.q_length, call.k_length, call.k_length)
        layouts = []
        for tensor, count in zip((*self.q.tensors, *self.keys.tensors), rows):
            shape = (*tensor.shape[:1], count, *tensor.shape[2:])
            layouts.append(kernels.layout_of(tensor).contiguous(shape[1:] if call.packed else shape))
        return kernels.accumulates(direction, *layouts, self.options_of(call))

    def part(self, call: Call, whole: Tensor) -> Tensor:
        """A call's part of a tensor of all rows and keys."""
        return self.setting.placed.part(whole, call, self.schedule.heads_q)

    def options_of(self, call: Call) -> Dict[str, Any]:
        options = dict(self.setting.options)
        placed = self.setting.placed
        of_call = call.options() if placed is None else placed.options(call, self.schedule.heads_q)
        for name, value in of_call.items():
            if isinstance(value, list):
                value = _constant(tuple(value), self.q.tensors[0].device)
            options[name] = value
        return options


def _unpacked(call: Call, *tensors: Tensor) -> Tuple[Tensor, ...]:
    """Converts to a call's layout: packed sequences have no batch."""
    return tuple(t[0] for t in tensors) if call.packed else tensors


def _rows(tensor: Tensor, first: int, count: int) -> Tensor:
    return tensor.narrow(1, first, count)


class SharedGradients:
    """The sums of the gradients of what all ranks have, the bias and a score program's tensors, over this rank's calls,
    in the calls' order: float32, or float64 of such a tensor."""

    def __init__(self, tensors: Sequence[Optional[Tensor]], wanted: Sequence[bool]):
        """tensors: the bias, or None, and then the program's."""

        def zeros(x: Tensor) -> Tensor:
            return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)

        self._dtypes = [None if x is None else x.dtype for x in tensors]
        self._sums = [zeros(x) if is_wanted else None for x, is_wanted in zip(tensors, wanted)]
        self._captured = [None if x is None else torch.empty_like(x) for x in self._sums[1:]]

    @property
    def of_bias(self) -> bool:
        return self._sums[0] is not None

    def options(self, options: Dict[str, Any]) -> Dict[str, Any]:
        """The options of a call whose gradients `add` adds."""
        wanted = any(part is not None for part in self._captured)
        return program_ops.with_gradients(options, self._captured) if wanted else options

    def add(self, part_of: Callable[[Tensor], Tensor], d_bias: Optional[Tensor]) -> None:
        """part_of: a call's part of the bias."""
        if d_bias is not None:
            part_of(self._sums[0]).add_(d_bias)
        for total, part in zip(self._sums[1:], self._captured):
            if total is not None:
                total.add_(part)

    def finished(self) -> List[Optional[Tensor]]:
        """In the tensors' dtypes."""
        return [None if x is None else x.to(dtype) for x, dtype in zip(self._sums, self._dtypes)]


def forward(
    setting: Setting, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor]
) -> Tuple[Tensor, Tensor, Tuple[Tensor, ...]]:
    """o and lse of this rank's rows, and the inputs of backward: q, k, v, o, lse, lse_low of the rows and heads that
    this rank computes."""
    walk = _Walk(setting.forward, setting, q, k, v, gathered=False)
    schedule = walk.schedule
    own_q = walk.q.tensors[0]
    last_pairs = max((n for n, step in enumerate(schedule.steps) if step.pairs), default=-1)
    if last_pairs < 0:  # no rows
        return (
            q.new_empty((*q.shape[:3], v.shape[3])),
            q.new_empty((q.shape[0], q.shape[2], 0), dtype=torch.float32),
            (),
        )
    mine = None if sink is None else sink[schedule.heads_q].float()
    # If each row has all its keys in one call, the sink is added by that call; otherwise it is one more part.
    depth = setting.forward.depth
    joins = mine is not None and depth > 1
    parts = depth + joins
    adds = parts > 1 and walk.accumulates("forward")
    partial = Partial((*own_q.shape[:3], v.shape[3]), parts, q.dtype, q.device, adds)
    result: Dict[str, Tensor] = {}

    def compute(step: int, listed: List[Tuple[Call, Block]]) -> None:
        for call, block in listed:
            options = walk.options_of(call)
            if mine is not None and not joins:
                options["sink"] = mine
            keys = (_rows(t, call.k_row, call.k_length) for t in block.tensors)
            o, lse, low = partial.place(call.q_row, call.q_length)
            if partial.accumulates:
                options["accumulate"] = 1
            outputs = {"lse": lse, **({"o": o} if partial.accumulates or o.dtype == q.dtype else {})}
            if call.packed:
                outputs = {name: t[0] for name, t in outputs.items()}
            options["lse_low"] = low[0] if call.packed else low
            results = kernels.forward(
                *_unpacked(call, _rows(own_q, call.q_row, call.q_length), *keys), options, **outputs
            )
            if "o" not in outputs:
                o.copy_(results[0])
        if step == last_pairs:
            if joins:
                partial.join_sink(mine)
            result["o"], result["lse"], result["low"] = partial.finished()
            if walk.divided:
                result["all_o"] = q.new_empty((*q.shape[:3], v.shape[3]))
                result["all_lse"] = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
                for name, dim in (("o", 1), ("lse", 2)):
                    rows = take(result[name], walk.q.ranges(walk.local), slice(0, own_q.shape[2]), dim)
                    put(result[f"all_{name}"], walk.whole.ranges(walk.local), schedule.heads_q.start, rows, False, dim)

    def send(message: Message) -> Tensors:
        heads = slice(message.first_head, message.first_head + message.num_heads)
        if message.travels == "O":
            ranges, heads = walk.q.ranges(message.chunks), slice(0, own_q.shape[2])
            return take(result["o"], ranges, heads), take(result["lse"], ranges, heads, 2)
        if message.travels == "Q":
            return (take(q, walk.whole.ranges(message.chunks), heads),)
        if walk.divided and message.peer in schedule.group:
            return tuple(take(t, walk.whole.ranges(message.chunks), heads) for t in (k, v))
        ranges, heads = walk.keys.ranges(message.chunks), slice(0, message.num_heads)
        return tuple(take(t, ranges, heads) for t in walk.keys.tensors)

    def buffers(message: Message) -> Tensors:
        batch, rows, heads = q.shape[0], walk.rows_of(message), message.num_heads
        if message.travels == "O":
            lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
            return q.new_empty((batch, rows, heads, v.shape[3])), lse
        sources = (q,) if message.travels == "Q" else (k, v)
        return tuple(t.new_empty((batch, rows, heads, t.shape[3])) for t in sources)

    def deliver(message: Message, tensors: Tensors) -> None:
        if message.travels == "O":
            ranges = walk.whole.ranges(message.chunks)
            put(result["all_o"], ranges, message.first_head, tensors[0], False)
            put(result["all_lse"], ranges, message.first_head, tensors[1], False, 2)
        elif message.travels == "Q" or walk.in_group(message.chunks[0]):
            block = walk.q if message.travels == "Q" else walk.keys
            for target, value in zip(block.tensors, tensors):
                put(target, block.ranges(message.chunks), 0, value, add=False)
        else:
            walk.fetched.append(Block(schedule.chunks, message.chunks, tensors))

    walk.walk(compute, send, buffers, deliver)
    saved = (own_q, *walk.keys.tensors, result["o"], result["lse"], result["low"])
    if walk.divided:
        return result["all_o"], result["all_lse"], saved
    return result["o"], result["lse"], saved


def backward(
    setting: Setting,
    saved: Tuple[Tensor, ...],
    d_o: Tensor,
    d_lse: Optional[Tensor],
    sink: Optional[Tensor],
    shapes: Tuple[torch.Size, torch.Size, torch.Size],
    shared: SharedGradients,
) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    """The gradients of this rank's q, k, v, and its part of the gradient of the sink; `shared` receives its part of
    those of the bias and of a score program's tensors. d_o and d_lse are of this rank's rows."""
    q, k, v, o, lse, low = saved
    walk = _Walk(setting.backward(), setting, q, k, v, gathered=True)
    schedule = walk.schedule
    if walk.divided:
        walk.whole = Block(schedule.chunks, walk.local, ())
        whole_d_o, whole_d_lse = d_o, d_lse
        d_o = walk.gather(d_o, schedule.heads_q)
        if d_lse is not None:
            d_lse = walk.gather(d_lse.transpose(1, 2)[..., None], schedule.heads_q)[..., 0].transpose(1, 2)
    sum_q = Gradient(q)
    sum_keys = (Gradient(k), Gradient(v))  # of this rank's own rows
    sums: Dict[Tuple[int, ...], Tuple[Gradient, ...]] = {}  # of fetched blocks
    kept: Dict[int, Tuple[Block, Tuple[Gradient, ...]]] = {}  # by chunk
    d_q, d_k, d_v = (q.new_empty(shape) for shape in shapes) if walk.divided else (None, None, None)

    def gradients_of(block: Block) -> Tuple[Gradient, ...]:
        if block is walk.keys:
            return sum_keys
        if block.numbers not in sums:
            sums[block.numbers] = tuple(Gradient(t) for t in block.tensors)
            for number in block.numbers:
                kept[number] = (block, sums[block.numbers])
        return sums[block.numbers]

    adds = any(walk.program.steps) and walk.accumulates("backward")

    def compute(step: int, listed: List[Tuple[Call, Block]]) -> None:
        for call, block in listed:

            def rows(t: Tensor) -> Tensor:
                return _rows(t, call.q_row, call.q_length)

            of_lse = [
                None if t is None else t[:, :, call.q_row : call.q_row + call.q_length].contiguous()
                for t in (d_lse, lse, low)
            ]
            keys = [_rows(t, call.k_row, call.k_length) for t in block.tensors]
            arguments = [rows(d_o), of_lse[0], rows(q), *keys, rows(o), of_lse[1], of_lse[2]]
            if call.packed:
                arguments = [None if t is None else t[0] for t in arguments]
            options = shared.options({**walk.options_of(call), "lse_low": arguments.pop()})
            part_of = functools.partial(walk.part, call)
            if adds:
                targets = [sum_q.rows(call.q_row, call.q_length)]
                targets += [gradient.rows(call.k_row, call.k_length) for gradient in gradients_of(block)]
                d_q_rows, d_k_rows, d_v_rows = (t[0] for t in targets) if call.packed else targets
                options["accumulate"] = 1
                sums_of_call = (d_q_rows, d_k_rows, d_v_rows)
                found = kernels.backward(*arguments, shared.of_bias, False, options, sums=sums_of_call)
                shared.add(part_of, found[3])
                continue
            *parts, d_bias, _ = kernels.backward(*arguments, shared.of_bias, False, options)
            shared.add(part_of, d_bias)
            if call.packed:
                parts = [t[None] for t in parts]
            sum_q.add(call.q_row, parts[0])
            for gradient, part in zip(gradients_of(block), parts[1:]):
                gradient.add(call.k_row, part)
        for block in {id(block): block for _, block in listed}.values():
            mine = [number for number in block.numbers if number in walk.own]
            if block is not walk.keys and mine:  # keys of several ranks, including its own
                for gradient, of_all in zip(sum_keys, sums[block.numbers]):
                    part = take(of_all.total(), block.ranges(mine), slice(0, of_all.total().shape[2]))
                    put(gradient.total(), walk.keys.ranges(mine), 0, part, add=True)

    def send(message: Message) -> Tensors:
        heads = slice(message.first_head, message.first_head + message.num_heads)
        all_heads = slice(0, message.num_heads)
        if message.travels == "dO":
            ranges = walk.whole.ranges(message.chunks)
            tensors = (take(whole_d_o, ranges, heads),)
            return tensors if d_lse is None else (*tensors, take(whole_d_lse, ranges, heads, 2))
        if message.travels == "K, V":
            return tuple(take(t, walk.keys.ranges(message.chunks), all_heads) for t in walk.keys.tensors)
        if message.travels == "dQ":
            return (take(sum_q.total(), walk.q.ranges(message.chunks), all_heads).to(q.dtype),)
        if walk.in_group(message.chunks[0]):
            parts = tuple(take(g.total(), walk.keys.ranges(message.chunks), all_heads) for g in sum_keys)
            return parts if message.partial else tuple(t.to(k.dtype) for t in parts)
        block, gradients = kept[message.chunks[0]]
        tensors = tuple(take(g.total(), block.ranges(message.chunks), all_heads) for g in gradients)
        for number in message.chunks:
            kept.pop(number)
        return tensors

    def buffers(message: Message) -> Tensors:
        batch, rows, heads = q.shape[0], walk.rows_of(message), message.num_heads
        dtype = torch.float32 if message.partial else q.dtype
        if message.travels == "dO":
            tensors = (q.new_empty((batch, rows, heads, v.shape[3])),)
            return tensors if d_lse is None else (*tensors, lse.new_empty((batch, heads, rows)))
        sources = (q,) if message.travels == "dQ" else (k, v)
        return tuple(t.new_empty((batch, rows, heads, t.shape[3]), dtype=dtype) for t in sources)

    def deliver(message: Message, tensors: Tensors) -> None:
        if message.travels == "dO":
            put(d_o, walk.q.ranges(message.chunks), 0, tensors[0], add=False)
            if d_lse is not None:
                put(d_lse, walk.q.ranges(message.chunks), 0, tensors[1], add=False, dim=2)
        elif message.travels == "K, V":
            walk.fetched.append(Block(schedule.chunks, message.chunks, tensors))
        elif message.travels == "dQ":
            put(d_q, walk.whole.ranges(message.chunks), message.first_head, tensors[0], add=False)
        elif walk.divided and message.peer in schedule.group:
            received.append((message, tensors))
        else:
            for gradient, value in zip(sum_keys, tensors):
                put(gradient.total(), walk.keys.ranges(message.chunks), 0, value, add=True)

    received: List[Tuple[Message, Tensors]] = []
    walk.walk(compute, send, buffers, deliver)
    d_sink = None
    if sink is not None:
        d_sink = torch.zeros_like(sink, dtype=torch.float32)
        delta = (d_o.float() * o.float()).sum(-1).transpose(1, 2)
        d_lse_minus_delta = -delta if d_lse is None else d_lse - delta
        weight = torch.exp(sink.float()[schedule.heads_q][None, :, None] - lse - low)
        weight = torch.where(lse == -torch.inf, 0.0, weight)  # rows that see no key
        d_sink[schedule.heads_q] = (weight * d_lse_minus_delta).sum((0, 2))
    if not walk.divided:
        return sum_q.total().to(q.dtype), *(g.total().to(k.dtype) for g in sum_keys), d_sink
    return _own_heads(walk, sum_q, sum_keys, received, (d_q, d_k, d_v)) + (d_sink,)


def _own_heads(walk: _Walk, sum_q, sum_keys, received, outputs) -> Tuple[Tensor, Tensor, Tensor]:
    """If heads are divided: joins this rank's own rows of the heads that it computed with those received."""
    schedule = walk.schedule
    d_q, d_k, d_v = outputs
    ranges, whole = walk.q.ranges(walk.local), walk.whole.ranges(walk.local)
    heads = slice(0, schedule.heads_q.stop - schedule.heads_q.start)
    put(d_q, whole, schedule.heads_q.start, take(sum_q.total(), ranges, heads), add=False)
    heads = slice(0, schedule.heads_kv.stop - schedule.heads_kv.start)
    mine = tuple(take(g.total(), ranges, heads) for g in sum_keys)
    parts = [(schedule.rank, schedule.heads_kv.start, whole, mine)]
    parts += [(m.peer, m.first_head, walk.whole.ranges(m.chunks), tensors) for m, tensors in received]
    # If there are fewer KV heads than ranks, several ranks read one KV head; their sums are added in float32, in the
    # order of the ranks.
    partial = any(message.partial for message, _ in received)
    totals = tuple(torch.zeros_like(d, dtype=torch.float32) for d in (d_k, d_v)) if partial else (d_k, d_v)
    for _, first_head, rows, tensors in sorted(parts, key=lambda part: part[0]):
        for total, value in zip(totals, tensors):
            put(total, rows, first_head, value, add=partial)
    return d_q, *(total.to(d_k.dtype) for total in totals)
