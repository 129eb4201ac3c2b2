"""scripts/search_bwd_sm90.py, as far as it runs without a compiler and a GPU, with the library's data from
tessera_tiles."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import search_bwd_sm90 as search  # noqa: E402

BEFORE = search.TABLE.read_text(encoding="utf-8")


def test_the_table_s_rows_are_among_what_fits():
    rows, candidates = search.tiles_of("rows"), search.tiles_of("candidates")
    assert list(rows) == list(search.read_rows(BEFORE)) == list(candidates)
    for row, (tile,) in rows.items():
        assert tile in candidates[row], row.name
        assert len(set(candidates[row])) == len(candidates[row])


def test_the_program_s_table_is_the_file_s():
    for row, lines in search.read_rows(BEFORE).items():
        (tile,) = search.tiles_of("rows")[row]
        assert lines[-1] == f"{{{row.head_dim}, {str(row.options).lower()}, {tile.cpp}}},"


def test_options_have_64_queries_and_a_head_size_of_128_two_stages():
    for row, tiles in search.tiles_of("candidates").items():
        for tile in tiles:
            block_m, stages, _, _ = tile.values
            assert block_m == 64 or not row.options
            # 16 KiB for each of Q, dO and dS of a stage, beside K, V and two tiles of dQ.
            assert stages == 2 or row.head_dim == 64


def test_a_config_names_every_field():
    for row, (tile,) in search.tiles_of("rows").items():
        text = search.config_text(row, tile, search.tile_search.BFLOAT16)
        assert all(f".{name} = " in text for name in search.library()["config_fields"])


def measured(row, rates):
    """{(causal, length): {tile: rate}} of two tiles, and cuDNN at 400."""
    tiles = search.tiles_of("candidates")[row][:2]
    cells = [(causal, length) for causal in row.masks for length in search.LENGTHS]
    return tiles, {cell: {**dict(zip(tiles, pair)), "cudnn": 400.0} for cell, pair in zip(cells, rates)}


def test_a_row_has_the_tile_with_the_best_geometric_mean():
    row = search.Row(128, False)
    (_, best), cells = measured(row, [(300, 200), (300, 320), (300, 340), (200, 300), (300, 310), (300, 320)])
    text = search.table_text(BEFORE, {row: cells}, "a GPU, today")
    assert search.read_rows(text)[row] == [
        "// a GPU, today",
        "// full 512: 200 (0.50), 2048: 320 (0.80), 8192: 340 (0.85); causal 512: 300 (0.75), 2048: 310 (0.78), 8192: "
        "320 (0.80)",
        f"{{128, false, {best.cpp}}},",
    ]
    others = search.read_rows(BEFORE) | {row: search.read_rows(text)[row]}
    assert search.read_rows(text) == others


def test_a_tile_that_is_wrong_anywhere_does_not_win():
    row = search.Row(96, True)
    (right, best), cells = measured(row, [(300, 400), (300, 400), (300, 400)])
    del cells[False, search.LENGTHS[0]][best]
    assert search.winner(cells) == right


def test_what_was_not_measured_stays():
    assert search.table_text(BEFORE, {}, "") == BEFORE
