"""The graph that ``make_fx`` traces: which node a tensor or a symbol stands for, and nodes that we add.

Invariant: a node that is added here is what the tracer would have added. Limits: the tracer of `make_fx`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import (  # proxies are attached to tensors by no public call
    ProxyTorchDispatchMode,
    _enable_thunkify,
    _sym_register,
    fetch_sym_proxy,
    set_original_aten_op,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from functionalize._torch.modes import on_handles
from functionalize._torch.sizes import is_symbol
from functionalize._torch.tensors import is_symbolic, storage_key


def point_proxy(mode: ProxyTorchDispatchMode, handle: torch.Tensor, value: torch.Tensor) -> None:
    """Let ``handle`` stand for the graph node that ``value`` stands for."""
    tracker = mode.tracer.tensor_tracker
    proxy = tracker.get(value)
    if proxy is not None:
        tracker[handle] = proxy


def tensors_with_storage(mode: ProxyTorchDispatchMode, key: int) -> Iterator[torch.Tensor]:
    """The tensors of a storage that the tracer knows as nodes."""
    return (tensor for tensor in mode.tracer.tensor_tracker if storage_key(tensor) == key)


def node_of(mode: ProxyTorchDispatchMode, tensor: torch.Tensor) -> Any:
    """The node that a tensor stands for; None for a constant of the trace."""
    entry = mode.tracer.tensor_tracker.get(tensor)
    if entry is None:
        return None
    return getattr(entry, "node", None) or entry.proxy.node


def last_node(mode: ProxyTorchDispatchMode) -> Any:
    """The newest node of the graph that is traced; None while there is none."""
    return next(iter(reversed(mode.tracer.graph.nodes)), None)


def same_node(mode: ProxyTorchDispatchMode, one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors stand for the same node."""
    node = node_of(mode, one)
    return node is not None and node is node_of(mode, two)


# What these mean depends on where in its storage the value lies.
_LOOKS_AT_STRIDES = frozenset({torch.ops.aten.as_strided.default})


def record_view(
    mode: ProxyTorchDispatchMode, op: Any, value: torch.Tensor, args: tuple[Any, ...], result: torch.Tensor
) -> bool:
    """Add the node ``op(value, *args)``, whose result is known already, to the graph. False: the tracer cannot."""
    source = mode.tracer.tensor_tracker.get(value)
    if source is None or source.constant is not None or op in _LOOKS_AT_STRIDES:
        return False
    with set_original_aten_op(op):
        name = mode.tracer.graph._target_to_str(op.overloadpacket.__name__)
        if any(map(is_symbol, args)) or any(type(arg) is list and any(map(is_symbol, arg)) for arg in args):
            args = pytree.tree_map_only(torch.SymInt, fetch_sym_proxy(mode.tracer), args)
        proxy = mode.tracer.create_proxy("call_function", op, (source.proxy, *args), {}, name=name)
        track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)
    return True


def record_effect(mode: ProxyTorchDispatchMode, op: Any, handle: torch.Tensor, args: tuple[Any, ...]) -> None:
    """Add the node ``op(handle, *args)`` for its effect, which the handle shows already, without running the op."""
    tracked, symbols = mode.tracer.tensor_tracker, fetch_sym_proxy(mode.tracer)
    args = pytree.tree_map_only(torch.Tensor, lambda tensor: tracked[tensor].proxy, (handle, *args))
    args = pytree.tree_map_only(torch.SymInt, symbols, args)
    name = mode.tracer.graph._target_to_str(op.overloadpacket.__name__)
    mode.tracer.create_proxy("call_function", op, args, {}, name=name)


def record_symbols(mode: ProxyTorchDispatchMode, arguments: Any) -> None:
    """Have the nodes for the symbols among some arguments now: the tracer adds them when they are first used."""
    for number in pytree.tree_leaves(arguments):
        if isinstance(number, torch.SymInt) and number in mode.tracer.symnode_tracker:
            fetch_sym_proxy(mode.tracer)(number)


_the_number: Any = torch.sym_int  # a function like any other to a graph


def track_symbols(mode: ProxyTorchDispatchMode, handle: torch.Tensor) -> None:
    """Let the tracer know the sizes of a tensor made while it did not look: as arithmetic on symbols that it knows.

    Nodes for the arithmetic appear when a symbol is used. The tracer does the same for sums and products by itself,
    and gives up on powers, minima and the like, and on numbers: symbols that a guard has pinned.
    """
    if not is_symbolic(handle):
        return
    symbols = list(filter(is_symbol, [*handle.size(), *handle.stride(), handle.storage_offset()]))
    free = [symbol for number in symbols for symbol in number.node.expr.free_symbols]
    if len(free) > 1:  # the tracer does not find powers and products of three by itself
        numel = on_handles(torch.Tensor.numel, (handle,), {})
        symbols += filter(is_symbol, [numel, handle.untyped_storage().nbytes()])
    # Imported here: sympy takes longer to load than all the rest, and where there are symbols torch has loaded it.
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Arithmetic(PythonReferenceAnalysis):
        """Torch's, which of a quotient of integers makes an expression, whatever is then done with it."""

        int_truediv = staticmethod(operator.truediv)
        trunc_to_int = staticmethod(lambda number, dtype: math.trunc(number))

    tracer: Any = mode.tracer
    for symbol in symbols:
        expression = symbol.node.expr
        if symbol in tracer.symnode_tracker:
            continue
        if expression.is_number:
            with _enable_thunkify(tracer):
                _sym_register(tracer, _the_number, (int(expression),), symbol)
            continue
        known = {free: tracer.sympy_expr_tracker.get(free) for free in expression.free_symbols}
        if any(entry is None for entry in known.values()):
            continue
        with _enable_thunkify(tracer):
            values = {free: entry.value for free, entry in known.items()}
            same = sympy_interp(Arithmetic, values, expression)
        if isinstance(same, torch.SymInt) and same in tracer.symnode_tracker:
            tracer.symnode_tracker[symbol] = tracer.symnode_tracker[same]
