"""What torch runs on a GPU alone, kernels of attention and of recurrent cells, by operators that engines have.

Invariant: a row computes what the kernel computes, but for what only the kernel's own backward reads (states of random
numbers); for arguments that it does not take it gives NotImplemented. Limits: without dropout, whose random numbers are
the kernel's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _on_cpu(op: Any, tensors: Sequence[Any], dropout: float, is_causal: bool, mask: Any, scale: float | None) -> Any:
    return NotImplemented if dropout else op(*tensors, 0.0, is_causal, attn_mask=mask, scale=scale)


def _unread(like: Any) -> Any:
    return like.new_zeros([0], dtype=torch.int64)


def efficient_attention(
    query: Any, key: Any, value: Any, mask: Any, keeps: bool, dropout: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    found = _on_cpu(_FORWARD, (query, key, value), dropout, is_causal, mask, scale)
    return found if found is NotImplemented else (*found, _unread(query), _unread(query))


def efficient_attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, mask: Any, out: Any, total: Any, seed: Any, offset: Any,
    dropout: float, wanted: Sequence[bool], is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    """Of the mask there is no gradient here."""
    if wanted[3] and mask is not None:
        return NotImplemented
    found = _on_cpu(_BACKWARD, (gradient, query, key, value, out, total), dropout, is_causal, mask, scale)
    return found if found is NotImplemented else (*found, query.new_zeros([0]))


def flash_attention(
    query: Any, key: Any, value: Any, dropout: float = 0.0, is_causal: bool = False, debugs: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    found = NotImplemented if debugs else _on_cpu(_FORWARD, (query, key, value), dropout, is_causal, None, scale)
    return found if found is NotImplemented else _with_lengths(found, query, key)


def flash_attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, total: Any, lengths: Any, others: Any, longest: Any,
    longest_key: Any, dropout: float, is_causal: bool, seed: Any, offset: Any, *, scale: float | None = None,
) -> Any:  # fmt: skip
    return _on_cpu(_BACKWARD, (gradient, query, key, value, out, total), dropout, is_causal, None, scale)


def cudnn_attention(
    query: Any, key: Any, value: Any, mask: Any, keeps: bool, dropout: float = 0.0, is_causal: bool = False,
    debugs: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    found = NotImplemented if debugs else _on_cpu(_FORWARD, (query, key, value), dropout, is_causal, mask, scale)
    return found if found is NotImplemented else _with_lengths(found, query, key)


def cudnn_attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, total: Any, seed: Any, offset: Any, mask: Any,
    lengths: Any, others: Any, longest: Any, longest_key: Any, dropout: float, is_causal: bool, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    return _on_cpu(_BACKWARD, (gradient, query, key, value, out, total), dropout, is_causal, mask, scale)


def _with_lengths(found: Any, query: Any, key: Any) -> Any:
    unread = [_unread(query) for _ in range(5)]
    return *found, *unread[:2], query.size(2), key.size(2), *unread[2:]


def _with(gates: Any, bias: Any) -> Any:
    return gates if bias is None else gates + bias


def lstm_cell(of_input: Any, of_hidden: Any, cell: Any, bias: Any = None, bias_of_hidden: Any = None) -> Any:
    """With the gates, which its backward reads."""
    enters, forgets, new, leaves = (_with(of_input, bias) + _with(of_hidden, bias_of_hidden)).chunk(4, 1)
    gates = enters.sigmoid(), forgets.sigmoid(), new.tanh(), leaves.sigmoid()
    after = gates[1] * cell + gates[0] * gates[2]
    return gates[3] * after.tanh(), after, torch.cat(gates, 1)


def gru_cell(of_input: Any, of_hidden: Any, hidden: Any, bias: Any = None, bias_of_hidden: Any = None) -> Any:
    """With what its backward reads."""
    given, kept = _with(of_input, bias).chunk(3, 1), _with(of_hidden, bias_of_hidden).chunk(3, 1)
    reset, update = (given[0] + kept[0]).sigmoid(), (given[1] + kept[1]).sigmoid()
    new = (given[2] + kept[2] * reset).tanh()
    return (hidden - new) * update + new, torch.cat([reset, update, new, hidden, kept[2]], 1)


GPU_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_efficient_attention.default: efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_attention_backward,
    aten._scaled_dot_product_flash_attention.default: flash_attention,
    aten._scaled_dot_product_flash_attention_backward.default: flash_attention_backward,
    aten._scaled_dot_product_cudnn_attention.default: cudnn_attention,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_attention_backward,
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_gru_cell.default: gru_cell,
}
