"""The arguments of a call, in the order in which the program was captured with them.

Invariant: arguments that are built alike have the same structure, leaf by leaf, whether they were passed by position or
by name, in any order. Only arguments that a function collects in ``**kwargs`` must keep their order, which it sees.
Limits: those of ``StateWalk``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize._torch.tensors import autograd_base
from functionalize.errors import InputMismatchError
from functionalize.python_state.slots import ContainerSource, ObjectSource
from functionalize.python_state.walk import LEAF_TYPES, TENSOR_TYPES, StateWalk, is_module


class CallArguments:
    """The arguments of one call. If all are tensors and plain values, as in most calls, they are not walked."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str]) -> None:
        """``names``: those of the positional arguments."""
        self._passed, self.kwargs, self._names = args, kwargs, names
        self.are_examples = False  # whether tensors are examples of what calls may pass, which guards do not compare
        self.values = (*args, *kwargs.values()) if kwargs else args

    @cached_property
    def args(self) -> list[Any]:
        """The positional arguments."""
        return list(self._passed)

    @cached_property
    def kinds(self) -> tuple[type, ...]:
        """The types of the arguments."""
        return tuple(map(type, self.values))

    @cached_property
    def flat(self) -> bool:
        """Whether all arguments are tensors and plain values."""
        return LEAF_TYPES.issuperset(self.kinds)

    @property
    def leaves(self) -> Sequence[Any]:
        """Tensors and plain values, in order."""
        return self.values if self.flat else [slot.get() for slot in self.walk.leaves]

    @property
    def structure(self) -> Any:
        """A value that is equal for arguments that are built alike."""
        if not self.flat:
            return tuple(self.walk.shape)
        return tuple(torch.Tensor if argument_type in TENSOR_TYPES else argument_type for argument_type in self.kinds)

    @property
    def containers(self) -> Mapping[int, ContainerSource]:
        """The containers of the arguments, with their paths."""
        return self.walk.containers

    @property
    def objects(self) -> Sequence[ObjectSource]:
        """The objects among the arguments."""
        return self.walk.objects

    @cached_property
    def walk(self) -> StateWalk:
        """The walk over the arguments."""
        walk = StateWalk()
        for position in range(len(self.args)):
            walk.walk(self.args, position, self._names[position])
        for name in self.kwargs:
            walk.walk(self.kwargs, name, name)
        return walk

    def like(self, make: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
        """Arguments built alike, with other tensors.

        Raises:
            RuntimeError: some object among them cannot be copied.
        """
        memo: dict[int, Any] = {
            id(leaf): make(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves
        }
        try:
            return copy.deepcopy((list(self.args), self.kwargs), memo)
        except Exception as error:
            raise RuntimeError(f"the arguments of the call cannot be copied: {error}") from error


@dataclass(frozen=True, eq=False)
class Nest:
    """Arguments in plain containers, without their tensors."""

    leaves: tuple[Any, ...]  # None for tensors
    tensors: frozenset[int]  # which leaves are tensors
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> Nest | None:
        """The nest of some arguments; None if they contain objects that pytrees do not know."""
        leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
        if not all(type(leaf) in LEAF_TYPES or isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        tensors = frozenset(place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        return cls(tuple(None if place in tensors else leaf for place, leaf in enumerate(leaves)), tensors, spec)

    def filled(self, tensor: Callable[[], Any]) -> tuple[list[Any], dict[str, Any]]:
        """The positional arguments and those by name, with a value in the place of each tensor."""
        leaves = [tensor() if place in self.tensors else leaf for place, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True)
class CallingConvention:
    """How a program was called when it was captured."""

    names: tuple[str, ...]  # those of the positional arguments
    keywords: tuple[str, ...]
    parameters: tuple[str, ...]  # the function's own names for its positional arguments
    nest: Nest | None = None  # how the arguments were nested; None if not all were in plain containers
    own_names: frozenset[str] | None = None  # those that `**kwargs` does not collect; None: the function collects none

    @classmethod
    def of(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> CallingConvention:
        """The convention of one call of a function."""
        parameters = _parameters_of(func)
        names = tuple(_names_of(parameters, len(args)))
        collects = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        return cls(names[: len(args)], tuple(kwargs), names, Nest.of(args, kwargs), named if collects else None)

    def takes(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether these are as many arguments with the same names, and those in `**kwargs` have the same order."""
        passed = (*self.parameters[: len(args)], *kwargs)
        alike = len(passed) == len(args) + len(kwargs) and {*passed} == {*self.names, *self.keywords}
        return alike and self.collected(kwargs) == self.collected(self.keywords)

    def collected(self, keywords: Iterable[str]) -> tuple[str, ...]:
        """The names of arguments that the function collects in `**kwargs`, in order."""
        own_names = self.own_names
        return () if own_names is None else tuple(name for name in keywords if name not in own_names)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> CallArguments:
        """A call's arguments, in the order of the capture.

        Raises:
            InputMismatchError: other arguments were passed than at the capture.
        """
        if len(args) != len(self.names) or tuple(kwargs) != self.keywords:
            args, kwargs = self._reordered(args, kwargs)
        return CallArguments(args, kwargs, self.names)

    def _reordered(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        order = (*self.names, *self.keywords)
        passed = dict(zip(self.parameters, args, strict=False)) | kwargs
        missing, more = [name for name in order if name not in passed], [name for name in passed if name not in order]
        if missing or more or len(args) + len(kwargs) != len(order):
            said = [f"without {', '.join(missing)}"] if missing else []
            said += [f"with {', '.join(more)}"] if more else []
            raise InputMismatchError(
                f"the program is called {' and '.join(said) or 'with more arguments'}; it was captured with the "
                f"arguments {', '.join(order) or 'none'}",
                hint="pass the same arguments, or capture again",
            )
        if self.collected(kwargs) != self.collected(self.keywords):
            raise InputMismatchError(
                f"the program is called with {', '.join(self.collected(kwargs))} in this order; it was captured with "
                f"{', '.join(self.collected(self.keywords))}, and its **kwargs shows the order",
                hint="pass them in the same order, or capture with on_guard_failure='recapture'",
            )
        return [passed[name] for name in self.names], {name: passed[name] for name in self.keywords}


def base_of(value: Any) -> torch.Tensor | None:
    """The tensor that autograd takes a tensor for a view of, or the tensor itself; None for other values."""
    return autograd_base(value) if isinstance(value, torch.Tensor) else None


def _parameters_of(func: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function; empty if it has no signature."""
    try:
        return list(inspect.signature(func.forward if is_module(func) else func).parameters.values())  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return []


def _names_of(parameters: Sequence[inspect.Parameter], count: int) -> list[str]:
    """The names of a function's positional arguments, at least ``count``."""
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "arg")
    return names + [f"{rest}_{position}" for position in range(count - len(names))]
