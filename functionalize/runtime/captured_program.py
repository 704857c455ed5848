"""A captured program: its graph, the account of its writes, and a call that does what the original does.

Invariant: a call computes by the graph alone; then it writes back, and gives the outputs the aliasing of the original.
Limits: calls with inputs of another look or aliasing are refused, or captured anew.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule

from functionalize._torch import pytree, storage_key
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.history import AliasHistory
from functionalize.errors import InputMismatchError, StateMismatchError
from functionalize.graph_capture.finalize import Mutation, Outcome
from functionalize.runtime.autograd import Call, Replay, backward_of, refuse_written
from functionalize.runtime.copy_epilogue import with_copies
from functionalize.runtime.graph_inputs import Lifted, Source, is_leaf
from functionalize.runtime.guards import Guard
from functionalize.runtime.output_aliasing import Presenter, Sizes, refuse_other_sizes, unwritten, write_back
from functionalize.runtime.reinplace import runnable
from functionalize.runtime.side_effects import Output, follow


class CapturedProgram:
    """What :func:`functionalize.capture` returns."""

    def __init__(self, lifted: Lifted, outcome: Outcome, *, remove: str) -> None:
        self.remove = remove
        self._account = outcome  # of the capture that made the graph
        self.again: Callable[..., CapturedProgram] | None = None  # captures the same program for other inputs
        self.backward_of: Callable[..., CapturedProgram] | None = None  # captures the gradients for some tangents
        self.differentiated: list[Source] = []  # of such a program: whose gradients it gives
        self.recaptures = False  # whether other inputs are captured anew
        self.graph = outcome.tracer.graph
        self._root = outcome.tracer.root
        self._follow(lifted, outcome)

    def _follow(self, lifted: Lifted, outcome: Outcome) -> None:
        self._lifted, self._outcome = lifted, outcome
        self._calls: dict[Any, Call] = {}  # by the sizes of the inputs
        self._guard = Guard(lifted, outcome, gradients_matter=self.needs_gradients)

    @functools.cached_property
    def signature(self) -> ExportGraphSignature:
        """What each input and output of ``graph_module`` is, in the words of ``torch.export``."""
        return self._account.signature()

    @property
    def mutations(self) -> list[Mutation]:
        """Every write to an input or to state."""
        return self._account.mutations

    @property
    def alias_history(self) -> AliasHistory:
        """Every storage that was viewed or written, with its views and writes."""
        return self._account.historian.history

    @property
    def leaves_gradients(self) -> bool:
        """Whether a call changes the ``grad`` of inputs or parameters."""
        return bool(self._outcome.gradients)

    @property
    def has_all_gradients(self) -> bool:
        """Whether every leaf had a gradient when the program was captured."""
        sources = self._outcome.sources
        return {id(s.grad_of) for s in sources if s.grad_of} == {id(s) for s in sources if is_leaf(s.value)}

    @property
    def needs_gradients(self) -> bool:
        """Whether what a call does depends on which gradients are there."""
        if self._outcome.gradients_read:
            return not self._outcome.only_accumulates
        return self.leaves_gradients and not self.has_all_gradients

    def serves_without_gradients(self, other: CapturedProgram) -> bool:
        """Whether this program, captured with gradients, does what ``other`` does, captured without."""
        read = self._outcome.gradients_read
        accumulated = read <= other._outcome.gradients.keys() and self._outcome.only_accumulates
        return not read or accumulated

    @functools.cached_property
    def graph_module(self) -> GraphModule:
        """The graph, as a module: of state and inputs, in the order of the signature."""
        return GraphModule(self._root, self.graph, "Captured")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, write back, and return what the original does.

        Raises:
            InputMismatchError: the inputs are not such as the program was captured for.
        """
        arguments = self._lifted.walk(list(args), dict(kwargs))
        try:
            inputs = self._guard.inputs(arguments)
        except InputMismatchError as error:
            other = None if self.again is None else self._another(error, args, kwargs)
            if other is None:
                raise
            return other(*args, **kwargs)
        outcome = self._outcome
        results = self._results(inputs, args, kwargs)
        refuse_other_sizes(outcome.leaves, results)
        states, sizes = [self._lifted.state, arguments], self._sizes(inputs, results)
        originals = self._originals(inputs)
        with torch.no_grad():
            stand_in = functools.partial(self._stand_in, inputs, originals, sizes)
            write_back(outcome.backs, inputs, outcome.first_places, results, originals, stand_in, sizes)
        presenter = Presenter(outcome.leaves, inputs, outcome.places, results, sizes, self._left(originals))
        for source, gradient in outcome.gradients.items():
            inputs[source].grad = None if gradient is None else presenter.tensor(gradient)
        for change in outcome.changes:
            change.apply(states, presenter.tensor)
        leaves = [
            results[recipe.place] if isinstance(recipe, Output) else follow(recipe, states, presenter.tensor)
            for recipe in outcome.outputs
        ]
        assert outcome.spec is not None
        return pytree.tree_unflatten(leaves, outcome.spec)

    @functools.cached_property
    def _run_in_place(self) -> GraphModule | None:
        """The graph with writes in the memory of inputs that are written back anyway, where there are such."""
        return runnable(self._outcome, self._root, apart=self._guard.apart)

    @property
    def inputs(self) -> list[Source]:
        """What the graph takes, in order."""
        unused = self._outcome.unused
        return [source for number, source in enumerate(self._lifted.sources) if number not in unused]

    def _results(self, inputs: Sequence[Any], args: Any, kwargs: Any) -> Sequence[Any]:
        """What the graph gives, known to autograd where the original's results are."""
        outcome, unused = self._outcome, self._outcome.unused
        tracked = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in outcome.leaves)
        if not tracked or self.leaves_gradients:  # its backward is part of it
            with torch.no_grad():
                run = self._run_in_place or self.graph_module
                return run(*(v for place, v in enumerate(inputs) if place not in unused))  # type: ignore[no-any-return]
        refuse_written(self._lifted.sources, outcome, inputs)
        given = [v for place, v in enumerate(unwritten(inputs, outcome.backs)) if place not in unused]
        return Replay.apply(self._replayed(args, kwargs, inputs), *given)  # type: ignore[no-untyped-call, no-any-return]

    def _replayed(self, args: Any, kwargs: Any, inputs: Sequence[Any]) -> Call:
        """The graph and its backward, which is captured for the sizes of the call."""
        outcome, sources = self._outcome, self._lifted.sources
        key = tuple(value.size() for value in inputs if isinstance(value, torch.Tensor))
        if key not in self._calls:
            assert self.backward_of is not None
            sizes = self._sizes(inputs, ())
            numbers = [n for n, leaf in enumerate(outcome.leaves) if leaf.requires_grad and leaf.output is not None]
            numbers = [n for n in dict.fromkeys(outcome.result_numbers) if n in numbers]
            places = [sizes.place(outcome.leaves[n].place) for n in numbers]
            devices = [outcome.handles[n].device for n in numbers]
            tangents = list(zip(places, devices, strict=True))
            constants = [s for s in sources if s.spot is None and s.grad_of is None and s.value.requires_grad]
            self._calls[key] = Call(
                self.graph_module,
                tuple(source.name for source in self.inputs),
                tuple(outcome.leaves[n].output or 0 for n in numbers),
                any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in self.graph.nodes),
                backward_of(self.backward_of, constants, tangents, args, kwargs),
            )
        return self._calls[key]

    def _another(self, error: InputMismatchError, args: Any, kwargs: Any) -> CapturedProgram | None:
        """A program for a call that this one is not for. State that leaves the graph as it is is followed."""
        assert self.again is not None
        if self.recaptures:
            return self.again(args, kwargs)
        if isinstance(error, StateMismatchError):
            other = self.again(args, kwargs)
            if str(other.graph) == str(self.graph) and str(other.signature) == str(self.signature):
                self._follow(other._lifted, other._outcome)
                return self
        return None

    def _sizes(self, inputs: Sequence[Any], results: Sequence[Any]) -> Sizes:
        """What the symbols among the program's sizes are in a call."""
        sizes, (of_inputs, of_results) = Sizes(), self._outcome.symbolic
        for number, place in of_inputs:
            sizes.learn(place, inputs[number])
        for output, place in of_results if results else ():
            sizes.learn(place, results[output])
        return sizes

    def _left(self, originals: Mapping[int, torch.Tensor]) -> dict[int, tuple[torch.Tensor, Layout]]:
        places = self._outcome.first_places
        return {source: (tensor, places[source]) for source, tensor in originals.items()}

    def _originals(self, inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Tensors that keep the storages of inputs which are about to leave them, or have writes beyond themselves."""
        backs = self._outcome.backs
        if not any(back.metadata or back.place is not None for back in backs):
            return {}
        return {back.source: inputs[back.source].detach() for back in backs}

    def _stand_in(self, inputs: Sequence[Any], originals: Mapping[int, Any], sizes: Sizes, argument: Any) -> Any:
        """What a call has for what a metadata op of the program names: tensors, sizes, lists of sizes."""
        if isinstance(argument, (list, tuple)):
            return [self._stand_in(inputs, originals, sizes, item) for item in argument]
        if not isinstance(argument, torch.Tensor):
            return sizes.number(argument) if isinstance(argument, torch.SymInt) else argument
        source = self._outcome.source_of(argument)
        if source is not None:
            return inputs[source]
        source = self._outcome.storages.get(storage_key(argument))
        if source is not None:
            return originals[source]
        return torch.empty(list(map(sizes.number, argument.size())), dtype=argument.dtype, device=argument.device)

    def flat_inputs(self, *args: Any, **kwargs: Any) -> list[Any]:
        """What ``graph_module`` takes for a call: state and the leaves of the arguments, in the signature's order.

        Raises:
            InputMismatchError: the inputs are not such as the program was captured for.
        """
        values = self._guard.inputs(self._lifted.walk(list(args), dict(kwargs)))
        return [value for number, value in enumerate(values) if number not in self._outcome.unused]

    def with_copy_epilogue(self) -> GraphModule:
        """The same graph ending in ``copy_`` onto what it writes; it returns the caller's outputs alone."""
        return with_copies(self._outcome, self._root)

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

        return report.write(report.build(self, title, self._metadata_writes(), self._shared()), path)

    def _metadata_writes(self) -> list[tuple[str, str]]:
        """The inputs and state whose size, strides or storage a call changes, each with the op that does it."""
        named = [(self._outcome.sources[back.source], back) for back in self._outcome.backs]
        return [
            (source.target or source.name, str(op)) for source, back in named for op, _ in back.metadata + back.after
        ]

    def _shared(self) -> list[list[str]]:
        """The names of graph inputs that share a storage, storage by storage."""
        groups: dict[int, list[str]] = {}
        for source in self._outcome.sources:
            if isinstance(source.value, torch.Tensor):
                groups.setdefault(storage_key(source.value), []).append(source.name)
        return [group for group in groups.values() if len(group) > 1]
