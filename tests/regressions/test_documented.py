"""What PyTorch documents and tests of ``torch.func.functionalize``, asked of ours.

The graphs of the documented examples must have its operators in its order, less its dead nodes. The other
programs are of the kinds that PyTorch's own tests of functionalization go through; eager is their oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functionalize as incumbent

from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES, operators, trace

aten = torch.ops.aten
Program = Callable[..., Any]
EITHER = pytest.mark.parametrize("remove", REMOVES)
WHILE = pytest.mark.parametrize("mode", [None, *MODES], ids=str)


# Documented


def on_an_intermediate(a: Tensor) -> Tensor:
    b = a + 1
    c = b.view(-1)
    c.add_(1)
    return b


def on_an_input(a: Tensor) -> Tensor:
    b = a.view(-1)
    b.add_(1)
    return a


@EITHER
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("func", [on_an_intermediate, on_an_input])
@pytest.mark.parametrize("size", [(2,), (2, 3)], ids=str)
def test_documented_graphs(func: Program, size: tuple[int, ...], mode: str, remove: str) -> None:
    example = torch.randn(size)
    ours, theirs = (
        operators(trace(func, example, remove=remove, mode=mode, transform=transform))
        for transform in (functionalize, incumbent)
    )
    assert computing(ours) == computing(theirs)
    assert sorted(ours) == sorted(theirs)


def computing(names: list[str]) -> list[str]:
    """Without the questions for symbolic sizes, which make_fx places where a size is first used."""
    return [name for name in names if not name.startswith("sym_size")]


@EITHER
def test_documented_values(remove: str) -> None:
    example = torch.randn(2)
    assert torch.allclose(on_an_intermediate(example), functionalize(on_an_intermediate, remove=remove)(example))


@WHILE
def test_documented_failures_work(mode: Any) -> None:
    """The limits that its documentation names: autograd inside, resize of a base with views, overlapping writes."""

    def backward(x: Tensor) -> Any:
        leaf = x.detach().clone().requires_grad_()
        (leaf * leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.mul_(2)

    def windows(x: Tensor) -> Tensor:
        y = x + 1
        y.unfold(0, 3, 2).abs_()
        return y

    for func in (backward, windows):
        assert_equivalent(func, torch.randn(7), tracing_mode=mode)


def test_documented_state_outside_is_functionalized() -> None:
    state = torch.zeros(2)
    functionalize(lambda x: state.view(-1).add_(x))(torch.ones(2))
    assert torch.equal(state, torch.ones(2))


# The kinds of programs of PyTorch's own tests

PROGRAMS: list[Any] = []
SQUARE = torch.arange(16.0).view(4, 4)
CONSTANT = torch.arange(3.0)


def program(*inputs: Any) -> Callable[[Program], Program]:
    def register(func: Program) -> Program:
        PROGRAMS.append(pytest.param(func, inputs, id=func.__name__))
        return func

    return register


@program(torch.ones(4))
def multiple_views_of_same_base(x: Tensor) -> Any:
    one, two = x.view(-1), x.view(-1)
    x.add_(1)
    return one + 1, two + 1


@program(torch.ones(4, 2))
def simple(x: Tensor) -> Any:
    y = torch.ones(4, 2)
    z = x.view(4, 2)
    z.add_(y)
    return x * x, z


@program(torch.ones(4, 2))
def simple_out(x: Tensor) -> Any:
    y = torch.ones(4, 2)
    z = torch.empty(0)
    torch.add(x.view(4, 2), y, out=z)
    return z * z


@program(torch.arange(8.0))
def multi_out(x: Tensor) -> Any:
    low, high = torch.empty(4), torch.empty(4)
    torch.aminmax(x.view(2, 4), dim=0, out=(high, low))
    return high, low


@program(torch.ones(4))
def tensor_ctr(x: Tensor) -> Any:
    y = torch.tensor((1, 2, 3, 4))
    y.view(-1).add_(1)
    return x + y


@program(SQUARE)
def advanced_indexing_with_strides(x: Tensor) -> Any:
    y = x.t() + 0
    y[:, torch.tensor([0, 2])] = 5.0
    return y, y.view(-1) if y.is_contiguous() else y.t().view(-1)


@program(SQUARE, torch.tensor([0, 1]))
def optional_tensor_list(x: Tensor, index: Tensor) -> Any:
    y = x.view(16)
    y[index] = torch.arange(2.0)
    return y, x[None, index], x[:, index]


@program(SQUARE)
def nonfunctional_constant_in_a_list(x: Tensor) -> Any:
    y = x + 1
    return y[torch.tensor([0, 2])].add_(1), y


@program(torch.ones(4, 2))
def inplace_on_non_view(x: Tensor) -> Any:
    y = x.view(4, 2)
    x.add_(1)
    return y


@program(torch.randn(2, 3))
def view_clone_view_inplace(x: Tensor) -> Any:
    return x.reshape(-1).clone().view(3, 2).relu_()


@program(torch.ones(4))
def zero_tensors(x: Tensor) -> Any:
    y = x + torch._efficientzerotensor(4)
    return y.add_(torch._efficientzerotensor(4))


@program(torch.ones(3))
def the_output_is_another_tensor(x: Tensor) -> Any:
    (x + 1).add_(x)
    return CONSTANT


@program(torch.ones(2, 2))
def composite_of_a_list(x: Tensor) -> Any:
    y = torch.block_diag(x, x)
    y.add_(1)
    return y


@program(torch.ones(2, 2))
def cat_out(x: Tensor) -> Any:
    out = torch.empty(0)
    torch.cat((x,), out=out)
    return out


@program(torch.ones(2, 2))
def diagonal(x: Tensor) -> Any:
    y = x.clone()
    y.diagonal().add_(1)
    return y * y


@program(torch.ones(2, 2))
def diagonal_of_an_input(x: Tensor) -> Any:
    x.diagonal().add_(1)
    return x


@program(torch.ones(2, 3, 4, 5))
def channels_last(x: Tensor) -> Any:
    y = x.contiguous(memory_format=torch.channels_last)
    y[:, 0].add_(1)
    return y, y.stride()


@program(SQUARE)
def pieces(x: Tensor) -> Any:
    halves, uneven, rows = x.split(2), x.split_with_sizes([1, 3]), x.unbind()
    halves[1].diagonal().add_(1)
    uneven[1].mul_(2)
    rows[0][1:].zero_()
    return halves[0] + halves[1], uneven[0], rows[3]


@program(SQUARE)
def chained_slices(x: Tensor) -> Any:
    y = x.transpose(1, 0)[1:3]
    first, second = y.split(1)
    first.mul_(second)
    return y + first


@program(torch.ones(4))
def inplace_views(x: Tensor) -> Any:
    y = torch.ones(4, 2) + x.view(4, 1)
    y.transpose_(1, 0)
    y[0].add_(1)
    y.unsqueeze_(0).squeeze_(0).t_()
    return y


@program(torch.ones(4))
def wrapped_numbers(x: Tensor) -> Any:
    z = x.view(4)
    z.add_(1)
    return z.mul_(2).div_(1)


@program(torch.randn(4))
def dtype_changes(x: Tensor) -> Any:
    y, out = x.clone(), torch.zeros(4)
    y.ge_(0)
    torch.add(torch.ones(4, dtype=torch.int64), 1, out=out)
    return y, out


@program(torch.ones(4, 4))
def everything(x: Tensor) -> Any:
    y = torch.ones(2, 2)
    total = x + x
    half = total.view(8, 2)
    square, other = half.view(4, 4).split(2)
    corner, _ = square.split(2, 1)
    flat = corner.reshape(-1)
    corner.transpose_(0, 1)
    corner.add_(y)
    other.t()[1].unsqueeze(0).squeeze(0).mul_(3)
    return total, half[0], corner, flat + square.diagonal().repeat(2), other


@program(SQUARE)
def copies(x: Tensor) -> Any:
    y = torch.zeros(4, 4)
    y[0].copy_(x[1])
    y[1:3].copy_(x[0])
    y[3].copy_(torch.arange(4))
    z = torch.empty_strided((4, 4), (1, 6))
    z.copy_(torch.ones(4, dtype=torch.int32))
    return y, z, z.stride()


@program(SQUARE)
def fills(x: Tensor) -> Any:
    y = x + x
    z = y.diagonal()
    y.fill_(0)
    z.fill_(1)
    return y, z


@program(torch.ones(3, 2, 4))
def elementwise_with_an_assigned_row(x: Tensor) -> Any:
    y = x * 2
    y[0] = y[1] + y[2]
    y[:, 0, 1:3] = 7
    return y.sum(0)


@program(torch.ones(8, 2))
def resize_smaller(x: Tensor) -> Any:
    w = x + 1
    y = w.view(4, 4)
    y.resize_(3, 3)
    y2 = y.view(-1)
    y2.add_(1)
    z = y + 1
    return w, z


@program(torch.ones(8, 2))
def resize_same_size_other_rank(x: Tensor) -> Any:
    y = x.clone()
    y.resize_(16, 1)
    return y.add_(1)


@program(torch.ones(8, 2))
def resize_larger(x: Tensor) -> Any:
    y = x + 1
    y.resize_(5, 5)
    y2 = y.view(25)
    y2.fill_(1)
    return y, y + 1


@program(torch.ones(4))
def resize_larger_under_a_view(x: Tensor) -> Any:
    y = x + 1
    z = y.view(2, 2)
    y.resize_(8).fill_(3)
    return y, z


@program(torch.ones(8))
def resize_of_an_input(x: Tensor) -> Any:
    x.resize_(4)
    x.add_(1)
    return x * 2


@program(torch.ones(2, 2))
def set_(x: Tensor) -> Any:
    y = torch.zeros(3)
    aten.set_.source_Tensor(y, x)
    y.add_(1)
    return y * 2


@program(torch.ones(4))
def nested_functions(x: Tensor) -> Any:
    def inner(y: Tensor) -> Tensor:
        y.add_(1)
        return y[1:]

    part = inner(x)
    inner(part)
    return part, x


@program(torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3))
def norms_with_statistics(x: Tensor, mean: Tensor, variance: Tensor) -> Any:
    one = torch.nn.functional.batch_norm(x, mean, variance, training=True)
    return one, torch.instance_norm(x, None, None, mean, variance, True, 0.1, 1e-5, False)


@program(torch.ones(4, dtype=torch.complex64))
def lazy_bits(x: Tensor) -> Any:
    y = x * 1j
    y.conj().add_(1)
    y.imag.mul_(2)
    return y.conj(), y, torch.view_as_real(y)[..., 0]


@program(torch.randn(2, 5), torch.randn(3, 5), torch.randn(3))
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return torch.nn.functional.linear(x, weight, bias)


@program(torch.randn(4), torch.tensor([1.0]))
def observer(x: Tensor, scale: Tensor) -> Any:
    on = torch.tensor([1])
    low, high, zero = torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([0], dtype=torch.int32)
    arguments = x, on, on.clone(), low, high, scale, zero, 0.01, 0, 255, 0
    return tuple(torch._fused_moving_avg_obs_fq_helper(*arguments))


@EITHER
@pytest.mark.parametrize("mode", [None, "real", "fake"], ids=str)
@pytest.mark.parametrize(("func", "inputs"), PROGRAMS)
def test_programs(func: Program, inputs: tuple[Any, ...], mode: Any, remove: str) -> None:
    assert_equivalent(func, *inputs, remove=remove, tracing_mode=mode)


# FakeTensor refuses aten.resize_ of a tensor of symbolic size, in plain make_fx too.
SYMBOLIC = [one for one in PROGRAMS if not str(one.id).startswith("resize_")]


@pytest.mark.every(5)
@pytest.mark.slow
@EITHER
@pytest.mark.parametrize(("func", "inputs"), SYMBOLIC)
def test_programs_of_symbolic_sizes(func: Program, inputs: tuple[Any, ...], remove: str) -> None:
    assert_equivalent(func, *inputs, remove=remove, tracing_mode="symbolic")


BATCHED = [one for one in PROGRAMS if one.id in ("simple", "chained_slices", "inplace_on_non_view", "wrapped_numbers")]


@EITHER
@pytest.mark.parametrize(("func", "inputs"), BATCHED)
def test_programs_under_vmap(func: Program, inputs: tuple[Any, ...], remove: str) -> None:
    batch = [torch.stack([value, value + 1]) for value in inputs]
    wanted = torch.func.vmap(func)(*[value.clone() for value in batch])
    got = torch.func.vmap(functionalize(func, remove=remove))(*[value.clone() for value in batch])
    torch.testing.assert_close(got, wanted)
