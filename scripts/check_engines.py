#!/usr/bin/env python3
"""tessera.serving's plug-ins in the packages vllm and sglang themselves, on the CPU.

    PYTHONPATH=SITE python scripts/check_engines.py

SITE has this repository's wheel (scripts/build_wheel.sh). vllm, sglang and PyTorch are installed, or their wheels are
unpacked into folders of PYTHONPATH beside what they import. The script loads the plug-ins by the engines' own loaders,
holds tests/python/engine_stand_ins.py against the packages' classes, and runs tests/python/test_serving_plugins.py in
the packages. docs/reference/serving.md says what was run.
"""

from __future__ import annotations

import enum
import inspect
import sys
from importlib.metadata import version
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests/python"
# Of a stand-in's module: where the package has the same name.
CLASSES = {
    "KVCacheLayout": "vllm.v1.kv_cache_layout", "AttentionCGSupport": "vllm.v1.attention.backend",
    "AttentionBackend": "vllm.v1.attention.backend", "AttentionMetadataBuilder": "vllm.v1.attention.backend",
    "AttentionImpl": "vllm.v1.attention.backend",
    "SglangAttentionBackend": "sglang.srt.layers.attention.base_attn_backend",
}  # fmt: skip
FUNCTIONS = {
    "register_backend": "vllm.v1.attention.backends.registry",
    "register_attention_backend": "sglang.srt.layers.attention.attention_registry",
}


def parameters(function) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values()]


def plain(owner, member: str):
    """The function under a method, a class method or a static method."""
    function = inspect.getattr_static(owner, member)
    return inspect.unwrap(getattr(function, "__func__", function))


def differences(stand_in, real, name: str) -> list[str]:
    """What the stand-in has that the package has not, or has otherwise."""
    if inspect.isfunction(stand_in):
        same = parameters(stand_in) == parameters(real)
        return [] if same else [f"{name}: {parameters(stand_in)}, the package: {parameters(real)}"]
    if isinstance(stand_in, enum.EnumMeta):
        pairs = {member.name: member.value for member in stand_in}, {member.name: member.value for member in real}
        return [] if pairs[0] == pairs[1] else [f"{name}: {pairs[0]}, the package: {pairs[1]}"]
    found = []
    for member, value in vars(stand_in).items():
        if member.startswith("__") and member != "__init__" or member.startswith("_abc"):
            continue
        if not hasattr(real, member):
            found.append(f"{name}.{member}: the package has none")
        elif callable(getattr(stand_in, member)):
            found += differences(plain(stand_in, member), plain(real, member), f"{name}.{member}")
    return found


def main() -> int:
    import pytest
    import torch

    print(f"vllm {version('vllm')}, sglang {version('sglang')}, PyTorch {torch.__version__}")
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    backend = AttentionBackendEnum["TESSERA"]
    print(f"vLLM's plug-ins made {backend}: {backend.get_class()}")

    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    load_plugins()
    assert "tessera" in ATTENTION_BACKEND_CHOICES
    print(f"SGLang's plug-ins made --attention-backend tessera: {ATTENTION_BACKENDS['tessera'].__qualname__}")

    sys.path.insert(0, str(TESTS))
    import engine_stand_ins

    found = []
    for name, module in {**CLASSES, **FUNCTIONS}.items():
        stand_in = getattr(engine_stand_ins, name)
        real = getattr(__import__(module, fromlist=["_"]), stand_in.__name__)
        found += differences(stand_in, real, f"{module}.{stand_in.__name__}")
    print("\n".join(found) or f"{len(CLASSES) + len(FUNCTIONS)} stand-ins are as the packages' own", flush=True)
    options = ["-v", "-p", "no:cacheprovider", "-rs", "--no-header", "--disable-warnings"]
    return pytest.main([*options, str(TESTS / "test_serving_plugins.py")]) or bool(found)


if __name__ == "__main__":
    sys.exit(main())
