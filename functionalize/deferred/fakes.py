"""Fake tensors without a recording: torch's mode, set up for programs that are inspected and not run.

Invariant: a tensor has one fake tensor in a mode, and fake tensors share a storage where the tensors do. Limits: those
of torch's FakeTensorMode.
"""

from __future__ import annotations

import torch

from functionalize._torch import FakeTensor, FakeTensorMode
from functionalize._torch.deferred import PlainFakeMode


def fake_mode(*, fake_cuda: bool = False) -> FakeTensorMode:
    """A context in which every new tensor is fake: it has everything but data.

    It is torch's ``FakeTensorMode``. Its ``from_tensor`` makes a fake tensor from a real one: the same object for the
    same tensor, and with one storage for tensors that share a storage.

    Args:
        fake_cuda: whether CUDA tensors may be made on a machine without CUDA.

    Raises:
        RuntimeError: inside the context, if a CUDA tensor is made on a machine without CUDA and ``fake_cuda`` is false.

    Example:
        >>> import torch
        >>> from functionalize import fake_mode, is_fake
        >>> with fake_mode() as mode:
        ...     x = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> x.shape, x.device, is_fake(x)
        (torch.Size([2, 4]), device(type='cpu'), True)
        >>> y = torch.zeros(4)
        >>> mode.from_tensor(y) is mode.from_tensor(y)
        True
    """
    return PlainFakeMode(fake_cuda=fake_cuda)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake: made under ``fake_mode`` or torch's FakeTensorMode, or deferred.

    Example:
        >>> import torch
        >>> from functionalize import fake_mode, is_fake
        >>> is_fake(torch.ones(2))
        False
    """
    return isinstance(tensor, FakeTensor)


def meta_like(fake: torch.Tensor) -> torch.Tensor:
    """A tensor on device ``meta`` with the size, strides, dtype and ``requires_grad`` of a fake one.

    For a parameter, the result is a parameter.

    Raises:
        ValueError: the tensor is not fake.

    Example:
        >>> import torch
        >>> from functionalize import fake_mode, meta_like
        >>> with fake_mode():
        ...     x = torch.ones(2, 3).t()
        >>> meta_like(x).stride(), meta_like(x).device
        ((1, 3), device(type='meta'))
    """
    if not isinstance(fake, FakeTensor):
        raise ValueError(
            f"meta_like takes a fake tensor, not a {type(fake).__name__} on {getattr(fake, 'device', 'no device')}"
        )
    made = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="meta")
    if isinstance(fake, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=fake.requires_grad)
    return made.requires_grad_(fake.requires_grad)
