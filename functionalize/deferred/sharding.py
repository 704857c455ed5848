"""Computes a part of a node along one dimension: of what it needs the parts alone, where a rule says which these are.

What has no rule is computed whole, and the part copied. Random numbers are drawn from the state where the part begins.

Invariant: a part has the elements that the whole has there, bit for bit. Limits: parts are ranges of one dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from functionalize._torch import OpOverload
from functionalize._torch.deferred import is_sole_user
from functionalize._torch.dispatch import kernels_alone
from functionalize.deferred.draws import Draws
from functionalize.deferred.evaluation import Evaluation, here, in_place, map_arg_devices
from functionalize.deferred.fills import fill_of
from functionalize.deferred.ranges import fill_part
from functionalize.deferred.specs import Spec, spec_of

aten = torch.ops.aten


class Window(NamedTuple):
    """A range of one dimension."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """That part of a tensor."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def size(self, size: Sequence[int]) -> list[int]:
        """The size of that part of a tensor of a size."""
        return [self.stop - self.start if dim == self.dim else count for dim, count in enumerate(size)]


Part = tuple[Node, Window | None]  # None: all of it
Compute = Callable[[list[Any]], Any]  # from the values of the parts that it needs
Plan = tuple[list[Part], Compute]
Rule = Callable[[Node, Spec, Window], Plan | None]


class ShardEvaluation:
    """One run that computes a part of a node."""

    def __init__(self, evaluate: Callable[[], Evaluation], draws: Draws, compute: Callable[[Node], None]) -> None:
        """``evaluate`` makes runs over whole nodes; ``compute`` computes one for what it does to a generator."""
        self._evaluate, self._draws, self._compute = evaluate, draws, compute

    def run(self, node: Node, window: Window) -> torch.Tensor:
        """A part of a node's value, in memory of its own."""
        plans: dict[Part, Plan] = {}
        waiting: list[Part] = [(node, window)]
        while waiting:
            part = waiting.pop()
            if part not in plans:
                plans[part] = self._plan(*part)
                waiting += plans[part][0]
        uses = Counter(need for needs, _ in plans.values() for need in needs)
        values: dict[Part, Any] = {}
        with kernels_alone(), torch.inference_mode(False), self._draws.running():
            for part in sorted(plans, key=lambda part: part[0]):
                needs, compute = plans[part]
                given = []
                for need in needs:
                    uses[need] -= 1
                    given.append(values[need] if uses[need] else values.pop(need))
                values[part] = compute(given)
                del given
            value: torch.Tensor = values.pop((node, window))
            return value if is_sole_user(value) and value.is_contiguous() else value.clone().contiguous()

    def _plan(self, node: Node, window: Window | None) -> Plan:
        spec = spec_of(node)
        if window is not None and spec is not None:
            fill = fill_of(node)
            if fill is not None and fill.per_element is not None:
                return [], partial(fill_part, fill, node, window, self._draws, self._compute, self._evaluate().place)
            rule = _rule(node.target)
            plan = None if rule is None else rule(node, spec, window)
            if plan is not None:
                return plan
        return [], lambda given: self._whole(node, window)

    def _whole(self, node: Node, window: Window | None) -> Any:
        found: list[Any] = []
        self._evaluate().run([node], lambda node, value: found.append(value))
        value = found.pop()
        if window is None:
            return value
        part = window.of(value)
        return part if node.op == "get_attr" else part.clone()


@cache
def _rule(target: Any) -> Rule | None:
    if target in _RULES:
        return _RULES[target]
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return _elementwise if pointwise else None


def _applied(node: Node, needs: list[Part], args: Any = None) -> Plan:
    """A node's own op on parts of its arguments, which stand in the order of its nodes."""
    args = node.args if args is None else args

    def compute(given: list[Any]) -> Any:
        values = dict(zip((need for need, _ in needs), given, strict=True))
        call_args, call_kwargs = map_arg((tuple(args), node.kwargs), values.__getitem__)
        call_args, call_kwargs = map_arg_devices((call_args, call_kwargs), here)
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
    op = in_place(node.target)
    if op is None or not needs or first is not needs[0][0] or spec_of(first) != spec:
        return needs, plain

    def compute(given: list[Any]) -> Any:
        if len(given) == 1 and needs[0][1] is not None:
            value = given.pop()
            if is_sole_user(value):
                return op(value, *node.args[1:], **node.kwargs)
            given = [value]
        return plain(given)

    return needs, compute


