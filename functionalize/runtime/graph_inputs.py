"""What a captured program takes as inputs: parameters, buffers and other state that it reaches, and its arguments.

Invariant: the order is that of ``torch.export``: parameters, buffers, constants, user inputs; each state tensor once,
under the first of its names. Limits: what a function reaches otherwise than by arguments is looked for among its own
variables and those of functions that it calls by name.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from functionalize.runtime.state_walk import OPAQUE, Spot, State, is_module

_PREFIX = {InputKind.PARAMETER: "p", InputKind.BUFFER: "b", InputKind.CONSTANT_TENSOR: "c"}
_DEPTH = 4  # how far functions that call functions are followed


@dataclass(frozen=True, eq=False)
class Source:
    """One input of a program: a tensor of its state, or a leaf of its arguments."""

    kind: InputKind
    name: str  # of the placeholder
    target: str | None  # the path of a state tensor
    value: Any  # when the program was captured
    spot: Spot | None  # where it sits; None for a constant, which the program holds itself
    persistent: bool | None = None
    grad_of: Source | None = None  # whose gradient it is


class Supposed:
    """A gradient that a tensor does not have: a capture may ask what the program does if it has one."""

    def __init__(self, of: torch.Tensor) -> None:
        self.of = of


class Lifted:
    """The inputs of one program."""

    def __init__(
        self,
        func: Callable[..., Any],
        roots: dict[str, Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        suppose_gradients: bool = False,
    ) -> None:
        self.state = State()
        for name in roots:
            self.state.walk(roots, name, name)
        self.args, self.kwargs, self.arguments = list(args), dict(kwargs), State()
        self.names = names_of(func, len(self.args))
        walk_arguments(self.arguments, self.args, self.kwargs, self.names)
        taken: set[str] = set()
        state, user = list(self._state_sources(taken)), list(self._user_sources(taken))
        gradients = list(self._gradients([*state, *user], taken, suppose_gradients))
        self.sources = [*state, *gradients, *user]

    def walk(self, args: list[Any], kwargs: dict[str, Any]) -> State:
        """The arguments of another call."""
        state = State()
        walk_arguments(state, args, kwargs, self.names)
        return state

    def _state_sources(self, taken: set[str]) -> Iterator[Source]:
        found: dict[int, Source] = {}
        for spot in self.state.tensors:
            tensor = spot.get()
            if id(tensor) not in found:
                kind, persistent = _kind_of(spot, tensor)
                name = fresh(f"{_PREFIX[kind]}_{spot.path}", taken)
                found[id(tensor)] = Source(kind, name, spot.path, tensor, spot, persistent)
        order = [InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR]
        yield from sorted(found.values(), key=lambda source: order.index(source.kind))

    def _gradients(self, sources: list[Source], taken: set[str], suppose: bool) -> Iterator[Source]:
        """The gradients that inputs have, or could have."""
        seen: set[int] = set()
        for source in sources:
            if not is_leaf(source.value) or id(source.value) in seen:
                continue
            seen.add(id(source.value))
            gradient = source.value.grad if source.value.grad is not None or not suppose else Supposed(source.value)
            if gradient is not None:
                target = f"{source.target or source.name}.grad"
                yield Source(InputKind.BUFFER, fresh(f"b_{target}", taken), target, gradient, None, False, source)

    def _user_sources(self, taken: set[str]) -> Iterator[Source]:
        for spot in self.arguments.leaves:
            if isinstance(spot.get(), torch.Tensor) or spot.owner is None or isinstance(spot.owner, (dict, list)):
                yield Source(InputKind.USER_INPUT, fresh(spot.path, taken), None, spot.get(), spot)


def is_leaf(value: Any) -> bool:
    """Whether a value is a tensor that autograd leaves gradients at."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _kind_of(spot: Spot, tensor: torch.Tensor) -> tuple[InputKind, bool | None]:
    if type(tensor) is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter):
        return InputKind.PARAMETER, None
    if is_module(spot.owner):
        if spot.holder is spot.owner._buffers:
            return InputKind.BUFFER, spot.key not in spot.owner._non_persistent_buffers_set
        return InputKind.CONSTANT_TENSOR, None
    return InputKind.BUFFER, False


def fresh(path: str, taken: set[str]) -> str:
    """A name for a placeholder that none has yet, written as ``torch.export`` writes it."""
    name = base = _identifier(path)
    count = 0
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name


@functools.cache
def _identifier(path: str) -> str:
    base = re.sub(r"\W", "_", path).lower() or "arg"
    return f"_{base}" if base[0].isdigit() or keyword.iskeyword(base) else base


def walk_arguments(state: State, args: list[Any], kwargs: dict[str, Any], names: Sequence[str]) -> None:
    """Enter the arguments of a call."""
    for place in range(len(args)):
        state.walk(args, place, names[place])
    for name in kwargs:
        state.walk(kwargs, name, name)


def names_of(func: Callable[..., Any], count: int) -> list[str]:
    """What a function calls its first arguments."""
    if not count:
        return []
    try:
        parameters = list(inspect.signature(func.forward if is_module(func) else func).parameters.values())  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        parameters = []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "arg")
    names = [p.name for p in positional[:count]]
    return names + [f"{rest}_{place}" for place in range(count - len(names))]


def reached(func: Any, depth: int = _DEPTH) -> dict[str, Any]:
    """Modules, optimizers and other objects with tensors that a function reaches through its variables, by name."""
    found: dict[str, Any] = {}
    for name, value in _variables(func):
        if is_module(value) or isinstance(value, torch.optim.Optimizer):
            found.setdefault(name, value)
        elif depth and inspect.isfunction(inspect.unwrap(value) if callable(value) else value):
            for inner, item in reached(value, depth - 1).items():
                found.setdefault(inner, item)
    return found


def _variables(func: Any) -> Iterator[tuple[str, Any]]:
    while isinstance(func, functools.partial):
        yield from ((f"arg{place}", value) for place, value in enumerate(func.args))
        yield from func.keywords.items()
        func = func.func
    if inspect.ismethod(func):
        yield "self", func.__self__
        func = func.__func__
    func = inspect.unwrap(func)
    if not inspect.isfunction(func):
        return
    if func.__module__ and func.__module__.split(".")[0] == "torch":
        return
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=False):
        with_value = _content(cell)
        if with_value:
            yield name, with_value[0]
    for name in func.__code__.co_names:
        if name in func.__globals__ and not isinstance(func.__globals__[name], (type, *OPAQUE[1:2])):
            yield name, func.__globals__[name]


def _content(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not filled yet
        return []
