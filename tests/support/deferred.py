"""What tests of deferred construction compare: a construction in eager, and the same one recorded.

Invariant: both begin with the same seed, and leave the generator in the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from functionalize import deferred_init, is_deferred, materialize_module, materialize_tensor

SEED = 7


def module(make: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    """A class whose constructor is a function of the module."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make(self)

    return Made


def parameter(make: Callable[[], Tensor]) -> Callable[[], nn.Module]:
    """A class with one parameter."""
    return module(lambda self: setattr(self, "weight", nn.Parameter(make())))


def pair(make: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What a constructor gives in eager, and deferred."""
    torch.manual_seed(SEED)
    eager = make(*args, **kwargs)
    after = torch.get_rng_state()
    torch.manual_seed(SEED)
    deferred = deferred_init(make, *args, **kwargs)
    assert torch.equal(torch.get_rng_state(), after)
    return eager, deferred


def state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name; tied ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def assert_same(one: Tensor, two: Tensor, name: str = "") -> None:
    """Two tensors are the same, but for their memory."""
    assert type(one) is type(two), name
    if is_lazy(one):
        return
    assert one.is_meta or torch.equal(bits(one), bits(two)), name
    assert (one.dtype, one.stride(), one.storage_offset()) == (two.dtype, two.stride(), two.storage_offset()), name
    assert (one.device, one.requires_grad) == (two.device, two.requires_grad), name


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements: a zero is not its negative, and a NaN is itself."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def check(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Any:
    """A module is the same whole, one tensor after another from the last to the first, and by submodules."""
    eager, deferred = pair(make, *args, **kwargs)
    torch.rand(1)  # what is drawn in between changes nothing
    materialize_module(deferred)
    assert not is_deferred(deferred)
    compare(eager, deferred)
    _, by_tensors = pair(make, *args, **kwargs)
    expected = dict(state(eager))
    for name, tensor in reversed(list(state(by_tensors))):
        assert_same(materialize_tensor(tensor), expected[name], name)
    _, by_modules = pair(make, *args, **kwargs)
    for child in reversed(list(by_modules.children())):
        before = torch.get_rng_state()
        materialize_module(child)
        assert torch.equal(torch.get_rng_state(), before)
    materialize_module(by_modules)
    compare(eager, by_modules)
    return deferred


def compare(eager: nn.Module, real: nn.Module) -> None:
    """Two modules have the same state, tied alike."""
    ours = dict(state(real))
    assert list(ours) == [name for name, _ in state(eager)]
    for name, tensor in state(eager):
        assert_same(ours[name], tensor, name)
    assert ties(real) == ties(eager)


def ties(module: nn.Module) -> list[list[str]]:
    """Which names stand for one tensor, and which for one memory."""
    objects: dict[int, list[str]] = {}
    memory: dict[int, list[str]] = {}
    for name, tensor in state(module):
        objects.setdefault(id(tensor), []).append(name)
        if not is_lazy(tensor) and not tensor.is_meta and tensor.numel():
            memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [*objects.values(), *memory.values()]
