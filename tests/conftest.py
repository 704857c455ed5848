"""What every test gets: a seeded generator, and a skip with its reason where there is no CUDA device.

Torch is imported only by tests that already did: those of codegen run without it.
"""

from __future__ import annotations

import sys

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `cuda` on machines without a device."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give each test the same random numbers, whatever ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
