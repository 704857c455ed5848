"""How autograd came by a view that a program gives: writes to it are refused, or accepted, as in eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture

pytestmark = [  # Dynamo warns of torch's own code
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
Function = Callable[[Tensor], Any]


def unbound(x: Tensor) -> Any:
    return x.unbind(0)


def one_of_several(x: Tensor) -> Any:
    return (x.split(1)[1],)


def part_of_a_piece(x: Tensor) -> Any:
    return x, x.chunk(2)[0][1:]


def pieces_of_a_result(x: Tensor) -> Any:
    y = x * 2
    return (y, *y.unbind(0))


def pieces_of_what_is_not_given(x: Tensor) -> Any:
    return (x * 2).unbind(0)


def without_gradients(x: Tensor) -> Any:
    y = x * 2
    with torch.no_grad():
        return x[0], x.unbind(0)[1], y, y[1], x.detach()[0]


def in_inference_mode(x: Tensor) -> Any:
    with torch.inference_mode():
        return x[0], x[1:]


def of_complex_numbers(x: Tensor) -> Any:
    with torch.no_grad():
        return (torch.view_as_complex(x),)


def one_view(x: Tensor) -> Any:
    return x[0], x.t()


FUNCTIONS = [
    unbound,
    one_of_several,
    part_of_a_piece,
    pieces_of_a_result,
    pieces_of_what_is_not_given,
    without_gradients,
    in_inference_mode,
    of_complex_numbers,
    one_view,
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _computed() -> Tensor:
    return torch.arange(4.0, requires_grad=True).view(2, 2) * 1


def _accepted(function: Function) -> list[Any]:
    """Of each result its look, and whether it may be written."""
    found = []
    for number in range(len(function(_computed()))):
        one = function(_computed())[number]
        look = one.requires_grad, one.is_leaf
        try:
            one.mul_(2)
        except RuntimeError:
            found.append((*look, False))
        else:
            found.append((*look, True))
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("f", FUNCTIONS)
def test_writes_to_results(f: Function, compiled: bool) -> None:
    ours = torch.compile(f, backend="functionalize") if compiled else capture(f, (_computed(),))
    assert _accepted(ours) == _accepted(f)


@pytest.mark.parametrize("f", [unbound, without_gradients, one_view])
def test_what_autograd_takes_for_views(f: Function) -> None:
    for made in (_computed, lambda: torch.ones(2, 2)):
        ours, eager = (function(made()) for function in (capture(f, (made(),)), f))
        assert [one._is_view() for one in ours] == [one._is_view() for one in eager]


def test_pieces_have_gradients() -> None:
    def f(x: Tensor) -> Any:
        first, second = x.unbind(0)
        return first, second, first * second

    x = torch.arange(4.0, requires_grad=True)
    found = []
    for function in (f, capture(f, (_computed(),))):
        first, second, product = function(x.view(2, 2) * 1)
        found.append(torch.autograd.grad((first.sin() + product + second * 3).sum(), x))
    torch.testing.assert_close(found[1], found[0])


def test_pieces_of_a_tensor_that_requires_gradients_afterwards_are_leaves() -> None:
    def f(x: torch.Tensor) -> Any:
        first, second = x.split([1, 1])
        x.requires_grad_()
        return second, first

    def looks(found: Any) -> list[Any]:
        return [(part.is_leaf, part.requires_grad, part.grad_fn, part.tolist()) for part in found]

    assert looks(capture(f, (torch.arange(2.0),))(torch.arange(2.0))) == looks(f(torch.arange(2.0)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_a_view_made_with_gradients_off_and_told_to_require_them_takes_gradients(remove: Any, mode: Any) -> None:
    def run(x: Tensor) -> Tensor:
        view = x[0]
        return view.requires_grad_()

    leaf = torch.ones(3, 2, requires_grad=True)
    captured = capture(run, (leaf * 2,), remove=remove, on_guard_failure="recapture")
    for call in (run, captured):
        x = leaf * 2
        with mode():
            view = call(x)
        assert view.is_leaf and not view.is_inference()
        (gradient,) = torch.autograd.grad([view], [view], [torch.ones(2)])
        torch.testing.assert_close(gradient, torch.ones(2))
