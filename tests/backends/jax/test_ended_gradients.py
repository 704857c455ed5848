"""Gradients that JAX takes of programs which end some on their own: those of eager, or refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from functionalize import InputMismatchError, UnsupportedProgramError, capture, jaxify

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from functionalize.backends.jax import from_torch  # noqa: E402

X = torch.tensor([-1.0, 0.25, 1.5])


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = grad * (x.abs() < 1)
        return found


def straight(x: Tensor) -> Tensor:
    return Straight.apply(x * 0.5).sum()  # type: ignore[no-any-return, no-untyped-call]


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = x * 2
    return (x * factor).sum()


def halves(x: Tensor) -> Tensor:
    y = x * 1
    y[:1] = (x * x)[:1].detach()
    return (y * y).sum()


def both_ways(x: Tensor) -> Tensor:
    shared = x * 3
    return (shared.detach() * shared + shared.detach()).sum()


def hooked(x: Tensor) -> Tensor:
    y = x * x.detach()
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y.sum()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


def reverse(x: Tensor) -> Tensor:
    return (Reversed.apply(x * 3) * x).sum()  # type: ignore[no-any-return, no-untyped-call]


def scale(x: Tensor) -> Tensor:
    return (Scaled.apply(x * 3) * x).sum()  # type: ignore[no-any-return, no-untyped-call]


def views_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        first = x[:2]
    return (first * x[1:]).sum()


def copies_without_grad(x: Tensor) -> Tensor:
    copy = torch.zeros(3)
    with torch.no_grad():
        copy.copy_(x)
    return (copy * x).sum()


def writes_without_grad(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.view(3).add_(1)
    return (y * x).sum()


def given_data(x: Tensor) -> Tensor:
    y = torch.zeros(3)
    y.data = x * 2
    return (y * x).sum()


def by_a_number(x: Tensor) -> Tensor:
    return x.sum() * x.sum().item()


def in_a_body(x: Tensor) -> Tensor:
    found: Tensor = torch.cond(x.sum() > 0, lambda x: x * x.detach(), lambda x: x * 2, (x,))
    return found.sum()


def in_a_body_without_grad(x: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = x * 2
        return factor * x

    found: Tensor = torch.cond(x.sum() > 0, body, lambda x: x * 2, (x,))
    return found.sum()


def nothing(x: Tensor) -> Tensor:
    return x.detach().sum()


ENDING = {
    "detach": (lambda x: (x * x.detach()).sum(), "x.detach()"),
    "no_grad": (without_grad, "factor = x * 2"),
    "function": (straight, "Straight.apply"),
    "reverse": (reverse, "Reversed.apply"),
    "identity": (scale, "Scaled.apply"),
    "written": (halves, ".detach()"),
    "twice": (both_ways, "shared.detach()"),
    "hook": (hooked, "x.detach()"),
    "all": (nothing, "x.detach()"),
    "view": (views_without_grad, "first = x[:2]"),
    "copy": (copies_without_grad, "copy.copy_(x)"),
    "write": (writes_without_grad, "add_(1)"),
    "data": (given_data, "y.data = x * 2"),
    "number": (by_a_number, "x.sum().item()"),
    "tensor": (lambda x: (x.new_tensor(x * 2) * x).sum(), "x.new_tensor(x * 2)"),
    "cond": (in_a_body, "x.detach()"),
    "cond without grad": (in_a_body_without_grad, "torch.cond"),
}


def eager(function: Any, *inputs: Tensor) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in inputs]
    result = function(*leaves)
    if not result.requires_grad:
        return [torch.zeros_like(one) for one in leaves]
    return list(torch.autograd.grad(result, leaves))


def same(expected: Tensor, found: Any) -> None:
    np.testing.assert_allclose(expected.detach().numpy(), np.asarray(found), rtol=1e-6)


@pytest.mark.every(4)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.parametrize("name", ENDING)
def test_gradients_end_where_they_do_in_eager(name: str) -> None:
    function, line = ENDING[name]
    call, (expected,) = jaxify(function), eager(function, X)
    same(expected, jax.grad(call)(from_torch(X)))
    same(expected, jax.jit(jax.grad(call))(from_torch(X)))
    same(torch.stack([expected, expected]), jax.vmap(jax.grad(call))(jnp.stack([from_torch(X)] * 2)))
    same(function(X), call(from_torch(X)))  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedProgramError, match="second time") as error:
        jax.hessian(call)(from_torch(X))
    assert line in str(error.value)


class Average(nn.Module):
    """Takes from its input a running average, which has no gradient, and drops out."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.5).add_(x.detach() * 0.5)
        return (self.weight * self.weight.detach() * (x - self.average)).sum()


def test_gradients_of_parameters_beside_a_buffer_that_is_written() -> None:
    module = Average()
    reference = copy.deepcopy(module)
    step = capture(module, (X,)).to_jax()

    def loss(state: Any, x: Any) -> Any:
        after, result = step(state, x)
        return result, after

    state = step.initial_state
    for _ in range(2):
        x = X.clone().requires_grad_()
        reference.zero_grad()
        reference(x).backward()
        (of_state, of_x), state = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(state, from_torch(X))
        assert x.grad is not None and reference.weight.grad is not None
        same(x.grad, of_x)
        same(reference.weight.grad, of_state["weight"])
        same(reference.average, state["average"])
        assert not of_state["average"].any()


