"""Deferred initialization: construct with fake tensors, materialize them later, in whole or in part.

Invariant: a materialized tensor equals, bit for bit, that of an eager construction. Limits:
docs/tutorials/large-models.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch

from functionalize._torch import FakeTensor, buffers_of, parameters_of
from functionalize._torch.deferred import take_place
from functionalize.deferred.materialization import Shard, materialized, materialized_before, shard_of
from functionalize.deferred.recording import Recording
from functionalize.deferred.refusals import not_callable, wrong_type

Result = TypeVar("Result")


@cache
def recording() -> Recording:
    """The recording of this process."""
    return Recording()


def deferred_init(module_or_fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
    """Call a function, such as a module's class, and return its result with fake tensors, without computing them.

    The fake tensors have everything but data: size, strides, dtype, device, class, and shared storages. How to
    compute each of them is recorded, as are later changes (``half()``, ``to(device)``, ``load_state_dict``). If the
    function reads values (``item()``, ``bool()``, ``tolist()``), only these are computed.

    The default generator ends in the state that an eager construction leaves. Real tensors that the function reads
    must not change until all tensors that depend on them are materialized.

    Args:
        module_or_fn: a module's class, or any function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The function's result.

    Raises:
        TypeError: ``module_or_fn`` is not callable, or is a module that exists already.
        DeferredError: the function writes to a tensor from outside, reads an address, calls an operator without a
            meta kernel, or is called inside a trace.

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
    exists = isinstance(module_or_fn, torch.nn.Module) and not (args or kwargs)
    if not callable(module_or_fn) or isinstance(module_or_fn, torch.Tensor) or exists:
        raise not_callable(module_or_fn)
    result: Result = recording().run(module_or_fn, args, kwargs)
    return result


def is_deferred(value: torch.Tensor | torch.nn.Module) -> bool:
    """Whether a tensor is deferred, or any parameter or buffer of a module.

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
    for submodule in module.modules():
        for container in (parameters_of(submodule), buffers_of(submodule)):
            yield from (tensor for tensor in container.values() if tensor is not None)


def materialize_tensor(tensor: torch.Tensor, shard: Shard | None = None) -> torch.Tensor:
    """Materialize a deferred tensor. The same tensor gives the same object; a real tensor is returned as it is.

    The result equals that of an eager construction bit for bit, in whatever order tensors are materialized. Deferred
    tensors that share memory become tensors that share memory. Parameters become parameters.

    Args:
        tensor: a tensor of any shape and dtype.
        shard: ``(dim, rank, world)`` to materialize only chunk ``rank`` of ``torch.chunk(tensor, world, dim)``, in
            separate memory; a rank beyond the last chunk gets an empty tensor. As far as the operators allow, elements
            outside the chunk are not computed.

    Raises:
        NotDeferredError: a fake tensor that ``deferred_init`` did not make.
        DeferredError: a tensor from outside that the construction read has changed, or the machine does not have a
            device.
        TypeError: ``tensor`` is not a tensor.
        ValueError: ``shard`` is not a chunk of the tensor.

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
        raise wrong_type("materialize_tensor", "tensor", tensor)
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
    """Materialize the parameters and buffers of a module in place: all references to them see real tensors.

    Args:
        module: the module, including its submodules.
        buffers_only: whether to leave the parameters deferred.
        check_fn: called with each module; returns whether to materialize that module's own tensors.
        device: the device of the tensors (default: the device of the construction). Operators that were recorded for
            a device that the machine does not have run on this one.
        dtype: the dtype of floating-point tensors (default: as recorded).

    Raises:
        NotDeferredError: the module has a fake tensor that ``deferred_init`` did not make.
        DeferredError: a tensor from outside that the construction read has changed, or the machine does not have a
            device.
        TypeError: ``module`` is not a module.

    Example:
        >>> import torch
        >>> from functionalize import deferred_init, materialize_module
        >>> model = deferred_init(lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
        >>> materialize_module(model, check_fn=lambda layer: isinstance(layer, torch.nn.Linear))
        >>> materialize_module(model[1], dtype=torch.float64)
        >>> model[0].weight.dtype, model[1].running_mean
        (torch.float32, tensor([0., 0., 0., 0.], dtype=torch.float64))
    """
    if not isinstance(module, torch.nn.Module):
        raise wrong_type("materialize_module", "module", module)
    own = recording()
    target = None if device is None else torch.device(device), dtype
    with own.lock:
        modules = [submodule for submodule in module.modules() if check_fn is None or check_fn(submodule)]
        places = [place for submodule in modules for place in _places(submodule, buffers_only)]
        fakes = {id(fake): fake for _, _, fake in places}
        before = {key for key, fake in fakes.items() if materialized_before(fake) is not None}
        real = materialized(own, fakes.values(), target)
        replaced = {key for key in real if key in before or not take_place(fakes[key], real[key])}
        for container, name, fake in places:
            if id(fake) in replaced:
                container[name] = real[id(fake)]
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
