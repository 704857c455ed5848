"""Training steps: one made of a module and an optimizer, and the state that an optimizer makes in its first step.

Invariant: parameters, gradients and the state that is there stay as they are. Limits: optimizers whose first step needs
a closure, or is another than the later ones, keep their state for the first step to make.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from functionalize._torch import pytree


class _First(dict[Any, Any]):
    """A parameter's state, with copies of what each entry was first."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Any, Any] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.first.setdefault(key, value.clone() if isinstance(value, torch.Tensor) else value)
        super().__setitem__(key, value)


def make_state(optimizer: torch.optim.Optimizer) -> bool:
    """Give each parameter that has no state the one that the optimizer's first step would begin with.

    The first step runs on zeros in place of the parameters, with gradients of zeros. Tells whether it gave some.
    """
    missing = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter)
    ]
    if not missing or any(group.get("dampening") for group in optimizer.param_groups):
        return False  # with dampening, the first step of SGD does not dampen
    twins = {parameter: _twin(parameter) for parameter in missing}
    before = optimizer.__dict__.copy()
    hooks = {name: type(value)() for name, value in before.items() if name.endswith("_hooks") and value}
    groups = [
        {**group, "params": [twins[p] for p in group["params"] if p in twins]} for group in optimizer.param_groups
    ]
    state: Any = defaultdict(_First)
    optimizer.__dict__.update(state=state, param_groups=groups, **hooks)
    try:
        type(optimizer).step(optimizer)
    except Exception:  # what it needs beside gradients is the program's to give
        return False
    finally:
        optimizer.__dict__.clear()
        optimizer.__dict__.update(before)
    for parameter, twin in twins.items():
        if twin in state and state[twin].first:
            optimizer.state[parameter] = state[twin].first
    return any(twin in state and state[twin].first for twin in twins.values())


def _twin(parameter: torch.Tensor) -> torch.nn.Parameter:
    twin = torch.nn.Parameter(torch.zeros_like(parameter, requires_grad=False))
    twin.grad = torch.zeros_like(twin)
    return twin


def training_step(model: Any, optimizer: Any) -> Callable[..., Any]:
    """Forward, backward and update of a module that returns a loss: a scalar, or an output that has one."""

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer.zero_grad()
        output = model(*args, **kwargs)
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise TypeError(
                f"with an optimizer, {type(model).__name__} must return a loss: a tensor without dimensions, or an "
                "output with such a `loss`. Else capture a function that computes it, calls backward() and then "
                "optimizer.step()"
            )
        loss.backward()
        optimizer.step()
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    return step
