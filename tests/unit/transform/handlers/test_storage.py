"""Tensors that change their storage (`.data =`, `set_`): intermediates, views and inputs, alone and sharing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import UnsupportedMutationError, capture, functionalize
from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES, operators, trace

aten = torch.ops.aten


# Intermediates


def data_of_a_view(x: Tensor, w: Tensor) -> Any:
    y = x + 1
    v = y.view(-1)
    v.data = torch.zeros(3) + w.sum()
    v.add_(1)
    return y, v


def data_of_a_base(x: Tensor, w: Tensor) -> Any:
    y = x + 1
    v = y[0]
    y.data = x * 2
    y.add_(1)
    v.mul_(3)
    return y, v


def data_shared_by_two(x: Tensor, w: Tensor) -> Any:
    y, z = x + 1, w * 3
    y.data = z
    y.add_(1)
    return y, z


def data_of_its_own_transpose(x: Tensor, w: Tensor) -> Any:
    y = x + 1
    y.data = y.data.t()
    y[0].add_(1)
    return y, y.stride()


def data_of_its_own_view(x: Tensor, w: Tensor) -> Any:
    y = x.clone()
    v = y.view(-1)
    y.data = v[:3]
    y.add_(1)
    v.mul_(2)
    return y, v


def data_of_another_row(x: Tensor, w: Tensor) -> Any:
    y = x + 1
    v = y[0]
    v.data = y[1]
    v.add_(1)
    return y, v


def data_while_a_view_lives(x: Tensor, w: Tensor) -> Any:
    y = x + 1
    v = y.view(-1)
    y.data = torch.ones(2, 2)
    v.add_(1)
    y.mul_(5)
    return y, v


def data_in_a_loop(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    for _ in range(3):
        y.data = y.data + w
        y.mul_(2)
    return y


def data_of_another_dtype(x: Tensor, w: Tensor) -> Any:
    y = x + 1
    y.data = y.to(torch.float64)
    y.add_(1)
    return y


def writes_through_data_and_detach(x: Tensor, w: Tensor) -> Any:
    y = x + 1
    y.data.add_(1)
    y.detach().mul_(2)
    return y


def set_to_a_tensor(x: Any, w: Any) -> Any:
    y = x + 1
    v = y[0]
    v.set_(w.view(-1))
    v.add_(1)
    y.set_(x * 2)
    y.add_(1)
    return y, v


def set_among_views(x: Any, w: Any) -> Any:
    y, z = x + 1, w + 1
    v = y[1:]
    y.set_(z)
    y.t_()
    y.add_(1)
    return y, z, v


def set_to_nothing(x: Any, w: Any) -> Any:
    y = x + 1
    v = y[0]
    y.set_()
    v.add_(1)
    return y, y.numel(), v


# Inputs


def data_of_an_input(x: Tensor, w: Tensor) -> Any:
    x.data = x * 2
    x.add_(1)
    return x * 3 + w.sum()


def data_of_an_input_that_is_not_written(x: Tensor, w: Tensor) -> Any:
    x.data = x * 2
    return w + 1


def data_of_an_input_and_a_view_of_the_old(x: Tensor, w: Tensor) -> Any:
    v = x[0]
    x.data = x * 2
    v.add_(1)
    x.mul_(2)
    return v, w


def data_of_an_input_from_another(x: Tensor, w: Tensor) -> Any:
    x.data = w[:1]
    x.add_(1)
    return w * 1


def data_of_an_input_is_an_output(x: Tensor, w: Tensor) -> Any:
    y = x + 1
    x.data = y[0]
    x.mul_(5)
    return y


def data_of_two_inputs_swapped(x: Tensor, w: Tensor) -> Any:
    x.data, w.data = w.data, x.data
    x.add_(1)
    return x * w


def data_of_two_inputs_are_one(x: Tensor, w: Tensor) -> Any:
    t = x * 1
    x.data = t
    w.data = t
    t.add_(1)
    return x + w


def old_data_of_an_input(x: Tensor, w: Tensor) -> Any:
    old = x.data
    x.data = x + 1
    old.mul_(2)
    return x * 1


def data_after_t(x: Tensor, w: Tensor) -> Any:
    x.t_()
    x.data = x + 1
    x.add_(1)
    return x * 1


def set_of_an_input(x: Any, w: Any) -> Any:
    x.set_(x * 2)
    x.add_(1)
    return w * 3


def set_of_an_input_to_another(x: Any, w: Any) -> Any:
    x.set_(w[0])
    x.add_(1)
    return w * 3


def set_of_an_input_to_its_transpose(x: Any, w: Any) -> Any:
    x.set_(x.t())
    x[0].add_(1)
    return w + 1


def set_of_an_input_to_nothing(x: Any, w: Any) -> Any:
    x.set_()
    return w * 3


def data_of_two_inputs_in_one_storage(x: Any, w: Any) -> Any:
    whole = torch.cat([w.reshape(-1), x.reshape(-1)]) * 2
    x.data, w.data = whole[4:].view(2, 2), whole[:4].view(2, 2)
    return x + 1


def data_of_two_inputs_that_overlap(x: Any, w: Any) -> Any:
    whole = torch.cat([w.reshape(-1), x.reshape(-1)]) * 2
    x.data, w.data = whole[3:6], whole[:4].view(2, 2)
    w.add_(1)
    return x * 2


PROGRAMS = [value for value in list(globals().values()) if getattr(value, "__module__", None) == __name__]


def apart() -> tuple[Tensor, Tensor]:
    return torch.arange(4.0).view(2, 2), torch.full((2, 2), 3.0)


def shared() -> tuple[Tensor, Tensor]:
    x = torch.arange(4.0).view(2, 2)
    return x, x.view(2, 2)


@pytest.mark.every(5)
@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("mode", [None, *MODES], ids=str)
@pytest.mark.parametrize("inputs", [apart, shared], ids=lambda build: build.__name__)
@pytest.mark.parametrize("func", PROGRAMS, ids=lambda func: func.__name__)
def test_storage(func: Callable[..., Any], inputs: Callable[[], Any], mode: Any, remove: str) -> None:
    assert_equivalent(func, *inputs(), remove=remove, tracing_mode=mode)


def test_an_input_gets_a_new_storage_in_the_graph() -> None:
    graph = trace(data_of_an_input, *apart())
    assert operators(graph)[-3:] == ["empty.memory_format", "set_.source_Tensor", "copy_.default"]
    x, w = shared()
    graph(x, w)
    assert x.untyped_storage().data_ptr() != w.untyped_storage().data_ptr()


@pytest.mark.parametrize("mode", MODES)
def test_an_input_of_a_graph_keeps_its_dtype(mode: Any) -> None:
    def f(x: Tensor) -> Tensor:
        x.data = x.to(torch.float64)
        return x * 2

    assert_equivalent(f, torch.ones(2))
    with pytest.raises(UnsupportedMutationError, match=r"test_storage\.py.*\n.*no operator can change the dtype"):
        make_fx(functionalize(f), tracing_mode=mode)(torch.ones(2))


def test_set_to_a_storage() -> None:
    def f(x: Any) -> Any:
        y, z = x + 1, x * 2
        y.set_(z.untyped_storage(), 1, (2,), (1,))
        y.add_(1)
        return y, z

    assert_equivalent(f, torch.arange(4.0))


def test_parameters_of_one_vector() -> None:
    module, eager = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    eager.load_state_dict(module.state_dict())

    def shrinking(of: torch.nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            vector = torch.nn.utils.parameters_to_vector(of.parameters())
            torch.nn.utils.vector_to_parameters(vector * 0.9, of.parameters())
            return of(x).detach()  # type: ignore[no-any-return]

        return step

    program, x = capture(shrinking(module), (torch.ones(3),)), torch.ones(3)
    for _ in range(3):
        assert torch.equal(program(x), shrinking(eager)(x))
        for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert module.bias.data_ptr() == module.weight.data_ptr() + 24
