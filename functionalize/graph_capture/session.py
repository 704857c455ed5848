"""One run of a program on fake tensors in the places of its inputs, and its record.

Invariant: the objects that the program reaches are, after the run, as they were before it; the tracer and the fake
tensors live as long as the session. Limits: one thread captures a module at a time.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from functionalize._torch import ASKED_PROPERTIES, GRADIENT, HOOKS, KIND, FakeTensor, has_gradient_hooks
from functionalize._torch.autograd import outside_of_the_caller
from functionalize._torch.distributed.communication import note_groups
from functionalize._torch.fakes import (
    CaptureFakeMode,
    below_dispatch,
    fake_mode_of,
    new_fake_mode,
)
from functionalize._torch.subclasses.sharding import forget_plans
from functionalize.aliasing.geometry import Layout
from functionalize.graph_capture.backward.gradient_hooks import check_hooks, install_hooks
from functionalize.graph_capture.backward.gradients_of_state import with_visible_layouts
from functionalize.graph_capture.backward.hooks_left import HooksLeft
from functionalize.graph_capture.finish.objects import ObjectGraph
from functionalize.graph_capture.finish.side_effects import SideEffectRecorder, refuse_changes_inside
from functionalize.graph_capture.inputs.asked_sizes import AskedSizes
from functionalize.graph_capture.inputs.dynamic_shapes import dims_of, size_guards
from functionalize.graph_capture.inputs.hyperparameters import Numbers
from functionalize.graph_capture.inputs.inputs import MissingGradient, ProgramInputs, WrapperInput, is_leaf
from functionalize.graph_capture.inputs.tensor_attributes import TensorAttributes
from functionalize.graph_capture.inputs.view_inputs import view_of, with_roots
from functionalize.graph_capture.inputs.watched_state import WatchedState
from functionalize.graph_capture.inputs.wrappers import refuse_changed, refuse_symbolic, wrap_fakes
from functionalize.graph_capture.parallel_modules import ParallelModules
from functionalize.graph_capture.recording import RecordingSession
from functionalize.graph_capture.refusals.changed_code import code_put_back
from functionalize.graph_capture.refusals.iterators import iterators_kept
from functionalize.graph_capture.refusals.leaks import Traced, take_back
from functionalize.graph_capture.refusals.schedules import ScheduleSteps
from functionalize.graph_capture.refusals.torch_errors import UNANSWERABLE
from functionalize.graph_capture.request import CaptureRequest
from functionalize.graph_capture.trace.data_oracle import Decider
from functionalize.graph_capture.trace.example_data import ExampleData, NoDataError
from functionalize.graph_capture.trace.numbers.number_methods import Hashed, have_plain_keys
from functionalize.graph_capture.trace.numbers.texts import Texts
from functionalize.graph_capture.trace.patched_type_checks import TypeChecks
from functionalize.graph_capture.trace.patches import RunPatches, symbols_expected
from functionalize.graph_capture.trace.provenance import Provenance
from functionalize.graph_capture.trace.random.random_sources import RandomSources, TorchGenerators
from functionalize.graph_capture.trace.random.unread_draws import UnreadDraws
from functionalize.python_state.slots import NumberSlot
from functionalize.python_state.traversal_rules import PLAIN, of_proxy
from functionalize.runtime.call_tree import CallTree
from functionalize.runtime.calls.specialization import Capture, Recorded
from functionalize.runtime.capturing import CAPTURES
from functionalize.runtime.guards.guards import Assumptions, Guards
from functionalize.runtime.guards.modes import modes_now
from functionalize.runtime.outputs.side_effects import LeftInObjects
from functionalize.tracing.fakeify import fakes_of
from functionalize.tracing.metas import METAS
from functionalize.transform.api import run_call
from functionalize.transform.borrowed_memory import BorrowedMemory
from functionalize.transform.functions.numbers import Conversions
from functionalize.transform.gradients.autograd_notes import Questions


class CaptureSession(RecordingSession):
    """One run of a program on fake tensors in the places of its inputs."""

    def __init__(self, request: CaptureRequest, *, hooked: bool = False, suppose_gradients: bool = False) -> None:
        """``hooked``: run the hooks on gradients of state; ``suppose_gradients``: as if leaves had gradients."""
        self._program, self._inputs = request.program, _inputs_of(request, hooked, suppose_gradients)
        inputs = self._inputs
        self._modes = modes_now()
        self._unread = UnreadDraws()
        self._asked = Questions()  # the program's questions to tensors
        self._constants = dict[
            int, tuple[torch.Tensor, int]
        ]()  # tensors outside its state that it wrote, with versions
        dims = {} if request.sizes.spec is None else dims_of(inputs, request.sizes)
        plain = [entry for entry in inputs.inputs if type(entry) is not WrapperInput]
        tensors = [entry.value for entry in plain if isinstance(entry.value, torch.Tensor)]
        symbolic = bool(dims)
        if symbolic:
            refuse_symbolic(inputs.inputs, dims.keys())
        fake_mode = fake_mode_of(tensors) or new_fake_mode(symbolic=symbolic, metas=METAS)
        self._provenance = Provenance(inputs.state.modules, run_call.__code__)
        remove_views = request.remove == "mutations_and_views"
        self._generators = generators = TorchGenerators(self._held, inputs.inputs)
        note = self._provenance.note
        super().__init__(
            fake_mode,
            note,
            generators.note,
            remove_views=remove_views,
            symbolic=symbolic,
            order=request.order,
            parallel=ParallelModules([*inputs.state.seen, *inputs.arguments.seen]),
        )

        def with_symbols(tensor: torch.Tensor) -> torch.Tensor:
            from functionalize._torch.symbols.symbols import with_symbols  # here: loads sympy

            return with_symbols(fake_mode, tensor, f"input{id(tensor)}", list(dims.get(id(tensor), ())))

        self.states = WatchedState(inputs.state), WatchedState(inputs.arguments)
        self._steps = ScheduleSteps(self.states[0], inputs.schedules)
        self._fakes = fakes_of(tensors, self.factory, dims.keys(), with_symbols)
        self._sizes = AskedSizes(dims, self._fakes, self._label, strict=request.sizes.strict)
        for entry in inputs.inputs:
            value = entry.value
            entry.fake = self._like(value) if type(value) is MissingGradient else self._fakes.get(id(value))
        for entry in inputs.inputs:
            if entry.root is not None and entry.root.fake is not None:
                entry.fake = self._fakes[id(entry.value)] = view_of(entry.root.fake, Layout.of(entry.value))
        if len(plain) < len(inputs.inputs):
            self._fakes |= wrap_fakes(inputs.inputs)
        self._numbers = Numbers(
            [(e.slot, e.fake) for e in inputs.inputs if isinstance(e.slot, NumberSlot)], inputs.tied
        )
        if request.numbers is not None:
            data = ExampleData(
                self.recorder.tracer,
                functools.partial(_example, inputs),
                generators.before,
                self.regions.drawn_again,
                lambda: self.parallel.rearrange,
            )
            self.decider = Decider(self.recorder, self.regions, data, self._provenance.now, request.answers)

    def _like(self, missing: MissingGradient) -> Any:
        """A fake tensor in the place of a gradient that a tensor does not have."""
        with below_dispatch():
            return self.factory.like_real(missing.of)

    @property
    def _held(self) -> list[Any]:
        """The values in state and arguments that are not tensors, plain values or containers."""
        slots = (*self._inputs.state.others, *self._inputs.arguments.others)
        return [value for value in (of_proxy(slot.get()) for slot in slots) if type(value) not in PLAIN]

    @property
    def traced(self) -> Traced:
        """The tensors that the run traces."""
        passed = (entry.value for entry in self._inputs.inputs if isinstance(entry.value, FakeTensor))
        return Traced(self.recorder.tracer.tensor_tracker, passed)

    def empty_caches(self) -> None:
        """Empty caches by arguments that the run filled, if anything but the inputs outlives it."""
        fakes = [entry.fake for entry in self._inputs.inputs if entry.fake is not None]
        own = {id(tensor) for fake in fakes for tensor in (fake, fake.grad if fake.is_leaf else None)}
        if any(id(tensor) not in own for tensor, _ in self.traced.alive()):
            self.traced.empty_caches()

    @property
    def _misses_hooks(self) -> bool:
        held = (slot.get() for slot in self._inputs.state.tensors)
        return HOOKS in self._asked and not self._inputs.hooked and any(map(has_gradient_hooks, held))

    @property
    def has_all_gradients(self) -> bool:
        """Whether every leaf had a gradient."""
        return self._having_gradients >= {id(entry.value) for entry in self._inputs.inputs if is_leaf(entry.value)}

    @property
    def _having_gradients(self) -> set[int]:
        """The tensors, by identity, that had a gradient, or that are supposed to have had one."""
        return {id(entry.gradient_of.value) for entry in self._inputs.inputs if entry.gradient_of is not None}

    def run_unless_hooked(self) -> Recorded | None:
        """Record the program; None if it took gradients without the hooks of its state."""
        try:
            recorded = self.run()
        except Exception:
            if not self._misses_hooks:
                raise
        return None if self._misses_hooks else recorded

    def run(self) -> Recorded:
        """Record the program, and restore the sources of random numbers."""
        sources, changed = RandomSources(self._held), list[Exception]()
        unread = self._unread
        CAPTURES.running += 1
        try:
            watched = self._generators.watched(self._root, self.regions)
            with outside_of_the_caller(), watched:
                recorded = self._recorded()
        except Exception as error:
            self._check_substitutes(error)  # it may have taken another branch than in eager
            if not unread.note_error(error):
                raise
        finally:
            CAPTURES.running -= 1
            changed += sources.restore(unread)
            take_back(self._constants.values(), self._lifted())
        for refused in changed:
            raise refused
        self._generators.check_given(self._lifted())
        return recorded

    @property
    def _root(self) -> torch.nn.Module:
        """The module that holds the graph's attributes."""
        tracer: Any = self.recorder.tracer  # its stub allows another class
        return tracer.root  # type: ignore[no-any-return]

    def _lifted(self) -> list[torch.Tensor]:
        """The tensors that the program has reached outside its state."""
        root, inputs = self._root, self._inputs.inputs
        own = (entry.value for entry in inputs if entry.slot is None and entry.fake is entry.value)
        return [value for value in (*own, *vars(root).values(), *root.buffers()) if isinstance(value, torch.Tensor)]

    def _recorded(self) -> Recorded:
        inputs, mode = self._inputs, self.fake_mode
        self.add_inputs(inputs.inputs)
        alone = mode.of_this_thread() if isinstance(mode, CaptureFakeMode) else contextlib.nullcontext()
        fakes = self._fakes
        state, arguments = (watched.substituted(fakes) for watched in self.states)
        # Outermost: hooks on all modules are among what the program changes.
        with alone, self._provenance.watched(), self._numbers.restored(), self.parallel.kept(), state, arguments:
            for entry in inputs.inputs:
                if entry.gradient_of is not None and entry.gradient_of.fake is not None:
                    entry.gradient_of.fake.grad = entry.fake
            if inputs.hooked:
                install_hooks(inputs.inputs)
            recorded = self._recorded_on_fakes()
        self._sizes.check(mode.shape_env)
        self._provenance.write(recorded.graph)
        note_groups(recorded.graph)
        self._numbers.check()
        refuse_changed(inputs.inputs)
        self._attributes.check_given()
        refuse_changes_inside(inputs.python_guards)
        return recorded

    def _recorded_on_fakes(self) -> Recorded:
        """Record the program, with fake tensors in the places of its inputs."""
        inputs, environment = self._inputs, self.fake_mode.shape_env
        code = inputs.follower.code
        effects = SideEffectRecorder(self.states, inputs.follower.is_log, inputs.walk_again)
        texts = Texts(inputs.follower.is_log, lambda: inputs.follower.code.catches)
        self._attributes = TensorAttributes(inputs.inputs)
        types = TypeChecks(code.asking, self._attributes.identity, code.converting.values())
        run_patches = RunPatches(
            tracer=self.recorder.tracer,
            environment=environment,
            attributes=self._attributes,
            texts=texts,
            types=types,
            draws=self._unread,
            hashed=Hashed(),
            parallel=self.parallel,
        )
        with (
            self.active(),
            run_patches.patches() as patches,
            symbols_expected(environment, patches.install_later, at_once=bool(self._sizes)),
            types.used(),
            # A program may catch the error of an option that is no plain bool.
            Conversions.deciding(Conversions.decide, bools=code.catches),
            self._attributes.running(),
            HooksLeft(self.states) as hooks,
            texts.kept(),
        ):
            self._sizes.relate()
            self._sizes.name(environment)
            with self.recorder, self._sizes.lines_noted(environment, self._provenance.now):
                left = functools.partial(self._left, effects, hooks, texts)
                run = functools.partial(self._run_program, run_patches.hashed.looked_up)
                try:
                    return self.record(run, inputs.inputs, left, self._provenance.here, self._follow)
                finally:
                    if run_patches.hashed.planned:
                        forget_plans()

    def _label(self, tensor: int) -> str:
        """The name of an argument in messages, by the identity of its tensor."""
        return next(f"the input `{entry.name}`" for entry in self._inputs.inputs if id(entry.value) == tensor)

    def _left(
        self, effects: SideEffectRecorder, hooks: HooksLeft, texts: Texts, objects: ObjectGraph, returned: list[Any]
    ) -> LeftInObjects:
        hooks.note()
        objects.texts = texts
        changes, steps = effects.side_effects(objects, returned), self._steps.described(objects.reconstruction)
        describe = functools.partial(objects.reconstruction, path="a result")
        awaited = self.parallel.awaited(returned, [state.walk.seen for state in self.states], describe)
        left = LeftInObjects(changes, steps, texts.described(objects.reconstruction), awaited)
        self._numbers.check_kept(objects.is_reached)
        self._generators.make_in_graph(self.recorder.tracer.graph)
        return left

    def _follow(self, context: Any) -> None:
        self._provenance.follow(context)
        self._attributes.unused = context.notes.unused
        noted = (entry for entry in self._inputs.inputs if entry.optional or entry.gradient_of is not None)
        context.notes.unused.update(id(entry.fake) for entry in noted)
        self._asked, context.notes.constants = context.notes.asked, self._constants
        context.notes.generators, context.borrowed = self._generators.given, BorrowedMemory(self._held)

    def _run_program(self, looked_up: list[Any]) -> Any:
        """``looked_up``: gets the numbers that the program looks up in dicts."""
        if self._numbers.places:
            self._numbers.place()
            self.states[0].begin()
        inputs = self._inputs
        self.parallel.begin({id(entry.value): entry.fake for entry in inputs.inputs})
        steps, code = self._steps.noted(), code_put_back(inputs.python_guards, inputs.state, inputs.arguments)
        try:
            with steps, code, iterators_kept(inputs.state, inputs.arguments):
                returned = self._program(*inputs.args, **inputs.kwargs)
            self.parallel.check_left(returned)
            return returned
        finally:
            self._sizes.returned = True
            if looked_up:
                have_plain_keys(held.container for state in self.states for held in state.walk.containers.values())

    def _check_substitutes(self, cause: Exception | None = None) -> None:
        """Raise where the program asked an input something that its fake tensor answers differently."""
        if not any(question in self._asked for question in UNANSWERABLE):
            return
        for entry in self._inputs.inputs:
            if not isinstance(entry.value, torch.Tensor) or entry.fake is None:
                continue
            for name, line in self._asked.of(id(entry.fake), id(entry.function)):
                answer = name in UNANSWERABLE and ASKED_PROPERTIES[name](entry.value)
                if answer and not ASKED_PROPERTIES[name](entry.fake):
                    raise UNANSWERABLE[name].error(line, input=entry.target or entry.name) from cause

    def _questions(self, recorded: Recorded) -> set[tuple[int, str]]:
        """What the program asked inputs, by their numbers, or may have asked: whether arguments are parameters."""
        inputs, questions = self._inputs.inputs, {*self._attributes.asked(self._inputs.inputs), *recorded.asked}
        asking = self._inputs.follower.code.asking
        if asking["Parameter"] or asking["Buffer"]:
            tensors = [n for n, e in enumerate(inputs) if e.argument is not None and isinstance(e.value, torch.Tensor)]
            questions |= {(number, KIND) for number in tensors}
        return questions

    def capture(self, recorded: Recorded) -> Capture:
        """The record of the run, with what it assumes."""
        metadata, inputs = recorded.metadata, self._inputs
        self._check_substitutes()
        check_hooks(self._inputs.inputs, recorded.asked)
        supposed = any(isinstance(entry.value, MissingGradient) for entry in inputs.inputs)
        with_gradient = self._having_gradients
        at_new = any(
            id(inputs.inputs[n].value) not in with_gradient for n in metadata.gradients
        )  # also at tensors that require no gradient
        leaves_new = at_new or (bool(metadata.gradients) and not self.has_all_gradients)
        questions = self._questions(recorded)
        matter = not supposed and leaves_new
        assumptions = Assumptions(
            self._modes,
            inputs.python_guards,
            inputs.state,
            inputs.call,
            [e.value.of if isinstance(e.value, MissingGradient) else e.value for e in inputs.inputs],
            sizes=size_guards(self.fake_mode.shape_env, metadata),
            gradients_matter=matter or (bool(metadata.gradients_read) and not metadata.only_accumulates),
            asked={(n, name) for n, name in questions if not (supposed and name == GRADIENT)},
            written={number for number, entry in enumerate(inputs.inputs) if entry.writes},
            asks_kinds=any(inputs.follower.code.asking[name] for name in ("type", "Parameter", "Buffer")),
            seen_layouts=with_visible_layouts(inputs.inputs, recorded.graph, self._attributes.unused),
        )
        return Capture(
            recorded=recorded,
            guards=Guards(metadata, assumptions),
            state=inputs.state,
            convention=inputs.convention,
            modes_left=self.modes_left,
            tree=CallTree.of(inputs.call),
            original=self._program,
            catches=inputs.follower.code.catches,
            converts=inputs.follower.code.converts,
            unread=self._unread.calls,
            runs_as_written=self.parallel.rearrange or recorded.reaches_made,
        )


def _inputs_of(request: CaptureRequest, hooked: bool, suppose_gradients: bool) -> ProgramInputs:
    inputs = ProgramInputs(
        request.function,
        request.roots,
        request.args,
        dict(request.kwargs),
        hooked=hooked,
        suppose_gradients=suppose_gradients,
        numbers=request.numbers,
    )
    if request.as_views:
        inputs.inputs = with_roots(inputs.inputs)
    return inputs


def _example(inputs: ProgramInputs, placeholder: Any) -> Any:
    """The example value of an input of the graph; an error for placeholders that are not inputs of the program."""
    entry = next((entry for entry in inputs.inputs if entry.name == placeholder.target), None)
    if entry is None:
        raise NoDataError(f"`{placeholder.target}` is not an input of the program")
    missing = isinstance(entry.value, MissingGradient)
    return torch.zeros_like(entry.value.of) if missing else entry.value
