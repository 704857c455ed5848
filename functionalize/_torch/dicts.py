"""Versions of dicts: a dict of the same version has not been written since, so nobody has to compare its entries.

Invariant: two writes give two versions, also to different dicts. Limits: a dict that was written may hold what it did;
subclasses have an order, or more content, that no version counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Python's own, which its public C API does not give; where torch has no such function, each dict may have been written.
dict_version: Callable[[dict[Any, Any]], Any] = getattr(
    torch._C._dynamo.guards, "dict_version", lambda container: object()
)
