"""``dynamic_shapes``: which sizes of a program's inputs may differ from call to call.

Invariant: a call is computed only for sizes for which each decision that the capture took on sizes holds.
Limits: sizes of tensors; numbers among the arguments are part of the program.
"""

from __future__ import annotations

import ast
import keyword
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from functionalize.graph_capture.inputs.inputs import ProgramInputs
from functionalize.refusals.calls import NUMBER_AS_DYNAMIC
from functionalize.runtime.guards.sizes import SizeGuards
from functionalize.runtime.metadata import ProgramMetadata

Dims = dict[int, Any]  # of one tensor: the dimensions that may differ, with their specs


class DynamicShapes(NamedTuple):
    """``dynamic_shapes``, and whether a program must be right for all sizes that it asks for."""

    spec: Any
    strict: bool


def with_dims(spec: Any) -> Any:
    """``dynamic_shapes`` with a ``Dim`` for each text: sizes of equal text are equal, as they are to torch.onnx.

    A text is a name (``"batch"``), or arithmetic of one name and integers (``"2*batch + 1"``). If the spec
    has a ``Dim`` of that name, the text means that one.

    Raises:
        ValueError: a text is neither.
    """
    if not any(isinstance(leaf, str) for leaf in _leaves(spec)):
        return spec
    from torch.export import Dim

    from functionalize._torch.symbols.symbols import named_dim

    dims = {dim.__name__: dim for leaf in _leaves(spec) if (dim := named_dim(leaf)) is not None}

    def dim_of(name: str) -> Any:
        return dims.setdefault(name, Dim(name))

    return _mapped(spec, lambda leaf: _dim_of_text(leaf, dim_of) if isinstance(leaf, str) else leaf)


def _leaves(spec: Any) -> Iterator[Any]:
    if isinstance(spec, (Mapping, list, tuple)):
        for part in spec.values() if isinstance(spec, Mapping) else spec:
            yield from _leaves(part)
    else:
        yield spec


def _mapped(spec: Any, make: Callable[[Any], Any]) -> Any:
    if isinstance(spec, Mapping):
        return {key: _mapped(part, make) for key, part in spec.items()}
    if isinstance(spec, (list, tuple)):
        parts = [_mapped(part, make) for part in spec]
        return tuple(parts) if isinstance(spec, tuple) else parts
    return make(spec)


_OF_DIMS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def _dim_of_text(text: str, dim_of: Callable[[str], Any]) -> Any:
    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.Name(id=name) if not keyword.iskeyword(name):
                return dim_of(name)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OF_DIMS:
                return _OF_DIMS[type(op)](value(left), value(right))
        raise ValueError(ast.unparse(node))

    try:
        dim = value(ast.parse(text.strip(), mode="eval").body)
    except Exception as error:  # the parser's, or one of a Dim's own
        raise _misread(text) from error
    if isinstance(dim, int):
        raise _misread(text)
    return dim


def _misread(text: str) -> ValueError:
    return ValueError(
        f"dynamic_shapes has the text {text!r} for a size\n"
        '    try  a name such as "batch" (sizes of one name are equal); "2*batch + 1"; or Dim.AUTO for a size that '
        "follows from several others"
    )


def dims_of(inputs: ProgramInputs, sizes: DynamicShapes) -> dict[int, Dims]:
    """For each input tensor, by identity, the dimensions that may differ. A spec that does not fit is a ValueError."""
    from functionalize._torch.symbols.symbols import is_dynamic

    spec = sizes.spec
    by_tensor: dict[int, Dims] = {}
    arguments = dict(zip(inputs.convention.names, inputs.args, strict=True)) | inputs.kwargs
    if not sizes.strict:  # a later call may have other arguments
        named = spec if isinstance(spec, Mapping) else dict(zip(arguments, spec, strict=False))
        spec = {name: part for name, part in named.items() if name in arguments and _fits(name, arguments[name], part)}
    if isinstance(spec, Mapping):
        unknown = [name for name in spec if name not in arguments]
        if unknown:
            raise ValueError(
                f"dynamic_shapes names {unknown[0]!r}, but the arguments are {', '.join(arguments)}\n"
                "    try  names of arguments only: the sizes of results follow from them"
            )
        parts: Mapping[str, Any] = spec
    elif isinstance(spec, (list, tuple)) and len(spec) == len(arguments):
        parts = dict(zip(arguments, spec, strict=True))
    else:
        raise _misfit("the arguments", spec, f"a dictionary by argument name, or a tuple of {len(arguments)} entries")
    for name, part in parts.items():
        for tensor, dims in _pairs(name, arguments[name], part):
            by_tensor.setdefault(id(tensor), {}).update({dim: d for dim, d in dims.items() if is_dynamic(d)})
    return {key: dims for key, dims in by_tensor.items() if dims}


