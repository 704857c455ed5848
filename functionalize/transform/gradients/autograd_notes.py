"""Notes what a program does, while it is traced, that its graph does not show but gradients or guards depend on.

Invariant: notes are only added while the program runs. Limits: properties that only C++ reads are not noted.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch

from functionalize._torch import (
    BEGIN,
    FOLLOWED_VIEW,
    HOOKS,
    LAYOUT,
    LEAF_VIEW,
    OFFSET,
    SILENT_VIEW,
    STORAGE,
    VERSION,
    VIEW,
    FakeTensor,
    pytree,
    storage_key,
)
from functionalize._torch.dispatch import identity_of
from functionalize._torch.tensors import (
    autograd_base,
    is_leaf_to_autograd,
    is_taken_again,
    is_view_to_autograd,
)
from functionalize.aliasing.bases import Base, View
from functionalize.aliasing.geometry import Layout, hinted_span, same
from functionalize.aliasing.overlap import box_of
from functionalize.call_stack import Location, user_location
from functionalize.errors import UnsupportedMutationError
from functionalize.reachability import functions_behind
from functionalize.refusals.gradients import (
    GRADIENT_OF_WRITTEN,
    READS_BEYOND,
    RESHAPED_WITHOUT_GRAD_MODE,
    VERSION_OF_GRADIENT,
)
from functionalize.transform.gradients.lost_views import LostViews

# Generators of random numbers that a program passed, by their identity in C++.
Generators = dict[int, list["weakref.ref[torch.Generator]"]]


class Reshapes:
    """The tensors whose metadata changed in place, while autograd may remember the old metadata."""

    def __init__(self) -> None:
        self.any = False  # whether one of them, or a view of it, requires gradients, or came to
        self.replaced: set[int] = set()  # by identity, those whose data were replaced afterwards
        self.lost_views = LostViews()
        self.lines: dict[int, Location | None] = {}  # likewise, the changed tensors, and the lines
        self._hidden: dict[int, Location | None] = {}  # likewise, those changed with grad mode off, and the lines
        self._first: dict[int, tuple[int, Layout]] = {}  # likewise, their storages and layouts before that
        self._held: dict[int, torch.Tensor] = {}  # by identity; held, so that no other gets it
        self._again: set[int] = set()  # likewise, those changed more than once
        # By storage, tensors that require gradients and whose data are, or were, there, before or since `.data =`.
        self._moved: dict[int, list[torch.Tensor]] = {}

    def note(self, handle: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """Note that a handle is about to get other metadata; ``views``: the other tensors in its memory."""
        if id(handle) in self._held:
            self._again.add(id(handle))
        else:
            self.lines[id(handle)] = user_location()
        self._held[id(handle)] = handle
        self.any |= handle.requires_grad or any(view.requires_grad for view in views)

    def note_silent(self, handle: torch.Tensor, before: View) -> None:
        """Note that a handle has got other metadata, perhaps with grad mode off; ``before``: its view before that.

        With the same layout in other memory, its gradients are at the same positions. So they are if it is back where
        it was before, and nothing was computed from it meanwhile.
        """
        if torch.is_grad_enabled() or is_leaf_to_autograd(handle):
            return
        now, key = Layout.of(handle), storage_key(handle)
        if handle.requires_grad and key != before.base.key:  # by `set_`, as which Dynamo records `.data =`
            self._note_moved(handle, (before.base.key, key))
        moved = key != before.base.key and same(now.size, before.layout.size)
        if not (moved and same(now.stride, before.layout.stride)):
            self._hidden.setdefault(id(handle), user_location())
            self.lost_views.note_silent(handle)
        first_key, first = self._first.setdefault(id(handle), (before.base.key, before.layout))
        if key == first_key and now.key == first.key and self.lost_views.note_return(handle):
            del self._first[id(handle)]
            self._hidden.pop(id(handle), None)

    def note_data(self, handle: torch.Tensor, source: torch.Tensor) -> None:
        """Note that a handle gets the data of another tensor by `.data =`."""
        self.lines.setdefault(id(handle), user_location())
        if handle.requires_grad:
            self._note_moved(handle, map(storage_key, (handle, source)))
        if id(handle) in self._held and handle.requires_grad:
            self.replaced.add(id(handle))

    def _note_moved(self, handle: torch.Tensor, storages: Iterable[int]) -> None:
        for key in storages:
            self._moved.setdefault(key, []).append(handle)

    def moved(self, base: Base) -> Sequence[torch.Tensor]:
        """The tensors whose data are, or were, in a storage, and were replaced by `.data =`."""
        return self._moved.get(base.key, ())

    def hidden_from_autograd(self, inputs: Iterable[torch.Tensor]) -> UnsupportedMutationError | None:
        """The error if autograd outside of the program would not see an input's new metadata as it did inside."""
        for fake in inputs:
            if id(fake) in self._hidden:
                return RESHAPED_WITHOUT_GRAD_MODE.error(self._hidden[id(fake)])
        return None

    def sees_one_change(self, handle: torch.Tensor) -> bool:
        """Whether autograd outside of the program sees one change of metadata where eager's sees several."""
        return id(handle) in self._again and handle.requires_grad

    def close(self) -> None:
        """Drop all tensors."""
        self.any |= any(handle.requires_grad for handle in self._held.values())
        self._held.clear()
        self._moved.clear()
        self.lost_views.close()


