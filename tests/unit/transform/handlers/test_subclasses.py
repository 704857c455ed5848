"""Tensor subclasses: one that logs, one that holds two tensors, DTensor in one process.

In direct use a subclass desugars first, and its inner tensors are functionalized. `make_fx` traces a subclass that it
is given as one tensor, and so do we: the graph takes the subclass, is functional, and runs on others like it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.logging_tensor import LoggingTensor, capture_logs
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from functionalize import UnsupportedProgramError, capture, functionalize
from functionalize.verify import assert_functional
from tests.support.graphs import MODES, REMOVES

EITHER = pytest.mark.parametrize("remove", REMOVES)
Function = Callable[[Any], Any]


def numbers(*size: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(size).numel()).view(size)


def two() -> Tensor:
    made: Tensor = TwoTensor(numbers(2, 3), -numbers(2, 3))
    return made


def logged() -> Tensor:
    made: Tensor = LoggingTensor(numbers(2, 3))
    return made


def inner(tree: Any) -> list[Any]:
    """The tensors inside the subclasses of a pytree, and what kinds they are."""
    found: list[Any] = []
    for leaf in pytree.tree_leaves(tree):
        parts = [leaf.a, leaf.b] if isinstance(leaf, TwoTensor) else [getattr(leaf, "elem", leaf)]
        found += [type(leaf).__name__, *(part.detach().clone() for part in parts)]
    return found


def in_place(x: Tensor) -> Any:
    y = x * 2
    y.add_(1)
    return y


def through_views(x: Tensor) -> Any:
    y = x * 2
    y[0].mul_(3)
    y.t()[1].add_(1)
    y.view(-1)[2:].zero_()
    return y, y[0], y.reshape(-1)


def of_the_input(x: Tensor) -> Any:
    x.add_(1)
    x[1].mul_(2)
    return x.sum()


def by_out(x: Tensor) -> Any:
    out = torch.empty_like(x)
    torch.add(x, 1, out=out)
    return out


def detached(x: Tensor) -> Any:
    y = x.detach()
    y.add_(1)
    return y


def pieces(x: Tensor) -> Any:
    y = torch.cat([x, x])
    y[0].fill_(5)
    return y.split(2)


def gradient(x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    y = (leaf * leaf).clone()
    y[0].mul_(2)
    return torch.autograd.grad(y.sum(), leaf)


def each(x: Tensor) -> Any:
    both = [x * 1, x * 2]
    torch._foreach_add_(both, 1)
    return both


def transposed_in_place(x: Tensor) -> Any:
    y = x + 0
    y.t_()
    y[0].add_(1)
    return y


PROGRAMS = [in_place, through_views, of_the_input, by_out, detached, pieces, gradient, each, transposed_in_place]


@EITHER
@pytest.mark.parametrize("make", [two, logged])
@pytest.mark.parametrize("func", PROGRAMS)
def test_direct(func: Function, make: Callable[[], Tensor], remove: str) -> None:
    ours, eager = make(), make()
    got, wanted = functionalize(func, remove=remove)(ours), func(eager)
    assert_same(inner((got, ours)), inner((wanted, eager)))


@EITHER
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("func", PROGRAMS)
def test_traced_as_one_tensor(func: Function, mode: Any, remove: str) -> None:
    graph = make_fx(functionalize(func, remove=remove), tracing_mode=mode)(two() * 3)
    assert_functional(graph, remove)
    ours, eager = two(), two()
    with torch.no_grad():
        got = graph(ours)
    assert_same(inner((got, ours)), inner((func(eager), eager)))


def assert_same(got: list[Any], wanted: list[Any]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other


def test_what_a_logging_subclass_sees_is_the_program() -> None:
    with capture_logs() as logs:
        functionalize(in_place)(logged())
    assert [re.findall(r"aten\.\w+\.\w+", line) for line in logs] == [["aten.mul.Tensor"], ["aten.add_.Tensor"]]


# DTensor


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@EITHER
@pytest.mark.parametrize("func", [in_place, of_the_input, detached, gradient])
def test_dtensor(func: Function, mesh: Any, remove: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    ours, eager = (distribute_tensor(numbers(2, 3), mesh, [Shard(0)]) for _ in range(2))
    got, wanted = functionalize(func, remove=remove)(ours), func(eager)
    for one, other in zip(pytree.tree_leaves((got, ours)), pytree.tree_leaves((wanted, eager)), strict=True):
        assert type(one) is type(other) and one.placements == other.placements
        torch.testing.assert_close(one.full_tensor(), other.full_tensor())


class OwnParameter(torch.nn.Parameter):
    """A class of its own, of which no operator asks."""


@pytest.mark.parametrize("operation", [lambda x, p: x * p, lambda x, p: p * x, torch.mul])
def test_parameters_of_a_class_of_their_own_are_refused_in_captures(operation: Callable[..., Tensor]) -> None:
    """Also by operators of Python's, for which torch turns a TypeError into NotImplemented."""
    parameter = OwnParameter(torch.ones(2))
    with pytest.raises(UnsupportedProgramError, match="is a OwnParameter, a subclass"):
        capture(lambda x: operation(x, parameter), (torch.ones(2),))


