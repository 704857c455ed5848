"""Calls of a program that differ from the one it was captured with: other inputs, modes, numbers and flags.

Invariant: a call is data, drawn from the program's seed. Limits: few changes at a time; what eager leaves to the order
of its loops is not called.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.sweeps.fuzz.generate import followed, is_followed, well_defined
from tests.sweeps.fuzz.program import Input, Program, Storage


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CALLS = 4  # beside those that are like the capture
MODES: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype float64": lambda: _default_dtype(torch.float64),
}


@dataclass(frozen=True)
class Call:
    """What one call passes, and what it runs under. ``program`` has the call's inputs."""

    program: Program
    changes: tuple[str, ...] = ()
    mode: str = ""
    training: bool = True
    number: Any = 2

    def __str__(self) -> str:
        how = [self.mode or "plain", *(() if self.training else ("eval",)), f"number {self.number!r}"]
        return f"the call with other {', '.join(self.changes) or 'nothing'} ({', '.join(how)})"


class Surrounded(torch.nn.Module):
    """The function of a program where a parameter, a number, a flag and the modes of torch count as well."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.tensor([[0.5, -1.0]]))

    def forward(self, number: Any, *inputs: torch.Tensor) -> Any:
        """The outputs, and what else counts."""
        outputs = self.function(*inputs)
        column = inputs[0].reshape(-1, 1).real.float()
        product = column @ self.weight
        return outputs, product * number if self.training else product + 1, torch.ones(2) * number


def surrounded(program: Program) -> bool:
    """Whether the program is captured inside of a module."""
    return random.Random(f"{program.seed} module").random() < 0.5


def calls_of(program: Program) -> list[Call]:
    """The call of the capture, and others."""
    rng = random.Random(f"{program.seed} capture")
    follows = is_followed(program.seed)
    first = Call(followed(program) if follows else program, number=rng.choice([2, 0.5, 2, True]))
    if rng.random() < 0.6 and not follows:
        first = replace(gradients(rng, first), changes=())
    if rng.random() < 0.1:
        first = replace(mode(rng, first), changes=())
    if rng.random() < 0.4:
        first = replace(slices(rng, first), changes=())
    if not well_defined(first.program):
        first = Call(program)
    others = [_other(random.Random(f"{program.seed} call {n}"), first) for n in range(CALLS)]
    return [first, *(call for call in others if call is not None), values(rng, first)]


def _other(rng: random.Random, first: Call) -> Call | None:
    """A call that differs in one or two ways, if eager says what it does."""
    for _ in range(3):
        call = first
        for _ in range(rng.choice([1, 1, 2])):
            call = rng.choice(CHANGES)(rng, call)
        if call.changes and well_defined(call.program):
            return call
    return None


Change = Callable[[random.Random, Call], Call]
CHANGES: list[Change] = []


def change(maker: Callable[[random.Random, Call], Call]) -> Change:
    """A way for a call to differ; its name is noted where it does."""

    def changed(rng: random.Random, call: Call) -> Call:
        other = maker(rng, call)
        return call if other == call else replace(other, changes=(*call.changes, maker.__name__))

    CHANGES.append(changed)
    return changed


def _with_inputs(call: Call, inputs: list[Input], storages: tuple[Storage, ...] | None = None) -> Call:
    storages = call.program.storages if storages is None else storages
    needed = {entry.storage for entry in inputs}
    viewed = {entry.storage for entry in inputs if entry.gradient == "view"}
    kept = tuple(replace(one, computed=one.name in viewed) for one in storages if one.name in needed)
    return replace(call, program=replace(call.program, inputs=tuple(inputs), storages=kept))


def _place(call: Call, chosen: Input, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Call:
    """Put an input, and those that are the same object, elsewhere in storages of their own."""
    placed = replace(chosen, size=size, stride=stride, offset=offset, storage=f"{chosen.storage}_{chosen.name}")
    room = -(-placed.extent // getattr(torch, chosen.dtype).itemsize)
    storage = Storage(placed.storage, chosen.dtype, max(room, 1))
    inputs = [
        replace(placed, name=e.name, same_as=e.same_as) if chosen.name in (e.name, e.same_as) else e
        for e in call.program.inputs
    ]
    return _with_inputs(call, inputs, (*call.program.storages, storage))


def _pick(rng: random.Random, call: Call) -> Input:
    return rng.choice([entry for entry in call.program.inputs if not entry.same_as])


def _strides(size: tuple[int, ...], order: list[int], step: int = 1) -> tuple[int, ...]:
    """Dense strides, the last dim of ``order`` innermost."""
    found = [0] * len(size)
    for dim in reversed(order):
        found[dim], step = step, step * size[dim]
    return tuple(found)


@change
def values(rng: random.Random, call: Call) -> Call:
    """Other numbers."""
    storages = tuple(replace(storage, shift=rng.randrange(1, 11)) for storage in call.program.storages)
    return replace(call, program=replace(call.program, storages=storages))


@change
def strides(rng: random.Random, call: Call) -> Call:
    """The dims of an input in another order: a transposed input, another memory format."""
    chosen = _pick(rng, call)
    order = rng.sample(range(len(chosen.size)), len(chosen.size))
    return _place(call, chosen, chosen.size, _strides(chosen.size, order), chosen.offset)


@change
def steps(rng: random.Random, call: Call) -> Call:
    """An input that is every second element of memory."""
    chosen = _pick(rng, call)
    return _place(call, chosen, chosen.size, _strides(chosen.size, list(range(len(chosen.size))), 2), 0)


@change
def expansion(rng: random.Random, call: Call) -> Call:
    """An input that has one dim expanded."""
    chosen = _pick(rng, call)
    if not chosen.size:
        return call
    dim = rng.randrange(len(chosen.size))
    found = tuple(0 if place == dim else stride for place, stride in enumerate(chosen.stride))
    return _place(call, chosen, chosen.size, found, chosen.offset)


@change
def offset(rng: random.Random, call: Call) -> Call:
    """An input that lies further back in its memory."""
    chosen = _pick(rng, call)
    return _place(call, chosen, chosen.size, chosen.stride, chosen.offset + rng.choice([1, 2]))


@change
def sizes(rng: random.Random, call: Call) -> Call:
    """An input of another size."""
    chosen = _pick(rng, call)
    if not chosen.size:
        return call
    dim = rng.randrange(len(chosen.size))
    size = list(chosen.size)
    size[dim] = rng.choice([1, size[dim] + 1, size[dim] * 2, 0])
    return _place(call, chosen, tuple(size), _strides(tuple(size), list(range(len(size)))), chosen.offset)


@change
def ranks(rng: random.Random, call: Call) -> Call:
    """An input with one dim more."""
    chosen = _pick(rng, call)
    first = chosen.size[0] * chosen.stride[0] if chosen.size else 1
    return _place(call, chosen, (1, *chosen.size), (first, *chosen.stride), chosen.offset)


@change
def dtypes(rng: random.Random, call: Call) -> Call:
    """An input of another dtype."""
    chosen = _pick(rng, call)
    dtype = rng.choice(["float32", "float64", "int64", "complex64"])
    smooth = dtype != "int64"
    changed = replace(chosen, dtype=dtype, gradient=chosen.gradient if smooth else "")
    call = _with_inputs(call, [changed if entry == chosen else entry for entry in call.program.inputs])
    return _place(call, changed, chosen.size, chosen.stride, chosen.offset)


@change
def sharing(rng: random.Random, call: Call) -> Call:
    """An input in the memory of another, in the same place or beside it."""
    inputs = list(call.program.inputs)
    chosen, other = rng.choice(inputs), rng.choice(inputs)
    if chosen.name == other.name or chosen.dtype != other.dtype or chosen.same_as or other.same_as:
        return call
    storage = next(one for one in call.program.storages if one.name == other.storage)
    if storage.dtype != chosen.dtype:
        return call
    moved = replace(chosen, storage=other.storage, offset=rng.choice([other.offset, 0, storage.numel]))
    gradient = "view" if other.gradient == "view" else "" if moved.gradient == "view" else moved.gradient
    moved = replace(moved, gradient=gradient)
    room = max(storage.numel, moved.extent // getattr(torch, moved.dtype).itemsize)
    storages = tuple(replace(one, numel=room) if one is storage else one for one in call.program.storages)
    return _with_inputs(call, [moved if entry is chosen else entry for entry in inputs], storages)


@change
def objects(rng: random.Random, call: Call) -> Call:
    """An input that is one object with an earlier one, or no longer."""
    inputs = list(call.program.inputs)
    place = rng.randrange(len(inputs))
    chosen = inputs[place]
    earlier = [entry for entry in inputs[:place] if entry.size == chosen.size and not entry.same_as]
    if chosen.same_as:
        inputs[place] = replace(chosen, same_as="")
        return _place(_with_inputs(call, inputs), inputs[place], chosen.size, chosen.stride, chosen.offset)
    if not earlier or any(entry.same_as == chosen.name for entry in inputs):
        return call
    twin = rng.choice(earlier)
    inputs[place] = replace(twin, name=chosen.name, same_as=twin.name)
    return _with_inputs(call, inputs)


@change
def gradients(rng: random.Random, call: Call) -> Call:
    """Other inputs that require gradients: leaves, computed ones, and views of a computed storage.

    None where a program negates by a bit: eager's gradients of a write through such a view are wrong.
    """
    made: dict[str, Input] = {}
    storages = {one.name: one for one in call.program.storages}
    for entry in call.program.inputs:
        kinds = ["", "leaf", "computed", "computed"]
        smooth = getattr(torch, entry.dtype).is_floating_point or getattr(torch, entry.dtype).is_complex
        negates = any("_neg_view" in step.source for step in call.program.steps)
        smooth = smooth and not negates
        if storages[entry.storage].dtype == entry.dtype:
            kinds += ["view", "view"]
        if 0 in entry.stride:
            kinds.remove("computed")
            kinds.remove("computed")
        kind = rng.choice(kinds) if smooth else ""
        made[entry.name] = replace(entry, gradient=made[entry.same_as].gradient if entry.same_as else kind)
    return _with_inputs(call, list(made.values()))


@change
def slices(rng: random.Random, call: Call) -> Call:
    """Inputs that autograd knows for slices of their memory, or no longer."""
    dtypes = {storage.name: storage.dtype for storage in call.program.storages}
    drawn = {entry.name: rng.random() < 0.7 and dtypes[entry.storage] == entry.dtype for entry in call.program.inputs}
    inputs = [replace(entry, sliced=drawn[entry.same_as or entry.name]) for entry in call.program.inputs]
    return _with_inputs(call, inputs)


@change
def mode(rng: random.Random, call: Call) -> Call:
    """Another mode of torch."""
    return replace(call, mode=rng.choice(list(MODES)))


@change
def training(rng: random.Random, call: Call) -> Call:
    """The other training flag, where the program is in a module."""
    return replace(call, training=not call.training) if surrounded(call.program) else call


@change
def number(rng: random.Random, call: Call) -> Call:
    """Another Python number, where the program takes one."""
    return replace(call, number=rng.choice([3, 0.5, 2.0, True, math.inf])) if surrounded(call.program) else call
