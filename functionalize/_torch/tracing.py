"""``make_fx``'s tracer, for a graph that is not traced by ``make_fx``.

Invariant: a tensor that is tracked here is found by torch's own tracing code. Limits: one graph a tracer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
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

__all__ = ["ProxyTorchDispatchMode", "PythonKeyTracer"]


def new_tracer() -> PythonKeyTracer:
    """A tracer with an empty graph."""
    tracer = PythonKeyTracer()
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
    return None if entry is None or entry.constant is not None else entry.proxy.node


def track(tracer: Any, tensor: torch.Tensor, node: Node) -> None:
    """Let a tensor of plain sizes stand for a node."""
    tracer.tensor_tracker[tensor] = _ProxyTensor(Proxy(node, tracer), None)


def tracked_node(tracer: Any, tensor: torch.Tensor) -> Node | None:
    """The node that a tensor stands for."""
    entry = tracer.tensor_tracker.get(tensor)
    return None if entry is None else entry.proxy.node


SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def symbol_node(tracer: Any, symbol: Any) -> Any:
    """The node that gives a symbol; a number for one that a guard has pinned."""
    found = fetch_sym_proxy(tracer)(symbol)
    return found.node if isinstance(found, Proxy) else found


@contextlib.contextmanager
def recording(tracer: Any, fakes: FakeTensorMode, *, symbolic: bool) -> Iterator[None]:
    """What is set while ``make_fx`` traces, but for its modes; higher-order ops trace their bodies as inside it."""
    outer = _MakefxTracer({}, "symbolic" if symbolic else "fake", True, False, False, False, True)
    outer.fake_tensor_mode, outer.fx_tracer = fakes, tracer
    kernels = enable_python_dispatcher() if symbolic else contextlib.nullcontext()
    with fakes, kernels, _set_make_fx_tracer(outer), disable_autocast_cache():
        yield