def _fits(name: str, value: Any, spec: Any) -> bool:
    try:
        list(_pairs(name, value, spec))
    except ValueError:
        return False
    return True


def _misfit(name: str, spec: Any, expected: str) -> ValueError:
    return ValueError(f"dynamic_shapes has {spec!r} for {name}\n    try  {expected}; None for fixed sizes")


def _pairs(name: str, value: Any, spec: Any) -> Iterator[tuple[torch.Tensor, Dims]]:
    """The tensors of an argument, each with the spec of its dimensions."""
    if spec is None:
        return
    if isinstance(value, torch.Tensor):
        yield value, _dims(name, value, spec)
    elif isinstance(value, (list, tuple)):
        if not isinstance(spec, (list, tuple)) or len(spec) != len(value):
            raise _misfit(f"{name!r}", spec, f"a list of {len(value)} entries")
        for place, part in enumerate(spec):
            yield from _pairs(f"{name}.{place}", value[place], part)
    elif isinstance(spec, Mapping):
        members = value if isinstance(value, Mapping) else {key: getattr(value, str(key), None) for key in spec}
        for key, part in spec.items():
            if key not in members or (members is not value and not hasattr(value, str(key))):
                raise _misfit(
                    f"{name!r}", spec, (f"a dictionary of keys or attributes of {name!r}, which has no {key!r}")
                )
            yield from _pairs(f"{name}.{key}", members[key], part)
    else:
        _check_constant(name, value, spec)


def _check_constant(name: str, value: Any, spec: Any) -> None:
    """Refuse a dynamic spec for a value that is not a tensor: a number is constant, which `Dim.AUTO` allows."""
    from functionalize._torch.symbols.symbols import is_dim, is_dynamic, may_specialize

    if not isinstance(value, (int, float)):
        if isinstance(value, Mapping) or not isinstance(spec, int):
            raise _misfit(f"{name!r}", spec, "a dictionary by its keys or attributes")
        return
    fits = (may_specialize(spec) or not is_dynamic(spec)) if is_dim(spec) else isinstance(spec, int)
    if not fits:
        raise NUMBER_AS_DYNAMIC.error(spec=spec, name=name, value=value)


def _dims(name: str, tensor: torch.Tensor, spec: Any) -> Dims:
    """The spec of one tensor, by dimension."""
    from functionalize._torch.symbols.symbols import is_dim

    count = tensor.dim()
    if isinstance(spec, Mapping):
        dims = dict(spec)
    elif isinstance(spec, (list, tuple)):
        dims = dict(enumerate(spec))
    else:
        raise _misfit(f"{name!r}", spec, f"a dictionary by dimension, or a tuple of {count} entries")
    wrong = [dim for dim in dims if type(dim) is not int or not -count <= dim < count]
    if wrong:
        raise ValueError(f"dynamic_shapes names dimension {wrong[0]!r} of {name!r}, which has {count} dimensions")
    if isinstance(spec, (list, tuple)) and len(spec) != count:
        raise _misfit(f"{name!r}", spec, f"a tuple of {count} entries, or a dictionary by dimension")
    for dim, dim_spec in dims.items():
        if not (dim_spec is None or is_dim(dim_spec) or (type(dim_spec) is int and dim_spec == tensor.size(dim))):
            expected = 'a Dim, a name such as "batch", Dim.AUTO, Dim.DYNAMIC, Dim.STATIC, or the size itself'
            expected += f", {tensor.size(dim)}"
            raise _misfit(f"dimension {dim} of {name!r}", dim_spec, expected)
    return {dim % count: dim_spec for dim, dim_spec in dims.items()}


def size_guards(environment: Any, metadata: ProgramMetadata) -> SizeGuards | None:
    """The conditions that a program assumes about its inputs' sizes; None where all of them are numbers."""
    from functionalize._torch.symbols import symbols  # here: loads sympy

    layouts = dict(metadata.symbols.inputs)
    if not layouts:
        return None
    conditions, ranges = symbols.guards(environment), environment.var_to_range
    return SizeGuards(metadata.inputs, layouts, conditions, ranges, getattr(environment, "dims", {}))
