"""Reads autograd's graph of a program: which results have gradients, and why others do not.

Invariant: a captured backward that could not give the right gradients is refused with the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from functionalize._torch import is_symbolic, storage_key
from functionalize._torch.autograd import CUSTOM_BACKWARD, DELAYED_ERROR, delayed_error, passes_on, without_formula
from functionalize.aliasing.overlap import disjoint
from functionalize.errors import NoFormulaError, UnsupportedMutationError
from functionalize.graph_capture.inputs.inputs import TracedInput
from functionalize.graph_capture.inputs.view_inputs import can_be_view
from functionalize.reachability import functions_behind
from functionalize.refusals.gradients import (
    EXPANDED_WRITTEN,
    INTEGERS_WITH_GRADIENTS,
    LEAF_GIVEN_AWAY,
    ONCE_DIFFERENTIABLE,
    OTHER_MEMORY,
    OTHER_SIZE,
    OVERLAPPING_INPUTS,
    PIECES_OF_WRITTEN,
    SET_TO_OTHER_INPUT,
    VIEW_AT_UNKNOWN_OFFSET,
    WRITTEN_AT_OFFSET,
    WRITTEN_BEYOND,
    WRITTEN_WITH_OTHER,
    ZERO_DERIVATIVE_OF_VIEW,
)
from functionalize.refusals.refusal import Refusal
from functionalize.runtime.metadata import InputMutation, OutputAlias, SymbolSources
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.epilogue import Input
from functionalize.transform.gradients.autograd_notes import Reshapes
from functionalize.transform.handlers.custom_ops import WithoutFormula


@contextlib.contextmanager
def requiring(edges: Sequence[Any]) -> Iterator[None]:
    """Have leaves require gradients that the program has set to require none: earlier results need theirs."""
    detached = [edge for edge in edges if isinstance(edge, torch.Tensor) and not edge.requires_grad]
    for leaf in detached:
        leaf.requires_grad_()
    try:
        yield
    finally:
        for leaf in detached:
            leaf.requires_grad_(False)


def reaching(targets: Sequence[torch.Tensor], sources: Sequence[Any]) -> list[int]:
    """From which ``targets`` autograd reaches each source, a leaf or an edge: a bit for each target."""
    if len(targets) == 1:
        return [1] * len(sources)
    ends = [get_gradient_edge(target) for target in targets]
    order, visited, stack = list[Any](), set[Any](), [(edge.node, False) for edge in ends]
    while stack:  # an order in which each node comes behind those that lead to it
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions if following is not None]
    bits, arriving = dict[Any, int](), dict[Any, int]()
    for number, edge in enumerate(ends):
        for table, key in ((bits, edge.node), (arriving, (edge.node, edge.output_nr))):
            table[key] = table.get(key, 0) | 1 << number
    for node in reversed(order):
        for place, (following, output) in enumerate(node.next_functions):
            passed = arriving.get((node, place), 0) if passes_on(node) else bits.get(node, 0)
            for table, key in ((bits, following), (arriving, (following, output))):
                table[key] = table.get(key, 0) | passed
    leaves = {id(node.variable): arriving.get((node, 0), 0) for node in order if hasattr(node, "variable")}
    at = (leaves.get(id(s)) if isinstance(s, torch.Tensor) else arriving.get((s.node, s.output_nr)) for s in sources)
    return [bits or 0 for bits in at]


def refusals(targets: Mapping[int, torch.Tensor], sources: Sequence[Any]) -> dict[int, NoFormulaError]:
    """Why tensors have no gradient that a function without a formula computes from the sources, by their numbers."""
    refused = {
        function: refusal
        for function in functions_behind(target.grad_fn for target in targets.values())
        if function.name().startswith(_REFUSING) and (refusal := _refusal(function)) is not None
    }
    if not refused:
        return {}
    nodes = {get_gradient_edge(source).node if isinstance(source, torch.Tensor) else source.node for source in sources}
    refused = {function: refusal for function, refusal in refused.items() if function not in nodes}
    # A delayed error leads to no source; eager's `backward` raises it nevertheless.
    met = {
        function
        for function in refused
        if function.name() == DELAYED_ERROR or not nodes.isdisjoint(functions_behind([function]))
    }
    behind = {number: met & functions_behind([target.grad_fn]) for number, target in targets.items()}
    return {number: refused[next(iter(functions))] for number, functions in behind.items() if functions}


def _refusal(function: Any) -> NoFormulaError | None:
    """Why an autograd function, or that of an operator without a formula, gives no gradient."""
    if function.name() == _WITHOUT_FORMULA:
        return function.refusal  # type: ignore[no-any-return]
    text = delayed_error(function) if function.name() == DELAYED_ERROR else without_formula(function)
    return None if text is None else NoFormulaError.of_eager(text)


_WITHOUT_FORMULA = f"{WithoutFormula.__name__}Backward"
_REFUSING = (_WITHOUT_FORMULA, DELAYED_ERROR, CUSTOM_BACKWARD)  # how the names of functions begin that may refuse


def reach_made_leaves(
    handles: Sequence[torch.Tensor], aliases: Sequence[OutputAlias], returned: Container[int]
) -> bool:
    """Whether a leaf that the program made, and keeps, would get a gradient from its results.

    ``returned``: the numbers of the handles that the program returns.

    Raises:
        UnsupportedProgramError: a leaf that it returns would.
    """
    leaves = [number for number, alias in enumerate(aliases[: len(handles)]) if alias.leaf is not None]
    behind = functions_behind(tensor.grad_fn for tensor in handles) if leaves else ()
    reached = {id(getattr(function, "variable", None)) for function in behind}
    reached_leaves = [number for number in leaves if id(handles[number]) in reached]
    if any(number in returned for number in reached_leaves):
        raise LEAF_GIVEN_AWAY.error()
    return bool(reached_leaves)


def check_differentiable(gradients: Sequence[Any], sources: Sequence[Any]) -> None:
    """Raise where autograd would if it visited the function: it visits only those that lead to the inputs asked for."""
    before = {source.node for source in sources if isinstance(source, GradientEdge)}  # the program
    behind = functions_behind((gradient.grad_fn for gradient in gradients if gradient is not None), before)
    if any(function.name() == DELAYED_ERROR for function in behind):
        raise ONCE_DIFFERENTIABLE.error()


def check_devices(gradients: Sequence[Any], targets: Sequence[torch.Tensor]) -> None:
    """Raise where gradients of tensors with data are on meta: views of fake zeros (`_efficientzerotensor`) are."""
    lost = any(gradient is not None and gradient.is_meta for gradient in gradients)
    if lost and not any(target.is_meta for target in targets):
        raise ZERO_DERIVATIVE_OF_VIEW.error()


def check_has_gradients(result: torch.Tensor) -> None:
    """Raise for an integer tensor in autograd's graph: from an in-place comparison of an integer tensor with a leaf."""
    if not (result.dtype.is_floating_point or result.dtype.is_complex):
        raise INTEGERS_WITH_GRADIENTS.error(dtype=result.dtype)


