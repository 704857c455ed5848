"""Computes the real tensors of deferred ones.

Invariant: real tensors share memory where the deferred ones do, and a deferred tensor gives the same real tensor each
time. Limits: a tensor that was computed from parameters has no autograd history.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import FakeTensor, share_gradient_hooks, storage_key
from functionalize._torch.deferred import attributes_of_users, is_sole_user
from functionalize._torch.dispatch import kernels_alone
from functionalize.aliasing.geometry import Layout
from functionalize.deferred.recording import Cell, Recording
from functionalize.deferred.shards.rules import Window
from functionalize.deferred.shards.sharding import in_own_memory
from functionalize.deferred.shards.views import part_behind
from functionalize.refusals.deferred import DEFERRED_LAYOUT, MATERIALIZED_INSIDE, NOT_DEFERRED, VIEW_OF_CONVERTED_DTYPE

aten = torch.ops.aten
_MADE = "_functionalize_made"  # the attribute of a fake tensor that holds its real tensor
_SHARDS = "_functionalize_shards"  # the attribute that holds its shards
Target = tuple[torch.device | None, torch.dtype | None]


def materialized(recording: Recording, tensors: Iterable[FakeTensor], target: Target) -> dict[int, torch.Tensor]:
    """A real tensor for each deferred one, by identity."""
    real: dict[int, torch.Tensor] = {}
    waiting: dict[int, tuple[FakeTensor, Cell]] = {}
    for tensor in tensors:
        made = materialized_before(tensor)
        if made is not None:
            real[id(tensor)] = made
        else:
            waiting[id(tensor)] = tensor, _cell(recording, tensor)
    of_node: dict[Node, list[Cell]] = {}
    for cell in {id(cell): cell for _, cell in waiting.values() if cell.made is None}.values():
        of_node.setdefault(cell.node, []).append(cell)

    def done(node: Node, value: torch.Tensor) -> None:
        for cell in of_node[node]:
            cell.made = _at_layout(cell, value, target)

    for cells in of_node.values():
        recording.externals.check(guard for cell in cells for guard in cell.guards)
    recording.evaluation(target[0]).run(of_node, done)
    for tensor, cell in waiting.values():
        real[id(tensor)] = _real_tensor(tensor, cell)
    _gradients(recording, [tensor for tensor, _ in waiting.values()], real, target)
    return real


def _gradients(
    recording: Recording, fakes: Iterable[FakeTensor], made: dict[int, torch.Tensor], target: Target
) -> None:
    """Materialize the gradients of fake tensors, and set them on the real ones."""
    gradients = {id(fake): fake.grad for fake in fakes if fake.is_leaf and isinstance(fake.grad, FakeTensor)}
    if gradients:
        real = materialized(recording, gradients.values(), target)
        for key, gradient in gradients.items():
            made[key].grad = real[id(gradient)]


def materialized_before(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real tensor that a fake one has; None if its storage or layout has changed since."""
    made: Any = getattr(tensor, _MADE, None)
    if made is None or made[0] != _place_of(tensor):
        return None
    real: torch.Tensor = made[1]
    return real


Shard = tuple[int, int, int]


def shard_of(recording: Recording, tensor: FakeTensor, shard: Shard) -> torch.Tensor:
    """The real tensor for a rank's shard of a deferred one; the shards of other ranks are not kept."""
    cell = _cell(recording, tensor)
    window = window_of(tensor.size(), shard)
    made: Any = getattr(tensor, _SHARDS, {}).get(shard)
    if made is not None and made[0] == _place_of(tensor):
        return made[1]  # type: ignore[no-any-return]
    recording.externals.check(cell.guards)
    layout = Layout.of(tensor)
    source = None if layout.matches(cell.layout) else part_behind(cell.layout, layout, window)
    if cell.made is not None:
        part = window.of(_real_tensor(tensor, cell).detach()).clone(memory_format=torch.contiguous_format)
    elif source is not None:
        with kernels_alone():
            part = in_own_memory(source.read(recording.shard_evaluation().run(cell.node, source.window)))
    elif not layout.matches(cell.layout):
        values = recording.evaluation(torch.device("cpu")).values([cell.node])
        with kernels_alone():
            whole = _at_layout(cell, values.pop(), (None, None)).as_strided(*_where(tensor))
            part = window.of(whole).clone(memory_format=torch.contiguous_format)
    else:
        part = recording.shard_evaluation().run(cell.node, window)
    real = _with_attributes(tensor, part)
    setattr(tensor, _SHARDS, {**getattr(tensor, _SHARDS, {}), shard: (_place_of(tensor), real)})
    return real


