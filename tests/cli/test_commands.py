"""compare, plan, info and help."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("compare", "--lengths", "64,200", "-H", 2, "-D", 32, "--repeat", 1, "--device", "cpu")


def test_compare_json(folder):
    report = json.loads(folder.succeeds(*SMALL, "--json").out)
    assert [(c["direction"], c["length"]) for c in report["cells"]] == [
        ("forward", 64), ("forward", 200), ("backward", 64), ("backward", 200)]  # fmt: skip
    assert report["peak_gflops"] > 0
    for cell in report["cells"]:
        outputs = ["o", "lse"] if cell["direction"] == "forward" else ["d_q", "d_k", "d_v"]
        assert list(cell["tessera"]["errors"]) == outputs
        n, sides = cell["length"], (cell["tessera"], cell["standard"])
        assert cell["flops"] == 4 * 2 * n * n * 32 * (2.5 if cell["direction"] == "backward" else 1)
        for side in sides:
            assert side["gflops"] == pytest.approx(cell["flops"] / side["ms"] * 1e-6)
            assert 0 < side["rms_error"] <= side["max_error"]
        matrices = 2 if cell["direction"] == "backward" else 1
        assert cell["standard"]["extra_bytes"] == matrices * 2 * n * n * 4
        assert cell["speed_up"] == pytest.approx(cell["standard"]["ms"] / cell["tessera"]["ms"])


@pytest.mark.parametrize("flags", (("--causal",), ("--kv-heads", 1), ("--dtype", "bfloat16"), ("--dtype", "float16")))
def test_compare_agrees_with_float64(folder, flags):
    report = json.loads(folder.succeeds(*SMALL, *flags, "--json").out)
    for cell in report["cells"]:
        for name, error in cell["tessera"]["errors"].items():
            assert error["elements"] > 0
            assert cell["standard"]["errors"].get(name, error)["elements"] == error["elements"], name
        # Both sides against the same float64 rows: the plain computation sets the bound, twice over.
        assert cell["tessera"]["rms_error"] <= 2 * cell["standard"]["rms_error"]


@pytest.mark.parametrize(
    "flags",
    (
        ("--mask-mod", "j <= q_pos && j % 3 != 1", "--dtype", "bfloat16"),
        ("--score-mod", "10 * tanh(s / 10) + slope[h] * log(1.0 + abs(i - j))", "--bind", "slope=slope.npy",
         "--causal"),
        ("--score-mod", "hidden[j] ? -inf : max(s, c * s)", "--mask-mod", "i != 5", "--bind", "hidden=hidden.npy",
         "c=0.5", "--kv-heads", 1),
    ),
)  # fmt: skip
def test_compare_with_a_score_program(folder, flags):
    """Standard attention evaluates it by code of its own, as the float64 rows do."""
    folder.save(slope=np.array([-0.5, 0.25], np.float32), hidden=np.arange(200) % 4 == 0)
    report = json.loads(folder.succeeds(*SMALL, *flags, "--json").out)
    assert bool(report["score_mod"]) == ("--score-mod" in flags) and bool(report["mask_mod"]) == ("--mask-mod" in flags)
    for cell in report["cells"]:
        matrices = 3 if cell["direction"] == "backward" else 1
        assert cell["standard"]["extra_bytes"] >= matrices * 2 * cell["length"] ** 2 * 4
        for name, error in cell["tessera"]["errors"].items():
            assert error["elements"] > 0 and error["max"] < (2e-2 if "bfloat16" in flags else 1e-5), name
        assert 0 < cell["tessera"]["rms_error"] <= 2 * cell["standard"]["rms_error"]


def test_compare_on_a_gpu(folder):
    """With its kernels for comparison; without a GPU a refusal with the reason, and the CPU as default."""
    gpu = json.loads(folder.succeeds(*SMALL[:-2], "--json").out)["device"] == "cuda"
    flags = (*SMALL[:-1], "cuda", "--against", "standard,fa1", "--dtype", "float16", "--causal", "--json")
    if not gpu:
        outcome = folder.tessera(*flags)
        assert outcome.code == 2 and outcome.err.startswith("tessera: --device: cuda, CUDA: ")
        pytest.skip(outcome.err.strip())
    report = json.loads(folder.succeeds(*flags).out)
    assert report["device"] == "cuda" and report["multiprocessors"] > 0
    for cell in report["cells"]:
        assert cell["kernel"][:3] in ("fwd", "bwd")
        for name in ("standard", "fa1"):
            assert cell[name]["ms"] > 0 and cell[name]["extra_bytes"] == cell[f"{name}_needs_bytes"] > 0
            assert all(0 < error["max"] < 4e-2 for error in cell[name]["errors"].values())
        assert cell["tessera"]["ms"] > 0 and cell["tessera"]["share_of_peak"] is None
        for name, error in cell["tessera"]["errors"].items():
            assert 0 < error["max"] < 2e-2, name


def test_compare_table(folder):
    outcome = folder.succeeds(*SMALL)
    lines = outcome.out.splitlines()
    assert outcome.err == ""  # the progress bar is for terminals
    assert "float32" in lines[0] and "H 2, D 32" in lines[0] and "GFLOP/s" in lines[0]
    rows = [line for line in lines if line.split()[:1] in (["forward"], ["backward"])]
    assert len(rows) == 4
    for row in rows:
        assert row.count("│") == lines[2].count("│") and "×" in row and "%" in row


def test_compare_says_what_does_not_fit(folder):
    outcome = folder.succeeds(*SMALL, "--memory-limit", 0)
    assert outcome.out.count("not run") == 4
    report = json.loads(folder.succeeds(*SMALL, "--memory-limit", 0, "--json").out)
    for cell in report["cells"]:
        assert cell["standard"] is None and cell["speed_up"] is None and cell["standard_needs_bytes"] > 0
        assert cell["tessera"]["ms"] > 0


def test_compare_report_is_the_json_and_can_be_drawn(folder):
    outcome = folder.succeeds(*SMALL, "--memory-limit", 1e-4, "--report", "report.json")
    assert folder.files() == {"report.json"}
    report = json.loads((folder.path / "report.json").read_text())
    assert report["title"] == outcome.out.splitlines()[0] and report["memory_of"] == "this machine"
    assert set(report) == set(json.loads(folder.succeeds(*SMALL, "--json").out))
    pytest.importorskip("matplotlib")
    draw = (sys.executable, ROOT / "python/tessera/compare/plot.py", "report.json", "picture.svg")
    drawn = subprocess.run(draw, cwd=folder.path, capture_output=True, text=True, timeout=60)
    assert drawn.returncode == 0 and drawn.stderr == "", drawn.stderr
    assert (folder.path / "picture.svg").read_text().rstrip().endswith("</svg>")


@pytest.mark.parametrize("columns", (60, 80, 120, 140))
def test_compare_fits_the_terminal(folder, columns):
    shown = folder.on_terminal(columns, *SMALL, "--memory-limit", 2e-4)
    lines = [line.rsplit("\033[K", 1)[-1] for line in shown.split("\n")]
    assert max(map(len, lines)) <= columns
    for progress in shown.split("\r\033[K")[1:]:
        assert len(progress.split("\n")[0]) <= columns
    table = [line for line in lines if "│" in line]
    # The bars are aligned.
    assert len({tuple(i for i, c in enumerate(line) if c == "│") for line in table}) == 1
    for word in ("Tessera", "standard attention", "speed-up", "length", "ms", "extra", "needs", "forward", "backward"):
        assert word in shown
    assert ("RMS error" in shown) == (columns >= 138) and ("GFLOP/s    extra" in shown) == (columns >= 118)
    assert ("--json all numbers" in " ".join(lines)) == (columns < 138)


def test_plan_in_words(folder):
    text = folder.succeeds(
        "plan", "--device", "cpu", "--sq", 4096, "-H", 32, "--kv-heads", 8, "-D", 128, "--causal"
    ).out
    for word in ("tiled", "decode", "refused", "GFLOP", "standard attention", "workspace"):
        assert word in text


def test_plan_lands_on_the_roofline(folder):
    here = ("plan", "--device", "cpu")
    decode, prefill = (*here, "--sq", 1, "--sk", 4096, "-H", 8, "--kv-heads", 2), (*here, "--sq", 4096, "-H", 8)
    plan = json.loads(folder.succeeds(*decode, "--json").out)
    roof = plan["roofline"]
    assert roof["intensity"] < roof["ridge"] and roof["limit_gflops"] < roof["peak_gflops"]
    assert roof["intensity"] == pytest.approx(plan["flops"] / plan["bytes_moved"])
    assert roof["ridge"] == pytest.approx(roof["peak_gflops"] / roof["read_gbps"])
    assert roof["limit_gflops"] == pytest.approx(roof["intensity"] * roof["read_gbps"])
    assert "bound by memory" in folder.succeeds(*decode).out
    assert "bound by arithmetic" in folder.succeeds(*prefill).out


def test_plan_json(folder):
    flags = ("--device", "cpu", "--sq", 1, "--sk", 4096, "-H", 8, "--kv-heads", 2)
    plan = json.loads(folder.succeeds("plan", *flags, "--json").out)
    assert plan["kernel"] == "decode"


@pytest.mark.parametrize(
    "flags",
    (
        ("--packed",),
        ("--page-size", 16),
        ("--packed", "--page-size", 16),
        ("--direction", "backward", "--bias", "--dbias", "--sink", "--dsink"),
        ("--mask", "--alibi", "--window", 128, 0, "--softcap", 30, "--dropout", 0.1),
        ("--block-mask", "--mask-block", 64, 64),
        ("--dtype", "bf16", "--dv", 32, "--lse", "--top-left", "--causal"),
        ("--dtype", "float64"),
        ("--isa", "baseline", "--threads", 3),
        ("--seqused-k", "--cu-seqlens-q", "--max-seqlen-q", 300),
        ("--direction", "backward", "--dlse", "--sink", "--bias", "--alibi", "--mask"),
    ),
)
def test_plan_takes_every_option(folder, flags):
    flags = ("plan", "--device", "cpu", "-B", 2, "--sq", 300, *flags)
    assert json.loads(folder.succeeds(*flags, "--json").out)["kernel"]
    assert folder.succeeds(*flags).out


RANKS = ("plan", "--sq", 8192, "-H", 8, "--kv-heads", 2, "-D", 64, "--dtype", "bfloat16", "--causal", "--ranks")


def test_plan_for_ranks_in_words(folder):
    text = folder.succeeds(*RANKS, 4, "--strategy", "ring", "--direction", "backward").out
    for words in (
        "ranks      4, zig_zag: 2048 rows each",
        "balance    the busiest rank has 1.000",
        "a prediction for GPUs",
    ):
        assert words in text, words
    assert "strategy   ring" in text and "<- taken" in text and text.count("\nrank ") == 4
    assert "7 x 0 " in text and "dK, dV of 0 from 1" in text
    assert folder.succeeds(*RANKS, 16).out.count("\nrank ") == 1


def test_plan_for_ranks_json(folder):
    plan = json.loads(folder.succeeds(*RANKS, 4, "--json").out)
    assert [s["rank"] for s in plan["schedules"]] == [0, 1, 2, 3]
    area = sum(step["area"] for schedule in plan["schedules"] for step in schedule["steps"])
    assert area == 8192 * 8193 // 2 == plan["visible_area"]
    assert plan["strategies"][0]["strategy"] == plan["strategy"]
    packed = ("plan", "--lengths", "5000,1000,2192", "--ranks", 2, "--layout", "planned", "--rank", 1, "--json")
    assert [s["rank"] for s in json.loads(folder.succeeds(*packed).out)["schedules"]] == [1]


@pytest.mark.parametrize(
    "flags, complaint",
    (
        (("--ranks", 4, "--sq", 1001), "(given: --sq)"),
        (("--ranks", 4, "--sq", 64, "--strategy", "star"), "--strategy: 'star', accepted auto, ring, all_to_all"),
        (("--ranks", 3, "--sq", 66, "--strategy", "all_to_all"), "8 do not divide over 3 ranks"),
        (("--ranks", 4, "--sq", 64, "--bias"), "--bias: given with --ranks"),
        (("--sq", 64, "--layout", "planned"), "--layout: given without --ranks"),
        (("--ranks", 4), "--sq is required"),
        (("--ranks", 4, "--sq", 64, "--rank", 4), "--rank: 4, accepted 0 .. 3"),
    ),
)
def test_plan_refuses_ranks_by_name(folder, flags, complaint):
    outcome = folder.tessera("plan", *flags)
    assert outcome.code == 2 and complaint in outcome.err, outcome.err


@pytest.mark.parametrize("flags", (("--arch", 90), ("--device", "cuda", "--arch", "sm_90a"), ("--arch", "90a")))
def test_plan_for_a_gpu_that_is_not_here(folder, flags):
    flags = ("plan", "--sq", 4096, "-H", 32, "-D", 128, "--dtype", "bfloat16", *flags)
    plan = json.loads(folder.succeeds(*flags, "--json").out)
    assert plan["kernel"] == "fwd_sm90" and "roofline" not in plan  # this CPU's roofline does not apply to it
    assert plan["device"]["described"] and plan["device"]["arch"] == 90 and plan["device"]["cores"] == 132
    text = folder.succeeds(*flags).out
    assert "none of this machine's" in text and "compute capability 9.0" in text and "measured here" not in text


def test_plan_takes_the_longest_sequence(folder):
    """4 packed sequences of 100 rows, one of which is said to be at most 40 long: fewer tiles."""
    flags = ("plan", "--arch", 90, "--dtype", "float16", "-B", 4, "--sq", 4096, "--packed", "--json")
    plans = [json.loads(folder.succeeds(*flags, *more).out) for more in ((), ("--max-seqlen-q", 1024))]
    assert [plan["max_seqlen_q"] for plan in plans] == [4096, 1024]


def test_plan_for_a_smaller_gpu(folder):
    flags = ("plan", "--sq", 1, "--sk", 32768, "-H", 8, "--dtype", "float16", "--arch", 86)
    plans = [json.loads(folder.succeeds(*flags, *more, "--json").out) for more in ((), ("--multiprocessors", 8))]
    assert [plan["device"]["cores"] for plan in plans] == [84, 8]
    assert plans[0]["steps"][0]["num_splits"] > plans[1]["steps"][0]["num_splits"]


def test_support_page_is_up_to_date(folder):
    page = ROOT / "docs/reference/support.md"
    shown = folder.succeeds("support", "--markdown").out
    assert shown == page.read_text(), "out of date: make docs"
    sys.path.insert(0, str(ROOT / "scripts"))
    import make_support

    readme = (ROOT / "README.md").read_text()
    assert make_support.with_table(readme, make_support.table_of(shown)) == readme, "README is out of date: make docs"


def test_support_says_what_plan_says(folder):
    options = {o["name"]: o["cells"] for o in json.loads(folder.succeeds("support", "--json").out)["options"]}
    asked = {"dropout_p": ("--dropout", 0.5), "sink": ("--sink",), "paged": ("--page-size", 16)}
    for name, flags in asked.items():
        assert len(options[name]) == 4 * 2 * 6  # back ends, directions, dtypes
        for cell in options[name]:
            if cell["arch"] == 0 and cell["kernel"] == "tiled":
                continue  # its plan measures this machine's roofline, each a second
            where = ("--arch", cell["arch"]) if cell["arch"] else ("--device", "cpu", "--isa", "baseline")
            which = ("--dtype", cell["dtype"], "--direction", cell["direction"])
            plan = folder.tessera("plan", "-B", 2, "--sq", 256, *where, *which, *flags, "--json")
            if cell["kernel"]:
                assert json.loads(plan.out)["kernel"] == cell["kernel"] and cell["reason"] is None
            else:
                assert plan.code == 2 and cell["reason"] in plan.err
    # A gradient of the backward pass alone; the plan contains everything named by its row of the fields.
    assert {cell["direction"] for cell in options["d_sink"]} == {"backward"}
    assert {"bias", "mask", "block_mask", "alibi_slopes", "d_lse", "causal", "window", "softcap"} <= set(options)


def test_support_in_short(folder):
    rows = [line.split("  ") for line in folder.succeeds("support").out.splitlines()]
    table = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert table["float64"] == ["yes", "no", "no", "no"] and table["float16"] == ["yes"] * 4
    assert table["paged"] == ["forward"] * 4


def test_info(folder):
    text = folder.succeeds("info").out
    for word in ("CPU", "features", "kernels", "threads", "GPU", "NVRTC", "kernel cache"):
        assert word in text


def test_info_json_and_environment(folder):
    info = json.loads(folder.succeeds("info", "--json", TESSERA_ISA="baseline", TESSERA_NUM_THREADS="1").out)
    assert info["cpu"]["isa"] == "baseline" and info["cpu"]["threads"] == 1
    assert "TESSERA_ISA" in info["cpu"]["isa_reason"]
    assert info["gpus"] or info["cuda"]["reason"]


@pytest.mark.parametrize(
    "command", ((), ("compare",), ("run",), ("plan",), ("trace",), ("info",), ("support",), ("cache",))
)
def test_help_has_examples(folder, command):
    outcome = folder.succeeds(*command, "--help")
    assert "Examples:" in outcome.out and "tessera " in outcome.out and outcome.err == ""


def test_version(folder):
    assert folder.succeeds("--version").out.startswith("tessera 0.")


def test_cache_is_listed_and_cleared(folder, monkeypatch):
    kernels = folder.path / "kernels"
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(kernels))
    listed = json.loads(folder.succeeds("cache", "list", "--json").out)
    assert listed["folder"] == str(kernels) and listed["entries"] == [] and listed["unwritable"] == ""
    damaged = kernels / ("0" * 32 + "-13.0.cubin")
    damaged.write_bytes(b"no entry")
    (kernels / "notes.txt").write_text("not a kernel")
    entries = json.loads(folder.succeeds("cache", "list", "--json").out)["entries"]
    assert [(entry["file"], entry["intact"], entry["bytes"]) for entry in entries] == [(damaged.name, False, 8)]
    assert "damaged" in folder.succeeds("cache", "list").out
    assert "1 kernel removed, 8 B" in folder.succeeds("cache", "clear").out
    assert [path.name for path in kernels.iterdir()] == ["notes.txt"]


def test_cache_says_when_it_is_in_memory(folder, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE_DIR", "/dev/null/kernels")
    assert "kept in memory" in folder.succeeds("cache", "list").out


def test_info_says_what_the_environment_asks(folder):
    asked = {"TESSERA_CUDA_GRAPHS": "0", "TESSERA_FWD_SM80_BULK": "0"}
    assert json.loads(folder.succeeds("info", "--json", **asked).out)["cuda"]["environment"] == asked
    assert "TESSERA_CUDA_GRAPHS=0: 0: launches one by one" in folder.succeeds("info", **asked).out


def test_info_says_why_there_is_no_compiler(folder, monkeypatch):
    monkeypatch.setenv("TESSERA_NVRTC", "/nowhere")
    cuda = json.loads(folder.succeeds("info", "--json").out)["cuda"]
    assert not cuda["nvrtc_found"] and "/nowhere" in cuda["nvrtc"] and "12.8" in cuda["nvrtc"]
