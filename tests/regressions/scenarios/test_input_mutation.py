"""Functions that write to their inputs: data, metadata, both; alone, several, returned, by buffers and statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.support.equality import Check, Table, differentiated, written_afterwards
from tests.support.graphs import operators

data, metadata, statistics = Table(), Table(), Table()
SQUARE = torch.arange(9.0).view(3, 3)
LINE = torch.arange(12.0)


@data(SQUARE)
def one(a: Tensor) -> Tensor:
    a.mul_(2)
    return a * 3


@data(SQUARE, None, 3)
def beside_none_and_a_number(a: Tensor, nothing: None, number: int) -> Any:
    a.mul_(number)
    return a * 3, nothing, number


@data(SQUARE)
def returned(a: Tensor) -> Any:
    a.mul_(2)
    return a, a


@data(SQUARE, LINE, SQUARE)
def several(a: Tensor, b: Tensor, c: Tensor) -> Any:
    a.mul_(2)
    c.mul_(2)
    return a + b[:3] + c


@data(SQUARE, torch.zeros(3, 3))
def by_out(a: Tensor, out: Tensor) -> Tensor:
    return torch.sin(a, out=out)


@data(torch.arange(8.0)[::2])
def gapped(a: Tensor) -> Tensor:
    a.mul_(2)
    return a + 1


@data(SQUARE.t())
def transposed(a: Tensor) -> Any:
    a.mul_(2)
    return a + 1, a.view(-1) if a.is_contiguous() else a.t().view(-1)


@data(torch.zeros(3, 1, 2))
def through_a_squeeze(a: Tensor) -> Tensor:
    a.squeeze(1).add_(1)
    return a.squeeze().mul_(2) + 1


@data(SQUARE, LINE[:3])
def written_with_what_is_computed_from_it(a: Tensor, b: Tensor) -> Tensor:
    a[1:].add_(a[:-1] * b)
    b.copy_(a.sum(0))
    a.copy_(a @ a)
    return a.max()


@data(SQUARE, torch.zeros(3, 3))
def a_buffer_that_is_copied_to(a: Tensor, buffer: Tensor) -> Any:
    buffer.copy_(a + 1)
    return (a * buffer).sum()


@data(SQUARE, torch.zeros(3))
def a_buffer_of_another_shape_that_is_copied_to(a: Tensor, buffer: Tensor) -> Any:
    buffer.copy_(a.sum(0))
    buffer[:1].copy_(a[0, 2])
    return buffer + a


@data(SQUARE, torch.zeros(3, dtype=torch.float64))
def of_another_dtype(a: Tensor, b: Tensor) -> Tensor:
    b.add_(a[0])
    a.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    return b * 2


@data(SQUARE)
def back_and_forth(a: Tensor) -> None:
    a.add_(1)
    a.sub_(1)


@data(SQUARE, SQUARE)
def swapped(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b * 2)
    b.copy_(kept)


@data(SQUARE)
def after_it_was_saved_for_the_output(a: Tensor) -> Any:
    before = a * a
    a.exp_()
    return before, a[0]


@data(SQUARE)
def by_index_and_mask(a: Tensor) -> Any:
    a[torch.tensor([0, 2])] = a[1] * 2
    a[:, 1][a[:, 1] > 2] = 7.0
    a.index_add_(0, torch.tensor([0, 0]), torch.ones(2, 3))
    a.masked_fill_(a == 7, 1.0).scatter_(1, torch.zeros(3, 1, dtype=torch.int64), 5.0)
    return a.sum()


@data.each
def test_data(func: Any, inputs: Any, check: Check) -> None:
    check(func, *inputs)


@data.each
def test_data_and_a_caller_who_writes_to_the_outputs(func: Any, inputs: Any, remove: str) -> None:
    assert_equivalent(
        written_afterwards(func),
        *inputs,
        transform=lambda _: written_afterwards(functionalize(func, remove=remove)),
        remove=remove,
    )


def gradients(func: Any, inputs: Any, remove: str) -> None:
    given = [value for value in inputs if isinstance(value, Tensor)]
    assert_equivalent(
        differentiated(func), *given, transform=lambda _: differentiated(functionalize(func, remove=remove))
    )


NO_GRADIENT = ("beside_none_and_a_number", "by_out", "of_another_dtype", "after_it_was_saved_for_the_output")


def _differentiable(test: Any) -> Any:
    return data.each(test, *NO_GRADIENT)


@_differentiable
def test_data_with_gradients(func: Any, inputs: Any, remove: str) -> None:
    gradients(func, inputs, remove)


def test_writes_that_meet_another_argument_run_or_fail_as_in_eager(check: Check) -> None:
    def add(a: Tensor) -> Tensor:
        return a[1:].add_(a[:-1])

    def copy(a: Tensor) -> Tensor:
        return a[1:].copy_(a[:-1])

    def put(a: Tensor) -> Tensor:
        rows = a.view(3, 4)
        rows[torch.tensor([0, 2])] = rows[1]
        return rows

    def out(a: Tensor) -> Any:
        return torch.mul(a[:-1], 2, out=a[1:])

    def cat(a: Tensor) -> Any:
        return torch.cat([a[:3], a[:3]], out=a[:6])

    def foreach(a: Tensor) -> None:
        torch._foreach_add_([a[1:]], [a[:-1]])

    def same(a: Tensor) -> Any:
        return a.add_(a).mul_(a), a[::2].sub_(a[1::2]), torch.exp(a, out=a)

    for func in (add, copy, put, out, cat, foreach, same):
        check(func, LINE)


def test_a_value_that_backward_needs_and_that_was_written_is_refused_as_in_eager(remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        b = a.exp()
        b.add_(1)
        return b

    for func in (f, functionalize(f, remove=remove)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            func(SQUARE.clone().requires_grad_()).sum().backward()


# Metadata


@metadata(SQUARE[:2])
def transposed_in_place(a: Tensor) -> Tensor:
    a.transpose_(1, 0)
    return a + 1


@metadata(SQUARE[:2])
def transposed_and_written(a: Tensor) -> Any:
    a.t_()
    a.mul_(2)
    return a[0]


@metadata(torch.zeros(1, 3, 1))
def squeezed_and_unsqueezed(a: Tensor) -> Any:
    a.squeeze_(0).add_(1)
    a.unsqueeze_(1)
    return a.squeeze(), a.dim()


@metadata(SQUARE[:2])
def view_and_metadata(a: Tensor) -> Any:
    rows = a[0]
    a.t_()
    rows.add_(1)
    a[0].mul_(3)
    return rows, a + 0


@metadata(SQUARE[:2])
def returned_with_new_metadata(a: Tensor) -> Any:
    a.swapaxes_(0, 1)
    return a, a[0], a.t()


@metadata(SQUARE[:2], SQUARE)
def data_of_one_and_metadata_of_another(a: Tensor, b: Tensor) -> Any:
    a.t_()
    b.mul_(2)
    return a @ b[:2]


@metadata.each
def test_metadata(func: Any, inputs: Any, check: Check) -> None:
    check(func, *inputs)


@pytest.mark.parametrize("mode", [None, "real", "fake"], ids=str)
def test_resize_of_inputs(check: Check) -> None:
    def smaller(a: Tensor) -> Tensor:
        a.resize_(6)
        a.mul_(2)
        return a + 1

    def larger(a: Tensor) -> Tensor:
        a.resize_(3, 5)
        a[2:].fill_(1)
        return a * 2

    def there_and_back(a: Tensor) -> Tensor:
        a.resize_(20).fill_(2)
        a.resize_(12).add_(1)
        return a.sum()

    def to_nothing(a: Tensor) -> Any:
        a.resize_(0)
        return a.sum(), a.numel()

    for func in (smaller, larger, there_and_back, to_nothing):
        check(func, LINE.clone())


def test_bytes_of_a_storage_are_resized(remove: str) -> None:
    """Frees and fills a storage as a sharded parameter does; what lies there between the two is nobody's."""

    def f(a: Tensor, new: Tensor) -> Any:
        storage = a.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        a.copy_(new)
        return a.sum()

    assert_equivalent(f, LINE.clone(), LINE + 1, remove=remove)


