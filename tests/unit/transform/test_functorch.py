"""``torch.func`` inside a functionalized function and over it, nested functionalize, duals. Eager is the oracle."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES, operators

F = torch.func
EITHER = pytest.mark.parametrize("remove", REMOVES)
WHILE = pytest.mark.parametrize("mode", [None, *MODES], ids=str)
Program = Callable[..., Any]

# By torch, in jvp.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def bump(x: Tensor) -> Tensor:
    y = x * 2
    y[0].mul_(x[1])
    y.view(-1)[1:].exp_()
    return y


def cube(x: Tensor) -> Tensor:
    y = x * x
    y[0].mul_(x[0])
    y[1:].mul_(x[1:])
    return y.sum()


def writes_to_its_input(x: Tensor) -> Tensor:
    x[0].mul_(2)
    x.t()[1:].add_(1)
    return x * x


def returns_its_input(x: Tensor) -> Tensor:
    return x.mul_(2)


def returns_a_view(x: Tensor) -> Tensor:
    return (x * 1).mul_(2)[0]


def scalar(func: Program) -> Program:
    def loss(x: Tensor) -> Any:
        return func(x).sum()

    return loss


def tangent(func: Program) -> Program:
    def run(x: Tensor) -> Any:
        return F.jvp(func, (x,), (torch.ones_like(x),))

    return run


def pullback(func: Program) -> Program:
    def run(x: Tensor) -> Any:
        output, back = F.vjp(func, x)[:2]
        return output, back(torch.ones_like(output))[0]

    return run


def dual(func: Program) -> Program:
    def run(x: Tensor) -> Any:
        with forward_ad.dual_level():
            parts = forward_ad.unpack_dual(func(forward_ad.make_dual(x * 1, torch.ones_like(x))))
            return tuple(None if part is None else part.clone() for part in parts)

    return run


TRANSFORMS: dict[str, Callable[[Program], Program]] = {
    "grad": lambda func: F.grad(scalar(func)),
    "grad of grad": lambda func: F.grad(scalar(F.grad(scalar(func)))),
    "vmap": F.vmap,
    "vmap over columns": lambda func: F.vmap(func, in_dims=1, out_dims=-1),
    "vmap of grad": lambda func: F.vmap(F.grad(scalar(func))),
    "grad of vmap": lambda func: F.grad(scalar(F.vmap(func))),
    "jvp": tangent,
    "vmap of jvp": lambda func: F.vmap(tangent(func)),
    "vjp": pullback,
    "jacrev": F.jacrev,
    "jacfwd": F.jacfwd,
    "hessian": lambda func: F.hessian(scalar(func)),
    "dual": dual,
    "jacobian": lambda func: lambda x: torch.autograd.functional.jacobian(func, x),
}
PROGRAMS = [bump, writes_to_its_input, returns_its_input, returns_a_view]
OF_ROWS = ("vmap", "vmap over columns", "vmap of grad", "grad of vmap", "vmap of jvp")  # which have no `t()[1:]`


def cases() -> list[Any]:
    return [
        pytest.param(name, func, id=f"{name}-{func.__name__}")
        for name in TRANSFORMS
        for func in PROGRAMS
        if not (name in OF_ROWS and func is writes_to_its_input)
    ]


def same(call: Program, eager: Program, plain: Program, mode: Any) -> None:
    """One call against eager: results and what is left in the input; a program that plain make_fx refuses is left."""
    x = torch.rand(3, 2, generator=torch.Generator().manual_seed(0))
    y, example = x.clone(), x.clone()
    torch.manual_seed(0)
    try:
        wanted = eager(x)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            call(y)
        return
    if mode is not None:
        try:
            call = make_fx(call, tracing_mode=mode)(example)
        except RuntimeError as error:
            with pytest.raises(type(error)):
                make_fx(plain, tracing_mode=mode)(example)
            return
    torch.manual_seed(0)
    torch.testing.assert_close(call(y), wanted, check_stride=mode is None)
    torch.testing.assert_close(y, x)


@pytest.mark.every(5)
@WHILE
@EITHER
@pytest.mark.parametrize(("name", "func"), cases())
def test_over_a_functionalized_function(name: str, func: Program, mode: Any, remove: str) -> None:
    apply = TRANSFORMS[name]
    same(apply(functionalize(func, remove=remove)), apply(func), apply(func), mode)


@pytest.mark.every(4)
@WHILE
@EITHER
@pytest.mark.parametrize(("name", "func"), cases())
def test_inside_a_functionalized_function(name: str, func: Program, mode: Any, remove: str) -> None:
    program = TRANSFORMS[name](func)
    same(functionalize(program, remove=remove), program, program, mode)


# More programs


INSIDE: dict[str, Program] = {}


def inside(program: Program) -> Program:
    INSIDE[program.__name__] = program
    return program


@inside
def batched_with_what_is_not(x: Tensor) -> Any:
    total = torch.ones(2)

    def row(a: Tensor, b: Tensor) -> Tensor:
        total.add_(1)
        return (a * b).mul_(b) * total

    return F.vmap(row, in_dims=(0, None))(x, x[0]), total


@inside
def batched_writes_to_an_input(x: Tensor) -> Any:
    return F.vmap(lambda row: row.mul_(2))(x), x


@inside
def batched_random_numbers(x: Tensor) -> Any:
    def noisy(row: Tensor) -> Tensor:
        return row + torch.rand(2).mul_(2)

    return [F.vmap(noisy, randomness=kind)(x) for kind in ("same", "different")]


@inside
def gradient_with_a_written_closure_and_aux(x: Tensor) -> Any:
    y = x.clone()

    def loss(a: Tensor) -> Any:
        return (a * y.mul_(2)).sum(), a.detach().clone().add_(1)

    return F.grad(loss, has_aux=True)(x), y


@inside
def written_before_and_after(x: Tensor) -> Any:
    y = x + 1
    y[0].mul_(3)
    z = F.vmap(bump)(y)
    z.view(-1).mul_(2)
    return z, F.grad(cube)(y.mul_(2))


@inside
def gradients_of_samples(x: Tensor) -> Any:
    module = nn.Linear(2, 2).requires_grad_(False)
    weights = {name: torch.full_like(value, 0.5) for name, value in module.named_parameters()}

    def loss(weights: Any, row: Tensor) -> Any:
        out: Tensor = F.functional_call(module, weights, (row,))
        return out.relu_().sum()

    return F.vmap(F.grad(loss), in_dims=(None, 0))(weights, x)


@inside
def dual_written_in_place(x: Tensor) -> Any:
    with forward_ad.dual_level():
        d = forward_ad.make_dual(x * 1, torch.ones_like(x))
        d.mul_(d)
        d.view(-1)[0] = 3.0
        d.t()[0].exp_()
        return tuple(part.clone() for part in forward_ad.unpack_dual(d) if part is not None)


@inside
def dual_copied_into_a_view(x: Tensor) -> Any:
    with forward_ad.dual_level():
        d = forward_ad.make_dual(x * 1, torch.ones_like(x))
        z = torch.zeros(2, 3).t()
        z[1].copy_(d[0])
        z.mul_(2)
        return tuple(part.clone() for part in forward_ad.unpack_dual(z) if part is not None)


@inside
def dual_of_an_input_and_a_written_tangent(x: Tensor) -> Any:
    with forward_ad.dual_level():
        tangent = torch.ones_like(x)
        d = forward_ad.make_dual(x, tangent)
        tangent.mul_(3)
        d.mul_(2)
        return tuple(part.clone() for part in forward_ad.unpack_dual(d * d) if part is not None)


@inside
def dual_over_a_gradient(x: Tensor) -> Any:
    def gradient(x: Tensor) -> Tensor:
        w = x.clone().requires_grad_()
        y = w * w
        y[0].mul_(w[1])
        return torch.autograd.grad(y.sum(), w, create_graph=True)[0]

    return dual(gradient)(x)


@inside
def linearized(x: Tensor) -> Any:
    x = x.clone()
    x[0].mul_(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # linearize edits graphs and is told so
        slope = F.linearize(lambda x: (x.sin() * x).sum(), x)[1](torch.ones_like(x))
    x.add_(1)
    return slope, x


@inside
def traced(x: Tensor) -> Any:
    x = x.clone()
    x[0].mul_(2)

    def inner(a: Tensor) -> Tensor:
        b = a + x
        b[0].mul_(3)
        return b

    z: Tensor = make_fx(inner)(x)(x)
    z.t()[0].add_(2)
    return z, x


@WHILE
@EITHER
@pytest.mark.parametrize("name", INSIDE)
def test_inside(name: str, mode: Any, remove: str) -> None:
    program = INSIDE[name]
    if mode is None:
        assert_equivalent(program, torch.rand(3, 2), remove=remove, strides=True)
    same(functionalize(program, remove=remove), program, program, mode)


def test_what_the_program_traces_is_left_as_it_is() -> None:
    def f(x: Tensor) -> Any:
        row = x[0]
        row.mul_(2)
        plain, pure = make_fx(writes_to_its_input)(x), make_fx(functionalize(writes_to_its_input))(x)
        seen = x + 0
        return plain(x), pure(x), seen, row, operators(plain)[:2], operators(pure)[-1]

    assert_equivalent(f, torch.rand(3, 2))
    found = functionalize(f)(torch.rand(3, 2))
    assert found[-2:] == (["select.int", "mul_.Tensor"], "copy_.default")


@pytest.mark.every(5)
@WHILE
@pytest.mark.parametrize("inner", REMOVES)
@EITHER
def test_nested_in_each_order(inner: str, mode: Any, remove: str) -> None:
    def pure(func: Program) -> Program:
        return functionalize(func, remove=inner)

    for program in (
        lambda x: pure(F.grad(pure(cube)))(x),
        lambda x: F.vmap(pure(F.grad(pure(cube))))(x),
        lambda x: pure(tangent(pure(bump)))(x),
        lambda x: (pure(pure(writes_to_its_input))(x), x * 1),
        lambda x: pure(dual(pure(F.vmap(pure(bump)))))(x),
    ):
        same(functionalize(program, remove=remove), program, program, mode)


@EITHER
@pytest.mark.parametrize("requires_grad", [False, True])
def test_inside_aot_autograd(requires_grad: bool, remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        y[0].add_(1)
        return y.sin()

    inputs = [torch.ones(3, 2, requires_grad=requires_grad) for _ in range(2)]
    compiled = aot_function(functionalize(f, remove=remove), nop)
    results = [run(x) for run, x in zip((f, compiled), inputs, strict=True)]
    torch.testing.assert_close(results[1], results[0])
    if requires_grad:
        for result in results:
            result.sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
