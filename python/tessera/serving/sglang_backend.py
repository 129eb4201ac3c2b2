"""The class that SGLang's registry makes for the back end `tessera`: SGLang 0.5.23's contract on
tessera.serving.sglang."""

from __future__ import annotations

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from . import sglang


class Backend(sglang.Backend, AttentionBackend):
    """SGLang's base class has the rest of the contract: what it has defaults for."""
