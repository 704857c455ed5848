"""Random functions of a counter as schedules of a learning rate, in exported training steps: eager's losses and rates.

``python -m tests.sweeps.fuzz.schedules 0 120`` tries those of some seeds. Invariant: a seed is always the same
function. Limits: one optimizer with one rate; decisions by the counter, and by what is computed.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functionalize import UnsupportedExportError, capture

CALLS = 8
_COMBINED = ("({} + {})", "({} * {})", "max({}, {})", "min({}, {})")


def schedule(seed: int) -> str:
    """The source of a function ``rate(epoch)``."""
    choice = random.Random(seed)
    body = _statement(choice, 3, 1)
    return f"def rate(epoch):\n    value = 1.0\n{body}    return value / (1.0 + abs(value))\n"


def _expression(choice: random.Random, depth: int) -> str:
    kind = choice.randrange(7 if depth else 3)
    if kind < 3:
        return ("epoch", str(choice.choice([0.5, 1.0, 2.0, 0.9, 3])), str(choice.randrange(1, 6)))[kind]
    return _COMBINED[kind - 3].format(_expression(choice, depth - 1), _expression(choice, depth - 1))


def _statement(choice: random.Random, depth: int, indent: int) -> str:
    begin = "    " * indent
    if not depth or choice.random() < 0.3:
        return f"{begin}value = {_expression(choice, 2)}\n"
    decisions = (
        f"epoch {choice.choice(['<', '<=', '>', '==', '!='])} {choice.randrange(6)}",
        f"epoch % {choice.randrange(2, 4)} == {choice.randrange(2)}",
        f"value > {choice.choice([0.5, 1, 2, 4])}",
    )
    ways = [_statement(choice, depth - 1, indent + 1) for _ in range(2)]
    then = _statement(choice, depth - 1, indent) if choice.random() < 0.3 else ""
    return f"{begin}if {choice.choice(decisions)}:\n{ways[0]}{begin}else:\n{ways[1]}{then}"


def _made(rate: Callable[[int], float]) -> tuple[torch.optim.Optimizer, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return optimizer, step


def verdict(seed: int) -> str:
    """Nothing where the exported step does what eager's does; else in which call it does not, or why it is refused."""
    names: dict[str, Any] = {}
    exec(schedule(seed), names)
    optimizer, eager = _made(names["rate"])
    try:
        exported = capture(_made(names["rate"])[1], (torch.ones(3, 3),)).to_exported_program().module()
    except UnsupportedExportError as error:
        return f"refused: {error.causes[0]}"
    for call in range(CALLS):
        x = torch.full((3, 3), call % 3 + 0.5)
        losses = exported(x), eager(x)
        rates = [float(value) for name, value in exported.named_buffers() if name.endswith(".lr")]
        wanted = optimizer.param_groups[0]["lr"]
        if not torch.allclose(*losses, rtol=1e-4) or any(abs(one - wanted) > 1e-7 for one in rates):
            return f"wrong in call {call}: {losses}, rates {rates} for {wanted}\n{schedule(seed)}"
    return ""


def main(begin: int, end: int) -> int:
    """Try the functions of some seeds; how many are not right."""
    failed = 0
    for seed in range(begin, end):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = verdict(seed)
        if found:
            failed += 1
            print(f"seed {seed}: {found}", flush=True)
    print(f"{end - begin - failed} of {end - begin} right")
    return failed


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
