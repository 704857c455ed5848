"""What is done to deferred tensors, recorded as one pure graph, and which memory holds what.

A session is one call of the transform: a construction, or one operation on a deferred tensor afterwards. When it ends,
each fake storage that somebody still has gets a `Cell`: which node of the graph it holds, and how that lies there. The
next session begins with the cells. Tensors are known by their storages alone, so that what torch does behind the
dispatcher (``.data =``, swapping two tensors) needs no notice.

Invariant: between two sessions nothing refers to a tensor of the user's. Limits: strided tensors, one graph in a
process, one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import FakeTensor, current_proxy_mode, functionalized_outside, storage_key
from functionalize._torch.deferred import (
    DeferredFakeMode,
    become,
    exchange,
    forget_tensors,
    give_data,
    in_place_of,
    new_deferred_mode,
    placed,
    real_data,
    users_of,
)
from functionalize._torch.dispatch import below_mode, current_fake_mode, kernels_alone
from functionalize._torch.fakes import FakeFactory
from functionalize._torch.symbols.tracing import erase, recording, track, tracked_node
from functionalize.aliasing.bases import Base, View
from functionalize.aliasing.geometry import Layout
from functionalize.deferred.copies import copied
from functionalize.deferred.evaluation import Evaluation, needs
from functionalize.deferred.externals import External, Externals
from functionalize.deferred.function_mode import DeferredFunctionMode
from functionalize.deferred.random.draws import Draws
from functionalize.deferred.random.fills import fill_of
from functionalize.deferred.recorder import DeferredRecorder
from functionalize.deferred.refusals import explained
from functionalize.deferred.shards.sharding import ShardEvaluation
from functionalize.deferred.specs import specs_of
from functionalize.refusals.deferred import DEFERRED_INSIDE_TRACE, MATERIALIZED_TENSOR_WRITTEN, OUTSIDE_TENSOR_WRITTEN
from functionalize.tracing.metas import METAS
from functionalize.transform.api import new_mode, run_call, tracing_disabled
from functionalize.transform.context import FunctionalizationContext

_SWAPS = ((torch.utils, "swap_tensors"),)  # it refuses what is tracked
_STATES = ((torch, "get_rng_state"), (torch.random, "get_rng_state"))
_FEW = 1000  # nodes that nothing needs are dropped when there are twice as many as then, and these


@dataclass(eq=False)
class Cell:
    """What a fake storage holds: the value of a node, at a layout."""

    storage: torch.UntypedStorage
    layout: Layout
    device: torch.device
    node: Node
    guards: tuple[External, ...] = ()  # what the construction decided by
    made: torch.Tensor | None = None  # the real tensor at this layout, once there is one

    @property
    def dead(self) -> bool:
        """Whether no tensor has the storage any more."""
        return users_of(self.storage) <= 1


class Recording:
    """The one recording of a process."""

    def __init__(self) -> None:
        self.mode: DeferredFakeMode = new_deferred_mode(METAS)
        self.factory = FakeFactory(self.mode)
        self.lock = threading.RLock()
        self.cells: dict[int, Cell] = {}
        self.externals = Externals()
        self.draws = Draws()
        self.recorder = recorder = DeferredRecorder(self.factory, self._note, self._answer)
        self.tracer: Any = recorder.tracer
        self._new: list[Node] = []
        self._guards: tuple[External, ...] = ()  # of the session
        self._found: list[tuple[Base, Cell]] = []
        self._swept = 0  # nodes that were left
        self._context: FunctionalizationContext | None = None
        self.mode.intercept = self._intercepted
        self.mode.copied = lambda tensor, memo: self.run(copied, (tensor, memo), {})

    @property
    def active(self) -> bool:
        """Whether a session is."""
        return self._context is not None

    def run(self, program: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a program, and record what it does."""
        with self.lock:
            if self.active:
                return program(*args, **kwargs)
            if current_proxy_mode() is not None or functionalized_outside():
                raise DEFERRED_INSIDE_TRACE.error()
            with self.mode.silent():
                try:
                    with recording(self.tracer, self.mode, symbolic=False), self.recorder:
                        return self._session(program, args, kwargs)
                except RuntimeError as error:
                    known = explained(error)
                    if known is None:
                        raise
                    raise known from error
                finally:
                    self._context = None
                    with kernels_alone():
                        self._settle()

    def _session(self, program: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        mode = new_mode(False)
        self._context = context = mode.context
        context.unseen = Adoption(self, context)  # type: ignore[assignment]
        context.historian = WriteWatch(self)  # type: ignore[assignment]

        def kept(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._replaced(), DeferredFunctionMode(self.value, self.become):
                    return program(*args, **kwargs), None
            except BaseException as error:  # what a program did before it raised stays done
                return None, error

        def end(context: FunctionalizationContext, inputs: Any, outcome: Any) -> Any:
            with tracing_disabled():
                self._found = self._read(context)
            result, error = outcome
            if error is not None:
                raise error
            return result

        return run_call(mode, kept, args, kwargs, end, reached=[])

    def _intercepted(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on deferred tensors outside of a session."""
        return self.run(func, args, kwargs)

    # The end of a session

    def _read(self, context: FunctionalizationContext) -> list[tuple[Base, Cell]]:
        """What each storage holds that was viewed or written."""
        found = []
        for base in list(context.graph.bases.values()):
            if base.key > 0 and base.storage.device.type == "meta":
                value = context.read(base.top)
                node = tracked_node(self.tracer, value)
                assert node is not None
                found.append((base, Cell(base.storage, base.top.layout, self._device_of(node), node, self._guards)))
        return found

    def _settle(self) -> None:
        found, self._found = self._found, []
        for base, cell in found:
            old = self.cells.get(base.key)
            if old is None or old.node is not cell.node or not old.layout.matches(cell.layout):
                self.cells[base.key] = cell
            base.handles.clear()
            base.original = None
        for tensor, entry in forget_tensors(self.tracer, self.mode):
            key = storage_key(tensor)
            if key > 0 and key not in self.cells:
                node = entry.node if hasattr(entry, "node") else entry.proxy.node
                place = tensor.untyped_storage(), Layout.of(tensor), tensor.fake_device
                self.cells[key] = Cell(*place, node, self._guards)
        for node in self._new:
            node.meta = {name: node.meta[name] for name in ("draw", "external") if name in node.meta} | {
                "val": specs_of(node.meta.get("val"))
            }
            if fill_of(node) is not None and node.args and isinstance(node.args[0], Node):
                node.update_arg(0, None)  # what it fills it does not read
        self._new.clear()
        self._guards = ()
        self.draws.settle(self.evaluation(torch.device("cpu")).compute)
        if len(self.tracer.graph.nodes) > 2 * self._swept + _FEW:
            self.sweep()

    def _device_of(self, node: Node) -> torch.device:
        value = node.meta["val"]
        return value.fake_device if isinstance(value, FakeTensor) else value.device

    def sweep(self) -> None:
        """Drop the cells that nobody has, and the nodes that no cell needs."""
        for key in [key for key, cell in self.cells.items() if cell.dead]:
            del self.cells[key]
        graph = self.tracer.graph
        needed = needs([cell.node for cell in self.cells.values()])
        for node in reversed(list(graph.nodes)):
            if node not in needed:
                erase(graph, node)
        self.externals.keep(graph, self.tracer)
        self._swept = len(graph.nodes)

    # While a session runs

    def _note(self, node: Node) -> None:
        """A node was added to the graph."""
        self._new.append(node)
        if node.op == "get_attr":
            self.externals.note(node, self.tracer.root)
        elif current_fake_mode() in (None, self.mode):  # of another mode nothing is drawn
            self.draws.note(node, self.tracer.root)

    def _answer(self, nodes: list[Node]) -> Any:
        """What nodes come to, asked while a program runs."""
        found: list[Any] = []
        self.evaluation().run(nodes, lambda node, value: found.append(value))
        read = [one.meta["external"] for one in needs(nodes) if "external" in one.meta]
        self._guards = tuple(dict.fromkeys((*self._guards, *read)))
        return found

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor comes to, while a session runs."""
        assert self._context is not None
        with tracing_disabled(), below_mode(self._context.enter()):
            node = tracked_node(self.tracer, self._context.value(tensor))
        assert node is not None
        (value,) = self._answer([node])
        return value.clone() if node.op == "get_attr" else value  # type: ignore[no-any-return]

    def become(self, lazy: Any, source: torch.Tensor) -> None:
        """Make a tensor object that holds nothing yet a deferred one, with the memory of another."""
        assert self._context is not None
        with tracing_disabled(), below_mode(self._context.enter()):
            layout = self._context.graph.ensure(source).layout
        where = layout.size, layout.stride, layout.offset
        become(lazy, placed(self.factory, source.untyped_storage(), where, layout.dtype, source.device))

    def evaluation(self, device: torch.device | None = None) -> Evaluation:
        """A run over a part of the graph; ``device``: where to compute what was recorded for one that is not there."""
        return Evaluation(self.tracer.root, self.draws, self.externals, device)

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """While functions of torch that no mode is told of are this recording's own."""
        with in_place_of(_SWAPS, self._swap), in_place_of(_STATES, self._state):
            yield

    def _state(self, before: Callable[..., torch.Tensor]) -> torch.Tensor:
        """What ``torch.get_rng_state`` gives: as in eager, and no state that stands for it."""
        with kernels_alone():
            return self.draws.state_of(torch.default_generator, self.evaluation(torch.device("cpu")).compute)

    def _swap(self, before: Callable[..., None], one: torch.Tensor, two: torch.Tensor) -> None:
        """What ``torch.utils.swap_tensors`` does, while a session tracks the tensors."""
        if not (isinstance(one, FakeTensor) and isinstance(two, FakeTensor)):
            return before(one, two)
        context = self._context
        assert context is not None
        with tracing_disabled(), below_mode(context.enter()):
            for tensor in (one, two):
                context.unseen.adopt([tensor])  # type: ignore[union-attr]
                context.unshare(tensor)
                context.graph.ensure(tensor).base.handles.pop(id(tensor), None)
                self.tracer.tensor_tracker.pop(tensor, None)
            exchange(one, two)
            for tensor in (one, two):
                context.graph.relocate(tensor)

    def shard_evaluation(self) -> ShardEvaluation:
        """A run that computes a part of a node."""
        there = torch.device("cpu")
        return ShardEvaluation(lambda: self.evaluation(there), self.draws, self.evaluation(there).compute)

    def cell_of(self, tensor: torch.Tensor) -> Cell | None:
        """What the storage of a tensor holds; None of a tensor that is not deferred."""
        if type(tensor) is not FakeTensor or tensor.fake_mode is not self.mode:
            return None
        if not self.active and real_data(tensor) is not None:
            self.run(torch.Tensor.detach, (tensor,), {})
        return self.cells.get(storage_key(tensor))


class Adoption:
    """Tells a session what a tensor of another one holds, when it meets it. In the place of `UnseenAliases`."""

    def __init__(self, recording: Recording, context: FunctionalizationContext) -> None:
        self._recording, self._context = recording, context
        self._known = set[int]()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let tensors stand for what the cells of their storages hold."""
        recording, graph = self._recording, self._context.graph
        for tensor in tensors:
            if type(tensor) is not FakeTensor:
                continue
            key = storage_key(tensor)
            if key in self._known or key in graph.bases:
                continue
            cell = recording.cells.get(key)
            if cell is None:
                self._take_data(tensor)
                continue
            self._known.add(key)
            layout = cell.layout
            where = (layout.size, layout.stride, layout.offset)
            substitute = placed(recording.factory, cell.storage, where, layout.dtype, cell.device)
            track(recording.tracer, substitute, cell.node)
            graph.track(substitute, graph.create_base(substitute, substitute))

    def _take_data(self, tensor: FakeTensor) -> None:
        """Let a tensor that was given the memory of a real one stand for a copy of that."""
        real = real_data(tensor)
        if real is None or tensor.fake_mode is not self._recording.mode:
            return
        with below_mode(self._context.enter()):
            copy = real.clone()
        give_data(tensor, copy)  # type: ignore[arg-type]
        self._known.add(storage_key(copy))
        self._context.graph.track(copy, self._context.graph.create_base(copy, copy))

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing is to be noted of results."""

    def let_go(self, tensor: torch.Tensor) -> None:
        """Nothing is held."""

    def forget(self) -> None:
        """The session ends."""
        self._known.clear()


class WriteWatch:
    """Refuses writes that no graph of a construction holds. In the place of a `Historian`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def viewed(self, view: View, op: Any) -> None:
        """Views are nobody's concern."""

    def writes_of(self, base: Base) -> Sequence[Any]:
        """Nothing is noted."""
        return ()

    def wrote(self, view: View, op: Any) -> None:
        """Refuse a write to a tensor from outside, or to memory that has become real."""
        storage = view.base.storage
        if isinstance(storage, torch.UntypedStorage) and storage.device.type != "meta":
            raise OUTSIDE_TENSOR_WRITTEN.error(op=op, size=tuple(view.layout.size))
        cell = self._recording.cells.get(view.base.key)
        if cell is not None and cell.made is not None:
            raise MATERIALIZED_TENSOR_WRITTEN.error(op=op, size=tuple(view.layout.size))
