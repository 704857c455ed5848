"""Legal writes: each result gets the shape, dtype and device of what it is written to; an `out=` is resized.

Invariant: all results of an op are legal before the first is committed. Limits: only strided tensors are resized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from functionalize._torch import pytree, storage_key
from functionalize.aliasing.geometry import Layout, differ, hinted_span
from functionalize.aliasing.tensor_queries import is_fake, is_plain_strided, same_strides, tensor_leaves
from functionalize.aliasing.view_rules import Value
from functionalize.errors import UnsupportedMutationError
from functionalize.ops import tables
from functionalize.ops.tables import Written
from functionalize.transform import dry_run
from functionalize.transform.context import FunctionalizationContext

aten = torch.ops.aten
Kwargs = dict[str, Any]


class WriteLegalizer:
    """Turns the results of one op into legal values of the arguments that it writes, or raises what eager raises."""

    def __init__(self, context: FunctionalizationContext, func: Any, args: Sequence[Any], kwargs: Kwargs) -> None:
        self.context, self.func, self.args, self.kwargs = context, func, args, kwargs
        self._is_out = tables.row(func).kind is tables.Kind.OUT
        self._targets: list[Any] = []
        self._call: tuple[tuple[Any, Any, Any], Any] | None = None
        self._twins: dict[int, torch.Tensor] | None = None

    def commit_all(
        self, written: Sequence[Written], results: Sequence[Any], variant: tuple[Any, Any, Any] | None = None
    ) -> None:
        """Commit each result to its argument; all are legal before the first is committed.

        ``variant`` is the call, on handles, whose results these are.
        """
        self._call = None if variant is None else (variant, results)
        self._targets = [w.given(self.args, self.kwargs) for w in written]
        pairs = [
            (handle, value)
            for w, target in zip(written, self._targets, strict=True)
            for handle, value in _pairs(w, target, w.value_among(results))
        ]
        values = [self._legalized(handle, value) for handle, value in pairs]
        for (handle, _), value in zip(pairs, values, strict=True):
            self.context.write(handle, value)

    def _legalized(self, handle: torch.Tensor, value: Value) -> Value:
        if differ(value.size(), handle.size()) or value.dtype != handle.dtype:
            twin = self._twin(handle, value)
            if self._is_out and differ(twin.size(), value.size()):
                twin = value  # fake tensors that run the kernel for real do not see that it resized its `out=`
            if differ(twin.size(), handle.size()):
                # A fake twin is resized to contiguous strides, a real one to those of the result.
                by_value = is_fake(twin) and not differ(value.size(), twin.size())
                resize(self.context, handle, self._as_in_eager(value) if by_value else twin)
                self._refuse_overlap(handle)
            if value.dtype != handle.dtype:
                value = self.context.executor.call(aten._to_copy.default, value, dtype=handle.dtype)
        if value.device != handle.device:
            value = self.context.executor.call(aten._to_copy.default, value, device=handle.device)
        return value

    def _as_in_eager(self, value: Value) -> Value:
        """A result with the strides that eager gives it, which its value may not have."""
        if self._call is None or not self.context.values_of(*self._call[0][1:])[2]:
            return value
        (func, args, kwargs), results = self._call
        likes = pytree.tree_leaves(dry_run.with_eager_strides(self.context.executor, func, args, kwargs, results))
        found = (like for like, leaf in zip(likes, pytree.tree_leaves(results), strict=True) if leaf is value)
        return next(found)

    def _twin(self, handle: torch.Tensor, value: Value) -> torch.Tensor:
        """A twin of a written handle, with the metadata that eager's write leaves."""
        if torch.Tag.dynamic_output_shape in self.func.tags:
            return cast("torch.Tensor", value)
        if self._twins is None:
            twins = self._dry_run()
            self._twins = {id(h): twin for h, twin in zip(tensor_leaves(self._targets, {}), twins, strict=True)}
        return self._twins[id(handle)]

    def _refuse_overlap(self, resized: torch.Tensor) -> None:
        """Raise where an `out=` that was resized overlaps another argument: eager does not notice."""
        key, (start, stop) = storage_key(resized), hinted_span(Layout.of(resized))
        for other in tensor_leaves(self.args, self.kwargs):
            if other is resized or storage_key(other) != key:
                continue
            first, end = hinted_span(Layout.of(other))
            if start < end and first < stop:
                raise UnsupportedMutationError(
                    f"{self.func} resizes its out= to {tuple(resized.size())}, into memory that it reads or writes",
                    why="what eager gives then depends on the order in which its kernel goes through the elements",
                    hint="pass an out= of the right size, or a tensor that shares no memory with the arguments",
                )

    def _dry_run(self) -> list[torch.Tensor]:
        executor = self.context.executor
        try:
            return dry_run.on_twins(executor, self.func, self.args, self.kwargs, self._targets)
        except Exception:
            if not executor.observed:  # what eager does to its arguments before it raises: `out=` may have another size
                executor.on_handles(self.func, self.args, self.kwargs)
            raise


def _pairs(written: Written, target: Any, result: Any) -> Iterator[tuple[torch.Tensor, Value]]:
    """The tensors of a written argument, each with its new value."""
    for handle, value in zip(*((target, result) if written.is_list else ([target], [result])), strict=True):
        if handle is not None:
            yield handle, value


def resize(context: FunctionalizationContext, handle: torch.Tensor, like: torch.Tensor) -> None:
    """Give an ``out=`` handle the layout that eager gives it; all of its elements are about to be written."""
    if not is_plain_strided(handle):
        raise UnsupportedMutationError(
            f"a resize of a tensor of layout {handle.layout}",
            why="in a graph only strided tensors can be given another size",
            hint="build a new tensor of that size",
        )
    if context.executor.observed:
        context.refuse_constant(handle)
        context.unshare(handle)
        context.prepare_resize(handle)
    context.executor.resize_handle(handle, like.size(), {})
    if not same_strides(handle, like):
        layout = (list(like.size()), list(like.stride()))
        context.executor.on_handles(aten.as_strided_.default, (handle, *layout), {})
    if context.executor.observed:
        context.executor.track_sizes(handle)
        context.graph.relocate(handle)
