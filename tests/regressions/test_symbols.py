"""Programs whose sizes are symbols, or known from data only, that the fuzzer found to differ from eager; shrunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from functionalize import UnsupportedMutationError
from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES, trace

WAYS = [(mode, remove) for mode in (None, *MODES) for remove in REMOVES]
in_every_way = pytest.mark.parametrize(("mode", "remove"), WAYS)


@in_every_way
def test_stride_that_a_guard_has_pinned(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        b = a.view((1, 1, 2, 2))
        return b + sum(b.stride())

    assert_equivalent(f, torch.arange(4.0).view(2, 2), remove=remove, tracing_mode=mode)


@in_every_way
def test_out_of_a_size_that_data_decided_until_it_met_an_input(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        b = a.nonzero()
        b -= a
        return torch.mul(b, b, out=torch.empty(0, dtype=torch.int64))

    assert_equivalent(f, torch.ones(2, 1, dtype=torch.int16), remove=remove, tracing_mode=mode)


_PARTS: dict[str, Any] = {
    "split": lambda x: x.split([4, 2])[1],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "row": lambda x: x[1],
    "rest": lambda x: x[1::2],
    "transposed": lambda x: x[:, None, None].permute(2, 0, 1),
    "strided": lambda x: x.as_strided((2,), (2,), 1),
    "of expanded": lambda x: x.expand(3, -1).diagonal(),
    "windows": lambda x: x.unfold(0, 2, 2),
}


@pytest.mark.parametrize("part", _PARTS.values(), ids=_PARTS)
@in_every_way
def test_parts_of_a_tensor_whose_size_the_data_decide(mode: Any, remove: str, part: Any) -> None:
    def f(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b = a[a > 0]
        c = part(b)
        c.add_(1)
        b.mul_(3)
        return b, c + 1

    assert_equivalent(f, torch.arange(9.0) - 2, remove=remove, tracing_mode=mode)


@in_every_way
def test_copy_to_windows_of_a_tensor_whose_size_the_data_decide(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        b = a[a > 0]
        b.unfold(0, 3, 2).copy_(torch.arange(3.0))
        return b

    assert_equivalent(f, torch.arange(9.0) - 2, remove=remove, tracing_mode=mode)


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.copy_(torch.arange(2.0))])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_so_many_writes_to_one_element_as_the_data_decide_are_refused(mode: str, write: Any) -> None:
    with pytest.raises(UnsupportedMutationError, match="some positions of which are the same element"):
        trace(lambda a: write(a[a > 0].unfold(0, 2, 1)), torch.arange(9.0) - 2, mode=mode)


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("length", [16, 17])
def test_random_numbers_come_in_the_order_of_memory_at_any_size(length: int, remove: str) -> None:
    def f(a: torch.Tensor) -> None:
        a[:, 1].normal_()

    graph = trace(f, torch.zeros(length, 2), remove=remove, mode="symbolic")
    for other in (length, 16, 19, 40, 61):
        wanted, got = torch.zeros(other, 2), torch.zeros(other, 2)
        for function, argument in ((f, wanted), (graph, got)):
            torch.manual_seed(0)
            function(argument)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("remove", REMOVES)
def test_write_to_a_list_of_tensors_whose_sizes_the_data_decide(remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        positive = a[a > 0]
        torch._foreach_add_([positive], [a], alpha=2)
        return positive

    graph = trace(f, torch.ones(1), remove=remove, mode="fake")
    for a in (torch.ones(1), torch.zeros(1)):
        assert torch.equal(graph(a), f(a))


@pytest.mark.parametrize("remove", REMOVES)
def test_how_many_elements_a_flattened_square_has(remove: str) -> None:
    def f(a: torch.Tensor) -> Any:
        flat = a.flatten(0, 1)
        return flat.view(-1), flat.contiguous()

    assert_equivalent(f, torch.arange(9.0).view(3, 3), remove=remove, tracing_mode="symbolic", strides=False)
