"""Collectives of ``c10d``, which write to their arguments: in a graph, functional ones whose results are written there.

In: an operator of ``c10d``, whose schema declares no writes. Out: what eager returns, with a work of ours. The graph
gets the functional twin where the program communicates, and a `wait_tensor` where it waits: at the call, or at
``Work.wait`` and its kin if the call is asynchronous, at the latest when the program ends.

Invariant: the program's order of starts and waits is the graph's. Limits: what a program reads of a tensor before it
waits, which eager leaves open, is the old value.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import has_side_effect

from functionalize._torch import below_autograd, below_mode, pytree
from functionalize._torch.distributed.collectives import (
    boxed,
    group_of,
    kernel_of,
    reduction_name,
    register_shapes,
    work_class,
)
from functionalize.aliasing.geometry import same
from functionalize.aliasing.tensor_queries import is_contiguous, tensor_leaves
from functionalize.ops.collectives import Collective, Way, collective
from functionalize.ops.tables import overload
from functionalize.refusals.operators import COLLECTIVE
from functionalize.transform.context import FunctionalizationContext

aten = torch.ops.aten
Value = torch.Tensor
Kwargs = dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Transfer:
    """What a collective will have computed, and the program's tensors that get its elements, one after the other.

    ``sizes``: how many elements each gets, if they get different numbers of them.
    """

    result: Value
    targets: Sequence[torch.Tensor]
    sizes: Sequence[int] | None = None


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of an operator of ``c10d``: its arguments by name, and values of its tensors as kernels take them."""

    context: FunctionalizationContext
    row: Collective
    func: Any
    named: Mapping[str, Any]
    group: Any

    @property
    def written(self) -> Any:
        """The argument that it writes."""
        return self.named[self.row.written or ""]

    @property
    def read(self) -> Any:
        """The argument that it reads."""
        return self.named[self.row.read or ""]

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that it writes or reads, which may be in lists of lists."""
        named = [self.named[name] for name in (self.row.written, self.row.read) if name is not None]
        return [leaf for leaf in pytree.tree_leaves(named) if isinstance(leaf, torch.Tensor)]

    @property
    def reduction(self) -> str:
        """The name of its reduction.

        Raises:
            UnsupportedMutationError: functional operators have no name for it.
        """
        name = reduction_name(self.named["reduce_op"])
        if name is None:
            raise self.refused("its reduction has a factor, which cannot be read (PREMUL_SUM)")
        return name

    def start(self, *args: Any) -> Any:
        """The result of the twin."""
        with self.context.executor.communicating([*tensor_leaves(args, {})]):
            return self.context.executor.call(_twin(self.row), *args)

    def value(self, handle: torch.Tensor) -> Value:
        """The value of a tensor, contiguous."""
        value: Value = self.context.value(handle)
        if not is_contiguous(value):
            value = self.context.executor.call(aten.clone.default, value, memory_format=torch.contiguous_format)
        return value

    def flat(self, handle: torch.Tensor) -> Value:
        """The elements of a tensor in one dimension."""
        return _shaped(self.context, self.value(handle), [handle.numel()])

    def refused(self, reason: str) -> Exception:
        """The error for a call that no graph can express."""
        return COLLECTIVE.error(op=self.func.name(), reason=reason)


def run(context: FunctionalizationContext, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Run a collective that writes, or that is called for its effect on other processes alone."""
    if not context.executor.observed:
        return context.executor.on_handles(func, args, kwargs)
    row, named = collective(func), {argument.name: argument.default_value for argument in func._schema.arguments}
    named |= dict(zip(named, args, strict=False)) | kwargs
    if row is None or row.reason is not None:
        raise COLLECTIVE.error(op=func.name(), reason=None if row is None else row.reason)
    if row.way is Way.DECOMPOSED:
        with context.enter():
            return kernel_of(func)(*args, **kwargs)
    call = _Call(context, row, func, named, group_of(named["process_group"]))
    if any(tensor.layout is not torch.strided for tensor in call.tensors):
        raise call.refused("a tensor is sparse")
    transfers = [*_FORMS[func.overloadpacket.__name__](call)]
    for transfer in transfers:
        _check(call, transfer)
    results = pytree.tree_leaves(call.written) if row.written else []
    work = work_class()(_Pending(call, transfers).settle, results)
    context.executor.works.append(work)
    returned = boxed(work)
    return (call.written, returned) if len(func._schema.returns) > 1 else returned


