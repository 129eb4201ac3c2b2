"""PyTorch's registry of implementations, for tests: Tessera activated, its calls counted, PyTorch's own restored."""

import pytest
import torch
import torch.nn.attention

from tessera.torch import sdpa

registry = torch.nn.attention


@pytest.fixture(autouse=True)
def restored():
    yield
    registry.restore_flash_attention_impl(_raise_warn=False)


@pytest.fixture
def calls(monkeypatch):
    """How often the kernels of this package were reached."""
    counts = {"forward": 0, "backward": 0}
    for name in counts:
        original = getattr(sdpa._core, name)

        def counted(*arguments, _name=name, _original=original, **options):
            _original(*arguments, **options)
            counts[_name] += 1

        monkeypatch.setattr(
            sdpa, "_core", type("Counted", (), {**vars(sdpa._core), name: staticmethod(counted)}), raising=True
        )
    return counts


def on_tessera():
    registry.activate_flash_attention_impl("Tessera")
