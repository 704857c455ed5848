"""What an exported program begins with: its state under names that a module can have, and its arguments.

Invariant: state that the program writes is a copy, of which tensors that shared memory do so; what it only reads is
shared with the original. Limits: arguments that pytrees do not know are bound: their tensors are state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from functionalize._torch import pytree
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.strided_layout import tensor_at
from functionalize.backends.preparation.example_call import ExampleCall
from functionalize.errors import UnsupportedExportError
from functionalize.runtime.call_tree import ArgumentRef, ObjectLeaf, joined

_TAKEN_NAMES = frozenset(dir(torch.fx.GraphModule)) | frozenset(torch.fx.GraphModule({}, torch.fx.Graph()).__dict__)
CONSTANTS = (int, float, bool, str, type(None))


@dataclass(eq=False)
class ExportInput:
    """One input of an exported graph."""

    kind: InputKind
    name: str
    target: str | None = None  # of state
    value: Any = None  # the tensor of state, or the value of an argument that is no tensor
    persistent: bool | None = None
    number: int | None = None  # of the program's input; None: it has none
    path: tuple[Any, ...] = ()  # of an argument: its name, and keys into it


def attribute_paths(targets: Sequence[str]) -> list[str]:
    """Paths that attributes of a module can have: none leads through another, and none is a module's own."""
    found: list[str] = []
    taken: set[str] = set()
    every = set(targets)
    for target in targets:
        parts = [f"{part}_" if part in _TAKEN_NAMES else part or "_" for part in target.split(".")]
        for count in range(1, len(parts)):
            if ".".join(target.split(".")[:count]) in every:  # a tensor, which has no attributes
                parts = [*parts[: count - 1], "_".join(parts[count - 1 :])]
                break
        path = ".".join(parts)
        while path in taken:
            path += "_"
        taken.add(path)
        found.append(path)
    return found


class Arguments:
    """The arguments of an exported program: those of the original but for objects, which are bound."""

    def __init__(self, call: ExampleCall) -> None:
        tree, convention = call.program.capture.tree, call.program.capture.convention
        self._numbers = call.program.metadata.arguments
        self._call = call
        self.causes: list[str] = []
        self.bound: list[ObjectLeaf] = []
        dropped = self._dropped = set[tuple[int, Any]]()
        for leaf, path in zip(tree.leaves, tree.paths, strict=True):
            if isinstance(leaf, (ArgumentRef, *CONSTANTS)):
                continue
            dropped.add(_place(path))
            if len(path) > 2:
                self.causes.append(_nested(path))
            elif isinstance(leaf, ObjectLeaf):
                self.bound.append(leaf)
        self.args, self.kwargs = self.of(call.args, call.kwargs)
        names = [name for at, name in enumerate(convention.names) if (0, at) not in dropped]
        self.names = [*map(free_name, names), *self.kwargs]
        self.spec = pytree.tree_structure((self.args, self.kwargs))
        positions = [at for at in range(len(call.args)) if (0, at) not in dropped]
        named: dict[tuple[int, Any], str] = {(0, at): name for at, name in zip(positions, names, strict=True)}
        named |= {(1, name): name for name in call.kwargs if (1, name) not in dropped}
        self._leaves = [
            (leaf, (named[place], *path[2:]))
            for leaf, path in zip(tree.leaves, tree.paths, strict=True)
            if (place := _place(path)) in named
        ]

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of a call of the original, in the capture's order, that the exported program takes."""
        positional = tuple(value for at, value in enumerate(args) if (0, at) not in self._dropped)
        return positional, {free_name(name): value for name, value in kwargs.items() if (1, name) not in self._dropped}

    @property
    def objects(self) -> dict[int, torch.Tensor]:
        """The tensors of arguments that are bound, by the numbers of the program's inputs."""
        numbers = [self._numbers[number] for leaf in self.bound for number in leaf.numbers]
        return {number: self._call.inputs[number] for number in numbers}

    def inputs(self, names: Callable[[str], str], entries: Sequence[Any]) -> list[ExportInput]:
        """The user's inputs, leaf by leaf."""
        found = []
        for leaf, path in self._leaves:
            if isinstance(leaf, ArgumentRef):
                number = self._numbers[leaf.number]
                found.append(ExportInput(InputKind.USER_INPUT, entries[number].name, number=number, path=path))
            else:
                found.append(ExportInput(InputKind.USER_INPUT, names(joined(path)), value=leaf, path=path))
        return found


def free_name(name: str) -> str:
    """What an argument of some name is called: an exported module's own `self` comes before it."""
    return "self_" if name == "self" else name


def _place(path: Sequence[Any]) -> tuple[int, Any]:
    """Of an argument: whether it is passed by name, and its position or name."""
    return path[0].idx, getattr(path[1], "idx", getattr(path[1], "key", None))


def _nested(path: Sequence[Any]) -> str:
    return UnsupportedExportError.cause(
        f"the argument `{joined(path[1:])}` contains an object of a class that is not registered with pytree",
        why="the arguments of an exported program are tensors, numbers, and containers of them",
        hint="pass it as a separate argument (its tensors become state of the exported program), or register its "
        "class with torch.export.register_dataclass or torch.utils.pytree",
    )


def copied(values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors, of which those that shared a storage share one."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = []
    for value in values:
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            found.append(value.detach().clone())
            continue
        storage = value.untyped_storage()
        key = storage.data_ptr() or id(value)
        if key not in storages:
            storages[key] = storage.clone()
        found.append(tensor_at(storages[key], Layout.of(value)))
    return found
