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
from functionalize.domains.tensors import counts_elements, repeats
from functionalize.program import Program
from functionalize.regions import Geometry, fits, plain
from functionalize.view_rules import Value

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Input:
    """An input tensor, and where it lay when the call began."""

    handle: torch.Tensor
    place: Geometry
    storage: int
    capacity: Any  # bytes that its storage holds

    @classmethod
    def of(cls, handle: torch.Tensor) -> Input:
        key, place = storage_key(handle), Geometry.of(handle)
        return cls(handle, place, key, plain(handle.untyped_storage().nbytes()) if key > 0 else 0)


@dataclass(frozen=True, eq=False)
class WriteBack:
    """An input that changed: what to copy to it, and what it stands for from then on, each if there is need."""

    input: Input
    data: Value | None
    shown: Value | None


class Epilogue:
    """Ends one call: reads what escapes, then writes back."""

    def __init__(self, program: Program, inputs: Sequence[Input], outputs: Sequence[torch.Tensor]) -> None:
        self.program, self.inputs, self.outputs = program, inputs, outputs
        self._returned = {id(handle) for handle in outputs}
        self._moved = [entry for entry in inputs if moved(entry)]

    def run(self) -> None:
        """Every value is computed before the first write-back runs."""
        own = {id(entry.handle) for entry in self.inputs}
        for handle in self.outputs:
            view = self.program.graph.find(handle)
            if view is not None and id(handle) not in own:
                self.program.domain.point(handle, self._presentable(handle, view))
        backs = self._plan()
        self.program.release()
        self._surface_others(own | self._returned)
        for back in backs:
            self._emit(back)

    def _presentable(self, handle: torch.Tensor, view: View) -> Value:
        """A handle's value as a node that is the handle's alone."""
        program = self.program
        value, call = program.read(view), program.domain.call
        if view.borrowed or (repeats(value) and not repeats(handle)):
            # Another tensor, or another position, has the same memory, and the caller may write to it.
            value = call(aten.clone.default, value)
            view.settle(value, view.stamp)
        elif any(program.domain.same_node(entry.handle, value) for entry in self._moved):
            # The input's node is about to take on other metadata.
            value = call(aten.clone.default if program.domain.remove_views else aten.alias.default, value)
        return value

    def _surface_others(self, done: set[int]) -> None:
        """Let each handle that somebody else holds (autograd, a closure) stand for its current value."""
        for base in list(self.program.graph.bases.values()):
            for ref, view in list(base.handles.values()):
                handle = ref()
                if handle is not None and id(handle) not in done and view.value is not handle:
                    self.program.domain.point(handle, self._presentable(handle, view))

    def _plan(self) -> list[WriteBack]:
        """The write-backs, in input order."""
        changed: list[tuple[Input, View, bool]] = []
        for entry in self.inputs:
            view = self.program.graph.find(entry.handle)
            written = view is not None and not view.base.untouched(view, since=0)
            if view is not None and (written or entry in self._moved):
                changed.append((entry, view, written))
        storages = {entry.storage for entry, _, _ in changed}
        return [self._write_back(*change, storages) for change in changed]

    def _write_back(self, entry: Input, view: View, written: bool, storages: set[int]) -> WriteBack:
        program = self.program
        data = program.read(view) if written else None
        if data is not None and storage_key(data) in storages:
            # The memory of an input that is about to be written, perhaps before this one.
            data = program.domain.call(aten.clone.default, data)
        shown = self._presentable(entry.handle, view) if id(entry.handle) in self._returned else data
        return WriteBack(entry, data, shown)

    def _emit(self, back: WriteBack) -> None:
        """Run a write-back in the modes below, which record it."""
        handle, domain = back.input.handle, self.program.domain
        if back.input in self._moved:
            node = domain.alias(handle)  # stands for the input; each op below is one on it
            for op, args in _metadata(back.input, self.inputs):
                op(handle, *args)
                domain.point(handle, node)
        if back.data is not None:
            if counts_elements(handle):
                aten.resize_as_sparse_.default(handle, back.data)
            aten.copy_.default(handle, back.data)
        if back.shown is not None:
            domain.point(handle, back.shown)


def moved(entry: Input) -> bool:
    """Whether the function changed an input's metadata."""
    return Geometry.of(entry.handle).key != entry.place.key or storage_key(entry.handle) != entry.storage


def _metadata(entry: Input, inputs: Sequence[Input]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The ops that give an input its new metadata."""
    handle = entry.handle
    size, stride, place = list(handle.size()), list(handle.stride()), Geometry.of(handle)
    if storage_key(handle) != entry.storage:  # `set_` or `.data =`
        source = next((other for other in inputs if other.storage == storage_key(handle)), None)
        yield (aten.resize_.default, (size,)) if source is None else (aten.set_.source_Tensor, (source.handle,))
    elif not fits(place, entry.capacity):
        yield aten.resize_.default, (size,)
    yield aten.as_strided_.default, (size, stride, handle.storage_offset())
