"""Threads: many call one program; one captures while others run, train or capture. Right, or a clear refusal."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from functionalize import capture

ROUNDS = 50
_REFUSED = "another thread is capturing"


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def together(*works: Callable[[], None], seconds: float = 60) -> list[BaseException]:
    """Run works in threads that begin at once; what they raised."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:  # told in the main thread
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "threads wait for one another for ever"
    return raised


def gradients(call: Callable[[Tensor], Tensor], module: torch.nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(call(X).sum(), list(module.parameters())))


@pytest.mark.slow
def test_eight_threads_call_and_differentiate_one_program() -> None:
    module = model()
    want, want_gradients = module(X), gradients(module, module)
    for _ in range(ROUNDS // 10):  # the first calls of a program are those that race
        program = capture(module, (X,))

        def work(program: Callable[[Tensor], Tensor] = program) -> None:
            for _ in range(ROUNDS // 10):
                torch.testing.assert_close(program(X), want)
                for got, wanted in zip(gradients(program, module), want_gradients, strict=True):
                    torch.testing.assert_close(got, wanted)

        assert not together(*[work] * 8)


def second(call: Callable[[Tensor], Tensor], rows: int) -> list[Tensor]:
    x = torch.linspace(-1, 1, 4 * rows).view(rows, 4).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    return [gradient.detach(), *torch.autograd.grad(gradient.square().sum(), x)]


def hooks() -> list[int]:
    known = torch.nn.modules.module
    return [len(known._global_forward_pre_hooks), len(known._global_forward_hooks)]


def test_eight_threads_differentiate_models_of_their_own_twice() -> None:
    want, before = second(model(), 3), hooks()

    def work(own: torch.nn.Module) -> None:
        for _ in range(2):
            torch.testing.assert_close(second(capture(own, (X,)), 3), want)

    assert not together(*(partial(work, model()) for _ in range(8)))
    assert hooks() == before


@pytest.mark.parametrize("same", [True, False], ids=["one size", "sizes of their own"])
def test_eight_threads_differentiate_one_program_twice(same: bool) -> None:
    module, before = model(), hooks()
    program = capture(module, (X,), on_guard_failure="recapture")
    wants = {rows: second(module, rows) for rows in range(3, 11)}

    def work(rows: int) -> None:
        for _ in range(3):
            torch.testing.assert_close(second(program, rows), wants[rows])

    assert not together(*(partial(work, 3 if same else rows) for rows in wants))
    assert hooks() == before


def test_a_second_derivative_is_captured_while_another_thread_captures() -> None:
    """The one waits for the other: neither finds the other's hooks, and none stay."""
    one, other, before = model(), model(), hooks()
    want = second(one, 3)

    def differentiate() -> None:
        torch.testing.assert_close(second(capture(one, (X,)), 3), want)

    def recapture() -> None:
        program = capture(other, (X,), on_guard_failure="recapture")
        for rows in range(2, 8):
            program(torch.ones(rows, 4))

    assert not together(differentiate, recapture)
    assert hooks() == before


def test_threads_that_need_other_programs_share_them() -> None:
    runs: SimpleQueue[int] = SimpleQueue()  # by captures: a list would be added to by calls as well

    def run(x: Tensor) -> Tensor:
        runs.put(x.shape[0])
        return x * 2

    program = capture(run, (torch.ones(1),), on_guard_failure="recapture")

    def work() -> None:
        for size in range(2, 6):
            assert torch.equal(program(torch.ones(size)), torch.full((size,), 2.0))

    assert not together(*[work] * 8)
    assert sorted(runs.get() for _ in range(runs.qsize())) == [1, 2, 3, 4, 5]


def capturing(module: torch.nn.Module, want: Tensor) -> Callable[[], None]:
    def work() -> None:
        for _ in range(ROUNDS):
            torch.testing.assert_close(capture(module, (X,))(X), want)

    return work


@pytest.mark.slow(seconds=11)
def test_threads_capture_other_models_and_the_same() -> None:
    module = model()
    want = module(X)
    others = [model() for _ in range(2)]
    works = [capturing(one, want) for one in (module, module, *others)]
    assert not together(*works, seconds=120)


@pytest.mark.slow
def test_captured_programs_run_while_their_model_is_captured() -> None:
    module = model()
    want, program = module(X), capture(module, (X,))

    def run() -> None:
        for _ in range(ROUNDS * 5):
            torch.testing.assert_close(program(X), want)

    assert not together(capturing(module, want), run, run)


@pytest.mark.slow
def test_other_models_run_and_train_meanwhile() -> None:
    module, other, alone = model(), model(), model()
    want = module(X)

    def train(trained: torch.nn.Module) -> None:
        optimizer = torch.optim.SGD(trained.parameters(), 0.01)
        for _ in range(ROUNDS):
            optimizer.zero_grad()
            trained(X).sum().backward()
            optimizer.step()

    assert not together(capturing(module, want), lambda: train(other))
    train(alone)
    for got, wanted in zip(other.parameters(), alone.parameters(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.slow
def test_the_model_itself_runs_meanwhile_or_says_why_not() -> None:
    module = model()
    want, before = module(X), copy.deepcopy(module.state_dict())

    def run() -> None:
        for _ in range(ROUNDS * 5):
            try:
                got = module(X)
            except RuntimeError as error:
                assert _REFUSED in str(error), error
            else:
                assert type(got) is Tensor and torch.equal(got, want)

    assert not together(capturing(module, want), run, run)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.slow
def test_a_capture_says_to_another_thread_that_it_is_one() -> None:
    module, said = torch.nn.Linear(4, 1), list[str]()

    def elsewhere() -> None:
        with pytest.raises(RuntimeError, match=_REFUSED) as caught:
            module(X)
        said.append(str(caught.value))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # a thread that is there before the capture

        def run(x: Tensor) -> Tensor:
            result: Tensor = module(x)
            pool.submit(elsewhere).result()
            return result

        torch.testing.assert_close(capture(run, (X,))(X), module(X))
    assert len(said) == 1 and "finish the capture" in said[0]
