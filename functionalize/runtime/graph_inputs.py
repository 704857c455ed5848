"""The arguments of a call as leaves, in the order in which a captured program takes them.

Invariant: arguments that are built alike are walked alike. Limits: those of ``StateWalk``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from functionalize.runtime.state_walk import StateWalk, is_module


def walk_arguments(args: list[Any], kwargs: dict[str, Any], names: Sequence[str]) -> StateWalk:
    """Walk the arguments of a call; ``names`` are those of the positional ones."""
    walk = StateWalk()
    for position in range(len(args)):
        walk.walk(args, position, names[position] if position < len(names) else f"arg_{position}")
    for name in kwargs:
        walk.walk(kwargs, name, name)
    return walk


def names_of(func: Callable[..., Any], count: int) -> list[str]:
    """What a function calls its first ``count`` arguments."""
    if not count:
        return []
    try:
        parameters = list(inspect.signature(func.forward if is_module(func) else func).parameters.values())  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        parameters = []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "arg")
    names = [p.name for p in positional[:count]]
    return names + [f"{rest}_{position}" for position in range(count - len(names))]
