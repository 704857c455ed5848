"""The elements of a sparse tensor, if their number is data-dependent: by operators of a graph.

Torch's own methods answer with Python's numbers, or ask for them.

Invariant: each gives what the method gives, or raises what it raises. Limits: tensors in COO layout; elements that
gradients go through are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from functionalize._torch import OF_ELEMENTS
from functionalize.refusals.tensors import SPARSE_GRADIENT

aten = torch.ops.aten


def _count(tensor: torch.Tensor) -> Any:
    return aten._indices.default(tensor).size(1)


def _of_coalesced(name: str, op: Any) -> Callable[[torch.Tensor], Any]:
    def found(tensor: torch.Tensor) -> Any:
        if not tensor.is_coalesced():
            raise RuntimeError(f"Cannot get {name} on an uncoalesced tensor, please call .coalesce() first")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise SPARSE_GRADIENT.error(part=name, size=tuple(tensor.size()))
        return op(tensor)

    return found


_ANSWERS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "_nnz": _count,
    "_indices": aten._indices.default,
    "_values": aten._values.default,
    "indices": _of_coalesced("indices", aten._indices.default),
    "values": _of_coalesced("values", aten._values.default),
}
ELEMENTS: Mapping[Any, Callable[[torch.Tensor], Any]] = {OF_ELEMENTS[name]: give for name, give in _ANSWERS.items()}
"""What each method gives for a tensor without known elements."""
