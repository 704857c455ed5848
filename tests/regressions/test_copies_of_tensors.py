"""Copies of tensors and of objects that hold tensors, and tensors made of lists of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import capture, functionalize
from functionalize.errors import UnsupportedProgramError


def test_deep_copies_share_memory_as_the_originals_do() -> None:
    def program(x: Tensor) -> Any:
        base = x.detach() * 2
        part, other = base[1:], x.detach().t()
        base.add_(1)
        copies = copy.deepcopy({"base": base, "part": part, "other": other})
        copies["base"].mul_(10)
        return copies["base"], copies["part"], copies["other"], base

    x = torch.arange(4.0).view(2, 2)
    for run in (capture(program, (x,)), functionalize(program), make_fx(functionalize(program))(x)):
        for ours, theirs in zip(run(x), program(x), strict=True):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    one, two, *_ = capture(program, (x,))(x)
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def test_an_optimizers_state_is_copied_inside() -> None:
    def make() -> Callable[[Tensor], Any]:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 1)
        optimizer = torch.optim.Adam(module.parameters())

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
            return state["state"][0]["exp_avg"], copy.deepcopy(module).weight.detach(), state["param_groups"][0]["lr"]

        return step

    mine, eager = make(), make()
    program = capture(mine, (torch.ones(2, 3),))
    for number in range(3):
        x = torch.full((2, 3), number + 0.5)
        torch.testing.assert_close(program(x), eager(x))


def test_a_deep_copy_of_what_is_no_leaf_is_refused_as_in_eager() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="graph leaves"):
        capture(lambda x: copy.deepcopy(x * 2), (x,))


MADE_OF_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "two": lambda x: torch.tensor([x.sum(), x.mean()]),
    "nested": lambda x: torch.tensor([[x.sum()], [x[:1]]]),
    "with a number": lambda x: torch.tensor([x.sum().double(), 2]),
    "with a float": lambda x: torch.tensor([x.sum().long(), 0.5, x.sum().item()]),
    "truths": lambda x: torch.tensor([x.sum() > 2, True]),
    "a dtype": lambda x: torch.tensor([1.5, x.sum().int()], dtype=torch.int32),
    "a leaf": lambda x: torch.tensor([x.sum()], requires_grad=True) * 2,
    "all": lambda x: torch.tensor(list(x.unbind()), dtype=torch.float64),
    "as_tensor": lambda x: torch.as_tensor([x.sum(), x.sum()]),
    "asarray": lambda x: torch.asarray([x.sum(), x.sum()], copy=True),
    "new_tensor": lambda x: x.new_tensor([x.sum().double(), 1]),
    "by keyword": lambda x: torch.asarray(obj=x * 2),
}


@pytest.mark.parametrize("name", MADE_OF_TENSORS)
def test_tensors_that_are_made_of_lists_of_tensors(name: str) -> None:
    function = MADE_OF_TENSORS[name]
    x = torch.arange(3.0) * 2
    expected, result = function(x), capture(function, (torch.ones(3),))(x)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert result.requires_grad == expected.requires_grad


def test_what_has_torch_fill_memory_says_so() -> None:
    with pytest.raises(UnsupportedProgramError, match=r"a Python list of tensors(.|\n)*torch\.stack"):
        capture(lambda x: torch.FloatTensor([x.sum(), x.mean()]), (torch.ones(3),))


def test_copies_of_tensors_are_in_their_memory() -> None:
    def program(x: Tensor) -> Any:
        twice = x * 2
        same, parameter = copy.copy(twice), copy.copy(torch.nn.Parameter(x * 3))
        same.add_(1)
        copy.copy(x).mul_(5)
        return twice, same, parameter, parameter.is_leaf, parameter.requires_grad

    x, y = torch.ones(3), torch.ones(3)
    torch.testing.assert_close(capture(program, (x,))(x), program(y), rtol=0, atol=0)
    assert torch.equal(x, y)


def test_a_copy_of_a_computed_tensor_is_a_leaf() -> None:
    def program(x: Tensor) -> Tensor:
        copied: Tensor = copy.copy(x * 2)
        return copied.mul_(2)

    for run in (program, lambda x: capture(program, (x,))(x)):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            run(torch.ones(3, requires_grad=True))
