"""Tensor subclasses of tests, which hold other tensors and say which, and programs of them beside eager.

Each program is called three times, in eager and as something makes it, on objects that are built alike. Compared are
results, arguments, parameters, gradients, their classes and metadata, and which of them are the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from functionalize._torch.subclasses.wrappers import Wrapping, is_wrapper_class

Program = Callable[[Any], Any]
MESHES: list[Any] = []  # of the process group


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


def jagged() -> Any:
    return torch.nested.nested_tensor([numbers(n, 4) for n in (2, 3)], layout=torch.jagged)


@contextmanager
def one_rank() -> Iterator[Any]:
    """A mesh of one device, which the kinds that are sharded need."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    MESHES.append(dist.device_mesh.init_device_mesh("cpu", (1,)))
    yield MESHES[0]
    MESHES.clear()
    dist.destroy_process_group()


def sharded() -> Any:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(numbers(4, 4), MESHES[0], [Shard(0)])


def partial_sum() -> Any:
    from torch.distributed.tensor import DTensor, Partial

    return DTensor.from_local(numbers(4, 4), MESHES[0], [Partial()])


KINDS: dict[str, Callable[[], Any]] = {
    "two tensors": lambda: two(4, 4),
    "two tensors of two tensors": nested_two,
    "not contiguous": lambda: two(4, 4).t(),
    "int8 weight": int8,
    "jagged": jagged,
    "masked": lambda: masked_tensor(numbers(4, 4), numbers(4, 4) > 0),
    "sharded": sharded,
    "partial sum": partial_sum,
}


def opened(tree: Any) -> list[Any]:
    """Values that show all of a pytree: classes, metadata, plain tensors."""
    seen = list[Any]()
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and is_wrapper_class(type(leaf)):
            wrapping = Wrapping.of(leaf)
            metadata = wrapping.context if leaf.layout is torch.strided else None
            seen += [wrapping.cls, str(metadata), leaf.requires_grad, leaf.is_leaf]
            seen += [part.detach().clone() for part in wrapping.parts_of(leaf)]
        elif isinstance(leaf, Tensor):
            seen += [leaf.requires_grad, leaf.detach().clone()]
        else:
            seen.append(leaf)
    return seen


