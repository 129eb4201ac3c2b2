"""PyTorch's own attention on Tessera, through PyTorch's registry of flash attention implementations.

`torch.nn.attention.activate_flash_attention_impl("Tessera")` registers the kernels of `aten.py` with the dispatcher for
the CPU and for CUDA; `restore_flash_attention_impl()` removes them. `activate()` and `restore()` do the same, also in
releases without a registry. Calls that Tessera refuses go to the kernel that was registered before.

The implementation that computed a call's forward pass also computes its backward pass, whatever was activated or
restored in between: the kernels of backward operators remain after the first activation, and decide by the LSE
(`aten.is_ours`).
"""

from __future__ import annotations

import collections
import inspect
import logging
import threading
import warnings
from typing import Callable, Dict, Optional

import torch
import torch.nn.attention

from . import aten

_NAME = "Tessera"
_logger = logging.getLogger("tessera.torch")
_fallbacks: collections.Counter = collections.Counter()
_REFUSALS = (ValueError, TypeError, NotImplementedError)

_ROWS: Dict[str, Callable] = {
    "_flash_attention_forward": aten.rows_forward,
    "_flash_attention_forward_no_dropout_inplace": aten.rows_forward_into,
    "_flash_attention_backward": aten.rows_backward,
}
# By dispatch key. For the operators of _ROWS, PyTorch itself lacks kernels on the CPU.
_KERNELS: Dict[str, Dict[str, Callable]] = {
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": aten.flash_for_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": aten.flash_for_cpu_backward,
        **_ROWS,
    },
    "CUDA": {
        "_scaled_dot_product_flash_attention": aten.flash,
        "_scaled_dot_product_flash_attention_backward": aten.flash_backward,
        "_scaled_dot_product_efficient_attention": aten.efficient,
        "_scaled_dot_product_efficient_attention_backward": aten.efficient_backward,
        "_scaled_dot_product_cudnn_attention": aten.cudnn,
        "_scaled_dot_product_cudnn_attention_backward": aten.cudnn_backward,
        **_ROWS,
    },
}


def fallback_reasons(reset: bool = False) -> Dict[str, int]:
    """Why calls went to PyTorch's own kernel since activation (or the last reset), with the number of calls for each
    reason.

    The logger "tessera.torch" logs each call at level INFO when it happens.
    """
    reasons = dict(_fallbacks)
    if reset:
        _fallbacks.clear()
    return reasons


def _refused(reason: str) -> None:
    _fallbacks[reason] += 1
    _logger.info("PyTorch's own kernel runs: %s", reason)


class _Passing(threading.local):
    """True if one of PyTorch's kernels runs: it may call another of our operators, and must get its own."""

    active = False


_passing = _Passing()


def _kernel(ours: Callable, original) -> Callable:
    """Tessera's kernel, with PyTorch's for refused calls; `original` None: PyTorch has none."""
    if original is None:
        return lambda keyset, *arguments, **options: ours(*arguments, **options)

    def call(keyset, *arguments, **options):
        if _passing.active:
            return original.call_boxed(keyset, *arguments, **options)
        try:
            return ours(*arguments, **options)
        except _REFUSALS as error:
            _refused(str(error))
        _passing.active = True
        try:
            return original.call_boxed(keyset, *arguments, **options)
        finally:
            _passing.active = False

    return call


def _copied_by_a_compiler() -> bool:
    """True if TorchInductor may have copied the tensors that a program saved, to change their layout.

    Without dropout either implementation may compute its backward pass; the active one does."""
    node = torch._C._current_autograd_node() if _Activation.current is not None else None
    return node is not None and node.name() == "CompiledFunctionBackward"


def _backward_kernel(ours: Callable, original) -> Callable:
    """The kernel of the implementation that computed the forward pass."""
    if original is None:
        return _kernel(ours, None)
    names = list(inspect.signature(ours).parameters)
    of_lse, of_dropout = names.index("logsumexp"), names.index("dropout_p")
    of_state = next((names.index(name) for name in ("philox_offset", "rng_state") if name in names), None)
    if "philox_seed" in names and ours is aten.flash_backward:
        of_state = names.index("philox_seed")  # it is seed and offset there
    kernel = _kernel(ours, original)

    def call(keyset, *arguments, **options):
        offset = arguments[of_state].flatten()[-1:] if of_state is not None and arguments[of_dropout] else None
        if aten.is_ours(arguments[of_lse], offset) or (offset is None and _copied_by_a_compiler()):
            if offset is not None:  # PyTorch's kernel would drop other entries
                return ours(*arguments, **options)
            return kernel(keyset, *arguments, **options)
        if _Activation.current is not None and not _passing.active:
            _refused("logsumexp: of a forward pass that was PyTorch's own")
        return original.call_boxed(keyset, *arguments, **options)

    return call


def _install(rows: Callable[[str], bool], kernel_of: Callable) -> torch.library.Library:
    """Registers kernel_of(ours, PyTorch's) for the operators of those rows, until the library object is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for key, replaced in _KERNELS.items():
            if key == "CUDA" and torch.version.cuda is None:
                continue
            for name, ours in replaced.items():
                if not rows(name) or not hasattr(torch.ops.aten, name):
                    continue
                original = None
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                    original = torch.library.get_kernel(f"aten::{name}", key)
                library.impl(name, kernel_of(ours, original), key, with_keyset=True, allow_override=True)
    return library


def _is_backward(name: str) -> bool:
    return name.endswith("_backward")


class _Activation:
    """The kernels in the dispatcher, as long as PyTorch's registry or `activate` keeps this handle."""

    current: Optional["_Activation"] = None
    _backward: Optional[torch.library.Library] = None

    def __init__(self) -> None:
        if _Activation.current is not None:
            _Activation.current.remove()
        if _Activation._backward is not None:
            _Activation._backward._destroy()
        _Activation._backward = _install(_is_backward, _backward_kernel)
        self._forward: Optional[torch.library.Library] = _install(lambda name: not _is_backward(name), _kernel)
        _fallbacks.clear()
        _Activation.current = self

    def remove(self) -> None:
        if self._forward is not None:
            self._forward._destroy()
            self._forward = None
        if _Activation.current is self:
            _Activation.current = None


def _can_fall_through() -> bool:
    return hasattr(torch.library, "get_kernel")


def register() -> bool:
    """Adds the name "Tessera" to PyTorch's registry. Returns False in releases without a registry. Activates
    nothing."""
    add = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is None or not _can_fall_through():
        return False
    add(_NAME, register_fn=_Activation)
    return True


def activate() -> None:
    """From now on PyTorch's attention uses Tessera, through PyTorch's registry if the release has one.

    Raises:
        NotImplementedError: the release lacks `torch.library.get_kernel`, by which refused calls find PyTorch's own
            kernel.
    """
    if not _can_fall_through():
        raise NotImplementedError(f"PyTorch {torch.__version__}, accepted releases with torch.library.get_kernel")
    if register():
        torch.nn.attention.activate_flash_attention_impl(_NAME)
    else:
        _Activation()


def restore() -> None:
    """Restores PyTorch's own attention; does nothing if Tessera is not active."""
    active = _Activation.current
    if active is None:
        return
    restore_registry = getattr(torch.nn.attention, "restore_flash_attention_impl", None)
    if restore_registry is not None and torch.nn.attention.current_flash_attention_impl() == _NAME:
        restore_registry()
    active.remove()
