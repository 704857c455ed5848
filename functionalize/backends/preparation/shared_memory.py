"""Inputs that share memory in part: a backend gets each by its value, and the graph reads the memory of all.

Where a graph reads memory of one input beyond what that input shows, the memory is put together of the values of all
inputs that lie in it.

Invariant: what is computed with is what some input shows. Limits: inputs of one dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from functionalize._torch import pytree
from functionalize._torch.exporting import viewing
from functionalize.aliasing.geometry import Layout
from functionalize.errors import InputMismatchError
from functionalize.ops import traits
from functionalize.runtime.guards.alias_pattern import Pattern, Shared, same_tensors
from functionalize.runtime.metadata import ProgramMetadata

aten = torch.ops.aten
_STRIDED = (aten.as_strided.default, aten.as_strided_copy.default)


def passed_state(pattern: Pattern, metadata: ProgramMetadata, bound: Collection[int] = ()) -> dict[int, int]:
    """Inputs that are state and, the very tensors, arguments as well: which. What is passed counts for both.

    ``bound``: arguments that are state of the exported program.
    """
    given = {n for n, entry in enumerate(metadata.inputs) if entry.argument is not None and n not in bound}
    pairs = [pair if pair[1] in given else pair[::-1] for pair in same_tensors(pattern).items()]
    return {state: argument for state, argument in pairs if argument in given and state not in given}


def check_one_value(metadata: ProgramMetadata, same: Mapping[int, int], arrays: Mapping[int, Any]) -> None:
    """Hold the arrays of a call to what the program takes for one tensor; ``same``: see ``alias_pattern``.

    Raises:
        InputMismatchError: such have other elements, or none that are known while a backend traces.
    """
    for number, first in same.items():
        one, other = arrays.get(first), arrays.get(number)
        if one is other or one is None or other is None:
            continue
        try:
            known, alike = True, np.asarray(one).tobytes() == np.asarray(other).tobytes()
        except Exception:  # a backend's own, of arrays that stand for others
            known = alike = False
        if not alike:
            labels = f"{metadata.inputs[number].label} and {metadata.inputs[first].label}"
            raise InputMismatchError(
                f"{labels} {'have different elements' if known else 'may differ, because the call is traced'}, but "
                "were the same tensor when the program was captured",
                hint="pass one array twice (inside a traced function: `lambda x: f(state, x, x)`), or capture with "
                "tensors that share no memory",
            )


def with_shared_memory(
    graph: Graph, metadata: ProgramMetadata, pattern: Sequence[Any]
) -> tuple[Graph, list[tuple[str, str]]]:
    """The graph with memory that inputs share as a value of its own, where it reads beyond one of them.

    And what stands in the way of that: inputs, as they are called, and why.

    Args:
        graph: of a program's inputs.
        metadata: says how these lie in their storages.
        pattern: which of them share a storage, see ``alias_pattern``.
    """
    groups, causes = groups_of(pattern), list[tuple[str, str]]()
    if not groups:
        return graph, causes
    made, copies = Graph(), dict[Node, Node]()
    made.output(made.graph_copy(graph, copies))
    placeholders = made.find_nodes(op="placeholder")
    inputs = dict(zip(metadata.taken, placeholders, strict=True))
    for group in groups:
        members = [(inputs[n], metadata.layouts_before[n]) for n in group if n in inputs]
        if are_alike([layout for _, layout in members]) and not _share(made, placeholders[-1], members):
            labels = " and ".join(metadata.inputs[number].label for number in group)
            causes.append(
                (labels, ("they share memory, and the program computes with elements of it outside all of them"))
            )
    return made, causes


def groups_of(pattern: Sequence[Any]) -> list[list[int]]:
    """The inputs that share a storage without being one tensor, storage by storage."""
    found: dict[int, list[int]] = {}
    for number, entry in enumerate(pattern):
        if isinstance(entry, Shared) and entry.same is None:
            found.setdefault(entry.first, [entry.first]).append(number)
    return list(found.values())


def call_node(graph: Graph, op: Any, *args: Any) -> Node:
    """A node that calls an operator, with the fake value that it gives."""
    values = pytree.tree_map_only(Node, lambda node: node.meta["val"], args)
    tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
    node = graph.call_function(op, args)
    with tensors[0].fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        node.meta["val"] = _RESHAPED.get(op, op)(*values)
    return node


_RESHAPED = {aten.view.default: aten.reshape.default}  # fake values have the strides of memory, which values have not


class Memory:
    """The elements of a storage that inputs share, as a value that changes from node to node."""

    def __init__(self, graph: Graph, members: Sequence[tuple[Node, Layout]], room: int = 0) -> None:
        """Of the values of ``members``, each with its layout; of ``room`` elements at least."""
        dtype = members[0][1].dtype
        room = max(room, *(layout.span[1] // dtype.itemsize for _, layout in members))
        self._graph = graph
        like = members[0][0].meta["val"]
        options = {"dtype": dtype, "device": like.device}
        self.node = graph.call_function(aten.full.default, ([room], _nothing(dtype)), options)
        with like.fake_mode:
            self.node.meta["val"] = torch.full([room], 0, **options)
        for node, layout in members:
            self.write(layout, node)

    def write(self, layout: Layout, value: Node) -> None:
        """Put a value at a layout."""
        self.node = call_node(self._graph, aten.as_strided_scatter.default, self.node, value, *_place(layout))

    def read(self, layout: Layout) -> Node:
        """What there is at a layout."""
        return call_node(self._graph, aten.as_strided_copy.default, self.node, *_place(layout))


def _place(layout: Layout) -> tuple[list[int], list[int], int]:
    return list(layout.size), list(layout.stride), layout.offset


def are_alike(layouts: Sequence[Layout]) -> bool:
    """Whether one memory serves tensors of some layouts: sizes are known, and they have one dtype."""
    return len({layout.dtype for layout in layouts}) == 1 and all(layout.static for layout in layouts)


def _share(graph: Graph, last: Node, members: Sequence[tuple[Node, Layout]]) -> bool:
    """Have what reads beyond a member read the memory of all; whether nothing needs what no member shows."""
    readers = [(user, node) for node, layout in members for user in node.users if _goes_beyond(user, node, layout)]
    if not readers:
        return True
    ends = [_last(user.args[1], user.args[2], _start(user, members)) for user, _ in readers]
    following = last.next
    with graph.inserting_before(following):
        memory = Memory(graph, members, max(ends)).node
    for user, _ in readers:
        user.args = (memory, user.args[1], user.args[2], _start(user, members))
    shown = torch.zeros(memory.meta["val"].size(), dtype=torch.bool)
    for _, layout in members:
        shown.as_strided(*_place(layout)).fill_(True)
    return bool(shown.all()) or not _needs_more(graph, {memory: shown})


def _needs_more(graph: Graph, shown: dict[Node, torch.Tensor]) -> bool:
    """Whether a graph does more than to move elements that are not there; ``shown``: which are, where not all are."""
    for node in graph.nodes:
        if shown.keys().isdisjoint(node.all_input_nodes):
            continue
        moved = _moved(node, shown)
        if moved is None:
            return True
        if not moved.all():
            shown[node] = moved
    return False


def _moved(node: Node, shown: Mapping[Node, torch.Tensor]) -> torch.Tensor | None:
    """Which elements of a view, a copy of a view or a scatter into one are there; None of anything else."""
    op: Any = viewing(node.target) or node.target
    if op is aten.view.dtype or not (getattr(op, "is_view", False) or op in traits.SCATTERS):
        return None

    def of(one: Node) -> torch.Tensor:
        return shown[one] if one in shown else torch.ones(one.meta["val"].size(), dtype=torch.bool)

    with contextlib.suppress(RuntimeError, TypeError, AttributeError):  # sizes that are no numbers, lazy bits
        moved: torch.Tensor = _RESHAPED.get(op, op)(*map_arg(node.args, of), **node.kwargs)
        return moved.contiguous()  # as a copy is, which strided views count in
    return None


def _start(user: Node, members: Sequence[tuple[Node, Layout]]) -> int:
    """Where a strided view begins in the storage: where it says, or where what it is a view of begins."""
    own: Any = user.args[3] if len(user.args) > 3 else None
    first: int = next(layout.offset for node, layout in members if node is user.args[0]) if own is None else own
    return first


def _goes_beyond(user: Node, node: Node, layout: Layout) -> bool:
    if user.target not in _STRIDED or user.args[0] is not node:
        return False
    start = _start(user, [(node, layout)])
    size = [*user.args[1], start]  # type: ignore[misc]
    if not all(type(number) is int for number in size):
        return False
    end, item = _last(user.args[1], user.args[2], start), layout.dtype.itemsize
    return start < layout.offset or end > layout.span[1] // item or not layout.dense


def _last(size: Any, stride: Any, start: int) -> int:
    if 0 in size:
        return start
    return int(start + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1)


def _nothing(dtype: torch.dtype) -> Any:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0
