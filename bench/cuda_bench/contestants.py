"""Tessera, its families by name, and PyTorch's flash and cuDNN backends: calls that are timed, results that are
checked.

Tensors are [B, S, H, D] in memory; scaled_dot_product_attention sees them as [B, H, S, D]. Backward is the backward
kernels alone, on the saved results of forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera
import tessera.torch
from cuda_bench.problem import Inputs, Problem

aten = torch.ops.aten
Call = Callable[[], object]
Results = Callable[[object], "dict[str, Tensor]"]


class NotOffered(Exception):
    """This contestant does not support the call."""


def _gradients(returned) -> dict[str, Tensor]:
    return dict(zip(("d_q", "d_k", "d_v"), returned))


def _turned(returned) -> dict[str, Tensor]:
    """[B, H, S, D] as [B, S, H, D]."""
    return {name: x.transpose(1, 2) for name, x in _gradients(returned).items()}


class Contestant:
    name: str
    title: str

    def __init__(self, problem: Problem, inputs: Inputs, direction: str):
        self.problem, self.inputs, self.direction = problem, inputs, direction
        self.how = ""  # how backward is called, if not as usual

    def call(self) -> tuple[Call, Results]:
        """The call, and how its results are read: o forward, d_q, d_k, d_v backward."""
        return self.forward() if self.direction == "forward" else self.backward()

    def forward(self) -> tuple[Call, Results]:
        raise NotImplementedError

    def backward(self) -> tuple[Call, Results]:
        raise NotImplementedError


class Tessera(Contestant):
    """The plan's kernel."""

    name, title = "tessera", "Tessera"
    kernel = "auto"

    def options(self) -> dict:
        p = self.problem
        options = {"causal": p.causal, "deterministic": p.deterministic}
        if p.window >= 0:
            options["window"] = (p.window, 0)
        if p.lengths:
            cu = self.inputs.cu_seqlens
            options.update(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=p.seqlen_q, max_seqlen_k=p.seqlen_k)
        if p.page_size:
            options.update(page_table=self.inputs.page_table, seqused_k=self.inputs.seqused_k)
        return options | self.inputs.options

    def plan(self) -> dict:
        x = self.inputs
        return tessera.plan(x.q, x.k, x.v, direction=self.direction, as_dict=True, **self.options())

    def forward(self) -> tuple[Call, Results]:
        x, options = self.inputs, self.options() | {"kernel": self.kernel}

        def call() -> Tensor:
            with torch.no_grad():
                return tessera.torch.attention(x.q, x.k, x.v, **options)

        return call, lambda o: {"o": o}

    def backward(self) -> tuple[Call, Results]:
        x, options = self.inputs, self.options()
        with torch.no_grad():
            o, lse = tessera.torch.attention(x.q, x.k, x.v, return_lse=True, **options)
        options.update(kernel=self.kernel, grad_bias=self.problem.bias_gradient)
        return lambda: tessera.attention_backward(x.q, x.k, x.v, o, lse, x.d_o, **options), _gradients


class Sm80(Tessera):
    """The mma.sync kernels, which run on every GPU from Ampere on, in cells where a plan chooses others."""

    name, title = "sm80", "sm80"

    def __init__(self, problem: Problem, inputs: Inputs, direction: str):
        super().__init__(problem, inputs, direction)
        self.kernel = {"forward": "fwd_sm80", "backward": "bwd_sm80"}[direction]
        if self.plan()["kernel"] == self.kernel:
            raise NotOffered(f"Tessera itself runs {self.kernel}")


class Sm90(Tessera):
    """Hopper's kernels that a plan does not choose by itself: backward, and of few query rows."""

    name, title = "sm90", "sm90"

    def __init__(self, problem: Problem, inputs: Inputs, direction: str):
        super().__init__(problem, inputs, direction)
        self.kernel = {"forward": "decode_sm90", "backward": "bwd_sm90"}[direction]
        if self.plan()["kernel"] == self.kernel:
            raise NotOffered(f"Tessera itself runs {self.kernel}")
        x = self.inputs
        try:
            tessera.plan(x.q, x.k, x.v, direction=direction, kernel=self.kernel, **self.options())
        except ValueError as refusal:
            raise NotOffered(str(refusal)) from None


