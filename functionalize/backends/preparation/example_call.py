"""Arguments like those that a program was captured with: of random numbers, since a program holds no example inputs.

Invariant: a capture with them is one of the same kind of call: sizes, strides, shared memory, requires_grad. Limits:
integers are zeros, so that they are labels and indices; memory that is shared is that of state, or has one dtype. What
is exported may read apart what a capture was given as one tensor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from functionalize._torch import OFFSET, SYMBOLS, pytree
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.strided_layout import tensor_at
from functionalize.backends.preparation.wrappers import of_parts, passes_wrappers, refuse_wrappers
from functionalize.call_stack import decisive_line
from functionalize.errors import UnsupportedExportError, UnsupportedProgramError
from functionalize.python_state.walk import StateWalk
from functionalize.runtime.arguments import CallArguments
from functionalize.runtime.call_tree import ArgumentRef, ObjectLeaf
from functionalize.runtime.calls.specialization import Specialization
from functionalize.runtime.guards.alias_pattern import Shared, same_tensors
from functionalize.runtime.guards.tensors import REQUIRES_GRAD

if TYPE_CHECKING:
    from functionalize.runtime.calls.program import CapturedProgram


def concrete(number: Any) -> int:
    """A size, or what it was when the program was captured."""
    return int(number.node.hint) if isinstance(number, SYMBOLS) else int(number)


class ExampleCall:
    """One call of a program with such arguments."""

    def __init__(self, program: Specialization, apart: Mapping[int, int] = MappingProxyType({})) -> None:
        """``apart``: inputs that get tensors of their own, each like the input that it was the same tensor as."""
        self._apart = apart
        self.program, self._made = program, dict[int, torch.Tensor]()
        self._generator = torch.Generator().manual_seed(0)
        guards = (guard for guard in program.guards.listed() if guard.property == REQUIRES_GRAD and guard.expected)
        self._requiring = {guard.subject for guard in guards}
        metadata = program.metadata
        values = zip(metadata.taken, program.recorded.graph.find_nodes(op="placeholder"), strict=True)
        self._looks = {number: node.meta.get("val") for number, node in values}
        self._numbers = metadata.arguments
        leaves = [self._leaf(leaf) for leaf in program.capture.tree.leaves]
        self.leaves: Sequence[Any] = leaves
        self.args, self.kwargs = pytree.tree_unflatten(leaves, program.capture.tree.spec)
        self.arguments: CallArguments = program.capture.convention.arguments(self.args, self.kwargs)

    @functools.cached_property
    def inputs(self) -> list[Any]:
        """What the program takes: its state as it was when this was asked first, and the arguments."""
        return self.program.guards.sources.values(self.arguments)

    @functools.cached_property
    def numbers(self) -> dict[int, int]:
        """The numbers of the inputs, by identity; of the same tensor at several, the first."""
        return {id(value): number for number, value in reversed(list(enumerate(self.inputs)))}

    @functools.cached_property
    def containers_of_caller(self) -> set[int]:
        """The identities of the containers that each call gets new: those of arguments which are not bound."""
        bound = StateWalk()
        for leaf in self.leaves:
            bound.walk([leaf], 0, "")
        return self.arguments.containers.keys() - bound.containers.keys()

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, ArgumentRef):
            number = self._numbers[leaf.number]
            return self._alone(number, self._apart[number]) if number in self._apart else self._tensor(number)
        if not isinstance(leaf, ObjectLeaf):
            return leaf
        value = leaf.get()
        if value is None:
            first, names = leaf.path.partition("_")[0], self.program.capture.convention.names
            name = names[int(first)] if first.isdecimal() and int(first) < len(names) else leaf.path
            raise UnsupportedProgramError(
                f"the argument `{name}`, an object of a class that is not registered with pytree, no longer exists",
                why=(
                    "a captured program does not keep its arguments alive, and this one becomes state of the "
                    "exported program"
                ),
                hint="keep the object alive until the program is exported; for a class without weak references, "
                "such as types.SimpleNamespace, pass a dict instead",
            )
        return value

    def _tensor(self, number: int) -> torch.Tensor:
        wrapping = self.program.metadata.inputs[number].wrapping
        if wrapping is not None and number not in self._made:
            entries = enumerate(self.program.metadata.inputs)
            parts = [self._tensor(n) for n, entry in entries if entry.part and entry.part.wrapper == number]
            self._made[number] = wrapping.wrapped(parts).requires_grad_(wrapping.requires_grad)
        if number not in self._made:
            self._share(number)
        if number not in self._made:
            self._made[number] = self._alone(number, number)
        return self._made[number]

    def _alone(self, number: int, like: int) -> torch.Tensor:
        """A tensor that shares no memory; ``like``: an input of its kind, which the graph takes."""
        look = self._looks[like]
        layout = Layout(tuple(look.size()), tuple(look.stride()), 0, look.dtype)
        if number not in self._looks and number in self.program.metadata.layouts_before:
            layout = self.program.metadata.layouts_before[number]
        offset = self.program.guards.asked.get((number, OFFSET), layout.offset)
        size, stride = tuple(map(concrete, layout.size)), tuple(map(concrete, layout.stride))
        layout = Layout(size, stride, concrete(offset), layout.dtype)
        storage = self._storage(layout.dtype, look.device, layout.span[1] // layout.dtype.itemsize)
        return self._like(number, tensor_at(storage, layout))

    def _like(self, number: int, made: torch.Tensor) -> torch.Tensor:
        label = self.program.metadata.inputs[number].label
        return made.requires_grad_() if label in self._requiring else made

    def _share(self, number: int) -> None:
        """Make the tensors of all arguments that share memory with one."""
        inputs, layouts = self.program.metadata.inputs, self.program.metadata.layouts_before
        group = next((g for g in self.program.recorded.shared if inputs[number].name in g), None)
        members = [n for n, entry in enumerate(inputs) if group is not None and entry.name in group]
        if number not in layouts or not all(layouts[n].static for n in members if n in layouts) or not members:
            return
        state = next((inputs[n] for n in members if inputs[n].slot is not None), None)
        if state is not None:
            storage = state.now().untyped_storage()
        else:
            ends = [layouts[n].span[1] for n in members]
            look = self._looks[number]
            storage = self._storage(look.dtype, look.device, max(ends) // look.dtype.itemsize)
        same: dict[Any, torch.Tensor] = {}
        for n in members:
            layout = layouts[n]
            made = tensor_at(storage, layout)
            self._made[n] = same.setdefault(layout.key, self._like(n, made))

    def _storage(self, dtype: torch.dtype, device: torch.device, elements: int) -> torch.UntypedStorage:
        made = torch.zeros(elements, dtype=dtype, device=device)
        if dtype.is_floating_point and dtype.itemsize > 1:
            made.copy_(torch.randn(elements, generator=self._generator))
        return made.untyped_storage()


@contextlib.contextmanager
def no_memory_beyond() -> Iterator[None]:
    """Name the line of a program that reads what its arguments do not show, where it runs with such as examples."""
    try:
        yield
    except RuntimeError as error:
        if "out of bounds for storage" not in str(error):
            raise
        raise UnsupportedProgramError(
            "the program reads memory of an argument's storage outside the argument",
            why="for the export, the program is captured again with arguments that fill their storages",
            hint="pass a tensor that covers that memory, and make the view inside the program",
            at=decisive_line(error),
        ) from error


@no_memory_beyond()
def as_called_now(program: CapturedProgram) -> CapturedProgram:
    """The program that a call would run now: a capture may be older than the model's mode, its state, or its hooks.

    It takes and returns the parts of wrappers. One of sparse arguments is given back as it is: no example is made of
    these, and exporters refuse them.
    """
    values = (node.meta.get("val") for node in program.current.recorded.graph.find_nodes(op="placeholder"))
    if any(isinstance(value, torch.Tensor) and value.layout is not torch.strided for value in values):
        return program
    call = ExampleCall(program.current)
    program = program.as_called_now(call.args, call.kwargs)
    if passes_wrappers(program.current.metadata):
        program = of_parts(program, call.args, call.kwargs)
    refuse_wrappers(program.current.metadata)
    return program


def refuse_schedules(program: CapturedProgram, to: str) -> None:
    """Raise where a program steps a scheduler of learning rates, which no export can.

    Raises:
        UnsupportedExportError: it does; ``to`` is the backend.
    """
    specialization = program.current
    state, metadata = specialization.capture.state, specialization.metadata
    changed = {id(effect.container_in([state])) for effect in metadata.side_effects if effect.state == 0}
    schedulers = (item for item in state.seen if isinstance(item, LRScheduler))
    if metadata.steps or any(id(vars(scheduler)) in changed for scheduler in schedulers):
        cause = UnsupportedExportError.cause(
            "the program steps a scheduler of learning rates",
            why="a scheduler computes with Python numbers, and an exported program has only tensors",
            hint="call scheduler.step() outside the captured program; in an optimizer made with lr=torch.tensor(0.1) "
            "the rate is state of the exported program, to which you can write the new rate",
            at=next((step.line for step in metadata.steps), None),
        )
        raise UnsupportedExportError(to, [cause])


@no_memory_beyond()
def with_arguments_apart(program: CapturedProgram, known: Specialization) -> CapturedProgram:
    """A program that reads each argument by itself, also those that shared memory at the capture: by their values.

    Where it writes to such memory, the write to one is one to the others: these stay as they are. An argument that is
    a tensor of the state counts for both.

    ``known``: what it was captured as.
    """
    apart = _unwritten(known)
    if not apart:
        return program
    call = ExampleCall(known, apart)
    return program.captured_again(call.args, call.kwargs, known.answers)


def _unwritten(known: Specialization) -> dict[int, int]:
    """Arguments that share memory which nothing writes, each with an input of its kind that the graph takes."""
    metadata, pattern = known.metadata, known.guards.aliasing
    memory = [one.first if isinstance(one, Shared) else one for one in pattern]
    written = {memory[one.input] for one in metadata.mutations}
    same, taken = same_tensors(pattern), set(metadata.taken)
    state = {n for n, entry in enumerate(metadata.inputs) if entry.argument is None}
    passed = {n for pair in same.items() if not state.isdisjoint(pair) for n in pair}
    groups: dict[Any, list[int]] = {}
    for number, first in enumerate(memory):
        groups.setdefault(first, []).append(number)
    found = {}
    for first, group in groups.items():
        if first is None or first in written or len(group) == 1 or taken.isdisjoint(group):
            continue
        kind = next(n for n in group if n in taken)
        for number in set(group) - state - passed:
            layout = metadata.layouts_before.get(number)
            if number not in taken and layout is not None and not layout.static:
                continue  # its sizes are symbols, which only a tensor of the graph has values for
            found[number] = next(n for n in (number, same.get(number), kind) if n in taken)
    return found
