"""The graph that ``make_fx`` traces, or would trace: which node a tensor or a symbol stands for, nodes that we add.

Invariant: torch's own tracing code finds each tensor that is tracked here, and would have added the nodes that are
added here. Limits: one graph a tracer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import weakref
from cmath import infj, nanj
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch

# Kernels in Python, which symbols go through.
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.proxy_tensor import (  # proxies are attached to tensors by no public call
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    _MakefxTracer,
    _ProxyTensor,
    _set_make_fx_tracer,
    fetch_sym_proxy,
    set_original_aten_op,
    track_tensor_tree,
)
from torch.fx.graph import (
    _illegal_names,  # those of Python
    _register_custom_builtin,  # makes names known to the code of graphs; there is no public way
)
from torch.fx.immutable_collections import immutable_dict
from torch.utils import _pytree as pytree

from functionalize._torch.dispatch import on_handles
from functionalize._torch.fakes import FakeTensor, FakeTensorMode, without_constants
from functionalize._torch.symbols.sizes import is_symbol
from functionalize._torch.symbols.traced_symbols import symbol_node
from functionalize._torch.tensors import SYMBOLS, is_symbolic, storage_key
from functionalize.ops import traits

_NO_KWARGS: dict[str, Any] = immutable_dict()

# A graph's code writes complex constants as Python prints them, `(nan+nanj)`: FX knows only `nan` and `inf`.
_register_custom_builtin("nanj", "from cmath import nanj", nanj)
_register_custom_builtin("infj", "from cmath import infj", infj)


class TensorTracker(MutableMapping[torch.Tensor, _ProxyTensor]):
    """The entries of tensors, by identity, while they live: as torch's own dictionary, with fewer calls.

    A tensor's death calls nothing: its entry counts as gone from then on, and is dropped when all are listed.
    """

    def __init__(self) -> None:
        self._refs: dict[int, _Ref] = {}

    def _ref(self, tensor: torch.Tensor) -> _Ref | None:
        """The reference to a tensor; None for a tensor without an entry, at the place of a dead one perhaps."""
        ref = self._refs.get(id(tensor))
        return ref if ref is not None and ref() is tensor else None

    def get(self, tensor: torch.Tensor, default: Any = None) -> Any:
        ref = self._ref(tensor)
        return default if ref is None else ref.entry or ref.make_entry()

    def __getitem__(self, tensor: torch.Tensor) -> _ProxyTensor:
        ref = self._ref(tensor)
        if ref is None:
            raise KeyError(tensor)
        return ref.entry or ref.make_entry()

    def __setitem__(self, tensor: torch.Tensor, entry: _ProxyTensor) -> None:
        self._refs[id(tensor)] = ref = _Ref(tensor)
        ref.entry, ref.node = entry, None

    def add(self, tensor: torch.Tensor, node: Node, tracer: Any) -> None:
        """Let a tensor stand for a node; its entry is made when torch asks for it."""
        self._refs[id(tensor)] = ref = _Ref(tensor)
        ref.entry, ref.node, ref.tracer = None, node, tracer

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._refs[id(tensor)]

    def __contains__(self, tensor: object) -> bool:
        ref = self._refs.get(id(tensor))
        return ref is not None and ref() is tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        # An entry may hold what made it: dropping the dead may free more tensors.
        self._refs = {identity: ref for identity, ref in self._refs.items() if ref() is not None}
        return iter([tensor for ref in self._refs.values() if (tensor := ref()) is not None])

    def __len__(self) -> int:
        return sum(ref() is not None for ref in self._refs.values())

    def clear(self) -> None:
        self._refs.clear()

    def node(self, tensor: torch.Tensor) -> Node | None:
        """The node that a tensor stands for; None if it has no node, and for constants."""
        ref = self._refs.get(id(tensor))
        if ref is None or ref() is not tensor:
            return None
        if ref.entry is None:
            return ref.node
        return None if ref.entry.constant is not None else _node_of(ref.entry)


class _Ref(weakref.ref[torch.Tensor]):
    __slots__ = ("entry", "node", "tracer")

    entry: _ProxyTensor | None  # None until it is needed, of a tensor that stands for a node
    node: Node | None
    tracer: Any

    def make_entry(self) -> _ProxyTensor:
        """The entry of a tensor that stands for a node."""
        assert self.node is not None
        self.entry = entry = _NodeEntry(self.node, self.tracer)
        return entry


class _NodeEntry(_ProxyTensor):
    """An entry for a node, which may be made on first use; its proxy is made when torch asks for it."""

    def __init__(self, node: Node | Callable[[], Node], tracer: Any) -> None:
        self._tracer, self.constant = tracer, None
        if isinstance(node, Node):
            self.__dict__["node"] = node  # the cached property's value
        else:
            self._make = node

    @cached_property
    def node(self) -> Node:
        return self._make()

    @property
    def parents(self) -> list[Node]:
        """The nodes that the node will be made from, while it is not made."""
        return [value for value in getattr(self._make, "args", ()) if isinstance(value, Node)]

    @cached_property
    def proxy(self) -> Proxy:  # type: ignore[override]
        return Proxy(self.node, self._tracer)


def new_tracer() -> PythonKeyTracer:
    """A tracer with an empty graph."""
    tracer = PythonKeyTracer()
    tracer.tensor_tracker = TensorTracker()
    tracer.root = torch.nn.Module()
    tracer.graph = graph = Graph(tracer_cls=PythonKeyTracer)
    graph._insert = graph._root._prepend  # type: ignore[assignment]  # FX takes the method that calls it
    tracer.tensor_attrs = {}
    return tracer


_names: dict[int, tuple[Any, str]] = {}  # by identity: the hash of an op is a method in Python


def name_for(op: Any) -> str:
    """The name that ``make_fx`` gives a node of an op."""
    entry = _names.get(id(op))
    if entry is None:
        entry = _names[id(op)] = op, str(Graph()._target_to_str(op.overloadpacket.__name__))
    return entry[1]


def new_node(
    graph: Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, opcode: str = "call_function"
) -> Node:
    """Add a call of an op on nodes, in a graph that no module owns.

    Like ``create_node``, which takes twice as long: it searches the arguments for symbols, and calls hooks.
    """
    names: Any = graph._graph_namespace
    number = names._base_count.get(name)
    if number is None or name not in names._used_names:
        unique = names.create_name(name, None)
    else:  # as `create_name`, which searches the name for a number each time
        unique = f"{name}_{number + 1}"
        while unique in names._used_names:
            number += 1
            unique = f"{name}_{number + 1}"
        names._used_names.add(unique)
        names._base_count[name] = number + 1
    return _insert(graph, Node(graph, unique, opcode, target, args, kwargs or _NO_KWARGS))


def _insert(graph: Graph, node: Node) -> Node:
    """Add a node with a name that no other node has."""
    opcode, target = node.op, node.target
    graph._graph_namespace._obj_to_name[node] = node.name
    graph._insert(node)
    graph._find_nodes_lookup_table.table[opcode, target if opcode == "call_function" else None][node] = None
    graph._len += 1
    return node


def op_node(tracer: Any, op: Any, args: Any, kwargs: Any) -> Node:
    """Add a call of an op on tensors that the tracer knows, or that become attributes of the graph."""

    def node_of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tracked_node(tracer, value) or tracer.create_arg(value)
        return symbol_node(tracer, value) if isinstance(value, SYMBOLS) else value

    args, kwargs = pytree.tree_map(node_of, (tuple(args), dict(kwargs)))
    return new_node(tracer.graph, op, args, kwargs, name_for(op))


def new_placeholder(graph: Graph, name: str) -> Node:
    """Add a placeholder of exactly this name, which is an identifier that is not in use yet.

    FX renames a node with the name of a Python function (`input` to `input_1`). It never gives such a name to another
    node, so this node can have it back.
    """
    names: Any = graph._graph_namespace
    if not (name[-1].isdigit() or name in names._used_names or name in _illegal_names):
        names._used_names.add(name)  # as `create_name`, which searches the name for a number
        names._base_count.setdefault(name, 0)
        return _insert(graph, Node(graph, name, "placeholder", name, (), _NO_KWARGS))
    node = new_node(graph, name, (), {}, name, "placeholder")
    if node.name != name:
        node.name = name
    return node


def track(tracer: Any, tensor: torch.Tensor, node: Node | Callable[[], Node]) -> None:
    """Let a tensor of plain sizes stand for a node, or for a node that is made on first use."""
    if isinstance(node, Node):
        tracer.tensor_tracker.add(tensor, node, tracer)
    else:
        tracer.tensor_tracker[tensor] = _NodeEntry(node, tracer)


def constant_node(tracer: Any, tensor: torch.Tensor) -> Node:
    """Add the node of an attribute of the graph that holds a tensor with data."""
    name = tracer.tensor_attrs.get(tensor)
    if name is None:
        name = tracer.tensor_attrs[tensor] = tracer.get_fresh_qualname("_tensor_constant")
        setattr(tracer.root, name, tensor)
    return new_node(tracer.graph, name, (), {}, name, "get_attr")


def keep_data(tracer: Any, mode: FakeTensorMode, fake: FakeTensor, data: torch.Tensor) -> None:
    """Let torch know the data of a fake tensor that stands for a node."""
    fake.constant = tracer.tensor_tracker[fake].constant = data
    mode.fake_tensor_converter.add_constant_storage_mapping(fake)


def tracked_node(tracer: Any, tensor: torch.Tensor) -> Node | None:
    """The node that a tensor stands for, also as a constant; None if it has no node."""
    tracker = tracer.tensor_tracker
    node = tracker.node(tensor) if type(tracker) is TensorTracker else None
    entry = tracker.get(tensor) if node is None else None
    return node if entry is None else _node_of(entry)


def _node_of(entry: Any) -> Node:
    node: Node = entry.node if type(entry) is _NodeEntry else entry.proxy.node
    return node


def data_hidden(tracer: Any, tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Let neither a tracer, if there is one, nor a fake mode know the data of tensors that are constants."""
    entries = [] if tracer is None else [tracer.tensor_tracker.get(tensor) for tensor in tensors]
    fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
    return without_constants([*fakes, *(entry for entry in entries if entry is not None)])