class _Sdpa(Contestant):
    """A backend of scaled_dot_product_attention."""

    backend: SDPBackend

    def __init__(self, problem: Problem, inputs: Inputs, direction: str):
        super().__init__(problem, inputs, direction)
        if problem.deterministic:
            raise NotOffered("measured without the deterministic option only")
        if problem.lengths or problem.window >= 0 or problem.page_size:
            raise NotOffered("scaled_dot_product_attention has no packed sequences, no windows and no pages")
        if problem.option in ("softcap", "ALiBi"):
            raise NotOffered("scaled_dot_product_attention has no softcap, and ALiBi as a bias alone")
        if problem.causal and problem.has_scores:
            raise NotOffered("scaled_dot_product_attention takes a mask or is causal")
        self.q, self.k, self.v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        self.options = {"is_causal": problem.causal}
        if problem.heads != problem.heads_kv:
            self.options["enable_gqa"] = True
        if problem.has_scores:
            (self.options["attn_mask"],) = inputs.options.values()
        if problem.option == "dropout":
            self.options["dropout_p"] = inputs.options["dropout_p"]

    def forward(self) -> tuple[Call, Results]:
        def call() -> Tensor:
            with torch.no_grad(), sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(self.q, self.k, self.v, **self.options)

        return call, lambda o: {"o": o.transpose(1, 2)}

    def backward(self) -> tuple[Call, Results]:
        d_o = self.inputs.d_o.transpose(1, 2)
        if self.problem.option:
            return self._through_autograd(d_o), _turned
        try:
            direct = self.direct_backward(d_o)
            direct()
            torch.cuda.synchronize()
        except (RuntimeError, TypeError) as error:
            torch.cuda.synchronize()
            self.how = f"through autograd: {str(error).splitlines()[0][:120]}"
            return self._through_autograd(d_o), _turned
        return direct, _turned

    def direct_backward(self, d_o: Tensor) -> Call:
        """The backward operator itself, on the saved results of the forward operator."""
        raise NotImplementedError

    def _through_autograd(self, d_o: Tensor) -> Call:
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        options = self.options
        if self.problem.bias_gradient:
            leaves.append(options["attn_mask"].detach().requires_grad_())
            options = options | {"attn_mask": leaves[-1]}
        with sdpa_kernel(self.backend):
            o = F.scaled_dot_product_attention(*leaves[:3], **options)
        return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)


class Flash(_Sdpa):
    """FlashAttention-2. Packed sequences and windows by the operator beneath scaled_dot_product_attention."""

    name, title, backend = "flash", "FA2", SDPBackend.FLASH_ATTENTION

    def __init__(self, problem: Problem, inputs: Inputs, direction: str):
        if problem.head_dim_v != problem.head_dim:
            raise NotOffered("values have the head size of queries and keys")
        self._beneath = bool(problem.lengths) or problem.window >= 0
        if self._beneath:
            Contestant.__init__(self, problem, inputs, direction)
            if problem.deterministic:
                raise NotOffered("measured without the deterministic option only")
        else:
            super().__init__(problem, inputs, direction)

    def _beneath_arguments(self) -> tuple[tuple, dict]:
        p, cu = self.problem, self.inputs.cu_seqlens
        window = {"window_size_left": p.window, "window_size_right": 0} if p.window >= 0 else {}
        return (cu, cu, p.seqlen_q, p.seqlen_k, 0.0, p.causal), window

    def forward(self) -> tuple[Call, Results]:
        if not self._beneath:
            return super().forward()
        x, (arguments, window) = self.inputs, self._beneath_arguments()
        call = lambda: aten._flash_attention_forward(x.q, x.k, x.v, *arguments, False, **window)  # noqa: E731
        return call, lambda returned: {"o": returned[0]}

    def backward(self) -> tuple[Call, Results]:
        if not self._beneath:
            return super().backward()
        x, (arguments, window) = self.inputs, self._beneath_arguments()
        o, lse, rng_state, unused, _ = self.forward()[0]()
        call = lambda: aten._flash_attention_backward(  # noqa: E731
            x.d_o, x.q, x.k, x.v, o, lse, *arguments, rng_state, unused, **window
        )
        return call, _gradients

    def direct_backward(self, d_o: Tensor) -> Call:
        causal = self.problem.causal
        o, lse, cu_q, cu_k, max_q, max_k, rng_state, unused, _ = aten._scaled_dot_product_flash_attention(
            self.q, self.k, self.v, 0.0, causal
        )
        saved = (o, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, rng_state, unused)
        return lambda: aten._scaled_dot_product_flash_attention_backward(d_o, self.q, self.k, self.v, *saved)


