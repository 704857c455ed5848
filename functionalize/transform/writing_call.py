"""One call of an op that writes: what it writes, and legal values for that.

Each result gets the shape, dtype and device of its target; an `out=` is resized.

Invariant: all results of an op are legal before the first is committed. Limits: only strided tensors are resized.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from functionalize._torch import counting_versions, counts_versions, decided, pytree, storage_key, unbacked
from functionalize.aliasing.geometry import Layout, differ, hinted_span, stop
from functionalize.aliasing.overlap import spans_disjoint
from functionalize.aliasing.tensor_queries import is_fake, is_plain_strided, same_strides, tensor_leaves
from functionalize.aliasing.view_rules import Value
from functionalize.errors import UnsupportedMutationError
from functionalize.ops import traits
from functionalize.ops.calls import argument, declared
from functionalize.ops.tables import Kind, OpRow, Written
from functionalize.refusals.gradients import OUT_WITH_VIEWS_RESIZED
from functionalize.refusals.writes import NOT_STRIDED_RESIZED, OUT_BEYOND_SHARED_STORAGE, OUT_RESIZED_INTO_OPERANDS
from functionalize.transform import dry_run
from functionalize.transform.context import FunctionalizationContext

aten = torch.ops.aten
_CANNOT_GROW = "output with shape {} doesn't match the broadcast shape {}"  # eager's words
_CANNOT_CAST = "result type {} can't be cast to the desired output type {}"  # eager's words
DTYPE_NAMES = {  # in errors of eager
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
Kwargs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class VariantCall:
    """A call, on handles, of the functional variant of an op that writes."""

    op: Any
    args: list[Any]
    kwargs: Kwargs


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor among the arguments. ``index``: in its list, if the call writes lists; -1 if all entries read it."""

    name: str
    index: int
    tensor: torch.Tensor
    written: bool


