"""Tensors that a function reaches without being passed them: globals, closures, buffers and parameters of a module.

In direct use they are written in place. In a graph they are constants: what was written is copied back to them, at the
end and at each run; a change of their metadata is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import UnsupportedMutationError, functionalize
from functionalize.verify import assert_equivalent, assert_functional
from tests.support.graphs import MODES, REMOVES

EITHER = pytest.mark.parametrize("remove", REMOVES)
Function = Callable[[Tensor], Any]
Stateful = tuple[Function, list[Tensor]]  # a function and all state that it may write

STATEFUL: dict[str, tuple[Callable[[], Stateful], Tensor]] = {}


def stateful(example: Tensor) -> Callable[[Callable[[], Stateful]], Callable[[], Stateful]]:
    def register(make: Callable[[], Stateful]) -> Callable[[], Stateful]:
        STATEFUL[make.__name__] = (make, example)
        return make

    return register


@stateful(torch.ones(3))
def in_place() -> Stateful:
    state = torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        state.add_(x)
        return state * 2

    return f, [state]


@stateful(torch.ones(3))
def views_made_inside() -> Stateful:
    state, rows = torch.arange(6.0), torch.ones(2, 3)

    def f(x: Tensor) -> Any:
        state[1:4] = x
        low, high = rows.unbind()
        high.copy_(low + x)
        rows.t()[1:].mul_(2)
        torch.add(x, 1, out=state[3:])
        return rows.view(-1)[2:], state.sum()

    return f, [state, rows]


@stateful(torch.ones(3))
def state_and_its_view() -> Stateful:
    state = torch.zeros(3)
    part = state[1:]

    def f(x: Tensor) -> Tensor:
        state.add_(x)
        part.mul_(2)
        return state + 0

    return f, [state, part]


@stateful(torch.ones(3))
def two_parts_of_what_is_not_seen() -> Stateful:
    whole = torch.arange(6.0)
    low, high = whole[:2], whole[3:]

    def f(x: Tensor) -> Tensor:
        high.add_(1)
        low.mul_(high[:2])
        high.mul_(2)
        return x + low.sum()

    return f, [whole, low, high]


@stateful(torch.ones(3))
def around_the_view_that_is_seen() -> Stateful:
    whole = torch.arange(6.0)
    low = whole[:2]

    def f(x: Tensor) -> Tensor:
        low.as_strided((2,), (1,), 4).add_(1)
        return x + low.sum()

    return f, [whole, low]


@stateful(torch.ones(3))
def through_views_alone() -> Stateful:
    state = torch.zeros(3, 3)

    def f(x: Tensor) -> Tensor:
        state[1].copy_(x)
        state.t()[0].mul_(2)
        state[2] += 1
        return x + 1

    return f, [state]


@stateful(torch.ones(3))
def copied_before_it_is_written() -> Stateful:
    state = torch.zeros(3)

    def f(x: Tensor) -> Any:
        y = torch.empty(3)
        y.copy_(state)
        state.add_(1)
        return y + x, y

    return f, [state]


@stateful(torch.ones(3))
def one_state_into_another() -> Stateful:
    one, two = torch.zeros(3), torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        one.copy_(two)
        two.copy_(x)
        return one + two

    return f, [one, two]


@stateful(torch.ones(3))
def returned() -> Stateful:
    state = torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        state.add_(1)
        x.add_(state)
        return state

    return f, [state]


@stateful(torch.ones(3))
def written_by_out() -> Stateful:
    state = torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        torch.add(x, state, out=state)
        return x

    return f, [state]


@stateful(torch.arange(12.0).view(4, 3))
def batch_norm() -> Stateful:
    module = nn.BatchNorm1d(3)
    return module, list(module.buffers())


@stateful(torch.ones(2, 3))
def gradient_descent() -> Stateful:
    module = nn.Linear(3, 3)
    for parameter in module.parameters():
        nn.init.ones_(parameter)

    def f(x: Tensor) -> Tensor:
        with torch.enable_grad():
            loss: Tensor = module(x).sum()
            gradients = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
        return loss.detach()

    return f, list(module.parameters())


@torch.no_grad()
def assert_alike(ours: Function, our_state: list[Tensor], eager: Function, state: list[Tensor], x: Tensor) -> None:
    """Twice, since a write that is lost may show in the second call only."""
    for _ in range(2):
        mine, theirs = x.clone(), x.clone()
        torch.testing.assert_close(ours(mine), eager(theirs))
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(our_state, state)


@EITHER
@pytest.mark.parametrize("name", STATEFUL)
def test_direct(name: str, remove: str) -> None:
    make, example = STATEFUL[name]
    func, state = make()
    assert_alike(functionalize(func, remove=remove), state, *make(), example)


@EITHER
def test_memory_of_an_array_is_written(remove: str) -> None:
    array = torch.zeros(3).numpy()
    functionalize(lambda x: torch.from_numpy(array).add_(x)[0].mul_(2), remove=remove)(torch.ones(3))
    assert array.tolist() == [2.0, 1.0, 1.0]


@EITHER
@pytest.mark.parametrize("name", STATEFUL)
def test_graphs_write_back_to_constants(name: str, remove: str) -> None:
    make, example = STATEFUL[name]
    func, state = make()
    before = [tensor.detach().clone() for tensor in state]
    graph = make_fx(functionalize(func, remove=remove))(example.clone())
    assert_functional(graph, remove)
    with torch.no_grad():
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)  # tracing in real mode runs the function
    assert_alike(graph, state, *make(), example)


@EITHER
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch itself hides it
def test_graphs_of_fake_inputs_write_back_to_constants(name: str, mode: Any, remove: str) -> None:
    make, example = STATEFUL[name]
    func, state = make()
    before = [tensor.detach().clone() for tensor in state]
    graph = make_fx(functionalize(func, remove=remove), tracing_mode=mode, _allow_non_fake_inputs=True)(example.clone())
    assert_functional(graph, remove)
    torch.testing.assert_close(before, [tensor.detach() for tensor in state], rtol=0, atol=0)
    assert_alike(graph, state, *make(), example)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_fake_modes_refuse_real_state_as_they_do_without_us(mode: Any) -> None:
    func, _ = in_place()
    for traced in (func, functionalize(func)):
        with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
            make_fx(traced, tracing_mode=mode)(torch.ones(3))


def test_state_that_is_passed_is_an_input() -> None:
    module = nn.BatchNorm1d(3)
    state = dict(module.named_buffers())

    def f(buffers: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(module, buffers, (x,))

    batch = torch.randn(4, 3)
    graph = make_fx(functionalize(f))({name: buffer.clone() for name, buffer in state.items()}, batch)
    graph(state, batch)
    expected = nn.BatchNorm1d(3)
    expected(batch)
    torch.testing.assert_close(dict(expected.named_buffers()), state)


BUFFER = torch.zeros(2, 3)


def test_metadata_of_constants_is_refused_by_name() -> None:
    local = torch.zeros(2)
    module = nn.Module()
    module.register_buffer("cache", torch.zeros(2, 3))

    def of_a_global(x: Tensor) -> Tensor:
        BUFFER.t_()
        return x * 2

    def of_a_closure(x: Tensor) -> Tensor:
        local.resize_(3).copy_(x)
        return x * 2

    def of_a_buffer(x: Tensor) -> Tensor:
        module.get_buffer("cache").unsqueeze_(0)
        return x * 2

    for func, name in ((of_a_global, "BUFFER"), (of_a_closure, "local"), (of_a_buffer, "module.cache")):
        with pytest.raises(UnsupportedMutationError, match=f"`{re.escape(name)}`, which is not an input") as raised:
            make_fx(functionalize(func))(torch.ones(3))
        assert "pass it as an argument" in str(raised.value)
        assert func.__name__ in str(raised.value)
    assert BUFFER.shape == (2, 3) and local.shape == (2,)


# A trace that goes on after the functionalized function


def bump(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def twice(x: Tensor) -> Any:
    return functionalize(bump)(x), functionalize(bump)(x), x + 0


def of_what_it_closes_over(x: Tensor) -> Any:
    functionalize(lambda: x.add_(1))()
    return x * 2


def of_an_intermediate(x: Tensor) -> Any:
    y = x * 3
    rows = y[:1]
    functionalize(lambda: rows.add_(1))()
    functionalize(lambda: y.mul_(2))()
    y.add_(1)
    return y, rows + 0


def written_afterwards(x: Tensor) -> Any:
    first = functionalize(bump)(x)
    x.add_(5)
    return first, x * 2


def returned_and_written(x: Tensor) -> Any:
    y = functionalize(lambda x: x.add_(1))(x)
    y.mul_(2)
    return x * 2


def returned_read_and_written(x: Tensor) -> Any:
    def inner(x: Tensor) -> Tensor:
        x[1:].mul_(3)
        return x.add_(1)

    y = functionalize(inner)(x)
    before = x + y
    y.mul_(2)
    x[0].add_(1)
    y = functionalize(inner)(y)
    return before, x * 2, y


def returned_resized_and_written(x: Tensor) -> Any:
    y = functionalize(lambda x: x.add_(1).unsqueeze_(0))(x)
    y.mul_(2)
    return x * 2, y + x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "func",
    [
        twice,
        of_what_it_closes_over,
        of_an_intermediate,
        written_afterwards,
        returned_and_written,
        returned_read_and_written,
        returned_resized_and_written,
    ],
)
def test_a_trace_that_goes_on(func: Function, mode: Any) -> None:
    graph = make_fx(func, tracing_mode=mode)(torch.zeros(3))
    assert_alike(graph, [], func, [], torch.arange(3.0))


STATE = torch.ones(3)


def returns_its_input(x: Tensor) -> Tensor:
    return x.add_(1)


def returns_it_unwritten(x: Tensor) -> Any:
    return x, x + 1


def returns_a_part(x: Tensor) -> Tensor:
    return x[1:].add_(1)


def returns_what_it_closes_over(x: Tensor) -> Any:
    return STATE.add_(x), STATE[:1]


def returns_it_twice(x: Tensor) -> Any:
    x[0].add_(1)
    return {"all": (x, x), "part": x[:2], "sum": x.sum()}


def returns_it_resized(x: Tensor) -> Tensor:
    return x.add_(1).resize_(2)


def returns_it_transposed(x: Tensor) -> Tensor:
    return x.unsqueeze_(0).mul_(2).t_()


def returns_it_elsewhere(x: Tensor) -> Any:
    x.set_(x * 2)  # type: ignore[call-overload]  # torch's stubs leave out tensors
    return x, x[1:]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize(
    "func",
    [
        returns_its_input,
        returns_it_unwritten,
        returns_a_part,
        returns_what_it_closes_over,
        returns_it_twice,
        returns_it_resized,
        returns_it_transposed,
        returns_it_elsewhere,
    ],
)
def test_the_graph_is_the_same_whoever_calls(func: Function, remove: str, mode: Any) -> None:
    pure = functionalize(func, remove=remove)
    tracers = [make_fx(one, tracing_mode=mode, _allow_non_fake_inputs=True) for one in (pure, lambda x: pure(x))]
    texts = [str(tracer(torch.ones(3)).graph) for tracer in tracers]
    assert texts[0] == texts[1]
    if func is not returns_what_it_closes_over:  # the state would differ from run to run
        assert_equivalent(func, torch.arange(3.0), remove=remove, tracing_mode=mode)


def test_data_of_a_constant_is_refused() -> None:
    state = torch.zeros(2)

    def f(x: Tensor) -> Tensor:
        state.data = x * 2
        return state + 1

    with pytest.raises(UnsupportedMutationError, match="which is not an input, change in place"):
        make_fx(functionalize(f))(torch.ones(2))
    assert torch.equal(functionalize(f)(torch.ones(2)), torch.full((2,), 3.0))
