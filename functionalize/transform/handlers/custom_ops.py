"""Ops that write and have no functional variant: custom ops above all.

Where no mode below observes us, such an op runs on the program's own tensors. In a graph it becomes
``auto_functionalized``; arguments that it writes and that share elements are views of one base there.

Invariant: arguments that share elements do so while the op runs. Limits: a graph has no form for an op that returns
what it writes, for a written element that an argument which is only read shows too, and for two dtypes of one storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize._torch import (
    auto_functionalized,
    auto_functionalized_v2,
    can_auto_functionalize,
    counting_versions,
    counts_versions,
    storage_key,
)
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.overlap import flat_base_layout, spans_disjoint_guarded
from functionalize.aliasing.tensor_queries import tensor_leaves
from functionalize.errors import UnsupportedMutationError
from functionalize.ops import tables
from functionalize.ops.tables import OpRow
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.handlers.random_ops import laid_out

aten = torch.ops.aten
Kwargs = dict[str, Any]


def run(context: FunctionalizationContext, func: Any, row: OpRow, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Run an op without functional variant: returns what it returns, and commits its writes."""
    if not context.executor.observed:
        return on_memory(context, func, args, kwargs)
    if not can_auto_functionalize(func):
        raise _without_form(func, row)
    return _in_graph(context, func, row, args, kwargs)


