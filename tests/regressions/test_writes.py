"""Writes in place: in which order they count, through which views, and to which elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize.errors import UnsupportedMutationError
from functionalize.verify import assert_equivalent
from tests.support.equality import in_every_way
from tests.support.graphs import MODES, REMOVES, trace


@in_every_way
def test_masked_fill_of_an_expanded_tensor_fills_where_any_position_is_masked(mode: Any, remove: str) -> None:
    def f(a: Tensor, mask: Tensor) -> Tensor:
        return a.expand(2, 3).masked_fill_(mask, 5)

    mask = torch.arange(6).reshape(2, 3) == 4
    with pytest.warns(UserWarning, match="on expanded tensors is deprecated"):
        assert_equivalent(f, torch.ones(3), mask, remove=remove, tracing_mode=mode)


@pytest.mark.filterwarnings("ignore:Use of index_fill_ on expanded tensors")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", [lambda v: v.tril_(), lambda v: v.index_fill_(0, torch.tensor([0]), 2)])
def test_other_writes_to_an_expanded_tensor_are_refused(write: Any, mode: Any) -> None:
    with pytest.raises(UnsupportedMutationError, match="some positions of which are the same element"):
        trace(lambda a: write(a.expand(2, 3)), torch.ones(3), mode=mode)


@in_every_way
def test_write_below_an_expand_whose_place_a_plain_route_passes_through(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> None:
        a.expand((3, 8)).select(0, 0)[7:].copy_(torch.arange(1))

    assert_equivalent(f, torch.arange(8.0).as_strided((1, 8), (1, 1)), remove=remove, tracing_mode=mode)


@in_every_way
def test_what_lies_around_an_input_is_read(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        a.t_()
        return a.as_strided((7,), (1,), 3)

    assert_equivalent(f, torch.arange(10.0).as_strided((), ()), remove=remove, tracing_mode=mode)


@in_every_way
def test_write_back_to_an_expanded_input(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        a[:, 1].mul_(3)
        a.t_()
        return a.sum()

    assert_equivalent(f, torch.arange(3.0)[:, None].expand(3, 4), remove=remove, tracing_mode=mode)


@in_every_way
def test_square_of_one_symbol(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        b = a.view(-1)
        b.view(-1).add_(1)
        b.mul_(2)
        a.mul_(2)
        return b

    assert_equivalent(f, torch.ones(2, 2), remove=remove, tracing_mode=mode)


@in_every_way
def test_foreach_entry_that_reads_what_an_earlier_one_wrote(mode: Any, remove: str) -> None:
    def f(a: Tensor, b: Tensor) -> None:
        torch._foreach_mul_([a, b], [b, a])
        torch._foreach_mul_([a[0], b[0]], a[0])

    assert_equivalent(f, torch.arange(1.0, 4.0), torch.arange(2.0, 5.0), remove=remove, tracing_mode=mode)


@in_every_way
def test_write_to_one_element_that_is_read(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> None:
        one = a.squeeze(-2)
        one.mul_(a.contiguous().view(-1))

    inputs = torch.full((2,), 3.0).as_strided((1, 1), (2, 2))
    assert_equivalent(f, inputs, remove=remove, tracing_mode=mode)


@in_every_way
def test_second_write_to_a_view_comes_after_those_in_between(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> None:
        b = a[::2].unsqueeze(0)
        b.add_(1)
        b.fill_diagonal_(1)
        b.fill_(0.5)

    assert_equivalent(f, torch.arange(7.0), remove=remove, tracing_mode=mode)


@in_every_way
def test_foreach_entry_that_reads_beside_what_it_writes(mode: Any, remove: str) -> None:
    def f(x: Tensor) -> None:
        torch._foreach_copy_([x[1]], [x[0]])
        torch._foreach_add_([x[:, 1]], [x[:, 0]])
        torch._foreach_addcmul_([x[0], x[1]], [x[1], x[2]], [x[2], x[0]], 2.0)

    assert_equivalent(f, torch.arange(12.0).view(3, 4), remove=remove, tracing_mode=mode)


@in_every_way
def test_copies_of_lists_convert_expand_and_read_what_earlier_entries_wrote(mode: Any, remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        y, z = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(8)
        torch._foreach_copy_([x[0], x[1], y, z[2:6]], [x[1], x[0], x[2], y[1].float()])
        torch._foreach_copy_([z[:4], z[4:]], [x[0], x[1]])
        return y.sum() + z

    assert_equivalent(f, torch.arange(12.0).view(3, 4), remove=remove, tracing_mode=mode)


def test_copies_of_lists_are_no_nodes() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty(8)
        torch._foreach_copy_([out[:4], out[4:]], [x, y])
        return out

    graph = capture(f, (torch.ones(4), torch.ones(4))).graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == ["aten.cat.default"]


@in_every_way
def test_empty_tensor_viewed_as_a_wider_dtype(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        empty: Tensor = a.repeat_interleave(2, 1).split([0, 2], 1)[0]
        return empty.view(torch.float32)

    assert_equivalent(f, torch.ones(7, 1, dtype=torch.float16), remove=remove, tracing_mode=mode)


@in_every_way
def test_view_that_only_fake_tensors_allow(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> None:
        b = a.view(2, 1, 3, 1).permute(1, 2, 0, 3)
        b.scatter_(0, torch.zeros(1, 3, 2, 1, dtype=torch.int64), -2)

    assert_equivalent(f, torch.arange(6.0), remove=remove, tracing_mode=mode)


@in_every_way
@pytest.mark.parametrize("part", [slice(None), slice(1, None), 0])
def test_copy_of_an_input_that_is_written_afterwards(part: Any, mode: Any, remove: str) -> None:
    def f(a: Tensor, b: Tensor) -> None:
        b.detach().copy_(a[part])
        a.index_fill_(0, torch.tensor([0]), -2)

    a = torch.arange(6.0).view(3, 2)
    assert_equivalent(f, a, torch.zeros_like(a[part]), remove=remove, tracing_mode=mode)


@in_every_way
def test_an_input_that_starts_late_in_its_storage_traced_twice(mode: Any, remove: str) -> None:
    """Fake tensors forget, from the second time on, that a scatter keeps the storage offset of its base."""

    def f(a: Tensor, b: Tensor) -> Tensor:
        a[:17:2] *= 0
        return a

    memory = torch.arange(24.0)
    inputs = (memory.as_strided((17, 1), (1, 1), 1), memory.as_strided((11, 1), (1, 1), 5))
    for _ in range(2):
        assert_equivalent(f, *inputs, remove=remove, tracing_mode=mode)


@pytest.mark.parametrize("remove", REMOVES)
def test_writes_to_parts_of_a_tensor_in_a_storage_of_no_whole_number_of_its_elements(remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        x.as_strided((2,), (2,)).add_(1)
        x[1:3] += 1
        x[0] = 3
        return x.sum()

    def floats_in_bytes() -> Tensor:
        return torch.zeros(102, dtype=torch.uint8)[:100].view(torch.float32)

    assert_equivalent(f, floats_in_bytes(), transform=lambda f: capture(f, (floats_in_bytes(),), remove=remove))


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("offset", [0, 1])
def test_places_in_what_could_be_written_in_place(offset: int, remove: str) -> None:
    """A call writes in the memory of the input where it can, which begins elsewhere than a result's."""

    def f(x: Tensor) -> Tensor:
        x.scatter_(1, torch.zeros(4, 1, dtype=torch.int64), 5)
        x.as_strided((2,), (1,), 10).fill_(7)
        x[:1].index_fill_(1, torch.tensor([1]), 3)
        return x.as_strided((2,), (1,), 2) + 1

    given = [torch.arange(14.0)[offset : offset + 12].view(4, 3) for _ in range(2)]
    torch.testing.assert_close(capture(f, (given[0],), remove=remove)(given[0]), f(given[1]))
    torch.testing.assert_close(given[0], given[1])