def test_gradients_of_what_is_written_to_an_argument() -> None:
    def scale(x: Tensor, y: Tensor) -> Tensor:
        y.mul_(x.detach()).add_(x)
        return (y * y).sum()

    def both(x: Tensor, y: Tensor) -> Tensor:
        y = y * 1
        return scale(x, y) + y.sum()

    call = jaxify(scale)

    def written(x: Any, y: Any) -> Any:
        returned, arguments = call(x, y)
        return returned + arguments["y"].sum()

    found = jax.grad(written, argnums=(0, 1))(from_torch(X), from_torch(X + 1))
    for one, other in zip(eager(both, X, X + 1), found, strict=True):
        same(one, other)


@pytest.mark.slow
def test_the_backward_draws_what_the_forward_drew() -> None:
    call = jaxify(lambda x: torch.nn.functional.dropout(x * x.detach(), 0.5).sum())
    x = jnp.arange(1.0, 100)
    state = call.state(x)
    _, total = call.apply(state, x)
    gradient = jax.grad(lambda x: call.apply(state, x)[1])(x)
    assert set((gradient / x).tolist()) == {0.0, 2.0}
    np.testing.assert_allclose((gradient * x).sum(), total, rtol=1e-6)


def test_gradients_of_complex_numbers() -> None:
    def function(z: Tensor) -> Tensor:
        return z * z.detach() * (1 + 2j)

    z = torch.tensor([1 + 2j, 3 - 1j])
    leaf, cotangent = z.clone().requires_grad_(), torch.tensor([1 - 1j, 2 + 0.5j])
    (expected,) = torch.autograd.grad(function(leaf), leaf, cotangent)
    _, backward = jax.vjp(jaxify(function), from_torch(z))
    same(expected, jnp.conj(backward(jnp.conj(from_torch(cotangent)))[0]))


HOOKS: dict[str, Any] = {
    "parameter": lambda layer: layer.weight.register_hook(lambda gradient: gradient * 3),
    "module": lambda layer: layer.register_full_backward_hook(lambda _, before, after: (before[0] * 5,)),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_the_state_change_gradients(kind: str) -> None:
    layer = nn.Linear(3, 1)
    HOOKS[kind](layer)
    step = capture(lambda x: layer(x).sum(), (X,)).to_jax()
    x = X.clone().requires_grad_()
    layer(x).sum().backward()
    of_state, of_x = jax.grad(lambda state, x: step(state, x)[1], argnums=(0, 1))(step.initial_state, from_torch(X))
    assert x.grad is not None and layer.weight.grad is not None
    same(x.grad, of_x)
    same(layer.weight.grad, of_state["layer.weight"])


def test_hooks_on_functions_of_autograd_change_gradients() -> None:
    layer = nn.Linear(3, 1)

    def function(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        assert y.grad_fn is not None
        y.grad_fn.register_hook(lambda before, after: tuple(one * 2 if one is not None else one for one in before))
        return y.sum()

    step = capture(function, (X,)).to_jax()
    function(X).backward()
    assert layer.weight.grad is not None
    same(layer.weight.grad, jax.grad(lambda state: step(state, from_torch(X))[1])(step.initial_state)["layer.weight"])


def test_what_ends_no_gradients_of_the_inputs_leaves_all_derivatives_to_jax() -> None:
    class Positions(nn.Module):
        frequencies: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                angles = self.frequencies[None, :].expand(2, 3).t() @ torch.ones(2)
            return (x**3 * angles.cos()).sum()

    module = Positions()
    call = jaxify(module)
    hessian = torch.autograd.functional.hessian(module, X)
    same(hessian, jax.hessian(call)(from_torch(X)))


def decides(x: Tensor) -> Tensor:
    return (x * x.detach()).sum() if x.sum() > 0 else x.sum()


def test_what_has_no_backward_is_refused_with_the_reason_and_the_lines() -> None:
    step = capture(decides, (X,)).to_jax()
    with pytest.raises(UnsupportedProgramError, match="it branches on tensor values") as error:
        jax.grad(lambda x: step({}, x)[1])(from_torch(X))
    assert "(x * x.detach()).sum()" in str(error.value)
    same(decides(X), step({}, from_torch(X))[1])


class Recurrent(nn.Module):
    """Replaces a tensor of its state at each call, by one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.hidden = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.layer(x) + self.hidden)
        self.hidden = hidden.detach()
        return hidden.sum()


def test_programs_that_replace_state_are_refused_with_the_line() -> None:
    step = capture(Recurrent(), (X,)).to_jax()
    with pytest.raises(UnsupportedProgramError, match="changes Python objects") as error:
        jax.grad(lambda state, x: step(state, x)[1])(step.initial_state, from_torch(X))
    assert "self.hidden = hidden.detach()" in str(error.value)


def test_python_state_that_changed_since_the_capture_has_no_function() -> None:
    module = nn.Dropout()
    program = capture(lambda x: (module(x) * x.detach()).sum(), (X,))
    module.eval()
    with pytest.raises(InputMismatchError, match="training"):
        program.to_jax()
