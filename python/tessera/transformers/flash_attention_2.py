"""`attn_implementation="flash_attention_2"` by Tessera's drop-in for `flash_attn`, also on the CPU.

Transformers offers "flash_attention_2" if a distribution named flash-attn is installed and PyTorch has a GPU. The
drop-in deliberately has another name and needs no GPU, so Transformers must be patched in the three places listed
below.
"""

from __future__ import annotations

from typing import Any

import transformers.modeling_flash_attention_utils as utils

_saved: dict[str, Any] = {}


def _available(kernels_fallback_ok: bool = False) -> bool:
    return True


def activate_flash_attention_2() -> None:
    """From now on models can be created with, or set to, `attn_implementation="flash_attention_2"`, computed by
    Tessera.

    This affects the whole process, until `restore_flash_attention_2`. Calling it twice has no further effect.

    Raises:
        ImportError: `flash_attn` is missing, or is not Tessera's drop-in.
    """
    if _saved:
        return
    try:
        from flash_attn._call import Call  # noqa: F401  a module that only the drop-in has
    except ModuleNotFoundError as error:
        raise ImportError(
            "flash_attn: Tessera's drop-in is not what `import flash_attn` finds, accepted is the distribution "
            "tessera-flash-attn: pip install ./python/flash_attn_dropin"
        ) from error
    entry = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    _saved.update(entry=dict(entry), available=utils.is_flash_attn_2_available)
    # 1. a model's check of the requested implementation; 2. its check of the device of its weights
    entry["general_availability_check"] = _available
    entry["supported_devices"] = (*entry["supported_devices"], (_available, "cpu"))
    # 3. the choice of the functions to call
    utils.is_flash_attn_2_available = _available
    utils._loaded_implementation = None


def restore_flash_attention_2() -> None:
    """Restores Transformers' own check. Models set to "flash_attention_2" meanwhile must be set to another
    implementation."""
    if not _saved:
        return
    utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2].update(_saved["entry"])
    utils.is_flash_attn_2_available = _saved["available"]
    utils._loaded_implementation = None
    _saved.clear()
