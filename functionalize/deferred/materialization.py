"""Real tensors for deferred ones.

Invariant: two tensors that share memory do so when they are real, and one tensor becomes one tensor, however often it
is asked for. Limits: a tensor that was computed from parameters comes without the history of autograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import FakeTensor, share_gradient_hooks, storage_key
from functionalize._torch.deferred import attributes_of_users, is_sole_user
from functionalize._torch.dispatch import kernels_alone
from functionalize.aliasing.geometry import Layout
from functionalize.deferred.recording import Cell, Recording
from functionalize.errors import DeferredError, NotDeferredError

_MADE = "_functionalize_made"  # what a fake tensor was made into
Target = tuple[torch.device | None, torch.dtype | None]


def materialized(recording: Recording, tensors: Iterable[FakeTensor], target: Target) -> dict[int, torch.Tensor]:
    """A real tensor for each deferred one, by identity."""
    found: dict[int, torch.Tensor] = {}
    waiting: dict[int, tuple[FakeTensor, Cell]] = {}
    for tensor in tensors:
        made = made_before(tensor)
        if made is not None:
            found[id(tensor)] = made
        else:
            waiting[id(tensor)] = tensor, _cell(recording, tensor)
    of_node: dict[Node, list[Cell]] = {}
    for cell in {id(cell): cell for _, cell in waiting.values() if cell.made is None}.values():
        of_node.setdefault(cell.node, []).append(cell)

    def done(node: Node, value: torch.Tensor) -> None:
        for cell in of_node[node]:
            cell.made = _laid_out(cell, value, target)

    recording.evaluation(target[0]).run(of_node, done)
    for tensor, cell in waiting.values():
        found[id(tensor)] = _presented(tensor, cell)
    return found


def made_before(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a fake tensor was made into, where it is still the same."""
    made: Any = getattr(tensor, _MADE, None)
    if made is None or made[0] != (storage_key(tensor), Layout.of(tensor).key):
        return None
    real: torch.Tensor = made[1]
    return real


def _cell(recording: Recording, tensor: torch.Tensor) -> Cell:
    cell = recording.cell_of(tensor)
    if cell is None:
        raise NotDeferredError(
            f"a fake tensor of size {tuple(tensor.size())} is to be materialized",
            why="it was not made inside of deferred_init: nobody recorded how",
            hint="make it inside of deferred_init(function, ...)",
        )
    return cell


def _laid_out(cell: Cell, value: torch.Tensor, target: Target) -> torch.Tensor:
    """A value in memory of its own, as it lies in the cell's storage."""
    layout = cell.layout
    device = target[0] or value.device
    dtype = target[1] if target[1] is not None and value.is_floating_point() else value.dtype
    own = is_sole_user(value) and not value.is_inference()
    if (value.device, value.dtype) != (device, dtype):
        value, own = value.to(device, dtype), True
    room = cell.storage.nbytes() // layout.dtype.itemsize
    fits = value.storage_offset() == layout.offset and value.untyped_storage().nbytes() == room * value.itemsize
    if own and fits and value.stride() == tuple(layout.stride):
        return value
    memory = torch.empty(room, device=device, dtype=dtype)
    made = memory.as_strided(layout.size, layout.stride, layout.offset)
    made.copy_(value)
    return made


def _presented(tensor: FakeTensor, cell: Cell) -> torch.Tensor:
    """The real tensor for a fake one of a cell whose memory is real."""
    assert cell.made is not None
    where = tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()
    with kernels_alone(), torch.inference_mode(tensor.is_inference()):
        memory = cell.made.detach()
        if tensor.dtype != cell.layout.dtype:
            _refuse_other_dtype(cell)
            memory = torch.empty(0, dtype=tensor.dtype, device=memory.device).set_(
                memory.untyped_storage(), *where[::-1]
            )
        real = memory.as_strided(*where)
        real = _of_kind(tensor, real)
        for name, value in attributes_of_users(tensor).items():
            if name != _MADE:
                setattr(real, name, value)
    share_gradient_hooks(tensor, real)
    setattr(tensor, _MADE, ((storage_key(tensor), Layout.of(tensor).key), real))
    return real


def _refuse_other_dtype(cell: Cell) -> None:
    if cell.made is not None and cell.made.dtype != cell.layout.dtype:
        raise DeferredError(
            f"memory of {cell.layout.dtype}, which is seen as another dtype as well, is to be of {cell.made.dtype}",
            why="what is converted has other bytes",
            hint="materialize without `dtype`, and convert afterwards",
        )


def _of_kind(tensor: FakeTensor, real: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(real, requires_grad=tensor.requires_grad)
    if isinstance(tensor, torch.nn.Buffer):
        real = torch.nn.Buffer(real, persistent=tensor.persistent)
    real.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    return real
