"""The sides of the comparison: Tessera, standard attention, PyTorch's own. Inputs and outputs are [B, S, H, D]."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera
from tessera.compare.frameworks import NumPy, PyTorch
from tessera.compare.shape import Shape

_SEED = 7  # of the dropout


class Inputs:
    """q, d_o [B, S, H, D] and k, v [B, S, Hkv, D], standard normal; d_o backward only."""

    def __init__(self, shape: Shape, framework: NumPy | PyTorch):
        random = np.random.default_rng(0)

        def normal(dims: tuple[int, ...]) -> Any:
            return framework.array(random.standard_normal(dims, np.float32), shape.dtype)

        self.q = normal(shape.query_shape)
        self.k, self.v = normal(shape.key_shape), normal(shape.key_shape)
        self.d_o = normal(shape.query_shape) if shape.backward else None


class Side:
    """One way to compute attention. `prepare` is not timed: it makes suitable layouts and, backward, runs the forward
    pass."""

    name: str  # in JSON
    title: str  # in the table
    kernel = ""  # the kernel that runs

    def __init__(self, shape: Shape, framework: Any, inputs: Inputs):
        self.shape, self.framework, self.inputs = shape, framework, inputs

    def needs_bytes(self) -> int:
        """Estimate of the memory that must be free before it is tried; 0 if nothing grows with the square of the
        length."""
        return 0

    def extra_bytes(self) -> int | None:
        """Memory in addition to inputs and outputs, if it is known; otherwise the measured value is used."""
        return None

    def prepare(self) -> None: ...

    def call(self) -> Any:
        raise NotImplementedError

    def results(self, returned: Any) -> dict[str, Any]:
        """The results of `call` by name: o forward; d_q, d_k, d_v backward."""
        raise NotImplementedError


def _named(shape: Shape, arrays: Any) -> dict[str, Any]:
    return dict(zip(("d_q", "d_k", "d_v") if shape.backward else ("o",), arrays))


class Tessera(Side):
    name = title = "Tessera"

    def __init__(self, shape: Shape, framework: Any, inputs: Inputs, threads: int, kernel: str):
        super().__init__(shape, framework, inputs)
        self._options: dict[str, Any] = {"causal": shape.causal, "threads": threads, "kernel": kernel}
        if shape.dropout_p:
            self._options.update(dropout_p=shape.dropout_p, dropout_seed=_SEED)

    def extra_bytes(self) -> int:
        """The plan's workspace, and the LSE."""
        return self._workspace_bytes + 4 * self.shape.batch * self.shape.heads * self.shape.length

    def prepare(self) -> None:
        q, k, v = self.inputs.q, self.inputs.k, self.inputs.v
        plan = tessera.plan(q, k, v, direction=self.shape.direction, as_dict=True, **self._options)
        self.kernel = plan["kernel"]
        self._workspace_bytes = plan["workspace_bytes"]
        if self.shape.backward:
            forward = {**self._options, "kernel": "auto"}  # the requested kernel may be a backward one
            self._o, self._lse = tessera.attention(q, k, v, return_lse=True, **forward)

    def call(self) -> Any:
        q, k, v, d_o = self.inputs.q, self.inputs.k, self.inputs.v, self.inputs.d_o
        if self.shape.backward:
            return tessera.attention_backward(q, k, v, self._o, self._lse, d_o, **self._options)
        return (tessera.attention(q, k, v, **self._options),)

    def results(self, returned: Any) -> dict[str, Any]:
        return _named(self.shape, returned)


