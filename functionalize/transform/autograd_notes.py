"""What a program does, while it is traced, that a graph cannot show and gradients or guards depend on.

Invariant: notes are only added while the program runs. Limits: what is asked by C++ alone is not seen.
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize._torch import VIEW, FakeTensor
from functionalize._torch.tensors import autograd_base
from functionalize.aliasing.bases import Base
from functionalize.aliasing.geometry import Layout, hinted_span


class AutogradNotes:
    """The notes of one call."""

    def __init__(self) -> None:
        self.hooked: list[Any] = []  # functions of autograd, and leaves, whose gradients the program changes by hooks
        self.asked: set[str] = set()  # what the program asked tensors of which others like them may say otherwise
        self.unused: set[int] = set()  # by identity, tensors that the program has asked nothing so far
        self.hides_writes: bool | None = None  # whether autograd missed some; None: nobody asks
        self.readdressed: set[int] = set()  # storages of `as_strided` views that autograd may look for elsewhere
        self.beyond: dict[int, int] = {}  # storages of such of a part alone: how often written before the first
        self.pieces: set[int] = set()  # by identity, tensors of which several views were made at once
        self.detaches: list[str] = []  # the lines that detach a tensor: its gradients end there
        self.reshapes = False  # whether metadata of a tensor that requires gradients changed
        self.replaced: set[int] = set()  # by identity, those whose data were replaced afterwards
        # Tensors of no trace that were written, with their versions before; None: all may be such, and nobody asks.
        self.constants: dict[int, tuple[torch.Tensor, int]] | None = None
        self._reshaped: dict[int, torch.Tensor] = {}  # by identity; held, so that no other has it
        self._required: dict[int, torch.Tensor] = {}  # told to require gradients; the same

    def note_required(self, handle: torch.Tensor, has_views: bool) -> None:
        """Note that a handle is told to require gradients."""
        self._required[id(handle)] = handle
        if has_views:
            self.asked.add(VIEW)  # to autograd these are views of what the tensor itself may be one of

    def note_write(self, handle: torch.Tensor, base: Base) -> None:
        """Note a write: of what is no tensor of the trace's, or of which autograd does not tell all that share memory.

        It does not without grad mode, and where these are no views of one tensor.
        """
        if self.constants is not None and type(handle) is not FakeTensor and not handle.is_inference():
            self.constants.setdefault(id(handle), (handle, handle._version))
        there = [other for ref in base.handles.values() if (other := ref()) is not None] if self._required else []
        if len(there) > 1 and any(id(other) in self._required for other in there):
            self.asked.add(VIEW)  # a write makes autograd look for the others where that begins
        if self.hides_writes is False:
            told = autograd_base(handle) if torch.is_grad_enabled() and handle.requires_grad else None
            known = (other for ref in base.handles.values() if (other := ref()) is not None)
            self.hides_writes = any(other.requires_grad and autograd_base(other) is not told for other in known)

    def note_address(self, source: torch.Tensor, part: torch.Tensor, base: Base) -> None:
        """Note that `as_strided` takes a part of a storage, given by a tensor of it."""
        offset = source.storage_offset()
        if not (type(offset) is int and offset == 0):
            self.readdressed.add(base.key)
        (first, last), (start, end) = (hinted_span(Layout.of(tensor)) for tensor in (source, part))
        if start < first or last < end:
            self.beyond.setdefault(base.key, len(base.log))

    def note_pieces(self, source: torch.Tensor) -> None:
        """Note that several views of a handle are made at once: autograd accepts no write to what they are views of."""
        if source.requires_grad:
            self.pieces.add(id(autograd_base(source)))

    def note_untold(self, handle: torch.Tensor) -> None:
        """Note a write of what has no gradient (a comparison in place), which leaves a handle its history."""
        if self.hides_writes is False:
            self.hides_writes = handle.requires_grad

    def note_reshape(self, handle: torch.Tensor, views_lose: bool) -> None:
        """Note that a handle is about to get other metadata; whether views of it may then show what it does not."""
        if handle.requires_grad:
            self._reshaped[id(handle)], self.reshapes = handle, True
            if views_lose and torch.is_grad_enabled():
                self.asked.add(VIEW)  # autograd finds these in what the handle becomes, or in what that is a view of

    def note_data(self, handle: torch.Tensor) -> None:
        """Note that a handle gets other data by `.data =`."""
        if id(handle) in self._reshaped:
            self.replaced.add(id(handle))

    def close(self) -> None:
        """Drop all tensors: the call has ended."""
        self.hooked.clear()
        self._reshaped.clear()
        self._required.clear()
