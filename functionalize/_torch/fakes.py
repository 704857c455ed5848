"""Fake tensors, made without a dispatch.

Invariant: a tensor made here is what FakeTensorMode would have made. Limits: strided layout, sizes known as integers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode  # fake tensors are made by one mode, which may be the caller's
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from functionalize._torch.dispatch import below_dispatch

_META = torch.device("meta")
_REAL = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def data_dependent() -> tuple[type[Exception], ...]:
    """The errors that fake tensors raise because the data would decide."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # here: loads sympy

    return DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode


def fake_mode_of(leaves: Sequence[Any]) -> FakeTensorMode | None:
    """The mode that made the fake tensors among some values; None where there are none."""
    real = _REAL.issuperset(map(type, leaves))  # else torch looks into each
    mode: FakeTensorMode | None = detect_fake_mode(None if real else list(leaves))
    return mode


def new_fake_mode(*, symbolic: bool) -> FakeTensorMode:
    """A mode as ``make_fx`` sets it up."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # here: loads sympy

    mode = FakeTensorMode(
        allow_fallback_kernels=not symbolic,
        allow_non_fake_inputs=True,
        shape_env=ShapeEnv(duck_shape=not symbolic),
        static_shapes=not symbolic,
    )
    mode._allow_unsafe_data_ptr_access = False  # asking fake tensors for their memory raises
    return mode


def stand_ins(tensors: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes fake tensors for some, and others of their kind: aliased as they are, and without data."""
    mode = fake_mode_of(tensors) or new_fake_mode(symbolic=False)

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the converter looks for gradients where there are none
            return mode.from_tensor(tensor, static_shapes=True)

    return made


def mark_as(fake: Any, tensor: torch.Tensor) -> None:
    """Tell a fake tensor what torch says, besides its layout, of the tensor that it stands for."""
    if type(tensor) is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True
    elif type(tensor) is torch.nn.Buffer:
        fake._is_buffer, fake.persistent = True, tensor.persistent
    if tensor.requires_grad:
        fake.requires_grad_(True)


_make_subclass: Any = torch.Tensor._make_subclass
_forbid_data: Any = torch._C._set_throw_on_mutable_data_ptr


class FakeFactory:
    """Makes the fake tensors of one mode. To be used inside of ``below_dispatch``, which costs as much as the rest."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def fresh(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> FakeTensor:
        """A fake tensor with a storage of its own."""
        return self.around(torch.empty_strided(size, stride, dtype=dtype, device=_META), device)

    def view(self, source: FakeTensor, size: Sequence[int], stride: Sequence[int], offset: int) -> FakeTensor:
        """A fake tensor at another place of a fake tensor's storage."""
        return self.around(source.as_strided(size, stride, offset), source.fake_device)

    def at(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> FakeTensor:
        """A fake tensor at the place that a tensor has in its storage, in a storage of device ``meta``."""
        place = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        return self.around(torch.empty(0, dtype=tensor.dtype, device=_META).set_(storage, *place), tensor.device)

    def snapshot(self, tensor: FakeTensor) -> FakeTensor:
        """A fake tensor that later changes of the metadata of ``tensor`` do not reach."""
        return self.around(tensor, tensor.fake_device)

    def like_real(self, tensor: torch.Tensor) -> FakeTensor:
        """A fake tensor of the size and the strides of a tensor, with a storage of its own."""
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        return self.fresh(tensor.size(), tensor.stride(), tensor.dtype, device)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor that looks like any tensor."""
        if not isinstance(tensor, FakeTensor):
            return self.mode.from_tensor(tensor)
        with below_dispatch():
            return self.snapshot(tensor)

    def around(self, element: torch.Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor at the place of a tensor of device ``meta``, or of a fake one."""
        made: Any = _make_subclass(FakeTensor, element, False, dispatch_device=True, device_for_backend_keys=device)
        attributes = self._attributes.get(device)
        if attributes is None:
            first: Any = FakeTensor(self.mode, torch.empty(0, device=_META), device)
            attributes = self._attributes[device] = first.__dict__
        _forbid_data(made)
        made.__dict__ = attributes.copy()
        return made  # type: ignore[no-any-return]
