"""Sparse, nested, quantized and mkldnn tensors: they pass, in direct use with all writes that eager knows.

A graph expresses writes to whole sparse and quantized tensors. A write to a part of one (its values, what it was built
of) is refused there, since nothing in the graph says that the two share memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import UnsupportedMutationError, functionalize
from functionalize.verify import assert_equivalent
from tests.support.graphs import REMOVES

EITHER = pytest.mark.parametrize("remove", REMOVES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(Sparse|beta|prototype|nested):UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(quantiz|deprecated)"),
]
Function = Callable[[Tensor], Any]
X = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])


def dense_of(x: Tensor) -> Any:
    sparse = x.to_sparse()
    sparse.mul_(3)
    sparse.add_(sparse)
    sparse.add_(x.to_sparse(), alpha=2)
    y = sparse.to_dense()
    y[0].add_(1)
    return y


def coordinates_copied(x: Tensor) -> Any:
    sparse, other = x.to_sparse(), torch.zeros(2, 3).to_sparse()
    other.copy_(sparse)
    sparse.zero_()
    return other.to_dense(), sparse.to_dense()


def dense_plus_sparse(x: Tensor) -> Any:
    y = x * 1
    y.add_(x.to_sparse())
    y[0].add_(1)
    return y, torch.sparse.mm(x.to_sparse(), y.t().contiguous())


def quantized(x: Tensor) -> Any:
    q = torch.quantize_per_tensor(x - 1, 0.1, 10, torch.quint8)
    q.relu_()
    q[0].copy_(x[1])
    q.t()[0].fill_(1.0)
    numbers = q.int_repr()
    numbers.add_(1)
    return q.dequantize(), numbers, q.view(-1)[1:].dequantize()


def mkldnn(x: Tensor) -> Any:
    m = (x - 1).to_mkldnn()
    m.relu_()
    m.add_(m)
    y = m.to_dense()
    y[0].add_(1)
    return y, m.view(3, 2).to_dense(), m.reshape(6).to_dense()


WHOLE = [dense_of, coordinates_copied, dense_plus_sparse, quantized, mkldnn]


def rows(x: Tensor) -> Any:
    compressed = x.to_sparse_csr()
    compressed.mul_(2)
    return compressed.to_dense(), compressed.values(), compressed.crow_indices()


def rows_copied(x: Tensor) -> Any:
    compressed = x.to_sparse_csr()
    compressed.copy_((x * 2).to_sparse_csr())
    return compressed.to_dense()


def values(x: Tensor) -> Any:
    sparse = x.to_sparse()
    sparse._values().mul_(5)
    return sparse.to_dense()


def values_of_what_is_written(x: Tensor) -> Any:
    sparse = x.to_sparse().coalesce()
    seen = sparse.values()
    sparse.mul_(5)
    return seen + 0, sparse.to_dense()


def what_it_was_built_of(x: Tensor) -> Any:
    given = x[0, :2] * 1
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 2]]), given, (2, 3))
    given.add_(1)
    return sparse.to_dense()


def resized(x: Tensor) -> Any:
    sparse = x.to_sparse()
    sparse.sparse_resize_((4, 4), 2, 0)
    return sparse.to_dense()


def requantized(x: Tensor) -> Any:
    q = torch.quantize_per_tensor(x, 0.5, 3, torch.quint8)
    q.copy_(x * 2.2)
    return q.dequantize()


REFUSED_IN_GRAPHS: dict[Function, str] = {
    values: "which has no strided storage",
    values_of_what_is_written: "would not see the write",
    what_it_was_built_of: "would not see the write",
    resized: "only strided tensors",
}


def nested(x: Tensor) -> Any:
    n: Any = torch.nested.as_nested_tensor([x[0] * 1, x[1, :2] * 1])
    n.mul_(2)
    n.relu_()
    first, _ = n.unbind()
    first.add_(1)
    return n.to_padded_tensor(0.0)


def nested_in_a_buffer(x: Tensor) -> Any:
    sizes, strides, offsets = torch.tensor([[3], [2]]), torch.tensor([[1], [1]]), torch.tensor([0, 3])
    n = torch._nested_view_from_buffer(x.view(-1), sizes, strides, offsets)
    n.mul_(2)
    return n.to_padded_tensor(0.0), x * 1


def jagged(x: Tensor) -> Any:
    n: Any = torch.nested.as_nested_tensor([x[0] * 1, x[1, :2] * 1], layout=torch.jagged)
    n.sin_()
    n.values().mul_(2)
    first, _ = n.unbind()
    first.add_(1)
    return n.to_padded_tensor(0.0), n.offsets()


@EITHER
@pytest.mark.parametrize(
    "func", [*WHOLE, rows, rows_copied, *REFUSED_IN_GRAPHS, requantized, nested, nested_in_a_buffer, jagged]
)
def test_direct(func: Function, remove: str) -> None:
    assert_equivalent(func, X, remove=remove)


@EITHER
@pytest.mark.parametrize("func", WHOLE)
def test_graphs(func: Function, remove: str) -> None:
    assert_equivalent(func, X, remove=remove, tracing_mode="real")


@EITHER
def test_compressed_rows_in_graphs(remove: str) -> None:
    assert_equivalent(rows, X, remove=remove, tracing_mode="fake")  # `make_fx` itself asks for strides in real mode


@EITHER
@pytest.mark.parametrize("mode", [None, "real", "fake"], ids=str)
@pytest.mark.parametrize("name", ["mul_", "add_", "zero_"])
def test_sparse_inputs(name: str, mode: Any, remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        getattr(x, name)(*{"mul_": (2,), "add_": (x.clone(),), "zero_": ()}[name])
        return x.to_dense()

    assert_equivalent(f, X.to_sparse().coalesce(), remove=remove, tracing_mode=mode)


@EITHER
@pytest.mark.parametrize("func", REFUSED_IN_GRAPHS)
def test_refused_in_graphs(func: Function, remove: str) -> None:
    with pytest.raises(UnsupportedMutationError, match=REFUSED_IN_GRAPHS[func]):
        make_fx(functionalize(func, remove=remove))(X.clone())


@EITHER
def test_a_write_to_what_a_fake_tensor_does_not_know_to_be_quantized_is_refused(remove: str) -> None:
    with pytest.raises(UnsupportedMutationError, match="which fake tensors treat as an ordinary tensor"):
        make_fx(functionalize(requantized, remove=remove), tracing_mode="fake")(X)
