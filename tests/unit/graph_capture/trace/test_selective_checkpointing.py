"""Selective checkpointing in a capture: what the policy says is kept, all else is computed again, as in eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from functionalize import capture

aten = torch.ops.aten
REMOVE = ("mutations", "mutations_and_views")
Body = Callable[[Tensor, Tensor], Tensor]


def _selective(body: Body, ops: Sequence[Any]) -> Body:
    contexts = partial(create_selective_checkpoint_contexts, list(ops))
    return lambda x, w: checkpoint(body, x, w, use_reentrant=False, context_fn=contexts)


def _written(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).sin()
    y.mul_(2)
    return (y @ w).cos()


@pytest.mark.parametrize("remove", REMOVE)
@pytest.mark.parametrize(
    "body",
    [
        lambda x, w: F.dropout(x @ w, 0.5),
        lambda x, w: F.dropout((x @ w).sin(), 0.5) @ w,
        lambda x, w: F.dropout(F.rrelu(x @ w, training=True), 0.5).exp(),
        _written,
    ],
)
def test_what_is_not_kept_may_be_written(body: Body, remove: str) -> None:
    run = _selective(body, [aten.mm.default])
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    found = []
    for call in (run, capture(run, (x, w), remove=remove)):
        torch.manual_seed(0)
        result = call(x, w)
        found.append((result.detach(), torch.autograd.grad(result.sum(), (x, w)), torch.rand(1)))
    torch.testing.assert_close(*found)


def test_what_is_kept_may_not_be_written() -> None:
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    run = _selective(_written, [aten.sin.default])
    for call in (run, capture(run, (x, w))):
        with pytest.raises(RuntimeError, match="selective activation checkpoint has been mutated"):
            call(x, w).sum().backward()


@pytest.mark.parametrize("remove", REMOVE)
@pytest.mark.parametrize(
    ("ops", "kept"),
    [([], 0), ([aten.sin.default], 1), ([aten.mm.default], 2), ([aten.sin.default, aten.mm.default], 3)],
)
def test_the_policy_says_what_is_saved(ops: Sequence[Any], kept: int, remove: str) -> None:
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    run = capture(_selective(lambda x, w: ((x @ w).sin().exp() @ w).cos(), ops), (x, w), remove=remove)
    run(x, w)  # compiled outside of the hooks
    saved, own = set[int](), {x.data_ptr(), w.data_ptr()}

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run(x, w)
    assert len(saved - own) == kept
    assert result.requires_grad
