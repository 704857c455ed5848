"""Who shares a storage with whom: the records, found from any tensor.

Which view a handle has is derived from the handle's storage and geometry, so that metadata mutation, ``.data`` and
copies of a tensor object that are made behind the dispatcher need no bookkeeping.

Invariant: replaying the rules from the top of a base's tree down to a view gives the view's geometry.
Limits: strided layout. What the views are worth is the matter of :mod:`functionalize.aliasing.regenerate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize._torch import storage_key, unbacked
from functionalize.aliasing import geometry as regions
from functionalize.aliasing import view_composition as view_routes
from functionalize.aliasing import view_rules
from functionalize.aliasing.bases import Base, HandleRef, View
from functionalize.aliasing.geometry import Geometry
from functionalize.aliasing.view_rules import Call, Value, ViewRule
from functionalize.errors import UnsupportedMutationError

aten = torch.ops.aten

# A user's `x.view(-1)` of a tensor that has one dimension already is kept as a step of its own, as in the documented
# graphs of torch.func.functionalize. Deeper in a chain, and for other ops, such a step is dropped.
_RENAMINGS = frozenset({aten.view.default, aten._unsafe_view.default})
_LONG_CHAIN = 3  # from here on a view looks for a shorter way from the root


class AliasGraph:
    """All bases of one call, found by storage, and the views that handles have on them."""

    def __init__(self, held: Callable[[torch.Tensor], bool] = lambda handle: False) -> None:
        self._held = held  # whether a handle outlives the call, and so does what is written to it
        self.bases: dict[int, Base] = {}
        self.keeps_writes = False  # whether bases remember all writes, also those that their values have
        self._together: dict[int, list[torch.Tensor]] = {}

    def expect(self, inputs: Sequence[torch.Tensor]) -> None:
        """Learn the inputs of the call. Those that share a storage get one base as soon as one of them needs it."""
        for handle in inputs:
            self._together.setdefault(storage_key(handle), []).append(handle)
        self._together = {key: group for key, group in self._together.items() if len(group) > 1}

    def close(self) -> None:
        """Drop all tensors: the call has ended."""
        for base in list(self.bases.values()):  # with a value a handle may die, and its base be forgotten
            base.let_go()
        self.bases.clear()
        self._together.clear()

    def find(self, handle: torch.Tensor) -> View | None:
        """The handle's view, or None when its storage was neither viewed nor written."""
        base = self.bases.get(storage_key(handle))
        if base is None:
            return None
        place = Geometry.of(handle)
        known = base.handles.get(id(handle))
        if known is not None and (known.view.geometry is place or known.view.geometry.key == place.key):
            return known.view
        if base.at(place) is None:
            base.simplify()
        return self.locate(base, place)

    def ensure(self, handle: torch.Tensor) -> View:
        """The handle's view, of a new base if there is none yet."""
        return self.find(handle) or self.adopt(handle, handle)

    def adopt(self, handle: torch.Tensor, value: Value) -> View:
        """Make a base for the handle's storage whose root is worth ``value``."""
        group = self._together.pop(storage_key(handle), ()) if self._together else ()
        first = max(group, key=lambda member: Geometry.of(member).reach) if group else handle
        base = Base(first, value if first is handle else first)
        self.bases[base.key] = base
        base.kept = {} if self.keeps_writes else None
        base.held = first if base.original and self._held(first) else None
        if value is not handle:
            self.track(handle, base.root)
        for other in group:
            view = self.locate(base, Geometry.of(other))
            if view.value is None:
                view.settle(other, 0)
        return base.root if first is handle else self.locate(base, Geometry.of(handle))

    def moved(self, handle: torch.Tensor) -> None:
        """A handle's metadata was changed by an op that no rule describes."""
        base = self.bases.get(storage_key(handle))
        if base is None:
            self.adopt(handle, handle)
        else:
            self.track(handle, self.locate(base, Geometry.of(handle)))

    def track(self, handle: torch.Tensor, view: View) -> None:
        """Remember which view a handle has. A base is forgotten with the last handle that depends on it."""
        known = HandleRef(handle, self._forget)
        known.key, known.view = id(handle), view
        view.base.handles[known.key] = known

    def _forget(self, gone: HandleRef) -> None:
        base = gone.view.base
        if base.handles.get(gone.key) is gone:
            del base.handles[gone.key]
            if not base.handles and self.bases.get(base.key) is base:
                del self.bases[base.key]
                base.let_go()

    def derive(self, source: View, op: Any, args: tuple[Any, ...], place: Geometry) -> View:
        """The view that ``op(source, *args)`` makes; chains collapse where fewer steps reach the same place."""
        base, build = source.base, view_rules.VIEW_RULES.get(op)
        if source is base.root and op in _RENAMINGS and place.key == source.geometry.key:
            return base.renamed(view_rules.VIEW_RULES[op](source.geometry, place, *args))
        known = base.at(place)
        if known is source and build is not None and not place.static and unbacked(place.size):
            return View(base, source, build(source.geometry, place, *args), place)  # may do more when a graph is run
        if known is not None:
            return known
        if build is None:
            return self.locate(base, place)
        if source.depth - base.root.depth >= _LONG_CHAIN:
            shortcut = self._shortcut(source, place)
            if shortcut is not None:
                return shortcut
        return base.add(source, build(source.geometry, place, *args), place)

    def _shortcut(self, source: View, place: Geometry) -> View | None:
        """Reach a place at the end of a long chain from the root by fewer steps, if that can be."""
        base, root = source.base, source.base.root
        length = source.depth - root.depth
        steps = _route(root, place)
        if steps is None:
            return self.locate(base, place) if length >= 2 * _LONG_CHAIN and place.static else None
        if len(steps) > length:
            return None
        parent, rule = self._last(root, steps)
        return base.at(place) or base.add(parent, rule, place)

    def _last(self, root: View, steps: Sequence[view_routes.Step]) -> tuple[View, ViewRule]:
        """The last step of a route as a rule, and the view that it starts from."""
        parent, base = root, root.base
        for op, args, reached in steps[:-1]:
            parent = base.at(reached) or base.add(parent, _rule(op, parent, reached, args), reached)
        op, args, reached = steps[-1]
        return parent, _rule(op, parent, reached, args)

    def prepare_write(self, view: View) -> None:
        """Hang a view that is about to be written below sources that hold each element once.

        A source whose positions share elements (`unfold`, `expand`) would keep the old one at the other positions.
        """
        base = view.base
        if not any(source.geometry.shares for source in view.lineage() if source is not view):
            if view is base.top and view.geometry.shares:
                self._image(base, view.geometry)
            return
        steps = _route(base.root, view.geometry)
        parent, rule = self._last(base.root, steps) if steps else self._address(base, view.geometry)
        if any(source is view or source.geometry.shares for source in parent.lineage()):  # a step was there already
            parent, rule = self._address(base, view.geometry)
        base.move(view, parent, rule)

    def locate(self, base: Base, place: Geometry) -> View:
        """A view by its place alone, addressed through the elements of its storage in order."""
        known = base.at(place)
        if known is not None:
            return known
        return base.add(*self._address(base, place), place)

    def _address(self, base: Base, place: Geometry) -> tuple[View, ViewRule]:
        """A source whose elements lie in order of the storage, and the rule that reads a place from it."""
        if place.conj or place.neg:
            op = aten._conj.default if place.conj else aten._neg_view.default
            neg = place.neg if place.conj else False
            plain = self.locate(base, dataclasses.replace(place, conj=False, neg=neg))
            self.prepare_write(plain)
            return plain, _rule(op, plain, place, ())
        top = base.top.geometry
        source = base.top if regions.reaches(top, place) else self._image(base, place)
        if source.geometry.dtype != place.dtype:
            source = self._as_dtype(source, place.dtype)
        whole = (
            place.order is not None
            and place.elements == source.geometry.elements
            and place.dtype == source.geometry.dtype
        )
        if whole and len(source.geometry.size) == 1:
            return source, view_rules.permuted_dense(place)
        return source, view_rules.strided(source.geometry, place)

    def _as_dtype(self, source: View, dtype: torch.dtype) -> View:
        place = regions.as_dtype(source.geometry, dtype)
        rule = view_rules.VIEW_RULES[aten.view.dtype](source.geometry, place, dtype)
        return source.base.at(place) or source.base.add(source, rule, place)

    def _image(self, base: Base, place: Geometry) -> View:
        """A new top: the elements of the storage in order, from the first to the last that any view addresses."""
        old = base.top
        around = regions.image(old.geometry, place)
        if around is None:
            raise UnsupportedMutationError(
                f"a tensor of size {tuple(place.size)} at {place.offset} of a storage seen through {old.geometry.size}",
                why="where the two meet depends on sizes that are not known while tracing",
                hint="trace with static shapes (tracing_mode='fake'), or pass tensors that do not share a storage",
            )
        image = View(base, None, None, around)
        if old.geometry.order is not None and old.geometry.elements == around.elements:
            rule = view_rules.permuted_dense(old.geometry)
        else:
            rule = view_rules.strided(image.geometry, old.geometry)
        image.stamp = old.stamp
        base.seed = _seed(base, image.geometry, rule, old)
        base.crown(image, rule)
        return image


