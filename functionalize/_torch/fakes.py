"""Fake tensors, made without a dispatch.

Invariant: a tensor made here is what FakeTensorMode would have made. Limits: strided layout, sizes known as integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode  # fake tensors are made by one mode, which may be the caller's
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

__all__ = ["FakeTensor", "FakeTensorMode"]

_META = torch.device("meta")
_REAL = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_PLAIN = _REAL | {FakeTensor}
below_dispatch = torch._C._DisableTorchDispatch  # the kernels themselves, whatever modes and subclasses there are


def is_data_dependent(error: Exception) -> bool:
    """Whether fake tensors raised an error because the data would decide."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # here: loads sympy

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    return isinstance(error, kinds)


def fake_mode_of(leaves: Sequence[Any]) -> FakeTensorMode | None:
    """The mode that made the fake tensors among some values; None where there are none."""
    real = _REAL.issuperset(map(type, leaves))  # else torch looks into each
    mode: FakeTensorMode | None = detect_fake_mode(None if real else list(leaves))
    return mode


class _FakeTensorMode(FakeTensorMode):
    """A mode in which some ops have another meta kernel than torch's."""

    metas: Mapping[Any, Callable[..., Any]] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meta = self.metas.get(func)
        if meta is None or not _PLAIN.issuperset(map(type, filter(torch.is_tensor, args))):
            return super().dispatch(func, types, args, kwargs or {})
        with self:
            return meta(*args, **(kwargs or {}))


def new_fake_mode(*, symbolic: bool, metas: Mapping[Any, Callable[..., Any]] | None = None) -> FakeTensorMode:
    """A mode as ``make_fx`` sets it up. ``metas``: what ops give for which torch's meta kernel is not to be asked."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # here: loads sympy

    mode = _FakeTensorMode(
        allow_fallback_kernels=not symbolic,
        allow_non_fake_inputs=True,
        shape_env=ShapeEnv(duck_shape=not symbolic),
        static_shapes=not symbolic,
    )
    mode.metas = metas or {}
    mode._allow_unsafe_data_ptr_access = False  # asking fake tensors for their memory raises
    return mode


def mark_as(fake: Any, tensor: torch.Tensor) -> None:
    """Have a fake tensor taken for a parameter or a buffer, as the tensor is that it stands for."""
    if type(tensor) is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True
    elif type(tensor) is torch.nn.Buffer:
        fake._is_buffer, fake.persistent = True, tensor.persistent


_make_subclass: Any = torch.Tensor._make_subclass
_forbid_data: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr


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

    def at(
        self,
        storage: torch.UntypedStorage,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FakeTensor:
        """A fake tensor at a place of a storage of device ``meta``."""
        return self.around(torch.empty(0, dtype=dtype, device=_META).set_(storage, offset, size, stride), device)

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
