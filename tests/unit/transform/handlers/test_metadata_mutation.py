"""Metadata mutation (`t_`, `squeeze_`, `as_strided_`, `resize_`, ...) of intermediates, views and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES


def grow_with_a_live_view(x: Tensor) -> Any:
    y = x + 1
    v = y[0]
    y.resize_(3, 4)
    y[2].fill_(7)
    v.add_(1)
    return y, v


def shrink_with_a_live_view(x: Tensor) -> Any:
    y = x + 1
    v = y.view(-1)
    y.resize_(2, 2)
    y.add_(1)
    return y, v


def shrink_an_input(x: Tensor) -> Any:
    x.resize_(2, 2)
    x.add_(1)
    return x * 2


def grow_an_input(x: Tensor) -> Any:
    x.resize_(4, 4)
    x.view(-1)[12:].fill_(3)
    return x.sum()


def grow_an_input_with_a_live_view(x: Tensor) -> Any:
    v = x.view(-1)
    x.resize_(4, 4)
    x.view(-1)[12:].zero_()
    v.mul_(2)
    return v


def shrink_a_view(x: Tensor) -> Any:
    y = x + 1
    v = y[1:]
    v.resize_(2, 2)
    v.add_(1)
    return y, v


def grow_a_view(x: Tensor) -> Any:
    y = x + 1
    v = y[1:]
    v.resize_(5, 4)
    v.fill_(2)
    return y, v


def transpose_an_input(x: Tensor) -> Any:
    x.t_()
    x[0].add_(1)
    return x.stride(), x * 2


def many_on_an_input(x: Tensor) -> Any:
    x.unsqueeze_(0)
    x.squeeze_()
    x.transpose_(0, 1)
    x.swapaxes_(0, 1)
    x.add_(1)
    return x + 1


def as_strided_an_input(x: Tensor) -> Any:
    x.as_strided_((2, 2), (1, 2), 3)
    x.mul_(2)
    return x.storage_offset(), x + 0


def as_strided_with_shared_elements(x: Tensor) -> Any:
    y = x + 1
    y.as_strided_((3, 3), (1, 1))
    z = y * 2
    y[0].add_(1)
    return y, z


def transpose_with_a_live_view(x: Tensor) -> Any:
    y = x + 1
    v = y.t()
    y.transpose_(0, 1)
    y.add_(v)
    return y, v


def questions(x: Tensor) -> Any:
    y = x + 1
    y.unsqueeze_(1)
    y.squeeze_(1)
    y.t_()
    return y.is_contiguous(), y.stride(), y._is_view(), y


def grow_from_nothing(x: Tensor) -> Any:
    y = torch.empty(0)
    y.resize_(3, 4)
    y.copy_(x)
    y.resize_(2, 3)
    return y


def resize_as(x: Tensor) -> Any:
    y = x + 1
    y.resize_as_(torch.empty(2, 2))
    y.t_()
    y.mul_(3)
    return y


def strided_views_of_one_base(x: Tensor) -> Any:
    y = x + 1
    w = y.as_strided((4,), (3,))
    w.zero_()
    y.as_strided((2, 2), (4, 1), 5).add_(1)
    return y, w


def strided_view_of_a_view(x: Tensor) -> Any:
    t = x.t()
    w = t.as_strided((3, 3), (1, 4))
    w.add_(t[:3])
    return w, t


def unsqueeze_an_input_and_view_it(x: Tensor) -> Any:
    x.unsqueeze_(0)
    y = x[0]
    y.t_()
    y.add_(1)
    return y


def transpose_a_view_with_gaps(x: Tensor) -> Any:
    y = x[:, ::2]
    y.t_()
    y.add_(1)
    return y.storage_offset(), y.stride(), y


def squeeze_a_view_of_an_input(x: Tensor) -> Any:
    y = x.view(2, 6)
    y.squeeze_()
    y.transpose_(0, -1)
    y[1].zero_()
    return x.sum(), y


def empty_an_input(x: Tensor) -> Any:
    x.resize_(0)
    return x.numel()


def empty_and_grow(x: Tensor) -> Any:
    y = x + 1
    y.resize_(0)
    y.resize_(3, 4)
    y.zero_()
    return y


def shrink_an_input_with_a_live_view(x: Tensor) -> Any:
    v = x[1]
    x.resize_(2, 2)
    v.add_(5)
    return x, v


def as_strided_an_input_with_a_live_view(x: Tensor) -> Any:
    v = x[2]
    x.as_strided_((2, 2), (2, 1), 0)
    v.add_(5)
    x.add_(1)
    return v


def channels_last(x: Tensor) -> Any:
    y = x.clone(memory_format=torch.preserve_format)
    y = y[None, :, :, None]
    y = y.contiguous(memory_format=torch.channels_last)
    y.add_(1)
    s = y.stride()
    y.resize_(1, 4, 3, 1, memory_format=torch.channels_last)
    return s, y


def transpose_an_input_and_reshape(x: Tensor) -> Any:
    x.transpose_(0, 1)
    y = x.reshape(-1)
    y.add_(1)
    z = x.view(x.shape)
    z.mul_(2)
    return y


def gradient_of_an_input(x: Tensor) -> Any:
    x.requires_grad_()
    y = (x * 2).sum()
    (g,) = torch.autograd.grad(y, x)
    return g


def gradient_through_a_transpose(x: Tensor) -> Any:
    y = x * 2
    y.requires_grad_()
    z = y * y
    z.t_()
    z.mul_(2)
    (g,) = torch.autograd.grad(z.sum(), y)
    return g, z.detach()


PROGRAMS = [value for value in list(globals().values()) if getattr(value, "__module__", None) == __name__]


@pytest.mark.every(5)
@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("mode", [None, *MODES], ids=str)
@pytest.mark.parametrize("func", PROGRAMS, ids=lambda func: func.__name__)
def test_metadata_mutation(func: Callable[..., Any], mode: Any, remove: str) -> None:
    assert_equivalent(func, torch.arange(12.0).view(3, 4), remove=remove, tracing_mode=mode)
