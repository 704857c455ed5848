"""Run an op that writes without writing: its functional variant, then a commit of each written argument.

Invariant: a write is admitted exactly where eager admits it, and raises eager's own error elsewhere.
Limits: an op whose row names no functional variant is the matter of :mod:`functionalize.transform.handlers.custom_ops`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch

from functionalize._torch import (
    FakeTensor,
    pytree,
    sized_by_data,
    storage_key,
    unbacked,
)
from functionalize.aliasing.geometry import Geometry, differ, hinted_span, same, spans_disjoint
from functionalize.aliasing.tensor_queries import counts_elements, is_fake, placed, repeats, same_strides, tensor_leaves
from functionalize.aliasing.view_rules import Value
from functionalize.errors import UnsupportedMutationError
from functionalize.ops import tables
from functionalize.ops.tables import OpRow, Written
from functionalize.transform.context import Program
from functionalize.transform.handlers import custom_ops
from functionalize.transform.handlers import overlapping_writes as shared_elements
from functionalize.transform.handlers import random_ops as random_order

aten = torch.ops.aten
Kwargs = dict[str, Any]
_Entry = tuple[int, torch.Tensor, bool]  # of a list: its index, the tensor, whether it is written


def mutate(program: Program, func: Any, row: OpRow, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """What ``func(*args, **kwargs)`` returns; its writes are committed to the alias graph."""
    written = [w for w in row.written if _writes(func, w, args, kwargs)]
    if not written:
        return _quietly(program, func, row, args, kwargs)
    if row.functional is None or (row.random and not program.domain.observed):
        return custom_ops.run(program, func, row, args, kwargs)
    meet = any(w.is_list for w in written) and _entries_meet(written, func, args, kwargs)
    if not program.domain.observed and (meet or not all(map(placed, tensor_leaves(args, kwargs)))):
        return custom_ops.on_memory(program, func, args, kwargs)
    done = shared_elements.run(program, func, row, written, args, kwargs)
    if done is not NotImplemented:
        return done
    short = _OF_THEIR_OWN.get(func)
    if short is not None and short(program, func, args, kwargs):
        return args[0]
    if meet:
        return _entry_by_entry(program, func, row, args, kwargs)
    hidden = any(w.when for w in written) or row.quiet is None
    variant = tables.overload(row.functional if hidden else row.quiet or row.functional)
    handles = _variant_arguments(program, func, row, variant, args, kwargs)
    results = _computed(program, func, row, args, kwargs, variant, handles)
    if results is None:
        # Eager's kernel raises as well, once it has written what comes before.
        return custom_ops.on_memory(program, func, args, kwargs)
    if len(variant._schema.returns) == 1:
        results = (results,)
    fresh = results
    if any(i >= 0 for i in row.returns) and program.values(*handles)[2]:
        fresh = program.rehandle(variant, *handles, results)
    Admission(program, func, args, kwargs).settle_all(written, results, (variant, *handles))
    returns = [fresh[i] if i >= 0 else row.written[-i - 1].given(args, kwargs) for i in row.returns]
    return None if not returns else returns[0] if len(returns) == 1 else tuple(returns)


def _computed(
    program: Program,
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
        ordered = random_order.compute(program, variant, *handles, writes=True) if row.random else None
        return program.compute(variant, *handles) if ordered is None else ordered
    except Exception as error:
        if not program.domain.observed:
            return None
        sized = any(isinstance(leaf, FakeTensor) and sized_by_data(leaf) for leaf in tensor_leaves(args, kwargs))
        if not (sized and isinstance(error, RuntimeError)):
            raise
        written = [w.given(args, kwargs) for w in row.written if _writes(func, w, args, kwargs)]
        program.domain.rehearse(func, args, kwargs, written)
        raise UnsupportedMutationError(
            f"{func} on tensors whose sizes only the data tell",
            why=f"{variant}, which computes what it writes, cannot be traced with such sizes",
            hint="spell it out by other operators, or check the sizes first (torch._check)",
        ) from error


def _entries_meet(written: Sequence[Written], func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    """Whether an entry that a foreach op writes lies where it reads or writes another entry.

    What one entry reads may lie where that entry writes, as `x` in `_foreach_mul_([x], [x])`: it is read before.
    """
    targets = [w.given(args, kwargs) for w in written]
    of_all = 0 if len(targets[0]) == 1 else -1  # the index of a tensor that each entry reads
    by_storage: dict[int, list[_Entry]] = {}
    for arg in (*args, *kwargs.values()):
        writes = any(arg is target for target in targets)
        for index, leaf in enumerate(arg) if isinstance(arg, (list, tuple)) else [(of_all, arg)]:
            if isinstance(leaf, torch.Tensor):
                by_storage.setdefault(storage_key(leaf), []).append((index, leaf, writes))
    return any(
        _meet(one, other) for entries in by_storage.values() for one, other in itertools.combinations(entries, 2)
    )


def _meet(one: _Entry, other: _Entry) -> bool:
    (index, tensor, writes), (other_index, other_tensor, other_writes) = one, other
    if index == other_index and not (writes and other_writes):
        return False
    return (writes or other_writes) and not spans_disjoint(Geometry.of(tensor), Geometry.of(other_tensor))


def _entry_by_entry(program: Program, func: Any, row: OpRow, args: Sequence[Any], kwargs: Kwargs) -> None:
    """Eager's kernels go through the entries in order, so that one sees what another before it wrote."""
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
        mutate(program, func, row, [entry(arg, index) for arg in args], named)


