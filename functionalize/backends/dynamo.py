"""``torch.compile(model, backend="functionalize")``: Dynamo's graphs, without mutation, for any compiler.

The graph that Dynamo found is recorded like any other program (`graph_capture`), and called like one (`runtime`); what
lies between is the compiler's.

Invariant: a graph that a compiler gets writes nothing, not even back to its inputs. Limits: tensor
subclasses that say what they hold, of sizes that are numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Interpreter, Node

from functionalize._torch import (
    ASKED_PROPERTIES,
    FOLLOWED_VIEW,
    VERSION,
    DisableTorchFunction,
    FakeTensorMode,
    has_tangent,
    in_forward_ad,
    is_view,
)
from functionalize._torch.autograd import outside_of_the_caller
from functionalize._torch.dispatch import ENTER_AUTOCAST, any_autocast
from functionalize._torch.dynamo import (
    alias_of,
    asks_base,
    asks_version,
    default_dtype_before,
    enable_python_dispatcher,
    has_new_guards,
    in_compiled_autograd,
    keeps_version,
    known_number,
    leaves_inference_mode,
    lookup_backend,
    note_origin,
    of_sizes,
    own_tracing_context,
    sizes_by_data,
    to_fakes,
)
from functionalize._torch.subclasses.wrappers import Wrapping, is_wrapper_class, plain_part
from functionalize._torch.symbols.sizes import has_symbol
from functionalize.aliasing.geometry import Layout, hint
from functionalize.call_stack import Scopes, line_of_trace
from functionalize.errors import NoFormulaError, OverlappingInputsError, UnsupportedProgramError, check_remove
from functionalize.graph_capture.inputs.inputs import PartInput, TracedInput, WrapperInput, with_parts
from functionalize.graph_capture.inputs.view_inputs import view_of, with_roots
from functionalize.graph_capture.inputs.wrappers import refuse_changed, wrap_fakes
from functionalize.graph_capture.recording import RecordingSession
from functionalize.graph_capture.trace.checkpointing import CheckpointRegions
from functionalize.python_state.reconstruct import GraphNumber
from functionalize.refusals.gradients import INPUT_FOLLOWS_VIEW, INPUT_IS_VIEW
from functionalize.runtime.arguments import base_of
from functionalize.runtime.autograd.joint import Derivative, ForwardCall, JointGraph, Orders
from functionalize.runtime.autograd.partition import PartitionFn, partition
from functionalize.runtime.calls.computation import DifferentiableComputation, GraphComputation
from functionalize.runtime.calls.finalizer import Finish, finishing
from functionalize.runtime.calls.specialization import Recorded
from functionalize.runtime.calls.stages import Compute, composed
from functionalize.runtime.guards.alias_pattern import alias_pattern
from functionalize.runtime.guards.modes import DEFAULT_DTYPE, in_modes, set_modes
from functionalize.runtime.guards.sizes import InputSize, Sizes
from functionalize.runtime.metadata import GraphInput, ProgramMetadata, needed_results
from functionalize.runtime.outputs.side_effects import LeftInObjects
from functionalize.tracing.fakeify import fresh
from functionalize.transform.api import run_call
from functionalize.verify import assert_functional

Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]
_SIZES = (
    "the compiled graph depends on sizes in another way than the program, whose inputs share memory or are not "
    "strided\n"
    "    why  the graph was compiled for dynamic sizes, and Dynamo takes no further guards on them\n"
    "    try  torch.compile(..., dynamic=False)"
)
_OPTIONS = ("compiler", "remove", "partition_fn")


def dynamo_backend(
    compiler: Compiler | str = "eager",
    *,
    remove: str = "mutations_and_views",
    partition_fn: PartitionFn | None = None,
) -> Callable[..., Callable[..., Any]]:
    """A backend for ``torch.compile`` that passes graphs without mutation to a compiler.

    The graphs consist of ATen operators. They take tensors and sizes, and return a tuple. If gradients are required,
    the compiler gets a forward graph and a backward graph, which autograd treats as one operator. The code around the
    graphs writes to inputs, and makes outputs that are views of inputs or of other outputs.

    Args:
        compiler: a function of a ``torch.fx.GraphModule`` and example inputs (fake tensors, and symbols for sizes)
            that returns a function; or the name of a backend of ``torch.compile``, such as ``"inductor"``. With
            ``"eager"`` the graphs run as they are.
        remove: ``"mutations_and_views"``, or ``"mutations"`` to keep view operators.
        partition_fn: splits the joint graph into forward and backward, as in AOTAutograd (default:
            ``min_cut_rematerialization_partition``).

    Returns:
        A function for ``torch.compile(..., backend=...)``.

    Raises:
        ValueError: ``remove`` is neither of the two.

    Example:
        >>> import torch
        >>> from functionalize import dynamo_backend
        >>> def show(graph, inputs):
        ...     print(*[node.name for node in graph.graph.nodes if node.op == "call_function"])
        ...     return graph
        >>> @torch.compile(backend=dynamo_backend(show))
        ... def bump(x):
        ...     x[0].add_(1)
        ...     return x.sum()
        >>> x = torch.zeros(3)
        >>> bump(x), x
        select_copy add select_scatter sum_1
        (tensor(1.), tensor([1., 0., 0.]))
    """
    check_remove(remove)

    def functionalized(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        if in_compiled_autograd():
            raise UnsupportedProgramError(
                "compiled autograd passes a backward to this backend",
                why=(
                    "graphs of compiled autograd consist of autograd nodes, which accumulate into `.grad` and call "
                    "hooks"
                ),
                hint="set torch._dynamo.config.compiled_autograd = False (backwards of compiled programs are "
                "compiled with them), or capture() the function that calls backward()",
            )
        named = lookup_backend(compiler) if isinstance(compiler, str) else compiler
        for node in filter(asks_base, graph.graph.nodes):
            raise INPUT_IS_VIEW.error(line_of_trace(node.stack_trace), input=node.all_input_nodes[0].name)
        modes = {DEFAULT_DTYPE: default_dtype_before()}
        return _Backend(graph, named, remove, partition_fn, modes).compile(inputs)

    return functionalized


def backend(
    graph: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **kwargs: Any
) -> Callable[..., Any]:
    """What ``backend="functionalize"`` names; ``options`` are the arguments of :func:`dynamo_backend`.

    Raises:
        ValueError: there is no such option.

    Example:
        >>> import torch
        >>> double = torch.compile(lambda x: x.mul_(2), backend="functionalize", options={"compiler": "eager"})
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """
    unknown = set(options or ()).difference(_OPTIONS)
    if unknown:
        raise ValueError(f"backend='functionalize' has no option {sorted(unknown)}; its options are {list(_OPTIONS)}")
    return dynamo_backend(**(options or {}))(graph, inputs)


@dataclass(frozen=True, eq=False)
class _Compiled:
    """A Dynamo graph for one pattern of its inputs."""

    metadata: ProgramMetadata
    modes_left: Mapping[str, Any]  # modes of torch that it leaves changed
    compute: Compute
    finish: Finish

    def __call__(self, inputs: Sequence[Any]) -> Any:
        known = self.metadata.inputs  # tensors that the graph makes of numbers are among these
        values = [one.constant if one.argument is None else _value(one, inputs[one.argument]) for one in known]
        for number, one in enumerate(known):
            if one.base_of is not None:
                values[number] = base_of(values[one.base_of])
        results = self.finish(values, [], self.compute(values))
        set_modes(self.modes_left)
        return results


@dataclass(frozen=True, eq=False)
class _Backend:
    """One Dynamo graph, and what is to be done with it."""

    graph: GraphModule
    compiler: Compiler
    remove: str
    partition_fn: PartitionFn | None
    modes: Mapping[str, Any]  # modes of torch that calls begin in, where Dynamo leaves them otherwise

    @cached_property
    def state(self) -> dict[str, torch.Tensor]:
        return {**dict(self.graph.named_parameters()), **dict(self.graph.named_buffers())}

    @cached_property
    def keeps_casts(self) -> bool:
        """Whether autocast casts what the graph computes with: of leaves it keeps what it has cast."""
        return any_autocast() or any(self.graph.graph.find_nodes(op="call_function", target=ENTER_AUTOCAST))

    @cached_property
    def replaces_data(self) -> bool:
        """Whether the graph gives tensors other data: `.data =`, in Dynamo's words."""
        return any(self.graph.graph.find_nodes(op="call_function", target=torch.Tensor.set_))

    def _pattern(self, inputs: Sequence[Any], looks: bool) -> tuple[Any, ...]:
        """What Dynamo does not compare: how inputs share memory, if it ``looks``; of which autocast keeps the cast.

        Where the graph replaces data, also which are views that require gradients.
        """
        inputs = _parted(inputs)
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        keeps = [self._keeps_cast(tensor) for tensor in tensors if self.keeps_casts]
        views = [ASKED_PROPERTIES[FOLLOWED_VIEW](tensor) for tensor in tensors if self.replaces_data]
        return _sharing(inputs) if looks else None, tuple(keeps), tuple(views)

    def _keeps_cast(self, tensor: torch.Tensor) -> bool:
        return self.keeps_casts and tensor.is_leaf and not is_view(tensor)

    def compile(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The graph as a function; compiled once more for each other pattern of its inputs."""
        given = [*self.state.values(), *inputs]
        first = self._compiled(given)
        looks = bool(first.metadata.mutations) or any(alias.input is not None for alias in first.metadata.outputs)
        pattern = self._pattern(given, looks)
        others: dict[Any, _Compiled] = {}

        def compiled(*args: Any) -> Any:
            flat, chosen = [*self.state.values(), *args], first
            if in_forward_ad() and any(map(has_tangent, flat)):
                return self.graph(*args)  # its operators have derivatives forward, of which a call knows nothing
            if (looks or self.keeps_casts) and (now := self._pattern(flat, looks)) != pattern:
                key = (now, *(value.size() if isinstance(value, torch.Tensor) else value for value in flat))
                if key not in others:
                    others[key] = self._compiled(flat)
                chosen = others[key]
            return chosen(flat)

        return compiled

    def _compiled(self, inputs: Sequence[Any]) -> _Compiled:
        """The graph for one way in which its inputs share memory; in two halves where gradients are wanted."""
        mode, fakes = to_fakes(inputs)
        found, modes_left = self.recorded(mode, fakes)
        as_views = isinstance(found.joint, OverlappingInputsError)
        if as_views:
            found, modes_left = self.recorded(mode, fakes, as_views)
        metadata, joint = found.metadata, found.joint
        if isinstance(joint, Exception) and not isinstance(joint, NoFormulaError):
            raise joint
        taken = [metadata.inputs[number] for number in metadata.taken]
        known = {entry.name: _value(entry, fakes[entry.argument]) for entry in taken if entry.argument is not None}
        handed = partial(self.handed, mode, known)

        def compiled(compute: Compute) -> _Compiled:
            return _Compiled(metadata, modes_left, composed(metadata, compute), finishing(metadata))

        if isinstance(joint, JointGraph):
            halves = partition(joint, self.partition_fn, handed)
            orders = Orders(halves, _Derivatives(self, mode, fakes, as_views), _sizes_of(metadata, fakes))
            return compiled(DifferentiableComputation(metadata, orders, found.refused))
        numbers = [GraphNumber(position) for position, _ in metadata.symbols.computed]
        described = (metadata.mutations, metadata.outputs, metadata.bases, [*metadata.results, *numbers])
        positions = needed_results(*described, further_bases=False)
        graph = Graph()  # gives those results alone
        results: Any = graph.graph_copy(found.graph, {})
        graph.output(tuple(results[position] for position in positions))
        graph.eliminate_dead_code(Node.is_impure)  # without that, Dynamo takes random numbers for dead
        function = handed(GraphModule(found.root, graph))
        reason = joint if isinstance(joint, Exception) else None  # said to those who ask for gradients
        return compiled(GraphComputation(metadata, function, positions, reason))

    def recorded(
        self, mode: FakeTensorMode, fakes: Sequence[Any], as_views: bool = False, order: int = 1
    ) -> tuple[Recorded, Mapping[str, Any]]:
        """Run the graph on fake tensors, and record it without mutation; with the modes that it leaves otherwise.

        ``as_views``: whether inputs that overlap are views of what autograd knows them for views of; ``order``: how
        often it is differentiated.
        """
        with in_modes(self.modes):
            return self._recorded(mode, fakes, as_views, order)

    def _recorded(
        self, mode: FakeTensorMode, fakes: Sequence[Any], as_views: bool, order: int
    ) -> tuple[Recorded, Mapping[str, Any]]:
        remove_views = self.remove == "mutations_and_views"
        session = RecordingSession(mode, note_origin, remove_views=remove_views, symbolic=True, order=order)
        names = [name.replace(".", "_") for name in self.state]
        names += [node.name for node in self.graph.graph.find_nodes(op="placeholder")]
        inputs = [
            TracedInput(InputKind.USER_INPUT, name, None, value, argument=position)
            for position, (name, value) in enumerate(zip(names, fakes, strict=True))
        ]
        inputs = with_parts(inputs, {*names}, symbolic=True)
        inputs = with_roots(inputs) if as_views else inputs
        with mode, enable_python_dispatcher():  # traced as they are: `make_fx` would convert them once more
            _stand_in(inputs, self._handle)
            wrap_fakes(inputs, self._keeps_cast)
        for entry in inputs:
            entry.value = entry.value if entry.fake is None else entry.fake
        handles = [entry.value for entry in inputs if entry.given and type(entry) is not PartInput]
        session.add_inputs(inputs)
        run = _Run(self.graph, session.regions)

        def program() -> Any:
            held = {f"graph.{name}": value for name, value in zip(self.state, handles, strict=False)}
            given = tuple(handles[len(held) :])
            results = torch.func.functional_call(run, held, given) if held else run(*given)
            refuse_changed(inputs)
            return list(results) if isinstance(results, (list, tuple)) else [results]

        noted = torch.fx.traceback.preserve_node_meta(), sizes_by_data(mode)
        with outside_of_the_caller(), noted[0], noted[1], session.active(), session.recorder:
            found = session.record(
                program, inputs, lambda objects, returned: LeftInObjects(), Scopes(run_call.__code__).here
            )
        self._refuse_versions(found)
        self._refuse_replaced_views(found, fakes)
        if not leaves_inference_mode(self.graph.graph):  # else it says of each result what it is
            outputs = [replace(alias, inference=alias.inference or None) for alias in found.metadata.outputs]
            found = replace(found, metadata=replace(found.metadata, outputs=tuple(outputs)))
        return found, session.modes_left

    def _refuse_versions(self, found: Recorded) -> None:
        """Raise where the program asks for the version of an input."""
        number = next((number for number, question in found.asked if question == VERSION), None)
        if number is not None:
            nodes = (node for node in self.graph.graph.nodes if asks_version(node))
            raise UnsupportedProgramError(
                f"the program reads the `_version` of `{found.metadata.inputs[number].name}`, an input of Dynamo's "
                "graph",
                why="the graph is compiled once, for inputs of any version",
                hint="read it in a function under torch.compiler.disable, or capture() the program, whose calls "
                "compare versions",
                at=line_of_trace(next((node.stack_trace for node in nodes), None)),
            )

    def _refuse_replaced_views(self, found: Recorded, fakes: Sequence[Any]) -> None:
        """Raise where the program gives other data to an input that autograd looks for by where its data lie."""
        for (number, question), line in found.asked.items():
            entry = found.metadata.inputs[number]
            if question != FOLLOWED_VIEW or entry.argument is None:
                continue
            if ASKED_PROPERTIES[FOLLOWED_VIEW](fakes[entry.argument]):
                raise INPUT_FOLLOWS_VIEW.error(line, input=entry.name)

    def _handle(self, fake: torch.Tensor) -> torch.Tensor:
        """What the graph runs on: a tensor to which it may write."""
        alias = alias_of(fake)
        return alias if self._keeps_cast(fake) else fresh(alias)

    def handed(self, mode: FakeTensorMode, known: dict[str, Any], graph: GraphModule) -> Callable[..., Any]:
        """What the compiler makes of a graph; inputs that Dynamo knows are its own fake tensors."""
        assert_functional(graph, self.remove)
        values = []
        for node in graph.graph.find_nodes(op="placeholder"):
            value = known.get(node.name, node.meta.get("val"))
            values.append(value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value)
        with own_tracing_context(mode):
            return self.compiler(graph, values)


def _stand_in(inputs: Sequence[TracedInput], handle: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have tensors of a trace stand for Dynamo's fake tensors: of inputs that know their roots, views of these."""
    plain = [entry for entry in inputs if isinstance(entry.value, torch.Tensor) and type(entry) is not WrapperInput]
    layouts = {id(entry): Layout.of(entry.value) for entry in plain}
    for entry in plain:
        entry.base = entry.known_base
        entry.value = entry.fake = handle(entry.value)
    for entry in plain:
        if entry.root is not None and entry.root.fake is not None:
            entry.value = entry.fake = view_of(entry.root.fake, layouts[id(entry)])


def _value(entry: GraphInput, argument: Any) -> Any:
    """An input, in the argument that it is, or that holds it."""
    return argument if entry.part is None else plain_part(argument, entry.part.path)


def _parted(values: Sequence[Any]) -> list[Any]:
    """Values, with the parts of wrappers in the places of these."""
    wrapped = (isinstance(value, torch.Tensor) and is_wrapper_class(type(value)) for value in values)
    return [
        part
        for value, opens in zip(values, wrapped, strict=True)
        for part in (Wrapping.of(value).parts_of(value) if opens else (value,))
    ]


def _sizes_of(metadata: ProgramMetadata, fakes: Sequence[Any]) -> Callable[[Sequence[Any]], Sizes] | None:
    """What tells the sizes of a call that may differ, and the numbers, by the position of the input."""
    places = [(n, entry.argument) for n, entry in enumerate(metadata.inputs) if entry.argument is not None]
    held = [(n, place) for n, place in places if known_number(fakes[place])]
    differing = [pair for pair in places if has_symbol(fakes[pair[1]]) and pair not in held]
    tensors = [(n, place) for n, place in differing if isinstance(fakes[place], torch.Tensor)]
    numbers = [pair for pair in differing if pair not in tensors]
    if not (differing or held):
        return None

    def of(inputs: Sequence[Any]) -> Sizes:
        sizes = (InputSize(place, inputs[n].size(), inputs[n].stride()) for n, place in tensors)
        given = (InputSize(place, inputs[n], ()) for n, place in numbers)
        return *sizes, *given, *(InputSize(place, inputs[n].item(), ()) for n, place in held)

    return of


class _Derivatives:
    """Records the derivatives of one Dynamo graph: for its symbols, or else for the sizes of one call."""

    def __init__(self, backend: _Backend, mode: FakeTensorMode, fakes: Sequence[Any], as_views: bool) -> None:
        self._backend, self._mode, self._fakes, self._as_views = backend, mode, fakes, as_views

    def __call__(self, order: int, sizes: Sizes) -> Derivative:
        """The derivative of an order."""
        if not has_new_guards(self._mode):
            try:
                made = self._recorded(self._mode, self._fakes, order)
            except Exception:
                if not has_new_guards(self._mode):
                    raise
            if not has_new_guards(self._mode):
                return Derivative(made, lambda sizes: True)
        # It decides by sizes, and from now on the symbols are taken for more than Dynamo knows.
        shared = any(isinstance(entry, tuple) for entry in alias_pattern(self._fakes))
        static = None if shared else of_sizes(self._fakes, {place: (size, stride) for place, size, stride in sizes})
        if static is None:
            raise RuntimeError(_SIZES)
        return Derivative(self._recorded(*static, order), sizes.__eq__)

    def _recorded(self, mode: FakeTensorMode, fakes: Sequence[Any], order: int) -> ForwardCall:
        joint = self._backend.recorded(mode, fakes, self._as_views, order)[0].joint
        if isinstance(joint, Exception):
            raise joint
        if not isinstance(joint, JointGraph):
            raise RuntimeError(_SIZES)
        return partition(joint, self._backend.partition_fn, partial(self._backend.handed, mode, {}))


def _sharing(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """How inputs share memory, and where what they are to autograd views of lies."""
    pattern = alias_pattern(inputs)
    if not any(isinstance(entry, tuple) for entry in pattern):
        return (pattern,)
    bases = [base_of(value) for value in inputs]
    others = [None if base is value else base for base, value in zip(bases, inputs, strict=True)]
    sizes = (None if base is None else tuple(map(hint, base.size())) for base in others)
    return alias_pattern([*inputs, *others]), *sizes


class _Runner(Interpreter):
    """Runs a graph node by node, so that what is recorded has each node's line of the user's program."""

    def __init__(self, graph: GraphModule, regions: CheckpointRegions) -> None:
        super().__init__(graph)
        self._regions = regions

    def run_node(self, n: Node) -> Any:
        if keeps_version(n):
            with DisableTorchFunction():  # nobody is told that this is asked
                return self.env[n.all_input_nodes[0]]._version
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.higher_order.invoke_subgraph:  # a part of the program, as if it stood there
            return _Runner(args[0], self._regions).run(*args[2:])
        if target is not torch.ops.higher_order.tag_activation_checkpoint:
            return super().call_function(target, args, kwargs)
        with self._regions.inside(draws_the_same=kwargs.get("preserve_rng_state", True)):
            return _Runner(args[0], self._regions).run(*args[1:])


class _Run(torch.nn.Module):
    """A graph and its runner as a module, whose parameters and buffers can be replaced."""

    def __init__(self, graph: GraphModule, regions: CheckpointRegions) -> None:
        super().__init__()
        self.graph, self._regions = graph, regions

    def forward(self, *inputs: Any) -> Any:
        return _Runner(self.graph, self._regions).run(*inputs)