@dataclass(eq=False)
class _Pending:
    """A collective that the program has started and not waited for."""

    call: _Call
    transfers: Sequence[_Transfer]

    def settle(self) -> None:
        """Wait, and write what has arrived to the program's tensors; once."""
        transfers, self.transfers = self.transfers, ()
        context = self.call.context
        with below_mode(context.enter()), below_autograd():
            for transfer in transfers:
                context.op, context.origin = self.call.func, None
                waited = context.executor.call(_WAIT, transfer.result)
                for target, part in zip(transfer.targets, _parts(context, waited, transfer.targets), strict=True):
                    context.write(target, part)


def _check(call: _Call, transfer: _Transfer) -> None:
    """Raise unless the elements of the result are those of the targets. A call checks sizes that are symbols."""
    if not transfer.targets:
        return
    arriving = transfer.sizes or [transfer.result.numel() // len(transfer.targets)] * len(transfer.targets)
    for size, target in zip(arriving, transfer.targets, strict=True):
        if type(size) is int and type(target.numel()) is int and size != target.numel():
            raise call.refused(f"{size} elements arrive in a tensor of {target.numel()}")
    for tensor in (*transfer.targets, *call.tensors):
        if tensor.dtype != transfer.result.dtype:
            raise call.refused(f"elements of {transfer.result.dtype} arrive in a tensor of {tensor.dtype}")


def _parts(context: FunctionalizationContext, value: Value, targets: Sequence[torch.Tensor]) -> Sequence[Value]:
    """The elements of a value in the shapes of the targets, one after the other."""
    if len(targets) < 2:
        return [_shaped(context, value, target.size()) for target in targets]
    sizes = [target.numel() for target in targets]
    flat = _shaped(context, value, [value.numel()])
    pieces = context.executor.call(aten.split_with_sizes.default, flat, sizes)
    return [_shaped(context, piece, target.size()) for piece, target in zip(pieces, targets, strict=True)]


def _shaped(context: FunctionalizationContext, value: Value, size: Sequence[Any]) -> Value:
    """A contiguous value in another shape."""
    if same(tuple(value.size()), tuple(size)):
        return value
    return context.executor.call(aten.view.default, value, list(size))  # type: ignore[no-any-return]


@functools.cache
def _twin(row: Collective) -> Any:
    register_shapes()
    op = overload(row.twin or "")
    has_side_effect(op)  # so that FX does not drop its nodes as dead: other processes wait for it
    return op


# The transfers of each operator


def _all_reduce(call: _Call) -> Iterator[_Transfer]:
    for tensor in call.written:
        yield _Transfer(call.start(call.value(tensor), call.reduction, call.group.group_name), [tensor])


def _all_reduce_coalesced(call: _Call) -> Iterator[_Transfer]:
    values = [call.value(tensor) for tensor in call.written]
    results = call.start(values, call.reduction, call.group.group_name)
    return (_Transfer(result, [target]) for result, target in zip(results, call.written, strict=True))


def _broadcast(call: _Call) -> Iterator[_Transfer]:
    for tensor in call.written:
        yield _Transfer(call.start(call.value(tensor), call.named["root_rank"], call.group.group_name), [tensor])


def _reduce(call: _Call) -> Iterator[_Transfer]:
    for tensor in call.written:
        root = call.named["root_rank"]
        yield _Transfer(call.start(call.value(tensor), call.reduction, root, call.group.group_name), [tensor])


def _all_gather(call: _Call) -> Iterator[_Transfer]:
    outputs = call.written if isinstance(call.written, list) else [[call.written]]
    inputs = call.read if isinstance(call.read, list) else [call.read]
    for targets, tensor in zip(outputs, inputs, strict=True):
        yield _Transfer(call.start(call.flat(tensor), call.group.size(), call.group.group_name), targets)


def _all_gather_coalesced(call: _Call) -> Iterator[_Transfer]:
    results = call.start([*map(call.flat, call.read)], call.group.size(), call.group.group_name)
    lists = isinstance(call.written[0], list)  # one of each rank
    targets = zip(*call.written, strict=True) if lists else ([target] for target in call.written)
    return itertools.starmap(_Transfer, zip(results, map(list, targets), strict=True))


def _reduce_scatter(call: _Call) -> Iterator[_Transfer]:
    for target, tensors in zip(call.written, call.read, strict=True):
        values = [call.value(tensor) for tensor in tensors]
        yield _Transfer(call.start(values, call.reduction, call.group.group_name), [target])


def _reduce_scatter_tensor(call: _Call) -> Iterator[_Transfer]:
    result = call.start(call.flat(call.read), call.reduction, call.group.size(), call.group.group_name)
    yield _Transfer(result, [call.written])


def _reduce_scatter_coalesced(call: _Call) -> Iterator[_Transfer]:
    values = [*map(call.flat, call.read)]
    results = call.start(values, call.reduction, call.group.size(), call.group.group_name)
    return (_Transfer(result, [target]) for result, target in zip(results, call.written, strict=True))


def _gather(call: _Call) -> Iterator[_Transfer]:
    targets = call.written[0] if call.written else []  # lists of the root alone
    for tensor in call.read:
        root = call.named["root_rank"]
        yield _Transfer(call.start(call.value(tensor), len(targets), root, call.group.group_name), targets)


def _scatter(call: _Call) -> Iterator[_Transfer]:
    values = [call.value(tensor) for tensor in (call.read[0] if call.read else [])]
    for target in call.written:
        root = call.named["root_rank"]
        yield _Transfer(call.start(call.value(target), values, root, call.group.group_name), [target])


def _all_to_all(call: _Call) -> Iterator[_Transfer]:
    like, values = [[call.value(tensor) for tensor in tensors] for tensors in (call.written, call.read)]
    sizes = [tensor.numel() for tensor in like]
    yield _Transfer(call.start(like, values, call.group.group_name), call.written, sizes)


def _all_to_all_single(call: _Call) -> Iterator[_Transfer]:
    world, value = call.group.size(), call.value(call.read)
    received, sent = call.named["output_split_sizes"], call.named["input_split_sizes"]
    received = received or [call.written.size(0) // world] * world
    sent = sent or [call.read.size(0) // world] * world
    yield _Transfer(call.start(value, [*received], [*sent], call.group.group_name), [call.written])


def _barrier(call: _Call) -> Iterator[_Transfer]:
    yield _Transfer(call.start(call.group.group_name, call.named["device_ids"]), [])


def _send(call: _Call) -> Iterator[_Transfer]:
    for tensor in call.read:
        peer, tag = call.named["dst"], call.named["tag"]
        yield _Transfer(call.start(call.value(tensor), peer, tag, call.group.group_name), [])


def _receive(call: _Call) -> Iterator[_Transfer]:
    for tensor in call.written:
        peer, tag = call.named["src"], call.named["tag"]
        yield _Transfer(call.start(call.value(tensor), peer, tag, call.group.group_name), [tensor])


_FORMS: Mapping[str, Callable[[_Call], Iterator[_Transfer]]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce_coalesced,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather,
    "allgather_coalesced_": _all_gather_coalesced,
    "allgather_into_tensor_coalesced_": _all_gather_coalesced,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_tensor,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "gather_": _gather,
    "scatter_": _scatter,
    "alltoall_base_": _all_to_all_single,
    "alltoall_": _all_to_all,
    "barrier": _barrier,
    "send": _send,
    "recv_": _receive,
}
_WAIT = torch.ops._c10d_functional.wait_tensor.default if torch.distributed.is_available() else None
