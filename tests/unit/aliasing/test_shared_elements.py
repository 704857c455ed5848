"""Tensors whose positions share elements (`unfold`, `as_strided`, `expand`): each write reaches every position.

And writes whose source shares elements with their target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import InputMismatchError, UnsupportedMutationError, capture, functionalize
from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES


def windows(x: Tensor) -> Any:
    y = x + 1
    y.unfold(0, 3, 2).add_(1)
    return y


def windows_with_a_factor_for_each_position(x: Tensor) -> Any:
    y = x + 1
    y.unfold(0, 3, 1).mul_(torch.arange(1.0, 4.0))
    return y


def windows_of_which_the_last_wins(x: Tensor) -> Any:
    y = x + 1
    w = y.unfold(0, 3, 2)
    w.copy_(torch.arange(100.0, 100.0 + w.numel()).view_as(w))
    return y


def windows_that_are_wide(x: Tensor) -> Any:
    y = x + 1
    y.unfold(0, 8, 1).copy_(torch.arange(32.0).view(4, 8))
    return y


def windows_one_by_one(x: Tensor) -> Any:
    y = x + 1
    w = y.unfold(0, 3, 2)
    before = w[0].sum()
    w[1].add_(1)
    w[2].mul_(2)
    after = w[0].sum()
    w[:, 1].zero_()
    return y, w, before, after


def windows_of_a_strided_tensor(x: Tensor) -> Any:
    y = (x + 1)[::2]
    y.unfold(0, 2, 1).add_(y.unfold(0, 2, 1))
    return y


def windows_as_result(x: Tensor) -> Any:
    y = x + 1
    torch.add(y.unfold(0, 3, 2), 1, out=y.unfold(0, 3, 2))
    return y


def strided(x: Tensor) -> Any:
    y = x + 1
    y.as_strided((4, 5), (2, 1)).sub_(x[:5]).mul_(2)
    y.as_strided((5, 4), (1, 2)).pow_(2)
    return y


def strided_in_three_dimensions(x: Tensor) -> Any:
    y = x * 0.1
    v = y.as_strided((3, 3, 3), (1, 1, 1))
    v.addcmul_(v, v, value=0.5)
    return y, v


def strided_with_bounds_for_each_position(x: Tensor) -> Any:
    x.as_strided((3, 4), (2, 1)).clamp_(torch.arange(0.0, 4.0), torch.arange(2.0, 6.0))
    return x * 1


def strided_compared(x: Tensor) -> Any:
    y = x + 1
    y.as_strided((4, 4), (1, 1)).lt_(5)
    return y


def strided_in_the_order_of_the_source(x: Tensor) -> Any:
    y = x + 1
    y.as_strided((4, 4), (1, 1)).copy_(torch.arange(16.0).view(4, 4).t())
    return y


def long_rows(x: Tensor) -> Any:
    y = torch.zeros(40) + x.sum()
    y.as_strided((3, 33), (1, 1)).add_(torch.arange(33.0)).mul_(1.5)
    return y


def one_row_of_expanded(x: Tensor) -> Any:
    y = x + 1
    e = y.expand(3, 11)
    e[1].add_(1)
    e[0, 3:5].mul_(7)
    y[None].expand(3, 11)[1][None].expand(2, 11)[0][2:].sub_(1)
    return y, e


def part_of_the_windows_of_an_input(x: Tensor) -> Any:
    w = x.unfold(0, 3, 1)
    w[2:4].add_(1)
    return w.sum(0)


PROGRAMS = [value for value in list(globals().values()) if getattr(value, "__module__", None) == __name__]


@pytest.mark.every(5)
@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("mode", [None, *MODES], ids=str)
@pytest.mark.parametrize("func", PROGRAMS, ids=lambda func: func.__name__)
def test_writes(func: Callable[..., Any], mode: Any, remove: str) -> None:
    assert_equivalent(func, torch.arange(11.0), remove=remove, tracing_mode=mode)


def update_all(x: Tensor) -> Any:
    return x.add_(1) * 2


def update_a_row(x: Tensor) -> Any:
    x[1].mul_(3)
    return x.sum(0)


def overwrite(x: Tensor) -> Any:
    x.copy_(torch.arange(float(x.numel())).view(x.shape))
    return x * 1


def update_from_its_own_columns(x: Tensor) -> Any:
    x[:, 1:].add_(x[:, :-1] * 1)
    return x + 0


INPUTS = {
    "windows": torch.arange(11.0).unfold(0, 3, 2),
    "wide windows": torch.arange(11.0).unfold(0, 8, 1),
    "equal strides": torch.arange(11.0).as_strided((3, 3), (1, 1)),
    "strided": torch.arange(11.0).as_strided((3, 3), (2, 3)),
    "windows of a part": torch.arange(11.0)[3:7].unfold(0, 2, 1),
}


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("mode", [None, *MODES], ids=str)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("func", [update_all, update_a_row, overwrite, update_from_its_own_columns])
def test_inputs(func: Callable[..., Any], name: str, mode: Any, remove: str) -> None:
    assert_equivalent(func, INPUTS[name], remove=remove, tracing_mode=mode)


# Sources that overlap their target at other positions: the result depends on the order of eager's kernel, whose own
# check misses those where one of the tensors has gaps. With a clone the programs are defined.

Wrap = Callable[[Tensor], Tensor]


def put(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


OVERLAPPING: dict[str, Callable[[Tensor, Wrap], Any]] = {
    "first column": lambda x, copy: x.sub_(copy(x[:, :1])),
    "last column": lambda x, copy: x.div_(copy(x[:, -1:])),
    "columns moved on": lambda x, copy: x[:, 1:].copy_(copy(x[:, :-1])),
    "columns moved back": lambda x, copy: x[:, :-1].copy_(copy(x[:, 1:])),
    "rows of a part": lambda x, copy: x[1:, ::2].copy_(copy(x[:-1, ::2])),
    "of every other": lambda x, copy: x[:, 0::2].sub_(copy(x[:, :1])),
    "transposed part": lambda x, copy: x[:, :4].copy_(copy(x[:, :4].t())),
    "an element": lambda x, copy: x[:, ::2].mul_(copy(x[1, 2])),
    "lerp": lambda x, copy: x[:, 1:].lerp_(copy(x[:, :-1]), 0.5),
    "addcmul": lambda x, copy: x[:, 1:].addcmul_(x[:, 1:], copy(x[:, :-1])),
    "out": lambda x, copy: torch.mul(copy(x[:, :-1]), 2, out=x[:, 1:]),
    "where": lambda x, copy: torch.where(x[:, 1:] > 3, copy(x[:, :-1]), x[:, 1:], out=x[:, 1:]),
    "foreach": lambda x, copy: torch._foreach_sub_([x], [copy(x[:, :1])]),
    "one entry of a list": lambda x, copy: torch._foreach_mul_([x[:2, 1:], x[2:]], [copy(x[:2, :-1]), x[2:] * 1]),
    "matrix product": lambda x, copy: x[:, :4].addmm_(copy(x[:, :4]), x[:, :4].clone()),
    "matrix product, out": lambda x, copy: torch.mm(copy(x[:, :4]), x[:, :4].clone(), out=x[:, :4]),
    "sum": lambda x, copy: torch.sum(copy(x), 0, out=x[0]),
    "cat": lambda x, copy: torch.cat([copy(x[:, 2:4]), copy(x[:, :2])], 1, out=x[:, :4]),
    "cumsum": lambda x, copy: torch.cumsum(copy(x[:, :-1]), 1, out=x[:, 1:]),
    "scatter": lambda x, copy: x[:, ::2].scatter_(1, torch.tensor([[2, 1, 0]] * 4), copy(x[:, 1:4])),
    "index_put": lambda x, copy: x[:, ::2].index_put_((torch.tensor([0, 2, 1]),), copy(x[:3, 1:4])),
    "masked_scatter": lambda x, copy: x[:, 1:].masked_scatter_(x[:, 1:] > 3, copy(x[:, :-1])),
    "mask": lambda x, copy: (m := x % 3 == 0).masked_fill_(copy(m[:, :1]), False),
    "its own mask": lambda x, copy: put(m := x % 3 == 0, copy(m[:, 0]), False),
}
# No element is read where it was written at another position, or else the write leaves it as it was.
DEFINED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x.add_(x),
    "halves": lambda x: x[:, :3].mul_(x[:, 3:]),
    "odd and even": lambda x: x[:, 0::2].mul_(x[:, 1::2]),
    "a row and a column": lambda x: x[0, :4].add_(x[:, 0]),
    "the diagonal": lambda x: x[0, :4].mul_(x[:, :4].diagonal()),
    "one row to all": lambda x: x[:, 1:].copy_(x[1, 1:]),
    "one column to all": lambda x: x.copy_(x[:, :1]),
    "masks": lambda x: (m := x % 3 == 0).bitwise_or_(m[:, :1]),
    "rows by a mask of the same": lambda x: put(m := x % 3 == 0, m[:, 0], m[:1].clone()),
    "where it is true": lambda x: put(m := x % 3 == 0, m, False),
    "a number": lambda x: x.fill_(x[1, 1]),
    "a number by a mask": lambda x: x.masked_fill_(x > 3, x[1, 1]),
    "columns swapped": lambda x: put(x, (slice(None), [0, 1]), x[:, [1, 0]]),
    "as integers": lambda x: x.view(torch.int32).copy_(x),
    "real parts": lambda x: (c := torch.view_as_complex(x.view(4, 3, 2))).mul_(c.real),
    "parts of numbers": lambda x: (c := torch.view_as_complex(x.view(4, 3, 2))).real.mul_(c.imag),
    "cumsum": lambda x: torch.cumsum(x, 1, out=x),
    "entries of one list": lambda x: torch._foreach_add_([x[:2], x[2:]], [x[:2], x[2:]]),
}


def matrix() -> Tensor:
    return torch.arange(24.0).view(4, 6)


def after(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A write to an input, and to a view of what a program makes."""

    def program(x: Tensor) -> Any:
        y = torch.stack([x, x + 1])[1]
        return write(x), write(y), y * 1

    return program


