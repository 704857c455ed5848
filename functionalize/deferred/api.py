"""Deferred initialization: construct on fake tensors, make them real later, in whole or in part.

Invariant: what is made real is, bit for bit, what eager construction would have given. Limits: docs/tutorials/large-models.md.
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
from functionalize.deferred.refusals import no_tensor, not_callable

Result = TypeVar("Result")


@cache
def recording() -> Recording:
    """The one of this process."""
    return Recording()


def deferred_init(module_or_fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
    """What a function returns, a module's class say, with fake tensors for those that it makes.

    The fake tensors have all but data: size, strides, dtype, device, class, and what they share. How each is computed
    is recorded; so is what is done to them afterwards (``half()``, ``to(device)``, ``load_state_dict``). Where the
    function asks for data (``item()``, ``bool()``, ``tolist()``), what it asks for is computed.

    The default generator is left where the construction would have left it in eager. Real tensors that the function
    reads must stay as they are until what depends on them is materialized.

    Args:
        module_or_fn: a module's class, or any function.
        args: its arguments.
        kwargs: the same, by name.

    Returns:
        What it returns.

    Raises:
        TypeError: it is not callable, or a module that is made already.
        DeferredError: it writes to a tensor from outside, asks for an address, calls an operator without a meta
            kernel, or is called inside of a trace.

    Example:
        >>> import torch
        >>> from functionalize import deferred_init, is_deferred, materialize_module
        >>> model = deferred_init(torch.nn.Linear, 50_000, 50_000)  # ten gigabytes
        >>> model.weight.shape, is_deferred(model)
        (torch.Size([50000, 50000]), True)
        >>> small = deferred_init(torch.nn.Linear, 3, 4)
        >>> materialize_module(small)
        >>> is_deferred(small)
        False
    """
    made = isinstance(module_or_fn, torch.nn.Module) and not (args or kwargs)
    if not callable(module_or_fn) or isinstance(module_or_fn, torch.Tensor) or made:
        raise not_callable(module_or_fn)
    result: Result = recording().run(module_or_fn, args, kwargs)
    return result


def is_deferred(value: torch.Tensor | torch.nn.Module) -> bool:
    """Whether a tensor is deferred, or some parameter or buffer of a module.

    Example:
        >>> import torch
        >>> from functionalize import deferred_init, is_deferred
        >>> is_deferred(deferred_init(torch.nn.Linear, 3, 4)), is_deferred(torch.ones(3))
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
    """The real tensor for a deferred one: the same object for the same tensor. A real tensor is returned as it is.

    It is what eager would have made, bit for bit, whatever was materialized before. Deferred tensors that share memory
    become tensors that do. Parameters become parameters.

    Args:
        tensor: of any shape and dtype.
        shard: ``(dim, rank, world)``: only the part of ``torch.chunk(tensor, world, dim)`` that a rank holds, in memory
            of its own; ranks beyond the last chunk get none of the elements. What the part does not need is not
            computed, as far as the operators allow.

    Raises:
        NotDeferredError: a fake tensor that was not made by ``deferred_init``.
        DeferredError: a tensor from outside that the construction read has changed; a device is not there.
        TypeError: it is no tensor.
        ValueError: there is no such shard.

    Example:
        >>> import torch
        >>> from functionalize import deferred_init, materialize_tensor
        >>> weight = deferred_init(torch.arange, 10)
        >>> materialize_tensor(weight, shard=(0, 1, 2))
        tensor([5, 6, 7, 8, 9])
        >>> materialize_tensor(weight) is materialize_tensor(weight)
        True
    """
    if not isinstance(tensor, torch.Tensor):
        raise no_tensor("materialize_tensor", "tensor", tensor)
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
    """Make the parameters and buffers of a module real, in place: whatever refers to them sees them real.

    Args:
        module: with its submodules.
        buffers_only: leave the parameters deferred.
        check_fn: of which modules the tensors are made real; asked for each, whatever it says of those around it.
        device: where to put the tensors; where they were made, unless given. What was recorded for a device that is
            not there is computed on it.
        dtype: of floating-point tensors; as recorded, unless given.

    Raises:
        NotDeferredError: the module has a fake tensor that was not made by ``deferred_init``.
        DeferredError: a tensor from outside that the construction read has changed; a device is not there.
        TypeError: it is no module.

    Example:
        >>> import torch
        >>> from functionalize import deferred_init, materialize_module
        >>> model = deferred_init(lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
        >>> materialize_module(model, check_fn=lambda one: isinstance(one, torch.nn.Linear))
        >>> materialize_module(model[1], dtype=torch.float64)
        >>> model[0].weight.dtype, model[1].running_mean
        (torch.float32, tensor([0., 0., 0., 0.], dtype=torch.float64))
    """
    if not isinstance(module, torch.nn.Module):
        raise no_tensor("materialize_module", "module", module)
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
