"""The backward is captured by the first call whose results require gradients, before that call changes anything."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize.errors import UnsupportedMutationError


def _ones(*size: int) -> Tensor:
    return torch.ones(size, requires_grad=True)


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def test_the_first_call_replaces_the_program_and_later_calls_keep_it() -> None:
    program = capture(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    assert program.specialization.awaits_gradients
    program(torch.ones(1, 2))
    first = program.specialization
    assert not first.awaits_gradients
    program(torch.ones(1, 2)).sum().backward()
    assert program.specialization is first
    assert len(program.variants) == 1


def test_a_step_that_drops_gradients_is_captured_once() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    program = capture(step, (torch.ones(1, 2),))
    for _ in range(3):  # the first finds no gradients
        program(torch.ones(1, 2))
    assert len(program.variants) == 1


def test_gradients_now() -> None:
    x = _ones(3)
    program = capture(lambda x: x * x, (x,), gradients="now")
    assert not program.specialization.awaits_gradients
    program(x).sum().backward()
    assert torch.equal(_gradient(x), 2 * torch.ones(3))


def test_gradients_now_raise_what_the_first_call_would_have() -> None:
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            held.add_(1)
            return gradient

    held = torch.zeros(3)

    def run(x: Tensor) -> Tensor:
        result: Tensor = Writes.apply(x)  # type: ignore[no-untyped-call]
        return result

    program = capture(run, (_ones(3),))
    with pytest.raises(UnsupportedMutationError, match="the backward writes to a tensor that existed before"):
        capture(run, (_ones(3),), gradients="now")
    with pytest.raises(UnsupportedMutationError, match="the backward writes to a tensor that existed before"):
        program(_ones(3)).sum().backward()
    with pytest.raises(UnsupportedMutationError, match="the backward writes to a tensor that existed before"):
        program.joint_graph(_ones(3))


def test_unknown_option() -> None:
    with pytest.raises(ValueError, match="gradients"):
        capture(torch.sin, (_ones(3),), gradients="later")


def test_a_program_that_changes_python_state_has_gradients() -> None:
    calls: list[int] = []

    def run(x: Tensor) -> Tensor:
        calls.append(len(calls))
        return x * 3

    program = capture(run, (_ones(2),))
    x = _ones(2)
    program(x).sum().backward()
    assert calls == [0]
    assert torch.equal(_gradient(x), torch.full((2,), 3.0))


def test_writes_of_the_first_call_happen_once() -> None:
    count = torch.zeros(())

    def run(x: Tensor) -> Tensor:
        return x * count.add_(1)

    program = capture(run, (_ones(2),))
    x = _ones(2)
    program(x).sum().backward()
    assert count.item() == 1
    assert torch.equal(_gradient(x), torch.ones(2))


def test_random_numbers_are_those_of_eager() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    program = capture(run, (_ones(64),))
    grads: list[tuple[Tensor, Tensor]] = []
    for function in (run, program, program):
        torch.manual_seed(5)
        x = _ones(64)
        function(x).sum().backward()
        grads.append((_gradient(x), torch.rand(1)))
    for grad, after in grads[1:]:
        assert torch.equal(grad, grads[0][0])
        assert torch.equal(after, grads[0][1])


def test_the_first_call_takes_another_branch_than_the_examples() -> None:
    def run(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    program = capture(run, (_ones(2),))
    for sign, slope in ((-1, 3), (1, 2), (-1, 3)):
        x = (sign * torch.ones(2)).requires_grad_()
        program(x).sum().backward()
        assert torch.equal(_gradient(x), torch.full((2,), float(slope)))
    assert [[one.answer for one in variant.decisions] for variant in program.variants] == [[True], [False]]


def test_the_first_call_meets_an_error_of_the_program() -> None:
    def run(x: Tensor) -> Tensor:
        if x.sum() < 0:
            raise ValueError("negative")
        return x * 2

    program = capture(run, (_ones(2),))
    with pytest.raises(ValueError, match="negative"):
        program((-torch.ones(2)).requires_grad_())
    x = _ones(2)
    program(x).sum().backward()
    assert torch.equal(_gradient(x), torch.full((2,), 2.0))


def test_a_backward_that_narrows_sizes_serves_the_others_by_another_capture() -> None:
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2 if gradient.size(0) > 5 else gradient * 7

    def run(x: Tensor) -> Tensor:
        result: Tensor = Asks.apply(x)  # type: ignore[no-untyped-call]
        return result

    program = capture(run, (_ones(3),), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2, max=64)}})
    for size in (3, 4, 8, 9, 3, 8):
        x, expected = _ones(size), _ones(size)
        program(x).sum().backward()
        run(expected).sum().backward()
        assert torch.equal(_gradient(x), _gradient(expected))
    assert [(size.low, size.high) for size in program.sizes] == [(2, 64)]


def test_two_threads_at_once() -> None:
    module = torch.nn.Linear(4, 4)
    program, x = capture(module, (torch.ones(2, 4),)), torch.ones(2, 4)
    gradients: list[Tensor] = []

    def call() -> None:
        gradients.extend(torch.autograd.grad(program(x).sum(), [module.weight]))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (expected,) = torch.autograd.grad(module(x).sum(), [module.weight])
    assert len(gradients) == 2
    assert all(torch.equal(gradient, expected) for gradient in gradients)
    assert len(program.variants) == 1


def test_second_derivatives_of_the_first_call() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    program = capture(lambda x: (x**3).sum(), (x,))
    (first,) = torch.autograd.grad(program(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 6 * x.detach())


def test_calls_under_other_modes_than_the_captures() -> None:
    module = torch.nn.Linear(3, 3)
    program, x = capture(module, (torch.ones(2, 3),)), torch.ones(2, 3)
    with torch.no_grad():
        assert torch.equal(program(x), module(x))
    program(x).sum().backward()
    assert module.weight.grad is not None


def test_a_replaced_program_is_freed() -> None:
    program = capture(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    forward = weakref.ref(program.specialization)
    program(torch.ones(1, 2))
    gc.collect()
    assert forward() is None


def test_exports_before_and_after_the_first_call_are_alike() -> None:
    program = capture(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    before = str(program.to_exported_program().graph)
    program(torch.ones(1, 2)).sum().backward()
    assert str(program.to_exported_program().graph) == before


def test_the_joint_graph_gives_results_and_gradients() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    joint = capture(lambda x: x.sin(), (x,)).joint_graph(x)
    result, gradient, written = joint(x.detach(), torch.ones(2))
    assert torch.equal(result, x.detach().sin())
    assert torch.equal(gradient, x.detach().cos())
    assert written is None


def test_no_joint_graph_without_gradients() -> None:
    program = capture(torch.sin, (torch.ones(2),))
    with pytest.raises(RuntimeError, match="no joint graph"):
        program.joint_graph(torch.ones(2))


def test_a_gradient_that_only_a_dead_copy_reads_is_no_input_of_the_backward() -> None:
    module = torch.nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()  # as after any step

    def forward(x: Tensor) -> Tensor:
        copied = copy.deepcopy(module).bfloat16()  # and its gradients
        result: Tensor = copied(x.bfloat16()).float() + module(x)
        return result

    weight = _gradient(module.weight).clone()
    result = capture(forward, (torch.ones(1, 2),), gradients="now")(torch.ones(1, 2))
    assert torch.equal(result, forward(torch.ones(1, 2)))
    result.sum().backward()
    assert torch.equal(_gradient(module.weight), 2 * weight)
