"""Programs whose sizes are symbols, or known from data only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize.errors import UnsupportedMutationError
from functionalize.verify import assert_equivalent
from tests.support.equality import in_every_way
from tests.support.graphs import REMOVES, trace


@in_every_way
def test_stride_that_a_guard_has_pinned(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        b = a.view((1, 1, 2, 2))
        return b + sum(b.stride())

    assert_equivalent(f, torch.arange(4.0).view(2, 2), remove=remove, tracing_mode=mode)


@in_every_way
def test_out_of_a_size_that_data_decided_until_it_met_an_input(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
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
def test_parts_of_a_tensor_of_data_dependent_size(mode: Any, remove: str, part: Any) -> None:
    def f(a: Tensor) -> tuple[Tensor, Tensor]:
        b = a[a > 0]
        c = part(b)
        c.add_(1)
        b.mul_(3)
        return b, c + 1

    assert_equivalent(f, torch.arange(9.0) - 2, remove=remove, tracing_mode=mode)


@in_every_way
def test_copy_to_windows_of_a_tensor_of_data_dependent_size(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        b = a[a > 0]
        b.unfold(0, 3, 2).copy_(torch.arange(3.0))
        return b

    assert_equivalent(f, torch.arange(9.0) - 2, remove=remove, tracing_mode=mode)


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.copy_(torch.arange(2.0))])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_data_dependent_number_of_writes_to_one_element_is_refused(mode: str, write: Any) -> None:
    with pytest.raises(UnsupportedMutationError, match="some positions of which are the same element"):
        trace(lambda a: write(a[a > 0].unfold(0, 2, 1)), torch.arange(9.0) - 2, mode=mode)


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("length", [16, 17])
def test_random_numbers_come_in_the_order_of_memory_at_any_size(length: int, remove: str) -> None:
    def f(a: Tensor) -> None:
        a[:, 1].normal_()

    graph = trace(f, torch.zeros(length, 2), remove=remove, mode="symbolic")
    for other in (length, 16, 19, 40, 61):
        wanted, got = torch.zeros(other, 2), torch.zeros(other, 2)
        for function, argument in ((f, wanted), (graph, got)):
            torch.manual_seed(0)
            function(argument)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("remove", REMOVES)
def test_write_to_a_list_of_tensors_of_data_dependent_sizes(remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        positive = a[a > 0]
        torch._foreach_add_([positive], [a], alpha=2)
        return positive

    graph = trace(f, torch.ones(1), remove=remove, mode="fake")
    for a in (torch.ones(1), torch.zeros(1)):
        assert torch.equal(graph(a), f(a))


@pytest.mark.parametrize("remove", REMOVES)
def test_how_many_elements_a_flattened_square_has(remove: str) -> None:
    def f(a: Tensor) -> Any:
        flat = a.flatten(0, 1)
        return flat.view(-1), flat.contiguous()

    assert_equivalent(f, torch.arange(9.0).view(3, 3), remove=remove, tracing_mode="symbolic", strides=False)


@in_every_way
def test_write_to_a_tensor_of_data_dependent_size(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        b = a.nonzero()
        b.masked_fill_(b != 0, 3)
        return b

    assert_equivalent(f, torch.ones(2, 2), remove=remove, tracing_mode=mode)


@in_every_way
def test_as_strided_of_a_tensor_of_data_dependent_size(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        return a[a > 0].as_strided((3,), (1,), 0)

    assert_equivalent(f, torch.arange(5), remove=remove, tracing_mode=mode)


@pytest.mark.parametrize("remove", REMOVES)
def test_squeeze_of_a_data_dependent_size(remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        return a[a > 0].squeeze(0)

    graph = trace(f, torch.arange(2.0), remove=remove, mode="symbolic")
    for inputs in (torch.arange(2.0), torch.arange(3.0)):
        torch.testing.assert_close(graph(inputs), f(inputs))


@pytest.mark.parametrize("remove", REMOVES)
def test_part_beyond_what_an_empty_storage_held_before_it_got_a_data_dependent_size(remove: str) -> None:
    def f(x: Tensor) -> Any:
        chosen = x[x > 0]
        summed = torch.add(chosen, chosen, out=torch.empty(0))
        return summed, summed.as_strided((1,), (1,), 2)

    program = capture(f, (torch.tensor([1.0, -1, 2, 3, 4]),), remove=remove)
    for data in ([1.0, -1, 2, 3, 4], [5.0, 6, 7, 8, 9], [1.0, 2, 3, -1, -1]):
        assert_equivalent(f, torch.tensor(data), transform=lambda _: program)
    for attempt in (f, program):
        with pytest.raises(RuntimeError):
            attempt(torch.tensor([1.0, 2, -3, -4, -5]))


@pytest.mark.parametrize("remove", REMOVES)
def test_write_in_place_of_a_data_dependent_size(remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        x -= x[x > 0]
        return x

    program = capture(f, (torch.tensor([2.0]),), remove=remove)
    assert_equivalent(f, torch.tensor([3.0]), transform=lambda _: program)
    for attempt in (f, program):
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            attempt(torch.tensor([-3.0]))


@pytest.mark.parametrize("remove", REMOVES)
def test_decision_about_the_larger_of_two_numbers_in_a_method_of_a_tensor(remove: str) -> None:
    def f(x: Tensor) -> Any:
        found = x.nonzero().unflatten(1, (1, 2))
        found.index_put_((torch.tensor([2, 0, 2]),), torch.tensor(3), True)
        found[:6:2] = 3
        return x, found

    program = capture(f, (torch.tensor([[-5.0, 2, -2, 5, 1, -3]]),), remove=remove)
    for x in ([[1.0, 2, 3, 4, 5, 6]], [[6.0, -5, 4, -3, 2, -1]]):
        assert_equivalent(f, torch.tensor(x), transform=lambda _: program)


@pytest.mark.parametrize("remove", REMOVES)
def test_a_size_that_can_be_nothing_but_one_is_expanded(remove: str) -> None:
    """Torch had fallen back to another answer before the range of the size told."""

    def f(x: Tensor) -> Any:
        found = x.nonzero()  # one row at most
        squares = torch.mul(found, found, out=torch.empty(0, dtype=torch.int64))
        return found.narrow(-2, 1, 0), squares.expand((3, 0))

    x = torch.tensor(3)
    for ours, eager in zip(capture(f, (x,), remove=remove)(x), f(x), strict=True):
        assert ours.shape == eager.shape


@pytest.mark.parametrize("remove", REMOVES)
def test_interpolation_of_views_with_symbolic_sizes(remove: str) -> None:
    """Of views that are copied for it, though it stays on a kernel in C++."""

    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.interpolate(x[None][:, :1].expand(-1, 3, -1), size=4)[0]

    program = capture(f, (torch.randn(4, 5),), dynamic_shapes=({1: torch.export.Dim("n", min=2)},), remove=remove)
    x = torch.randn(4, 7)
    torch.testing.assert_close(program(x), f(x))


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_data_dependent_size_is_expanded_when_the_graph_is_run(mode: str, remove: str) -> None:
    """Torch takes it for the size that is asked for, which the view has then already."""

    def f(x: Tensor) -> Any:
        found = x[x > 0]
        repeated = found.expand(3)
        doubled = repeated * 2
        found.mul_(5)
        return repeated, doubled

    graph = trace(f, torch.tensor([1.0, -1, -1]), mode=mode, remove=remove)
    for numbers in ([1.0, -1, -1], [1.0, 2, 3]):
        for ours, eager in zip(graph(torch.tensor(numbers)), f(torch.tensor(numbers)), strict=True):
            assert ours.tolist() == eager.tolist()


_SCATTERED = [[[1.0, 1], [1, 1]], [[0.0, 1], [1, 1]], [[0.0, 0], [0, 1]]]  # 4, 3 and 1 nonzero positions


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("example", _SCATTERED[::2])
@pytest.mark.parametrize("name", ["contiguous", "flatten", "is_contiguous", "ravel", "reshape"])
def test_one_data_dependent_position_in_every_way(name: str, example: Any, remove: str) -> None:
    """What is reshaped is a copy of several positions, which lie side by side, and a view of one."""

    def f(x: Tensor) -> Any:
        positions = x.nonzero()
        got = getattr(positions, name)(*([-1] if name == "reshape" else []))
        if isinstance(got, Tensor):
            got.add_(10)
        return positions, got

    program = capture(f, (torch.tensor(example),), on_guard_failure="recapture", remove=remove)
    for values in _SCATTERED:
        (ours, got), (eager, expected) = program(torch.tensor(values)), f(torch.tensor(values))
        torch.testing.assert_close(ours, eager)
        if name == "is_contiguous":
            assert got is expected
        else:
            torch.testing.assert_close(got, expected, check_stride=True)
            shares = got.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()
            assert shares == (len(expected.reshape(-1, 2)) == 1)


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_what_may_share_memory_with_a_written_copy_is_checked_when_the_graph_is_run(mode: str, remove: str) -> None:
    def f(x: Tensor) -> Any:
        positions = x.nonzero()
        return positions, positions.flatten()

    def g(x: Tensor) -> Any:
        positions, flat = f(x)
        flat.add_(5)
        flat.add_(5)
        return positions, flat

    x, one = torch.tensor(_SCATTERED[0]), torch.tensor(_SCATTERED[-1])
    torch.testing.assert_close(trace(f, x, mode=mode, remove=remove)(one), f(one))
    graph = trace(g, x, mode=mode, remove=remove)
    torch.testing.assert_close(graph(x), g(x))
    with pytest.raises(RuntimeError, match="data-dependent size is 1"):
        graph(one)
    checks = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    assert len(checks) == 1


def test_tensors_are_sizes_of_padding() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, (x[0] * 2).long()))  # type: ignore[arg-type]  # eager takes a number's tensor

    captured = capture(run, (torch.ones(3),))
    for x in (torch.ones(3), torch.tensor([2.0, 1, 1]), torch.tensor([0.0, 1, 1])):
        torch.testing.assert_close(captured(x), run(x))


@pytest.mark.parametrize("remove", REMOVES)
def test_a_part_of_what_the_data_give_tells_not_how_long_that_is(remove: str) -> None:
    """Half of it, rounded up, is all of it for one element and for two."""

    def run(x: Tensor) -> Tensor:
        return x.nonzero().tensor_split(2, 0)[0]

    program = capture(run, (torch.ones(2, 3),), remove=remove)
    for count in range(7):
        x = (torch.arange(6) < count).float().view(2, 3)
        assert torch.equal(program(x), run(x))
        pairs = zip(run(x).shape, program(x).stride(), run(x).stride(), strict=True)
        assert all(got == want for size, got, want in pairs if size > 1)
