"""A small transformer over pixels learns Pathfinder, with Tessera's attention, both ways, over side x side tokens.

    train=examples/pathfinder/train.py
    python $train --side 64 --folder out/64 --minutes 9                              # stops, and keeps its state
    python $train --side 64 --folder out/64 --minutes 9 --resume                     # continues as if never stopped
    python $train --side 128 --folder out/128 --init out/64/checkpoint.pt            # stretches the positions
    python $train --side 256 --folder out/256 --init out/128/checkpoint.pt --near 20 # block-sparse
    torchrun --nproc-per-node 4 $train --side 256 --folder out/256 --resume          # a batch over four GPUs
    torchrun --nproc-per-node 4 $train --side 256 --folder out/256 --resume --over 4 # each picture over four GPUs

Attention is full, or, with --near, of pixels in blocks of 128 at most so many rows away, by a block mask: at 256 pixels
a side and 20 rows this is a sixth of all pairs. The first paper also trained Path-256 with block-sparse attention.

Under torchrun each process has a part of every batch and its own GPU (without GPUs: gloo); --over N divides each
picture's tokens over N processes, whose attention is tessera.torch.context_parallel's (ranks.py), with a window of as
many rows. The pictures and, but for rounding, the results are those of one process, so any call may --resume another's.

Every picture it trains on is new (drawing.py). In the folder: the held-out pictures (pathfinder.py drew them),
checkpoint.pt, weights.pt (a sixth of it: the weights alone, in bfloat16) and curve.csv, whose last columns are the
accuracy on those pictures, with its 95 % interval. --init with --steps 0 evaluates the given weights.
"""

import argparse
import csv
import math
import sys
import time
from pathlib import Path

import numpy as np
import tessera.torch
import torch
from torch import nn

import drawing
import pathfinder
from ranks import Ranks

HELD_OUT_SEED = 1_000_003
COLUMNS = ("step", "pictures", "seconds", "loss", "accuracy", "held_out", "low", "high")


# ---- the model ------------------------------------------------------------------------------------------------------


