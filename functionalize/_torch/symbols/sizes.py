"""Symbolic sizes and numbers: what a trace knows of them, and its questions about data-dependent ones.

Invariant: no guard pins a symbol, except by the answer to a question. Limits: does not load sympy, which torch has
loaded where there are symbols.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # no public path to it

from functionalize._torch.tensors import SYMBOLS, is_symbolic

_MOST = sys.maxsize


def is_symbol(number: Any) -> bool:
    return isinstance(number, torch.SymInt)


def has_symbol(value: Any) -> bool:
    """Whether a value is a symbol, or a tensor of symbolic sizes."""
    return isinstance(value, SYMBOLS) or (isinstance(value, torch.Tensor) and is_symbolic(value))


def settled(number: Any) -> Any:
    """A size as a plain number if the trace knows it by now, so that no node computes it; else the size itself."""
    value = number.node.maybe_as_int() if isinstance(number, torch.SymInt) else None
    return number if value is None else value


def hint_of(number: Any, fallback: int | None = None) -> Any:
    """The value of a symbol in this trace, without a guard; the fallback if it is data-dependent."""
    node = number.node
    if node.hint is not None:
        return node.hint
    if node.shape_env.has_guarding_hint(node.expr):  # equated with sizes of inputs after it was made
        return node.shape_env.guarding_hint_or_throw(node.expr)
    return None if fallback is None else node.shape_env.optimization_hint(node.expr, fallback=fallback)


def unbacked(numbers: Sequence[Any]) -> bool:
    """Whether some size is data-dependent: known only when the program runs, and not from the inputs' sizes."""
    return any(type(number) is not int and hint_of(number) is None for number in numbers)


def steps_over(tensor: torch.Tensor, outer: int, inner: int) -> bool:
    """Whether one dimension's stride is known to be larger than another's, where both have several positions.

    If they are data-dependent: for all sizes with which the tensor has elements.
    """
    from torch.fx.experimental import symbolic_shapes  # here, as below: loads sympy
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    numbers: list[Any] = [
        number if type(number) is int else number.node for number in (*tensor.size(), *tensor.stride())
    ]
    ranges = {symbol: bounds for node in numbers for symbol, bounds in _ranges(node).items()}
    sizes, strides = numbers[: tensor.dim()], numbers[tensor.dim() :]
    for size in sizes:
        if type(size) is not int and size.expr.is_Symbol:
            ranges[size.expr] &= ValueRanges(1, _MOST)
    sympy: Any = symbolic_shapes.sympy  # type: ignore[attr-defined]  # what symbols are made of
    several = sympy.Dummy("several", integer=True, positive=True)
    ranges[several] = ValueRanges(2, _MOST)
    own = {} if type(sizes[inner]) is int else {sizes[inner].expr: several}
    outer_stride, inner_stride = (
        stride if type(stride) is int else stride.expr for stride in (strides[outer], strides[inner])
    )
    ratio, unit = (sympy.Integer(1) * outer_stride / inner_stride).xreplace(own).as_numer_denom()
    return bool(unit.is_number and bound_sympy(ratio, ranges).lower > unit)


def _ranges(node: Any) -> dict[Any, Any]:
    return {} if type(node) is int else {free: node.shape_env.var_to_range[free] for free in node.expr.free_symbols}


def decided(condition: Any) -> bool | None:
    """The answer to a question about data-dependent sizes; None if the trace does not answer."""
    environment: Any = condition.node.shape_env if isinstance(condition, torch.SymBool) else None
    asked = environment is not None and hint_of(condition) is None
    return None if asked and not getattr(environment, "is_answered", False) else bool(condition)


def decide_ones(sizes: Sequence[Any]) -> None:
    """Ask whether each data-dependent size is 1, if the trace answers; else check that it is not.

    Torch assumes, without a check, that each is larger.
    """
    for size in sizes:
        environment: Any = size.node.shape_env if is_symbol(size) else None
        if hasattr(environment, "decider") and unbacked([size]):
            if environment.is_answered:
                bool(size == 1)
            else:
                torch._check(size != 1)