class Standard(Side):
    """The textbook's algorithm: stores P = softmax(scale Q K^T) and uses whole matrix products.

    The heads of a key head are stacked as rows, q [B, Hkv, G S, D], so that keys are never repeated.
    """

    name, title = "standard", "standard attention"

    def needs_bytes(self) -> int:
        """P, and backward dS; dropout's factors, and P with dropout applied; the mask."""
        matrices = 2 if self.shape.backward else self.framework.softmax_matrices
        matrices += 2 if self.shape.dropout_p else 0
        mask = self.shape.length**2 if self.shape.causal else 0
        return matrices * self.shape.scores * self.framework.product_bytes(self.shape.dtype) + mask

    def extra_bytes(self) -> int:
        return self.needs_bytes()

    def prepare(self) -> None:
        self.kernel = f"matrix products of {self.framework.name}"
        first = self.framework.heads_first
        self._q, self._k, self._v = (self._stacked(first(x)) for x in (self.inputs.q, self.inputs.k, self.inputs.v))
        if self.shape.backward:
            self._d_o = self._stacked(first(self.inputs.d_o))
            self._o = self._forward()

    def call(self) -> Any:
        return self._backward() if self.shape.backward else (self._forward(),)

    def results(self, returned: Any) -> dict[str, Any]:
        s, d = self.shape.length, self.shape.head_dim
        unstacked = (x.reshape(self.shape.batch, -1, s, d).swapaxes(1, 2) for x in returned)
        return _named(self.shape, [self.framework.rounded(x, self.shape.dtype) for x in unstacked])

    def _stacked(self, x: Any) -> Any:
        return x.reshape(self.shape.batch, self.shape.heads_kv, -1, self.shape.head_dim)

    def _forward(self) -> Any:
        b, hkv, s = self.shape.batch, self.shape.heads_kv, self.shape.length
        scores = self._q @ self._k.swapaxes(-1, -2)
        scores *= self.shape.scale
        if self.shape.causal:
            self.framework.hide(scores.reshape(b, hkv, -1, s, s), self.framework.hidden(s))
        p = self.framework.softmax(scores)
        del scores
        applied = p
        if self.shape.dropout_p:
            kept = self.framework.kept(p, self.shape.dropout_p, _SEED)
            applied = p * kept
        if self.shape.backward:
            self._p, self._applied = p, applied
            self._kept = kept if self.shape.dropout_p else None
        return applied @ self._v

    def _backward(self) -> Any:
        d_v = self._applied.swapaxes(-1, -2) @ self._d_o
        d_s = self._d_o @ self._v.swapaxes(-1, -2)
        if self._kept is not None:
            d_s *= self._kept
        d_s -= (self._d_o * self._o).sum(-1)[..., None]
        d_s *= self._p
        d_s *= self.shape.scale
        return d_s @ self._k, d_s.swapaxes(-1, -2) @ self._q, d_v


class PyTorchAttention(Side):
    """torch.nn.functional.scaled_dot_product_attention, with the backend that PyTorch chooses."""

    name, title = "pytorch", "PyTorch's own"

    def __init__(self, shape: Shape, framework: PyTorch, inputs: Inputs):
        super().__init__(shape, framework, inputs)
        self._torch = framework.torch
        self._options = {"is_causal": shape.causal, "dropout_p": shape.dropout_p}
        if shape.heads != shape.heads_kv:
            self._options["enable_gqa"] = True
        self._inputs = [framework.heads_first(x).requires_grad_(shape.backward) for x in (inputs.q, inputs.k, inputs.v)]
        choice = self._torch._fused_sdp_choice(*self._inputs, **self._options)
        names = {backend.value: name for name, backend in self._torch.nn.attention.SDPBackend.__members__.items()}
        self.kernel = names.get(choice, "unknown").lower().removesuffix("_attention")

    def needs_bytes(self) -> int:
        """None with flash. Written out ("math"), the scores and their softmax in float32, and backward their
        gradients."""
        return 0 if self.kernel != "math" else (4 if self.shape.backward else 2) * 4 * self.shape.scores

    def prepare(self) -> None:
        if self.shape.backward:
            self._o = self._attend()
            self._d_o = self.framework.heads_first(self.inputs.d_o)

    def _attend(self) -> Any:
        return self._torch.nn.functional.scaled_dot_product_attention(*self._inputs, **self._options)

    def call(self) -> Any:
        if self.shape.backward:
            return self._torch.autograd.grad(self._o, self._inputs, self._d_o, retain_graph=True)
        with self._torch.no_grad():
            return (self._attend(),)

    def results(self, returned: Any) -> dict[str, Any]:
        return _named(self.shape, [x.transpose(1, 2) for x in returned])
