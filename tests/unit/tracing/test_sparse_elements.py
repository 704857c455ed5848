"""Elements of sparse tensors whose number is data-dependent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import DataDependentError, UnsupportedMutationError, UnsupportedProgramError, capture

INDICES = [torch.tensor(one) for one in ([1, 2, 2, 5], [1, 1, 1, 1], [0, 3, 4, 5], [5, 5, 0, 0])]
torch.manual_seed(0)
TABLE = torch.randn(6, 3, requires_grad=True)


def gradient(indices: Tensor, table: Tensor = TABLE) -> Tensor:
    """A sparse tensor that is not coalesced."""
    loss = torch.nn.functional.embedding(indices, table, sparse=True).square().sum()
    return torch.autograd.grad(loss, table)[0]


def parts(i: Tensor) -> Any:
    found = gradient(i).coalesce()
    return found._indices(), found._values() * 2, found.indices(), found.values(), found


def count(i: Tensor) -> Tensor:
    return torch.ones(()) * gradient(i).coalesce()._nnz()


def made_of_parts(i: Tensor) -> Any:
    found = gradient(i).coalesce()
    values = found._values().abs().sqrt()
    one = torch.sparse_coo_tensor(found._indices(), values, found.size(), check_invariants=False)
    return one, found.new(found._indices(), values * 3, found.size()), one.to_dense()


def masked(i: Tensor) -> Any:
    found = gradient(i).coalesce()
    picked = torch.ones(6, 3).sparse_mask(found)
    return picked._values() - found._values(), picked


def decided(i: Tensor) -> Tensor:
    found = gradient(i).coalesce()
    return i * 2 if found._nnz() < 2 else found._values().sum()


def asked(i: Tensor) -> Tensor:
    total = gradient(i) + gradient((i + 1) % 6)
    return total.to_dense() if total.is_coalesced() else total * 2


def added(i: Tensor) -> Tensor:
    total = gradient(i).coalesce() + gradient((i + 1) % 6).coalesce()
    return total.coalesce().values() if i[0] > 0 else total.to_dense()


def written_later(i: Tensor) -> Any:
    """What was made of the values is gone when they are written."""
    found = gradient(i).coalesce()
    values = found._values() * 2
    total = torch.ones(6, 3).add_(found.new(found._indices(), values, found.size()))
    return total, values.add_(1)


def loop_over_rows(i: Tensor) -> Tensor:
    found = gradient(i).coalesce()
    return torch.zeros(6, 3).index_add(0, found._indices()[0], -found._values())


PROGRAMS = [parts, count, made_of_parts, masked, decided, asked, added, written_later, loop_over_rows]


def assert_equal(got: Any, wanted: Any) -> None:
    for one, other in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert (one.layout, one.dtype, one.size()) == (other.layout, other.dtype, other.size())
        assert torch.equal(one.to_dense(), other.to_dense())
        if one.is_sparse:
            assert (one.is_coalesced(), one._nnz()) == (other.is_coalesced(), other._nnz())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program.__name__))
def test_equal_to_eager(program: Callable[[Tensor], Any]) -> None:
    captured = capture(program, (INDICES[0],), on_guard_failure="recapture")
    for indices in INDICES:
        assert_equal(captured(indices), program(indices))
    assert len(captured.variants) <= 2


def test_a_write_that_a_sparse_tensor_would_see_is_refused() -> None:
    def kept(i: Tensor) -> Tensor:
        found = gradient(i).coalesce()
        values = found._values() * 2
        made = found.new(found._indices(), values, found.size()).detach()
        values.add_(1)
        return made

    with pytest.raises(UnsupportedMutationError, match="would not see the write"):
        capture(kept, (INDICES[0],))

    def part(i: Tensor) -> Tensor:
        found = gradient(i).coalesce()
        found._values().add_(1)
        return found

    with pytest.raises(UnsupportedMutationError, match="parts of a sparse"):
        capture(part, (INDICES[0],))


def test_values_of_what_is_not_coalesced_are_refused_as_in_eager() -> None:
    def values(i: Tensor) -> Tensor:
        return (gradient(i) + gradient(i)).values()

    for run in (values, lambda i: capture(values, (i,))):
        with pytest.raises(RuntimeError, match="on an uncoalesced tensor"):
            run(INDICES[0])


def test_without_data_nobody_knows_whether_it_is_coalesced() -> None:
    with pytest.raises(DataDependentError, match="is_coalesced"):
        capture(asked, (INDICES[0],), on_data="raise")


def test_gradients_of_values_are_refused() -> None:
    def values(x: Tensor) -> Tensor:
        return x.to_sparse().coalesce().values() * 2

    with pytest.raises(UnsupportedProgramError, match="gradients go through the values"):
        capture(values, (torch.eye(3, requires_grad=True),))
