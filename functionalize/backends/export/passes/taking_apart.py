"""Exported programs decomposed by torch, operator by operator; what it cannot decompose is refused.

Invariant: an error names the operator, and the user's line; sizes that may differ still do so afterwards. Limits: those
of torch's decompositions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from functionalize._torch import pytree
from functionalize._torch.exporting import without_spec_warnings
from functionalize._torch.symbols.sizes import settled
from functionalize.call_stack import line_in
from functionalize.errors import UnsupportedExportError


def taken_apart(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]] | None, to: str) -> ExportedProgram:
    """The program, with the operators of a table decomposed; without a table, to the core ATen set.

    Raises:
        UnsupportedExportError: torch's decomposition of an operator asks for a data-dependent number.
    """
    try:
        with without_spec_warnings(), _without_nests(program) as nest:
            made: ExportedProgram = program.run_decompositions(None if table is None else dict(table))
        made.module_call_graph[0].signature.out_spec = nest
        return made
    except UnsupportedExportError:
        raise
    except (AssertionError, RuntimeError, TypeError) as error:
        name = str(error).partition("While executing %")[2].split(" ")[0]
        node = next((node for node in program.graph.nodes if node.name == name), None)
        cause = UnsupportedExportError.cause(
            f"torch cannot decompose {name or 'the program'}" + ("" if node is None else f", {node.target}"),
            why=str(error).split("\n", maxsplit=1)[0],
            hint="use other operators",
            at=None if node is None else user_line(node),
        )
        raise UnsupportedExportError(to, [cause]) from error


@contextlib.contextmanager
def _without_nests(program: ExportedProgram) -> Iterator[Any]:
    """While a program is decomposed: it returns a list. Yields how it nests its results, among them the rebuilt ones.

    Torch runs the program and flattens what it returns, where text and dtypes are no longer the nodes without leaves.
    """
    whole: Any = program.module_call_graph[0].signature
    nest = whole.out_spec
    whole.out_spec = pytree.treespec_tuple([pytree.treespec_leaf()] * nest.num_leaves)
    try:
        yield nest
    finally:
        whole.out_spec = nest


@contextlib.contextmanager
def sizes_stay_free(program: ExportedProgram, to: str) -> Iterator[None]:
    """While a program is decomposed whose sizes may differ: the trace says afterwards which of them no longer do.

    Raises:
        UnsupportedExportError: what an operator was decomposed into is right for one size.
    """
    looks = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    sizes = {name: enumerate(look.size()) for name, look in looks.items() if isinstance(look, torch.Tensor)}
    free = [(name, dim, size) for name, of_one in sizes.items() for dim, size in of_one if _is_free(size)]
    yield
    causes = [
        UnsupportedExportError.cause(
            f"dimension {dim} of `{name}` is dynamic, but the decomposed program supports only {settled(size)}",
            why="an operator is decomposed into one step for each element of that dimension",
            hint="capture the program for one size (without dynamic_shapes for that dimension, or with Dim.STATIC)",
        )
        for name, dim, size in free
        if not _is_free(size)
    ]
    if causes:
        raise UnsupportedExportError(to, causes)


def _is_free(size: Any) -> bool:
    return type(settled(size)) is not int


def user_line(node: Node) -> str | None:
    """The user's line of a node; of inputs and of numbers that a program computes, which have none, their readers'."""
    traces = (one.meta.get("stack_trace") for one in (node, *node.users))
    return line_in(next(filter(None, traces), None))
