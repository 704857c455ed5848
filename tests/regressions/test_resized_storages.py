"""Programs that resize: `resize_`, and an `out=` that is too small; what the storage holds then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture, functionalize
from functionalize.errors import (
    InputMismatchError,
    UnsupportedMutationError,
)
from functionalize.verify import assert_equivalent
from functionalize.verify.observation import differences, observe
from tests.support.equality import in_every_way
from tests.support.graphs import MODES, REMOVES, trace

MEMORY = torch.arange(24.0)
SPAN = torch.arange(6.0)
Program = Callable[..., Any]


@pytest.mark.parametrize("remove", REMOVES)
def test_out_is_resized_to_the_strides_that_eager_gives_it(remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        a.t_()
        return torch.mul(a, a, out=torch.empty(0))

    assert_equivalent(f, torch.ones(2, 3), remove=remove)
    assert functionalize(f, remove=remove)(torch.ones(2, 3)).stride() == (1, 3)


@in_every_way
def test_resize_past_the_end_of_a_storage_keeps_what_it_holds(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        a.resize_(5)
        a[3:].fill_(1)
        return a

    assert_equivalent(f, torch.arange(4.0)[1:3], remove=remove, tracing_mode=mode)


@in_every_way
def test_out_that_outgrows_the_storage_of_an_input(mode: Any, remove: str) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        torch.add(b, 2, out=a.chunk(1)[0])
        return a

    with pytest.warns(UserWarning, match="was resized"):
        assert_equivalent(f, torch.zeros(1), torch.zeros(2), remove=remove, tracing_mode=mode)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@in_every_way
def test_out_that_moves_an_input_which_others_are_addressed_through(mode: Any, remove: str) -> None:
    def f(a: Tensor, b: Tensor, c: Tensor) -> None:
        torch.sum(c, -2, out=a)

    memory = torch.arange(12.0)
    inputs = (memory.as_strided((6, 2), (1, 6)), memory[:4:2], torch.ones(1, 2))
    assert_equivalent(f, *inputs, remove=remove, tracing_mode=mode)


@in_every_way
def test_empty_diagonal_that_is_resized(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> None:
        torch.add(a.diagonal(-1, 0, 1), 2, out=a.diagonal(1, 0, 1))

    assert_equivalent(f, torch.ones(2, 1), remove=remove, tracing_mode=mode)


@in_every_way
def test_resize_of_an_input_that_shows_part_of_its_storage(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        a.resize_(13)
        a[12:].fill_(1)
        return a

    def part() -> Tensor:
        return torch.empty(0).set_(torch.arange(12.0).untyped_storage(), 0, (2,), (1,))

    if mode == "symbolic":  # how large the storage is when the graph is run, no symbol says
        with pytest.raises(UnsupportedMutationError, match="in a storage that is larger than the tensor"):
            trace(f, part(), remove=remove, mode=mode)
    else:
        assert_equivalent(f, part(), remove=remove, tracing_mode=mode)


@in_every_way
def test_resize_of_an_input_that_was_moved_in_its_storage(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> None:
        a.as_strided_((3, 1), (1, 1), 1)
        a.resize_(2, 2, 2)
        a.view(-1)[7:].fill_(-2)

    assert_equivalent(f, torch.arange(8.0), remove=remove, tracing_mode=mode)


@in_every_way
def test_data_after_a_resize(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        b = a + 1
        b.resize_(5)
        b[4:].fill_(-2)
        b.data = b
        return b

    assert_equivalent(f, torch.arange(4.0).view(2, 2), remove=remove, tracing_mode=mode)


@in_every_way
def test_out_that_is_resized_into_what_is_read(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        one, two = a.chunk(2, 1)
        return torch.clamp(one, -1, 2, out=two)

    if mode is None:  # eager's kernel runs on the memory itself
        with pytest.warns(UserWarning, match="was resized"):
            assert_equivalent(f, torch.arange(12.0).view(4, 3), remove=remove)
        return
    with (
        pytest.raises(UnsupportedMutationError, match="into memory that it reads or writes"),
        pytest.warns(UserWarning, match="was resized"),
    ):
        trace(f, torch.ones(4, 3), remove=remove, mode=mode)


@in_every_way
def test_resize_of_a_detached_input(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> None:
        a.detach_()
        torch.stack([torch.ones(2, 2)] * 2, out=a)

    inputs = torch.ones(2, 2, requires_grad=True)
    with pytest.warns(UserWarning, match="was resized"), torch.no_grad():
        assert_equivalent(f, inputs, remove=remove, tracing_mode=mode)


@in_every_way
def test_resized_out_has_the_strides_that_eager_gives(mode: Any, remove: str) -> None:
    def f(x: Tensor) -> Any:
        product, (values, places) = torch.empty(0), (torch.empty(0), torch.empty(0, dtype=torch.long))
        torch.mul(x.t(), 2, out=product)
        torch.sort(x.t(), dim=0, out=(values, places))
        return product, values, places, [int(n) for out in (product, values, places) for n in out.stride()]

    assert_equivalent(f, torch.arange(12.0).view(3, 4), remove=remove, tracing_mode=mode)


@in_every_way
def test_out_of_a_size_that_a_guard_has_pinned(mode: Any, remove: str) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.resize_as_(a)
        return torch.mul(torch.ones(()), 2, out=b.reshape(3, 4, 2))

    with pytest.warns(UserWarning, match="was resized"):
        assert_equivalent(f, torch.ones(4), torch.ones(6, 4), remove=remove, tracing_mode=mode)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@in_every_way
def test_a_computed_input_that_an_out_makes_grow_keeps_its_offset(mode: Any, remove: str) -> None:
    def f(a: Tensor, b: Tensor) -> None:
        torch.eq(b, 2, out=a)

    def inputs() -> tuple[Tensor, ...]:
        memory = torch.arange(9.0) * torch.ones(9, requires_grad=True)
        return memory.as_strided((1, 3), (2, 2), 1), torch.arange(12.0)

    run = functionalize(f, remove=remove)
    if mode is not None:
        run = torch.no_grad()(trace(f, *inputs(), remove=remove, mode=mode))
    a, b = inputs()
    run(a, b)
    assert (a.storage_offset(), a.stride(), a.untyped_storage().nbytes()) == (1, (1,), 52)
    assert torch.equal(a, (b == 2).float())


@pytest.mark.parametrize("name", ["ne_", "pow_", "atan2_", "copysign_", "heaviside_", "mul_"])
@pytest.mark.filterwarnings("error")
def test_no_write_in_place_gives_another_size(name: str) -> None:
    """Fake kernels of some resize what they write."""

    def run(x: Tensor) -> None:
        getattr(x, name)(torch.ones(1, 9))

    attempts: list[Any] = [run, functionalize(run), lambda x: capture(run, (x,))]
    for attempt in [*attempts, *(lambda x, mode=mode: trace(run, x, mode=mode) for mode in MODES)]:
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            attempt(torch.ones(9, 1))


@pytest.mark.parametrize("remove", REMOVES)
def test_out_of_a_data_dependent_size_beyond_what_an_input_shows(remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        chosen = x[x > 0]
        torch.sub(chosen, 2, out=x.split([3, 0], 1)[1])
        return chosen

    x = torch.arange(24.0)[7:].as_strided((1, 3), (6, 2))
    with pytest.raises(UnsupportedMutationError, match="unknown while the program is traced"):
        capture(f, (x,), remove=remove)(x)


@pytest.mark.parametrize("remove", REMOVES)
def test_storage_that_grows_to_no_whole_number_of_the_elements_of_another_input(remove: str) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        y.resize_((1, 40))
        y.view(-1)[37:].fill_(2)
        x[..., 1] = 0.5
        x.div_(2)
        return y

    def inputs() -> tuple[Tensor, Tensor]:
        memory = torch.arange(24.0)
        numbers = torch.empty(0, dtype=torch.int16)
        return memory[6::2][:4], numbers.set_(memory.untyped_storage(), 11, (2, 14), (14, 1))

    assert_equivalent(f, *inputs(), transform=lambda f: capture(f, inputs(), remove=remove))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_that_has_a_shared_storage_grow_to_a_data_dependent_size_is_refused() -> None:
    def f(x: Tensor) -> Any:
        found = x.nonzero()
        first, second = x.t().vsplit(2)
        torch.stack([found, found], out=first)
        return second, found

    x = torch.tensor([[1, 2, 3, 4]], dtype=torch.int16)
    with pytest.raises(UnsupportedMutationError, match="beyond the 8 bytes that it shares"):
        capture(f, (x,))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_that_shares_a_storage_and_keeps_within_at_a_data_dependent_size() -> None:
    def f(x: Tensor, out: Tensor) -> Tensor:
        torch.masked_select(x, x > 0, out=out[:3])
        return out + 1

    given = [(torch.arange(5.0) - 2, torch.zeros(5)) for _ in range(2)]
    torch.testing.assert_close(capture(f, given[0])(*given[0]), f(*given[1]))
    torch.testing.assert_close(given[0], given[1])


@pytest.mark.parametrize("remove", REMOVES)
def test_out_that_is_an_argument_and_too_small_is_the_error_of_eager(remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.sub(x, torch.arange(9), out=x)

    x = torch.ones(1, dtype=torch.int64)
    for run in (f, lambda x: capture(f, (x,), remove=remove)):
        with pytest.raises(RuntimeError, match=r"output with shape \[1\] doesn't match the broadcast shape \[9\]"):
            run(x)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_a_computed_input_that_grows_keeps_its_place_in_its_storage(remove: str) -> None:
    """No write of autograd's: what has no gradient may be written into a tensor that requires some."""

    def program(x: Tensor, y: Tensor) -> None:
        torch.eq(y, 2, out=x)

    def at(offset: int) -> tuple[Tensor, ...]:
        memory = MEMORY[:9].clone().mul_(torch.ones(9, requires_grad=True))
        return memory.as_strided((1, 3), (2, 2), offset), torch.arange(12.0), memory

    captured = capture(program, at(1)[:2], remove=remove)
    for offset in (0, 1, 2):
        (x, y, memory), (wanted, *_) = at(offset), at(offset)
        captured(x, y)
        program(wanted, y)
        assert torch.equal(x, wanted)
        assert (x.storage_offset(), x.stride()) == (wanted.storage_offset(), wanted.stride())
        assert x.untyped_storage().nbytes() == memory.untyped_storage().nbytes() == 4 * (12 + offset)