def compare(
    make: Callable[[], tuple[Program, Any]], through: Callable[..., Any], calls: int = 3, *, backward: bool = False
) -> Any:
    """Compare eager with the program that ``through`` makes of it and its arguments, and give this program.

    ``make``: gives the program and its argument; ``backward``: whether to take the gradients of the results.
    """
    histories = []
    for captured in (False, True):
        torch.manual_seed(0)
        func, x = make()
        program: Any = through(func, (x,)) if captured else func
        history: list[Any] = []
        for _ in range(calls):
            result = program(x)
            if backward:
                differentiable = [leaf for leaf in pytree.tree_leaves(result) if leaf.requires_grad]
                ends = [(leaf.values() if leaf.is_nested else leaf).sum() for leaf in differentiable]
                torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
            same = [leaf is other for leaf in pytree.tree_leaves(result) for other in pytree.tree_leaves(x)]
            tensors = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
            history += [*opened(result), *opened(x), *opened([leaf.grad for leaf in tensors]), same]
            if isinstance(func, nn.Module):
                history += opened([[parameter, parameter.grad] for parameter in func.parameters()])
                history += opened(list(func.buffers()))
        histories.append(history)
    eager, ours = histories
    assert len(eager) == len(ours)
    for wanted, got in zip(eager, ours, strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(got, wanted, check_stride=True, equal_nan=True)
        else:
            assert got == wanted
    return program


class Holder(nn.Module):
    def __init__(self, held: Any, as_parameter: bool, requires_grad: bool, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._forward = forward
        if as_parameter:
            self.held = nn.Parameter(held, requires_grad=requires_grad)
        else:
            self.register_buffer("held", held)

    def forward(self, x: Tensor) -> Any:
        return self._forward(self.held, x)


def add_in_place(x: Any) -> Any:
    with torch.no_grad():
        if isinstance(x, Int8Weight):
            return x.copy_(Int8Weight.of(x.dequantize() * 0.5))
        return x.mul_(0.5)


ROLES: dict[str, Callable[[Any], tuple[Program, Any]]] = {
    "argument": lambda made: (lambda x: x * 2, made),
    "argument in containers": lambda made: (lambda x: {"sum": x["a"][0] * 2, "same": x["a"]}, {"a": (made, 3)}),
    "parameter": lambda made: (Holder(made, True, False, lambda held, x: held * 2), numbers(4)),
    "buffer": lambda made: (Holder(made, False, False, lambda held, x: held * 2), numbers(4)),
    "result": lambda made: (lambda x: (x, x.detach(), x * 1), made),
    "written argument": lambda made: (add_in_place, made),
    "written buffer": lambda made: (Holder(made, False, False, lambda held, x: add_in_place(held) is held), numbers(4)),
    "written parameter": lambda made: (Holder(made, True, True, lambda held, x: add_in_place(held) * 1), numbers(4)),
}


def made_inside(x: Tensor) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(x * 2, MESHES[0], [Shard(0)])


GRADIENTS: dict[str, Callable[[], tuple[Program, Any]]] = {
    "of an argument": lambda: (lambda x: (x * x).sin(), two(2, 3).requires_grad_()),
    "of a plain argument": lambda: (lambda x: x * two(2, 3), numbers(2, 3).requires_grad_()),
    "of two results": lambda: (lambda x: (x * 2, (x * x).sum()), two(2, 3).requires_grad_()),
    "of an unused argument": lambda: (lambda x: x["a"] * 2, {k: two(2).requires_grad_() for k in "ab"}),
    "of a parameter": lambda: (
        Holder(two(4, 4), True, True, lambda held, x: nn.functional.linear(x, held)),
        numbers(2, 4),
    ),
    "beside an int8 weight": lambda: (
        Holder(int8(), True, False, lambda held, x: nn.functional.linear(x, held)),
        numbers(2, 4).requires_grad_(),
    ),
    "through a view": lambda: (lambda x: (x.view(-1), x[0]), two(2, 3).requires_grad_()),
    "beside a detached result": lambda: (lambda x: (x.detach() + 1, x * 2), two(2, 3).requires_grad_()),
    "of nested wrappers": lambda: (lambda x: (x * x).exp(), nested_two().requires_grad_()),
    "of a jagged product": lambda: (
        Holder(numbers(4, 4), True, True, lambda held, x: nn.functional.linear(x, held).relu()),
        jagged(),
    ),
    "of a shard": lambda: (lambda x: (x * 2).full_tensor(), sharded().requires_grad_()),
    "of a partial sum": lambda: (lambda x: x.to_local() * 2, partial_sum().requires_grad_()),
    "of a result that is a partial sum": lambda: (lambda x: x + x, partial_sum().requires_grad_()),
    "of a shard made inside": lambda: (made_inside, numbers(4, 4).requires_grad_()),
}


def shared(x: Any) -> Any:
    x[0].add_(1)
    return x[1] * 2


SHARED: dict[str, Callable[[], Any]] = {
    "one wrapper twice": lambda: [two(2, 3)] * 2,
    "wrappers of one tensor": lambda: (lambda x: [x, TwoTensor(x.a, x.b)])(two(2, 3)),
    "a wrapper and its part": lambda: (lambda x: [x, x.a])(two(2, 3)),
    "a wrapper and what its parts are views of": lambda: (lambda x: [TwoTensor(x[:2], x.clone()[:2]), x])(numbers(4)),
}


class Quantized(nn.Module):
    """A layer of an int8 weight, and a buffer that is written."""

    kept: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(4, 4)
        self.layer.weight = nn.Parameter(int8(), requires_grad=False)
        self.register_buffer("kept", two(2, 4))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.kept.mul_(0.5)
        return self.layer(x), self.kept
