"""Inputs that get other memory or metadata: `set_`, `data`, `t_`, `as_strided_`; where they begin afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize.errors import UnsupportedMutationError
from functionalize.verify import assert_equivalent, assert_functional
from functionalize.verify.observation import clone_inputs, differences, observe
from tests.support.equality import in_every_way
from tests.support.graphs import REMOVES

MEMORY = torch.arange(24.0)
SPAN = torch.arange(6.0)
Program = Callable[..., Any]


@in_every_way
def test_sizes_are_read_before_the_input_gets_others(mode: Any, remove: str) -> None:
    def f(a: Any) -> None:
        a.set_(a.clone())

    assert_equivalent(f, torch.ones(4, 3), remove=remove, tracing_mode=mode)


@in_every_way
def test_write_back_to_an_input_that_becomes_expanded(mode: Any, remove: str) -> None:
    def f(a: Any) -> None:
        expanded = a.broadcast_to((1, 2, 2, 3))
        a.tril_()
        a.set_(expanded)

    assert_equivalent(f, torch.ones(1, 1), remove=remove, tracing_mode=mode)


@in_every_way
def test_data_of_an_input_that_requires_grad(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        a.data = a.detach().t().clone()
        return a.detach() * 2

    assert_equivalent(f, torch.ones(2, 3, requires_grad=True), remove=remove, tracing_mode=mode)


@in_every_way
def test_set_to_an_input_that_is_written_and_returned(mode: Any, remove: str) -> None:
    def f(a: Tensor, b: Any) -> Tensor:
        b.set_(a)
        return a.mul_(2)

    assert_equivalent(f, torch.arange(3.0)[::2], torch.ones(()), remove=remove, tracing_mode=mode)


@in_every_way
def test_set_to_an_input_whose_metadata_change_later(mode: Any, remove: str) -> None:
    def f(a: Tensor, b: Any) -> None:
        b.set_(a)
        a.squeeze_((0, 1))

    assert_equivalent(f, torch.ones(1, 1), torch.ones(()), remove=remove, tracing_mode=mode)


@in_every_way
def test_a_storage_read_after_the_input_that_others_are_addressed_through_has_left_it(mode: Any, remove: str) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        b.set_()  # type: ignore[call-overload]
        return a.as_strided((3,), (3,), 0)

    memory = torch.arange(8.0, dtype=torch.float64)
    inputs = (memory.as_strided((2,), (2,), 1), memory.view(torch.int64).as_strided((3, 1), (2, 6), 1))
    assert_equivalent(f, *inputs, remove=remove, tracing_mode=mode)


def test_set_to_a_storage_that_it_outgrows() -> None:
    def f(x: Tensor) -> Tensor:
        view = x.view(2)
        view.neg_()
        view.set_(x.untyped_storage(), 11, (1,), (1,))
        return x.add(1)

    def inputs(room: int) -> Tensor:
        return torch.arange(float(room))[5:7]

    program = capture(f, (inputs(12),), on_guard_failure="recapture")
    for room in (12, 7):
        assert_equivalent(f, inputs(room), transform=lambda _: program)
        x = inputs(room)
        assert torch.equal(program(x), torch.tensor([-4.0, -5.0]))


def test_versions_of_what_lies_in_a_storage_that_another_input_moves_to_and_writes() -> None:
    def f(x: Any, y: Tensor) -> None:
        y.t_()
        x.set_(y.untyped_storage(), 8, (1,))
        x.fill_(3)

    made = [(torch.empty(0), torch.arange(9.0)[:2]) for _ in range(2)]
    capture(f, made[0])(*made[0])
    f(*made[1])
    assert [one._version for one in made[0]] == [one._version for one in made[1]]


@pytest.mark.parametrize("remove", REMOVES)
def test_set_that_keeps_size_and_strides_beyond_the_storage_is_the_error_of_eager(remove: str) -> None:
    def f(x: Any, offset: int, stride: int) -> Tensor:
        x.set_(x.untyped_storage(), offset, (2,), (stride,))
        return x[:1] + 1  # type: ignore[no-any-return]

    def inputs() -> Tensor:
        return torch.arange(3)[1:]

    for run in (f, lambda x, *place: capture(f, (x, *place), remove=remove)(x, *place)):
        with pytest.raises(
            RuntimeError, match="requiring a storage size of 32 are out of bounds for storage of size 24"
        ):
            run(inputs(), 2, 1)
        torch.testing.assert_close(run(inputs(), 2, 2), torch.tensor([3]))  # grows
        torch.testing.assert_close(run(inputs(), 0, 1), torch.tensor([1]))


def test_set_to_the_storage_of_an_input_of_another_dtype() -> None:
    def f(x: Tensor, y: Any) -> Any:
        y.set_(x[0].untyped_storage())
        x[2].fill_(-2)
        return y, x

    given = [(torch.arange(12.0).view(4, 3).t(), torch.zeros(4, 3, dtype=torch.complex64).t()) for _ in range(2)]
    ours, eager = capture(f, given[0])(*given[0]), f(*given[1])
    torch.testing.assert_close(ours, eager)
    assert [one.untyped_storage().nbytes() for one in given[0]] == [48, 48]
    assert given[0][0].untyped_storage().data_ptr() == given[0][1].untyped_storage().data_ptr()


@pytest.mark.parametrize("remove", REMOVES)
def test_copy_in_a_storage_that_an_input_takes_of_a_part_that_is_written_afterwards(remove: str) -> None:
    def f(x: Any) -> Any:
        other = x * x
        part = x[2:3]
        x.set_(other.untyped_storage(), 3, (3,))
        other[:1].copy_(part)
        part.zero_()
        return other[:1], part

    given = [torch.arange(1.0, 7.0) for _ in range(2)]
    ours, eager = capture(f, (given[0],), remove=remove)(given[0]), f(given[1])
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(given[0], given[1])


@pytest.mark.parametrize("remove", REMOVES)
def test_write_to_memory_that_an_expanded_input_has_left(remove: str) -> None:
    """What it shows now has no elements, so it shows none of them once."""

    def f(x: Tensor) -> Tensor:
        first = x[:1]
        x.data = x[1:].data
        first.fill_(7)
        return first

    def given() -> Tensor:
        return torch.arange(3.0).as_strided((1, 1), (0, 2), 2)

    ours, eager = given(), given()
    assert capture(f, (given(),), remove=remove)(ours).item() == f(eager).item() == 7
    assert ours.untyped_storage().tolist() == eager.untyped_storage().tolist()


def writes_beyond_an_input(x: Tensor) -> Tensor:
    return x.as_strided((7,), (1,), 16).neg_()


def grows_an_input_through_a_view(x: Tensor) -> None:
    view = x.view(3, 1, 2, 1)
    view.resize_(1, 13, 1)
    view.view(-1)[6:].fill_(0)


def writes_to_memory_that_an_input_leaves(x: Tensor) -> Tensor:
    first = x.unbind(0)[0]
    x.div_(2)
    x.as_strided_((1, 2), (2, 1), 5)
    return first


def sets_an_input_to_a_copy_of_itself(x: Tensor) -> tuple[Tensor, Tensor]:
    x.swapaxes_(-1, -2)
    before = x.reshape(4, 1)
    x.set_(x.clone())  # type: ignore[call-overload]
    return x, before


def leaves_a_storage_for_none(x: Tensor) -> None:
    x.mul_(torch.arange(4.0).view(4, 1))
    x.set_()  # type: ignore[call-overload]


def moves_an_input_into_the_memory_of_another(x: Tensor, y: Tensor, z: Tensor) -> None:
    y.index_fill_(0, torch.tensor([1, 2]), -2)
    x.set_(z)  # type: ignore[call-overload]
    y.unsqueeze_(0)


def returns_negated_views_of_a_result(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.mul(x, x, out=torch.empty(0))
    return y, torch._neg_view(y)


def returns_empty_parts_of_one_storage(x: Tensor) -> list[Tensor]:
    return list((x + x).tensor_split([6, 7], 0))[1:]


def returns_views_of_a_data_dependent_size(x: Tensor) -> tuple[Tensor, ...]:
    rows = x.nonzero()
    return (*rows.tensor_split([1], 0), rows.unfold(-2, 1, 1), rows.t())


def views_a_part_of_known_size_of_a_storage_of_unknown(x: Tensor) -> Tensor:
    (x + 1)[:1].unflatten(0, (1,))  # what this looks like is known from here on
    first: Tensor = x[x > 0].split([1, 0], 0)[0].unflatten(0, (1,))
    return first


def returns_a_diagonal_of_a_data_dependent_size(x: Tensor) -> tuple[Tensor, Tensor]:
    places = x.nonzero()
    return places, places.diagonal(1, 1, 0)


def returns_rows_with_data_dependent_strides(x: Tensor) -> tuple[Tensor, ...]:
    return x.nonzero()[-1], x.nonzero()[-1:], (x > 0).nonzero()[:, 1:][0]


def reads_a_conjugate_view(x: Tensor) -> Tensor:
    return torch.complex(x, x).conj().real


def returns_what_requires_grad_only_then(x: Tensor) -> Tensor:
    return x.requires_grad_()


PROGRAMS: list[tuple[Program, tuple[Tensor, ...]]] = [
    (writes_beyond_an_input, (MEMORY.as_strided((), ()),)),
    (grows_an_input_through_a_view, (torch.arange(6.0).view(3, 2),)),
    (writes_to_memory_that_an_input_leaves, (MEMORY.as_strided((2,), (2,), 1),)),
    (sets_an_input_to_a_copy_of_itself, (torch.arange(4.0).view(4, 1),)),
    (leaves_a_storage_for_none, (torch.arange(4.0).view(4, 1),)),
    (moves_an_input_into_the_memory_of_another, (torch.zeros(()), MEMORY[:5], MEMORY[0])),
    (returns_negated_views_of_a_result, (torch.arange(3.0),)),
    (returns_empty_parts_of_one_storage, (torch.ones(6),)),
    (returns_views_of_a_data_dependent_size, (torch.tensor([[1.0, 0], [2, 3]]),)),
    (views_a_part_of_known_size_of_a_storage_of_unknown, (torch.tensor([1.0, -1.0]),)),
    (returns_a_diagonal_of_a_data_dependent_size, (torch.ones(2),)),
    (returns_rows_with_data_dependent_strides, (torch.tensor([[1.0, 0], [2, 3]]),)),
    (reads_a_conjugate_view, (torch.arange(3.0),)),
    (returns_what_requires_grad_only_then, (torch.ones(2),)),
]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize(("program", "inputs"), PROGRAMS, ids=[program.__name__ for program, _ in PROGRAMS])
def test_captured_as_eager_runs_it(program: Program, inputs: tuple[Tensor, ...], remove: str) -> None:
    captured = capture(program, clone_inputs(inputs), remove=remove)
    assert_functional(captured.graph_module, remove)
    want, got = observe(program, clone_inputs(inputs)), observe(captured, clone_inputs(inputs))
    assert want.error is None
    assert not list(differences(want, got, strides=True, aliasing=True, rtol=None, atol=None))


def transposes_in_place(x: Tensor) -> Tensor:
    return x.t_()


def adds_a_dim_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    row = x[0]
    return row, x.unsqueeze_(0)


def shrinks(x: Tensor) -> tuple[Tensor, Tensor]:
    column = x[:, 0]
    x.resize_(2, 1)
    return column, x.mul_(2)


def narrows_and_writes(x: Tensor) -> None:
    x.as_strided_((2, 2), (3, 1)).fill_(7)


def takes_the_data_of_a_part(x: Tensor) -> Tensor:
    x.data = x[1:]
    return x * 2


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize(
    "program", [transposes_in_place, adds_a_dim_in_place, shrinks, narrows_and_writes, takes_the_data_of_a_part]
)
def test_an_input_may_begin_elsewhere_in_its_storage(program: Program, remove: str) -> None:
    """Metadata that a call gives to an input begin where that call's input begins."""

    def at(offset: int) -> tuple[Tensor]:
        return (MEMORY.clone().as_strided((2, 3), (3, 1), offset),)

    captured = capture(program, at(0), remove=remove, on_guard_failure="recapture")
    for offset in (0, 4, 5):
        expected, actual = observe(program, at(offset)), observe(captured, at(offset))
        assert not list(differences(expected, actual, strides=True, aliasing=True, rtol=0, atol=0))
        assert expected.inputs[0].storage_offset() == actual.inputs[0].storage_offset()


