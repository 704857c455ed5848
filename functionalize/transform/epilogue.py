"""What is left to do when the function returns: bring escaped handles up to date, write back to the inputs.

Invariant: the write-backs come last, in input order, one for each input that changed and none for the others; then
those to tensors which the function wrote without being passed them.
Limits: runs only where a mode below observes us; otherwise the handles' memory is the result already.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize._torch import memory_view, storage_key
from functionalize.aliasing.bases import Base, View
from functionalize.aliasing.geometry import Geometry, fits, plain, same, stop
from functionalize.aliasing.tensor_queries import counts_elements, repeated, repeats
from functionalize.aliasing.view_rules import Value
from functionalize.errors import UnsupportedMutationError
from functionalize.transform.context import Program
from functionalize.transform.values import TensorsDomain

aten = torch.ops.aten


@dataclass(slots=True, eq=False)
class Input:
    """An input tensor, and where it lay when the call began."""

    handle: torch.Tensor
    place: Geometry
    storage: int
    capacity: Any  # bytes that its storage holds
    requires_grad: bool

    @classmethod
    def of(cls, handle: torch.Tensor) -> Input:
        key, place = storage_key(handle), Geometry.of(handle)
        capacity = plain(handle.untyped_storage().nbytes()) if key > 0 else 0
        return cls(handle, place, key, capacity, handle.requires_grad)


Step = tuple[Any, tuple[Any, ...]]  # an op on an input, and its arguments after the input


@dataclass(frozen=True, eq=False)
class Part:
    """A part of an input that was written: the view ops that lead to it, and what to copy there."""

    path: tuple[Step, ...]
    place: Geometry
    value: Value


@dataclass(frozen=True, eq=False)
class WriteBack:
    """An input that changed: ops for its metadata, and what to copy to it."""

    input: Input
    metadata: tuple[Step, ...]
    data: Value | None
    after: tuple[Step, ...]  # ops for its metadata once the data are there
    parts: tuple[Part, ...] = ()  # instead of the data: what was written, where that is less


class Epilogue:
    """Ends one call: reads what escapes, then writes back."""

    def __init__(self, program: Program, inputs: Sequence[Input], outputs: Sequence[torch.Tensor]) -> None:
        self.program, self.outputs = program, outputs
        self.inputs = [*inputs, *_outside(program, inputs)]
        self._returned = {id(handle) for handle in outputs}
        self.moved = [entry for entry in self.inputs if moved(entry)]
        for entry in self.moved:
            program.fix(entry.handle)

    def run(self) -> None:
        """Every value is computed before the first write-back runs."""
        for back in self.settle():
            self._emit(back)

    def settle(self) -> list[WriteBack]:
        """Bring all that escapes up to date; the write-backs that are left to do."""
        own = {id(entry.handle) for entry in self.inputs}
        for handle in self.outputs:
            view = self.program.graph.find(handle)
            if view is not None and id(handle) not in own:
                self.program.domain.point(handle, self._presentable(handle, view))
        backs = self._plan()
        self.program.release()
        self._surface_others(own | self._returned)
        return backs

    def return_value(self, handle: torch.Tensor) -> None:
        """Let an input that was written stand for its value where it is returned, as nobody writes back to it."""
        view = self.program.graph.find(handle)
        if view is not None and id(handle) in self._returned:
            self.program.domain.point(handle, self._presentable(handle, view))

    def _presentable(self, handle: torch.Tensor, view: View) -> Value:
        """A handle's value as a node that is the handle's alone."""
        program = self.program
        value, call = program.read(view), program.domain.call
        if view.borrowed or (repeats(value) and not repeats(handle)):
            # Another tensor, or another position, has the same memory, and the caller may write to it.
            value = call(aten.clone.default, value)
            view.settle(value, view.stamp)
        elif any(program.domain.same_node(entry.handle, value) for entry in self.moved):
            # The input's node is about to take on other metadata.
            value = call(aten.clone.default if program.domain.remove_views else aten.alias.default, value)
        return value

    def _surface_others(self, done: set[int]) -> None:
        """Let each handle that somebody else holds (autograd, a closure) stand for its current value."""
        for base in list(self.program.graph.bases.values()):
            for known in list(base.handles.values()):
                handle, view = known(), known.view
                if handle is None or id(handle) in done:
                    continue
                if view.value is not handle or not base.untouched(view, since=view.stamp):
                    self.program.domain.point(handle, self._presentable(handle, view))

    def _plan(self) -> list[WriteBack]:
        """The write-backs, in input order."""
        changed: list[tuple[Input, View, bool]] = []
        for entry in self.inputs:
            base = self.program.graph.bases.get(entry.storage)
            if entry not in self.moved and (base is None or not base.log):
                continue
            view = self.program.graph.find(entry.handle)
            written = view is not None and not view.base.untouched(view, since=0)
            if view is not None and (written or entry in self.moved):
                changed.append((entry, view, written))
        metadata = _Metadata(self.inputs, self.moved, self.program.domain)
        return [self._write_back(*change, metadata, {entry.storage for entry, _, _ in changed}) for change in changed]

    def _write_back(
        self, entry: Input, view: View, written: bool, metadata: _Metadata, storages: set[int]
    ) -> WriteBack:
        program = self.program
        parts = self._parts(entry, view, storages)
        if parts:
            return WriteBack(entry, (), None, (), parts)
        fresh = entry in self.moved and metadata.takes_fresh_storage(entry)
        data = program.read(view) if written or fresh else None
        data = None if data is None else self._apart(data, storages)
        steps = tuple(metadata.steps(entry)) if entry in self.moved else ()
        after: tuple[Step, ...] = ()
        if data is not None and repeated(entry.handle):
            data, before, after = self._once(entry.handle, data)
            steps += before
        program.domain.fix_symbols([args for _, args in steps])
        return WriteBack(entry, steps, data, after)

    def _apart(self, data: Value, storages: set[int]) -> Value:
        """What to copy, if need be out of the memory of an input that is about to be written, maybe before this one."""
        if self.program.domain.memory(data) not in storages:
            return data
        copy: Value = self.program.domain.call(aten.clone.default, data)
        return copy

    def _parts(self, entry: Input, view: View, storages: set[int]) -> tuple[Part, ...]:
        """What was written, where the base remembers that, and it is less than all of the input."""
        base = view.base
        alone = sum(other.storage == entry.storage for other in self.inputs) == 1
        if not base.kept or not alone or entry in self.moved or view is not base.root:
            return ()
        if not all(_is_part(written, view) for written in base.kept):
            return ()
        if sum(math.prod(written.geometry.size) for written in base.kept) >= math.prod(view.geometry.size):
            return ()
        return tuple(
            Part(_path(written, view), written.geometry, self._apart(value, storages))
            for written, value in base.kept.items()
        )

    def _once(self, handle: torch.Tensor, data: Value) -> tuple[Value, tuple[Step, ...], tuple[Step, ...]]:
        """What to copy, and where, for an expanded input: `copy_` refuses positions that share an element."""
        size, stride, offset = list(handle.size()), list(handle.stride()), handle.storage_offset()
        compact = list(size)
        for dim in repeated(handle):
            data, compact[dim] = self.program.domain.call(aten.slice.Tensor, data, dim, 0, 1), 1
        place = aten.as_strided_.default
        return data, ((place, (compact, stride, offset)),), ((place, (size, stride, offset)),)

    def _emit(self, back: WriteBack) -> None:
        """Run a write-back in the modes below, which record it.

        They take the input for the result of its last write-back from then on. So a graph that returns the input
        returns that, and code that goes on in the trace reads and writes the input itself.
        """
        handle, domain = back.input.handle, self.program.domain
        node = domain.alias(handle) if back.metadata else handle  # stands for the input; each op below is one on it
        self._run(back.metadata, handle, node)
        if back.data is not None:
            if counts_elements(handle):
                aten.resize_as_sparse_.default(handle, back.data)
            if back.after:  # a fake input shows its last geometry already, which refuses to be written
                self._run(((aten.copy_.default, (back.data,)),), handle, node)
            else:
                aten.copy_.default(handle, back.data)
        self._run(back.after, handle, node)

    def _run(self, steps: Sequence[Step], handle: torch.Tensor, node: torch.Tensor) -> None:
        for op, args in steps:
            self.program.domain.write_metadata(op, handle, args)
            self.program.domain.point(handle, node)


def _is_part(view: View, root: View) -> bool:
    """Whether plain view ops lead from a root to a view whose elements lie apart."""
    steps = list(itertools.takewhile(lambda step: step is not root, view.lineage()))
    return (
        view.geometry.static
        and root.geometry.static
        and not view.geometry.shares
        and root in view.lineage()
        and not any(step.rule is None or step.rule.by_storage for step in steps)
    )


def _path(view: View, root: View) -> tuple[Step, ...]:
    steps = list(itertools.takewhile(lambda step: step is not root, view.lineage()))
    return tuple(action for step in reversed(steps) if step.rule is not None for action in step.rule.path)


def _outside(program: Program, inputs: Sequence[Input]) -> Iterator[Input]:
    """Traced tensors that the function reached and wrote by another way than being passed them."""
    passed = {id(entry.handle) for entry in inputs}
    whole = not program.graph.keeps_writes  # nothing beside the inputs is written back
    lying: dict[int, list[torch.Tensor]] = defaultdict(list)
    for entry in () if whole else inputs:
        lying[storage_key(entry.handle)].append(entry.handle)
    for base in list(program.graph.bases.values()):
        root = base.held
        if root is None or (id(root) in passed and (whole or not _beyond(base, lying[base.key]))):
            continue
        if id(root) not in passed and all(base.root in view.lineage() for view in base.log.views()):
            capacity = plain(base.storage.nbytes()) if base.capacity is None else base.capacity
            yield Input(root, base.root.geometry, base.key, capacity, root.requires_grad)
        else:
            top = base.top.geometry
            yield Input.of(memory_view(root, base.storage, (top.size, top.stride, top.offset), top.dtype))


def _beyond(base: Base, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether what a storage holds beside the inputs that lie in it was written, and is to be written back."""
    if not base.log:
        return False
    shown = [view for handle in inputs if (view := base.at(Geometry.of(handle))) is not None]
    return not all(any(view in written.lineage() for view in shown) for written in base.log.views())


