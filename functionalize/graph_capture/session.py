"""One run of a program on fake tensors, recorded as a graph. Captured programs and Dynamo's graphs run through here.

Invariant: the tracer and the fake tensors live as long as the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize._torch import FakeTensor, is_symbolic
from functionalize._torch.fakes import FakeFactory, FakeTensorMode, below_dispatch, is_data_dependent
from functionalize._torch.tracing import new_placeholder, recording, track
from functionalize.call_stack import Origin
from functionalize.errors import DataDependentError
from functionalize.graph_capture.checkpointing import CheckpointRegions
from functionalize.graph_capture.finalize import Finalized, GraphFinalizer
from functionalize.graph_capture.inputs import TracedInput
from functionalize.graph_capture.joint_graph import JointTracer
from functionalize.runtime.side_effects import SideEffect
from functionalize.tracing.recording_mode import Annotate, RecordingMode
from functionalize.transform.api import new_mode, run_call

Effects = Callable[[Callable[[Any], int]], Sequence[SideEffect]]  # of a numbering of tensors


class RecordingSession:
    """Records one program."""

    def __init__(self, fake_mode: FakeTensorMode, annotate: Annotate, *, remove_views: bool, symbolic: bool) -> None:
        """``annotate`` is told of each node; ``symbolic``: whether sizes may be symbols."""
        self.fake_mode, self.factory = fake_mode, FakeFactory(fake_mode)
        self.regions = CheckpointRegions()
        self._remove_views, self._symbolic = remove_views, symbolic

        def noted(node: Any) -> None:
            annotate(node)
            self.regions.note(node)

        self.recorder = RecordingMode(self.factory, noted, symbolic=symbolic)

    def add_inputs(self, inputs: Sequence[TracedInput]) -> None:
        """Placeholders for the inputs, and their fake tensors as what these stand for."""
        for entry, node in [(entry, new_placeholder(self.recorder.tracer.graph, entry.name)) for entry in inputs]:
            node.meta["val"] = entry.value if entry.fake is None else None
            self._track(entry, node)

    def _track(self, entry: TracedInput, node: Any) -> None:
        fake, tracer = entry.fake, self.recorder.tracer
        if fake is None and not isinstance(entry.value, torch.SymInt):
            return
        if isinstance(fake, FakeTensor) and not is_symbolic(fake):
            with below_dispatch():
                node.meta["val"] = self.factory.snapshot(fake)
            if fake not in tracer.tensor_tracker:
                track(tracer, fake, node)
        else:
            from functionalize._torch.symbols import track_input  # here: loads sympy

            with self.fake_mode:
                track_input(tracer, entry.value if fake is None else fake, node)

    def active(self) -> Any:
        """What is set around the run, but for the recording mode itself."""
        return recording(self.recorder.tracer, self.fake_mode, symbolic=self._symbolic)

    def record(
        self,
        run: Callable[[], Any],
        inputs: list[TracedInput],
        effects: Effects,
        here: Callable[[], Origin],
        follow: Callable[[Any], None] = lambda context: None,
    ) -> Finalized:
        """Run the program, and end its graph. ``here``: where it is; ``follow`` gets the program before it runs."""
        mode, tracer = new_mode(self._remove_views), self.recorder.tracer
        mode.context.takes_subclasses = False
        finalizer = GraphFinalizer(mode.context, tracer, inputs, here, self.factory.like)
        joint = JointTracer(mode, tracer, self.fake_mode, self.regions)
        joint.begin(inputs)
        follow(mode.context)
        found: list[Finalized] = []

        def end(context: Any, entries: Any, returned: Any) -> None:
            context.origin = None
            side_effects = effects(finalizer.number)
            found.append(finalizer.finalize(entries, returned, side_effects, joint))

        try:
            run_call(mode, run, (), {}, end, reached=[entry.fake for entry in inputs if entry.fake is not None])
        except Exception as error:
            if is_data_dependent(error):
                raise DataDependentError.of(error) from error
            raise
        return found[0]