def nodes_in_use(tracer: Any) -> set[Node]:
    """The nodes that tracked tensors stand for, or will be made from: later nodes may take them."""
    nodes = set[Node]()
    for entry in tracer.tensor_tracker.values():
        own = isinstance(entry, _NodeEntry)
        unmade = own and "node" not in entry.__dict__
        nodes.update(entry.parents if unmade else [entry.node if own else entry.proxy.node])
    return nodes


def keeps_workspaces(graph: Graph) -> bool:
    """Whether a graph must run in grad mode: a backward in it may need workspaces that its ops keep only then."""
    return any(graph.find_nodes(op="call_function", target=op) for op in traits.WORKSPACE_IN_GRAD_MODE)


# Selective checkpointing keeps every result, and checks that it stays unwritten, if it takes itself to be compiled.
_checkpoints_as_in_eager: Any = getattr(torch.compiler, "_non_strict_tracing_context", contextlib.nullcontext)


def _in_autocast_region() -> bool:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


@contextlib.contextmanager
def _own_autocast_casts() -> Iterator[None]:
    """Keep casts of weights inside of a region as eager does, where a weight has one cast with one gradient.

    Inside of a region of the caller's, which has its own casts in the same cache, casts of fake tensors stay there
    until the region ends: torch empties only the whole cache, and finds a cast by its tensor object.
    """
    inside = _in_autocast_region()
    if not inside:
        torch.clear_autocast_cache()
    try:
        yield
    finally:
        if not inside:
            torch.clear_autocast_cache()


