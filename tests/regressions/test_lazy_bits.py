"""Lazily conjugated and negated tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize.errors import UnsupportedMutationError
from functionalize.verify import assert_equivalent
from tests.support.equality import in_every_way
from tests.support.graphs import REMOVES

MEMORY = torch.arange(24.0)
SPAN = torch.arange(6.0)


@in_every_way
def test_negative_of_a_negative_view(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        negative = torch._neg_view(a)
        negative.data.neg_()
        return negative

    assert_equivalent(f, torch.arange(3.0), remove=remove, tracing_mode=mode)


def test_lazy_negation_resized_in_inference_mode_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        torch._neg_view(x[2:]).swapaxes_(0, 1)
        return x.mul_(2)

    x = torch.arange(9.0).view(3, 3)
    with torch.inference_mode(), pytest.raises(UnsupportedMutationError, match="lazily conjugated or negated"):
        capture(f, (x,))
    ours, eager = x.clone(), x.clone()
    assert torch.equal(capture(f, (ours,))(ours), f(eager))
    assert ours._version == eager._version


def test_copy_of_an_expanded_tensor_to_its_own_negation_is_the_error_of_eager() -> None:
    def f(x: Tensor) -> Tensor:
        return torch._neg_view(x).copy_(x)

    x = torch.zeros(3, 1).expand(3, 2)
    for run in (f, lambda x: capture(f, (x,))):
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            run(x)


@pytest.mark.parametrize("remove", REMOVES)
def test_place_beyond_the_storage_of_a_lazy_conjugate_is_the_error_of_eager(remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x.conj().as_strided((3,), (1,), 6) + 1

    x = torch.ones(2, dtype=torch.complex64)
    for run in (f, lambda x: capture(f, (x,), remove=remove)):
        with pytest.raises(
            RuntimeError, match="requiring a storage size of 72 are out of bounds for storage of size 16"
        ):
            run(x)


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_results_are_conjugated_and_negated_lazily_where_eager_does(remove: str) -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).conj(), (x * 3).conj().imag

    leaf = torch.tensor([[1 + 2j, 3 - 1j], [2j, 4.0]], requires_grad=True)
    captured = capture(run, (leaf,), remove=remove)
    gradients = []
    for function in (run, captured):
        first, second = function(leaf)
        assert first.is_conj() and second.is_neg()
        gradients.append(torch.autograd.grad(torch.view_as_real(first.resolve_conj()).sum() + second.sum(), leaf)[0])
    for want, got in zip(run(leaf), captured(leaf), strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bit", [torch._neg_view, torch.conj])
def test_lazy_bits_of_results_in_one_memory(mode: Any, bit: Any) -> None:
    """In inference mode no tensor is a view of another: each of them could have been the one that was computed."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        first, second = x * 2j, x * 3j
        return bit(first), first, bit(second), bit(second)[:1]

    with mode():
        for want, got in zip(run(MEMORY), capture(run, (MEMORY,))(MEMORY), strict=True):
            assert torch.equal(want, got)
            assert (want.is_conj(), want.is_neg()) == (got.is_conj(), got.is_neg())


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("bit", [torch._neg_view, torch.conj])
def test_a_row_of_columns_keeps_its_strides_under_a_lazy_bit(bit: Any, remove: str) -> None:
    def run(x: Tensor) -> Tensor:
        made: Tensor = bit((x * 2j)[1:2])
        return made

    x = SPAN.as_strided((3, 2), (1, 3)).clone().requires_grad_()
    want, got = run(x), capture(run, (x,), remove=remove)(x)
    assert want.stride() == got.stride() == (1, 3)
    assert (want.is_conj(), want.is_neg()) == (got.is_conj(), got.is_neg())
    assert torch.equal(want, got)
    gradients = [torch.autograd.grad(one.real.sum() + one.imag.sum(), x)[0] for one in (want, got)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("bit", [torch._neg_view, torch.conj])
def test_data_that_are_lazily_negated_are_refused_for_an_input(bit: Any) -> None:
    def run(x: Tensor) -> Tensor:
        view = bit(x)
        x.data = view.data
        return x * 1

    with pytest.raises(UnsupportedMutationError, match="lazily"):
        capture(run, (SPAN * 1j,))

    def inside(x: Tensor) -> Tensor:
        return run(x.clone())

    assert torch.equal(capture(inside, (SPAN * 1j,))(SPAN * 1j), inside(SPAN * 1j))


def _real_of_a_copied_conjugate(x: Tensor) -> Tensor:
    x.copy_(x.conj())
    return x.real


def _real_of_a_written_input(x: Tensor) -> Tensor:
    x[:2].mul_(2)
    return x.real


def _by_addresses(x: Tensor) -> Tensor:
    x.as_strided((2,), (4,)).add_(1j)
    return x


def _resized(x: Tensor) -> Tensor:
    return x.resize_(5) * 1


@pytest.mark.parametrize("bit", [torch.conj, torch.Tensor.contiguous], ids=["conjugate", "plain"])
@pytest.mark.parametrize(
    "program",
    [_real_of_a_copied_conjugate, _real_of_a_written_input, _by_addresses, _resized],
    ids=lambda f: f.__name__,
)
@in_every_way
def test_values_need_not_have_the_bits_of_their_handles(mode: Any, remove: str, program: Any, bit: Any) -> None:
    assert_equivalent(program, bit(torch.arange(9.0).view(3, 3) + 2j), remove=remove, tracing_mode=mode)
