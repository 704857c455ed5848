"""Autograd around and inside a functionalized function: leaves, detached aliases, hooks, writes in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from functionalize import functionalize
from tests.support.equality import Check, Table

inside = Table()
SQUARE = torch.arange(9.0).view(3, 3) + 1
EITHER_WAY = pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad])


@inside(SQUARE, SQUARE + 1)
def backward_after_writes(x: Tensor, w: Tensor) -> Any:
    leaf = w.detach().clone().requires_grad_()
    y = x * leaf
    y[0].mul_(leaf[1])
    y.t()[1:].add_(leaf[:2] * 2)
    y.sin().sum().backward()
    return leaf.grad


@inside(SQUARE)
def gradients_accumulate(x: Tensor) -> Any:
    leaf = x.detach().clone().requires_grad_()
    for _ in range(3):
        (leaf * leaf).sum().backward()
    assert leaf.grad is not None
    leaf.grad.mul_(2)
    return leaf.grad


@inside(SQUARE)
def second_derivative(x: Tensor) -> Any:
    leaf = x.detach().clone().requires_grad_()
    y = leaf * 1
    y.view(-1)[2:].pow_(3)
    (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), leaf)
    return first.detach(), second


@inside(SQUARE)
def a_hook_that_writes_its_gradient(x: Tensor) -> Any:
    leaf = x.detach().clone().requires_grad_()
    y = leaf * 2
    y.register_hook(lambda gradient: gradient.clone().mul_(3))
    y.exp().sum().backward()
    return leaf.grad


@inside(SQUARE)
def a_write_under_no_grad_between(x: Tensor) -> Any:
    leaf = x.detach().clone().requires_grad_()
    with torch.no_grad():
        leaf[0].mul_(2)
    (leaf**2).sum().backward()
    with torch.no_grad():
        leaf -= 0.1 * leaf.grad  # type: ignore[operator]
        leaf.grad.zero_()  # type: ignore[union-attr]
    return leaf.detach(), leaf.grad


@inside(SQUARE)
def checkpointed(x: Tensor) -> Any:
    leaf = x.detach().clone().requires_grad_()

    def part(y: Tensor) -> Tensor:
        z = y * 2
        z[0].mul_(y[1])
        return z.relu_()

    out = checkpoint(part, leaf * 1, use_reentrant=False)
    out.sum().backward()
    return leaf.grad


class WritesInBackward(torch.autograd.Function):
    """Doubles; its backward adds to a tensor that forward was given, and to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.seen.add_(1)
        gradient = gradient.clone()
        gradient[0].mul_(3)
        return gradient, None


@inside(SQUARE, torch.zeros(3))
def backward_writes_what_forward_was_given(x: Tensor, seen: Tensor) -> Any:
    leaf = x.detach().clone().requires_grad_()
    out = WritesInBackward.apply(leaf * 1, seen)  # type: ignore[no-untyped-call]
    out.sin().sum().backward()
    return leaf.grad, seen * 1


