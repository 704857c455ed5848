"""Programs that the fuzzer found to differ from eager, shrunk; each is named after what it shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from functionalize import UnsupportedMutationError, UnsupportedProgramError, capture, functionalize
from functionalize.errors import DataDependentError
from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES, trace

WAYS = [(mode, remove) for mode in (None, *MODES) for remove in REMOVES]
in_every_way = pytest.mark.parametrize(("mode", "remove"), WAYS)


@pytest.mark.parametrize("remove", REMOVES)
def test_foreach_write_to_a_saved_tensor_is_seen_by_autograd(remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        b = a * 2
        c = b * b
        torch._foreach_add_([b], 1)
        return c

    result = functionalize(f, remove=remove)(torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("remove", REMOVES)
def test_out_is_resized_to_the_strides_that_eager_gives_it(remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        a.t_()
        return torch.mul(a, a, out=torch.empty(0))

    assert_equivalent(f, torch.ones(2, 3), remove=remove)
    assert functionalize(f, remove=remove)(torch.ones(2, 3)).stride() == (1, 3)


@in_every_way
def test_resize_past_the_end_of_a_storage_keeps_what_it_holds(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        a.resize_(5)
        a[3:].fill_(1)
        return a

    assert_equivalent(f, torch.arange(4.0)[1:3], remove=remove, tracing_mode=mode)


@in_every_way
def test_out_that_outgrows_the_storage_of_an_input(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.add(b, 2, out=a.chunk(1)[0])
        return a

    with pytest.warns(UserWarning, match="was resized"):
        assert_equivalent(f, torch.zeros(1), torch.zeros(2), remove=remove, tracing_mode=mode)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@in_every_way
def test_out_that_moves_an_input_which_others_are_addressed_through(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        torch.sum(c, -2, out=a)

    memory = torch.arange(12.0)
    inputs = (memory.as_strided((6, 2), (1, 6)), memory[:4:2], torch.ones(1, 2))
    assert_equivalent(f, *inputs, remove=remove, tracing_mode=mode)


@in_every_way
@pytest.mark.parametrize("length", [15, 16, 17, 34])
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x[:, 1].normal_(),
        lambda x: x.t()[:, ::2].normal_(1, 2),
        lambda x: x[:, 1:].t().uniform_(),
        lambda x: x.t()[:, ::2].bernoulli_(0.5),
        lambda x: torch.rand_like(x[::2].t()),
        lambda x: torch.randn_like(x.t()),
    ],
    ids=["normal of a column", "normal of rows", "uniform", "bernoulli", "rand_like", "randn_like"],
)
def test_random_numbers_come_in_the_order_of_memory(draw: Any, length: int, mode: Any, remove: str) -> None:
    assert_equivalent(draw, torch.zeros(length, 2), remove=remove, tracing_mode=mode)


@in_every_way
def test_masked_fill_of_an_expanded_tensor_fills_where_any_position_is_masked(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
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
def test_write_to_a_tensor_whose_size_the_data_decide(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        b = a.nonzero()
        b.masked_fill_(b != 0, 3)
        return b

    assert_equivalent(f, torch.ones(2, 2), remove=remove, tracing_mode=mode)


@in_every_way
def test_as_strided_of_a_tensor_whose_size_the_data_decide(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return a[a > 0].as_strided((3,), (1,), 0)

    assert_equivalent(f, torch.arange(5), remove=remove, tracing_mode=mode)


@in_every_way
def test_write_below_an_expand_whose_place_a_plain_route_passes_through(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> None:
        a.expand((3, 8)).select(0, 0)[7:].copy_(torch.arange(1))

    assert_equivalent(f, torch.arange(8.0).as_strided((1, 8), (1, 1)), remove=remove, tracing_mode=mode)


@in_every_way
def test_sizes_are_read_before_the_input_gets_others(mode: Any, remove: str) -> None:
    def f(a: Any) -> None:
        a.set_(a.clone())

    assert_equivalent(f, torch.ones(4, 3), remove=remove, tracing_mode=mode)


@in_every_way
def test_what_lies_around_an_input_is_read(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        a.t_()
        return a.as_strided((7,), (1,), 3)

    assert_equivalent(f, torch.arange(10.0).as_strided((), ()), remove=remove, tracing_mode=mode)


@in_every_way
def test_write_back_to_an_input_that_becomes_expanded(mode: Any, remove: str) -> None:
    def f(a: Any) -> None:
        expanded = a.broadcast_to((1, 2, 2, 3))
        a.tril_()
        a.set_(expanded)

    assert_equivalent(f, torch.ones(1, 1), remove=remove, tracing_mode=mode)


@in_every_way
def test_write_back_to_an_expanded_input(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        a[:, 1].mul_(3)
        a.t_()
        return a.sum()

    assert_equivalent(f, torch.arange(3.0)[:, None].expand(3, 4), remove=remove, tracing_mode=mode)


@in_every_way
def test_square_of_one_symbol(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        b = a.view(-1)
        b.view(-1).add_(1)
        b.mul_(2)
        a.mul_(2)
        return b

    assert_equivalent(f, torch.ones(2, 2), remove=remove, tracing_mode=mode)


@in_every_way
def test_empty_diagonal_that_is_resized(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> None:
        torch.add(a.diagonal(-1, 0, 1), 2, out=a.diagonal(1, 0, 1))

    assert_equivalent(f, torch.ones(2, 1), remove=remove, tracing_mode=mode)


@in_every_way
def test_data_of_an_input_that_requires_grad(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        a.data = a.detach().t().clone()
        return a.detach() * 2

    assert_equivalent(f, torch.ones(2, 3, requires_grad=True), remove=remove, tracing_mode=mode)


@in_every_way
def test_negative_of_a_negative_view(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        negative = torch._neg_view(a)
        negative.data.neg_()
        return negative

    assert_equivalent(f, torch.arange(3.0), remove=remove, tracing_mode=mode)


@in_every_way
def test_set_to_an_input_that_is_written_and_returned(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor, b: Any) -> torch.Tensor:
        b.set_(a)
        return a.mul_(2)

    assert_equivalent(f, torch.arange(3.0)[::2], torch.ones(()), remove=remove, tracing_mode=mode)


@in_every_way
def test_resize_of_an_input_that_shows_part_of_its_storage(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        a.resize_(13)
        a[12:].fill_(1)
        return a

    def part() -> torch.Tensor:
        return torch.empty(0).set_(torch.arange(12.0).untyped_storage(), 0, (2,), (1,))

    if mode == "symbolic":  # how large the storage is when the graph is run, no symbol says
        with pytest.raises(UnsupportedMutationError, match="in a storage that is larger than the tensor"):
            trace(f, part(), remove=remove, mode=mode)
    else:
        assert_equivalent(f, part(), remove=remove, tracing_mode=mode)


@in_every_way
def test_resize_of_an_input_that_was_moved_in_its_storage(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> None:
        a.as_strided_((3, 1), (1, 1), 1)
        a.resize_(2, 2, 2)
        a.view(-1)[7:].fill_(-2)

    assert_equivalent(f, torch.arange(8.0), remove=remove, tracing_mode=mode)


@in_every_way
def test_data_after_a_resize(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        b = a + 1
        b.resize_(5)
        b[4:].fill_(-2)
        b.data = b
        return b

    assert_equivalent(f, torch.arange(4.0).view(2, 2), remove=remove, tracing_mode=mode)


@in_every_way
def test_foreach_entry_that_reads_what_an_earlier_one_wrote(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> None:
        torch._foreach_mul_([a, b], [b, a])
        torch._foreach_mul_([a[0], b[0]], a[0])

    assert_equivalent(f, torch.arange(1.0, 4.0), torch.arange(2.0, 5.0), remove=remove, tracing_mode=mode)


@pytest.mark.parametrize("remove", REMOVES)
def test_squeeze_of_a_size_that_only_the_data_tell(remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return a[a > 0].squeeze(0)

    graph = trace(f, torch.arange(2.0), remove=remove, mode="symbolic")
    for inputs in (torch.arange(2.0), torch.arange(3.0)):
        torch.testing.assert_close(graph(inputs), f(inputs))


@in_every_way
def test_out_that_is_resized_into_what_is_read(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
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
def test_set_to_an_input_whose_metadata_change_later(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor, b: Any) -> None:
        b.set_(a)
        a.squeeze_((0, 1))

    assert_equivalent(f, torch.ones(1, 1), torch.ones(()), remove=remove, tracing_mode=mode)


def _by_grad(a: torch.Tensor) -> Any:
    return torch.autograd.grad((a * a).sum(), [a])[0]


def _by_backward(a: torch.Tensor) -> Any:
    (a * a).sum().backward()
    return a.grad


def _by_backward_of_a_list(a: torch.Tensor) -> Any:
    torch.autograd.backward([(a * a).sum()])
    return a.grad


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("gradient", [_by_grad, _by_backward, _by_backward_of_a_list])
def test_strides_of_a_gradient_are_those_without_a_mode(gradient: Any, remove: str) -> None:
    inputs = torch.ones(2).as_strided((1, 2), (1, 1)).requires_grad_()
    assert gradient(inputs.detach().requires_grad_()).stride() == (1, 1)
    assert_equivalent(gradient, inputs.detach().requires_grad_(), remove=remove, strides=True)


@pytest.mark.parametrize("remove", REMOVES)
def test_writes_in_a_backward_pass(remove: str) -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            ctx.total = total
            return a * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            ctx.total.view(-1)[1:].add_(gradient.sum())
            ctx.total.t_()
            return gradient.clone().mul_(2), None

    def f(a: torch.Tensor, total: torch.Tensor) -> Any:
        doubled: Any = Doubles.apply(a, total)  # type: ignore[no-untyped-call]
        gradient = torch.autograd.grad(doubled.sum(), [a])[0]
        total[0].mul_(3)
        return gradient, total.sum()

    assert_equivalent(f, torch.ones(3, requires_grad=True), torch.zeros(2, 3), remove=remove, strides=True)


@in_every_way
def test_resize_of_a_detached_input(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> None:
        a.detach_()
        torch.stack([torch.ones(2, 2)] * 2, out=a)

    inputs = torch.ones(2, 2, requires_grad=True)
    with pytest.warns(UserWarning, match="was resized"), torch.no_grad():
        assert_equivalent(f, inputs, remove=remove, tracing_mode=mode)


@in_every_way
def test_write_to_one_element_that_is_read(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> None:
        one = a.squeeze(-2)
        one.mul_(a.contiguous().view(-1))

    inputs = torch.full((2,), 3.0).as_strided((1, 1), (2, 2))
    assert_equivalent(f, inputs, remove=remove, tracing_mode=mode)


@in_every_way
def test_second_write_to_a_view_comes_after_those_in_between(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> None:
        b = a[::2].unsqueeze(0)
        b.add_(1)
        b.fill_diagonal_(1)
        b.fill_(0.5)

    assert_equivalent(f, torch.arange(7.0), remove=remove, tracing_mode=mode)


@in_every_way
def test_foreach_entry_that_reads_beside_what_it_writes(mode: Any, remove: str) -> None:
    def f(x: torch.Tensor) -> None:
        torch._foreach_copy_([x[1]], [x[0]])
        torch._foreach_add_([x[:, 1]], [x[:, 0]])
        torch._foreach_addcmul_([x[0], x[1]], [x[1], x[2]], [x[2], x[0]], 2.0)

    assert_equivalent(f, torch.arange(12.0).view(3, 4), remove=remove, tracing_mode=mode)


@in_every_way
def test_resized_out_has_the_strides_that_eager_gives(mode: Any, remove: str) -> None:
    def f(x: torch.Tensor) -> Any:
        product, (values, places) = torch.empty(0), (torch.empty(0), torch.empty(0, dtype=torch.long))
        torch.mul(x.t(), 2, out=product)
        torch.sort(x.t(), dim=0, out=(values, places))
        return product, values, places, [int(n) for out in (product, values, places) for n in out.stride()]

    assert_equivalent(f, torch.arange(12.0).view(3, 4), remove=remove, tracing_mode=mode)


@in_every_way
def test_empty_tensor_viewed_as_a_wider_dtype(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        empty: torch.Tensor = a.repeat_interleave(2, 1).split([0, 2], 1)[0]
        return empty.view(torch.float32)

    assert_equivalent(f, torch.ones(7, 1, dtype=torch.float16), remove=remove, tracing_mode=mode)


@in_every_way
def test_view_that_only_fake_tensors_allow(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> None:
        b = a.view(2, 1, 3, 1).permute(1, 2, 0, 3)
        b.scatter_(0, torch.zeros(1, 3, 2, 1, dtype=torch.int64), -2)

    assert_equivalent(f, torch.arange(6.0), remove=remove, tracing_mode=mode)


@in_every_way
def test_data_of_another_shape_in_autograd(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor) -> torch.Tensor | None:
        b = a.detach().requires_grad_()
        b.data = b.t()
        (b.sin() * 3).sum().backward()
        return b.grad

    assert_equivalent(f, torch.ones(1, 2), remove=remove, tracing_mode=mode)


@in_every_way
def test_out_of_a_size_that_a_guard_has_pinned(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.resize_as_(a)
        return torch.mul(torch.ones(()), 2, out=b.reshape(3, 4, 2))

    with pytest.warns(UserWarning, match="was resized"):
        assert_equivalent(f, torch.ones(4), torch.ones(6, 4), remove=remove, tracing_mode=mode)


@in_every_way
@pytest.mark.parametrize("part", [slice(None), slice(1, None), 0])
def test_copy_of_an_input_that_is_written_afterwards(part: Any, mode: Any, remove: str) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> None:
        b.detach().copy_(a[part])
        a.index_fill_(0, torch.tensor([0]), -2)

    a = torch.arange(6.0).view(3, 2)
    assert_equivalent(f, a, torch.zeros_like(a[part]), remove=remove, tracing_mode=mode)


@in_every_way
def test_an_input_that_starts_late_in_its_storage_traced_twice(mode: Any, remove: str) -> None:
    """Fake tensors forget, from the second time on, that a scatter keeps the storage offset of its base."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a[:17:2] *= 0
        return a

    memory = torch.arange(24.0)
    inputs = (memory.as_strided((17, 1), (1, 1), 1), memory.as_strided((11, 1), (1, 1), 5))
    for _ in range(2):
        assert_equivalent(f, *inputs, remove=remove, tracing_mode=mode)


