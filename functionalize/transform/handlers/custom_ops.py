"""Ops that write and have no functional variant, custom ops above all, and gradients through ops without a formula.

Unobserved, such an op runs on the program's own tensors. In a graph it becomes ``auto_functionalized``; arguments that
it writes and that share elements are views of one base there.

Invariant: arguments that share elements do so while the op runs. Limits: a graph cannot express an op that returns
what it writes, a written element that a read-only argument shows, too, and two dtypes of one storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from functionalize._torch import (
    FakeTensor,
    above_autograd,
    auto_functionalized,
    auto_functionalized_v2,
    can_auto_functionalize,
    followed_inside,
    kernel_of,
    storage_key,
)
from functionalize._torch.fakes import data_dependent, has_fake_impl, operator_without_fake
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.overlap import disjoint_guarded, flat_base_layout
from functionalize.aliasing.tensor_queries import is_fake, tensor_leaves
from functionalize.errors import NoFormulaError, UnsupportedMutationError, UnsupportedProgramError
from functionalize.ops import tables
from functionalize.ops.tables import OpRow
from functionalize.refusals.gradients import NO_FORMULA
from functionalize.refusals.operators import (
    CUSTOM_READS_WHAT_IT_WRITES,
    CUSTOM_WRITES_SHARED,
    FAKE_RAISES,
    FAKE_READS_VALUES,
    NO_FAKE,
    RETURNS_OTHER,
    RETURNS_WRITTEN,
    UNPAIRED,
)
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.handlers.strides import value_like_handle
from functionalize.transform.writing_call import Kwargs, WritingCall

aten = torch.ops.aten


def run(call: WritingCall) -> Any:
    """Run an op without functional variant: returns what it returns, and commits its writes."""
    if not call.context.executor.observed:
        return call.on_memory()
    if not can_auto_functionalize(call.func):
        raise _without_form(call.row)
    return _in_graph(call)


def with_gradients(context: FunctionalizationContext, func: Any, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """The results of ``run``, which runs an op. If autograd lacks a formula for it, a graph refuses its gradient.

    In direct use eager's kernel runs, whose calls autograd follows.
    """
    tensors = list(tensor_leaves(args, kwargs))
    sources = [arg for arg in tensors if arg.requires_grad and _differentiable(arg)] if torch.is_grad_enabled() else []
    if not sources or not followed_inside(func, sources[0].device):
        return run()
    if not context.executor.observed and not any(map(is_fake, tensors)):
        with above_autograd():
            return context.executor.on_handles(kernel_of(func, tensors), args, kwargs)
    out = run()
    written = [w.given(args, kwargs) for w in tables.row(func).written]
    results = {id(tensor): tensor for tensor in tensor_leaves([out, *written], {}) if _differentiable(tensor)}
    refusal = NO_FORMULA.error(op=func.name())
    for result in results.values():
        if not (result.is_leaf and result.requires_grad):
            with above_autograd():
                context.executor.on_handles(WithoutFormula.apply, (refusal, result, *sources), {})
    return out


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class WithoutFormula(torch.autograd.Function):
    """A tensor that an operator without a formula made, or wrote: its gradient is refused."""

    @staticmethod
    def forward(ctx: Any, refusal: NoFormulaError, result: torch.Tensor, *sources: torch.Tensor) -> Any:
        ctx.refusal = refusal
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ctx.refusal


def refused_on_fakes(op: Any, args: Sequence[Any], kwargs: Kwargs, error: Exception) -> UnsupportedProgramError | None:
    """Why an operator of the user's raises on fake tensors, if the reason is that these are fake."""
    operator = operator_without_fake(error)
    if operator is not None:
        return NO_FAKE.error(op=operator)
    fake = any(isinstance(leaf, FakeTensor) for leaf in tensor_leaves(args, kwargs))
    if isinstance(error, UnsupportedProgramError) or not fake or not has_fake_impl(op):
        return None
    if isinstance(error, data_dependent()):
        return FAKE_READS_VALUES.error(op=op.name())
    return FAKE_RAISES.error(op=op.name(), kind=type(error).__name__, error=error)


def _in_graph(call: WritingCall) -> Any:
    context, func, own = call.context, call.func, call.func._schema.arguments
    named: Kwargs = {argument.name: argument.default_value for argument in own if argument.has_default_value()}
    named |= {argument.name: arg for argument, arg in zip(own, call.args, strict=False)} | dict(call.kwargs)
    # What the op writes, by the names that `auto_functionalized_v2` has for it.
    targets = {name: handle for w in call.row.written for name, handle in _targets(w.name, named.get(w.name))}
    names = {w.name for w in call.row.written}
    read = tensor_leaves((), {name: arg for name, arg in named.items() if name not in names})
    shared = _shared(context, func, targets, list(read))
    lists = [named[w.name] for w in call.row.written if w.is_list and named.get(w.name) is not None]
    if shared or any(item is None for items in lists for item in items):  # `auto_functionalized` needs a tensor
        return call.returned(_with_bases(call, named, targets, shared))
    results = auto_functionalized(func, **{name: _values(context, arg) for name, arg in named.items()})
    count = len(func._schema.returns) or 1  # without returns it returns one None
    written = [value for result in results[count:] for value in (result if isinstance(result, list) else [result])]
    for handle, value in zip(targets.values(), filter(lambda value: value is not None, written), strict=True):
        context.write(handle, value)
    return call.returned(results)


