"""Higher-order ops (``cond``, ``map``, ``scan``, ...): their operands become values, their bodies are functionalized.

Where no mode below observes us, the bodies are parts of the program and run on its own tensors. In a graph, a body of
``cond`` or ``while_loop`` that writes to operands gives their new values as further results, which are written back
outside: `Frame` finds out what a body writes while it is traced, and it is traced again to give it.

Invariant: bodies in a graph write nothing. Limits: in a graph, operands that are written share no element with other
operands; a result that may be an operand is not written later on; bodies of other ops write to no operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize._torch import HigherOrderOperator, OpOverload, mode_stack, pytree, storage_key, unwrap_functorch
from functionalize.aliasing.geometry import same
from functionalize.errors import UnsupportedMutationError
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.epilogue import Epilogue

aten = torch.ops.aten
Kwargs = dict[str, Any]
Function = Callable[..., Any]
FunctionalizeBody = Callable[[Function, "Frame"], Function]


class OperandsWritten(Exception):
    """A body wrote to operands whose new values it was not asked to return; caught in this module."""

    def __init__(self, positions: Sequence[int]) -> None:
        super().__init__(positions)
        self.positions = tuple(positions)


class Frame:
    """One body: its operands, with the strides of the originals; its results, and which operands it wrote."""

    def __init__(self, func: Any, operands: Sequence[Any] | None = None, given: Sequence[int] = ()) -> None:
        self.func, self.operands, self.given = func, operands, tuple(given)
        self.spec: pytree.TreeSpec | None = None
        self.strides: list[Any] = []  # of the results
        self.aliased: set[int] = set()  # operands that a result shares memory with

    def enter(self, context: FunctionalizationContext, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operands as the body sees them."""
        if self.operands is None:
            return args
        return tuple(_as_laid_out(context, arg, like) for arg, like in zip(args, self.operands, strict=True))

    def leave(self, args: tuple[Any, ...], outputs: Any, epilogue: Epilogue) -> Any:
        """The body's results, followed by the new values of the operands in ``given``."""
        position = {id(unwrap_functorch(arg)): i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        leaves, self.spec = pytree.tree_flatten(outputs)
        self._look_at(args, leaves)
        values: dict[int, Any] = {}
        for back in epilogue.prepare():
            handle = back.input.handle
            if back.metadata or id(handle) not in position:
                raise _refusal(self.func, "changes the shape or the strides of an operand", "compute a new tensor")
            values[position[id(handle)]] = back.data
            epilogue.return_value(handle)
        if not values.keys() <= set(self.given):
            if self.operands is None:
                raise _refusal(
                    self.func, f"writes to operand {min(values)}", "return the new value, and copy_ it after"
                )
            raise OperandsWritten(sorted(values))
        if not self.given:
            return outputs
        call = epilogue.context.executor.call
        news = [call(aten.clone.default, values.get(i, args[i])) for i in self.given]  # results share no memory
        return (*leaves, *news)

    def _look_at(self, args: tuple[Any, ...], leaves: Sequence[Any]) -> None:
        keys = {storage_key(arg): i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.strides = [_strides(leaf) for leaf in leaves]
        self.aliased |= {keys[key] for leaf in tensors if (key := storage_key(leaf)) in keys}


def run(
    context: FunctionalizationContext,
    functionalize_body: FunctionalizeBody,
    func: Any,
    args: Sequence[Any],
    kwargs: Kwargs,
) -> Any:
    """Run a higher-order op with bodies that belong to the program, or that are free of mutation."""
    if not mode_stack():
        return _at_once(context, func, args, kwargs)
    if func in _WITH_WRITES:
        return _WITH_WRITES[func](context, functionalize_body, func, args)

    def pure(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return context.value(leaf)
        return functionalize_body(leaf, Frame(func)) if _is_body(leaf) else leaf

    call_args, call_kwargs = pytree.tree_map(pure, (tuple(args), kwargs))
    return func(*call_args, **call_kwargs)


def _is_body(leaf: Any) -> bool:
    return callable(leaf) and not isinstance(leaf, (OpOverload, HigherOrderOperator, type))


def _at_once(context: FunctionalizationContext, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Run the op on the program's own tensors; its bodies are dispatched to the program again."""

    def entering(leaf: Any) -> Any:
        def body(*args: Any, **kwargs: Any) -> Any:
            with context.enter():
                return leaf(*args, **kwargs)

        return body if _is_body(leaf) else leaf

    call_args, call_kwargs = pytree.tree_map(entering, (tuple(args), kwargs))
    return func(*call_args, **call_kwargs)


# In a graph


def _cond(context: FunctionalizationContext, functionalize_body: FunctionalizeBody, func: Any, args: Any) -> Any:
    pred, yes, no, operands = args

    def attempt(given: Sequence[int]) -> Any:
        frames = [Frame(func, operands, given) for _ in (yes, no)]
        bodies = [functionalize_body(body, frame) for body, frame in zip((yes, no), frames, strict=True)]
        outputs = func(_value(context, pred), *bodies, [_value(context, operand) for operand in operands])
        return frames, pytree.tree_leaves(outputs)

    (frame, other), given, leaves = _until_known(context, func, operands, attempt)
    for index, strides in enumerate(frame.strides):
        if len(other.strides) == len(frame.strides) and strides == other.strides[index]:
            leaves[index] = _with_strides(context, leaves[index], strides)
    count = len(leaves) - len(given)
    for position, value in zip(given, leaves[count:], strict=True):
        context.write(operands[position], value)
    _protect(context, func, [operands[i] for i in frame.aliased | other.aliased], leaves[:count])
    return pytree.tree_unflatten(leaves[:count], frame.spec)


def _while_loop(context: FunctionalizationContext, functionalize_body: FunctionalizeBody, func: Any, args: Any) -> Any:
    """An operand that is written is carried along. One that is carried anyway is written in the first round only."""
    condition, body, carried, additional = args
    operands, count = (*carried, *additional), len(carried)

    def attempt(given: Sequence[int]) -> Any:
        frame = Frame(func, operands, given)
        pure_condition, pure_body = functionalize_body(condition, Frame(func)), functionalize_body(body, frame)
        values = [_value(context, operand) for operand in operands]
        slots = [values[position] for position in given]
        first = [aten.ones.default([], dtype=torch.bool)] if any(position < count for position in given) else []
        width = count + len(slots)

        def parts(args: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
            """The operands of the original, and what is carried beside them."""
            now = [*args[:count], *args[width + len(first) :]]
            for position, slot in zip(given, args[count:width], strict=True):
                if position >= count:
                    now[position] = slot
            return now, args[count : width + len(first)]

        def again(*args: Any) -> Any:
            return pure_condition(*parts(args)[0])

        def round_(*args: Any) -> Any:
            now, beside = parts(args)
            outputs = list(pure_body(*now))
            for i, position in enumerate(given):
                if position < count:
                    outputs[count + i] = aten.where.self(beside[-1], outputs[count + i], beside[i])
            return (*outputs, *(aten.zeros_like.default(flag) for flag in beside[len(slots) :]))

        outputs = func(again, round_, (*values[:count], *slots, *first), tuple(values[count:]))
        return (frame,), list(outputs)[:width]

    (frame,), given, leaves = _until_known(context, func, operands, attempt)
    for position, value in zip(given, leaves[count:], strict=True):
        context.write(operands[position], value)
    _protect(context, func, [operands[i] for i in frame.aliased], leaves[:count])
    return tuple(leaves[:count])


_WITH_WRITES: dict[Any, Function] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.while_loop: _while_loop,
}


def _until_known(
    context: FunctionalizationContext, func: Any, operands: Sequence[Any], attempt: Function
) -> tuple[Any, Any, list[Any]]:
    """Trace the bodies until all operands that they write are given; returns frames, their positions, results."""
    given: tuple[int, ...] = ()
    while True:
        try:
            frames, leaves = attempt(given)
        except OperandsWritten as found:
            given = tuple(sorted({*given, *found.positions}))
            _refuse_shared(context, func, operands, given)
        else:
            return frames, given, leaves


def _refuse_shared(context: FunctionalizationContext, func: Any, operands: Sequence[Any], given: Sequence[int]) -> None:
    for position in given:
        for other, operand in enumerate(operands):
            if other == position or not isinstance(operand, torch.Tensor):
                continue
            if storage_key(operand) == storage_key(operands[position]):
                one, two = context.graph.ensure(operand), context.graph.ensure(operands[position])
                if not one.disjoint(two):
                    what = f"writes to operand {position}, which shares elements with operand {other}"
                    raise _refusal(func, what, "pass one of the two, and take the view of it inside the body")


def _protect(context: FunctionalizationContext, func: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Refuse later writes to operands and results that may be one tensor in eager, and are two in the graph."""
    for tensor in (*operands, *results) if operands else ():
        if isinstance(tensor, torch.Tensor):
            context.protect(tensor, f"{func} may have returned an operand, so that both may be the same memory")


def _value(context: FunctionalizationContext, leaf: Any) -> Any:
    return context.value(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _as_laid_out(context: FunctionalizationContext, value: Any, like: Any) -> Any:
    strided = isinstance(like, torch.Tensor) and like.layout is torch.strided
    return _with_strides(context, value, like.stride()) if strided else value


def _strides(leaf: Any) -> tuple[int, ...] | None:
    """The strides of a tensor whose size and strides are plain integers; else None."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return None
    known = all(type(n) is int for n in (*leaf.size(), *leaf.stride()))
    return leaf.stride() if known else None


def _with_strides(context: FunctionalizationContext, value: Any, strides: Any) -> Any:
    """A handle with strides that bodies may ask for; see Note [Values may have other strides than their handles]."""
    if strides is None or not isinstance(value, torch.Tensor) or same(value.stride(), strides):
        return value
    handle: torch.Tensor = context.executor.on_handles(value.new_empty_strided, (value.size(), strides), {})
    context.graph.create_base(handle, value)
    context.executor.sync_memory(handle, value)
    return handle


def _refusal(func: Any, what: str, hint: str) -> UnsupportedMutationError:
    return UnsupportedMutationError(
        f"a body of {func} {what}",
        why="in a graph a body is a function of values, and this one changes memory that others may look at",
        hint=f"{hint}; or call it outside of a trace",
    )
