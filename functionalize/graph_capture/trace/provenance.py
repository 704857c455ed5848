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

from functionalize.call_stack import Modules, Origin, Scopes
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
        self.now = self._scopes.here  # where the program is now, which may be after its last op
        self._context: FunctionalizationContext | None = None
        self._paths, self._observers = modules, tuple(_observers)

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
            context.origin = self.now(sys._getframe(2))  # two frames of this package less
        return context.origin  # type: ignore[no-any-return]

    def note(self, node: Node) -> None:
        """A node was added to the graph just now."""
        origin: Any = None if self._context is None else self._context.origin
        meta, origin = node.meta, origin or self.here()
        meta["stack_trace"] = origin  # as text in the end
        meta["nn_module_stack"] = origin.modules
        if not torch.is_grad_enabled():
            meta[NO_GRAD] = True
        for observer in self._observers:
            observer(node)

    @staticmethod
    def write(graph: Graph) -> None:
        """Give each node its stack trace."""
        for node in graph.nodes:
            origin = node.meta.get("stack_trace")
            if isinstance(origin, Origin):
                node.meta["stack_trace"] = origin.lines.text

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Follow which modules run in this thread, but not in bodies of higher-order ops while Dynamo traces them."""
        thread = threading.get_ident()

        def enter(module: torch.nn.Module, args: Any) -> None:
            if not torch.compiler.is_dynamo_compiling() and threading.get_ident() == thread:
                self._scopes.enter(sys._getframe(1), self._with(module))  # the frame of the module's call

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_dynamo_compiling() and threading.get_ident() == thread:
                self._scopes.leave()

        with contextlib.ExitStack() as handles:
            handles.callback(hooks.register_module_forward_pre_hook(enter).remove)
            handles.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)
            yield

    def _with(self, module: torch.nn.Module) -> Modules:
        """The modules that run, with one more inside."""
        path, running = self._paths.get(id(module)), self._scopes.modules
        if path is None:
            return running
        cls = type(module)
        entry = (path, f"{cls.__module__}.{cls.__qualname__}")
        return {**running, "L__self__" + path.replace(".", "_"): entry}