def test_metadata_that_a_compiled_program_gives_begin_where_its_input_does() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(adds_a_dim_in_place, backend="functionalize")
    for offset in (0, 4):
        arguments = [MEMORY.clone().as_strided((2, 3), (3, 1), offset) for _ in range(2)]
        expected, actual = observe(adds_a_dim_in_place, arguments[:1]), observe(compiled, arguments[1:])
        assert not list(differences(expected, actual, strides=True, aliasing=True, rtol=0, atol=0))


@pytest.mark.parametrize("place", [(), (2, (1,), (4,))], ids=["a tensor", "a place of it"])
def test_a_tensor_that_requires_gradients_is_set_in_one_write(place: tuple[Any, ...]) -> None:
    def program(x: Any, y: Tensor) -> None:
        x.set_(y, *place)

    def computed() -> Tensor:
        return torch.arange(4.0).mul_(torch.ones(4, requires_grad=True))

    captured, x, wanted = capture(program, (computed(), MEMORY)), computed(), computed()
    captured(x, MEMORY)
    program(wanted, MEMORY)
    assert torch.equal(x, wanted)
    assert x._version == wanted._version == 2


def test_an_input_that_is_set_to_another_one_with_gradients_is_refused() -> None:
    with pytest.raises(UnsupportedMutationError, match="set to the memory of another input"):
        capture(lambda x, y: x.set_(y), (SPAN[2:], SPAN.clone().requires_grad_()))


