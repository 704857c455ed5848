"""The symbols of the graph that ``make_fx`` traces: which nodes compute them, and symbols that we add to the tracer.

Invariant: torch's own tracing code finds each symbol that is tracked here. Limits: one graph a tracer.
"""

from __future__ import annotations

import math
import operator
from functools import cache
from typing import Any

import torch
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import (  # proxies are attached to symbols by no public call
    ProxyTorchDispatchMode,
    _enable_thunkify,
    _sym_register,
    fetch_sym_proxy,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.utils import _pytree as pytree

from functionalize._torch.dispatch import on_handles
from functionalize._torch.symbols.sizes import is_symbol
from functionalize._torch.tensors import SYMBOLS, is_symbolic

_COMPARISONS = frozenset({operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne})
_ARITHMETIC = frozenset({operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod})
_ENDLESS = frozenset({*_COMPARISONS, *_ARITHMETIC, operator.pow})


def symbol_node(tracer: Any, symbol: Any) -> Any:
    """The node that computes a symbol; a number if a guard has pinned it."""
    proxy = fetch_sym_proxy(tracer)(symbol)
    return proxy.node if isinstance(proxy, Proxy) else proxy


def tracked_symbol_node(tracer: Any, symbol: Any) -> Any:
    """The same; None if the tracer has not seen the symbol."""
    is_tracked = symbol.node.constant is not None or symbol.node.expr.is_number or symbol in tracer.symnode_tracker
    return symbol_node(tracer, symbol) if is_tracked else None


def is_foregone(out: Any, args: Any) -> bool:
    """Whether a comparison of symbols of floats has got a fixed answer, though they may be NaN."""
    if not isinstance(out, torch.SymBool) or out.node.expr.free_symbols:
        return False
    return any(map(_may_be_endless, args))


def is_endless(func: Any, args: Any) -> bool:
    """Whether arithmetic on symbols of floats involves an infinity or NaN, for which sympy has rules of its own."""
    constant = any(isinstance(arg, float) and not math.isfinite(arg) for arg in args)
    if constant and func in _COMPARISONS:
        return any(map(_may_be_endless, args))
    return constant and func in _ENDLESS and any(isinstance(arg, torch.SymFloat) for arg in args)


def _may_be_endless(number: Any) -> bool:
    """Whether a symbol of floats may be infinite or NaN: what is computed of whole numbers alone is finite."""
    symbols = number.node.expr.free_symbols if isinstance(number, torch.SymFloat) else ()
    return any(symbol.is_integer is not True for symbol in symbols)


def endless(tracer: Any, func: Any, args: Any) -> Any:
    """A new symbol for the result of a call for which :func:`is_endless` holds."""
    return (compared if func in _COMPARISONS else opaque_float)(tracer, func, args)


def compared(tracer: Any, func: Any, args: Any) -> Any:
    """A new symbol for a comparison: `x == x` is false if ``x`` is NaN."""
    return _opaque(tracer, func, args, "create_unbacked_symbool")


def opaque_float(tracer: Any, func: Any, args: Any) -> torch.SymFloat:
    """A new symbol for the result of a function of symbols, which becomes a node."""
    return _opaque(tracer, func, args, "create_unbacked_symfloat")  # type: ignore[no-any-return]


def opaque_integer(tracer: Any, func: Any, args: Any) -> torch.SymInt:
    """A new symbol for the result of a function of symbols that returns a whole number."""
    return _opaque(tracer, func, args, "create_unbacked_symint")  # type: ignore[no-any-return]


def whole_number_of(tracer: Any, condition: Any) -> Any:
    """A new symbol for a data-dependent bool as a whole number: 0 or 1."""
    from torch.fx.experimental.symbolic_shapes import constrain_range  # here: loads sympy

    number = _opaque(tracer, torch.sym_ite, (condition, 1, 0), "create_unbacked_symint")
    constrain_range(number, min=0, max=1)
    return number


def _opaque(tracer: Any, func: Any, args: Any, create: str) -> Any:
    environment = next(arg.node.shape_env for arg in args if isinstance(arg, SYMBOLS))
    with environment.ignore_fresh_unbacked_symbols():  # no op returns it
        made = getattr(environment, create)()
    _sym_register(tracer, func, args, made)
    return made


def symbol_node_of(tracer: Any, expression: Any) -> Node | None:
    """The node that computes a symbol, by the expression that it was made as; None if the tracer has not seen it.

    The node's value depends on tensor values, even if a guard has pinned the symbol since.
    """
    entry = tracer.sympy_expr_tracker.get(expression)
    if entry is None:
        return None
    proxy = entry.proxy.force() if hasattr(entry.proxy, "force") else entry.proxy
    return proxy.node  # type: ignore[no-any-return]


def record_symbols(mode: ProxyTorchDispatchMode, arguments: Any) -> None:
    """Add the nodes for the symbols among some arguments now: the tracer would add them on first use."""
    for number in pytree.tree_leaves(arguments):
        if is_symbol(number) and number in mode.tracer.symnode_tracker:
            fetch_sym_proxy(mode.tracer)(number)


_the_number: Any = torch.sym_int  # a function that a graph can call


@cache
def _arithmetic() -> Any:
    """Torch's arithmetic on symbols, which makes a quotient of integers an expression, whatever is done with it."""
    from torch.utils._sympy.reference import PythonReferenceAnalysis  # here: loads sympy

    class Arithmetic(PythonReferenceAnalysis):
        int_truediv = staticmethod(operator.truediv)
        trunc_to_int = staticmethod(lambda number, dtype: math.trunc(number))

    return Arithmetic


def track_symbols(mode: ProxyTorchDispatchMode, handle: torch.Tensor) -> None:
    """Track the sizes of a tensor that the tracer did not see being made, as arithmetic on tracked symbols.

    Nodes for the arithmetic appear when a symbol is used. The tracer does the same for sums and products by itself,
    and gives up on powers, minima and the like, and on numbers: symbols that a guard has pinned.
    """
    if not is_symbolic(handle):
        return
    symbols = list(filter(is_symbol, [*handle.size(), *handle.stride(), handle.storage_offset()]))
    single = len(symbols) < 2 and all(number.node.expr.is_Symbol for number in symbols)
    if not single:  # the tracer does not find powers and products of three by itself
        numel = on_handles(torch.Tensor.numel, (handle,), {})
        symbols += filter(is_symbol, [numel, handle.untyped_storage().nbytes()])
    # Imported here: sympy takes longer to load than all the rest, and where there are symbols torch has loaded it.
    from torch.utils._sympy.interp import sympy_interp

    tracer: Any = mode.tracer
    for symbol in symbols:
        expression = symbol.node.expr
        if symbol in tracer.symnode_tracker:
            continue
        if expression.is_number:
            with _enable_thunkify(tracer):
                _sym_register(tracer, _the_number, (int(expression),), symbol)
            continue
        tracked = tracer.sympy_expr_tracker
        if not tracked.keys() >= expression.free_symbols:
            continue
        with _enable_thunkify(tracer):
            values = {free: tracked[free].value for free in expression.free_symbols}
            same = sympy_interp(_arithmetic(), values, expression)
        if is_symbol(same) and same in tracer.symnode_tracker:
            tracer.symnode_tracker[symbol] = tracer.symnode_tracker[same]


def track_symbol(mode: ProxyTorchDispatchMode, symbol: Any, same: Any) -> None:
    """Let a symbol that no node computes stand for the node of ``same``, a number that equals it."""
    tracer: Any = mode.tracer
    tracked, name = tracer.sympy_expr_tracker, symbol.node.expr
    if name.free_symbols <= tracked.keys():
        return
    if is_symbol(same):
        set_proxy_slot(symbol, tracer, get_proxy_slot(same, tracer))
    else:  # the offset of a position in an expanded dimension, whose stride is 0
        with _enable_thunkify(tracer):
            _sym_register(tracer, _the_number, (same,), symbol)
