"""Programs that exporters must get right: each has state or writes, and is called several times.

Invariant: two that are made one after the other are equal. Limits: CPU, no random numbers inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Program = Callable[..., Any]


class Lstm(nn.Module):
    """Carries its state in an attribute that does not exist before the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.LSTM(3, 4), None

    def forward(self, x: Tensor) -> Tensor:
        y, self.state = self.layer(x, self.state)
        result: Tensor = y
        return result


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(tokens))
        return result


class SharedBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Buffer(torch.zeros(3, 2))
        self.row = nn.Buffer(self.rows[1])

    def forward(self, x: Tensor) -> Tensor:
        self.rows.add_(x)
        self.row.mul_(2)
        return self.rows.sum() + self.row


class PythonCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class Swap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.zeros(3), torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        self.a, self.b = self.b, self.a
        return x + self.a


def _step(optimizer: str, **options: Any) -> Callable[[], Program]:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
        update = getattr(torch.optim, optimizer)(model.parameters(), **options)

        def step(x: Tensor, y: Tensor) -> Tensor:
            update.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            update.step()
            return loss

        return step

    return make


def _tied_step() -> Program:
    model = Tied()
    update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(tokens: Tensor) -> Tensor:
        update.zero_grad()
        loss = model(tokens).pow(2).sum()
        loss.backward()
        update.step()
        result: Tensor = loss
        return result

    return step


def _counter() -> Program:
    count = torch.zeros(())

    def run(x: Tensor) -> Tensor:
        count.add_(1)
        return x * count

    return run


def _decode() -> Program:
    keys = torch.zeros(1, 8, 4)

    def decode(x: Tensor, position: Tensor) -> Tensor:
        keys[:, position] = x
        return (keys * x).sum(-1)

    return decode


def _mutates(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)[1:].mul_(2).sum()


def _aliased(x: Tensor, y: Tensor) -> Tensor:
    y.add_(1)
    x.mul_(2)
    return x + 1


def _outputs(x: Tensor) -> Any:
    return {"itself": x, "none": None, "number": x.size(0), "views": (x[1:], x.t())}  # as JAX orders them


def _decides(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > -100 else x


def _overlapping() -> tuple[Tensor, ...]:
    whole = torch.randn(6)
    return whole, whole[2:5]


def _batch() -> tuple[Tensor, ...]:
    return torch.randn(6, 4), torch.randint(0, 2, (6,))


def _of(*size: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(size),)


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randint(0, 7, (2, 3)),)


PROGRAMS: dict[str, tuple[Callable[[], Program], Callable[[], tuple[Tensor, ...]]]] = {
    "counter": (_counter, _of(5)),
    "python-counter": (PythonCounter, _of(5)),
    "batch-norm": (lambda: nn.BatchNorm1d(3), _of(4, 3)),
    "decode": (_decode, lambda: (torch.randn(1, 4), torch.randint(0, 8, (1,)))),
    "sgd": (_step("SGD", lr=0.1, momentum=0.9), _batch),
    "adamw": (_step("AdamW", lr=0.01), _batch),
    "lstm": (Lstm, _of(5, 2, 3)),
    "mutates-input": (lambda: _mutates, lambda: (torch.randn(5), torch.randn(5))),
    "aliased-inputs": (lambda: _aliased, _overlapping),
    "outputs-alias-inputs": (lambda: _outputs, _of(3, 2)),
    "tied": (Tied, _tokens),
    "tied-step": (_tied_step, _tokens),
    "shared-buffers": (SharedBuffers, _of(2)),
    "swap": (Swap, _of(3)),
    "sizes-by-data": (lambda: lambda x: x[x > 0] * 2, _of(7)),
    "decides": (lambda: _decides, _of(7)),
}


def made(name: str, seed: int = 0) -> tuple[Program, Callable[[], tuple[Tensor, ...]]]:
    """A program of a name, and what makes its inputs."""
    make, inputs = PROGRAMS[name]
    torch.manual_seed(seed)
    return make(), inputs


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """A training step on the mean of the squares that a model gives."""

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
