"""One functionalized call: its alias graph and the executor of its values, addressed by handles.

Invariant: between two ops every handle has one current value, and a real handle's memory holds it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from functionalize._torch import (
    PLAIN_TYPES,
    DisableTorchFunction,
    FakeTensor,
    below_autograd,
    below_mode,
    has_unknown_elements,
    is_symbolic,
    is_view,
    mode_stack,
    new_symbols_wait,
    on_handles,
    pytree,
    storage_id,
    storage_key,
    unbacked,
)
from functionalize._torch.subclasses.wrappers import is_wrapper_class
from functionalize._torch.tensors import is_leaf_to_autograd
from functionalize.aliasing.alias_graph import AliasGraph
from functionalize.aliasing.bases import Base, View
from functionalize.aliasing.geometry import Layout, same
from functionalize.aliasing.history import Historian
from functionalize.aliasing.regenerate import commit, regenerate, top_value
from functionalize.aliasing.strided_layout import has_bits
from functionalize.aliasing.tensor_queries import is_fake, same_strides, tensor_leaves
from functionalize.aliasing.view_rules import Value
from functionalize.errors import UnsupportedMutationError, name_of
from functionalize.ops import tables
from functionalize.ops.calls import draws
from functionalize.refusals.tensors import SUBCLASS
from functionalize.refusals.writes import CONSTANT_RESHAPED, DATA_OF_OTHER_SHAPE, SET_TO_DEAD_STORAGE, STILL_A_VIEW
from functionalize.tracing.meta_cache import MISS
from functionalize.transform import dry_run
from functionalize.transform.borrowed_memory import BorrowedMemory
from functionalize.transform.gradients.autograd_notes import AutogradNotes
from functionalize.transform.gradients.ended_gradients import WITHOUT_GRAD_MODE, EndedGradients
from functionalize.transform.unseen_aliases import UnseenAliases
from functionalize.transform.values import ADDRESSING, PREPARED, ValueExecutor

aten = torch.ops.aten
_AS_STRIDED = aten.as_strided.default  # its result depends on where its source lies in the storage
_MAY_SHARE = (
    "a tensor is reshaped, and one of the two tensors is written. Where a data-dependent size is 1, eager's result "
    "is a view, but the graph's is a copy. Write to a `.clone()`"
)


@dataclass(frozen=True, eq=False)
class _Sharing:
    """Why a tensor must not be written."""

    held: torch.Tensor  # the tensor, so that no other gets its storage
    other: weakref.ref[torch.Tensor] | None  # the tensor that shares its memory
    refusal: Callable[..., UnsupportedMutationError] | None = None  # makes the error; None: see `sizes`
    sizes: Sequence[Any] = ()  # data-dependent: the two share memory if one of the sizes is 1


@dataclass(slots=True)
class ValueArguments:
    """Arguments with handles replaced by values, and whether some value has other strides than its handle."""

    args: list[Any]
    kwargs: dict[str, Any]
    strides_differ: bool


class FunctionalizationContext:
    """The state of one call: ops read and write the values of handles through it."""

    def __init__(
        self,
        executor: ValueExecutor,
        enter: Callable[[], contextlib.AbstractContextManager[Any]],
        functionalize_body: Callable[..., Callable[..., Any]],
    ) -> None:
        self.executor = executor
        self.enter = enter  # dispatches the ops inside to this program again
        self._functionalize_body = functionalize_body
        self.graph = AliasGraph(held=executor.predates_call)
        self.unseen = UnseenAliases(executor, self.graph) if executor.on_memory else None
        self.op: Any = None  # the op that the program called last
        self.origin: Any = None  # the line in the user's code; None until it is needed
        self.historian: Historian | None = None
        self.takes_subclasses = True  # whether the program may use tensor subclasses
        self.notes, self.endings = AutogradNotes(), EndedGradients(executor, self.graph)
        self.borrowed: BorrowedMemory | None = None  # None: not noted
        self._protected: dict[int, list[_Sharing]] = {}
        self._sources: Any = WeakIdKeyDictionary()  # of views of tensors without strides, kept alive as long
        self._carriers: dict[View, torch.Tensor] = {}  # by view that was not read yet, one of its handles

    def body(self, function: Callable[..., Any], frame: Any) -> Callable[..., Any]:
        """A body of a higher-order op as a program of its own, with a `Frame`."""
        return self._functionalize_body(function, frame, self.endings)

    def has_traced_subclass(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether an argument is a wrapper subclass that a tracer below tracks as one tensor, not by its parts."""
        self.refuse_subclasses(map(type, tensor_leaves(args, kwargs)))
        return self.executor.proxies is not None and any(
            type(leaf) not in PLAIN_TYPES and (not self.executor.is_constant(leaf) or self.graph.find(leaf) is not None)
            for leaf in tensor_leaves(args, kwargs)
        )

    def refuse_subclasses(self, classes: Iterable[type]) -> None:
        """Raise for a tensor subclass that is no wrapper, unless the program may use subclasses."""
        own = () if self.takes_subclasses else set(classes) - PLAIN_TYPES
        for cls in own:
            if issubclass(cls, torch.Tensor) and not is_wrapper_class(cls):
                raise SUBCLASS.error(tensor="a tensor that the program uses", kind=cls.__name__)

    def has_unknown_elements(self, tensor: torch.Tensor) -> bool:
        """Whether a captured program reads data-dependent elements of a sparse tensor."""
        return not self.takes_subclasses and on_handles(has_unknown_elements, (tensor,), {})

    def value(self, handle: torch.Tensor) -> Value:
        """The current value of a handle."""
        if not self.executor.observed:
            return self.executor.physical(handle)  # its memory is current, also where a NumPy array was written
        view = self.graph.find(handle)
        return handle if view is None else regenerate(self, view)

    def read_handle(self, handle: torch.Tensor, layout: Layout) -> Value:
        """The current value of a handle with a layout, while a graph is recorded."""
        base = self.graph.bases.get(storage_key(handle))
        if base is None:
            return handle
        view = self.graph.view_of(handle, base, layout)
        return view.value if view.value is not None and view.generation == base.log.length else regenerate(self, view)

    def read(self, view: View) -> Value:
        """The current value of a view."""
        return regenerate(self, view)

    def call(self, op: Any, *args: Any) -> Value:
        return self.executor.call(op, *args)

    @contextlib.contextmanager
    def carrying_out(self, base: Base, write: int) -> Iterator[None]:
        """Give the nodes made inside the origin of a write to a base, which may be read much later."""
        writes = () if self.historian is None else self.historian.writes_of(base)
        before = self.origin
        self.origin = writes[write - 1].origin if 0 < write <= len(writes) else before
        try:
            yield
        finally:
            self.origin = before

    @property
    def views_alias(self) -> bool:
        return not self.executor.remove_views

    def recorded_view(self, view: View, source_value: Value) -> Value | None:
        """A view's handle as its value, recorded as a node; None if running the op may give another tensor."""
        handle = self._carriers.get(view)
        if handle is None or view.rule is None or view.parent is None or len(view.rule.path) != 1:
            return None
        layout, (op, args) = view.parent.layout, view.rule.path[0]
        if not has_bits(source_value, layout):
            return None
        if layout.static and view.layout.static and not is_symbolic(source_value):
            as_expected = source_value.stride() == layout.stride and source_value.storage_offset() == layout.offset
        else:
            part_of_unbacked = unbacked(layout.size) and self.executor.remove_views and not view.rule.addresses_storage
            if unbacked(view.layout.size) or part_of_unbacked:
                return self.executor.record_unbacked(op, source_value, args, handle)
            geometry = (*source_value.stride(), source_value.storage_offset())
            as_expected = same(geometry, (*layout.stride, layout.offset))
        return handle if as_expected and self.executor.record(op, source_value, args, handle) else None

    def _record_at_once(self, handle: torch.Tensor, view: View, parent: View) -> None:
        """Add the node of a view of an unwritten storage: no write comes between the view and what reads it."""
        recorder, source, rule = self.executor.recorder, parent.value, view.rule
        if recorder is None or rule is None or len(rule.path) != 1:
            return
        if type(source) is not FakeTensor or type(handle) is not FakeTensor:
            return
        (op, args), layout = rule.path[0], parent.layout
        as_expected = source.stride() == layout.stride and source.storage_offset() == layout.offset
        if as_expected and op is not _AS_STRIDED and recorder.add_view(op, source, args, handle):
            view.value = handle

    def view_made(self, handle: torch.Tensor, view: View) -> None:
        """Note that the program got a handle from a view op."""
        self.graph.track(handle, view)
        if self.historian is not None and view.record is None:
            self.historian.viewed(view, self.op)
        parent = view.parent
        if parent is None:
            return
        if view.layout.static and parent.layout.static:
            if self.executor.records:
                self._carriers.setdefault(view, handle)
                if view.value is None and not view.base.log.length:
                    self._record_at_once(handle, view, parent)
        elif not view.layout.static and unbacked(view.layout.size):
            self._carriers[view] = handle
            with new_symbols_wait(handle):
                self.read(parent)
            self.read(view)  # at once: the tracer binds new symbols to the node that it sees next
        elif unbacked(parent.layout.size):
            self._carriers[view] = handle  # has sizes that an op may not know for the part that it takes

    def drop_unread_handles(self) -> None:
        """Drop handles that only we hold; the handles that live on are held elsewhere."""
        self._carriers.clear()
        for base in list(self.graph.bases.values()):
            base.drop_stale()

    def close(self) -> None:
        """Drop all tensors: the call has ended."""
        self._carriers.clear()
        self._protected.clear()
        self._sources.clear()
        self.notes.close()
        if self.unseen is not None:
            self.unseen.forget()
        self.graph.close()

    def write(self, handle: torch.Tensor, value: Value, *, aliased: bool = False) -> None:
        """Commit a write of ``value``, of the handle's shape and dtype; ``aliased``: another tensor has it too."""
        sharings = self._protected.get(storage_key(handle), []) if self._protected else []
        for sharing in [*sharings]:
            if sharing.other is None or sharing.other() is not None:
                if sharing.refusal is None:
                    self._check_not_one(sharing.sizes)
                    sharings.remove(sharing)  # checked once
                    continue
                raise sharing.refusal(size=tuple(handle.size()))
        if not self.executor.observed:
            self.executor.sync_memory(handle, value)  # only memory will be read
            return
        view = self.graph.ensure(handle)
        base = view.base
        original = base.original() if base.original and not base.log else None
        if original is not None:
            self.graph.track(original, base.root)
        self.graph.track(handle, view)
        self.notes.note_write(handle, base)
        if self.endings.grad_is_off:
            self.endings.note_values([value], WITHOUT_GRAD_MODE)
        self.graph.prepare_write(view)
        if self.historian is not None:
            self.historian.wrote(view, self.op)
        commit(view, self.executor.snapshot(value) if aliased else value, aliased=aliased)
        self.executor.sync_memory(handle, value)

    def views_beside(self, handle: torch.Tensor) -> list[torch.Tensor]:
        """The other handles in the memory of a handle."""
        view = self.graph.find(handle)
        handles = [] if view is None else [ref() for ref in view.base.handles.values()]
        return [other for other in handles if other is not None and other is not handle]

    def set_data(self, handle: torch.Tensor, source: torch.Tensor) -> None:
        """Run ``handle.data = source``: the handle gets the source's storage and layout."""
        self.origin = None
        if self.executor.observed:
            followed = self.notes.hides_writes is not None and handle.requires_grad and not is_leaf_to_autograd(handle)
            if followed and not (same(handle.size(), source.size()) and same_strides(handle, source)):
                raise DATA_OF_OTHER_SHAPE.error()
            with below_mode(self.enter()), below_autograd():
                self.refuse_constant(handle)
                self.unshare(handle)
                view = self.graph.ensure(source)
                if handle.requires_grad and is_view(handle):
                    self.protect(source, STILL_A_VIEW.error)
                self.notes.note_data(handle, source)
                self.endings.note(source, "given to `.data`")
                self.graph.track(handle, view)
                # Drop the source: as long as it lives, autograd takes the handle to have its old shape.
                self._carriers.pop(view, None)
                if self.unseen is not None:
                    self.unseen.let_go(source)
                if view.value is source:
                    view.value = self.executor.alias(source)
        with DisableTorchFunction():
            handle.data = source

    def prepare_resize(self, handle: torch.Tensor) -> None:
        """Note that the program is about to resize a handle. Memory that its storage gains has no contents yet."""
        view = self.graph.ensure(handle)
        if view.base.capacity is None and view.base.key > 0:
            self.executor.extend_fake_storage(handle)
            view.base.note_resize()

    def differentiate(self, backward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run autograd's engine; in direct use below the mode, since the engine checks for modes."""
        if self.notes.reshapes.lost_views.suspects:
            self.notes.reshapes.lost_views.note_use(tensor_leaves(pytree.tree_leaves((args, kwargs)), {}))
        lost = self.notes.reshapes.lost_views.error() if self.executor.observed else None
        if lost is not None:
            raise lost
        mode = self.enter()
        aside = not self.executor.observed and mode_stack()[-1:] == [mode]
        with below_mode(mode) if aside else contextlib.nullcontext():
            return backward(*args, **kwargs)

    def find_storage(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """Make a base for a storage that the program is about to set a tensor to, which may make it grow.

        Returns a tensor with the storage, if a tensor with it is known.
        """
        base = self.graph.bases.get(storage_id(storage))
        if base is not None:
            holding = base.original() if base.original is not None else None  # tensors of the program grow as they are
            if holding is not None and storage_key(holding) == base.key:
                self.prepare_resize(holding)
            return base.root.value
        holding = self.executor.tensor_with_storage(storage)
        if holding is not None:
            self.prepare_resize(holding)
        elif self.executor.observed and storage.nbytes():
            raise SET_TO_DEAD_STORAGE.error(nbytes=storage.nbytes())
        return holding

    def protect(
        self,
        handle: torch.Tensor,
        refusal: Callable[..., UnsupportedMutationError],
        other: torch.Tensor | None = None,
    ) -> None:
        """From now on refuse writes to a handle: another tensor has its memory, and would not see them.

        ``refusal``: makes the error, for a size. ``other``: that tensor, if writes are harmless once it, and all views
        of it, are gone.
        """
        if self.executor.observed:
            sharing = _Sharing(handle, None if other is None else weakref.ref(other), refusal)
            self._protected.setdefault(storage_key(handle), []).append(sharing)

    def note_copy(self, source: torch.Tensor, copy: torch.Tensor, sizes: Sequence[Any]) -> None:
        """Note a copy that eager makes unless one of some data-dependent sizes is 1.

        The graph checks that no size is 1 if either tensor is written while the other lives.
        """
        for tensor, other in ((source, copy), (copy, source)) if self.executor.observed else ():
            sharing = _Sharing(tensor, weakref.ref(other), sizes=sizes)
            self._protected.setdefault(storage_key(tensor), []).append(sharing)

    def _check_not_one(self, sizes: Sequence[Any]) -> None:
        """Have the graph check that no size is 1."""
        for size in sizes:
            self.executor.call(torch.ops.aten._assert_scalar.default, size != 1, _MAY_SHARE)

    def keep_source(self, view: torch.Tensor, source: torch.Tensor) -> None:
        """Keep a tensor alive as long as a view of it."""
        if view is not source:
            self._sources[view] = source

    def note_reshape(self, handle: torch.Tensor, *, loses_elements: bool) -> None:
        """Note that an op will change a handle's metadata; ``loses_elements``: whether it may lose elements by that."""
        self.refuse_constant(handle)
        views = self.views_beside(handle)
        self.notes.note_reshape(handle, views, loses_elements and bool(views))

    def note_reshaped(self, handle: torch.Tensor, before: View) -> None:
        """Note that an op has changed a handle's metadata; ``before``: its view before that."""
        if is_fake(handle) and handle.requires_grad:
            self.notes.note_reshaped(handle, before)

    def refuse_constant(self, handle: torch.Tensor) -> None:
        """Raise if a handle is a constant of the trace: a graph cannot change its metadata."""
        view = self.graph.find(handle)
        if self.executor.is_constant(handle) and (view is None or view.base.is_original(handle)):
            raise CONSTANT_RESHAPED.error(tensor=name_of(handle))

    def unshare(self, handle: torch.Tensor) -> None:
        """Replace a handle whose metadata are about to change, wherever it is used as a value."""
        view = self.graph.ensure(handle)
        self._carriers.pop(view, None)
        if view.base.seed is not None:
            top_value(self, view.base)  # reads the handle with its old layout
        for shared in {view, view.base.root}:
            if shared.value is handle:
                shared.value = self.executor.alias(handle)
                if view.base.is_original(handle):
                    view.base.twin = shared.value
                self.graph.track(handle, shared)

    def compute(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Results, as values, of a functional op on handles."""
        if tables.row(op).composite or op in ADDRESSING:  # decomposed above the modes below us
            with self.enter():
                out = op(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, self.value, out)
        out = MISS if op in PREPARED else self.run_cached(op, args, kwargs)
        if out is not MISS:
            return out
        values = self.values_of(args, kwargs)
        return self.executor.call(op, *values.args, **values.kwargs)

    def run_cached(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results of an op on handles whose values have their strides; ``MISS`` if they are not cached."""
        recorder = self.executor.recorder
        return MISS if recorder is None else recorder.run_on_values(op, args, kwargs, self.read_handle)

    def values_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> ValueArguments:
        """Arguments with handles replaced by values, and whether some value has other strides than its handle."""
        values = ValueArguments([], kwargs, strides_differ=False)
        values.args = self._replaced(args, values)
        if kwargs:
            values.kwargs = dict(zip(kwargs, self._replaced(kwargs.values(), values), strict=True))
        return values

    def _replaced(self, args: Iterable[Any], values: ValueArguments) -> list[Any]:
        """The values of handles among arguments; notes in ``values`` whether strides differ."""
        replaced: list[Any] = []
        for arg in args:
            type_ = type(arg)
            if type_ in PLAIN_TYPES or isinstance(arg, torch.Tensor):
                value = self.value(arg)
                if value is not arg and not values.strides_differ and arg.layout is torch.strided:
                    values.strides_differ = not same_strides(value, arg)
                replaced.append(value)
            else:
                replaced.append(self._replaced(arg, values) if type_ is list or isinstance(arg, (list, tuple)) else arg)
        return replaced

    def rehandle(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
        """The results of an op on values as handles: with eager's strides, if the values' strides differ."""
        strides_differ = self.values_of(args, kwargs).strides_differ
        return self.with_eager_strides(func, args, kwargs, out) if strides_differ else out

    def with_eager_strides(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
        """The same, if the values' strides are known to differ."""
        handles = dry_run.with_eager_strides(self.executor, func, args, kwargs, out)
        pairs = [(handles, out)]
        if not isinstance(out, torch.Tensor):
            pairs = list(zip(pytree.tree_leaves(handles), pytree.tree_leaves(out), strict=True))
        for handle, value in pairs:
            if handle is value:
                continue
            if self.executor.observed:
                self.graph.create_base(handle, value)
            if draws(func, args, kwargs) or not self.executor.observed:
                self.executor.sync_memory(handle, value)  # it drew numbers of its own, or memory is the record
        return handles
