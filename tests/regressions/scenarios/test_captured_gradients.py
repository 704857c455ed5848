"""Gradients where inputs get new metadata in place, or overlap and are written: AOTAutograd's tests, and their kin.

Invariant: calls of captured programs give eager's results, aliasing, inputs afterwards, and gradients of two orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import UnsupportedMutationError, capture
from tests.support.equality import Table

metadata, overlapping = Table(), Table()
Size = tuple[int, ...]
Given = Callable[..., Sequence[Tensor]]
LINE, SQUARE, ROWS = (6,), (3, 3), (2, 3)


def themselves(*computed: Tensor) -> Sequence[Tensor]:
    return computed


def twice(x: Tensor) -> Sequence[Tensor]:
    return x, x


def flat(x: Tensor) -> Sequence[Tensor]:
    return x.view(-1), x.view(-1)


def windows(x: Tensor) -> Sequence[Tensor]:
    return x[:4], x[2:]


def halves(x: Tensor) -> Sequence[Tensor]:
    return x[:1], x[1:]


# New metadata, as AOTAutograd's tests of these names have it


@metadata((SQUARE, SQUARE), themselves)
def input_mutation_metadata(a: Tensor, b: Tensor) -> Any:
    a.transpose_(1, 0)
    return a + b


@metadata((SQUARE,), themselves)
def input_mutation_metadata2(a: Tensor) -> Any:
    a.transpose_(1, 0)
    a.mul_(2)
    return a + 1


@metadata((SQUARE,), themselves)
def input_data_and_metadata_mutation(a: Tensor) -> Any:
    a.t_()
    a[0].mul_(2)
    return a.view(a.shape)


@metadata((SQUARE, SQUARE), themselves)
def view_and_inplace_view(a: Tensor, b: Tensor) -> Any:
    a.t_()
    return b.view(b.shape), a.view(a.shape)


@metadata((ROWS, ROWS, ROWS), themselves)
def input_output_view_metadata_mutate_multiple(a: Tensor, b: Tensor, c: Tensor) -> Any:
    b.mul_(3)
    c.t_()
    return a.view(3, 2), b.view(3, 2), c.t().view(6)


@metadata((SQUARE, SQUARE, SQUARE, SQUARE), themselves)
def input_mutation_output_view_multiple(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
    b.transpose_(1, 0)
    c.add_(1)
    return d + 1, b.diagonal(), a + c


@metadata(((1, 2, 4),), themselves)
def output_all_alias_types(a: Tensor) -> Any:
    a.transpose_(1, 0)
    doubled = a.mul(2)
    return doubled.squeeze(), doubled.transpose(1, 0), a.unsqueeze(0)


@metadata((ROWS,), flat)
def input_metadata_mutation_aliases(a: Tensor, b: Tensor) -> Any:
    a.unsqueeze_(0)
    return a + b


@metadata((SQUARE,), twice)
def dupe_arg_torture(x: Tensor, y: Tensor) -> Any:
    x.t_()
    y.unsqueeze_(0)
    return x + y


@metadata((ROWS,), twice)
def invalid_dupe_left_bias(x: Tensor, y: Tensor) -> Any:
    x.t_()
    return (x + y,)


@metadata((SQUARE,), themselves)
def input_mutation_set__input_mutation(a: Any) -> Any:
    b = torch.arange(9, dtype=a.dtype).reshape(3, 3)
    with torch.no_grad():
        a.set_(b)
    return a * b


@metadata((SQUARE, SQUARE), themselves)
def set__and_data_mutation_good(a: Any, b: Tensor) -> Any:
    with torch.no_grad():
        a.set_(b)
    b.mul_(2)
    return a + b


@metadata((SQUARE,), themselves)
def input_mutation_set__nop(a: Any) -> Any:
    b = torch.arange(9, dtype=a.dtype)
    before = torch.ops.aten.alias.default(a)
    with torch.no_grad():
        a.set_(b)
        a.set_(before)
    return a + b.reshape(3, 3)


@metadata((SQUARE, (3, 9)), themselves)
def set__steals_view_chain(a: Tensor, b: Tensor) -> Any:
    mine: Any = a.detach().mul(2)
    other = b.detach().mul(2)
    part = other[1].view(3, 3)
    mine.set_(part)
    mine.view(-1).mul_(2)
    return mine * part * a


# Their kin


@metadata((ROWS,), themselves)
def nothing_but_metadata(a: Tensor) -> Any:
    a.t_()


@metadata((ROWS,), themselves)
def written_before(a: Tensor) -> Any:
    a.mul_(2)
    a.t_()
    return a.sin()


@metadata((ROWS,), themselves)
def written_before_and_after_also_without_gradients(a: Tensor) -> Any:
    a.mul_(2)
    a.swapaxes_(0, 1)
    with torch.no_grad():
        a.add_(1)
    return a.sin()


@metadata(((2, 1, 3),), themselves)
def squeezed_and_written(a: Tensor) -> Any:
    a.squeeze_()
    a[0].mul_(3)
    return a[0] * 3


@metadata((ROWS,), themselves)
def several_changes(a: Tensor) -> Any:
    a.t_()
    y = a * 2
    a.unsqueeze_(1)
    a.transpose_(0, 2)
    return y, a, a[0].view(-1)


@metadata((ROWS, ROWS), themselves)
def in_a_loop(a: Tensor, b: Tensor) -> Any:
    for _ in range(3):
        a.t_()
        b.unsqueeze_(0)
    return a.sum() * b


@metadata((LINE,), themselves)
def every_second_element_is_left(a: Tensor) -> Any:
    a.as_strided_((3,), (2,))
    a.mul_(3)
    return a.sin()


@metadata((LINE,), lambda x: (x[1:],))
def a_part_of_a_view(a: Tensor) -> Any:
    a.as_strided_((2,), (2,))
    return a * 3


@metadata((ROWS,), lambda x: (x[:, None].expand(2, 2, 3),))
def expanded(a: Tensor) -> Any:
    a.transpose_(0, 1)
    return a * torch.arange(12.0, dtype=a.dtype).view(2, 2, 3)


@metadata((SQUARE, SQUARE), lambda x, y: (x.detach(), y))
def comes_to_require_gradients(a: Tensor, b: Tensor) -> Any:
    a.t_()
    a.mul_(b)
    return a * 2


@metadata((ROWS,), themselves)
def detached_afterwards(a: Tensor) -> Any:
    y = a * 2
    a.t_()
    a.detach_()
    return a * 2, y


@metadata((ROWS,), themselves)
def gradients_inside(a: Tensor) -> Any:
    a.t_()
    (gradient,) = torch.autograd.grad((a * a).sum(), a, create_graph=True)
    return gradient * 2, a * 3


@metadata((ROWS,), halves)
def one_half_turned_the_other_written(a: Tensor, b: Tensor) -> Any:
    b.mul_(2)
    a.t_()
    a.mul_(3)
    return a * 3, b.sin()


@metadata((ROWS,), lambda x: (x[:1], x))
def a_view_and_its_base_turned(a: Tensor, b: Tensor) -> Any:
    a.t_()
    b.t_()
    return a * 3, b * 2


@metadata((ROWS, ROWS), themselves)
def data_exchanged(a: Tensor, b: Tensor) -> Any:
    a.data, b.data = b.data, a.data
    return a * 2 + b


# Inputs that overlap, as AOTAutograd's tests of these names have them


@overlapping((ROWS,), lambda x: (x[0], x[0]))
def input_mutation_aliases_other_input(a: Tensor, b: Tensor) -> Any:
    a.add_(1)
    return a + b


@overlapping((ROWS,), lambda x: (x[0], x))
def input_mutation_aliases_other_input2(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    return a + b


@overlapping((ROWS,), flat)
def input_mutation_aliases_and_output_alias(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    return b.view(b.shape)


@overlapping((ROWS, ROWS), lambda x, y: (x.view(-1), y, x.view(-1)))
def input_aliased_with_mutation_output_alias(a: Tensor, b: Tensor, c: Tensor) -> Any:
    c.mul_(2)
    return b.add(1), c.view(-1)


@overlapping((SQUARE,), lambda x: (x[0], x[0]))
def input_data_and_metadata_mutation_aliases_other_input(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    b.t_()
    return a.mul(b)


@overlapping((ROWS, ROWS), lambda x, y: (x.view(-1), y.view(-1), x.view(-1), y.view(-1)))
def input_mutation_aliases_bases_out_of_order(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
    b.add_(1)
    d.unsqueeze_(0)
    return a + c + d, b.view(-1)


@overlapping((ROWS, ROWS), lambda x, y: (x.view(-1), y, x.view(-1)))
def input_mutation_alias_everything(a: Tensor, b: Tensor, c: Tensor) -> Any:
    c.mul_(2)
    b.t_()
    total = a + c
    line = total.view(-1)
    return line, b.t(), line.unsqueeze(0)


def strided(start: int) -> Given:
    return lambda x: (x.as_strided((4, 4), (9, 1), 0), x.as_strided((4, 4), (9, 1), start))


@overlapping(((64,),), strided(22))
@overlapping(((64,),), strided(24))
@overlapping(((64,),), strided(25))
@overlapping(((256,),), lambda x: (x.as_strided((2, 4, 3), (110, 24, 4), 5), x[195:219]))
def input_mutation_false_aliasing(a: Tensor, b: Tensor) -> Any:
    a.mul_(3)
    b.mul_(2)
    return a.clone().view(-1) + b.clone().view(-1)


# Their kin


@overlapping((LINE,), windows)
def both_written_one_without_gradients(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    with torch.no_grad():
        b.add_(1)
    return a.sin() + b


@overlapping((LINE,), windows)
def one_written_through_a_detached_view(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    b.detach().mul_(3)
    return a.sin() + b


@overlapping((LINE,), windows)
def written_with_the_other(a: Tensor, b: Tensor) -> Any:
    a.copy_(b * 2)
    return a * 2, b


@overlapping((LINE,), lambda x: (x[:4], x[2:], x[1:3]))
def three_of_one(a: Tensor, b: Tensor, c: Tensor) -> Any:
    c.mul_(5)
    a.mul_(2)
    return b * a, c


@overlapping((LINE,), lambda x: (x[:4], x[2:], x))
def nothing_is_read(a: Tensor, b: Tensor, base: Tensor) -> Any:
    a.mul_(2)


@overlapping((LINE,), windows)
def a_result_that_needs_no_gradient(a: Tensor, b: Tensor) -> Any:
    a.mul_(a.detach().clone())
    return b.detach()


@overlapping((LINE,), windows)
def turned_after_the_write(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    b.unsqueeze_(0)
    return a * b


@overlapping((ROWS,), lambda x: (x, x.t()))
def a_tensor_and_its_transpose(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    b.t_()
    return a * b


@overlapping((ROWS,), lambda x: (x[0], x[:, :2]))
def a_row_and_columns(a: Tensor, b: Tensor) -> Any:
    a.mul_(3)
    b.mul_(2)
    return a.sum() * b


class Seen:
    """All that a caller can see of one call: results, inputs afterwards, gradients of what these were computed from."""

    def __init__(self, func: Any, sizes: Sequence[Size], given: Given, order: int = 1) -> None:
        leaves = [torch.linspace(-1, 2, torch.Size(s).numel(), dtype=torch.float64).view(s) for s in sizes]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        inputs = given(*(leaf + 1 for leaf in leaves))
        results = func(*inputs)
        every = [one for one in (*_listed(results), *inputs) if one is not None]
        self.values = [one.detach().clone() for one in every]
        self.places = [(one.stride(), one.storage_offset(), one.requires_grad, one.is_leaf) for one in every]
        self.memory = [(one is other, _share(one, other)) for one in every for other in every]
        self.gradients = _gradients(every, leaves, order)


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _gradients(every: Sequence[Tensor], leaves: Sequence[Tensor], order: int) -> list[Tensor | None]:
    """Of all that requires gradients, each element of it counted otherwise."""
    total: Any = torch.zeros(())
    for one in every:
        if one.requires_grad:
            total = total + (one.sin() * torch.arange(1.0, one.numel() + 1, dtype=one.dtype).view(one.size())).sum()
    for number in range(order):
        found = torch.autograd.grad(total, leaves, allow_unused=True, create_graph=number + 1 < order)
        total = sum(one.square().sum() for one in found if one is not None)
    return list(found)


def assert_alike(ours: Seen, eager: Seen) -> None:
    assert (ours.places, ours.memory) == (eager.places, eager.memory)
    torch.testing.assert_close(ours.values, eager.values)
    assert [one is None for one in ours.gradients] == [one is None for one in eager.gradients]
    for one, other in zip(ours.gradients, eager.gradients, strict=True):
        torch.testing.assert_close(one, other)


def check(func: Any, sizes: Sequence[Size], given: Given, remove: str) -> None:
    """Calls of one captured program against eager: a first one, one like it, one that is differentiated twice."""
    captured = capture(func, tuple(given(*(torch.ones(s, dtype=torch.float64) * leaf() for s in sizes))), remove=remove)
    for order in (1, 1, 2):
        assert_alike(Seen(captured, sizes, given, order), Seen(func, sizes, given, order))


def leaf() -> Tensor:
    return torch.ones((), dtype=torch.float64, requires_grad=True)


@pytest.mark.every(5)
@metadata.each
def test_new_metadata(func: Any, inputs: tuple[Sequence[Size], Given], remove: str) -> None:
    sizes, given = inputs
    check(func, sizes, given, remove)


@pytest.mark.every(4)
@overlapping.each
def test_inputs_that_overlap(func: Any, inputs: tuple[Sequence[Size], Given], remove: str) -> None:
    sizes, given = inputs
    check(func, sizes, given, remove)


@pytest.mark.filterwarnings("ignore:.*(autograd.function.Function.*should not be instantiated|torch.jit)")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("func", [written_before, input_mutation_set__input_mutation, three_of_one])
def test_what_dynamo_makes_of_them(func: Any) -> None:
    """It breaks its graph where an input gets new metadata."""
    torch._dynamo.reset()
    sizes, given = next(row.values[1] for row in (*metadata.rows, *overlapping.rows) if row.values[0] is func)
    compiled = torch.compile(func, backend="functionalize", dynamic=False)
    assert_alike(Seen(compiled, sizes, given), Seen(func, sizes, given))


# What is refused


def set_where_autograd_follows(a: Any, b: Tensor) -> Any:
    a.set_(b)
    return b * 2


def other_memory_and_then_written(a: Tensor, b: Tensor) -> Any:
    a.data = b.data * 2
    a.mul_(b)
    return a * 2


def turned_without_gradients(a: Tensor, b: Tensor) -> Any:
    with torch.no_grad():
        a.t_()
    return a.t() * b


def base_turned_below_its_view(a: Tensor, b: Tensor) -> Any:
    b.t_()
    b.mul_(2)
    return a * 3


@pytest.mark.parametrize(
    ("func", "given", "line"),
    [
        (set_where_autograd_follows, themselves, r"a\.set_\(b\)"),
        (other_memory_and_then_written, themselves, r"a\.data = b\.data \* 2"),
        (turned_without_gradients, themselves, r"a\.t_\(\)"),
        (base_turned_below_its_view, lambda x, y: (x[:1], x), r"return a \* 3"),
    ],
)
def test_what_autograd_cannot_be_told_is_refused_with_the_line(func: Any, given: Given, line: str) -> None:
    inputs = given(*(torch.ones(ROWS) * torch.ones(1, requires_grad=True) for _ in range(2)))
    before = [(one.detach().clone(), one.stride()) for one in inputs]
    with pytest.raises(UnsupportedMutationError, match=f"at .*{line}(.|\n)*try  "):
        capture(func, tuple(inputs))(*inputs)
    assert all(
        torch.equal(one, old) and one.stride() == stride for one, (old, stride) in zip(inputs, before, strict=True)
    )


@pytest.mark.parametrize("change", ["data", "t_"])
def test_a_leaf_of_another_size_is_refused(change: str) -> None:
    def func(a: Tensor) -> Tensor:
        with torch.no_grad():
            if change == "data":
                a.data = torch.ones(4)
            else:
                a.t_()
        return a * a

    with pytest.raises(
        UnsupportedMutationError, match=r"`a`, which requires gradients, changes its size, strides or memory(.|\n)*size"
    ):
        capture(func, (torch.ones(ROWS, requires_grad=True),))


def test_an_expanded_input_that_another_overlaps_is_refused_and_the_advice_helps() -> None:
    def func(a: Tensor, b: Tensor) -> Tensor:
        b.mul_(2)
        return a * 3

    def advised(a: Tensor, b: Tensor) -> Tensor:
        return func(a.expand(4), b)

    def given(x: Tensor) -> Sequence[Tensor]:
        return x[:1].expand(4), x[:3]

    inputs = tuple(given(torch.ones(LINE) * leaf().float()))
    with pytest.raises(UnsupportedMutationError, match="pass the tensor before expand"):
        capture(func, inputs)(*inputs)
    check(advised, (LINE,), lambda x: (x[:1], x[:3]), "mutations_and_views")


def test_sizes_that_may_differ() -> None:
    def func(a: Tensor, b: Tensor) -> Any:
        a.unsqueeze_(0)
        b.t_()
        b.mul_(3)
        return a * 2, b[0]

    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    inputs = tuple(torch.ones(ROWS, dtype=torch.float64) * leaf() for _ in range(2))
    captured = capture(func, inputs, dynamic_shapes={"a": rows, "b": rows})
    for count in (2, 5):
        sizes = ((count, 3), (count, 3))
        assert_alike(Seen(captured, sizes, themselves), Seen(func, sizes, themselves))
