"""Thousands of Pathfinder pictures with PyTorch, on a GPU if there is one: the same paths, distances and ink as
pathfinder.py, but many pictures at a time. Training sees each picture once.
"""

import math

import torch

from pathfinder import MOST_TURN, SAME_DISTANCE, STYLES, TURN

TRIES, TURNS = 128, 6  # paths that are grown in parallel, the first one with room stays; directions tried for each dash
ROUNDING = 0.36  # from a point to the middle of its half pixel, at the most
AT_ONCE = {32: 2048, 64: 512, 128: 96, 256: 96}  # pictures a side that fit into some GB


def grid(cells, per_pixel, device):
    """x and y [cells, cells], in pixels."""
    at = torch.arange(cells, device=device, dtype=torch.float32) / per_pixel
    return at[None, :].expand(cells, cells), at[:, None].expand(cells, cells)


def distances(dashes, x, y):
    """From every place of the grid to the nearest point of every dash. dashes [B, N, 2, 2], ends of x and y -> [B, N,
    cells, cells]."""
    start, line = dashes[:, :, 0], dashes[:, :, 1] - dashes[:, :, 0]
    from_x = x - start[..., 0, None, None]
    from_y = y - start[..., 1, None, None]
    line_x, line_y = line[..., 0, None, None], line[..., 1, None, None]
    share = ((from_x * line_x + from_y * line_y) / (line_x**2 + line_y**2)).clamp_(0, 1)
    return torch.hypot(from_x - share * line_x, from_y - share * line_y)


def first_true(mask):
    """Along the last axis: where, and whether anywhere."""
    return mask.int().argmax(-1), mask.any(-1)


class Board:
    """Each half pixel's distance from what a path must avoid: [B, 2 side, 2 side]."""

    def __init__(self, count, side, device):
        self.side, self.style = side, STYLES[side]
        self.x, self.y = grid(2 * side, 2, device)
        self.room = torch.full((count, 2 * side, 2 * side), math.inf, device=device)
        low, high = self.style.disc + 1, side - 2 - self.style.disc
        outside = (self.x < low) | (self.y < low) | (self.x > high) | (self.y > high)
        self.room[:, outside] = -math.inf

    def is_free(self, points, more):
        """points [B, ..., P, 2] -> [B, ...]: whether all have room, and `more` pixels beyond it."""
        cell = (2 * points).round().long()
        within = ((cell >= 0) & (cell < 2 * self.side)).all(-1)
        cell = cell.clamp_(0, 2 * self.side - 1)
        flat = (cell[..., 1] * 2 * self.side + cell[..., 0]).flatten(1)
        room = self.room.flatten(1).gather(1, flat).view(within.shape)
        return (within & (room > ROUNDING + more)).all(-1)

    def block(self, path, disc):
        """Around a path's dashes [B, N, 2, 2], and by `disc` more around its ends."""
        near = distances(path, self.x, self.y).amin(1)
        if disc:
            for end in (path[:, 0, 0], path[:, -1, 1]):
                near = torch.minimum(
                    near, torch.hypot(self.x - end[:, 0, None, None], self.y - end[:, 1, None, None]) - disc
                )
        self.room = torch.minimum(self.room, near - self.style.clearance)


def grow_paths(board, dashes, with_discs, generator):
    """TRIES paths a picture [B, TRIES, dashes, 2, 2], and which of them have room."""
    style, device, count = board.style, board.room.device, len(board.room)
    shares = torch.linspace(0, 1, int(style.dash) + 2, device=device)[:, None]
    at = board.side * torch.rand(count, TRIES, 2, device=device, generator=generator)
    direction = 2 * math.pi * torch.rand(count, TRIES, device=device, generator=generator)
    alive = torch.ones(count, TRIES, dtype=torch.bool, device=device)
    path, own = [], []
    for index in range(dashes):
        turn = (TURN * torch.randn(count, TRIES, TURNS, device=device, generator=generator)).clamp_(
            -MOST_TURN, MOST_TURN
        )
        turned = direction[..., None] + turn
        ahead = torch.stack([turned.cos(), turned.sin()], -1)
        start = at[:, :, None] + (style.gap if index else 0) * ahead
        points = start[..., None, :] + shares * (style.dash * ahead)[..., None, :]  # [B, TRIES, TURNS, P, 2]
        free = board.is_free(points, style.disc if with_discs and index in (0, dashes - 1) else 0)
        for earlier in own[:-2]:  # no loops
            apart = points[:, :, :, :, None] - earlier[:, :, None, None]
            free &= (apart.square().sum(-1) >= style.clearance**2).flatten(3).all(-1)
        which, found = first_true(free)
        alive &= found
        pick = which[..., None, None, None].expand(-1, -1, 1, *points.shape[3:])
        chosen = points.gather(2, pick)[:, :, 0]  # [B, TRIES, P, 2]
        direction = turned.gather(2, which[..., None])[..., 0]
        path.append(chosen[:, :, [0, -1]])
        own.append(chosen)
        at = chosen[:, :, -1]
    return torch.stack(path, 2), alive


