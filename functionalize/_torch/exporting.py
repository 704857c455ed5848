"""Parts of exported programs besides their graphs: fake tensors of a mode of their own, symbols with sources.

Loads sympy. Invariant: a translated value has the sizes, strides and symbols of the original, and does not refer to the
original's mode and environment of symbols. Limits: strided tensors; others are not translated.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher  # operators on sizes that kernels in C++ do not take
from torch._dynamo.source import (  # guards of an exported program are code that names where a size comes from
    AttrSource,
    ConstantSource,
    GetItemSource,
    LocalSource,
    TensorProperty,
    TensorPropertySource,
    is_from_local_source,
)
from torch._export.verifier import Verifier  # which functions on numbers an exported program may have
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from functionalize._torch.dispatch import OpOverload
from functionalize._torch.fakes import FakeTensor, MetasFakeMode
from functionalize._torch.symbols.shape_env import DecidingShapeEnv
from functionalize._torch.tensors import SYMBOLS


@contextlib.contextmanager
def without_spec_warnings() -> Iterator[None]:
    """While torch copies exported programs: it warns of its own pytree specs then, and of nodes that it erases twice.

    Ignores only these warnings: filters belong to the process, and another thread may leave these behind.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
        warnings.filterwarnings("ignore", r"erase_node", UserWarning)
        yield


class ExportFakes:
    """Translates the values in the metadata of one graph's nodes."""

    def __init__(self, nodes: Iterable[Node], metas: Mapping[Any, Callable[..., Any]]) -> None:
        """``metas``: meta kernels by op, to replace torch's when torch traces the graph again."""
        self._old, self._renamed = _environment_of(nodes), dict[Any, Any]()  # expressions of numbers that nodes read
        self.environment = DecidingShapeEnv()
        self.mode = MetasFakeMode(shape_env=self.environment, allow_non_fake_inputs=True, export=True)
        self.mode.metas = metas
        if self._old is not None:
            self._take_over(self._old)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run operators on these fake tensors, and on sizes that are symbols."""
        with self.mode, enable_python_dispatcher():
            yield

    def _take_over(self, old: ShapeEnv) -> None:
        new = self.environment
        for symbol, bounds in old.var_to_range.items():
            new.var_to_range[symbol] = bounds
            new.var_to_range_sloc[symbol] = old.var_to_range_sloc[symbol]
            if symbol in old.var_to_stack:
                new.var_to_stack[symbol] = old.var_to_stack[symbol]
        for symbol, hint in old.backed_var_to_val.items():
            new.backed_var_to_val[symbol] = hint
            new.var_to_sources[symbol] = [ConstantSource(str(symbol))]
            new.symbol_guard_counter[symbol] = 0
        new.unique_ids |= old.unique_ids  # symbols that this mode makes get other names
        new.size_like |= old.size_like
        new.dims.update(getattr(old, "dims", {}))
        new.replacements.update(old.replacements)
        new.unbacked_symint_counter = old.unbacked_symint_counter
        new.unbacked_symfloat_counter = old.unbacked_symfloat_counter
        new.guards.extend(old.guards)
        for symbol, several in old.deferred_runtime_asserts.items():
            new.deferred_runtime_asserts[symbol] = list(several)
            new.num_deferred_runtime_asserts += len(several)

    def locate(self, symbol: Any, path: Sequence[Any], dim: int) -> None:
        """Record that a symbol is the size of an argument: ``path`` begins with its name, and goes on with keys."""
        source: Any = LocalSource(path[0])
        for key in path[1:]:
            if isinstance(key, pytree.GetAttrKey):
                source = AttrSource(source, key.name)
            else:
                source = GetItemSource(source, key.key if isinstance(key, pytree.MappingKey) else key.idx)
        source_of_size = TensorPropertySource(source, TensorProperty.SIZE, dim)
        local = [old for old in self.environment.var_to_sources[symbol] if is_from_local_source(old)]
        self.environment.var_to_sources[symbol] = [*local, source_of_size]

    def ranges(self, symbols: set[Any]) -> dict[Any, Any]:
        """The ranges of some symbols."""
        return {symbol: bounds for symbol, bounds in self.environment.var_to_range.items() if symbol in symbols}

    def value(self, value: Any) -> Any:
        """A tensor like a node's value, in this mode."""
        return pytree.tree_map_only((torch.Tensor, *SYMBOLS), self._translated, value)

    def _translated(self, value: Any) -> Any:
        if isinstance(value, SYMBOLS):
            return self._symbol(value)
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.is_nested:
            return value
        size, stride = map(self._number, value.size()), map(self._number, value.stride())
        made = self.empty(list(size), list(stride), value.dtype, value.fake_device)
        return made.requires_grad_() if value.requires_grad else made

    def _number(self, number: Any) -> Any:
        return self._symbol(number) if isinstance(number, SYMBOLS) else number

    def _symbol(self, value: Any) -> Any:
        node = value.node
        hint, expression = node.hint if node.has_hint() else None, node.expr.xreplace(self._renamed)
        if not expression.free_symbols and node.expr.free_symbols:  # of numbers that are known by now
            return node.pytype(expression)
        return type(value)(SymNode(expression, self.environment, node.pytype, hint))

    def empty(self, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: Any) -> torch.Tensor:
        """A fake tensor."""
        with self.mode:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def read_off(self, original: Any) -> tuple[Any, Mapping[Any, Any]]:
        """The number that a node reads from a tensor, for the number in the original; and the node's bindings."""
        if not isinstance(original, SYMBOLS) or original.node.expr.is_symbol:
            return self.value(original), {}
        with self.environment.ignore_fresh_unbacked_symbols():
            whole = isinstance(original, torch.SymInt)
            made = self.environment.create_unbacked_symint() if whole else self.environment.create_unbacked_symfloat()
        self._renamed[original.node.expr] = made.node.expr  # in later nodes
        return made, {made.node.expr: ()}

    def is_known(self, original: Any, number: float) -> None:
        """Record the value of a number of the original."""
        if isinstance(original, SYMBOLS) and original.node.expr.is_symbol:
            self._renamed[original.node.expr] = original.node.expr * 0 + number  # sympy's number

    def settled_bindings(self, node: Node) -> Mapping[Any, Any]:
        """The symbols that a node introduces, and where in its value they are.

        A capture gives a view's size a symbol of its own, and learns later that it equals another. Torch knows that
        when it traces the program again, and must not search for the symbol.
        """
        bound: Mapping[Any, Any] = node.meta["unbacked_bindings"]
        view: Any = viewing(node.target) or node.target
        if not getattr(view, "is_view", False):  # data-dependent
            return bound
        args, kwargs = pytree.tree_map_only(Node, lambda arg: arg.meta["val"], (node.args, node.kwargs))
        symbols = set(self.environment.var_to_range)
        with self.mode, self.environment.ignore_fresh_unbacked_symbols():
            value = view(*args, **kwargs)
        left = {}
        for symbol, path in bound.items():
            size = pytree.key_get(value, path)
            expression = size.node.expr if isinstance(size, SYMBOLS) else symbol - symbol + size  # sympy's number
            if expression.free_symbols <= symbols:
                self.environment._set_replacement(symbol, expression, "the two are equal")
            else:
                left[symbol] = path
        return left


