"""Ends a call: brings handles that escape up to date, and writes back to the inputs.

Invariant: the write-backs come last, in input order, one for each input that changed; then
those to tensors that the function wrote but did not get as arguments.
Limits: runs only if a mode below observes us; otherwise the handles' memory is the result already.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from functionalize._torch import memory_view, storage_key, unbacked
from functionalize.aliasing.bases import Base, View
from functionalize.aliasing.geometry import Layout, fits, plain, same, stop
from functionalize.aliasing.overlap import box_of
from functionalize.aliasing.tensor_queries import counts_elements, repeated, repeats
from functionalize.aliasing.view_rules import OpCall, Value
from functionalize.refusals.writes import DATA_LAZILY_NEGATED, DATA_OF_OTHER_DTYPE
from functionalize.transform.context import FunctionalizationContext

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Part:
    """A part of an input that was written: what to copy, and the view ops that lead there."""

    data: Value
    path: tuple[OpCall, ...]


@dataclass(frozen=True, eq=False)
class _Restrided:
    """Data for an input whose positions share elements, and the ops before and after they are copied."""

    data: Value
    before: OpCall
    after: OpCall


@dataclass(frozen=True, eq=False)
class _Changed:
    """An input that the function changed, the view that it shows now, and whether that was written."""

    input: Input
    view: View
    written: bool


@dataclass(slots=True, eq=False)
class Input:
    """An input tensor, and its layout and storage when the call began."""

    handle: torch.Tensor
    layout: Layout
    storage: int
    capacity: Any  # bytes that its storage holds
    requires_grad: bool

    @classmethod
    def of(cls, handle: torch.Tensor) -> Input:
        key, layout = storage_key(handle), Layout.of(handle)
        capacity = plain(handle.untyped_storage().nbytes()) if key > 0 else 0
        return cls(handle, layout, key, capacity, handle.requires_grad)


@dataclass(frozen=True, eq=False)
class WriteBack:
    """An input that changed: ops for its metadata, and what to copy to it."""

    input: Input
    metadata: tuple[OpCall, ...]
    data: Value | None
    after: tuple[OpCall, ...]  # ops for its metadata once the data are there
    parts: tuple[Part, ...] = ()  # in place of the data: the parts that were written, if these are less


class Epilogue:
    """Ends one call: reads what escapes, then writes back."""

    def __init__(
        self,
        context: FunctionalizationContext,
        inputs: Sequence[Input],
        outputs: Sequence[torch.Tensor],
        whole: Collection[int] = (),
    ) -> None:
        """``whole``: handles, by identity, of inputs that are written back whole even if parts suffice."""
        self.context, self.outputs, self._kept_whole = context, outputs, whole
        self.inputs = [*inputs, *_outside(context, inputs)]
        self._storages = Counter(entry.storage for entry in self.inputs)
        self._returned = {id(handle) for handle in outputs}
        self.moved = [entry for entry in self.inputs if moved(entry)]
        for entry in self.moved:
            context.refuse_constant(entry.handle)

    def run(self) -> None:
        """Prepare the write-backs, then emit them: every value is computed before the first one runs."""
        for back in self.prepare():
            self._emit(back)

    def prepare(self) -> list[WriteBack]:
        """Let all handles that escape stand for current values; returns the write-backs to the inputs."""
        own = {id(entry.handle) for entry in self.inputs}
        for handle in self.outputs:
            if id(handle) not in own:
                self.return_value(handle)
        backs = self._plan()
        self.context.drop_unread_handles()
        self._surface_others(own | self._returned)
        return backs

    def return_value(self, handle: torch.Tensor) -> None:
        """Let a handle stand for its value if it is returned, and is not an input that is written back."""
        view = self.context.graph.find(handle)
        if view is not None and id(handle) in self._returned:
            self.context.executor.retarget_proxy(handle, self._presentable(handle, view))

    def _presentable(self, handle: torch.Tensor, view: View) -> Value:
        """A handle's value, cloned or aliased if its node stands for another tensor, too."""
        context = self.context
        value, call = context.read(view), context.executor.call
        if view.aliased or (repeats(value) and not repeats(handle)):
            # Another tensor, or another position, has the same memory, and the caller may write to it.
            value = call(aten.clone.default, value)
            view.set_value(value, view.generation)
        elif any(context.executor.same_node(entry.handle, value) for entry in self.moved):
            # The input's node is about to take on other metadata.
            value = call(aten.clone.default if context.executor.remove_views else aten.alias.default, value)
        return value

    def _surface_others(self, done: set[int]) -> None:
        """Let each handle that others hold (autograd, a closure) stand for its current value."""
        for base in list(self.context.graph.bases.values()):
            for ref in list(base.handles.values()):
                handle, view = ref(), ref.view
                if handle is None or id(handle) in done:
                    continue
                if view.value is not handle or not base.untouched(view, since=view.generation):
                    self.context.executor.retarget_proxy(handle, self._presentable(handle, view))

    def _plan(self) -> list[WriteBack]:
        """The write-backs, in input order; those that make a storage larger come first: others may need the room."""
        changed: list[_Changed] = []
        for entry in self.inputs:
            base = self.context.graph.bases.get(entry.storage)
            if entry not in self.moved and (base is None or not base.log):
                continue
            view = self.context.graph.find(entry.handle)
            written = view is not None and not view.base.untouched(view, since=0)
            if view is not None and (written or entry in self.moved):
                changed.append(_Changed(entry, view, written))
        changed.sort(key=lambda change: not (change.input in self.moved and grows(change.input)))
        metadata = _Metadata(self.inputs, self.moved, self.context)
        storages = {change.input.storage for change in changed}
        return [
            self._in_parts(change.input, change.view, storages) or self._whole(change, metadata, storages)
            for change in changed
        ]

    def _whole(self, change: _Changed, metadata: _Metadata, storages: set[int]) -> WriteBack:
        entry, view, written = change.input, change.view, change.written
        fresh = entry in self.moved and metadata.takes_data(entry)
        data = self._unshared(self.context.read(view), storages) if written or fresh else None
        steps = tuple(metadata.steps(entry)) if entry in self.moved else ()
        after: tuple[OpCall, ...] = ()
        if data is not None and repeated(entry.handle):
            if self.context.graph.keeps_writes and not steps and id(entry.handle) not in self._kept_whole:
                return WriteBack(entry, (), None, (), (self._first_of_each(entry.handle, data),))
            once = self._once(entry.handle, data)
            data, after = once.data, (once.after,)
            steps += (once.before,)
        self.context.executor.record_sizes([args for _, args in steps])
        return WriteBack(entry, steps, data, after)

    def _unshared(self, data: Value, storages: set[int]) -> Value:
        """The data; a clone if they are in a storage that the write-backs write, maybe before the data are read."""
        shared = self.context.executor.storage_of(data) in storages
        return self.context.call(aten.clone.default, data) if shared else data

    def _in_parts(self, entry: Input, view: View, storages: set[int]) -> WriteBack | None:
        """The write-back of the written parts; None unless plain views lead there, and they are less than the input."""
        kept = view.base.kept
        if not kept or self._storages[entry.storage] > 1 or entry in self.moved or view is not view.base.root:
            return None
        paths = [path for written in kept if (path := _path(written, view)) is not None]
        whole = id(entry.handle) in self._kept_whole or len(paths) < len(kept)
        if whole or sum(written.layout.numel for written in kept) >= view.layout.numel:
            return None
        values = [self._unshared(value, storages) for value in kept.values()]
        return WriteBack(entry, (), None, (), tuple(map(Part, values, paths)))

    def _first_of_each(self, handle: torch.Tensor, data: Value) -> Part:
        """Data for the first of the positions that an expanded input repeats, and the views that lead to these."""
        path = tuple(OpCall(aten.slice.Tensor, (dim, 0, 1)) for dim in repeated(handle))
        for op, args in path:
            data = self.context.executor.call(op, data, *args)
        return Part(data, path)

    def _once(self, handle: torch.Tensor, data: Value) -> _Restrided:
        """Data without the repeated positions of an expanded input.

        `copy_` refuses positions that share an element.
        """
        size, stride = list(handle.size()), list(handle.stride())
        data = self._first_of_each(handle, data).data
        compact = list(size)
        for dim in repeated(handle):
            compact[dim] = 1
        restride = aten.as_strided_.default
        return _Restrided(data, OpCall(restride, (compact, stride)), OpCall(restride, (size, stride)))

    def _emit(self, back: WriteBack) -> None:
        """Run a write-back in the modes below, which record it.

        They take the input for the result of its last write-back from then on. So a graph that returns the input
        returns that, and code that goes on in the trace reads and writes the input itself.
        """
        handle, executor = back.input.handle, self.context.executor
        node = executor.alias(handle) if back.metadata else handle  # stands for the input, on which each op below runs
        self._run(back.metadata, handle, node)
        if back.data is not None:
            if counts_elements(handle):
                aten.resize_as_sparse_.default(handle, back.data)
            if back.after:  # a fake input has its last geometry already, which `copy_` refuses to write
                self._run([OpCall(aten.copy_.default, (back.data,))], handle, node)
            else:
                aten.copy_.default(handle, back.data)
        self._run(back.after, handle, node)

    def _run(self, steps: Sequence[OpCall], handle: torch.Tensor, node: torch.Tensor) -> None:
        for op, args in steps:
            self.context.executor.record_metadata_write(op, handle, args)
            self.context.executor.retarget_proxy(handle, node)


