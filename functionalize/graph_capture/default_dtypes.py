"""Default dtypes that a program sets for a while: what operators give under them is said by their nodes.

A graph runs under the default dtype that the program began with.

Invariant: each node gives the dtype that it gave. Limits: operators that take a dtype, and those of tensors that have a
floating one; others are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import OpOverload
from functionalize.errors import UnsupportedProgramError


class DefaultDtypes:
    """The nodes that were recorded under another default dtype than the first."""

    def __init__(self) -> None:
        self._first = torch.get_default_dtype()
        self._nodes: list[Node] = []

    def note(self, node: Node) -> None:
        """A node was added to the graph."""
        if torch.get_default_dtype() is not self._first:
            self._nodes.append(node)

    def spell_out(self) -> None:
        """Have the nodes say which dtype they give.

        Raises:
            UnsupportedProgramError: one of them cannot.
        """
        for node in self._nodes:
            value: Any = node.meta.get("val")
            given = [one.meta.get("val") for one in node.all_input_nodes]
            plain = not isinstance(node.target, OpOverload) or not _is_floating(value)
            if plain or any(map(_is_floating, given)):
                continue
            if not any(argument.name == "dtype" for argument in node.target._schema.arguments):  # type: ignore[union-attr]
                raise UnsupportedProgramError(
                    f"the program sets another default dtype, under which {node.target} gives {value.dtype}",
                    why="calls run the graph under one default dtype",
                    hint="give tensors their dtypes by `dtype=` or `.to()`",
                    at=node.meta["stack_trace"].location,
                )
            node.update_kwarg("dtype", node.kwargs.get("dtype") or value.dtype)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
