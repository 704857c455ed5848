"""Symbolic sizes: how a size becomes a symbol, and what a trace assumes of it.

Loads sympy: imported only where sizes are symbols. Limits: written against torch 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._dynamo.source import ConstantSource  # a symbol needs a source
from torch.export import Dim
from torch.export.dynamic_shapes import _DerivedDim, _DimHint, _DimHintType  # of `2 * Dim("n")`, of `Dim.AUTO`
from torch.fx.experimental.proxy_tensor import _enable_thunkify, disable_proxy_modes_tracing, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import Mod, PythonMod
from torch.utils._sympy.printers import PythonPrinter

from functionalize._torch.fakes import FakeTensorMode

assume: Any = torch._check  # documented, though its name is private
DerivedDim, NamedDim = _DerivedDim, Dim


def is_dim(entry: Any) -> bool:
    """Whether an entry in ``dynamic_shapes`` describes a dimension, other than as a number."""
    return isinstance(entry, (_DimHint, Dim))


def is_dynamic(dim: Any) -> bool:
    """Whether a dimension's entry in ``dynamic_shapes`` lets it differ."""
    if isinstance(dim, _DimHint):
        return dim.type is not _DimHintType.STATIC
    return isinstance(dim, Dim)  # a derived `Dim` is a `Dim`


def named_dim(entry: Any) -> Any:
    """The ``Dim`` that an entry is, or is derived from; None for others."""
    if isinstance(entry, _DerivedDim):
        return entry.root
    return entry if isinstance(entry, Dim) else None


def may_specialize(dim: Any) -> bool:
    """Whether the program determines if the dimension can differ."""
    return isinstance(dim, _DimHint) and dim.type is _DimHintType.AUTO


def with_symbols(mode: FakeTensorMode, tensor: torch.Tensor, name: str, dynamic: Sequence[int]) -> torch.Tensor:
    """A fake tensor with a symbol for each of some dimensions."""
    sizes = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    fake: torch.Tensor = mode.from_tensor(tensor, source=ConstantSource(name), symbolic_context=context)
    return fake


def track_input(tracer: Any, tensor: torch.Tensor, node: Any) -> None:
    """Track a tensor as a placeholder, and its symbols as its sizes; nodes for these are added on first use."""
    with disable_proxy_modes_tracing(), _enable_thunkify(tracer):
        track_tensor_tree(tensor, torch.fx.Proxy(node, tracer), constant=None, tracer=tracer)


def asserted(environment: ShapeEnv) -> Iterator[Any]:
    """The conditions on data-dependent symbols that the trace assumes, as expressions."""
    conditions = (check.expr for several in environment.deferred_runtime_asserts.values() for check in several)
    return iter(dict.fromkeys(conditions))


class SizesAsText(NamedTuple):
    """Sizes of arguments by name, bounds of symbols, conditions on these, and their values at the capture."""

    arguments: dict[str, list[Any]]
    bounds: dict[str, Any]
    conditions: list[str]
    examples: dict[str, int]


def sizes_of(arguments: Mapping[str, torch.Tensor]) -> SizesAsText:
    """The sizes of arguments, as text; empty if no size is a symbol."""
    texts = {name: [_text(size) for size in tensor.size()] for name, tensor in arguments.items()}
    free = _symbolic(arguments.values())
    if not free:
        return SizesAsText({}, {}, [], {})
    environment, symbols = free[0].shape_env, set().union(*(node.expr.free_symbols for node in free))
    bounds = {str(symbol): [_finite(end) for end in _ends(environment.var_to_range[symbol])] for symbol in symbols}
    conditions = [str(guard) for guard in guards(environment) if guard.free_symbols <= symbols]
    examples = {str(symbol): int(environment.guarding_hint_or_throw(symbol)) for symbol in symbols}
    return SizesAsText(texts, bounds, conditions, examples)


def environment_of(tensors: Iterable[torch.Tensor]) -> ShapeEnv | None:
    """The environment of the symbols in the sizes of tensors; None without symbols."""
    return next((node.shape_env for node in _symbolic(tensors)), None)


def _symbolic(tensors: Iterable[torch.Tensor]) -> list[Any]:
    sizes: list[Any] = [size for tensor in tensors for size in tensor.size()]
    return [size.node for size in sizes if type(size) is not int]


