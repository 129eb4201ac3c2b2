"""The visible keys of a model's queries in Tessera's terms: causal, window, packed sequences, padding; no [Sq, Sk]
matrix.

Transformers describes a mask by a composed function of (batch, head, query, key) indices. The compositions that it
makes itself are recognised by their code and become a `Pattern`, which needs at most O(Sk) memory. Other masks (chunks,
image blocks, a user's own function) are evaluated to a boolean [B, 1, Sq, Sk], as for "sdpa".
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Optional, Union

import torch
import transformers
from torch import Tensor
from transformers import masking_utils as hf

if "q_offset" not in inspect.signature(hf.sdpa_mask).parameters:
    raise ImportError(f"transformers {transformers.__version__}: accepted releases that make masks from q_offset")


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A mask that needs no matrix. Query i and key j are aligned at the end: the last query with the last key."""

    causal: bool
    window: tuple[int, int] = (-1, -1)  # keys visible left and right of the diagonal, -1 = all
    keys: Optional[int] = None  # only this many keys are used: a static cache is longer than its content; None = all
    padding: Optional[Tensor] = None  # bool [B, keys], False = not visible
    cu_seqlens: Optional[Tensor] = None  # int32 [sequences + 1]: sequences in the flattened [B * S] rows
    matrix: Optional[Tensor] = None  # bool [B, 1, Sq, Sk], True = visible; the whole mask, for a tracer

    # generate() makes the masks of a static cache ahead of time, and treats them like tensors.
    ndim = 4

    def contiguous(self) -> "Pattern":
        return self

    @property
    def by_position(self) -> bool:
        """True if only the positions of a query and a key decide."""
        return self.keys is None and self.padding is None and self.cu_seqlens is None and self.matrix is None


@dataclasses.dataclass
class _Recognised:
    causal: bool = False
    left: int = -1
    right: int = -1
    segments: Optional[Tensor] = None  # int [B, S], the sequence of each token


def _no_segments() -> Tensor:
    return torch.zeros(1, 1, dtype=torch.int64)


def _code_of(maker: str, *arguments) -> object:
    """The code shared by all functions of a maker, whatever their closures; a dummy in releases that lack the maker."""
    make = getattr(hf, maker, None)
    return object() if make is None else make(*arguments).__code__


_AND = _code_of("and_masks", hf.causal_mask_function)
_SLIDING = _code_of("sliding_window_overlay", 1)
_SLIDING_BOTH_WAYS = _code_of("sliding_window_bidirectional_overlay", 1)
_PACKED = _code_of("packed_sequence_mask_function", _no_segments())
_PACKED_POSITIONS = _code_of("remap_positions_for_packed_sequence", hf.causal_mask_function, _no_segments())
_EVERYTHING = getattr(hf, "bidirectional_mask_function", None)


def _closed_over(function: Callable) -> dict:
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))


def _parts(function: Callable) -> Iterator[Callable]:
    """The functions whose conjunction `function` is. Within one packed sequence, distances equal those of the
    indices."""
    code = getattr(function, "__code__", None)
    if code is _AND:
        for part in _closed_over(function)["mask_functions"]:
            yield from _parts(part)
    elif code is _PACKED_POSITIONS:
        yield from _parts(_closed_over(function)["mask_function"])
    else:
        yield function


def _recognise(function: Callable) -> Optional[_Recognised]:
    found = _Recognised()
    for part in _parts(function):
        code = getattr(part, "__code__", None)
        if part is hf.causal_mask_function:
            found.causal = True
        elif code is _SLIDING:
            found.left = _closed_over(part)["sliding_window"] - 1
        elif code is _SLIDING_BOTH_WAYS:
            found.left = found.right = _closed_over(part)["sliding_window"]
        elif code is _PACKED:
            found.segments = _closed_over(part)["packed_sequence_mask"]
        elif part is not _EVERYTHING:
            return None
    return found


def _cu_seqlens(segments: Tensor) -> Tensor:
    """int32 [sequences + 1] of segments [B, S]; a sequence ends with its row."""
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = first.flatten().nonzero().flatten()
    return torch.cat((starts, starts.new_tensor([segments.numel()]))).to(torch.int32)


def _traced(*tensors: Optional[Tensor]) -> bool:
    """True if values cannot be read: a tracer runs, or a tensor is not a plain one."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return any(isinstance(t, Tensor) and type(t) not in (Tensor, torch.nn.Parameter) for t in tensors)


def _known_causal(mask_function: Callable, arguments: dict) -> bool:
    """True if a tracer, which cannot inspect a function, may treat it as causal or a part of causal: the functions that
    Transformers composes for its causal layers (packed sequences, windows, chunks) are conjunctions. Only its
    bidirectional layers pass the other skip."""
    conjunction = mask_function is hf.causal_mask_function or mask_function.__code__ is _AND
    return conjunction and "config" in arguments


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Union[int, Tensor] = 0,
    kv_offset: int = 0,
    mask_function: Callable = hf.causal_mask_function,
    attention_mask: Union[Tensor, Pattern, None] = None,
    local_size: Optional[int] = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: Optional[bool] = None,
    use_vmap: bool = False,
    device: Union[torch.device, str] = "cpu",
    **kwargs,
) -> Union[Tensor, Pattern, None]:
    """The mask for `attention_forward`; Transformers calls this once per forward pass and kind of layer.

    Args:
        q_length, kv_length: Sq and Sk. q_offset, kv_offset: the positions of the first query and the first key.
        mask_function: Transformers' description of the pattern.
        attention_mask: bool [B, S], False = padding, in positions from 0; or what this function returned before.
        local_size: a window or chunk, if any; for `sdpa_mask`, if the pattern is not recognised.
        allow_is_causal_skip, allow_is_bidirectional_skip: False requests a matrix even if none is needed.
        use_vmap: whether `mask_function` must be mapped over indices. device: of the matrix.

    Returns:
        None for the plain causal pattern over all keys; a `Pattern`; or bool [B, 1, Sq, Sk], True = visible.
    """
    if isinstance(attention_mask, Pattern):
        return attention_mask
    traced = _traced(attention_mask, q_offset)
    found = None if traced else _recognise(mask_function)
    keys = kv_length
    if found is not None and found.segments is None:
        if found.causal or max(found.left, found.right) >= 0:
            # The diagonal ends at this call's last key; a static cache continues after it.
            keys = int(q_offset) + q_length - kv_offset
            if keys > kv_length or (keys < kv_length and not found.causal):
                found = None
        if not (allow_is_causal_skip or allow_is_bidirectional_skip):
            found = None
    if found is None:
        # Only with as many queries as keys, since a missing mask does not tell how the queries are aligned.
        skip = allow_is_causal_skip and q_length == kv_length
        matrix = hf.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=skip, allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        # If nothing is visible beyond the diagonal, the kernels skip half of the tiles.
        square = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset == 0
        one_sided = traced and square and not use_vmap and allow_is_bidirectional_skip is None
        if matrix is not None and one_sided and _known_causal(mask_function, kwargs):
            return Pattern(causal=True, matrix=matrix)
        return matrix

    if found.segments is not None:
        return Pattern(found.causal, (found.left, found.right), cu_seqlens=_cu_seqlens(found.segments))

    padding = None
    if attention_mask is not None:
        padding = hf.prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + keys]
        if padding.all():
            padding = None
    # A window that reaches every key has no effect.
    left, right = (-1 if side >= keys - 1 else side for side in (found.left, found.right))
    if found.causal and left == right == -1 and keys == kv_length and padding is None:
        return None
    return Pattern(found.causal, (left, right), None if keys == kv_length else keys, padding)
