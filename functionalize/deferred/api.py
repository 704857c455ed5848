"""Deferred initialization: construct on fake tensors, make them real later, in whole or in part.

Invariant: what is made real is, bit for bit, what eager construction would have given. Limits: docs/deferred.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch

from functionalize._torch import FakeTensor, buffers_of, parameters_of
from functionalize._torch.deferred import take_place
from functionalize.deferred.materialization import Shard, made_before, materialized, shard_of
from functionalize.deferred.recording import Recording
from functionalize.deferred.refusals import not_callable

Result = TypeVar("Result")


@cache
def recording() -> Recording:
    """The one of this process."""
    return Recording()


def deferred_init(module_or_fn: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """What a function returns, a module's class say, with fake tensors for those that it makes.

    They report the true device, size, strides and dtype. Random numbers are drawn when they are made real, those that
    the function would have drawn now: torch's generator stays as it is.

    Args:
        module_or_fn: a module's class, or any function.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        What the function returns.

    Example:
        >>> import torch
        >>> from functionalize import deferred_init, is_deferred, materialize_module
        >>> layer = deferred_init(torch.nn.Linear, 4, 2)
        >>> is_deferred(layer), layer.weight.shape
        (True, torch.Size([2, 4]))
        >>> materialize_module(layer)
        >>> is_deferred(layer), layer(torch.ones(1, 4)).shape
        (False, torch.Size([1, 2]))
    """
    if not callable(module_or_fn) or isinstance(module_or_fn, torch.Tensor):
        raise not_callable(module_or_fn)
    result: Result = recording().run(module_or_fn, args, kwargs)
    return result


def is_deferred(value: torch.Tensor | torch.nn.Module) -> bool:
    """Whether a tensor is deferred, or some parameter or buffer of a module.

    Example:
        >>> import torch
        >>> from functionalize import deferred_init, is_deferred
        >>> is_deferred(deferred_init(torch.ones, 2)), is_deferred(torch.ones(2))
        (True, False)
    """
    if isinstance(value, torch.nn.Module):
        return any(map(is_deferred, _tensors(value)))
    return isinstance(value, FakeTensor) and recording().cell_of(value) is not None


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for one in module.modules():
        for container in (parameters_of(one), buffers_of(one)):
            yield from (tensor for tensor in container.values() if tensor is not None)


def materialize_tensor(tensor: torch.Tensor, shard: Shard | None = None) -> torch.Tensor:
    """The real tensor for a deferred one: the same object for the same tensor. A real one is returned as it is.

    Args:
        tensor: the tensor.
        shard: ``(dim, rank, world)``: the part of one dimension that one rank of some has.

    Returns:
        The tensor, equal bit for bit to the one of the construction that was deferred; or a part of it.

    Raises:
        ValueError: it is a fake tensor that no construction made.

    Example:
        >>> import torch
        >>> from functionalize import deferred_init, materialize_tensor
        >>> layer = deferred_init(torch.nn.Linear, 4, 2)
        >>> materialize_tensor(layer.bias).shape, materialize_tensor(layer.weight, shard=(0, 1, 2)).shape
        (torch.Size([2]), torch.Size([1, 4]))
    """
    if not isinstance(tensor, FakeTensor):
        return tensor
    own = recording()
    with own.lock:
        if shard is not None:
            return shard_of(own, tensor, shard)
        return materialized(own, [tensor], (None, None))[id(tensor)]


def materialize_module(
    module: torch.nn.Module,
    buffers_only: bool = False,
    check_fn: Callable[[torch.nn.Module], bool] | None = None,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Make the parameters and buffers of a module real, in place.

    Args:
        module: the module; its children come with it.
        buffers_only: leave parameters deferred.
        check_fn: whether the tensors that a module itself holds are made real; all modules are asked.
        device: where to; unless given, where the construction would have put each.
        dtype: of floating-point tensors; unless given, their own.

    Example:
        >>> import torch
        >>> from functionalize import deferred_init, materialize_module
        >>> model = deferred_init(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
        >>> materialize_module(model, dtype=torch.float64)
        >>> model[0].weight.dtype
        torch.float64
    """
    own = recording()
    target = None if device is None else torch.device(device), dtype
    with own.lock:
        modules = [one for one in module.modules() if check_fn is None or check_fn(one)]
        places = [place for one in modules for place in _places(one, buffers_only)]
        fakes = {id(fake): fake for _, _, fake in places}
        given = {key for key, fake in fakes.items() if made_before(fake) is not None}
        made = materialized(own, fakes.values(), target)
        left = {key for key in made if key in given or not take_place(fakes[key], made[key])}
        for container, name, fake in places:
            if id(fake) in left:
                container[name] = made[id(fake)]
        own.sweep()


Place = tuple[dict[str, Any], str, FakeTensor]


def _places(module: torch.nn.Module, buffers_only: bool) -> Iterator[Place]:
    """Where a module has deferred tensors."""
    containers: list[dict[str, Any]] = [buffers_of(module)]
    if not buffers_only:
        containers += [parameters_of(module), vars(module)]
    for container in containers:
        for name, value in container.items():
            if isinstance(value, FakeTensor) and (container is not vars(module) or is_deferred(value)):
                yield container, name, value
