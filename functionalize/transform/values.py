"""Values as ordinary tensors: what eager use computes, and what ``make_fx`` tracks by proxies.

Invariant: a value never changes, neither its data nor its metadata; a *real* handle's memory is always current.
Limits: one executor serves one call of a functionalized function, in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
    data_hidden,
    enable_python_dispatcher,
    forget_offset,
    has_symbols,
    is_symbol,
    is_symbolic,
    last_node,
    memory_write,
    mode_stack,
    on_handles,
    pieces_of,
    point_proxy,
    record_effect,
    record_symbols,
    record_view,
    same_node,
    sized_by_data,
    storage_id,
    storage_key,
    tensors_with_storage,
    track_symbol,
    track_symbols,
    tracked_node,
    unbacked,
    uncached_fakes,
)
from functionalize.aliasing.geometry import hint, plain
from functionalize.aliasing.tensor_queries import counts_elements, is_contiguous, is_fake, repeated, tensor_leaves
from functionalize.ops import traits
from functionalize.ops.variants import copying
from functionalize.tracing.meta_cache import CachedCall
from functionalize.tracing.recording_mode import RecordingMode

aten = torch.ops.aten
Value = torch.Tensor
Run = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


def _dispatch(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return op(*args, **kwargs)


class ValueExecutor:
    """Executes ops on values through the modes that run below ours."""

    def __init__(self, *, remove_views: bool) -> None:
        self.remove_views = remove_views
        self.proxies: ProxyTorchDispatchMode | None = current_proxy_mode()
        own = [mode for mode in mode_stack() if not isinstance(mode, (FakeTensorMode, RecordingMode))]
        self.recorder = self.proxies if isinstance(self.proxies, RecordingMode) and not own else None
        self.run: Run = _dispatch if self.recorder is None else self.recorder.run  # one op, on values
        # Whether nodes can be added for views of fake handles without running the ops again (`record`).
        self.records = self.proxies is not None and not remove_views
        self.observed = any(not isinstance(mode, FakeTensorMode) for mode in mode_stack())
        fake = any(isinstance(mode, FakeTensorMode) for mode in mode_stack())
        self.on_memory = self.proxies is not None and not fake  # a graph is traced while eager computes
        self.symbolic = self.proxies is not None and has_symbols(mode_stack())
        self._frozen: dict[int, int] = {}  # by the storage of a copy, the storage that it stands for
        self._start = last_node(self.proxies) if self.proxies is not None else None
        self.works: list[Any] = []  # of collectives that the program has started

    # Values

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute one op on values; instead of a view op its ``*_copy`` if views are to be removed."""
        args = _prepared(op, args, copies=self.remove_views)
        if self.remove_views:
            view, op = op, copying(op)
            fake = op is not view and isinstance(args[0], FakeTensor)
            if fake and sized_by_data(args[0], args[1:]):
                # torch's copy ops guard on a data-dependent size, view ops do not
                copied = self.record_unbacked(view, args[0], args[1:], on_handles(view, args, {}))
                if copied is not None:
                    return copied
            if fake and is_symbolic(args[0]):  # also in functions that are kept on kernels in C++
                with enable_python_dispatcher():
                    return self.run(op, args, kwargs)
        if op in traits.KEEPS_OFFSET and is_fake(args[0]) and not _starts_storage(args[0]):
            with uncached_fakes(args[:1]):  # from the cache they come with offset zero
                return op(*args, **kwargs)
        return self.run(op, args, kwargs)

    def communicating(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """While an op acts on other processes: torch would run it on constants already while it traces."""
        return data_hidden(None if self.proxies is None else self.proxies.tracer, tensors)

    def snapshot(self, value: Value) -> Value:
        """A copy of a value, for the same graph node, which no later write to a handle can change."""
        if self.is_constant(value):
            twin: Value = aten.clone.default(value)
            return twin  # a node: the constant's data are known when the graph runs
        copied = copy_of_memory if type(value) in PLAIN_TYPES else torch.clone
        frozen = self.alias(value, aten.alias.default if is_fake(value) else copied)
        self._frozen[storage_key(frozen)] = self.storage_of(value)
        return frozen

    def storage_of(self, value: Value) -> int:
        """The key of the storage that holds a value when the graph is run."""
        key = storage_key(value)
        return self._frozen.get(key, key)

    def alias(self, value: Value, op: Any = aten.alias.default) -> Value:
        """Another tensor object for the same graph node."""
        twin: Value
        twin = on_handles(op, (value,), {}) if self.recorder is None else self.recorder.propagate(op, (value,), {})[0]
        self.retarget_proxy(twin, value)
        return twin

    def record(self, op: Any, value: Value, args: tuple[Any, ...], handle: torch.Tensor) -> bool:
        """Add the node ``op(value, *args)`` with the handle as its result; False if that is not possible."""
        if self.proxies is None or not self.records or type(handle) is not FakeTensor:
            return False
        if self.recorder is not None and op is not aten.as_strided.default and type(value) is FakeTensor:
            return self.recorder.record_view(op, value, args, handle)
        return record_view(self.proxies, op, value, args, handle)

    def record_unbacked(self, op: Any, value: Value, args: tuple[Any, ...], handle: torch.Tensor) -> Value | None:
        """The value of a view of data-dependent size, by a node alone: running the op would make new symbols."""
        if self.proxies is None or not isinstance(handle, FakeTensor):
            return None
        result: Value = handle
        if self.remove_views:
            op = copying(op)
            result = on_handles(aten.clone.default, (handle,), {"memory_format": torch.contiguous_format})
            forget_offset(handle)
        return result if record_view(self.proxies, op, value, args, result) else None

    # Handles

    def sync_memory(self, handle: torch.Tensor, value: Value) -> None:
        """Copy a value to a real handle's memory, for code that reads memory directly."""
        if is_fake(handle) or is_fake(value):
            return
        if counts_elements(handle):
            on_handles(aten.resize_as_sparse_.default, (handle, value), {})
        for dim in repeated(handle):  # written once: `copy_` refuses positions that share an element
            handle, value = (on_handles(aten.slice.Tensor, (side, dim, 0, 1), {}) for side in (handle, value))
        if type(handle) in PLAIN_TYPES:
            memory_write(handle, value)
        else:  # a wrapper: its parts have the memory
            on_handles(aten.copy_.default, (handle, value), {})

    def physical(self, handle: torch.Tensor) -> Value:
        """A handle without conjugate and negative bits, which kernels do not take."""
        if handle.is_sparse or not (handle.is_conj() or handle.is_neg()):
            return handle
        view, op = (aten._conj, aten.conj_physical) if handle.is_conj() else (aten._neg_view, aten.neg)
        value: Value = on_handles(op.default, (self.physical(on_handles(view.default, (handle,), {})),), {})
        return value

    def retarget_proxy(self, handle: torch.Tensor, value: Value) -> None:
        """Let a handle that leaves the function stand for the node of ``value``."""
        if self.proxies is not None:
            point_proxy(self.proxies, handle, value)

    def on_handles(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an op on the program's own tensors, seen by no tracer."""
        return self.propagate(func, args, kwargs)[0]

    def propagate(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, CachedCall | None]:
        """Run an op on the program's own tensors, seen by no tracer: results, and the call if these are cached."""
        if func is aten.unbind.int and is_symbolic(args[0]):
            return [self.on_handles(aten.select.int, where, {}) for where in pieces_of(*args, **kwargs)], None
        if self.recorder is not None:
            out, call = self.recorder.propagate(func, args, kwargs)
            if call is not None:
                return out, call
        else:
            out = on_handles(func, args, kwargs)
        if self.symbolic:
            if func is aten.diagonal.default and not unbacked(out.size()) and 0 in map(hint, out.size()):
                # With symbolic sizes it starts where a diagonal with elements would; in eager, where its source does.
                layout = (out.size(), out.stride(), args[0].storage_offset())
                on_handles(aten.as_strided_.default, (out, *layout), {})
            for handle in tensor_leaves([out], {}):
                self.track_sizes(handle)
        return out, None

    def resize_handle(self, handle: torch.Tensor, size: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """``resize_`` of one of the program's own tensors, decomposed if sizes are symbolic: fake ones refuse it."""
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
        self.track_sizes(handle)

    def extend_fake_storage(self, handle: torch.Tensor) -> None:
        """Make a fake input's storage as large as the original's, before the program reads beyond the input."""
        original, held = bytes_of_original(handle), plain(handle.untyped_storage().nbytes())
        if original is not None and original > hint(held):
            whole = on_handles(lambda: held + (original - hint(held)), (), {})
            on_handles(torch.ops.inductor.resize_storage_bytes_.default, (handle, whole), {})

    def record_metadata_write(self, op: Any, handle: torch.Tensor, args: tuple[Any, ...]) -> None:
        """Run an op that changes an input's metadata; for a fake input, which has them already, only add the node."""
        if self.proxies is not None and is_fake(handle):
            record_effect(self.proxies, op, handle, args)
        else:
            op(handle, *args)

    def record_sizes(self, arguments: Any) -> None:
        """Record the sizes in ``arguments`` now, before the tensor that has them is changed."""
        if self.proxies is not None:
            record_symbols(self.proxies, arguments)

    def track_sizes(self, handle: torch.Tensor) -> None:
        """Track the symbols in the sizes of a handle that the tracer did not see being made."""
        if self.proxies is not None and handle.layout is torch.strided:
            track_symbols(self.proxies, handle)

    def track_offset(self, handle: torch.Tensor, offset: Any) -> None:
        """Track a storage offset that is a new symbol, as a number that is computed from known symbols."""
        symbol = handle.storage_offset()
        if self.proxies is not None and isinstance(handle, FakeTensor) and is_symbol(symbol):
            forget_offset(handle)
            track_symbol(self.proxies, symbol, offset)

    def is_constant(self, handle: torch.Tensor) -> bool:
        """Whether a tracer below takes a handle for a constant: it is neither an input nor a result of an op."""
        return self.proxies is not None and tracked_node(self.proxies.tracer, handle) is None

    def predates_call(self, handle: torch.Tensor) -> bool:
        """Whether a handle of the graph that is traced existed before the function was called."""
        if self.proxies is None:
            return False
        node = tracked_node(self.proxies.tracer, handle)
        return node is None or (self._start is not None and not self._start < node)

    def same_node(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Whether two tensors stand for the same node of the graph that is traced."""
        return self.proxies is not None and same_node(self.proxies, first, second)

    def tensor_with_storage(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """A tensor that the tracer knows, with this storage; None if it knows no such tensor."""
        return None if self.proxies is None else next(tensors_with_storage(self.proxies, storage_id(storage)), None)


# Note [Values may have other strides than their handles]: a `*_copy` is contiguous, a functional variant has
# strides of its own choice. So an op that depends on strides runs on values only as prepared here.


def _prepared(op: Any, args: tuple[Any, ...], *, copies: bool) -> tuple[Any, ...]:
    """Arguments for an op on values; ``copies`` says that the op's ``*_copy`` will run."""
    prepare = PREPARED.get(op)
    if prepare is None or (copies and op is aten.view.default):  # view_copy takes any strides
        return args
    return prepare(op, args)


def _by_storage(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``as_strided`` counts from the start of the value's storage, a rule from the value's first element."""
    base, *rest, offset = args
    # A scatter copies its base with all of the storage, and its meta kernel forgets that the copy starts where the
    # base did.
    moved = op is aten.as_strided_scatter.default and not (_starts_storage(base) and _fills_storage(base))
    if moved or not is_contiguous(base):
        base = aten.clone.default(base, memory_format=torch.contiguous_format)
    if type(offset) is int and offset == 0:
        return (base, *rest)  # where the value begins, wherever that is in a later call
    return (base, *rest, offset + base.storage_offset())


def _without_gaps(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args if _fills_storage(args[0]) else (aten.clone.default(args[0]), *args[1:])


def _starts_storage(value: Value) -> bool:
    offset = value.storage_offset()
    return type(offset) is int and offset == 0


def _fills_storage(base: Value) -> bool:
    return hint(base.untyped_storage().nbytes()) % base.element_size() == 0


def _with_legal_layout(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_legal_base(op, args), *args[1:])


def _legal_base(op: Any, args: tuple[Any, ...]) -> torch.Tensor:
    base: torch.Tensor = args[0]
    if op is aten.view.default and is_contiguous(base):
        return base
    if op is aten.view.dtype and is_fake(base) and _resizes_column(base, args[1]):
        return aten.clone.default(base, memory_format=torch.contiguous_format)  # type: ignore[no-any-return]
    try:
        on_handles(op, args, {})
        if op is aten.view.default and is_fake(base):
            below_all_modes(_view_of_nothing, (base, args[1]), {})
    except (RuntimeError, ValueError):
        if op is aten.view.dtype and 0 in base.size():  # contiguous strides of an empty tensor may be illegal, too
            strides = [args[1].itemsize] * (base.dim() - 1) + [1]
            return aten.new_empty_strided.default(base, list(base.size()), strides)  # type: ignore[no-any-return]
        return aten.clone.default(base, memory_format=torch.contiguous_format)  # type: ignore[no-any-return]
    return base


def _resizes_column(base: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a view of another dtype uses the stride of a last dimension of size 1, which may differ on fakes."""
    size = base.size()[-1] if base.dim() else 0
    return dtype.itemsize != base.dtype.itemsize and type(size) is int and size == 1


def _view_of_nothing(base: torch.Tensor, size: Sequence[Any]) -> None:
    """Raises what the kernel of `view` raises, for the sizes of this trace: the fake kernel accepts more."""
    if not unbacked((*base.size(), *size)):
        layout = list(map(hint, base.size())), list(map(hint, base.stride()))
        torch.empty_strided(*layout, device="meta").view(list(map(hint, size)))


PREPARED: dict[Any, Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]] = {
    **dict.fromkeys(traits.VIEWS_BY_ADDRESS, _by_storage),
    **dict.fromkeys(traits.KEEPS_OFFSET, _without_gaps),
    **dict.fromkeys(traits.LEGAL_BY_LAYOUT, _with_legal_layout),
}


# Functional ops of the program that address the storage of their argument: where that was viewed or written, they run
# as views and writes, which know the layout of a handle.


def _as_strided_copy(x: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None) -> Any:
    part = aten.as_strided.default(x, size, stride, storage_offset)
    return aten.clone.default(part, memory_format=torch.contiguous_format)


def _as_strided_scatter(
    x: torch.Tensor, source: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> Any:
    whole = aten.as_strided.default(x, [x.untyped_storage().nbytes() // x.dtype.itemsize], [1], 0)
    copy = aten.as_strided.default(aten.clone.default(whole), x.size(), x.stride(), x.storage_offset())
    aten.copy_.default(aten.as_strided.default(copy, size, stride, storage_offset), source)
    return copy


ADDRESSING: dict[Any, Callable[..., Any]] = {
    aten.as_strided_copy.default: _as_strided_copy,
    aten.as_strided_scatter.default: _as_strided_scatter,
}
