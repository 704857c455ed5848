"""Strides of results that eager's kernels lay out otherwise than torch's decompositions, of which fake tensors tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from functionalize import capture
from functionalize.tracing import meta_cache

OPERATORS: list[Callable[..., Any]] = [
    *(torch.add, torch.mul, torch.div, torch.atan2, torch.maximum, torch.eq, torch.copysign, torch.xlogy),
    *(torch.logaddexp, torch.logaddexp2, torch.logical_and, torch.logical_or, torch.logical_xor),
    *(torch.floor_divide, torch.special.xlog1py),
]
LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "expanded": lambda dtype: torch.ones((), dtype=dtype).expand(3, 3),
    "transposed": lambda dtype: torch.ones(3, 3, dtype=dtype).t(),
    "rows": lambda dtype: torch.ones(3, 1, dtype=dtype).expand(3, 3),
    "number": lambda dtype: torch.ones((), dtype=dtype),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_of_two_tensors(operator: Callable[..., Any], dtype: torch.dtype) -> None:
    pairs = [(LAYOUTS[one](dtype), LAYOUTS[other](dtype)) for one in LAYOUTS for other in LAYOUTS]
    pairs += [(one.float(), other) for one, other in pairs]

    def run(pairs: Any) -> Any:
        return [operator(*pair) for pair in pairs]

    ours, eager = capture(run, (pairs,))(pairs), run(pairs)
    assert [one.stride() for one in ours] == [one.stride() for one in eager]
    assert [one.dtype for one in ours] == [one.dtype for one in eager]


def test_of_angles() -> None:
    def run(x: torch.Tensor) -> Any:
        return x.t().angle(), x.real.t().angle(), x.real.t().int().angle()

    x = torch.randn(3, 4, dtype=torch.complex64)
    ours, eager = capture(run, (x,))(x), run(x)
    assert [one.stride() for one in ours] == [one.stride() for one in eager]


def test_of_powers_and_leaks() -> None:
    def run(x: torch.Tensor, number: torch.Tensor) -> Any:
        y, base = x.t(), number.item()
        return [2**y, base**y, torch.float_power(2, y), torch.rrelu(y, 0.1, 0.1), *torch._foreach_pow(2, [y])]

    args = torch.rand(3, 4), torch.tensor(3.0)
    ours, eager = capture(run, args)(*args), run(*args)
    assert [one.stride() for one in ours] == [one.stride() for one in eager]
    assert all(map(torch.equal, ours, eager))


def test_of_gradients_through_dropout() -> None:
    def run(gradient: torch.Tensor, mask: torch.Tensor) -> Any:
        return torch.ops.aten.native_dropout_backward(gradient.mT, mask, 2.0)

    args = torch.randn(3, 4), torch.rand(4, 3) > 0.5
    assert capture(run, args)(*args).stride() == run(*args).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_of_gradients_of_sums(dtype: torch.dtype) -> None:
    """The gradient of a sum is an expanded one."""

    def run(x: torch.Tensor) -> Any:
        y = x.mT
        return torch.autograd.grad((y * y).sum(), [y])[0].view(3, 1, 1, 3)

    x = torch.randn(3, 3).to(dtype).requires_grad_()
    assert capture(run, (x,))(x).stride() == run(x).stride()


@pytest.mark.parametrize("training", [True, False])
def test_of_batch_norms_of_permuted_tensors(training: bool) -> None:
    """They are dense, so that views of them can be taken."""
    of_rows, of_images = (norm.train(training) for norm in (torch.nn.BatchNorm1d(6), torch.nn.BatchNorm2d(6)))

    def run(x: torch.Tensor, y: torch.Tensor) -> Any:
        return of_rows(x.transpose(1, 2)).view(-1), of_images(y.transpose(1, 2)).view(-1), of_images(y.mT.mT[:, :6])

    x, y = torch.randn(2, 5, 6, requires_grad=True), torch.randn(2, 6, 6, 3, requires_grad=True)
    eager, ours = run(x, y), capture(run, (x, y))(x, y)
    torch.testing.assert_close([one.stride() for one in ours], [one.stride() for one in eager])
    for one, other in zip(ours, eager, strict=True):
        options: Any = {"allow_unused": True, "retain_graph": True}
        got, want = (torch.autograd.grad(result.square().sum(), [x, y], **options) for result in (one, other))
        assert [g is None for g in got] == [g is None for g in want]
        torch.testing.assert_close([g for g in got if g is not None], [g for g in want if g is not None])


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("size", "stride"),
    [
        *(((1, 3), (1, 1)), ((1, 3), (2, 2)), ((2, 1), (1, 5)), ((2, 1, 3), (3, 1, 1)), ((3, 1, 2), (1, 1, 3))),
        *(((1, 1, 4), (3, 9, 1)), ((2, 1, 3), (1, 7, 2)), ((1, 2, 3), (6, 3, 1))),
        *(((2, 1, 3, 4), (12, 7, 4, 1)), ((1, 2, 3, 1), (9, 1, 2, 7)), ((2, 1, 1, 3), (3, 1, 9, 1))),
        *(((1, 3, 2, 1), (1, 1, 3, 1)), ((2, 3, 1, 1), (3, 1, 1, 1))),
        *(((12, 0), (2, 1)), ((2, 0), (1, 2)), ((0, 3), (1, 4)), ((3, 0, 2), (8, 2, 1)), ((2, 3, 0), (1, 8, 2))),
        *(((2, 0, 1), (1, 2, 7)), ((2, 3, 0, 4), (1, 2, 24, 6))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_strides_of_dimensions_of_one_position_or_none(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> None:
    def strides(x: torch.Tensor, row: torch.Tensor, whole: torch.Tensor) -> list[tuple[int, ...]]:
        compared = [x > 0, x == row, x.logical_not(), torch.where(x > 0, x, 1)]
        computed = [x + 2, x * x, x + row, row - x, x * 1.5, x / 2, x * whole, x.neg(), x.clamp(0, 1), x**2, x.sin()]
        copied = [x.clone(), x.to(torch.float64), torch.zeros_like(x), x.flip(0), x.masked_fill(x > 0, 1)]
        return [result.stride() for result in (*compared, *computed, *copied)]

    x = torch.empty_strided(size, stride, dtype=dtype).fill_(1)
    given = x, torch.ones(size[-1:]), torch.ones(size, dtype=torch.float64)
    assert capture(strides, given)(*given) == strides(*given)


def test_of_no_elements_beside_sparse_tensors_and_where_strides_are_symbols() -> None:
    """Neither has numbers to compare: no size is asked for, and nothing raises."""
    sparse = torch.zeros(0, 3).to_sparse()
    assert capture(lambda x, y: x + y, (torch.zeros(0, 3), sparse))(torch.zeros(0, 3), sparse).size() == (0, 3)

    def program(x: torch.Tensor) -> Any:
        return x[:, :0].t() + 1, x[:, :0].clone(), x * 2

    columns = torch.export.Dim("columns", min=2)
    captured = capture(program, (torch.ones(3, 4),), dynamic_shapes=({1: columns},))
    for count in (2, 4, 6):
        x = torch.ones(3, count)
        assert [one.size() for one in captured(x)] == [one.size() for one in program(x)]


def test_of_a_view_that_an_earlier_capture_took() -> None:
    """Captures share a cache: here the first one puts a view into it that the finalizer takes, not the program."""

    def silent(w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return w.unsqueeze(-1).transpose(-1, 0)

    def viewed(x: torch.Tensor) -> torch.Tensor:
        y = (x * 1).unsqueeze(-1).transpose(-1, 0)  # of strides (1, 1)
        return y.view(y.shape)

    meta_cache.clear()
    capture(silent, (torch.ones(7, requires_grad=True),))
    x = torch.ones(7)
    assert capture(viewed, (x,))(x).stride() == viewed(x).stride() == (7, 1)


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_of_an_index_into_a_view(remove: str) -> None:
    """An index without a mask keeps the order of the dimensions that it does not index."""

    def run(x: torch.Tensor, index: torch.Tensor) -> Any:
        y = x.permute(2, 1, 0)
        parts = (
            y[index],
            y[:, index],
            y[:, :, index],
            y[index, :, index],
            y[None, index],
            y[:, None, index],
            y[:1, index],
        )
        return *parts, y[:, 0][None, index].as_strided((4,), (1,))

    args = torch.randn(2, 4, 3), torch.tensor([0, 1])
    ours, eager = capture(run, args, remove=remove)(*args), run(*args)
    assert [one.stride() for one in ours] == [one.stride() for one in eager]
    assert all(map(torch.equal, ours, eager))


def test_of_an_index_of_no_tensor() -> None:
    def run(x: torch.Tensor) -> Any:
        return torch.ops.aten.index.Tensor(x.permute(2, 1, 0), [None])

    x = torch.ones(0, 3, 4)  # others are an internal error of torch's
    assert capture(run, (x,))(x).stride() == run(x).stride()


def test_of_a_position_in_an_expanded_dimension() -> None:
    """The position is data-dependent, and its offset is not."""
    position = torch.tensor(1)

    def run(x: torch.Tensor) -> torch.Tensor:
        return x[:1].expand(3, 6)[position]

    x = torch.randn(4, 6)
    assert torch.equal(capture(run, (x,))(x), run(x))
