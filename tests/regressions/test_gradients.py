"""Gradients through views, writes and replaced data; backward passes inside of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture, functionalize
from functionalize.errors import UnsupportedMutationError
from functionalize.verify import assert_equivalent
from tests.support.equality import in_every_way
from tests.support.graphs import REMOVES

MEMORY = torch.arange(24.0)
SPAN = torch.arange(6.0)
Program = Callable[..., Any]


@pytest.mark.parametrize("remove", REMOVES)
def test_foreach_write_to_a_saved_tensor_is_seen_by_autograd(remove: str) -> None:
    def f(a: Tensor) -> Tensor:
        b = a * 2
        c = b * b
        torch._foreach_add_([b], 1)
        return c

    result = functionalize(f, remove=remove)(torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def _by_grad(a: Tensor) -> Any:
    return torch.autograd.grad((a * a).sum(), [a])[0]


def _by_backward(a: Tensor) -> Any:
    (a * a).sum().backward()
    return a.grad


def _by_backward_of_a_list(a: Tensor) -> Any:
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
        def forward(ctx: Any, a: Tensor, total: Tensor) -> Tensor:
            ctx.total = total
            return a * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            ctx.total.view(-1)[1:].add_(gradient.sum())
            ctx.total.t_()
            return gradient.clone().mul_(2), None

    def f(a: Tensor, total: Tensor) -> Any:
        doubled: Any = Doubles.apply(a, total)  # type: ignore[no-untyped-call]
        gradient = torch.autograd.grad(doubled.sum(), [a])[0]
        total[0].mul_(3)
        return gradient, total.sum()

    assert_equivalent(f, torch.ones(3, requires_grad=True), torch.zeros(2, 3), remove=remove, strides=True)


@in_every_way
def test_data_of_another_shape_in_autograd(mode: Any, remove: str) -> None:
    def f(a: Tensor) -> Tensor | None:
        b = a.detach().requires_grad_()
        b.data = b.t()
        (b.sin() * 3).sum().backward()
        return b.grad

    assert_equivalent(f, torch.ones(1, 2), remove=remove, tracing_mode=mode)


def test_backward_inside_to_a_leaf_of_another_shape() -> None:
    def f(x: Tensor) -> Tensor:
        x.data = x.t()
        (x * 3).sum().backward()
        return x.detach()

    def leaf() -> Tensor:
        return torch.arange(2.0).view(2, 1).requires_grad_()

    program, x = capture(f, (leaf(),)), leaf()
    assert_equivalent(f, leaf(), transform=lambda _: program)
    program(x)
    assert x.grad is not None and torch.equal(x.grad, torch.full((1, 2), 3.0))


def test_leaf_that_gets_data_of_another_size_where_the_results_have_no_backward() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        made = y + 4
        x.data = made.data
        (made * made).sum().backward()
        return made

    def leaves() -> tuple[Tensor, Tensor]:
        return torch.arange(6.0).requires_grad_(), torch.ones(2, 2).requires_grad_()

    program, (x, y) = capture(f, leaves()), leaves()
    made = program(x, y)
    (x * 2).sum().backward()  # while the result lives, and with it what autograd knows of the leaf
    assert x.grad is not None and torch.equal(x.grad, torch.full((2, 2), 2.0))
    for source in (x, y):
        with pytest.raises(RuntimeError, match="that itself calls backward"):
            torch.autograd.grad(made.sum(), source, allow_unused=True)


def test_gradient_by_older_views_of_what_is_not_contiguous() -> None:
    def leaf(stride: tuple[int, int]) -> Tensor:
        return torch.ones(6).as_strided((2, 3), stride).detach().requires_grad_()

    def by_view(x: Tensor) -> Tensor:
        row = x.select(0, 1)
        with torch.no_grad():
            x.mul_(2)
        return torch.autograd.grad(row.sin().sum(), [x])[0]

    def by_newer_view(x: Tensor) -> Tensor:
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


def test_gradient_of_nothing_is_the_error_of_eager() -> None:
    def f(x: Tensor) -> object:
        return torch.autograd.grad(x.sum())  # type: ignore[call-overload]

    with pytest.raises(TypeError, match="inputs"):
        capture(f, (torch.ones(2, requires_grad=True),))


def test_gradients_by_name() -> None:
    def f(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return torch.autograd.grad((x * y).sum(), {"x": x, "y": y})

    def leaves() -> list[Tensor]:
        return [torch.arange(2.0).requires_grad_(), torch.arange(2.0, 4.0).requires_grad_()]

    found = capture(f, tuple(leaves()))(*leaves())
    assert torch.equal(found["x"], torch.arange(2.0, 4.0))
    assert torch.equal(found["y"], torch.arange(2.0))


@pytest.mark.parametrize("of_a_leaf_made_inside", [False, True])
def test_gradient_that_gets_another_size(of_a_leaf_made_inside: bool) -> None:
    def f(x: Tensor) -> Any:
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


@pytest.mark.parametrize("transpose", [Tensor.t_, lambda y: y.transpose_(0, 1), lambda y: y.swapaxes_(-1, 0)])
def test_gradients_of_views_of_what_is_transposed_in_place_are_refused(transpose: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 1
        rows = y.view(2, 2)
        transpose(y)
        return rows[1, 0] * 2

    def taken_again(x: Tensor) -> Tensor:
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


def test_second_derivative_of_what_draws_behind_an_index_that_it_does_not_depend_on() -> None:
    def f(x: Tensor) -> Tensor:
        part = x[1:] ** 2
        part.index_put_((torch.tensor([0, 1, 0]),), torch.tensor(-1.0), True)
        return part * torch.bernoulli(part.sigmoid().detach()).add(1).detach().clamp(1, 1)

    def second(run: Any, x: Tensor) -> Any:
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)

    x = torch.arange(3.0, requires_grad=True)
    program = capture(f, (x,))
    for _ in range(3):
        torch.testing.assert_close(second(program, x), second(f, x))


@pytest.mark.parametrize("remove", REMOVES)
def test_second_derivative_of_what_shares_memory_with_a_view_that_is_transposed(remove: str) -> None:
    """The version of the input grows, though nothing is written to it: autograd would take that for a write."""

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([[0.5, -1.0]]))

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Any:
            windows = y.unfold(0, 2, 3)
            z.data = z + 1
            part = windows[:]
            windows.transpose_(0, 0)
            return part, x.reshape(-1, 1) @ self.weight

    def given() -> tuple[Tensor, ...]:
        memory = torch.arange(12.0).untyped_storage()
        x, y, z = (torch.empty(0).set_(memory, start, (size,), (1,)) for start, size in ((0, 12), (0, 12), (3, 4)))
        return x, y.mul_(torch.ones(12, requires_grad=True)), z

    def second(run: Any) -> Tensor:
        product = run(*given())[1]
        (gradient,) = torch.autograd.grad(product.square().sum(), module.weight, create_graph=True)
        return torch.autograd.grad(gradient.sum(), module.weight)[0]

    module = Product()
    torch.testing.assert_close(second(capture(module, given(), remove=remove)), second(module))


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

    def f(x: Tensor) -> Tensor:
        for name, args in changes:
            getattr(x, name)(*args)
        return x

    def given(leaf: Tensor) -> Tensor:
        return (leaf * 2).as_strided((2, 1), (1, 2), 0)

    program = capture(f, (given(torch.arange(9.0)),), on_guard_failure="recapture")
    x = given(torch.arange(9.0, requires_grad=True))
    with pytest.raises(UnsupportedMutationError, match=r"reads memory beyond(.|\n)*getattr\(x, name\)"):
        program(x)
    assert x.size() == (2, 1)
    assert torch.equal(program(given(torch.arange(9.0))), f(given(torch.arange(9.0))))


def test_a_derivative_of_a_gradient_where_an_input_shows_a_part_of_its_storage() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return (x * x * x * y.as_strided((1,), (1,), 8)).sum()

    y = torch.empty(0).set_(MEMORY.untyped_storage(), 0, (2,), (1,))  # no view, to torch
    x = torch.ones(3, requires_grad=True)
    captured = capture(program, (x, y))
    (gradient,) = torch.autograd.grad(captured(x, y), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(gradient.sum(), x)[0], torch.full((3,), 6 * 8.0))


@pytest.mark.parametrize("pieces", [lambda x: (x[0:2], x[2:4]), lambda x: x.chunk(2)])
def test_a_view_that_gets_other_data_has_the_gradient_that_it_had(pieces: Program) -> None:
    def program(x: Tensor) -> Any:
        one, other = pieces(x)
        one.data = other.data
        return one

    for called in (program, capture(program, (torch.ones(4, 3, requires_grad=True),))):
        x = torch.randn(4, 3, requires_grad=True)
        result = called(x)
        result.backward(torch.ones(2, 3) * 3)
        assert x.grad is not None
        assert torch.equal(result, x[2:4]) and torch.equal(x.grad, torch.tensor([[3.0]] * 2 + [[0.0]] * 2).expand(4, 3))


def test_views_of_what_shows_other_elements_have_no_gradients_in_fake_tensors() -> None:
    def program(x: Tensor) -> None:
        whole = x * 2
        part, _ = whole.vsplit(2)
        whole.as_strided_((1, 3), (1, 1), 20)
        part.sum().backward()

    with pytest.raises(UnsupportedMutationError, match="after its metadata, or its base's, changed"):
        capture(program, (torch.ones(8, 3, requires_grad=True),))


@pytest.mark.parametrize("step", [1, 2, 0], ids=["beyond", "between", "repeated"])
@pytest.mark.parametrize("write", [Tensor.uniform_, lambda part: part.mul_(2)], ids=["fill", "product"])
def test_memory_that_an_input_does_not_show_is_not_written_with_gradients(step: int, write: Any) -> None:
    """To autograd the write is one to the tensor that the input is a view of, which the program is not given."""

    def run(x: Tensor) -> None:
        part = x.unfold(0, 1, 1)
        part.as_strided_((3, 1), (1, 3), 2)
        write(part)

    whole = SPAN * torch.ones(6, requires_grad=True)
    with pytest.raises(UnsupportedMutationError, match="whole storage"):
        capture(run, (whole.as_strided((3,), (step,), 0),))(whole.as_strided((3,), (step,), 0))
    plain, eager = SPAN.clone(), SPAN.clone()
    for function, memory in ((run, eager), (capture(run, (SPAN.clone().as_strided((3,), (step,), 0),)), plain)):
        torch.manual_seed(0)
        function(memory.as_strided((3,), (step,), 0))
    assert torch.equal(plain, eager)


@pytest.mark.parametrize("view", [lambda x: x[:], lambda x: x.view(2, 1, 3)[:, 0]], ids=["whole", "row"])
@pytest.mark.parametrize("write", ["view", "base"])
def test_gradients_through_views_that_change_their_metadata_in_place(view: Any, write: str) -> None:
    """Of fake tensors, autograd finds the view as it was before: a product with the transpose."""
    factors = torch.arange(6.0)

    def run(x: Tensor) -> Tensor:
        y = x * 1
        part: Tensor = view(y)
        part.t_()
        part.mul_(factors.view(3, 2)) if write == "view" else y.mul_(factors.view(2, 3))
        return part * 2

    def read(x: Tensor) -> Tensor:
        part: Tensor = view(x * 1)
        part.t_()
        return part * factors.view(3, 2)

    x = SPAN.view(2, 3).clone().requires_grad_()
    result = capture(run, (x,))(x)
    assert torch.equal(result, run(x))
    with pytest.raises(
        UnsupportedMutationError, match="after its metadata, or its base's, changed in place"
    ) as refused:
        result.sum().backward()
    assert "in run: " in str(refused.value)
    want, got = (torch.autograd.grad(function(x).sum(), x)[0] for function in (read, capture(read, (x,))))
    assert torch.equal(want, got)

    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(run(x).sum(), x)[0]

    with pytest.raises(UnsupportedMutationError, match="after its metadata, or its base's, changed in place"):
        capture(step, (x,))


def test_gradients_through_views_that_are_given_other_data() -> None:
    """Of tensors with data, autograd finds the view again where its new data lie, once its base is written."""

    def run(x: Tensor, writes: bool) -> Tensor:
        y = x * 1
        part = y[3]
        part.data = part * 2
        if writes:
            y[:2] = 0.5
        return part

    x = SPAN.clone().requires_grad_()
    want, got = (torch.autograd.grad(f(x, False), x)[0] for f in (run, capture(run, (x, False))))
    assert torch.equal(want, got)
    result = capture(run, (x, True))(x, True)
    assert torch.equal(result, run(x, True))
    with pytest.raises(UnsupportedMutationError, match="replaced its data"):
        result.backward()


def test_an_input_that_is_detached_in_place_is_differentiated_around() -> None:
    """Autograd unpacks nothing that it saved, and was detached in place since."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        x.detach_()
        return x * weight * weight

    weight = SPAN.clone().requires_grad_()
    results = []
    for function in (run, capture(run, (SPAN * torch.ones(6, requires_grad=True), weight))):
        x = SPAN * torch.ones(6, requires_grad=True)
        (first,) = torch.autograd.grad(function(x, weight).sum(), weight, create_graph=True)
        results.append((first.detach(), torch.autograd.grad(first.sum(), weight)[0], x.requires_grad))
    assert all(map(torch.equal, results[0][:2], results[1][:2]))
    assert results[0][2] is results[1][2] is False


