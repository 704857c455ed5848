"""What is left to do when the function returns: bring escaped handles up to date, write back to the inputs.

Invariant: the write-backs come last, in input order, one for each input that changed and none for the others.
Limits: runs only where a mode below observes us; otherwise the handles' memory is the result already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize._torch import storage_key
from functionalize.alias_graph import View
from functionalize.program import Program
from functionalize.regions import Geometry, hint
from functionalize.view_rules import Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Input:
    """An input tensor, and where it lay when the call began."""

    handle: torch.Tensor
    place: Geometry
    storage: int
    capacity: int  # elements that its storage can hold, for the sizes of this trace

    @classmethod
    def of(cls, handle: torch.Tensor) -> Input:
        key, place = storage_key(handle), Geometry.of(handle)
        capacity = hint(handle.untyped_storage().nbytes()) // max(handle.dtype.itemsize, 1) if key > 0 else 0
        return cls(handle, place, key, capacity)


@dataclass(frozen=True)
class WriteBack:
    """An input that changed, its new value, and whether data was written or only the metadata changed."""

    input: Input
    value: Value
    written: bool


def plan(program: Program, inputs: Sequence[Input]) -> list[WriteBack]:
    """The write-backs, in input order. Each value is computed here, before the first write-back runs."""
    changed: list[tuple[Input, View]] = []
    for entry in inputs:
        view = program.graph.find(entry.handle)
        if view is not None and (not view.base.untouched(view, since=0) or moved(entry)):
            changed.append((entry, view))
    written = {entry.storage for entry, _ in changed}
    values = [program.read(view) for _, view in changed]
    return [
        WriteBack(entry, _own(program, value, written), written=not view.base.untouched(view, since=0))
        for (entry, view), value in zip(changed, values, strict=True)
    ]


def _own(program: Program, value: Value, written: set[int]) -> Value:
    """A value that is the memory of an input which is about to be written must be saved before."""
    if storage_key(value) in written:
        return program.domain.call(aten.clone.default, value)
    return value


def moved(entry: Input) -> bool:
    """Whether the function changed an input's metadata."""
    return Geometry.of(entry.handle).key != entry.place.key or storage_key(entry.handle) != entry.storage


def emit(program: Program, backs: Sequence[WriteBack], inputs: Sequence[Input]) -> None:
    """Run the write-backs in the modes below, which record them."""
    for back in backs:
        handle = back.input.handle
        if moved(back.input):
            node = program.domain.alias(handle)  # stands for the input; each write-back below is one to it
            for op, args in _metadata(back.input, inputs):
                op(handle, *args)
                program.domain.point(handle, node)
        if back.written:
            aten.copy_.default(handle, back.value)
        program.domain.point(handle, back.value)


def _metadata(entry: Input, inputs: Sequence[Input]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The ops that give an input its new metadata."""
    handle = entry.handle
    size, stride, place = list(handle.size()), list(handle.stride()), Geometry.of(handle)
    if storage_key(handle) != entry.storage:  # `set_` or `.data =`
        source = next((other for other in inputs if other.storage == storage_key(handle)), None)
        yield (aten.resize_.default, (size,)) if source is None else (aten.set_.source_Tensor, (source.handle,))
    elif place.reach[2] > entry.capacity:
        yield aten.resize_.default, (size,)
    yield aten.as_strided_.default, (size, stride, handle.storage_offset())


def surface(program: Program, outputs: Sequence[torch.Tensor], inputs: Sequence[Input]) -> None:
    """Let every handle that lives on stand for its current value: outputs first, then what others hold."""
    program.release()
    own = {id(entry.handle) for entry in inputs}
    for handle in outputs:
        view = program.graph.find(handle)
        if view is not None and id(handle) not in own:
            _surface(program, handle, view, inputs)
    done = own | {id(handle) for handle in outputs}
    for base in list(program.graph.bases.values()):
        for ref, view in list(base.handles.values()):
            other = ref()
            if other is not None and id(other) not in done and view.value is not other:
                _surface(program, other, view, inputs)


def _surface(program: Program, handle: torch.Tensor, view: View, inputs: Sequence[Input]) -> None:
    value, call = program.read(view), program.domain.call
    if view.borrowed:  # the same node stands for another tensor, which the caller may write to
        value = call(aten.clone.default, value)
        view.settle(value, view.stamp)
    elif any(moved(entry) and program.domain.same_node(entry.handle, value) for entry in inputs):
        # The input's node is about to take on other metadata.
        value = call(aten.clone.default if program.domain.remove_views else aten.alias.default, value)
    program.domain.point(handle, value)