class Cudnn(_Sdpa):
    name, title, backend = "cudnn", "cuDNN", SDPBackend.CUDNN_ATTENTION

    def direct_backward(self, d_o: Tensor) -> Call:
        causal = self.problem.causal
        o, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            self.q, self.k, self.v, None, True, 0.0, causal
        )
        saved = (o, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, causal)
        return lambda: aten._scaled_dot_product_cudnn_attention_backward(d_o, self.q, self.k, self.v, *saved)


class Flash4(Contestant):
    """FlashAttention-4: `flash_attn.cute` of the package flash-attn-4. tessera_flash_attn, of that name, must not be
    on the path. A first call of each shape compiles for one to three seconds."""

    name, title = "flash4", "FA4"

    def __init__(self, problem: Problem, inputs: Inputs, direction: str):
        super().__init__(problem, inputs, direction)
        if problem.lengths or problem.page_size or problem.option:
            raise NotOffered("measured in dense cells without options only")
        try:
            from flash_attn.cute import interface
        except ImportError as missing:
            raise NotOffered(f"flash-attn-4 is not installed: {missing}") from None
        self._interface = interface
        # FlashAttention-4 has a window or is causal: with a window of `window` keys, none of them to the right.
        mask = {"window_size_left": problem.window, "window_size_right": 0}
        self.options = mask if problem.window >= 0 else {"causal": problem.causal}

    def forward(self) -> tuple[Call, Results]:
        x = self.inputs

        def call() -> tuple:
            with torch.no_grad():
                return self._interface._flash_attn_fwd(x.q, x.k, x.v, **self.options)

        return call, lambda returned: {"o": returned[0]}

    def backward(self) -> tuple[Call, Results]:
        x = self.inputs
        with torch.no_grad():
            o, lse = self._interface._flash_attn_fwd(x.q, x.k, x.v, return_lse=True, **self.options)[:2]
        options = self.options | {"deterministic": self.problem.deterministic}

        def call() -> tuple:
            with torch.no_grad():
                return self._interface._flash_attn_bwd(x.q, x.k, x.v, o, x.d_o, lse, **options)

        return call, _gradients


class Efficient(_Sdpa):
    """The backend that supports any mask, for cells that the others do not support."""

    name, title, backend = "efficient", "efficient", SDPBackend.EFFICIENT_ATTENTION

    def __init__(self, problem: Problem, inputs: Inputs, direction: str):
        if not problem.has_scores:
            raise NotOffered("measured with a bias or a mask only")
        super().__init__(problem, inputs, direction)


CONTESTANTS = (Tessera, Sm80, Sm90, Flash, Flash4, Cudnn, Efficient)


def enter(
    problem: Problem, inputs: Inputs, direction: str, names: list[str]
) -> tuple[list[Contestant], dict[str, str]]:
    """Those of `names` that support the call, and the others' reasons."""
    entered, reasons = [], {}
    for contestant in CONTESTANTS:
        if contestant.name not in names:
            continue
        try:
            entered.append(contestant(problem, inputs, direction))
        except NotOffered as reason:
            reasons[contestant.name] = str(reason)
    return entered, reasons