@pytest.mark.parametrize("remove", REMOVES)
def test_views_of_a_view_that_got_other_data(remove: str) -> None:
    """Autograd knows them for views of the input, whose memory they have not."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        view: Tensor = x.view(2, 3)
        view.data = view * 2
        return tuple(view.split([1, 1], 0))

    x = SPAN * torch.ones(6, requires_grad=True)
    want, got = run(x), capture(run, (x,), remove=remove)(x)
    assert all(map(torch.equal, want, got))
    losses = [(one * one).sum() + other.sum() for one, other in (want, got)]
    assert torch.equal(*(torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses))


@pytest.mark.parametrize("remove", REMOVES)
def test_what_a_detached_input_was_computed_from_gets_no_gradient(remove: str) -> None:
    def run(x: Tensor, y: Tensor) -> None:
        x.detach_()
        x[2] = y

    def gradients(func: Any) -> tuple[Tensor | None, ...]:
        base, y = torch.ones(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
        x = base * 1
        func(x, y)
        return torch.autograd.grad((x * x).sum(), [base, y], allow_unused=True)

    program = capture(run, (torch.ones(3, 8, requires_grad=True) * 1, torch.ones(8, requires_grad=True)), remove=remove)
    want, got = gradients(run), gradients(program)
    assert want[0] is None and got[0] is None
    assert got[1] is not None and want[1] is not None and torch.equal(got[1], want[1])


@pytest.mark.parametrize("remove", REMOVES)
def test_writes_where_views_show_what_an_input_leaves_out_have_no_gradients(remove: str) -> None:
    def run(x: Tensor) -> Tensor:
        view = x.as_strided((4,), (1,), 0)
        x.mul_(2)
        return view * 1

    def given() -> Tensor:
        return (torch.arange(8.0) * torch.ones(8, requires_grad=True))[::2]

    with pytest.raises(UnsupportedMutationError, match="reads memory beyond"):
        capture(run, (given(),), remove=remove)(given())
    with torch.no_grad():
        want, got = run(SPAN.repeat(2)[::2]), capture(run, (SPAN.repeat(2)[::2],), remove=remove)(SPAN.repeat(2)[::2])
    assert torch.equal(want, got)
