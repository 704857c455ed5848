"""Operators whose results have layouts, sizes or last bits of their own, and operators with bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture, functionalize
from functionalize.errors import UnsupportedProgramError


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_reshaped_as_in_eager(layout: torch.layout) -> None:
    """They have no sizes to ask about."""

    def f(x: Tensor) -> Any:
        return x.is_contiguous(), x.contiguous(), x.reshape(2, -1, 3)

    parts = [torch.ones(2, 3), torch.zeros(1, 3)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    (known, *ours), (expected, *eager) = functionalize(f)(nested), f(nested)
    assert known is expected
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(list(one.unbind()), list(other.unbind()))


# Sizes of both factors, whether the second lies column by column, offsets of the groups.
GROUPED = [
    ((8, 16), (2, 16, 32), False, [3, 8]),
    ((8, 16), (2, 6, 16), True, [4, 8]),  # rows of the result are padded to 16 bytes
    ((2, 8, 16), (2, 16, 8), False, None),
    ((2, 8, 16), (16, 8), False, [4, 8]),
    ((8, 16), (16, 8), False, [4, 16]),
    ((8, 16), (2, 16, 3), False, [4, 8]),  # what follows is refused
    ((8, 16), (2, 12, 8), False, [4, 8]),
    ((8, 16), (3, 16, 8), False, [4, 8]),
    ((8, 16), (2, 16, 8), False, None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("left", "right", "turned", "offsets"), GROUPED)
def test_grouped_matrix_products(left: Any, right: Any, turned: bool, offsets: Any, dtype: torch.dtype) -> None:
    a, b = torch.randn(left, dtype=dtype), torch.randn(right, dtype=dtype)
    b = b.mT if turned else b
    groups = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(a, b, offs=groups)

    try:
        want = run(a, b)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            capture(run, (a, b))
        return
    got = capture(run, (a, b))(a, b)
    assert torch.equal(got, want)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("part", [slice(None), slice(1, 7)])
@pytest.mark.parametrize("tokens", [5, 8])
def test_gradients_of_grouped_matrix_products(part: slice, tokens: int) -> None:
    """Copies of views have rows of any length; the kernel asks for rows of 16 bytes, as eager's transposes have."""
    groups = torch.tensor([2, 3, tokens], dtype=torch.int32)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x[:, part], weight[..., part].mT, offs=groups).sin().sum()

    x, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    want = torch.autograd.grad(run(x, weight), (x, weight))
    for remove in ("mutations", "mutations_and_views"):
        loss = capture(run, (x, weight), remove=remove)(x, weight)
        torch.testing.assert_close(torch.autograd.grad(loss, (x, weight)), want)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        capture(run, (x[:, :6].clone(), weight[..., :6].clone()))


@pytest.mark.parametrize("size", [(), (3,), (2, 3)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_margin_losses_of_one_row_are_numbers(size: tuple[int, ...], reduction: str) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.multilabel_margin_loss(x, y, reduction=reduction)

    x, y = torch.rand(size, requires_grad=True), torch.zeros(size, dtype=torch.int64)
    given, wanted = capture(program, (x, y))(x, y), program(x, y)
    assert given.size() == wanted.size()
    assert torch.equal(given, wanted)
    assert torch.equal(*(torch.autograd.grad(loss.sum(), x)[0] for loss in (given, wanted)))


_EQUATIONS = {
    "square": ((3, 3), (3, 1)),
    "tall": ((5, 3), (5, 2)),
    "wide": ((3, 5), (3, 2)),
    "batch": ((2, 5, 3), (2, 5, 2)),
    "of one vector": ((5, 3), (5,)),
    "of vectors": ((2, 5, 3), (2, 5)),
    "broadcast": ((4, 1, 5, 3), (1, 2, 5, 2)),
    "none": ((0, 3), (0, 1)),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("driver", [None, "gels", "gelsd", "gelss", "gelsy"])
@pytest.mark.parametrize("equations", _EQUATIONS)
def test_least_squares_are_laid_out_as_in_eager(equations: str, driver: str | None) -> None:
    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.linalg.lstsq(a, b, driver=driver))

    torch.manual_seed(0)
    given = [torch.randn(size, requires_grad=True) for size in _EQUATIONS[equations]]
    rows, columns = _EQUATIONS[equations][0][-2:]
    if driver in ("gelss", "gelsd") and rows > columns:
        with pytest.raises(UnsupportedProgramError, match=r"(?s)least squares.*residuals.*another driver"):
            capture(program, given)
        return
    ours, eager = capture(program, given)(*given), program(*given)
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other, check_stride=True, rtol=1e-3, atol=1e-4)
        assert one.requires_grad == other.requires_grad
    gradients = [torch.autograd.grad(one[0].sum(), given) for one in (ours, eager)]
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-3)


def test_least_squares_of_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedProgramError, match=r"(?s)lstsq.* on the device 'meta'.*solve it on the CPU"):
        capture(lambda x: torch.linalg.lstsq(x, x).solution, (torch.empty(3, 3, device="meta"),))


@torch.library.custom_op("functionalize_regressions::add_one", mutates_args=("x",))
def add_one(x: Tensor) -> None:
    x.add_(1)


def test_a_custom_op_writes_to_state() -> None:
    total = torch.zeros(3)

    def program(x: Tensor) -> Tensor:
        add_one(total)
        return x + total

    captured = capture(program, (torch.ones(3),))
    assert captured(torch.ones(3)).tolist() == [2.0] * 3
    assert captured(torch.ones(3)).tolist() == [3.0] * 3
    assert total.tolist() == [2.0] * 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.slow
def test_bodies_of_higher_order_ops_call_modules_and_close_over_state() -> None:
    from torch._higher_order_ops.map import map as mapped

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            y = torch.cond(x.sum() > 0, lambda x: self.inner(x), lambda x: x * 2, (x,))
            return mapped(lambda row, scale: row * scale, y, self.inner.weight[0])  # type: ignore[arg-type]

    model = Model()
    captured = capture(model, (torch.ones(2, 3),))
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        assert torch.allclose(captured(x), model(x))


@pytest.mark.parametrize("dividend", [7, 7.5, True])
def test_numbers_are_divided_by_tensors(dividend: float) -> None:
    n = torch.tensor([2, -3])
    assert torch.equal(capture(lambda n: dividend // n, (n,))(n), dividend // n)


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
