"""Holds a captured program against eager, on inputs of random numbers.

Invariant: eager and the program start from equal state, and the state is left as eager leaves it.
Limits: state is parameters, buffers and optimizers that the target reaches, not other Python objects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from functionalize.graph_capture.python_state import reached
from functionalize.runtime.state_walk import is_module, joined
from functionalize.verify.observation import Observation, clone_inputs, differences, leaf_differences, observe


def differences_from_eager(
    target: Callable[..., Any],
    program: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    seed: int,
    rtol: float | None = None,
    atol: float | None = None,
) -> Iterator[str]:
    """In what a program differs from its original on some inputs, in words; nothing where it does not."""

    def observed(func: Callable[..., Any]) -> Observation:
        return observe(lambda args, kwargs: func(*args, **kwargs), clone_inputs(inputs), seed)

    roots = {"": target} if is_module(target) else reached(target)
    optimizers = [root for root in roots.values() if isinstance(root, torch.optim.Optimizer)]
    before, steps = _values(roots), [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    wanted = observed(target)
    after = _values(roots)
    with torch.no_grad():
        for name, tensor in _tensors(roots):
            tensor.copy_(before[name])
            tensor.grad = None
    for optimizer, state in zip(optimizers, steps, strict=True):
        optimizer.load_state_dict(state)
    yield from differences(wanted, observed(program), strides=True, aliasing=True, rtol=rtol, atol=atol)
    for name, tensor in _tensors(roots):
        for line in leaf_differences(after[name], tensor.detach(), strides=False, rtol=rtol, atol=atol):
            yield f"state {name}: {line}"


def _tensors(roots: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of the modules among some objects, by name."""
    for name, root in roots.items():
        if is_module(root):
            for path, tensor in (*root.named_parameters(), *root.named_buffers()):
                yield joined(name, path), tensor


def _values(roots: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _tensors(roots)}
