"""The Pathfinder task (Linsley et al. 2018; in Long Range Arena the longest are called Path-X): are the two discs the
ends of one dashed path? Pixel by pixel, a picture of 64 x 64 is a sequence of 4096 tokens, one of 256 x 256 of 65536.

    python examples/pathfinder/pathfinder.py --side 64 --count 10000 --seed 0 --out pathfinder64.npz
    python examples/pathfinder/pathfinder.py --sheet docs/images/pathfinder.png

Every picture has two long paths of equally many dashes, room for a disc at each of their four ends, and shorter paths
that distract. The label only decides which two ends have discs: those of one path (1), or one of each (0), at nearly
the same distance. No dash of a path comes as near to another path as to its own next dash, so `is_connected`, which
sees pixels only, can determine every picture's label.
"""

import argparse
import dataclasses
import functools
import math
import multiprocessing
import sys
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Style:
    """In pixels, but for counts."""

    dashes: int  # of a long path
    distractors: int
    distractor_dashes: int
    dash: float
    gap: float
    thickness: float
    disc: float  # radius

    @property
    def clearance(self):  # between the centre lines of two paths: their lit pixels are farther apart than reach
        return self.gap + self.thickness + 2.2

    @property
    def reach(self):  # how far apart lit pixels of one path may be: those nearest to the ends of two dashes
        return self.gap + 1.5


STYLES = {
    32: Style(dashes=5, distractors=2, distractor_dashes=2, dash=2.8, gap=1.2, thickness=1.0, disc=1.7),
    64: Style(dashes=8, distractors=5, distractor_dashes=3, dash=4.0, gap=1.8, thickness=1.2, disc=2.0),
    128: Style(dashes=14, distractors=16, distractor_dashes=4, dash=5.0, gap=2.5, thickness=1.5, disc=3.0),
    256: Style(dashes=22, distractors=32, distractor_dashes=6, dash=6.5, gap=3.0, thickness=2.0, disc=4.0),
}
TURN, MOST_TURN = 0.3, 0.6  # radians between dashes: standard deviation, and the most
SAME_DISTANCE = 0.1  # how much the discs' distance may depend on the label, relatively


# ---- geometry -------------------------------------------------------------------------------------------------------


def distance(pair):
    return math.dist(*pair)


@functools.lru_cache
def shares(count):
    return np.linspace(0, 1, count)[:, None]


def along(start, end):
    """Points of a segment, at most a pixel apart."""
    return start + shares(int(distance((start, end))) + 2) * (end - start)


class Board:
    """Free places for dashes: a raster of half pixels, blocked around existing ones. In `for_ends` a disc has room,
    too."""

    FINE, ROUNDING = 2, 0.36  # half pixels, and the farthest from a point to its own

    def __init__(self, side, style):
        self.style = style
        self.blocked, self.for_ends = np.ones((2, self.FINE * side, self.FINE * side), bool)
        inside = slice(int(self.FINE * (style.disc + 1)), int(self.FINE * (side - 2 - style.disc)))
        self.blocked[inside, inside] = self.for_ends[inside, inside] = False

    def is_free(self, points, end):
        x, y = np.rint(self.FINE * points.T).astype(int)
        side = len(self.blocked)
        if min(x.min(), y.min()) < 0 or max(x.max(), y.max()) >= side:
            return False
        return not (self.for_ends if end else self.blocked)[y, x].any()

    def block(self, points, disc):
        """Around a path's points; around its first and last by the radius of a disc more."""
        for at, point in enumerate(points):
            more = disc if at in (0, len(points) - 1) else 0
            for raster, room in ((self.blocked, 0), (self.for_ends, self.style.disc)):
                radius = self.FINE * (self.style.clearance + self.ROUNDING + more + room)
                low = np.maximum(np.ceil(self.FINE * point - radius), 0).astype(int)
                high = np.floor(self.FINE * point + radius).astype(int) + 1
                y, x = np.ogrid[low[1] : min(high[1], len(raster)), low[0] : min(high[0], len(raster))]
                raster[low[1] : high[1], low[0] : high[0]] |= (x - self.FINE * point[0]) ** 2 + (
                    y - self.FINE * point[1]
                ) ** 2 <= radius**2


