"""What every test gets: a seeded generator, and its mark as slow where another mode of tracing stands for it.

Torch is imported only by tests that already did: those of codegen run without it.
"""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give each test the same random numbers, whatever ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests run programs directly and traced with fake tensors; real and symbolic traces go with the slow ones."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("mode") in ("real", "symbolic"):
            item.add_marker(pytest.mark.slow)