@pytest.mark.every(5)
@pytest.mark.parametrize("mode", [None, *MODES], ids=str)
@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_source_that_overlaps_is_refused_in_a_trace(name: str, mode: Any) -> None:
    write = OVERLAPPING[name]
    if mode is None:
        assert_equivalent(after(lambda x: write(x, lambda part: part)), matrix())
        return
    with pytest.raises(
        UnsupportedMutationError, match=r"test_shared_elements\.py:(?s:.*)pass a copy \(`\.clone\(\)`\)"
    ):
        make_fx(functionalize(lambda x: write(x, lambda part: part)), tracing_mode=mode)(matrix())
    assert_equivalent(after(lambda x: write(x, torch.clone)), matrix(), tracing_mode=mode)


@pytest.mark.every(5)
@pytest.mark.parametrize("mode", [None, *MODES], ids=str)
@pytest.mark.parametrize("name", DEFINED)
def test_a_source_that_changes_nothing_is_taken(name: str, mode: Any) -> None:
    assert_equivalent(after(DEFINED[name]), matrix(), tracing_mode=mode)


@pytest.mark.parametrize("name", ["first column", "columns moved on", "foreach"])
def test_other_routes_refuse_it_as_well(name: str) -> None:
    def program(x: Tensor) -> Tensor:
        OVERLAPPING[name](x, lambda part: part)
        return x * 1

    with pytest.raises(UnsupportedMutationError, match="at other positions"):
        capture(program, (matrix(),))
    with pytest.raises(Exception, match="at other positions"):
        torch.compile(program, backend="functionalize")(matrix())