def _text(size: Any) -> Any:
    return size if type(size) is int else str(size.node.expr)


def _ends(bounds: Any) -> tuple[Any, Any]:
    return bounds.lower, bounds.upper


def _finite(end: Any) -> int | None:
    return int(end) if end.is_number and end.is_finite and end < 2**62 else None


def guards(environment: ShapeEnv) -> Iterator[Any]:
    """The conditions on symbols that the trace assumes, as expressions."""
    return iter(dict.fromkeys(guard.expr for guard in environment.guards))


_SEARCHED = 257  # sizes above that of an example


def _compared_with_one(condition: Any) -> Any:
    """The number that a condition requires to be 1, or below 2."""
    relation: str = type(condition).__name__
    args: Any = getattr(condition, "args", ())
    if relation in ("GreaterThan", "StrictGreaterThan"):
        relation, args = relation.replace("Greater", "Less"), args[::-1]
    bound = {"Equality": 1, "LessThan": 1, "StrictLessThan": 2}.get(relation)
    return args[0] if bound is not None and args[1] == bound else None


class TakenForGranted:
    """The conditions on the sizes of its inputs that a trace assumes, and the lines that require them."""

    def __init__(self, environment: ShapeEnv | None, names: Mapping[Any, str]) -> None:
        """``environment``: None if all sizes are numbers; ``names``: names of the symbols of sizes in messages."""
        self._environment: Any = environment
        self._names, self._conditions = dict(names), list[Any]()
        if environment is None:
            return
        self._conditions += guards(environment)
        for symbol in names:
            low, high = _ends(environment.var_to_range[symbol])
            self._conditions += [symbol >= low, symbol <= high]

    @property
    def constants(self) -> set[int]:
        """The numbers that the conditions name."""
        atoms = set().union(*(condition.atoms() for condition in self._conditions if hasattr(condition, "atoms")))
        return {int(atom) for atom in atoms if atom.is_Integer}

    def is_constant(self, size: Any) -> bool:
        """Whether a size is a number by now."""
        return type(size) is int or self._environment.simplify(size.node.expr).is_number

    def broken_by(self, values: Mapping[Any, int]) -> Any:
        """The first condition that some sizes do not meet; None if they meet all conditions."""
        return next((each for each in self._conditions if str(each.xreplace(dict(values))) == "False"), None)

    def equates(self, condition: Any) -> bool:
        """Whether a condition says that two sizes are equal, and no more."""
        return type(condition).__name__ == "Equality" and all(part.is_symbol for part in condition.args)

    def larger(self, symbol: Any, values: Mapping[Any, int]) -> tuple[Any, int] | None:
        """A condition that holds because a size computed from a symbol is 0 or 1, and the first value that breaks it.

        ``values``: of the symbols, in the example. Torch makes programs of their own for the sizes 0 and 1.
        """
        for condition in self._conditions:
            size = _compared_with_one(condition) if symbol in getattr(condition, "free_symbols", ()) else None
            if size is None or size.is_symbol or size.has(Mod, PythonMod) or size.xreplace(dict(values)) not in (0, 1):
                continue
            candidates = range(values[symbol] + 1, values[symbol] + _SEARCHED)
            larger = (n for n in candidates if str(condition.xreplace({**values, symbol: n})) == "False")
            value = next(larger, None)
            if value is not None:
                return condition, value
        return None

    def said_of(self, name: str) -> tuple[str, str] | None:
        """The line that made a size a number, and why; None if it is unknown."""
        equal = [each for each in self._conditions if type(each).__name__ == "Equality" and not self.equates(each)]
        of_it = [each for each in equal if name in {self._names.get(symbol) for symbol in each.free_symbols}]
        return self.said(of_it[0]) if of_it else None

    def said(self, condition: Any) -> tuple[str, str]:
        """The line that required a condition, and the condition in words."""
        line = getattr(self._environment, "lines", {}).get(condition, "unknown")
        named = {
            symbol: type(symbol)(self._names[symbol]) for symbol in condition.free_symbols if symbol in self._names
        }
        return str(line), f"the program assumes there that {PythonPrinter().doprint(condition.xreplace(named))}"