def on_memory(context: FunctionalizationContext, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Run an op on the program's own tensors in direct use: eager's own kernel, with what it does before it raises."""
    with contextlib.nullcontext() if counts_versions(func) else counting_versions():
        return context.executor.on_handles(func, args, kwargs)


def undeclared(context: FunctionalizationContext, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Run an op that does what its schema does not say: in direct use only, as nobody knows what it writes."""
    if not context.executor.observed:
        return context.executor.on_handles(func, args, kwargs)
    raise UnsupportedMutationError(
        f"{func.name()}, a collective operation, in what becomes a graph",
        why=str(tables.undeclared(func)),
        hint="the functional collectives (torch.distributed._functional_collectives), which return what they computed",
    )


@dataclass(frozen=True, eq=False)
class _Target:
    """One tensor that the op writes: ``auto_functionalized_v2`` knows it by this name."""

    name: str
    handle: torch.Tensor


def _in_graph(context: FunctionalizationContext, func: Any, row: OpRow, args: Sequence[Any], kwargs: Kwargs) -> Any:
    declared = func._schema.arguments
    named: Kwargs = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    named |= {argument.name: arg for argument, arg in zip(declared, args, strict=False)} | dict(kwargs)
    targets = [target for w in row.written for target in _targets(w.name, named.get(w.name))]
    shared = _shared(context, func, targets, named)
    own = len(func._schema.returns) or 1  # a None stands for no return at all
    if shared:
        results = _with_bases(context, func, row, named, targets, shared)
    else:
        results = auto_functionalized(func, **{name: _values(context, arg) for name, arg in named.items()})
        written = [value for result in results[own:] for value in (result if isinstance(result, list) else [result])]
        for target, value in zip(targets, filter(lambda value: value is not None, written), strict=True):
            context.write(target.handle, value)
    returns = [results[i] if i >= 0 else row.written[-i - 1].given(args, kwargs) for i in row.returns]
    return None if not returns else returns[0] if len(returns) == 1 else tuple(returns)


def _targets(name: str, given: Any) -> Iterator[_Target]:
    if isinstance(given, (list, tuple)):
        yield from (_Target(f"{name}_{i}", item) for i, item in enumerate(given) if item is not None)
    elif given is not None:
        yield _Target(name, given)


def _values(context: FunctionalizationContext, arg: Any) -> Any:
    """An argument as values with the strides of the program's tensors, since the op may ask for them."""
    if isinstance(arg, (list, tuple)):
        return [_values(context, item) for item in arg]
    if not isinstance(arg, torch.Tensor):
        return arg
    return laid_out(context, arg)


# Arguments that share elements


def _shared(
    context: FunctionalizationContext, func: Any, targets: Sequence[_Target], named: Kwargs
) -> dict[int, Layout]:
    """By storage in which written arguments overlap: the flat layout around all that are written there."""
    keys = [storage_key(leaf) for leaf in tensor_leaves((), named)]
    if len(set(keys)) == len(keys):
        return {}
    written = {id(target.handle) for target in targets}
    for target in targets:
        for other in tensor_leaves((), named):
            if id(other) not in written and _may_overlap(context, target.handle, other):
                raise _read_too(func, target)
    groups: dict[int, list[torch.Tensor]] = {}
    for index, target in enumerate(targets):
        if any(
            _may_overlap(context, target.handle, other.handle) for other in [*targets[:index], *targets[index + 1 :]]
        ):
            groups.setdefault(storage_key(target.handle), []).append(target.handle)
    return {key: _hull(func, [Layout.of(handle) for handle in group]) for key, group in groups.items()}


def _may_overlap(context: FunctionalizationContext, one: torch.Tensor, two: torch.Tensor) -> bool:
    if storage_key(one) != storage_key(two):
        return False
    views = context.graph.ensure(one), context.graph.ensure(two)
    return not (views[0].disjoint(views[1]) or spans_disjoint_guarded(views[0].layout, views[1].layout))


def _hull(func: Any, layouts: Sequence[Layout]) -> Layout:
    whole: Layout | None = layouts[0]
    for layout in layouts:
        whole = _around(whole, layout)
    if whole is None or any(
        (layout.dtype, layout.conj, layout.neg) != (whole.dtype, False, False) for layout in layouts
    ):
        raise UnsupportedMutationError(
            f"{func} writes arguments that share elements",
            why="they are read in different ways, and auto_functionalized has one base of one dtype for all",
            hint="call it outside of a trace, or pass it tensors that do not share a storage",
        )
    return whole


def _around(whole: Layout | None, layout: Layout) -> Layout | None:
    return None if whole is None else flat_base_layout(whole, layout)


def _with_bases(
    context: FunctionalizationContext,
    func: Any,
    row: OpRow,
    named: Kwargs,
    targets: Sequence[_Target],
    shared: dict[int, Layout],
) -> Any:
    """The op's own results; what it writes is committed, to arguments that share elements through their base."""
    handles: list[torch.Tensor] = []
    encoded: Kwargs = {}
    index_of: dict[int, int] = {}
    for target in targets:
        handle, key = target.handle, storage_key(target.handle)
        whole = shared.get(key)
        if whole is None or key not in index_of:
            index_of[key] = len(handles)
            handles.append(handle if whole is None else _spanning(context, handle, whole))
        encoded[f"_{target.name}_base_index"] = index_of[key]
        if whole is not None:
            encoded[f"_{target.name}_size"] = list(handle.size())
            encoded[f"_{target.name}_stride"] = list(handle.stride())
            encoded[f"_{target.name}_storage_offset"] = handle.storage_offset() - whole.offset
    for w in row.written:
        given = named.get(w.name)
        if w.is_list:
            encoded[f"_{w.name}_length"] = None if given is None else len(given)
        elif given is None:
            encoded[f"_{w.name}_base_index"] = None
    read = {name: arg for name, arg in named.items() if name not in {w.name for w in row.written}}
    encoded |= {name: _values(context, arg) for name, arg in read.items()}
    # Cloned, since views of a base count from the start of its storage.
    bases = [context.executor.call(aten.clone.default, context.value(handle)) for handle in handles]
    results = auto_functionalized_v2(func, **encoded, _all_bases=bases)
    for handle, value in zip(handles, results[-len(bases) :], strict=True):
        context.write(handle, value)
    return results[: -len(bases)]


def _spanning(context: FunctionalizationContext, handle: torch.Tensor, whole: Layout) -> torch.Tensor:
    layout = list(whole.size), list(whole.stride), whole.offset
    spanning: torch.Tensor = context.executor.on_handles(aten.as_strided.default, (handle, *layout), {})
    return spanning


# Refusals


def _without_form(func: Any, row: OpRow) -> UnsupportedMutationError:
    why = tables.UNPAIRED.get(row.name)
    hint = "call it outside of a trace, or compute the result out of place and copy_ it into the argument"
    if why is None and any(index < 0 for index in row.returns):
        why = "it returns what it writes, which auto_functionalized does not know unless a tag of the op says so"
        hint = "let the op return nothing, or give it the tag torch.Tag.inplace or torch.Tag.out"
    elif why is None:
        why = "auto_functionalized takes ops that return tensors or nothing, and what this one returns is neither"
        hint = "let the op return tensors, a fixed number of them"
    return UnsupportedMutationError(f"{row.name} writes {', '.join(w.name for w in row.written)}", why=why, hint=hint)


def _read_too(func: Any, target: _Target) -> UnsupportedMutationError:
    return UnsupportedMutationError(
        f"{func} writes `{target.name}` and reads another argument with the same elements",
        why="auto_functionalized runs the op on a copy of what it writes, so that the other would not change with it",
        hint="pass a `.clone()` of what is read, if the op reads it before it writes, or name it in `mutates_args`",
    )