def _same(node: Node, spec: Spec, window: Window) -> Plan | None:
    """What gives each element of its first argument."""
    (source,) = node.all_input_nodes[:1] or (None,)
    return None if source is None or spec_of(source) is None else _applied(node, [(source, window)])


def _made(number: int | None, node: Node, spec: Spec, window: Window) -> Plan:
    """What has one number in all places, or none: at an index of the arguments, or itself."""
    value: Any = node.args[number] if number is not None and number < len(node.args) else None

    def compute(given: list[Any]) -> torch.Tensor:
        made = torch.empty(window.size(spec.size), dtype=spec.dtype, device=here(spec.device))
        return made if number is None else made.fill_(value)

    return [], compute


def _number(value: float, node: Node, spec: Spec, window: Window) -> Plan:
    size = window.size(spec.size)
    return [], lambda given: torch.full(size, value, dtype=spec.dtype, device=here(spec.device))


def _permuted(order: Callable[[Node, int], Sequence[int]], node: Node, spec: Spec, window: Window) -> Plan | None:
    source: Any = node.args[0]
    dims = order(node, len(spec.size))
    return _applied(node, [(source, window._replace(dim=dims[window.dim]))])


def _swapped(node: Node, count: int) -> list[int]:
    args: Any = node.args
    one, two = (int(dim) % count for dim in args[1:3])
    dims = list(range(count))
    dims[one], dims[two] = dims[two], dims[one]
    return dims


def _reordered(node: Node, count: int) -> list[int]:
    dims: Any = node.args[1]
    return [dim % count for dim in dims]


def _viewed(node: Node, spec: Spec, window: Window) -> Plan | None:
    """A view by another size, which has the dimensions up to that of the window in common."""
    source: Any = node.args[0]
    own, until = spec_of(source), window.dim + 1
    if own is None or own.size[:until] != spec.size[:until] or not own.contiguous:
        return None
    size = window.size(spec.size)
    return [(source, window)], lambda given: given[0].reshape(size)


def _select_scatter(node: Node, spec: Spec, window: Window) -> Plan | None:
    args: Any = node.args
    base, source, dim, index = (*args, 0, 0)[:4]
    count = len(spec.size)
    dim, index = int(dim) % count, int(index) % spec.size[int(dim)]
    if dim != window.dim:
        inner = window._replace(dim=window.dim - (dim < window.dim))
        return _written([(base, window), (source, inner)], lambda part: part.select(dim, index))
    if not window.start <= index < window.stop:
        return [(base, window)], lambda given: given[0]
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
        return [(base, window)], lambda given: given[0]
    inner = Window(dim, low - first, high - first)
    return _written([(base, window), (source, inner)], lambda part: part.narrow(dim, low - window.start, high - low))


def _written(needs: list[Part], place: Callable[[torch.Tensor], torch.Tensor]) -> Plan:
    """The first part with the second written to a place of it."""

    def compute(given: list[Any]) -> torch.Tensor:
        source, base = given.pop(), given.pop()
        base = base if is_sole_user(base) else base.clone()
        place(base).copy_(source)
        return base  # type: ignore[no-any-return]

    return needs, compute


_RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default), _same),
    **dict.fromkeys((aten.detach.default, aten.alias.default), _same),
    **dict.fromkeys((aten.full.default, aten.full_like.default), partial(_made, 1)),
    **dict.fromkeys(
        (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default), partial(_made, None)
    ),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), partial(_number, 0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), partial(_number, 1)),
    aten.t.default: partial(_permuted, lambda node, count: range(count)[::-1]),
    aten.transpose.int: partial(_permuted, _swapped),
    aten.permute.default: partial(_permuted, _reordered),
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.select_scatter.default: _select_scatter,
    aten.slice_scatter.default: _slice_scatter,
}
