"""What eager refuses is refused: by the same type of exception, with its message, at the same operator.

Each program writes to its input before it fails, and the input is left as eager leaves it. What eager lets pass (an
`out=` of another size is resized with a warning) passes with the same warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import functionalize
from functionalize.verify.observation import Observation, clone_inputs, differences, observe
from tests.support.graphs import MODES, REMOVES

EITHER = pytest.mark.parametrize("remove", REMOVES)
Program = Callable[[Tensor], Any]
PROGRAMS: list[Any] = []
# The kernel of the functional variant names the two sizes in the other order.
OTHER_WORDS = {"masked_bad"}


def numbers(*size: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(size).numel()).view(size)


def program(example: Tensor) -> Callable[[Program], Program]:
    def register(func: Program) -> Program:
        PROGRAMS.append(pytest.param(func, example, id=func.__name__))
        return func

    return register


@program(numbers(2, 3))
def shape_mismatch(x: Tensor) -> Any:
    x.add_(1)
    y = x * 2
    y.add_(torch.ones(5))
    return y


@program(numbers(2, 3))
def shape_mismatch_input(x: Tensor) -> Any:
    x.mul_(2)
    x.add_(torch.ones(2, 3, 3))
    return x


@program(numbers(2, 3))
def broadcast_grow(x: Tensor) -> Any:
    y = torch.ones(3)
    x.add_(1)
    y.add_(x)
    return y


@program(numbers(2, 3))
def uncastable(x: Tensor) -> Any:
    x.add_(1)
    y = torch.ones(2, 3, dtype=torch.long)
    y.add_(x)
    return y


@program(numbers(2, 3))
def uncast_bool(x: Tensor) -> Any:
    x.add_(1)
    (x > 0).add_(1.5)
    return x


@program(numbers(2, 3))
def out_dtype(x: Tensor) -> Any:
    x.add_(1)
    o = torch.empty(2, 3, dtype=torch.long)
    torch.add(x, 1.5, out=o)
    return o


@program(numbers(2, 3))
def out_shape_warn(x: Tensor) -> Any:
    o = torch.empty(5)
    torch.add(x, 1, out=o)
    return o


@program(numbers(2, 3))
def expand_write(x: Tensor) -> Any:
    x.add_(1)
    y = x[0:1].expand(4, 3)
    y.add_(1)
    return y


@program(numbers(2, 3))
def expand_copy(x: Tensor) -> Any:
    x.add_(1)
    y = x[0:1].expand(4, 3)
    y.copy_(torch.ones(4, 3))
    return y


@program(numbers(2, 3))
def partial_overlap(x: Tensor) -> Any:
    x.mul_(2)
    f = x.view(-1)
    f[1:].add_(f[:-1])
    return x


@program(numbers(2, 3))
def copy_overlap(x: Tensor) -> Any:
    x.mul_(2)
    f = x.view(-1)
    f[1:].copy_(f[:-1])
    return x


@program(numbers(2, 3))
def leaf(x: Tensor) -> Any:
    x.add_(1)
    w = torch.ones(3, requires_grad=True)
    w.add_(1)
    return x


@program(numbers(2, 3))
def leaf_view(x: Tensor) -> Any:
    x.add_(1)
    w = torch.ones(3, requires_grad=True)
    w[0].add_(1)
    return x


@program(numbers(2, 3))
def inference(x: Tensor) -> Any:
    x.add_(1)
    with torch.inference_mode():
        y = torch.ones(3)
    y.add_(1)
    return x


@program(numbers(2, 3))
def inference_view(x: Tensor) -> Any:
    x.add_(1)
    with torch.inference_mode():
        y = torch.ones(3)
    y[0].add_(1)
    return x


@program(numbers(2, 3))
def bad_view(x: Tensor) -> Any:
    x.add_(1)
    x.t().view(-1)
    return x


@program(numbers(2, 3))
def bad_index(x: Tensor) -> Any:
    x.add_(1)
    x[5].add_(1)
    return x


@program(numbers(2, 3))
def bad_index_put(x: Tensor) -> Any:
    x.add_(1)
    x[torch.tensor([7])] = 1.0
    return x


@program(numbers(2, 3))
def bad_scatter(x: Tensor) -> Any:
    x.add_(1)
    x.scatter_(0, torch.tensor([[9]]), 1.0)
    return x


@program(numbers(2, 3))
def bad_squeeze(x: Tensor) -> Any:
    x.add_(1)
    x.transpose_(0, 5)
    return x


@program(numbers(2, 3))
def bad_asstrided(x: Tensor) -> Any:
    x.add_(1)
    return x.as_strided((3,), (1,), 100)


@program(numbers(2, 3))
def bad_set(x: Tensor) -> Any:
    x.add_(1)
    y: Any = torch.ones(2, dtype=torch.long)
    y.set_(x)
    return x


@program(numbers(2, 3))
def foreach_bad(x: Tensor) -> Any:
    x.add_(1)
    ys = [x * 1, torch.ones(4)]
    torch._foreach_add_(ys, [torch.ones(2, 3), torch.ones(5)])
    return ys


@program(numbers(2, 3))
def saved(x: Tensor) -> Any:
    w = x.clone().requires_grad_()
    y = w.exp()
    y.add_(1)
    y.sum().backward()
    return w.grad


@program(numbers(2, 3))
def multi_view_inplace(x: Tensor) -> Any:
    w = x.clone().requires_grad_()
    first = (w * 1).split(1)[0]
    first.add_(1)
    return first


@program(numbers(2, 3))
def fill_bad(x: Tensor) -> Any:
    x.add_(1)
    x.fill_(torch.ones(2))
    return x


@program(numbers(2, 3))
def copy_bad(x: Tensor) -> Any:
    x.add_(1)
    x[0].copy_(torch.ones(7))
    return x


@program(numbers(2, 3))
def matmul_bad(x: Tensor) -> Any:
    x.add_(1)
    return x @ x


@program(numbers(2, 3))
def out_requires_grad(x: Tensor) -> Any:
    x.add_(1)
    w = torch.ones(2, 3, requires_grad=True)
    o = torch.empty(2, 3)
    torch.mul(w, 2, out=o)
    return o


@program(numbers(2, 3))
def out_overlap(x: Tensor) -> Any:
    x.add_(1)
    torch.add(x, 1, out=x[0:1].expand(2, 3))
    return x


@program(numbers(2, 3))
def out_alias_input(x: Tensor) -> Any:
    x.add_(1)
    f = x.view(-1)
    torch.add(f[:-1], 1, out=f[1:])
    return x


@program(numbers(2, 3).to(torch.complex64))
def complex_to_real(x: Tensor) -> Any:
    y = torch.ones(2, 3)
    y.add_(x)
    return y


@program(numbers(2, 3))
def cumsum_out_bad(x: Tensor) -> Any:
    o = torch.empty(2, 3, dtype=torch.long)
    torch.cumsum(x, 0, out=o)
    return o


@program(numbers(2, 3))
def unsafe_bool(x: Tensor) -> Any:
    x.add_(1)
    bool(x)
    return x


@program(numbers(3, 3))
def inverse_singular(x: Tensor) -> Any:
    x.zero_()
    return torch.linalg.inv(x)


@program(numbers(3, 3))
def cholesky_out(x: Tensor) -> Any:
    o = torch.empty(3, 3)
    torch.linalg.cholesky(-x, out=o)
    return o


@program(numbers(2, 3))
def zerodim_tensor_add(x: Tensor) -> Any:
    x.add_(1)
    x.t_()
    x.add_(torch.ones(4))
    return x


@program(numbers(2, 3))
def index_add_bad(x: Tensor) -> Any:
    x.add_(1)
    x.index_add_(0, torch.tensor([0, 1, 2]), torch.ones(2, 3))
    return x


@program(numbers(2, 3))
def masked_bad(x: Tensor) -> Any:
    x.add_(1)
    x.masked_fill_(torch.ones(3, 3, dtype=torch.bool), 0)
    return x


@program(numbers(2, 3))
def masked_expand(x: Tensor) -> Any:
    x.add_(1)
    x[:1].expand(2, 3).masked_fill_(torch.ones(2, 3, dtype=torch.bool), 0)
    return x


def call(func: Program, example: Tensor) -> tuple[Observation, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = observe(func, clone_inputs((example,)))
    return seen, [str(warning.message)[:60] for warning in caught]


@EITHER
@pytest.mark.parametrize(("func", "example"), PROGRAMS)
def test_direct(func: Program, example: Tensor, remove: str) -> None:
    eager, ours = call(func, example), call(functionalize(func, remove=remove), example)
    assert ours[1] == eager[1]
    if eager[0].error is None:
        assert list(differences(eager[0], ours[0], strides=True, aliasing=True, rtol=None, atol=None)) == []
    else:
        assert type(ours[0].error) is type(eager[0].error)
        assert func.__name__ in OTHER_WORDS or str(ours[0].error)[:60] == str(eager[0].error)[:60]
        torch.testing.assert_close(ours[0].inputs, eager[0].inputs)


@EITHER
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("func", "example"), PROGRAMS)
def test_traced(func: Program, example: Tensor, mode: Any, remove: str) -> None:
    """As in eager, or as `make_fx` refuses or admits the program by itself: fake kernels do not refuse all."""
    eager, _ = call(func, example)
    plain, _ = call(lambda x: make_fx(func, tracing_mode=mode)(x), example)
    ours, _ = call(lambda x: make_fx(functionalize(func, remove=remove), tracing_mode=mode)(x), example)
    assert type(ours.error) in (type(eager.error), type(plain.error))


@EITHER
def test_out_that_eager_resizes_before_it_raises(remove: str) -> None:
    def f(a: Tensor, out: Tensor) -> None:
        torch.stack([a, a], out=out)

    left = []
    for function in (f, functionalize(f, remove=remove)):
        out = torch.zeros(3, 1).t() > 0
        with warnings.catch_warnings(), pytest.raises(TypeError, match="can't be cast"):
            warnings.simplefilter("ignore")
            function(torch.arange(4), out)
        left.append((out.size(), out.stride()))
    assert left[0] == left[1]


@pytest.mark.parametrize("remove", REMOVES)
def test_foreach_leaves_the_entries_before_the_one_that_raises_written(remove: str) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> None:
        torch._foreach_clamp_min_([a, b], 0)

    def run(function: Any) -> tuple[torch.Tensor, int]:
        a = torch.full((2,), -1.0)
        before = a._version
        with pytest.raises(RuntimeError, match="clamp"):
            function(a, torch.ones(1, dtype=torch.complex64))
        return a, a._version - before

    got, growth = run(functionalize(f, remove=remove))
    assert torch.equal(got, torch.zeros(2))
    assert (growth > 0, got.tolist()) == (run(f)[1] > 0, run(f)[0].tolist())


@EITHER
def test_foreach_entries_that_read_one_another_before_one_raises(remove: str) -> None:
    def f(a: Tensor, b: Tensor) -> None:
        torch._foreach_add_([a, b], [b, a])

    left = []
    for function in (f, functionalize(f, remove=remove)):
        a, b = torch.ones((), dtype=torch.complex64), torch.ones((), dtype=torch.float64)
        with pytest.raises(RuntimeError, match="can't be cast"):
            function(a, b)
        left.append((a.item(), b.item(), a._version, b._version))
    assert left[0] == left[1]
