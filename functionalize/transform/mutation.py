"""Run an op that writes without writing: its functional variant, then a commit of each written argument.

Invariant: a write is legal exactly where eager takes it, and raises eager's own error elsewhere.
Limits: an op whose row names no functional variant is the matter of :mod:`functionalize.transform.handlers.custom_ops`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from functionalize._torch import FakeTensor, sized_by_data, storage_key, unbacked
from functionalize.aliasing.geometry import Layout, differ, same
from functionalize.aliasing.overlap import spans_disjoint
from functionalize.aliasing.tensor_queries import counts_elements, is_plain_strided, repeats, tensor_leaves
from functionalize.errors import UnsupportedMutationError
from functionalize.ops import tables
from functionalize.ops.tables import OpRow, Written
from functionalize.transform import dry_run
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.handlers import custom_ops, overlapping_writes, random_ops
from functionalize.transform.write_legality import WriteLegalizer

aten = torch.ops.aten
Kwargs = dict[str, Any]
_Entry = tuple[int, torch.Tensor, bool]  # of a list: its index, the tensor, whether it is written


def mutate(context: FunctionalizationContext, func: Any, row: OpRow, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Run a mutating op: returns what ``func(*args, **kwargs)`` returns, and commits its writes."""
    written = [w for w in row.written if _writes(func, w, args, kwargs)]
    if not written:
        return _without_write(context, func, row, args, kwargs)
    if row.functional is None or (row.random and not context.executor.observed):
        return custom_ops.run(context, func, row, args, kwargs)
    meet = any(w.is_list for w in written) and _entries_meet(written, func, args, kwargs)
    if not context.executor.observed and (meet or not all(map(is_plain_strided, tensor_leaves(args, kwargs)))):
        return custom_ops.on_memory(context, func, args, kwargs)
    done = overlapping_writes.run(context, func, row, written, args, kwargs)
    if done is not NotImplemented:
        return done
    special = _SPECIAL.get(func)
    if special is not None and special(context, func, args, kwargs):
        return args[0]
    if meet:
        return _entry_by_entry(context, func, row, args, kwargs)
    hidden = any(w.when for w in written) or row.non_mutating_op is None
    variant = tables.overload(row.functional if hidden else row.non_mutating_op or row.functional)
    handles = _variant_arguments(context, func, row, variant, args, kwargs)
    results = _computed(context, func, row, args, kwargs, variant, handles)
    if results is None:
        # Eager's kernel raises as well, once it has written what comes before.
        return custom_ops.on_memory(context, func, args, kwargs)
    if len(variant._schema.returns) == 1:
        results = (results,)
    fresh = results
    if any(i >= 0 for i in row.returns) and context.values_of(*handles)[2]:
        fresh = context.rehandle(variant, *handles, results)
    WriteLegalizer(context, func, args, kwargs).commit_all(written, results, (variant, *handles))
    returns = [fresh[i] if i >= 0 else row.written[-i - 1].given(args, kwargs) for i in row.returns]
    return None if not returns else returns[0] if len(returns) == 1 else tuple(returns)


def _computed(
    context: FunctionalizationContext,
    func: Any,
    row: OpRow,
    args: Sequence[Any],
    kwargs: Kwargs,
    variant: Any,
    handles: tuple[list[Any], Kwargs],
) -> Any:
    """The functional variant's results, or None where it raises in direct use.

    Some variants know no sizes that only the data tell, where the op does.
    """
    try:
        ordered = random_ops.compute(context, variant, *handles, writes=True) if row.random else None
        return context.compute(variant, *handles) if ordered is None else ordered
    except Exception as error:
        if not context.executor.observed:
            return None
        sized = any(isinstance(leaf, FakeTensor) and sized_by_data(leaf) for leaf in tensor_leaves(args, kwargs))
        if not (sized and isinstance(error, RuntimeError)):
            raise
        written = [w.given(args, kwargs) for w in row.written if _writes(func, w, args, kwargs)]
        dry_run.on_twins(context.executor, func, args, kwargs, written)
        raise UnsupportedMutationError(
            f"{func} on tensors whose sizes only the data tell",
            why=f"{variant}, which computes what it writes, cannot be traced with such sizes",
            hint="spell it out by other operators, or check the sizes first (torch._check)",
        ) from error


