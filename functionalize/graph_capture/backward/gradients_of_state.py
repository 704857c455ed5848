"""Gradients that tensors of a program hold: which it leaves there, which it reads, and whether these are added to only.

Invariant: a gradient is an input of the graph only where the program reads or writes it. Limits: leaves, and what a
program made hold one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set

import torch
from torch.fx import Graph, Node

from functionalize.graph_capture.finish.objects import ObjectGraph
from functionalize.graph_capture.inputs.inputs import TracedInput, has_gradient, is_leaf
from functionalize.python_state.slots import NumberSlot

aten = torch.ops.aten


def left_by(inputs: Sequence[TracedInput], objects: ObjectGraph) -> dict[int, int | None]:
    """By identity of an input: the number of the gradient that the program left there, if it is another than before."""
    given = {id(entry.gradient_of.fake): entry.fake for entry in inputs if entry.gradient_of is not None}
    found: dict[int, int | None] = {}
    for entry in inputs:
        if entry.gradient_of is not None or entry.fake is None:
            continue
        leaf = is_leaf(entry.value) or is_leaf(entry.fake) or id(entry.fake) in given or has_gradient(entry.fake)
        if leaf and entry.fake.grad is not given.get(id(entry.fake)):
            found[id(entry)] = None if entry.fake.grad is None else objects.number(entry.fake.grad)
    return found


def left_at_made(inputs: Sequence[TracedInput], objects: ObjectGraph) -> dict[int, int]:
    """Of tensors that the program made and that the caller gets, by number: the number of the gradient of each."""
    given, found = {id(entry.fake) for entry in inputs}, dict[int, int]()
    for number, handle in enumerate(objects.handles):  # which grow: a gradient may have one
        if id(handle) not in given and (gradient := _gradient(handle)) is not None:
            found[number] = objects.number(gradient)
    return found


def _gradient(handle: torch.Tensor) -> torch.Tensor | None:
    with warnings.catch_warnings():  # torch warns of asking a tensor that is no leaf
        warnings.simplefilter("ignore", UserWarning)
        return handle.grad


def drop_unread(
    inputs: Sequence[TracedInput], graph: Graph, written: set[int]
) -> tuple[frozenset[int], set[int], bool]:
    """Gradients that the program neither reads nor writes are no inputs, nor are numbers that it does not read.

    Returns the inputs that go; the identities of those whose gradients are read; whether these are added to only.
    """
    unused, read, accumulates = set[int](), set[int](), True
    for number, (entry, node) in enumerate(zip(inputs, list(graph.find_nodes(op="placeholder")), strict=True)):
        if entry.gradient_of is None:
            if isinstance(entry.slot, NumberSlot) and not node.users:
                unused.add(number)
                graph.erase_node(node)
            continue
        if not node.users and number not in written:
            unused.add(number)
            graph.erase_node(node)
        else:
            read.add(id(entry.gradient_of))
            accumulates &= number in written and _is_added_to(node)
    return frozenset(unused), read, accumulates


def laid_out(inputs: Sequence[TracedInput], graph: Graph, untouched: Set[int]) -> set[int]:
    """The gradients of which the program may see how they lie in memory, by number: it does more than to add to them.

    ``untouched``: the identities of fakes that the program has passed to no function of torch's.
    """
    placeholders = {node.target: node for node in graph.find_nodes(op="placeholder")}
    found = set[int]()
    for number, entry in enumerate(inputs):
        if entry.gradient_of is None:
            continue
        node = placeholders.get(entry.name)
        users = [] if node is None else list(node.users)
        added = node is not None and _is_added_to(node) and all(one.op == "output" for one in users[0].users)
        if id(entry.fake) not in untouched or (users and not added):
            found.add(number)
    return found


def _is_added_to(gradient: Node) -> bool:
    """Whether a gradient is read once, to be added to."""
    user = next(iter(gradient.users), None)
    adds = user is not None and user.target is aten.add.Tensor and user.args[0] is gradient
    return adds and len(gradient.users) == 1
