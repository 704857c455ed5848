"""What one call of an operator does, according to its arguments.

In: an operator and the arguments of one call. Out: an argument by its name, whether the call draws random numbers, and
whether what it returns is data-dependent.
Guarantees: arguments are found by the schema, by position or by name, with its defaults. Limits: only the values in
`_DRAWS_NOTHING` say that a call draws no random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.ops import tables
from functionalize.ops.tables import OpOverload

# Arguments of operators that draw random numbers, each with the value with which a call does not draw.
_DRAWS_NOTHING: Mapping[str, object] = {"dropout_p": 0.0, "train": False, "training": False}
_DATA_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_INDEX, _MASKS = torch.ops.aten.index.Tensor, frozenset({torch.bool, torch.uint8})


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument in a schema."""

    position: int
    kwarg_only: bool
    default: Any


@functools.cache
def declared(op: Any) -> dict[str, Parameter]:
    """The arguments of an op, by name; cached, as reading the schema costs as much as an op."""
    arguments = enumerate(op._schema.arguments)
    return {own.name: Parameter(index, own.kwarg_only, own.default_value) for index, own in arguments}


def argument(op: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An argument of a call by name, the schema's default if the call leaves it out."""
    own = declared(op)[name]
    by_position = not own.kwarg_only and own.position < len(args)
    return args[own.position] if by_position else kwargs.get(name, own.default)


def is_data_dependent(op: Any, args: Sequence[Any]) -> bool:
    """Whether a call returns a number that depends on tensor values, or a tensor whose size does.

    >>> index, x, mask = torch.ops.aten.index.Tensor, torch.ones(2), torch.tensor([True, False])
    >>> is_data_dependent(index, (x, [mask])), is_data_dependent(index, (x, [torch.tensor([1])]))
    (True, False)
    """
    if not isinstance(op, OpOverload) or _DATA_DEPENDENT.isdisjoint(op.tags):
        return False
    return op is not _INDEX or has_mask(args[1])


def has_mask(indices: Sequence[Any]) -> bool:
    """Whether an index is a mask, which selects a data-dependent number of elements."""
    return any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in indices)


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers.

    >>> import torch
    >>> dropout = torch.ops.aten.native_dropout.default
    >>> draws(dropout, (torch.ones(2), 0.5, True), {}), draws(dropout, (torch.ones(2), 0.5, False), {})
    (True, False)
    """
    switches = _switches(op)
    return switches is not None and all(argument(op, name, args, kwargs) != _DRAWS_NOTHING[name] for name in switches)


@functools.cache
def _switches(op: Any) -> list[str] | None:
    """The arguments that may turn drawing off in a call of a random op; None if the op is not random."""
    if not (isinstance(op, OpOverload) and tables.row(op).random):
        return None
    return [name for name in _DRAWS_NOTHING if name in declared(op)]
