"""Parameters that a function makes itself, in every mode of a trace: the graph computes them anew, and runs.

In a real trace no mode sees ``torch.nn.Parameter(tensor)`` take the tensor's memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import UnsupportedExportError, capture, functionalize
from functionalize.verify import assert_functional
from tests.support.graphs import MODES, REMOVES


def initialized(x: Tensor) -> Tensor:
    weight = nn.Parameter(torch.empty(3))
    nn.init.ones_(weight)
    return x * weight


def layer(x: Tensor) -> Any:
    made = nn.Linear(3, 3)
    nn.init.ones_(made.weight)
    nn.init.zeros_(made.bias)
    return made(x)


def computed(x: Tensor) -> Tensor:
    return nn.Parameter(x * 2) * x


def written_by_data(x: Tensor) -> Tensor:
    weight = nn.Parameter(x * 2)
    weight.data.add_(1)
    return weight * x


def written_before(x: Tensor) -> Tensor:
    start = torch.zeros(3)
    start.add_(x)
    weight = nn.Parameter(start)
    del start
    return weight * 2


def of_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x * 2
    weight = nn.Parameter(whole[1:])
    with torch.no_grad():
        weight.mul_(3)
    return whole, weight * 1


def of_the_input(x: Tensor) -> Tensor:
    weight = nn.Parameter(x)
    with torch.no_grad():
        weight.add_(1)
    return weight * 2


def given_away(x: Tensor) -> Tensor:
    return nn.Parameter(x * 2)


def trained(x: Tensor) -> Tensor:
    weight = nn.Parameter(torch.empty(3))
    nn.init.ones_(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    (x * weight).sum().backward()
    optimizer.step()
    return weight * 1


PROGRAMS = [
    initialized,
    layer,
    computed,
    written_by_data,
    written_before,
    of_a_view,
    of_the_input,
    given_away,
    trained,
]


@pytest.mark.filterwarnings("ignore:.*sparse_csr.*")
@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("func", PROGRAMS, ids=lambda func: func.__name__)
def test_the_graph_runs(func: Callable[[Tensor], Any], mode: Any, remove: str) -> None:
    graph = make_fx(functionalize(func, remove=remove), tracing_mode=mode)(torch.ones(3))
    assert_functional(graph, remove)
    assert not list(graph.graph.find_nodes(op="get_attr"))
    for start in (1.0, 2.0):
        inputs = [torch.arange(start, start + 3) for _ in range(2)]
        torch.testing.assert_close(graph(inputs[0]), func(inputs[1]))
        torch.testing.assert_close(*inputs)


@pytest.mark.slow
def test_a_trace_holds_few_tensors() -> None:
    """What no parameter can be made of any more is let go of while the trace runs."""
    alive: list[int] = []

    def chain(x: Tensor) -> Tensor:
        made: list[weakref.ref[Tensor]] = []
        for _ in range(200):
            x = x + 1
            made.append(weakref.ref(x))
            alive.append(sum(reference() is not None for reference in made))
        return x

    gc.collect()
    make_fx(functionalize(chain))(torch.ones(3))
    assert max(alive) < 30


def detached_again(x: Tensor) -> Any:
    made = x.detach().requires_grad_()
    (made * 3).sum().backward()
    return made.detach_()


def with_its_gradient(x: Tensor) -> Any:
    made = x.detach().requires_grad_()
    (made * made).sum().backward()
    return made, made.grad


def with_a_retained_gradient(x: Tensor) -> Any:
    made = x.detach().requires_grad_() * 2
    made.retain_grad()
    (made * made).sum().backward()
    return made.grad, made.detach()


def trained_and_given(x: Tensor) -> Any:
    """A model that is made, trained and given away, as it stands between two steps."""
    made = layer_of(x)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        made(x.detach()).pow(2).sum().backward()
        optimizer.step()
    return made


def layer_of(x: Tensor) -> nn.Linear:
    made = nn.Linear(x.shape[-1], 2)
    nn.init.constant_(made.weight, 0.5)
    nn.init.zeros_(made.bias)
    return made


def _looks(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return list(map(_looks, value.parameters()))
    if isinstance(value, tuple):
        return [*map(_looks, value), [one.grad is other for one in value for other in value]]
    gradient = None if value.grad is None else _looks(value.grad)
    return type(value), value.requires_grad, value.is_leaf, value.tolist(), gradient


GIVEN = (detached_again, with_its_gradient, with_a_retained_gradient, trained_and_given)


@pytest.mark.parametrize("func", GIVEN, ids=lambda func: func.__name__)
def test_what_is_made_keeps_its_gradient(func: Callable[[Tensor], Any]) -> None:
    program = capture(func, (torch.ones(2, 3),))
    for _ in range(2):
        x = torch.randn(2, 3)
        assert _looks(program(x)) == _looks(func(x))


def test_gradients_of_what_is_made_are_not_dropped_by_exporters() -> None:
    program = capture(detached_again, (torch.ones(3),))
    with pytest.raises(UnsupportedExportError, match="a gradient on a tensor that it creates"):
        program.to_exported_program()
