"""What a program does, while it is traced, that a graph cannot show and gradients or guards depend on.

Invariant: notes are only added while the program runs. Limits: what is asked by C++ alone is not seen.
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize.aliasing.bases import Base


class AutogradNotes:
    """The notes of one call."""

    def __init__(self) -> None:
        self.hooked: list[Any] = []  # functions of autograd, and leaves, whose gradients the program changes by hooks
        self.asked: set[str] = set()  # what the program asked tensors of which others like them may say otherwise
        self.unused: set[int] = set()  # by identity, tensors that the program has asked nothing so far
        self.hides_writes: bool | None = None  # whether autograd missed some; None: nobody asks
        self.readdressed: set[int] = set()  # storages of `as_strided` views that autograd may look for elsewhere
        self.reshapes = False  # whether metadata of a tensor that requires gradients changed
        self.replaced: set[int] = set()  # by identity, those whose data were replaced afterwards
        self._reshaped: dict[int, torch.Tensor] = {}  # by identity; held, so that no other has it

    def note_write(self, handle: torch.Tensor, base: Base) -> None:
        """Note a write that autograd misses: without grad mode, or through a detached alias."""
        if self.hides_writes is not False or (torch.is_grad_enabled() and handle.requires_grad):
            return
        known = (ref() for ref in base.handles.values())
        self.hides_writes = any(other is not None and other.requires_grad for other in known)

    def note_reshape(self, handle: torch.Tensor) -> None:
        """Note that a handle is about to get other metadata."""
        if handle.requires_grad:
            self._reshaped[id(handle)], self.reshapes = handle, True

    def note_data(self, handle: torch.Tensor) -> None:
        """Note that a handle gets other data by `.data =`."""
        if id(handle) in self._reshaped:
            self.replaced.add(id(handle))

    def close(self) -> None:
        """Drop all tensors: the call has ended."""
        self.hooked.clear()
        self._reshaped.clear()
