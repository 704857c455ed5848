"""What every test gets: a seeded generator.

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
