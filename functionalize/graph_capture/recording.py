"""Records one program, for captures and for Dynamo's graphs.

Invariant: the tracer and the fake tensors live as long as the session. Limits: one program each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import FakeTensor, is_symbolic
from functionalize._torch.autograd import checkpoint_frames_noted, functions_noted
from functionalize._torch.fakes import FakeFactory, FakeTensorMode, below_dispatch, data_dependent
from functionalize._torch.symbols.tracing import new_placeholder, recording, track
from functionalize.call_stack import Origin, decisive_line
from functionalize.graph_capture.backward.joint_graph import JointTracer
from functionalize.graph_capture.finish.finalize import GraphFinalizer
from functionalize.graph_capture.finish.objects import ObjectGraph
from functionalize.graph_capture.inputs.inputs import TracedInput, WrapperInput
from functionalize.graph_capture.inputs.watched_state import WatchedState
from functionalize.graph_capture.parallel_modules import ParallelModules
from functionalize.graph_capture.refusals.arrays import refuse_shared
from functionalize.graph_capture.refusals.storages import refuse_resized
from functionalize.graph_capture.refusals.torch_errors import explained, replayed
from functionalize.graph_capture.trace.checkpointing import CheckpointRegions
from functionalize.graph_capture.trace.data_oracle import Decider
from functionalize.graph_capture.trace.default_dtypes import DefaultDtypes
from functionalize.refusals.values import BRANCH
from functionalize.runtime.calls.specialization import Recorded
from functionalize.runtime.guards.modes import changed_modes, modes_now, set_modes
from functionalize.runtime.outputs.side_effects import LeftInObjects
from functionalize.tracing.recording_mode import Annotate, RecordingMode
from functionalize.transform.api import new_mode, run_call
from functionalize.transform.gradients.ended_gradients import EndedGradients

Effects = Callable[[ObjectGraph, list[Any]], LeftInObjects]  # describes the objects that a program leaves and returns


class RecordingSession:
    """Records one program."""

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        annotate: Annotate,
        draws: Callable[[Node], Node | None] = lambda node: None,
        *,
        remove_views: bool,
        symbolic: bool,
        order: int = 1,
        parallel: ParallelModules | None = None,
    ) -> None:
        """``annotate`` is notified of each node; ``symbolic``: sizes may be symbols; ``order``: of the joint graph;
        ``parallel``: the modules of its state that communicate in a backward.

        ``draws`` is notified of each node that may draw random numbers, and returns the node that has drawn the same
        numbers, if any.
        """
        self.fake_mode, self.factory = fake_mode, FakeFactory(fake_mode)
        self.regions = regions = CheckpointRegions()
        self._dtypes = dtypes = DefaultDtypes()
        self._remove_views, self._symbolic, self.order = remove_views, symbolic, order
        self.decider: Decider | None = None
        self.states: Sequence[WatchedState] = ()  # objects that the program reaches, and may change
        self.parallel = parallel or ParallelModules(())
        self.modes_left = dict[str, Any]()  # modes of torch that the program left changed

        def observe(node: Node) -> Node | None:  # not the session: fake tensors hold the recorder, and it holds them
            dtypes.note(node)
            regions.note(node)
            first = draws(node)
            if first is not None:
                regions.note_drawn_again(node, first)
            return first

        self.recorder = RecordingMode(self.factory, annotate, observe, regions.frames, symbolic=symbolic)
        regions.find_attributes_on(self.recorder.tracer.root)

    def add_inputs(self, inputs: Sequence[TracedInput]) -> None:
        """Add placeholders for the inputs, and track their fake tensors as these."""
        tracer = self.recorder.tracer
        fakes = [e.fake for e in inputs if isinstance(e.fake, FakeTensor) and not is_symbolic(e.fake)]
        with below_dispatch():
            snapshots = {id(fake): self.factory.snapshot(fake) for fake in fakes}
        for entry in inputs:
            fake, node = entry.fake, new_placeholder(tracer.graph, entry.name)
            node.meta["val"] = entry.value if fake is None else snapshots.get(id(fake))
            if fake is not None and id(fake) in snapshots:
                if fake not in tracer.tensor_tracker:
                    track(tracer, fake, node)
            elif type(entry) is not WrapperInput and (fake is not None or isinstance(entry.value, torch.SymInt)):
                from functionalize._torch.symbols.symbols import track_input  # here: loads sympy

                with self.fake_mode:
                    track_input(tracer, entry.value if fake is None else fake, node)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Set up the run, except for the recording mode itself."""
        from functionalize._torch.symbols.shape_env import deciding  # here: loads sympy

        traced = recording(self.recorder.tracer, self.fake_mode, symbolic=self._symbolic)
        try:
            with deciding(self.fake_mode.shape_env, self.decider), traced, checkpoint_frames_noted(self.regions.begin):
                yield
        finally:
            self.decider = None  # it refers to the session
            self.regions.release()

    def _ran(self, run: Callable[[], Any], endings: EndedGradients) -> list[Any]:
        """The program's result, in a list; modes of torch that it leaves changed are restored."""
        before = modes_now()
        try:
            with functions_noted(endings.note_function):
                return [run()]  # to which nothing else refers from now on
        finally:
            endings.close()
            self.modes_left = changed_modes(before)
            set_modes({name: before[name] for name in self.modes_left})

    def record(
        self,
        run: Callable[[], Any],
        inputs: list[TracedInput],
        effects: Effects,
        current_origin: Callable[[], Origin],
        follow: Callable[[Any], None] = lambda context: None,
    ) -> Recorded:
        """Run the program, end its graph, and restore modes of torch that it left changed.

        ``current_origin``: where the program is; ``follow`` gets the program before it runs.
        """
        mode, tracer = new_mode(self._remove_views), self.recorder.tracer
        root = tracer.root
        mode.context.takes_subclasses = False
        finalizer = GraphFinalizer(mode.context, tracer, inputs, current_origin, self.factory.like, self.decider)
        states = [state.walk for state in self.states]
        joint = JointTracer(mode, tracer, self.fake_mode, self.regions, self.order, states, self.parallel)
        joint.begin(inputs)
        follow(mode.context)

        def end(context: Any, entries: Any, returned: Any) -> Recorded:
            context.origin = None
            left = effects(finalizer.objects, returned)
            self._dtypes.make_explicit(root)
            ended = finalizer.finalize(entries, returned, left, joint)
            refuse_shared(context, finalizer.handles, returned)
            refuse_resized(context.graph, entries, finalizer.handles, freed=self.parallel.buffers)
            return ended

        try:
            plain = [entry for entry in inputs if entry.fake is not None and type(entry) is not WrapperInput]
            passed = [entry for entry in plain if entry.given]
            fakes = [entry.fake for entry in sorted(passed, key=lambda entry: entry.optional)]
            recorded: Recorded = run_call(
                mode, partial(self._ran, run, mode.context.endings), (), {}, end, reached=fakes
            )
        except data_dependent() as error:
            reason = " ".join(str(error).split("\n", maxsplit=1)[0].split())
            raise BRANCH.error(decisive_line(error), reason=reason) from error
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            refusal = explained(error) or replayed(error, mode.context.notes.reshapes.any)
            if refusal is None:
                raise
            raise refusal from error
        return recorded
