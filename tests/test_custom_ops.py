"""Custom operators that write: optional arguments, lists, arguments that share elements, what they return.

In direct use they run on the program's own tensors; in a graph they stand in `auto_functionalized`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import UnsupportedMutationError, UnsupportedProgramError, capture, functionalize
from functionalize.verify import assert_equivalent
from tests.graphs import MODES, REMOVES, operators, trace

NAMESPACE = "functionalize_custom_ops"
EITHER = pytest.mark.parametrize("remove", REMOVES)
WHILE = pytest.mark.parametrize("mode", [None, *MODES], ids=str)
ops: Any = getattr(torch.ops, NAMESPACE)


@torch.library.custom_op(f"{NAMESPACE}::accumulate", mutates_args=("total",))
def accumulate(x: Tensor, total: Tensor) -> Tensor:
    total.add_(x)
    return x * 2


@accumulate.register_fake
def _(x: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{NAMESPACE}::count_calls", mutates_args=("calls",))
def count_calls(calls: Tensor, x: Tensor) -> Tensor:
    calls.add_(1)
    return x.clone()


@count_calls.register_fake
def _(calls: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{NAMESPACE}::clear", mutates_args=("x", "y"))
def clear(x: Tensor, y: Tensor | None = None) -> None:
    x.zero_()
    if y is not None:
        y.fill_(7)


@torch.library.custom_op(f"{NAMESPACE}::raise_all", mutates_args=("xs",))
def raise_all(xs: list[Tensor], by: float) -> None:
    for index, x in enumerate(xs):
        x.add_(by + index)


@torch.library.custom_op(f"{NAMESPACE}::both", mutates_args=("a", "b"))
def both(a: Tensor, b: Tensor) -> None:
    a.add_(1)
    b.mul_(2)


@torch.library.custom_op(f"{NAMESPACE}::double_rows", mutates_args=("out",))
def double_rows(x: Tensor, out: Tensor) -> None:
    for source, target in zip(x, out, strict=True):
        target.copy_(source * 2)


@torch.library.custom_op(f"{NAMESPACE}::scale", mutates_args=("a",))
def scale(a: Tensor, n: int, text: str = "x", *, factor: float = 2.0) -> tuple[Tensor, Tensor]:
    a.mul_(factor)
    return a + n, a.sum()


@scale.register_fake
def _(a: Tensor, n: int, text: str = "x", *, factor: float = 2.0) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), a.new_empty(())


@torch.library.custom_op(f"{NAMESPACE}::unknown", mutates_args="unknown")
def unknown(a: Tensor, b: Tensor) -> None:
    b.add_(a)


@torch.library.custom_op(f"{NAMESPACE}::pieces", mutates_args=("a",))
def pieces(a: Tensor) -> list[Tensor]:
    a.add_(1)
    return [a + 1, a * 2]


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:

        def define(schema: str, kernel: Callable[..., Any], key: str, *tags: Any) -> None:
            library.define(schema, tags=tags)
            library.impl(schema.partition("(")[0], kernel, key)

        explicit = "CompositeExplicitAutograd"
        define("plus_(Tensor(a!) x, Scalar s) -> Tensor(a!)", lambda x, s: x.add_(s), explicit)
        define("tagged_(Tensor(a!) x, Scalar s) -> Tensor(a!)", lambda x, s: x.add_(s), explicit, torch.Tag.inplace)
        define("twice(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", lambda x, *, out: out.copy_(x * 2), explicit)
        define("tail(Tensor(a) x) -> Tensor(a)", lambda x: x.view(-1)[1:], explicit)
        define("plus(Tensor(a!) x, Tensor y) -> Tensor", lambda x, y: x.add_(y) * y, "CompositeImplicitAutograd")
        yield


def numbers(*size: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(size).numel()).view(size)


PROGRAMS: list[Any] = []


def program(*inputs: Tensor) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(func: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(pytest.param(func, inputs, id=func.__name__))
        return func

    return register


@program(numbers(3), numbers(3))
def views_and_inputs(x: Tensor, total: Tensor) -> Any:
    rows = torch.ones(2, 3)
    first = accumulate(x, total)
    accumulate(x, rows[1])
    clear(rows[0], first[1:])
    clear(total[:1])
    return first, rows, total + 1


@program(numbers(2, 3))
def lists(x: Tensor) -> Any:
    y = x + 1
    raise_all([y[0], y[1], x[0]], 2.0)
    raise_all([], 1.0)
    return y


@program(numbers(2, 3))
def two_views_of_one_base(x: Tensor) -> Any:
    y = x + 0
    both(y[0], y[1])
    both(y[:, 0], y[:, 1])
    return y


@program(numbers(2, 3))
def a_base_and_its_view(x: Tensor) -> Any:
    y = x + 0
    both(y, y[0])
    both(y[1], y.t())
    return y


@program(numbers(2, 3))
def one_tensor_twice(x: Tensor) -> Any:
    y = x + 0
    both(y, y)
    both(x, x)
    return y


@program(numbers(4))
def overlapping_parts_of_an_input(x: Tensor) -> Any:
    both(x[1:], x[:-1])
    return x * 1


@program(numbers(5))
def a_list_that_overlaps(x: Tensor) -> Any:
    y = x + 0
    raise_all([y[1:], x[:2], y[:-1], y], 1.0)
    return y


@program(numbers(3, 4))
def several_results(x: Tensor) -> Any:
    a, b = scale(x.t()[1:], 3, factor=3.0)
    a.add_(1)
    return a, b, *scale(x, 1, "z")


@program(numbers(3, 4))
def into_an_out_argument(x: Tensor) -> Any:
    out = torch.empty(2, 4)
    double_rows(x[:2], out)
    double_rows(x[:1], x[2:])
    return out


@program(numbers(3))
def what_is_written_is_unknown(x: Tensor) -> Any:
    y = x + 1
    unknown(x, y)
    return y


@program(numbers(3, 4))
def a_view(x: Tensor) -> Any:
    y = x + 1
    z = ops.tail(y)
    z.add_(1)
    return y, z


@program(numbers(3, 4))
def a_composite(x: Tensor) -> Any:
    y = x + 1
    z = ops.plus(y[0], x[0])
    ops.plus(x[1], z)
    return y, z


@program(numbers(3, 2))
def a_tag_that_says_in_place(x: Tensor) -> Any:
    y = x + 1
    z = ops.tagged_(y[0], 2)
    z.mul_(2)
    return y, z, ops.tagged_(x, 1)


@program(numbers(3))
def between_autograd(x: Tensor) -> Any:
    leaf, total = torch.ones(3, requires_grad=True), torch.zeros(3)
    accumulate(x, total)
    (leaf * total).sum().backward()
    return leaf.grad, total


@program(numbers(3))
def elements_of_many_positions(x: Tensor) -> Any:
    clear(x[:1].expand(3))
    return x


@program(numbers(3, 2))
def in_inference_mode(x: Tensor) -> Any:
    with torch.inference_mode():
        y = x + 1
        clear(y[0])
        accumulate(x[0], y[1])
        return y


@WHILE
@EITHER
@pytest.mark.parametrize(("func", "inputs"), PROGRAMS)
def test_programs(func: Callable[..., Any], inputs: tuple[Tensor, ...], mode: Any, remove: str) -> None:
    assert_equivalent(func, *inputs, remove=remove, tracing_mode=mode)


@EITHER
def test_graphs_hold_the_operator_in_auto_functionalized(remove: str) -> None:
    plain = operators(trace(views_and_inputs, numbers(3), numbers(3), remove=remove))
    shared = operators(trace(one_tensor_twice, numbers(2, 3), remove=remove))
    assert plain.count("auto_functionalized") == 4 and shared.count("auto_functionalized_v2") == 2


def returns_what_it_writes(x: Tensor) -> Any:
    y = x + 1
    z = ops.plus_(y[0], 2)
    z.mul_(2)
    return y, z


def writes_out_and_returns_it(x: Tensor) -> Any:
    y = x + 1
    ops.twice(x[0], out=y[1]).add_(1)
    return y


def returns_a_list(x: Tensor) -> Any:
    y = x * 1
    found = pieces(y[0])
    found[0].add_(1)
    return found, y


def reads_what_it_writes(x: Tensor) -> Any:
    y = x + 1
    double_rows(y[:-1], y[1:])
    return y


def two_dtypes(x: Tensor) -> Any:
    y = x + 1
    both(y, y.view(torch.int32))
    return y


NO_FORM: dict[Callable[..., Any], str] = {
    returns_what_it_writes: "returns what it writes",
    writes_out_and_returns_it: "returns what it writes",
    returns_a_list: "return tensors or nothing",
    reads_what_it_writes: "on a copy of what it writes",
    two_dtypes: "one base of one dtype",
}


@EITHER
@pytest.mark.parametrize("func", NO_FORM)
def test_without_a_form_in_graphs(func: Callable[..., Any], remove: str) -> None:
    assert_equivalent(func, numbers(3, 4), remove=remove)
    for mode in ("real", "fake"):
        with pytest.raises(UnsupportedMutationError, match=NO_FORM[func]):
            make_fx(functionalize(func, remove=remove), tracing_mode=mode)(numbers(3, 4))


@EITHER
@WHILE
def test_results_have_the_strides_that_eager_gives(mode: Any, remove: str) -> None:
    def f(x: Tensor, calls: Tensor) -> Any:
        y = count_calls(calls, x.t())
        flat = y.view(-1) if y.is_contiguous() else y.t().view(-1)
        flat[1:4].mul_(2)
        return y, [int(n) for n in y.stride()]

    assert_equivalent(f, numbers(3, 4), torch.zeros(1), remove=remove, tracing_mode=mode)


@torch.library.custom_op(f"{NAMESPACE}::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op(f"{NAMESPACE}::chosen_without_fake", mutates_args=())
def chosen_without_fake(x: Tensor) -> Tensor:
    return x[x > 0]


@torch.library.custom_op(f"{NAMESPACE}::of_wrong_fake", mutates_args=())
def of_wrong_fake(x: Tensor) -> Tensor:
    return x * 2


@of_wrong_fake.register_fake
def _(x: Tensor) -> Tensor:
    raise ValueError("nobody has written this")


@torch.library.custom_op(f"{NAMESPACE}::of_reading_fake", mutates_args=())
def of_reading_fake(x: Tensor) -> Tensor:
    return x.new_zeros(int(x.sum()))


@of_reading_fake.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_zeros(int(x.sum()))


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("kernel_alone(Tensor x) -> Tensor")
_library.impl("kernel_alone", lambda x: x * 2, "CPU")


def _catches(x: Tensor) -> Any:
    try:
        return ops.kernel_alone(x)
    except RuntimeError:
        return x * 3


REFUSED_ON_FAKES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "custom_op": (lambda x: without_fake(x), "without_fake has no fake implementation"),
    "of a size by data": (lambda x: chosen_without_fake(x), "chosen_without_fake has no fake implementation"),
    "Library.impl": (lambda x: ops.kernel_alone(x), "kernel_alone.default has no fake implementation"),
    "caught": (_catches, "kernel_alone.default has no fake implementation"),
    "a fake that raises": (lambda x: of_wrong_fake(x), "of_wrong_fake raises ValueError: nobody has written this"),
    "a fake that reads": (lambda x: of_reading_fake(x), "of_reading_fake reads the values of a tensor"),
}


@pytest.mark.parametrize("route", ["capture", "exported", "fake", "symbolic"])
@pytest.mark.parametrize("program", REFUSED_ON_FAKES)
def test_operators_that_fake_tensors_cannot_run(program: str, route: Any) -> None:
    f, says = REFUSED_ON_FAKES[program]
    with pytest.raises(UnsupportedProgramError, match=rf"{says}[\s\S]*test_custom_ops.py:\d+ in [\s\S]*torch.library."):
        if route in ("capture", "exported"):
            capture(f, (torch.ones(2),), on_data="raise" if route == "exported" else "decide").to_exported_program()
        else:
            make_fx(functionalize(f), tracing_mode=route)(torch.ones(2))


def test_what_the_refusal_advises() -> None:
    @torch.library.custom_op(f"{NAMESPACE}::registered_later", mutates_args=())
    def later(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(UnsupportedProgramError, match=r"torch\.library\.register_fake"):
        capture(lambda x: later(x), (torch.ones(2),))
    torch.library.register_fake(f"{NAMESPACE}::registered_later", torch.empty_like)
    assert capture(lambda x: later(x), (torch.ones(2),))(torch.ones(2)).tolist() == [2, 2]


def test_errors_of_kernels_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="nobody"):
        torch.ops.functionalize_custom_ops.of_wrong_fake(torch.ones(2, device="meta"))
    assert functionalize(_catches)(torch.ones(2)).tolist() == [2, 2]