def _route(root: View, place: Geometry) -> list[view_routes.Step] | None:
    """Plain views that lead from a root to a place, if the place is a box of it."""
    box = regions.box(root.geometry, place)
    if box is None or (place.conj, place.neg) != (root.geometry.conj, root.geometry.neg):
        return None
    return view_routes.steps(root.geometry, box, place)


def _rule(op: Any, source: View, place: Geometry, args: tuple[Any, ...]) -> ViewRule:
    return view_rules.VIEW_RULES[op](source.geometry, place, *args)


def _seed(base: Base, place: Geometry, rule: ViewRule, old: View) -> Callable[[Call], Value]:
    """How to compute an image from the old top's value, and around it from what the storage holds."""
    original, old_seed, value, empty = base.original, base.seed, old.value, regions.empty(old.geometry)

    def seed(call: Call) -> Value:
        first = old_seed(call) if value is None and old_seed is not None else value
        handle = base.twin if base.twin is not None else original() if original else None
        inside = base.holds(place)

        def around() -> Value:
            held = place.size[0] if inside else _held(base, place, old.geometry)
            if handle is None or not (inside or held > 0):
                return call(aten.new_zeros.default, first, list(place.size))
            elements = call(aten.as_strided_copy.default, handle, [held], [1], place.offset)
            gained = [] if inside else [call(aten.new_zeros.default, first, [place.size[0] - held])]
            return call(aten.cat.default, [elements, *gained]) if gained else elements

        if empty or (first is handle and not rule.covers and inside):
            return around()
        return rule.inverse(call, around, first)

    return seed


def _held(base: Base, place: Geometry, old: Geometry) -> int:
    """How many elements of a place the storage had before it grew; none, where it had those of the old top alone."""
    if type(base.capacity) is int:
        return int(base.capacity // place.dtype.itemsize - place.offset)
    if regions.hinted_span(old) == (0, regions.hint(base.capacity)):
        return 0
    raise UnsupportedMutationError(
        f"a tensor of size {tuple(old.size)} grows into a storage that it shows in part",
        why="how much the storage held before depends on sizes that the graph has no name for",
        hint="trace with static shapes (tracing_mode='fake'), or resize a tensor that has a storage of its own",
    )
