"""What each operator that acts on other processes does: what it writes, its functional twin, or why a graph refuses it.

In: an operator of one of `NAMESPACES`. Out: its frozen row; None for operators of other namespaces. Guarantees: every
operator of these namespaces has a row; a test compares them with the running torch. Limits: schemas of ``c10d`` do not
declare writes, and those of the other namespaces do, but for the exceptions named here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

OWN = "functionalize"  # of the functional operators that torch lacks, see `_torch/distributed/collectives.py`
NAMESPACES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "fsdp", "_dtensor", OWN}
)


class Way(Enum):
    """How an operator enters a graph."""

    TWIN = "its functional twin, whose results are written to its arguments"
    VALUE = "as it is: it returns what it computes, and acts on other processes"
    WRITE = "as any operator whose schema declares its writes; it acts on no other process"
    WAIT = "as it is: it returns its argument once that has arrived"
    DECOMPOSED = "by the operators that its own kernel calls"
    LOCAL = "as it is: it acts on no other process"
    REFUSED = "not at all"


@dataclass(frozen=True)
class Collective:
    """The row of one operator, by its name without overload.

    ``written`` and ``read`` name tensors, lists of them, and lists of lists; ``twin``: the functional operator;
    ``reason``: why it is refused.
    """

    op: str
    kind: str  # what it does, whatever its form: `all_reduce`
    way: Way
    written: str | None = None
    read: str | None = None
    twin: str | None = None
    reason: str | None = None


def _twin(op: str, form: str, written: str, read: str, twin: str) -> Collective:
    return Collective(f"c10d::{op}", form, Way.TWIN, written, read, twin)


def _refused(namespace: str, names: Iterable[str], reason: str) -> Iterable[Collective]:
    return (Collective(f"{namespace}::{name}", name.strip("_"), Way.REFUSED, reason=reason) for name in names)


def _values(namespace: str, names: Iterable[str]) -> Iterable[Collective]:
    return (Collective(f"{namespace}::{name}", _form(name), Way.VALUE) for name in names)


def _form(name: str) -> str:
    """What an operator does: `all_gather` for `all_gather_into_tensor_coalesced`."""
    return functools.reduce(str.removesuffix, ("_coalesced", "_into_tensor", "_tensor", "_single"), name)


_FUNCTIONAL = ("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor")
_FORMS = (
    *("all_reduce", "all_reduce_coalesced", "broadcast", "all_gather_into_tensor_coalesced"),
    "reduce_scatter_tensor_coalesced",
)
_IN_PLACE = (
    *("all_reduce_", "all_reduce_coalesced_", "broadcast_", "all_gather_into_tensor_out"),
    "reduce_scatter_tensor_out",
)
_SHARDING = ("all_gather_copy_in", "chunk_cat", "split_with_sizes_copy")
_PEERS = ("isend", "irecv", "batch_p2p_ops")
_SYMMETRIC = (
    *("_async_input_mm", "_barrier", "_low_contention_all_gather", "_low_contention_reduce_scatter", "_rendezvous"),
    *("all_to_all_vdev", "all_to_all_vdev_2d", "all_to_all_vdev_2d_offset", "fused_all_gather_matmul"),
    *("fused_all_gather_scaled_matmul", "fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter"),
    *("get_remote_tensors", "memset32_", "multi_root_tile_reduce", "multimem_all_gather_out", "multimem_all_reduce_"),
    *("multimem_one_shot_all_reduce", "multimem_one_shot_all_reduce_out", "multimem_one_shot_reduce_out", "nccl_get"),
    *("nccl_put", "nccl_put_signal", "nccl_put_with_signal", "nccl_reduce_scatter_offset", "nccl_wait_for_signal"),
    *("nccl_wait_signal", "nvshmem_all_to_all", "nvshmem_broadcast", "nvshmem_get", "nvshmem_put"),
    *("nvshmem_put_with_signal", "nvshmem_wait_for_signal", "one_shot_all_reduce", "one_shot_all_reduce_copy"),
    *("one_shot_all_reduce_copy_out", "one_shot_all_reduce_out", "reduce_scatter_out", "stream_write_value32_"),
    *("tile_reduce", "two_shot_all_reduce_", "two_shot_all_reduce_out"),
)
_SYMMETRIC_LATER = (
    *("_low_contention_all_gather_ce_multicast", "_low_contention_all_gather_ce_multicast_out", "nccl_get_out"),
    *("memcpy_to_multicast_", "nccl_all_to_all_nd", "nvshmem_get_out"),
)
_UNDECLARED = "it writes to its arguments or acts on other processes, but its schema does not say so"
_WHO_SENDS = "who sends is known when the tensor has arrived, and the order in a graph would not be the program's"
_REMOTE = "it reads and writes memory that other processes share, in an order that only its signals tell"

_ROWS = (
    _twin("allreduce_", "all_reduce", "tensors", "tensors", "_c10d_functional::all_reduce"),
    _twin("allreduce_coalesced_", "all_reduce", "tensors", "tensors", "_c10d_functional::all_reduce_coalesced"),
    _twin("allgather_", "all_gather", "output_tensors", "input_tensors", "_c10d_functional::all_gather_into_tensor"),
    _twin(
        "_allgather_base_", "all_gather", "output_tensor", "input_tensor", "_c10d_functional::all_gather_into_tensor"
    ),
    _twin(
        *("allgather_coalesced_", "all_gather", "output_lists", "input_list"),
        "_c10d_functional::all_gather_into_tensor_coalesced",
    ),
    _twin(
        *("allgather_into_tensor_coalesced_", "all_gather", "outputs", "inputs"),
        "_c10d_functional::all_gather_into_tensor_coalesced",
    ),
    _twin("reduce_scatter_", "reduce_scatter", "output_tensors", "input_tensors", f"{OWN}::reduce_scatter"),
    _twin(
        *("_reduce_scatter_base_", "reduce_scatter", "output_tensor", "input_tensor"),
        "_c10d_functional::reduce_scatter_tensor",
    ),
    _twin(
        *("reduce_scatter_tensor_coalesced_", "reduce_scatter", "outputs", "inputs"),
        "_c10d_functional::reduce_scatter_tensor_coalesced",
    ),
    _twin("broadcast_", "broadcast", "tensors", "tensors", "_c10d_functional::broadcast"),
    _twin("reduce_", "reduce", "tensors", "tensors", f"{OWN}::reduce"),
    _twin("gather_", "gather", "output_tensors", "input_tensors", f"{OWN}::gather"),
    _twin("scatter_", "scatter", "output_tensors", "input_tensors", f"{OWN}::scatter"),
    _twin("alltoall_base_", "all_to_all", "output", "input", "_c10d_functional::all_to_all_single"),
    _twin("alltoall_", "all_to_all", "output_tensors", "input_tensors", f"{OWN}::all_to_all"),
    Collective("c10d::barrier", "barrier", Way.TWIN, twin=f"{OWN}::barrier"),
    Collective("c10d::send", "send", Way.TWIN, read="tensors", twin=f"{OWN}::send"),
    Collective("c10d::recv_", "receive", Way.TWIN, written="tensors", twin=f"{OWN}::receive"),
    *_refused("c10d", ["recv_any_source_"], _WHO_SENDS),
    *_refused("c10d", ["monitored_barrier_"], "it raises on the rank that waits, for reasons that no value has"),
    *_refused("c10d", ["check_for_nan"], "it raises for what the elements are"),
    *_values("_c10d_functional", (*_FUNCTIONAL, *_FORMS)),
    *_values("_c10d_functional_autograd", _FUNCTIONAL),
    *_values("c10d_functional", (*_FUNCTIONAL, *_FORMS)),
    Collective(
        *(f"{OWN}::alltoall_base_", "all_to_all", Way.TWIN, "output", "input", "_c10d_functional::all_to_all_single")
    ),
    *_values(OWN, ("reduce", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier", "send", "receive")),
    *_refused("_c10d_functional", _IN_PLACE, "it is for compilers: in a graph the operator without `_` has its place"),
    Collective("_c10d_functional::wait_tensor", "wait", Way.WAIT),
    Collective("c10d_functional::wait_tensor", "wait", Way.WAIT),
    Collective("_c10d_functional::_wrap_tensor_autograd", "wrap", Way.LOCAL),
    *_refused("_c10d_functional", _PEERS, _UNDECLARED),
    *_refused("c10d_functional", _PEERS, _UNDECLARED),
    Collective("_dtensor::shard_dim_alltoall", "all_to_all", Way.VALUE),
    Collective("_dtensor::mesh_get_process_group", "group", Way.LOCAL),
    *(Collective(f"fsdp::{name}", name, Way.DECOMPOSED) for name in _SHARDING),
    Collective("fsdp::copy_", "copy_", Way.WRITE),
    *_refused("symm_mem", _SYMMETRIC, _REMOTE),
)
_OF_LATER_TORCH = (  # than the pinned version
    *_refused("_c10d_functional", ["wait_tensors"], "in a graph each tensor is waited for by itself: `wait_tensor`"),
    *_refused("c10d", ["gather_into_tensor_"], "it has no functional form: `gather` has one"),
    Collective("fsdp::chunk_cat_mixed_dtype", "chunk_cat", Way.DECOMPOSED),
    *_refused("fsdp", ["record_grad_output_stream"], "it acts on a stream of a GPU"),
    *_refused("symm_mem", _SYMMETRIC_LATER, _REMOTE),
)
LATER: Mapping[str, Collective] = {row.op: row for row in _OF_LATER_TORCH}
ROWS: Mapping[str, Collective] = {row.op: row for row in (*_ROWS, *_OF_LATER_TORCH)}


@functools.cache
def collective(op: Any) -> Collective | None:
    """The row of an operator; None if it is not one of the namespaces.

    Raises:
        LookupError: an operator of the namespaces has no row.

    Example:
        >>> import torch
        >>> collective(torch.ops._c10d_functional.all_reduce.default).kind
        'all_reduce'
    """
    if getattr(op, "namespace", None) not in NAMESPACES:
        return None
    name = op.name().partition(".")[0]
    if name not in ROWS and op.namespace != OWN:
        raise LookupError(f"{name} acts on other processes, and has no row in functionalize.ops.collectives")
    return ROWS.get(name)


def refused(op: Any) -> str | None:
    """Why an operator cannot be in a graph; None if it can.

    Example:
        >>> import torch
        >>> print(refused(torch.ops._c10d_functional.all_reduce.default))
        None
    """
    row = collective(op)
    if row is None or row.way is not Way.TWIN:
        return None if row is None else row.reason
    return _UNDECLARED


def communicates(op: object) -> bool:
    """Whether `op` acts on other processes, or waits for them.

    Example:
        >>> import torch
        >>> communicates(torch.ops._c10d_functional.all_reduce.default)
        True
    """
    row = collective(op)
    return row is not None and row.way not in (Way.LOCAL, Way.WRITE)


def starts(op: object) -> bool:
    """Whether `op` starts a communication, which other processes take part in.

    Example:
        >>> import torch
        >>> starts(torch.ops._c10d_functional.wait_tensor.default)
        False
    """
    row = collective(op)
    return row is not None and row.way is Way.VALUE
