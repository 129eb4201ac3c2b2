"""python -m tessera: compare, plan and info; and the results of the comparison, each side against float64."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

import tessera
from conftest import assert_close
from reference import Plain
from tessera import _core
from tessera.__main__ import main
from tessera.compare.device import DEVICES, Cpu, Cuda
from tessera.compare.exact import Exact
from tessera.compare.float64 import attend
from tessera.compare.frameworks import NumPy, PyTorch
from tessera.compare.shape import Shape
from tessera.compare.sides import Inputs, PyTorchAttention, Standard, Tessera

SMALL = ["compare", "--lengths", "64,96", "-H", "4", "-D", "32", "--threads", "1", "--repeat", "2",
         "--device", "cpu"]  # fmt: skip


@pytest.fixture(params=["NumPy", "PyTorch on cpu", "PyTorch on cuda"])
def framework(request):
    if request.param == "NumPy":
        return NumPy(1)
    pytest.importorskip("torch")
    name = request.param.rpartition(" ")[2]
    if not DEVICES[name].is_there():
        pytest.skip("PyTorch and Tessera have no GPU")
    return PyTorch(1, name)


@pytest.fixture(params=list(DEVICES)[::-1])
def place(request):
    """A --device; the CPU's needs no PyTorch."""
    if not DEVICES[request.param].is_there():
        pytest.skip("PyTorch and Tessera have no GPU")
    return request.param


def shape_of(**changed):
    values = dict(direction="forward", length=45, batch=2, heads=4, heads_kv=2, head_dim=24, dtype="float32",
                  causal=False, dropout_p=0.0)  # fmt: skip
    return Shape(**{**values, **changed})


def run(tmp_path, *arguments, without=()):
    """The program in a process of its own, where the packages `without` cannot be imported."""
    for name in without:
        (tmp_path / f"{name}.py").write_text(f'raise ImportError("{name} is hidden")')
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, "-m", "tessera", *arguments], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"})  # fmt: skip


