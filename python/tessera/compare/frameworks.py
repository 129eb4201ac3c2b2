"""The framework of the comparison: PyTorch if it is installed, otherwise NumPy. Only the functions that the peers
need."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.compare.errors import WrongUse


class NumPy:
    """NumPy arrays. NumPy lacks a half-precision matrix product, so standard attention uses float32 there."""

    name = "NumPy"

    def __init__(self, threads: int):
        self.version = np.__version__
        # Without threadpoolctl, the matrix product uses the threads that OPENBLAS_NUM_THREADS set at the start.
        try:
            from threadpoolctl import threadpool_limits
        except ImportError:
            self.threads_are_set = False
        else:
            threadpool_limits(threads, user_api="blas")
            self.threads_are_set = True

    def dtype(self, name: str) -> Any:
        if name != "bfloat16":
            return np.dtype(name)
        try:
            import ml_dtypes
        except ImportError:
            raise WrongUse("--dtype: bfloat16, without PyTorch accepted only where ml_dtypes is installed") from None
        return np.dtype(ml_dtypes.bfloat16)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.empty(shape, self.dtype(dtype))

    def array(self, values: np.ndarray, dtype: str) -> Any:
        return values.astype(self.dtype(dtype))

    def heads_first(self, x: Any) -> np.ndarray:
        """[B, S, H, D] as a contiguous [B, H, S, D] for matrix products."""
        return np.ascontiguousarray(x.swapaxes(1, 2), np.float32)

    def product_bytes(self, dtype: str) -> int:
        """Bytes of an element of a matrix product's result."""
        return 4

    def rounded(self, x: np.ndarray, dtype: str) -> Any:
        return x if dtype == "float32" else x.astype(self.dtype(dtype))

    def hidden(self, length: int) -> np.ndarray:
        """bool [S, S], True right of the diagonal."""
        return np.triu(np.ones((length, length), np.bool_), 1)

    def hide(self, s: np.ndarray, hidden: np.ndarray) -> None:
        np.copyto(s, -np.inf, where=hidden)

    def softmax(self, s: np.ndarray) -> np.ndarray:
        """In place of s."""
        s -= s.max(axis=-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(axis=-1, keepdims=True)
        return s

    softmax_matrices = 1  # matrices of the scores' size alive at once

    def kept(self, like: np.ndarray, p: float, seed: int) -> np.ndarray:
        """Dropout's factors in the shape of `like`: 0 with probability p, otherwise 1 / (1 - p)."""
        uniform = np.random.default_rng(seed).random(like.shape, np.float32)
        return np.where(uniform < p, np.float32(0), np.float32(1 / (1 - p)))

    def float64(self, x: Any) -> np.ndarray:
        return np.asarray(x).astype(np.float64)

    def nbytes(self, x: Any) -> int:
        return x.nbytes


class PyTorch:
    """Tensors of PyTorch, on one device."""

    name = "PyTorch"
    threads_are_set = True

    def __init__(self, threads: int, device: str = "cpu"):
        import torch

        self.torch, self.device, self.version = torch, device, torch.__version__
        torch.set_num_threads(threads)
        # PyTorch's first backward pass starts a thread and more; none of that is part of a side's memory.
        x = torch.zeros(1, 1, 8, 8, device=device, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().backward()

    def dtype(self, name: str) -> Any:
        return getattr(self.torch, name)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.torch.empty(shape, dtype=self.dtype(dtype), device=self.device)

    def array(self, values: np.ndarray, dtype: str) -> Any:
        return self.torch.from_numpy(values).to(self.device, self.dtype(dtype))

    def heads_first(self, x: Any) -> Any:
        return x.transpose(1, 2).contiguous()

    def product_bytes(self, dtype: str) -> int:
        return self.dtype(dtype).itemsize

    def rounded(self, x: Any, dtype: str) -> Any:
        return x.to(self.dtype(dtype))

    def hidden(self, length: int) -> Any:
        return self.torch.ones(length, length, dtype=self.torch.bool, device=self.device).triu_(1)

    def hide(self, s: Any, hidden: Any) -> None:
        s.masked_fill_(hidden, float("-inf"))

    def softmax(self, s: Any) -> Any:
        return self.torch.softmax(s, -1)

    softmax_matrices = 2

    def kept(self, like: Any, p: float, seed: int) -> Any:
        generator = self.torch.Generator(self.device).manual_seed(seed)
        return self.torch.empty_like(like).bernoulli_(1 - p, generator=generator).div_(1 - p)

    def float64(self, x: Any) -> np.ndarray:
        return x.detach().to("cpu", self.torch.float64).numpy()

    def nbytes(self, x: Any) -> int:
        return x.numel() * x.element_size()


def installed(threads: int, device: str) -> NumPy | PyTorch:
    """PyTorch if it can be imported, otherwise NumPy."""
    try:
        return PyTorch(threads, device)
    except ImportError:
        return NumPy(threads)
