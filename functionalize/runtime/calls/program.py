"""A captured program: its graph, the history of its writes, and a call that does what the original does.

Invariant: a program holds neither its example inputs nor its tracer. Limits: calls that the guards do not allow are
refused, or captured again.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.export.graph_signature import ExportGraphSignature, OutputKind
from torch.fx import Graph, GraphModule

from functionalize._torch import in_forward_ad, in_functorch_transform
from functionalize._torch.autograd import hidden_from_dynamo
from functionalize._torch.subclasses.wrappers import part_at
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.history import AliasHistory
from functionalize.errors import in_words
from functionalize.refusals.calls import (
    CALLED_IN_TRANSFORM,
    FAKES_NOT_ACCEPTED,
    NO_JOINT_GRAPH,
    PROGRAM_COPIED,
)
from functionalize.runtime.arguments import CallArguments
from functionalize.runtime.autograd.joint import JointGraph
from functionalize.runtime.autograd.partition import PartitionFn
from functionalize.runtime.calls.selection import Specializations
from functionalize.runtime.calls.specialization import Capture, Chosen, Recapture, Recorded, Specialization
from functionalize.runtime.calls.stages import RunAsWritten
from functionalize.runtime.calls.variants import Variant
from functionalize.runtime.capturing import CAPTURES, CAPTURING
from functionalize.runtime.communication import CallLog, current_log, logging_to, run_as_written
from functionalize.runtime.decisions import Answers, Decision, Diverged
from functionalize.runtime.exports import Exports
from functionalize.runtime.graphs.graph_forms import with_copies
from functionalize.runtime.guards.guard import Guard
from functionalize.runtime.guards.sizes import Size
from functionalize.runtime.metadata import GraphInput, ProgramMetadata


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

        ``original``: the program; ``is_exporting``: whether the capture ran it as torch's export does.
        """
        self.is_exporting, self.remove, self.original = is_exporting, remove, original
        self._specializations = Specializations(
            capture, recapture, partition_fn, on_guard_failure=on_guard_failure, cache_size=cache_size
        )
        self._convention = capture.convention
        self._others: dict[Any, CapturedProgram] = {}  # by the number and the names of their arguments

    @property
    def graph(self) -> Graph:
        """The graph: of state and inputs, in the order of the signature."""
        return self._recorded.graph

    @property
    def _recorded(self) -> Recorded:
        return self.specialization.recorded

    @property
    def _metadata(self) -> ProgramMetadata:
        return self.specialization.metadata

    @property
    def signature(self) -> ExportGraphSignature:
        """What each input and output of ``graph_module`` is, in the words of ``torch.export``."""
        return self._recorded.signature()

    @property
    def mutations(self) -> list[Mutation]:
        """Every write to an input or to state."""
        return [
            Mutation(output_kind, target, write.view.region, write.op, str(write.origin.inside))
            for output_kind, target, base in self._recorded.written
            for write in self._recorded.historian.writes_of(base)
        ]

    @property
    def alias_history(self) -> AliasHistory:
        """Every storage that was viewed or written, with its views and writes."""
        return self._recorded.historian.history

    @property
    def graph_module(self) -> GraphModule:
        """The graph, as a module: of state and inputs, in the order of the signature."""
        return self.specialization.graph_module

    @property
    def specialization(self) -> Specialization:
        """The specialization for the example inputs, which a backend converts."""
        return self._specializations.first

    @property
    def guards(self) -> list[Guard]:
        """What the graph assumes of a call; print it line by line.

        Example:
            >>> import torch
            >>> from functionalize import capture
            >>> program = capture(lambda x: x + 1, (torch.zeros(3),))
            >>> [str(guard) for guard in program.guards if guard.property in ("size", "grad mode")]
            ['the call: grad mode True', 'the input `x`: size (3,)']
        """
        return list(self.specialization.guards.listed())

    @property
    def sizes(self) -> list[Size]:
        """The sizes that may differ from call to call, each with its bounds; empty without ``dynamic_shapes``.

        Example:
            >>> import torch
            >>> from functionalize import capture
            >>> program = capture(lambda x: x + 1, (torch.zeros(4),), dynamic_shapes={"x": {0: "batch"}})
            >>> print(*program.sizes)
            batch: 2 or more (dimension 0 of `x`)
        """
        return [] if self.specialization.guards.sizes is None else self.specialization.guards.sizes.described()

    @property
    def variants(self) -> list[Variant]:
        """The variants for the branches that calls have taken so far, in the order of their capture.

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
        return [Variant(kept) for kept in sorted(self._specializations.kept, key=attrgetter("number"))]

    @property
    def inputs(self) -> list[GraphInput]:
        """The inputs of the graph, in order."""
        return [self._metadata.inputs[number] for number in self._metadata.taken]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The state and the constants that the graph takes, by the names of its inputs."""
        held = {e.name: e.constant if e.slot is None else e.slot.get() for e in self.inputs if e.argument is None}
        parts = {
            e.name: part_at(held[e.name], e.part.path) for e in self.inputs if e.name in held and e.part is not None
        }
        return {name: value.detach() for name, value in (held | parts).items() if isinstance(value, torch.Tensor)}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute, write back, and return what the original does.

        For another grad mode, other inputs that require gradients, or Python state that leaves the graph as it is, the
        program is captured again, and the capture is kept. Other differences are refused, or captured with
        ``on_guard_failure="recapture"``. While another program is captured, a call runs the original. ``torch.compile``
        leaves calls between its graphs.

        Raises:
            InputMismatchError: the program was captured for other inputs, or other modes of torch.
            RuntimeError: inside of ``torch.func.grad``, ``vmap`` or ``jvp``, which would not see through the call.
        """
        if is_dynamo_compiling():
            return _called_between_graphs(self, args, kwargs)
        returned = self._specializations.kept[0].fast_call(args, kwargs)
        if returned is not None:
            return returned
        if CAPTURES.running:  # this program is a part of the captured one
            return self.original(*args, **kwargs)
        if in_functorch_transform() is not None or in_forward_ad():
            raise CALLED_IN_TRANSFORM.error()
        specializations = self._specializations
        if specializations.on_guard_failure == "recapture" and not self._convention.takes(args, kwargs):
            return self._called_so(args, kwargs)(*args, **kwargs)
        arguments = self._convention.arguments(args, kwargs)
        chosen = specializations.passed(arguments)
        if chosen is not None and not chosen.specialization.may_repeat and current_log() is None:
            return self._run(chosen, arguments)
        with logging_to(CallLog()):
            return self._run(chosen or self._chosen(arguments), arguments)

    def _chosen(self, arguments: CallArguments) -> Chosen | Exception:
        """The specialization for a call, or an operator's error, which eager may raise with another message."""
        try:
            with CAPTURING:
                return self._specializations.choose(arguments)
        except Exception as error:
            if in_words(error):
                raise
            return error

    def _run(self, chosen: Chosen | Exception, arguments: CallArguments) -> Any:
        if isinstance(chosen, Exception):
            return self._as_it_is(arguments, chosen)
        try:
            return chosen.specialization.run(chosen.inputs, arguments)
        except Diverged as error:
            answers = error.answers
        with logging_to(current_log() or CallLog()):  # the other branch may communicate
            return self._run_another(chosen.specialization, answers, arguments)

    def _called_so(self, args: Sequence[Any], kwargs: dict[str, Any]) -> CapturedProgram:
        """The program as it was captured for this number of arguments, with these names."""
        key = len(args), *sorted(kwargs), self._convention.collected(kwargs)
        kept = self._specializations
        with CAPTURING:
            other = self._others.pop(key, None)
            if other is None:
                how = {"on_guard_failure": kept.on_guard_failure, "cache_size": kept.cache_size}
                other = self._made_of(kept.recapture(args, kwargs), **how)
            self._others = dict([*self._others.items(), (key, other)][-kept.cache_size :])
        return other

    def _made_of(self, capture: Capture, **how: Any) -> CapturedProgram:
        """A program made of another capture."""
        specializations = self._specializations
        own = {"remove": self.remove, "recapture": specializations.recapture, "original": self.original}
        return CapturedProgram(capture, **{**own, "partition_fn": specializations.partition_fn, **how})

    def __repr__(self) -> str:
        arguments = [entry.name for entry in self.inputs if entry.argument is not None]
        count = sum(entry.argument is None for entry in self.inputs)
        operators = sum(node.op == "call_function" for node in self.graph.nodes)
        rows = {
            "inputs": ", ".join(arguments),
            "state": f"{count} tensor{'s' if count != 1 else ''}" if count else "",
            "writes": ", ".join(dict.fromkeys(target for _, target, _ in self._recorded.written)),
            "sizes": ", ".join(map(str, self.sizes)),
            "graph": f"{operators} operators, remove={self.remove!r}",
            "variants": str(len(self._specializations.kept)),
        }
        name = getattr(self.original, "__qualname__", type(self.original).__name__)
        return "\n".join([f"CapturedProgram({name})", *(f"  {row:<9} {text}" for row, text in rows.items() if text)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PROGRAM_COPIED.error()

    def _as_it_is(self, arguments: CallArguments, reason: Exception) -> Any:
        """Run the original, which could not be captured for a call: it mostly raises, with eager's message."""
        returned = run_as_written(self.original, arguments.args, arguments.kwargs)
        if not isinstance(reason, RunAsWritten):
            warnings.warn(FAKES_NOT_ACCEPTED.error(reason=reason), stacklevel=4)
        return returned

    def _run_another(self, chosen: Specialization, answers: Answers, arguments: CallArguments) -> Any:
        """The result of a call that takes another branch than the captured programs."""
        tried, answers_by_kind = [chosen], {chosen.kind: answers}  # one kind's say nothing of another's
        specializations, call_kind = self._specializations, chosen.kind
        while True:
            with CAPTURING:
                agreeing = specializations.agreeing(tried, answers_by_kind, arguments)
                if agreeing is not None:
                    tried.append(agreeing.specialization)
                else:
                    reason = specializations.without_variant(call_kind, answers_by_kind[call_kind])
                    if reason is not None:
                        break
                another = specializations.another(agreeing, call_kind, answers_by_kind[call_kind], arguments)
            if another is None:  # the program itself raises on this branch, perhaps after writes
                return run_as_written(self.original, arguments.args, arguments.kwargs)
            chosen, call_kind = another.specialization, another.specialization.kind
            try:
                return chosen.run(another.inputs, arguments)
            except Diverged as error:
                answers_by_kind[call_kind] = error.answers
            tried.append(chosen)
        warnings.warn(reason.error(bound=specializations.cache_size), stacklevel=4)
        return run_as_written(self.original, arguments.args, arguments.kwargs)

    @property
    def current(self) -> Specialization:
        """The specialization that ran the last call; before a first call, the first specialization."""
        return self._specializations.kept[0]

    def as_called_now(self, args: Sequence[Any], kwargs: dict[str, Any]) -> CapturedProgram:
        """The program that a call with arguments like these examples would run now; itself if that is the first one.

        Changes since the last call (a module's mode, a number, state that a call made) are followed or refused as in a
        call.

        Raises:
            InputMismatchError: a call would be refused.
        """
        arguments = self._convention.arguments(args, kwargs)
        arguments.are_examples = True
        with CAPTURING:
            chosen = self.current
            if not isinstance(chosen.checked(arguments), list):
                chosen = self._specializations.choose(arguments).specialization
        return self if chosen is self.specialization else self._made_of(chosen.capture)

    def captured_like(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Specialization:
        """The program captured for other arguments, or with the current state; the capture is not kept.

        It has no backward, as every capture for an export.
        """
        return self._specializations.captured(self._convention.arguments(args, kwargs), order=0)

    def captured_again(self, args: Any, kwargs: Any, answers: Answers | None = None, **how: Any) -> CapturedProgram:
        """The program, or another ``function``, captured for such arguments; ``answers``: to its decisions.

        ``adapt``: makes of the program one that takes these arguments.
        """
        if "function" in how:
            how = {"adapt": None, **how}
        recapture = functools.partial(self._specializations.recapture, **how)
        capture = recapture(args, kwargs, order=0, answers=answers)
        original, adapt = how.get("function", self.original), how.get("adapt")
        original = original if adapt is None else adapt(original)
        return self._made_of(capture, recapture=recapture, original=original)

    def with_decisions(self, decisions: Sequence[Decision]) -> CapturedProgram:
        """This program with other decisions, whose locations are those of the program that it was made of."""
        recorded = self.current.recorded
        graph = dataclasses.replace(recorded.metadata.graph, decisions=tuple(decisions))
        metadata = dataclasses.replace(recorded.metadata, graph=graph)
        capture = dataclasses.replace(self.current.capture, recorded=dataclasses.replace(recorded, metadata=metadata))
        return self._made_of(capture)

    def flat_inputs(self, /, *args: Any, **kwargs: Any) -> list[Any]:
        """The inputs of ``graph_module`` for a call: state and the leaves of the arguments, in the signature's order.

        Raises:
            InputMismatchError: the program was captured for other inputs.
        """
        inputs = self.specialization.guards.check(self._convention.arguments(args, kwargs))
        return self.specialization.inputs_of_graph(inputs)

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
        joint = self._specializations.captured(self._convention.arguments(args, kwargs)).recorded.joint
        if isinstance(joint, JointGraph):
            return joint.module
        raise joint if isinstance(joint, Exception) else NO_JOINT_GRAPH.error()

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
            title: the title of the page; by default the name of the captured program.

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
        from functionalize import report  # imports jinja2, which only a report needs

        return report.write(report.build(self, title, self._metadata_writes(), self._recorded.shared), path)

    def _metadata_writes(self) -> list[tuple[str, str]]:
        """The inputs and state whose size, strides or storage a call changes, each with the op that does it."""
        named = [(self._metadata.inputs[mutation.input], mutation) for mutation in self._metadata.mutations]
        return [
            (entry.target or entry.name, str(op))
            for entry, mutation in named
            for op, _ in mutation.metadata + mutation.after
        ]


@hidden_from_dynamo
def _called_between_graphs(program: CapturedProgram, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call that Dynamo does not trace: it would trace how state is found and guarded, not what is computed."""
    return program(*args, **kwargs)
