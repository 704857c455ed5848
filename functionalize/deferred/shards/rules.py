"""Which parts of its arguments an operator needs for a part of its result, and how it computes that part.

Invariant: the elements of a part equal those of the whole, bit for bit. Limits: parts are ranges of one dimension;
the result of an operator without a rule is computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from functionalize._torch import OpOverload, pytree
from functionalize._torch.deferred import is_sole_user
from functionalize.deferred.evaluation import available
from functionalize.deferred.specs import Spec, spec_of
from functionalize.ops.variants import in_place_of

aten = torch.ops.aten


class Window(NamedTuple):
    """A range of one dimension."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def size(self, size: Sequence[int]) -> list[int]:
        """The size of this part of a tensor of a size."""
        return [self.stop - self.start if dim == self.dim else count for dim, count in enumerate(size)]


Part = tuple[Node, Window | None]  # None: all of it
Compute = Callable[[list[Any]], Any]  # from the values of the parts that it needs
Plan = tuple[list[Part], Compute]
Rule = Callable[[Node, Spec, Window], Plan | None]


@cache
def rule_of(target: Any) -> Rule | None:
    """The rule of an operator, or None."""
    if target in _RULES:
        return _RULES[target]
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return _elementwise if pointwise else None


def _applied(node: Node, needs: list[Part]) -> Plan:
    """A plan that runs a node's own op on the parts of its arguments that it ``needs``."""

    def compute(inputs: list[Any]) -> Any:
        values = dict(zip((need for need, _ in needs), inputs, strict=True))
        call_args, call_kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        call_args, call_kwargs = pytree.tree_map_only(torch.device, available, (call_args, call_kwargs))
        return node.target(*call_args, **call_kwargs)  # type: ignore[operator]

    return needs, compute


def _elementwise(node: Node, spec: Spec, window: Window) -> Plan | None:
    needs: list[Part] = []
    for argument in node.all_input_nodes:
        own = spec_of(argument)
        if own is None:
            return None
        dim = window.dim - (len(spec.size) - len(own.size))
        shared = dim >= 0 and own.size[dim] == spec.size[window.dim]
        needs.append((argument, window._replace(dim=dim) if shared else None))
    plain = _applied(node, needs)[1]
    first: Any = node.args[0] if node.args else None
    op = in_place_of(node.target)
    if op is None or not needs or first is not needs[0][0] or spec_of(first) != spec:
        return needs, plain

    def compute(inputs: list[Any]) -> Any:
        if len(inputs) == 1 and needs[0][1] is not None:
            value = inputs.pop()
            if is_sole_user(value):
                return op(value, *node.args[1:], **node.kwargs)
            inputs = [value]
        return plain(inputs)

    return needs, compute


def _same(node: Node, spec: Spec, window: Window) -> Plan | None:
    """For ops that give each element of their first argument."""
    (source,) = node.all_input_nodes[:1] or (None,)
    return None if source is None or spec_of(source) is None else _applied(node, [(source, window)])


def _uninitialized(node: Node, spec: Spec, window: Window) -> Plan:
    size = window.size(spec.size)
    return [], lambda inputs: torch.empty(size, dtype=spec.dtype, device=available(spec.device))


def _number(value: float, node: Node, spec: Spec, window: Window) -> Plan:
    size = window.size(spec.size)
    return [], lambda inputs: torch.full(size, value, dtype=spec.dtype, device=available(spec.device))


def _permuted(order: Callable[[Node, int], Sequence[int]], node: Node, spec: Spec, window: Window) -> Plan | None:
    source: Any = node.args[0]
    dims = order(node, len(spec.size))
    return _applied(node, [(source, window._replace(dim=dims[window.dim]))])


def _swapped(node: Node, count: int) -> list[int]:
    args: Any = node.args
    first, second = (int(dim) % count for dim in args[1:3])
    dims = list(range(count))
    dims[first], dims[second] = dims[second], dims[first]
    return dims


def _reordered(node: Node, count: int) -> list[int]:
    dims: Any = node.args[1]
    return [dim % count for dim in dims]


def _viewed(node: Node, spec: Spec, window: Window) -> Plan | None:
    """For views by another size that keep the dimensions up to that of the window."""
    source: Any = node.args[0]
    own, until = spec_of(source), window.dim + 1
    if own is None or own.size[:until] != spec.size[:until] or not own.contiguous:
        return None
    size = window.size(spec.size)
    return [(source, window)], lambda inputs: inputs[0].reshape(size)


def _filled(node: Node, spec: Spec, window: Window) -> Plan:
    """For ops whose result has one value in all places, their second argument."""
    value: Any = node.args[1]
    size, dtype, device = window.size(spec.size), spec.dtype, available(spec.device)
    if not isinstance(value, Node):
        return [], lambda inputs: torch.full(size, value, dtype=dtype, device=device)
    return [(value, None)], lambda inputs: torch.empty(size, dtype=dtype, device=device).fill_(inputs[0])