def _named(func: Any, name: str, args: Sequence[Any], kwargs: Kwargs) -> Any:
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
    return written.when is None or bool(_named(func, written.when, args, kwargs))


def _quietly(program: Program, func: Any, row: OpRow, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """A call that writes nothing (evaluation-mode batch norm): the op that says so in its schema, if there is one."""
    quiet = tables.overload(row.quiet) if row.quiet else func
    results, skewed = program.computed(quiet, args, kwargs)
    return program.rehandle(quiet, args, kwargs, results) if skewed else results


def _variant_arguments(
    program: Program, func: Any, row: OpRow, variant: Any, args: Sequence[Any], kwargs: Kwargs
) -> tuple[list[Any], Kwargs]:
    """The functional variant's arguments, in handles."""
    outputs = {w.name for w in row.written} if row.kind is tables.Kind.OUT else set()
    call_kwargs: Kwargs = {name: arg for name, arg in kwargs.items() if name not in outputs}
    call_args = list(args)
    if row.functional_args is not None:
        by_name = {name: _named(func, name, args, kwargs) for name in row.functional_args}
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
        if program.domain.dtype_of(variant, call_args, call_kwargs) != first.dtype:
            call_kwargs = with_dtype
    return call_args, call_kwargs


def _names_no_dtype(variant: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    """Whether an op takes a dtype for its result, and this call leaves it out."""
    _, kwarg_only, _ = _declared(variant).get("dtype", (0, False, None))
    return kwarg_only and kwargs.get("dtype") is None


class Admission:
    """Settles the results of one op on the arguments that it writes, as eager would, or raises what eager raises."""

    def __init__(self, program: Program, func: Any, args: Sequence[Any], kwargs: Kwargs) -> None:
        self.program, self.func, self.args, self.kwargs = program, func, args, kwargs
        self._is_out = tables.row(func).kind is tables.Kind.OUT
        self._targets: list[Any] = []
        self._origin: tuple[tuple[Any, Any, Any], Any] | None = None
        self._twins: dict[int, torch.Tensor] | None = None

    def settle_all(
        self, written: Sequence[Written], results: Sequence[Any], variant: tuple[Any, Any, Any] | None = None
    ) -> None:
        """Commit each result to its argument; all are admitted before the first is committed.

        ``variant`` is the call, on handles, whose results these are.
        """
        self._origin = None if variant is None else (variant, results)
        self._targets = [w.given(self.args, self.kwargs) for w in written]
        pairs = [
            (handle, value)
            for w, target in zip(written, self._targets, strict=True)
            for handle, value in _pairs(w, target, w.value_among(results))
        ]
        values = [self._admitted(handle, value) for handle, value in pairs]
        for (handle, _), value in zip(pairs, values, strict=True):
            self.program.write(handle, value)

    def _admitted(self, handle: torch.Tensor, value: Value) -> Value:
        if differ(value.size(), handle.size()) or value.dtype != handle.dtype:
            twin = self._twin(handle, value)
            if self._is_out and differ(twin.size(), value.size()):
                twin = value  # fake tensors that run the kernel for real do not see that it resized its `out=`
            if differ(twin.size(), handle.size()):
                # A fake twin is resized to contiguous strides, a real one to those of the result.
                by_value = is_fake(twin) and not differ(value.size(), twin.size())
                resize(self.program, handle, self._as_in_eager(value) if by_value else twin)
                self._refuse_overlap(handle)
            if value.dtype != handle.dtype:
                value = self.program.domain.call(aten._to_copy.default, value, dtype=handle.dtype)
        if value.device != handle.device:
            value = self.program.domain.call(aten._to_copy.default, value, device=handle.device)
        return value

    def _as_in_eager(self, value: Value) -> Value:
        """A result with the strides that eager gives it, which its value may not have."""
        if self._origin is None or not self.program.values(*self._origin[0][1:])[2]:
            return value
        (func, args, kwargs), results = self._origin
        likes = pytree.tree_leaves(self.program.domain.expected(func, args, kwargs, results))
        found = (like for like, leaf in zip(likes, pytree.tree_leaves(results), strict=True) if leaf is value)
        return next(found)

    def _twin(self, handle: torch.Tensor, value: Value) -> torch.Tensor:
        """What becomes of a written handle's metadata, tried on a twin."""
        if torch.Tag.dynamic_output_shape in self.func.tags:
            return cast("torch.Tensor", value)
        if self._twins is None:
            twins = self._rehearsed()
            self._twins = {id(h): twin for h, twin in zip(tensor_leaves(self._targets, {}), twins, strict=True)}
        return self._twins[id(handle)]

    def _refuse_overlap(self, resized: torch.Tensor) -> None:
        """Eager does not notice that an `out=` which it resized lies where it reads, and gives what comes of it."""
        key, (start, stop) = storage_key(resized), hinted_span(Geometry.of(resized))
        for other in tensor_leaves(self.args, self.kwargs):
            if other is resized or storage_key(other) != key:
                continue
            first, end = hinted_span(Geometry.of(other))
            if start < end and first < stop:
                raise UnsupportedMutationError(
                    f"{self.func} resizes its out= to {tuple(resized.size())}, into memory that it reads or writes",
                    why="what eager gives then depends on the order in which its kernel goes through the elements",
                    hint="pass an out= of the right size, or a tensor that shares no memory with the arguments",
                )

    def _rehearsed(self) -> list[torch.Tensor]:
        domain = self.program.domain
        try:
            return domain.rehearse(self.func, self.args, self.kwargs, self._targets)
        except Exception:
            if not domain.observed:  # what eager does to its arguments before it raises: `out=` may have another size
                domain.on_handles(self.func, self.args, self.kwargs)
            raise


def _pairs(written: Written, target: Any, result: Any) -> Iterator[tuple[torch.Tensor, Value]]:
    """Each tensor that an argument holds, with its new value."""
    for handle, value in zip(*((target, result) if written.is_list else ([target], [result])), strict=True):
        if handle is not None:
            yield handle, value


def resize(program: Program, handle: torch.Tensor, like: torch.Tensor) -> None:
    """Give an ``out=`` handle the geometry that eager gives it; all of its elements are about to be written."""
    if not placed(handle):
        raise UnsupportedMutationError(
            f"a resize of a tensor of layout {handle.layout}",
            why="in a graph only strided tensors can be given another size",
            hint="build a new tensor of that size",
        )
    if program.domain.observed:
        program.fix(handle)
        program.unshare(handle)
        program.grows(handle)
    program.domain.resize_handle(handle, like.size(), {})
    if not same_strides(handle, like):
        place = (list(like.size()), list(like.stride()))
        program.domain.on_handles(aten.as_strided_.default, (handle, *place), {})
    if program.domain.observed:
        program.domain.know_symbols(handle)
        program.graph.moved(handle)


# Writes with a way of their own: the value does not depend on what was there, or on one position alone


def _copy(program: Program, func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    target, source = args[0], args[1]
    if not (placed(target) and placed(source)):
        return _copy_sparse(program, target, source)
    if unbacked((*target.size(), *source.size())) and not same(source.size(), target.size()):
        return False  # the functional variant knows how to broadcast to sizes that only the data tell
    call, value = program.domain.call, program.value(source)
    other = differ(source.size(), target.size())
    if other:
        program.domain.rehearse(func, args, kwargs, [target])
    elif program.graph.find(target) is not None and program.graph.find(source) is program.graph.find(target):
        return True
    options = {o: getattr(target, o) for o in ("dtype", "device") if getattr(target, o) != getattr(source, o)}
    converted = call(aten._to_copy.default, value, **options) if options else value
    if other:
        converted = call(aten.expand.default, converted, list(target.size()))
    program.write(target, converted, borrowed=not options)
    return True


def _copy_sparse(program: Program, target: torch.Tensor, source: torch.Tensor) -> bool:
    kinds = [(tensor.layout, tensor.dtype, tensor.device, tensor.size()) for tensor in (target, source)]
    if kinds[0] != kinds[1] or not (target.is_sparse or counts_elements(target)):
        return False
    program.write(target, program.domain.call(aten.clone.default, program.value(source)))
    return True


def _fill(program: Program, func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    target, number = args[0], args[1] if len(args) > 1 else 0
    if not placed(target):
        return False
    options = {"dtype": target.dtype, "layout": target.layout, "device": target.device, "pin_memory": False}
    program.write(target, program.domain.call(aten.full.default, list(target.size()), number, **options))
    return True


def _masked_fill(program: Program, func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    """Eager fills an element of an expanded tensor where the mask holds at any of its positions."""
    target, mask, number = args
    if not repeats(target):
        return False
    shared = [dim for dim, stride in enumerate(target.stride()) if type(stride) is int and stride == 0]
    with program.enter():
        mask = mask.expand(target.size()).any(shared, keepdim=True)
    op = aten.masked_fill.Tensor if isinstance(number, torch.Tensor) else aten.masked_fill.Scalar
    program.write(target, program.compute(op, (target, mask, number), kwargs))
    return True


_OF_THEIR_OWN: dict[Any, Callable[[Program, Any, Sequence[Any], Kwargs], bool]] = {
    aten.copy_.default: _copy,
    aten.fill_.Scalar: _fill,
    aten.masked_fill_.Scalar: _masked_fill,
    aten.masked_fill_.Tensor: _masked_fill,
    aten.zero_.default: _fill,
}
