"""Views that autograd, on fake tensors, would replay differently from eager.

When the memory of a view changes, or its metadata or those of its base, autograd takes the view again: of tensors with
data by its strides and offset, of fake tensors by the steps that once led to it. If these lead elsewhere now, gradients
through the view would be wrong.

Invariant: a view is refused when it is used, not before: its metadata may come back to what they were.
Limits: uses are ops, and what a program returns; an ``autograd.Function`` that gets such a view and runs no op on it is
not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from functionalize._torch import FakeTensor, on_handles
from functionalize._torch.tensors import autograd_base, is_taken_again, is_view_to_autograd, view_again
from functionalize.aliasing.bases import Base
from functionalize.aliasing.geometry import Layout
from functionalize.call_stack import Location, user_location
from functionalize.errors import UnsupportedMutationError
from functionalize.refusals.gradients import VIEW_AFTER_RESHAPE


class LostViews:
    """The lost views of one call."""

    def __init__(self) -> None:
        self.suspects: dict[int, weakref.ref[torch.Tensor]] = {}  # by identity, views that would be wrong if used now
        self._turned: dict[int, weakref.ref[torch.Tensor]] = {}  # views whose own metadata changed in place
        self._moved: dict[int, weakref.ref[torch.Tensor]] = {}  # views that were given other data
        self._silent: set[int] = set()  # by identity, suspects that are not views, and were not used so far
        self._used: Location | None = None  # the line that used a lost view

    def note_turn(self, handle: torch.Tensor, base: Base) -> None:
        """Note that a fake handle's metadata have changed in place."""
        is_recorded = torch.is_grad_enabled()  # autograd has a node for it, with the layout of the handle itself
        if is_recorded:
            self.note_use([handle])
        if is_view_to_autograd(handle):
            self._turned[id(handle)] = weakref.ref(handle)
        for view in _sharing(base):
            if id(view) in self._turned or autograd_base(view) is handle:
                self._check(view, is_recorded and view is handle)

    def note_write(self, handle: torch.Tensor, base: Base) -> None:
        """Note a write to memory, by a handle."""
        for view in _sharing(base) if self._turned else ():
            if id(view) in self._turned:
                self._check(view, False)
                if view is handle:
                    self.note_use([view])
        for ref in self._moved.values():  # they are in other memory by now
            moved = ref()
            if moved is not None and is_view_to_autograd(moved) and autograd_base(moved) is autograd_base(handle):
                self._check(moved, False)

    def note_moved(self, handle: torch.Tensor) -> None:
        """Note that a handle gets other data: autograd expects it with these when its base is written."""
        if isinstance(handle, FakeTensor) and is_view_to_autograd(handle):
            self._moved[id(handle)] = weakref.ref(handle)

    def note_silent(self, handle: torch.Tensor) -> None:
        """Note that a handle has got other metadata with grad mode off."""
        if not is_view_to_autograd(handle):
            self.suspects[id(handle)] = weakref.ref(handle)
            self._silent.add(id(handle))

    def note_return(self, handle: torch.Tensor) -> bool:
        """Note that it has its old metadata again. Returns whether it was unused meanwhile, and is not a view."""
        is_unused = id(handle) in self._silent
        if is_unused:
            self._silent.remove(id(handle))
            del self.suspects[id(handle)]
        return is_unused

    def note_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note a use of tensors that autograd follows."""
        pairs = [(self.suspects.get(id(tensor)), tensor) for tensor in tensors]
        used = {id(tensor) for view, tensor in pairs if view is not None and view() is tensor}
        if self._used is None and not used <= self._silent:
            self._used = user_location()
        self._silent -= used

    def note_lost(self) -> None:
        """Note that a tensor no longer shows what its views show."""
        self._used = self._used or user_location()

    def error(self) -> UnsupportedMutationError | None:
        """The error if gradients would be wrong."""
        if self._used is None:
            return None
        return VIEW_AFTER_RESHAPE.error(self._used)

    def _check(self, view: torch.Tensor, is_recorded: bool) -> None:
        if not is_recorded and view.requires_grad and is_taken_again(view) and _leads_elsewhere(view):
            self.suspects[id(view)] = weakref.ref(view)
        else:
            self.suspects.pop(id(view), None)

    def close(self) -> None:
        """Drop all tensors."""
        self.suspects.clear()
        self._turned.clear()
        self._moved.clear()
        self._silent.clear()


def _sharing(base: Base) -> list[FakeTensor]:
    handles = (ref() for ref in base.handles.values())
    return [handle for handle in handles if isinstance(handle, FakeTensor)]


def _leads_elsewhere(view: torch.Tensor) -> bool:
    again = on_handles(view_again, (view, autograd_base(view)), {})
    return again is None or not Layout.of(again).matches(Layout.of(view))
