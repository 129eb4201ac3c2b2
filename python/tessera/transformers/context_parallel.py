"""A Transformers model on many processes, each with a part of every sequence's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Union

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .masks import Pattern, _recognise

if TYPE_CHECKING:
    from tessera.torch.ranks import ContextParallel


def context_parallel(parallel: ContextParallel, name: str = "tessera_context_parallel") -> str:
    """Registers attention over the ranks of `parallel` and returns its name. Training a model on N ranks takes two
    lines and sharded inputs::

        parallel = tessera.torch.context_parallel(group)
        model.set_attn_implementation(tessera.transformers.context_parallel(parallel))

        loss = model(
            parallel.shard(input_ids), position_ids=parallel.position_ids(length)[None], use_cache=False,
            labels=local, shift_labels=local,                # local = parallel.shard of the labels, shifted beforehand
        ).loss                                               # the mean over this rank's rows, equally many on each

    Gradients of parameters are this rank's part: average them over the ranks, as in data parallelism.

    Supported are decoders, causal and with sliding windows, softcaps and sinks, and full attention without padding. For
    packed rows, pass `cu_seq_lens_q` of the whole batch as a keyword of the model's call. Padding, masks that are
    matrices, caches and dropout are refused with an error.
    """

    def attention_forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Union[Pattern, Tensor, None],
        dropout: float = 0.0,
        scaling: Optional[float] = None,
        softcap: Optional[float] = None,
        s_aux: Optional[Tensor] = None,
        position_bias: Optional[Tensor] = None,
        cu_seq_lens_q: Optional[Tensor] = None,
        output_attentions: bool = False,
        **kwargs,
    ) -> tuple[Tensor, None]:
        for what, given in (
            ("dropout", dropout),
            ("position_bias", position_bias),
            ("output_attentions", output_attentions),
        ):
            if given is not None and given is not False and given != 0.0:
                raise ValueError(f"{what}: given, not accepted by {name} yet")
        if not isinstance(attention_mask, Pattern) or not attention_mask.by_position:
            raise ValueError(
                f"attention_mask: a {type(attention_mask).__name__}, accepted what {name} made of no mask at all"
            )
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if cu_seq_lens_q is not None:
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        o = parallel.attention(
            q, k, v, cu_seqlens=cu_seq_lens_q, causal=attention_mask.causal, window=attention_mask.window,
            scale=scaling, softcap=softcap or 0.0, sink=s_aux,
        )  # fmt: skip
        return (o if cu_seq_lens_q is None else o.unflatten(0, query.shape[:1] + query.shape[2:3])), None

    def attention_mask(mask_function=None, attention_mask=None, q_length=0, kv_length=0, **kwargs) -> Pattern:
        """Positions jump where a rank's chunks meet, and Transformers would mistake that for packed sequences; those
        are given by cu_seq_lens_q here."""
        if attention_mask is not None and not (isinstance(attention_mask, Tensor) and bool(attention_mask.all())):
            raise ValueError(f"attention_mask: with padding, or no tensor, accepted none with {name}")
        if q_length != kv_length:
            raise ValueError(f"past_key_values: a cache of {kv_length - q_length} keys, accepted none with {name}")
        found = _recognise(mask_function)
        if found is None:
            raise ValueError(
                f"attention_mask: a pattern that is neither causal nor a window, not accepted by {name} yet"
            )
        return Pattern(found.causal, (found.left, found.right))

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    return name
