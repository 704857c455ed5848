"""Records operations on deferred tensors as one pure graph, and which node's value each storage holds.

A session is one call of the transform: a construction, or one operation on a deferred tensor afterwards. When it ends,
each fake storage that is still in use gets a `Cell`: the node of the graph whose value it holds, and the value's layout
there. The next session begins with the cells. Tensors are identified by their storages alone, so that operations which
bypass the dispatcher (``.data =``, swapping two tensors) need no record.

Invariant: between two sessions the recording refers to no tensor of the user's. Limits: strided tensors, one graph in
a process, one thread at a time.
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

_SWAPS = ((torch.utils, "swap_tensors"),)  # torch's refuses tensors that are tracked
_STATES = ((torch, "get_rng_state"), (torch.random, "get_rng_state"))
_FEW = 1000  # a graph is swept when it has twice the nodes that the last sweep left, and these


@dataclass(eq=False)
class Cell:
    """What a fake storage holds: the value of a node, at a layout."""

    storage: torch.UntypedStorage
    layout: Layout
    device: torch.device
    node: Node
    guards: tuple[External, ...] = ()  # what the values depend on that the program has read
    made: torch.Tensor | None = None  # the real tensor at this layout, once it is materialized

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
        self._cells_read: list[tuple[Base, Cell]] = []
        self._swept = 0  # how many nodes the last sweep left
        self._context: FunctionalizationContext | None = None
        self.mode.intercept = self.run  # an operation on deferred tensors outside a session
        self.mode.copied = lambda tensor, memo: self.run(copied, (tensor, memo), {})

    @property
    def active(self) -> bool:
        """Whether a session runs."""
        return self._context is not None

    def run(self, program: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a program, and record its operations."""
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
                    explanation = explained(error)
                    if explanation is None:
                        raise
                    raise explanation from error
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
            except BaseException as error:  # what the program did before it raised stays recorded
                return None, error

        def end(context: FunctionalizationContext, inputs: Any, outcome: Any) -> Any:
            with tracing_disabled():
                self._cells_read = self._read(context)
            result, error = outcome
            if error is not None:
                raise error
            return result

        return run_call(mode, kept, args, kwargs, end, reached=[])

    # The end of a session

    def _read(self, context: FunctionalizationContext) -> list[tuple[Base, Cell]]:
        """A cell for each storage that was viewed or written."""
        cells = []
        for base in list(context.graph.bases.values()):
            if base.key > 0 and base.storage.device.type == "meta":
                value = context.read(base.top)
                node = tracked_node(self.tracer, value)
                assert node is not None
                cells.append((base, Cell(base.storage, base.top.layout, self._device_of(node), node, self._guards)))
        return cells

    def _settle(self) -> None:
        cells, self._cells_read = self._cells_read, []
        for base, cell in cells:
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
                node.update_arg(0, None)  # it does not read the tensor that it fills
        self._new.clear()
        self._guards = ()
        self.draws.settle(self.evaluation(torch.device("cpu")).compute)
        if len(self.tracer.graph.nodes) > 2 * self._swept + _FEW:
            self.sweep()

    def _device_of(self, node: Node) -> torch.device:
        value = node.meta["val"]
        return value.fake_device if isinstance(value, FakeTensor) else value.device

    def sweep(self) -> None:
        """Drop the cells of storages that no tensor has, and the nodes that no cell needs."""
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
        """Note a new node of the graph."""
        self._new.append(node)
        if node.op == "get_attr":
            self.externals.note(node, self.tracer.root)
        elif current_fake_mode() in (None, self.mode):  # nothing is drawn for tensors of another mode
            self.draws.note(node, self.tracer.root)

    def _answer(self, nodes: list[Node]) -> Any:
        """The values of nodes, computed while a program runs."""
        values = self.evaluation().values(nodes)
        read = [node.meta["external"] for node in needs(nodes) if "external" in node.meta]
        self._guards = tuple(dict.fromkeys((*self._guards, *read)))
        return values

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a tensor, computed while a session runs."""
        assert self._context is not None
        with tracing_disabled(), below_mode(self._context.enter()):
            node = tracked_node(self.tracer, self._context.value(tensor))
        assert node is not None
        (value,) = self._answer([node])
        return value.clone() if node.op == "get_attr" else value  # type: ignore[no-any-return]

    def become(self, lazy: Any, source: torch.Tensor) -> None:
        """Make an uninitialized tensor object a deferred one, with the memory of another."""
        assert self._context is not None
        with tracing_disabled(), below_mode(self._context.enter()):
            layout = self._context.graph.ensure(source).layout
        where = layout.size, layout.stride, layout.offset
        become(lazy, placed(self.factory, source.untyped_storage(), where, layout.dtype, source.device))

    def evaluation(self, device: torch.device | None = None) -> Evaluation:
        """A run over a part of the graph; ``device`` replaces a device that this machine does not have."""
        return Evaluation(self.tracer.root, self.draws, self.externals, device)

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """A context in which this recording replaces functions of torch that no mode sees."""
        with in_place_of(_SWAPS, self._swap), in_place_of(_STATES, self._state):
            yield

    def _state(self, before: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The result of ``torch.get_rng_state``: eager's state, not the mark in its place."""
        with kernels_alone():
            return self.draws.state_of(torch.default_generator, self.evaluation(torch.device("cpu")).compute)

    def _swap(self, before: Callable[..., None], first: torch.Tensor, second: torch.Tensor) -> None:
        """``torch.utils.swap_tensors``, for tensors that a session tracks."""
        if not (isinstance(first, FakeTensor) and isinstance(second, FakeTensor)):
            return before(first, second)
        context = self._context
        assert context is not None
        with tracing_disabled(), below_mode(context.enter()):
            for tensor in (first, second):
                context.unseen.adopt([tensor])  # type: ignore[union-attr]
                context.unshare(tensor)
                context.graph.ensure(tensor).base.handles.pop(id(tensor), None)
                self.tracer.tensor_tracker.pop(tensor, None)
            exchange(first, second)
            for tensor in (first, second):
                context.graph.relocate(tensor)

    def shard_evaluation(self) -> ShardEvaluation:
        """A run that computes a part of a node."""
        cpu = torch.device("cpu")
        return ShardEvaluation(lambda: self.evaluation(cpu), self.draws, self.evaluation(cpu).compute)

    def cell_of(self, tensor: torch.Tensor) -> Cell | None:
        """The cell of a tensor's storage; None if the tensor is not deferred."""
        if type(tensor) is not FakeTensor or tensor.fake_mode is not self.mode:
            return None
        if not self.active and real_data(tensor) is not None:
            self.run(torch.Tensor.detach, (tensor,), {})
        return self.cells.get(storage_key(tensor))


