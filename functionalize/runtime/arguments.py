"""The arguments of a call, in the order in which the program was captured with them.

Invariant: arguments that are built alike have the same structure, leaf by leaf, however they were spelled (by position
or by name, in whatever order; but for what a function collects in ``**kwargs``, whose order it sees). Limits: those of
``StateWalk``.
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
    """What one call brings. Arguments that are tensors and plain values, as most are, need no walk."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str]) -> None:
        """``names``: of the positional arguments."""
        self._given, self.kwargs, self._names = args, kwargs, names
        self.are_examples = False  # tensors that stand for any that a call may pass: nobody compares them
        self.values = (*args, *kwargs.values()) if kwargs else args

    @cached_property
    def args(self) -> list[Any]:
        """The positional arguments."""
        return list(self._given)

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
        """Equal for arguments that are built alike."""
        if not self.flat:
            return tuple(self.walk.shape)
        return tuple(torch.Tensor if kind in TENSOR_TYPES else kind for kind in self.kinds)

    @property
    def containers(self) -> Mapping[int, ContainerSource]:
        """What the arguments sit in, and their paths."""
        return self.walk.containers

    @property
    def objects(self) -> Sequence[ObjectSource]:
        """The objects among the arguments."""
        return self.walk.objects

    @cached_property
    def walk(self) -> StateWalk:
        """The arguments as objects that were walked."""
        walk = StateWalk()
        for position in range(len(self.args)):
            walk.walk(self.args, position, self._names[position])
        for name in self.kwargs:
            walk.walk(self.kwargs, name, name)
        return walk

    def like(self, make: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
        """Arguments built alike, of other tensors.

        Raises:
            RuntimeError: some object among them cannot be copied.
        """
        known: dict[int, Any] = {
            id(leaf): make(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves
        }
        try:
            return copy.deepcopy((list(self.args), self.kwargs), known)
        except Exception as error:
            raise RuntimeError(f"the arguments of the call cannot be copied: {error}") from error


@dataclass(frozen=True, eq=False)
class Nest:
    """Arguments of plain containers, without their tensors."""

    leaves: tuple[Any, ...]  # None for tensors
    tensors: frozenset[int]  # which of them are some
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> Nest | None:
        """That of some arguments; None where objects are among them that are no such containers."""
        leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
        if not all(type(leaf) in LEAF_TYPES or isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        tensors = frozenset(place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        return cls(tuple(None if place in tensors else leaf for place, leaf in enumerate(leaves)), tensors, spec)

    def filled(self, tensor: Callable[[], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional arguments and arguments by name, with a value for each tensor."""
        leaves = [tensor() if place in self.tensors else leaf for place, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True)
class CallingConvention:
    """How a program was called when it was captured."""

    names: tuple[str, ...]  # of the positional arguments
    keywords: tuple[str, ...]
    parameters: tuple[str, ...]  # what the function itself calls its positional arguments
    nest: Nest | None = None  # how the arguments were nested; None where they were not of plain containers
    apart: frozenset[str] | None = None  # the names that a `**kwargs` does not collect; None where there is none

    @classmethod
    def of(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> CallingConvention:
        """The convention of one call of a function."""
        known = _parameters_of(func)
        names = tuple(_names_of(known, len(args)))
        collects = any(one.kind is one.VAR_KEYWORD for one in known)
        named = frozenset(one.name for one in known if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
        return cls(names[: len(args)], tuple(kwargs), names, Nest.of(args, kwargs), named if collects else None)

    def takes(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether these are as many arguments, of the same names; those that are collected in the same order."""
        given = (*self.parameters[: len(args)], *kwargs)
        alike = len(given) == len(args) + len(kwargs) and {*given} == {*self.names, *self.keywords}
        return alike and self.collected(kwargs) == self.collected(self.keywords)

    def collected(self, keywords: Iterable[str]) -> tuple[str, ...]:
        """Those names of arguments that the function collects in a dict, in order."""
        return () if self.apart is None else tuple(name for name in keywords if name not in self.apart)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> CallArguments:
        """A call's arguments in this order.

        Raises:
            InputMismatchError: others were given than at the capture.
        """
        if len(args) != len(self.names) or tuple(kwargs) != self.keywords:
            args, kwargs = self._reordered(args, kwargs)
        return CallArguments(args, kwargs, self.names)

    def _reordered(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        order = (*self.names, *self.keywords)
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        missing, more = [name for name in order if name not in given], [name for name in given if name not in order]
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
        return [given[name] for name in self.names], {name: given[name] for name in self.keywords}


def base_of(value: Any) -> torch.Tensor | None:
    """What autograd takes a tensor for a view of, itself where it is none; None of other values."""
    return autograd_base(value) if isinstance(value, torch.Tensor) else None


def _parameters_of(func: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function; none where nobody knows them."""
    try:
        return list(inspect.signature(func.forward if is_module(func) else func).parameters.values())  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return []


def _names_of(parameters: Sequence[inspect.Parameter], count: int) -> list[str]:
    """What a function calls its positional arguments, ``count`` at least."""
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "arg")
    return names + [f"{rest}_{position}" for position in range(count - len(names))]