@dataclass(eq=False)
class WritingCall:
    """A call, on handles, of an op that writes some of its arguments."""

    context: FunctionalizationContext
    func: Any
    row: OpRow
    args: Sequence[Any]
    kwargs: Kwargs

    def __post_init__(self) -> None:
        self.written: list[Written] = []  # which arguments this call writes
        self.targets: list[Any] = []  # these: tensors, and lists of tensors
        for written in self.row.written:
            target = written.given(self.args, self.kwargs)
            if target is not None and (written.when is None or self.argument(written.when)):
                self.written.append(written)
                self.targets.append(target)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments."""
        return list(tensor_leaves(self.args, self.kwargs))

    @cached_property
    def meetings(self) -> list[tuple[Operand, Operand]]:
        """Each written operand, with each other operand in the same storage that may overlap it."""
        leaves = [leaf for leaf in self.tensors if leaf.layout is torch.strided]
        if len(leaves) == 1 or len(set(map(storage_key, leaves))) == len(leaves):
            return []
        by_key: dict[int, list[Operand]] = {}
        for operand in self._operands():
            by_key.setdefault(storage_key(operand.tensor), []).append(operand)
        return [
            (first, second) if first.written else (second, first)
            for operands in by_key.values()
            for first, second in itertools.combinations(operands, 2)
            if (first.written or second.written)
            and not spans_disjoint(Layout.of(first.tensor), Layout.of(second.tensor))
        ]

    def _operands(self) -> Iterator[Operand]:
        written = {w.name for w in self.written}
        lists = self.written[0].is_list
        of_all = -1 if lists and len(self.targets[0]) > 1 else 0
        for name, arg in (*zip(declared(self.func), self.args, strict=False), *self.kwargs.items()):
            listed = isinstance(arg, (list, tuple))
            for index, leaf in enumerate(arg if listed else [arg]):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    yield Operand(name, index if listed and lists else of_all, leaf, name in written)

    @property
    def puts_one_number(self) -> bool:
        """Whether all elements that are written get the same number."""
        if self.func is not aten.index_put_.default or self.argument("accumulate"):
            return False
        numel = self.argument("values").numel()
        return type(numel) is int and numel == 1

    def argument(self, name: str) -> Any:
        """An argument by name, the schema's default if the call leaves it out."""
        return argument(self.func, name, self.args, self.kwargs)

    def returned(self, results: Sequence[Any]) -> Any:
        """The returns of the op: results of its functional variant, or arguments that it writes."""
        written = self.row.written
        returns = [results[i] if i >= 0 else written[-i - 1].given(self.args, self.kwargs) for i in self.row.returns]
        return None if not returns else returns[0] if len(returns) == 1 else tuple(returns)

    def on_memory(self) -> Any:
        """Run the op on the program's own tensors in direct use: eager's kernel, with its effects before it raises."""
        with contextlib.nullcontext() if counts_versions(self.func) else counting_versions():
            return self.context.executor.on_handles(self.func, self.args, self.kwargs)

    def on_twins(self) -> dict[int, torch.Tensor]:
        """Twins of the written handles, by identity, as eager's write leaves them. Raises what eager raises."""
        executor = self.context.executor
        try:
            return dry_run.on_twins(executor, self.func, self.args, self.kwargs, self.targets)
        except Exception:
            if not executor.observed:  # what eager does to its arguments before it raises: `out=` may have another size
                executor.on_handles(self.func, self.args, self.kwargs)
            raise

    _twins = cached_property(on_twins)

    @cached_property
    def _resizes_by_data(self) -> bool:
        """Whether an `out=` has a data-dependent size: kernels that would resize it read numbers."""
        sizes = [size for target in tensor_leaves(self.targets, {}) for size in target.size()]
        return self.row.kind is Kind.OUT and unbacked(sizes)

    def commit(self, results: Sequence[Any], variant: VariantCall) -> None:
        """Commit to each written argument its value among the results of ``variant``, or raise what eager raises."""
        pairs: list[tuple[torch.Tensor | None, Value]] = []
        for w, target in zip(self.written, self.targets, strict=True):
            value = w.value_among(results)
            pairs += zip(target, value, strict=True) if w.is_list else [(target, value)]
        writes = [(handle, value) for handle, value in pairs if handle is not None]
        if self.row.kind is Kind.OUT:
            for handle, value in writes:
                self._refuse_reading(handle, value)
        legal = [(handle, self._legalized(handle, value, results, variant)) for handle, value in writes]
        for handle, value in legal:
            self.context.write(handle, value)

    def _legalized(self, handle: torch.Tensor, value: Value, results: Sequence[Any], variant: VariantCall) -> Value:
        if differ(value.size(), handle.size()) or value.dtype != handle.dtype:
            if self.row.kind is Kind.INPLACE and is_fake(handle) and differ(value.size(), handle.size()):
                value = self._of_size(handle, value)
            cannot = torch.Tag.dynamic_output_shape in self.func.tags
            cannot |= self._resizes_by_data and value.dtype == handle.dtype
            twin = value if cannot else self._twins[id(handle)]
            if self.row.kind is Kind.OUT and differ(twin.size(), value.size()):
                twin = value  # fake tensors that run the kernel for real do not see that it resized its `out=`
            if differ(twin.size(), handle.size()):
                # A fake twin is resized to contiguous strides, a real one to those of the result.
                copied = self.func in traits.COPIES_TO_OUT and self.args[0].is_complex()
                by_value = is_fake(twin) and not (copied or differ(value.size(), twin.size()))
                self._resize(handle, self._as_in_eager(value, results, variant) if by_value else twin)
                self._refuse_overlap(handle)
            if value.dtype != handle.dtype:
                if self.row.kind is Kind.INPLACE and not torch.can_cast(value.dtype, handle.dtype):
                    raise RuntimeError(_CANNOT_CAST.format(DTYPE_NAMES[value.dtype], DTYPE_NAMES[handle.dtype]))
                if self.row.kind is Kind.OUT and is_fake(twin) and not cannot:
                    dry_run.refuse_dtype(self.context.executor, self.func, self.args, self.kwargs, handle, value.dtype)
                if not (value.is_floating_point() or value.is_complex()):
                    self.context.notes.note_hidden_change(handle)
                value = self.context.executor.call(aten._to_copy.default, value, dtype=handle.dtype)
        if value.device != handle.device:
            value = self.context.executor.call(aten._to_copy.default, value, device=handle.device)
        return value

    def _of_size(self, handle: torch.Tensor, value: Value) -> Value:
        """A value that is written in place to a handle, with the handle's size; asks if that is data-dependent."""
        if tuple(value.size()) != tuple(handle.size()):
            raise RuntimeError(_CANNOT_GROW.format(list(handle.size()), list(value.size())))
        return self.context.executor.call(aten.view.default, value, list(handle.size()))

    def _as_in_eager(self, value: Value, results: Sequence[Any], variant: VariantCall) -> Value:
        """A result with the strides that eager gives it, which its value may not have."""
        if not self.context.values_of(variant.args, variant.kwargs).strides_differ:
            return value
        executor = self.context.executor
        made = dry_run.with_eager_strides(executor, variant.op, variant.args, variant.kwargs, results)
        likes = pytree.tree_leaves(made)
        return next(like for like, leaf in zip(likes, pytree.tree_leaves(results), strict=True) if leaf is value)

    def _resize(self, handle: torch.Tensor, like: torch.Tensor) -> None:
        """Give an ``out=`` handle the layout that eager gives it; all of its elements are about to be written."""
        if not is_plain_strided(handle):
            raise NOT_STRIDED_RESIZED.error(layout=handle.layout)
        context, executor = self.context, self.context.executor
        if executor.observed:
            _refuse_lost_views(context, handle)
            context.refuse_constant(handle)
            context.unshare(handle)
            context.prepare_resize(handle)
        executor.resize_handle(handle, like.size(), {})
        if not same_strides(handle, like):
            executor.on_handles(aten.as_strided_.default, (handle, list(like.size()), list(like.stride())), {})
        if executor.observed:
            executor.track_sizes(handle)
            context.graph.relocate(handle)
            self._refuse_growth(handle)

    def _refuse_growth(self, resized: torch.Tensor) -> None:
        """Raise if the storage of other tensors grows by a data-dependent number of elements.

        If the trace does not answer, the operators of the graph check their bounds.
        """
        view = self.context.graph.ensure(resized)
        top = view.base.top.layout
        if not unbacked(view.layout.size) or unbacked(top.size) or len(view.base.handles) == 1:
            return
        needed, held = stop(view.layout) * view.layout.dtype.itemsize, hinted_span(top)[1]
        if decided(needed <= held) is False:
            raise OUT_BEYOND_SHARED_STORAGE.error(op=self.func, held=held)

    def _refuse_reading(self, handle: torch.Tensor, value: Value) -> None:
        """Raise if an `out=` that is to be resized is an argument, too."""
        if not differ(value.size(), handle.size()) or sum(tensor is handle for tensor in self.tensors) == 1:
            return
        if torch.Tag.pointwise in self.func.tags:
            raise RuntimeError(_CANNOT_GROW.format(list(handle.size()), list(value.size())))
        raise self._overlapping(value.size())

    def _refuse_overlap(self, resized: torch.Tensor) -> None:
        """Raise if a resized `out=` overlaps another argument: eager does not notice."""
        key, (start, stop) = storage_key(resized), hinted_span(Layout.of(resized))
        for other in self.tensors:
            if other is resized or storage_key(other) != key:
                continue
            first, end = hinted_span(Layout.of(other))
            if start < end and first < stop:
                raise self._overlapping(resized.size())

    def _overlapping(self, size: Sequence[Any]) -> UnsupportedMutationError:
        return OUT_RESIZED_INTO_OPERANDS.error(op=self.func, size=tuple(size))


def _refuse_lost_views(context: FunctionalizationContext, handle: torch.Tensor) -> None:
    """Raise if a fake tensor that has views, and a gradient, is about to get another size."""
    if is_fake(handle) and handle.requires_grad and context.views_beside(handle):
        raise OUT_WITH_VIEWS_RESIZED.error()
