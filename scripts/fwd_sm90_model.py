"""Which tiles fit fwd_sm90's budgets, and their approximate speed: the part of the search without compiler and GPU.

The program tessera_tiles reports which fields a tile varies, which values are in range and which fit shared memory,
from the constexpr functions by which the library plans and the kernel is laid out. VALUES lists the values tried for
each field.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import tile_search

# ---- data from the library ----


def library() -> dict:
    return tile_search.tables()["fwd_sm90"]


@lru_cache
def tuned_fields() -> tuple[str, ...]:
    """The fields that a row of the table varies, in order."""
    fields = tuple(library()["fields"])
    unknown = [name for name in fields if name not in VALUES]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: a field of Sm90Tile that VALUES has no values for")
    return fields


def config_fields() -> tuple[str, ...]:
    """The fields of FwdSm90Config, in order."""
    return tuple(library()["config_fields"])


def widths() -> tuple[int, ...]:
    """The widths N of the wgmma wrappers."""
    return tuple(library()["wgmma_widths"])


@dataclass(frozen=True)
class Layout:
    in_range: bool  # also for rings deep enough for consumers that see different keys
    output_chunks: int  # chunks of O that are staged: as many as fit, at least one
    smem_bytes: int


@lru_cache
def _layouts(head_dim: int, head_dim_v: int) -> dict[tuple[int, ...], Layout]:
    """For all tiles made of VALUES."""
    tiles = list(itertools.product(*(VALUES[name] for name in tuned_fields())))
    asked = "".join(f"{head_dim} {head_dim_v} {' '.join(map(str, tile))}\n" for tile in tiles)
    answers = (map(int, line.split()) for line in tile_search.ask("--fits", text=asked).splitlines())
    return {tile: Layout(bool(fits), chunks, size) for tile, (fits, chunks, size) in zip(tiles, answers, strict=True)}


def layout(shape: Shape, tile: Tile) -> Layout:
    return _layouts(shape.head_dim, shape.head_dim_v)[tile.values]


# ---- the machine ----

REGISTERS = {2: 232, 3: 160, 4: 112}  # per thread of a consumer
# Registers for addresses, loop and softmax beside S, P and O. This only drops hopeless tiles; the compiler decides.
SPARE_REGISTERS = {2: 36, 3: 28, 4: 28}
CONSUMER_ROWS = 64

# Per clock and multiprocessor.
TENSOR_FLOP = 4096
EXPONENTIALS = 16
FLOAT_OPS = 128
SMEM_READ_BYTES = 128
# The rest was fitted to 43 cells measured on an H200 (D 64, 128, 256), with an error of 7 % RMS. This ranks tiles and
# promises no speed.
L2_BYTES = 38
SHARE_OF_THE_REST = 0.16  # overlap is not perfect, and all units share one power budget
OPS_A_SCORE = 3
OPS_A_MASKED_SCORE = 8
TURN_CLOCKS = 250  # for the barriers of a tile
LOAD_CLOCKS = 400  # latency of loading a tile
STORE_CLOCKS = 2500  # an epilogue for 128 x 128 outputs
LAUNCH_CLOCKS = 12000
CLOCK_HZ = 1.79e9

VALUES = {
    "block_n": range(48, 257, 16),
    "consumers": (2, 3, 4),
    "k_stages": range(1, 7),
    "v_stages": range(1, 7),
    "q_stages": range(2, 9),  # tiles of 64 queries
    "cluster": (1, 2),  # blocks
}


# ---- cases and tiles ----

# Visible keys: a form, and the table's name for it; "options" is all keys with scores changed one by one.
AREAS = {"full": "kFull", "causal": "kCausal", "window": "kPartial", "options": "kOptions"}
CALL_KEYS = 32  # keys covered by a call of Philox; with dropout a tile needs a multiple of it


@dataclass(frozen=True)
class Shape:
    """Head sizes and the form of the visible area: the key of a row of the table, without the length.

    The length is that of a sequence or, with a window, the number of keys that a query sees.
    """

    head_dim: int
    head_dim_v: int
    area: str  # of AREAS

    @property
    def heads(self) -> int:
        """About 2048 columns per token; the published number where that is not a whole number of heads."""
        return {96: 20, 192: 10 if self.head_dim_v == 192 else 16}.get(self.head_dim, 2048 // self.head_dim)

    @property
    def name(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"({self.head_dim}, {self.head_dim_v})"
        return f"D {dims} {self.area}"

    def batch(self, length: int, tokens: int) -> tuple[int, int]:
        """The number of sequences, and the tokens of each."""
        return (1, tokens) if self.area == "window" else (max(1, tokens // length), length)

    def visible(self, length: int, tokens: int) -> float:
        """Pairs of a query and a visible key of one head; causal counts as half."""
        batch, rows = self.batch(length, tokens)
        keys = {"full": rows, "causal": rows / 2, "window": min(length, rows), "options": rows}
        return batch * rows * keys[self.area]


@dataclass(frozen=True)
class Tile:
    values: tuple[int, ...]  # in the order of tuned_fields()

    def __getattr__(self, name: str) -> int:
        fields = tuned_fields()
        if name in fields:
            return self.values[fields.index(name)]
        raise AttributeError(name)

    @property
    def block_m(self) -> int:
        return CONSUMER_ROWS * self.consumers

    @property
    def kind(self) -> tuple[int, ...]:
        """Everything but its stages."""
        return self.block_n, self.consumers, self.cluster

    @property
    def text(self) -> str:
        """The value of TESSERA_FWD_SM90_TILE."""
        return ",".join(map(str, self.values))


def output_width(shape: Shape) -> int:
    return min(w for w in widths() if w >= max(shape.head_dim_v, 64))  # columns of O come in chunks of 64


def accumulator_registers(shape: Shape, tile: Tile) -> int:
    """S and O in float32 and, if P does not replace S, P in pairs of 16 bits, over 128 threads of 64 rows."""
    weights = tile.block_n // 4 if tile.consumers < 4 else 0
    return tile.block_n // 2 + output_width(shape) // 2 + weights


def fits(shape: Shape, tile: Tile) -> bool:
    if shape.area != "full" and tile.cluster > 1:  # its blocks would not see the same keys
        return False
    if shape.area == "options" and tile.block_n % CALL_KEYS != 0:
        return False
    registers = accumulator_registers(shape, tile) + SPARE_REGISTERS[tile.consumers]
    if registers > REGISTERS[tile.consumers] or tile.block_n not in widths():
        return False
    at = layout(shape, tile)
    return at.in_range and at.smem_bytes <= library()["smem_limit_bytes"]


def taken_by(shape: Shape, tile: Tile) -> Tile:
    """The tile that the library makes of a row: clusters only if all queries see all keys."""
    single = shape.area != "full"
    return Tile(tuple(1 if single and name == "cluster" else getattr(tile, name) for name in tuned_fields()))


def enumerate_tiles(shape: Shape) -> list[Tile]:
    """All tiles that fit, except those dominated by another tile with at least as many stages everywhere."""
    fields = tuned_fields()
    tiles = [Tile(values) for values in itertools.product(*(VALUES[name] for name in fields))]
    groups: dict[tuple, list[Tile]] = {}
    for tile in tiles:
        if fits(shape, tile):
            groups.setdefault(tile.kind, []).append(tile)

    def better(a: Tile, b: Tile) -> bool:
        return a != b and all(x >= y for x, y in zip(a.values, b.values))

    return [t for group in groups.values() for t in group if not any(better(other, t) for other in group)]


# ---- the model ----


def _tile_clocks(shape: Shape, tile: Tile) -> float:
    """Clocks of one tile of keys for all consumers of a block, in the steady state."""
    m, n, d, dv = tile.block_m, tile.block_n, shape.head_dim, output_width(shape)
    tensor = 2 * m * n * (d + dv) / TENSOR_FLOP
    # A consumer reads its Q and all of K and V; TMA writes K and V once.
    read = tile.consumers * 2 * (CONSUMER_ROWS * d + n * d + n * dv)
    copied = 2 * n * (d + dv)
    units = [
        tensor,
        m * n / EXPONENTIALS + OPS_A_SCORE * m * n / FLOAT_OPS,
        (read + copied) / SMEM_READ_BYTES,
        copied / tile.cluster / L2_BYTES,
    ]
    busiest = max(units)
    # K is held until the softmax of its tile has been checked, V until the product after that: one tile of each is
    # always in use, and the other tiles in flight must cover the latency of L2.
    ahead = min(tile.k_stages - 1, tile.v_stages - 1) * busiest * 0.8
    stall = max(0.0, LOAD_CLOCKS - ahead) * 0.5
    return busiest + SHARE_OF_THE_REST * (sum(units) - busiest) + TURN_CLOCKS + stall


def _work_clocks(shape: Shape, tile: Tile, keys: int, masked: int) -> float:
    """Clocks of a tile of queries that sees `keys` tiles of keys, `masked` of them partially."""
    m, n = tile.block_m, tile.block_n
    of_scores = m * n / EXPONENTIALS + OPS_A_MASKED_SCORE * m * n / FLOAT_OPS
    # If no tile of Q is spare, the block waits for the first loads.
    start = of_scores / tile.consumers + LOAD_CLOCKS * (1.0 if tile.q_stages == tile.consumers else 0.25)
    store = STORE_CLOCKS * m * shape.head_dim_v / (128 * 128)
    return start + keys * _tile_clocks(shape, tile) + masked * OPS_A_MASKED_SCORE * m * n / FLOAT_OPS + store


def predict_seconds(shape: Shape, tile: Tile, length: int, tokens: int, multiprocessors: int) -> float:
    """Forward, Sq = Sk: the work tiles of a persistent grid, which ends when its slowest block does."""
    batch, rows = shape.batch(length, tokens)
    clocks = []
    for rows_end in range(tile.block_m, rows + tile.block_m, tile.block_m):
        # With a causal mask, the keys of a block; with a window, those of a consumer, which skips the others'.
        seen = {"causal": rows_end, "window": min(rows_end, length + CONSUMER_ROWS)}.get(shape.area, rows)
        edges = {"causal": tile.block_m, "window": 2 * CONSUMER_ROWS}.get(shape.area, 0)
        keys = -(-min(seen, rows) // tile.block_n)
        masked = -(-edges // tile.block_n) if edges else int(rows % tile.block_n != 0)
        clocks.append(_work_clocks(shape, tile, keys, min(masked, keys)))
    # Longest first, in alternating directions: approximately the orders of the kernel.
    ordered = sorted(clocks * (batch * shape.heads), reverse=True)
    loads = [0.0] * multiprocessors
    for index, clock in enumerate(ordered):
        lap, block = divmod(index, multiprocessors)
        loads[multiprocessors - 1 - block if lap % 2 else block] += clock
    return (max(loads) + LAUNCH_CLOCKS) / CLOCK_HZ


def predict_rates(shape: Shape, tile: Tile, lengths: list[int], tokens: int, multiprocessors: int) -> list[float]:
    """TFLOP/s for `tokens` tokens in all."""
    rates = []
    for length in lengths:
        flops = 2.0 * shape.heads * shape.visible(length, tokens) * (shape.head_dim + shape.head_dim_v)
        rates.append(flops / predict_seconds(shape, tile, length, tokens, multiprocessors) * 1e-12)
    return rates


def best(
    shape: Shape, lengths: list[int], tokens: int, multiprocessors: int, count: int
) -> list[tuple[Tile, list[float]]]:
    """The `count` most promising tiles and their TFLOP/s at the lengths.

    Alternates between the best tiles of each length. Of tiles that differ only in their stages at most two are kept, so
    that the model's blind spots do not decide.
    """
    rates = {tile: predict_rates(shape, tile, lengths, tokens, multiprocessors) for tile in enumerate_tiles(shape)}
    ranked = [sorted(rates, key=lambda tile: -rates[tile][index]) for index in range(len(lengths))]
    chosen: dict[Tile, list[float]] = {}
    for tile in itertools.chain.from_iterable(zip(*ranked)):
        alike = sum(tile.kind == t.kind for t in chosen)
        if tile not in chosen and alike < 2 and len(chosen) < count:
            chosen[tile] = rates[tile]
    return list(chosen.items())