def _select(node: Node, spec: Spec, window: Window) -> Plan | None:
    """Computes the part of the source with fewer elements: that of the selected index, or that of the window."""
    args: Any = node.args
    own = spec_of(args[0])
    if own is None:
        return None
    dim, index = int(args[1]) % len(own.size), int(args[2]) % own.size[int(args[1])]
    if own.size[dim] * (window.stop - window.start) > spec.size[window.dim]:
        row = Window(dim, index, index + 1)
        return [(args[0], row)], lambda inputs: window.of(inputs[0].select(dim, 0)).clone()
    outer = window._replace(dim=window.dim + (window.dim >= dim))
    return [(args[0], outer)], lambda inputs: inputs[0].select(dim, index).clone()


def _slice(node: Node, spec: Spec, window: Window) -> Plan | None:
    args: Any = node.args
    source, dim, start, stop, step = (*args, *(0, None, None, 1)[len(args) - 1 :])[:5]
    own = spec_of(source)
    if own is None:
        return None
    dim = int(dim) % len(own.size)
    first, last, _ = slice(start, stop, 1).indices(own.size[dim])
    if dim != window.dim:
        return [(source, window)], lambda inputs: inputs[0][(slice(None),) * dim + (slice(first, last, step),)].clone()
    inner = Window(dim, first + window.start * step, first + max(window.stop - 1, window.start) * step + 1)
    if window.stop == window.start:
        inner = Window(dim, 0, 0)
    return [(source, inner)], lambda inputs: inputs[0][(slice(None),) * dim + (slice(None, None, step),)].clone()


def _cat(node: Node, spec: Spec, window: Window) -> Plan | None:
    args: Any = node.args
    dim, sources = int(args[1] if len(args) > 1 else 0) % len(spec.size), args[0]
    needs: list[Part] = []
    begin = 0
    for source in sources:
        own = spec_of(source)
        if own is None or len(own.size) != len(spec.size) or own.dtype != spec.dtype:
            return None
        inner, end = window, begin + own.size[dim]
        if dim == window.dim:
            inner = Window(dim, max(begin, window.start) - begin, min(end, window.stop) - begin)
        if inner.start < inner.stop or dim != window.dim:
            needs.append((source, inner))
        begin = end
    size = window.size(spec.size)
    empty = torch.empty(size, dtype=spec.dtype, device=available(spec.device)) if not needs else None
    return needs, lambda inputs: torch.cat(inputs, dim) if empty is None else empty


def _stack(node: Node, spec: Spec, window: Window) -> Plan | None:
    args: Any = node.args
    dim, sources = int(args[1] if len(args) > 1 else 0) % len(spec.size), args[0]
    if dim == window.dim:
        taken = sources[window.start : window.stop]
        return ([(source, None) for source in taken], lambda inputs: torch.stack(inputs, dim)) if taken else None
    inner = window._replace(dim=window.dim - (window.dim > dim))
    return [(source, inner) for source in sources], lambda inputs: torch.stack(inputs, dim)


def _select_scatter(node: Node, spec: Spec, window: Window) -> Plan | None:
    args: Any = node.args
    base, source, dim, index = (*args, 0, 0)[:4]
    count = len(spec.size)
    dim, index = int(dim) % count, int(index) % spec.size[int(dim)]
    if dim != window.dim:
        inner = window._replace(dim=window.dim - (dim < window.dim))
        return _written([(base, window), (source, inner)], lambda part: part.select(dim, index))
    if not window.start <= index < window.stop:
        return [(base, window)], lambda inputs: inputs[0]
    at = index - window.start
    return _written([(base, window), (source, None)], lambda part: part.select(dim, at))


def _slice_scatter(node: Node, spec: Spec, window: Window) -> Plan | None:
    args: Any = node.args
    base, source, dim, start, stop, step = (*args, *(0, 0, None, 1)[len(args) - 2 :])[:6]
    count = len(spec.size)
    whole = spec.size[int(dim) % count]
    first, last, _ = slice(start, stop, 1).indices(whole)
    dim = int(dim) % count
    if dim != window.dim:
        return _written(
            [(base, window), (source, window)], lambda part: part[(slice(None),) * dim + (slice(first, last, step),)]
        )
    if step != 1:
        return None
    low, high = max(first, window.start), min(last, window.stop)
    if low >= high:
        return [(base, window)], lambda inputs: inputs[0]
    inner = Window(dim, low - first, high - first)
    return _written([(base, window), (source, inner)], lambda part: part.narrow(dim, low - window.start, high - low))


def _written(needs: list[Part], place: Callable[[torch.Tensor], torch.Tensor]) -> Plan:
    """A plan that writes the second part to a place of the first."""

    def compute(inputs: list[Any]) -> torch.Tensor:
        source, base = inputs.pop(), inputs.pop()
        base = base if is_sole_user(base) else base.clone()
        place(base).copy_(source)
        return base  # type: ignore[no-any-return]

    return needs, compute


_RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default), _same),
    **dict.fromkeys((aten.detach.default, aten.alias.default), _same),
    **dict.fromkeys((aten.full.default, aten.full_like.default), _filled),
    **dict.fromkeys((aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default), _uninitialized),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), partial(_number, 0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), partial(_number, 1)),
    **dict.fromkeys((aten.fill.Tensor, aten.fill.Scalar), _filled),
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.t.default: partial(_permuted, lambda node, count: range(count)[::-1]),
    aten.transpose.int: partial(_permuted, _swapped),
    aten.permute.default: partial(_permuted, _reordered),
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.select_scatter.default: _select_scatter,
    aten.slice_scatter.default: _slice_scatter,
}
