"""The elements of sparse tensors with a data-dependent number of them: a symbol stands for that number.

A fake tensor in COO layout reports no elements. Here a symbol is the size of its indices and of its values, and of
tensors that are made of these, or by `sparse_mask` with the tensor as the mask.

Guarantees: a tensor without such elements is left to torch. Limits: other layouts. The number of elements of an
operator's result is a symbol of its own, equal to another symbol where the program relies on that; whether elements are
coalesced is data-dependent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from functionalize._torch import has_unknown_elements
from functionalize._torch.fakes import DataDependentOutputException, FakeTensor

aten = torch.ops.aten


@dataclass
class _Elements:
    """What the trace knows of the elements of a tensor."""

    count: Any = None  # a symbol, once the program has read it
    coalesced: bool = False  # whether they surely are


_ELEMENTS: Any = WeakIdKeyDictionary()  # by fake tensor


def _elements(tensor: Any) -> _Elements:
    elements: _Elements | None = _ELEMENTS.get(tensor)
    if elements is None:
        elements = _ELEMENTS[tensor] = _Elements()
    return elements


def _count(tensor: Any) -> Any:
    elements = _elements(tensor)
    if elements.count is None:
        from functionalize._torch.symbols.symbols import assume  # here: loads sympy

        elements.count = tensor.fake_mode.shape_env.create_unbacked_symint()
        assume(elements.count >= 0)
    return elements.count


def _indices(tensor: Any) -> Any:
    if not has_unknown_elements(tensor):
        return NotImplemented
    return torch.empty((tensor.sparse_dim(), _count(tensor)), dtype=torch.int64, device=tensor.device)


def _values(tensor: Any) -> Any:
    if not has_unknown_elements(tensor):
        return NotImplemented
    size = (_count(tensor), *tensor.size()[tensor.sparse_dim() :])
    return torch.empty(size, dtype=tensor.dtype, device=tensor.device)


def is_coalesced(tensor: torch.Tensor) -> bool:
    """Whether a tensor is coalesced, for a program that asks; data-dependent if the elements are unknown.

    Raises:
        DataDependentOutputException: the trace does not answer data-dependent questions.
    """
    if not isinstance(tensor, FakeTensor) or not has_unknown_elements(tensor):
        return tensor.is_coalesced()
    if _elements(tensor).coalesced:
        return True
    decider = getattr(tensor.fake_mode.shape_env, "decider", None)
    answer = None if decider is None else decider.result(aten.is_coalesced.default, (tensor,), {})
    if answer is None:
        raise DataDependentOutputException(aten.is_coalesced.default)
    return bool(answer)


def take_as_coalesced(tensor: torch.Tensor) -> None:
    """Treat a tensor of unknown elements as coalesced: whoever passes it at run time coalesces it."""
    _elements(tensor).coalesced = True


def _coalesce(tensor: Any) -> Any:
    return _made(tensor.sparse_dim(), tensor.dense_dim(), tensor.size(), tensor, _Elements(coalesced=True))


def _of_parts(sparse_dim: int, dense_dim: int, size: Any, indices: Any, values: Any, **options: Any) -> Any:
    count = indices.size(1)
    if not isinstance(count, torch.SymInt):
        return NotImplemented
    return _made(sparse_dim, dense_dim, size, values, _Elements(count))


def _sparse_mask(tensor: Any, mask: Any) -> Any:
    if not has_unknown_elements(mask) or tensor.layout is not torch.strided:
        return NotImplemented
    return _made(mask.sparse_dim(), mask.dense_dim(), mask.size(), tensor, _elements(mask))


def _made(sparse_dim: int, dense_dim: int, size: Any, like: Any, elements: _Elements) -> Any:
    """A tensor of unknown elements, with the dtype and the device of ``like``."""
    options = {"dtype": like.dtype, "layout": torch.sparse_coo, "device": like.device}
    made: Any = aten._sparse_coo_tensor_with_dims.default(sparse_dim, dense_dim, size, **options)
    _ELEMENTS[made] = elements
    return made


SPARSE_METAS: Mapping[Any, Callable[..., Any]] = {
    aten._indices.default: _indices,
    aten._values.default: _values,
    aten._coalesce.default: _coalesce,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: _of_parts,
    aten.sparse_mask.default: _sparse_mask,
}
