"""Gradient hooks of a program's state: they run where the program takes gradients, and not where its caller does.

The substitute of a tensor has the hooks of the tensor, in the same dict, so that handles remove them there. What a hook
reaches is state. It is searched only if the program takes gradients: otherwise hooks run when a call is differentiated,
whose gradients arrive at the tensors themselves.

Invariant: a hook runs once for each gradient that eager would give it. Limits: hooks of arguments, and of autograd's
own functions, are refused where the program takes gradients.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from functionalize._torch import HOOKS, gradient_hooks, has_gradient_hooks, share_gradient_hooks
from functionalize._torch.autograd import has_node_hooks
from functionalize.call_stack import Location
from functionalize.graph_capture.inputs.inputs import TracedInput, is_leaf
from functionalize.python_state.containers import cell_content, copy_of, unchanged
from functionalize.python_state.walk import StateWalk
from functionalize.refusals.gradients import BACKWARD_CHANGES_OBJECT, HOOK_LEFT, HOOK_OF_NODES, NODE_HOOKS
from functionalize.transform.gradients.autograd_notes import Questions


def install_hooks(inputs: Iterable[TracedInput]) -> None:
    """Give the substitutes of state the hooks of their tensors.

    Raises:
        UnsupportedProgramError: a hook could not run there.
    """
    for entry in inputs:
        if entry.slot is None or not isinstance(entry.value, torch.Tensor) or entry.fake is None:
            continue
        for hook in (hook for hooks in gradient_hooks(entry.value) for hook in hooks.values()):
            _refuse_nodes(hook, entry.target or entry.name)
        share_gradient_hooks(entry.value, entry.fake)


@contextlib.contextmanager
def hooks_suspended(inputs: Sequence[TracedInput], asked: Questions) -> Iterator[None]:
    """Take gradients that the program does not take itself, without a record in ``asked``.

    The hooks that substitutes share with their tensors do not run: they run when a call is differentiated.
    """
    shared = [(hooks, dict(hooks)) for entry in inputs for hooks in _shared(entry)]
    for hooks, _ in shared:
        hooks.clear()
    try:
        with asked.taken_back(HOOKS):
            yield
    finally:
        for hooks, content in shared:
            hooks.update(content)


class ContainerSnapshots:
    """The contents of objects before a backward."""

    def __init__(self, states: Iterable[StateWalk]) -> None:
        sources = (source for walk in states for source in walk.containers.values())
        self._before = [(source.container, source.path, copy_of(source.container)) for source in sources]

    def check(self) -> None:
        """Raise if the backward has changed an object.

        Raises:
            UnsupportedProgramError: it has.
        """
        for container, path, content in self._before:
            if not unchanged(container, content):
                raise BACKWARD_CHANGES_OBJECT.error(object=f"`{path}`" if path else "a Python object")


def check_hooks(inputs: Sequence[TracedInput], asked: Mapping[tuple[int, str], Location | None]) -> None:
    """Raise where the program left a hook on an input, or takes gradients that run hooks of autograd's functions.

    ``asked``: the questions of the program, by the number of the input and the question.

    Raises:
        UnsupportedProgramError: it did.
    """
    for number, entry in enumerate(inputs):
        if entry.fake is None or not isinstance(entry.value, torch.Tensor):
            continue
        label = entry.target or entry.name
        if has_gradient_hooks(entry.fake):
            own = set(map(id, gradient_hooks(entry.value)))
            if not own.issuperset(map(id, gradient_hooks(entry.fake))):
                raise HOOK_LEFT.error(place=f"on the gradient of `{label}`")
        if (number, HOOKS) in asked and is_leaf(entry.value) and has_node_hooks(entry.value):
            raise NODE_HOOKS.error(asked[number, HOOKS], input=label)


def _shared(entry: TracedInput) -> list[dict[int, Any]]:
    """The dicts of hooks that a substitute shares with its tensor."""
    if entry.fake is None or not isinstance(entry.value, torch.Tensor) or not has_gradient_hooks(entry.fake):
        return []
    own = set(map(id, gradient_hooks(entry.value)))
    return [hooks for hooks in gradient_hooks(entry.fake) if id(hooks) in own]


def _refuse_nodes(hook: Callable[..., Any], label: str) -> None:
    """Raise if a hook refers to functions of autograd: substitutes have different ones."""
    function = inspect.unwrap(hook)
    for cell in getattr(function, "__closure__", None) or ():
        value = cell_content(cell)
        if any(isinstance(item, Node) for item in (value if isinstance(value, (list, tuple)) else (value,))):
            raise HOOK_OF_NODES.error(input=label)
