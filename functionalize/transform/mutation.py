"""Run an op that writes without writing: its functional variant, then a commit of each written argument.

Invariant: a write is legal exactly where eager takes it, and raises eager's own error elsewhere.
Limits: :mod:`functionalize.transform.handlers.custom_ops` runs ops whose rows name no functional variant.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize._torch import FakeTensor, sized_by_data, unbacked
from functionalize.aliasing.geometry import Layout, differ, same, size_hint
from functionalize.aliasing.tensor_queries import counts_elements, is_plain_strided, repeats, tensor_leaves
from functionalize.errors import UnsupportedMutationError
from functionalize.ops import tables, traits
from functionalize.ops.calls import declared, draws
from functionalize.refusals.writes import DATA_DEPENDENT_WRITE, SHARED_ELEMENTS
from functionalize.tracing.meta_cache import MISS
from functionalize.transform import dry_run
from functionalize.transform.handlers import custom_ops, overlapping_reads, random_ops, rounded_factors
from functionalize.transform.handlers.strides import values_like_handles
from functionalize.transform.writing_call import DTYPE_NAMES, VariantCall, WritingCall

aten = torch.ops.aten


def mutate(call: WritingCall) -> Any:
    """Run a mutating op: returns what it returns, and commits its writes."""
    context, row, written = call.context, call.row, call.written
    if not written and (row.functional or row.non_mutating_op or not call.func._schema.is_mutable):
        return _without_write(call)
    if row.functional is None or (not context.executor.observed and draws(call.func, call.args, call.kwargs)):
        return custom_ops.run(call)
    meet = any(target.index != other.index for target, other in call.meetings)  # entries of lists
    if not context.executor.observed and (meet or not all(map(is_plain_strided, call.tensors))):
        return call.on_memory()
    done = _overlapping(call)
    if done is not NotImplemented:
        return done
    special = _SPECIAL.get(call.func)
    if special is not None and special(call):
        return call.args[0] if call.func._schema.returns else None
    if meet:
        return _entry_by_entry(call)
    hidden = row.non_mutating_op is None or any(w.when for w in written)
    op = tables.overload(row.functional if hidden else row.non_mutating_op or row.functional)
    variant = _variant_call(call, op)
    if op in traits.BY_TENSOR:
        variant = rounded_factors.of_tensors(context, variant)
    results = _computed(call, variant)
    if results is None:
        return call.on_memory()  # eager's kernel raises as well, once it has written what comes before
    if len(variant.op._schema.returns) == 1:
        results = (results,)
    returns_more = any(i >= 0 for i in row.returns)
    fresh = context.rehandle(variant.op, variant.args, variant.kwargs, results) if returns_more else results
    call.commit(results, variant)
    return call.returned(fresh)


def _computed(call: WritingCall, variant: VariantCall) -> Any:
    """The functional variant's results, or None if it raises in direct use.

    Some variants do not take data-dependent sizes, though the op does.
    """
    try:
        op, args, kwargs = variant.op, variant.args, variant.kwargs
        if op in traits.STEPS_OF_OPTIMIZERS:  # their kernels go through the memory of all tensors alike
            args, kwargs = values_like_handles(call.context, args, kwargs)
            return call.context.executor.call(op, *args, **kwargs)
        ordered = random_ops.compute(call.context, op, args, kwargs, writes=True) if call.row.random else None
        return call.context.compute(op, args, kwargs) if ordered is None else ordered
    except Exception as error:
        if not call.context.executor.observed:
            return None
        sized = any(isinstance(leaf, FakeTensor) and sized_by_data(leaf) for leaf in call.tensors)
        if isinstance(error, UnsupportedMutationError) or not (sized and isinstance(error, RuntimeError)):
            raise
        call.on_twins()
        raise DATA_DEPENDENT_WRITE.error(op=call.func, variant=variant.op) from error


def _entry_by_entry(call: WritingCall) -> None:
    """Run a foreach op one entry at a time, in eager's order: an entry sees what those before it wrote."""
    count = len(call.args[0])

    def entry(arg: Any, index: int) -> Any:
        return arg[index : index + 1] if isinstance(arg, (list, tuple)) and len(arg) == count else arg

    for index in range(count):
        named = {name: entry(arg, index) for name, arg in call.kwargs.items()}
        mutate(dataclasses.replace(call, args=[entry(arg, index) for arg in call.args], kwargs=named))


def _without_write(call: WritingCall) -> Any:
    """Run a call that writes nothing (evaluation-mode batch norm) by its non-mutating op, if it has such an op."""
    context, args, kwargs = call.context, call.args, call.kwargs
    op = tables.overload(call.row.non_mutating_op) if call.row.non_mutating_op else call.func
    out = context.run_cached(op, args, kwargs)
    return context.rehandle(op, args, kwargs, context.compute(op, args, kwargs)) if out is MISS else out