@pytest.mark.slow
def test_a_resize_of_what_the_data_give_a_size_is_refused() -> None:
    """What the storage gained, and what is in it, would depend on the data."""

    def resized(x: Tensor) -> Tensor:
        found = x[x > 0]
        return found.resize_(4, 3)

    def resized_by_an_out(x: Tensor) -> Any:
        places = x.nonzero()
        return torch.min(x, -1, out=(x.flip(1), places))

    with pytest.raises(UnsupportedMutationError, match=r"in a resized storage, which held a tensor of size \(u\d"):
        capture(resized, (MEMORY,))
    with pytest.raises(UnsupportedMutationError, match=r"in a resized storage, which held a tensor of size \(u\d"):
        capture(resized_by_an_out, (MEMORY.view(4, 6),))
    assert capture(lambda x: x[x > 0].resize_(0), (MEMORY,))(MEMORY).shape == (0,)


def test_what_ends_a_program_is_not_cast() -> None:
    """Autocast of the CPU knows no float16: the storage that has grown is put together without it."""

    def run(x: Tensor) -> None:
        x.resize_(14)
        x[8:].fill_(0)

    x, other = (torch.arange(9, dtype=torch.float16)[1:7] for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        capture(run, (x,))(x)
    run(other)
    assert torch.equal(x, other)


@pytest.mark.parametrize("op", [torch.abs, torch.angle])
def test_a_resized_out_of_a_real_part_is_contiguous(op: Any) -> None:
    def run(x: Tensor, out: Tensor) -> None:
        op(x, out=out)

    for x in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.complex64)):
        outs = [torch.empty(0) for _ in range(3)]
        run(x.t(), outs[0])
        capture(run, (x.t(), outs[1]))(x.t(), outs[2])
        assert outs[2].stride() == outs[0].stride()


