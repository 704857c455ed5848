"""Gradients of a program's tensors: which it leaves there, which it reads, and whether it only adds to these.

Invariant: a gradient is an input of the graph only where the program reads or writes it. Limits: the gradients of
leaves, and of tensors that the program made.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set

import torch
from torch.fx import Graph, Node

from functionalize.graph_capture.finish.objects import ObjectGraph
from functionalize.graph_capture.inputs.inputs import PartInput, TracedInput, WrapperInput, has_gradient, is_leaf
from functionalize.python_state.slots import NumberSlot

aten = torch.ops.aten


def left_by(inputs: Sequence[TracedInput], objects: ObjectGraph) -> dict[int, int | None]:
    """The number of the gradient that the program left at an input, by the input's identity, if it is a new one."""
    before = {id(entry.gradient_of.fake): entry.fake for entry in inputs if entry.gradient_of is not None}
    left: dict[int, int | None] = {}
    for entry in inputs:
        fake = entry.fake
        if entry.gradient_of is not None or fake is None or (fake.is_leaf and fake.grad is before.get(id(fake))):
            continue
        leaf = is_leaf(entry.value) or is_leaf(fake) or id(fake) in before or has_gradient(fake)
        if leaf and fake.grad is not before.get(id(fake)):
            left[id(entry)] = None if fake.grad is None else objects.number(fake.grad)
    return left


def left_at_made(inputs: Sequence[TracedInput], objects: ObjectGraph) -> dict[int, int]:
    """The number of the gradient of each tensor that the program made and the caller gets, by the tensor's number."""
    fakes, gradients = {id(entry.fake) for entry in inputs}, dict[int, int]()
    for number, handle in enumerate(objects.handles):  # grows meanwhile: a gradient may get a handle
        if id(handle) not in fakes and (gradient := _gradient(handle)) is not None:
            gradients[number] = objects.number(gradient)
    return gradients


def _gradient(handle: torch.Tensor) -> torch.Tensor | None:
    with warnings.catch_warnings():  # torch warns where the tensor is not a leaf
        warnings.simplefilter("ignore", UserWarning)
        return handle.grad


def drop_unread(
    inputs: Sequence[TracedInput], graph: Graph, written: set[int]
) -> tuple[frozenset[int], set[int], bool]:
    """Remove the gradients that the program neither reads nor writes from the inputs, and the numbers it does not read.

    Returns the removed inputs; the identities of those whose gradients are read; whether these are only added to.
    """
    unused, read, accumulates = set[int](), set[int](), True
    for number, (entry, node) in enumerate(zip(inputs, list(graph.find_nodes(op="placeholder")), strict=True)):
        owner = entry.wrapper.gradient_of if type(entry) is PartInput else entry.gradient_of
        is_wrapper = type(entry) is WrapperInput
        if owner is None or is_wrapper:
            if is_wrapper or (isinstance(entry.slot, NumberSlot) and not node.users):
                unused.add(number)
                graph.erase_node(node)
            continue
        if not node.users and number not in written:
            unused.add(number)
            graph.erase_node(node)
        else:
            read.add(id(owner))
            # No zeros replace a missing wrapper.
            accumulates &= number in written and _is_added_to(node) and type(entry) is not PartInput
    return frozenset(unused), read, accumulates


def with_visible_layouts(inputs: Sequence[TracedInput], graph: Graph, untouched: Set[int]) -> set[int]:
    """The gradients whose layout the program may see, by number: it does more than add to them.

    ``untouched``: the identities of fakes that the program has passed to no function of torch's.
    """
    placeholders = {node.target: node for node in graph.find_nodes(op="placeholder")}
    visible = set[int]()
    for number, entry in enumerate(inputs):
        if entry.gradient_of is None or type(entry) is WrapperInput:
            continue
        node = placeholders.get(entry.name)
        users = [] if node is None else list(node.users)
        added = node is not None and _is_added_to(node) and all(reader.op == "output" for reader in users[0].users)
        if id(entry.fake) not in untouched or (users and not added):
            visible.add(number)
    return visible


def _is_added_to(gradient: Node) -> bool:
    """Whether a gradient is read once, by an addition to it."""
    user = next(iter(gradient.users), None)
    adds = user is not None and user.target is aten.add.Tensor and user.args[0] is gradient
    return adds and len(gradient.users) == 1
