"""Traces the backward of a program into the same graph, right after its forward: a joint graph.

A joint graph of a higher order takes the gradients of the order before for results, and their tangents for inputs.

Invariant: the backward goes through what autograd recorded while the program ran, so gradients are those that eager
gives: of ``no_grad`` regions, of functions with a backward of their own, of writes. Limits: a backward that writes to
tensors from outside it is refused, unless they are its incoming gradients; a backward that draws random numbers is
differentiable once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from functionalize._torch import is_symbolic, on_handles, storage_key
from functionalize._torch.autograd import module_without_code
from functionalize._torch.dispatch import without_autocast
from functionalize._torch.fakes import CaptureFakeMode, FakeTensorMode
from functionalize._torch.subclasses.wrappers import Wrapping, is_wrapper_class, with_tangent_metadata
from functionalize._torch.symbols.tracing import track, tracked_node
from functionalize.aliasing.geometry import Layout
from functionalize.graph_capture.backward.dependence import forget_unread, reads_storages, sharing, sources_of
from functionalize.graph_capture.backward.differentiability import (
    check_devices,
    check_differentiable,
    check_has_gradients,
    reaching,
    refusals,
    refuse_written_pieces,
    requiring,
)
from functionalize.graph_capture.backward.gradient_hooks import ContainerSnapshots, hooks_suspended
from functionalize.graph_capture.finish.outputs import OutputAnalysis
from functionalize.graph_capture.inputs.inputs import TracedInput, WrapperInput, gradient_edge, is_leaf
from functionalize.graph_capture.inputs.wrappers import frozen_wrapping
from functionalize.graph_capture.parallel_modules import ParallelModules
from functionalize.graph_capture.refusals.torch_errors import of_derivative
from functionalize.graph_capture.trace.checkpointing import CheckpointRegions, copied
from functionalize.graph_capture.trace.data_oracle import DecisionsOfGraph
from functionalize.ops import tables
from functionalize.ops.collectives import starts
from functionalize.python_state.walk import StateWalk
from functionalize.reachability import nodes_behind
from functionalize.refusals.gradients import BACKWARD_ACTS, BACKWARD_WRITES, GRADIENT_OF_ELSEWHERE
from functionalize.refusals.random_numbers import DRAWN_IN_BACKWARD
from functionalize.refusals.tensors import OTHER_TANGENT, WRAPPER_TWICE_DIFFERENTIATED
from functionalize.refusals.values import RUNS_ONCE
from functionalize.runtime.autograd.joint import JointGraph, tangent_name
from functionalize.runtime.autograd.wrappers import Gradients, WrapperGradient, WrapperResult
from functionalize.runtime.metadata import (
    AliasKind,
    BaseResult,
    InputMutation,
    OutputAlias,
    ProgramMetadata,
    SymbolSources,
    frozen_layout,
    needed_results,
)
from functionalize.runtime.random_state import is_random, sources
from functionalize.tracing.sparse_elements import take_as_coalesced
from functionalize.transform.function_mode import FunctionalizeFunctionMode
from functionalize.transform.mode import FunctionalizeMode

EndJoint = Callable[[ProgramMetadata], JointGraph]


@dataclass(frozen=True, eq=False)
class Target:
    """A tensor that gradients are traced from."""

    positions: tuple[int, ...]  # among the joint graph's outputs: its own, or those of the parts of a wrapper
    tensor: torch.Tensor
    output: int | None = None  # of the program, for a wrapper
    wrapping: Wrapping | None = None


@dataclass(frozen=True, eq=False)
class _Gradient:
    """A gradient of a source: its node, or those of its parts; no node for a gradient of None."""

    tensor: torch.Tensor | None
    nodes: Sequence[Node]
    wrapping: Wrapping | None = None

    @property
    def ends(self) -> Sequence[Node | None]:
        """What becomes outputs of the graph."""
        return self.nodes or (None,)


@dataclass(frozen=True, eq=False)
class _Incoming:
    """The tangent of a target, and the tensors with placeholders that it is made of."""

    tensor: torch.Tensor
    parts: Sequence[torch.Tensor]
    wrapping: Wrapping | None = None


@dataclass(frozen=True)
class Differentiable:
    """The tensors that gradients are traced from, each with its position among the joint graph's outputs."""

    results: tuple[int, ...]  # outputs of the program's graph that the joint graph computes too
    bases: tuple[int, ...]  # bases whose values it computes beside them
    layouts: tuple[Layout | None, ...]  # of both
    targets: tuple[Target, ...]

    def giving(self, added: Sequence[int]) -> Differentiable:
        """The same with additional results, which are numbers."""
        count = len(self.results)
        layouts = (*self.layouts[:count], *[None] * len(added), *self.layouts[count:])
        targets = tuple(
            replace(target, positions=tuple(n + len(added) * (n >= count) for n in target.positions))
            for target in self.targets
        )
        return Differentiable((*self.results, *added), self.bases, layouts, targets)