def on_terminal(columns, *arguments):
    """The program's output on a terminal with this number of columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen([sys.executable, "-m", "tessera", *arguments], stdout=theirs, stderr=theirs,
                               env={**environment, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"})  # fmt: skip
    os.close(theirs)
    shown = bytearray()
    try:
        while data := os.read(ours, 4096):
            shown.extend(data)
    except OSError:  # the program has ended
        pass
    os.close(ours)
    assert process.wait(timeout=120) == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


def result_of(capsys, *arguments):
    assert main([*SMALL, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def assert_as_good(side, standard):
    """In float32, on values of magnitude 1."""
    assert 0 < side["max_error"] <= 2 * standard["max_error"] + 4 * np.finfo(np.float32).eps


# ---- what is computed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_side_computes_attention(framework, direction, causal):
    shape = shape_of(direction=direction, causal=causal)
    inputs = Inputs(shape, framework)
    sides = [Tessera(shape, framework, inputs, 1, "auto"), Standard(shape, framework, inputs)]
    if isinstance(framework, PyTorch):
        sides.append(PyTorchAttention(shape, framework, inputs))
    arrays = [framework.float64(x) for x in (inputs.q, inputs.k, inputs.v)]
    exact, plain = (Plain(*arrays, dtype=dtype, causal=causal) for dtype in ("float64", "float32"))
    if shape.backward:
        d_o = framework.float64(inputs.d_o)
        exact, plain = ({f"d_{key[1:]}": x for key, x in r.gradients(d_o).items()} for r in (exact, plain))
    else:
        exact, plain = {"o": exact.o}, {"o": plain.o}
    for side in sides:
        side.prepare()
        results = side.results(side.call())
        assert results.keys() == exact.keys(), side.title
        for name in exact:
            assert_close(framework.float64(results[name]), exact[name], plain[name], "float32")


def oracle(q, k, v, d_o, **options):
    """The library's results in float64, from the definition: src/core/reference.cpp."""
    o, lse = tessera.attention(q, k, v, return_lse=True, **options)
    if d_o is None:
        return {"o": o}
    gradients = tessera.attention_backward(q, k, v, o, lse, d_o, **options)
    return {"o": o, "d_q": gradients.d_q, "d_k": gradients.d_k, "d_v": gradients.d_v}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_float64_reference(framework, direction, causal):
    """It is right to float64's precision, and a wrong result shows."""
    shape = shape_of(direction=direction, causal=causal, batch=1, heads=2, heads_kv=1)
    inputs = Inputs(shape, framework)
    arrays = (inputs.q, inputs.k, inputs.v, inputs.d_o)
    results = oracle(*(None if x is None else framework.float64(x) for x in arrays), causal=causal)
    results = {name: results[name] for name in (("d_q", "d_k", "d_v") if shape.backward else ("o",))}
    as_arrays = (lambda x: x) if framework.name == "NumPy" else framework.torch.from_numpy  # both on the CPU
    exact = Exact(shape, framework, inputs.q, inputs.k, inputs.v, inputs.d_o)
    errors = exact.errors({name: as_arrays(x) for name, x in results.items()})
    assert errors.keys() == results.keys()
    assert max(error.max for error in errors.values()) < 64 * np.finfo(np.float64).eps
    assert all(error.elements == results[name].size for name, error in errors.items())  # this small, the sample is all
    for name in results:
        wrong = {other: np.array(x) for other, x in results.items()}
        wrong[name][0, 3] += 1
        error = exact.errors({other: as_arrays(x) for other, x in wrong.items()})[name]
        assert error.max == pytest.approx(1) and error.rms < 1


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_float64_with_every_option(random, arrays):
    """The computation shared by the sample here and the GPU's benchmark."""
    xp = pytest.importorskip(arrays)
    given = (lambda x: x) if xp is np else xp.from_numpy
    rows, keys, d, slope, window = 37, 50, 16, 0.25, 20
    q, d_o = (random.standard_normal((rows, d)) for _ in range(2))
    k, v = (random.standard_normal((keys, d)) for _ in range(2))
    bias, mask = random.standard_normal((rows, keys), np.float32), random.random((rows, keys)) < 0.8
    mask[3] = False  # a row that sees nothing
    options = {"causal": True, "softcap": 2.0}
    expected = oracle(
        *(x[None, :, None] for x in (q, k, v, d_o)), bias=bias[None, None], mask=mask[None, None],
        alibi_slopes=np.array([slope], np.float32), window=(window, -1), **options,
    )  # fmt: skip
    results = attend(
        xp, *map(given, (q, k, v, np.arange(rows) + keys - rows)), scale=d**-0.5, d_o=given(d_o), window=(window, -1),
        bias=given(bias), mask=given(mask), slope=slope, **options,
    )  # fmt: skip
    for name, exact in expected.items():
        np.testing.assert_allclose(np.asarray(getattr(results, name)), exact[0, :, 0], rtol=0, atol=1e-13, err_msg=name)


