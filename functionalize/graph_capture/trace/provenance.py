"""Where each node of a graph comes from: the user's lines, and the modules whose ``forward`` was running.

Observers are notified of each node, to show the progress of a long capture.

Invariant: a node's meta has what ``make_fx`` and ``torch.export`` put there: ``stack_trace``, ``nn_module_stack``.
Limits: nodes of a backward pass carry the line that called for it. An observer is notified of captures that begin while
it observes, in all threads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn.modules import module as hooks

from functionalize.call_stack import Origin, Scopes
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.gradients.ended_gradients import NO_GRAD

_observers: list[Callable[[Node], None]] = []


@contextlib.contextmanager
def observing(observer: Callable[[Node], None]) -> Iterator[None]:
    """Notify a function of each node, once its module is recorded."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class Provenance:
    """Records, node by node, where the program is; texts are written when all nodes are recorded."""

    def __init__(self, modules: Mapping[int, str], until: CodeType) -> None:
        self._scopes = Scopes(until)
        self._context: FunctionalizationContext | None = None
        self._paths, self._observers = modules, tuple(_observers)
        self._running: list[dict[str, tuple[str, str]]] = [{}]

    def follow(self, context: FunctionalizationContext) -> None:
        """From now on all nodes of one op of a program have one origin."""
        self._context = context

    def observe(self, observer: Callable[[Node], None]) -> None:
        """Notify a function of each node, once its module and its line are recorded."""
        self._observers = (observer, *self._observers)

    def here(self) -> Origin:
        """Where the program is."""
        context = self._context
        if context is None:
            return self.now()
        if context.origin is None:
            context.origin = self.now()
        return context.origin  # type: ignore[no-any-return]

    def now(self) -> Origin:
        """Where the program is now, which may be after its last op."""
        origin = self._scopes.here()
        origin.modules = self._running[-1]
        return origin

    def note(self, node: Node) -> None:
        """A node was added to the graph just now."""
        origin: Any = None if self._context is None else self._context.origin
        origin = node.meta["stack_trace"] = origin or self.here()  # as text in the end
        node.meta["nn_module_stack"] = origin.modules
        if not torch.is_grad_enabled():
            node.meta[NO_GRAD] = True
        for observer in self._observers:
            observer(node)

    @staticmethod
    def write(graph: Graph) -> None:
        """Give each node its stack trace."""
        for node in graph.nodes:
            origin = node.meta.get("stack_trace")
            if isinstance(origin, Origin):
                node.meta["stack_trace"] = origin.text

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Follow which modules run in this thread, but not in bodies of higher-order ops while Dynamo traces them."""
        thread = threading.get_ident()

        def enter(module: torch.nn.Module, args: Any) -> None:
            if not torch.compiler.is_dynamo_compiling() and threading.get_ident() == thread:
                self._running.append(self._with(module))
                self._scopes.enter(sys._getframe(1))  # the frame of the module's call

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_dynamo_compiling() and threading.get_ident() == thread:
                self._running.pop()
                self._scopes.leave()

        with contextlib.ExitStack() as handles:
            handles.callback(hooks.register_module_forward_pre_hook(enter).remove)
            handles.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)
            yield

    def _with(self, module: torch.nn.Module) -> dict[str, tuple[str, str]]:
        """The modules that run, with one more inside."""
        path = self._paths.get(id(module))
        if path is None:
            return self._running[-1]
        cls = type(module)
        entry = (path, f"{cls.__module__}.{cls.__qualname__}")
        return {**self._running[-1], "L__self__" + path.replace(".", "_"): entry}
