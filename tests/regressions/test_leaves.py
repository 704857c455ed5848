"""Who is a leaf, who requires gradients, and which version a tensor has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize.errors import (
    DataDependentError,
    UnsupportedMutationError,
    UnsupportedProgramError,
)
from tests.support.graphs import REMOVES

SPAN = torch.arange(6.0)
Program = Callable[..., Any]


@pytest.mark.parametrize("remove", REMOVES)
def test_view_of_what_data_were_before_a_backward_inside_requires_gradients(remove: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.expand(2, 4)
        x.data = x + 1
        rows.sum().backward()
        return rows, x

    x = torch.arange(4.0).requires_grad_()
    rows, same = capture(f, (torch.arange(4.0).requires_grad_(),), remove=remove)(x)
    assert rows.requires_grad
    assert same is x
    assert torch.equal(rows.detach(), torch.arange(4.0).expand(2, 4))
    assert x.grad is not None and torch.equal(x.grad, torch.full((4,), 2.0))
    try:
        rows.sum().backward()
    except RuntimeError as error:
        assert "that itself calls backward" in str(error)
    else:
        assert torch.equal(x.grad, torch.full((4,), 4.0))


def test_computed_inputs_are_no_leaves_without_gradients() -> None:
    def computed() -> Tensor:
        return torch.ones(3, requires_grad=True) * 1

    def is_leaf(x: Tensor) -> bool:
        return x.is_leaf

    def new_leaf(x: Tensor) -> None:
        x.detach_()
        x.requires_grad_()

    for mode in (torch.no_grad, torch.inference_mode):
        x, y = computed(), computed()
        with mode():
            assert not capture(is_leaf, (x,))(y)
    with torch.no_grad(), pytest.raises(UnsupportedMutationError, match="sets requires_grad again"):
        capture(new_leaf, (x,))


def test_refused_call_leaves_inputs_without_gradients() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        chosen: Tensor = y.nonzero().split([0, 0], 0)[0]
        return chosen

    def inputs(number: float) -> tuple[Tensor, Tensor]:
        return torch.ones(2), torch.full((3,), number)

    program, (x, y) = capture(f, inputs(0)), inputs(1)
    with pytest.raises(DataDependentError, match="do not satisfy"):
        program(x, y)
    assert not x.requires_grad
    program(*inputs(0))


def test_a_leaf_that_is_a_view_of_what_changes_its_metadata_is_told_of() -> None:
    """Autograd takes the view by the same steps again; the tensor itself requires no gradients."""

    def f(x: Tensor) -> None:
        leaf = x.permute([0]).requires_grad_()
        view = leaf.unsqueeze(0)
        x.resize_((1, 2))
        x[0].fill_(1)
        (view * 3).sum().backward()

    with pytest.raises(UnsupportedProgramError, match=r"changes its size or strides(.|\n)*view \* 3"):
        capture(f, (torch.arange(2.0),))


@pytest.mark.parametrize("asks", [lambda x: x.is_leaf, lambda x: x.grad_fn is None])
@pytest.mark.parametrize("leaf_first", [False, True])
def test_a_program_that_asks_for_leaves_gets_the_answer_of_each_call(asks: Program, leaf_first: bool) -> None:
    leaf = torch.ones(3, requires_grad=True)

    def program(x: Tensor) -> Tensor:
        return x * 2 if asks(x) else x * 3

    arguments = [leaf, leaf * 1] if leaf_first else [leaf * 1, leaf]
    captured = capture(program, arguments[:1])
    for x in (*arguments, *arguments):
        assert torch.equal(captured(x), program(x))


def test_a_leaf_that_is_detached_in_place_is_no_computed_tensor() -> None:
    def program(x: Tensor) -> Tensor:
        return x.detach_().requires_grad_()

    captured = capture(program, (torch.ones(2, requires_grad=True),))
    assert captured(torch.ones(2, requires_grad=True)).is_leaf
    with pytest.raises(UnsupportedMutationError, match="in place, and then sets requires_grad again"):
        captured(torch.ones(2, requires_grad=True) * 2)


def test_the_version_of_a_gradient_is_the_engines() -> None:
    def run(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((x * x).sum(), x)
        return gradient * gradient._version

    with pytest.raises(UnsupportedProgramError, match="_version"):
        capture(run, (SPAN,))


@pytest.mark.parametrize("given", [False, True])
def test_results_of_leaves_that_the_program_makes_require_gradients(given: bool) -> None:
    """Also where inputs require gradients, which get none."""

    def run(x: Tensor) -> Tensor:
        return torch.ones(6, requires_grad=True) * x.detach()

    x = SPAN.clone().requires_grad_(given)
    program = capture(run, (x,))
    for _ in range(5):
        result = program(x)
        assert result.requires_grad
        assert not result.is_leaf
        result.sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("remove", REMOVES)
def test_older_views_of_what_is_reshaped_and_then_requires_gradients(remove: str) -> None:
    def run(x: Tensor) -> Tensor:
        view = x.squeeze(1)
        x.squeeze_(-2)
        x.requires_grad_()
        return view

    with pytest.raises(UnsupportedProgramError, match="changes its size or strides"):
        capture(run, (torch.ones(1, 1),), remove=remove)
