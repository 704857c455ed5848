"""Attention as one operator, and its gradients, by products of matrices.

Torch's decomposition of the operator alone gives other numbers where its backward reads the logarithms of sums.

Invariant: as eager's kernel, a query that may look at nothing gets zeros; 16 bits are computed with 32; results lie as
the kernel's. Limits: without dropout, for which torch has no kernel on the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from functionalize.backends.decompositions.opmath import wide

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def is_differentiated(node: Node) -> bool:
    """Whether a node is a backward of attention, or attention whose backward reads it."""
    if node.target is not _FORWARD:
        return node.target is _BACKWARD
    return any(user.target is operator.getitem and user.args[1] == 1 and user.users for user in node.users)


def _in_order(*tensors: Any) -> list[Any]:
    """Tensors whose elements lie in order, also when torch takes copies of views before them for views."""
    return [aten.clone.default(one, memory_format=torch.contiguous_format) for one in tensors]


def _of_heads(query: Any, key: Any) -> Any:
    """Keys, or values, for as many heads as queries have."""
    batch, heads, *rest = key.size()
    groups = query.size(1) // heads
    if groups == 1:
        return wide(key)
    return wide(key).unsqueeze(2).expand(batch, heads, groups, *rest).reshape(batch, heads * groups, *rest)


def _summed(gradient: Any, key: Any) -> Any:
    """The gradient of what :func:`_of_heads` takes."""
    batch, heads, *rest = key.size()
    return gradient.reshape(batch, heads, gradient.size(1) // heads, *rest).sum(2).to(key.dtype)


def _scores(query: Any, key: Any, is_causal: bool, mask: Any, scale: Any) -> Any:
    found = (wide(query) @ key.transpose(-2, -1)) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        rows = aten.arange.default(query.size(-2)).unsqueeze(1)
        seen = aten.arange.default(key.size(-2)).unsqueeze(0) <= rows
        found = aten.where.ScalarOther(seen, found, float("-inf"))
    return found if mask is None else found + wide(mask)


def attention(
    query: Any, key: Any, value: Any, dropout: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None,
    scale: Any = None,
) -> Any:  # fmt: skip
    """With what its backward reads."""
    if dropout:
        return NotImplemented
    rows_first = query.transpose(1, 2).is_contiguous()
    query, key, value = _in_order(query, key, value)
    scores = _scores(query, _of_heads(query, key), is_causal, attn_mask, scale)
    most = aten.amax.default(scores, [-1], True)
    shares = aten._softmax.default(scores, -1, False)
    total = (scores - most).exp().sum(-1, keepdim=True).log() + most
    if attn_mask is not None:
        nothing = aten.eq.Scalar(most, float("-inf"))
        shares = aten.masked_fill.Scalar(shares, nothing, 0.0)
        total = aten.masked_fill.Scalar(total, nothing, 0.0)
    found = (shares @ _of_heads(query, value)).to(query.dtype)
    return _by_rows(found) if rows_first else found, _by_rows(total).squeeze(-1)


def _by_rows(x: Any) -> Any:
    """A tensor in whose memory rows come before heads."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, total: Any, dropout: float, is_causal: bool, *,
    attn_mask: Any = None, scale: Any = None,
) -> Any:  # fmt: skip
    if dropout:
        return NotImplemented
    gradient, query, key, value, out, total = _in_order(gradient, query, key, value, out, total)
    factor = query.size(-1) ** -0.5 if scale is None else scale
    keys, values, gradient = _of_heads(query, key), _of_heads(query, value), wide(gradient)
    shares = (_scores(query, keys, is_causal, attn_mask, scale) - total.unsqueeze(-1)).exp()
    of_shares = gradient @ values.transpose(-2, -1)
    of_scores = shares * (of_shares - (gradient * wide(out)).sum(-1, keepdim=True)) * factor
    of_key, of_value = of_scores.transpose(-2, -1) @ wide(query), shares.transpose(-2, -1) @ gradient
    found = (of_scores @ keys).to(query.dtype), _summed(of_key, key), _summed(of_value, value)
    return tuple(map(_by_rows, found))


ATTENTION: dict[Any, Callable[..., Any]] = {_FORWARD: attention, _BACKWARD: attention_backward}
