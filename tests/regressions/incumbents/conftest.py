"""Each test that asks for `check` runs directly and traced in each mode, with both ways to remove."""

from __future__ import annotations

from tests.support.equality import check, mode, remove

__all__ = ["check", "mode", "remove"]
