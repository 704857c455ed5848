"""A graph decomposed into the operators that a backend has rows for, by torch's own decompositions.

The table: an operator with a row stays; any other is replaced by what ``torch.export.default_decompositions()`` gives,
else torch's further decompositions, else what the operator is composed of; and so on with what these run.

Invariant: the graph computes the same, and has neither mutation nor views that write. Limits: an operator without row
stays, for its refusal (:func:`without_row`), if it has no decomposition or gives data-dependent sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from functionalize._torch import OpOverload, pytree, unbacked
from functionalize._torch.decompositions import HigherOrderOperator, decomposition_of, traced_call
from functionalize.backends.decompositions import opmath
from functionalize.backends.decompositions.families import interpolation, optimizer_steps
from functionalize.backends.decompositions.families.antialiasing import ANTIALIASED
from functionalize.backends.decompositions.families.attention import is_differentiated
from functionalize.backends.decompositions.families.backwards import OF_INTERPOLATIONS
from functionalize.backends.decompositions.own import DECOMPOSITIONS, ROUNDED
from functionalize.backends.decompositions.primitives import PRIMITIVES
from functionalize.call_stack import line_of_trace
from functionalize.ops.tables import row
from functionalize.transform.api import functionalize

aten = torch.ops.aten
Rows = Container[Any] | Callable[[Node], bool]  # what stays: operators, or calls of them
KEPT = ("stack_trace", "nn_module_stack")  # of a node's meta: those that stand for it have the same


def decomposed(
    graph: Graph, root: torch.nn.Module, rows: Rows, within: frozenset[Any] = frozenset()
) -> tuple[Graph, torch.nn.Module]:
    """A graph whose operators have rows where torch's decompositions lead to such.

    Args:
        graph: a mutation-free graph whose nodes have fake values in ``meta["val"]``.
        root: what its attributes are found on.
        rows: by operator, those that stay.
        within: the operators that the graph decomposes, which are not decomposed again: torch's tables go in
            circles.

    Returns:
        The new graph, and what its attributes are found on.
    """
    if all(node.op != "call_function" or _stays(node, rows) for node in graph.nodes):
        return graph, root
    made, copies, attributes = Graph(), dict[Node, Any](), torch.nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr":
            setattr(attributes, str(node.target), getattr(root, str(node.target)))
        body = None if node.op != "call_function" or _stays(node, rows) else _spelt_out(node, rows, within)
        whole = copies.get(node.args[0]) if node.target is operator.getitem else None
        if isinstance(whole, (list, tuple)):
            copies[node] = whole[node.args[1]]
        elif body is None:
            copies[node] = made.node_copy(node, copies.__getitem__)
        else:
            copies[node] = _inlined(made, node, body, copies, attributes)
    return made, attributes


def without_stacks(graph: Graph) -> Graph:
    """A graph whose loops give their last values, where it had all of them stacked, for a backward, and read the last.

    Torch stacks them wherever the functions of a loop read what requires gradients.
    """
    stacking: Any = torch.ops.higher_order.while_loop_stack_output
    if not graph.find_nodes(op="call_function", target=stacking):
        return graph
    made = Graph()
    made.output(made.graph_copy(graph, {}))
    for loop in made.find_nodes(op="call_function", target=stacking):
        reads = [read for stack in loop.users for read in stack.users]
        if all(_is_last(read) or _is_told(read) for read in reads):
            _loop_without_stacks(loop)
    return made


def _loop_without_stacks(loop: Node) -> None:
    loop.target = torch.ops.higher_order.while_loop
    loop.meta.pop("unbacked_bindings", None)  # how many rows there are
    loop.meta["val"] = map_arg(tuple(loop.args[2]), lambda carried: carried.meta["val"])  # type: ignore[arg-type]
    for stack in list(loop.users):
        for read in list(stack.users):
            other: Any = 1  # row, as nobody asks how many there are
            if _is_last(read):
                other, stack.meta["val"] = stack, loop.meta["val"][stack.args[1]]
            for user in list(read.users):
                user.args = map_arg(user.args, {node: node for node in user.all_input_nodes}.__or__({read: other}).get)
            loop.graph.erase_node(read)


def _is_last(node: Node) -> bool:
    """Whether a node is the last row of a stack."""
    return node.target in (aten.select.int, aten.select_copy.int) and node.args[1:] == (0, -1)


def _is_told(node: Node) -> bool:
    """Whether a node is how many rows a stack has, and nothing computes with that."""
    return node.target is aten.sym_size.int and all(user.op == "output" for user in node.users)


def for_export(graph: Graph, root: torch.nn.Module) -> tuple[Graph, torch.nn.Module]:
    """The same, where two kinds of operators are decomposed.

    Those of optimizers alone, as those on lists of tensors: engines lack them. And attention that is differentiated:
    what torch takes its forward apart into is not what its backward reads.
    """
    graph = without_stacks(graph)
    ops = {node.target for node in graph.nodes if node.op == "call_function"}
    lists = {op for op in ops if optimizer_steps.decomposition(op)}
    return decomposed(graph, root, lambda node: not (node.target in lists or is_differentiated(node)))


def without_scales(graph: Graph, root: torch.nn.Module) -> tuple[Graph, torch.nn.Module]:
    """The same without interpolations by scales or corners that count, to the exact nearest, and their backwards.

    Engines take the quotients of the sizes for scales.

    Raises:
        UnsupportedProgramError: a scale counts at some sizes alone, or torch cannot spell it out.
    """
    spelt = interpolation.EXACT | set(OF_INTERPOLATIONS) | (set(ANTIALIASED) - interpolation.ANTIALIASED)
    made, attributes = decomposed(graph, root, lambda node: not (_differs(node) or node.target in spelt))
    for node in filter(_differs, made.nodes):
        interpolation.refuse(node.target, _values(node.args), line_of_trace(node.stack_trace))
    return made, attributes


def rounds(node: Node) -> bool:
    """Whether a backend might round the numbers of a call differently from eager."""
    return node.target in opmath.SPELT_OUT and opmath.counts(node.target, _values(node.args), _values(node.kwargs))


class _OtherArgumentsError(Exception):
    """A decomposition is not for the arguments of a call, which stays as it is."""


def _differs(node: Node) -> bool:
    args = _values(node.args) if node.target in interpolation.SCALED else ()
    return bool(args) and (interpolation.scaled(node.target, args) or interpolation.differs(node.target, args))


def _values(arguments: Any) -> Any:
    return pytree.tree_map_only(Node, lambda node: node.meta["val"], arguments)


def _stays(node: Node, rows: Rows) -> bool:
    """Whether a node is computed as it is: by its row, or as a function of Python on numbers."""
    return not isinstance(node.target, OpOverload) or (
        node.target in rows if isinstance(rows, Container) else rows(node)
    )


def without_row(graph: Graph, rows: Mapping[Any, Any]) -> Iterator[Node]:
    """The calls of operators, also of higher-order ones, that have no row."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target not in rows and is_operator(node.target):
            yield node