class JointTracer:
    """Traces one backward, through the dispatch mode that the forward ran in."""

    def __init__(
        self,
        mode: FunctionalizeMode,
        tracer: Any,
        fake_mode: FakeTensorMode,
        regions: CheckpointRegions,
        order: int,
        states: Sequence[StateWalk],
        parallel: ParallelModules,
    ) -> None:
        """``order``: how often the program is differentiated, 0 for its forward alone.

        ``states``: the objects that the program reaches; ``parallel``: those that communicate in a backward.
        """
        self._parallel = parallel
        self._mode, self._tracer, self._fake_mode, self.regions = mode, tracer, fake_mode, regions
        self.order, self._states = order, states
        self._grad_fns: dict[int, Any] = {}
        self.refused: Mapping[int, Exception] = {}  # why some results have no gradient while others have one
        self.refusal: Exception | None = None  # why no result has one, or one that is written to an input has not
        regions.node_of = lambda tensor: tracked_node(tracer, mode.context.value(tensor))

    def begin(self, inputs: Sequence[TracedInput]) -> None:
        """Record, before the program runs, the gradient edges of its inputs, and their versions."""
        seen: set[int] = set()
        with torch.inference_mode(False):  # a view makes its history when it is read
            for entry in inputs:
                fake = entry.fake
                if fake is None:
                    continue
                if not fake.is_inference():
                    entry.version = fake._version
                if entry.gradient_of is None and id(fake) not in seen:
                    seen.add(id(fake))  # a tensor that is passed twice has one gradient
                    self._grad_fns[id(entry)] = fake.grad_fn
                    entry.edge = gradient_edge(fake) if entry.root is None else None
        if any(entry.edge is not None for entry in inputs):
            self._mode.context.notes.hides_writes = False

    def find_new_leaves(self, inputs: Sequence[TracedInput]) -> None:
        """Give an edge to the inputs that the program has set to require gradients."""
        seen = {id(entry.fake) for entry in inputs if entry.edge is not None}
        for entry in inputs:
            new = entry.edge is None and entry.gradient_of is None
            if new and is_leaf(entry.fake) and id(entry.fake) not in seen:
                seen.add(id(entry.fake))
                entry.edge = gradient_edge(entry.fake)  # type: ignore[arg-type]

    def written_inputs(self, inputs: Sequence[TracedInput]) -> set[int]:
        """The inputs whose writes autograd saw, by the identities of their fakes."""
        return {
            id(entry.fake)
            for entry in inputs
            if entry.fake is not None
            and entry.fake.requires_grad
            and entry.fake.grad_fn is not self._grad_fns.get(id(entry), entry.fake.grad_fn)
        }

    def asserted(self) -> list[Any]:
        """What the trace assumed about data-dependent symbols."""
        environment = self._fake_mode.shape_env
        if environment is None or not environment.deferred_runtime_asserts:
            return []
        from functionalize._torch.symbols.symbols import asserted  # here: loads sympy

        return list(asserted(environment))

    def wanted(
        self,
        inputs: Sequence[TracedInput],
        analysis: OutputAnalysis,
        aliases: Sequence[OutputAlias],
        handles: Sequence[torch.Tensor],
        mutations: Sequence[InputMutation],
        reconstructions: Sequence[Any],
    ) -> Differentiable:
        """What the joint graph computes and differentiates; ``reconstructions``: of what the program returns.

        Raises:
            UnsupportedMutationError: autograd would not accept what the program makes.
        """
        refuse_written_pieces(self._mode.context, inputs, mutations)
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
        pairs = zip(aliases, handles, strict=True)
        own += [pair for pair in pairs if pair[0].kind is AliasKind.RESULT or pair[0].own_gradient]
        for described, handle in own:
            if described.result is not None:
                layouts[described.result] = described.layout
                targets |= {described.result: handle} if described.requires_grad else {}
        bases = [number for number, (base, _) in enumerate(based) if base.result is None]
        wrappers = {n: handle for n, handle in enumerate(handles) if aliases[n].is_recorded}
        parts = {n: [aliases[part] for part in aliases[n].parts] for n in wrappers}
        for alias in (alias for each in parts.values() for alias in each if alias.result is not None):
            layouts[alias.result] = alias.layout  # type: ignore[index]
        single = {m.writes[-1].result for m in mutations if m.writes}
        targets = self._without_refused(inputs, targets, single, wrappers.values())
        numbered = [Target((results.index(result),), handle) for result, handle in targets.items()]
        numbered += [Target((len(results) + n,), based[b][1]) for n, b in enumerate(bases) if based[b][0].requires_grad]
        numbered.sort(key=lambda target: target.positions)
        for number, handle in wrappers.items():
            positions = tuple(results.index(alias.result) for alias in parts[number])  # type: ignore[arg-type]
            numbered.append(Target(positions, handle, number, aliases[number].wrapping))
        ordered = (*(layouts[result] for result in results), *(based[number][0].layout for number in bases))
        return Differentiable(tuple(results), tuple(bases), ordered, tuple(numbered))

    def _without_refused(
        self,
        inputs: Sequence[TracedInput],
        targets: dict[int, torch.Tensor],
        written: set[int],
        wrappers: Iterable[torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """The targets, by results, without those whose gradients are refused: a call refuses each of these by itself.

        ``written``: results that are written to inputs; autograd knows these by their gradients alone.
        ``wrappers``: results without a number of their own: if one is refused, all are.
        """
        edges = [entry.edge for entry in inputs if entry.edge is not None]
        with requiring(edges):
            refused = refusals(targets, edges)
            of_wrappers = refusals(dict(enumerate(wrappers)), edges)
        if of_wrappers:
            self.refusal = next(iter(of_wrappers.values()))
            return targets
        if len(refused) == len(targets) or not written.isdisjoint(refused):
            self.refusal = next(iter(refused.values()), None)
            return targets
        self.refused = refused
        return {result: target for result, target in targets.items() if result not in refused}

    def trace(
        self,
        inputs: Sequence[TracedInput],
        wanted: Differentiable,
        outputs: Sequence[Any],
        bases: Sequence[Node],
        decisions: DecisionsOfGraph,
    ) -> EndJoint | Exception | None:
        """The joint graph, or why it cannot be traced; None where no input gets a gradient.

        ``outputs``: of the program's graph, which get the backward's ``decisions``; ``bases``: values of bases.
        """
        graph = self._tracer.graph
        before = set(graph.nodes)
        tangents: list[list[Node]] = []
        contents = ContainerSnapshots(self._states)
        if self.refusal is not None:
            return self.refusal
        try:
            if self.order > 1:
                _refuse_wrappers(inputs, wanted)
            results: list[Any] = [*(outputs[position] for position in wanted.results), *bases]
            level = _Level([entry.edge for entry in inputs if entry.edge is not None], wanted, results)
            with hooks_suspended(inputs, self._mode.context.notes.asked), decisions.of_backward(before) as added:
                for _ in range(1, self.order):
                    level = self._next(level, tangents)
                forward = set(graph.nodes)
                with requiring(level.sources):
                    sources = self._parallel.gathered(level.sources)
                    reached = reaching([target.tensor for target in level.wanted.targets], sources)
                computed, incoming = self._gradients(level, tangents, create_graph=False)
                written = [self._written(part) for tangent in incoming for part in tangent.parts]
            contents.check()
            if self.order == 1 and not any(gradient.nodes for gradient in computed):
                return None
            marked = self.regions.resolve()
            _refuse_drawn(node for node in graph.nodes if node in forward - before)
            _refuse_acting(node for node in graph.nodes if node not in before)
            names = [entry.name for entry in inputs]
            names += [str(node.target) for nodes in tangents[:-1] for node in nodes]
            primals = [*graph.find_nodes(op="placeholder")][: len(inputs)] + [n for t in tangents[:-1] for n in t]
            level = level.giving(added if self.order == 1 else (), outputs)
            forward |= nodes_behind(outputs)
            placeholders = primals, tangents[-1] if tangents else []
            ends = [end for gradient in computed for end in gradient.ends]
            joint = copied(graph, placeholders, [*level.results, *ends, *written], forward, marked)
            gradients = dict(zip(self._numbers(inputs, tangents[:-1]), computed, strict=True))
            bits = _for_parts(reached, incoming, computed)
            return functools.partial(self._frozen, joint, inputs, names, gradients, level.wanted, incoming, bits)
        except Exception as error:
            return of_derivative(error, self.order)
        finally:
            _erase_backward(graph, before.union(nodes_behind(outputs)), [n for nodes in tangents for n in nodes])

    def _next(self, level: _Level, tangents: list[list[Node]]) -> _Level:
        """The gradients of one order as the results of the next, and their tangents as additional inputs."""
        gradients, incoming = self._gradients(level, tangents, create_graph=True)
        check_differentiable([gradient.tensor for gradient in gradients], level.sources)
        results = [(gradient.nodes[0], gradient.tensor) for gradient in gradients if gradient.tensor is not None]
        targets = [Target((n,), gradient) for n, (_, gradient) in enumerate(results) if gradient.requires_grad]
        layouts = [frozen_layout(Layout.of(g)) if g.layout is torch.strided else None for _, g in results]
        wanted = Differentiable(tuple(range(len(results))), (), tuple(layouts), tuple(targets))
        return _Level([*level.sources, *(each.tensor for each in incoming)], wanted, [node for node, _ in results])

    def _gradients(
        self, level: _Level, tangents: list[list[Node]], create_graph: bool
    ) -> tuple[list[_Gradient], list[_Incoming]]:
        """The gradients of a level, and their tangents, which get placeholders."""
        context = self._mode.context
        targets = [target.tensor for target in level.wanted.targets]
        tangents.append([])
        incoming = [self._incoming(target, tangents, create_graph) for target in level.wanted.targets]
        before = [(tensor, storage_key(tensor)) for tensor in self._tracer.tensor_tracker]
        writes = dict.fromkeys((key for _, key in before), 0)
        writes |= {key: len(base.log) for key, base in context.graph.bases.items()}
        # A backward runs after the regions of autocast that its forward ran in.
        with FunctionalizeFunctionMode(context), self._mode, requiring(level.sources), without_autocast():
            gradients: Sequence[Any] = [None] * len(level.sources)
            if targets and level.sources:
                mode = self._fake_mode
                with mode.sizes_count_at_the_end() if isinstance(mode, CaptureFakeMode) else contextlib.nullcontext():
                    passed = [tangent.tensor for tangent in incoming]
                    gradients = self._parallel.gradients(targets, level.sources, passed, create_graph=create_graph)
        if any(storage_key(tensor) != key for tensor, key in before):  # it was given other data
            raise BACKWARD_WRITES.error()
        check_devices(gradients, targets)
        own = set() if create_graph else {storage_key(part) for tangent in incoming for part in tangent.parts}
        own |= {storage_key(buffer) for buffer in self._parallel.buffers}
        for key, base in context.graph.bases.items():
            outside = (key in writes or base.held is not None) and key not in own
            if outside and len(base.log) > writes.get(key, 0):
                raise BACKWARD_WRITES.error()
        return list(map(self._gradient, gradients)), incoming

    def _gradient(self, gradient: torch.Tensor | None) -> _Gradient:
        if gradient is None:
            return _Gradient(None, ())
        value = self._mode.context.value
        if not is_wrapper_class(type(gradient)):
            return _Gradient(gradient, (self._node(value(gradient)),))
        wrapping = frozen_wrapping(gradient, "a gradient")
        return _Gradient(gradient, [self._node(value(part)) for part in wrapping.parts_of(gradient)], wrapping)

    def _incoming(self, target: Target, tangents: list[list[Node]], requires_grad: bool) -> _Incoming:
        """The gradient of a result that a call passes in."""
        if target.wrapping is None:
            check_has_gradients(target.tensor)
            made = self._tangent(target.tensor, tangents, requires_grad)
            return _Incoming(made, (made,))
        check_has_gradients(target.tensor)
        wanted = on_handles(lambda: with_tangent_metadata(target.tensor.detach()), (), {})
        wrapping = Wrapping.of(wanted)
        parts = [self._tangent(part, tangents, requires_grad) for part in wrapping.parts_of(wanted)]
        if len(parts) != len(target.positions):
            raise OTHER_TANGENT.error(kind=target.wrapping.name, other=wrapping.name)
        return _Incoming(wrapping.wrapped(parts), parts, frozen_wrapping(wanted, "a gradient"))

    def _written(self, tangent: torch.Tensor) -> Node | None:
        """The value that the backward has written to the gradient of a result; None if it has written nothing."""
        base = self._mode.context.graph.bases.get(storage_key(tangent))
        return self._node(self._mode.context.value(tangent)) if base is not None and base.log else None

    @staticmethod
    def _numbers(inputs: Sequence[TracedInput], tangents: Sequence[Sequence[Node]]) -> list[int]:
        """Which of the program's inputs, then tangents, get gradients."""
        leaves = [number for number, entry in enumerate(inputs) if entry.edge is not None]
        return leaves + [len(inputs) + number for number in range(sum(map(len, tangents)))]

    def _tangent(self, target: torch.Tensor, tangents: list[list[Node]], requires_grad: bool) -> torch.Tensor:
        """A dense tensor for the gradient of a result, with a placeholder."""
        graph = self._tracer.graph
        made: torch.Tensor = on_handles(torch.empty_like, (target,), {"requires_grad": False})
        made.requires_grad_(requires_grad)
        if made.layout is torch.sparse_coo:
            take_as_coalesced(made)  # as in calls
        last = next(reversed(list(graph.find_nodes(op="placeholder"))), None)
        with graph.inserting_after(last) if last is not None else graph.inserting_before():
            node = graph.placeholder(tangent_name(len(tangents), len(tangents[-1])))
        tangents[-1].append(node)
        node.meta["val"] = on_handles(torch.empty_like, (made,), {})  # nothing else holds this fake
        if is_symbolic(made):
            from functionalize._torch.symbols.symbols import track_input  # here: loads sympy

            with self._fake_mode:
                track_input(self._tracer, made, node)
        else:
            track(self._tracer, made, node)
        return made

    def _node(self, value: torch.Tensor) -> Node:
        node = tracked_node(self._tracer, value)
        if node is None:
            raise GRADIENT_OF_ELSEWHERE.error()
        return node

    def _frozen(
        self,
        graph: Graph,
        inputs: Sequence[TracedInput],
        names: Sequence[str],
        gradients: dict[int, _Gradient],
        wanted: Differentiable,
        incoming: Sequence[_Incoming],
        reached: Sequence[int],
        metadata: ProgramMetadata,
    ) -> JointGraph:
        """The joint graph once the metadata is known; until then ``graph`` takes all inputs of the program."""
        placeholders = list(graph.find_nodes(op="placeholder"))
        taken = [n for n in range(len(names)) if n not in metadata.unused]
        if self.order > 1:  # a higher order takes only what it uses
            for node in [node for node in graph.nodes if tables.acts(node.target)]:
                graph.erase_node(node)  # the call has done it
            if any(starts(node.target) for node in graph.nodes):
                raise RUNS_ONCE.error(reason="a derivative of a derivative computes the forward again")
            graph.eliminate_dead_code(Node.is_impure)  # random numbers stay
            forget_unread(graph)
            taken = [n for n in taken if placeholders[n].users or (n in gradients and gradients[n].nodes)]
        for unused in (placeholders[number] for number in set(range(len(names))).difference(taken)):
            _erase_with_users(graph, unused)
        fakes = {number: entry.fake for number, entry in enumerate(inputs) if entry.fake is not None}
        at_risk = _at_risk(fakes, taken, metadata) if self.order == 1 else []
        positions, count = dict[int, tuple[int, ...]](), 0
        for number, gradient in gradients.items():
            if gradient.nodes:
                positions[number] = tuple(range(count, count + len(gradient.nodes)))
            count += len(gradient.ends)
        wrappers = {n for n, entry in enumerate(inputs) if type(entry) is WrapperInput}
        wrapped = {n for n in positions if gradients[n].wrapping is not None or n in wrappers}
        return JointGraph(
            module_without_code(self._tracer.root, graph),
            tuple(taken),
            tuple(names[number] for number in taken),
            wanted.results,
            wanted.bases,
            wanted.layouts,
            tuple(position for target in wanted.targets for position in target.positions),
            Gradients(
                tuple(positions[n][0] if n in positions and n not in wrapped else None for n in taken),
                tuple(WrapperGradient(n, gradients[n].wrapping, positions[n]) for n in sorted(wrapped)),
                _wrapper_results(metadata, taken, wanted.targets, incoming),
            ),
            frozenset(map(taken.index, at_risk)),
            frozenset(taken.index(n) for n in metadata.detached if n in taken),
            reads_storages(graph),
            bool(self._mode.context.notes.hides_writes),
            _in_positions(metadata.symbols, taken, wanted.results if self.order == 1 else ()),
            sources_of(graph, len(wanted.layouts), sharing([fakes.get(number) for number in taken]), reached),
            _draws(self._tracer.root, graph, names),
        )


@dataclass(frozen=True)
class _Level:
    """What is differentiated: ``wanted`` with respect to ``sources``; ``results``: the nodes of the forward."""

    sources: Sequence[Any]
    wanted: Differentiable
    results: list[Any]

    def giving(self, added: Sequence[int], outputs: Sequence[Any]) -> _Level:
        """The same with additional results, some of the program's outputs."""
        count, nodes = len(self.wanted.results), [outputs[position] for position in added]
        return _Level(self.sources, self.wanted.giving(added), [*self.results[:count], *nodes, *self.results[count:]])


def _refuse_wrappers(inputs: Sequence[TracedInput], wanted: Differentiable) -> None:
    """Raise where a derivative of a gradient needs wrappers."""
    wrappings = [entry.wrapping for entry in inputs if type(entry) is WrapperInput and entry.edge is not None]
    for wrapping in (*wrappings, *(target.wrapping for target in wanted.targets)):
        if wrapping is not None:
            raise WRAPPER_TWICE_DIFFERENTIATED.error(kind=wrapping.name)


def _wrapper_results(
    metadata: ProgramMetadata, taken: Sequence[int], targets: Sequence[Target], incoming: Sequence[_Incoming]
) -> tuple[WrapperResult, ...]:
    """The results that are wrappers; ``taken``: the inputs that the graph takes."""
    results = list[WrapperResult]()
    for target, tangent in zip(targets, incoming, strict=True):
        if target.output is not None and target.wrapping is not None and tangent.wrapping is not None:
            aliases = [metadata.outputs[number] for number in metadata.outputs[target.output].parts]
            inputs = [alias.input if alias.kind is AliasKind.INPUT else None for alias in aliases]
            places = tuple(taken.index(number) if number in taken else None for number in inputs)
            results.append(WrapperResult(target.output, target.wrapping, target.positions, places, tangent.wrapping))
    return tuple(results)


def _for_parts(reached: Sequence[int], incoming: Sequence[_Incoming], gradients: Sequence[_Gradient]) -> Sequence[int]:
    """From which tangents autograd reaches each end of gradients; the parts of tangents have bits of their own."""
    bits, first = list[int](), 0
    for tangent in incoming:
        bits.append(((1 << len(tangent.parts)) - 1) << first)
        first += len(tangent.parts)
    expanded = [sum(bits[n] for n in range(len(bits)) if each >> n & 1) for each in reached]
    return [each for each, gradient in zip(expanded, gradients, strict=True) for _ in gradient.ends]


def _erase_backward(graph: Graph, kept: set[Node], tangents: Sequence[Node]) -> None:
    """Erase the nodes that are not to be kept, and the placeholders of tangents."""
    kept = kept.union(tangents)
    for node in reversed(graph.nodes):
        if node not in kept and not node.users:
            graph.erase_node(node)
    for node in tangents:
        graph.erase_node(node)


def _refuse_drawn(nodes: Iterable[Node]) -> None:
    """Raise if nodes of a backward that is differentiated draw random numbers."""
    for node in nodes:
        if is_random(node):
            raise DRAWN_IN_BACKWARD.error(op=node.target)


def _refuse_acting(nodes: Iterable[Node]) -> None:
    """Raise if nodes of a backward have side effects: nobody knows how often it will run."""
    for node in nodes:
        if tables.acts(node.target):
            raise BACKWARD_ACTS.error(getattr(node.meta.get("stack_trace"), "decisive", None), op=node.target)


def _erase_with_users(graph: Graph, node: Node) -> None:
    """Erase a node, and what is computed from it, which nobody needs."""
    path = [node]
    while path:
        user = next(iter(path[-1].users), None)
        if user is not None:
            assert user.op != "output"
            path.append(user)
        else:
            graph.erase_node(path.pop())


def _at_risk(fakes: Mapping[int, Any], taken: Sequence[int], metadata: ProgramMetadata) -> list[int]:
    """The inputs whose storages a call writes to, or whose version it raises: new metadata in place is a write."""
    changed = {*metadata.versions, *(mutation.input for mutation in metadata.mutations)}
    storages = {storage_key(fakes[number]) for number in changed}
    return [number for number in taken if number in fakes and storage_key(fakes[number]) in storages]


def _in_positions(symbols: SymbolSources, taken: Sequence[int], results: Sequence[int]) -> SymbolSources:
    """Where the symbols are read among the inputs and the results of a graph."""
    return SymbolSources(
        tuple((taken.index(number), layout) for number, layout in symbols.inputs if number in taken),
        tuple((taken.index(number), expression) for number, expression in symbols.numbers if number in taken),
        tuple((results.index(output), layout) for output, layout in symbols.outputs if output in results),
        tuple((results.index(output), symbol) for output, symbol in symbols.computed if output in results),
    )


def _draws(root: torch.nn.Module, graph: Graph, names: Sequence[str]) -> tuple[Any, ...]:
    """What the nodes that draw random numbers draw from: the name of an input, a generator, or a device with one."""
    return tuple(
        names[int(source.removeprefix("primals_"))] if isinstance(source, str) else source
        for source in sources(graph, root)
    )
