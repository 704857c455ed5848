"""Sums, means and maxima of the rows of bags, and their gradients, by other operators.

Invariant: each index is of the last bag that begins at or before it; one at ``padding_idx`` counts for nothing. Limits:
dense gradients; weights of samples that lie in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_SUM, _MEAN, _MAX = range(3)  # the modes


def _bags(indices: Any, begins: Any) -> Any:
    """The bag of each index."""
    places = aten.arange.default(indices.size(0), dtype=begins.dtype)
    return (places.unsqueeze(-1) >= begins).to(begins.dtype).sum(-1) - 1


def _is_fast(weight: Any, padding_idx: int) -> bool:
    """Whether torch's kernel of a CPU adds up without a word of the bags, which its backward then finds by itself."""
    return bool(weight.dtype in (torch.float32, torch.float16) and weight.stride(1) == 1 and padding_idx < 0)


def embedding_bag(
    weight: Any, indices: Any, offsets: Any, by_frequency: bool = False, mode: int = _SUM, sparse: bool = False,
    weights: Any = None, include_last_offset: bool = False, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """With it, what a backward reads: the bag of each index, sizes of bags, and which index is the largest."""
    begins = offsets[: offsets.size(0) - 1] if include_last_offset else offsets
    bag, rows = _bags(indices, begins), weight.index_select(0, indices)
    rows = rows if weights is None else rows * weights.unsqueeze(-1)
    counted = (indices != padding_idx).unsqueeze(-1)
    counts = torch.zeros_like(begins).index_add(0, bag, counted.squeeze(-1).to(begins.dtype))
    zeros = rows.new_zeros([begins.size(0), weight.size(1)])
    if mode == _MAX:
        found, largest = _maxima(zeros, torch.where(counted, rows, -float("inf")), bag, counts, indices)
        return found, bag, counts, largest
    found = zeros.index_add(0, bag, torch.where(counted, rows, 0))
    if mode == _SUM:
        bag = offsets.new_zeros([0]) if _is_fast(weight, padding_idx) else bag
        return found, bag, torch.zeros_like(counts), torch.zeros_like(counts)
    return found / counts.clamp(min=1).unsqueeze(-1).to(found.dtype), bag, counts, counts


def _maxima(zeros: Any, rows: Any, bag: Any, counts: Any, indices: Any) -> tuple[Any, Any]:
    """The maxima of bags, and for each the first index that has it; zeros for what is empty."""
    places = bag.unsqueeze(-1).expand(rows.size())
    found = zeros.scatter_reduce(0, places, rows, "amax", include_self=False)
    last = indices.size(0)
    order = aten.arange.default(last, dtype=torch.int64).unsqueeze(-1)
    candidates = torch.where(rows == found.index_select(0, bag), order, last)
    first = torch.full_like(zeros, last, dtype=torch.int64).scatter_reduce(0, places, candidates, "amin")
    empty = (counts == 0).unsqueeze(-1)
    largest = torch.where(empty, 0, indices[torch.where(empty, 0, first).clamp(max=max(last - 1, 0))])
    return torch.where(empty, 0, found), largest.to(bag.dtype)


def embedding_bag_forward_only(weight: Any, indices: Any, offsets: Any, *options: Any) -> Any:
    """The same, with as many sizes as there are offsets."""
    found, bag, sizes, largest = embedding_bag(weight, indices, offsets, *options)
    return found, bag, aten.constant_pad_nd.default(sizes, [0, offsets.size(0) - sizes.size(0)]), largest


def embedding_bag_backward(
    gradient: Any, indices: Any, offsets: Any, bag: Any, sizes: Any, largest: Any, count: Any, by_frequency: bool,
    mode: int, sparse: bool, weights: Any, padding_idx: int = -1,
) -> Any:  # fmt: skip
    if sparse:
        return NotImplemented
    zeros = gradient.new_zeros([count, gradient.size(1)])
    if mode == _MAX:
        given = torch.where((sizes > 0).unsqueeze(-1), gradient, 0)
        return zeros.scatter_add(0, largest.to(torch.int64), given)
    bag = bag if bag.size(0) else _bags(indices, offsets)
    rows = gradient.index_select(0, bag)
    if mode == _MEAN:
        rows = rows / sizes.index_select(0, bag).clamp(min=1).unsqueeze(-1).to(rows.dtype)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    if by_frequency:
        counts = torch.zeros([count], dtype=rows.dtype).index_add(0, indices, torch.ones_like(rows[:, 0]))
        rows = rows / counts.index_select(0, indices).unsqueeze(-1)
    return zeros.index_add(0, indices, torch.where((indices != padding_idx).unsqueeze(-1), rows, 0))


def per_sample_weights_backward(
    gradient: Any, weight: Any, indices: Any, offsets: Any, bag: Any, mode: int, padding_idx: int = -1
) -> Any:
    bag = bag if bag.size(0) else _bags(indices, offsets)
    found = (gradient.index_select(0, bag) * weight.index_select(0, indices)).sum(-1)
    return torch.where(indices != padding_idx, found, 0)


BAGS: dict[Any, Callable[..., Any]] = {
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag_forward_only,
    aten._embedding_bag_backward.default: embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: per_sample_weights_backward,
}
