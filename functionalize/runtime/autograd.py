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

from functionalize._torch.autograd import without_autocast
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.strided_layout import has_strides
from functionalize.runtime.output_aliasing import laid_out
from functionalize.runtime.symbol_bindings import SymbolSources

Function = Callable[..., Sequence[Any]]
_TENSOR = object()  # stands for a tensor that autograd keeps


@dataclass(frozen=True)
class SavedInput:
    """What the backward takes: an input of the graph, by its position."""

    position: int


@dataclass(frozen=True)
class SavedResult:
    """What the backward takes: a result of the forward, by its position."""

    position: int


@dataclass(frozen=True, eq=False)
class ForwardCall:
    """The two halves of a joint graph, and how they fit together."""

    forward: Function
    backward: Function | None  # None: no input gets a gradient
    layouts: Sequence[Layout | None]  # of the forward's results that are no saved ones; None: as they come
    tangents: Sequence[int]  # results that have one
    saved: Sequence[SavedInput | SavedResult]  # what the backward takes, before the tangents
    gradients: Sequence[int | None]  # for each input of the graph the backward's result that is its gradient
    doubles: Sequence[int]  # results that are inputs, or stand there twice: autograd wants tensors of their own
    at_risk: frozenset[int]  # inputs in whose storages the call writes
    symbols: SymbolSources

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The forward's results, and after them what else is to be saved."""
        apart = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
        with torch.enable_grad():  # kernels ask whether to keep what a backward needs; nothing here requires grad
            results = list(called(self.forward, apart))
        for position in self.doubles:
            if isinstance(results[position], torch.Tensor):
                results[position] = results[position].detach()
        count, symbols = len(self.layouts), self.symbols.bind(inputs, results)
        results[:count] = laid_out(results[:count], self.layouts, symbols)
        return results

    def to_save(self, inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """What the backward will take; inputs that the call is about to write are copied."""
        values = []
        for source in self.saved:
            if isinstance(source, SavedResult):
                values.append(results[source.position])
                continue
            value = inputs[source.position]
            at_risk = source.position in self.at_risk and isinstance(value, torch.Tensor)
            values.append(value.clone() if at_risk else value)
        return values


class CapturedFunction(torch.autograd.Function):
    """A call of the forward, whose derivative is the backward."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *inputs: Any) -> tuple[Any, ...]:
        results = call.run(inputs)
        saved = call.to_save(inputs, results)
        ctx.call, ctx.plain = call, [_TENSOR if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.save_for_backward(*[value for value in saved if isinstance(value, torch.Tensor)])
        outputs = results[: len(call.layouts)]
        ctx.tangents = [_Tangent.of(outputs[position]) for position in call.tangents]
        others = [r for n, r in enumerate(outputs) if n not in call.tangents and isinstance(r, torch.Tensor)]
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
        given += [like.made(tangents[n]) for n, like in zip(call.tangents, ctx.tangents, strict=True)]
        twice = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in given)
        with torch.no_grad():
            results = called(call.backward, given)
        found = [None if position is None else results[position] for position in call.gradients]
        if twice:
            found = _DifferentiableOnce.apply(len(found), *found, *given)  # type: ignore[no-untyped-call]
        return None, *found


class Undifferentiable(torch.autograd.Function):
    """Results whose backward could not be captured: raises the reason when it is asked for, and else does nothing."""

    @staticmethod
    def forward(ctx: Any, reason: Exception | None, count: int, *values: Any) -> tuple[Any, ...]:
        """The first ``count`` values are results, the others inputs that require gradients."""
        ctx.reason, ctx.arguments = reason, 2 + len(values)
        return tuple(value.detach() for value in values[:count])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        if ctx.reason is not None:
            raise ctx.reason
        return (None,) * ctx.arguments


class _DifferentiableOnce(torch.autograd.Function):
    """Gradients whose own gradients nobody has captured."""

    @staticmethod
    def forward(ctx: Any, count: int, *values: Any) -> tuple[Any, ...]:
        """The first ``count`` values are gradients, the others what they were computed from."""
        return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in values[:count])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(_ONCE)


_ONCE = (
    "a captured program is differentiable once, and here the gradient of its gradient is asked for\n"
    "    why  its backward is a graph, captured when the program was; none was captured for that backward\n"
    "    try  take the gradients (torch.autograd.grad(..., create_graph=True)) inside of what is captured"
)


@dataclass(frozen=True)
class _Tangent:
    """What a tangent looks like in the captured backward: like its result."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, result: torch.Tensor) -> _Tangent:
        like = torch.empty_like(result, device="meta") if result.layout is torch.strided else result
        return cls(result.size(), like.stride() if like.layout is torch.strided else (), result.dtype, result.device)

    def made(self, tangent: torch.Tensor | None) -> torch.Tensor:
        """A tangent in that layout; zeros where there is none."""
        if tangent is None:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device).zero_()
        if tangent.layout is not torch.strided:
            return tangent
        if tangent.is_conj() or tangent.is_neg():
            tangent = tangent.resolve_conj().resolve_neg()
        if has_strides(tangent, self.stride):
            return tangent
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device).copy_(tangent)


def called(function: Function, inputs: Sequence[Any]) -> Sequence[Any]:
    """A graph's results. Graphs of operators below autocast must not be cast again."""
    with without_autocast():
        results = function(*inputs)
    return results if isinstance(results, (list, tuple)) else (results,)