@contextlib.contextmanager
def recording(tracer: Any, fakes: FakeTensorMode, *, symbolic: bool) -> Iterator[None]:
    """Set what ``make_fx`` sets while it traces, except its modes: higher-order ops trace their bodies as inside it."""
    outer = _MakefxTracer({}, "symbolic" if symbolic else "fake", True, False, False, False, True)
    outer.fake_tensor_mode, outer.fx_tracer = fakes, tracer
    kernels = enable_python_dispatcher() if symbolic else contextlib.nullcontext()
    with fakes, kernels, _set_make_fx_tracer(outer), _own_autocast_casts(), _checkpoints_as_in_eager():
        yield


def is_erased(node: Node) -> bool:
    """Whether a node is no longer in its graph."""
    return bool(node._erased)


def erase(graph: Graph, node: Node) -> None:
    """Erase a node, and the graph's entry for its name, which would keep it alive."""
    graph.erase_node(node)
    names: Any = graph._graph_namespace
    names._used_names.discard(names._obj_to_name.pop(node, None))


def point_proxy(mode: ProxyTorchDispatchMode, handle: torch.Tensor, value: torch.Tensor) -> None:
    """Let ``handle`` stand for the graph node that ``value`` stands for."""
    tracker = mode.tracer.tensor_tracker
    proxy = tracker.get(value)
    if proxy is not None:
        tracker[handle] = proxy