def test_a_resized_input_has_a_storage_as_large_as_that_of_the_capture() -> None:
    """A larger one holds what the input gains, a smaller one does not hold what the graph reads."""

    def run(x: Tensor) -> Tensor:
        x.resize_(4)
        x[2:].add_(1)
        return x * 2

    program, memory = capture(run, (torch.ones(2),), on_guard_failure="recapture"), torch.arange(8.0)
    assert torch.equal(program(memory[:2]), torch.tensor([0.0, 2, 6, 8]))
    with pytest.raises(InputMismatchError, match="the storage size in bytes of the input `x` is 32, and was 8 when"):
        capture(run, (torch.ones(2),))(memory[:2])


def test_an_input_moves_to_what_another_one_has_gained() -> None:
    def run(x: Any, y: Tensor) -> None:
        y.resize_(18)
        y[12:].fill_(1)
        x.set_(y.untyped_storage(), 3, (4,), (3,))

    program = capture(run, (torch.zeros(()), torch.arange(12.0)))
    x, y = torch.zeros(()), torch.arange(12.0)
    program(x, y)
    assert x.tolist() == [3, 6, 9, 1]
    assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def grows_what_it_was_given(x: Tensor, y: Tensor) -> None:
    y.data = x.data
    y.resize_((1, 2, 5)).view(-1)[2:].fill_(-2)


