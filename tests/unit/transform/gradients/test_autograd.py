"""Autograd inside a functionalized function: gradients, hooks, checkpoints, errors. Eager is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES

EITHER = pytest.mark.parametrize("remove", REMOVES)
WHILE = pytest.mark.parametrize("mode", [None, *MODES], ids=str)
checkpoint: Any = torch.utils.checkpoint.checkpoint
Program = Callable[..., Any]


class Double(torch.autograd.Function):
    """Writes to its input and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class ScaleRow(torch.autograd.Function):
    """Saves what it wrote to, and writes to gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x.clone()
        y[0].mul_(w[0])
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w, _ = ctx.saved_tensors
        by_x, by_w = grads[0].clone(), torch.zeros_like(w)
        by_x[0].mul_(w[0])
        by_w[0].add_(grads[0][0] * x[0])
        return by_x, by_w


class Batched(torch.autograd.Function):
    """The newer kind, with a vmap rule made from its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        y = x.clone()
        y.view(-1)[0].mul_(3)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        grad.view(-1)[0].mul_(3)
        return grad


INSIDE: dict[str, Program] = {}


def inside(program: Program) -> Program:
    INSIDE[program.__name__] = program
    return program


def leaf_of(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def block(w: Tensor) -> Tensor:
    y = w * 2
    y[0].mul_(w[1])
    return y.relu_().sin()


@inside
def grad_after_a_write_to_a_view(x: Tensor, w: Tensor) -> Any:
    w = leaf_of(w)
    y = x * w
    y[0].mul_(w[0])
    (gradient,) = torch.autograd.grad(y.sum(), w)
    return gradient.mul_(2)


@inside
def backward_twice_and_a_step(x: Tensor, w: Tensor) -> Any:
    leaf = leaf_of(w)
    for _ in range(2):
        y = (x * leaf).relu_()
        y.view(-1)[1:].mul_(3)
        y.sum().backward()
    with torch.no_grad():
        assert leaf.grad is not None
        leaf.sub_(leaf.grad, alpha=0.1)
        leaf.grad.zero_()
    return leaf.detach(), leaf.grad


@inside
def grad_of_grad(x: Tensor, w: Tensor) -> Any:
    w = leaf_of(w)
    y = (x * w).sin()
    y[0].mul_(w[0])
    (g,) = torch.autograd.grad(y.sum(), w, create_graph=True)
    g = g.clone()
    g.t()[0].mul_(2)
    (h,) = torch.autograd.grad(g.pow(2).sum(), w)
    return g.detach(), h


@inside
def requires_grad_on_an_intermediate(x: Tensor, w: Tensor) -> Any:
    y = x.clone()
    y.view(-1)[0] = 3.0
    y.requires_grad_()
    z = y * 2
    z.mul_(y)
    z.sum().backward()
    return y.grad, y.requires_grad, z.requires_grad, y.is_leaf


@inside
def requires_grad_on_an_input(x: Tensor, w: Tensor) -> Any:
    x.mul_(2)
    x.requires_grad_()
    (x * x).sum().backward()
    gradient, x.grad = x.grad, None
    x.requires_grad_(False)
    return gradient


@inside
def mark_dirty(x: Tensor, w: Tensor) -> Any:
    a = leaf_of(x)
    b = a * 1
    c: Any = Double.apply(b)  # type: ignore[no-untyped-call]
    (c * b).sum().backward()
    return a.grad, c is b, b.detach()


@inside
def mark_dirty_on_a_view(x: Tensor, w: Tensor) -> Any:
    a = leaf_of(x)
    b = a * 1
    Double.apply(b[0])  # type: ignore[no-untyped-call]
    b.sum().backward()
    return a.grad, b.detach()


@inside
def mark_dirty_on_an_input(x: Tensor, w: Tensor) -> Any:
    return Double.apply(x) + 1  # type: ignore[no-untyped-call]


@inside
def function_with_saved_tensors(x: Tensor, w: Tensor) -> Any:
    w = leaf_of(w)
    y: Any = ScaleRow.apply(x.clone(), w * 1)  # type: ignore[no-untyped-call]
    return torch.autograd.grad((y * y).sum(), w)


@inside
def function_under_grad_and_vmap(x: Tensor, w: Tensor) -> Any:
    def loss(x: Tensor) -> Any:
        return (Batched.apply(x) ** 2).sum()  # type: ignore[no-untyped-call]

    return torch.func.grad(loss)(x), torch.func.vmap(Batched.apply)(w)


@inside
def checkpoints(x: Tensor, w: Tensor) -> Any:
    gradients = []
    for reentrant in (True, False):
        leaf = leaf_of(w)
        y = checkpoint(block, leaf * x, use_reentrant=reentrant).clone()
        y[0].mul_(3)
        y.sum().backward()
        gradients.append(leaf.grad)
    return gradients


@inside
def hooks_of_tensors(x: Tensor, w: Tensor) -> Any:
    leaf, seen = leaf_of(w), []

    def doubling(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0].mul_(2)
        seen.append(gradient)
        return gradient

    y = leaf * x
    y.register_hook(doubling)
    y.mul_(x)
    y.register_hook(lambda gradient: seen.append(gradient * 1))
    y.retain_grad()
    z = y.clone()
    z[1].mul_(x[1])
    z.sum().backward()
    return leaf.grad, y.grad, seen


@inside
def hooks_after_accumulation(x: Tensor, w: Tensor) -> Any:
    leaf = leaf_of(w)

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    handle = leaf.register_post_accumulate_grad_hook(step)
    y = leaf * x
    y[0].mul_(2)
    y.sum().backward()
    handle.remove()
    return leaf.detach(), leaf.grad is None


@inside
def hooks_of_modules(x: Tensor, w: Tensor) -> Any:
    module, log = nn.Linear(3, 3), []
    with torch.no_grad():
        module.weight.fill_(0.5)
        module.bias.fill_(0.1)

    def after(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        log.append(out.detach().clone())
        return out.relu_()

    def before(module: nn.Module, grad_in: Any, grad_out: Any) -> None:
        log.append(grad_out[0].clone())

    module.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))
    module.register_forward_hook(after)
    module.register_full_backward_hook(before)
    module(x * 1).sum().backward()
    return log, module.weight.grad, module.bias.grad


