"""Traces the backward of a program into the same graph, right after its forward: a joint graph.

Invariant: the backward goes through what autograd recorded while the program ran, so gradients are those that eager
gives: of ``no_grad`` regions, of functions with a backward of their own, of writes. Limits: differentiable once; a
backward that writes to what lives outside of it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from functionalize._torch import is_symbolic, on_handles, storage_key
from functionalize._torch.autograd import module_without_code
from functionalize._torch.fakes import FakeTensorMode
from functionalize._torch.tracing import track, tracked_node
from functionalize.aliasing.geometry import Layout
from functionalize.errors import UnsupportedMutationError
from functionalize.graph_capture.checkpointing import CheckpointRegions, is_random, item_of
from functionalize.graph_capture.inputs import TracedInput, gradient_edge
from functionalize.graph_capture.output_analysis import OutputAnalysis
from functionalize.runtime.autograd import JointGraph
from functionalize.runtime.metadata import (
    AliasKind,
    BaseResult,
    InputMutation,
    OutputAlias,
    ProgramMetadata,
    SymbolSources,
    needed_results,
)
from functionalize.transform.mode import FunctionalizeFunctionMode, FunctionalizeMode

EndJoint = Callable[[ProgramMetadata], JointGraph]


@dataclass(frozen=True)
class Differentiable:
    """What gradients are traced from: tensors, each with its position among the joint graph's outputs."""

    results: tuple[int, ...]  # outputs of the program's graph that the joint graph gives too
    bases: tuple[int, ...]  # bases whose values it gives beside them
    layouts: tuple[Layout | None, ...]  # of both
    targets: tuple[tuple[int, torch.Tensor], ...]


