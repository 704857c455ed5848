"""What the inputs of a program are after a call, as nodes of its graph: whole, where the program wrote parts of them.

Invariant: the nodes are neither views nor writes; they have fake values as others do. Limits: inputs whose sizes,
strides or storages change are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch.fx import Graph, Node

from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.view_rules import VIEW_RULES
from functionalize.backends.preparation.shared_memory import Memory, are_alike, call_node, groups_of
from functionalize.runtime.metadata import InputMutation, ProgramMetadata


def with_new_values(graph: Graph, metadata: ProgramMetadata, pattern: Sequence[Any]) -> tuple[Graph, dict[int, int]]:
    """The graph with the new value of each input that a call changes among its outputs.

    Args:
        graph: of the program.
        metadata: says what it writes.
        pattern: which inputs share a storage, see ``alias_pattern``: a write to one changes the others.

    Returns:
        The new graph, and for each such input the position of its value among the outputs.
    """
    made, copies = Graph(), dict[Node, Node]()
    results: Any = list(made.graph_copy(graph, copies))  # type: ignore[arg-type]
    inputs = dict(zip(metadata.taken, made.find_nodes(op="placeholder"), strict=True))
    mutations = [one for one in metadata.mutations if changes_metadata(one, metadata, pattern) is None and one.writes]
    values: dict[int, Node] = {}
    together = _written_together(metadata, pattern)
    for group in together:
        values |= _values_of_group(made, group, mutations, metadata, inputs, results)
    for mutation in mutations:
        if not any(mutation.input in group for group in together):
            values[mutation.input] = _after(made, inputs[mutation.input], mutation, results)
    positions = {number: len(results) + place for place, number in enumerate(values)}
    made.output((*results, *values.values()))
    return made, positions


def _written_together(metadata: ProgramMetadata, pattern: Sequence[Any]) -> list[list[int]]:
    """Inputs that share a storage which is written."""
    written = {mutation.input for mutation in metadata.mutations}
    return [group for group in groups_of(pattern) if written.intersection(group)]


def unlike_memory(metadata: ProgramMetadata, pattern: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Inputs that share a storage which is written, and no value can stand for: what they are called, and why."""
    for group in _written_together(metadata, pattern):
        if not are_alike([metadata.layouts_before[number] for number in group]):
            labels = " and ".join(metadata.inputs[number].label for number in group)
            yield labels, "they share memory, and have different dtypes or dynamic sizes"


def _values_of_group(
    graph: Graph,
    group: Sequence[int],
    mutations: Sequence[InputMutation],
    metadata: ProgramMetadata,
    inputs: Mapping[int, Node],
    results: Sequence[Any],
) -> dict[int, Node]:
    """What inputs in one storage are after the writes to it, one after the other."""
    layouts = {number: metadata.layouts_before[number] for number in group if number in inputs}
    if not are_alike(list(layouts.values())):
        return {}
    memory = Memory(graph, [(inputs[number], layout) for number, layout in layouts.items()])
    for mutation in mutations:
        if mutation.input in layouts:
            layout = layouts[mutation.input]
            memory.write(layout, _after(graph, memory.read(layout), mutation, results))
    return {number: memory.read(layout) for number, layout in layouts.items()}


def changes_metadata(mutation: InputMutation, metadata: ProgramMetadata, pattern: Sequence[Any]) -> str | None:
    """Why no value alone says what an input is after the call; None where one does."""
    together = (number for group in groups_of(pattern) for number in group)
    replaced = is_replaced(mutation, metadata) and mutation.input not in together
    if mutation.after or (mutation.metadata and not replaced):
        op = (mutation.metadata or mutation.after)[0][0]
        return f"it changes the size, strides or storage of an input ({op}), and not only its elements"
    if mutation.layout is not None:
        return "it writes to memory of an input's storage outside the input"
    return None


def is_replaced(mutation: InputMutation, metadata: ProgramMetadata) -> bool:
    """Whether an input gets a whole new value of its size and dtype, in whatever memory: ``x.data = x * 2``."""
    before, after = metadata.layouts_before.get(mutation.input), metadata.layouts_after.get(mutation.input)
    alike = before is not None and after is not None and (before.size, before.dtype) == (after.size, after.dtype)
    return alike and bool(mutation.writes) and not mutation.writes[0].path


def arguments_with_gradients(metadata: ProgramMetadata) -> list[str]:
    """Arguments whose gradients the program leaves, reads or adds to: what is passed to a backend has none."""
    left = {number for number, gradient in metadata.gradients.items() if gradient is not None}
    used = {*metadata.taken, *(one.input for one in metadata.mutations)}
    left |= {of for number in used if (of := metadata.inputs[number].gradient_of) is not None}
    return [metadata.inputs[number].label for number in sorted(left) if metadata.inputs[number].argument is not None]


def _after(graph: Graph, target: Node, mutation: InputMutation, results: Sequence[Any]) -> Node:
    """What an input is after the writes of one mutation."""
    value = target
    for write in mutation.writes:
        value = _written(graph, value, list(write.path), results[write.result])
    return value


def _written(graph: Graph, whole: Node, path: list[Any], part: Node) -> Node:
    """A value with one part of it replaced: along the path to the part, and back by the rules of its views."""
    if not path:
        return part
    (op, args), rest, call = path[0], path[1:], partial(call_node, graph)
    view = call(op, whole, *args) if rest else part
    source, out = Layout.of(whole.meta["val"]), Layout.of(view.meta["val"])
    new: Node = VIEW_RULES[op](source, out, *args).inverse(call, lambda: whole, _written(graph, view, rest, part))
    return new
