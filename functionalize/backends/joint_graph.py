"""A Dynamo graph and its backward as one program without mutation.

The graph runs twice on fake tensors: first to see which of its results autograd knows, then, under ``functionalize``
and ``make_fx``, together with the gradients of those. What aliases an input is no result of the program: it is
described as a place in the storage of that input.

Invariant: the two runs see tensors that look alike. Limits: once differentiable; strided tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize._torch import SYMBOLS, FakeTensorMode, storage_key
from functionalize._torch.dynamo import alias_of, inside
from functionalize.aliasing.geometry import Geometry, hint, plain, same
from functionalize.errors import UnsupportedMutationError
from functionalize.transform.api import functionalize

Program = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Number:
    """A size that is known when the program runs: by its number among those."""

    index: int


@dataclass(frozen=True)
class Item:
    """One output of the Dynamo graph: a constant, a number, or a tensor, itself or a view at a place in its storage."""

    constant: Any = None
    number: int | None = None
    given: int | None = None  # an input
    value: int | None = None  # a result of the program
    was: Geometry | None = None  # where that tensor lay
    place: Geometry | None = None  # where the view lay; None: the tensor itself
    differentiable: bool = True


@dataclass
class Outcome:
    """What a run of the graph left."""

    values: list[torch.Tensor] = field(default_factory=list)  # results of the program
    layouts: list[Geometry | None] = field(default_factory=list)  # of these; None where it is contiguous
    numbers: list[Any] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    written: list[int] = field(default_factory=list)  # inputs that autograd saw being written
    targets: list[torch.Tensor] = field(default_factory=list)  # what has a tangent: those inputs, then values


@dataclass(frozen=True)
class Traced:
    """The joint program: of inputs and tangents; its results are values, numbers, and gradients of ``leaves``."""

    module: GraphModule
    passed: list[int]  # which of the graph's inputs are inputs of the program: tensors and symbols
    leaves: list[int]  # which of them may have a gradient
    outcome: Outcome


class _Fresh(torch.autograd.Function):
    """The same memory, as a tensor that is no leaf and no view, so that it may be written."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def trace(program: Program, mode: FakeTensorMode, given: Sequence[Any], remove: str) -> Traced:
    """Trace a graph, a function of a flat list of inputs, together with the gradients of its results."""
    with inside(mode):
        outcome = _run(program, _aliases(given))
    _refuse_shared(given, outcome)
    traced = _traced(program, mode, given, remove, outcome)
    if not _alike(traced.outcome, outcome):  # an op gave a view in the one run and no view in the other
        traced = _traced(program, mode, given, remove, traced.outcome)
    return traced


def _traced(program: Program, mode: FakeTensorMode, given: Sequence[Any], remove: str, expected: Outcome) -> Traced:
    """The joint program, with tangents for what is expected to have some."""
    passed = [place for place, value in enumerate(given) if isinstance(value, (torch.Tensor, *SYMBOLS))]
    leaves = [place for place in passed if isinstance(given[place], torch.Tensor) and given[place].requires_grad]
    with inside(mode):
        tangents = [torch.empty_like(t, memory_format=torch.contiguous_format).detach() for t in expected.targets]
        fresh = _aliases(given)
    seen: list[Outcome] = []

    def joint(primals: list[Any], tangents: list[torch.Tensor]) -> list[Any]:
        flat = list(given)
        for place, value in zip(passed, primals, strict=True):
            flat[place] = value
        outcome = _run(program, flat)
        seen.append(outcome)
        gradients: Sequence[Any] = [None] * len(leaves)
        if outcome.targets and leaves and _alike(outcome, expected):
            gradients = torch.autograd.grad(outcome.targets, [flat[i] for i in leaves], tangents, allow_unused=True)
        return [*outcome.values, *outcome.numbers, *gradients]

    transformed = functionalize(joint, remove=remove)
    with torch.fx.traceback.preserve_node_meta(), inside(mode):
        module = make_fx(transformed)([fresh[i] for i in passed], tangents)
    return Traced(module, passed, leaves, seen[-1])


def _alike(one: Outcome, two: Outcome) -> bool:
    """Whether two runs have tangents of the same shapes."""
    shapes = [[Geometry.of(target).size for target in outcome.targets] for outcome in (one, two)]
    return len(shapes[0]) == len(shapes[1]) and all(map(same, *shapes))


def _aliases(given: Sequence[Any]) -> list[Any]:
    """Tensors over the same memory, whose metadata may be changed."""
    return [alias_of(value) if isinstance(value, torch.Tensor) else value for value in given]


def _fresh(leaf: torch.Tensor) -> torch.Tensor:
    if not (leaf.requires_grad and torch.is_grad_enabled()):
        return leaf
    handle: torch.Tensor = _Fresh.apply(leaf)  # type: ignore[no-untyped-call]
    return handle