@in_every_way
def test_a_storage_read_after_the_input_that_others_are_addressed_through_has_left_it(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.set_()  # type: ignore[call-overload]
        return a.as_strided((3,), (3,), 0)

    memory = torch.arange(8.0, dtype=torch.float64)
    inputs = (memory.as_strided((2,), (2,), 1), memory.view(torch.int64).as_strided((3, 1), (2, 6), 1))
    assert_equivalent(f, *inputs, remove=remove, tracing_mode=mode)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@in_every_way
def test_a_computed_input_that_an_out_makes_grow_keeps_its_offset(mode: Any, remove: str) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> None:
        torch.eq(b, 2, out=a)

    def inputs() -> tuple[torch.Tensor, ...]:
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

    def run(x: torch.Tensor) -> None:
        getattr(x, name)(torch.ones(1, 9))

    attempts: list[Any] = [run, functionalize(run), lambda x: capture(run, (x,))]
    for attempt in [*attempts, *(lambda x, mode=mode: trace(run, x, mode=mode) for mode in MODES)]:
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            attempt(torch.ones(9, 1))


@pytest.mark.parametrize("remove", REMOVES)
def test_part_beyond_what_an_empty_storage_held_before_it_got_a_size_that_the_data_tell(remove: str) -> None:
    def f(x: torch.Tensor) -> Any:
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
def test_write_in_place_of_a_size_that_the_data_tell(remove: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x -= x[x > 0]
        return x

    program = capture(f, (torch.tensor([2.0]),), remove=remove)
    assert_equivalent(f, torch.tensor([3.0]), transform=lambda _: program)
    for attempt in (f, program):
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            attempt(torch.tensor([-3.0]))


@pytest.mark.parametrize("remove", REMOVES)
def test_decision_about_the_larger_of_two_numbers_in_a_method_of_a_tensor(remove: str) -> None:
    def f(x: torch.Tensor) -> Any:
        found = x.nonzero().unflatten(1, (1, 2))
        found.index_put_((torch.tensor([2, 0, 2]),), torch.tensor(3), True)
        found[:6:2] = 3
        return x, found

    program = capture(f, (torch.tensor([[-5.0, 2, -2, 5, 1, -3]]),), remove=remove)
    for x in ([[1.0, 2, 3, 4, 5, 6]], [[6.0, -5, 4, -3, 2, -1]]):
        assert_equivalent(f, torch.tensor(x), transform=lambda _: program)


@pytest.mark.parametrize("remove", REMOVES)
def test_view_of_what_data_were_before_a_backward_inside_requires_gradients(remove: str) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.expand(2, 4)
        x.data = x + 1
        rows.sum().backward()
        return rows, x

    x = torch.arange(4.0).requires_grad_()
    rows, same = capture(f, (torch.arange(4.0).requires_grad_(),), remove=remove)(x)
    assert rows.requires_grad
    assert same is x
    assert torch.equal(rows.detach(), torch.arange(4.0).expand(2, 4))
    assert x.grad is not None and torch.equal(x.grad, torch.full((4,), 2.0))
    try:
        rows.sum().backward()
    except RuntimeError as error:
        assert "that itself calls backward" in str(error)
    else:
        assert torch.equal(x.grad, torch.full((4,), 4.0))


def test_backward_inside_to_a_leaf_of_another_shape() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.data = x.t()
        (x * 3).sum().backward()
        return x.detach()

    def leaf() -> torch.Tensor:
        return torch.arange(2.0).view(2, 1).requires_grad_()

    program, x = capture(f, (leaf(),)), leaf()
    assert_equivalent(f, leaf(), transform=lambda _: program)
    program(x)
    assert x.grad is not None and torch.equal(x.grad, torch.full((1, 2), 3.0))


@pytest.mark.parametrize("remove", REMOVES)
def test_out_of_a_size_that_the_data_tell_beyond_what_an_input_shows(remove: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        chosen = x[x > 0]
        torch.sub(chosen, 2, out=x.split([3, 0], 1)[1])
        return chosen

    x = torch.arange(24.0)[7:].as_strided((1, 3), (6, 2))
    with pytest.raises(UnsupportedMutationError, match="unknown while the program is traced"):
        capture(f, (x,), remove=remove)(x)


def test_input_that_becomes_an_inference_tensor_and_goes_back_to_its_storage() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.data = x + 1
        x.set_(y)  # type: ignore[call-overload]
        return x.add_(1)

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.arange(12.0)
        return memory[:4], memory[4:8]

    program = capture(f, inputs(), on_guard_failure="recapture")
    for mode in (torch.no_grad, torch.inference_mode):
        (x, y), (same, other) = inputs(), inputs()
        with mode():
            f(x, y)
            program(same, other)
        assert (same.is_inference(), other.is_inference()) == (x.is_inference(), y.is_inference())
        assert torch.equal(same, x)
        assert same.data_ptr() == other.data_ptr()


def test_leaf_that_gets_data_of_another_size_where_the_results_have_no_backward() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = y + 4
        x.data = made.data
        (made * made).sum().backward()
        return made

    def leaves() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(6.0).requires_grad_(), torch.ones(2, 2).requires_grad_()

    program, (x, y) = capture(f, leaves()), leaves()
    made = program(x, y)
    (x * 2).sum().backward()  # while the result lives, and with it what autograd knows of the leaf
    assert x.grad is not None and torch.equal(x.grad, torch.full((2, 2), 2.0))
    for source in (x, y):
        with pytest.raises(RuntimeError, match="that itself calls backward"):
            torch.autograd.grad(made.sum(), source, allow_unused=True)


def test_set_to_a_storage_that_it_outgrows() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        view = x.view(2)
        view.neg_()
        view.set_(x.untyped_storage(), 11, (1,), (1,))
        return x.add(1)

    def inputs(room: int) -> torch.Tensor:
        return torch.arange(float(room))[5:7]

    program = capture(f, (inputs(12),), on_guard_failure="recapture")
    for room in (12, 7):
        assert_equivalent(f, inputs(room), transform=lambda _: program)
        x = inputs(room)
        assert torch.equal(program(x), torch.tensor([-4.0, -5.0]))


@pytest.mark.parametrize("remove", REMOVES)
def test_writes_to_parts_of_a_tensor_in_a_storage_of_no_whole_number_of_its_elements(remove: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.as_strided((2,), (2,)).add_(1)
        x[1:3] += 1
        x[0] = 3
        return x.sum()

    def floats_in_bytes() -> torch.Tensor:
        return torch.zeros(102, dtype=torch.uint8)[:100].view(torch.float32)

    assert_equivalent(f, floats_in_bytes(), transform=lambda f: capture(f, (floats_in_bytes(),), remove=remove))


@pytest.mark.parametrize("remove", REMOVES)
def test_storage_that_grows_to_no_whole_number_of_the_elements_of_another_input(remove: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.resize_((1, 40))
        y.view(-1)[37:].fill_(2)
        x[..., 1] = 0.5
        x.div_(2)
        return y

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.arange(24.0)
        numbers = torch.empty(0, dtype=torch.int16)
        return memory[6::2][:4], numbers.set_(memory.untyped_storage(), 11, (2, 14), (14, 1))

    assert_equivalent(f, *inputs(), transform=lambda f: capture(f, inputs(), remove=remove))


def test_gradient_by_older_views_of_what_is_not_contiguous() -> None:
    def leaf(stride: tuple[int, int]) -> torch.Tensor:
        return torch.ones(6).as_strided((2, 3), stride).detach().requires_grad_()

    def by_view(x: torch.Tensor) -> torch.Tensor:
        row = x.select(0, 1)
        with torch.no_grad():
            x.mul_(2)
        return torch.autograd.grad(row.sin().sum(), [x])[0]

    def by_newer_view(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.mul_(2)
        row = x.select(0, 1)
        return torch.autograd.grad(row.sin().sum(), x)[0]

    assert_equivalent(by_view, leaf((3, 1)), transform=lambda f: capture(f, (leaf((3, 1)),)))
    assert_equivalent(by_newer_view, leaf((1, 2)), transform=lambda f: capture(f, (leaf((1, 2)),)))
    with pytest.raises(
        UnsupportedMutationError, match="non-contiguous"
    ):  # the strides of eager's are those of the leaf
        capture(by_view, (leaf((1, 2)),))


def test_computed_inputs_are_no_leaves_without_gradients() -> None:
    def computed() -> torch.Tensor:
        return torch.ones(3, requires_grad=True) * 1

    def is_leaf(x: torch.Tensor) -> bool:
        return x.is_leaf

    def new_leaf(x: torch.Tensor) -> None:
        x.detach_()
        x.requires_grad_()

    for mode in (torch.no_grad, torch.inference_mode):
        x, y = computed(), computed()
        with mode():
            assert not capture(is_leaf, (x,))(y)
    with torch.no_grad(), pytest.raises(UnsupportedMutationError, match="sets requires_grad again"):
        capture(new_leaf, (x,))


def test_refused_call_leaves_inputs_without_gradients() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        chosen: torch.Tensor = y.nonzero().split([0, 0], 0)[0]
        return chosen

    def inputs(number: float) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(2), torch.full((3,), number)

    program, (x, y) = capture(f, inputs(0)), inputs(1)
    with pytest.raises(DataDependentError, match="do not satisfy"):
        program(x, y)
    assert not x.requires_grad
    program(*inputs(0))


def test_gradient_of_nothing_is_the_error_of_eager() -> None:
    def f(x: torch.Tensor) -> object:
        return torch.autograd.grad(x.sum())  # type: ignore[call-overload]

    with pytest.raises(TypeError, match="inputs"):
        capture(f, (torch.ones(2, requires_grad=True),))


def test_gradients_by_name() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return torch.autograd.grad((x * y).sum(), {"x": x, "y": y})

    def leaves() -> list[torch.Tensor]:
        return [torch.arange(2.0).requires_grad_(), torch.arange(2.0, 4.0).requires_grad_()]

    found = capture(f, tuple(leaves()))(*leaves())
    assert torch.equal(found["x"], torch.arange(2.0, 4.0))
    assert torch.equal(found["y"], torch.arange(2.0))


@pytest.mark.parametrize("of_a_leaf_made_inside", [False, True])
def test_gradient_that_gets_another_size(of_a_leaf_made_inside: bool) -> None:
    def f(x: torch.Tensor) -> Any:
        leaf = x.detach().clone().requires_grad_() if of_a_leaf_made_inside else x
        (leaf * leaf).sum().backward()
        gradient: Any = leaf.grad
        gradient.data = leaf.detach()[:, :4].view(1, 4, 1, 1)
        gradient.squeeze_(2)
        return leaf, gradient

    x, other = (torch.arange(8.0).view(1, 8).requires_grad_() for _ in range(2))
    ours = capture(f, (x,))(x)
    eager = f(other)
    for leaf, gradient in (ours, eager):
        assert leaf.grad is gradient
        assert gradient.shape == (1, 4, 1)
        assert gradient.data_ptr() == leaf.data_ptr()
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(x.grad, other.grad)


def test_lazy_negation_resized_in_inference_mode_is_refused() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        torch._neg_view(x[2:]).swapaxes_(0, 1)
        return x.mul_(2)

    x = torch.arange(9.0).view(3, 3)
    with torch.inference_mode(), pytest.raises(UnsupportedMutationError, match="lazily conjugated or negated"):
        capture(f, (x,))
    ours, eager = x.clone(), x.clone()
    assert torch.equal(capture(f, (ours,))(ours), f(eager))
    assert ours._version == eager._version


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_that_has_a_shared_storage_grow_as_the_data_tell_is_refused() -> None:
    def f(x: torch.Tensor) -> Any:
        found = x.nonzero()
        first, second = x.t().vsplit(2)
        torch.stack([found, found], out=first)
        return second, found

    x = torch.tensor([[1, 2, 3, 4]], dtype=torch.int16)
    with pytest.raises(UnsupportedMutationError, match="beyond the 8 bytes that it shares"):
        capture(f, (x,))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_that_shares_a_storage_and_keeps_within_as_the_data_tell() -> None:
    def f(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.masked_select(x, x > 0, out=out[:3])
        return out + 1

    given = [(torch.arange(5.0) - 2, torch.zeros(5)) for _ in range(2)]
    torch.testing.assert_close(capture(f, given[0])(*given[0]), f(*given[1]))
    torch.testing.assert_close(given[0], given[1])


@pytest.mark.parametrize("remove", REMOVES)
def test_out_that_is_an_argument_and_too_small_is_the_error_of_eager(remove: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sub(x, torch.arange(9), out=x)

    x = torch.ones(1, dtype=torch.int64)
    for run in (f, lambda x: capture(f, (x,), remove=remove)):
        with pytest.raises(RuntimeError, match=r"output with shape \[1\] doesn't match the broadcast shape \[9\]"):
            run(x)


def test_outputs_of_one_storage_are_inference_tensors_as_in_eager() -> None:
    def f(x: torch.Tensor) -> Any:
        moved: Any = x.view(1, 8)
        moved.set_(moved.clone())
        return moved, moved.expand(2, 8), moved.clone()

    x = torch.randn(8)
    with torch.inference_mode():
        ours, eager = capture(f, (x,))(x), f(x)
    assert [one.is_inference() for one in ours] == [one.is_inference() for one in eager] == [False, False, True]


def test_versions_of_what_lies_in_a_storage_that_another_input_moves_to_and_writes() -> None:
    def f(x: Any, y: torch.Tensor) -> None:
        y.t_()
        x.set_(y.untyped_storage(), 8, (1,))
        x.fill_(3)

    made = [(torch.empty(0), torch.arange(9.0)[:2]) for _ in range(2)]
    capture(f, made[0])(*made[0])
    f(*made[1])
    assert [one._version for one in made[0]] == [one._version for one in made[1]]


def test_copy_of_an_expanded_tensor_to_its_own_negation_is_the_error_of_eager() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(x).copy_(x)

    x = torch.zeros(3, 1).expand(3, 2)
    for run in (f, lambda x: capture(f, (x,))):
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            run(x)


@pytest.mark.parametrize("transpose", [torch.Tensor.t_, lambda y: y.transpose_(0, 1), lambda y: y.swapaxes_(-1, 0)])
def test_gradients_of_views_of_what_is_transposed_in_place_are_refused(transpose: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        rows = y.view(2, 2)
        transpose(y)
        return rows[1, 0] * 2

    def taken_again(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        rows = y.view(4)
        y.unsqueeze_(0)
        return rows[2] * 2

    x = torch.arange(4.0).view(2, 2)
    torch.testing.assert_close(capture(f, (x,))(x), f(x))
    x.requires_grad_()
    with pytest.raises(UnsupportedMutationError, match="after its metadata, or its base's, changed"):
        torch.autograd.grad(capture(f, (x,))(x), x)
    ours, eager = (torch.autograd.grad(run(x), x) for run in (capture(taken_again, (x,)), taken_again))
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("remove", REMOVES)
def test_set_that_keeps_size_and_strides_beyond_the_storage_is_the_error_of_eager(remove: str) -> None:
    def f(x: Any, offset: int, stride: int) -> torch.Tensor:
        x.set_(x.untyped_storage(), offset, (2,), (stride,))
        return x[:1] + 1  # type: ignore[no-any-return]

    def inputs() -> torch.Tensor:
        return torch.arange(3)[1:]

    for run in (f, lambda x, *place: capture(f, (x, *place), remove=remove)(x, *place)):
        with pytest.raises(
            RuntimeError, match="requiring a storage size of 32 are out of bounds for storage of size 24"
        ):
            run(inputs(), 2, 1)
        torch.testing.assert_close(run(inputs(), 2, 2), torch.tensor([3]))  # grows
        torch.testing.assert_close(run(inputs(), 0, 1), torch.tensor([1]))


def test_set_to_the_storage_of_an_input_of_another_dtype() -> None:
    def f(x: torch.Tensor, y: Any) -> Any:
        y.set_(x[0].untyped_storage())
        x[2].fill_(-2)
        return y, x

    given = [(torch.arange(12.0).view(4, 3).t(), torch.zeros(4, 3, dtype=torch.complex64).t()) for _ in range(2)]
    ours, eager = capture(f, given[0])(*given[0]), f(*given[1])
    torch.testing.assert_close(ours, eager)
    assert [one.untyped_storage().nbytes() for one in given[0]] == [48, 48]
    assert given[0][0].untyped_storage().data_ptr() == given[0][1].untyped_storage().data_ptr()


@pytest.mark.parametrize("remove", REMOVES)
def test_place_beyond_the_storage_of_a_lazy_conjugate_is_the_error_of_eager(remove: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.conj().as_strided((3,), (1,), 6) + 1

    x = torch.ones(2, dtype=torch.complex64)
    for run in (f, lambda x: capture(f, (x,), remove=remove)):
        with pytest.raises(
            RuntimeError, match="requiring a storage size of 72 are out of bounds for storage of size 16"
        ):
            run(x)


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


def test_random_numbers_in_an_order_that_the_data_tell() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x.nonzero(), dtype=torch.float32).uniform_()

    x = torch.tensor([[1, 0, 2], [3, 4, 0]])
    program = capture(f, (x,))
    for value in (x, x.clamp(max=1) - 1, x + 1):
        torch.manual_seed(3)
        expected = f(value)
        torch.manual_seed(3)
        result = program(value)
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_second_derivative_of_what_draws_behind_an_index_that_it_does_not_depend_on() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        part = x[1:] ** 2
        part.index_put_((torch.tensor([0, 1, 0]),), torch.tensor(-1.0), True)
        return part * torch.bernoulli(part.sigmoid().detach()).add(1).detach().clamp(1, 1)

    def second(run: Any, x: torch.Tensor) -> Any:
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)

    x = torch.arange(3.0, requires_grad=True)
    program = capture(f, (x,))
    for _ in range(3):
        torch.testing.assert_close(second(program, x), second(f, x))


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("offset", [0, 1])
def test_places_in_what_could_be_written_in_place(offset: int, remove: str) -> None:
    """A call writes in the memory of the input where it can, which begins elsewhere than a result's."""

    def f(x: torch.Tensor) -> torch.Tensor:
        x.scatter_(1, torch.zeros(4, 1, dtype=torch.int64), 5)
        x.as_strided((2,), (1,), 10).fill_(7)
        x[:1].index_fill_(1, torch.tensor([1]), 3)
        return x.as_strided((2,), (1,), 2) + 1

    given = [torch.arange(14.0)[offset : offset + 12].view(4, 3) for _ in range(2)]
    torch.testing.assert_close(capture(f, (given[0],), remove=remove)(given[0]), f(given[1]))
    torch.testing.assert_close(given[0], given[1])


def test_random_numbers_for_what_is_transposed_and_has_a_size_that_the_data_tell() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x[x[:, 0] > 0].t(), 0.5)

    x = torch.tensor([[1.0, 0, 2], [3, 4, 0], [0, 0, 1]])
    program, results = capture(f, (x,)), []
    for run in (program, f):
        torch.manual_seed(0)
        results.append(run(x))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("remove", REMOVES)
def test_write_to_memory_that_an_expanded_input_has_left(remove: str) -> None:
    """What it shows now has no elements, so it shows none of them once."""

    def f(x: torch.Tensor) -> torch.Tensor:
        first = x[:1]
        x.data = x[1:].data
        first.fill_(7)
        return first

    def given() -> torch.Tensor:
        return torch.arange(3.0).as_strided((1, 1), (0, 2), 2)

    ours, eager = given(), given()
    assert capture(f, (given(),), remove=remove)(ours).item() == f(eager).item() == 7
    assert ours.untyped_storage().tolist() == eager.untyped_storage().tolist()


@pytest.mark.parametrize("remove", REMOVES)
def test_a_size_that_can_be_nothing_but_one_is_expanded(remove: str) -> None:
    """Torch had fallen back to another answer before the range of the size told."""

    def f(x: torch.Tensor) -> Any:
        found = x.nonzero()  # one row at most
        squares = torch.mul(found, found, out=torch.empty(0, dtype=torch.int64))
        return found.narrow(-2, 1, 0), squares.expand((3, 0))

    x = torch.tensor(3)
    for ours, eager in zip(capture(f, (x,), remove=remove)(x), f(x), strict=True):
        assert ours.shape == eager.shape


@pytest.mark.parametrize("remove", REMOVES)
def test_interpolation_of_views_with_symbolic_sizes(remove: str) -> None:
    """Of views that are copied for it, though it stays on a kernel in C++."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x[None][:, :1].expand(-1, 3, -1), size=4)[0]

    program = capture(f, (torch.randn(4, 5),), dynamic_shapes=({1: torch.export.Dim("n", min=2)},), remove=remove)
    x = torch.randn(4, 7)
    torch.testing.assert_close(program(x), f(x))


@pytest.mark.parametrize("remove", REMOVES)
def test_memory_of_another_dtype_in_a_column_of_one(remove: str) -> None:
    """Kernels look at its stride, which is not that of fake views."""

    def f(x: torch.Tensor, part: torch.Tensor, y: torch.Tensor) -> Any:
        part.add_(-1)
        return x * 1, y * 2

    def given() -> tuple[torch.Tensor, ...]:
        memory = torch.arange(4)
        part = memory.view(torch.int16).as_strided((1, 1), (1, 1), 1)
        return memory.as_strided((1, 1), (2, 2)), part, torch.ones(2, requires_grad=True) * 1

    for ours, eager in zip(capture(f, given(), remove=remove)(*given()), f(*given()), strict=True):
        assert ours.tolist() == eager.tolist()


@pytest.mark.parametrize("remove", REMOVES)
def test_second_derivative_of_what_shares_memory_with_a_view_that_is_transposed(remove: str) -> None:
    """The version of the input grows, though nothing is written to it: autograd would take that for a write."""

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([[0.5, -1.0]]))

        def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
            windows = y.unfold(0, 2, 3)
            z.data = z + 1
            part = windows[:]
            windows.transpose_(0, 0)
            return part, x.reshape(-1, 1) @ self.weight

    def given() -> tuple[torch.Tensor, ...]:
        memory = torch.arange(12.0).untyped_storage()
        x, y, z = (torch.empty(0).set_(memory, start, (size,), (1,)) for start, size in ((0, 12), (0, 12), (3, 4)))
        return x, y.mul_(torch.ones(12, requires_grad=True)), z

    def second(run: Any) -> torch.Tensor:
        product = run(*given())[1]
        (gradient,) = torch.autograd.grad(product.square().sum(), module.weight, create_graph=True)
        return torch.autograd.grad(gradient.sum(), module.weight)[0]

    module = Product()
    torch.testing.assert_close(second(capture(module, given(), remove=remove)), second(module))


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_size_that_the_data_tell_is_expanded_when_the_graph_is_run(mode: str, remove: str) -> None:
    """Torch takes it for the size that is asked for, which the view has then already."""

    def f(x: torch.Tensor) -> Any:
        found = x[x > 0]
        repeated = found.expand(3)
        doubled = repeated * 2
        found.mul_(5)
        return repeated, doubled

    graph = trace(f, torch.tensor([1.0, -1, -1]), mode=mode, remove=remove)
    for numbers in ([1.0, -1, -1], [1.0, 2, 3]):
        for ours, eager in zip(graph(torch.tensor(numbers)), f(torch.tensor(numbers)), strict=True):
            assert ours.tolist() == eager.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        [("as_strided_", ((1, 3), (3, 1), 4)), ("unsqueeze_", (-1,))],
        [("unsqueeze_", (0,)), ("as_strided_", ((1, 3), (3, 1), 4))],
    ],
    ids=["before", "after"],
)
def test_an_input_that_goes_beyond_itself_among_other_changes_is_refused(changes: list[tuple[str, Any]]) -> None:
    """A call gives it its new metadata at once: autograd would give the elements gradients, where eager's has zeros."""

    def f(x: torch.Tensor) -> torch.Tensor:
        for name, args in changes:
            getattr(x, name)(*args)
        return x

    def given(leaf: torch.Tensor) -> torch.Tensor:
        return (leaf * 2).as_strided((2, 1), (1, 2), 0)

    program = capture(f, (given(torch.arange(9.0)),), on_guard_failure="recapture")
    x = given(torch.arange(9.0, requires_grad=True))
    with pytest.raises(UnsupportedMutationError, match=r"reads memory beyond(.|\n)*getattr\(x, name\)"):
        program(x)
    assert x.size() == (2, 1)
    assert torch.equal(program(given(torch.arange(9.0))), f(given(torch.arange(9.0))))


_SCATTERED = [[[1.0, 1], [1, 1]], [[0.0, 1], [1, 1]], [[0.0, 0], [0, 1]]]  # as many positions as the data tell: 4, 3, 1


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("example", _SCATTERED[::2])
@pytest.mark.parametrize("name", ["contiguous", "flatten", "is_contiguous", "ravel", "reshape"])
def test_one_position_that_the_data_tell_lies_in_any_way(name: str, example: Any, remove: str) -> None:
    """What is reshaped is a copy of several positions, which lie side by side, and a view of one."""

    def f(x: torch.Tensor) -> Any:
        positions = x.nonzero()
        got = getattr(positions, name)(*([-1] if name == "reshape" else []))
        if isinstance(got, torch.Tensor):
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
    def f(x: torch.Tensor) -> Any:
        positions = x.nonzero()
        return positions, positions.flatten()

    def g(x: torch.Tensor) -> Any:
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_reshaped_as_in_eager(layout: torch.layout) -> None:
    """They have no sizes to ask about."""

    def f(x: torch.Tensor) -> Any:
        return x.is_contiguous(), x.contiguous(), x.reshape(2, -1, 3)

    parts = [torch.ones(2, 3), torch.zeros(1, 3)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    (known, *ours), (expected, *eager) = functionalize(f)(nested), f(nested)
    assert known is expected
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(list(one.unbind()), list(other.unbind()))


def test_a_leaf_that_is_a_view_of_what_changes_its_metadata_is_told_of() -> None:
    """Autograd takes the view by the same steps again; the tensor itself requires no gradients."""

    def f(x: torch.Tensor) -> None:
        leaf = x.permute([0]).requires_grad_()
        view = leaf.unsqueeze(0)
        x.resize_((1, 2))
        x[0].fill_(1)
        (view * 3).sum().backward()

    with pytest.raises(UnsupportedProgramError, match=r"changes its size or strides(.|\n)*view \* 3"):
        capture(f, (torch.arange(2.0),))
