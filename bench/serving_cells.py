"""The cells of bench/cuda_serving.py and their targets: plain data, without a GPU."""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

KERNELS = ("auto", "decode_sm90", "fwd_sm90")
DENSE = 0  # a layout; otherwise the keys of a page
PAGES = (16, 64, 544, 1)
MIB = 1 << 20
PEERS = (  # one query a sequence: B x Sk of the peers' table, and shorter
    (1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 65536), (8, 8192), (16, 4096), (64, 2048), (64, 8192), (1, 524288)
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    case: str
    heads: int
    heads_kv: int
    batch: int
    keys: int  # of the longest sequence
    dim: int = 128
    layouts: tuple[int, ...] = (DENSE,)
    lengths: tuple[int, ...] = ()  # of each sequence, if they differ
    invariant: bool = False  # batch_invariant, too
    queries: int = 1
    chunks: tuple[int, int, int] = (0, 0, 0)  # mixed: how many beside the tokens, tokens of each, keys of each
    prefix: int = 0  # keys that all sequences have in common
    kernels: tuple[str, ...] = ("decode_sm90",)

    @property
    def bytes(self) -> int:
        """Bytes of K and V in use; append: of the new q, k and v, which are read and written."""
        if self.case == "append":
            return 2 * self.batch * self.queries * (self.heads + 2 * self.heads_kv) * self.dim
        keys = sum(self.lengths) if self.lengths else self.batch * self.keys
        return 4 * (keys + self.chunks[0] * self.chunks[2]) * self.heads_kv * self.dim

    def tflop(self, seconds: float) -> float:
        """TFLOP/s, causal at the bottom right, of equal lengths."""
        pairs = self.queries * self.keys - self.queries * (self.queries - 1) / 2
        return 4e-12 * self.batch * self.heads * self.dim * pairs / seconds

    @property
    def name(self) -> str:
        text = f"{self.case} {self.heads}/{self.heads_kv} {self.batch} x {self.keys}"
        if self.dim != 128:
            text += f" D {self.dim}"
        if self.queries > 1:
            text += f", {self.queries} queries"
        if self.prefix:
            text += f", {self.prefix} in common"
        if self.chunks[0]:
            text += f" + {self.chunks[0]} x {self.chunks[1]} of {self.chunks[2]}"
        return text


def log_normal(count: int, median: int, longest: int, seed: int = 5) -> tuple[int, ...]:
    """Random lengths; the longest is `longest`."""
    draw = random.Random(seed)
    lengths = [min(longest, max(1, round(draw.lognormvariate(math.log(median), 1.0)))) for _ in range(count)]
    lengths[lengths.index(max(lengths))] = longest
    return tuple(lengths)


def _decode() -> list[Cell]:
    shapes = [(heads, *shape) for heads in ((32, 8), (64, 8), (32, 32)) for shape in PEERS]
    return [
        Cell("decode", *heads, batch, keys, layouts=(DENSE, *PAGES), invariant=True) for heads, batch, keys in shapes
    ]


def _dims() -> list[Cell]:
    shapes = ((64, 64, 8192), (64, 16, 32768), (256, 8, 8192), (256, 16, 8192), (256, 1, 65536))
    return [Cell("dims", 32, 8, batch, keys, dim=dim, layouts=(DENSE, 16)) for dim, batch, keys in shapes]


def _lengths() -> list[Cell]:
    lengths = log_normal(64, 4096, 65536)
    return [Cell("lengths", 32, kv, 64, max(lengths), layouts=(16, 64, 256), lengths=lengths) for kv in (8, 32)]


def _mixed() -> list[Cell]:
    steps = (
        (16, 4096, (1, 512, 4096)), (64, 8192, (1, 512, 8192)), (64, 2048, (4, 256, 2048)), (16, 1024, (1, 32, 1024)),
        (128, 1024, (2, 1024, 8192)), (16, 4096, (1, 16, 4096)), (16, 4096, (8, 16, 4096)), (64, 2048, (1, 63, 8192)),
        (64, 2048, (8, 12, 2048)), (16, 32768, (1, 48, 32768)), (4, 65536, (1, 32, 65536)),
    )  # fmt: skip
    kernels = ("fwd_sm80", "fwd_sm90", "mixed_sm90")
    return [
        Cell("mixed", 32, 8, batch, keys, layouts=(16,), chunks=chunks, kernels=kernels)
        for batch, keys, chunks in steps
    ]


def _trees() -> list[Cell]:
    shapes, kernels = ((64, 4), (16, 8), (16, 16)), ("decode_sm90", "fwd_sm80", "fwd_sm90")
    return [
        Cell("trees", 32, 8, batch, 8192, layouts=(16,), queries=queries, kernels=kernels) for batch, queries in shapes
    ]


def _short() -> list[Cell]:
    kernels = ("decode_sm90", "fwd_sm80")
    return [
        Cell("short", *heads, batch, keys, kernels=kernels)
        for heads in ((32, 8), (32, 32))
        for batch in (1, 8, 64)
        for keys in (128, 256, 512, 1024, 2048, 4096)
    ]


def _few() -> list[Cell]:
    shapes = (
        (32, 8, 128, 1, 8192, (8, 32)), (32, 8, 128, 1, 512, (16, 32)), (32, 8, 128, 1, 1024, (16, 32)),
        (32, 8, 128, 1, 2048, (32,)),
        (32, 8, 128, 2, 8192, (32,)), (32, 8, 128, 4, 8192, (8, 16)), (32, 8, 128, 64, 2048, (8, 16, 48)),
        (32, 8, 128, 1, 131072, (8, 32)),
        (64, 8, 128, 16, 8192, (4, 8)), (8, 8, 128, 16, 8192, (24,)), (32, 8, 64, 16, 8192, (8, 16)),
        (32, 8, 256, 8, 8192, (8, 16)),
    )  # fmt: skip
    kernels = ("decode_sm90", "fwd_sm80", "fwd_sm90")
    return [
        Cell("few", heads, heads_kv, batch, keys, dim=dim, layouts=(16,), queries=queries, kernels=kernels)
        for heads, heads_kv, dim, batch, keys, some in shapes
        for queries in some
        # As many keys as a prefix leaves.
    ] + [Cell("few", *heads, 64, 256, layouts=(64,), kernels=kernels[:2]) for heads in ((32, 8), (8, 8))]


def _tokens() -> list[Cell]:
    shapes = ((64, 8, 128, 1, 8192), (64, 8, 128, 1, 131072), (64, 8, 128, 64, 2048), (8, 1, 128, 1, 8192),
              (8, 1, 128, 1, 131072), (32, 2, 256, 1, 2048), (32, 2, 256, 1, 8192),
              (32, 2, 256, 1, 131072))  # fmt: skip
    return [
        Cell("tokens", heads, heads_kv, batch, keys, dim=dim, layouts=(DENSE, 16), queries=queries, kernels=KERNELS)
        for heads, heads_kv, dim, batch, keys in shapes
        for queries in (1, 2, 4, 8, 16)
    ]


def _chunks() -> list[Cell]:
    return [
        Cell("chunks", heads, heads_kv, 1, 65536, layouts=(16,), queries=queries, kernels=("auto",))
        for heads, heads_kv in ((64, 8), (16, 2), (8, 1))
        for queries in (64, 512, 1024)
    ]


def _prefix() -> list[Cell]:
    shapes = ((32, 8, 64, 8192, 256), (8, 8, 64, 8192, 256), (32, 8, 256, 2048, 256), (32, 8, 16, 32768, 512))
    return [
        Cell("prefix", heads, heads_kv, batch, prefix + own, layouts=(64,), prefix=prefix, kernels=())
        for heads, heads_kv, batch, prefix, own in shapes
    ]


def _append() -> list[Cell]:
    shapes = ((64, 1, 2048), (16, 512, 2048), (64, 512, 1024), (4, 8192, 8192))
    return [
        Cell("append", 32, 8, batch, keys, layouts=(DENSE, 16), queries=tokens, kernels=())
        for batch, tokens, keys in shapes
    ]


def _codes() -> list[Cell]:
    shapes = (
        (32, 8, 128, 16, 4096), (32, 8, 128, 64, 8192), (64, 8, 128, 64, 2048), (32, 8, 128, 1, 1024),
        (32, 8, 128, 1, 8192), (8, 1, 128, 1, 131072), (32, 8, 64, 64, 8192), (32, 2, 256, 16, 16384),
    )  # fmt: skip
    return [
        Cell("codes", heads, heads_kv, batch, keys, dim=dim, layouts=(DENSE, 16, 64), queries=queries)
        for heads, heads_kv, dim, batch, keys in shapes
        for queries in (1, 4)
    ] + [Cell("codes", 64, 8, 64, 2048, layouts=(16,), queries=16), Cell("codes", 64, 8, 64, 2048, layouts=(1,))]


CASES = {"decode": _decode, "dims": _dims, "lengths": _lengths, "mixed": _mixed, "trees": _trees, "few": _few,
         "tokens": _tokens, "chunks": _chunks, "prefix": _prefix, "append": _append, "codes": _codes,
         "short": _short}  # fmt: skip


# ---- targets ----


@dataclass
class Goal:
    text: str
    asked: str
    got: list[tuple[float, str]] = field(default_factory=list)  # a ratio and its cell, each
    least: float | None = None
    most: float | None = None
    mean: bool = False  # of all; otherwise the worst one

    def row(self) -> tuple[str, str, str, str, str]:
        if not self.got:
            return self.text, self.asked, "-", "", "not measured"
        if self.mean:
            value, where = math.exp(statistics.fmean(math.log(x) for x, _ in self.got)), f"{len(self.got)} cells"
        else:
            value, where = (min if self.least is not None else max)(self.got)
        met = value >= self.least if self.least is not None else value <= self.most
        return (
            self.text, self.asked, f"{value:.3f}" if value < 5 else f"{value:.1f}", where, "met" if met else "NOT MET",
        )  # fmt: skip


def goals(results: Iterable[dict]) -> list[Goal]:
    """results: cuda_serving.py's record of a cell, {"cell": Cell's fields, "us": {contestant: microseconds}}."""
    no_slower = Goal("decoding, cuDNN dense / Tessera, worst of all layouts", ">= 0.98", least=0.98)
    small = Goal("the same below 64 MiB, geometric mean", ">= 1.03", least=1.03, mean=True)
    large = Goal("the same from 64 MiB on, geometric mean", ">= 1.00", least=1.0, mean=True)
    at_8192 = Goal("1 x 8192, 32/8 and 64/8 (H200), us", "<= 11", most=11)
    at_1024 = Goal("1 x 1024, 32/8 and 64/8 (H200), us", "<= 7.5", most=7.5)
    ones = Goal("pages of 1 / pages of 16", "<= 1.10", most=1.1)
    dims = Goal("D 64 and 256, reading alone / Tessera", ">= 0.97", least=0.97)
    lengths = Goal("log-normal lengths, reading alone / Tessera", ">= 0.92", least=0.92)
    invariant = Goal("batch_invariant / not", "<= 1.05", most=1.05)
    mixed = Goal("mixed / (tokens alone + chunks alone)", "<= 1.05", most=1.05)
    trees = Goal("a tree / causal", "<= 1.05", most=1.05)
    prefix = Goal("a prefix of 8192 of 64 sequences, 32/8, each alone / read once", ">= 4", least=4.0)
    append = Goal("append from 64 MiB on, a copy of as many bytes / Tessera", ">= 0.85", least=0.85)
    append_one = Goal("append of a token each of 64 sequences, us", "<= 4", most=4.0)
    chosen = Goal("few queries and mixed, the plan's kernel / the fastest", "<= 1.05", most=1.05)
    one_token = Goal("one token of few or many KV heads, Tessera / cuDNN dense", "<= 1.02", most=1.02)
    several = {
        8: Goal("8 tokens / the larger of one token and their products at 500 TFLOP/s", "<= 1.15", most=1.15),
        16: Goal("16 tokens, likewise", "<= 1.35", most=1.35),
    }
    fewer = Goal("fewer tokens / more tokens", "<= 1.03", most=1.03)
    codes = Goal("one token from 256 MiB of K and V on, bfloat16 / float8_e4m3", ">= 1.75", least=1.75)
    any_codes = Goal("bfloat16 / float8_e4m3, everywhere", ">= 1.00", least=1.0)
    chunks = Goal("a chunk of 512 or 1024 queries over 65536 keys, TFLOP/s", ">= 550", least=550)
    by_tokens: dict[str, dict[int, float]] = {}  # of a shape and layout
    for result in results:
        cell, us = (
            Cell(**{key: tuple(x) if isinstance(x, list) else x for key, x in result["cell"].items()}),
            result["us"],
        )
        name = cell.name
        ours = {key: x for key, x in us.items() if key.startswith("decode_sm90") and "invariant" not in key}
        if cell.case == "tokens":
            for layout in (name for name in us if name.startswith("auto")):
                shape = name.split(", ")[0] + layout.removeprefix("auto")
                times = by_tokens.setdefault(shape, {})
                times[cell.queries] = us[layout]
                if cell.queries == 1 and "cudnn" in us:
                    one_token.got.append((us[layout] / us["cudnn"], shape))
                if cell.queries in several and 1 in times:
                    at_500 = cell.tflop(1.0) / 500 * 1e6
                    several[cell.queries].got.append((us[layout] / max(times[1], at_500), shape))
                more = [(times[less] / us[layout], f"{shape}, {less} and {cell.queries}")
                        for less in times if less < cell.queries]  # fmt: skip
                fewer.got += more
            chosen.got += [
                (us[f"auto{end}"] / min(x for key, x in us.items() if key.endswith(end) and key != "cudnn"), name + end)
                for end in (" pages of 16",)
                if f"auto{end}" in us
            ]
        elif cell.case == "codes":
            ratios = [(us[layout.split(" by ")[0]] / x, f"{name}, {layout}")
                      for layout, x in us.items() if " by " in layout]  # fmt: skip
            any_codes.got += ratios
            if cell.bytes >= 256 * MIB and cell.queries == 1:
                codes.got += ratios
        elif cell.case == "chunks":
            if cell.queries >= 512:
                chunks.got += [(cell.tflop(us[key] * 1e-6), name) for key in us if key.startswith("auto")]
        elif cell.case == "decode":
            if "cudnn" in us:
                for layout, x in ours.items():
                    ratio = us["cudnn"] / x, f"{name}{layout.removeprefix('decode_sm90')}"
                    no_slower.got.append(ratio)
                    (small if cell.bytes < 64 * MIB else large).got.append(ratio)
            if (cell.batch, cell.heads_kv) == (1, 8):
                for goal, keys in ((at_8192, 8192), (at_1024, 1024)):
                    if cell.keys == keys:
                        goal.got += [(x, f"{name}{layout.removeprefix('decode_sm90')}") for layout, x in ours.items()]
            if {"decode_sm90 pages of 1", "decode_sm90 pages of 16"} <= us.keys():
                ones.got.append((us["decode_sm90 pages of 1"] / us["decode_sm90 pages of 16"], name))
            if {"decode_sm90", "decode_sm90 invariant"} <= us.keys():
                invariant.got.append((us["decode_sm90 invariant"] / us["decode_sm90"], name))
        elif cell.case in ("dims", "lengths") and "read" in us:
            goal = dims if cell.case == "dims" else lengths
            goal.got += [(us["read"] / x, f"{name}{layout.removeprefix('decode_sm90')}") for layout, x in ours.items()]
        elif cell.case == "mixed" and {"both", "tokens alone", "chunks alone"} <= us.keys():
            mixed.got.append((us["both"] / (us["tokens alone"] + us["chunks alone"]), name))
        elif cell.case == "trees" and {"tree", "causal"} <= us.keys():
            trees.got.append((us["tree"] / us["causal"], name))
        elif cell.case == "prefix" and {"read once", "each alone"} <= us.keys():
            if (cell.heads, cell.heads_kv, cell.batch, cell.prefix) == (32, 8, 64, 8192):
                prefix.got.append((us["each alone"] / us["read once"], name))
        elif cell.case == "append":
            calls = [(x, f"{name}, {layout}") for layout, x in us.items() if layout != "copy" and " by " not in layout]
            if cell.bytes >= 64 * MIB and "copy" in us:
                append.got += [(us["copy"] / x, layout) for x, layout in calls]
            if (cell.batch, cell.queries) == (64, 1):
                append_one.got += calls
        by_plan = {"mixed": "both", "few": "causal"}.get(cell.case)
        forced = [x for key, x in us.items() if by_plan and key.startswith(f"{by_plan} by ")]
        if forced and by_plan in us:
            chosen.got.append((us[by_plan] / min(forced), name))
    return [
        no_slower, small, large, at_8192, at_1024, ones, dims, lengths, invariant, mixed, trees, prefix, append,
        append_one, chosen, one_token, *several.values(), fewer, chunks, codes, any_codes,
    ]  # fmt: skip


def table(results: Iterable[dict]) -> str:
    rows = [("goal", "asked", "got", "where", ""), *(goal.row() for goal in goals(results))]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)


def write_csv(results: Iterable[dict], path: str) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("cell", "MiB", "contestant", "us", "TB/s", "error"))
        for result in results:
            for name, us in result["us"].items():
                tb = result["bytes"] / us * 1e-6
                error = result["errors"].get(name, "")
                writer.writerow((result["name"], round(result["bytes"] / MIB), name, f"{us:.2f}", f"{tb:.3f}", error))


def fields(cell: Cell) -> dict:
    return asdict(cell)