def grow_path(random, board, dashes, with_discs):
    """The dashes of one path, [start, end] each, or None if it has no room."""
    style = board.style
    direction = random.uniform(0, 2 * np.pi)
    at = random.uniform(0, len(board.blocked) / board.FINE, 2)
    path, own = [], []
    for index in range(dashes):
        for _ in range(6):
            turned = direction + min(max(random.normal(0, TURN), -MOST_TURN), MOST_TURN)
            ahead = np.array([math.cos(turned), math.sin(turned)])
            start = at + style.gap * ahead if index else at
            points = along(start, start + style.dash * ahead)
            if not board.is_free(points, with_discs and index in (0, dashes - 1)):
                continue
            earlier = np.concatenate(own[:-2]) if len(own) > 2 else np.empty((0, 2))  # no loops
            if (((points[:, None] - earlier) ** 2).sum(-1) >= style.clearance**2).all():
                break
        else:
            return None
        path.append((start, points[-1]))
        own.append(points)
        at, direction = points[-1], turned
    return path


def nearest_ends(first, second):
    """An end of either path, at the distance closest to that between both ends of the first, and the difference."""
    ends = [(path[0][0], path[-1][1]) for path in (first, second)]
    wanted = distance(ends[0])
    pair = min(((a, b) for a in ends[0] for b in ends[1]), key=lambda pair: abs(distance(pair) - wanted))
    return pair, abs(distance(pair) / wanted - 1)


def place_paths(random, side, style):
    """All paths, the two long ones first."""
    while True:
        board, paths = Board(side, style), []
        for at in range(2 + style.distractors):
            dashes = style.dashes if at < 2 else style.distractor_dashes
            for _ in range(100):
                path = grow_path(random, board, dashes, with_discs=at < 2)
                if path is not None and (at != 1 or nearest_ends(paths[0], path)[1] <= SAME_DISTANCE):
                    break
            else:
                break
            paths.append(path)
            board.block(np.concatenate([along(*dash) for dash in path]), style.disc if at < 2 else 0)
        else:
            return paths


# ---- pictures -------------------------------------------------------------------------------------------------------


def draw(side, style, paths, discs):
    """uint8 [side, side]: each pixel by how much of it is within half a thickness of a dash, or within a disc."""
    y, x = np.mgrid[:side, :side].astype(float)
    beyond = np.full((side, side), np.inf)  # the ink's edge
    for start, end in (dash for path in paths for dash in path):
        low = np.maximum(np.floor(np.minimum(start, end) - 3), 0).astype(int)
        high = np.ceil(np.maximum(start, end) + 4).astype(int)
        box = (slice(low[1], high[1]), slice(low[0], high[0]))
        line = end - start
        share = np.clip(((x[box] - start[0]) * line[0] + (y[box] - start[1]) * line[1]) / (line @ line), 0, 1)
        away = np.hypot(x[box] - start[0] - share * line[0], y[box] - start[1] - share * line[1])
        beyond[box] = np.minimum(beyond[box], away - style.thickness / 2)
    for centre in discs:
        beyond = np.minimum(beyond, np.hypot(x - centre[0], y - centre[1]) - style.disc)
    return np.round(255 * np.clip(0.5 - beyond, 0, 1)).astype(np.uint8)


def picture(side, label, seed, index):
    """The index-th picture of a seed, independent of earlier ones."""
    random = np.random.default_rng([seed, side, index])
    style = STYLES[side]
    paths = place_paths(random, side, style)
    discs = (paths[0][0][0], paths[0][-1][1]) if label else nearest_ends(*paths[:2])[0]
    return draw(side, style, paths, discs)


def labels_of(count, seed):
    """Half of them 1, in an order that the seed decides."""
    return np.random.default_rng([seed, count]).permutation(np.arange(count) % 2).astype(np.int64)


def _drawn(arguments):
    return picture(*arguments)


def generate(side, count, seed, workers=1):
    """uint8 [count, side, side] and labels [count]."""
    labels = labels_of(count, seed)
    jobs = [(side, int(label), seed, index) for index, label in enumerate(labels)]
    if workers == 1:
        images = [picture(*job) for job in jobs]
    else:
        with multiprocessing.Pool(workers) as pool:
            images = pool.map(_drawn, jobs, chunksize=64)
    return np.stack(images) if images else np.empty((0, side, side), np.uint8), labels


# ---- the answer, from pixels alone ----------------------------------------------------------------------------------


LIT = 64  # of 255: within half a thickness and a quarter of a pixel, so that a pixel at each end of a dash is


