"""Gradients of a call: autograd goes through its graph as through one operator.

Forward and backward were captured together, and a partition function of torch's cut them in two. What the backward
needs is saved by ``save_for_backward``, so that autograd checks that nobody has written to it since.

Invariant: the gradients are those of the captured program, of each input that required one. Limits: differentiable
once; asked for more, a call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from functionalize._torch.autograd import without_autocast
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.strided_layout import has_strides, with_layout
from functionalize.runtime.metadata import SymbolSources

Function = Callable[..., Sequence[Any]]
_TENSOR = object()  # stands for a tensor that autograd keeps


@dataclass(frozen=True, eq=False)
class JointGraph:
    """A program's forward and backward in one graph: of ``primals_N`` and ``tangents_N``.

    Its outputs are results of the forward, and then gradients of inputs.
    """

    module: GraphModule
    numbers: tuple[int, ...]  # of the program's inputs that it takes: `primals_N` is the N-th of all
    names: tuple[str, ...]  # of these
    results: tuple[int, ...]  # which of the program's results it gives, before the values of bases
    bases: tuple[int, ...]  # of which bases it gives the values, after the results
    layouts: tuple[Layout | None, ...]  # of both; None: as they come
    tangents: tuple[int, ...]  # which of both have one
    gradients: tuple[int | None, ...]  # for each input its position among the gradients
    at_risk: frozenset[int]  # inputs in whose storages a call writes
    symbols: SymbolSources  # in positions of these inputs and results


@dataclass(frozen=True, eq=False)
class ForwardCall:
    """The two halves of a joint graph, and how they fit together."""

    joint: JointGraph
    forward: Function
    backward: Function | None  # None: no input gets a gradient
    saved: Sequence[int]  # what the backward takes before the tangents: positions among inputs, then results
    gradients: Sequence[int | None]  # for each input of the graph the backward's result that is its gradient
    doubles: Sequence[int]  # results that are inputs, or stand there twice: autograd wants tensors of their own

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The forward's results, and after them what else is to be saved."""
        apart = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
        with torch.enable_grad():  # kernels ask whether to keep what a backward needs; nothing here requires grad
            results = list(called(self.forward, apart))
        for position in self.doubles:
            if isinstance(results[position], torch.Tensor):
                results[position] = results[position].detach()
        symbols = self.joint.symbols.bind(inputs, results)
        for position, layout in enumerate(self.joint.layouts):  # graphs without views, and compilers, choose others
            if layout is not None:
                results[position] = with_layout(results[position], symbols.layout(layout))
        return results

    def to_save(self, inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """What the backward will take; inputs that the call is about to write are copied."""
        values = [*inputs, *results]
        for position in self.joint.at_risk.intersection(self.saved):
            if isinstance(values[position], torch.Tensor):
                values[position] = values[position].clone()
        return [values[position] for position in self.saved]


class CapturedFunction(torch.autograd.Function):
    """A call of the forward, whose derivative is the backward."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *inputs: Any) -> tuple[Any, ...]:
        results = call.run(inputs)
        saved = call.to_save(inputs, results)
        ctx.call, ctx.plain = call, [_TENSOR if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.save_for_backward(*[value for value in saved if isinstance(value, torch.Tensor)])
        outputs = results[: len(call.joint.layouts)]
        ctx.looks = [_look_of(outputs[position]) for position in call.joint.tangents]
        others = [r for n, r in enumerate(outputs) if n not in call.joint.tangents and isinstance(r, torch.Tensor)]
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        call: ForwardCall = ctx.call
        if call.backward is None:
            return (None,) * (1 + len(call.gradients))
        saved = iter(ctx.saved_tensors)
        given = [next(saved) if value is _TENSOR else value for value in ctx.plain]
        given += [_laid_out(tangents[n], *look) for n, look in zip(call.joint.tangents, ctx.looks, strict=True)]
        twice = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in given)
        with torch.no_grad():
            results = called(call.backward, given)
        found = [None if position is None else results[position] for position in call.gradients]
        if twice:
            found = Undifferentiable.apply(RuntimeError(_ONCE), len(found), *found, *given)  # type: ignore[no-untyped-call]
        return None, *found


class Undifferentiable(torch.autograd.Function):
    """Results whose backward was not captured: raises the reason when it is asked for."""

    @staticmethod
    def forward(ctx: Any, reason: Exception, count: int, *values: Any) -> tuple[Any, ...]:
        """The first ``count`` values are results, the others what they were computed from."""
        ctx.reason = reason
        return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in values[:count])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        raise ctx.reason


_ONCE = (
    "a captured program is differentiable once, and here the gradient of its gradient is asked for\n"
    "    why  its backward is a graph, captured when the program was; none was captured for that backward\n"
    "    try  take the gradients (torch.autograd.grad(..., create_graph=True)) inside of what is captured"
)


def _look_of(result: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    """What the captured backward expects of a result's tangent: to look like the result, without holes."""
    like = torch.empty_like(result, device="meta") if result.layout is torch.strided else None
    return result.size(), () if like is None else like.stride(), result.dtype, result.device


def _laid_out(
    tangent: torch.Tensor | None, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tangent in a layout; zeros where there is none."""
    if tangent is None:
        return torch.empty_strided(size, stride, dtype=dtype, device=device).zero_()
    if tangent.layout is not torch.strided:
        return tangent
    tangent = tangent.resolve_conj().resolve_neg()
    if has_strides(tangent, stride):
        return tangent
    return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(tangent)


def called(function: Function, inputs: Sequence[Any]) -> Sequence[Any]:
    """A graph's results. Graphs of operators below autocast must not be cast again."""
    with without_autocast():
        results = function(*inputs)
    return results if isinstance(results, (list, tuple)) else (results,)
