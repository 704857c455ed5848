"""A captured program: its graph, the account of its writes, and a call that does what the original does.

Invariant: a program holds neither its example inputs nor what traced it. Limits: calls that the guards do not
allow are refused, or captured again.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import ExportGraphSignature, OutputKind
from torch.fx import GraphModule

from functionalize._torch import in_forward_ad, in_functorch_transform
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.history import AliasHistory
from functionalize.call_stack import raised_by_program
from functionalize.errors import (
    DataDependentError,
    GradientMismatchError,
    InputMismatchError,
    NotCapturedWarning,
    NumberMismatchError,
    StateMismatchError,
    in_words,
)
from functionalize.runtime.arguments import CallArguments
from functionalize.runtime.autograd.joint import JointGraph
from functionalize.runtime.autograd.partition import PartitionFn
from functionalize.runtime.calls.specialization import Capture, Recapture, Specialization
from functionalize.runtime.calls.variants import Variant, agreeing, too_many, undecided
from functionalize.runtime.capturing import CAPTURES, CAPTURING
from functionalize.runtime.decisions import Answers, Decision, Diverged, agree
from functionalize.runtime.exports import Exports
from functionalize.runtime.graphs.graph_forms import with_copies
from functionalize.runtime.guards.guard import Guard
from functionalize.runtime.guards.sizes import Size
from functionalize.runtime.metadata import GraphInput

_IN_TRANSFORM = (
    "a captured program is called inside torch.func.grad, vmap, jvp, dual_level or a similar transform\n"
    "    why  the program computes with plain tensors, so the transform would treat its results as constants\n"
    "    try  capture a function that applies the transform, or transform the original"
)
_NO_GRADIENTS = (
    "the program has no joint graph of forward and backward for these arguments\n"
    "    why  none of its results depends on an input that requires gradients, or gradients are off\n"
    "    try  pass inputs that require gradients, outside of torch.no_grad()"
)
_BOUND = (
    "a captured program cannot be copied or pickled\n"
    "    why  it reads and writes the state that it was captured with, and a copy would share that state\n"
    "    try  copy the model and capture the copy, or save the program: "
    "`torch.export.save(program.to_exported_program(), path)`"
)


@dataclass(frozen=True)
class Mutation:
    """One write to an input or to state.

    ``target``: the path of the state, or the name of the input. ``region``: the place in its storage that was
    written. ``op``: the operator. ``location``: the user's line, as ``file:line in function: text``.

    Example:
        >>> import torch
        >>> from functionalize import capture
        >>> capture(lambda x: x[1:].add_(1), (torch.zeros(3),)).mutations
        [Mutation(x: [2] at 1, by aten.add_.Tensor)]
    """

    kind: OutputKind
    target: str
    region: Layout
    op: str
    location: str

    def __str__(self) -> str:
        return f"{self.target}: {self.op} at {self.location}"

    def __repr__(self) -> str:
        return f"Mutation({self.target}: {list(self.region.size)} at {self.region.offset}, by {self.op})"


class CapturedProgram(Exports):
    """What :func:`functionalize.capture` returns: call it as the original, read its graph, export it.

    Example:
        >>> import torch
        >>> from functionalize import capture
        >>> def bump(x):
        ...     x[0].add_(1)
        ...     return x.sum()
        >>> capture(bump, (torch.zeros(3),))
        CapturedProgram(bump)
          inputs    x
          writes    x
          graph     4 operators, remove='mutations_and_views'
          variants  1
    """

    def __init__(
        self,
        capture: Capture,
        *,
        remove: str,
        recapture: Recapture,
        original: Callable[..., Any],
        partition_fn: PartitionFn | None = None,
        on_guard_failure: str = "raise",
        cache_size: int = 8,
        is_exporting: bool = False,
    ) -> None:
        """``recapture``: captures the same program for other inputs, or for a derivative of some order.

        ``original``: what was captured; ``is_exporting``: whether it was told that torch exports it.
        """
        self.is_exporting = is_exporting
        self.remove = remove
        self._recapture, self._on_guard_failure = recapture, on_guard_failure
        self._partition_fn, self._cache_size, self.original = partition_fn, cache_size, original
        self._set_first(Specialization(capture, partition_fn, recapture))
        self._specializations = [self._first]  # the one that was called last comes first
        self._convention, self._lock = capture.convention, threading.Lock()
        self._others: dict[Any, CapturedProgram] = {}  # by how many arguments they have, and by what names

    def _set_first(self, first: Specialization) -> None:
        self._first, self._recorded, self._metadata = first, first.recorded, first.metadata
        self.graph = first.recorded.graph

    @property
    def signature(self) -> ExportGraphSignature:
        """What each input and output of ``graph_module`` is, in the words of ``torch.export``."""
        return self._recorded.signature()

    @property
    def mutations(self) -> list[Mutation]:
        """Every write to an input or to state."""
        return [
            Mutation(kind, target, write.view.region, write.op, str(write.origin.inside))
            for kind, target, base in self._recorded.written
            for write in self._recorded.historian.writes_of(base)
        ]

    @property
    def alias_history(self) -> AliasHistory:
        """Every storage that was viewed or written, with its views and writes."""
        return self._recorded.historian.history

    @property
    def graph_module(self) -> GraphModule:
        """The graph, as a module: of state and inputs, in the order of the signature."""
        return self._first.graph_module

    @property
    def specialization(self) -> Specialization:
        """All that the capture for the example inputs gave: what a backend makes its program of."""
        return self._first

    @property
    def guards(self) -> list[Guard]:
        """What the graph takes for granted of a call; print it line by line.

        Example:
            >>> import torch
            >>> from functionalize import capture
            >>> program = capture(lambda x: x + 1, (torch.zeros(3),))
            >>> [str(guard) for guard in program.guards if guard.property in ("size", "grad mode")]
            ['the call: grad mode True', 'the input `x`: size (3,)']
        """
        return list(self._first.guards.listed())

    @property
    def sizes(self) -> list[Size]:
        """The sizes that may differ from call to call, each with its bounds; none without ``dynamic_shapes``.

        Example:
            >>> import torch
            >>> from functionalize import capture
            >>> program = capture(lambda x: x + 1, (torch.zeros(4),), dynamic_shapes={"x": {0: "batch"}})
            >>> print(*program.sizes)
            batch: 2 or more (dimension 0 of `x`)
        """
        return [] if self._first.guards.sizes is None else self._first.guards.sizes.described()

    @property
    def variants(self) -> list[Variant]:
        """The ways that the program goes by the data of its calls so far, in the order of their capture.

        Example:
            >>> import torch
            >>> from functionalize import capture
            >>> def flip(x):
            ...     return -x if x.sum() < 0 else x
            >>> program = capture(flip, (torch.ones(3),))
            >>> program(-torch.ones(3))
            tensor([1., 1., 1.])
            >>> [[decision.answer for decision in variant.decisions] for variant in program.variants]
            [[False], [True]]
        """
        return [Variant(known) for known in sorted(self._specializations, key=attrgetter("number"))]

    @property
    def inputs(self) -> list[GraphInput]:
        """What the graph takes, in order."""
        return [self._metadata.inputs[number] for number in self._metadata.taken]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that the graph takes besides the user's, by the names of its inputs: state and constants."""
        found = {e.name: e.constant if e.slot is None else e.slot.get() for e in self.inputs if e.argument is None}
        return {name: value.detach() for name, value in found.items() if isinstance(value, torch.Tensor)}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute, write back, and return what the original does.

        Other grad modes, and other inputs that require gradients, are captured again, and the result is kept; so is
        Python state that leaves the graph as it is. What else differs is refused, or captured with
        ``on_guard_failure="recapture"``. While another program is captured, this one is its original.

        Raises:
            InputMismatchError: the inputs, or the modes of torch, are not such as the program was captured for.
            RuntimeError: inside of ``torch.func.grad``, ``vmap`` or ``jvp``, which would not see through the call.
        """
        returned = self._specializations[0].fast_call(args, kwargs)
        if returned is not None:
            return returned
        if CAPTURES.running:  # it is a part of what is captured
            return self.original(*args, **kwargs)
        if in_functorch_transform() is not None or in_forward_ad():
            raise RuntimeError(_IN_TRANSFORM)
        if self._on_guard_failure == "recapture" and not self._convention.takes(args, kwargs):
            return self._called_so(args, kwargs)(*args, **kwargs)
        arguments = self._convention.arguments(args, kwargs)
        found = self._known(arguments)
        if found is None:
            try:
                with CAPTURING:
                    found = self._chosen(arguments)
            except Exception as error:
                if in_words(error):
                    raise
                reason = error  # an operator's, for these inputs: eager may say it in other words
        if found is None:
            return self._as_it_is(arguments, reason)
        chosen, inputs = found
        try:
            return chosen.run(inputs, arguments)
        except Diverged as error:
            answers = error.answers
        return self._run_another(chosen, answers, arguments)

    def _called_so(self, args: Sequence[Any], kwargs: dict[str, Any]) -> CapturedProgram:
        """The program as it was captured for so many arguments, by these names."""
        key = len(args), *sorted(kwargs), self._convention.collected(kwargs)
        with CAPTURING:
            found = self._others.pop(key, None)
            if found is None:
                how: dict[str, Any] = {"on_guard_failure": self._on_guard_failure, "cache_size": self._cache_size}
                how |= {"partition_fn": self._partition_fn, "original": self.original, "remove": self.remove}
                found = CapturedProgram(self._recapture(args, kwargs), recapture=self._recapture, **how)
            self._others = dict([*self._others.items(), (key, found)][-self._cache_size :])
        return found

    def __repr__(self) -> str:
        arguments = [entry.name for entry in self.inputs if entry.argument is not None]
        count = sum(entry.argument is None for entry in self.inputs)
        rows = {
            "inputs": ", ".join(arguments),
            "state": f"{count} tensor{'s' if count != 1 else ''}" if count else "",
            "writes": ", ".join(dict.fromkeys(target for _, target, _ in self._recorded.written)),
            "sizes": ", ".join(map(str, self.sizes)),
            "graph": f"{sum(one.op == 'call_function' for one in self.graph.nodes)} operators, remove={self.remove!r}",
            "variants": str(len(self._specializations)),
        }
        name = getattr(self.original, "__qualname__", type(self.original).__name__)
        return "\n".join([f"CapturedProgram({name})", *(f"  {row:<9} {text}" for row, text in rows.items() if text)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(_BOUND)

    def _known(self, arguments: CallArguments) -> tuple[Specialization, list[Any]] | None:
        """The program that was captured for such a call, and its inputs, where that is told fast."""
        for index, known in enumerate(self._specializations):
            inputs = known.passed(arguments)
            if inputs is not None:
                if index:
                    self._use(known)
                return known, inputs
        return None

    def _as_it_is(self, arguments: CallArguments, reason: Exception) -> Any:
        """What the original does, which could not be captured for a call: it mostly raises, and in eager's words."""
        found = self.original(*arguments.args, **arguments.kwargs)
        warnings.warn(
            f"an operator accepted the inputs of a call, but not fake tensors like them: {reason}\n"
            "    why  no captured variant fits this call, and a new variant could not be captured\n"
            "    try  nothing is required: the original ran instead; to have such calls captured, remove that "
            "operator",
            NotCapturedWarning,
            stacklevel=3,
        )
        return found

    def _run_another(self, chosen: Specialization, answers: Answers, arguments: CallArguments) -> Any:
        """The result of a call that takes another branch than the captured programs."""
        tried, known_answers = [chosen], {chosen.kind: answers}  # those of one kind say nothing of another one's
        while True:
            with CAPTURING:
                others = [known for known in self._specializations if known not in tried]
                found = agreeing(others, known_answers, arguments)
                floats = found is None and self._are_too_many_floats(chosen.kind, known_answers[chosen.kind])
                try:
                    if found is None and not floats:
                        found = self._new_variant(chosen.kind, known_answers[chosen.kind], arguments)
                    elif found is not None and found[0].awaits_gradients:
                        tried.append(found[0])
                        found = self._with_gradients(found[0], arguments)
                except Exception as error:
                    if not raised_by_program(error):
                        raise
                    found = None
                if found is not None:
                    self._use(found[0])  # before another thread looks for it
            if floats:
                return self._as_written(arguments)
            if found is None:  # this way leads to an error of the program's, and perhaps writes before it
                return self.original(*arguments.args, **arguments.kwargs)
            chosen, inputs = found
            try:
                return chosen.run(inputs, arguments)
            except Diverged as error:
                known_answers[chosen.kind] = error.answers
            tried.append(chosen)

    def _are_too_many_floats(self, kind: object, answers: Answers) -> bool:
        """Whether there are as many variants as are kept, and what asks for one more is a float: one for each value."""
        return type(answers[-1]) is float and sum(one.kind is kind for one in self._specializations) >= self._cache_size

    def _as_written(self, arguments: CallArguments) -> Any:
        """The original's result: the program passes data-dependent floats to code that takes only Python numbers."""
        warnings.warn(
            "the program passes data-dependent floats to code that takes only Python numbers, in more than "
            f"{self._cache_size} calls\n"
            "    why  each float needs a separate variant, so the original runs for this call and for later ones "
            "like it\n"
            "    try  return the tensor; or only print the float, or append it (or its text) to a list",
            NotCapturedWarning,
            stacklevel=4,
        )
        return self.original(*arguments.args, **arguments.kwargs)

    def _new_variant(
        self, kind: object, answers: Answers, arguments: CallArguments
    ) -> tuple[Specialization, list[Any]]:
        variants = [known for known in self._specializations if known.kind is kind]
        if len(variants) >= self._cache_size:
            raise too_many(variants, answers, self._cache_size)
        made = self._captured(arguments)
        inputs = made.checked(arguments)
        if not isinstance(inputs, list):  # what was captured just now
            raise inputs
        if not (variants and variants[0].takes_as(made)):  # numbers have changed, which are inputs now
            return made, inputs
        if not agree(answers, made.answers):
            raise undecided(answers, made)
        made.kind = kind
        return made, inputs

    def _chosen(self, arguments: CallArguments) -> tuple[Specialization, list[Any]]:
        """The program for a call, captured if there is none yet, and its inputs."""
        refusals: dict[Specialization, InputMismatchError] = {}
        for known in sorted(dict.fromkeys([self._first, *self._specializations]), key=attrgetter("awaits_gradients")):
            inputs = known.checked(arguments)
            if isinstance(inputs, list):
                if known.awaits_gradients and not arguments.are_examples:
                    known, inputs = self._with_gradients(known, arguments)
                self._use(known)
                return known, inputs
            refusals[known] = inputs
        refused = [refusals.pop(self._first), *refusals.values()]
        kinds = {type(error) for error in refused}
        changes = set[int]().union(*(known.guards.changes for known in self._specializations))
        own = any(id(error.container) in changes for error in refused)  # the program itself left it so
        follows = own or GradientMismatchError in kinds or self._on_guard_failure == "recapture"
        if not (follows or kinds & {StateMismatchError, NumberMismatchError}):
            raise refused[0]
        made = self._captured(arguments, order=0 if arguments.are_examples else 1)
        numbers = [error for error in refused if isinstance(error, NumberMismatchError)]
        taken = any(not made.guards.settings.compares(error.container, error.key) for error in numbers)  # as an input
        if not (follows or taken or self._stays(made, arguments)):
            raise refused[0]
        inputs = made.checked(arguments)
        if not isinstance(inputs, list):  # what was captured just now
            raise inputs
        self._use(made)
        return made, inputs

    def _stays(self, made: Specialization, arguments: CallArguments) -> bool:
        """Whether a program that was captured with other Python state is as one that is known."""
        known = self._specializations[0]
        if known.awaits_gradients and not made.awaits_gradients:  # of it, only the forward can be compared
            made = self._captured(arguments, order=0)
        if any(made.is_like(known) for known in self._specializations):
            return True
        if not known.decisions or known.answers == made.answers:
            return False
        try:  # this one takes other branches: what matters is what it does on the way of that one
            order = 0 if known.awaits_gradients else 1
            return self._captured(arguments, known.answers, order=order).is_like(known)
        except DataDependentError:  # which it does not have
            return False

    def _captured(self, arguments: CallArguments, answers: Answers | None = None, *, order: int = 1) -> Specialization:
        """The program for such arguments; ``order``: with its backward, or with 0 the forward alone."""
        capture = self._recapture(arguments.args, arguments.kwargs, order=order, answers=answers)
        return Specialization(capture, self._partition_fn, self._recapture)

    def _with_gradients(self, forward: Specialization, arguments: CallArguments) -> tuple[Specialization, list[Any]]:
        """What takes the place of a program without a backward, for a call that its guards let pass; and its inputs.

        The program runs on fakes once more, before the call changes anything. If the data of this call take another
        branch, it is a further variant, as long as there is room for one.
        """
        made = self._captured(arguments)
        variants = [known for known in self._specializations if known.kind is forward.kind and known is not forward]
        for known in variants:
            inputs = known.checked(arguments) if made.answers == known.answers and known.takes_as(made) else None
            if isinstance(inputs, list):
                return known, inputs
        inputs = made.checked(arguments)
        if not isinstance(inputs, list):  # what was captured just now
            raise inputs
        if forward.takes_as(made):
            made.kind = forward.kind
        if agree(forward.answers, made.answers) or len(variants) + 1 >= self._cache_size:
            self._replace(forward, made)
        else:
            self._use(made)
        return made, inputs

    def _replace(self, forward: Specialization, made: Specialization) -> None:
        """Have a program with its backward take the place of one without, unless this one serves more sizes."""
        with self._lock:
            if forward in self._specializations:
                made.number = forward.number  # its place among the variants
            others = [known for known in self._specializations if known is not forward]
            self._specializations = [made, *others]
        if self._first is forward and made.takes_sizes_of(forward):
            self._set_first(made)

    def _use(self, chosen: Specialization) -> None:
        """Have a program come first, and forget those that were not called for long."""
        with self._lock:
            found = [chosen, *(known for known in self._specializations if known is not chosen)]
            kinds = list(dict.fromkeys(known.kind for known in found))[: self._cache_size]
            self._specializations = [known for known in found if known.kind in kinds]

    @property
    def current(self) -> Specialization:
        """What ran the last call; before the first, what was captured first."""
        return self._specializations[0]

    def as_called_now(self, args: Sequence[Any], kwargs: dict[str, Any]) -> CapturedProgram:
        """The program that a call would run now, by itself: this one where it is the first; for example arguments.

        What has changed since the last call (a module's mode, a number, state that a call made) is followed or refused
        as a call does.

        Raises:
            InputMismatchError: such a call would be refused.
        """
        arguments = self._convention.arguments(args, kwargs)
        arguments.are_examples = True
        with CAPTURING:
            chosen = self.current
            if not isinstance(chosen.checked(arguments), list):
                chosen = self._chosen(arguments)[0]
        if chosen is self._first:
            return self
        how: dict[str, Any] = {"remove": self.remove, "recapture": self._recapture, "original": self.original}
        return CapturedProgram(chosen.capture, partition_fn=self._partition_fn, **how)

    def captured_like(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Specialization:
        """The program as it is for other arguments, or with the state that there is now; it is not kept.

        Without its backward, as all that is captured to be exported.
        """
        return self._captured(self._convention.arguments(args, kwargs), order=0)

    def captured_again(self, args: Any, kwargs: Any, answers: Answers | None = None, **how: Any) -> CapturedProgram:
        """The program, or another ``function``, captured for such arguments; ``answers``: its way."""
        recapture, original = functools.partial(self._recapture, **how), how.get("function", self.original)
        capture = recapture(args, kwargs, order=0, answers=answers)
        return CapturedProgram(capture, remove=self.remove, recapture=recapture, original=original)

    def with_decisions(self, decisions: Sequence[Decision]) -> CapturedProgram:
        """This program by itself, with other words for its decisions: those of what it was made of."""
        recorded = self.current.recorded
        graph = dataclasses.replace(recorded.metadata.graph, decisions=tuple(decisions))
        metadata = dataclasses.replace(recorded.metadata, graph=graph)
        capture = dataclasses.replace(self.current.capture, recorded=dataclasses.replace(recorded, metadata=metadata))
        return CapturedProgram(capture, remove=self.remove, recapture=self._recapture, original=self.original)

    def flat_inputs(self, /, *args: Any, **kwargs: Any) -> list[Any]:
        """What ``graph_module`` takes for a call: state and the leaves of the arguments, in the signature's order.

        Raises:
            InputMismatchError: the inputs are not such as the program was captured for.
        """
        inputs = self._first.guards.check(self._convention.arguments(args, kwargs))
        return self._first.inputs_of_graph(inputs)

    def joint_graph(self, /, *args: Any, **kwargs: Any) -> GraphModule:
        """The forward and the backward in one graph, captured for a call with these arguments; nothing is computed.

        It takes `primals_N`, the N-th of the program's inputs, and `tangents_N`, the gradients of the N-th result that
        has one. It returns what the program computes, then a gradient for each input that requires one (None where no
        result depends on it), then for each tangent what the backward writes to it, or None. Partition functions of
        AOTAutograd take such graphs.

        Raises:
            RuntimeError: the program has no backward for such arguments; the message says why.

        Example:
            >>> import torch
            >>> from functionalize import capture
            >>> x = torch.ones(3, requires_grad=True)
            >>> program = capture(lambda x: x.sin(), (x,))
            >>> joint = program.joint_graph(x)
            >>> [node.name for node in joint.graph.nodes]
            ['primals_0', 'tangents_0', 'sin', 'cos', 'mul', 'output']
        """
        joint = self._captured(self._convention.arguments(args, kwargs)).recorded.joint
        if isinstance(joint, JointGraph):
            return joint.module
        raise joint if isinstance(joint, Exception) else RuntimeError(_NO_GRADIENTS)

    def with_copy_epilogue(self) -> GraphModule:
        """The same graph ending in ``copy_`` onto what it writes; it returns the caller's outputs alone."""
        return with_copies(self.graph, self._recorded.root, self._metadata)

    def print_readable(self) -> str:
        """Print the graph as Python, with shapes and the user's lines; the text is returned as well."""
        return self.graph_module.print_readable()

    def report(self, path: str | os.PathLike[str], *, title: str = "") -> Path:
        """Write one self-contained HTML page: storages over time, the code before and after, mutations, sizes.

        Args:
            path: the file to write.
            title: what the page is called; otherwise it is named after what was captured.

        Returns:
            The path of the file.

        Example:
            >>> import tempfile, torch
            >>> from pathlib import Path
            >>> from functionalize import capture
            >>> program = capture(lambda x: x.add_(1), (torch.zeros(3),))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     page = program.report(Path(folder) / "report.html", title="Add one").read_text()
            >>> "<title>Add one" in page
            True
        """
        from functionalize import report  # jinja2 is imported by those who ask for a page

        return report.write(report.build(self, title, self._metadata_writes(), self._recorded.shared), path)

    def _metadata_writes(self) -> list[tuple[str, str]]:
        """The inputs and state whose size, strides or storage a call changes, each with the op that does it."""
        named = [(self._metadata.inputs[mutation.input], mutation) for mutation in self._metadata.mutations]
        return [
            (entry.target or entry.name, str(op))
            for entry, mutation in named
            for op, _ in mutation.metadata + mutation.after
        ]