def pieces_of(tensor: torch.Tensor, dim: int = 0) -> list[tuple[torch.Tensor, int, int]]:
    """The arguments by which ``select`` returns the results of ``unbind``. Asks for their number if data-dependent."""
    return [(tensor, dim, number) for number in range(int(tensor.size(dim)))]


def offset_of_part(tensor: torch.Tensor, dim: int = 0, start: Any = None, *_: Any) -> Any:
    """The data-dependent storage offset of a slice, or of a selected position; None if it is known.

    It clamps a start beyond the tensor, as slices do; a position beyond the tensor is an error elsewhere.
    """
    if not (is_symbol(start) and unbacked([start])):
        return None
    size = tensor.size(dim)
    negative = torch.sym_min(torch.sym_max(-start, 0), 1)  # 1 or 0: `sym_ite` does not take a symbol beside a number
    begin = torch.sym_max(torch.sym_min(start + size * negative, size), 0)
    return tensor.storage_offset() + begin * tensor.stride(dim)


def decide_broadcasts(shapes: Sequence[Sequence[Any]]) -> None:
    """Ask whether each data-dependent size that is broadcast with another size is 1.

    If the trace does not answer, torch assumes that the two are equal, and checks that when the program runs.
    """
    for sizes in itertools.zip_longest(*map(reversed, shapes), fillvalue=1):
        for size in filter(is_symbol, sizes):
            asked = getattr(size.node.shape_env, "is_answered", False) and unbacked([size])
            if asked and any(_differ(size, other) for other in sizes if other is not size):
                bool(size == 1)


def decide_batches(batches: Sequence[Sequence[Any]]) -> None:
    """Ask whether sizes of batches that are multiplied are 1; two sizes that are not 1 are equal."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_and  # here: loads sympy

    decide_broadcasts(batches)
    for size, other in zip(reversed(batches[0]), reversed(batches[-1]), strict=False):
        if unbacked([size, other]) and statically_known_true(sym_and(size != 1, other != 1)):
            torch._check(size == other)


def _differ(size: Any, other: Any) -> bool:
    """Whether a size may differ from another that is not 1; `expand` writes -1 for the same size."""
    if type(other) is int:
        return other not in (1, -1)
    return bool(size.node.expr != other.node.expr)


def sized_by_data(tensor: FakeTensor, numbers: Sequence[Any] = ()) -> bool:
    """Whether sizes of a tensor, or in numbers and lists of numbers, are data-dependent, or were until a guard."""
    symbols: list[Any] = []
    for number in numbers:
        symbols += filter(is_symbol, number if isinstance(number, (list, tuple)) else [number])
    if not (is_symbolic(tensor) or symbols):
        return False
    return tensor.fake_mode.static_shapes or unbacked((*tensor.size(), *symbols))


def forget_offset(handle: FakeTensor) -> None:
    """Drop the symbol of a view's storage offset from those that torch awaits: a copy of the view starts at zero."""
    environment, offset = handle.fake_mode.shape_env, handle.storage_offset()
    if environment is not None and isinstance(offset, torch.SymInt):
        pending = environment.pending_fresh_unbacked_symbols
        pending[:] = [symbol for symbol in pending if symbol not in offset.node.expr.free_symbols]


@contextlib.contextmanager
def new_symbols_wait(handle: Any) -> Iterator[None]:
    """While nodes before that of a view are recorded: the tracer would bind the view's new symbols to the next node."""
    environment = handle.fake_mode.shape_env
    waiting, environment.pending_fresh_unbacked_symbols = environment.pending_fresh_unbacked_symbols, []
    try:
        yield
    finally:
        environment.pending_fresh_unbacked_symbols[:0] = waiting
