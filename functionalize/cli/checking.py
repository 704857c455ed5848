"""Holds a captured program against eager, on inputs of random numbers.

Invariant: eager and the program start from equal state, and the state is left as eager leaves it.
Limits: state is parameters, buffers and optimizers that the target reaches, not other Python objects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize.graph_capture.python_state import reached
from functionalize.runtime.state_walk import is_module
from functionalize.verify.observation import clone_inputs, differences, leaf_differences, observe

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class _State:
    """The state that a function or module reaches."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self._roots: dict[str, Any] = {"": target} if is_module(target) else reached(target)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, by name."""
        found: dict[str, torch.Tensor] = {}
        for name, root in self._roots.items():
            if is_module(root):
                for path, tensor in (*root.named_parameters(), *root.named_buffers()):
                    found[f"{name}.{path}" if name else path] = tensor
        return found

    def copy(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What it holds now."""
        optimizers = {name: copy.deepcopy(root.state_dict()) for name, root in self._roots.items() if _steps(root)}
        return {name: tensor.detach().clone() for name, tensor in self.tensors().items()}, optimizers

    def restore(self, before: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
        """Put a copy back."""
        values, optimizers = before
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(values[name])
                tensor.grad = None
        for name, state in optimizers.items():
            self._roots[name].load_state_dict(copy.deepcopy(state))


def _steps(root: Any) -> bool:
    return isinstance(root, torch.optim.Optimizer)


def differences_from_eager(
    target: Callable[..., Any],
    program: Callable[..., Any],
    inputs: Inputs,
    *,
    seed: int,
    rtol: float | None = None,
    atol: float | None = None,
) -> Iterator[str]:
    """In what a program differs from its original on some inputs, in words; nothing where it does not."""
    state = _State(target)
    before = state.copy()
    wanted = observe(lambda args, kwargs: target(*args, **kwargs), clone_inputs(inputs), seed)
    after, _ = state.copy()
    state.restore(before)
    actual = observe(lambda args, kwargs: program(*args, **kwargs), clone_inputs(inputs), seed)
    yield from differences(wanted, actual, strides=True, aliasing=True, rtol=rtol, atol=atol)
    for name, tensor in state.tensors().items():
        for line in leaf_differences(after[name], tensor.detach(), strides=False, rtol=rtol, atol=atol):
            yield f"state {name}: {line}"
