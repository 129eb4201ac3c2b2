"""Padded batches to packed rows and back."""

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` of input [N, ...]: [len(indices), ...]."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ...] with `values` in the rows `indices` and 0 elsewhere."""
    output = values.new_zeros(first_axis_dim, *values.shape[1:])
    return output.index_copy(0, indices.long(), values)  # Transformers passes int32


def index_first_axis_residual(input: Tensor, indices: Tensor):
    """The rows, and the input for the residual branch; their gradients are added."""
    return index_first_axis(input, indices), input.view_as(input)


def _cumulative(seqlens: Tensor) -> Tensor:
    return F.pad(torch.cumsum(seqlens, dim=0, dtype=torch.int32), (1, 0))


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask=None):
    """Rows that a mask keeps.

    hidden_states [B, S, ...]; attention_mask, unused_mask [B, S], 1 = kept. Rows kept only by unused_mask are included,
    but not counted in the last value. Returns the rows [T, ...], their indices in [B * S], cu_seqlens int32 [B + 1],
    the longest length, and the lengths int32 [B] by attention_mask.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    max_seqlen = seqlens.max().item()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _cumulative(seqlens), max_seqlen, used


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor):
    """The same for rows of a batch that hold several sequences: attention_mask_in_length [B, S] has their lengths first
    and zeros after. Returns the rows, indices, cu_seqlens and the longest length."""
    total = attention_mask_in_length.sum(dim=-1)
    columns = torch.arange(attention_mask_in_length.shape[1], device=total.device)
    indices = torch.nonzero((columns < total[:, None]).flatten(), as_tuple=False).flatten()
    lengths = attention_mask_in_length.flatten()
    seqlens = lengths[lengths.nonzero().flatten()]
    max_seqlen = seqlens.max().item()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _cumulative(seqlens), max_seqlen


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Rows [T, ...] back into [batch, seqlen, ...], 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
