"""``make_fx``'s tracer, for a graph that is not traced by ``make_fx``.

Invariant: a tensor that is tracked here is found by torch's own tracing code. Limits: one graph a tracer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from functools import cache, cached_property
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher  # kernels in Python, which symbols go through
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    _MakefxTracer,
    _ProxyTensor,
    _set_make_fx_tracer,
    disable_autocast_cache,
    fetch_sym_proxy,
)

from functionalize._torch.fakes import FakeTensorMode
from functionalize._torch.sizes import SYMBOLS

__all__ = ["SYMBOLS", "ProxyTorchDispatchMode", "PythonKeyTracer"]


class TensorTracker(MutableMapping[torch.Tensor, _ProxyTensor]):
    """What tensors stand for, while they live; by identity, as torch's own dictionary for it, which asks more often."""

    def __init__(self) -> None:
        self._refs: dict[int, _Ref] = {}

    def get(self, tensor: torch.Tensor, default: Any = None) -> Any:
        found = self._refs.get(id(tensor))
        return default if found is None else found.entry

    def __getitem__(self, tensor: torch.Tensor) -> _ProxyTensor:
        return self._refs[id(tensor)].entry

    def __setitem__(self, tensor: torch.Tensor, entry: _ProxyTensor) -> None:
        ref = _Ref(tensor, self._forget)
        ref.key, ref.entry = id(tensor), entry
        self._refs[ref.key] = ref

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._refs[id(tensor)]

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._refs

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([tensor for ref in list(self._refs.values()) if (tensor := ref()) is not None])

    def __len__(self) -> int:
        return len(self._refs)

    def _forget(self, ref: _Ref) -> None:
        if self._refs.get(ref.key) is ref:
            del self._refs[ref.key]


class _Ref(weakref.ref[torch.Tensor]):
    __slots__ = ("entry", "key")

    key: int
    entry: _ProxyTensor


class _NodeEntry(_ProxyTensor):
    """An entry for a node, whose proxy is made when torch asks for it."""

    def __init__(self, node: Node, tracer: Any) -> None:
        self.node, self._tracer, self.constant = node, tracer, None

    @cached_property
    def proxy(self) -> Proxy:  # type: ignore[override]
        return Proxy(self.node, self._tracer)


class _LaterEntry(_NodeEntry):
    """An entry for a node that is made when somebody asks for it."""

    def __init__(self, make: Callable[[], Node], tracer: Any) -> None:
        self._make, self._tracer, self.constant = make, tracer, None

    @cached_property
    def node(self) -> Node:  # type: ignore[override]
        return self._make()


def new_tracer() -> PythonKeyTracer:
    """A tracer with an empty graph."""
    tracer = PythonKeyTracer()
    tracer.tensor_tracker = TensorTracker()
    tracer.root = torch.nn.Module()
    tracer.graph = Graph(tracer_cls=PythonKeyTracer)
    tracer.tensor_attrs = {}
    return tracer


@cache
def name_for(op: Any) -> str:
    """What ``make_fx`` names a node of an op."""
    return str(Graph()._target_to_str(op.overloadpacket.__name__))


def node_of_constant_free(tracked: Any, tensor: torch.Tensor) -> Node | None:
    """The node that a tensor stands for, if its data are not known to the tracer."""
    entry = tracked.get(tensor)
    return None if entry is None or entry.constant is not None else _node_of(entry)


def _node_of(entry: _ProxyTensor) -> Node:
    return entry.node if isinstance(entry, _NodeEntry) else entry.proxy.node


def new_node(graph: Graph, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Node:
    """A call of an op, given nodes: ``create_node`` would look through the arguments for symbols, which takes time."""
    node = graph.create_node("call_function", op, name=name)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


def new_placeholder(graph: Graph, name: str) -> Node:
    """A placeholder of just this name, which is a word, and nobody's yet.

    FX renames what is called like a function of Python's (`input` to `input_1`). It never gives such a name to another
    node, so this one can have it back.
    """
    node = graph.create_node("placeholder", name, name=name)
    if node.name != name:
        node.name = name
    return node


def track(tracer: Any, tensor: torch.Tensor, node: Node) -> None:
    """Let a tensor of plain sizes stand for a node."""
    tracer.tensor_tracker[tensor] = _NodeEntry(node, tracer)


def track_later(tracer: Any, tensor: torch.Tensor, make: Callable[[], Node]) -> None:
    """Let a tensor of plain sizes stand for a node that is made when it is used."""
    tracer.tensor_tracker[tensor] = _LaterEntry(make, tracer)


def tracked_node(tracer: Any, tensor: torch.Tensor) -> Node | None:
    """The node that a tensor stands for."""
    entry = tracer.tensor_tracker.get(tensor)
    return None if entry is None else _node_of(entry)


def symbol_node(tracer: Any, symbol: Any) -> Any:
    """The node that gives a symbol; a number for one that a guard has pinned."""
    found = fetch_sym_proxy(tracer)(symbol)
    return found.node if isinstance(found, Proxy) else found


# Ops whose kernels give a backward its workspace where grad mode is on, and else None.
_ASKS_GRAD_MODE = (torch.ops.aten.mkldnn_rnn_layer.default,)


def keeps_workspaces(graph: Graph) -> bool:
    """Whether a graph is to run with grad mode on, since a backward that it holds may need what its ops then keep."""
    return any(graph.find_nodes(op="call_function", target=op) for op in _ASKS_GRAD_MODE)


def symbol_node_of(tracer: Any, expression: Any) -> Node | None:
    """The node that gives a symbol, by the expression that it is; None where the tracer has not seen it."""
    entry = tracer.sympy_expr_tracker.get(expression)
    return None if entry is None else symbol_node(tracer, entry.value)


@contextlib.contextmanager
def recording(tracer: Any, fakes: FakeTensorMode, *, symbolic: bool) -> Iterator[None]:
    """What is set while ``make_fx`` traces, but for its modes; higher-order ops trace their bodies as inside it."""
    outer = _MakefxTracer({}, "symbolic" if symbolic else "fake", True, False, False, False, True)
    outer.fake_tensor_mode, outer.fx_tracer = fakes, tracer
    kernels = enable_python_dispatcher() if symbolic else contextlib.nullcontext()
    with fakes, kernels, _set_make_fx_tracer(outer), disable_autocast_cache():
        yield
