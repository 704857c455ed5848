"""Fake tensors for a program's tensors: without data, aliased as the originals are.

Invariant: two fakes share a storage exactly where the originals do, and a storage is as large as the original; their
versions are the originals'.
Limits: tensors of other layouts and symbolic sizes are converted by torch's own converter, whose storages may be
smaller than the originals.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from contextvars import ContextVar
from typing import Any

import torch

from functionalize._torch import PLAIN_TYPES, is_symbolic, is_view, set_versions, storage_key, unwrap_functorch
from functionalize._torch.fakes import FakeFactory, below_dispatch, mark_as

Convert = Callable[[torch.Tensor], torch.Tensor]


def fakes_of(
    tensors: Iterable[torch.Tensor], factory: FakeFactory, dynamic: Set[int], convert: Convert
) -> dict[int, torch.Tensor]:
    """A fake tensor for each tensor, by the tensor's identity.

    ``dynamic``: the identities of those whose sizes may be symbols; ``convert`` makes their fakes, and those of tensors
    that share their storages.
    """
    originals = {id(tensor): tensor for tensor in tensors}
    groups: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in originals.values():
        groups[storage_key(tensor)].append(tensor)
    fakes: dict[int, torch.Tensor] = {}
    others: list[list[torch.Tensor]] = []
    with below_dispatch(), torch.inference_mode(False):  # a fake made in inference mode is an inference tensor
        for group in groups.values():
            if not (dynamic and dynamic & set(map(id, group))) and all(map(_is_plain, group)):
                for tensor, fake in zip(group, _of_group(factory, group), strict=True):
                    mark_as(fake, tensor)
                    fakes[id(tensor)] = fake
            else:
                others.append(group)
    for key, tensor in originals.items():
        if tensor.requires_grad and not tensor.is_leaf and key in fakes:
            fakes[key] = fresh(fakes[key])
    for group in others:
        inference = any(tensor.is_inference() for tensor in group)
        with warnings.catch_warnings(), torch.inference_mode(inference and torch.is_inference_mode_enabled()):
            warnings.simplefilter("ignore", UserWarning)  # the converter asks non-leaves for gradients
            for tensor in group:
                fake = (convert if dynamic else factory.mode.from_tensor)(tensor)
                # Autograd would pass a write to a view on to its base, past the operators that lead to the view.
                fakes[id(tensor)] = fresh(fake) if is_view(fake) and not fake.is_leaf else fake
    counted = [tensor for tensor in originals.values() if not tensor.is_inference()]
    set_versions([fakes[id(tensor)] for tensor in counted], [tensor._version for tensor in counted])
    return fakes


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a layout, a storage and a device describe a tensor completely."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not (is_symbolic(tensor) or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not (tensor.is_inference() or tensor.device.type == "meta")
        and unwrap_functorch(tensor) is tensor
    )


def _of_group(factory: FakeFactory, group: list[torch.Tensor]) -> list[Any]:
    """Fakes of the tensors of one storage, in one storage of the same size."""
    first = group[0]
    size = first.untyped_storage().nbytes()
    if len(group) == 1 and not first.storage_offset():
        fake = factory.fresh(first.shape, first.stride(), first.dtype, first.device)
        if fake.untyped_storage().nbytes() == size:
            return [fake]
    storage = torch.UntypedStorage(size, device="meta")
    return [factory.at(storage, tensor) for tensor in group]


_STOPS = ContextVar("_STOPS", default=False)
BEYOND = "a backward runs into the operators that computed an example input"


class _Fresh(torch.autograd.Function):
    """The same memory, as a tensor that is neither a leaf nor a view, so that it may be written."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        if not _STOPS.get():
            raise RuntimeError(BEYOND)


@contextlib.contextmanager
def stopping_at_inputs() -> Iterator[None]:
    """Have a backward stop where it reaches example inputs."""
    token = _STOPS.set(True)
    try:
        yield
    finally:
        _STOPS.reset(token)


def fresh(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that a program may write, if the tensor requires a gradient; else the tensor."""
    if not leaf.requires_grad:
        return leaf
    with torch.inference_mode(False), torch.enable_grad():
        handle: torch.Tensor = _Fresh.apply(leaf)  # type: ignore[no-untyped-call]
    return handle
