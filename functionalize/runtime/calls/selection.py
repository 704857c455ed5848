"""Chooses the specialization of a program that runs a call.

Takes the arguments of a call and gives a :class:`Chosen`: a kept specialization whose guards let the call pass, or a
new one that is captured for it. If the call takes other branches, :meth:`Specializations.another` gives the next
specialization to try.

Invariant: a call is computed by a specialization whose guards let it pass, and it takes the branches of its capture.
Limits: ``cache_size`` kinds of calls, with as many variants each; a program that takes another branch when it runs
again on the same data is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from operator import attrgetter

from functionalize.call_stack import raised_by_program
from functionalize.errors import (
    DataDependentError,
    GradientMismatchError,
    InputMismatchError,
    NotCapturedWarning,
    NumberMismatchError,
    StateMismatchError,
)
from functionalize.ops.collectives import starts
from functionalize.refusals.calls import NUMBERS_VARY, WAYS_VARY
from functionalize.refusals.refusal import Refusal
from functionalize.refusals.values import OTHER_BRANCH_AGAIN, TOO_MANY_VARIANTS
from functionalize.runtime.arguments import CallArguments
from functionalize.runtime.autograd.partition import PartitionFn
from functionalize.runtime.calls.specialization import Capture, Chosen, Recapture, Specialization
from functionalize.runtime.calls.stages import RunAsWritten
from functionalize.runtime.decisions import Answers, agree


class Specializations:
    """The captures of one program: the first for the example inputs, later ones for calls that needed them."""

    def __init__(
        self,
        capture: Capture,
        recapture: Recapture,
        partition_fn: PartitionFn | None,
        *,
        on_guard_failure: str,
        cache_size: int,
    ) -> None:
        self.recapture, self.partition_fn = recapture, partition_fn
        self.on_guard_failure, self.cache_size = on_guard_failure, cache_size
        self.first = Specialization(capture, partition_fn, recapture)
        self.kept = [self.first]  # the last one that was called comes first
        self._lock = threading.Lock()

    def passed(self, arguments: CallArguments) -> Chosen | None:
        """The specialization for a call like an earlier one; None if the guards must check the call."""
        for index, specialization in enumerate(self.kept):
            inputs = specialization.passed(arguments)
            if inputs is not None:
                if index:
                    self.use(specialization)
                return Chosen(specialization, inputs)
        return None

    def choose(self, arguments: CallArguments) -> Chosen:
        """The specialization for a call, captured if none that is kept lets it pass.

        Raises:
            InputMismatchError: the program was captured for other calls, and is not captured again.
        """
        refusals: dict[Specialization, InputMismatchError] = {}
        for specialization in sorted(dict.fromkeys([self.first, *self.kept]), key=attrgetter("awaits_gradients")):
            inputs = specialization.checked(arguments)
            if isinstance(inputs, list):
                chosen = Chosen(specialization, inputs)
                if specialization.awaits_gradients and not arguments.are_examples:
                    chosen = self._with_gradients(specialization, arguments)
                self.use(chosen.specialization)
                return chosen
            refusals[specialization] = inputs
        refused = [refusals.pop(self.first), *refusals.values()]
        changes = set[int]().union(*(specialization.guards.changes for specialization in self.kept))
        # Whether the program itself changes what differs, or nobody chooses it.
        is_followed = any(id(held) in changes for error in refused for held in error.containers)
        of_state = [error for error in refused if isinstance(error, StateMismatchError)]
        is_followed |= not all(error.is_option for error in of_state)
        by_gradients = any(isinstance(error, GradientMismatchError) for error in refused)
        follows = is_followed or by_gradients or self.on_guard_failure == "recapture"
        if not (follows or of_state):
            raise refused[0]
        examples = arguments.are_examples  # their values decide nothing: the branches are those of the last call
        made = self.kept[0].again(arguments.args, arguments.kwargs) if examples else self.captured(arguments)
        numbers = [error for error in refused if isinstance(error, NumberMismatchError)]
        taken = any(not made.guards.python_guards.compares(error.containers, error.key) for error in numbers)
        if not (follows or taken or self._stays(made, arguments)):
            raise refused[0]
        chosen = Chosen.of_new(made, arguments)
        self.use(made)
        return chosen

    def _stays(self, made: Specialization, arguments: CallArguments) -> bool:
        """Whether a capture with other Python state computes the same as a kept specialization."""
        last = self.kept[0]
        if last.awaits_gradients and not made.awaits_gradients:  # only the forward can be compared
            made = self.captured(arguments, order=0)
        if any(made.is_like(specialization) for specialization in self.kept):
            return True
        if not last.decisions or last.answers == made.answers:
            return False
        try:  # it took other branches: compare it on the branches of the kept one
            order = 0 if last.awaits_gradients else 1
            return self.captured(arguments, last.answers, order=order).is_like(last)
        except DataDependentError:  # it does not have these branches
            return False

    def captured(self, arguments: CallArguments, answers: Answers | None = None, *, order: int = 1) -> Specialization:
        """The program captured for such arguments; ``order``: 1 with its backward, 0 for the forward alone."""
        capture = self.recapture(arguments.args, arguments.kwargs, order=order, answers=answers)
        return Specialization(capture, self.partition_fn, self.recapture)

    def agreeing(
        self, tried: Sequence[Specialization], answers: Mapping[object, Answers], arguments: CallArguments
    ) -> Chosen | None:
        """A kept specialization that was not tried, whose answers begin with those that the call gave.

        ``answers``: by kind of call; the answers of one kind say nothing of another's.
        """
        for specialization in self.kept:
            if specialization not in tried and agree(answers.get(specialization.kind, ()), specialization.answers):
                inputs = specialization.checked(arguments)
                if isinstance(inputs, list):
                    return Chosen(specialization, inputs)
        return None

    def another(
        self, agreeing: Chosen | None, call_kind: object, answers: Answers, arguments: CallArguments
    ) -> Chosen | None:
        """``agreeing``, with its backward if the call needs it, or a new variant.

        None if the capture on these branches raises an error of the program's own, or runs into an operator's error.
        """
        try:
            if agreeing is None:
                chosen = self._new_variant(call_kind, answers, arguments)
            elif agreeing.specialization.awaits_gradients:
                chosen = self._with_gradients(agreeing.specialization, arguments)
            else:
                chosen = agreeing
        except Exception as error:
            if not (raised_by_program(error) or isinstance(error, RunAsWritten)):
                raise
            return None
        self.use(chosen.specialization)  # before another thread looks for it
        return chosen

    def without_variant(self, call_kind: object, answers: Answers) -> Refusal[NotCapturedWarning] | None:
        """Why the original runs where the limit of variants is reached; None if it is not, or the call is refused.

        Each value of a float needs a variant. A rank that raises would leave other ranks waiting for its collectives.
        """
        if len(self._variants(call_kind)) < self.cache_size:
            return None
        if type(answers[-1]) is float:
            return NUMBERS_VARY
        nodes = (node for specialization in self.kept for node in specialization.recorded.graph.nodes)
        return WAYS_VARY if any(starts(node.target) for node in nodes) else None

    def _variants(self, call_kind: object) -> list[Specialization]:
        return [specialization for specialization in self.kept if specialization.kind is call_kind]

    def _new_variant(self, call_kind: object, answers: Answers, arguments: CallArguments) -> Chosen:
        variants = self._variants(call_kind)
        if len(variants) >= self.cache_size:
            raise too_many(variants, answers, self.cache_size)
        made = self.captured(arguments)
        chosen = Chosen.of_new(made, arguments)
        if not (variants and variants[0].takes_as(made)):  # numbers that changed have become inputs
            return chosen
        if not agree(answers, made.answers):
            raise undecided(answers, made)
        made.kind = call_kind
        return chosen

    def _with_gradients(self, forward: Specialization, arguments: CallArguments) -> Chosen:
        """The replacement, with a backward, of a specialization without one, for a call that its guards let pass.

        The program runs on fakes once more, before the call changes anything. If this call takes another branch, the
        capture becomes a new variant, as long as there is room for it.
        """
        made = self.captured(arguments)
        variants = [variant for variant in self._variants(forward.kind) if variant is not forward]
        for variant in variants:
            inputs = variant.checked(arguments) if made.answers == variant.answers and variant.takes_as(made) else None
            if isinstance(inputs, list):
                return Chosen(variant, inputs)
        chosen = Chosen.of_new(made, arguments)
        if forward.takes_as(made):
            made.kind = forward.kind
        if agree(forward.answers, made.answers) or len(variants) + 1 >= self.cache_size:
            self._replace(forward, made)
        else:
            self.use(made)
        return chosen

    def _replace(self, forward: Specialization, made: Specialization) -> None:
        """Replace a specialization without a backward; it stays the first one if it serves more sizes."""
        with self._lock:
            if forward in self.kept:
                made.number = forward.number  # its place among the variants
            self.kept = [made, *(specialization for specialization in self.kept if specialization is not forward)]
        if self.first is forward and made.takes_sizes_of(forward):
            self.first = made

    def use(self, chosen: Specialization) -> None:
        """Move a specialization to the front, and drop those that were not called for long."""
        with self._lock:
            ordered = [chosen, *(specialization for specialization in self.kept if specialization is not chosen)]
            call_kinds = list(dict.fromkeys(specialization.kind for specialization in ordered))[: self.cache_size]
            self.kept = [specialization for specialization in ordered if specialization.kind in call_kinds]


def too_many(variants: Sequence[Specialization], answers: Answers, bound: int) -> DataDependentError:
    """The error for more variants than are kept. ``answers``: those of the call so far."""
    nearest = max(variants, key=lambda variant: _common(answers, variant.answers))
    last = nearest.decisions[: len(answers)][-1]
    return TOO_MANY_VARIANTS.error(last.location, bound=bound, answer=answers[-1])


def _common(answers: Answers, others: Answers) -> int:
    return sum(agree(answers[:count], others) for count in range(1, len(answers) + 1))


def undecided(answers: Answers, made: Specialization) -> DataDependentError:
    """The error for a program that was captured for a call, and then takes another branch than the call did."""
    decision = made.decisions[: len(answers)][-1]
    return OTHER_BRANCH_AGAIN.error(decision.location, before=decision.answer, now=answers[-1])