@functools.lru_cache
def offsets_within(radius):
    reach = int(radius)
    return [
        (dy, dx)
        for dy in range(-reach, reach + 1)
        for dx in range(-reach, reach + 1)
        if dy * dy + dx * dx <= radius * radius
    ]


def shifted(mask, dy, dx):
    height, width = mask.shape
    result = np.zeros_like(mask)
    result[max(dy, 0) : height + min(dy, 0), max(dx, 0) : width + min(dx, 0)] = (
        mask[max(-dy, 0) : height + min(-dy, 0), max(-dx, 0) : width + min(-dx, 0)]
    )  # fmt: skip
    return result


def reached(lit, start, reach):
    """All lit pixels that a chain of lit pixels, each within reach of the one before, joins to those of start."""
    group, edge = start & lit, start & lit
    while edge.any():
        near = functools.reduce(np.logical_or, (shifted(edge, dy, dx) for dy, dx in offsets_within(reach)))
        edge = near & lit & ~group
        group = group | edge
    return group


def discs_of(image):
    """A mask for each disc: where a whole neighbourhood is lit; dashes are too thin for that."""
    side = image.shape[-1]
    core = functools.reduce(
        np.logical_and, (shifted(image > 127, dy, dx) for dy, dx in offsets_within(STYLES[side].disc - 0.6))
    )
    found = []
    while core.any():
        first = np.zeros_like(core)
        first.flat[np.argmax(core)] = True
        disc = reached(core, first, 1.5)
        found.append(disc)
        core = core & ~disc
    return found


def is_connected(image):
    """Whether a path joins the two discs."""
    first, second = discs_of(image)
    return bool((reached(image >= LIT, first, STYLES[image.shape[-1]].reach) & second).any())


# ---- pictures to look at -------------------------------------------------------------------------------------------


def draw_sheet(path, seed=0, columns=4):
    """Of each side some pictures of either label, with is_connected's result: the pixels connected with each disc in
    colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = np.array([[0x3B, 0xC0, 0xD3], [0xFF, 0x8A, 0x3D]])
    figure, axes = plt.subplots(len(STYLES), 2 * columns, figsize=(2 * columns * 1.5, len(STYLES) * 1.66))
    for row, side in zip(axes, STYLES):
        for at, axis in enumerate(row):
            label = int(at < columns)
            image = picture(side, label, seed, at)
            if is_connected(image) != bool(label):
                raise SystemExit(
                    f"side {side}, seed {seed}, picture {at}: drawn as {label}, and the pixels say otherwise"
                )
            shown = np.repeat(image[:, :, None], 3, axis=2)
            for disc, colour in list(zip(discs_of(image), colours))[:: -1 if label else 1]:
                group = reached(image >= LIT, disc, STYLES[side].reach)
                group = functools.reduce(np.logical_or, (shifted(group, dy, dx) for dy, dx in offsets_within(1)))
                shown[group] = (image[group][:, None] / 255 * colour).astype(np.uint8)
            axis.imshow(shown, interpolation="nearest")
            axis.set_axis_off()
            axis.set_title(f"{side} × {side}: {label}", fontsize=8)
    figure.tight_layout(pad=0.4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, choices=list(STYLES), default=32, help="pixels (default: 32)")
    parser.add_argument("--count", type=int, default=1000, help="pictures (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument(
        "--workers", type=int, default=1, help="processes; the pictures do not depend on it (default: 1)"
    )
    parser.add_argument(
        "--out", type=Path, help=".npz with images, uint8 [count, side, side], and labels, int64 [count]"
    )
    parser.add_argument("--sheet", type=Path, help="draw some of each side into this .png (needs matplotlib)")
    arguments = parser.parse_args()
    if arguments.out is None and arguments.sheet is None:
        parser.error("nothing to do: accepted --out, --sheet or both")
    for name in ("count", "seed", "workers"):
        if getattr(arguments, name) < (name == "workers"):
            parser.error(f"--{name}: {getattr(arguments, name)}, accepted {int(name == 'workers')} and more")
    if arguments.out:
        images, labels = generate(arguments.side, arguments.count, arguments.seed, arguments.workers)
        np.savez_compressed(arguments.out, images=images, labels=labels)
        print(f"{arguments.out}: {len(labels)} pictures, {labels.sum()} of them connected")
    if arguments.sheet:
        draw_sheet(arguments.sheet, arguments.seed)
        print(f"{arguments.sheet}: pictures of {', '.join(map(str, STYLES))} pixels a side")
    return 0


if __name__ == "__main__":
    sys.exit(main())