def is_operator(target: Any) -> bool:
    """Whether a target is one of torch's operators, and no function of Python."""
    return isinstance(target, (OpOverload, HigherOrderOperator))


def sized_by_data(node: Node) -> bool:
    """Whether a node gives a tensor of data-dependent size."""
    values = node.meta.get("val")
    return any(
        isinstance(value, torch.Tensor) and value.layout is torch.strided and unbacked(value.size())
        for value in (values if isinstance(values, (list, tuple)) else [values])
    )


def _spelt_out(node: Node, rows: Rows, within: frozenset[Any]) -> GraphModule | None:
    """What a call runs, as a graph of its arguments that are nodes."""
    function, within = _function(node, within)
    if function is None or sized_by_data(node):
        return None
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Node)]
    if any("val" not in leaves[place].meta for place in places):
        return None  # a generator of random numbers

    def call(*values: Any) -> Any:
        given = dict(zip(places, values, strict=True))
        args, kwargs = pytree.tree_unflatten([given.get(n, leaf) for n, leaf in enumerate(leaves)], spec)
        args = interpolation.counting(node.target, args)
        found = function(*_plain(args), **_plain(kwargs))
        if found is NotImplemented:
            raise _OtherArgumentsError
        return tuple(found) if isinstance(found, tuple) else found  # a named one would be a node of the graph

    values, gives = [leaves[place].meta["val"] for place in places], node.meta.get("val")
    interpolation.must_interpolate(node.target, _values(node.args), line_of_trace(node.stack_trace))
    interpolation.must_scale(node.target, _values(node.args), line_of_trace(node.stack_trace))
    try:
        body = traced_call(call, values, gives)
        if any(isinstance(one.target, OpOverload) and row(one.target).written for one in body.graph.nodes):
            body = traced_call(functionalize(call), values, gives)
    except (_OtherArgumentsError, NotImplementedError, RuntimeError):  # torch's own raise the others
        return None
    graph, attributes = decomposed(body.graph, body, rows, within)
    if any(getattr(one.target, "namespace", None) == "prims" and not _stays(one, rows) for one in graph.nodes):
        return None  # nobody has a primitive of torch's references who lacks the operator
    return GraphModule(attributes, graph)


def _function(node: Node, within: frozenset[Any]) -> tuple[Callable[..., Any] | None, frozenset[Any]]:
    """What computes the same as a call, and the operators that are not decomposed in that."""
    if rounds(node):
        return opmath.SPELT_OUT[node.target], within  # the operator itself, of other dtypes
    if node.target in within:
        return None, within
    function = PRIMITIVES.get(node.target) or DECOMPOSITIONS.get(node.target) or ROUNDED.get(node.target)
    function = function or optimizer_steps.decomposition(node.target) or decomposition_of(node.target)
    return function, within | {node.target}


def _plain(arguments: Any) -> Any:
    """Arguments in lists that can be changed: those of a node cannot, and some decompositions do."""
    if isinstance(arguments, dict):
        return {name: _plain(value) for name, value in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return (list if isinstance(arguments, list) else tuple)(map(_plain, arguments))
    return arguments


def _inlined(
    graph: Graph, node: Node, body: GraphModule, copies: Mapping[Node, Any], attributes: torch.nn.Module
) -> Any:
    """Put the nodes of a body in a graph for a node; what stands for it."""
    leaves = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
    known: dict[Node, Any] = dict(
        zip(body.graph.find_nodes(op="placeholder"), map(copies.__getitem__, leaves), strict=True)
    )
    begun = len(graph.nodes)
    for one in body.graph.find_nodes(op="get_attr"):
        name = f"of_{node.name}_{one.target}"
        setattr(attributes, name, getattr(body, str(one.target)))
        known[one] = graph.get_attr(name)
    result = graph.graph_copy(body.graph, known)
    for one in list(graph.nodes)[begun:]:
        one.meta |= {key: node.meta[key] for key in KEPT if key in node.meta}
    return result
