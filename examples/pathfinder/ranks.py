"""The processes of a training, one a GPU, as torchrun starts them: each has a part of every batch, or, with `over` > 1,
`over` of them have a part of each picture."""

import os
from datetime import timedelta

import tessera.torch
import torch
import torch.distributed as dist


class Ranks:
    def __init__(self, over, batch):
        """Alone without torchrun's environment."""
        self.rank, self.ranks = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
        if over < 1 or self.ranks % over:
            raise SystemExit(f"--over: {over}, accepted divisors of the number of processes, {self.ranks}")
        self.over, self.parts, self.part = over, self.ranks // over, self.rank // over
        if batch % self.parts:
            raise SystemExit(f"--batch: {batch}, accepted multiples of the {self.parts} parts over the processes")
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        self.parallel = None
        if self.ranks == 1:
            return
        if cuda:
            torch.cuda.set_device(self.device)
        # One process draws the held-out pictures while the others wait.
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=30))
        groups = [dist.new_group(range(n * over, (n + 1) * over)) for n in range(self.parts)]
        if over > 1:
            self.group = groups[self.part]
            self.parallel = tessera.torch.context_parallel(self.group, layout="contiguous")

    @property
    def first(self):
        return self.rank == 0

    def shard(self, x, dim):
        """This rank's tokens."""
        return x if self.parallel is None else self.parallel.shard(x, dim)

    def mean(self, x):
        """[B, width], the mean over all tokens of a picture. Its gradient is that of this rank's mean: `over` times as
        large, since `average` divides by all ranks, not by the number of pictures that they have."""
        mean = x.mean(1)
        if self.parallel is None:
            return mean
        total = mean.detach().clone()
        dist.all_reduce(total, group=self.group)
        return mean + (total / self.over - mean.detach())

    def mine(self, x):
        """The part of a batch."""
        return x.chunk(self.parts)[self.part]

    def average(self, tensors):
        """Over all ranks, in place."""
        if self.ranks == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, values in zip(tensors, (flat / self.ranks).split([tensor.numel() for tensor in tensors])):
            tensor.copy_(values.view_as(tensor))

    def sum_of_parts(self, count):
        """Of an integer that is the same on the ranks of a picture."""
        if self.ranks == 1:
            return count
        total = torch.tensor([count], device=self.device)
        dist.all_reduce(total)
        return int(total) // self.over

    def wait(self):
        if self.ranks > 1:
            dist.barrier()

    def agreed(self, value):
        """The first rank's truth value."""
        if self.ranks == 1:
            return value
        truth = torch.tensor([value], dtype=torch.int32, device=self.device)
        dist.broadcast(truth, 0)
        return bool(truth)

    def close(self):
        if self.ranks > 1:
            dist.destroy_process_group()
