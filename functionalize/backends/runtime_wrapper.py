"""What a compiled Dynamo graph does when it is called.

Invariant: a call computes by the compiler's functions alone; then it writes back to the inputs, and gives outputs that
alias inputs and one another as the program's do. Limits: once differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from functionalize._torch.dynamo import without_autocast
from functionalize.aliasing.geometry import Layout
from functionalize.backends.joint_graph import Item, Number
from functionalize.backends.partitioner import Extra, Given, Parts, Step
from functionalize.runtime.output_aliasing import laid_out, view_at

Function = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Plan:
    """All that a call needs to know. Results of the forward graph: values, numbers, extras, what is saved."""

    parts: Parts
    inputs: int
    passed: list[int]  # which inputs the graphs take
    leaves: list[int]  # which may have gradients
    items: list[Item]
    layouts: list[Layout | None]  # of the values
    numbers: int
    tangents: list[int]  # results that have a gradient
    seen: frozenset[int]  # inputs whose writes autograd sees
    risky: frozenset[int]  # inputs whose memory is written
    forward: Function
    backward: Function | None

    @property
    def results(self) -> int:
        """How many results come before what is saved."""
        return len(self.layouts) + self.numbers + self.parts.extras

    def run(self, given: Sequence[Any]) -> list[Any]:
        """The forward graph's results; those that the caller gets are no inputs, not twice there, and laid out."""
        with torch.no_grad(), without_autocast():
            results = list(_called(self.forward, [given[place] for place in self.passed]))
            for place in self.parts.copies:
                if isinstance(results[place], torch.Tensor):
                    results[place] = results[place].clone()
            numbers = results[len(self.layouts) :]
            for place, layout in enumerate(self.layouts):
                results[place] = _laid_out(results[place], layout, numbers)
        return results

    def kept(self, given: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """What the backward will need, as it is before the inputs are written."""
        saved = []
        for source in self.parts.saved:
            value = given[source.index] if isinstance(source, Given) else results[source.index]
            risky = isinstance(source, Given) and source.index in self.risky and isinstance(value, torch.Tensor)
            saved.append(value.clone() if risky else value)
        return saved

    def gradients(self, saved: Sequence[Any], tangents: Sequence[torch.Tensor]) -> list[Any]:
        """The gradients of the inputs."""
        found: list[Any] = [None] * self.inputs
        if self.backward is None:
            return found
        given = [*saved, *[tangents[place].contiguous() for place in self.tangents]]
        with torch.no_grad(), without_autocast():
            results = _called(self.backward, given)
        for leaf, place in zip(self.leaves, self.parts.gradients, strict=True):
            found[leaf] = None if place is None else results[place]
        return found


class _Differentiable(torch.autograd.Function):
    """The forward graph, with the backward graph as its derivative."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *given: Any) -> tuple[Any, ...]:
        results = plan.run(given)
        saved = plan.kept(given, results)
        ctx.plan, ctx.plain = plan, [None if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.save_for_backward(*[value for value in saved if isinstance(value, torch.Tensor)])
        outputs = [r.detach() if isinstance(r, torch.Tensor) else r for r in results[: plan.results]]
        apart = [r for i, r in enumerate(outputs) if i not in plan.tangents and isinstance(r, torch.Tensor)]
        ctx.mark_non_differentiable(*apart)
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if value is None else value for value in ctx.plain]
        return (None, *ctx.plan.gradients(saved, tangents))


def call(plan: Plan, given: Sequence[Any]) -> list[Any]:
    """Compute, write back, and give the outputs of the Dynamo graph."""
    if plan.tangents:
        with torch.enable_grad():
            results = list(_Differentiable.apply(plan, *given))  # type: ignore[no-untyped-call]
    else:
        results = plan.run(given)
    values, rest = results[: len(plan.layouts)], results[len(plan.layouts) :]
    numbers, extras = rest[: plan.numbers], rest[plan.numbers :]
    for step in plan.parts.steps:
        with torch.set_grad_enabled(step.target in plan.seen):
            _step(step, given, extras)
    return [_output(item, given, values, numbers) for item in plan.items]


def _step(step: Step, given: Sequence[Any], extras: Sequence[Any]) -> None:
    def actual(arg: Any) -> Any:
        if isinstance(arg, Given):
            return given[arg.index]
        if isinstance(arg, Extra):
            return extras[arg.index]
        return type(arg)(map(actual, arg)) if isinstance(arg, (list, tuple)) else arg

    step.op(given[step.target], *map(actual, step.args))


def _output(item: Item, given: Sequence[Any], values: Sequence[Any], numbers: Sequence[Any]) -> Any:
    if item.number is not None:
        return numbers[item.number]
    if item.given is None and item.value is None:
        return item.constant
    tensor = given[item.given] if item.given is not None else values[item.value or 0]
    if item.place is None or item.was is None:
        return tensor
    tensor = tensor if item.differentiable else tensor.detach()
    return view_at(tensor, _actual(item.was, numbers), _actual(item.place, numbers))


def _laid_out(value: torch.Tensor, layout: Layout | None, numbers: Sequence[Any]) -> torch.Tensor:
    """A value with the strides that the program gave it; compilers, and graphs without views, choose others."""
    if layout is not None:
        return laid_out(value, _actual(layout, numbers))
    if value.layout is not torch.strided or value.is_contiguous():
        return value
    return value.contiguous()


def _actual(place: Layout, numbers: Sequence[Any]) -> Layout:
    """A place with the sizes of this call."""

    def actual(number: Any) -> Any:
        return numbers[number.index] if isinstance(number, Number) else number

    size, stride = tuple(map(actual, place.size)), tuple(map(actual, place.stride))
    return replace(place, size=size, stride=stride, offset=actual(place.offset))


def _called(function: Function, given: list[Any]) -> Sequence[Any]:
    results = function(*given)
    return results if isinstance(results, (list, tuple)) else (results,)