def _variant_call(call: WritingCall, variant: Any) -> VariantCall:
    """The call of the functional variant, on handles."""
    row = call.row
    outputs = {w.name for w in row.written} if row.kind is tables.Kind.OUT else set()
    args, kwargs = list(call.args), {name: arg for name, arg in call.kwargs.items() if name not in outputs}
    if row.functional_args is not None:
        by_name = {name: call.argument(name) for name in row.functional_args}
        args, kwargs = [], {}
        for (own, parameter), (name, arg) in zip(declared(variant).items(), by_name.items(), strict=False):
            if parameter.kwarg_only or (own != name and own in by_name):
                kwargs[own] = arg
            else:
                args.append(arg)
    first = row.written[0].given(call.args, call.kwargs)
    kwargs |= {option: getattr(first, option) for option in row.options} | dict(row.constants)
    dtype = declared(variant).get("dtype")
    # Sums and products without a dtype of the caller's compute in that of what they write: `sum.out`, `cumsum_`.
    takes_dtype = dtype is not None and dtype.kwarg_only
    inherits = takes_dtype and kwargs.get("dtype") is None and isinstance(first, torch.Tensor)
    if inherits and dry_run.result_dtype(variant, args, kwargs) != first.dtype:
        kwargs["dtype"] = first.dtype
    return VariantCall(variant, args, kwargs)


# Writes to a tensor in which several positions share an element (overlapping `unfold`, `as_strided`)
#
# Eager goes through the positions in the order of their strides, outermost first, and writes an element once for each
# of its positions, reading what it wrote before. So in a graph such a write becomes one for each slice along the
# outermost dimension, until the positions of a slice are disjoint. Limits: ops that are elementwise by their tag, whose
# number of slices is fixed for the sizes of the trace; eager itself refuses strides of zero.


def _overlapping(call: WritingCall) -> Any:
    """Run a write whose targets overlap, or raise what eager raises; NotImplemented if it can run like any other."""
    targets = [target for target in tensor_leaves(call.targets, {}) if target.layout is torch.strided]
    if not call.meetings and all(Layout.of(target).contiguous for target in targets):
        return NotImplemented  # almost all writes
    in_order = any(_order_matters(call, target) for target in targets)
    if not (in_order or any(map(repeats, targets)) or call.meetings):
        return NotImplemented
    if not call.context.executor.observed:
        return call.on_memory()
    dry_run.on_copies(call.context.executor, call.func, call.args, call.kwargs)
    overlapping_reads.refuse(call)
    if in_order:
        return _by_slices(call)
    expanded = next(filter(repeats, targets), None)
    alike = call.func.overloadpacket in traits.WRITES_ALIKE_EVERYWHERE or call.puts_one_number
    if expanded is not None and not alike:
        raise _shared_elements(call.func, expanded)
    return NotImplemented


def _shared_elements(func: Any, target: torch.Tensor) -> UnsupportedMutationError:
    size, stride = tuple(target.size()), tuple(target.stride())
    return SHARED_ELEMENTS.error(op=func, size=size, strides=stride)


def _order_matters(call: WritingCall, target: torch.Tensor) -> bool:
    """Whether it matters that eager writes an element once for each position that shares it."""
    layout = Layout.of(target)
    if layout.contiguous or not layout.overlaps_beyond_expand:
        return False
    if call.func is aten.copy_.default:  # the last position has the last word: the scatter's too, if the order is clear
        return _ambiguous(layout)
    return call.func.overloadpacket not in traits.IDEMPOTENT or len(call.tensors) != 1


def _ambiguous(layout: Layout) -> bool:
    strides = [
        size_hint(stride) for size, stride in zip(layout.size, layout.stride, strict=True) if size_hint(size) > 1
    ]
    return len(set(strides)) < len(strides)


def _by_slices(call: WritingCall) -> torch.Tensor:
    """Run an op on a target whose positions share elements, slice by slice; returns the target."""
    func, row, target = call.func, call.row, call.row.written[0].given(call.args, call.kwargs)
    variant = tables.overload(row.functional) if row.functional else func
    elementwise = torch.Tag.pointwise in variant.tags or func is aten.copy_.default
    if not elementwise or len(row.written) > 1:
        raise _shared_elements(func, target)
    others = [leaf for leaf in call.tensors if leaf is not target and not differ(leaf.size(), target.size())]
    dim = _outermost(target, others)
    if unbacked([target.size(dim)]):
        raise _shared_elements(func, target)
    with call.context.enter():  # the slices are views of the program like any other
        for index in range(int(target.size(dim))):
            sliced = [_slice(arg, target, dim, index) for arg in call.args]
            func(*sliced, **{name: _slice(arg, target, dim, index) for name, arg in call.kwargs.items()})
    return target  # type: ignore[no-any-return]


