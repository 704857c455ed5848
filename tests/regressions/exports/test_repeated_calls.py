"""Exported programs with state, called several times beside eager, on each route."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from functionalize import capture
from tests.support.routes import ONNX, SAVED, STABLEHLO, Route

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
Inputs = Callable[[], tuple[Any, ...]]


class Replaced(nn.Module):
    """Gives its buffer, the entries of a list and a number other values with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.cache, self.factor = nn.Buffer(torch.zeros(3)), [torch.zeros(3) for _ in range(2)], 0.5

    def forward(self, x: Tensor) -> Any:
        self.hidden = self.hidden * 0.5 + x  # type: ignore[assignment]
        self.cache[0] = self.cache[0] + self.hidden
        self.factor = self.factor * 2
        return self.cache[0] * self.factor, self.cache[1], self.factor


def at_a_position() -> tuple[Any, Inputs]:
    """Writes where a tensor without dimensions says."""
    cache, weight = torch.zeros(6, 2), nn.Parameter(torch.ones(6, 2))

    def decode(x: Tensor, position: Tensor) -> Tensor:
        cache[position] = x
        with torch.no_grad():
            weight[position] += 1
        return (cache * weight.detach()).sum(-1) + cache[position, 0]

    return decode, lambda: (torch.randn(2), torch.randint(-6, 6, ()))


class Exchanged(nn.Module):
    """Gives back a tensor that it replaces, exchanges two others and writes to one of them; keeps its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.old, self.one, self.other, self.last = torch.zeros(3), torch.zeros(3), torch.ones(3), torch.zeros(3)

    def forward(self, x: Tensor) -> Any:
        old, last = self.old, self.last
        old.add_(x)
        self.old, self.last = old * 2, x
        self.one, self.other = self.other, self.one
        self.one.add_(x)
        return old, self.one * 2 + self.other, last


class Derived(nn.Module):
    """Replaces a tensor that shares memory with a parameter, which stays, as torch's old spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.current = self.weight.data

    def forward(self, x: Tensor) -> Tensor:
        self.current = self.weight.data * 2
        return x * self.current + self.weight


class Aliased(nn.Module):
    """Attributes that are no buffers are written: by themselves, and by tensors whose memory they show."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.weight, self.plain = nn.Buffer(torch.zeros(3)), nn.Parameter(torch.ones(3)), torch.zeros(3)
        self.tail, self.average = self.sums[1:], self.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        self.sums.add_(x)
        self.plain.sub_(x)
        self.average.mul_(0.5).add_(x)
        return self.tail * 2 + (self.weight + self.plain).sum()


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(3).half())

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.abs().cumsum(0)[-1])
        return self.mean.abs() + x.sum(0)


class LastArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        last, self.last = self.last, x
        return x - last


def old_gradient() -> tuple[Any, Inputs]:
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()

    def step(x: Tensor) -> Any:
        old = layer.weight.grad
        layer.zero_grad()
        layer(x).square().mean().backward()
        return old, layer.weight.grad

    return step, lambda: (torch.randn(4, 3),)


def norms_and_bits() -> tuple[Any, Inputs]:
    table = torch.nn.Embedding(7, 4, max_norm=0.5)

    def run(x: Tensor, index: Tensor) -> Any:
        return torch.cdist(table(index), x), index >> 1, index << 2

    return run, lambda: (torch.randn(5, 4), torch.randint(0, 7, (3,)))


def stepped(**options: Any) -> tuple[Any, Inputs]:
    layer = nn.Linear(3, 2)
    update = torch.optim.AdamW(layer.parameters(), **options)

    def step(x: Tensor) -> Any:
        update.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        update.step()
        return loss

    return step, lambda: (torch.randn(4, 3),)


def functions_of_numbers() -> tuple[Any, Inputs]:
    def run(x: Tensor, number: Tensor) -> Any:
        n = number.item()
        chosen = x * min(n, 0.5, n * 2) + max(n, 0.25)
        return chosen, x * math.expm1(n) * math.degrees(n) + math.fmod(n, 0.1), nn.functional.leaky_relu(x, n * 2 + 1)

    return run, lambda: (torch.randn(3), torch.rand((), dtype=torch.float64))


def in_part_shared() -> tuple[Any, Inputs]:
    """Neither input has all the memory that the two share."""

    def run(x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        y.mul_(2)
        return x + 0, y

    def inputs() -> tuple[Tensor, ...]:
        whole = torch.randn(6)
        return whole[:4], whole[2:]

    return run, inputs


class BegunAsOne(nn.Module):
    """States that begin as one tensor, and are several ones from the first call on: of an LSTM, of a delay line."""

    def __init__(self) -> None:
        super().__init__()
        zeros = torch.zeros(3)
        self.state, self.line, self.cells = (zeros, zeros), [zeros] * 3, [(zeros, zeros), (zeros, zeros)]

    def forward(self, x: Tensor) -> Any:
        hidden, cell = self.state
        self.state = hidden + x, cell * 0.5 + 1
        self.line.append(x * 1)
        self.line.pop(0)
        self.cells = [(one + x, other + 2 * x) for one, other in self.cells]
        return self.state[0] * cell, torch.stack(self.line).sum(0), self.cells[1][1] - self.cells[0][0]


def returned_state() -> tuple[Any, Inputs]:
    state: dict[str, Any] = {"kept": torch.ones(3), "n": 0, "nested": [torch.zeros(3)], "sum": torch.ones(3)}
    pair = [torch.zeros(3), torch.ones(3)]

    def program(x: Tensor) -> Any:
        state["n"] += 1
        state["sum"] = state["sum"] + x
        state["nested"][0] = state["nested"][0] - x
        state["kept"].add_(x)
        pair[0], pair[1] = pair[1], pair[0]
        return state, pair

    return program, lambda: (torch.randn(3),)


class Turned(nn.Module):
    """Puts whole new values into its buffers: by other data, and by other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.turned = nn.Buffer(torch.arange(4.0).reshape(2, 2)), nn.Buffer(torch.rand(2, 2))

    def forward(self, x: Tensor) -> Any:
        self.other.data = self.other.data * 0.5 + x
        self.other[0].add_(1)
        self.turned.t_()[0].add_(x[0])
        return self.other[0] + self.turned[0]