class Questions:
    """A program's questions about its tensors that other tensors may answer differently, each with the tensor.

    Inputs live as long as the program runs. So a question about a tensor that it made, noted by the identity of that
    tensor or of its memory, is never taken for a question about an input.
    """

    _OF_MEMORY = frozenset({OFFSET, BEGIN, STORAGE, VERSION, LAYOUT})  # one answer for all tensors of a storage
    _REFUSED = frozenset({VIEW, SILENT_VIEW, LEAF_VIEW, FOLLOWED_VIEW, HOOKS})  # these name the line that asked

    def __init__(self) -> None:
        self._asked: dict[str, dict[int, Location | None]] = {}

    def __contains__(self, question: str) -> bool:
        """Whether the program asked the question about any tensor."""
        return question in self._asked

    def add(self, question: str, tensor: torch.Tensor) -> None:
        """Note a question."""
        self.add_all(question, [storage_key(tensor) if question in self._OF_MEMORY else id(tensor)])

    def add_all(self, question: str, keys: Iterable[int]) -> None:
        """Note a question about tensors, leaves and functions of autograd, or memories, by their identities."""
        asked = self._asked.setdefault(question, {})
        for key in keys:
            if key not in asked:
                asked[key] = user_location() if question in self._REFUSED else None

    def add_behind(self, question: str, results: Iterable[Any]) -> None:
        """Note a question about all that autograd computed tensors, or its own functions, from."""
        functions: list[Any] = []
        for result in results:
            with contextlib.suppress(RuntimeError):  # a view that autograd rejects by now
                functions += [result.grad_fn if isinstance(result, torch.Tensor) else result]
        behind = functions_behind(node for node in functions if hasattr(node, "next_functions"))
        self.add_all(question, [id(getattr(function, "variable", function)) for function in behind])

    def of(self, *keys: int) -> Iterator[tuple[str, Location | None]]:
        """The questions about a tensor, by the identities that it has, with the lines that errors name."""
        for question, asked in self._asked.items():
            key = next((key for key in keys if key in asked), None)
            if key is not None:
                yield question, asked[key]

    def keys(self, question: str) -> Set[int]:
        """The identities that a question was about."""
        return self._asked.get(question, {}).keys()

    @contextlib.contextmanager
    def taken_back(self, question: str) -> Iterator[None]:
        """Undo the notes of a question that code inside asks, not the program."""
        before = dict(self._asked[question]) if question in self._asked else None
        try:
            yield
        finally:
            self._asked.pop(question, None)
            if before is not None:
                self._asked[question] = before


