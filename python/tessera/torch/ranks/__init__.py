"""Attention of one batch on many processes: `tessera.torch.context_parallel`."""

from .parallel import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel"]