def test_dropout_of_standard_attention():
    """Its gradients are those of its own forward pass, by autograd in float64, with the entries that it dropped."""
    torch = pytest.importorskip("torch")
    framework, shape = PyTorch(1), shape_of(direction="backward", dropout_p=0.3, heads_kv=4)
    inputs = Inputs(shape, framework)
    side = Standard(shape, framework, inputs)
    side.prepare()
    assert (side._kept == 0).double().mean().item() == pytest.approx(0.3, abs=0.02)

    def gradients(dtype):
        q, k, v = leaves = [x.to(dtype).transpose(1, 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        p = torch.softmax(shape.scale * q @ k.transpose(-1, -2), -1) * side._kept.to(dtype)
        d_o = inputs.d_o.to(dtype).transpose(1, 2)
        return [framework.float64(x.transpose(1, 2)) for x in torch.autograd.grad(p @ v, leaves, d_o)]

    results = side.results(side.call()).values()
    for ours, exact, plain in zip(results, gradients(torch.float64), gradients(torch.float32)):
        assert_close(framework.float64(ours), exact, plain, "float32")


# ---- the program ----------------------------------------------------------------------------------------------------


def test_json(capsys, place):
    pytest.importorskip("torch")
    result = result_of(capsys, "--kv-heads", "2", "--causal", "--device", place)
    assert (result["device"], result["heads"], result["heads_kv"]) == (place, 4, 2)
    if place == "cpu":
        assert result["threads"] == 1 and result["cpu"] == tessera.device()["name"]
    else:
        assert result["gpu"] == tessera.device(place)["name"] and result["memory_bytes"] > 2**30
    cells = result["cells"]
    assert [(c["direction"], c["length"]) for c in cells] == [(d, n) for d in ("forward", "backward") for n in (64, 96)]
    for cell in cells:
        assert cell["flops"] == 4 * 4 * cell["length"] ** 2 * 32 / 2 * (2.5 if cell["direction"] == "backward" else 1)
        # Which of its kernels PyTorch picks for float32 on a GPU depends on the GPU and on the release; never flash.
        assert cell["pytorch"]["kernel"] in {"cpu": ["flash"], "cuda": ["efficient", "cudnn", "math"]}[place]
        assert cell["tessera"]["kernel"] == cell["kernel"]
        assert cell["speed_up"] == pytest.approx(cell["standard"]["ms"] / cell["tessera"]["ms"])
        assert cell["speed_up_pytorch"] == pytest.approx(cell["pytorch"]["ms"] / cell["tessera"]["ms"])
        names = ["o"] if cell["direction"] == "forward" else ["d_q", "d_k", "d_v"]
        for side in ("tessera", "standard", "pytorch"):
            assert list(cell[side]["errors"]) == names
            assert cell[side]["gflops"] == pytest.approx(cell["flops"] / cell[side]["ms"] * 1e-6)
            assert_as_good(cell[side], cell["standard"])


def test_half_precision(capsys, place):
    pytest.importorskip("torch")
    for dtype in ("float16", "bfloat16"):
        cells = result_of(capsys, "--dtype", dtype, "--device", place)["cells"]
        assert all(0 < c["tessera"]["rms_error"] <= 2 * c["standard"]["rms_error"] for c in cells)


def test_dropout(capsys, place):
    result = result_of(capsys, "--dropout", "0.2", "--device", place)
    assert result["dropout_p"] == 0.2
    for cell in result["cells"]:
        assert cell["tessera"]["max_error"] is None and cell["tessera"]["ms"] > 0
        if place == "cpu" and "pytorch" in cell:
            assert cell["pytorch"]["kernel"] == "math"  # its flash attention has none on the CPU


def test_memory_limit(capsys):
    limit = ["--memory-limit", str(100 * 1024 / 2**30), "--direction", "forward"]
    small, large = result_of(capsys, *limit)["cells"]
    assert small["standard"] is None or small["standard_needs_bytes"] <= 100 * 1024
    assert large["standard"] is None and large["speed_up"] is None and large["standard_needs_bytes"] > 100 * 1024
    assert main([*SMALL, *limit]) == 0
    last = capsys.readouterr().out.split("\n\n")[1].splitlines()[-1]
    needs = re.search(r"needs ([0-9.]+) ([KM])iB: not run", last)
    unit = {"K": 2**10, "M": 2**20}[needs[2]]
    assert float(needs[1]) == pytest.approx(large["standard_needs_bytes"] / unit, rel=0.01) and "96" in last


def test_without_pytorch(tmp_path):
    """NumPy alone: the same numbers except PyTorch's; without rich only the colours are missing."""
    process = run(tmp_path, *SMALL, "--json", without=("torch", "rich", "matplotlib", "threadpoolctl"))
    assert process.returncode == 0 and process.stderr == ""
    result = json.loads(process.stdout)
    assert result["arrays"].startswith("NumPy") and all("pytorch" not in cell for cell in result["cells"])
    for cell in result["cells"]:
        assert_as_good(cell["tessera"], cell["standard"])
    process = run(tmp_path, *SMALL)
    heading, table, legend = process.stdout.rstrip().split("\n\n")
    assert "NumPy" in heading and "OPENBLAS_NUM_THREADS" in legend
    assert len(table.splitlines()) == 3 + 4 and "\x1b" not in table


def test_rich_prints_the_same_text(capsys):
    pytest.importorskip("rich")
    assert main([*SMALL, "--direction", "forward"]) == 0
    heading, table, _ = capsys.readouterr().out.rstrip().split("\n\n")
    lines = table.splitlines()
    assert heading.startswith("Exact attention, forward · float32") and len(lines) == 3 + 2
    bars = [i for i, c in enumerate(lines[2]) if c == "┼"]
    assert bars and all([i for i, c in enumerate(line) if c == "│"] == bars for line in (*lines[:2], *lines[3:]))


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_plot(tmp_path, capsys, kind):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"compare.{kind}"
    result_of(capsys, "--plot", str(file))
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG") if kind == "png" else b"</svg>" in content
    assert list(tmp_path.iterdir()) == [file]  # no partial file stays


@pytest.mark.parametrize("lengths", ["96", "96,64"])
def test_plot_says_what_the_table_says(tmp_path, capsys, recwarn, lengths):
    matplotlib = pytest.importorskip("matplotlib")
    file = tmp_path / "compare.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        assert main([*SMALL, "--lengths", lengths, "--memory-limit", "0.00005", "--plot", str(file)]) == 0
    assert not recwarn.list
    texts = [text.text for text in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    shown, title = "\n".join(filter(None, texts)), capsys.readouterr().out.splitlines()[0]
    assert all(part in shown for part in title.split(" · ")) and max(map(len, shown.splitlines())) <= 120
    assert "e+" not in shown and "memory of this machine" in shown
    for pattern in (r"[\d.]+ [KMGT]iB", r"[\d.]+ [KMGT]iB,", "not run", r"[\d.]+ (µs|ms|s)", *lengths.split(",")):
        assert any(re.fullmatch(pattern, line) for line in shown.splitlines()), pattern


def test_plot_has_every_number_on_its_bar(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")

    def side(ms, gflops, held):
        return {"ms": ms, "gflops": gflops, "extra_bytes": held}

    cell = {"direction": "forward", "length": 64, "tessera": side(2, 300, 2**20), "standard": side(6, 100, 2**30),
            "standard_needs_bytes": 2**30, "pytorch": None, "pytorch_needs_bytes": 3 * 2**31}  # fmt: skip
    report = {"title": "A · B", "busy": "Busy.", "memory_bytes": 2**34, "memory_of": "this machine", "cells": [cell]}
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        tessera.compare.plot.draw_plot(str(tmp_path / "a.svg"), report)
    texts = ElementTree.parse(tmp_path / "a.svg").iter("{http://www.w3.org/2000/svg}text")
    shown = {line for text in texts for line in (text.text or "").splitlines()}
    assert {"1 MiB", "1 GiB", "6 GiB,", "not run", "300", "100", "3 ×", "64", "2 ms", "PyTorch's own", "Busy."} <= shown


def test_a_busy_machine_is_said(capsys, monkeypatch):
    monkeypatch.setattr(tessera._core, "busy_text", lambda threads: f"Busy for {threads}.")
    assert main([*SMALL, "--threads", "1", "--direction", "forward"]) == 0
    assert "Busy for 1." in " ".join(capsys.readouterr().out.split("\n\n")[2].split())
    monkeypatch.undo()
    assert tessera._core.busy_text(0) == "" and "idle at the start, for 1024 threads" in tessera._core.busy_text(1024)


def test_plot_keeps_links_and_modes(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    target, link = tmp_path / "target.png", tmp_path / "link.png"
    target.write_bytes(b"before")
    target.chmod(0o640)
    link.symlink_to(target)
    result_of(capsys, "--plot", str(link))
    assert link.is_symlink() and target.read_bytes().startswith(b"\x89PNG") and target.stat().st_mode & 0o777 == 0o640
    target.chmod(0o440)
    assert main([*SMALL, "--plot", str(link)]) == 2 and "read-only" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_table_and_progress_fit_the_terminal(columns):
    coloured = on_terminal(columns, *SMALL, "--lengths", "64,96", "--memory-limit", "0.00005")
    shown = re.sub(r"\033\[[0-9;]*m", "", coloured)
    lines = [line.rsplit("\033[K", 1)[-1] for line in shown.split("\n")]
    assert max(map(len, lines)) <= columns
    assert all(len(progress.split("\n")[0]) <= columns for progress in shown.split("\r\033[K")[1:])
    table = [line for line in lines if "│" in line]
    assert len({tuple(i for i, c in enumerate(line) if c == "│") for line in table}) == 1
    for word in ("Tessera", "standard", "length", "ms", "forward", "backward"):
        assert word in "\n".join(lines)
    # What a group has room for; at 60 columns that depends on how long the times are.
    assert re.search("needs|not run" if columns == 60 else "needs", shown)
    assert ("--json all numbers" in " ".join(lines)) == ("max error against float64" not in shown)


def test_saved_report_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "report.json", tmp_path / "picture.png"
    assert json.loads(json.dumps(result_of(capsys, "--report", str(report)))) == json.loads(report.read_text())
    assert main(["plot", str(report), str(picture)]) == 0 and picture.read_bytes().startswith(b"\x89PNG")
    report.write_text("{}")
    assert main(["plot", str(report), str(picture)]) == 2
    assert "no report of a comparison" in capsys.readouterr().err


def test_plot_without_matplotlib(tmp_path):
    process = run(
        tmp_path, "compare", "--plot", "compare.png", without=("matplotlib",)
    )  # long, were it not refused first
    assert process.returncode == 2 and process.stdout == ""
    assert (
        process.stderr == "tessera: --plot: needs matplotlib, which is not installed (pip install matplotlib)\n"
    )


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--lengths", "1k"], "--lengths: '1k'"),
        (["--lengths", "0"], "--lengths: 0, accepted 1 .. 2^24"),
        (["-D", "513"], "-D: 513, accepted 1 .. 512"),
        (["--kv-heads", "3"], "--kv-heads: 3, accepted a divisor of -H, 8"),
        (["--kv-heads", "0"], "--kv-heads: 0"),
        (["--dropout", "1"], "--dropout: 1.0, accepted 0 <= P < 1"),
        (["--repeat", "0"], "--repeat: 0"),
        (["--threads", "0"], "--threads: 0"),
        (["--memory-limit", "-1"], "--memory-limit: -1.0"),
        (["--device", "abacus"], "--device: 'abacus', accepted here: "),
        (["--plot", "compare.gif"], "accepted is a file that ends in .png or .svg"),
        (["--plot", "no/such/folder/a.png"], "in a folder that exists"),
        (["--report", "no/such/folder/a.json"], "in a folder that exists"),
        (["--dtype", "float64"], "--dtype"),
        (["--fast"], "--fast"),
    ],
)
def test_wrong_use(capsys, arguments, says):
    try:
        code = main(["compare", *arguments])
    except SystemExit as end:
        code = end.code
    out, error = capsys.readouterr()
    assert code == 2 and out == "" and error.count("\n") == 1 and error.startswith("tessera: ") and says in error


def test_what_the_library_refuses(capsys):
    assert main([*SMALL, "--kernel", "decode"]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and "decode" in error


def test_plan(capsys):
    assert main(["plan", "--sq", "40", "--sk", "50", "--kv-heads", "2", "--causal", "--window", "8", "0", "--bias",
                 "--sink", "--threads", "1", "--device", "cpu", "--json"]) == 0  # fmt: skip
    plan = json.loads(capsys.readouterr().out)
    q, k = np.empty((1, 40, 8, 64), np.float32), np.empty((1, 50, 2, 64), np.float32)
    bias, sink = np.empty((1, 8, 40, 50), np.float32), np.empty(8, np.float32)
    expected = tessera.plan(q, k, k, as_dict=True, causal=True, window=(8, 0), bias=bias, sink=sink, threads=1)
    assert plan == expected
    assert main(["plan", "--sq", "40", "--device", "cpu", "--direction", "backward"]) == 0
    assert "backward" in capsys.readouterr().out
    assert main(["plan", "--sq", "40", "--device", "cpu", "-D", "600"]) == 1
    assert "600" in capsys.readouterr().err


def test_plan_of_a_gpu_that_is_not_here(capsys):
    assert main(["plan", "--sq", "4096", "-D", "128", "--dtype", "bfloat16", "--causal", "--arch", "90", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernel"] == "fwd_sm90"


@pytest.mark.parametrize("command", ["run", "trace", "cache"])
def test_what_the_program_alone_does(capsys, command):
    """The program's other commands are listed and refer to the program, whatever follows."""
    assert main([command, "q.npy", "-o", "out.npy", "--causal", "--help"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    assert error.startswith(f"tessera: {command}: ") and "program tessera" in error and "make install" in error
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n    {name} " in text for name in ("compare", "plan", "info", "run", "trace", "support", "cache"))


def test_info(tmp_path, capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["version"] == tessera.__version__
    assert {name: facts["cpu"][name] for name in ("name", "isa", "isa_limit", "cores", "threads")}.items() <= (
        tessera.device().items()
    )
    gpus = facts["gpus"]
    assert [gpu["name"] for gpu in gpus] == [tessera.device(f"cuda:{n}")["name"] for n in range(len(gpus))]
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert tessera.device()["isa"] in out and ("GPU 0" if gpus else "GPUs           none: ") in out
    assert re.search("^NVRTC +", out, re.MULTILINE) and re.search("^kernel cache +", out, re.MULTILINE)
    process = run(tmp_path, "plan", "--sq", "64", "--isa", "baseline", "--device", "cpu", "--json", without=("torch",))
    assert json.loads(process.stdout)["device"]["isa"] == "baseline"


@pytest.mark.skipif("TESSERA_PROGRAM" not in os.environ, reason="the program was not built")
@pytest.mark.parametrize("arguments", [
    ["support"], ["support", "--json"], ["support", "--markdown"], ["info"],
    "plan --sq 4096 -H 32 --kv-heads 8 -D 128 --dtype bfloat16 --causal --arch 90".split(),
    "plan --sq 300 --sk 900 --bias --sink --dtype float16 --direction backward --arch 80 --json".split(),
], ids=" ".join)  # fmt: skip
def test_says_what_the_program_says(capsys, arguments):
    program = subprocess.run([os.environ["TESSERA_PROGRAM"], *arguments], capture_output=True, text=True, timeout=60)
    assert program.returncode == 0 and main(arguments) == 0
    ours = capsys.readouterr().out
    if "--json" in arguments:
        assert json.loads(ours) == json.loads(program.stdout)
    elif arguments == ["info"]:  # except the peer's line, memory, and the owner of NVRTC's folder
        names = [[line.split("  ")[0] for line in text.splitlines()] for text in (ours, program.stdout)]
        assert [*names[0], "standard peer"] == names[1]
    else:
        assert ours == program.stdout


# ---- its parts ------------------------------------------------------------------------------------------------------


def test_the_tables_numbers():
    """Like the program's: three digits, units, sides that were not run, and as many columns as fit a line."""
    sides = [
        ("Tessera", "Tessera", False),
        ("standard attention", "standard", False),
        ("PyTorch's own", "PyTorch", True),
    ]
    absent = dict.fromkeys(("seconds", "gflops", "extra_bytes", "max_error", "rms_error"))
    ours = {**absent, "seconds": 0.01234e-3, "gflops": 12345.6, "extra_bytes": 1000 * 1024, "max_error": 1.23e-4,
            "rms_error": 5e-6, "needs_bytes": 0, "kernel": "tiled"}  # fmt: skip
    standard = {**absent, "needs_bytes": 34 << 30, "kernel": ""}
    pytorch = {**ours, "seconds": 0.01234e-3 * 2.5, "extra_bytes": 8 << 20, "kernel": "flash"}
    table = _core.ComparisonTable(sides, False, None)
    lines = table.header().splitlines()
    assert [title.strip() for title in lines[0].split("│")] == [
        "", "Tessera", "standard attention", "PyTorch's own", "speed-up", "max error against "
                                                                          "float64", "RMS error"]  # fmt: skip
    row = table.row("forward", 64, [ours, standard, pytorch])
    assert [cell.split() for cell in row.split("│")] == [
        ["forward", "64"], ["0.0123", "12346", "0.98", "MiB"], ["needs", "34.0", "GiB:", "not", "run"],
        ["0.0309", "12346", "8.00", "MiB", "flash"], ["2.50", "×"], ["1.2e-04", "1.2e-04"],
        ["5.0e-06", "5.0e-06"]]  # fmt: skip
    assert "TFLOP/s" in _core.ComparisonTable(sides, True, None).header() and "GFLOP/s" in lines[1]
    refused = table.row("forward", 64, [ours, {**standard, "needs_bytes": 0}, pytorch])
    assert "│ refused: not run " in refused
    assert "A wider terminal" not in table.legend(True, "notes") and table.legend(True, "n.").endswith("float64. n.")
    narrow = _core.ComparisonTable(sides, False, 80)
    rows = [narrow.row(d, 64, [ours, standard, pytorch]) for d in ("forward", "forward", "backward")]
    assert [row.count("\n") for row in rows] == [2, 1, 2] and rows[2].startswith(" backward\n")
    assert max(len(line) for line in (narrow.header() + "".join(rows)).splitlines()) <= 80
    assert "A wider terminal shows more columns" in narrow.legend(False, "").replace("\n", " ")
    assert "MiB" not in table.row(
        "forward", 64, [{**ours, "extra_bytes": None}, standard, {**ours, "extra_bytes": 512}]
    )
    assert "512 B" in table.row("forward", 64, [ours, standard, {**pytorch, "extra_bytes": 512}])


def test_memory_is_measured():
    device, mib = Cpu(1), 2**20
    growth, array = device.growth_bytes(lambda: np.ones(32 * mib, np.uint8))
    if growth is None:
        pytest.skip("this system does not say what a process holds")
    assert 32 * mib <= growth < 36 * mib and array.nbytes == 32 * mib
    assert 0 < device.available_bytes() <= device.memory_bytes()


def test_memory_of_a_gpu_is_measured():
    torch = pytest.importorskip("torch")
    if not Cuda.is_there():
        pytest.skip("PyTorch and Tessera have no GPU")
    gpu, mib = Cuda(1), 2**20
    growth, array = gpu.growth_bytes(lambda: torch.ones(32 * mib, dtype=torch.uint8, device="cuda"))
    assert growth == 32 * mib and array.is_cuda
    assert 0 < gpu.available_bytes() <= gpu.memory_bytes()
    product = torch.ones(4096, 4096, device="cuda")
    gpu.warm_up(lambda: product @ product)
    once, _ = gpu.seconds(lambda: product @ product)
    often, _ = gpu.seconds(lambda: product @ product, 8)
    assert 0 < often < 2 * once  # each, not all together


def test_the_best_device_is_the_default(capsys):
    torch = pytest.importorskip("torch")
    arguments = [argument for argument in SMALL if argument not in ("--device", "cpu")]
    assert main([*arguments, "--direction", "forward", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["device"]
    assert found == ("cuda" if torch.cuda.is_available() and Cuda.is_there() else "cpu")


def test_plan_of_a_place(capsys, place):
    assert main(["plan", "--sq", "40", "--device", place, "--json"]) == 0
    kernel = json.loads(capsys.readouterr().out)["kernel"]
    assert kernel in {"cpu": ("tiled", "decode"), "cuda": ("fwd_sm80", "fwd_sm90")}[place]