def refuse_views_at_unknown_offsets(aliases: Sequence[OutputAlias], symbols: SymbolSources) -> None:
    """Raise where gradients would flow through a view whose layout a call cannot learn."""
    for alias in aliases:
        is_view = alias.leaf is None and (alias.input is not None or alias.base is not None)
        flows = is_view and alias.requires_grad and not alias.own_gradient
        if flows and not alias.layout.static and symbols.unlearned([alias.layout], []):
            raise VIEW_AT_UNKNOWN_OFFSET.error()


def refuse_new_histories(inputs: Sequence[TracedInput], mutations: Sequence[InputMutation]) -> None:
    """Raise where an input gets a gradient history without a write of a value that has one."""
    written = {mutation.input for mutation in mutations if mutation.writes}
    for number, entry in enumerate(inputs):
        fake, value = entry.fake, entry.value
        is_recorded = number in written or not isinstance(value, torch.Tensor) or value.requires_grad
        if is_recorded or fake is None or fake.is_leaf:
            continue
        raise SET_TO_OTHER_INPUT.error(input=entry.target or entry.name)


def forgets(entry: TracedInput) -> bool:
    """Whether an input that requires gradients has lost the history of its computation, by `detach_`."""
    function = entry.function
    return function is not None and entry.fake is not None and function not in functions_behind([entry.fake.grad_fn])


def refuse_written_pieces(
    context: FunctionalizationContext, inputs: Sequence[TracedInput], mutations: Sequence[InputMutation]
) -> None:
    """Raise where autograd no longer accepts pieces of an input, as another part of the same tensor was written."""
    cut = [entry for entry in inputs if id(entry.fake) in context.notes.pieces]
    for mutation in mutations if cut else ():
        entry = inputs[mutation.input]
        for other in cut:
            if other.fake is not entry.fake and _of_one_tensor(entry, other):
                raise PIECES_OF_WRITTEN.error(input=entry.target or entry.name, other=other.target or other.name)