def tensors_with_storage(mode: ProxyTorchDispatchMode, key: int) -> Iterator[torch.Tensor]:
    """The tensors of a storage that the tracer knows as nodes."""
    return (tensor for tensor in mode.tracer.tensor_tracker if storage_key(tensor) == key)


def last_node(mode: ProxyTorchDispatchMode) -> Any:
    """The newest node of the graph that is traced; None while it is empty."""
    return next(iter(reversed(mode.tracer.graph.nodes)), None)


def same_node(mode: ProxyTorchDispatchMode, first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors stand for the same node."""
    node = tracked_node(mode.tracer, first)
    return node is not None and node is tracked_node(mode.tracer, second)


def record_view(
    mode: ProxyTorchDispatchMode, op: Any, value: torch.Tensor, args: tuple[Any, ...], result: torch.Tensor
) -> bool:
    """Add the node ``op(value, *args)``, whose result exists, to the graph. Returns False if the tracer cannot."""
    source = mode.tracer.tensor_tracker.get(value)
    if source is None or source.constant is not None:
        return False
    if op is torch.ops.aten.as_strided.default:  # its result depends on the value's offset in its storage
        return False
    with set_original_aten_op(op):
        if any(map(is_symbol, args)) or any(type(arg) is list and any(map(is_symbol, arg)) for arg in args):
            args = pytree.tree_map_only(torch.SymInt, fetch_sym_proxy(mode.tracer), args)
        proxy = mode.tracer.create_proxy("call_function", op, (source.proxy, *args), {}, name=name_for(op))
        track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)
    return True


def record_effect(mode: ProxyTorchDispatchMode, op: Any, handle: torch.Tensor, args: tuple[Any, ...]) -> None:
    """Add the node ``op(handle, *args)`` for its effect, which the handle shows already, without running the op."""
    tracked = mode.tracer.tensor_tracker
    args = pytree.tree_map_only(torch.Tensor, lambda tensor: tracked[tensor].proxy, (handle, *args))
    args = pytree.tree_map_only(torch.SymInt, fetch_sym_proxy(mode.tracer), args)
    mode.tracer.create_proxy("call_function", op, args, {}, name=name_for(op))


@contextlib.contextmanager
def answers_of_export() -> Iterator[None]:
    """Make torch answer that it compiles and exports."""
    from torch._export.utils import _compiling_state_context  # here: loads the exporter

    with _compiling_state_context():
        yield


@contextlib.contextmanager
def logs_of_torch_off() -> Iterator[None]:
    """Make torch log only what the variable `TORCH_LOGS` asks for."""
    logs: Any = torch._logging
    logs.set_logs(all=logging.CRITICAL)
    try:
        yield
    finally:
        logs.set_logs()
