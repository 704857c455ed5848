"""The mode below autograd and functorch: each op of the program arrives here, and leaves as ops on values.

Invariant: the program gets back handles: plain tensors with eager's metadata. Ops that run in the modes below are free
of mutation, and of views if these are to be removed. Limits: one mode serves one call, in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import has_side_effect

from functionalize._torch import (
    PLAIN_TYPES,
    VERSION,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    TorchDispatchMode,
    alias_of_wrapper,
    as_before_modes,
    below_all_modes,
    counts_versions,
    current_proxy_mode,
    decide_ones,
    mode_stack,
    offset_of_part,
    on_handles,
    set_versions,
    storage_key,
    unbacked,
    uncompiled,
)
from functionalize._torch.autograd import running_backward
from functionalize._torch.dispatch import current_function_mode, without_function_mode
from functionalize._torch.fakes import fake_device
from functionalize.aliasing import view_rules
from functionalize.aliasing.bases import View
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.tensor_queries import counts_elements, tensor_leaves
from functionalize.errors import UnsupportedProgramError
from functionalize.ops import tables, traits
from functionalize.ops.collectives import Way, collective, communicates, starts
from functionalize.ops.tables import Kind, OpRow, ViewKind
from functionalize.ops.variants import copying, view_of
from functionalize.refusals.writes import QUANTIZED_WRITTEN, SPARSE_MADE_OF, SPARSE_PART_READ, SPARSE_PART_WRITTEN
from functionalize.tracing.meta_cache import MISS, CachedCall
from functionalize.transform import mutation
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.function_mode import EngineMode
from functionalize.transform.gradients.ended_gradients import WITHOUT_GRAD_MODE
from functionalize.transform.handlers import collectives, custom_ops, data, higher_order, observers, random_ops
from functionalize.transform.handlers.inplace_views import (
    check_place,
    keeps_size,
    new_size,
    refuse_bytes,
    refuse_uncounted,
    with_kept_strides,
)
from functionalize.transform.handlers.strides import trusted, with_aligned_bias
from functionalize.transform.values import ADDRESSING, ValueExecutor
from functionalize.transform.writing_call import WritingCall

aten = torch.ops.aten
Kwargs = dict[str, Any]


class FunctionalizeMode(TorchDispatchMode):
    """Functionalizes what runs inside it. Entered by :func:`functionalize.functionalize`, which plans the epilogue."""

    supports_higher_order_operators = True

    def __init__(self, *, remove_views: bool, functionalize_body: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Made outside of the mode: the executor finds the modes that will run below it.
        executor = ValueExecutor(remove_views=remove_views)
        self.context = FunctionalizationContext(executor, lambda: self, functionalize_body)
        self._tracer = self.context.executor.proxies
        self._mixes = any(isinstance(mode, FakeTensorMode) and mode.allow_non_fake_inputs for mode in mode_stack())
        self._bases, self._run, self._recorder = self.context.graph.bases, executor.run, executor.recorder
        self.refusal: UnsupportedProgramError | None = None  # raised at the end, too: the program may have caught it
        self._suspects = self.context.notes.reshapes.lost_views.suspects

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap `__torch_dispatch__`, at a cost for each op; `uncompiled` does the same

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile the bodies of higher-order ops as without a mode, and see what the compiled code runs."""
        return True

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # half of all ops on fake tensors
            return fake_device(args[0])
        kwargs = kwargs or {}
        if running_backward() >= 0 and type(current_function_mode()) is EngineMode:
            with without_function_mode():  # an op of the engine's own
                return self.__torch_dispatch__(func, types, args, kwargs)
        if types and not PLAIN_TYPES.issuperset(types) and not self.context.has_traced_subclass(args, kwargs):
            return NotImplemented  # a subclass desugars first; its inner tensors come back here
        entry = _handlers.get(id(func))
        if entry is None:
            entry = _handlers[id(func)] = func, _choose(func)
        handler, context = entry[1], self.context
        tracer = current_proxy_mode()
        if tracer is not self._tracer:  # as in `aside`, or torch hides the op from tracers
            return func(*args, **kwargs) if kwargs else func(*args)
        context.op, context.origin = func, None
        if self._suspects and handler not in _NO_USES and func is not _DETACH:
            context.notes.reshapes.lost_views.note_use(tensor_leaves(args, kwargs))
        if context.unseen is not None:
            context.unseen.adopt(tensor_leaves(args, kwargs))
            out = handler(self, func, args, kwargs)
            context.unseen.note(tensor_leaves(out if isinstance(out, (list, tuple)) else [out], {}))
            return out
        if handler is _FUNCTIONAL and not self._bases:
            return self._run(func, args, kwargs)
        return handler(self, func, args, kwargs)

    def aside(self) -> bool:
        """Whether the program is tracing a function into a graph of its own, whose ops arrive here later."""
        tracer = current_proxy_mode()
        return tracer is not self._tracer and tracer is not None

    def _functional(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        context = self.context
        out = context.run_cached(func, args, kwargs)
        if out is not MISS:  # most calls of a capture
            return out
        values = context.values_of(args, kwargs)
        call_args, call_kwargs = values.args, values.kwargs
        if not values.strides_differ:
            return self._run(func, call_args, call_kwargs)
        if func in traits.TRUSTS_STRIDES:
            call_args, call_kwargs = trusted(context, func, args, kwargs)
        elif func in traits.ALIGNED_BIAS:
            call_args = with_aligned_bias(context, func, call_args)
        ordered = random_ops.compute(context, func, args, kwargs, writes=False)
        out = self._run(func, call_args, call_kwargs) if ordered is None else ordered
        return context.with_eager_strides(func, args, kwargs, out)

    def _metadata(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        return on_handles(func, args, kwargs)

    def _version(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> int:
        """How many writes autograd has counted: the program's own tensor has the count."""
        self.context.notes.asked.add(VERSION, args[0])
        return args[0]._version  # type: ignore[no-any-return]

    def _set_version(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> None:
        set_versions(*args)

    def _is_set_to(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
        """Whether two handles show the same elements; fake ones say no, as torch makes storages for the answer."""
        first, second = args
        return storage_key(first) == storage_key(second) and Layout.of(first).matches(Layout.of(second))

    def _replaced(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        lifts = func is aten.lift_fresh.default
        if lifts and not self.context.executor.observed:
            return args[0]  # `from_numpy` arrives here: the tensor shares the array's memory
        out = self._functional(tables.overload(tables.row(func).functional or ""), args, kwargs)
        if lifts and self.context.borrowed is not None:
            self.context.borrowed.note_lifted(args[0], out)
        return out

    def _composite(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        with self, as_before_modes(func):
            return func.decompose(*args, **kwargs)

    def _unsafe_split(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        if torch.is_inference_mode_enabled():
            with self, as_before_modes(func):  # the safe variant has a kernel for views
                pieces = view_of(copying(func))(*args, **kwargs)
                return [piece if piece.is_inference() else _with_own_version(piece) for piece in pieces]
        return self._view(func, args, kwargs)

    def _addressing(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        if self.context.graph.find(args[0]) is None:  # its storage was neither viewed nor written
            return self._functional(func, args, kwargs)
        with self:
            return ADDRESSING[func](*args, **kwargs)

    def _observing(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        with self:
            observers.size_statistics(args)
        return self._mutation(func, args, kwargs)

    def _filling(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        if not self.context.executor.observed:
            return self._mutation(func, args, kwargs)
        with self:
            return random_ops.AS_FILLS[func](*args, **kwargs)

    def _view(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        context = self.context
        if not context.executor.observed:
            return on_handles(func, args, kwargs)  # only memory will be read: there is no graph to record
        source, graph = args[0], context.graph
        if not isinstance(source, torch.Tensor):  # autograd asks for the conjugate of a number
            with self:
                source = torch.scalar_tensor(source, dtype=_WIDEST[type(source)])
            args = (source, *args[1:])
        key = storage_key(source)
        if key < 0:
            return self._part_of_unstrided(func, args, kwargs)
        if func is _AS_STRIDED:
            check_place(source, args[1:])
        sized_by_data = func is _EXPAND and unbacked(source.size())  # which may be 1, and expanded
        out, call = self._run_view(func, args, kwargs)
        if context.endings.grad_is_off and func is not _DETACH:
            context.notes.note_view(source)
            context.endings.note(source, WITHOUT_GRAD_MODE)
        parent = graph.ensure(source, key, None if call is None else call.layout)
        if func is _AS_STRIDED and source.requires_grad:
            context.notes.note_address(parent, Layout.of(out))
        if isinstance(out, torch.Tensor):
            if call is None and storage_key(out) != key:
                out = alias_of_wrapper(func, args, kwargs, out)
            layout, rules = (Layout.of(out), None) if call is None else (call.entry.layouts[0], call.entry.rules)
            made = graph.derive(parent, func, tuple(args[1:]), layout, rules=rules, sized_by_data=sized_by_data)
            context.view_made(out, made)
        else:
            context.notes.note_pieces(source)
            layouts = [Layout.of(piece) for piece in out] if call is None else call.entry.layouts
            steps = view_rules.lower(func, layouts, tuple(args[1:]))
            for piece, layout, (op, op_args) in zip(out, layouts, steps, strict=True):
                context.view_made(piece, graph.derive(parent, op, op_args, layout))
        return out

    def _run_view(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> tuple[Any, CachedCall | None]:
        """The results of a view op on handles, and the call if these are cached."""
        type_ = type(args[0])
        if self._mixes and type_ is not FakeTensor and type_ in PLAIN_TYPES:
            # FakeTensorMode would give a view of a constant other memory.
            return below_all_modes(func, args, kwargs), None
        return self.context.executor.propagate(func, args, kwargs)

    def _unsupported_view(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        if not self.context.executor.observed:
            return on_handles(func, args, kwargs)
        return self._part_of_unstrided(func, args, kwargs)

    def _part_of_unstrided(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        copy = tables.row(func).copy if self.context.executor.remove_views and counts_elements(args[0]) else None
        out = self._functional(tables.overload(copy) if copy else func, args, kwargs)
        if isinstance(out, torch.Tensor) and func in view_rules.UNSUPPORTED_VIEWS:
            self.context.protect(
                out, partial(SPARSE_PART_WRITTEN.error, op=func, reason=view_rules.UNSUPPORTED_VIEWS[func])
            )
            self.context.protect(args[0], partial(SPARSE_PART_READ.error, op=func))
        for view in tensor_leaves([out], {}):
            self.context.keep_source(view, args[0])
        return out

    def _of_parts(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        out = self._functional(func, args, kwargs)
        for part in tensor_leaves(args, kwargs):
            self.context.protect(part, partial(SPARSE_MADE_OF.error, op=func), out)
        return out

    def _quantized(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        out = self._functional(func, args, kwargs)
        for handle in tensor_leaves([out], {}):
            if not handle.is_quantized:
                self.context.protect(handle, partial(QUANTIZED_WRITTEN.error, op=func))
        return out

    def _inplace_view(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        handle, context = args[0], self.context
        if not context.executor.observed:
            return on_handles(func, args, kwargs)
        func, args = with_kept_strides(func, args)
        size = new_size(func, args)
        if size is not None:
            if keeps_size(handle, size, kwargs):
                return handle
            refuse_uncounted(func, handle)
        variant = tables.row(func).functional
        op = tables.overload(variant) if variant else None
        context.note_reshape(handle, loses_elements=op not in view_rules.WAYS_BACK)
        for arg in args:
            if isinstance(arg, torch.Tensor):
                context.unshare(arg)
            elif isinstance(arg, torch.UntypedStorage):
                refuse_bytes(handle, context.find_storage(arg))
        view = context.graph.ensure(handle)
        if size is not None:
            context.prepare_resize(handle)
            context.executor.resize_handle(handle, size, kwargs)
        else:
            context.executor.on_handles(func, args, kwargs)
        context.note_reshaped(handle, view)
        context.executor.track_sizes(handle)
        view.base.simplify()
        if not Layout.of(handle).matches(view.layout) or storage_key(handle) != view.base.key:
            self._relocated(func, op, args, view)
        return handle

    def _relocated(self, func: Any, op: Any, args: Sequence[Any], before: View) -> None:
        """Track the view that a handle is after an op changed its metadata; ``op``: the view op with that result."""
        handle, context = args[0], self.context
        if func is aten.as_strided_.default and handle.requires_grad:
            context.notes.note_address(before, Layout.of(handle))
        if op in view_rules.VIEW_RULES and storage_key(handle) == before.base.key:
            context.graph.track(handle, context.graph.derive(before, op, tuple(args[1:]), Layout.of(handle)))
        elif func is aten.set_.default:  # to a storage of its own, which is empty
            options = {"dtype": handle.dtype, "device": handle.device}
            context.graph.create_base(handle, context.executor.call(aten.empty.memory_format, [0], **options))
        else:
            context.graph.relocate(handle)

    def _mutation(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        call = WritingCall(self.context, func, tables.row(func), args, kwargs)
        if counts_versions(func):
            return mutation.mutate(call)
        # Eager's kernel makes its writes by other ops, each of which bumps a version.
        versions = [(leaf, leaf._version) for leaf in tensor_leaves(call.targets, {}) if not leaf.is_inference()]
        out = mutation.mutate(call)
        for handle in [handle for handle, version in versions if handle._version == version]:
            torch.autograd.graph.increment_version(handle)
        return out

    def _collective(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        return collectives.run(self.context, func, args, kwargs)

    def _communicating(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        """The results of a functional collective."""
        handles = tensor_leaves(args, kwargs)
        values = map(self.context.value, handles) if self.context.executor.observed else ()
        with self.context.executor.communicating([*handles, *values]):
            return self._functional(func, args, kwargs)

    def _wait(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        """The argument itself, as eager's kernel returns it; its value is the result of the wait."""
        handle, context = args[0], self.context
        if not context.executor.observed:
            return on_handles(func, args, kwargs)
        value = context.executor.call(func, context.value(handle))
        if not context.executor.predates_call(handle):
            context.write(handle, value)
        return handle

    def _higher_order(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        return higher_order.run(self.context, func, args, kwargs)


_WIDEST = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}  # of numbers


_DEVICE = torch.ops.prim.device.default
_AS_STRIDED = aten.as_strided.default
_DETACH = aten.detach.default
_EXPAND = aten.expand.default


def _with_own_version(view: torch.Tensor) -> torch.Tensor:
    return view.data.requires_grad_(view.requires_grad)


_WAITS = [torch.ops._c10d_functional.wait_tensor.default] if torch.distributed.is_available() else []
Handler = Callable[[FunctionalizeMode, Any, Sequence[Any], Kwargs], Any]
_handlers: dict[int, tuple[Any, Handler]] = {}  # by identity: the hash of an op is a method in Python
_FUNCTIONAL = FunctionalizeMode._functional
_NO_USES = frozenset({FunctionalizeMode._metadata, FunctionalizeMode._inplace_view})  # for which views are not replayed
_OF_VERSIONS: dict[str, Handler] = {  # by name: some exist only once Dynamo has been imported
    **dict.fromkeys(("aten::_version", "prims::_tensor_version"), FunctionalizeMode._version),
    "prims::_unsafe_set_version_counter": FunctionalizeMode._set_version,
}
_BY_OP: dict[Any, Handler] = {
    # Metadata, which a handle has, whatever its value.
    **dict.fromkeys(
        [
            _DEVICE,
            *(getattr(aten, name).default for name in ("size", "stride", "storage_offset", "numel", "dim")),
            *(getattr(aten, name).default for name in ("sym_size", "sym_stride", "sym_storage_offset", "sym_numel")),
            *(getattr(aten, name).default for name in ("is_contiguous", "is_strides_like_format", "is_same_size")),
            aten.is_non_overlapping_and_dense.default,
            aten.is_contiguous.memory_format,
            aten._has_same_storage_numel.default,
        ],
        FunctionalizeMode._metadata,
    ),
    aten.is_set_to.default: FunctionalizeMode._is_set_to,
    aten._to_copy.default: lambda mode, func, args, kwargs: mode._functional(func, args, data.waiting(kwargs)),
    **dict.fromkeys(data.SETTING, lambda mode, func, args, kwargs: data.set_data(mode.context, *args)),
    # Tensors made from others, whose memory they keep.
    **dict.fromkeys(
        [
            aten._sparse_coo_tensor_with_dims_and_tensors.default,
            aten._sparse_compressed_tensor_with_dims.default,
            aten.sparse_compressed_tensor.comp_plain_value_size,
            aten._sparse_coo_tensor_unsafe.default,
            aten._sparse_compressed_tensor_unsafe.default,
            aten._nested_view_from_buffer.default,
        ],
        FunctionalizeMode._of_parts,
    ),
    **{
        getattr(packet, name): FunctionalizeMode._quantized
        for packet in (aten.quantize_per_tensor, aten.quantize_per_channel, aten.quantize_per_tensor_dynamic)
        for name in packet.overloads()
        if "out" not in name
    },
    **dict.fromkeys(_WAITS, FunctionalizeMode._wait),
    aten.unsafe_split.Tensor: FunctionalizeMode._unsafe_split,
    aten.unsafe_split_with_sizes.default: FunctionalizeMode._unsafe_split,
    **dict.fromkeys(ADDRESSING, FunctionalizeMode._addressing),
    observers.OBSERVING: FunctionalizeMode._observing,
    **dict.fromkeys(random_ops.AS_FILLS, FunctionalizeMode._filling),
}


def _squeezing(handler: Handler) -> Handler:
    """The handler, once the trace knows which of the dimensions have size 1."""

    def squeeze(mode: FunctionalizeMode, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        sizes: Sequence[Any] = args[0].size()
        if len(args) > 1 and sizes:
            sizes = [sizes[dim] for dim in (args[1] if isinstance(args[1], (list, tuple)) else [args[1]])]
        decide_ones(sizes)
        return handler(mode, func, args, kwargs)

    return squeeze


def _part(mode: FunctionalizeMode, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """A slice or a selected position; a data-dependent offset of it, for which torch has a new symbol, is tracked."""
    part = mode._view(func, args, kwargs)
    offset = offset_of_part(*args, **kwargs)
    if offset is not None:
        mode.context.executor.track_offset(part, offset)
    return part


def _choose(func: Any) -> Handler:
    """The handler of an op, by its kind and its row."""
    if isinstance(func, HigherOrderOperator):
        return FunctionalizeMode._higher_order
    if tables.acts(func) or communicates(func):
        has_side_effect(func)  # so that FX does not drop its nodes as dead
    if func in _BY_OP:
        return _BY_OP[func]
    if func.name() in _OF_VERSIONS:
        return _OF_VERSIONS[func.name()]
    if func in (aten.slice.Tensor, aten.select.int):
        return _part
    row = collective(func)
    if row is not None and row.way in (Way.TWIN, Way.REFUSED, Way.DECOMPOSED):
        return FunctionalizeMode._collective
    handler = _by_row(func)
    if handler is _FUNCTIONAL and starts(func):
        handler = FunctionalizeMode._communicating
    if func.namespace not in _OF_TORCH:
        return _of_users(handler)
    return _squeezing(handler) if func.overloadpacket in traits.SQUEEZES else handler


_OF_TORCH = ("aten", "prims", "prim")  # the namespaces whose operators have fakes and formulas, or do not need them


def _of_users(handler: Handler) -> Handler:
    """A handler for an operator of the user's: its fake implementation or its autograd formula may be missing."""

    def run(mode: FunctionalizeMode, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
        handled = partial(handler, mode, func, args, kwargs)
        try:
            return custom_ops.with_gradients(mode.context, func, handled, args, kwargs)
        except Exception as error:
            refusal = custom_ops.refused_on_fakes(func, args, kwargs, error)
            if refusal is None:
                raise
            mode.refusal = mode.refusal or refusal
            raise refusal from error

    return run


def _by_row(func: Any) -> Handler:
    row: OpRow = tables.row(func)
    if row.composite:
        return FunctionalizeMode._composite
    if row.view is ViewKind.INPLACE_VIEW:
        return FunctionalizeMode._inplace_view
    if row.kind is not Kind.FUNCTIONAL:
        return FunctionalizeMode._mutation
    if row.view in (ViewKind.SINGLE, ViewKind.MULTI):
        unsupported = func in view_rules.UNSUPPORTED_VIEWS
        return FunctionalizeMode._unsupported_view if unsupported else FunctionalizeMode._view
    return FunctionalizeMode._replaced if row.functional else FunctionalizeMode._functional
