"""Tensors that somebody gave to tensors as attributes (`p.main_grad`): inputs as others are, views of state too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from functionalize import UnsupportedProgramError, capture

Program = tuple[Callable[[Tensor], Any], Callable[[], list[Tensor]]]  # and the state that it has


def a_part_of_a_buffer() -> Program:
    weight, buffer = torch.ones(2), torch.zeros(4)
    weight.main_grad = buffer[:2]  # type: ignore[attr-defined]

    def step(x: Tensor) -> Tensor:
        weight.main_grad.add_(x)  # type: ignore[attr-defined]
        return buffer * 2

    return step, lambda: [buffer]


def the_buffer_itself() -> Program:
    weight, buffer = torch.ones(2), torch.zeros(2)
    weight.main_grad = buffer  # type: ignore[attr-defined]

    def step(x: Tensor) -> Any:
        buffer.add_(x)
        return weight.main_grad * 2  # type: ignore[attr-defined]

    return step, lambda: [buffer]


def of_an_attribute() -> Program:
    weight, buffer = torch.ones(2), torch.zeros(4)
    weight.scale = torch.ones(2)  # type: ignore[attr-defined]
    weight.scale.main_grad = buffer[2:]  # type: ignore[attr-defined]

    def step(x: Tensor) -> Any:
        weight.scale.main_grad.add_(x)  # type: ignore[attr-defined]
        return weight.scale + buffer.sum()  # type: ignore[attr-defined]

    return step, lambda: [buffer]


def gradients_added_up() -> Program:
    """As Megatron's optimizer does: a hook adds each gradient to a part of one buffer."""
    model, buffer = nn.Linear(2, 2, bias=False), torch.zeros(4)
    nn.init.ones_(model.weight)
    weight: Any = model.weight
    weight.main_grad = buffer.view(2, 2)

    def add(parameter: Any) -> None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(add)

    def step(x: Tensor) -> Tensor:
        model(x).sum().backward()
        norm: Tensor = buffer.norm()
        with torch.no_grad():
            weight.sub_(0.1 * weight.main_grad)
            weight.main_grad.zero_()
        return norm

    return step, lambda: [buffer, weight.detach()]


@pytest.mark.parametrize("make", [a_part_of_a_buffer, the_buffer_itself, of_an_attribute, gradients_added_up])
def test_a_program_reads_and_writes_attributes_of_tensors(make: Callable[[], Program]) -> None:
    (eager, wanted), (original, state) = make(), make()
    program = capture(original, (torch.ones(2),))
    for call in range(3):
        x = torch.full((2,), float(call))
        assert torch.equal(program(x), eager(x))
        for left, right in zip(state(), wanted(), strict=True):
            assert torch.equal(left, right)


def test_attributes_of_sharded_tensors(group_of_one: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    sharded: Any = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
    sharded.main_grad, sharded.factor, sharded.history = torch.zeros(2), 2.0, []

    def step(x: Tensor) -> Any:
        if getattr(sharded, "main_grad", None) is None or hasattr(sharded, "other"):
            return x
        sharded.main_grad.add_(x)
        return sharded.main_grad * sharded.factor

    x = torch.ones(2)
    program = capture(step, (x,))
    assert torch.equal(program(x), torch.full((2,), 2.0)) and torch.equal(program(x), torch.full((2,), 4.0))
    assert torch.equal(sharded.main_grad, torch.full((2,), 2.0))
    with pytest.raises(UnsupportedProgramError, match="reads the attribute `history`"):
        capture(lambda x: x + len(sharded.history), (x,))
