"""Gradients of a captured program: its backward is captured too, together with the forward that it needs.

Autograd goes through a call as through one operator. When its backward is asked for, a second graph, captured from the
program and the gradients of its results, computes both again from the inputs as they were: what the program computes
under ``no_grad``, and by functions with a backward of their own, has the gradients that eager gives it.

Invariant: random numbers are drawn again as in the call. Limits: differentiable once; inputs that the call writes and
that are results of other operators are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from functionalize._torch import pytree
from functionalize.aliasing.geometry import Layout
from functionalize.errors import UnsupportedMutationError
from functionalize.graph_capture.finalize import Outcome
from functionalize.runtime.graph_inputs import Source

TANGENTS = "tangents"


def with_gradients(func: Callable[..., Any], leaves: Callable[[], Sequence[torch.Tensor]]) -> Callable[..., Any]:
    """The gradients of ``leaves()`` as a function of what ``func`` takes, and of tangents by name."""

    def gradients(*args: Any, **kwargs: Any) -> Any:
        tangents = kwargs.pop(TANGENTS)
        with torch.enable_grad():
            results = differentiable(func(*args, **kwargs))
            found = torch.autograd.grad(results, list(leaves()), tangents, allow_unused=True)
        return list(found)

    return gradients


def differentiable(results: Any) -> list[torch.Tensor]:
    """The distinct tensors among some results that autograd can go back from."""
    tensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return list({id(tensor): tensor for tensor in tensors}.values())


def refuse_written(sources: Sequence[Source], outcome: Outcome, inputs: Sequence[Any]) -> None:
    """In eager, autograd would go through what a call writes to such an input."""
    for back in outcome.backs:
        value = inputs[back.source]
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            source = sources[back.source]
            raise UnsupportedMutationError(
                f"the captured program writes to `{source.target or source.name}`, through which gradients flow",
                why="they would have to flow through the write as well, into a tensor that exists already",
                hint="call it under torch.no_grad(), or pass a copy (`.clone()`) and return the new value",
            )


@dataclass(frozen=True, eq=False)
class Backward:
    """A graph that computes gradients from a call's inputs and tangents."""

    graph: GraphModule
    given: tuple[str, ...]  # the names of its inputs
    constants: Mapping[str, Any]  # those that it holds itself
    leaves: tuple[str, ...]  # whose gradients its last outputs are


@dataclass(frozen=True, eq=False)
class Call:
    """What the forward of a call leaves for its backward."""

    graph: GraphModule
    names: tuple[str, ...]  # of the graph's inputs
    results: tuple[int, ...]  # of the graph's outputs those that have a tangent
    random: bool
    backward: Backward | Exception  # why there is none


def backward_of(
    capture: Callable[..., Any], constants: Sequence[Source], results: Sequence[tuple[Layout, Any]], *call: Any
) -> Backward | Exception:
    """Capture the backward of a call, for tangents of its results' places; or the reason why that cannot be."""
    try:
        program = capture(constants, [_like(*result) for result in results], *call)
    except Exception as error:  # for the backward to raise, if it is asked for
        return error
    sources = program.inputs
    known = {source.name: source.value for source in sources if source.spot is None and source.grad_of is None}
    leaves = tuple(source.name for source in program.differentiated)
    return Backward(program.graph_module, tuple(source.name for source in sources), known, leaves)


def _like(place: Layout, device: torch.device) -> torch.Tensor:
    """A tensor of the size of a place, which holds nothing: for what it looks like."""
    if not place.static:
        raise UnsupportedMutationError(
            "gradients of a result whose size the data decide",
            why="the backward of a program is captured for the sizes of its results",
            hint="take the gradients inside of what is captured",
        )
    return torch.empty((), dtype=place.dtype, device=device).expand(place.size)


class Replay(torch.autograd.Function):
    """A call of a graph, whose backward is another graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Any) -> Any:
        ctx.call, ctx.inputs = call, inputs
        ctx.state = torch.get_rng_state() if call.random else None
        outputs = call.graph(*(value.detach() if isinstance(value, torch.Tensor) else value for value in inputs))
        # An output that is an input is another tensor to autograd.
        outputs = tuple(value.view_as(value) if isinstance(value, torch.Tensor) else value for value in outputs)
        rest = [v for n, v in enumerate(outputs) if n not in call.results and isinstance(v, torch.Tensor)]
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(True)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: Any) -> Any:
        call: Call = ctx.call
        backward = call.backward
        if isinstance(backward, Exception):
            raise RuntimeError(f"the backward of a captured program cannot be captured: {backward}") from backward
        known = dict(backward.constants) | dict(zip(call.names, ctx.inputs, strict=True))
        known |= {f"{TANGENTS}_{place}": tangents[number] for place, number in enumerate(call.results)}
        values = [known.get(name) for name in backward.given]
        with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=call.random):
            if call.random:
                torch.set_rng_state(ctx.state)
            outputs = backward.graph(*(v.detach() if isinstance(v, torch.Tensor) else v for v in values))
        found = dict(zip(backward.leaves, outputs[len(outputs) - len(backward.leaves) :], strict=True))
        return None, *(found.get(name) for name in call.names)
