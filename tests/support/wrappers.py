"""Tensor subclasses of tests: they hold other tensors, and say which."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree


class Int8Weight(Tensor):
    """A quantized weight, as users write them."""

    q: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype, device=q.device)

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        scale = weight.abs().amax(1) / 127
        return cls((weight / scale[:, None]).round().to(torch.int8), scale)

    def dequantize(self) -> Tensor:
        return self.q.to(self.scale.dtype) * self.scale[:, None]

    def __tensor_flatten__(self) -> Any:
        return ["q", "scale"], "symmetric"

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Int8Weight:
        return cls(inner["q"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            y = (x @ weight.q.to(x.dtype).t()) * weight.scale
            return y + bias[0] if bias and bias[0] is not None else y
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].q.detach(), args[0].scale.detach())
        if func is torch.ops.aten.copy_.default and isinstance(args[1], cls):
            args[0].q.copy_(args[1].q)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        args, kwargs = pytree.tree_map_only(cls, lambda weight: weight.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)


def numbers(*size: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(size).numel()).view(size).sin()


def two(*size: int) -> Any:
    return TwoTensor(numbers(*size), numbers(*size).cos())


def nested_two() -> Any:
    return TwoTensor(two(4, 4), two(4, 4))


def int8() -> Any:
    return Int8Weight.of(numbers(4, 4))
