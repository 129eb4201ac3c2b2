"""tessera.torch.context_parallel: one batch on 1 to 8 processes, with gloo, against float64 and against one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no torch.distributed with gloo", allow_module_level=True)

from tessera._ranks.calls import Rectangle, calls  # noqa: E402
from tessera._ranks.schedule import schedule  # noqa: E402
from tessera.torch import kernels  # noqa: E402
from tessera.torch.ranks.attention import Placed  # noqa: E402
from tessera.torch.ranks.program import program  # noqa: E402
from tessera.torch.ranks.rows import Block, Partial  # noqa: E402

WORKER = Path(__file__).with_name("ranks_worker.py")
CASES = "dense,few_kv_heads,sinks,packed,positional,programs,repeated,flat_error"
LAUNCHES = {
    1: "dense,packed",
    2: f"{CASES},small_model,refused,disagreement",
    4: f"{CASES},in_models,disagreement",
    8: "few_kv_heads,packed,flat_error",
    3: "lost_peer",
}


def launch(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(WORKER), *arguments], env=environment, capture_output=True, text=True, timeout=500
    )


@pytest.fixture(scope="module")
def launched():
    """One program for all numbers of ranks, since importing PyTorch takes longer than most cases."""
    return launch(*(f"{ranks}:{names}" for ranks, names in LAUNCHES.items()))


@pytest.mark.parametrize("ranks", LAUNCHES)
def test_over_gloo(launched, ranks):
    assert str(ranks) in launched.stdout.split(), launched.stderr[-6000:]


def test_megatron():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    done = launch("2:megatron")
    assert done.stdout.split() == ["2"], done.stderr[-6000:]


def visible(rectangle, offset_q, offset_k, place=None):
    """(query row, key row) of a call, as a kernel computes it; with `place` in a whole."""
    first_q, total_q, first_k, total_k = place or (0, rectangle.q_length, 0, rectangle.k_length)
    assert total_q >= first_q + rectangle.q_length and total_k >= first_k + rectangle.k_length
    for i in range(rectangle.q_length):
        for j in range(rectangle.k_length):
            diagonal = i + (total_k - first_k) - (total_q - first_q)
            left, right = rectangle.window_left, rectangle.window_right
            if (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right):
                yield offset_q + rectangle.q_row + i, offset_k + rectangle.k_row + j


def seen_by(call, options):
    """The same of a call, by the options that it is given."""
    if not call.packed:
        window = (-1, 0) if options.get("causal") else options.get("window", (-1, -1))
        place = (*options["place_q"], *options["place_k"]) if "place_q" in options else None
        yield from visible(Rectangle(0, call.q_row, call.q_length, call.k_row, call.k_length, *window), 0, 0, place)
        return
    cu_q, cu_k = options["cu_seqlens_q"], options["cu_seqlens_k"]
    assert (cu_q[-1], cu_k[-1]) == (call.q_length, call.k_length)
    places = options.get("places", [None] * (len(cu_q) - 1))
    assert len(places) == len(cu_q) - 1
    for n, place in enumerate(places):
        window = (-1, 0) if options.get("causal") else options.get("window", (-1, -1))
        r = Rectangle(0, cu_q[n], cu_q[n + 1] - cu_q[n], cu_k[n], cu_k[n + 1] - cu_k[n], *window)
        assert r.q_length <= options["max_seqlen_q"] and r.k_length <= options["max_seqlen_k"]
        yield from visible(r, call.q_row, call.k_row, place)


@pytest.mark.parametrize("window", (-1, 40))
@pytest.mark.parametrize("placed", (False, True))
def test_the_last_call_that_writes_a_row_computes_it(placed, window):
    """Forward, all_gather computes each row in one call; packed calls, which write the rows between their sequences,
    are few and leave the results of earlier ones."""
    lengths = (300, 20, 500, 7, 90, 64, 200, 11, 256, 88)
    for rank in range(4):
        made = program(
            lengths, rank, True, placed, ranks=4, layout="planned", strategy="all_gather", direction="forward",
            causal=1, window_left=window, heads_q=1, heads_kv=1, head_dim=8, chunk_rows=8,
        )  # fmt: skip
        assert made.depth == 1
        found = [planned.call for step in made.steps for planned in step]
        computed = {}
        for call in found:
            for row in range(call.q_row, call.q_row + call.q_length):
                computed[row] = any(r.q_row <= row < r.q_end for r in call.rectangles)
        assert len(computed) == sum(lengths) // 4 and all(computed.values())
        assert len(found) < sum(len(call.rectangles) for call in found)


@pytest.mark.parametrize("placed", (False, True))
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("layout", ("zig_zag", "contiguous", "planned"))
def test_calls_are_the_pairs(layout, packed, placed):
    """Whatever is joined, a step's calls compute what its pairs are, once: with a mask of their own, or with that of
    the whole and places in it."""
    lengths = (13, 1, 30, 0, 20) if packed else (64,)
    fewer = False
    for window in ((-1, 0), (-1, -1), (5, 0), (3, 2)):
        of_whole = Placed(lengths, (1, 1), {"causal": True} if window == (-1, 0) else {"window": window}, None)
        for direction in ("forward", "backward"):
            for rank in range(4):
                plan = schedule(
                    lengths, rank, ranks=4, layout=layout, strategy="ring", direction=direction, heads_q=1, heads_kv=1,
                    head_dim=8, window_left=window[0], window_right=window[1], chunk_rows=2,
                )  # fmt: skip
                own = Block(plan.chunks, plan.chunks_of(range(rank, rank + 1)), ())
                for step in plan.steps:
                    keys = {n for pair in step.pairs for n in range(pair.k_chunk, pair.k_chunk + pair.k_chunks)}
                    block = own if keys <= set(own.numbers) else Block(plan.chunks, tuple(keys), ())
                    rectangles = [
                        Rectangle(
                            p.sequence, own.row(p.q_chunk, p.q_begin), p.q_length, block.row(p.k_chunk, p.k_begin),
                            p.k_length, p.window_left, p.window_right, p.q_begin, p.k_begin,
                        )
                        for p in step.pairs
                    ]  # fmt: skip
                    expected = sorted(cell for r in rectangles for cell in visible(r, 0, 0))
                    found = calls(rectangles, packed, placed)
                    given = [of_whole.options(call, slice(0, 1)) if placed else call.options() for call in found]
                    assert sorted(cell for both in zip(found, given) for cell in seen_by(*both)) == expected
                    assert len(found) <= len(rectangles)
                    fewer |= len(found) < len(rectangles)
    assert fewer or not packed


def test_a_causal_zig_zag_step_is_one_call():
    for rank in range(4):
        plan = schedule(
            (64,), rank, ranks=4, layout="zig_zag", strategy="ring", heads_q=1, heads_kv=1, head_dim=8, causal=1
        )
        own = Block(plan.chunks, plan.chunks_of(range(rank, rank + 1)), ())
        for step in plan.steps:
            keys = {n for pair in step.pairs for n in range(pair.k_chunk, pair.k_chunk + pair.k_chunks)}
            block = own if keys <= set(own.numbers) else Block(plan.chunks, tuple(keys), ())
            rectangles = [
                Rectangle(0, own.row(p.q_chunk, p.q_begin), p.q_length, block.row(p.k_chunk, p.k_begin), p.k_length,
                          p.window_left, p.window_right)
                for p in step.pairs
            ]  # fmt: skip
            assert len(calls(rectangles, False)) == 1, step


@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_calls_accumulate_where_a_plan_serves_it(direction):
    def layouts(dtype, head_dim=16):
        return [kernels.layout_of(torch.zeros(2, 8, heads, head_dim, dtype=dtype)) for heads in (4, 2, 2)]

    slopes = torch.ones(4)
    options = {"causal": True, "place_q": (8, 32), "place_k": (0, 32), "alibi_slopes": slopes, "lse_low": slopes}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert kernels.accumulates(direction, *layouts(dtype), options)
    assert not kernels.accumulates(direction, *layouts(torch.float64), options), "its sums are float64"
    assert not kernels.accumulates(direction, *layouts(torch.bfloat16, 4096), options), "no kernel serves it"


@pytest.mark.parametrize("most", (8, 3, 2))
def test_parts_merge_exactly(most, monkeypatch):
    """Where calls do not accumulate: at once, or on the way where there are more than layers. Seven parts of some rows
    each, and a sink, which the last row, that sees nothing, does not get."""
    monkeypatch.setattr(Partial, "MOST", most)
    generator = torch.Generator().manual_seed(2)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    ranges = [(0, 10), (0, 4), (4, 10), (2, 8), (0, 10), (5, 6), (1, 9)]
    parts = [(normal(2, b - a, 3, 4), 3 * normal(2, 3, b - a)) for a, b in ranges]
    sink = normal(3)
    partial = Partial((2, 11, 3, 4), 7, torch.float32, torch.device("cpu"), accumulates=False)
    for (a, b), (o, lse) in zip(ranges, parts):
        o_there, lse_there, low_there = partial.place(a, b - a)
        low_there.zero_()
        o_there.copy_(o)
        lse_there.copy_(lse)
    partial.join_sink(sink)
    o, lse, _ = partial.finished()
    assert (lse[..., 10] == -torch.inf).all() and (o[:, 10] == 0).all()
    o, lse = o[:, :10], lse[..., :10]
    weights = torch.full((8, 2, 3, 10), -torch.inf, dtype=torch.float64)
    values = torch.zeros(8, 2, 10, 3, 4, dtype=torch.float64)
    for n, ((a, b), (part, part_lse)) in enumerate(zip(ranges, parts)):
        weights[n, :, :, a:b], values[n, :, a:b] = part_lse, part
    weights[7] = sink[None, :, None]
    exact = torch.logsumexp(weights, 0)
    mixed = (torch.exp(weights - exact).transpose(2, 3)[..., None] * values).sum(0)
    assert (lse - exact).abs().max() < 2e-6 and (o - mixed).abs().max() < 2e-6
