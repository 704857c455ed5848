"""The symbols of the graph that ``make_fx`` traces: which nodes give them, and those that we add to the tracer.

Invariant: a symbol that is tracked here is found by torch's own tracing code. Limits: one graph a tracer.
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
    """The node that gives a symbol; a number for one that a guard has pinned."""
    found = fetch_sym_proxy(tracer)(symbol)
    return found.node if isinstance(found, Proxy) else found


def is_foregone(out: Any, args: Any) -> bool:
    """Whether symbols of floats were compared, and the answer is known: it is not, where they may be NaN."""
    if not isinstance(out, torch.SymBool) or out.node.expr.free_symbols:
        return False
    return any(isinstance(arg, torch.SymFloat) and arg.node.expr.free_symbols for arg in args)


def is_endless(func: Any, args: Any) -> bool:
    """Whether symbols of floats meet an infinity, or what is NaN, of which sympy has rules of its own."""
    constant = any(isinstance(arg, float) and not math.isfinite(arg) for arg in args)
    return constant and func in _ENDLESS and any(isinstance(arg, torch.SymFloat) for arg in args)


def endless(tracer: Any, func: Any, args: Any) -> Any:
    """A symbol of its own for what :func:`is_endless` says of."""
    return (compared if func in _COMPARISONS else opaque_float)(tracer, func, args)


def compared(tracer: Any, func: Any, args: Any) -> Any:
    """A symbol of its own for a comparison: `x == x` is false where ``x`` is not a number."""
    return _opaque(tracer, func, args, "create_unbacked_symbool")


def opaque_float(tracer: Any, func: Any, args: Any) -> torch.SymFloat:
    """A symbol of its own for what a function of symbols gives, which becomes a node."""
    return _opaque(tracer, func, args, "create_unbacked_symfloat")  # type: ignore[no-any-return]


def whole_number_of(tracer: Any, condition: Any) -> Any:
    """A symbol of its own for the whole number that a data-dependent bool is: zero or one."""
    from torch.fx.experimental.symbolic_shapes import constrain_range  # here: loads sympy

    number = _opaque(tracer, torch.sym_ite, (condition, 1, 0), "create_unbacked_symint")
    constrain_range(number, min=0, max=1)
    return number


def _opaque(tracer: Any, func: Any, args: Any, create: str) -> Any:
    environment = next(arg.node.shape_env for arg in args if isinstance(arg, SYMBOLS))
    with environment.ignore_fresh_unbacked_symbols():  # no op gives it
        made = getattr(environment, create)()
    _sym_register(tracer, func, args, made)
    return made


def symbol_node_of(tracer: Any, expression: Any) -> Node | None:
    """The node that gives a symbol, by the expression that it was made as; None where the tracer has not seen it.

    It gives what the data say, also where a guard has pinned the symbol since.
    """
    entry = tracer.sympy_expr_tracker.get(expression)
    if entry is None:
        return None
    proxy = entry.proxy.force() if hasattr(entry.proxy, "force") else entry.proxy
    return proxy.node  # type: ignore[no-any-return]


def record_symbols(mode: ProxyTorchDispatchMode, arguments: Any) -> None:
    """Have the nodes for the symbols among some arguments now: the tracer adds them when they are first used."""
    for number in pytree.tree_leaves(arguments):
        if is_symbol(number) and number in mode.tracer.symnode_tracker:
            fetch_sym_proxy(mode.tracer)(number)


_the_number: Any = torch.sym_int  # a function like any other to a graph


@cache
def _arithmetic() -> Any:
    """Torch's arithmetic on symbols, which of a quotient of integers makes an expression, whatever is done with it."""
    from torch.utils._sympy.reference import PythonReferenceAnalysis  # here: loads sympy

    class Arithmetic(PythonReferenceAnalysis):
        int_truediv = staticmethod(operator.truediv)
        trunc_to_int = staticmethod(lambda number, dtype: math.trunc(number))

    return Arithmetic


def track_symbols(mode: ProxyTorchDispatchMode, handle: torch.Tensor) -> None:
    """Give the tracer the sizes of a tensor whose making it did not see: as arithmetic on symbols that it knows.

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
        known = tracer.sympy_expr_tracker
        if not known.keys() >= expression.free_symbols:
            continue
        with _enable_thunkify(tracer):
            values = {free: known[free].value for free in expression.free_symbols}
            same = sympy_interp(_arithmetic(), values, expression)
        if is_symbol(same) and same in tracer.symnode_tracker:
            tracer.symnode_tracker[symbol] = tracer.symnode_tracker[same]


def track_symbol(mode: ProxyTorchDispatchMode, symbol: Any, same: Any) -> None:
    """Let a symbol that no node gives stand for a number that is computed from such."""
    tracer: Any = mode.tracer
    known, name = tracer.sympy_expr_tracker, symbol.node.expr
    if not name.free_symbols <= known.keys():
        set_proxy_slot(symbol, tracer, get_proxy_slot(same, tracer))
