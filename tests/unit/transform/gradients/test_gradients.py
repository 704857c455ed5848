"""The caller differentiates through what a functionalized function gave back. Eager is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from functionalize import functionalize
from functionalize._torch import pytree
from tests.support.graphs import REMOVES
from tests.unit.transform.gradients.test_autograd import EXAMPLE, Batched, Double, Program, ScaleRow, block

checkpoint: Any = torch.utils.checkpoint.checkpoint
OUTSIDE: dict[str, Program] = {}


def outside(program: Program) -> Program:
    OUTSIDE[program.__name__] = program
    return program


def masked_block(x: Tensor, w: Tensor) -> Tensor:
    return block(nn.functional.dropout(w * x, 0.5))


@outside
def written_through_views(x: Tensor, w: Tensor) -> Any:
    y = x * w
    y[0].mul_(w[1])
    y.t().exp_()
    return y


@outside
def saved_then_written(x: Tensor, w: Tensor) -> Any:
    y = x * w
    y.view(-1).mul_(2)
    s, v = y.sin(), w * 1
    v.add_(1)
    return s * v


@outside
def views_of_an_intermediate(x: Tensor, w: Tensor) -> Any:
    y = x * w
    y.mul_(2)
    return y[0], y.t(), *(y * 2).unbind(0)


@outside
def input_and_its_views(x: Tensor, w: Tensor) -> Any:
    x[0].mul_(w[0])
    x.mul_(w)
    return x, x[0], x.t()


@outside
def dirty_input(x: Tensor, w: Tensor) -> Any:
    return Double.apply(x) * w  # type: ignore[no-untyped-call]


@outside
def function_then_write(x: Tensor, w: Tensor) -> Any:
    y: Any = ScaleRow.apply(x, w)  # type: ignore[no-untyped-call]
    y.mul_(2)
    return y, Batched.apply(x * w).mul_(2)  # type: ignore[no-untyped-call]


@outside
def checkpointed(x: Tensor, w: Tensor) -> Any:
    y = checkpoint(written_through_views, x, w, use_reentrant=True)
    return y, checkpoint(masked_block, x, w, use_reentrant=False)


@outside
def written_unseen(x: Tensor, w: Tensor) -> Any:
    y, z = x * w, x * w
    y.detach().mul_(2)
    with torch.no_grad():
        z[0].mul_(3)
    return y + 1, z + 1


@outside
def activations_in_place(x: Tensor, w: Tensor) -> Any:
    y = nn.functional.linear(x, w).relu_().sigmoid_()
    y.view(-1)[1:3].tanh_()
    mean, variance = torch.zeros(2), torch.ones(2)
    z = nn.functional.batch_norm(y, mean, variance, training=True).relu_()
    return y, z, mean, variance


@outside
def indexed_and_strided(x: Tensor, w: Tensor) -> Any:
    y, z = x * w, torch.complex(x, w)
    y[torch.tensor([0, 1]), torch.tensor([1, 2])] = w[0, 0]
    y[y > 0.5] *= 2
    y.as_strided((2,), (2,), 1).mul_(2)
    torch.view_as_real(z)[..., 0].mul_(2)
    return y, z.abs()


@outside
def lists(x: Tensor, w: Tensor) -> Any:
    pair = [x * 1, w * 2]
    torch._foreach_mul_(pair, 3)
    torch._foreach_add_(pair, [w, x])
    return pair


@outside
def hooked(x: Tensor, w: Tensor) -> Any:
    y = x * w
    y.register_hook(lambda gradient: gradient * 2)
    y.mul_(2)
    y.register_hook(lambda gradient: gradient.clone().mul_(3))
    return y


@outside
def fresh_leaf(x: Tensor, w: Tensor) -> Any:
    y = x.detach().clone().mul_(2).requires_grad_()
    return y, y * w


@outside
def gradient_written(x: Tensor, w: Tensor) -> Any:
    y = x * w
    y[0].mul_(w[1])
    (g,) = torch.autograd.grad(y.sin().sum(), w, create_graph=True)
    h = g * 1
    h[1].mul_(x[0])
    return h


@outside
def saved_and_spoiled(x: Tensor, w: Tensor) -> Any:
    y = (x * w).exp()
    z = y * 1
    y.detach().mul_(2)
    return z


def differentiate(func: Program, of_leaf: bool) -> Any:
    """All that a caller sees who calls and differentiates twice; the text of an error."""
    x, w = (part.clone().requires_grad_() for part in EXAMPLE)
    given = x if of_leaf else x * 1
    torch.manual_seed(0)
    try:
        outputs: Any = func(given, w)
        results = [*pytree.tree_leaves(outputs), given, w]
        seen = [(r.requires_grad, r.is_leaf, r._is_view(), r.stride(), r.storage_offset(), r._version) for r in results]
        functions = [type(r.grad_fn).__name__ for r in results]
        loss: Any = sum((r.abs() * (i + 1)).sum() for i, r in enumerate(results) if r.requires_grad)
        first = torch.autograd.grad(loss, [x, w], create_graph=True, materialize_grads=True)
        again: Any = sum((g**2).sum() for g in first if g.requires_grad)
        second = torch.autograd.grad(again, [x, w], materialize_grads=True) if isinstance(again, Tensor) else ()
    except RuntimeError as error:
        return str(error)[:60]
    return [r.detach() for r in results], seen, functions, first, second


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("of_leaf", [True, False], ids=["leaf", "result"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_outside(name: str, of_leaf: bool, remove: str) -> None:
    eager, ours = (differentiate(f, of_leaf) for f in (OUTSIDE[name], functionalize(OUTSIDE[name], remove=remove)))
    if isinstance(eager, str) or isinstance(ours, str):
        assert ours == eager
    else:
        assert ours[1:3] == eager[1:3]
        torch.testing.assert_close((ours[0], *ours[3:]), (eager[0], *eager[3:]))
