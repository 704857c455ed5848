"""Functions that change which storage a tensor has, or its size; and sizes that are symbols of the trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import UnsupportedMutationError, functionalize
from functionalize.verify import assert_equivalent, assert_functional
from tests.support.equality import Check, Table

storages, sizes, composites = Table(), Table(), Table()
SQUARE = torch.arange(16.0).view(4, 4)
LINE = torch.arange(12.0)


@storages(LINE, LINE + 1)
def an_input_takes_another_storage(a: Any, b: Any) -> Any:
    a.set_(b * 2)
    return a + 1


@storages(LINE, SQUARE)
def set_to_a_view_then_written(a: Any, b: Any) -> Any:
    a.set_(b.t()[1:])
    a.mul_(2)
    return b.sum(0), a * 1


@storages(LINE, LINE + 1)
def written_before_and_after(a: Any, b: Any) -> Any:
    a.mul_(2)
    kept = a[:4]
    a.set_(b)
    a.add_(1)
    kept.mul_(3)
    return kept, b * 1


@storages(LINE, LINE + 1)
def set_there_and_back(a: Any, b: Any) -> Any:
    original = a.view(12)
    a.set_(b)
    a.set_(original)
    return a + b


@storages(SQUARE)
def set_of_an_intermediate_to_its_own_part(x: Tensor) -> Any:
    y: Any = x * 2
    part = y[1:3]
    y.set_(part)
    y[0].zero_()
    return y, part


@storages(LINE)
def set_to_the_storage_of_another(x: Tensor) -> Any:
    y, z = x * 2, torch.empty(0)
    z.set_(y.untyped_storage(), 2, (2, 3), (4, 1))
    z.add_(1)
    return y, z


@storages.each
@pytest.mark.parametrize("mode", [None, "real", "fake"], ids=str)
def test_storages(func: Any, inputs: Any, check: Check) -> None:
    check(func, *inputs)


def test_a_storage_whose_tensors_are_gone_is_refused_in_graphs(remove: str) -> None:
    def f(x: Tensor) -> Any:
        storage = (x * 2).untyped_storage()
        z = torch.empty(0)
        z.set_(storage, 0, (3,), (2,))
        return z.add_(1)

    assert_equivalent(f, LINE, remove=remove)
    with pytest.raises(UnsupportedMutationError, match="without a live tensor"):
        make_fx(functionalize(f, remove=remove), tracing_mode="fake")(LINE)


def test_a_storage_is_freed_and_filled_before_its_tensor_is_written(remove: str) -> None:
    def f(a: Any, b: Any) -> Any:
        a.untyped_storage().resize_(b.untyped_storage().nbytes())
        a.set_(b * 2)
        return a.sum()

    assert_equivalent(f, torch.empty(0), LINE, remove=remove)


# Sizes


@sizes(SQUARE)
def an_output_that_depends_on_a_size(x: Tensor) -> Any:
    y = x * x.size(0)
    y[: x.size(1) // 2].add_(x.shape[1])
    return y, y.view(-1)[: x.numel() - 1]


@sizes(LINE, LINE)
def views_by_the_size_of_another(x: Tensor, y: Tensor) -> Any:
    z = x.view(-1, 3) + 1
    z[: y.size(0) // 6].mul_(2)
    return z.t(), z.view(2, -1)


@sizes(SQUARE[:3])
def an_expanded_size(x: Tensor) -> Any:
    y = x.unsqueeze(0).expand(2, -1, -1)
    z = y.reshape(-1, x.size(1))
    z[x.size(0) :].zero_()
    return z, y.sum(0)


@sizes(SQUARE)
def an_input_view_of_a_size_that_is_halved(x: Tensor) -> Any:
    left, right = x.split(x.size(1) // 2, 1)
    left.add_(right)
    return left, x.unflatten(1, (-1, 2))


@sizes(LINE)
def a_size_that_is_computed(x: Tensor) -> Any:
    n = x.shape[0]
    y = torch.zeros(n + 2)
    y[1 : n + 1].copy_(x)
    y[n:].add_(torch.arange(2) + n)
    return y.as_strided((n,), (1,), 1), y.roll(1)


@sizes.each
def test_sizes(func: Any, inputs: Any, check: Check) -> None:
    check(func, *inputs)


@pytest.mark.slow
@sizes.each
def test_a_graph_of_symbolic_sizes_serves_other_sizes(func: Any, inputs: Any, remove: str) -> None:
    graph = make_fx(functionalize(func, remove=remove), tracing_mode="symbolic")(*[x.clone() for x in inputs])
    assert_functional(graph, remove)
    larger = [torch.randn([2 * size for size in x.shape]) for x in inputs]
    ours, eager = [x.clone() for x in larger], [x.clone() for x in larger]
    torch.testing.assert_close(graph(*ours), func(*eager))
    torch.testing.assert_close(ours, eager)


# Composites


@composites(SQUARE - 8)
def in_place_composites(x: Tensor) -> Any:
    y = x * 1
    y.absolute_()
    torch.threshold_(y, 3, 1)
    y.swapdims_(0, 1).arccosh_().nan_to_num_()
    F.elu(x, inplace=True)
    return y, x.clip_(-1, 1), F.hardtanh(x * 2, inplace=True)


@composites(torch.randn(3, 4), torch.randn(5, 4), torch.randn(5))
def linear_layers(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    complex_input = torch.complex(x, x)
    y = F.linear(complex_input, torch.complex(weight, weight), torch.complex(bias, bias))
    y.real.mul_(2)
    return y, F.linear(x, weight, bias).relu_(), F.bilinear(x, x, torch.ones(2, 4, 4))


@composites(torch.randn(6, 3), torch.tensor([0, 2, 5, 1]), torch.tensor([0, 2]))
def embeddings(weight: Tensor, index: Tensor, offsets: Tensor) -> Any:
    rows = F.embedding(index, weight, max_norm=0.5)
    bags = F.embedding_bag(index, weight, offsets, mode="sum")
    bags[0].add_(rows[1])
    return {"rows": rows, "bags": bags, "view": weight[:2]}


@composites(torch.randn(2, 3, 8))
def convolution_and_pooling(x: Tensor) -> Any:
    y = F.conv1d(x, torch.ones(4, 3, 3), padding=1)
    y.relu_()[:, 0].zero_()
    values, where = F.max_pool1d(y, 2, return_indices=True)
    values.add_(1)
    return values, where, F.pad(y, (1, 2)).mul_(2), F.layer_norm(y, (8,)), F.group_norm(y, 2)


@composites(SQUARE)
def under_changing_modes(x: Tensor) -> Any:
    with torch.no_grad():
        y = x * 2
        y[0].add_(1)
    with torch.enable_grad():
        z = y.detach().requires_grad_()
        w = (z * z).sum()
    return y, w.detach(), torch.is_grad_enabled(), z.requires_grad


@composites.each
def test_composites(func: Any, inputs: Any, check: Check) -> None:
    check(func, *inputs)