@pytest.mark.parametrize("remove", REMOVES)
def test_memory_of_another_dtype_in_a_column_of_one(remove: str) -> None:
    """Kernels look at its stride, which is not that of fake views."""

    def f(x: Tensor, part: Tensor, y: Tensor) -> Any:
        part.add_(-1)
        return x * 1, y * 2

    def given() -> tuple[Tensor, ...]:
        memory = torch.arange(4)
        part = memory.view(torch.int16).as_strided((1, 1), (1, 1), 1)
        return memory.as_strided((1, 1), (2, 2)), part, torch.ones(2, requires_grad=True) * 1

    for ours, eager in zip(capture(f, given(), remove=remove)(*given()), f(*given()), strict=True):
        assert ours.tolist() == eager.tolist()


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors")
@pytest.mark.parametrize("remove", REMOVES)
def test_a_write_to_elements_in_order_of_another_dtype(remove: str) -> None:
    """The diagonal of an expanded tensor is the whole of its storage."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        integers = x.view(torch.int64)
        x.masked_fill_(torch.tensor([True, False, True, False]), 0.5)
        integers.chunk(2, 0)[0].diagonal().cumprod_(0)
        return integers, integers.chunk(2, 0)[0]

    def expanded() -> Tensor:
        return torch.arange(4.0).expand(4, 4)

    eager, mine = expanded(), expanded()
    want, got = run(eager), capture(run, (expanded(),), remove=remove)(mine)
    assert all(map(torch.equal, want, got))
    assert torch.equal(eager, mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_memory_of_booleans_is_written_as_bytes_alone(dtype: torch.dtype) -> None:
    def run(mask: Tensor, of: torch.dtype) -> Tensor:
        return mask.view(of)[:1].fill_(1)

    mask, bytes_of = torch.zeros(16, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
    with pytest.raises(UnsupportedMutationError, match="a bool tensor is written through a view of dtype torch"):
        capture(lambda x: run(x, dtype), (mask,))
    capture(lambda x: run(x, torch.uint8), (bytes_of,))(bytes_of)
    assert bytes_of.tolist() == [True] + 7 * [False] and not mask.any()
