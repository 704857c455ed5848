"""``make_fx``'s tracing mode with a fast path: ops whose results are cached become nodes without a second dispatch.

In: ops on fake tensors. Out: nodes of one tracer's graph, and the results. Guarantees: an op's node is the one that
``make_fx`` would have added. Limits: one thread, one graph.

Torch's own slow path records higher-order ops, symbolic sizes, constants, and ops never seen before. Both fill one
tracer, so that our executor of values and torch's higher-order ops see one graph.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import (
    HigherOrderOperator,
    is_symbolic,
    last_node,
    on_handles,
    pytree,
    record_view,
    settled,
)
from functionalize._torch.fakes import FakeFactory, FakeTensor, below_dispatch, data_dependent, fake_device
from functionalize._torch.subclasses.wrappers import is_ragged
from functionalize._torch.symbols.traced_symbols import compared, endless, is_endless, is_foregone
from functionalize._torch.symbols.tracing import (
    ProxyTorchDispatchMode,
    constant_node,
    keep_data,
    name_for,
    new_node,
    new_tracer,
    op_node,
    track,
    tracked_node,
)
from functionalize._torch.tensors import is_tiny_tensor
from functionalize.ops import tables, traits
from functionalize.ops.tables import ViewKind
from functionalize.tracing import meta_cache
from functionalize.tracing.meta_cache import CachedCall, CacheEntry, Read
from functionalize.tracing.sparse_elements import is_coalesced

Annotate = Callable[[Node], None]  # is called with each new node
Observe = Callable[[Node], Node | None]  # the same; returns the node that its results stand for, if that is another
_IS_COALESCED = torch.ops.aten.is_coalesced.default
_LIFT = torch.ops.aten.lift_fresh_copy.default
ORIGIN = ("nn_module_stack", "stack_trace")  # the entries of a node's meta that say where it comes from


class RecordingMode(ProxyTorchDispatchMode):
    """Records dispatched ops on the fake tensors of one mode into ``tracer.graph``."""

    supports_higher_order_operators = True
    tracer: Any  # torch's stubs allow other tracers, too

    def __init__(
        self,
        factory: FakeFactory,
        annotate: Annotate,
        observe: Observe = lambda node: None,
        observed: Sized = (),
        *,
        symbolic: bool,
    ) -> None:
        """``observe``: is called with nodes that may draw random numbers or run under another default dtype.

        While ``observed`` is not empty, it is called with all nodes.
        """
        super().__init__(new_tracer(), "symbolic" if symbolic else "fake")
        self.factory = factory
        self._annotate, self._observe, self._observed = annotate, observe, observed
        self._default_dtype = torch.get_default_dtype()
        self._torchs_mode = ProxyTorchDispatchMode(self.tracer, self.tracing_mode)
        self._last_items: dict[Node, Node] = {}  # of each node with several results, the item made last

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = self._fast_path(func, args, kwargs or {})
        return self._dispatch(func, args, kwargs or {}) if out is meta_cache.MISS else out

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(map(is_ragged, args)):
            return func(*args, **kwargs)
        if is_endless(func, args):
            return endless(self.tracer, func, args)
        args = tuple(map(settled, args))
        out = super().__sym_dispatch__(func, types, args, kwargs)
        return compared(self.tracer, func, args) if is_foregone(out, args) else out

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results of dispatching an op to this mode."""
        out = self._fast_path(func, args, kwargs)
        return func(*args, **kwargs) if out is meta_cache.MISS else out

    def _fast_path(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record an op and return its results; ``MISS`` if it has to take torch's path."""
        if func is _LIFT and is_tiny_tensor(args[0]):
            return self._lift(args[0])
        call = meta_cache.find(func, args, kwargs, self.factory, self.tracer)
        if call is None:
            return meta_cache.MISS
        entry: CacheEntry | None = call.entry
        out = meta_cache.MISS
        if entry is out:
            out = self._computed(func, args, kwargs)
            entry = meta_cache.insert(call.key, func, args, out)
        if entry is None:
            return meta_cache.MISS
        with below_dispatch():
            if out is meta_cache.MISS:
                out = entry.make(self.factory, args)
            if out is not meta_cache.MISS:
                self._record(func, call, out, entry)
        return out

    def _lift(self, tensor: torch.Tensor) -> FakeTensor:
        """Record a literal (`torch.tensor(0.5)`, `torch.tensor([])`): an attribute of the graph, and its copy.

        As torch does, which takes ten times as long: the data stay known, in case that the program asks for them.
        """
        tracer, of = self.tracer, (tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
        with below_dispatch():
            data, out, shown = tensor.clone(), self.factory.fresh(*of), self.factory.fresh(*of)
        attribute = constant_node(tracer, tensor)
        attribute.meta["val"] = shown
        self._added(attribute, observed=True)
        with below_dispatch():
            self._result(self._node(_LIFT, (attribute,), {}, name_for(_LIFT), observed=True), out)
        keep_data(tracer, self.factory.mode, out, data)
        return out

    def run_on_values(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], read: Read) -> Any:
        """The results of an op on the values of handles; ``MISS`` if they are not cached, or strides differ."""
        call = meta_cache.find(func, args, kwargs, self.factory, self.tracer, read)
        if call is None or call.entry is meta_cache.MISS or call.entry.is_view:
            return meta_cache.MISS
        with below_dispatch():
            out = call.entry.make(self.factory, ())
            self._record(func, call, out, call.entry)
        return out

    def propagate(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, CachedCall | None]:
        """An op's results, hidden from tracers, and the call in the cache: None if sizes may be symbols."""
        call = meta_cache.find(func, args, kwargs, self.factory)
        if call is None:
            out = self._viewed(func, args, kwargs) if func in traits.OF_PAIRS else meta_cache.MISS
            return on_handles(func, args, kwargs) if out is meta_cache.MISS else out, None
        if call.entry is meta_cache.MISS:
            out = self._computed(func, args, kwargs)
            entry = meta_cache.insert(call.key, func, args, out)
            return out, None if entry is None else replace(call, entry=entry)
        with below_dispatch():
            out = call.entry.make(self.factory, args)
        return (on_handles(func, args, kwargs), None) if out is meta_cache.MISS else (out, call)

    def _computed(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results of an op that the cache does not have, hidden from tracers."""
        out = self._viewed(func, args, kwargs)
        args, kwargs = meta_cache.with_example_numbers((args, kwargs))
        return on_handles(func, args, kwargs) if out is meta_cache.MISS else out

    def _viewed(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The view that a view op's own kernel makes of a fake tensor with plain sizes; ``MISS`` if it cannot."""
        source = args[0]
        if tables.row(func).view is not ViewKind.SINGLE or type(source) is not FakeTensor:
            return meta_cache.MISS
        if is_symbolic(source) or source.constant is not None or source.fake_mode is not self.factory.mode:
            return meta_cache.MISS
        try:
            with below_dispatch():
                out = func(*args, **kwargs)
                if (out.dtype == source.dtype or func in traits.OF_PAIRS) and not (out.is_conj() or out.is_neg()):
                    return self.factory.around(out, source.fake_device)
        except data_dependent():
            pass
        return meta_cache.MISS

    def record_view(self, op: Any, value: FakeTensor, args: tuple[Any, ...], result: FakeTensor) -> bool:
        """Add the node ``op(value, *args)`` for a result that exists. False if sizes or data prevent that."""
        if is_symbolic(result) or is_symbolic(value) or not self.add_view(op, value, args, result):
            return record_view(self, op, value, args, result)
        return True

    def add_view(self, op: Any, value: FakeTensor, args: tuple[Any, ...], result: FakeTensor) -> bool:
        """The same for plain sizes. False if the value is a constant."""
        source = self.tracer.tensor_tracker.node(value)
        if source is None:
            return False
        with below_dispatch():
            self._result(self._node(op, (source, *args), {}, name_for(op), observed=False), result)
        return True

    def op_node(self, op: Any, args: Sequence[Any], kwargs: Any) -> Node:
        """Add the node of an op that returns a number, without running the op."""
        node = op_node(self.tracer, op, args, kwargs)
        self._added(node, observed=True)
        return node

    def _record(self, func: Any, call: CachedCall, out: Any, entry: CacheEntry) -> None:
        """Add the node of an op whose results exist, given its arguments in nodes."""
        node = self._node(func, tuple(call.args), call.kwargs, entry.name, observed=entry.random)
        if entry.container is None:
            self._result(node, out)
            return
        shown = [None if leaf is None else self.factory.snapshot(leaf) for leaf in out]
        node.meta["val"] = entry.container(shown)
        for index, leaf in enumerate(out):
            if leaf is not None:
                track(self.tracer, leaf, partial(self.item_of, node, index, shown[index]))

    def item_of(self, node: Node, index: int, shown: FakeTensor | None) -> Node:
        """The node of one result of several, made on first use: most programs use one."""
        graph, last = self.tracer.graph, self._last_items.get(node)
        before = node if last is None or _result_index(last, node) > index else last
        while _result_index(before.next, node) < index:
            before = before.next
        with graph.inserting_after(before):
            item = new_node(graph, operator.getitem, (node, index), {}, "getitem")
        self._last_items[node] = item
        item.meta.update({name: node.meta[name] for name in ORIGIN if name in node.meta}, val=shown)
        return item

    def _node(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, *, observed: bool) -> Node:
        node = new_node(self.tracer.graph, func, args, kwargs, name)
        node.meta["original_aten"] = func
        return self._added(node, observed=observed) or node

    def _added(self, node: Node, *, observed: bool) -> Node | None:
        """Annotate a new node. Returns another node if the results stand for that one.

        ``observed``: whether nodes of this op are observed.
        """
        self._annotate(node)
        if observed or self._observed or torch.get_default_dtype() is not self._default_dtype:
            return self._observe(node)
        return None

    def _result(self, node: Node, out: FakeTensor | None) -> None:
        if out is None:
            node.meta["val"] = None
            return
        self.tracer.tensor_tracker.add(out, node, self.tracer)
        node.meta["val"] = self.factory.around(out, fake_device(out))

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Dispatch an op as ``make_fx`` does."""
        if func is _IS_COALESCED:
            return is_coalesced(args[0])
        last = last_node(self)
        if isinstance(func, HigherOrderOperator):
            with self._torchs_mode:
                out = func(*args, **kwargs)
        else:
            out = super().__torch_dispatch__(func, (), tuple(args), kwargs)
        for node in reversed(self.tracer.graph.nodes):
            if node is last:
                break
            if node.target is not operator.getitem or node.meta.keys().isdisjoint(ORIGIN):
                # Not for results of earlier ops, which are among the new nodes.
                self._stand_for(node, self._added(node, observed=True), out)
        return out

    def _stand_for(self, node: Node, other: Node | None, out: Any) -> None:
        """Make the results of a node stand for another node."""
        if other is None:
            return
        node.replace_all_uses_with(other)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and tracked_node(self.tracer, leaf) is node:
                track(self.tracer, leaf, other)


def _result_index(item: Node, node: Node) -> int:
    """The index of the result of ``node`` that ``item`` takes; any other node sorts last."""
    args: Any = item.args
    return args[1] if item.target is operator.getitem and args[0] is node else sys.maxsize