def _path(view: View, root: View) -> tuple[OpCall, ...] | None:
    """The plain view ops that lead from a root to a view without internal overlap; None if others lead there."""
    steps = list(itertools.takewhile(lambda step: step is not root, view.lineage()))
    if not (view.layout.static and root.layout.static and view.is_below(root)) or view.layout.has_internal_overlap:
        return None
    if any(step.rule is None or step.rule.addresses_storage for step in steps):
        return None
    return tuple(action for step in reversed(steps) if step.rule is not None for action in step.rule.path)


def _outside(context: FunctionalizationContext, inputs: Sequence[Input]) -> Iterator[Input]:
    """Traced tensors that the function wrote but did not get as arguments, as further inputs."""
    passed = {id(entry.handle) for entry in inputs}
    whole = not context.graph.keeps_writes  # only inputs are written back
    passed_tensors: dict[int, list[torch.Tensor]] = defaultdict(list)
    for entry in inputs:
        passed_tensors[storage_key(entry.handle)].append(entry.handle)
    for base in list(context.graph.bases.values()):
        root = base.held
        if root is None or (id(root) in passed and (whole or not _beyond(base, passed_tensors[base.key]))):
            continue
        if id(root) not in passed and all(view.is_below(base.root) for view in base.log.views()):
            capacity = plain(base.storage.nbytes()) if base.capacity is None else base.capacity
            yield Input(root, base.root.layout, base.key, capacity, root.requires_grad)
        else:
            top = base.top.layout
            seen = memory_view(base.storage, size=top.size, stride=top.stride, offset=top.offset, dtype=top.dtype)
            yield Input.of(seen)


