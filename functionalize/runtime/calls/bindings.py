"""Calls operators by torch's own Python functions, which parse their arguments faster than the general operator call.

No table says which function calls an operator. So candidates are tried: each function with the operator's name is
called with substitutes, and taken if it calls that very operator with the same arguments.

Invariant: a bound graph calls the operators that the graph names. Limits: torch's functions consult function modes and
tensor subclasses first, so neither may be present; operators that return lists are called as before.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.node import Node, map_arg
from torch.overrides import has_torch_function

from functionalize._torch.dispatch import BINDINGS, OpOverload, TorchDispatchMode

# A function may take a tensor without dimensions for a number.
_SUBSTITUTES = [((), torch.float32), ((), torch.int64), ((1,), torch.float32)]


def bound(call: Callable[..., Any], inputs: Iterable[Any]) -> Callable[..., Any]:
    """A graph's ``forward`` that calls operators by torch's functions where these exist, for inputs like ``inputs``."""
    module = getattr(call, "__self__", None)
    if not isinstance(module, GraphModule) or has_torch_function((*inputs, *_constants(module))):
        return call
    forward: Any = type(module).forward
    names = {id(value): name for name, value in forward.__globals__.items()}
    replaced = {names[id(node.target)]: called for node in module.graph.nodes if (called := _binding(node)) is not None}
    function = types.FunctionType(forward.__code__, {**forward.__globals__, **replaced}, argdefs=forward.__defaults__)
    return types.MethodType(function, module)


def _constants(module: GraphModule) -> list[Any]:
    return [attrgetter(node.target)(module) for node in module.graph.find_nodes(op="get_attr")]


def _binding(node: Node) -> Callable[..., Any] | None:
    """The function that calls a node's operator."""
    op = getattr(node.target, "overload", None)
    if op is None or not all(isinstance(returned.type, torch.TensorType) for returned in op._schema.returns):
        return None
    name = op._schema.name.partition("::")[2]
    for namespace in BINDINGS if op.namespace == "aten" else ():
        function = getattr(namespace, name, None)
        if callable(function) and all(_comes_to(function, op, node, *substitute) for substitute in _SUBSTITUTES):
            return function  # type: ignore[no-any-return]
    return None


def _comes_to(
    function: Callable[..., Any], op: OpOverload, node: Node, size: Sequence[int], dtype: torch.dtype
) -> bool:
    """Whether a function, called as a node's operator is, calls this operator with the same arguments."""
    made = dict[Node, torch.Tensor]()

    def substitute(argument: Node) -> torch.Tensor:
        return made.setdefault(argument, torch.empty(size, dtype=dtype, device="meta"))

    args, kwargs = map_arg((node.args, node.kwargs), substitute)
    try:
        with _StoppingMode():
            function(*args, **kwargs)
    except _Reached as reached:
        now, wanted = _by_name(op, reached.args, reached.kwargs), _by_name(op, args, kwargs)
        return reached.op is op and _same([*now.items()], [*wanted.items()])
    except Exception:  # not a call that the function takes
        return False
    return False


class _Reached(BaseException):
    """The first operator that was called."""

    def __init__(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.args, self.kwargs = op, tuple(args), kwargs


class _StoppingMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Reached(func, args, kwargs or {})


def _by_name(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of an operator, defaults included."""
    declared = op._schema.arguments
    passed = dict(zip((argument.name for argument in declared), args, strict=False)) | kwargs
    return {argument.name: passed.get(argument.name, argument.default_value) for argument in declared}


def _same(now: Any, wanted: Any) -> bool:
    if isinstance(now, (list, tuple)) and isinstance(wanted, (list, tuple)):
        return len(now) == len(wanted) and all(map(_same, now, wanted))
    if isinstance(wanted, torch.Tensor):
        return now is wanted
    return type(now) is type(wanted) and bool(now == wanted)