class JointTracer:
    """Traces one backward, through the dispatch mode that the forward ran in."""

    def __init__(
        self, mode: FunctionalizeMode, tracer: Any, fake_mode: FakeTensorMode, regions: CheckpointRegions
    ) -> None:
        self._mode, self._tracer, self._fake_mode, self.regions = mode, tracer, fake_mode, regions
        self._grad_fns: dict[int, Any] = {}

    def begin(self, inputs: Sequence[TracedInput]) -> None:
        """Remember, before the program runs, where autograd will find the gradients of its inputs."""
        seen: set[int] = set()
        with torch.inference_mode(False):  # a view that is asked there for its history makes it
            for entry in inputs:
                if entry.fake is not None and entry.gradient_of is None and id(entry.fake) not in seen:
                    seen.add(id(entry.fake))  # a tensor that is passed twice has one gradient
                    self._grad_fns[id(entry)] = entry.fake.grad_fn
                    entry.edge = gradient_edge(entry.fake)

    def written_inputs(self, inputs: Sequence[TracedInput]) -> set[int]:
        """The inputs, by the identities of their fakes, that autograd saw being written."""
        return {
            id(entry.fake)
            for entry in inputs
            if entry.fake is not None
            and entry.fake.requires_grad
            and entry.fake.grad_fn is not self._grad_fns.get(id(entry), entry.fake.grad_fn)
        }

    def wanted(
        self,
        inputs: Sequence[TracedInput],
        analysis: OutputAnalysis,
        aliases: Sequence[OutputAlias],
        handles: Sequence[torch.Tensor],
        mutations: Sequence[InputMutation],
        reconstructions: Sequence[Any],
    ) -> Differentiable:
        """What the joint graph is to give; ``reconstructions``: of what the program returns."""
        results = needed_results(mutations, aliases, analysis.bases, reconstructions, further_bases=True)
        layouts: dict[int, Layout | None] = dict.fromkeys(results)
        targets: dict[int, torch.Tensor] = {}
        for mutation in mutations:
            if mutation.differentiable and mutation.writes:
                fake = inputs[mutation.input].fake
                assert fake is not None
                targets[mutation.writes[-1].result] = fake
        based = list(zip(analysis.bases, analysis.base_handles, strict=True))
        own: list[tuple[OutputAlias | BaseResult, torch.Tensor]] = [*based]
        own += [pair for pair in zip(aliases, handles, strict=True) if pair[0].kind is AliasKind.RESULT]
        for described, handle in own:
            if described.result is not None:
                layouts[described.result] = described.layout
                targets |= {described.result: handle} if described.requires_grad else {}
        bases = [number for number, (base, _) in enumerate(based) if base.result is None]
        found = [(results.index(result), handle) for result, handle in targets.items()]
        found += [(len(results) + n, based[b][1]) for n, b in enumerate(bases) if based[b][0].requires_grad]
        laid_out = (*(layouts[result] for result in results), *(based[number][0].layout for number in bases))
        return Differentiable(tuple(results), tuple(bases), laid_out, tuple(sorted(found, key=lambda pair: pair[0])))

    def trace(
        self, inputs: Sequence[TracedInput], wanted: Differentiable, outputs: Sequence[Any], bases: Sequence[Node]
    ) -> EndJoint | Exception:
        """The joint graph, or why there is none. ``outputs``: of the program's graph; ``bases``: values of bases."""
        graph = self._tracer.graph
        placeholders = list(graph.find_nodes(op="placeholder"))
        forward = set(graph.nodes)
        tangents: list[Node] = []
        try:
            found = self._gradients(inputs, wanted, tangents)
            marked = self.regions.resolve()
            results = [outputs[position] for position in wanted.results]
            copied = _copied(graph, (placeholders, tangents), [*results, *bases, *found.values()], forward, marked)
            gradients = {key: None if node is None else n for n, (key, node) in enumerate(found.items())}
            return functools.partial(self._frozen, copied, inputs, gradients, wanted)
        except Exception as error:
            reason = RuntimeError(f"the backward of a captured program cannot be captured: {error}")
            reason.__cause__ = error
            return reason
        finally:
            for node in reversed(graph.nodes):
                if node not in forward and node not in tangents and not node.users:
                    graph.erase_node(node)
            for node in tangents:
                graph.erase_node(node)

    def _gradients(
        self, inputs: Sequence[TracedInput], wanted: Differentiable, tangents: list[Node]
    ) -> dict[int, Node | None]:
        """The nodes of the gradients, by the identities of the inputs; adds the placeholders of the tangents."""
        context = self._mode.context
        leaves = [entry for entry in inputs if entry.edge is not None]
        targets = [target for _, target in wanted.targets]
        given = [self._tangent(target, tangents) for target in targets]
        writes = {storage_key(tensor): 0 for tensor in self._tracer.tensor_tracker}
        writes |= {key: len(base.log) for key, base in context.graph.bases.items()}
        with FunctionalizeFunctionMode(context), self._mode:
            edges = [entry.edge for entry in leaves]
            gradients = torch.autograd.grad(targets, edges, given, allow_unused=True) if leaves else ()
        for key, base in context.graph.bases.items():
            outside = key in writes or base.held is not None
            if outside and len(base.log) > writes.get(key, 0):
                raise UnsupportedMutationError(
                    "the backward writes to a tensor that was there before it",
                    why="the backward of a captured program is a graph without effects",
                    hint="return the new value from the backward, or take the gradients inside of what is captured",
                )
        return {
            id(entry): None if gradient is None else self._node(context.value(gradient))
            for entry, gradient in zip(leaves, gradients, strict=True)
        }

    def _tangent(self, target: torch.Tensor, tangents: list[Node]) -> torch.Tensor:
        """A dense tensor for the gradient of a result, with a placeholder."""
        graph = self._tracer.graph
        made: torch.Tensor = on_handles(torch.empty_like, (target.detach(),), {"requires_grad": False})
        last = tangents[-1] if tangents else next(reversed(list(graph.find_nodes(op="placeholder"))), None)
        with graph.inserting_after(last) if last is not None else graph.inserting_before():
            node = graph.placeholder(f"tangents_{len(tangents)}")
        tangents.append(node)
        node.meta["val"] = made
        if is_symbolic(made):
            from functionalize._torch.symbols import track_input  # here: loads sympy

            with self._fake_mode:
                track_input(self._tracer, made, node)
        else:
            track(self._tracer, made, node)
        return made

    def _node(self, value: torch.Tensor) -> Node:
        node = tracked_node(self._tracer, value)
        if node is None:
            raise UnsupportedMutationError(
                "a gradient is a tensor that the backward did not compute",
                why="a graph cannot tell it from a constant",
                hint="compute the gradient in the backward, or return a copy (`.clone()`)",
            )
        return node

    def _frozen(
        self,
        graph: Graph,
        inputs: Sequence[TracedInput],
        gradients: dict[int, int | None],
        wanted: Differentiable,
        metadata: ProgramMetadata,
    ) -> JointGraph:
        """The joint graph once the metadata is known; before, ``graph`` takes all inputs of the program."""
        for node in graph.find_nodes(op="placeholder"):
            if node.name in {f"primals_{number}" for number in metadata.unused}:
                graph.erase_node(node)
        taken = metadata.taken
        written = {storage_key(inputs[m.input].fake) for m in metadata.mutations}  # type: ignore[arg-type]
        at_risk = [n for n in taken if inputs[n].fake is not None and storage_key(inputs[n].fake) in written]  # type: ignore[arg-type]
        return JointGraph(
            module_without_code(self._tracer.root, graph),
            tuple(taken),
            tuple(metadata.inputs[number].name for number in taken),
            wanted.results,
            wanted.bases,
            wanted.layouts,
            tuple(position for position, _ in wanted.targets),
            tuple(gradients.get(id(inputs[number])) for number in taken),
            frozenset(map(taken.index, at_risk)),
            _in_positions(metadata.symbols, taken, wanted.results),
        )


def _copied(
    graph: Graph,
    placeholders: tuple[Sequence[Node], Sequence[Node]],
    outputs: Sequence[Any],
    forward: set[Node],
    marked: dict[Node, int],
) -> Graph:
    """A copy of a graph, whose nodes tell partition functions what they want to know."""
    made, new = dict[Node, Node](), Graph()
    for kind, nodes in zip(("primals", "tangents"), placeholders, strict=True):
        for number, node in enumerate(nodes):
            made[node] = new.placeholder(f"{kind}_{number}")
            made[node].meta = dict(node.meta)
    new.graph_copy(graph, made)
    for node, copy in made.items():
        if node.op == "placeholder":
            continue
        phase = "forward" if node in forward else "backward"
        region = marked.get(item_of(node) or node)
        if region is not None:
            copy.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            if node.all_input_nodes:  # others are equal in all regions: merged, they belong to none
                copy.meta["ac_graph_id"] = region
        copy.meta["partitioner_tag"] = f"must_be_in_{phase}" if is_random(node) and region is None else f"is_{phase}"
    new.output(tuple(made[node] if isinstance(node, Node) else node for node in outputs))
    return new


def _in_positions(symbols: SymbolSources, taken: Sequence[int], results: Sequence[int]) -> SymbolSources:
    """Where the symbols are read among the inputs that a graph takes, and the results that it gives."""
    return SymbolSources(
        tuple((taken.index(number), layout) for number, layout in symbols.inputs if number in taken),
        tuple((taken.index(number), expression) for number, expression in symbols.numbers if number in taken),
        tuple((results.index(output), layout) for output, layout in symbols.outputs if output in results),
    )