def of_a_number_first() -> tuple[Any, Inputs]:
    return lambda x: torch.add(0.25, x, alpha=0.5) + x.clamp(-0.5, 2), lambda: (torch.randn(3),)


def bounded_steps() -> tuple[Any, Inputs]:
    """Its optimizer bounds by a float and an integer."""
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Rprop(layer.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(torch.ones(2, 3))
    return step, lambda: (torch.randn(2, 3),)


def fake_quantized() -> tuple[Any, Inputs]:
    scale, place = torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32)
    layer, on = nn.Linear(3, 2), torch.ones(1, dtype=torch.int64)

    def run(x: Tensor) -> Tensor:
        scale.mul_(1.5)
        with torch.no_grad():
            found: Tensor = torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
                layer(x), scale, place, on, 0, 15
            )[0]
        return found

    return run, lambda: (torch.randn(4, 3),)


PROGRAMS: dict[str, Callable[[], tuple[Any, Inputs]]] = {
    "turned": lambda: (Turned(), lambda: (torch.randn(2),)),
    "of-a-number-first": of_a_number_first,
    "bounded-steps": bounded_steps,
    "fake-quantized": fake_quantized,
    "replaced": lambda: (Replaced(), lambda: (torch.randn(3),)),
    "begun-as-one": lambda: (BegunAsOne(), lambda: (torch.randn(3),)),
    "returned-state": returned_state,
    "at-a-position": at_a_position,
    "in-part-shared": in_part_shared,
    "number-of-one-element": lambda: (lambda x: torch.tensor(x[:1].item()) * 2, lambda: (torch.randn(3),)),
    "sixteen-bits": lambda: (Short(), lambda: (torch.randn(4, 3).half(),)),
    "aliased": lambda: (Aliased(), lambda: (torch.randn(3),)),
    "derived": lambda: (Derived(), lambda: (torch.randn(3),)),
    "exchanged": lambda: (Exchanged(), lambda: (torch.randn(3),)),
    "old-gradient": old_gradient,
    "last-argument": lambda: (LastArgument(), lambda: (torch.randn(3),)),
    "norms-and-bits": norms_and_bits,
    "named-results": lambda: (lambda x: x.sort(-1), lambda: (torch.randn(2, 3),)),
    "stepped-in-lists": lambda: stepped(lr=0.1, foreach=True),  # whose operators take numbers that the step tells
    "rate-in-a-tensor": lambda: stepped(lr=torch.tensor(0.1)),  # combined with such numbers
    "functions-of-numbers": functions_of_numbers,
    "bilinear": lambda: (nn.Bilinear(3, 4, 5), lambda: (torch.randn(2, 3), torch.randn(2, 4))),
    "none": lambda: (lambda x, y=None: (None, {"y": y, "x": x + 1}), lambda: (torch.randn(3), None)),
}
_CASES = [
    pytest.param(name, route, marks=pytest.mark.full)
    if route is ONNX and name not in ("replaced", "at-a-position", "exchanged", "sixteen-bits")
    else pytest.param(name, route, marks=pytest.mark.slow(seconds=3))
    for name in PROGRAMS
    for route in (SAVED, ONNX, STABLEHLO)
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "route"), _CASES)
def test_four_calls(name: str, route: Route, tmp_path: Path) -> None:
    torch.manual_seed(0)
    program, inputs = PROGRAMS[name]()
    torch.manual_seed(0)
    twin, _ = PROGRAMS[name]()
    run = route(capture(program, inputs()), tmp_path)
    for _ in range(4):
        mine = inputs()
        given = copy.deepcopy(mine)
        expected, found = twin(*given), run(*mine)
        leaves = [[leaf for leaf in tree_leaves(one) if leaf is not None] for one in (found, expected)]
        for one, other in zip(*leaves, strict=True):
            torch.testing.assert_close(
                torch.as_tensor(one), torch.as_tensor(other), check_dtype=isinstance(other, Tensor)
            )
        torch.testing.assert_close(mine, given)


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("route", [SAVED, ONNX, STABLEHLO])
def test_arguments_that_are_state_count_for_both(route: Route, tmp_path: Path) -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    layer.requires_grad_(False)

    def run(weight: Tensor, bias: Tensor, x: Tensor) -> Any:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    loaded = route(capture(run, (layer.weight, layer.bias, x)), tmp_path)
    others = torch.randn(2, 3), torch.randn(2), torch.randn(4, 3)
    torch.testing.assert_close(loaded(*others), run(*others))


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_steps_of_parametrized_layers_in_jax(name: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(getattr(nn.utils.parametrizations, name)(nn.Linear(4, 3)))

    def step(layer: Any, x: Tensor) -> Any:
        layer.zero_grad()
        layer(x).square().sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.1 * parameter.grad
        return layer.weight.detach()

    x = torch.randn(2, 4)
    program = capture(lambda x: step(layers[0], x), (x,)).to_jax()
    run, state = program.jit(), program.initial_state
    for _ in range(3):
        state, weight = run(state, jnp.asarray(x.numpy()))
        torch.testing.assert_close(torch.tensor(weight.tolist()), step(layers[1], x))


@pytest.mark.parametrize(
    "kind", [functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.AdamW, torch.optim.Muon]
)
def test_a_first_step_in_low_precision(kind: Any, tmp_path: Path) -> None:
    """What is exported rounds otherwise; that is no other first call."""

    def step_of() -> Any:
        torch.manual_seed(0)
        layer = nn.Linear(64, 8, bias=False).bfloat16()
        optimizer = kind(layer.parameters())

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = layer(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    inputs = [torch.randn(16, 64, dtype=torch.bfloat16) for _ in range(3)]
    module, reference = SAVED(capture(step_of(), (inputs[0],)), tmp_path), step_of()
    for x in inputs:
        torch.testing.assert_close(module(x), reference(x), rtol=2e-2, atol=1e-3)


@pytest.mark.every(5)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}], ids=str)
def test_steps_of_recurrent_layers(options: dict[str, Any], tmp_path: Path) -> None:
    def step() -> Callable[[Tensor], Tensor]:
        torch.manual_seed(0)
        layers = nn.LSTM(4, 5, batch_first=True, **options)
        first = nn.Parameter(torch.randn((1 + layers.bidirectional) * layers.num_layers, 2, 5))
        optimizer = torch.optim.SGD([*layers.parameters(), first], 0.5)

        def run(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            output, (hidden, cell) = layers(x, (first, torch.zeros_like(first)))
            loss: Tensor = output.square().mean() + hidden.sin().mean() + cell.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return run

    eager, x = step(), torch.randn(4, 2, 3, 4)
    program = capture(step(), (x[0],))
    runs = [route(program, tmp_path) for route in (SAVED, ONNX, STABLEHLO)]
    for batch in x:
        expected = eager(batch)
        for run in runs:
            torch.testing.assert_close(torch.as_tensor(run(batch)), expected)
