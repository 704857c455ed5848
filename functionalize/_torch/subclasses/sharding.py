"""DTensor's plans: how each operator's results are sharded, kept by a hash of the operator's arguments.

Invariant: once a capture is over, no plan holds a symbol of it.
"""

from __future__ import annotations

import sys
from typing import Any

PLANS_IN = "torch.distributed.tensor."  # the modules whose code hashes arguments for that


def forget_plans() -> None:
    """Drop all plans; torch makes them again when they are needed."""
    debug: Any = sys.modules.get("torch.distributed.tensor.debug")
    if debug is not None:
        debug._clear_sharding_prop_cache()  # the public module has no public name for it
