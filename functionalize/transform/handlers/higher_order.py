"""Higher-order ops (``cond``, ``map``, ``scan``, ...): their operands become values, their bodies are functionalized.

If no mode below observes us, the bodies are parts of the program and run on its own tensors. In a graph, a body of
``cond`` or ``while_loop`` that writes to operands returns their new values as further results, which are written back
outside: `Frame` notes what a body writes while it is traced, and the body is traced again to return it.

Invariant: bodies in a graph write nothing. Limits: in a graph, operands that are written share no element with other
operands; a result that may be an operand is not written later on; bodies of other ops write to no operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from functionalize._torch import (
    VERSION,
    HigherOrderOperator,
    OpOverload,
    mode_stack,
    pytree,
    storage_key,
    unwrap_functorch,
)
from functionalize.aliasing.geometry import same
from functionalize.aliasing.tensor_queries import tensor_leaves
from functionalize.ops import traits
from functionalize.refusals.operators import BODY_READS_VERSION, BODY_RESHAPES, BODY_WRITES, BODY_WRITES_SHARED
from functionalize.refusals.writes import OPERAND_PERHAPS_RETURNED
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.epilogue import Epilogue

aten = torch.ops.aten
Kwargs = dict[str, Any]
Function = Callable[..., Any]


class OperandsWritten(Exception):
    """A body wrote to operands, at these positions, whose new values it does not return yet; caught here."""


class Frame:
    """One body: its operands, with the strides of the originals; its results, and which operands it wrote."""

    def __init__(self, func: Any, operands: Sequence[Any] | None = None, returned: Sequence[int] = ()) -> None:
        self.func, self.operands, self.returned = func, operands, tuple(returned)
        self.spec: Any = None  # of the results, as a pytree
        self.strides: list[Any] = []  # of the results
        self.aliased: set[int] = set()  # operands that a result shares memory with

    def enter(self, context: FunctionalizationContext, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operands as the body sees them."""
        if self.operands is None:
            return args
        strides = [like.stride() if _is_strided(like) else None for like in self.operands]
        return tuple(_with_strides(context, *pair) for pair in zip(args, strides, strict=True))

    def leave(self, args: tuple[Any, ...], outputs: Any, epilogue: Epilogue) -> Any:
        """The body's results, followed by the new values of the operands in ``returned``."""
        asked = epilogue.context.notes.asked.keys(VERSION)
        if asked and not asked.isdisjoint(map(storage_key, tensor_leaves(args, {}))):
            raise BODY_READS_VERSION.error(op=self.func)
        position = {id(unwrap_functorch(arg)): i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        leaves, self.spec = pytree.tree_flatten(outputs)
        self.strides = [_strides(leaf) for leaf in leaves]
        keys = {storage_key(arg): i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        self.aliased |= {keys[key] for key in map(storage_key, tensor_leaves(leaves, {})) if key in keys}
        values: dict[int, Any] = {}
        for back in epilogue.prepare():
            handle = back.input.handle
            if back.metadata or id(handle) not in position:
                raise BODY_RESHAPES.error(op=self.func)
            values[position[id(handle)]] = back.data
            epilogue.return_value(handle)
        if values and self.operands is None:
            raise BODY_WRITES.error(op=self.func, position=min(values))
        if not values.keys() <= set(self.returned):
            raise OperandsWritten(sorted(values))
        if not self.returned:
            return outputs
        call = epilogue.context.executor.call
        news = [call(aten.clone.default, values.get(i, args[i])) for i in self.returned]  # results share no memory
        return (*leaves, *news)


def run(context: FunctionalizationContext, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Run a higher-order op with bodies that are parts of the program, or free of mutation."""
    direct = not mode_stack()
    if func in _WITH_WRITES and not direct:
        return _WITH_WRITES[func](context, func, args)

    def prepared(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if direct else context.value(leaf)
        if not callable(leaf) or isinstance(leaf, (OpOverload, HigherOrderOperator, type)):
            return leaf
        return _entering(context, leaf) if direct else context.body(leaf, Frame(func))

    if func in traits.MAPS_ROWS and not direct:
        (body,), operands = _without_numbers(args[:1], args[-1])
        args = (body, *args[1:-1], operands)
    call_args, call_kwargs = pytree.tree_map(prepared, (tuple(args), kwargs))
    return func(*call_args, **call_kwargs)


def _entering(context: FunctionalizationContext, function: Function) -> Function:
    """A body whose ops are dispatched to the program again."""

    def body(*args: Any, **kwargs: Any) -> Any:
        with context.enter():
            return function(*args, **kwargs)

    return body


# In a graph


def _cond(context: FunctionalizationContext, func: Any, args: Any) -> Any:
    pred, yes, no, operands = args
    (yes, no), operands = _without_numbers((yes, no), operands)

    def attempt(returned: Sequence[int]) -> Any:
        frames = [Frame(func, operands, returned) for _ in (yes, no)]
        bodies = [context.body(body, frame) for body, frame in zip((yes, no), frames, strict=True)]
        pred_value, *values = context.values_of([pred, *operands], {}).args
        leaves = pytree.tree_leaves(func(pred_value, *bodies, values))
        first, second = (frame.strides for frame in frames)
        for index in range(len(first) if len(first) == len(second) else 0):
            if first[index] == second[index]:
                leaves[index] = _with_strides(context, leaves[index], first[index])
        return frames, leaves

    (frame, _), leaves = _with_writes(context, func, operands, attempt)
    return pytree.tree_unflatten(leaves, frame.spec)


def _while_loop(context: FunctionalizationContext, func: Any, args: Any) -> Any:
    """Carries written operands along. An operand that is carried anyway is written in the first round only."""
    condition, body, carried, additional = args
    (condition, body), additional = _without_numbers((condition, body), additional)
    operands, count = (*carried, *additional), len(carried)

    def attempt(returned: Sequence[int]) -> Any:
        frame = Frame(func, operands, returned)
        pure_condition = context.body(condition, Frame(func))
        pure_body = context.body(body, frame)
        values = context.values_of(operands, {}).args
        slots = [values[position] for position in returned]
        first = [aten.ones.default([], dtype=torch.bool)] if any(position < count for position in returned) else []
        width = count + len(slots)

        def parts(args: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
            """The operands of the original, and the values that are carried beside them."""
            now = [*args[:count], *args[width + len(first) :]]
            for position, slot in zip(returned, args[count:width], strict=True):
                if position >= count:
                    now[position] = slot
            return now, args[count : width + len(first)]

        def again(*args: Any) -> Any:
            return pure_condition(*parts(args)[0])

        def round_(*args: Any) -> Any:
            now, beside = parts(args)
            outputs = list(pure_body(*now))
            for i, position in enumerate(returned):
                if position < count:
                    outputs[count + i] = aten.where.self(beside[-1], outputs[count + i], beside[i])
            return (*outputs, *(aten.zeros_like.default(flag) for flag in beside[len(slots) :]))

        outputs = func(again, round_, (*values[:count], *slots, *first), tuple(values[count:]))
        return [frame], list(outputs)[:width]

    return tuple(_with_writes(context, func, operands, attempt)[1])


def _without_numbers(bodies: Sequence[Function], operands: Sequence[Any]) -> tuple[list[Function], tuple[Any, ...]]:
    """Bodies with the plain numbers among their last operands bound, and the operands that are left.

    Dynamo passes sizes that it has seen to differ: here they are constants, and not inputs of a body's graph.
    """
    numbers = {n: operand for n, operand in enumerate(operands) if isinstance(operand, (int, float))}
    if not numbers:
        return list(bodies), tuple(operands)

    def bound(body: Function) -> Function:
        def filled(*args: Any) -> Any:
            before = len(args) - (len(operands) - len(numbers))
            rest = iter(args[before:])
            last = (numbers[n] if n in numbers else next(rest) for n in range(len(operands)))
            return body(*args[:before], *last)

        return filled

    return list(map(bound, bodies)), tuple(operand for n, operand in enumerate(operands) if n not in numbers)


_WITH_WRITES: dict[Any, Function] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.while_loop: _while_loop,
}


def _with_writes(
    context: FunctionalizationContext, func: Any, operands: Sequence[Any], attempt: Function
) -> tuple[Sequence[Frame], list[Any]]:
    """Trace the bodies until they return all operands that they write, and write these. Returns frames and results."""
    returned: tuple[int, ...] = ()
    while True:
        try:
            frames, leaves = attempt(returned)
            break
        except OperandsWritten as error:
            returned = tuple(sorted({*returned, *error.args[0]}))
            _refuse_shared(context, func, operands, returned)
    count = len(leaves) - len(returned)
    for position, value in zip(returned, leaves[count:], strict=True):
        context.write(operands[position], value)
    # These may be one tensor in eager, and are two in the graph.
    aliased = [operands[position] for position in set[int]().union(*(frame.aliased for frame in frames))]
    for tensor in tensor_leaves([*aliased, *leaves[:count]] if aliased else [], {}):
        context.protect(tensor, partial(OPERAND_PERHAPS_RETURNED.error, op=func))
    return frames, leaves[:count]


def _refuse_shared(
    context: FunctionalizationContext, func: Any, operands: Sequence[Any], returned: Sequence[int]
) -> None:
    for position in returned:
        for other, operand in enumerate(operands):
            if other == position or not isinstance(operand, torch.Tensor):
                continue
            if storage_key(operand) == storage_key(operands[position]):
                first, second = context.graph.ensure(operand), context.graph.ensure(operands[position])
                if not first.disjoint(second):
                    raise BODY_WRITES_SHARED.error(op=func, position=position, other=other)


def _strides(leaf: Any) -> tuple[int, ...] | None:
    """The strides of a tensor whose size and strides are plain integers; else None."""
    is_plain = _is_strided(leaf) and all(type(n) is int for n in (*leaf.size(), *leaf.stride()))
    return leaf.stride() if is_plain else None


def _is_strided(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def _with_strides(context: FunctionalizationContext, value: Any, strides: Any) -> Any:
    """A handle with strides that bodies may read; see Note [Values may have other strides than their handles]."""
    if strides is None or not isinstance(value, torch.Tensor) or same(value.stride(), strides):
        return value
    handle: torch.Tensor = context.executor.on_handles(
        aten.new_empty_strided.default, (value, value.size(), strides), {}
    )
    context.graph.create_base(handle, value)
    context.executor.sync_memory(handle, value)
    return handle