@inside
def hooks_of_saved_tensors(x: Tensor, w: Tensor) -> Any:
    leaf = leaf_of(w)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone().mul_(2), lambda t: t.mul_(1)):
        y = leaf.sin() * leaf
    y[0].mul_(2)
    y.sum().backward()
    return leaf.grad


@inside
def leaf_written_under_no_grad(x: Tensor, w: Tensor) -> Any:
    leaf = leaf_of(w)
    with torch.no_grad():
        leaf[0].mul_(2)
        row = leaf[1]
        leaf.add_(1)
    (leaf * leaf).sum().backward()
    with torch.no_grad():
        assert leaf.grad is not None
        leaf -= leaf.grad * 0.1
    row.mul_(2)
    return leaf.detach(), row.requires_grad


@inside
def input_leaf_written_under_no_grad(x: Tensor, w: Tensor) -> Any:
    x.requires_grad_()
    with torch.no_grad():
        x.sub_(0.5)
        x.view(-1)[0] = 3
    out = (x * 2).detach()
    x.requires_grad_(False)
    return out


@inside
def inference_mode(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    with torch.inference_mode():
        z = nn.functional.linear(x, w)
        z.reshape(-1)[0].add_(1)
        y.mul_(2)
        y[0].add_(1)
        y.t_()
        return y, z.relu_().t(), z.is_inference(), y.is_inference()


@inside
def written_before_and_after_saving(x: Tensor, w: Tensor) -> Any:
    leaf = leaf_of(w)
    y = leaf * 1
    y.mul_(3)
    z = y.sin()
    whole = torch.cat([y, z])
    whole[1:3].exp_()
    whole.sum().backward()
    return leaf.grad


@inside
def detached_in_place(x: Tensor, w: Tensor) -> Any:
    y = leaf_of(x) * 2
    y.mul_(2)
    y.detach_()
    y.add_(1)
    return y, y.is_leaf, y.requires_grad


@inside
def batched_gradients(x: Tensor, w: Tensor) -> Any:
    return torch.autograd.functional.jacobian(block, x)


@inside
def version_kept(x: Tensor, w: Tensor) -> Any:
    leaf = leaf_of(x)
    y = leaf * 1
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(y):
        y.detach().mul_(2)
    y.sin().sum().backward()
    return leaf.grad


def error_of_a_saved_tensor(x: Tensor, w: Tensor) -> Any:
    y = leaf_of(x).exp()
    y.mul_(2)
    y.sum().backward()


def error_of_a_saved_tensor_written_by_foreach(x: Tensor, w: Tensor) -> Any:
    leaf = leaf_of(x)
    y = leaf.exp()
    torch._foreach_mul_([y.detach()], 2)
    y.sum().backward()


def error_of_a_saved_tensor_written_through_a_view(x: Tensor, w: Tensor) -> Any:
    y = leaf_of(x).sin()
    z = y * y
    y[0].mul_(2)
    z.sum().backward()


def error_of_a_view_of_a_leaf(x: Tensor, w: Tensor) -> Any:
    leaf_of(x)[0].mul_(2)


def error_of_one_of_several_views(x: Tensor, w: Tensor) -> Any:
    (leaf_of(x) * 1).unbind(0)[0].mul_(2)


def error_of_an_inference_tensor(x: Tensor, w: Tensor) -> Any:
    with torch.inference_mode():
        y = x * 2
    y.mul_(2)


ERRORS = [value for name, value in globals().items() if name.startswith("error_")]
EXAMPLE = torch.linspace(0.2, 2, 6).view(2, 3), torch.linspace(-1, 1.3, 6).view(2, 3)


@pytest.mark.every(5)
@WHILE
@EITHER
@pytest.mark.parametrize("name", INSIDE)
def test_inside(name: str, mode: Any, remove: str) -> None:
    square = (torch.rand(3, 3), torch.rand(3, 3))
    example = square if name == "inference_mode" else EXAMPLE
    assert_equivalent(INSIDE[name], *example, remove=remove, tracing_mode=mode, strides=mode is None)


@WHILE
@EITHER
@pytest.mark.parametrize("program", ERRORS, ids=lambda program: program.__name__)
def test_errors_are_those_of_eager(program: Program, mode: Any, remove: str) -> None:
    if mode is None:
        assert_equivalent(program, *EXAMPLE, remove=remove)
        return
    with pytest.raises(RuntimeError) as eager:
        program(*EXAMPLE)
    with pytest.raises(RuntimeError) as ours:
        make_fx(functionalize(program, remove=remove), tracing_mode=mode)(*EXAMPLE)
    assert str(ours.value)[:40] == str(eager.value)[:40]
