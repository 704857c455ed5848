"""Higher-order ops (``cond``, ``map``, ``scan``, ...): their operands become values, their bodies are functionalized.

Limits: a body that writes to an operand is refused by torch's own checks on the bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from functionalize.program import Program


def run(program: Program, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a higher-order op on values, with bodies free of mutation."""
    from functionalize.api import functionalize  # the bodies are programs of their own

    remove = "mutations_and_views" if program.domain.remove_views else "mutations"

    def pure(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return program.value(leaf)
        return functionalize(leaf, remove=remove) if callable(leaf) else leaf

    call_args, call_kwargs = pytree.tree_map(pure, (tuple(args), kwargs))
    return func(*call_args, **call_kwargs)