class DoublesInPlace(torch.autograd.Function):
    """Writes its argument and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


@inside(SQUARE)
def a_function_that_marks_dirty(x: Tensor) -> Any:
    leaf = x.detach().clone().requires_grad_()
    y = leaf * 1
    out = DoublesInPlace.apply(y)  # type: ignore[no-untyped-call]
    out.view(-1)[0].mul_(5)
    (y * out).sum().backward()
    return leaf.grad, y.detach()


@inside.each
def test_inside(func: Any, inputs: Any, check: Check) -> None:
    check(func, *inputs)


# Around


def both(func: Callable[..., Any], run: Callable[[Any], Any], remove: str) -> None:
    """What a run observes of a function and of the functionalized one."""
    got, want = run(functionalize(func, remove=remove)), run(func)
    for one, two in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True):
        if isinstance(two, Tensor):
            torch.testing.assert_close(one, two)
            assert (one.requires_grad, one.is_leaf) == (two.requires_grad, two.is_leaf)
        else:
            assert one == two


def test_a_write_changes_what_aliases_know_of_gradients(remove: str) -> None:
    def f(a: Tensor, w: Tensor) -> Any:
        a.add_(w)
        return a * 2

    def run(func: Any) -> Any:
        w, base = SQUARE.clone().requires_grad_(), torch.zeros(3, 3)
        alias = base.view(-1)
        out = func(base, w)
        (out.sum() + (alias * alias).sum()).backward()
        return base, alias, w.grad

    both(f, run, remove)


@EITHER_WAY
def test_detached_and_undetached_writes(grad_mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Any:
        a.detach().mul_(2)
        with torch.no_grad():
            a.add_(3)
        return a[0] + a

    def run(func: Any) -> Any:
        leaf = SQUARE.clone().requires_grad_()
        with grad_mode():
            out = func(leaf * 1 if grad_mode is torch.enable_grad else leaf)
        if out.requires_grad:
            (out * out).sum().backward()
        return out, leaf, leaf.grad, leaf._version

    both(f, run, remove)


def test_an_alias_that_autograd_does_not_know_of_is_written(remove: str) -> None:
    def f(a: Tensor) -> Any:
        hidden = a.detach().view(-1)
        hidden[1:3].mul_(7)
        return a * 2

    def run(func: Any) -> Any:
        leaf = SQUARE.clone().requires_grad_()
        out = func(leaf * 1)
        out.sum().backward()
        return out, leaf.grad

    both(f, run, remove)


def test_outputs_of_which_some_want_gradients(remove: str) -> None:
    def f(a: Tensor, b: Tensor) -> Any:
        a.mul_(2)
        with torch.no_grad():
            view = a.view(-1)
            fresh = a * 3
        return a.t(), b.view(-1), view, fresh, b.detach(), (b > 1)

    def run(func: Any) -> Any:
        leaf = SQUARE.clone().requires_grad_()
        return func(leaf * 1, SQUARE.clone())

    both(f, run, remove)


def test_a_function_that_makes_its_input_want_gradients(remove: str) -> None:
    def f(a: Tensor) -> Any:
        a.mul_(2)
        a.requires_grad_()
        return (a * a).sum()

    def run(func: Any) -> Any:
        a = SQUARE.clone()
        func(a).backward()
        return a, a.grad

    both(f, run, remove)


def test_backward_of_the_caller_sees_what_was_saved(remove: str) -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        z = y.relu()
        y.add_(1)
        z = z * 1
        z[0].mul_(w[0])
        kept = w * z
        return kept, y

    def run(func: Any) -> Any:
        x, w = SQUARE.clone().requires_grad_(), (SQUARE / 7).requires_grad_()
        kept, y = func(x, w)
        (kept.sin().sum() + y.sum()).backward()
        return kept, x.grad, w.grad

    both(f, run, remove)


def test_a_leaf_is_not_written_where_eager_forbids_it(remove: str) -> None:
    def f(a: Tensor) -> Any:
        return a.mul_(2)

    def view(a: Tensor) -> Any:
        return a[0].mul_(2)

    for func in (f, view):
        leaf = SQUARE.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="leaf"):
            functionalize(func, remove=remove)(leaf)
        assert torch.equal(leaf, SQUARE)


@EITHER_WAY
def test_inference_tensors(grad_mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Any:
        a.mul_(2)
        return a[1:], a.is_inference()

    def run(func: Any) -> Any:
        with torch.inference_mode():
            a = SQUARE.clone()
            return func(a)[1], a.is_inference(), a.tolist()

    both(f, run, remove)
    with torch.inference_mode():
        frozen = SQUARE.clone()
    with grad_mode(), pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        f(frozen)
    with grad_mode(), pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        functionalize(f, remove=remove)(frozen)


def test_autocast_and_complex(check: Check) -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            y[0].add_(1)
        z = torch.view_as_complex(torch.stack([x, w], -1).contiguous())
        z.conj().mul_(1j)
        return y.dtype == torch.bfloat16, y, z.real, z.imag

    check(f, SQUARE, SQUARE / 5)


def test_a_sparse_gradient(remove: str) -> None:
    def f(weight: Tensor, index: Tensor) -> Any:
        rows = torch.nn.functional.embedding(index, weight, sparse=True)
        rows[0].mul_(2)
        return rows

    def run(func: Any) -> Any:
        weight = SQUARE.clone().requires_grad_()
        func(weight, torch.tensor([0, 2])).sum().backward()
        assert weight.grad is not None and weight.grad.is_sparse
        return weight.grad.to_dense()

    both(f, run, remove)