class Adoption:
    """Gives a session the value of an earlier session's tensor when it first sees it. Replaces `UnseenAliases`."""

    def __init__(self, recording: Recording, context: FunctionalizationContext) -> None:
        self._recording, self._context = recording, context
        self._adopted = set[int]()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Track tensors as what the cells of their storages hold."""
        recording, graph = self._recording, self._context.graph
        for tensor in tensors:
            if type(tensor) is not FakeTensor:
                continue
            key = storage_key(tensor)
            if key in self._adopted or key in graph.bases:
                continue
            cell = recording.cells.get(key)
            if cell is None:
                self._take_data(tensor)
                continue
            self._adopted.add(key)
            layout = cell.layout
            where = (layout.size, layout.stride, layout.offset)
            substitute = placed(recording.factory, cell.storage, where, layout.dtype, cell.device)
            track(recording.tracer, substitute, cell.node)
            graph.track(substitute, graph.create_base(substitute, substitute))

    def _take_data(self, tensor: FakeTensor) -> None:
        """Give a tensor whose memory is a real tensor's (``.data =``) a recorded copy of that."""
        real = real_data(tensor)
        if real is None or tensor.fake_mode is not self._recording.mode:
            return
        with below_mode(self._context.enter()):
            copy = real.clone()
        give_data(tensor, copy)  # type: ignore[arg-type]
        self._adopted.add(storage_key(copy))
        self._context.graph.track(copy, self._context.graph.create_base(copy, copy))

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: results need no note."""

    def let_go(self, tensor: torch.Tensor) -> None:
        """Do nothing: no tensor is held."""

    def forget(self) -> None:
        """End the session."""
        self._adopted.clear()


class WriteWatch:
    """Refuses writes to real tensors, which a recording cannot hold. Replaces a `Historian`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def viewed(self, view: View, op: Any) -> None:
        """Do nothing: views are allowed."""

    def writes_of(self, base: Base) -> Sequence[Any]:
        """Nothing: writes are not noted."""
        return ()

    def wrote(self, view: View, op: Any) -> None:
        """Refuse a write to a tensor from outside, or to memory that is already materialized."""
        storage = view.base.storage
        if isinstance(storage, torch.UntypedStorage) and storage.device.type != "meta":
            raise OUTSIDE_TENSOR_WRITTEN.error(op=op, size=tuple(view.layout.size))
        cell = self._recording.cells.get(view.base.key)
        if cell is not None and cell.made is not None:
            raise MATERIALIZED_TENSOR_WRITTEN.error(op=op, size=tuple(view.layout.size))
