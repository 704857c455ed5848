"""The Python values that a program may decide by, found from what it runs: its modules, its variables, its optimizers.

Invariant: values are taken before the program runs. Limits: variables of functions that a program calls are found a
few calls deep, and by the names that their code has; functions of torch have none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from functionalize.runtime.settings import Settings
from functionalize.runtime.state_walk import OPAQUE, StateWalk, is_module

_DEPTH = 4  # how far functions that call functions are followed
_NO_SETTINGS = (type, OPAQUE[1], torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
Variable = tuple[str, Any, Any]  # its name, and the container and key where it is


def settings_of(func: Any, state: StateWalk) -> Settings:
    """What a program of this function, or module, and this state decides by."""
    settings, entered = Settings(), {id(item) for item in state.seen}
    for item in state.seen:
        if is_module(item):
            settings.add_module(item, state.modules[id(item)], entered)
    for slot in state.constants:
        settings.add(slot.path, slot.container, slot.key)
    codes: set[Any] = set()
    classes = {type(item) for item in state.seen if is_module(item)}
    for function in [func, *(kind.forward for kind in classes)]:
        for name, container, key in variables_below(function, codes):
            value = Settings.read(container, key)
            if not isinstance(value, _NO_SETTINGS) and id(value) not in entered:
                settings.add(name, container, key)
    return settings


def variables_below(func: Any, codes: set[Any], depth: int = _DEPTH) -> Iterator[Variable]:
    """The variables of a function, and of functions that these hold; ``codes``: what was looked through before."""
    for name, container, key in variables(func):
        yield name, container, key
        value = Settings.read(container, key)
        inner = inspect.unwrap(value) if callable(value) else value
        if depth and inspect.isfunction(inner) and inner.__code__ not in codes:
            codes.add(inner.__code__)
            yield from variables_below(value, codes, depth - 1)


def variables(func: Any) -> Iterator[Variable]:
    """What a function reaches by names: arguments bound by ``partial``, ``self``, closures, globals."""
    while isinstance(func, functools.partial):
        arguments = dict(enumerate(func.args))
        yield from ((f"arg{place}", arguments, place) for place in arguments)
        yield from ((name, func.keywords, name) for name in func.keywords)
        func = func.func
    if inspect.ismethod(func):
        yield "self", {"self": func.__self__}, "self"
        func = func.__func__
    func = inspect.unwrap(func)
    if not inspect.isfunction(func):
        return
    if func.__module__ and func.__module__.split(".")[0] == "torch":
        return
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=False):
        yield name, cell, None
    for name in func.__code__.co_names:
        if name in func.__globals__:
            yield name, func.__globals__, name


def reached(func: Any) -> dict[str, Any]:
    """Modules and optimizers that a function reaches through its variables, by name."""
    found: dict[str, Any] = {}
    for name, container, key in variables_below(func, set()):
        value = Settings.read(container, key)
        if is_module(value) or isinstance(value, torch.optim.Optimizer):
            found.setdefault(name, value)
    return found
