"""Training steps: one made of a module and an optimizer, and whether one that was captured minds missing gradients.

Limits: modules that return a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize.runtime.metadata import AliasKind, ProgramMetadata


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


def serves_without_gradients(assuming: ProgramMetadata, found: ProgramMetadata) -> bool:
    """Whether a program captured as if there were gradients does what one does that was captured without."""
    read = {assuming.inputs[number].name for number in assuming.gradients_read}
    left = {found.inputs[number].name for number in {*found.gradients, *found.gradients_read}}
    if assuming.graph.answers != found.graph.answers or _given(assuming) != _given(found):
        return False
    as_zeros = assuming.only_accumulates and not found.leaves_sparse_gradients
    return not read or (read <= left and as_zeros)


def _given(metadata: ProgramMetadata) -> list[tuple[AliasKind, str | None]]:
    """What the tensors are that a program gives, but for gradients: of what kind, of which inputs."""
    aliases = [one for number, one in enumerate(metadata.outputs) if number not in metadata.gradients.values()]
    return [(one.kind, None if one.input is None else metadata.inputs[one.input].name) for one in aliases]
