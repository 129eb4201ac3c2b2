"""One attention layer of a Transformers model on Tessera: its arguments, its masks, its caches."""

from __future__ import annotations

from typing import Optional, Union

import torch
from tessera.torch import attention
from tessera.torch.api import attention_by_heads
from torch import Tensor

from .masks import Pattern


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Union[Tensor, Pattern, None],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    is_causal: Optional[bool] = None,
    s_aux: Optional[Tensor] = None,
    position_bias: Optional[Tensor] = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Optional[Tensor] = None,
    max_length_q: Optional[int] = None,
    max_length_k: Optional[int] = None,
    deterministic: Optional[bool] = None,
    output_attentions: bool = False,
    **kwargs,
) -> tuple[Tensor, None]:
    """O = softmax(scaling * Q K^T + ...) V for a layer of a Transformers model, with gradients for all of its tensors.

    Args:
        module: the layer; `module.is_causal` (True if absent) applies if neither the mask nor `is_causal` decides.
        query: [B, Hq, Sq, D]. key: [B, Hkv, Sk, D]. value: [B, Hkv, Sk, Dv]; key and value heads are not repeated.
            float32, float16, bfloat16, or float64 by the reference kernel.
        attention_mask: the result of `tessera.transformers.attention_mask`; or the whole mask, as bool [B|1, Hq|1,
            Sq|1, Sk], True = visible, or as numbers that are added to the scores; or None.
        dropout: probability, in training. scaling: 1 / sqrt(D) by default. softcap: c tanh(s / c); None = none.
        sliding_window: without a mask, a query sees this many keys, including its own.
        s_aux: [Hq], a logit that joins each head's denominator.
        position_bias: [B|1, Hq, Sq, Sk], added to the scores.
        cu_seq_lens_q, cu_seq_lens_k: int [sequences + 1]: sequences in the flattened [B * S] rows, of lengths up to
            `max_length_q`, `max_length_k`; ignored with padding, a static cache, or a mask that is a matrix.

    Returns:
        O [B, Sq, Hq, Dv], and None for the probabilities.

    Raises:
        ValueError: `output_attentions`, since the probabilities are never stored; a wrong argument; or a keyword that
            changes the result and is not supported, such as the keys that sparse models choose for other kernels.
    """
    if output_attentions:
        raise ValueError(
            "output_attentions: True, accepted False with Tessera, which never stores the probabilities: set "
            'attn_implementation="eager" to see them'
        )
    _refuse(kwargs)
    options: dict = {"scale": scaling, "softcap": softcap or 0.0, "sink": s_aux, "dropout_p": dropout}
    if deterministic:
        options["deterministic"] = True
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options["causal"] = causal
        if sliding_window is not None:
            options["window"] = (sliding_window - 1, -1 if causal else sliding_window - 1)
    elif isinstance(attention_mask, Pattern):
        options.update(causal=attention_mask.causal, window=attention_mask.window)
    by_position = attention_mask is None or (isinstance(attention_mask, Pattern) and attention_mask.by_position)
    packed = cu_seq_lens_q is not None and cu_seq_lens_k is not None
    if by_position and not packed and s_aux is None and position_bias is None:
        return attention_by_heads(query, key, value, **options), None

    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    cu_seqlens = None  # for q and for k
    given = attention_mask is None  # True if the keywords may give them
    if isinstance(attention_mask, Pattern):
        pattern = attention_mask
        if pattern.keys is not None:
            k, v = k[:, : pattern.keys], v[:, : pattern.keys]
        if pattern.padding is not None:
            options["mask"] = pattern.padding.to(q.device)[:, None, None, :]
        if pattern.matrix is not None:
            options["mask"] = pattern.matrix
        if pattern.cu_seqlens is not None:
            cu_seqlens = pattern.cu_seqlens, pattern.cu_seqlens
        given = pattern.keys is None and pattern.padding is None and pattern.matrix is None
    elif attention_mask is not None:
        mask = attention_mask[..., : k.shape[1]]
        if mask.dtype != torch.bool:
            position_bias = mask if position_bias is None else position_bias + mask
        else:
            if q.shape[1] == 1 and mask.shape[1] == 1 and q.device.type == "cpu" and not torch.compiler.is_compiling():
                mask = _without_unused_keys(mask)
                k, v = k[:, : mask.shape[-1]], v[:, : mask.shape[-1]]
            options["mask"] = mask
    if given and packed:
        cu_seqlens = cu_seq_lens_q, cu_seq_lens_k
        options.update(max_seqlen_q=max_length_q, max_seqlen_k=max_length_k)
    if position_bias is not None:
        bias = position_bias[..., : k.shape[1]]
        options["bias"] = bias if bias.dtype in (q.dtype, torch.float32) else bias.float()

    if cu_seqlens is None:
        return attention(q, k, v, **options), None
    if position_bias is not None:
        raise ValueError("position_bias: given with packed sequences, accepted None there")
    batch, seqlen_q = q.shape[:2]
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    cu_seqlens_q, cu_seqlens_k = (c.to(q.device, torch.int32) for c in cu_seqlens)
    o = attention(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    return o.unflatten(0, (batch, seqlen_q)), None


# Keywords of Transformers' models that change the result. Models convert indices and block_indices, the keys that a
# query sees, to a mask only for "eager" and "sdpa".
_REFUSED = ("indices", "block_indices", "sinks", "cache", "head_mask", "layer_head_mask")


def _refuse(keywords: dict) -> None:
    for name, value in keywords.items():
        if value is None:
            continue
        if name in _REFUSED:
            raise ValueError(f'{name}: given, accepted None with Tessera: set attn_implementation="sdpa" or "eager"')
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: requires a gradient, accepted are keywords that Tessera knows")


def _without_unused_keys(mask: Tensor) -> Tensor:
    """mask [B, 1, 1, Sk] of one query, up to the last visible key: a static cache is mostly empty at first."""
    seen = mask.any(dim=0).flatten().nonzero()
    return mask[..., : int(seen[-1]) + 1] if seen.numel() else mask
