"""Inputs that are views of one tensor, written where gradients flow: calls and compiled functions against eager.

Invariant: values, gradients of the tensor and of what it was computed from, and the inputs afterwards are eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from functionalize import UnsupportedMutationError, capture
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.overlap import disjoint

pytestmark = [
    # Dynamo warns of torch's own code.
    pytest.mark.filterwarnings("ignore:.*(autograd.function.Function.*should not be instantiated|torch.jit)"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
Program = Callable[..., Any]


def writes_both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    b.add_(1)
    return (a * b).sum()


def writes_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    return b * 3


def reads_the_other_before(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = b * 2
    a.mul_(3)
    return y.sum() * b


def writes_one_by_the_other(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    b.add_(a.sum())
    return b * 3


def gives_them(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a.mul_(2)
    return b, a, b[1:], a.view(-1)


def writes_the_other(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.mul_(3)
    return a.sin()


PROGRAMS = [writes_both, writes_one, reads_the_other_before, writes_one_by_the_other, gives_them, writes_the_other]
NO_VIEW = "view size is not compatible with input tensor's size and stride"  # what `a.view(-1)` raises of columns
NO_VIEW_IN_DYNAMO = "Cannot view a tensor with shape"  # and torch's fake tensors
APART = {
    "halves": lambda base: (base[:4], base[4:]),
    "columns": lambda base: (base.view(2, 4)[:, :2], base.view(2, 4)[:, 2:]),
    "every second": lambda base: (base[::2], base[1::2]),
    "one detached": lambda base: (base[:4], base[4:].detach()),
    "one detached, the same": lambda base: (base, base.detach()),
}
OVERLAPPING = {
    "with their base": lambda base: (base.view(2, 4)[:, 1:2], base.view(2, 4)),
    "base first": lambda base: (base, base[:1]),
    "the whole, twice": lambda base: (base.view(2, 4), base.view(-1).view(2, 4)),
    "windows": lambda base: (base[:6], base[2:]),
    "rows and their transpose": lambda base: (base[:4].view(2, 2), base[:4].view(2, 2).t()),
}


def seen(func: Program, views: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], compiled: Any = None) -> list[Any]:
    """What can be seen of a call; ``compiled`` makes what is called of the function and of inputs like those."""
    torch.manual_seed(0)
    leaf = torch.randn(8, dtype=torch.float64, requires_grad=True)
    called = func if compiled is None else compiled(func, views(torch.zeros_like(leaf, requires_grad=True) * 1))
    base = leaf * 1
    args = views(base)
    results = called(*args)
    results = list(results) if isinstance(results, tuple) else [results]
    everything = [*results, *args, base]
    known = [value for value in everything if value.requires_grad]
    sum((value * torch.arange(1.0, value.numel() + 1).view(value.size())).sum() for value in known).backward()
    return [[value.requires_grad for value in everything], [value.detach() for value in everything], leaf.grad]


def compiled(func: Program, example: tuple[torch.Tensor, ...]) -> Program:
    torch._dynamo.reset()
    return torch.compile(func, backend="functionalize", dynamic=False, fullgraph=True)


def recaptured(func: Program, example: tuple[torch.Tensor, ...]) -> Program:
    return capture(func, example, on_guard_failure="recapture")


MAKERS, MAKER_IDS = [compiled, capture], ["compiled", "captured"]


def views_of(base: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of a tensor that overlap, by their places."""
    return base.as_strided((6,), (1,), start), base.as_strided((6,), (1,), start + 2)


def check(func: Program, views: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], make: Any) -> None:
    try:
        wanted = seen(func, views)
    except RuntimeError as error:
        assert NO_VIEW in str(error)
        with pytest.raises(RuntimeError, match=f"{NO_VIEW}|{NO_VIEW_IN_DYNAMO}"):
            seen(func, views, make)
        return
    torch.testing.assert_close(seen(func, views, make), wanted)


@pytest.mark.every(5)
@pytest.mark.parametrize("make", MAKERS, ids=MAKER_IDS)
@pytest.mark.parametrize("views", APART.values(), ids=APART.keys())
@pytest.mark.parametrize("func", PROGRAMS, ids=lambda func: func.__name__)
def test_written_inputs_that_are_apart(func: Program, views: Any, make: Any) -> None:
    check(func, views, make)


@pytest.mark.every(6)
@pytest.mark.parametrize("make", MAKERS, ids=MAKER_IDS)
@pytest.mark.parametrize("views", OVERLAPPING.values(), ids=OVERLAPPING.keys())
@pytest.mark.parametrize("func", PROGRAMS, ids=lambda func: func.__name__)
def test_written_inputs_that_overlap(func: Program, views: Any, make: Any) -> None:
    check(func, views, make)


def test_a_call_refuses_written_inputs_that_overlap_in_sizes_that_may_differ() -> None:
    base = torch.randn(8, requires_grad=True) * 1
    before, sizes = base.detach().clone(), {0: torch.export.Dim("n", max=7)}
    captured = capture(writes_one, (base[:6], base[2:]), dynamic_shapes={"a": sizes, "b": sizes})
    with pytest.raises(UnsupportedMutationError, match="`a` is written, requires gradients, and shares memory"):
        captured(base[:6], base[2:])
    assert torch.equal(base, before)


