"""What a program does to sources of random numbers without operators, and to arrays that are not tensors.

Operators that draw are nodes of the graph. A draw of Python's or NumPy's, or a write to an array, would happen only
once, in the capture.

Nothing is drawn while a program runs on fake tensors, so a state that is read and set again would leave no trace.
Functions of `torch.random` on the default generator are therefore intercepted, in the thread that captures
(:mod:`.default_generator`). A generator of the program's own advances at each node that draws from it, as in eager:
in another state, it was set by the program.

A generator that the program makes is made by each run of the graph, in the state in which the program first drew from
it.

Invariant: after a capture the sources are as they were; the default generator is not touched. Limits: the generators
and arrays that the program's state and arguments hold, `random`, and NumPy where it is loaded. Draws of other threads
from the last two count as the program's. `torch.default_generator.set_state` is not noticed.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from functionalize._torch.dispatch import HigherOrderOperator, identity_of
from functionalize.graph_capture.inputs.inputs import TracedInput
from functionalize.graph_capture.refusals.changed_lines import LineWanted
from functionalize.graph_capture.trace.checkpointing import CheckpointRegions
from functionalize.graph_capture.trace.random.default_generator import (
    DefaultGenerator,
    bytes_of,
    is_default,
)
from functionalize.graph_capture.trace.random.device_generators import DeviceGenerators, WatchedGenerator
from functionalize.graph_capture.trace.random.unread_draws import UnreadDraws
from functionalize.python_state.buffers import ARRAYS, GENERATORS, access_to
from functionalize.python_state.walk import TENSOR_TYPES
from functionalize.refusals.python_objects import ARRAY_WRITTEN
from functionalize.refusals.random_numbers import (
    DRAWN_OUTSIDE_TORCH,
    GENERATOR_OUTSIDE_STATE,
    GENERATOR_READ,
    GENERATOR_SET,
)
from functionalize.runtime.random_state import (
    default_generators_of_devices,
    fresh_generator,
    generator_of,
    is_random,
    source_of,
)
from functionalize.transform.gradients.autograd_notes import Generators


class TorchGenerators:
    """Generators of torch's, watched while a program runs that may only draw from them by operators."""

    _running: TorchGenerators | None = None  # of the current run

    def __init__(self, values: Iterable[Any], inputs: Iterable[TracedInput]) -> None:
        """``values``: what a program reaches; ``inputs``: those of its graph, which are not held."""
        by_identity = {identity_of(value): value for value in values if isinstance(value, torch.Generator)}
        for generator in (torch.default_generator, *default_generators_of_devices()):
            by_identity.pop(identity_of(generator), None)
        self._watched = {identity: WatchedGenerator.of(generator) for identity, generator in by_identity.items()}
        self._own, self._states = set(by_identity), set[bytes]()  # states that the program may have read
        self.given: Generators = {}  # generators that the program passed to draw from
        others = [entry for entry in inputs if type(entry.value) not in TENSOR_TYPES]
        self._passed = {entry.name: entry.value for entry in others if isinstance(entry.value, torch.Generator)}
        self._root: torch.nn.Module  # of the run, as the next
        self._default: DefaultGenerator
        self._devices = DeviceGenerators()

    @contextlib.contextmanager
    def watched(self, root: torch.nn.Module, regions: CheckpointRegions) -> Iterator[None]:
        """Watch the generators while the program runs.

        ``root``: the module that holds the graph's attributes; ``regions``: torch sets states where it repeats one.

        Raises:
            UnsupportedProgramError: the program has set a generator to another state.
        """
        self._root, self._default, TorchGenerators._running = root, DefaultGenerator(regions), self
        changed = False
        self._states.add(bytes_of(torch.default_generator.get_state()))
        for generator in self._watched.values():
            self._go_on(generator)  # else a seed that the program sets again would not be seen
        try:
            with self._devices.watched(), self._default.intercepted():
                self._states.update(map(bytes_of, self._devices.states()))
                yield
            changed = any(generator.is_changed for generator in self._watched.values())
        finally:
            for generator in self._watched.values():
                generator.generator.set_state(generator.before)
            TorchGenerators._running = None
        if changed:
            raise LineWanted(TorchGenerators.any_is_set, GENERATOR_SET)

    @staticmethod
    def any_is_set() -> bool:
        """Whether the running program has set a generator to another state."""
        running = TorchGenerators._running
        return running is not None and any(generator.is_changed for generator in running._watched.values())

    def _go_on(self, watched: WatchedGenerator) -> None:
        watched.go_on()
        self._states.add(bytes_of(watched.expected))

    def before(self, generator: torch.Generator) -> torch.Tensor:
        """The state of a generator before the program."""
        watched = self._watched.get(identity_of(generator))
        if watched is not None:
            return watched.before
        of_device = self._devices.before(generator)
        return generator.get_state() if of_device is None else of_device

    def note(self, node: Node) -> Node | None:
        """A node was added to the graph just now. Returns the node that drew the same, in a region that runs again.

        Raises:
            UnsupportedProgramError: it draws from a generator that the program has set to another state.
        """
        if not (isinstance(node.target, HigherOrderOperator) or is_random(node)):
            return None
        source = source_of(node, self._root)
        if source is None or (isinstance(source, Node) and source.target is fresh_generator):
            return None
        generator = generator_of(str(source.target) if isinstance(source, Node) else source, self._passed)
        watched = self._watched.get(identity_of(generator))
        if watched is None and self._devices.has(generator):
            first = self._devices.note_draw(generator, node, self._default.runs_again)
            self._states.update(map(bytes_of, self._devices.states()))
            return first
        if watched is None and is_default(generator):
            return self._default.note_draw(node)
        if watched is None:
            watched = self._watched[identity_of(generator)] = WatchedGenerator.of(generator)  # probably made inside
            if bytes_of(watched.before) in self._states:
                raise GENERATOR_READ.error()
        if watched.is_changed:
            raise LineWanted(TorchGenerators.any_is_set, GENERATOR_SET)
        self._go_on(watched)
        return None

    def make_in_graph(self, graph: Graph) -> None:
        """Have each run of the graph make the generators that the program, which is over, has made.

        Raises:
            UnsupportedProgramError: it draws from a generator that it did not make, and does not reach by a name.
        """
        made = dict[int, Node]()
        for node in graph.find_nodes(op="get_attr"):
            generator = getattr(self._root, str(node.target))
            key = identity_of(generator) if isinstance(generator, torch.Generator) else None
            if key is None or key not in self._watched or key in self._own:
                continue
            if key not in made:
                if self._is_kept(key):
                    raise GENERATOR_OUTSIDE_STATE.error()
                with graph.inserting_after(node):
                    made[key] = graph.call_function(fresh_generator, (node,))
            node.replace_all_uses_with(made[key], delete_user_cb=lambda user: user.target is not fresh_generator)

    def _is_kept(self, key: int) -> bool:
        """Whether something may still draw from a generator that the program has passed."""
        references = self.given.get(key)
        if references and any(reference() is not None for reference in references):
            gc.collect()
        return not references or any(reference() is not None for reference in references)

    def check_given(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise where one of some tensors, which the program got without operators, is the state of a generator.

        Raises:
            UnsupportedProgramError: it is.
        """
        for tensor in tensors:
            if type(tensor) is torch.Tensor and tensor.dtype == torch.uint8 and bytes_of(tensor) in self._states:
                raise GENERATOR_READ.error()


@dataclass(frozen=True, eq=False)
class _Source:
    """A source of random numbers besides torch's, or an array."""

    name: str
    is_array: bool
    read: Callable[[], Any]
    write: Callable[[Any], object]

    def refused(self, before: Any) -> LineWanted:
        """Why a program cannot change it; ``before``: its state."""

        def is_changed() -> bool:
            return not _same(self.read(), before)

        row = ARRAY_WRITTEN if self.is_array else DRAWN_OUTSIDE_TORCH
        return LineWanted(is_changed, row, source=self.name)


class RandomSources:
    """The sources, with their states when this is made."""

    def __init__(self, values: Iterable[Any]) -> None:
        """``values``: what a program reaches, generators included."""
        sources = list[_Source]()
        for value in {id(value): value for value in values}.values():
            for table in (GENERATORS, ARRAYS):
                access = access_to(value, table)
                if access is not None:
                    read, write = partial(access.read, value), partial(access.write, value)
                    sources.append(_Source(access.name, table is ARRAYS, read, write))
        sources.append(_Source("Python's `random`", False, random.getstate, random.setstate))
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            sources.append(_Source("numpy.random", False, numpy.get_state, numpy.set_state))
        self._before = [(source, source.read()) for source in sources]

    def restore(self, unread: UnreadDraws | None = None) -> list[LineWanted]:
        """Restore what has changed, and return why the program cannot change it. ``unread``: draws that it may do."""
        changed = self._changed()
        states = [source.read() for source, _ in changed]
        self._put_back(changed)
        if changed and unread and unread.calls and unread.decide_nothing():
            unread.again()
            refused = [pair for pair, after in zip(changed, states, strict=True) if not _same(pair[0].read(), after)]
            self._put_back(changed)
            changed = refused
        return [source.refused(before) for source, before in changed]

    def _changed(self) -> list[tuple[_Source, Any]]:
        return [(source, before) for source, before in self._before if not _same(source.read(), before)]

    @staticmethod
    def _put_back(changed: Sequence[tuple[_Source, Any]]) -> None:
        for source, before in changed:
            source.write(before)


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, tuple) and len(now) == 5:  # NumPy's: the second is an array
        return bool(now[2:] == before[2:] and (now[1] == before[1]).all())
    return bool(now == before)