def refused_write(
    context: FunctionalizationContext,
    inputs: Sequence[TracedInput],
    begun: Mapping[int, Input],
    mutations: Sequence[InputMutation],
) -> Exception | None:
    """Why autograd cannot record some write from outside the graph; None where it can record all.

    ``begun``: the inputs as they were before the program ran, by the identities of their fakes.

    Autograd sees a write-back to one of several inputs of a storage as in eager, and later uses of the other inputs
    too. It does not see the write inside the program, unless the other inputs were made as views of one of the inputs.
    """
    reshapes = context.notes.reshapes
    for entry in inputs:
        if id(entry.fake) in reshapes.replaced:
            return _new_metadata(entry, reshapes)
    if context.notes.finds_beyond:
        return context.notes.goes_beyond()
    for mutation in mutations:
        entry = inputs[mutation.input]
        if _has_other_size(entry) and not mutation.differentiable:
            raise _new_metadata(entry, reshapes, OTHER_SIZE)
        if mutation.differentiable and mutation.layout is not None:
            return WRITTEN_BEYOND.error(input=entry.target or entry.name)
        if entry.fake is not None and mutation.differentiable:
            changed = [inputs[other.input] for other in mutations if not _stays(other)]
            why = _refused_part(context, inputs, begun, entry) if mutation.writes else None
            why = why or _refused_layout(mutation, entry, changed, reshapes)
            if why is not None:
                return why
    hidden = context.notes.hidden_from_autograd(entry.fake for entry in inputs)
    return hidden if hidden is not None else reshapes.lost_views.error()


def _refused_part(
    context: FunctionalizationContext, inputs: Sequence[TracedInput], begun: Mapping[int, Input], entry: TracedInput
) -> Exception | None:
    """Why autograd cannot record which part of a tensor was written."""
    other = next((other for other in inputs if _meet(entry, other, begun)), None)
    if other is not None:
        together = all(can_be_view(part) for part in inputs if _of_one_tensor(entry, part))
        return (OVERLAPPING_INPUTS if together else WRITTEN_WITH_OTHER).error(input=entry.target or entry.name)
    if storage_key(entry.fake) in context.notes.readdressed:  # type: ignore[arg-type]
        return WRITTEN_AT_OFFSET.error(input=entry.target or entry.name)
    return None


def _refused_layout(
    mutation: InputMutation, entry: TracedInput, changed: Sequence[TracedInput], reshapes: Reshapes
) -> Exception | None:
    """Why autograd cannot record the layout of a written tensor, or those of other parts of the same tensor.

    ``changed``: the inputs that get other memory. Autograd looks for the gradient of a part in the new memory.
    """
    if mutation.after:
        return EXPANDED_WRITTEN.error(input=entry.target or entry.name)
    if not _stays(mutation) or not (mutation.writes or mutation.metadata):
        return _new_metadata(entry, reshapes)
    return next((_new_metadata(other, reshapes) for other in changed if _of_one_tensor(entry, other)), None)


def _stays(mutation: InputMutation) -> bool:
    """Whether an input keeps its memory, perhaps with other strides, which autograd can record."""
    return not mutation.after and all(op is torch.ops.aten.as_strided_.default for op, _ in mutation.metadata)


def _new_metadata(
    entry: TracedInput, reshapes: Reshapes, row: Refusal[UnsupportedMutationError] = OTHER_MEMORY
) -> UnsupportedMutationError:
    return row.error(reshapes.lines.get(id(entry.fake)), input=entry.target or entry.name)


def _other_size(fake: torch.Tensor, value: torch.Tensor) -> bool:
    return fake.dim() != value.dim() or not (is_symbolic(fake) or fake.size() == value.size())


def _has_other_size(entry: TracedInput) -> bool:
    """Whether an input that requires gradients got another size: its earlier gradients have the old size."""
    fake, value = entry.fake, entry.value
    return fake is not None and fake.requires_grad and isinstance(value, torch.Tensor) and _other_size(fake, value)


def _meet(entry: TracedInput, other: TracedInput, begun: Mapping[int, Input]) -> bool:
    """Whether two inputs shared elements and are parts of one tensor for autograd, unknown to the program."""
    if entry.fake is None or other.fake is None or other.fake is entry.fake:
        return False
    place, elsewhere = (begun.get(id(fake)) or Input.of(fake) for fake in (entry.fake, other.fake))
    if (entry.root or entry) is (other.root or other) or place.storage != elsewhere.storage:
        return False
    if disjoint(place.layout, elsewhere.layout):
        return False
    return _of_one_tensor(entry, other)


def _of_one_tensor(entry: TracedInput, other: TracedInput) -> bool:
    """Whether autograd takes two inputs for parts of one tensor."""
    return entry.known_base is other.known_base is not None