def is_set_to_what_has_grown(x: Tensor, y: Tensor) -> Tensor:
    first, _, last = y.chunk(3, -1)
    torch.cat([x, x], 0, out=last)
    x.set_(last)  # type: ignore[call-overload]
    return first * 1


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("program", [grows_what_it_was_given, is_set_to_what_has_grown])
def test_an_input_is_set_to_memory_that_another_one_gains(program: Program) -> None:
    def inputs() -> list[Tensor]:
        return [torch.arange(2.0), torch.arange(7.0)]

    captured = capture(program, tuple(inputs()))
    seen = observe(program, inputs()), observe(captured, inputs())
    assert not list(differences(*seen, strides=True, aliasing=True, rtol=None, atol=None))


def test_an_out_that_leaves_its_views_behind_is_refused_with_gradients() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        windows = x.unfold(0, 2, 3)
        torch.eq(torch.arange(1), 2, out=x)
        return windows.unbind(0)

    with pytest.warns(UserWarning, match="was resized"), pytest.raises(UnsupportedMutationError, match="views"):
        capture(run, (SPAN * torch.ones(6, requires_grad=True),))
    with pytest.warns(UserWarning, match="was resized"):
        results = capture(run, (SPAN,))(SPAN.clone())
    with pytest.warns(UserWarning, match="was resized"):
        expected = run(SPAN.clone())
    assert all(map(torch.equal, results, expected))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("remove", REMOVES)
def test_an_input_outgrows_its_storage_where_the_data_say_so(remove: str) -> None:
    def run(x: Tensor) -> None:
        found = x.nonzero()
        torch.stack([found, found], out=x)

    program = capture(run, (torch.tensor([1.0, 2, 0]),), remove=remove)
    for values in ([1.0, 2, 0], [1.0, 2, 3], [0.0, 0, 1]):
        want, got = torch.tensor(values), torch.tensor(values)
        run(want)
        program(got)
        assert torch.equal(want, got) and want.stride() == got.stride()
        assert want.untyped_storage().nbytes() == got.untyped_storage().nbytes()


@pytest.mark.filterwarnings("ignore:An output with one or more elements:UserWarning")
def test_a_storage_that_grows_grows_from_where_an_input_begins() -> None:
    def run(x: Tensor, y: Tensor) -> Any:
        view = y.unsqueeze(0)
        torch.cumsum(x, 0, out=view)
        return view

    def placed(offset: int) -> tuple[Tensor, Tensor]:
        return torch.arange(4), torch.zeros(4, dtype=torch.int64).as_strided((1, 1), (2, 2), offset)

    program = capture(run, placed(1), on_guard_failure="recapture")
    for offset in (1, 3, 2):
        want, got = run(*placed(offset)), program(*placed(offset))
        assert torch.equal(want, got)
        assert want.untyped_storage().nbytes() == got.untyped_storage().nbytes() == 8 * (offset + 4)