def _entries_meet(written: Sequence[Written], func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    """Whether an entry that a foreach op writes overlaps another entry.

    What one entry reads may overlap what that entry writes, as `x` in `_foreach_mul_([x], [x])`: it is read before.
    """
    targets = [w.given(args, kwargs) for w in written]
    of_all = 0 if len(targets[0]) == 1 else -1  # the index of a tensor that each entry reads
    by_key: dict[int, list[_Entry]] = {}
    for arg in (*args, *kwargs.values()):
        writes = any(arg is target for target in targets)
        for index, leaf in enumerate(arg) if isinstance(arg, (list, tuple)) else [(of_all, arg)]:
            if isinstance(leaf, torch.Tensor):
                by_key.setdefault(storage_key(leaf), []).append((index, leaf, writes))
    return any(
        _pair_meets(one, other) for entries in by_key.values() for one, other in itertools.combinations(entries, 2)
    )


def _pair_meets(one: _Entry, other: _Entry) -> bool:
    (index, tensor, writes), (other_index, other_tensor, other_writes) = one, other
    if index == other_index and not (writes and other_writes):
        return False
    return (writes or other_writes) and not spans_disjoint(Layout.of(tensor), Layout.of(other_tensor))


def _entry_by_entry(
    context: FunctionalizationContext, func: Any, row: OpRow, args: Sequence[Any], kwargs: Kwargs
) -> None:
    """Run a foreach op one entry at a time, in eager's order: an entry sees what those before it wrote."""
    count = len(args[0])
    if count == 1:
        raise UnsupportedMutationError(
            f"{func} on lists that hold one tensor, or parts of one, in the same place",
            why="eager writes both, in an order that depends on the kernel",
            hint="pass a copy (`.clone()`) in one of the lists",
        )

    def entry(arg: Any, index: int) -> Any:
        return arg[index : index + 1] if isinstance(arg, (list, tuple)) and len(arg) == count else arg

    for index in range(count):
        named = {name: entry(arg, index) for name, arg in kwargs.items()}
        mutate(context, func, row, [entry(arg, index) for arg in args], named)


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """An argument of a call by name, the schema's default where the call leaves it out."""
    position, kwarg_only, default = _declared(func)[name]
    if not kwarg_only and position < len(args):
        return args[position]
    return kwargs.get(name, default)


@cache
def _declared(func: Any) -> dict[str, tuple[int, bool, Any]]:
    """The arguments of an op: position, whether by name only, default. To ask the schema costs as much as an op."""
    return {
        declared.name: (position, declared.kwarg_only, declared.default_value)
        for position, declared in enumerate(func._schema.arguments)
    }


def _writes(func: Any, written: Written, args: Sequence[Any], kwargs: Kwargs) -> bool:
    if written.given(args, kwargs) is None:
        return False
    return written.when is None or bool(_argument(func, written.when, args, kwargs))


def _without_write(
    context: FunctionalizationContext, func: Any, row: OpRow, args: Sequence[Any], kwargs: Kwargs
) -> Any:
    """Run a call that writes nothing (evaluation-mode batch norm) by its non-mutating op, if there is one."""
    op = tables.overload(row.non_mutating_op) if row.non_mutating_op else func
    results, strides_differ = context.compute_comparing_strides(op, args, kwargs)
    return context.rehandle(op, args, kwargs, results) if strides_differ else results


def _variant_arguments(
    context: FunctionalizationContext, func: Any, row: OpRow, variant: Any, args: Sequence[Any], kwargs: Kwargs
) -> tuple[list[Any], Kwargs]:
    """The functional variant's arguments, in handles."""
    outputs = {w.name for w in row.written} if row.kind is tables.Kind.OUT else set()
    call_kwargs: Kwargs = {name: arg for name, arg in kwargs.items() if name not in outputs}
    call_args = list(args)
    if row.functional_args is not None:
        by_name = {name: _argument(func, name, args, kwargs) for name in row.functional_args}
        call_args, call_kwargs = [], {}
        for (declared, (_, kwarg_only, _)), (name, arg) in zip(
            _declared(variant).items(), by_name.items(), strict=False
        ):
            if kwarg_only or (declared != name and declared in by_name):
                call_kwargs[declared] = arg
            else:
                call_args.append(arg)
    first = row.written[0].given(args, kwargs)
    for option in row.options:
        call_kwargs[option] = getattr(first, option)
    call_kwargs.update(row.constants)
    if _names_no_dtype(variant, call_args, call_kwargs) and isinstance(first, torch.Tensor):
        with_dtype = {**call_kwargs, "dtype": first.dtype}
        # Sums and products compute in the dtype of what they write, where the caller names none: `sum.out`, `cumsum_`.
        if dry_run.result_dtype(variant, call_args, call_kwargs) != first.dtype:
            call_kwargs = with_dtype
    return call_args, call_kwargs


def _names_no_dtype(variant: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    """Whether an op takes a dtype for its result, and the call leaves it out."""
    _, kwarg_only, _ = _declared(variant).get("dtype", (0, False, None))
    return kwarg_only and kwargs.get("dtype") is None


# Special writes: the value does not depend on what was there, or depends on more than one position


def _copy(context: FunctionalizationContext, func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    target, source = args[0], args[1]
    if not (is_plain_strided(target) and is_plain_strided(source)):
        return _copy_sparse(context, target, source)
    if unbacked((*target.size(), *source.size())) and not same(source.size(), target.size()):
        return False  # the functional variant knows how to broadcast to sizes that only the data tell
    call, value = context.executor.call, context.value(source)
    other = differ(source.size(), target.size())
    if other:
        dry_run.on_twins(context.executor, func, args, kwargs, [target])
    elif context.graph.find(target) is not None and context.graph.find(source) is context.graph.find(target):
        return True
    options = {o: getattr(target, o) for o in ("dtype", "device") if getattr(target, o) != getattr(source, o)}
    converted = call(aten._to_copy.default, value, **options) if options else value
    if other:
        converted = call(aten.expand.default, converted, list(target.size()))
    context.write(target, converted, aliased=not options)
    return True


def _copy_sparse(context: FunctionalizationContext, target: torch.Tensor, source: torch.Tensor) -> bool:
    kinds = [(tensor.layout, tensor.dtype, tensor.device, tensor.size()) for tensor in (target, source)]
    if kinds[0] != kinds[1] or not (target.is_sparse or counts_elements(target)):
        return False
    context.write(target, context.executor.call(aten.clone.default, context.value(source)))
    return True


def _fill(context: FunctionalizationContext, func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    target, number = args[0], args[1] if len(args) > 1 else 0
    if not is_plain_strided(target):
        return False
    options = {"dtype": target.dtype, "layout": target.layout, "device": target.device, "pin_memory": False}
    context.write(target, context.executor.call(aten.full.default, list(target.size()), number, **options))
    return True


def _masked_fill(context: FunctionalizationContext, func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    """Eager fills an element of an expanded tensor where the mask holds at any of its positions."""
    target, mask, number = args
    if not repeats(target):
        return False
    shared = [dim for dim, stride in enumerate(target.stride()) if type(stride) is int and stride == 0]
    with context.enter():
        mask = mask.expand(target.size()).any(shared, keepdim=True)
    op = aten.masked_fill.Tensor if isinstance(number, torch.Tensor) else aten.masked_fill.Scalar
    context.write(target, context.compute(op, (target, mask, number), kwargs))
    return True


_SPECIAL: dict[Any, Callable[[FunctionalizationContext, Any, Sequence[Any], Kwargs], bool]] = {
    aten.copy_.default: _copy,
    aten.fill_.Scalar: _fill,
    aten.masked_fill_.Scalar: _masked_fill,
    aten.masked_fill_.Tensor: _masked_fill,
    aten.zero_.default: _fill,
}