def window_of(size: Sequence[int], shard: Shard) -> Window:
    """The window of a rank, as ``torch.chunk`` and DTensor's ``Shard`` split a dimension: the last may have less."""
    plain = isinstance(shard, tuple) and len(shard) == 3 and all(isinstance(number, int) for number in shard)
    if not (plain and -len(size) <= shard[0] < len(size) and 0 <= shard[1] < shard[2]):
        raise ValueError(
            f"shard={shard!r} of a tensor of size {tuple(size)}: it must be (dim, rank, world), where dim is a "
            "dimension of the tensor and 0 <= rank < world"
        )
    dim, rank, world = shard
    dim %= len(size)
    step = -(-size[dim] // world)
    return Window(dim, min(rank * step, size[dim]), min((rank + 1) * step, size[dim]))


def _place_of(tensor: torch.Tensor) -> Any:
    return storage_key(tensor), Layout.of(tensor).key


def _where(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    return tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()


def _cell(recording: Recording, tensor: FakeTensor) -> Cell:
    cell = recording.cell_of(tensor)
    if cell is None and tensor.fake_mode is recording.mode and tensor.layout is not torch.strided:
        raise DEFERRED_LAYOUT.error(layout=tensor.layout, size=tuple(tensor.size()))
    if cell is None and tensor.fake_mode is recording.mode and recording.active:
        raise MATERIALIZED_INSIDE.error()
    if cell is None:
        raise NOT_DEFERRED.error(size=tuple(tensor.size()))
    return cell


def _at_layout(cell: Cell, value: torch.Tensor, target: Target) -> torch.Tensor:
    """A value at the cell's layout, in a storage of its own of the cell's size: the value itself if it is so."""
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


def _real_tensor(tensor: FakeTensor, cell: Cell) -> torch.Tensor:
    """The real tensor of a fake one, in the memory of a materialized cell."""
    assert cell.made is not None
    size, stride, offset = _where(tensor)
    with kernels_alone(), torch.inference_mode(tensor.is_inference()):
        real = cell.made.detach()
        if tensor.dtype != cell.layout.dtype:
            if cell.made.dtype != cell.layout.dtype:
                raise VIEW_OF_CONVERTED_DTYPE.error(dtype=cell.layout.dtype, to=cell.made.dtype)
            real = torch.empty(0, dtype=tensor.dtype, device=real.device).set_(
                real.untyped_storage(), offset, size, stride
            )
        real = real.as_strided(size, stride, offset)
        real = real.conj() if tensor.is_conj() != real.is_conj() else real
        if tensor.is_neg() != real.is_neg():
            real = aten._neg_view.default(real)
    real = _with_attributes(tensor, real)
    setattr(tensor, _MADE, (_place_of(tensor), real))
    return real


def _with_attributes(tensor: FakeTensor, real: torch.Tensor) -> torch.Tensor:
    """A real tensor of the fake one's class, with the attributes and hooks that the program set on the fake one."""
    with kernels_alone():
        real = _of_class(tensor, real)
    for name, value in attributes_of_users(tensor).items():
        if name not in (_MADE, _SHARDS):
            setattr(real, name, value)
    share_gradient_hooks(tensor, real)
    return real


def _of_class(tensor: FakeTensor, real: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(real, requires_grad=tensor.requires_grad)
    if isinstance(tensor, torch.nn.Buffer):
        real = torch.nn.Buffer(real, persistent=tensor.persistent)
    real.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    return real
