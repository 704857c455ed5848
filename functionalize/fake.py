"""A program's tensors as fake ones: without data, aliased as the originals are.

Invariant: two fakes share a storage exactly where the originals do, and a storage is as large as the original.
Limits: tensors of other layouts, views that autograd knows of, and symbolic sizes are converted by torch's own
converter, whose storages may be smaller than the originals.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Set
from typing import Any

import torch

from functionalize._torch import PLAIN_TYPES, is_symbolic, storage_key, unwrap_functorch
from functionalize._torch.fakes import FakeFactory, below_dispatch

Convert = Callable[[torch.Tensor], torch.Tensor]


def fakes_of(
    tensors: Iterable[torch.Tensor], factory: FakeFactory, dynamic: Set[int], convert: Convert
) -> dict[int, torch.Tensor]:
    """A fake tensor for each tensor, by the tensor's identity.

    ``dynamic`` names those whose sizes may be symbols; ``convert`` gives the fakes of these and of what shares their
    storages.
    """
    groups: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for tensor in tensors:
        groups[storage_key(tensor)][id(tensor)] = tensor
    fakes: dict[int, torch.Tensor] = {}
    for group in groups.values():
        if dynamic.isdisjoint(group) and all(map(_is_plain, group.values())):
            storage = torch.UntypedStorage(next(iter(group.values())).untyped_storage().nbytes(), device="meta")
            with below_dispatch():
                fakes |= {key: _at(factory, storage, tensor) for key, tensor in group.items()}
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the converter looks for gradients where there are none
                fakes |= {key: (convert if dynamic else factory.mode.from_tensor)(t) for key, t in group.items()}
    return fakes


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a place in a storage, a dtype and a device say all of a tensor."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not (is_symbolic(tensor) or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not (tensor.is_inference() or tensor.device.type == "meta")
        and (tensor.is_leaf or not tensor.requires_grad)
        and not (tensor._is_view() and tensor.requires_grad)
        and unwrap_functorch(tensor) is tensor
    )


def _at(factory: FakeFactory, storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
    fake: Any = factory.at(storage, *place, tensor.dtype, tensor.device)
    if isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True
    elif type(tensor) is torch.nn.Buffer:
        fake._is_buffer, fake.persistent = True, tensor.persistent
    if tensor.requires_grad:
        fake.requires_grad_(True)
    return fake  # type: ignore[no-any-return]
