"""What a call does with the results of its graph: write-backs, and outputs that alias as the original's do.

Invariant: an output is the caller's own tensor, or a view of it, exactly where the original returns that.
Limits: outputs that share a storage which no input has are copied into one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from functionalize._torch import copy_of_memory, storage_key
from functionalize.aliasing.geometry import Layout
from functionalize.errors import DataDependentError
from functionalize.graph_capture.finalize import Back, Leaf

aten = torch.ops.aten


class Sizes:
    """The numbers that a program's symbols stand for in one call."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def learn(self, place: Layout, tensor: torch.Tensor) -> None:
        """Read symbols off a tensor of a known place."""
        if place.static:
            return
        for symbol, number in zip(place.size, tensor.size(), strict=True):
            if type(symbol) is not int:
                self._solve(symbol.node.expr, number)

    def _solve(self, expression: Any, number: int) -> None:
        """Learn a symbol from what a line in it comes to."""
        unknown = expression.free_symbols.difference(self._known)
        if len(unknown) != 1:
            return
        (symbol,) = unknown
        at_zero, at_one, at_two = (expression.xreplace({**self._known, symbol: value}) for value in (0, 1, 2))
        line = at_one - at_zero == at_two - at_one  # not the smaller of two sizes
        if line and at_one != at_zero and (number - at_zero) % (at_one - at_zero) == 0:
            value = int((number - at_zero) / (at_one - at_zero))
            if expression.xreplace({**self._known, symbol: value}) == number:
                self._known[symbol] = value

    def number(self, size: Any) -> Any:
        """A size in this call; itself where it has a symbol that no tensor tells."""
        if type(size) is int:
            return size
        value = size.node.expr.xreplace(self._known)
        return int(value) if type(value) is int or value.is_number else size

    def place(self, place: Layout) -> Layout:
        """A place in this call."""
        if place.static:
            return place
        size, stride = tuple(map(self.number, place.size)), tuple(map(self.number, place.stride))
        return replace(place, size=size, stride=stride, offset=self.number(place.offset))


def write_back(
    backs: Sequence[Back],
    inputs: Sequence[Any],
    places: Mapping[int, Layout],
    results: Sequence[Any],
    originals: Mapping[int, torch.Tensor],
    stand_in: Callable[[Any], Any],
    sizes: Sizes,
) -> None:
    """Do to the caller's tensors what the program did to its inputs; ``originals`` keep the storages they came with."""
    for back in backs:
        target = inputs[back.source]
        if back.place is not None:
            place, target = sizes.place(back.place), originals[back.source]
            _make_room(target, place)
            target = view_at(target, sizes.place(places[back.source]), place)
        for op, args in back.metadata:
            op(target, *map(stand_in, args))
        for piece in back.pieces:
            part = target
            for op, args in piece.path:
                part = op(part, *args)
            if results[piece.output] is not part:  # else it was written in place
                aten.copy_.default(part, results[piece.output])
        for op, args in back.after:
            op(target, *args)


def _make_room(tensor: torch.Tensor, place: Layout) -> None:
    """Let a storage grow as the program let it grow, through a view."""
    storage, needed = tensor.untyped_storage(), place.span[1]
    if storage.nbytes() < needed:
        storage.resize_(needed)


def refuse_other_sizes(leaves: Sequence[Leaf], results: Sequence[Any]) -> None:
    """Raise where the data gave a result another size than tracing took for granted (a broadcast asks for one)."""
    for leaf in leaves:
        if leaf.output is None or not leaf.place.static or results[leaf.output].layout is not torch.strided:
            continue
        if results[leaf.output].size() != leaf.place.size:
            raise DataDependentError(
                f"the data give a result of size {tuple(results[leaf.output].size())}, not {leaf.place.size}",
                why="a size that only the data tell was met with a number: tracing takes the two for equal, eager may "
                "broadcast",
                hint="say what is known of the size before (torch._check), or expand what has one element by itself",
            )