def _environment_of(nodes: Iterable[Node]) -> ShapeEnv | None:
    for value in pytree.tree_leaves([node.meta.get("val") for node in nodes]):
        if isinstance(value, FakeTensor) and value.fake_mode.shape_env is not None:
            return value.fake_mode.shape_env
        if isinstance(value, SYMBOLS):
            return value.node.shape_env  # type: ignore[no-any-return]
    return None


def named_sizes(nodes: Iterable[Node]) -> dict[str, str]:
    """The names of `Dim`s, by the symbols of the sizes that they are."""
    environment: Any = _environment_of(nodes)
    dims = {} if environment is None else environment.dims
    return {str(symbol): name for size, name in dims.items() if (symbol := environment.simplify(size)).is_symbol}


def symbols_of(value: Any) -> Iterator[Any]:
    """The symbols in the sizes and strides of a value."""
    for leaf in pytree.tree_leaves(value):
        numbers = (*leaf.size(), *leaf.stride()) if isinstance(leaf, torch.Tensor) else (leaf,)
        for number in numbers:
            if isinstance(number, SYMBOLS):
                yield from number.node.expr.free_symbols


def on_numbers(function: Any) -> bool:
    """Whether an exported program may call a function of Python's on numbers."""
    written = function is not round  # which is allowed, and cannot be saved
    return written and (function in Verifier().allowed_builtin_ops() or function.__module__.startswith("torch"))


def copying(op: Any) -> Any:
    """The copying variant of a view operator; any other operator itself."""
    packet = getattr(torch.ops.aten, f"{op._opname}_copy", None) if isinstance(op, OpOverload) and op.is_view else None
    return op if packet is None else getattr(packet, op._overloadname, op)


def viewing(op: Any) -> Any:
    """The view operator of which an operator is the copying variant; None for other operators."""
    if not isinstance(op, OpOverload) or not op._opname.endswith("_copy"):
        return None
    packet = getattr(torch.ops.aten, op._opname.removesuffix("_copy"), None)
    view = getattr(packet, op._overloadname, None)
    return view if getattr(view, "is_view", False) else None


STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)  # in the order of the inputs
