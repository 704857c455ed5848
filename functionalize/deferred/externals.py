"""Real tensors that a construction read, and whether they have changed since.

Invariant: a materialization reads the values that the construction read, or an error names the tensor. Limits: memory
that belongs to NumPy or to a file has no version counter, so a checksum of its bytes is compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from functionalize._torch.tensors import belongs_to_others, check_sum
from functionalize.call_stack import Location, user_location
from functionalize.errors import name_of, variable_of
from functionalize.refusals.deferred import OUTSIDE_TENSOR_CHANGED


@dataclass(frozen=True, eq=False)
class External:
    """A tensor, and its state when the construction read it."""

    tensor: torch.Tensor
    name: str | None  # of the variable that held it then
    line: Location
    version: int | None
    total: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> External:
        version = None if tensor.is_inference() else tensor._version
        storage = tensor.untyped_storage()
        total = check_sum(storage) if version is None or belongs_to_others(storage) else None
        return cls(tensor, variable_of(tensor), user_location(), version, total)

    def check(self) -> None:
        """Raise if its values have changed, or may have."""
        written = self.version is not None and self.tensor._version != self.version
        if written or (self.total is not None and check_sum(self.tensor.untyped_storage()) != self.total):
            raise OUTSIDE_TENSOR_CHANGED.error(self.line, tensor=self.name or name_of(self.tensor))


class Externals:
    """The real tensors that the nodes of a graph read."""

    def note(self, node: Node, root: torch.nn.Module) -> None:
        """Note a new node that reads an attribute of ``root``."""
        value = getattr(root, str(node.target))
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
            node.meta["external"] = External.of(value)

    def keep(self, graph: Graph, tracer: Any) -> None:
        """Drop the attributes that no node of a graph reads any more."""
        read = {str(node.target) for node in graph.find_nodes(op="get_attr")}
        for value, name in list(tracer.tensor_attrs.items()):
            if name not in read:
                del tracer.tensor_attrs[value]
        for name in [name for name in vars(tracer.root) if name.startswith("_tensor_constant") and name not in read]:
            delattr(tracer.root, name)

    def check(self, guards: Iterable[External]) -> None:
        """Raise if a tensor has changed on which a value depends that the program has read."""
        for external in guards:
            external.check()

    def read(self, node: Node, root: torch.nn.Module) -> Any:
        """The value that a node reads.

        Raises:
            DeferredError: the tensor has changed since it was recorded.
        """
        external: External | None = node.meta.get("external")
        if external is None:
            return getattr(root, str(node.target))
        external.check()
        return external.tensor
