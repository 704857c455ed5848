"""``dynamic_shapes``: which sizes of a program's inputs may differ from call to call.

Invariant: a call is computed only for sizes for which each decision that the capture took on sizes holds.
Limits: sizes of tensors; numbers among the arguments are part of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from functionalize.errors import InputMismatchError
from functionalize.graph_capture.inputs import ProgramInputs
from functionalize.runtime.metadata import ProgramMetadata
from functionalize.runtime.size_guards import SizeGuards

Dims = dict[int, Any]  # of one tensor: which dimensions may differ, and what is known of them


def dims_of(inputs: ProgramInputs, spec: Any) -> dict[int, Dims]:
    """For each input tensor, by identity, the dimensions that may differ. A spec that does not fit is a ValueError."""
    from functionalize._torch.symbols import is_dynamic

    found: dict[int, Dims] = {}
    arguments = dict(zip(inputs.convention.names, inputs.args, strict=True)) | inputs.kwargs
    if isinstance(spec, Mapping):
        unknown = [name for name in spec if name not in arguments]
        if unknown:
            raise ValueError(f"dynamic_shapes names {unknown[0]!r}; the arguments are {', '.join(arguments)}")
    parts = spec if isinstance(spec, Mapping) else dict(zip(arguments, spec, strict=False))
    for name, part in parts.items():
        for tensor, dims in _pairs(name, arguments[name], part):
            found.setdefault(id(tensor), {}).update({dim: d for dim, d in dims.items() if is_dynamic(d)})
    return {key: dims for key, dims in found.items() if dims}


def _pairs(name: str, value: Any, spec: Any) -> Iterator[tuple[torch.Tensor, Dims]]:
    """The tensors of an argument, each with what the spec says of its dimensions."""
    if spec is None or isinstance(spec, int):
        return
    if isinstance(value, torch.Tensor):
        dims = dict(spec) if isinstance(spec, Mapping) else dict(enumerate(spec))
        wrong = [dim for dim in dims if not -value.dim() <= dim < value.dim()]
        if wrong:
            raise ValueError(f"dynamic_shapes names dimension {wrong[0]} of {name!r}, which has {value.dim()}")
        yield value, {dim % value.dim(): given for dim, given in dims.items()}
    elif isinstance(value, Mapping):
        for key, part in spec.items():
            yield from _pairs(f"{name}.{key}", value[key], part)
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(spec):
            yield from _pairs(f"{name}.{place}", value[place], part)
    else:
        for key, part in (spec if isinstance(spec, Mapping) else {}).items():
            yield from _pairs(f"{name}.{key}", getattr(value, key), part)


def relate(dims: Mapping[int, Dims], fakes: Mapping[int, torch.Tensor]) -> None:
    """Tell the trace what the spec says: which sizes are equal, and between which bounds they lie."""
    from functionalize._torch.symbols import DerivedDim, NamedDim, assume

    named: dict[str, Any] = {}
    sizes = [(fakes[key].size(dim), given) for key, of_one in dims.items() for dim, given in of_one.items()]
    for size, given in sizes:
        if isinstance(given, DerivedDim):
            continue
        if isinstance(given, NamedDim):
            assume(size == named.setdefault(given.__name__, size))
        _bound(size, given.min, given.max)
    for size, given in sizes:
        if isinstance(given, DerivedDim) and given.root.__name__ in named:
            assume(size == given.fn(named[given.root.__name__]))


def check_free(dims: Mapping[int, Dims], fakes: Mapping[int, torch.Tensor]) -> None:
    """Raise where the program can only take the size that it was captured with."""
    from functionalize._torch.symbols import may_specialize

    for key, of_one in dims.items():
        for dim, given in of_one.items():
            size: Any = fakes[key].size(dim)
            if not may_specialize(given) and (type(size) is int or size.node.expr.is_number):
                raise InputMismatchError(
                    f"dimension {dim} of an input of size {list(fakes[key].size())} may differ by dynamic_shapes, and "
                    "the program is right for that size only",
                    hint="say Dim.AUTO or Dim.STATIC, or change what the program does with the size",
                )


def _bound(size: Any, low: Any, high: Any) -> None:
    from functionalize._torch.symbols import assume

    if low is not None and low > 0:
        assume(size >= low)
    if isinstance(high, int):
        assume(size <= high)


def size_guards(environment: Any, metadata: ProgramMetadata) -> SizeGuards | None:
    """What a program takes for granted of its inputs' sizes; None where all of them are numbers."""
    from functionalize._torch import symbols  # here: loads sympy

    layouts = dict(metadata.symbols.inputs)
    if not layouts:
        return None
    labels = {number: metadata.inputs[number].label for number in layouts}
    return SizeGuards(layouts, labels, symbols.guards(environment), environment.var_to_range)