def moved(entry: Input) -> bool:
    """Whether the function changed an input's metadata."""
    place = Geometry.of(entry.handle)
    return (place is not entry.place and place.key != entry.place.key) or storage_key(entry.handle) != entry.storage


class _Metadata:
    """The ops that give inputs their new metadata, in the order in which they run."""

    def __init__(self, inputs: Sequence[Input], moved: Sequence[Input], domain: TensorsDomain) -> None:
        self._domain = domain
        # Which input holds a storage when the ops so far have run: one that keeps it, if there is one.
        self._holder = {entry.storage: entry.handle for entry in [*moved, *(e for e in inputs if e not in moved)]}
        self._alone = {key for key, count in Counter(entry.storage for entry in inputs).items() if count == 1}

    def takes_fresh_storage(self, entry: Input) -> bool:
        """Whether an input left its storage (`set_`, `.data =`) for one that no input holds.

        Or outgrew it after `detach_`: a graph gets an input that requires grad, which eager's `resize_` refuses.
        """
        key = storage_key(entry.handle)
        if key == entry.storage:
            grows = entry.requires_grad and not fits(Geometry.of(entry.handle), entry.capacity)
            return grows and key in self._alone
        return key not in self._holder

    def steps(self, entry: Input) -> Iterator[Step]:
        """What to run on an input whose metadata changed; its data are copied afterwards."""
        handle, key, place = entry.handle, storage_key(entry.handle), Geometry.of(entry.handle)
        if place.dtype != entry.place.dtype:
            raise UnsupportedMutationError(
                f"`.data =` gives an input of {entry.place.dtype} data of {place.dtype}",
                why="no operator changes the dtype of a tensor that a graph gets as its input",
                hint="return the new tensor, and assign it to `.data` outside of the traced function",
            )
        size = list(handle.size())
        if self.takes_fresh_storage(entry):
            whole = place.contiguous and type(place.offset) is int and place.offset == 0
            options = {"dtype": place.dtype, "device": handle.device}
            memory = self._domain.call(aten.empty.memory_format, size if whole else [stop(place)], **options)
        else:
            whole, memory = False, self._holder.get(key)
        if key != entry.storage or memory is not self._holder.get(key):
            if self._holder.get(entry.storage) is handle:
                del self._holder[entry.storage]
            self._holder.setdefault(key, handle)
            yield aten.set_.source_Tensor, (memory,)
        elif not fits(place, entry.capacity):
            start, before = place.offset, entry.place.offset
            as_is = place.contiguous and same((start,), (before,))
            yield aten.resize_.default, (size if as_is else [stop(place) - before],)
        if not whole:
            yield aten.as_strided_.default, (size, list(handle.stride()), handle.storage_offset())
