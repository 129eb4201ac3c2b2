"""tessera trace: each step against NumPy on the inputs that it saved, its bytes against sums by hand and the plan's
count."""

import json
import struct

import numpy as np
import pytest
from reference import Plain

LEVELS = ("registers", "shared_memory", "l2", "hbm")
MASKS = {
    "full": ((), {}),
    "causal": (("--causal",), {"causal": True}),
    "window": (("--window", 40, 9), {"window": (40, 9)}),
    "causal_window": (
        ("--causal", "--window", 24, -1, "--scale", 0.5),
        {"causal": True, "window": (24, -1), "scale": 0.5},
    ),
}
SIZES = ("--length", 150, "-D", 24, "--block-m", 32, "--block-n", 48)


def read_float64(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    kinds = {"F64": "<f8", "F32": "<f4"}
    return {
        name: np.frombuffer(data[8 + length :][slice(*entry["data_offsets"])], kinds[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in json.loads(data[8 : 8 + length]).items()
    }  # fmt: skip


def trace(folder, *arguments):
    return json.loads(folder.succeeds("trace", *arguments, "--json").out)


def visible(length, causal=False, window=(-1, -1), **_):
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    seen = np.ones((length, length), bool)
    if causal:
        seen &= j <= i
    if window[0] >= 0:
        seen &= j >= i - window[0]
    if window[1] >= 0:
        seen &= j <= i + window[1]
    return seen


@pytest.mark.parametrize("mask", MASKS)
def test_every_step_is_the_softmax_of_the_keys_so_far(folder, mask):
    flags, options = MASKS[mask]
    row, length, head_dim = 70, 150, 24
    result = trace(
        folder, *SIZES, *flags, "--row", row, "--dtype", "float64", "--entries", head_dim, "--save", "x.safetensors"
    )
    held = read_float64(folder.path / "x.safetensors")
    exact = Plain(held["q"], held["k"], held["v"], **options)
    bound = length * 2.0**-52 * np.abs(held["v"]).max()  # a rounding for each term of the longest sum

    # All rows, and the last step of the one that is watched, against the definition.
    assert np.abs(held["o"] - exact.o).max() <= bound
    assert np.abs(np.array(result["row"]["o"]) - exact.o[0, row, 0]).max() <= bound
    assert abs(result["row"]["lse"] - exact.lse[0, 0, row]) <= bound
    assert result["max_error"]["o"] <= bound
    assert result["row"]["exact_lse"] == held["lse"][0, 0, row] == np.float32(exact.lse[0, 0, row])

    steps = [step for step in result["steps"] if "row" in step]
    assert steps and all(step["tile"][0] == row // 32 for step in steps)
    scores = options.get("scale", head_dim**-0.5) * held["q"][0, row, 0] @ held["k"][0, :, 0].T
    scores[~visible(length, **options)[row]] = -np.inf
    seen = np.zeros(length, bool)
    for step in steps:
        seen[slice(*step["keys"])] = True
        s, got = np.where(seen, scores, -np.inf), step["row"]
        if np.isneginf(s).all():  # other rows of the tile see the block
            assert (got["m"], got["l"], got["lse"], got["o_norm"]) == (None, 0, None, 0)
            continue
        p = np.exp(s - s.max())
        o = p @ held["v"][0, :, 0] / p.sum()
        assert got["m"] == pytest.approx(s.max(), abs=bound) and got["l"] == pytest.approx(p.sum(), rel=bound)
        assert got["lse"] == pytest.approx(s.max() + np.log(p.sum()), abs=bound)
        assert np.abs(np.array(got["o"]) - o).max() <= bound
        assert got["o_norm"] == pytest.approx(np.linalg.norm(o), abs=bound)
        assert got["distance"] == pytest.approx(np.linalg.norm(o - exact.o[0, row, 0]), abs=bound)
    assert steps[-1]["row"]["o"] == result["row"]["o"]


@pytest.mark.parametrize("mask", MASKS)
def test_tiles(folder, mask):
    flags, options = MASKS[mask]
    result = trace(folder, *SIZES, *flags)
    seen = visible(150, **options)
    assert [tuple(step["tile"]) for step in result["steps"]] == [(i, j) for i in range(5) for j in range(4)]
    for step in result["steps"]:
        tile = seen[slice(*step["queries"]), slice(*step["keys"])]
        assert step["kind"] == ("full" if tile.all() else "partial" if tile.any() else "skipped")
        assert ("bytes" in step) == tile.any()
    for kind in ("full", "partial", "skipped"):
        assert result["tiles"][kind] == sum(step["kind"] == kind for step in result["steps"])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_totals_are_the_plans(folder, mask, dtype):
    flags = MASKS[mask][0]
    result = trace(folder, *SIZES, *flags, "--dtype", dtype)
    steps = [step["bytes"] for step in result["steps"] if "bytes" in step]
    for level in LEVELS:
        for way in ("read", "written"):
            assert sum(step[level][way] for step in steps) == result["bytes"]["tiled"][level][way], (level, way)
            parts = [result["bytes"][f"standard_{part}"][level][way] for part in ("scores", "softmax", "product")]
            assert sum(parts) == result["bytes"]["standard"][level][way]
    sizes = ("--sq", 150, "-H", 1, "-D", 24, "--dtype", dtype, "--lse")
    plan = json.loads(folder.succeeds("plan", *sizes, *flags, "--device", "cpu", "--json").out)
    for side, key in (("tiled", "bytes_moved"), ("standard", "standard_bytes")):
        assert sum(result["bytes"][side]["hbm"].values()) == plan[key] == result["plan"][key]
    assert result["plan"]["flops"] == plan["flops"]


def test_a_score_program(folder):
    length, head_dim, row = 150, 24, 97
    bias = np.random.default_rng(4).standard_normal((1, 2 * length)).astype(np.float32)
    np.save(folder.path / "bias.npy", bias)
    i, j = np.arange(length)[:, None], np.arange(length)
    seen = (i // 40 == j // 40) | (j < 3)
    result = trace(
        folder, *SIZES, "--row", row, "--dtype", "float64", "--entries", head_dim, "--save", "x.safetensors",
        "--score-mod", "c * tanh(s / c) + bias[h, i - j + 150]", "--mask-mod", "i // 40 == j // 40 || j < first",
        "--bind", "bias=bias.npy", "c=1.5", "first=3",
    )  # fmt: skip
    held = read_float64(folder.path / "x.safetensors")
    s = 1.5 * np.tanh(held["q"][0, :, 0] @ held["k"][0, :, 0].T * head_dim**-0.5 / 1.5) + bias[0, i - j + length]
    p = np.where(seen, np.exp(s), 0)
    expected = p @ held["v"][0, :, 0] / p.sum(-1, keepdims=True)
    np.testing.assert_allclose(held["o"][0, :, 0], expected, atol=1e-13)
    np.testing.assert_allclose(result["row"]["o"], expected[row], atol=1e-13)
    assert result["row"]["lse"] == pytest.approx(np.log(p[row].sum()), abs=1e-12)
    assert result["max_error"]["o"] < 1e-13
    assert result["score_mod"] == "c * tanh(s / c) + bias[h, i - j + 150]"
    assert result["mask_mod"] == "i // 40 == j // 40 || j < first"
    for step in result["steps"]:
        tile = seen[slice(*step["queries"]), slice(*step["keys"])]
        assert step["kind"] == ("full" if tile.all() else "partial" if tile.any() else "skipped")
    np.save(folder.path / "short.npy", bias[:, :9])
    refused = folder.tessera("trace", *SIZES, "--score-mod", "s + bias[h, i]", "--bind", "bias=short.npy")
    assert refused.code == 2 and "bias: index 1 of bias[h, i] is 9" in refused.err


def test_bytes_by_hand(folder):
    """4 tiles of 32 x 32 over 64 queries and keys, D = 16, bfloat16."""
    result = trace(folder, "--length", 64, "-D", 16, "--block-m", 32, "--block-n", 32)
    tile = 32 * 16 * 2  # of Q, K or V
    state = 32 * (16 + 2) * 4  # O, m, l
    scores = 32 * 32 * (4 + 2)  # S, P
    first, second, third, fourth = (step["bytes"] for step in result["steps"])
    assert first["hbm"] == {"read": 3 * tile, "written": 0}
    assert second["hbm"] == {"read": 2 * tile, "written": tile + 32 * 4}
    assert third["hbm"] == {"read": tile, "written": 0}  # K and V are in L2
    assert fourth["hbm"] == {"read": 0, "written": tile + 32 * 4}
    assert [step["l2"]["read"] for step in (first, second, third, fourth)] == [3 * tile, 2 * tile, 3 * tile, 2 * tile]
    assert all(step["shared_memory"] == {"read": 3 * tile, "written": 0} for step in (first, second, third, fourth))
    assert first["registers"] == {"read": scores + state, "written": scores + 2 * state}
    assert second["registers"] == {"read": scores + 2 * state, "written": scores + state}
    standard = result["bytes"]["standard"]
    assert standard["l2"]["read"] == 4 * 2 * tile + 2 * 64 * 64 * 2 + 4 * tile  # Q and K, S and P, V
    assert standard["hbm"]["read"] == 3 * 2 * tile + 2 * 64 * 64 * 2
    assert result["tile_memory"] == {"shared_bytes": 3 * tile, "register_bytes": 32 * (32 + 16 + 2) * 4}


def test_keys_and_values_move_as_the_papers_bound_says(folder):
    """Theta(N^2 D^2 / M): no tile loads less of K and V than 2 e (e + 4) N^2 D^2 / M; tall tiles come near it."""
    length, head_dim, e = 512, 32, 2
    ratios = {}
    for block_m, block_n in ((16, 16), (64, 16), (128, 128), (256, 16)):
        result = trace(folder, "--length", length, "-D", head_dim, "--block-m", block_m, "--block-n", block_n)
        loaded = result["bytes"]["tiled"]["l2"]["read"] - length * head_dim * e  # but for Q
        floor = 2 * e * (e + 4) * (length * head_dim) ** 2 / sum(result["tile_memory"].values())
        ratios[block_m, block_n] = loaded / floor
    assert 1 < ratios[256, 16] < ratios[64, 16] < ratios[16, 16] < ratios[128, 128]
    assert ratios[256, 16] < 1.5


def test_text(folder):
    out = folder.succeeds("trace", "--length", 96, "--block-m", 32, "--block-n", 32, "--causal", "--row", 40).out
    assert "6 tiles" not in out and "9 tiles: 3 full, 3 partial, 3 skipped" in out
    assert "▒··\n█▒·  row 40\n██▒\n" in out
    assert "0 .. 31 " in out and "32 .. 63 " in out and "64 .. 95" not in out
    assert all(len(line) <= 80 for line in out.splitlines())
    for word in ("registers", "shared memory", "L2", "HBM", "LSE"):
        assert word in out


def test_the_seed_decides(folder):
    rows = [trace(folder, *SIZES, "--seed", seed)["row"] for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize(
    "arguments, named",
    (
        (("--length", 0), "--length: 0, accepted 1 .. 8192"),
        (("--length", 9000), "--length: 9000, accepted 1 .. 8192"),
        (("-D", 513), "[1, 512, 1, 513], accepted [B, Sk, Hkv, Dv] with Dv in 1 .. 512"),
        (("--block-m", 0), "--block-m: 0, accepted"),
        (("--block-n", -4), "--block-n: -4, accepted"),
        (("--length", 8192, "--block-m", 1), "accepted at most 65536 tiles"),
        (("--row", 512), "--row: 512, accepted 0 .. 511"),
        (("--entries", 65), "--entries: 65, accepted 0 .. 64"),
        (("--dtype", "int8"), "--dtype: 'int8', accepted"),
        (("--window", -2, 0), "--window"),
        (("--window", 3), "--window"),
        (("--block-m", "many"), "--block-m"),
        (("--softcap", 3), "--softcap"),
        (("--save", "nowhere/x.safetensors"), "--save"),
        (("--save", "x.npy"), "--save"),
    ),
)
def test_wrong_input(folder, arguments, named):
    outcome = folder.tessera("trace", *arguments)
    assert outcome.code == 2 and outcome.out == "" and folder.files() == set()
    assert len(outcome.error_lines) == 1 and named in outcome.err
