"""examples/pathfinder: the properties of its pictures."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
FOLDER = Path(__file__).resolve().parents[2] / "examples/pathfinder"
sys.path.insert(0, str(FOLDER))
import pathfinder  # noqa: E402, also for train

COUNTS = {32: 24, 64: 12, 128: 6, 256: 4}


@pytest.fixture(scope="module", params=COUNTS, ids=str)
def pictures(request):
    return pathfinder.generate(request.param, COUNTS[request.param], seed=11)


def components(image, reach):
    """How the lit pixels hang together, by union-find over all pairs: another way than the example's own."""
    points = np.argwhere(image >= pathfinder.LIT)
    near = ((points[:, None] - points[None]) ** 2).sum(-1) <= reach**2
    parent = list(range(len(points)))

    def root(i):
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, j in np.argwhere(np.triu(near, 1)):
        parent[root(i)] = root(j)
    return {tuple(point): root(i) for i, point in enumerate(points)}


def test_shapes_and_balance(pictures):
    images, labels = pictures
    assert images.dtype == np.uint8 and images.shape == (len(labels), images.shape[1], images.shape[1])
    assert 2 * labels.sum() == len(labels) and set(labels) == {0, 1}


def test_two_discs_and_the_label_is_true(pictures):
    images, labels = pictures
    style = pathfinder.STYLES[images.shape[1]]
    for image, label in zip(images, labels):
        discs = pathfinder.discs_of(image)
        assert len(discs) == 2
        for disc in discs:  # a whole one, within the picture
            y, x = np.argwhere(disc).mean(0)
            assert style.disc <= min(y, x) and max(y, x) <= images.shape[1] - 1 - style.disc
        assert pathfinder.is_connected(image) == bool(label)
        if images.shape[1] <= 64:
            of = components(image, style.reach)
            joined = of[tuple(np.argwhere(discs[0])[0])] == of[tuple(np.argwhere(discs[1])[0])]
            assert joined == bool(label)
            assert len(set(of.values())) == 2 + style.distractors  # every path by itself, and whole


def test_a_seed_is_the_same_pictures(pictures):
    images, labels = pictures
    side = images.shape[1]
    few = 4
    # Whatever was generated before.
    assert (pathfinder.picture(side, int(labels[few - 1]), 11, few - 1) == images[few - 1]).all()
    assert (pathfinder.picture(side, int(labels[0]), 12, 0) != images[0]).any()
    if side == 32:
        again, same = pathfinder.generate(side, len(labels), seed=11, workers=2)
        assert (again == images).all() and (same == labels).all()


def test_the_label_is_in_the_path_alone():
    """The amount of ink and the distance between the discs do not reveal the label: the pictures differ only in one
    disc."""
    side, count = 32, 30
    style = pathfinder.STYLES[side]
    ink, far = [], []
    for index in range(count):
        apart, joined = (pathfinder.picture(side, label, 3, index).astype(int) for label in (0, 1))
        changed = np.argwhere(apart != joined)
        assert 0 < len(changed) <= 2 * (2 * style.disc + 3) ** 2  # a disc moved, or two
        ink.append(apart.sum() / joined.sum())
        centres = [[np.argwhere(disc).mean(0) for disc in pathfinder.discs_of(image)] for image in (apart, joined)]
        far.append([np.hypot(*(a - b)) for a, b in centres])
    assert abs(np.mean(ink) - 1) < 0.01
    apart, joined = np.array(far).T
    assert (abs(apart / joined - 1) < pathfinder.SAME_DISTANCE + 0.1).all()  # a disc's pixels are a raster
    assert abs(np.mean(apart / joined) - 1) < 0.04


def test_program(tmp_path):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, FOLDER / "pathfinder.py", *map(str, arguments)], capture_output=True, text=True
        )

    done = run("--side", 32, "--count", 6, "--seed", 5, "--out", tmp_path / "x.npz")
    assert done.returncode == 0, done.stderr
    held = np.load(tmp_path / "x.npz")
    images, labels = pathfinder.generate(32, 6, seed=5)
    assert (held["images"] == images).all() and (held["labels"] == labels).all()
    for wrong in ((), ("--side", 48, "--out", "x.npz"), ("--count", -1, "--out", "x.npz")):
        refused = run(*wrong)
        assert refused.returncode == 2 and "accepted" in refused.stderr or "choose from" in refused.stderr


@pytest.mark.parametrize("side", (32, 64))
def test_pictures_by_the_thousand_are_the_same_pictures(side):
    """drawing.py's: labels that the pixels confirm, ink and distances as pathfinder.py's."""
    torch = pytest.importorskip("torch")
    import drawing

    count = COUNTS[side] // 2
    images, labels = drawing.generate(side, count, 7, torch.device("cpu"))
    assert images.dtype == torch.uint8 and images.shape == (count, side, side) and set(labels.tolist()) == {0, 1}
    style = pathfinder.STYLES[side]
    for image, label in zip(images.numpy(), labels):
        assert pathfinder.is_connected(image) == bool(label)
        discs = pathfinder.discs_of(image)
        assert len(discs) == 2
        for disc in discs:
            y, x = np.argwhere(disc).mean(0)
            assert style.disc <= min(y, x) and max(y, x) <= side - 1 - style.disc
    of = components(images[0].numpy(), style.reach)
    assert len(set(of.values())) == 2 + style.distractors
    ink = pathfinder.generate(side, 4, seed=3)[0].mean()
    assert images.float().mean().item() == pytest.approx(ink, rel=0.1)
    if side == 32:
        again, same = drawing.generate(side, count, 7, torch.device("cpu"))
        assert torch.equal(again, images) and torch.equal(same, labels)


