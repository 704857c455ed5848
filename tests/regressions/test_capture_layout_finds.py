"""Programs that the fuzzer found captured otherwise than eager runs them: layouts, and what autograd makes of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize.errors import UnsupportedMutationError, UnsupportedProgramError
from tests.support.graphs import REMOVES

SPAN = torch.arange(6.0)


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


@pytest.mark.parametrize("step", [1, 2])
def test_normal_numbers_fill_a_column_with_gaps(step: int) -> None:
    """A column lies in order, whatever the stride of its one-element dimension is."""

    def run(x: Tensor) -> Tensor:
        x.unsqueeze_(0)
        x.diagonal(0, 0, 2).normal_()
        return x

    def column() -> Tensor:
        return torch.zeros(32).as_strided((16, 1), (step, step))

    program = capture(run, (column(),))
    results = []
    for function in (run, program):
        torch.manual_seed(0)
        results.append(function(column()))
    assert torch.equal(*results)


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


def data_after_a_copy(x: Tensor) -> Tensor:
    x.set_(x.clone())  # type: ignore[call-overload]
    view = x.select(0, 0)
    x.data = x + 1
    return view


def a_view_set_to_a_copy(x: Tensor) -> Tensor:
    view = x.view(2, 3)
    view.set_(view.clone())  # type: ignore[call-overload]
    return view


@pytest.mark.parametrize("program", [data_after_a_copy, a_view_set_to_a_copy, lambda x: x * 2, lambda x: x[1:]])
@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference"])
def test_inference_tensors_are_those_of_eager(program: Callable[[Tensor], Tensor], inference: bool) -> None:
    def made() -> Tensor:
        with torch.inference_mode(inference):
            return SPAN.clone()

    captured = capture(program, (SPAN.clone(),), on_guard_failure="recapture")
    with torch.inference_mode():
        want, got = program(made()), captured(made())
        assert want.is_inference() == got.is_inference()
        assert torch.equal(want, got)


def test_the_version_of_a_gradient_is_the_engines() -> None:
    def run(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((x * x).sum(), x)
        return gradient * gradient._version

    with pytest.raises(UnsupportedProgramError, match="_version"):
        capture(run, (SPAN,))


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


@pytest.mark.parametrize("given", [False, True])
def test_results_of_leaves_that_the_program_makes_require_gradients(given: bool) -> None:
    """Also where inputs require gradients, which get none."""

    def run(x: Tensor) -> Tensor:
        return torch.ones(6, requires_grad=True) * x.detach()

    x = SPAN.clone().requires_grad_(given)
    program = capture(run, (x,))
    for _ in range(5):
        result = program(x)
        assert result.requires_grad
        assert not result.is_leaf
        result.sum().backward()
    assert x.grad is None


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
@pytest.mark.parametrize("view", [torch.view_as_complex, lambda x: x.view(-1), lambda x: x.view(torch.int32)])
def test_views_require_gradients_in_inference_mode_as_in_eager(remove: str, view: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        want, got = view(x), capture(view, (x,), remove=remove)(x)
    assert (got.requires_grad, got.is_inference()) == (want.requires_grad, want.is_inference())


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


@pytest.mark.parametrize("remove", REMOVES)
def test_older_views_of_what_is_reshaped_and_then_requires_gradients(remove: str) -> None:
    def run(x: Tensor) -> Tensor:
        view = x.squeeze(1)
        x.squeeze_(-2)
        x.requires_grad_()
        return view

    with pytest.raises(UnsupportedProgramError, match="changes its size or strides"):
        capture(run, (torch.ones(1, 1),), remove=remove)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_memory_of_booleans_is_written_as_bytes_alone(dtype: torch.dtype) -> None:
    def run(mask: Tensor, of: torch.dtype) -> Tensor:
        return mask.view(of)[:1].fill_(1)

    mask, bytes_of = torch.zeros(16, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
    with pytest.raises(UnsupportedMutationError, match="a bool tensor is written through a view of dtype torch"):
        capture(lambda x: run(x, dtype), (mask,))
    capture(lambda x: run(x, torch.uint8), (bytes_of,))(bytes_of)
    assert bytes_of.tolist() == [True] + 7 * [False] and not mask.any()


# What kernels compute otherwise where elements lie otherwise; each of a view.
READ_IN_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice": lambda x: torch.nn.functional.silu(x[..., :13]),
    "a transposed one": lambda x: x.transpose(1, 2).exp().sin(),
    "a row of each": lambda x: torch.tanh(x[:, 3]),
    "an expanded one": lambda x: (x[:, :1].expand(-1, 7, -1) * x[:, :7]).sigmoid(),
    "sums along columns": lambda x: x.transpose(1, 2).sum(1),
    "means": lambda x: x.permute(2, 0, 1).mean((1, 2)),
    "a variance": lambda x: x[..., ::2].var(-1),
    "a norm": lambda x: x.transpose(0, 2)[1:].norm(dim=0),
    "one of its views that is kept": lambda x: torch.stack([x.transpose(1, 2).exp(), x.transpose(1, 2) + 1]),
    "a contiguous copy": lambda x: x.transpose(1, 2).clone(memory_format=torch.contiguous_format).erf(),
}


@pytest.mark.parametrize("name", READ_IN_VIEWS)
def test_bits_are_those_of_eager(name: str) -> None:
    program = READ_IN_VIEWS[name]
    torch.manual_seed(0)
    x = torch.randn(5, 11, 29) * 3
    captured = capture(program, (x,))
    result, expected = captured(x), program(x)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()
    assert not any(getattr(node.target, "is_view", False) for node in captured.graph.nodes)