def nearest_ends(first, second):
    """As pathfinder.nearest_ends, of paths [B, ..., N, 2, 2]: the pair [B, ..., 2, 2], and how unlike its distance
    is."""
    ends = [torch.stack([path[..., 0, 0, :], path[..., -1, 1, :]], -2) for path in (first, second)]  # [B, ..., 2, 2]
    wanted = (ends[0][..., 0, :] - ends[0][..., 1, :]).norm(dim=-1)
    pairs = torch.stack([torch.stack([ends[0][..., i, :].expand_as(ends[1][..., j, :]), ends[1][..., j, :]], -2)
                         for i in (0, 1) for j in (0, 1)], -3)  # [B, ..., 4, 2, 2]  # fmt: skip
    apart = (pairs[..., 0, :] - pairs[..., 1, :]).norm(dim=-1)
    which = (apart - wanted[..., None]).abs().argmin(-1, keepdim=True)
    pair = pairs.gather(-3, which[..., None, None].expand(*which.shape, 2, 2)).squeeze(-3)
    return pair, (apart.gather(-1, which)[..., 0] / wanted - 1).abs()


def place_paths(count, side, device, generator):
    """All paths of pictures, as [B, dashes, 2, 2] each, the two long ones first; for pictures in which all have
    room."""
    style, board, paths = STYLES[side], Board(count, side, device), []
    complete = torch.ones(count, dtype=torch.bool, device=device)
    for at in range(2 + style.distractors):
        grown, alive = grow_paths(board, style.dashes if at < 2 else style.distractor_dashes, at < 2, generator)
        if at == 1:
            alive &= nearest_ends(paths[0][:, None], grown)[1] <= SAME_DISTANCE
        which, found = first_true(alive)
        complete &= found
        path = grown.gather(1, which[:, None, None, None, None].expand(-1, 1, *grown.shape[2:]))[:, 0]
        paths.append(path)
        board.block(path, style.disc if at < 2 else 0)
    return [path[complete] for path in paths]


def draw(side, paths, discs):
    """uint8 [B, side, side], as pathfinder.draw. discs: centres [B, 2, 2]."""
    style = STYLES[side]
    x, y = grid(side, 1, discs.device)
    beyond = torch.stack([distances(path, x, y).amin(1) for path in paths]).amin(0) - style.thickness / 2
    away = torch.hypot(x - discs[..., 0, None, None], y - discs[..., 1, None, None]).amin(1) - style.disc
    return (255 * (0.5 - torch.minimum(beyond, away)).clamp_(0, 1)).round().to(torch.uint8)


def generate(side, count, seed, device):
    """uint8 [count, side, side] and labels, float32 [count], half of them 1 on average. The same for the same seed on
    the same device."""
    generator = torch.Generator(device).manual_seed(seed)
    images, labels, have = [], [], 0
    while have < count:
        # Up to a third of them have no room for a path.
        paths = place_paths(min((count - have) * 3 // 2 + 8, AT_ONCE[side]), side, device, generator)
        label = torch.rand(len(paths[0]), device=device, generator=generator) < 0.5
        own = torch.stack([paths[0][:, 0, 0], paths[0][:, -1, 1]], 1)
        discs = torch.where(label[:, None, None], own, nearest_ends(*paths[:2])[0])
        images.append(draw(side, paths, discs))
        labels.append(label.float())
        have += len(label)
    return torch.cat(images)[:count], torch.cat(labels)[:count]


class Stream:
    """Endless pictures: a batch depends only on its number and the seed."""

    def __init__(self, side, batch, seed, device):
        self.side, self.batch_size, self.seed, self.device = side, batch, seed, device
        self.batches = max(1, AT_ONCE[side] // 2 // batch) if device.type == "cuda" else 1  # drawn at a time
        self.at, self.drawn = -1, None

    def batch(self, step):
        """uint8 [batch, side, side] and float32 [batch]."""
        at, part = divmod(step, self.batches)
        if at != self.at:
            seed = (self.seed << 32) + at
            self.at, self.drawn = at, generate(self.side, self.batches * self.batch_size, seed, self.device)
        here = slice(part * self.batch_size, (part + 1) * self.batch_size)
        return self.drawn[0][here], self.drawn[1][here]