def _run(program: Program, leaves: Sequence[Any]) -> Outcome:
    """Run the graph once."""
    handles = [_fresh(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    born = [handle.grad_fn if isinstance(handle, torch.Tensor) else None for handle in handles]
    results = program(list(handles))
    outcome = _described(handles, results)
    for place, (handle, before) in enumerate(zip(handles, born, strict=True)):
        if isinstance(handle, torch.Tensor) and handle.requires_grad and handle.grad_fn is not before:
            outcome.written.append(place)
            outcome.targets.append(handle)
    outcome.targets += [value for value in outcome.values if value.requires_grad]
    return outcome


def _refuse_shared(given: Sequence[Any], outcome: Outcome) -> None:
    """In the program autograd does not know that two inputs share their memory."""
    for place in outcome.written:
        key = storage_key(given[place])
        others = [i for i, value in enumerate(given) if isinstance(value, torch.Tensor) and i != place]
        if any(storage_key(given[other]) == key for other in others):
            raise UnsupportedMutationError(
                f"input {place} of the compiled graph is written, requires gradients, and shares memory with another",
                why="the gradient of the one input would have to flow through the other",
                hint="pass the tensor once and take the views of it inside of the compiled function",
            )


# Outputs


def _described(handles: Sequence[Any], results: Sequence[Any]) -> Outcome:
    """Which results are values, and which are views of inputs or of one another."""
    outcome = Outcome()
    givens: dict[int, int] = {}
    for place, handle in enumerate(handles):
        if isinstance(handle, torch.Tensor):
            givens.setdefault(storage_key(handle), place)
    groups: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for result in results:
        if isinstance(result, torch.Tensor):
            groups[storage_key(result)][id(result)] = result
    bases = {key: _base(list(group.values())) for key, group in groups.items() if key not in givens}
    for result in results:
        outcome.items.append(_item(result, handles, givens, bases, outcome))
    return outcome


def _item(result: Any, handles: Sequence[Any], givens: dict[int, int], bases: dict[int, Any], outcome: Outcome) -> Item:
    if isinstance(result, SYMBOLS):
        return Item(number=_number(result, outcome).index)
    if not isinstance(result, torch.Tensor):
        return Item(constant=result)
    key, itself = storage_key(result), next((i for i, handle in enumerate(handles) if handle is result), None)
    if itself is not None:
        return Item(given=itself)
    given = givens.get(key)
    base = bases.get(key) if given is None else handles[given]
    if base is result or base is None or (result.requires_grad and _reads_otherwise(result, base)):
        return Item(value=_value(result, outcome))
    was, place = (_place(tensor, outcome) for tensor in (base, result))
    value = _value(base, outcome) if given is None else None
    return Item(given=given, value=value, was=was, place=place, differentiable=result.requires_grad)


def _base(group: list[torch.Tensor]) -> torch.Tensor | None:
    """The tensor that the tensors of one storage are views of; None where there is more than one for autograd."""
    if len(group) == 1:
        return group[0]
    known = [tensor for tensor in group if tensor.requires_grad] or group
    roots = {id(root): root for root in map(_root, known)}
    if len(roots) > 1 and known[0].requires_grad:
        return None
    return max(roots.values(), key=lambda root: hint(root.numel()))


def _root(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def _reads_otherwise(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the elements are not those of the base: of another dtype, conjugate, negated."""
    return (tensor.dtype, tensor.is_conj(), tensor.is_neg()) != (base.dtype, base.is_conj(), base.is_neg())


def _value(tensor: torch.Tensor, outcome: Outcome) -> int:
    for index, value in enumerate(outcome.values):
        if value is tensor:
            return index
    outcome.values.append(tensor)
    place = Geometry.of(tensor)
    outcome.layouts.append(None if place.contiguous or place.conj or place.neg else _place(tensor, outcome))
    return len(outcome.values) - 1


def _place(tensor: torch.Tensor, outcome: Outcome) -> Geometry:
    place = Geometry.of(tensor)
    size, stride = (tuple(_plain(n, outcome) for n in numbers) for numbers in (place.size, place.stride))
    return replace(place, size=size, stride=stride, offset=_plain(place.offset, outcome))


def _plain(number: Any, outcome: Outcome) -> Any:
    number = plain(number)
    return number if type(number) is int else _number(number, outcome)


def _number(number: Any, outcome: Outcome) -> Number:
    for index, known in enumerate(outcome.numbers):
        if type(known) is type(number) and known.node.expr == number.node.expr:
            return Number(index)
    outcome.numbers.append(number)
    return Number(len(outcome.numbers) - 1)