def test_jagged_tensors_are_refused_where_torch_compiles() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    with pytest.raises(Exception, match="is a NestedTensor, and has sizes that are symbols"):
        torch.compile(lambda x: x * 2, backend="functionalize")(nested)


class Named(Tensor):
    """A class of the user's that changes no operator."""


@pytest.mark.parametrize("mode", [None, *MODES, "capture"], ids=str)
def test_as_subclass_of_plain_tensors(mode: Any) -> None:
    """A view of all of the tensor, which torch takes behind the modes."""

    def program(x: Tensor) -> tuple[Any, ...]:
        x.as_subclass(torch.Tensor).mul_(2)
        y = x * 3
        whole, row = y.as_subclass(torch.Tensor), y[1].as_subclass(cls=torch.Tensor)
        row.add_(whole[0])
        return y, whole is y, row.sum()

    def made() -> Any:
        if mode is None:
            return functionalize(program)
        x = numbers(2, 3)
        return capture(program, (x,)) if mode == "capture" else make_fx(functionalize(program), tracing_mode=mode)(x)

    x, again = numbers(2, 3), numbers(2, 3)
    found, wanted = made()(x), program(again)
    torch.testing.assert_close((*found, x), (*wanted, again), rtol=0, atol=0)
    assert "as_subclass" not in {*vars(torch.Tensor), *vars(FakeTensor)}


def test_gradients_through_as_subclass() -> None:
    captured = capture(lambda x: (x.as_subclass(torch.Tensor) * x).sum(), (numbers(3).requires_grad_(),))
    x = numbers(3).requires_grad_()
    captured(x).backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * numbers(3))


INTO_CLASSES: list[Function] = [
    lambda x: x.as_subclass(Named).as_subclass(Tensor),
    lambda x: (x * 2).as_subclass(Named),
    lambda x: Named(x * 2) + 1,
    lambda x: torch.Tensor._make_subclass(Named, x * 2) + 1,
]


@pytest.mark.parametrize("f", INTO_CLASSES)
def test_a_class_of_its_own_is_refused_in_a_capture(f: Function) -> None:
    with pytest.raises(
        UnsupportedProgramError, match=r"class[\s\S]*test_subclasses.py:\d+ in <lambda>[\s\S]*torch.compile"
    ):
        capture(f, (numbers(2),))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torch_compile_takes_classes_that_end_inside() -> None:
    """As the refusal advises."""
    compiled = torch.compile(lambda x: x.as_subclass(Named).mul(2).as_subclass(Tensor), backend="functionalize")
    assert torch.equal(compiled(numbers(2)), 2 * numbers(2))
