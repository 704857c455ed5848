"""Values as ordinary tensors: what eager use computes, and what ``make_fx`` tracks by proxies.

Invariant: a value never changes, neither its data nor its metadata; a *real* handle's memory is always current.
Limits: one domain serves one call of a functionalized function, in one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch

from functionalize._torch import (
    PLAIN_TYPES,
    FakeTensor,
    FakeTensorMode,
    ProxyTorchDispatchMode,
    below_all_modes,
    bytes_of_original,
    copy_of_memory,
    current_proxy_mode,
    forget_offset,
    has_symbols,
    holders,
    last_node,
    memory_write,
    mode_stack,
    node_of,
    on_handles,
    point_proxy,
    pytree,
    record_effect,
    record_symbols,
    record_view,
    same_node,
    sized_by_data,
    storage_id,
    storage_key,
    track_symbols,
    unbacked,
    uncached_fakes,
)
from functionalize.aliasing.geometry import Geometry, hint, plain
from functionalize.aliasing.tensor_queries import (
    counts_elements,
    is_fake,
    placed,
    repeated,
    same_strides,
    tensor_leaves,
)
from functionalize.ops import tables
from functionalize.tracing.recording_mode import RecordingMode
from functionalize.transform import dry_run as stand_ins
from functionalize.transform import stride_legalization as strides

aten = torch.ops.aten
Value = torch.Tensor

_DATA_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


Run = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


def _dispatch(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return op(*args, **kwargs)


@cache
def _copy_op(op: Any) -> Any:
    copy = tables.row(op).copy
    return op if copy is None else tables.overload(copy)


class TensorsDomain:
    """Executes ops on values through the modes that run below ours."""

    def __init__(self, *, remove_views: bool) -> None:
        self.remove_views = remove_views
        self.proxies: ProxyTorchDispatchMode | None = current_proxy_mode()
        own = [mode for mode in mode_stack() if not isinstance(mode, (FakeTensorMode, RecordingMode))]
        self._recorder = self.proxies if isinstance(self.proxies, RecordingMode) and not own else None
        self.run: Run = _dispatch if self._recorder is None else self._recorder.run  # one op, on values
        self.observed = any(not isinstance(mode, FakeTensorMode) for mode in mode_stack())
        self.symbolic = self.proxies is not None and has_symbols(mode_stack())
        self._frozen: dict[int, int] = {}  # which storages copies stand for
        self._start = last_node(self.proxies) if self.proxies is not None else None

    # Values

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute one op on values; of a view op its ``*_copy`` where views are to be removed."""
        args = strides.prepared(op, args, copies=self.remove_views)
        if self.remove_views:
            copied = self._copy_of_unbacked(op, args)
            if copied is not None:
                return copied
            op = _copy_op(op)
        if op in strides.KEEP_OFFSET and is_fake(args[0]) and not _starts_storage(args[0]):
            with uncached_fakes(args[:1]):  # from the cache they come with offset zero
                return op(*args, **kwargs)
        return self.run(op, args, kwargs)

    def _copy_of_unbacked(self, op: Any, args: tuple[Any, ...]) -> Value | None:
        """Copy a view of a tensor whose size only the data tell: torch's copy ops ask that size, their views do not."""
        fake = _copy_op(op) is not op and isinstance(args[0], FakeTensor)
        if not (fake and sized_by_data(args[0], pytree.tree_leaves(args[1:]))):
            return None
        return self.record_unbacked(op, args[0], args[1:], on_handles(op, args, {}))

    def freeze(self, value: Value) -> Value:
        """The value as a tensor object which no later write to a handle can change, for the same graph node."""
        if self.constant(value):
            twin: Value = aten.clone.default(value)
            return twin  # a node: what the constant holds is known when the graph runs
        copied = copy_of_memory if type(value) in PLAIN_TYPES else torch.clone
        frozen = self.alias(value, aten.alias.default if is_fake(value) else copied)
        self._frozen[storage_key(frozen)] = self.memory(value)
        return frozen

    def memory(self, value: Value) -> int:
        """The storage in which a value lies when the graph is run."""
        key = storage_key(value)
        return self._frozen.get(key, key)

    def alias(self, value: Value, op: Any = aten.alias.default) -> Value:
        """Another tensor object for the same graph node."""
        twin: Value = on_handles(op, (value,), {})
        self.point(twin, value)
        return twin

    @property
    def records(self) -> bool:
        """Whether a node can be added for a view that a fake handle shows already, without running the op again."""
        return self.proxies is not None and not self.remove_views

    def record(self, op: Any, value: Value, args: tuple[Any, ...], handle: torch.Tensor) -> bool:
        """Add the node ``op(value, *args)`` with the handle as its result, if that can be."""
        if self.proxies is None or self.remove_views or not isinstance(handle, FakeTensor):
            return False
        if self._recorder is not None and op is not aten.as_strided.default and isinstance(value, FakeTensor):
            return self._recorder.record_view(op, value, args, handle)
        return record_view(self.proxies, op, value, args, handle)

    def record_unbacked(self, op: Any, value: Value, args: tuple[Any, ...], handle: torch.Tensor) -> Value | None:
        """The value of a view whose size only the data tell, by a node: run again, the op would make other symbols."""
        if self.proxies is None or not isinstance(handle, FakeTensor):
            return None
        result: Value = handle
        if self.remove_views:
            op = _copy_op(op)
            result = on_handles(aten.clone.default, (handle,), {"memory_format": torch.contiguous_format})
            forget_offset(handle)
        return result if record_view(self.proxies, op, value, args, result) else None

    # Handles

    def show(self, handle: torch.Tensor, value: Value) -> None:
        """Bring a real handle's memory up to date, so that whatever reads memory directly sees current data."""
        if not is_fake(handle) and not is_fake(value):
            if counts_elements(handle):
                on_handles(aten.resize_as_sparse_.default, (handle, value), {})
            for dim in repeated(handle):  # written once: `copy_` refuses positions that share an element
                handle, value = (on_handles(aten.slice.Tensor, (side, dim, 0, 1), {}) for side in (handle, value))
            if type(handle) not in PLAIN_TYPES:  # a wrapper: its parts have the memory
                on_handles(aten.copy_.default, (handle, value), {})
                return
            memory_write(handle, value)

    def physical(self, handle: torch.Tensor) -> Value:
        """A handle as kernels take it: conjugate and negative bits are resolved above us in the dispatcher."""
        if handle.is_sparse or not (handle.is_conj() or handle.is_neg()):
            return handle
        view, op = (aten._conj, aten.conj_physical) if handle.is_conj() else (aten._neg_view, aten.neg)
        value: Value = on_handles(op.default, (self.physical(on_handles(view.default, (handle,), {})),), {})
        return value

    def point(self, handle: torch.Tensor, value: Value) -> None:
        """Let a handle that leaves the function stand for ``value`` in the modes below."""
        if self.proxies is not None:
            point_proxy(self.proxies, handle, value)

    def on_handles(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an op on the program's own tensors, seen by no tracer."""
        return self.propagate(func, args, kwargs)[0]

    def propagate(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Sequence[Geometry] | None]:
        """What an op gives of the program's own tensors, seen by no tracer, and where that lies, if it is known."""
        if self._recorder is not None:
            out, entry = self._recorder.propagate(func, args, kwargs)
            if entry is not None:
                return out, entry.places
        else:
            out = on_handles(func, args, kwargs)
        if self.symbolic:
            if func is aten.diagonal.default and not unbacked(out.size()) and 0 in map(hint, out.size()):
                # Of symbolic sizes it starts where one with elements would, in eager where its source does.
                place = (out.size(), out.stride(), args[0].storage_offset())
                on_handles(aten.as_strided_.default, (out, *place), {})
            for handle in tensor_leaves([out], {}):
                self.know_symbols(handle)
        return out, None

    def resize_handle(self, handle: torch.Tensor, size: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """``resize_`` of one of the program's own tensors, spelt out where sizes are symbolic: fake ones refuse it."""
        open_ended = unbacked(tuple(size))
        if not (is_fake(handle) and (self.symbolic or open_ended)):
            on_handles(aten.resize_.default, (handle, list(size)), kwargs)
            return
        options = {"dtype": handle.dtype, "device": handle.device, **kwargs}
        like = on_handles(aten.empty.memory_format, (list(size),), options)
        bytes_needed = (handle.storage_offset() + like.numel()) * handle.dtype.itemsize
        if open_ended or hint(bytes_needed) > hint(handle.untyped_storage().nbytes()):
            on_handles(torch.ops.inductor.resize_storage_bytes_.default, (handle, bytes_needed), {})
        on_handles(aten.as_strided_.default, (handle, like.size(), like.stride(), handle.storage_offset()), {})
        self.know_symbols(handle)

    def know_storage(self, handle: torch.Tensor) -> None:
        """Give a fake input all of the storage that the original has, before the program looks beyond the input."""
        original, known = bytes_of_original(handle), plain(handle.untyped_storage().nbytes())
        if original is not None and original > hint(known):
            whole = on_handles(lambda: known + (original - hint(known)), (), {})
            on_handles(torch.ops.inductor.resize_storage_bytes_.default, (handle, whole), {})

    def write_metadata(self, op: Any, handle: torch.Tensor, args: tuple[Any, ...]) -> None:
        """Have an op that gives an input its metadata recorded; a fake input shows it already."""
        if self.proxies is not None and is_fake(handle):
            record_effect(self.proxies, op, handle, args)
        else:
            op(handle, *args)

    def fix_symbols(self, arguments: Any) -> None:
        """Have a graph read symbols now, before the tensor that they are sizes of gets others."""
        if self.proxies is not None:
            record_symbols(self.proxies, arguments)

    def know_symbols(self, handle: torch.Tensor) -> None:
        """Let the tracer find the sizes of a handle that was made behind its back."""
        if self.proxies is not None and handle.layout is torch.strided:
            track_symbols(self.proxies, handle)

    def constant(self, handle: torch.Tensor) -> bool:
        """Whether a tracer below takes a handle for a constant: neither an input nor an op gave it to the program."""
        return self.proxies is not None and node_of(self.proxies, handle) is None

    def older(self, handle: torch.Tensor) -> bool:
        """Whether a handle of the graph that is traced was there before the function was called."""
        if self.proxies is None:
            return False
        node = node_of(self.proxies, handle)
        return node is None or (self._start is not None and not self._start < node)

    def same_node(self, one: torch.Tensor, two: torch.Tensor) -> bool:
        """Whether two tensors stand for the same node of the graph that is traced."""
        return self.proxies is not None and same_node(self.proxies, one, two)

    def holder(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """A tensor that tells the tracer what a storage holds."""
        return None if self.proxies is None else next(holders(self.proxies, storage_id(storage)), None)

    def expected(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
        """``out``, or fresh handles where eager, from the handles ``args``, would have given other strides."""
        if not _DATA_DEPENDENT.isdisjoint(func.tags):
            return out  # shapes that only the data tell, and tensors whose strides are their own
        flat, spec = pytree.tree_flatten(out)
        with _same_random_numbers(func):
            wanted = pytree.tree_leaves(self.on_handles(func, args, kwargs))
        handles = [_rehandled(leaf, want) for leaf, want in zip(flat, wanted, strict=True)]
        return pytree.tree_unflatten(handles, spec)

    def dtype_of(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
        """The dtype of an op's first result."""
        with _same_random_numbers(func):
            results = tensor_leaves([on_handles(func, args, kwargs)], {})
        return next((result.dtype for result in results), None)

    def rehearse(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], written: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Run a mutating op on twins of the handles that it writes: raises what eager raises, else returns the twins.

        ``written`` holds tensors and lists of tensors; the result holds their twins, flat.
        """
        originals = list(tensor_leaves(written, {}))
        try:
            return self._rehearsed(func, args, kwargs, originals, lambda number: number)
        except RuntimeError as error:
            if not (self.symbolic and "tried to directly modify sizes" in str(error)):
                raise
            # Fake tensors of symbolic sizes cannot be resized: the sizes are those of this trace, from here on.
            return self._rehearsed(func, args, kwargs, originals, int)

    def _rehearsed(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], originals: list[torch.Tensor], size: Any
    ) -> list[torch.Tensor]:
        twins = [on_handles(_uninitialized_like, (handle, size), {}) for handle in originals]
        by_id = {id(handle): twin for handle, twin in zip(originals, twins, strict=True)}
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda handle: by_id.get(id(handle), handle), (tuple(args), kwargs)
        )
        with _same_random_numbers(func), uncached_fakes(originals):
            self.on_handles(func, args, kwargs)
        for twin in twins if self.symbolic else ():
            self.know_symbols(twin)
        return [by_id[id(handle)] for handle in originals]

    def rehearse_on_copies(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Run an op on copies of its arguments, which share memory as the originals do: raises what eager raises.

        Fake kernels do not look at what shares memory, so fake arguments get real stand-ins, of zeros.
        """
        handles = list(tensor_leaves(args, kwargs))
        if any(handle.layout is not torch.strided for handle in handles):
            return
        fake = any(map(is_fake, handles))
        if fake and sum(hint(handle.untyped_storage().nbytes()) for handle in handles) > stand_ins.AT_MOST:
            return

        def run() -> None:
            copies = stand_ins.copies(
                handles, partial(stand_ins.zeros, symbolic=self.symbolic) if fake else copy_of_memory
            )
            new = pytree.tree_map_only(torch.Tensor, lambda handle: copies[id(handle)], (tuple(args), kwargs))
            func(*new[0], **new[1])

        try:
            with _same_random_numbers(func):
                below_all_modes(run, (), {})
        except Exception as error:  # what else zeros cannot do says nothing of the program
            if not fake or str(error).startswith("unsupported operation:"):
                raise


def _starts_storage(value: Value) -> bool:
    offset = value.storage_offset()
    return type(offset) is int and offset == 0


@contextlib.contextmanager
def _same_random_numbers(func: Any) -> Iterator[None]:
    """A second run of an op must not draw from the program's random numbers."""
    with torch.random.fork_rng(enabled=torch.Tag.nondeterministic_seeded in func.tags):
        yield


def _rehandled(result: Any, want: Any) -> Any:
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided or same_strides(result, want):
        return result
    return want


def _uninitialized_like(tensor: torch.Tensor, size: Callable[[Any], Any]) -> torch.Tensor:
    if not placed(tensor):
        return tensor.clone()
    return tensor.new_empty_strided(list(map(size, tensor.size())), list(map(size, tensor.stride())))