def _targets(name: str, argument: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(argument, (list, tuple)):
        yield from ((f"{name}_{i}", item) for i, item in enumerate(argument) if item is not None)
    elif argument is not None:
        yield name, argument


def _values(context: FunctionalizationContext, arg: Any) -> Any:
    """An argument as values with the strides of the program's tensors, since the op may ask for them."""
    if isinstance(arg, (list, tuple)):
        return [_values(context, item) for item in arg]
    if not isinstance(arg, torch.Tensor):
        return arg
    return value_like_handle(context, arg)


# Arguments that share elements


def _shared(
    context: FunctionalizationContext, func: Any, targets: dict[str, torch.Tensor], read: list[torch.Tensor]
) -> dict[int, Layout]:
    """By storage in which written arguments overlap: the flat layout around all written arguments there."""
    written = list(targets.values())
    tensors = [*written, *read]
    if len(set(map(storage_key, tensors))) == len(tensors):
        return {}
    for name, handle in targets.items():
        for other in read:
            if _may_overlap(context, handle, other):
                raise CUSTOM_READS_WHAT_IT_WRITES.error(op=func, argument=name)
    groups: dict[int, list[Layout]] = {}
    for handle in written:
        groups.setdefault(storage_key(handle), []).append(Layout.of(handle))
    meeting = {
        storage_key(first)
        for first, second in itertools.combinations(written, 2)
        if _may_overlap(context, first, second)
    }
    return {key: _hull(func, groups[key]) for key in meeting}


def _may_overlap(context: FunctionalizationContext, first: torch.Tensor, second: torch.Tensor) -> bool:
    if storage_key(first) != storage_key(second):
        return False
    views = context.graph.ensure(first), context.graph.ensure(second)
    return not (views[0].disjoint(views[1]) or disjoint_guarded(views[0].layout, views[1].layout))


def _hull(func: Any, layouts: Sequence[Layout]) -> Layout:
    whole: Layout | None = layouts[0]
    for layout in layouts:
        whole = None if whole is None else flat_base_layout(whole, layout)
    if whole is None or any(
        (layout.dtype, layout.conj, layout.neg) != (whole.dtype, False, False) for layout in layouts
    ):
        raise CUSTOM_WRITES_SHARED.error(op=func)
    return whole


def _with_bases(call: WritingCall, named: Kwargs, targets: dict[str, torch.Tensor], shared: dict[int, Layout]) -> Any:
    """The op's own results; what it writes is committed, to arguments that share elements through their base."""
    context = call.context
    bases: list[torch.Tensor] = []
    encoded: Kwargs = {}
    index_of: dict[int, int] = {}
    for name, handle in targets.items():
        key = storage_key(handle)
        whole = shared.get(key)
        if whole is None or key not in index_of:
            index_of[key] = len(bases)
            bases.append(handle if whole is None else _spanning(context, handle, whole))
        encoded[f"_{name}_base_index"] = index_of[key]
        if whole is not None:
            encoded[f"_{name}_size"] = list(handle.size())
            encoded[f"_{name}_stride"] = list(handle.stride())
            encoded[f"_{name}_storage_offset"] = handle.storage_offset() - whole.offset
    for w in call.row.written:
        argument = named.pop(w.name, None)
        if w.is_list:
            encoded[f"_{w.name}_length"] = None if argument is None else len(argument)
            encoded |= {f"_{w.name}_{n}_base_index": None for n, item in enumerate(argument or ()) if item is None}
        elif argument is None:
            encoded[f"_{w.name}_base_index"] = None
    encoded |= {name: _values(context, arg) for name, arg in named.items()}
    # Cloned, since views of a base count from the start of its storage.
    values = [context.executor.call(aten.clone.default, context.value(base)) for base in bases]
    results = auto_functionalized_v2(call.func, **encoded, _all_bases=values)
    count = len(results) - len(bases)
    for base, value in zip(bases, results[count:], strict=True):
        context.write(base, value)
    return results[:count]


def _spanning(context: FunctionalizationContext, handle: torch.Tensor, whole: Layout) -> torch.Tensor:
    layout = list(whole.size), list(whole.stride), whole.offset
    spanning: torch.Tensor = context.executor.on_handles(aten.as_strided.default, (handle, *layout), {})
    return spanning


def _without_form(row: OpRow) -> UnsupportedMutationError:
    written = {"op": row.name, "arguments": ", ".join(argument.name for argument in row.written)}
    reason = tables.UNPAIRED.get(row.name)
    if reason is not None:
        return UNPAIRED.error(reason=reason, **written)
    returns_written = any(index < 0 for index in row.returns)
    return (RETURNS_WRITTEN if returns_written else RETURNS_OTHER).error(**written)