# Statistics


@statistics(torch.randn(4, 3), torch.zeros(3), torch.ones(3))
def batch_norm_in_training(x: Tensor, mean: Tensor, variance: Tensor) -> Any:
    return F.batch_norm(x, mean, variance, training=True)


@statistics(torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3))
def batch_norm_after_a_write(x: Tensor, mean: Tensor, variance: Tensor) -> Any:
    mean[0].add_(1)
    x.mul_(2)
    out = F.batch_norm(x, mean, variance, training=True, momentum=0.5)
    return out, mean * variance


@statistics(torch.randn(4, 3), torch.zeros(3), torch.ones(3))
def batch_norm_twice(x: Tensor, mean: Tensor, variance: Tensor) -> Any:
    x = F.batch_norm(x, mean, variance, training=True)
    return F.batch_norm(x * 2, mean, variance, training=True)


@statistics.each
def test_statistics(func: Any, inputs: Any, check: Check) -> None:
    graph = check(func, *inputs)
    assert graph is None or operators(graph).count("copy_.default") >= 2


def test_statistics_in_evaluation_are_not_written(check: Check) -> None:
    def f(x: Tensor, mean: Tensor, variance: Tensor) -> Any:
        return F.batch_norm(x, mean, variance, training=False)

    graph = check(f, torch.randn(4, 3), torch.zeros(3), torch.ones(3))
    assert graph is None or "copy_.default" not in operators(graph)
