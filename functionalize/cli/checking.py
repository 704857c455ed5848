"""Holds a captured program against eager, on inputs of random numbers.

Invariant: eager and the program start from equal state, and the state is left as eager leaves it.
Limits: state is parameters, buffers and optimizers that the target reaches, not other Python objects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from functionalize.graph_capture.inputs.state import reached
from functionalize.python_state.walk import is_module, joined
from functionalize.runtime.calls.program import CapturedProgram
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
    before, steps = _values(roots), [_state_of(optimizer) for optimizer in optimizers]
    wanted = observed(target)
    after = _values(roots)
    with torch.no_grad():
        for name, tensor in _tensors(roots):
            tensor.copy_(before[name])
            tensor.grad = None
    for optimizer, state in zip(optimizers, steps, strict=True):
        _restore(optimizer, state)
    yield from differences(wanted, observed(program), strides=True, aliasing=True, rtol=rtol, atol=atol)
    for name, tensor in _tensors(roots):
        for line in leaf_differences(after[name], tensor.detach(), strides=False, rtol=rtol, atol=atol):
            yield f"state {name}: {line}"


def at_ends(
    program: CapturedProgram, inputs: tuple[tuple[Any, ...], dict[str, Any]]
) -> Iterator[tuple[str, tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Some inputs, cut off or repeated so that each size that may differ is at an end of its range; in words, too."""
    first = program.specialization
    sizes, arguments = first.guards.sizes, first.capture.convention.arguments(*inputs)
    if sizes is None:
        return
    values = first.guards.check(arguments)
    for said, layouts in sizes.ends(sizes.of(values)):
        wanted = {id(values[number]): layout for number, *layout in layouts}
        yield said, arguments.like(lambda leaf, wanted=wanted: _resized(leaf, *wanted.get(id(leaf), ())))  # type: ignore[misc]


def _resized(tensor: torch.Tensor, size: Any = None, stride: Any = None) -> torch.Tensor:
    if size is None:
        return tensor
    made = tensor.detach()
    for dim, count in enumerate(size):
        made = made.index_select(dim, torch.arange(count) % tensor.size(dim))
    laid_out = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(made)
    return laid_out.requires_grad_(tensor.requires_grad)


State = tuple[dict[torch.Tensor, dict[Any, Any]], list[dict[str, Any]]]


def _state_of(optimizer: torch.optim.Optimizer) -> State:
    """What an optimizer keeps, copied: by parameter, and its hyperparameters."""
    groups = [
        {key: _copy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    kept = {param: {key: _copy(value) for key, value in state.items()} for param, state in optimizer.state.items()}
    return kept, groups


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _restore(optimizer: torch.optim.Optimizer, before: State) -> None:
    """Give an optimizer its state back, in the objects that it has: a captured program knows these."""
    kept, groups = before
    pairs = [(state, kept[param]) for param, state in optimizer.state.items() if param in kept]
    for param in [param for param in optimizer.state if param not in kept]:
        del optimizer.state[param]
    for now, old in [*pairs, *zip(optimizer.param_groups, groups, strict=True)]:
        for key in [key for key in now if key not in old and key != "params"]:
            del now[key]
        for key, value in old.items():
            if isinstance(value, torch.Tensor) and isinstance(now.get(key), torch.Tensor):
                now[key].detach().copy_(value)
            else:
                now[key] = value


def _tensors(roots: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of the modules among some objects, by name."""
    for name, root in roots.items():
        if is_module(root):
            for path, tensor in (*root.named_parameters(), *root.named_buffers()):
                yield joined(name, path), tensor


def _values(roots: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _tensors(roots)}
