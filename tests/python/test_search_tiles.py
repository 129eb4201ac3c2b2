"""scripts/search_fwd_sm90.py, as far as it runs without a compiler and a GPU, with the library's data from
tessera_tiles."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import fwd_sm90_model as model  # noqa: E402
import fwd_sm90_ptxas as ptxas  # noqa: E402
import search_fwd_sm90 as search  # noqa: E402
import tile_search  # noqa: E402

SHAPES = [model.Shape(*dims, area) for dims in search.HEAD_DIMS for area in model.AREAS]


def test_the_table_s_rows_are_among_what_fits():
    table = search.table_tiles()
    assert set(table) == set(SHAPES)
    for shape, tiles in table.items():
        for tile in tiles:
            assert len(tile.values) == len(model.tuned_fields())
            assert model.fits(shape, tile), (shape.name, tile.text)


def test_the_program_s_table_is_the_file_s():
    rows = [line for lines in search.read_rows(search.TABLE.read_text(encoding="utf-8")).values() for line in lines]
    values = [[int(value) for value in line.strip("{},").split(",")[4:]] for line in rows if line.startswith("{")]
    assert values == [[row[name] for name in model.tuned_fields()] for row in model.library()["rows"]]


def test_shared_memory_is_counted_to_the_byte():
    values = {"block_n": 128, "consumers": 2, "k_stages": 2, "v_stages": 2, "q_stages": 2, "cluster": 1}
    tile = model.Tile(tuple(values[name] for name in model.tuned_fields()))
    at = model.layout(model.Shape(128, 128, "full"), tile)
    # K and V: 4 blocks of 32 KiB; Q: 2 tiles of 16 KiB; O: 8 warps x 2 chunks of 2 KiB; 1 KiB for work tiles and
    # barriers.
    assert (at.in_range, at.output_chunks, at.smem_bytes) == (True, 2, 193 << 10)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_what_is_enumerated_fits_and_nothing_smaller_stands_beside_it(shape):
    tiles = model.enumerate_tiles(shape)
    assert tiles and all(model.fits(shape, tile) for tile in tiles)
    for tile in tiles:
        for other in tiles:
            assert tile == other or tile.kind != other.kind or any(x < y for x, y in zip(tile.values, other.values))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_predictions_are_below_the_peak_and_grow_with_the_length(shape):
    peak = 132 * model.TENSOR_FLOP * model.CLOCK_HZ * 1e-12
    for tile, rates in model.best(shape, search.lengths_of(shape, True), search.TOKENS, 132, search.COMPILED):
        assert 0 < rates[0] < rates[-1] < peak, tile.text


def test_a_config_names_every_field():
    shape, tile = SHAPES[0], model.enumerate_tiles(SHAPES[0])[0]
    text = ptxas.config_text(shape, tile)
    assert all(f".{name} = " in text for name in model.config_fields())
    assert set(model.tuned_fields()) <= set(model.config_fields())


def measured(shape, rates):
    """{length: {tile: rate}} of two tiles, and cuDNN at 400."""
    tiles = model.enumerate_tiles(shape)[:2]
    return tiles, {
        n: {**dict(zip(tiles, row)), "cudnn": 400.0} for n, row in zip(search.lengths_of(shape, False), rates)
    }


def test_rows_are_as_few_as_the_measurements_allow():
    shape = model.Shape(128, 128, "causal")
    rates = [(300, 250), (350, 330), (400, 399), (450, 470), (480, 520), (500, 560)]
    (short, long), cells = measured(shape, rates)
    lines = search.rows_of(shape, cells)
    values = [", ".join(map(str, tile.values)) for tile in (long, short)]
    assert lines == [
        "// 2048: 399 (1.00), 4096: 470 (1.18), 8192: 520 (1.30), 16384: 560 (1.40)",
        f"{{128, 128, Area::kCausal, 2048, {values[0]}}},",
        "// 512: 300 (0.75), 1024: 350 (0.88)",
        f"{{128, 128, Area::kCausal, 0, {values[1]}}},",
    ]


def test_shapes_that_were_not_measured_keep_their_rows():
    before = search.TABLE.read_text(encoding="utf-8")
    assert search.table_text(before, {}, "") == before
    shape = model.Shape(128, 128, "window")
    _, cells = measured(shape, [(300, 250)] * 3)
    old, new = (search.read_rows(text) for text in (before, search.table_text(before, {shape: cells}, "a GPU, today")))
    assert new[shape][0] == "// a GPU, today" and len(new[shape]) == 3
    assert old | {shape: new[shape]} == new


def test_ptxas_words_decide():
    log = "Function properties\n  0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\nUsed 168 registers\n"
    assert tile_search.read_log(log, 0).reason(400) == "" and tile_search.read_log(log, 0).spill_bytes == 20
    assert tile_search.read_log(log, 0).reason(10) == "spills"
    for words in tile_search.LOSSES:
        assert tile_search.read_log(f"{log}(C7510) {words} due to it", 0).reason(400) == words
    assert "error: no" in tile_search.read_log("x.cu(3): error: no such thing", 6).reason(400)
