"""What a call saved for its backward, and somebody wrote since: the backward raises, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.partitioners import default_partition

from functionalize import capture

REMOVE = ("mutations", "mutations_and_views")
OF_INPUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # each saves a view of its first argument
    "mm": lambda x, w: x[0] @ w[0],
    "bmm": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w[0]),
    "select": lambda x, w: x[1] * w,
    "chunk": lambda x, w: x.chunk(3)[1] * w,
    "layer_norm": lambda x, w: F.layer_norm(x.mT, (3,), w[0, 0]),
    "complex": lambda x, w: torch.view_as_complex(x.view(9, 3)[:, :2].clone() + w[0, 0, 0]).real * x.diagonal()[0, 0],
}
OF_RESULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a part": lambda x, w: (x * w).exp()[0],
    "turned": lambda x, w: (x @ w).exp().mT,
    "softmax": lambda x, w: (x * w).softmax(-1).mT,
    "detached": lambda x, w: (lambda y: (y.detach().mT, y.sum()))((x * w).exp()),
    "two": lambda x, w: (lambda y: (y[1:], y[0]))((x * w).exp()),
    "split": lambda x, w: (x * w).sigmoid().split(1)[1],
}
refused = partial(pytest.raises, RuntimeError, match="modified by an inplace operation")


def _arguments() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 3, 3), torch.randn(3, 3, 3, requires_grad=True)


@pytest.mark.parametrize("cut", [None, default_partition])
@pytest.mark.parametrize("name", OF_INPUTS)
def test_an_argument(name: str, cut: Any) -> None:
    program = capture(OF_INPUTS[name], _arguments(), remove="mutations", partition_fn=cut)
    for run in (OF_INPUTS[name], program):
        parts: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda x: x,
            lambda x: x[1],
            lambda x: x.detach().view(-1),
        ]
        for part in parts:
            x, w = _arguments()
            result = run(x, w)
            part(x).zero_()
            with refused():
                result.sum().backward()


@pytest.mark.parametrize("name", OF_RESULTS)
def test_a_result(name: str) -> None:
    program = capture(OF_RESULTS[name], _arguments(), remove="mutations")
    for run in (OF_RESULTS[name], program):
        results = run(*_arguments())
        results = results if isinstance(results, tuple) else (results,)
        total = sum(result.sum() for result in results)
        results[0].detach().mul_(3)
        with refused():
            total.backward()


@pytest.mark.parametrize("remove", REMOVE)
def test_state_and_what_is_not_saved(remove: str) -> None:
    class Product(torch.nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(3, 3))

        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w @ self.table.t()

    module = Product()
    weight = torch.randn(3, 3, requires_grad=True)
    program = capture(module, (weight,), remove=remove)
    result = program(weight)
    result.detach().zero_()  # a product does not save it
    (gradient,) = torch.autograd.grad(result.sum(), weight, retain_graph=True)
    torch.testing.assert_close(gradient, module.table.sum(0).expand(3, 3))
    module.table.zero_()
    with refused():
        result.sum().backward()


def test_views_that_the_call_itself_writes_are_kept_as_they_were() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = x.clone().t() @ w
        x.mul_(2)
        return y

    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    expected = torch.autograd.grad(run(x.clone(), w).sum(), w)
    result = capture(run, (x.clone(), w), remove="mutations")(x, w)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), w), expected)


def test_the_derivative_of_a_derivative() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).exp()

    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    for call in (run, capture(run, (x, w), remove="mutations")):
        (gradient,) = torch.autograd.grad(call(x, w).sum(), w, create_graph=True)
        x.mul_(2)
        with refused():
            gradient.sum().backward()


def test_views_are_saved_in_the_memory_of_what_they_are_views_of() -> None:
    x, w = _arguments()
    program, saved = capture(OF_INPUTS["bmm"], (x, w), remove="mutations"), list[Tensor]()
    program(x, w)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        program(x, w)
    own = {x.untyped_storage().data_ptr(), w.untyped_storage().data_ptr()}
    assert {tensor.untyped_storage().data_ptr() for tensor in saved} <= own


@pytest.mark.parametrize("remove", REMOVE)
def test_a_result_that_is_laid_out_may_be_written(remove: str) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        return (x + w).mT

    x, w = _arguments()
    result = capture(run, (x, w), remove=remove)(x, w)
    result.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), w)[0], torch.full((3, 3, 3), 2.0))


@pytest.mark.parametrize("remove", REMOVE)
@pytest.mark.parametrize("run", [lambda x, w: x @ w, lambda x, w: x.values() * w[0]])
def test_a_sparse_argument(run: Callable[[Tensor, Tensor], Tensor], remove: str) -> None:
    def given() -> tuple[Tensor, Tensor]:
        return torch.eye(3).to_sparse().coalesce(), torch.randn(3, 3, requires_grad=True)

    for call in (run, capture(run, given(), remove=remove)):
        x, w = given()
        result = call(x, w)
        x.values().mul_(3)
        with refused():
            result.sum().backward()
        assert torch.autograd.grad(call(x, w).sum(), w)[0].any()