@pytest.mark.parametrize("make", MAKERS, ids=MAKER_IDS)
def test_three_views_and_their_base(make: Any) -> None:
    def func(a: torch.Tensor, b: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a.mul_(2)
        b.add_(a)
        return base.sin() * 2, a * b

    check(func, lambda base: (base[:4], base[4:], base), make)


@pytest.mark.parametrize("make", [compiled, recaptured], ids=MAKER_IDS)
def test_other_calls_of_one_function(make: Any) -> None:
    """Whether inputs overlap, and what autograd knows them for views of, may differ by call."""
    overlapping: Any = OVERLAPPING["windows"]
    unrelated = lambda base: (base[:6], (base * 3)[2:])  # noqa: E731
    detached = lambda base: (base[:6], base.detach()[2:].requires_grad_())  # noqa: E731
    larger = lambda base: views_of(torch.cat([base, base.detach()]), 0)  # noqa: E731
    further = lambda base: views_of(torch.cat([base, base.detach()]), 3)  # noqa: E731
    square = lambda base: views_of(torch.cat([base, base.detach()]).view(4, 4), 0)  # noqa: E731
    made = make(writes_one, overlapping(torch.zeros(8, dtype=torch.float64, requires_grad=True) * 1))
    for views in (unrelated, overlapping, larger, detached, further, square, overlapping, unrelated):
        torch.testing.assert_close(seen(writes_one, views, lambda *_: made), seen(writes_one, views))


def test_only_calls_with_gradients_take_the_tensor_that_inputs_are_views_of() -> None:
    base = torch.arange(8.0).requires_grad_() * 1
    captured = capture(writes_one, (base[:6], base[2:]))
    names = [entry.name for entry in captured.inputs]
    for _ in range(2):
        (captured(base[:6], base[2:]) * 2).sum().backward(retain_graph=True)
        with torch.no_grad():
            captured(base[:6], base[2:])
    assert [entry.name for entry in captured.inputs] == names
    exported = captured.to_exported_program().module()
    ours, eager = torch.arange(8.0), torch.arange(8.0)
    assert torch.equal(exported(ours[:6], ours[2:]), writes_one(eager[:6], eager[2:]))


def test_a_call_counts_its_writes_as_eager_does() -> None:
    def versions(func: Any) -> list[int]:
        base = torch.ones(8, requires_grad=True) * 1
        views = base[:6], base[2:]
        func(*views)
        return [tensor._version for tensor in (*views, base)]

    base = torch.ones(8, requires_grad=True) * 1
    for func in (writes_one, writes_one_by_the_other):
        assert versions(capture(func, (base[:6], base[2:]))) == versions(func)


def second(func: Program, views: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> torch.Tensor:
    leaf = torch.linspace(0, 1, 8, dtype=torch.float64, requires_grad=True)
    base = leaf * 1
    result = func(*views(base)).sin().sum() + base.cos().sum()
    (first,) = torch.autograd.grad(result, leaf, create_graph=True)
    return torch.autograd.grad(first.square().sum(), leaf)[0]


@pytest.mark.parametrize("make", MAKERS, ids=MAKER_IDS)
@pytest.mark.parametrize(
    "views",
    [APART["halves"], lambda base: (base[:4], base), lambda base: (base[:4], base[:6][:4])],
    ids=["apart", "with their base", "of what is no input"],
)
def test_second_derivatives(views: Any, make: Any) -> None:
    def func(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(a.clone())
        return (b * b).sin()

    made = make(func, views(torch.zeros(8, dtype=torch.float64, requires_grad=True) * 1))
    torch.testing.assert_close(second(made, views), second(func, views))


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (((4,), (1,), 0), ((4,), (1,), 4), True),
        (((4,), (1,), 0), ((4,), (1,), 3), False),
        (((2, 2), (4, 1), 0), ((2, 2), (4, 1), 2), True),
        (((2, 3), (4, 1), 0), ((2, 2), (4, 1), 2), False),
        (((2, 2), (4, 2), 0), ((2, 2), (4, 2), 1), True),
        (((2, 2), (4, 2), 0), ((4,), (1,), 0), False),
        (((2, 3), (3, 1), 1), ((2,), (3,), 0), False),  # the last of a row lies at the first of the next
        (((0,), (1,), 2), ((8,), (1,), 0), True),
        (((3, 2), (3, 2), 0), ((2,), (3,), 1), True),  # strides that do not nest
        (((3, 2), (3, 2), 0), ((2,), (3,), 2), False),
        (((2, 2), (1, 4), 0), ((2, 2), (4, 1), 2), True),
    ],
)
def test_what_is_disjoint(one: Any, other: Any, apart: bool) -> None:
    layouts = [Layout(size, stride, offset, torch.float32) for size, stride, offset in (one, other)]
    elements = [set(torch.arange(32).as_strided(*place).flatten().tolist()) for place in (one, other)]
    assert disjoint(*layouts) == disjoint(*layouts[::-1]) == apart
    assert not apart or elements[0].isdisjoint(elements[1])