def set_by_sizes_alone(x: Tensor, size: tuple[int, ...], offset: int) -> Tensor:
    x.set_(x.untyped_storage(), offset, size)  # type: ignore[call-overload]
    return x


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("size", [(3,), (2,), (1, 2)])
def test_set_keeps_the_strides_of_what_keeps_its_size(size: tuple[int, ...], remove: str) -> None:
    eager, mine = SPAN.clone()[::2], SPAN.clone()[::2]
    program = capture(set_by_sizes_alone, (SPAN.clone()[::2], size, 0), remove=remove)
    want, got = set_by_sizes_alone(eager, size, 0), program(mine, size, 0)
    assert want.stride() == got.stride()
    assert torch.equal(want, got)


@pytest.mark.parametrize("remove", REMOVES)
def test_set_to_a_storage_keeps_the_strides_of_what_keeps_its_size(remove: str) -> None:
    def run(x: Tensor) -> Tensor:
        made = x * 2
        x.set_(made.untyped_storage())
        return x

    repeated = torch.arange(1.0).expand(4)
    program = capture(run, (repeated,), remove=remove)
    assert run(torch.ones(1).expand(4)).stride() == program(torch.ones(1).expand(4)).stride() == (0,)
    with pytest.raises(UnsupportedMutationError, match="reach beyond that storage"):
        capture(run, (torch.arange(3.0)[::2],), remove=remove)