def _beyond(base: Base, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether elements of a storage were written that its inputs do not show."""
    if not base.log:
        return False
    shown = [Layout.of(handle) for handle in inputs]
    each = [_without_repetitions(Layout.of(handle)) for handle in inputs if handle.layout is torch.strided]

    def is_shown(written: View) -> bool:
        below = any(
            view.layout.matches(layout, ignoring_lazy_bits=True) for view in written.lineage() for layout in shown
        )
        return below or any(box_of(layout, written.layout) is not None for layout in each)

    return not all(map(is_shown, base.log.views()))


def _without_repetitions(layout: Layout) -> Layout:
    """The layout of the elements of an expanded layout, each once."""

    def once(size: Any, step: Any) -> Any:
        return size if type(step) is not int or step != 0 or (type(size) is int and size == 0) else 1

    return replace(layout, size=tuple(map(once, layout.size, layout.stride)))


def moved(entry: Input) -> bool:
    """Whether the function changed an input's metadata."""
    layout = Layout.of(entry.handle)
    return not layout.matches(entry.layout) or storage_key(entry.handle) != entry.storage


def grows(entry: Input) -> bool:
    """Whether an input kept its storage, which had no room for what the input shows now."""
    return storage_key(entry.handle) == entry.storage and not fits(Layout.of(entry.handle), entry.capacity)


class _Metadata:
    """The ops that give inputs their new metadata, in the order in which they run."""

    def __init__(self, inputs: Sequence[Input], moved: Sequence[Input], context: FunctionalizationContext) -> None:
        self._executor, self._runs_below_autograd = context.executor, context.graph.keeps_writes
        # The input that holds a storage after the ops so far: an input that keeps it, if possible.
        self._holder = {entry.storage: entry.handle for entry in [*moved, *(e for e in inputs if e not in moved)]}
        self._alone = {key for key, count in Counter(entry.storage for entry in inputs).items() if count == 1}
        self._before = {entry.storage for entry in inputs}
        self._ends: dict[int, list[Any]] = {}  # where moved inputs end, by their new storage
        for entry in moved:
            self._ends.setdefault(storage_key(entry.handle), []).append(stop(Layout.of(entry.handle)))

    def takes_data(self, entry: Input) -> bool:
        """Whether an input is in a storage that does not exist before the call."""
        return self.takes_fresh_storage(entry) or storage_key(entry.handle) not in self._before

    def takes_fresh_storage(self, entry: Input) -> bool:
        """Whether an input left its storage (`set_`, `.data =`) for one that no input holds.

        Or outgrew it, if the input requires grad: a graph that writes back itself runs `resize_` under autograd, which
        refuses. Autograd did not see what the program did within an `out=` or after `detach_`.
        """
        key = storage_key(entry.handle)
        if key == entry.storage and self._runs_below_autograd:
            return False
        if key == entry.storage:
            return entry.requires_grad and grows(entry) and key in self._alone
        return key not in self._holder

    def steps(self, entry: Input) -> Iterator[OpCall]:
        """The ops to run on an input whose metadata changed, before its data are copied."""
        handle, key, layout = entry.handle, storage_key(entry.handle), Layout.of(entry.handle)
        if layout.dtype != entry.layout.dtype:
            raise DATA_OF_OTHER_DTYPE.error(before=entry.layout.dtype, after=layout.dtype)
        if (layout.conj, layout.neg) != (entry.layout.conj, entry.layout.neg):
            raise DATA_LAZILY_NEGATED.error()
        size = list(handle.size())
        fresh = self.takes_fresh_storage(entry)
        if fresh:
            ends = self._ends[key]
            whole = layout.contiguous and type(layout.offset) is int and layout.offset == 0 and len(ends) == 1
            options = {"dtype": layout.dtype, "device": handle.device}
            room = size if whole else [functools.reduce(torch.sym_max, ends)]
            memory = self._executor.call(aten.empty.memory_format, room, **options)
        else:
            whole, memory = False, self._holder.get(key)
        if key != entry.storage or memory is not self._holder.get(key):
            if self._holder.get(entry.storage) is handle:
                del self._holder[entry.storage]
            self._holder.setdefault(key, handle)
            yield OpCall(aten.set_.source_Tensor, (memory,))
        elif unbacked(layout.size) or not fits(layout, entry.capacity):  # if there is room, it changes nothing
            start, before = layout.offset, entry.layout.offset
            as_is = layout.contiguous and same((start,), (before,))
            yield OpCall(aten.resize_.default, (size if as_is else [stop(layout) - before],))
        if not whole:
            stays = key == entry.storage and not fresh and same((layout.offset,), (entry.layout.offset,))
            offset = () if stays else (handle.storage_offset(),)  # if it stays: where the input of each call begins
            yield OpCall(aten.as_strided_.default, (size, list(handle.stride()), *offset))
