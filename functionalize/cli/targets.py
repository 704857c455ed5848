"""Finds what a command is about: ``package.module:object``, and its inputs.

Invariant: what is imported is looked for in the current directory first, as `python -m` does. Limits: none known.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from functionalize.cli.specs import Spec, make_inputs


class TargetError(Exception):
    """A target that cannot be found, made or called; the message says why, and what to do."""


def find(name: str) -> Any:
    """The object of a name ``package.module:object``. Raises TargetError where there is none."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise TargetError(f"{name!r} names no object: write package.module:object")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, what it imports is not
        message = f"there is no module {error.name!r}: neither in the current directory nor installed"
        raise TargetError(message) from error
    for step in path.split("."):
        if not hasattr(found, step):
            raise TargetError(f"{module_name} has no {path!r}{_near(found, step)}")
        found = getattr(found, step)
    return found


def _near(holder: Any, step: str) -> str:
    near = difflib.get_close_matches(step, dir(holder), n=3)
    return f"; near it are {', '.join(near)}" if near else ""


def model_of(name: str, *, call: bool, evaluate: bool) -> Callable[..., Any]:
    """The module or function that a command is about; classes of modules, and with ``call`` factories, are called."""
    import torch

    found = find(name)
    if call or (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        try:
            found = found()
        except TypeError as error:
            advice = "write a function that makes the model, and use --call"
            raise TargetError(f"{name} cannot be called without arguments ({error}): {advice}") from error
    if not callable(found):
        raise TargetError(f"{name} is a {type(found).__name__}, which is neither a function nor a module")
    if evaluate:
        if not isinstance(found, torch.nn.Module):
            raise TargetError(f"--eval is for modules; {name} is a {type(found).__name__}")
        found.eval()
    return found  # type: ignore[no-any-return]


def inputs_of(specs: Sequence[Spec], factory: str | None, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments to call the target with: by specs, or from a function without arguments."""
    if factory is None:
        return make_inputs(specs, seed)
    if specs:
        raise TargetError("inputs are given in words and by --inputs: use one of the two")
    import torch

    torch.manual_seed(seed)
    made = find(factory)()
    if not isinstance(made, tuple):
        return (made,), {}
    if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
        return tuple(made[0]), dict(made[1])
    return made, {}