SMALL = ("--side", 32, "--held-out", 4, "--batch", 4, "--width", 16, "--heads", 2, "--layers", 1, "--report", 2,
         "--warmup", 2)  # fmt: skip


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    pytest.importorskip("tessera")
    import train

    def run(folder, *arguments):
        train.main(["--folder", str(folder), *map(str, (*SMALL, *arguments))])
        return torch.load(folder / "checkpoint.pt")

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    one = run(whole, "--steps", 4)
    assert run(parts, "--steps", 4, "--minutes", 0)["step"] == 0
    other = run(parts, "--steps", 4, "--resume")
    assert one["step"] == other["step"] == 4
    for name, value in one["model"].items():
        assert torch.equal(value, other["model"][name]), name
    rows = (whole / "curve.csv").read_text().splitlines()
    assert rows[0].startswith("step,pictures") and [row.split(",")[0] for row in rows[1:]] == ["2", "4"]

    weights = torch.load(whole / "weights.pt")
    assert weights["positions_of"] == 32 and all(
        torch.equal(weights["model"][name], one["model"][name].bfloat16()) for name in one["model"]
    )
    capsys.readouterr()
    train.main(["--folder", str(whole), *map(str, SMALL), "--steps", "0", "--init", str(whole / "checkpoint.pt")])
    assert f"held out {float(rows[-1].split(',')[5]):.3f} (" in capsys.readouterr().out

    stretched = run(tmp_path / "larger", "--side", 64, "--steps", 1, "--init", whole / "checkpoint.pt")
    assert stretched["positions_of"] == pytest.approx(64 * 4.0 / 5.8)  # the periods of the dashes
    with pytest.raises(SystemExit, match="is of side 32, --side says 64"):
        run(whole, "--side", 64, "--resume")


def test_near_blocks_are_those_of_near_rows(tmp_path):
    """A block is visible where a row of its pixels is near one of the other's; training by it goes on, too."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("tessera")
    import train

    assert train.near_blocks(32, None, "cpu") is None
    for side, near in ((32, 0), (32, 5), (64, 3), (256, 20)):
        row = np.arange(side * side).reshape(-1, train.BLOCK) // side  # of each block's pixels
        apart = np.abs(row[:, None, [0, -1]][..., None] - row[None, :, [0, -1]][:, :, None]).min((2, 3))
        touching = (row[:, None, -1] >= row[None, :, 0]) & (row[None, :, -1] >= row[:, None, 0])
        found = train.near_blocks(side, near, "cpu")[0, 0].numpy()
        assert (found == (touching | (apart <= near))).all()
    train.main(["--folder", str(tmp_path), *map(str, SMALL), "--steps", "1", "--near", "2"])
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == 1


def launch(ranks, folder, *arguments):
    """train.py by as many processes as torchrun would start, with gloo."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = str(one.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    command = [sys.executable, str(FOLDER / "train.py"), "--folder", str(folder), *map(str, (*SMALL, *arguments))]
    running = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for process in running:
        text = process.communicate(timeout=300)[0]
        assert process.returncode == 0, text[-3000:]


@pytest.mark.parametrize("ranks, over, more", ((2, 1, ()), (4, 2, ("--near", 40))))
def test_many_processes_train_as_one(tmp_path, ranks, over, more):
    """The same pictures, losses and weights, but for rounding, and a resumed training has the same bits."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("tessera")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no torch.distributed with gloo")
    import train

    one, whole, parts = (tmp_path / name for name in ("one", "whole", "parts"))
    more = ("--steps", 4, *more)
    train.main(["--folder", str(one), *map(str, (*SMALL, *more))])
    launch(ranks, whole, *more, "--over", over)
    models = [torch.load(folder / "checkpoint.pt")["model"] for folder in (one, whole)]
    for name, value in models[0].items():
        assert torch.allclose(value, models[1][name], rtol=1e-3, atol=2e-5), name
    rows = [(folder / "curve.csv").read_text().splitlines()[1:] for folder in (one, whole)]
    for alone, divided in zip(*rows):
        alone, divided = ([float(x) for x in row.split(",")] for row in (alone, divided))
        assert alone[:2] == divided[:2] and alone[3:5] == pytest.approx(divided[3:5], rel=1e-4)
        assert alone[5] == divided[5]

    launch(ranks, parts, *more, "--over", over, "--minutes", 0)
    launch(ranks, parts, *more, "--over", over, "--resume")
    resumed = torch.load(parts / "checkpoint.pt")
    assert resumed["step"] == 4
    assert all(torch.equal(value, resumed["model"][name]) for name, value in models[1].items())


def test_processes_that_do_not_divide_are_refused(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("tessera")
    import train

    with pytest.raises(SystemExit, match="--over: 2, accepted divisors of the number of processes, 1"):
        train.main(["--folder", str(tmp_path), *map(str, SMALL), "--over", "2"])


def test_interval():
    """Wilson's interval at 95 %, computed by hand for 8 of 10."""
    pytest.importorskip("torch")
    pytest.importorskip("tessera")
    import train

    assert train.interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
