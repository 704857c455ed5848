"""Regions of inference mode inside of captured programs: what they give is inference tensors, as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from functionalize import capture


class _Kept:
    value: Tensor = torch.zeros(3)


@torch.inference_mode()
def decorated(x: Tensor) -> list[Tensor]:
    return [x * 2]


def views(x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        y = x * 2
        part = y[1:]
    return [y, part, y.view(3, 1), y + 1, y.clone(), x[1:]]


def pieces(x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return list((x * 2)[:2].unbind(0))


def state(x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        _Kept.value = x * 3
    return [_Kept.value + 1]


def leaves(x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return [nn.Parameter(x * 2), (x * 3).requires_grad_()]


def both(x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        y = torch.zeros_like(x)
        y[0] = 1
    with torch.inference_mode(False):
        z = torch.ones_like(x)
    return [y, z, x * 2]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("f", [decorated, views, pieces, state, leaves, both])
def test_what_inference_mode_gives(f: Callable[[Tensor], list[Tensor]], around: bool, requires_grad: bool) -> None:
    def run(function: Callable[[Tensor], list[Tensor]]) -> list[object]:
        with torch.inference_mode(around):
            tensors = [*function(torch.arange(3.0, requires_grad=requires_grad)), _Kept.value]
        return [(type(one), one.is_inference(), one.requires_grad, one.is_leaf, one.tolist()) for one in tensors]

    with torch.inference_mode(around):
        program = capture(f, (torch.arange(3.0, requires_grad=requires_grad),))
    for _ in range(2):
        assert run(program) == run(f)
