"""Training steps that combine a module and an optimizer.

Limits: modules that return a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functionalize._torch import pytree


def training_step(model: Any, optimizer: Any) -> Callable[..., Any]:
    """Forward, backward and update of a module that returns a loss: a scalar, or an output that has one."""

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer.zero_grad()
        output = model(*args, **kwargs)
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise TypeError(
                f"with an optimizer, {type(model).__name__} must return a loss: a tensor without dimensions, or an "
                "output with such a `loss`. Otherwise capture a function that computes the loss, calls backward() "
                "and then optimizer.step()"
            )
        loss.backward()
        optimizer.step()
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    return step
