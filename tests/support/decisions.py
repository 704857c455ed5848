"""Programs that decide by data, called on random inputs and held against eager; how many variants each has.

``python -m tests.support.decisions`` prints them. Limits: small sizes; equal means equal to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from functionalize import capture
from functionalize.runtime.calls.program import CapturedProgram

Step = Callable[..., Any]


class Subject(NamedTuple):
    """A program with the tensors that it keeps, made anew for each side of a comparison."""

    run: Step
    state: list[Tensor]


Make = Callable[[], Subject]
Draw = Callable[[torch.Generator], tuple[Any, ...]]


def converge() -> Subject:
    """A `while` loop that runs until a test holds, and counts how often it ran."""
    rounds = torch.zeros((), dtype=torch.int64)

    def run(x: Tensor) -> Tensor:
        while True:
            after = (x + 2 / x) / 2
            rounds.add_(1)
            if (after - x).abs().max() < 1e-4:
                return after
            x = after

    return Subject(run, [rounds])


def beam_search() -> Subject:
    """Three beams; it stops when the best is complete."""
    torch.manual_seed(0)
    table = nn.Embedding(6, 6).requires_grad_(False)

    def run(bias: Tensor) -> tuple[Tensor, Tensor]:
        scores, beams = torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64)
        for _ in range(5):
            grown = (scores[:, None] + (table(beams[:, -1]) + bias).log_softmax(-1)).flatten()
            scores, best = grown.topk(3)
            beams = torch.cat([beams[best // 6], best[:, None] % 6], dim=1)
            if beams[0, -1] == 5:
                break
        return beams, scores

    return Subject(run, list(table.parameters()))


def top_p() -> Subject:
    """Sampling among the most probable, which a loop in Python counts."""

    def run(logits: Tensor) -> Tensor:
        probabilities, order = logits.softmax(-1).sort(descending=True)
        total, count = 0.0, 0
        while total < 0.8:
            total, count = total + probabilities[count].item(), count + 1
        return order[torch.multinomial(probabilities[:count], 2, replacement=True)]

    return Subject(run, [])


def _perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1))


def loss_scaling() -> Subject:
    """A step of SGD under a GradScaler, which leaves out steps whose gradients are not finite."""
    model = _perceptron()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), torch.amp.GradScaler("cpu", 8.0)
    scaler.scale(torch.zeros(()))  # makes its tensors

    def run(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Subject(run, [*model.parameters(), scaler._scale, scaler._growth_tracker])  # type: ignore[list-item]


def clipping() -> Subject:
    """A step of Adam whose gradients are clipped where their norm is large."""
    model = _perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def run(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        if norm > 1:
            torch._foreach_div_(gradients, norm.item())
        optimizer.step()
        return loss.detach()

    return Subject(run, list(model.parameters()))


def experts() -> Subject:
    """Routing in Python: an expert runs if some token wants it, and counts its tokens."""
    torch.manual_seed(0)
    gate, layers = nn.Linear(4, 3).requires_grad_(False), [nn.Linear(4, 4).requires_grad_(False) for _ in range(3)]
    load = torch.zeros(3)

    def run(x: Tensor) -> Tensor:
        chosen, out = gate(x).argmax(-1), torch.zeros_like(x)
        for number, layer in enumerate(layers):
            tokens = (chosen == number).nonzero()[:, 0]
            if tokens.numel() == 0:
                continue
            out.index_add_(0, tokens, layer(x[tokens]))
            load[number] += tokens.numel()
        return out

    return Subject(run, [load])


def ragged() -> Subject:
    """A batch of sequences of different lengths, each normalized by itself."""

    def run(x: Tensor, lengths: Tensor) -> Tensor:
        for row, length in zip(x, lengths.tolist(), strict=True):
            part = row[: int(length)]
            part.sub_(part.mean())
        return x.sum(0)

    return Subject(run, [])


def _normal(*sizes: int, scale: float = 1.0) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(sizes, generator=generator) * scale


def _batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _normal(8, 4)(generator), _normal(8, 1, scale=2.0)(generator)


def _overflowing(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = _batch(generator)
    return x * (torch.inf if torch.rand((), generator=generator) < 0.2 else 1), y


PROGRAMS: dict[str, tuple[Make, Draw]] = {
    "a `while` loop to convergence": (converge, lambda g: (torch.rand(3, generator=g) * 8 + 0.1,)),
    "beam search with an early stop": (beam_search, lambda g: (_normal(6)(g),)),
    "top-p sampling in a loop": (top_p, lambda g: (_normal(8, scale=2.0)(g),)),
    "dynamic loss scaling": (loss_scaling, _overflowing),
    "gradients clipped by an `if`": (clipping, _batch),
    "mixture of experts": (experts, lambda g: (_normal(4, 4)(g),)),
    "ragged batches": (ragged, lambda g: (_normal(2, 4)(g), torch.randint(1, 5, (2,), generator=g))),
}


def compared(make: Make, draw: Draw, calls: int = 100, **options: Any) -> CapturedProgram:
    """Call a program and eager on the same random inputs; the captured program.

    Raises:
        AssertionError: results, inputs afterwards, state or random numbers differ.
    """
    generator = torch.Generator().manual_seed(0)
    eager, mine = make(), make()
    program = capture(mine.run, draw(generator), cache_size=100, **options)
    for _ in range(calls):
        given = draw(generator)
        twins = pytree.tree_map_only(Tensor, torch.clone, given)
        before = torch.get_rng_state()
        wanted, after = eager.run(*given), torch.get_rng_state()
        torch.set_rng_state(before)
        got = program(*twins)
        sides = (got, twins, mine.state), (wanted, given, eager.state)
        torch.testing.assert_close(*sides, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.get_rng_state(), after)
    return program


def main() -> None:
    """Print the programs with their variants."""
    for name, (make, draw) in PROGRAMS.items():
        begin = time.perf_counter()
        program = compared(make, draw)
        print(f"{name:32} {len(program.variants):3} variants, 100 calls as eager, {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