@pytest.mark.parametrize("mode", MODES)
def test_inputs_that_overlap(mode: Any) -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        x.add_(y)
        return y * 1

    whole = matrix()
    with pytest.raises(UnsupportedMutationError, match="at other positions"):
        make_fx(functionalize(program), tracing_mode=mode)(whole[:, 1:], whole[:, :-1])
    assert_equivalent(program, whole[:, 1:], whole[:, :-1])
    assert_equivalent(program, whole[:, 3:], whole[:, :3], tracing_mode=mode)


def move(cache: Tensor, keys: Tensor) -> Tensor:
    n = keys.shape[0]
    cache[:, :n] = cache[:, n : 2 * n]
    return cache * 1


def turn(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    x[..., :half] *= x[..., half:]
    x[:, :, 1] *= x[:, :, 0]
    return x * 1


def test_parts_that_are_apart_for_all_sizes() -> None:
    length = Dim("length", min=2, max=16)
    moved = capture(move, (torch.randn(3, 64), torch.ones(5)), dynamic_shapes={"cache": None, "keys": {0: length}})
    for size in (2, 16):
        cache, own = torch.randn(3, 64), torch.ones(size)
        torch.testing.assert_close(moved(cache.clone(), own), move(cache.clone(), own))
    turned = capture(turn, (torch.randn(3, 5, 8),), dynamic_shapes={"x": {0: Dim("rows"), 1: length}})
    for shape in ((2, 3, 8), (9, 16, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(turned(x.clone()), turn(x.clone()))


def test_parts_that_are_apart_for_some_sizes() -> None:
    def program(x: Tensor, at: Tensor, length: Tensor) -> Tensor:
        start, n = at.shape[0], length.shape[0]
        x[:, :n] = x[:, start : start + n]
        return x * 1

    sizes = {"x": None, "at": {0: Dim.AUTO}, "length": {0: Dim.AUTO}}
    captured = capture(program, (torch.randn(3, 64), torch.ones(9), torch.ones(4)), dynamic_shapes=sizes)
    for start, n in ((20, 20), (30, 7)):
        arguments = torch.randn(3, 64), torch.ones(start), torch.ones(n)
        x, *others = arguments
        torch.testing.assert_close(captured(x.clone(), *others), program(x.clone(), *others))
    with pytest.raises(InputMismatchError):
        captured(torch.randn(3, 64), torch.ones(5), torch.ones(7))


def test_parts_whose_place_comes_from_data() -> None:
    def program(x: Tensor) -> Tensor:
        at = int(x[0].argmin())
        x[0] = x[at + 1]  # the first one, or another
        x.sub_(x[:, at : at + 1].clone())
        return x * 1

    def overlapping(x: Tensor) -> Tensor:
        at = int(x[0].argmin())
        return x.sub_(x[:, at : at + 1]) * 1

    def moved_on(x: Tensor) -> Tensor:
        places = x.nonzero().t()
        places[:, 1:] = places[:, :-1]
        return places * 1

    x = torch.randn(4, 3)
    torch.testing.assert_close(capture(program, (x.clone(),))(x.clone()), program(x.clone()))
    for refused in (overlapping, moved_on):
        with pytest.raises(UnsupportedMutationError, match="at other positions"):
            capture(refused, (x,))