class AutogradNotes:
    """The notes of one call."""

    def __init__(self) -> None:
        # Nodes of autograd, and leaves, whose gradients the program changes by hooks, or whose memory it replaced by
        # `.data =`.
        self.hooked: list[Any] = []
        self.asked = Questions()
        self.unused: set[int] = set()  # by identity, tensors that the program has not used so far
        self.hides_writes: bool | None = None  # whether autograd missed a write; None: not noted
        self.readdressed: set[int] = set()  # storages of `as_strided` views that autograd may expect elsewhere
        self.finds_beyond = False  # whether autograd may replay such a view, outside of the tensor it was taken from
        self.pieces: set[int] = set()  # by identity, tensors that gave several views at once
        self.reshapes = Reshapes()
        # Written tensors outside of the trace, with their versions before; None: any may be outside, and is not noted.
        self.constants: dict[int, tuple[torch.Tensor, int]] | None = None
        self.generators: Generators = {}
        # By storage, the storages whose strides determine whether tensors are views of one another or copies.
        self._stride_dependent: dict[int, set[int]] = {}
        # By identity, views of tensors that are not contiguous and were written since.
        self._outdated: dict[int, weakref.ref[torch.Tensor]] = {}
        # Storages from which `as_strided` took elements that the tensor does not show, and the lines.
        self._beyond: dict[int, Location | None] = {}
        # By identity, tensors that were set to require gradients, and tensors of the caller with gradient hooks; and
        # whether a write shows that such a tensor is a view, even without other handles; held for their identity.
        self._requiring: dict[int, tuple[torch.Tensor, bool]] = {}
        self._gradients: dict[int, weakref.ref[torch.Tensor]] = {}  # by identity, gradients that autograd returned

    def note_generator(self, generator: Any) -> None:
        """Note that the program passes a generator, or None, to draw from."""
        if isinstance(generator, torch.Generator):
            self.generators.setdefault(identity_of(generator), []).append(weakref.ref(generator))

    def note_required(self, handle: torch.Tensor, beside: Iterable[torch.Tensor]) -> None:
        """Note that a handle is set to require gradients; ``beside``: the other tensors in its memory."""
        self._requiring.setdefault(id(handle), (handle, False))
        if any(is_view_to_autograd(other) and autograd_base(other) is handle for other in beside):
            self.asked.add(VIEW, handle)  # to autograd these are views of the base that the tensor itself may have

    def note_hook(self, handle: torch.Tensor, is_given: bool) -> None:
        """Note a hook on the gradient of a handle; ``is_given``: whether it comes from the program's caller."""
        self.hooked.append(handle.grad_fn or handle)
        if is_given:
            self._requiring[id(handle)] = handle, True  # after a later write the gradients of a view bypass the hook

    def note_stride_dependent(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Note a view that would have been a copy if the tensor had other strides, or the reverse."""
        for storage in (storage_key(source), storage_key(out)):
            self._stride_dependent.setdefault(storage, set()).add(storage_key(source))

    def note_write(self, handle: torch.Tensor, base: Base) -> None:
        """Note a write to a tensor outside of the trace, or one that autograd does not count for all that share memory.

        It does not with grad mode off, and if these are not views of one tensor.
        """
        self.reshapes.lost_views.note_write(handle, base)
        self.finds_beyond |= base.key in self._beyond
        # After a write autograd expects a view, in its base, where its data are now.
        self.asked.add_all(FOLLOWED_VIEW, map(id, self.reshapes.moved(base)))
        if base.key in self._stride_dependent:
            self.asked.add_all(LAYOUT, self._stride_dependent[base.key])
        if self.constants is not None and type(handle) is not FakeTensor and not handle.is_inference():
            self.constants.setdefault(id(handle), (handle, handle._version))
        if handle.requires_grad and len(base.handles) > 1:
            self._note_older_views(handle, base)
        self._note_requiring(base)
        self._note_views_of_leaves(base)
        if self.hides_writes is False:
            counted = autograd_base(handle) if torch.is_grad_enabled() and handle.requires_grad else None
            others = (other for ref in base.handles.values() if (other := ref()) is not None)
            self.hides_writes = any(other.requires_grad and autograd_base(other) is not counted for other in others)

    def _note_requiring(self, base: Base) -> None:
        """Note a write to memory of a tensor set to require gradients: autograd expects it where the memory begins."""
        sharing = [other for ref in base.handles.values() if (other := ref()) is not None] if self._requiring else []
        for other in sharing:
            if id(other) in self._requiring and (len(sharing) > 1 or self._requiring[id(other)][1]):
                self.asked.add(VIEW, other)
                self.asked.add(SILENT_VIEW, autograd_base(other))

    def _note_views_of_leaves(self, base: Base) -> None:
        """Note a write: autograd goes back to the tensor that a leaf was a view of when it became a leaf."""
        if len(base.handles) > 1:
            sharing = [other for ref in base.handles.values() if (other := ref()) is not None and other.requires_grad]
            for other in sharing:
                if is_view_to_autograd(other) and is_leaf_to_autograd(autograd_base(other)):
                    self.asked.add(LEAF_VIEW, autograd_base(other))

    def note_view(self, source: torch.Tensor) -> None:
        """Note that a view of a handle is made with grad mode off: it requires gradients if its base does."""
        if source.requires_grad and is_leaf_to_autograd(autograd_base(source)):
            self.asked.add(LEAF_VIEW, autograd_base(source))

    def note_given(self, handles: Iterable[torch.Tensor]) -> None:
        """Note the views made with grad mode off, as above, among the tensors that the caller gets."""
        for handle in handles:
            silent = handle.requires_grad and is_view_to_autograd(handle) and not is_taken_again(handle)
            if silent and is_leaf_to_autograd(autograd_base(handle)):
                self.asked.add(LEAF_VIEW, autograd_base(handle))

    def _note_older_views(self, handle: torch.Tensor, base: Base) -> None:
        others = [other for ref in base.handles.values() if (other := ref()) is not None and other is not handle]
        for other in others:
            is_older = other.requires_grad and is_view_to_autograd(other)
            if is_older and not autograd_base(other).is_contiguous():
                self._outdated[id(other)] = weakref.ref(other)

    def refuse_gradients_with_strides_of_inputs(self, inputs: Any) -> None:
        """Raise for inputs to whose gradients eager may give the strides of the inputs, because of their views.

        Raises:
            UnsupportedMutationError: an input was written after views were made of it that still live.
        """
        asked = pytree.tree_leaves(inputs)
        views = [view for ref in self._outdated.values() if (view := ref()) is not None]
        if any(autograd_base(view) is tensor for view in views for tensor in asked):
            raise GRADIENT_OF_WRITTEN.error()

    def note_address(self, source: View, part: Layout) -> None:
        """Note that `as_strided`, in place or not, takes a part of a storage, through a tensor of it."""
        offset, base = source.layout.offset, source.base
        if not (type(offset) is int and offset == 0):
            self.readdressed.add(base.key)
        (first, last), (start, end) = map(hinted_span, (source.layout, part))
        gaps = source.layout.static and part.static and not source.layout.dense
        between = gaps and box_of(source.layout, part) is None  # elements that the tensor leaves out
        if start < first or last < end or between:
            self._beyond.setdefault(base.key, user_location())

    def hidden_from_autograd(self, inputs: Iterable[torch.Tensor | None]) -> UnsupportedMutationError | None:
        """The error if autograd would treat inputs differently from eager, given the new metadata that a call sets."""
        fakes = [fake for fake in inputs if fake is not None]
        if any(self.reshapes.sees_one_change(fake) and storage_key(fake) in self._beyond for fake in fakes):
            return self.goes_beyond()
        return self.reshapes.hidden_from_autograd(fakes)

    def goes_beyond(self) -> UnsupportedMutationError:
        """The error for a view that autograd may replay, outside of the tensor that it was taken from."""
        return READS_BEYOND.error(next(iter(self._beyond.values()), None))

    def note_pieces(self, source: torch.Tensor) -> None:
        """Note that several views of a handle are made at once: autograd refuses writes to their base."""
        if source.requires_grad:
            self.pieces.add(id(autograd_base(source)))

    def note_hidden_change(self, handle: torch.Tensor) -> None:
        """Note a write of a value without gradient (a comparison in place), which leaves a handle its history."""
        if self.hides_writes is False:
            self.hides_writes = handle.requires_grad

    def note_reshape(self, handle: torch.Tensor, views: Sequence[torch.Tensor], views_lose: bool) -> None:
        """Note a coming change of a handle's metadata; ``views_lose``: whether views may then show what it does not."""
        self.reshapes.note(handle, views)
        self.finds_beyond |= storage_key(handle) in self._beyond
        if handle.requires_grad and views_lose and torch.is_grad_enabled():
            self.asked.add(VIEW, handle)  # autograd replays these on the changed handle, or on its base
            self.reshapes.lost_views.note_lost()

    def note_reshaped(self, handle: torch.Tensor, before: View) -> None:
        """Note that a fake handle has got other metadata; ``before``: its view before that."""
        if is_leaf_to_autograd(handle) and len(before.base.handles) > 1:
            self.asked.add(LEAF_VIEW, handle)
        self.reshapes.note_silent(handle, before)
        self.reshapes.lost_views.note_turn(handle, before.base)

    def note_data(self, handle: torch.Tensor, source: torch.Tensor) -> None:
        """Note that a handle gets the data of another tensor by `.data =`: autograd remembers it as it was."""
        self.reshapes.note_data(handle, source)
        self.reshapes.lost_views.note_moved(handle)
        with contextlib.suppress(RuntimeError):  # a view that autograd rejects by now
            self.hooked += [] if handle.grad_fn is None else [handle.grad_fn]

    def note_gradients(self, gradients: Any) -> None:
        """Note the gradients that autograd returned: a pytree of tensors and None."""
        tensors = [tensor for tensor in pytree.tree_leaves(gradients) if tensor is not None]
        self._gradients |= {id(tensor): weakref.ref(tensor) for tensor in tensors}

    def refuse_version_of_gradient(self, tensor: torch.Tensor) -> None:
        """Raise for a gradient: eager's engine accumulates gradients in place, a graph does not.

        Raises:
            UnsupportedProgramError: the tensor is a gradient.
        """
        ref = self._gradients.get(id(tensor))
        captured = self.constants is not None  # else the engine runs on the tensors themselves, or for this trace alone
        if captured and ref is not None and ref() is tensor:
            raise VERSION_OF_GRADIENT.error()

    def close(self) -> None:
        """Drop all tensors: the call has ended."""
        self.hooked.clear()
        self.reshapes.close()
        self._requiring.clear()
