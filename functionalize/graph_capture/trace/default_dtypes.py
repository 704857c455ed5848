"""Default dtypes that a program sets for a while: nodes that were recorded under one get an explicit dtype.

A graph runs under the default dtype that the program began with.

Invariant: the result of each node has the dtype that it had in the capture. Limits: operators that take a dtype,
operators on floating tensors, and pointwise operators; others are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import HigherOrderOperator, OpOverload, on_handles
from functionalize.call_stack import Origin, line_of_trace
from functionalize.refusals.python_objects import DEFAULT_DTYPE_SET

_CONVERT = torch.ops.aten._to_copy.default


class DefaultDtypes:
    """The nodes that were recorded under another default dtype than the first."""

    def __init__(self) -> None:
        self._first = torch.get_default_dtype()
        self._nodes: list[Node] = []

    def note(self, node: Node) -> None:
        """A node was added to the graph."""
        if torch.get_default_dtype() is not self._first:
            self._nodes.append(node)

    def make_explicit(self, root: torch.nn.Module) -> None:
        """Have the nodes state the dtypes of their results; ``root``: the module that holds their graph's attributes.

        Raises:
            UnsupportedProgramError: a node cannot.
        """
        for node in self._nodes:
            if isinstance(node.target, HigherOrderOperator):
                _set_dtypes_of_bodies(node, root)
            else:
                _set_dtype(node)


def _set_dtypes_of_bodies(node: Node, root: torch.nn.Module) -> None:
    """Set the dtypes in the bodies that a higher-order operator runs."""
    for argument in node.all_input_nodes:
        body = getattr(root, str(argument.target), None) if argument.op == "get_attr" else None
        if not isinstance(body, torch.fx.GraphModule):
            continue
        for inner in list(body.graph.nodes):
            if isinstance(inner.target, HigherOrderOperator):
                _set_dtypes_of_bodies(inner, body)
            else:
                _set_dtype(inner)


def _set_dtype(node: Node) -> None:
    value: Any = node.meta.get("val")
    operands = [argument for argument in node.all_input_nodes if isinstance(argument.meta.get("val"), torch.Tensor)]
    floating = any(_is_floating(argument.meta["val"]) for argument in operands)
    if floating or not isinstance(node.target, OpOverload) or not _is_floating(value):
        return
    if any(argument.name == "dtype" for argument in node.target._schema.arguments):
        node.update_kwarg("dtype", node.kwargs.get("dtype") or value.dtype)
    elif operands and torch.Tag.pointwise in node.target.tags:
        for operand in operands:
            node.replace_input_with(operand, _converted(node, operand, value.dtype))
    else:
        trace = node.meta.get("stack_trace")
        raise DEFAULT_DTYPE_SET.error(
            trace.location if isinstance(trace, Origin) else line_of_trace(trace), op=node.target, dtype=value.dtype
        )


def _converted(node: Node, operand: Node, dtype: torch.dtype) -> Node:
    """An operand in the dtype to which pointwise kernels promote it."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(_CONVERT, (operand,), {"dtype": dtype})
    made.meta = {**node.meta, "val": on_handles(torch.empty_like, (operand.meta["val"],), {"dtype": dtype})}
    return made


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
