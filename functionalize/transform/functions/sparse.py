"""Reads the elements of a sparse tensor by operators of a graph, if their number is data-dependent.

Torch's own methods return numbers of Python's, or ask for them.

Invariant: each function returns or raises what the method does. Limits: tensors in COO layout; elements that gradients
go through are refused.
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
    def elements(tensor: torch.Tensor) -> Any:
        if not tensor.is_coalesced():
            raise RuntimeError(f"Cannot get {name} on an uncoalesced tensor, please call .coalesce() first")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise SPARSE_GRADIENT.error(part=name, size=tuple(tensor.size()))
        return op(tensor)

    return elements


_ANSWERS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "_nnz": _count,
    "_indices": aten._indices.default,
    "_values": aten._values.default,
    "indices": _of_coalesced("indices", aten._indices.default),
    "values": _of_coalesced("values", aten._values.default),
}
ELEMENTS: Mapping[Any, Callable[[torch.Tensor], Any]] = {OF_ELEMENTS[name]: give for name, give in _ANSWERS.items()}
"""The functions that replace methods of a tensor without known elements."""
