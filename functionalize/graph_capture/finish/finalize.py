"""Ends the graph of a recorded program: write-backs and results become outputs, the rest becomes metadata.

Invariant: the graph's outputs are values alone; the metadata says what each is to the caller (an input, a view of one,
a part to copy). Limits: strided tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from functionalize._torch import HOOKS, LAYOUT, OFFSET, STORAGE, FakeTensor, storage_key
from functionalize._torch.fakes import CaptureFakeMode
from functionalize._torch.symbols.traced_symbols import symbol_node
from functionalize._torch.symbols.tracing import keeps_workspaces, tracked_node
from functionalize._torch.tensors import SYMBOLS
from functionalize.aliasing.bases import Base
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.history import Historian
from functionalize.call_stack import Location, Origin
from functionalize.graph_capture.backward.dependence import counting_from_storages, drop_dead
from functionalize.graph_capture.backward.differentiability import (
    forgets,
    reach_made_leaves,
    refuse_new_histories,
    refuse_views_at_unknown_offsets,
    refused_write,
)
from functionalize.graph_capture.backward.gradients_of_state import drop_unread, left_at_made, left_by
from functionalize.graph_capture.backward.joint_graph import EndJoint, JointTracer
from functionalize.graph_capture.finish.graph_symbols import symbol_sources
from functionalize.graph_capture.finish.objects import LEAF, ObjectGraph
from functionalize.graph_capture.finish.outputs import (
    GRADIENTS,
    MUTATIONS,
    GraphOutputs,
    InputLayouts,
    OutputAnalysis,
    signature_of,
)
from functionalize.graph_capture.inputs.inputs import ConstantLifter, PartInput, TracedInput, WrapperInput, drop_unused
from functionalize.graph_capture.trace.data_oracle import Decider, DecisionsOfGraph
from functionalize.graph_capture.trace.example_data import refuse_acting
from functionalize.ops import tables
from functionalize.ops.collectives import communicates
from functionalize.python_state.reconstruct import GraphNumber, TensorRef
from functionalize.reachability import nodes_behind
from functionalize.refusals.tensors import REACHED_TWICE, WRAPPER_WRITTEN_WITH_GRADIENT
from functionalize.runtime.autograd.joint import Backward, JointGraph
from functionalize.runtime.calls.precheck import precheck_of
from functionalize.runtime.calls.specialization import Recorded
from functionalize.runtime.decisions import Decision
from functionalize.runtime.graphs.waits import sink_waits
from functionalize.runtime.metadata import (
    BaseResult,
    GraphTraits,
    InputMutation,
    InputRef,
    NewStorage,
    OutputAlias,
    PartialWrite,
    ProgramMetadata,
    SymbolSources,
    frozen_layout,
    frozen_number,
    looked_up,
)
from functionalize.runtime.outputs.side_effects import LeftInObjects
from functionalize.runtime.random_state import sources
from functionalize.transform.api import tracing_disabled
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.epilogue import Epilogue, Input, WriteBack


class GraphFinalizer:
    """Ends one graph. Called when the program has run, below its dispatch mode."""

    def __init__(
        self,
        context: FunctionalizationContext,
        tracer: Any,
        inputs: list[TracedInput],
        current_origin: Callable[[], Origin],
        snapshot: Callable[[torch.Tensor], Any],
        decider: Decider | None = None,
    ) -> None:
        """``current_origin``: where the program is; ``snapshot``: a tensor's metadata, for a node's meta."""
        self.context, self.tracer, self.inputs, self.decider = context, tracer, inputs, decider
        self.objects = ObjectGraph(tracer)
        self.handles = self.objects.handles  # what the caller will get
        self.lifter = ConstantLifter(tracer, inputs, snapshot)
        self.outputs = GraphOutputs()
        self._historian = context.historian = Historian(self._name_of, current_origin)
        context.graph.keeps_writes = True
        self._values: dict[int, Node] = {}  # of all outputs, by the identity of the handle
        self._object_numbers: list[int] = []  # the outputs that are numbers in objects
        self._results: dict[int, int] = {}  # of handles, by number: the output with the value
        self._written: list[tuple[OutputKind, str, Base]] = []
        self._numbers: dict[int, int] = {}  # of the inputs, by the identities of their fakes
        self._storages = {id(entry.fake): storage_key(entry.fake) for entry in inputs if entry.fake is not None}

    def _name_of(self, base: Base) -> str:
        node = None if base.root.value is None else tracked_node(self.tracer, base.root.value)
        return "storage" if node is None else str(node.name)

    def finalize(
        self, entries: list[Input], returned: list[Any], left_in_objects: LeftInObjects, joint: JointTracer
    ) -> Recorded:
        """Compute the missing nodes, trace the backward, and end the graph.

        ``entries``: the program's inputs as they were before it ran; ``returned``: a list that holds its return value.
        """
        gradients, writes = left_by(self.inputs, self.objects), {id(entry): entry.writes for entry in self.inputs}
        gives = any(number is not None for number in gradients.values()) or self._adds_to_wrappers()
        whole = HOOKS in self.context.notes.asked and gives
        left = len(self.handles)  # in objects, and as gradients
        leaves, spec = self.objects.leaves(returned[0])
        references = list(map(self.objects.reference, leaves))
        end_of_result = len(self.handles)
        reconstruction = (
            None if self.objects.is_tree(returned[0]) else self.objects.reconstruction(returned[0], "the result")
        )
        held = left_at_made(self.inputs, self.objects)
        others = [*range(left), *range(end_of_result, len(self.handles))]
        drop_unused(self.inputs, self.tracer.graph, self.context, {id(handle) for handle in self.handles})
        seen = joint.written_inputs(self.inputs)
        with tracing_disabled():
            epilogue = Epilogue(self.context, entries, self.objects.plain_handles, whole=seen)
            backs = epilogue.prepare()
            self._lift_constants([back.input.handle for back in backs], entries)
            self._compute_nodes(backs, entries)
        begun = {id(entry.handle): entry for entry in entries}
        layouts = self._layouts(begun, {id(entry.handle) for entry in epilogue.moved})
        mutations = self._write_backs(backs, layouts, seen)
        results = self._add_results(references, others, gradients)
        analysis = OutputAnalysis(self.inputs, layouts, not whole, self.context.notes.hooked)
        aliases = analysis.outputs(self.objects, self._results, held)
        reaches_made = reach_made_leaves(() if whole else self.handles, aliases, range(left, end_of_result))
        read, sized = looked_up(mutations, aliases, analysis.bases), (self.inputs, layouts.before, aliases)
        symbols = symbol_sources(self.tracer, self.outputs, sized, read, joint.asserted())
        refuse_views_at_unknown_offsets(aliases, symbols)
        decisions = DecisionsOfGraph(self.decider, self.outputs)
        further = [*(output for output, _ in symbols.computed), *(decision.output for decision in decisions.all)]
        wanted = [*results, *map(GraphNumber, [*further, *self._object_numbers])]
        self.context.historian = None  # operators of the backward are not the program's
        traced = None if whole else self._traced(joint, analysis, aliases, begun, mutations, wanted, decisions)
        joint.regions.resolve()  # tracing is done: erase what a checkpointed region drew a second time
        self._count_writes(writes, {mutation.input for mutation in mutations}, layouts.old_storages)
        metadata = self._metadata(
            gradients=gradients,
            mutations=mutations,
            aliases=aliases,
            bases=analysis.bases,
            results=results if reconstruction is None else (reconstruction,),
            spec=spec if reconstruction is None else LEAF,
            left=left_in_objects,
            layouts=layouts,
            symbols=symbols,
            decisions=decisions,
        )
        if (metadata.graph.acts or metadata.graph.communicates) and decisions.all:
            self._refuse_acting(metadata, all_ops=traced is not None)
        ended = self._recorded(metadata, traced(metadata) if callable(traced) else traced)
        refused = joint.refused if isinstance(ended.joint, JointGraph) else {}
        return replace(ended, refused=refused, reaches_made=reaches_made)

    def _adds_to_wrappers(self) -> bool:
        """Whether gradients that are wrappers were written: autograd accumulates these in place."""
        parts = [entry for entry in self.inputs if type(entry) is PartInput]
        owned = [part for part in parts if part.wrapper.gradient_of is not None]
        views = (self.context.graph.find(entry.fake) for entry in owned if entry.fake is not None)
        return any(view is not None and view.base.log for view in views)

    def _refuse_acting(self, metadata: ProgramMetadata, *, all_ops: bool) -> None:
        """Raise where a call may learn midway that it takes another branch, and would start again.

        ``all_ops``: also for collectives, which a call repeats only in a graph with a backward: its order is another.
        """
        if precheck_of(self.tracer.graph, self.tracer.root, metadata, once=True) is None:
            first = metadata.graph.decisions[0].location
            refuse_acting(
                self.tracer.graph.nodes,
                (f"a call that takes another branch at {first} starts again from the beginning"),
                all_ops=all_ops,
            )

    def _traced(
        self,
        joint: JointTracer,
        analysis: OutputAnalysis,
        aliases: Sequence[OutputAlias],
        begun: dict[int, Input],
        mutations: Sequence[InputMutation],
        results: Sequence[Any],
        decisions: DecisionsOfGraph,
    ) -> EndJoint | Exception | Backward | None:
        """The joint graph, or why it is not traced; None where autograd records nothing that the caller gets."""
        joint.find_new_leaves(self.inputs)
        wanted = joint.wanted(self.inputs, analysis, aliases, self.handles, mutations, results)
        if not wanted.targets or not any(entry.edge is not None for entry in self.inputs):
            hidden = self.context.notes.hidden_from_autograd(entry.fake for entry in self.inputs)
            if hidden is not None:
                raise hidden  # what the caller gets has gradients nevertheless, as views of inputs
            return None
        self.context.notes.reshapes.lost_views.note_use(self.handles)
        refused = refused_write(self.context, self.inputs, begun, mutations)
        if refused is not None:
            return refused
        if joint.order == 0:
            return Backward.UNTRACED if joint.refusal is None else joint.refusal
        with tracing_disabled():
            bases = [self._node(self.context.value(analysis.base_handles[number])) for number in wanted.bases]
        return joint.trace(self.inputs, wanted, self.outputs.nodes, bases, decisions)

    # Constants

    def _lift_constants(self, written: Sequence[torch.Tensor], entries: Sequence[Input]) -> None:
        """Lift tensors that the program reached outside its inputs: to buffers if it wrote them, else to constants."""
        storages = {entry.storage for entry in entries}
        own = {id(entry.fake) for entry in self.inputs if entry.fake is not None}
        others = [h for h in written if id(h) not in own and storage_key(h) not in storages]
        others += [h for h in self.objects.plain_handles if id(h) not in own and tracked_node(self.tracer, h) is None]
        lifted = self.lifter.lift_attributes(written, others)
        if lifted:
            self._refuse_missed_writes([*lifted, *written])

    def _refuse_missed_writes(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise if tensors that the program reached outside its inputs have the memory of inputs that it writes."""
        entries = {
            storage_key(entry.value): entry
            for entry in self.inputs
            if isinstance(entry.value, torch.Tensor) and entry.fake is not entry.value
        }
        for tensor in tensors:
            entry = None if isinstance(tensor, FakeTensor) else entries.get(storage_key(tensor))
            if entry is None:
                continue
            views = [None if held is None else self.context.graph.find(held) for held in (entry.fake, tensor)]
            if any(view is not None and view.base.log for view in views):
                raise REACHED_TWICE.error(tensor=f"`{entry.target or entry.name}`")

    def _compute_nodes(self, backs: Sequence[WriteBack], entries: Sequence[Input]) -> None:
        """Compute the nodes of all outputs: the last inputs are lifted here, and keep their numbers."""
        storages = {entry.storage for entry in entries}  # which write-backs may write before an output is made
        for back in backs:
            for value in [part.data for part in back.parts]:
                self._node(value)
            if back.data is not None:
                self._values[id(back.input.handle)] = self._node(back.data)
        fakes = [entry.fake for entry in self.inputs if entry.fake is not None]
        nodes = [(tracked_node(self.tracer, fake), storage_key(fake)) for fake in fakes]
        storage_of = dict[Any, int](reversed(nodes))  # the storage of the first handle with the node
        for handle in self.objects.plain_handles:
            if id(handle) not in self._values:
                view = self.context.graph.find(handle)  # of an input that was written in part: computed here
                value = handle if view is None else self.context.read(view)
                storage, own = storage_key(value), storage_key(handle)
                if storage_of.setdefault(self._node(value), own) != own or (storage != own and storage in storages):
                    value = self.context.call(torch.ops.aten.clone.default, value)
                self._values[id(handle)] = self._node(value)
        for number, entry in enumerate(self.inputs):
            if entry.fake is not None:
                self._numbers.setdefault(id(entry.fake), number)

    # Write-backs

    def _write_backs(self, backs: Sequence[WriteBack], layouts: InputLayouts, seen: set[int]) -> list[InputMutation]:
        """What a call does to its inputs; ``seen``: the fakes, by identity, whose writes autograd saw."""
        mutations = [self._write_back(back, layouts, seen) for back in backs]
        refuse_new_histories(self.inputs, mutations)
        return mutations

    def _write_back(self, back: WriteBack, layouts: InputLayouts, seen: set[int]) -> InputMutation:
        handle, layout = back.input.handle, None
        nodes = [(self._node(part.data), part.path) for part in back.parts]
        if back.data is not None:
            nodes.append((self._values[id(handle)], ()))
        number = self._numbers.get(id(handle))
        if number is None:  # a write outside the elements of an input, in its storage
            number, layout = layouts.old_storages[storage_key(handle)], frozen_layout(Layout.of(handle))
        entry = self.inputs[number]
        differentiable = id(entry.fake) in seen
        if type(entry) is PartInput and id(entry.wrapper.fake) in seen:
            raise WRAPPER_WRITTEN_WITH_GRADIENT.error(tensor=entry.wrapper.label, kind=entry.wrapper.wrapping.name)
        if entry.optional and entry.kind is InputKind.CONSTANT_TENSOR:
            entry.kind, entry.persistent = InputKind.BUFFER, False
        output_kind, target = MUTATIONS[entry.kind], entry.target or entry.name
        writes = tuple(PartialWrite(self.outputs.add(node, output_kind, target), path) for node, path in nodes)
        view = self.context.graph.find(handle)
        if view is not None:
            self._written.append((output_kind, target, view.base))
        metadata, after = self._frozen_steps(back.metadata, layouts), self._frozen_steps(back.after, layouts)
        overlaps = layouts.after[number].has_internal_overlap
        becomes = handle.is_inference()  # by `.data =` of an inference tensor: a call makes the input one
        detached = differentiable and forgets(entry)
        return InputMutation(number, metadata, writes, after, layout, differentiable, detached, overlaps, becomes)

    def _frozen_steps(self, steps: Sequence[Any], layouts: InputLayouts) -> tuple[Any, ...]:
        return tuple((op, tuple(self._frozen(arg, layouts) for arg in args)) for op, args in steps)

    def _frozen(self, argument: Any, layouts: InputLayouts) -> Any:
        """An argument of an op on an input, without tensors and symbols of the trace."""
        if isinstance(argument, (list, tuple)):
            return [self._frozen(item, layouts) for item in argument]
        if not isinstance(argument, torch.Tensor):
            return frozen_number(argument)
        number = self._numbers.get(id(argument))
        if number is not None:
            return InputRef(number)
        old = layouts.old_storages.get(storage_key(argument))
        if old is not None:
            return InputRef(old, old=True)
        return NewStorage(tuple(map(frozen_number, argument.size())), argument.dtype, argument.device)

    # Outputs

    def _add_results(self, references: list[Any], left: Sequence[int], gradients: dict[int, int | None]) -> list[Any]:
        """Add outputs for what the program returned, then for what it left. Returns how calls make what it returned."""
        results = list(references)
        for position, made in enumerate(references):
            if isinstance(made, TensorRef):
                for part in self.objects.plain_parts(made.number):
                    self._give(part)
                continue
            symbolic = isinstance(made, SYMBOLS)
            output = self.outputs.add(symbol_node(self.tracer, made) if symbolic else made, OutputKind.USER_OUTPUT)
            results[position] = GraphNumber(output) if symbolic else made
        of_inputs = {number: entry for entry in self.inputs if (number := gradients.get(id(entry))) is not None}
        for number, parts in self.objects.wrappers.items():
            if number in of_inputs:
                of_inputs |= dict.fromkeys(parts, of_inputs[number])
        for number in left:
            if number not in self.objects.wrappers:  # its parts have numbers too
                self._give(number, of_inputs.get(number))
        for number in self.objects.symbols:
            self._object_numbers.append(self.outputs.add(symbol_node(self.tracer, number), OutputKind.USER_OUTPUT))
        return results

    def _give(self, number: int, gradient_of: TracedInput | None = None) -> None:
        """Add an output for a tensor that the caller gets, or finds as the gradient of an input."""
        node = self._values[id(self.handles[number])]
        if gradient_of is None:
            self._results[number] = self.outputs.add(node, OutputKind.USER_OUTPUT)
        else:
            target = gradient_of.target or gradient_of.name
            self._results[number] = self.outputs.add(node, GRADIENTS[gradient_of.kind], target)

    def _node(self, value: torch.Tensor) -> Node:
        node = tracked_node(self.tracer, value)
        return self.lifter.lift(value, written=False) if node is None else node

    # Metadata

    def _layouts(self, begun: dict[int, Input], moved: set[int]) -> InputLayouts:
        """The layouts of inputs before and after the run; ``moved``: the fakes, by identity, whose metadata changed."""
        layouts = InputLayouts()
        for number, entry in enumerate(self.inputs):
            if entry.fake is None or type(entry) is WrapperInput:
                continue
            first = begun.get(id(entry.fake))
            last = first if first is not None and id(entry.fake) not in moved else Input.of(entry.fake)
            if first is not None:
                layouts.before[number] = first.layout
            layouts.after[number] = last.layout
            layouts.storages.setdefault(last.storage, number)
            layouts.old_storages.setdefault((first or last).storage, number)  # a lifted input: nothing could change it
        return layouts

    def _metadata(
        self,
        *,
        gradients: dict[int, int | None],
        mutations: Sequence[InputMutation],
        aliases: Sequence[OutputAlias],
        bases: Sequence[BaseResult],
        results: Sequence[Any],
        spec: Any,
        left: LeftInObjects,
        layouts: InputLayouts,
        symbols: SymbolSources,
        decisions: DecisionsOfGraph,
    ) -> ProgramMetadata:
        """End the graph, and describe it."""
        self.tracer.graph.output(tuple(self.outputs.nodes))
        drop_dead(self.tracer.graph)
        sink_waits(self.tracer.graph)
        unused, read, accumulates = drop_unread(self.inputs, self.tracer.graph, {m.input for m in mutations})
        numbers = {id(entry): number for number, entry in enumerate(self.inputs)}
        return ProgramMetadata(
            inputs=tuple(entry.frozen(numbers) for entry in self.inputs),
            unused=unused,
            graph=self._traits(tuple(decisions.all)),
            mutations=tuple(mutations),
            outputs=tuple(aliases),
            bases=tuple(bases),
            results=tuple(results),
            spec=spec,
            gradients={numbers[key]: number for key, number in gradients.items()},
            gradients_read=frozenset(numbers[key] for key in read),
            only_accumulates=accumulates,
            left=left,
            layouts_before={number: frozen_layout(layout) for number, layout in layouts.before.items()},
            layouts_after={number: frozen_layout(layout) for number, layout in layouts.after.items()},
            symbols=symbols,
        )

    def _count_writes(
        self, writes: Mapping[int, int | None], written: set[int], old_storages: Mapping[int, int]
    ) -> None:
        """Record how many writes of changed inputs the program reported to autograd; one for an input lifted late."""
        if not written:
            return
        begun = {n: storage_key(e.value) for n, e in enumerate(self.inputs) if isinstance(e.value, torch.Tensor)}
        fakes = [self.inputs[number].fake for number in written]
        owners = {
            old_storages.get(storage_key(fake)) for fake in fakes if fake is not None
        }  # `set_` takes another input's storage
        changed = {begun[number] for number in written | owners if number in begun}
        parts = [entry for number in written if type(entry := self.inputs[number]) is PartInput]
        wrappers = {id(part.wrapper) for part in parts}
        changed |= {key for number, key in begun.items() if id(self.inputs[number]) in wrappers}
        for number, key in begun.items():
            entry = self.inputs[number]
            own = self._numbers.get(id(entry.fake)) == number and entry.root is None
            if key in changed and own:  # else its root counts, or the same tensor passed before
                count = writes.get(id(entry))
                entry.counted = int(number in written) if count is None else count

    def _traits(self, decisions: tuple[Decision, ...]) -> GraphTraits:
        graph, root = self.tracer.graph, self.tracer.root
        draws = sources(graph, root) if decisions else ()
        shown = [node.meta.get("val") if isinstance(node, Node) else None for node in self.outputs.nodes]
        sparse = frozenset(n for n, val in enumerate(shown) if getattr(val, "layout", _STRIDED) is not _STRIDED)
        modes = {val.fake_mode for val in shown if isinstance(val, FakeTensor)}
        calls = [node.target for node in graph.nodes if node.op == "call_function"]
        ops = {id(op): op for op in calls}.values()  # by identity: torch hashes ops in Python
        return GraphTraits(
            outputs=len(shown),
            keeps_workspaces=keeps_workspaces(graph),
            decisions=decisions,
            draws=draws,
            numbers=tuple(self._object_numbers),
            sparse=sparse,
            differentiates=HOOKS in self.context.notes.asked,
            lays_out_ones=all(isinstance(mode, CaptureFakeMode) for mode in modes),
            acts=any(map(tables.acts, ops)),
            communicates=any(map(communicates, ops)),
        )

    def _recorded(self, metadata: ProgramMetadata, joint: JointGraph | Exception | Backward | None) -> Recorded:
        self.context.notes.note_given(self.handles)
        groups: dict[int, list[str]] = {}
        for entry in self.inputs:
            if isinstance(entry.value, torch.Tensor):
                groups.setdefault(storage_key(entry.value), []).append(entry.name)
        taken = [metadata.inputs[number] for number in metadata.taken]
        specs = self.outputs.specs
        self._historian.detach()
        return Recorded(
            graph=self.tracer.graph,
            root=self.tracer.root,
            metadata=metadata,
            joint=joint,
            signature=lambda: signature_of(taken, specs),
            historian=self._historian,
            written=self._written,
            shared=[group for group in groups.values() if len(group) > 1],
            asked=self._asked(metadata),
            endings=self.context.endings.found,
        )

    def _asked(self, metadata: ProgramMetadata) -> dict[tuple[int, str], Location | None]:
        """The program's questions about its inputs, by their numbers, with the lines that errors name."""
        asked, storages = self.context.notes.asked, self._storages
        for base in filter(self._is_resized_input, self.context.graph.bases.values()):
            beyond = any(mutation.layout is not None for mutation in metadata.mutations)  # as far as it reached
            for question in (STORAGE, OFFSET) if beyond else (STORAGE,):
                asked.add_all(question, [storages.get(id(base.first), base.key)])
        counting = {node.target for node in nodes_behind(counting_from_storages(self.tracer.graph))}
        # Tensors that the program made may have the strides of any tensor that it computed them from.
        everywhere = {LAYOUT} if asked.keys(LAYOUT) - set(storages.values()) else set()
        answers: dict[tuple[int, str], Location | None] = {}
        for number, entry in enumerate(self.inputs):
            if entry.fake is None:
                continue
            storage = storages.get(id(entry.fake)) or storage_key(entry.fake)  # of a lifted input
            keys = id(entry.fake), storage, id(entry.function)
            for question in (*everywhere, OFFSET) if entry.name in counting else everywhere:
                answers[number, question] = None
            for question, line in asked.of(*keys):
                answers[number, question] = line
        return answers

    def _is_resized_input(self, base: Base) -> bool:
        """Whether the storage of an input was resized: the input does not hold what its storage gained."""
        return type(base.capacity) is int and id(base.first) in self._numbers


aten = torch.ops.aten
_STRIDED = torch.strided
