"""Objects by name: targets ``package.module:object``, optimizers, and sizes that may differ.

Invariant: what is imported is looked for in the current directory first, as `python -m` does. Limits: arguments of
optimizers are Python literals.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from functionalize.cli.specs import Spec

_OPTIMIZER = re.compile(r"(?P<name>[\w.]+(?::[\w.]+)?)(?P<arguments>\(.*\))?", re.DOTALL)
_RANGE = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<min>\d+)?:(?P<max>\d+)?")

Bounds = tuple[int | None, int | None]


class TargetError(Exception):
    """A target that cannot be found, made or called; the message says why, and what to do."""


def find(name: str) -> Any:
    """The object of a name ``package.module:object``. Raises TargetError where there is none."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise TargetError(f"{name!r} does not name an object: write package.module:object")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, what it imports is not
        message = f"no module {error.name!r} in the current directory or installed"
        raise TargetError(message) from error
    for step in path.split("."):
        if not hasattr(found, step):
            raise TargetError(f"{module_name} has no {path!r}{_near(found, step)}")
        found = getattr(found, step)
    return found


def _near(holder: Any, step: str) -> str:
    near = difflib.get_close_matches(step, dir(holder), n=3)
    return f"; similar names: {', '.join(near)}" if near else ""


def optimizer_of(text: str, model: Any) -> Any:
    """An optimizer in words: of ``torch.optim``, or ``package.module:object``, with keyword arguments or without.

    What is no optimizer yet is called with the parameters of the model.

    Raises:
        TargetError: there is no such object, or it makes no optimizer.

    Example:
        >>> import torch
        >>> optimizer_of("SGD(lr=0.5)", torch.nn.Linear(2, 1)).defaults["lr"]
        0.5
    """
    import torch

    read = _OPTIMIZER.fullmatch(text)
    if read is None:
        raise TargetError(f"cannot read the optimizer {text!r}: write AdamW, 'SGD(lr=0.1)', or package.module:object")
    name = read["name"] if ":" in read["name"] else f"torch.optim:{read['name']}"
    made = find(name)
    if isinstance(made, torch.optim.Optimizer):
        return made
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"{name} is not an optimizer object: for a function, name the optimizer object that it steps")
    try:
        made = made(model.parameters(), **_literals(text, read["arguments"]))
    except TargetError:
        raise
    except Exception as error:  # whatever a constructor says of its arguments
        raise TargetError(f"{name} cannot be called with the model's parameters: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise TargetError(f"{name} returns a {type(made).__name__}, which is not an optimizer")
    return made


def _literals(text: str, arguments: str | None) -> dict[str, Any]:
    """Keyword arguments, of ``(lr=0.1)``."""
    try:
        call: Any = ast.parse(f"f{arguments or '()'}", mode="eval").body
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("an optimizer takes only keyword arguments")
        return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError) as error:
        raise TargetError(f"cannot read the optimizer {text!r}: write it as 'SGD(lr=0.1, momentum=0.9)'") from error


def bounds_of(texts: Sequence[str]) -> dict[str, Bounds]:
    """Between which sizes others lie, by name, of ``batch=2:64``.

    Raises:
        TargetError: one cannot be read.

    Example:
        >>> bounds_of(["batch=2:64", "length=:128"])
        {'batch': (2, 64), 'length': (None, 128)}
    """
    found = {}
    for text in texts:
        read = _RANGE.fullmatch(text)
        if read is None:
            raise TargetError(f"cannot read the bounds {text!r}: write batch=2:64, batch=2: or batch=:64")
        low, high = (None if one is None else int(one) for one in (read["min"], read["max"]))
        if low is not None and high is not None and low > high:
            raise TargetError(f"the bounds {text!r} contain no size")
        found[read["name"]] = low, high
    return found


def dynamic_shapes_of(specs: Sequence[Spec], bounds: Mapping[str, Bounds]) -> Any:
    """``dynamic_shapes`` for inputs in words; None where all sizes stay.

    Raises:
        TargetError: there are bounds for a size that no input names, or a size lies outside of its own.
    """
    from torch.export import Dim

    sizes = {name: size for spec in specs for name, size in zip(spec.names, spec.sizes, strict=True) if name}
    for name, (low, high) in bounds.items():
        if name not in sizes:
            raise TargetError(f"no input has a size named {name!r}: write f32[{name}=4,16]")
        if not (low or 0) <= sizes[name] <= (sizes[name] if high is None else high):
            raise TargetError(f"the size {name!r} is {sizes[name]} in the inputs, outside its bounds")
    if not sizes:
        return None
    dims = {name: Dim(name, min=bounds.get(name, _ANY)[0], max=bounds.get(name, _ANY)[1]) for name in sizes}
    parts = {
        number: {dim: dims[name] for dim, name in enumerate(spec.names) if name} or None
        for number, spec in enumerate(specs)
    }
    order = sorted(parts, key=lambda number: specs[number].keyword is not None)
    return tuple(parts[number] for number in order)


_ANY: Bounds = (None, None)


def grown(specs: Sequence[Spec], bounds: Mapping[str, Bounds], by: int) -> dict[str, int]:
    """Other sizes for those that may differ, larger by some where their bounds have room."""
    found = {}
    for spec in specs:
        for name, size in zip(spec.names, spec.sizes, strict=True):
            high = bounds.get(name or "", _ANY)[1]
            if name:
                found[name] = size + by if high is None else min(size + by, high)
    return found
