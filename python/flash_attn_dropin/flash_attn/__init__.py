"""The flash_attn interface on Tessera, for unchanged programs, also on the CPU."""

import importlib.metadata
import os

__version__ = "2.8.4"


def _refuse_to_shadow() -> None:
    if os.environ.get("TESSERA_FLASH_ATTN") == "1":
        return
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"flash_attn: Tessera's drop-in would shadow the installed flash-attn {version}; accepted is one of them: "
        "uninstall one, or set TESSERA_FLASH_ATTN=1 to take Tessera's"
    )


_refuse_to_shadow()

try:
    import tessera.torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("tessera", "tessera.torch"):
        raise
    raise ImportError(
        "flash_attn: Tessera's drop-in needs Tessera (the distribution tessera-attention), which is not installed: "
        "pip install . at the root of its source tree"
    ) from None

from flash_attn.flash_attn_interface import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