def _outermost(target: torch.Tensor, others: Sequence[torch.Tensor]) -> int:
    """The outermost dimension of eager's loop over the elements, in TensorIterator's order."""
    dims = [dim for dim in range(target.dim()) if size_hint(target.size(dim)) > 1]

    def order(first: int, second: int) -> int:
        for operand in (target, *others):
            a, b = size_hint(operand.stride(first)), size_hint(operand.stride(second))
            if a and b and a != b:
                return b - a
            if a and b and size_hint(target.size(first)) != size_hint(target.size(second)):
                return size_hint(target.size(second)) - size_hint(target.size(first))
        return first - second

    return min(dims, key=functools.cmp_to_key(order))


def _slice(arg: Any, target: torch.Tensor, dim: int, index: int) -> Any:
    """The slice of an argument that belongs to one slice of the target."""
    if not isinstance(arg, torch.Tensor):
        return arg
    whole = arg if arg is target else aten.expand.default(arg, list(target.size()))
    return aten.select.int(whole, dim, index)


# Special writes: the value does not depend on the old value, or depends on more than one position


def _copy(call: WritingCall) -> bool:
    context, (target, source) = call.context, call.args[:2]
    if not (is_plain_strided(target) and is_plain_strided(source)):
        return _copy_sparse(call)
    if unbacked((*target.size(), *source.size())) and not same(source.size(), target.size()):
        return False  # the functional variant knows how to broadcast to data-dependent sizes
    execute, value = context.executor.call, context.value(source)
    other = differ(source.size(), target.size())
    if other:
        call.on_twins()
    elif context.graph.find(target) is not None and context.graph.find(source) is context.graph.find(target):
        return True
    options = {o: getattr(target, o) for o in ("dtype", "device") if getattr(target, o) != getattr(source, o)}
    converted = execute(aten._to_copy.default, value, **options) if options else value
    if other:
        converted = execute(aten.expand.default, converted, list(target.size()))
    context.write(target, converted, aliased=not options)
    return True


def _copy_each(call: WritingCall) -> bool:
    """By one copy for each entry, which reads nothing of what it writes."""
    targets, sources = call.args[:2]
    if len(targets) != len(sources):
        return False
    for target, source in zip(targets, sources, strict=True):
        mutate(WritingCall(call.context, aten.copy_.default, tables.row(aten.copy_.default), [target, source], {}))
    return True


def _copy_sparse(call: WritingCall) -> bool:
    context, (target, source) = call.context, call.args[:2]
    kinds = [(tensor.layout, tensor.dtype, tensor.device, tensor.size()) for tensor in (target, source)]
    if kinds[0] != kinds[1] or not (target.is_sparse or counts_elements(target)):
        return False
    context.write(target, context.executor.call(aten.clone.default, context.value(source)))
    return True


def _fill(call: WritingCall) -> bool:
    target, number = call.args[0], call.args[1] if len(call.args) > 1 else 0
    if not is_plain_strided(target):
        return False
    options = {"dtype": target.dtype, "layout": target.layout, "device": target.device, "pin_memory": False}
    value = call.context.executor.call(aten.full.default, list(target.size()), number, **options)
    call.context.write(target, value)
    return True


def _masked_fill(call: WritingCall) -> bool:
    """Eager fills an element of an expanded tensor where the mask holds at any of its positions."""
    context, (target, mask, number) = call.context, call.args
    if not repeats(target):
        return False
    shared = [dim for dim, stride in enumerate(target.stride()) if type(stride) is int and stride == 0]
    with context.enter():
        mask = mask.expand(target.size()).any(shared, keepdim=True)
    op = aten.masked_fill.Tensor if isinstance(number, torch.Tensor) else aten.masked_fill.Scalar
    context.write(target, context.compute(op, (target, mask, number), call.kwargs))
    return True


def _index_put(call: WritingCall) -> bool:
    """With one number for all positions: fill by a mask of these, as above."""
    context, (target, indices), values = call.context, call.args[:2], call.argument("values")
    masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    if values.dtype != target.dtype and not (masks and call.puts_one_number):  # fake kernels do not check that
        names = f"{DTYPE_NAMES[target.dtype]} for the destination and {DTYPE_NAMES[values.dtype]} for the source"
        raise RuntimeError(f"Index put requires the source and destination dtypes match, got {names}.")
    if not repeats(target) or not call.puts_one_number:
        return False
    with context.enter():
        mask = torch.zeros(target.size(), dtype=torch.bool, device=target.device)
        mask = aten.index_put.default(mask, indices, torch.ones((), dtype=torch.bool, device=target.device))
        number = call.argument("values").reshape(())
    return _masked_fill(dataclasses.replace(call, args=[target, mask, number], kwargs={}))


_SPECIAL: dict[Any, Callable[[WritingCall], bool]] = {
    aten._foreach_copy_.default: _copy_each,
    aten.copy_.default: _copy,
    aten.fill_.Scalar: _fill,
    aten.index_put_.default: _index_put,
    aten.masked_fill_.Scalar: _masked_fill,
    aten.masked_fill_.Tensor: _masked_fill,
    aten.zero_.default: _fill,
}
