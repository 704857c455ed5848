"""What a call does with the results of its graph: write-backs, and outputs that alias as the original's do.

Invariant: an output is the caller's own tensor, or a view of it, exactly where the original returns that.
Limits: outputs that share a storage which no input has are copied into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from functionalize.outcome import Back, Leaf
from functionalize.regions import Geometry, hinted_span

aten = torch.ops.aten


def write_back(backs: Sequence[Back], inputs: Sequence[Any], results: Sequence[Any], stand_ins: Any) -> None:
    """Do to the caller's tensors what the program did to its inputs."""
    for back in backs:
        target = inputs[back.source]
        for op, args in back.metadata:
            op(target, *map(stand_ins, args))
        for piece in back.pieces:
            part = target
            for op, args in piece.path:
                part = op(part, *args)
            aten.copy_.default(part, results[piece.output])
        for op, args in back.after:
            op(target, *args)


class Presenter:
    """Gives the tensors of one call, by their numbers."""

    def __init__(self, leaves: Sequence[Leaf], inputs: Sequence[Any], places: Any, results: Sequence[Any]) -> None:
        self._leaves, self._inputs, self._places, self._results = leaves, inputs, places, results
        self._made: dict[int, torch.Tensor] = {}

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor of a number: one object, however often it is asked for."""
        if number not in self._made:
            leaf = self._leaves[number]
            if leaf.group is not None:
                self._make_group(leaf.group)
            elif leaf.source is not None:
                self._made[number] = self._of_input(leaf, leaf.source)
            else:
                self._made[number] = laid_out(self._results[leaf.output or 0], leaf.place)
        return self._made[number]

    def _of_input(self, leaf: Leaf, source: int) -> torch.Tensor:
        tensor: torch.Tensor = self._inputs[source]
        if leaf.itself:
            return tensor
        was: Geometry = self._places[source]
        return view_at(tensor, was, leaf.place)

    def _make_group(self, group: int) -> None:
        """Outputs that share a storage: copied to their places in one."""
        members = [(number, leaf) for number, leaf in enumerate(self._leaves) if leaf.group == group]
        spans = [hinted_span(leaf.place) for _, leaf in members]
        values = [self._results[leaf.output or 0] for _, leaf in members]
        whole = torch.empty(max(stop for _, stop in spans), dtype=torch.uint8, device=values[0].device)
        for (number, leaf), value in zip(members, values, strict=True):
            made = at_place(whole.untyped_storage(), leaf.place.key[:3], leaf.place.dtype)
            fill(made, value)
            self._made[number] = _with_bits(made, leaf.place)


def view_at(tensor: torch.Tensor, was: Geometry, place: Geometry) -> torch.Tensor:
    """A view of a tensor, where the program had it relative to the tensor's own place."""
    bits = (place.conj, place.neg) == (was.conj, was.neg)
    if place.dtype == was.dtype and bits:
        offset = tensor.storage_offset() + place.offset - was.offset
        return tensor.as_strided(place.size, place.stride, offset)
    apart = tensor.storage_offset() * tensor.itemsize - was.offset * was.dtype.itemsize
    offset = place.offset + apart // place.dtype.itemsize
    made = at_place(tensor.untyped_storage(), (place.size, place.stride, offset), place.dtype)
    return _with_bits(made, place)


def _with_bits(made: torch.Tensor, place: Geometry) -> torch.Tensor:
    made = made.conj() if place.conj else made
    return aten._neg_view.default(made) if place.neg else made


def at_place(storage: torch.UntypedStorage, place: tuple[Any, Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """A tensor at a place (size, strides, offset) of a storage."""
    size, stride, offset = place
    with torch.no_grad():
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        return empty.set_(storage, offset, size, stride)  # type: ignore[call-overload, no-any-return]


def laid_out(value: torch.Tensor, place: Geometry) -> torch.Tensor:
    """A result with the strides that the original's has."""
    if value.layout is not torch.strided or not place.static or _alike(value, place):
        return value
    made = torch.empty(_extent(place), dtype=value.dtype, device=value.device)
    made = made.as_strided(place.size, place.stride, 0)
    return fill(made, value)


def _extent(place: Geometry) -> int:
    return 0 if 0 in place.size else 1 + sum((n - 1) * s for n, s in zip(place.size, place.stride, strict=True))


def _alike(value: torch.Tensor, place: Geometry) -> bool:
    dims = zip(value.size(), value.stride(), place.stride, strict=True)
    return all(mine == wanted for size, mine, wanted in dims if size > 1)


def fill(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy a value to a place, also where positions share elements: these have one value."""
    part, given = target, value
    for dim, (size, stride) in enumerate(zip(target.size(), target.stride(), strict=True)):
        if stride == 0 and size > 1:
            part, given = part.narrow(dim, 0, 1), given.narrow(dim, 0, 1)
    try:
        part.copy_(given)
    except RuntimeError:  # windows that overlap: element by element
        for index in range(part.size(0)):
            fill(part[index], given[index])
    return target
