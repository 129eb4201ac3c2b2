"""Help for interactive use: signatures that list every option, and Tessera's names for other libraries' options."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from typing import Any

from tessera import _core

_GROUPED_HEADS = "grouped heads need no option: Hq is a multiple of Hkv"
_PADDING = "keys by length are seqused_k; any others are a mask, True = visible"
_RETURN_LSE = "that is return_lse here"
# Other libraries' names for an option, and the equivalent here.
_ELSEWHERE = {
    "is_causal": "SDPA's is_causal is causal here, and top_left=True beside it measures from the first key, as SDPA "
                 "does",
    "causal_mask": "that is causal here",
    "attn_mask": "SDPA's attn_mask is mask here where it is bool (True = visible), and bias where it is added to the "
                 "scores",
    "attention_mask": _PADDING,
    "key_padding_mask": _PADDING,
    "enable_gqa": _GROUPED_HEADS,
    "num_kv_heads": _GROUPED_HEADS,
    "softmax_scale": "flash_attn's softmax_scale is scale here",
    "sm_scale": "that is scale here",
    "scaling": "that is scale here",
    "window_size": "flash_attn's window_size is window here, (left, right)",
    "local_window_size": "jax.nn's local_window_size is window here, (left, right)",
    "sliding_window": "that is window here: window=(n - 1, 0) shows a query n keys, its own among them",
    "logits_soft_cap": "that is softcap here",
    "soft_cap": "that is softcap here",
    "attn_bias": "that is bias here",
    "alibi": "that is alibi_slopes here, float32 [Hq] or [B, Hq]",
    "dropout": "that is dropout_p here",
    "dropout_rate": "that is dropout_p here",
    "seed": "that is dropout_seed here",
    "cu_seqlens": "that is cu_seqlens_q and cu_seqlens_k here",
    "max_seqlen": "that is max_seqlen_q and max_seqlen_k here",
    "max_seqlen_kv": "that is max_seqlen_k here",
    "cu_seqlens_kv": "that is cu_seqlens_k here",
    "block_table": "flash_attn's block_table is page_table here, and needs seqused_k",
    "cache_seqlens": "flash_attn's cache_seqlens is seqused_k here, including the new keys",
    "seqlens_k": "that is seqused_k here",
    "key_value_seq_lengths": "jax.nn's key_value_seq_lengths is seqused_k here",
    "s_aux": "that is sink here",
    "sinks": "that is sink here",
    "return_softmax_lse": _RETURN_LSE,
    "return_attn_probs": f"{_RETURN_LSE}; no call returns the probabilities",
    "return_residual": _RETURN_LSE,
    "tensor_layout": 'that is layout here, "bshd" or "bhsd"',
    "qkv_format": 'that is layout here, "bshd" or "bhsd"',
    "implementation": "that is kernel here",
    "backend": "that is kernel here",
    "num_threads": "that is threads here",
    "d_bias": "attention_backward computes it with grad_bias=True",
    "d_sink": "attention_backward computes it with grad_sink=True",
}


def unexpected_option(function: str, name: str) -> str:
    """The text of a TypeError: the equivalent of another library's option, otherwise the option with the most similar
    name."""
    hint = _ELSEWHERE.get(name)
    if hint is None:
        accepted = [
            *(f["name"] for f in _core.option_fields() if f["kind"] not in ("backward tensor", "result")),
            "return_lse",
        ]
        similar = difflib.get_close_matches(name, accepted, 1)
        hint = f"did you mean {similar[0]}?" if similar else f"help(tessera.{function}) lists what there is"
    return f"{function}() got an unexpected keyword argument '{name}': {hint}"


def with_options(function: Callable, without: tuple[str, ...] = ()) -> Callable:
    """`function` with a signature that lists the options it accepts as **options, except those in `without`."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {*signature.parameters, *without}
    for field in _core.option_fields():
        name, annotation = field["name"], field["annotation"]
        if name in taken or field["kind"] in ("backward tensor", "result"):
            continue
        annotation += " | None" if field["kind"] == "tensor" else ""
        shown.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field["default"], annotation=annotation)
        )
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    if function.__doc__ and _OPTIONS in function.__doc__:
        function.__doc__ = _with_other_tensors(function.__doc__)
    return function


_OPTIONS = "Options, by keyword only:"  # the first line of a list that ends with an empty line


def _with_other_tensors(help_text: str) -> str:
    """`help_text` with a line for each tensor among the options that it does not explain in words of its own."""
    lines = "".join(
        f"\n        {field['name']}: {field['dtypes']} {' or '.join(field['shapes'])}. {field['what']}."
        for field in _core.option_fields()
        if field["kind"] == "tensor" and not re.search(rf"\b{field['name']}\b", help_text)
    )
    end = help_text.index("\n\n", help_text.index(_OPTIONS))
    return help_text[:end] + lines + help_text[end:]
