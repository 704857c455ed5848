"""Data-dependent numbers, computed with as tensors without dimensions: no backend has symbols that are no sizes.

An optimizer asks its step (`1 - beta ** step.item()`), and goes on with a Python number. Here that is a float64 tensor,
as precise; an operator that takes the number takes the tensor.

Invariant: results have the dtypes that they had. Limits: integers stay symbols, for they may be sizes, unless they are
floats made whole, and so do floats that sizes are made of; where no row says how an operator takes a tensor, it gets
the number again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import SYMBOLS, OpOverload, pytree
from functionalize._torch.exporting import on_numbers
from functionalize._torch.symbols.sizes import unbacked
from functionalize.backends.export.emitter import Emitter
from functionalize.graph_capture.trace.numbers.number_methods import rest

aten = torch.ops.aten
_ITEM = aten._local_scalar_dense.default
# What Python computes with numbers, on tensors.
_PYTHON: dict[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.floordiv: aten.floor_divide.default,
    operator.mod: aten.remainder.Tensor,
    operator.pow: aten.pow.Tensor_Tensor,
    operator.neg: aten.neg.default,
    operator.abs: aten.abs.default,
    operator.eq: aten.eq.Tensor,
    operator.ne: aten.ne.Tensor,
    operator.lt: aten.lt.Tensor,
    operator.le: aten.le.Tensor,
    operator.gt: aten.gt.Tensor,
    operator.ge: aten.ge.Tensor,
    operator.and_: aten.logical_and.default,
    operator.or_: aten.logical_or.default,
    torch.sym_not: aten.logical_not.default,
    torch.sym_max: aten.maximum.default,
    torch.sym_min: aten.minimum.default,
    torch.sym_float: aten.clone.default,
    math.floor: aten.floor.default,
    math.ceil: aten.ceil.default,
    math.trunc: aten.trunc.default,
    round: aten.round.default,
    math.fabs: aten.abs.default,
    math.atan2: aten.atan2.default,
    math.copysign: aten.copysign.Tensor,
    math.fmod: aten.fmod.Tensor,
    math.hypot: aten.hypot.default,
    math.pow: aten.pow.Tensor_Tensor,
    math.degrees: aten.rad2deg.default,
    math.radians: aten.deg2rad.default,
} | {
    function: getattr(aten, name).default
    for name in (
        *("sqrt", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "erf", "erfc", "lgamma"),
        *("cos", "sin", "tan", "cosh", "sinh", "tanh", "acos", "asin", "atan", "acosh", "asinh", "atanh"),
    )
    for function in (getattr(torch, f"_sym_{name}", None), getattr(math, name, None))
    if function is not None
}
# Operators that take a number where another overload takes a tensor.
_OVERLOADS: dict[Any, Any] = {
    getattr(getattr(aten, name), one): getattr(getattr(aten, name), other)
    for one, other, names in (
        ("Scalar", "Tensor", "add sub mul div eq ne lt le gt ge remainder fmod fill bitwise_and lerp"),
        ("Tensor_Scalar", "Tensor_Tensor", "pow"),
        ("Scalar", "Tensor_Tensor", "pow"),
    )
    for name in names.split()
    if hasattr(getattr(aten, name), one) and hasattr(getattr(aten, name), other)
} | {op: op for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)}
Rule = Callable[..., Node]
NUMBER = "functionalize.number"  # in the meta of a node: that it is a number to its caller


def _scaled(emitter: Emitter, *factors: Any) -> Any:
    result, *others = [factor for factor in factors if factor != 1]
    for factor in others:
        result = emitter.call(aten.mul.Tensor, result, factor)
    return result


def _like(emitter: Emitter, tensor: Any, number: Any) -> Any:
    """A number in the dtype of the floats that it is computed with."""
    dtype = tensor.meta["val"].dtype
    if not isinstance(number, Node) or not dtype.is_floating_point:
        return number
    return emitter.call(aten._to_copy.default, number, dtype=dtype)


def _clamp(
    emitter: Emitter, tensor: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None
) -> Node:
    for op, scalar, bound in (
        (aten.maximum.default, aten.clamp_min.default, min if low is None else low),
        (aten.minimum.default, aten.clamp_max.default, max if high is None else high),
    ):
        if bound is not None:
            bound = _like(emitter, tensor, bound)
            tensor = emitter.call(op if isinstance(bound, Node) else scalar, tensor, bound)
    return tensor  # type: ignore[no-any-return]


def _where_other(emitter: Emitter, condition: Any, tensor: Any, number: Any) -> Node:
    return emitter.call(aten.where.self, condition, tensor, _like(emitter, tensor, number))


def _where_self(emitter: Emitter, condition: Any, number: Any, tensor: Any) -> Node:
    return emitter.call(aten.where.self, condition, _like(emitter, tensor, number), tensor)


def _sum(op: Any) -> Rule:
    def rule(emitter: Emitter, one: Any, other: Any, alpha: Any = 1) -> Node:
        return emitter.call(op, one, _scaled(emitter, alpha, other))

    return rule


def _addcdiv(emitter: Emitter, base: Any, above: Any, below: Any, value: Any = 1) -> Node:
    return emitter.call(aten.add.Tensor, base, emitter.call(aten.div.Tensor, _scaled(emitter, value, above), below))


def _addcmul(emitter: Emitter, base: Any, one: Any, other: Any, value: Any = 1) -> Node:
    return emitter.call(aten.add.Tensor, base, _scaled(emitter, value, one, other))


def _lerp(emitter: Emitter, start: Any, end: Any, weight: Any) -> Node:
    weight = emitter.call(aten._to_copy.default, weight, dtype=start.meta["val"].dtype)
    return emitter.call(aten.lerp.Tensor, start, end, weight)


def _full(emitter: Emitter, size: Any, value: Any, **options: Any) -> Node:
    return emitter.call(aten.clone.default, emitter.call(aten.expand.default, value, size))


def _full_like(emitter: Emitter, like: Any, value: Any, **options: Any) -> Node:
    ones = emitter.call(aten.ones_like.default, like, **options)
    return emitter.call(aten.mul.Tensor, ones, value)


def _plus_product(product: Any) -> Rule:
    """Of a base that is multiplied by 0 nothing counts, infinities neither."""

    def rule(emitter: Emitter, base: Any, one: Any, other: Any, *, beta: Any = 1, alpha: Any = 1) -> Node:
        found = _scaled(emitter, alpha, emitter.call(product, one, other))
        if not isinstance(beta, Node) and beta == 0:
            return found  # type: ignore[no-any-return]
        scaled = _scaled(emitter, beta, base)
        if isinstance(beta, Node):
            scaled = emitter.call(aten.where.self, emitter.call(aten.eq.Scalar, beta, 0), beta, scaled)
        return emitter.call(aten.add.Tensor, scaled, found)

    return rule


_RULES: dict[Any, Rule] = {
    aten.addmm.default: _plus_product(aten.mm.default),
    aten.addmv.default: _plus_product(aten.mv.default),
    aten.baddbmm.default: _plus_product(aten.bmm.default),
    aten.add.Tensor: _sum(aten.add.Tensor),
    aten.sub.Tensor: _sum(aten.sub.Tensor),
    aten.clamp.default: _clamp,
    aten.where.ScalarOther: _where_other,
    aten.where.ScalarSelf: _where_self,
    aten.masked_fill.Scalar: lambda emitter, tensor, mask, number: _where_self(emitter, mask, number, tensor),
    aten.addcdiv.default: _addcdiv,
    aten.addcmul.default: _addcmul,
    aten.lerp.Scalar: _lerp,
    aten.full.default: _full,
    aten.full_like.default: _full_like,
    aten.scalar_tensor.default: lambda emitter, value, **options: emitter.call(aten.clone.default, value),
}


def _equal(emitter: Emitter, one: Any, other: Any) -> Node:
    if tuple(one.meta["val"].size()) != tuple(other.meta["val"].size()):
        return emitter.call(aten.scalar_tensor.default, False, dtype=torch.bool)
    return emitter.call(aten.all.default, emitter.call(aten.eq.Tensor, one, other))


def _allclose(emitter: Emitter, *args: Any, **options: Any) -> Node:
    return emitter.call(aten.all.default, emitter.call(aten.isclose.default, *args, **options))


def _choosing(compare: Any) -> Rule:
    """As Python does: the first one, unless another is larger, or smaller."""

    def rule(emitter: Emitter, *numbers: Any) -> Node:
        found, *others = numbers
        for other in others:
            found = emitter.call(aten.where.self, emitter.call(compare, other, found), other, found)
        return found  # type: ignore[no-any-return]

    return rule


def _cube_root(emitter: Emitter, number: Any) -> Node:
    root = emitter.call(aten.pow.Tensor_Scalar, emitter.call(aten.abs.default, number), 1 / 3)
    return emitter.call(aten.copysign.Tensor, root, number)


# What Python computes with numbers, by several operators.
_SPELT_OUT: dict[Any, Rule] = {
    min: _choosing(aten.lt.Tensor),
    max: _choosing(aten.gt.Tensor),
    torch.sym_ite: lambda emitter, *values: emitter.call(aten.where.self, *values),
    rest: lambda emitter, number: emitter.call(aten.remainder.Scalar, number, 1),
    getattr(math, "cbrt", None): _cube_root,
}
# What makes floats of integers.
_FLOATS = _PYTHON.keys() | _SPELT_OUT.keys()
# Operators that answer by a flag of Python's.
_QUESTIONS: dict[Any, Rule] = {aten.equal.default: _equal, aten.allclose.default: _allclose}


def _makes_sizes(number: Node, whole: bool = False) -> bool:
    """Whether an operator takes whole numbers that Python makes of a number, or of one that it computes from it.

    ``whole``: whether the number is one.
    """
    for user in number.users:
        look = user.meta.get("val")
        if isinstance(user.target, OpOverload):
            if whole and user.target is not aten.scalar_tensor.default:
                return True
        elif isinstance(look, SYMBOLS) and _makes_sizes(user, whole or isinstance(look, torch.SymInt)):
            return True
    return False


class Numbers:
    """The numbers of one graph that are tensors."""

    def __init__(self, emitter: Emitter, *, floats: bool) -> None:
        """``floats``: whether those are that Python makes of integers."""
        self._emitter, self._floats, self.tensors = emitter, floats, set[Node]()

    def takes(self, node: Node, known: dict[Node, Any]) -> bool:
        """Whether a node gives such a number, or takes one."""
        look = node.meta.get("val")
        if node.target is _ITEM:
            return isinstance(look, torch.SymFloat)
        if node.target in _QUESTIONS:
            return True
        if isinstance(look, torch.SymFloat) and node.target in _FLOATS:
            told = unbacked([look])
            if self._floats or told or not on_numbers(node.target):
                return (self._floats and told) or not _makes_sizes(node)
        return any(known.get(arg) in self.tensors for arg in node.all_input_nodes)

    def copy(self, node: Node, known: dict[Node, Any]) -> Any:
        """A node, written with tensors."""
        emitter = self._emitter
        args, kwargs = pytree.tree_map_only(Node, known.__getitem__, (node.args, node.kwargs))
        emitter.at(node)
        if node.target is _ITEM:
            alone = args[0] if not args[0].meta["val"].dim() else emitter.call(aten.view.default, args[0], [])
            return self._number(emitter.call(aten._to_copy.default, alone, dtype=torch.float64))
        if node.target is round and args[1:] == (None,):
            args = args[:1]  # no digits
        if node.target in _PYTHON and not (node.target is round and args[1:]):
            return self._number(emitter.call(_PYTHON[node.target], *map(self._tensor, args)))
        if node.target in _SPELT_OUT:
            return self._number(_SPELT_OUT[node.target](emitter, *map(self._tensor, args)))
        if node.target in _QUESTIONS:
            return self._number(_QUESTIONS[node.target](emitter, *args, **kwargs))
        wanted = node.meta.get("val")
        if node.target in _RULES:
            made = _RULES[node.target](emitter, *args, **kwargs)
        elif node.target in _OVERLOADS:
            made = emitter.call(_OVERLOADS[node.target], *args, **kwargs)
        else:
            return self._as_numbers(node, known)
        if made.meta["val"].dtype != wanted.dtype:  # type: ignore[union-attr]
            made = emitter.call(aten._to_copy.default, made, dtype=wanted.dtype)  # type: ignore[union-attr]
        return made

    def _number(self, node: Node) -> Node:
        self.tensors.add(node)
        return node

    def _tensor(self, value: Any) -> Any:
        if isinstance(value, Node) and value in self.tensors:
            return value
        look = value.meta.get("val") if isinstance(value, Node) else value
        dtype = torch.bool if isinstance(look, (bool, torch.SymBool)) else torch.float64
        return self._emitter.call(aten.scalar_tensor.default, value, dtype=dtype)

    def _as_numbers(self, node: Node, known: dict[Node, Any]) -> Any:
        """A node that takes numbers alone."""
        mine = {arg: known[arg] for arg in node.all_input_nodes}
        for arg, value in mine.items():
            if value in self.tensors:
                if isinstance(arg.meta["val"], torch.SymInt):
                    value = self.whole(value)
                item = self._emitter.graph.call_function(_ITEM, (value,))
                look, bound = self._emitter.fakes.read_off(arg.meta["val"])
                item.meta = {"val": look, "unbacked_bindings": bound, "stack_trace": "", "nn_module_stack": {}}
                mine[arg] = item
        return self._emitter.copy(node, mine)

    def whole(self, number: Node) -> Node:
        """An integer that is there as a float."""
        return self._emitter.call(aten._to_copy.default, number, dtype=torch.int64)

    def assert_equal(self, node: Node, answer: Any, message: str) -> None:
        """Assert what a number is."""
        call = self._emitter.call
        if isinstance(answer, bool):
            agrees = node if answer else call(aten.logical_not.default, node)
        else:
            agrees = call(aten.eq.Scalar, node, answer)
        asserted = self._emitter.graph.call_function(aten._assert_async.msg, (agrees, message))
        asserted.meta = {"val": None, "nn_module_stack": {}, "stack_trace": ""}
