"""PyTorch's operators on Tessera, for tests: activated, Tessera's calls counted, PyTorch's own restored."""

import types

import pytest
import torch
import torch.nn.attention

import tessera.torch
from tessera.torch import aten, kernels

registry = torch.nn.attention
AVAILABLE = hasattr(torch.library, "get_kernel")


@pytest.fixture(autouse=True)
def restored():
    yield
    tessera.torch.restore()


@pytest.fixture
def calls(monkeypatch):
    """How often the kernels of this package were reached."""
    counts = {"forward": 0, "backward": 0}
    core = types.SimpleNamespace(**vars(aten._core))
    for name in counts:

        def counted(*arguments, _name=name, _original=getattr(aten._core, name), **options):
            _original(*arguments, **options)
            counts[_name] += 1

        setattr(core, name, counted)
    for module in (aten, kernels):
        monkeypatch.setattr(module, "_core", core)
    return counts


def on_tessera():
    tessera.torch.activate()
