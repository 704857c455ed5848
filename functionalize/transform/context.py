"""The program being functionalized: its alias graph and the domain of its values, seen through handles.

Invariant: between two ops every handle has one current value, and a real handle's memory holds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize._torch import (
    PLAIN_TYPES,
    DisableTorchFunction,
    below_autograd,
    below_mode,
    is_symbolic,
    mode_stack,
    pytree,
    storage_id,
    storage_key,
    unbacked,
)
from functionalize.aliasing.alias_graph import AliasGraph
from functionalize.aliasing.bases import View
from functionalize.aliasing.geometry import same
from functionalize.aliasing.history import Historian
from functionalize.aliasing.regenerate import commit, regenerate, top_value
from functionalize.aliasing.tensor_queries import same_strides, tensor_leaves
from functionalize.aliasing.view_rules import Value
from functionalize.errors import UnsupportedMutationError, name_of
from functionalize.ops import tables
from functionalize.transform.by_storage import BY_STORAGE
from functionalize.transform.values import TensorsDomain

aten = torch.ops.aten


class Program:
    """What the ops of one call act on."""

    def __init__(self, domain: TensorsDomain, enter: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.domain = domain
        self.enter = enter  # has the ops inside dispatched to this program again
        self.graph = AliasGraph(held=domain.older)
        self.op: Any = None  # the op that the program called last
        self.origin: Any = None  # where in the user's code; None until somebody looks
        self.historian: Historian | None = None
        self._protected: dict[int, tuple[str, torch.Tensor]] = {}
        self._carriers: dict[View, torch.Tensor] = {}  # of views not read yet, one handle each

    def whole(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a tracer below knows a wrapper subclass among the arguments: as one tensor, not by its parts."""
        return self.domain.proxies is not None and any(
            type(leaf) not in PLAIN_TYPES and (not self.domain.constant(leaf) or self.graph.find(leaf) is not None)
            for leaf in tensor_leaves(args, kwargs)
        )

    def value(self, handle: torch.Tensor) -> Value:
        """What a handle is worth now."""
        if not self.domain.observed:
            return self.domain.physical(handle)  # its memory is current, also where a NumPy array was written
        view = self.graph.find(handle)
        return handle if view is None else self.read(view)

    def read(self, view: View) -> Value:
        """What a view is worth now."""
        return regenerate(self, view)

    def call(self, op: Any, *args: Any) -> Value:
        """Execute one op on values."""
        return self.domain.call(op, *args)

    @property
    def views_alias(self) -> bool:
        """Whether the value of a view shares memory with its source's value."""
        return not self.domain.remove_views

    def recorded(self, view: View, source_value: Value) -> Value | None:
        """A view's handle as its value, if running the op would give just that again: the graph gets the node alone."""
        handle = self._carriers.get(view)
        if handle is None or view.rule is None or view.parent is None or len(view.rule.path) != 1:
            return None
        place, (op, args) = view.parent.geometry, view.rule.path[0]
        if place.static and view.geometry.static and not is_symbolic(source_value):
            as_expected = source_value.stride() == place.stride and source_value.storage_offset() == place.offset
            return handle if as_expected and self.domain.record(op, source_value, args, handle) else None
        if unbacked(view.geometry.size) or (
            unbacked(place.size) and self.domain.remove_views and not view.rule.by_storage
        ):
            return self.domain.record_unbacked(op, source_value, args, handle)
        if not same(source_value.stride(), place.stride) or not same([source_value.storage_offset()], [place.offset]):
            return None
        return handle if self.domain.record(op, source_value, args, handle) else None

    def made(self, handle: torch.Tensor, view: View) -> None:
        """The program got a handle from a view op."""
        self.graph.track(handle, view)
        if self.historian is not None:
            self.historian.viewed(view, self.op)
        parent = view.parent
        if parent is None:
            return
        if view.geometry.static and parent.geometry.static:
            if self.domain.records:
                self._carriers.setdefault(view, handle)
        elif not view.geometry.static and unbacked(view.geometry.size):
            self._carriers[view] = handle
            self.read(view)  # at once: the tracer binds new symbols to the node that it sees next
        elif unbacked(parent.geometry.size):
            self._carriers[view] = handle  # tells sizes that an op may not know of the part that it takes

    def release(self) -> None:
        """Let go of handles that only we hold, so that those which live on are those that others hold."""
        self._carriers.clear()
        for base in list(self.graph.bases.values()):
            base.drop_stale()

    def close(self) -> None:
        """Drop all tensors: the call has ended."""
        self._carriers.clear()
        self._protected.clear()
        self.graph.close()

    def write(self, handle: torch.Tensor, value: Value, *, borrowed: bool = False) -> None:
        """The program wrote ``value``, of the handle's shape and dtype, to a handle."""
        protected = self._protected.get(storage_key(handle)) if self._protected else None
        if protected is not None:
            raise UnsupportedMutationError(
                f"a write to a tensor of shape {tuple(handle.size())}",
                why=protected[0],
                hint="build a new tensor from the changed parts, or write to a `.to_dense()` or `.dequantize()` copy",
            )
        if not self.domain.observed:
            self.domain.show(handle, value)  # memory is all that anybody will read
            return
        view = self.graph.ensure(handle)
        base = view.base
        root_handle = base.original() if base.original else None
        if not base.log and root_handle is not None:
            self.graph.track(root_handle, base.root)
        self.graph.track(handle, view)
        self.graph.prepare_write(view)
        if self.historian is not None:
            self.historian.wrote(view, self.op)
        commit(view, self.domain.freeze(value) if borrowed else value, borrowed=borrowed)
        self.domain.show(handle, value)

    def replaced(self, handle: torch.Tensor, source: torch.Tensor) -> None:
        """The program says ``handle.data = source``: one more handle of the source's storage, at the source's place."""
        self.origin = None
        if self.domain.observed:
            with below_mode(self.enter()), below_autograd():
                self.fix(handle)
                self.unshare(handle)
                view = self.graph.ensure(source)
                self.graph.track(handle, view)
                # Let go of the source: as long as it lives, autograd thinks of the handle in its old shape.
                self._carriers.pop(view, None)
                if view.value is source:
                    view.value = self.domain.alias(source)
        with DisableTorchFunction():
            handle.data = source

    def grows(self, handle: torch.Tensor) -> View:
        """The program is about to resize a handle: its view. What its storage gains holds nothing yet."""
        view = self.graph.ensure(handle)
        if view.base.capacity is None and view.base.key > 0:
            self.domain.know_storage(handle)
            view.base.grows()
        return view

    def differentiate(self, backward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run autograd's engine: as if we were not there, where memory is all that anybody will read."""
        mode = self.enter()
        aside = not self.domain.observed and mode_stack()[-1:] == [mode]
        with below_mode(mode) if aside else contextlib.nullcontext():
            return backward(*args, **kwargs)

    def meet(self, storage: torch.UntypedStorage) -> None:
        """The program is about to set a tensor to a storage, of which the graph may not know yet."""
        if storage_id(storage) in self.graph.bases:
            return
        holder = self.domain.holder(storage)
        if holder is not None:
            self.graph.ensure(holder)
        elif self.domain.observed and storage.nbytes():
            raise UnsupportedMutationError(
                f"set_ to a storage of {storage.nbytes()} bytes",
                why="no tensor is left that says what the storage holds",
                hint="set_ to a tensor, or keep one of that storage alive",
            )

    def protect(self, handle: torch.Tensor, reason: str) -> None:
        """Refuse writes to a handle whose memory belongs to a tensor that would not see them."""
        if self.domain.observed:
            self._protected[storage_key(handle)] = reason, handle  # held, so that its storage is not another's

    def fix(self, handle: torch.Tensor) -> None:
        """Refuse to change the metadata of a constant of the trace: a graph finds it as the trace left it."""
        view = self.graph.find(handle)
        if self.domain.constant(handle) and (view is None or view.base.is_original(handle)):
            raise UnsupportedMutationError(
                f"the metadata of {name_of(handle)}, which is no input, is changed",
                why="in a graph it is a constant: data can be written back to it, but it keeps its size and strides",
                hint="pass it as an argument; for the state of a module by torch.func.functional_call",
            )

    def unshare(self, handle: torch.Tensor) -> None:
        """Part a handle whose metadata is about to change from the value that it may be."""
        view = self.graph.ensure(handle)
        self._carriers.pop(view, None)
        if view.base.seed is not None:
            top_value(self, view.base)  # reads the handle where it still lies
        for place in {view, view.base.root}:
            if place.value is handle:
                place.value = self.domain.alias(handle)
                if view.base.is_original(handle):
                    view.base.twin = place.value
                self.graph.track(handle, place)

    def compute(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Results, as values, of a functional op on handles."""
        return self.computed(op, args, kwargs)[0]

    def computed(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """The same, and whether the value of some handle has other strides."""
        if tables.row(op).composite or op in BY_STORAGE:  # they decompose above the modes below us, into views for one
            with self.enter():
                out = op(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, self.value, out), self.values(args, kwargs)[2]
        call_args, call_kwargs, skewed = self.values(args, kwargs)
        return self.domain.call(op, *call_args, **call_kwargs), skewed

    def values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any], bool]:
        """Arguments with handles replaced by values, and whether some value has other strides than its handle."""
        skewed = False

        def replaced(arg: Any) -> Any:
            nonlocal skewed
            if isinstance(arg, torch.Tensor):
                value = self.value(arg)
                skewed = skewed or (value is not arg and not _alike(value, arg))
                return value
            if isinstance(arg, (list, tuple)):
                return [replaced(item) for item in arg]
            return arg

        new_kwargs = {name: replaced(arg) for name, arg in kwargs.items()} if kwargs else kwargs
        return [replaced(arg) for arg in args], new_kwargs, skewed

    def rehandle(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
        """Give results of an op on skewed values the strides that eager gives them: they are handles from now on."""
        handles = self.domain.expected(func, args, kwargs, out)
        for handle, value in zip(pytree.tree_leaves(handles), pytree.tree_leaves(out), strict=True):
            if handle is value:
                continue
            if self.domain.observed:
                self.graph.adopt(handle, value)
            if tables.row(func).random or not self.domain.observed:
                self.domain.show(handle, value)  # it drew numbers of its own, or memory is the record
        return handles


def _alike(value: Value, handle: torch.Tensor) -> bool:
    return handle.layout is not torch.strided or same_strides(value, handle)