class _Copied(torch.autograd.Function):
    """A tensor in a copy of its storage, of which it may show a part only."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        return copy_of_memory(value, storage)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def unwritten(inputs: Sequence[Any], backs: Sequence[Back]) -> list[Any]:
    """The inputs, with copies for those whose memory will be written: autograd may save what they hold now."""
    written = {storage_key(inputs[back.source]) for back in backs}
    copies: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or storage_key(value) not in written:
            return value
        key = storage_key(value)
        if key < 0:
            return value.clone()
        if key not in copies:
            copies[key] = value.untyped_storage().clone()
        return _Copied.apply(value, copies[key])  # type: ignore[no-untyped-call]

    return [copy(value) for value in inputs]


class Presenter:
    """Gives the tensors of one call, by their numbers."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        inputs: Sequence[Any],
        places: Mapping[int, Layout],
        results: Sequence[Any],
        sizes: Sizes,
        originals: Mapping[int, tuple[torch.Tensor, Layout]],
    ) -> None:
        self._leaves, self._inputs, self._places, self._results, self._sizes = leaves, inputs, places, results, sizes
        self._originals = originals  # of inputs that left their storages: tensors that keep those
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
                self._made[number] = laid_out(self._results[leaf.output or 0], self._sizes.place(leaf.place))
        return self._made[number]

    def _of_input(self, leaf: Leaf, source: int) -> torch.Tensor:
        tensor: torch.Tensor = self._inputs[source]
        if leaf.itself:
            return tensor
        before = self._places[source]
        if leaf.left:
            tensor, before = self._originals[source]
        place, was = self._sizes.place(leaf.place), self._sizes.place(before)
        if not (place.static and was.static):
            return self._results[leaf.output or 0]  # type: ignore[no-any-return]
        if not leaf.fresh:
            return view_at(tensor, was, place)
        _make_room(tensor, place)
        with torch.no_grad():
            fill(view_at(tensor, was, place), self._results[leaf.output or 0])
        return view_at(tensor, was, place)

    def _make_group(self, group: int) -> None:
        """Outputs that share a storage: copied to their places in one."""
        members = [(number, leaf) for number, leaf in enumerate(self._leaves) if leaf.group == group]
        places = [self._sizes.place(leaf.place) for _, leaf in members]
        values = [self._results[leaf.output or 0] for _, leaf in members]
        if not all(place.static for place in places):
            self._made |= {number: value for (number, _), value in zip(members, values, strict=True)}
            return
        capacity = self._sizes.number(members[0][1].capacity)
        room = max(place.span[1] for place in places) if type(capacity) is not int else capacity
        whole = torch.empty(room, dtype=torch.uint8, device=values[0].device)
        for (number, _), place, value in zip(members, places, values, strict=True):
            made = at_place(whole.untyped_storage(), (place.size, place.stride, place.offset), place.dtype)
            self._made[number] = fill(_with_bits(made, place), value)


def view_at(tensor: torch.Tensor, was: Layout, place: Layout) -> torch.Tensor:
    """A view of a tensor, where the program had it relative to the tensor's own place."""
    bits = (place.conj, place.neg) == (was.conj, was.neg)
    if place.dtype == was.dtype and bits:
        offset = tensor.storage_offset() + place.offset - was.offset
        return tensor.as_strided(place.size, place.stride, offset)
    apart = tensor.storage_offset() * tensor.itemsize - was.offset * was.dtype.itemsize
    offset = place.offset + apart // place.dtype.itemsize
    made = at_place(tensor.untyped_storage(), (place.size, place.stride, offset), place.dtype)
    return _with_bits(made, place)


def _with_bits(made: torch.Tensor, place: Layout) -> torch.Tensor:
    made = made.conj() if place.conj else made
    return aten._neg_view.default(made) if place.neg else made


def at_place(storage: torch.UntypedStorage, place: tuple[Any, Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """A tensor at a place (size, strides, offset) of a storage."""
    size, stride, offset = place
    with torch.no_grad():
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        return empty.set_(storage, offset, size, stride)


def laid_out(value: torch.Tensor, place: Layout) -> torch.Tensor:
    """A result with the strides that the original's has."""
    if value.layout is not torch.strided or not place.static or _alike(value, place):
        return value
    made = torch.empty(_extent(place), dtype=value.dtype, device=value.device)
    made = made.as_strided(place.size, place.stride, 0)
    return fill(made, value)


def _extent(place: Layout) -> int:
    return 0 if 0 in place.size else 1 + sum((n - 1) * s for n, s in zip(place.size, place.stride, strict=True))


def _alike(value: torch.Tensor, place: Layout) -> bool:
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
    except RuntimeError as error:
        if not str(error).startswith("unsupported operation"):
            raise
        # Windows that overlap: one by one.
        for index in range(part.size(0)):
            fill(part[index], given[index])
    return target