def rotation(side, positions_of, head_dim, device):
    """cos and sin [side * side, head_dim / 2] of rotary positions in two dimensions: half of a head's pairs depend on
    the row, half on the column. positions_of: the side that defines the units; it differs from `side` if positions were
    scaled."""
    wavelengths = 4 * 32 ** torch.linspace(0, 1, head_dim // 4, device=device)  # of 4 to 128 pixels
    at = torch.arange(side, device=device) * (positions_of / side)
    angles = 2 * math.pi * at[:, None] / wavelengths
    rows = angles[:, None].expand(side, side, -1)
    turned = torch.cat([rows, rows.transpose(0, 1)], -1).flatten(0, 1)
    return turned.cos(), turned.sin()


def rotate(x, cos, sin):  # [B, S, H, D]
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


BLOCK = 128  # pixels, one after another


def near_blocks(side, near, device):
    """The block_mask of pixels at most `near` rows away, whole blocks; None: all of them."""
    if near is None:
        return None

    def visible(i, j):
        first, last = (torch.maximum(i, j) * BLOCK) // side, (torch.minimum(i, j) * BLOCK + BLOCK - 1) // side
        return first - last <= near

    return tessera.torch.block_mask(visible, side * side, side * side, block=(BLOCK, BLOCK), device=device)


def attention_of(side, near, ranks):
    """attention(q, k, v) of this process's tokens."""
    if ranks.parallel is not None:
        seen = {} if near is None else {"window": (near * side, near * side)}
        return lambda q, k, v: ranks.parallel.attention(q, k, v, **seen)
    blocks = near_blocks(side, near, ranks.device)
    seen = {} if blocks is None else {"block_mask": blocks, "mask_block": (BLOCK, BLOCK)}
    return lambda q, k, v: tessera.torch.attention(q, k, v, **seen)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, cos, sin, attention):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attention(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """One token a pixel. It starts from its stem x stem neighbouring pixels; after that only attention passes
    information between tokens."""

    def __init__(self, width, heads, layers, stem):
        super().__init__()
        self.head_dim = width // heads
        self.pixel = nn.Conv2d(1, width, stem, padding=stem // 2)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.answer = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, images, positions_of, near, ranks):  # uint8 [B, side, side] -> logits [B]
        side = images.shape[1]
        attention = attention_of(side, near, ranks)
        cos, sin = (ranks.shard(x, 0) for x in rotation(side, positions_of, self.head_dim, images.device))
        x = self.pixel(images[:, None].float() / 255).flatten(2).transpose(1, 2).contiguous()  # [B, side * side, width]
        x = ranks.shard(x, 1)
        for block in self.blocks:
            x = block(x, cos, sin, attention)
        return self.answer(ranks.mean(self.norm(x)))[:, 0]


# ---- pictures -------------------------------------------------------------------------------------------------------


def held_out_pictures(folder, side, count, workers):
    """Generated once, then kept in the folder."""
    file = folder / f"held-out-{side}-{count}.npz"
    if not file.exists():
        print(f"drawing {count} pictures into {file}", flush=True)
        images, labels = pathfinder.generate(side, count, HELD_OUT_SEED, workers)
        np.savez_compressed(file, images=images, labels=labels)
    held = np.load(file)
    return torch.from_numpy(held["images"]), torch.from_numpy(held["labels"]).float()


def stretched(side, held_side, held_positions_of):
    """The side in whose units the positions are if a model of another side continues here: a dash and its gap keep
    their length."""
    period = {side: style.dash + style.gap for side, style in pathfinder.STYLES.items()}
    return side * (held_positions_of / held_side) * period[held_side] / period[side]


def interval(right, count, z=1.96):
    """Wilson's interval of a fraction of right answers."""
    share = right / count
    centre, spread = share + z * z / (2 * count), z * math.sqrt(
        share * (1 - share) / count + z * z / (4 * count * count)
    )
    return (centre - spread) / (1 + z * z / count), (centre + spread) / (1 + z * z / count)


# ---- training -------------------------------------------------------------------------------------------------------


class Training:
    def __init__(self, options):
        self.options = options
        self.ranks = Ranks(options.over, options.batch)
        self.device = self.ranks.device
        options.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint, self.weights, self.curve = (
            options.folder / name for name in ("checkpoint.pt", "weights.pt", "curve.csv")
        )
        torch.manual_seed(options.seed)
        self.model = Model(options.width, options.heads, options.layers, options.stem).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.rate, betas=(0.9, 0.98),
                                           weight_decay=0.01,
                                           fused=self.device.type == "cuda")  # fmt: skip
        self.step, self.seconds, self.positions_of = 0, 0.0, options.side
        if options.resume:
            self.load(self.checkpoint)
        elif options.init:
            held = torch.load(options.init, map_location=self.device)
            self.model.load_state_dict(held["model"])
            self.positions_of = stretched(options.side, held["side"], held["positions_of"])
        self.stream = drawing.Stream(options.side, options.batch, options.seed, self.device)
        if self.ranks.first:
            held_out_pictures(options.folder, options.side, options.held_out, options.workers)
        self.ranks.wait()
        images, labels = held_out_pictures(options.folder, options.side, options.held_out, options.workers)
        self.held_out = images.to(self.device), labels.to(self.device)

    def load(self, file):
        held = torch.load(file, map_location=self.device)
        if held["side"] != self.options.side:
            raise SystemExit(
                f"--resume: {file} is of side {held['side']}, --side says {self.options.side}; --init stretches it"
            )
        self.model.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.step, self.seconds, self.positions_of = held["step"], held["seconds"], held["positions_of"]

    def save(self):
        if not self.ranks.first:
            return
        temporary = self.checkpoint.with_suffix(".new")
        model = self.model.state_dict()
        about = {"side": self.options.side, "positions_of": self.positions_of, "step": self.step}
        torch.save(
            {"model": model, "optimizer": self.optimizer.state_dict(), "seconds": self.seconds, **about}, temporary
        )
        temporary.replace(self.checkpoint)
        torch.save({"model": {name: value.to(torch.bfloat16) for name, value in model.items()}, **about}, self.weights)

    def logits(self, images):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.model(images, self.positions_of, self.options.near, self.ranks).float()

    def train_step(self):
        """Its pictures depend on the step's number alone, so a resumed training continues the same way. Loss and
        accuracy, on the device."""
        o = self.options
        images, labels = map(self.ranks.mine, self.stream.batch(self.step))
        for group in self.optimizer.param_groups:
            group["lr"] = (
                o.rate
                * min(1, (self.step + 1) / o.warmup)
                * 0.5
                * (1 + math.cos(math.pi * min(1, self.step / o.steps)))
            )
        logits = self.logits(images)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.ranks.average([parameter.grad for parameter in self.model.parameters()])
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return torch.stack([loss.detach(), ((logits > 0) == (labels > 0)).float().mean()])  # of this rank's part

    @torch.no_grad()
    def evaluate(self):
        ranks, right = self.ranks, 0
        images, labels = (x[ranks.part :: ranks.parts] for x in self.held_out)
        for first in range(0, len(labels), self.options.batch):
            part = slice(first, first + self.options.batch)
            right += int(((self.logits(images[part]) > 0) == (labels[part] > 0)).sum())
        right = ranks.sum_of_parts(right)
        count = len(self.held_out[1])
        return right / count, *interval(right, count)

    def report(self, losses):
        mean = torch.stack(losses).mean(0)
        self.ranks.average([mean])
        loss, accuracy = mean.tolist()
        held_out = self.evaluate()
        if not self.ranks.first:
            return held_out[0]
        row = (self.step, self.step * self.options.batch, self.seconds, loss, accuracy, *held_out)
        fresh = self.step <= self.options.report or not self.curve.exists()
        with self.curve.open("w" if fresh and not self.options.resume else "a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(COLUMNS)
            writer.writerow([f"{value:.5g}" if isinstance(value, float) else value for value in row])
        print(f"step {self.step:6d}  {self.seconds:7.0f} s  loss {loss:.4f}  trained on {accuracy:.3f}  held out "
              f"{held_out[0]:.3f} "
              f"({held_out[1]:.3f} .. {held_out[2]:.3f})", flush=True)  # fmt: skip
        return held_out[0]

    def run(self):
        o = self.options
        count = sum(parameter.numel() for parameter in self.model.parameters())
        ranks = self.ranks
        if ranks.first:
            print(
                f"{count / 1e6:.2f} million parameters, {o.side * o.side} tokens, {self.device}, from step {self.step}"
                + (f", {ranks.parts} x {ranks.over} processes" if ranks.ranks > 1 else ""),
                flush=True,
            )
        if o.steps == 0:
            held_out = self.evaluate()
            if ranks.first:
                print("held out {:.3f} ({:.3f} .. {:.3f})".format(*held_out))
            return
        start, before, losses = time.monotonic(), self.seconds, []
        while self.step < o.steps and (o.minutes is None or ranks.agreed(time.monotonic() - start < 60 * o.minutes)):
            losses.append(self.train_step())
            self.seconds = before + time.monotonic() - start
            if self.step % o.report == 0:
                reached = self.report(losses)
                self.save()
                losses = []
                if o.until is not None and reached >= o.until:
                    break
        if losses:
            self.report(losses)
        self.save()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--side", type=int, choices=list(pathfinder.STYLES), default=32, help="pixels (default: 32)")
    add("--folder", type=Path, required=True, help="what is kept, and found again by --resume")
    going_on = parser.add_mutually_exclusive_group()
    going_on.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    going_on.add_argument(
        "--init", type=Path, help="begin with this checkpoint's weights, its positions stretched over the picture"
    )
    add("--minutes", type=float, help="stop after so many")
    add("--until", type=float, help="stop at this accuracy on the held-out pictures")
    for name, value, what in (
        ("steps", 20000, "of the whole training"), ("batch", 64, "pictures a step"),
        ("held-out", 1000, "pictures to be judged by"),
        ("report", 100, "steps from one report and checkpoint to the next"), ("warmup", 500, "steps"),
        ("width", 128, "of the model"),
        ("heads", 4, ""), ("layers", 6, ""), ("stem", 3, "pixels a side"), ("seed", 0, ""),
        ("workers", 1, "processes that draw the held-out pictures"),
    ):  # fmt: skip
        add(f"--{name}", type=int, default=value, help=f"{what} (default: {value})".strip())
    add("--over", type=int, default=1, help="processes that have a picture's tokens, under torchrun (default: 1)")
    add("--near", type=int, help="attention sees pixels at most so many rows away (default: all)")
    add("--rate", type=float, default=1e-3, help="of learning (default: 1e-3)")
    options = parser.parse_args(arguments)
    if options.width % (4 * options.heads):
        parser.error(f"--width: {options.width}, accepted multiples of 4 times --heads, {4 * options.heads}")
    if options.near is not None and options.near < 0:
        parser.error(f"--near: {options.near}, accepted 0 and more")
    if options.stem % 2 == 0:
        parser.error(f"--stem: {options.stem}, accepted odd numbers")
    training = Training(options)
    training.run()
    training.ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
