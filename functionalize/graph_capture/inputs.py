"""What a captured program takes as inputs: parameters, buffers and other state that it reaches, and its arguments.

Invariant: the order is that of ``torch.export``: parameters, buffers, constants, user inputs; each state tensor once,
under the first of its names. Limits: what a function reaches otherwise than by arguments is looked for among its own
variables and those of functions that it calls by name.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from functionalize._torch.autograd import get_gradient_edge
from functionalize._torch.module_state import buffers_of, is_persistent
from functionalize.runtime.graph_inputs import names_of, walk_arguments
from functionalize.runtime.metadata import GraphInput
from functionalize.runtime.refused_objects import refuse_tensor
from functionalize.runtime.state_walk import OPAQUE, Slot, StateWalk, is_module

_PREFIX = {InputKind.PARAMETER: "p", InputKind.BUFFER: "b", InputKind.CONSTANT_TENSOR: "c"}
_DEPTH = 4  # how far functions that call functions are followed


@dataclass(eq=False)
class TracedInput:
    """One input while a program is captured: what becomes its :class:`GraphInput`, and what it is during the trace."""

    kind: InputKind
    name: str
    target: str | None
    value: Any  # the example: a tensor, a plain value, a MissingGradient
    slot: Slot | None = None
    argument: int | None = None
    persistent: bool | None = None
    gradient_of: TracedInput | None = None
    fake: torch.Tensor | None = None  # what the program gets in place of a tensor; a constant stays itself
    edge: Any = None  # where autograd finds its gradient, if it requires one

    @property
    def is_tensor(self) -> bool:
        """Whether the graph gets a tensor here."""
        return isinstance(self.value, (torch.Tensor, MissingGradient))

    @property
    def is_constant(self) -> bool:
        """Whether the program holds the tensor itself."""
        return self.slot is None and self.argument is None and self.gradient_of is None and self.is_tensor

    def frozen(self, numbers: dict[int, int]) -> GraphInput:
        """What a call needs to know; ``numbers`` are the positions of inputs by identity."""
        constant = self.value if self.is_constant else None
        if not self.is_tensor and isinstance(self.value, (int, float, bool, str)):
            constant = self.value
        gradient_of = None if self.gradient_of is None else numbers[id(self.gradient_of)]
        where = (self.slot, self.argument, constant, self.persistent, gradient_of)
        return GraphInput(self.kind, self.name, self.target, self.is_tensor, *where, self._requires_grad())

    def _requires_grad(self) -> bool | None:
        """Whether the input requires gradients now, if the program has said so; None where it has not."""
        before, now = isinstance(self.value, torch.Tensor) and self.value.requires_grad, self.fake
        if now is None or not self.is_tensor or now.requires_grad == before:
            return None
        return None if now.requires_grad and not now.is_leaf else now.requires_grad  # one that was written requires too


class MissingGradient:
    """A gradient that a tensor does not have: a capture may ask what the program does if it has one."""

    def __init__(self, of: torch.Tensor) -> None:
        self.of = of


class ProgramInputs:
    """The inputs of one program, found in the objects that it reaches and in its arguments."""

    def __init__(
        self,
        func: Callable[..., Any],
        roots: dict[str, Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        suppose_gradients: bool = False,
    ) -> None:
        self.state = StateWalk()
        for name in roots:
            self.state.walk(roots, name, name)
        self.args, self.kwargs = list(args), dict(kwargs)
        self.names = names_of(func, len(self.args))
        self.arguments = walk_arguments(self.args, self.kwargs, self.names)
        taken: set[str] = set()
        state, user = list(self._state(taken)), list(self._user(taken))
        gradients = list(self._gradients([*state, *user], taken, suppose_gradients))
        self.inputs = [*state, *gradients, *user]
        for entry in self.inputs:
            if isinstance(entry.value, torch.Tensor):
                refuse_tensor(entry.value, f"`{entry.target or entry.name}`")

    def _state(self, taken: set[str]) -> Iterator[TracedInput]:
        found: dict[int, TracedInput] = {}
        for slot in self.state.tensors:
            tensor = slot.get()
            if id(tensor) not in found:
                kind, persistent = _kind_of(slot, tensor)
                name = fresh_name(f"{_PREFIX[kind]}_{slot.path}", taken)
                found[id(tensor)] = TracedInput(kind, name, slot.path, tensor, slot, persistent=persistent)
        order = [InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR]
        yield from sorted(found.values(), key=lambda entry: order.index(entry.kind))

    def _gradients(self, inputs: list[TracedInput], taken: set[str], suppose: bool) -> Iterator[TracedInput]:
        """The gradients that inputs have, or could have."""
        seen: set[int] = set()
        for entry in inputs:
            if not is_leaf(entry.value) or id(entry.value) in seen:
                continue
            seen.add(id(entry.value))
            gradient = entry.value.grad
            if gradient is None and suppose:
                gradient = MissingGradient(entry.value)
            if gradient is not None:
                target = f"{entry.target or entry.name}.grad"
                name = fresh_name(f"b_{target}", taken)
                yield TracedInput(InputKind.BUFFER, name, target, gradient, persistent=False, gradient_of=entry)

    def _user(self, taken: set[str]) -> Iterator[TracedInput]:
        for position, slot in enumerate(self.arguments.leaves):
            value = slot.get()
            if isinstance(value, torch.Tensor) or slot.owner is None or isinstance(slot.owner, (dict, list)):
                name = fresh_name(slot.path, taken)
                yield TracedInput(InputKind.USER_INPUT, name, None, value, argument=position)


def is_leaf(value: Any) -> bool:
    """Whether a value is a tensor that autograd leaves gradients at."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def gradient_edge(tensor: torch.Tensor) -> Any:
    """Where autograd finds the gradient of a tensor as it is now; None for one that requires none."""
    if not tensor.requires_grad:
        return None
    return tensor if tensor.is_leaf else get_gradient_edge(tensor)


def _kind_of(slot: Slot, tensor: torch.Tensor) -> tuple[InputKind, bool | None]:
    if type(tensor) is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter):
        return InputKind.PARAMETER, None
    if is_module(slot.owner):
        if slot.container is buffers_of(slot.owner):
            return InputKind.BUFFER, is_persistent(slot.owner, slot.key)
        return InputKind.CONSTANT_TENSOR, None
    return InputKind.BUFFER, False


def fresh_name(path: str, taken: set[str]) -> str:
    """A name for a placeholder that none has yet, written as ``torch.export`` writes it."""
    name = base = _identifier(path)
    count = 0
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    if hasattr(builtins, name):  # FX prints such a placeholder as `input_1 = input`: no other may be called that
        taken.add(f"{name}_1")
    return name


@functools.cache
def _identifier(path: str) -> str:
    base = re.sub(r"\W", "_", path).lower() or "arg"
    return f"_{base}" if base[0].isdigit() or keyword.iskeyword(base) else base


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
