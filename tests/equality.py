"""Fixtures that hold one program against eager: used directly and traced in each mode, with both ways to remove."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.fx import GraphModule

from functionalize.verify import assert_equivalent
from tests.graphs import MODES, REMOVES

__all__ = ["Check", "check", "mode", "remove"]

Check = Callable[..., GraphModule | None]


@pytest.fixture(params=REMOVES)
def remove(request: Any) -> Any:
    return request.param


@pytest.fixture(params=[None, *MODES], ids=str)
def mode(request: Any) -> Any:
    return request.param


@pytest.fixture
def check(remove: str, mode: Any) -> Check:
    """`assert_equivalent` in one way to remove and one mode; returns the graph, None in direct use."""

    def run(func: Callable[..., Any], *inputs: Any, **options: Any) -> GraphModule | None:
        return assert_equivalent(func, *inputs, remove=remove, tracing_mode=mode, **options)

    return run
