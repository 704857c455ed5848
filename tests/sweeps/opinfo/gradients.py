"""First and second derivatives through a captured call, against eager's.

Invariant: tangents are laid out in turn as the results are, transposed, and expanded from one number. Limits: cases
count where eager's own derivatives exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from functionalize import DataDependentError, capture
from functionalize.verify.observation import clone_inputs
from tests.sweeps.opinfo.programs import Program

SEED = 42


def derivatives(run: Callable[..., Any], inputs: tuple[torch.Tensor, ...], order: int) -> list[Any]:
    """The gradients of a call, and the gradients of these, with tangents of many layouts."""
    torch.manual_seed(SEED)
    leaves = [value for value in inputs if value.requires_grad]
    values, found, sources = differentiable(run(*inputs)), list[Any](), list(leaves)
    for one in range(order):
        torch.manual_seed(SEED + one)  # some entries of the database set a seed of their own
        tangents = [_tangent(value, number + one) for number, value in enumerate(values)]
        last = one == order - 1
        if not last:
            tangents = [tangent.requires_grad_() for tangent in tangents]
        gradients = torch.autograd.grad(values, sources, tangents, allow_unused=True, create_graph=not last)
        found += gradients
        values, sources = differentiable(gradients), [*sources, *tangents]
        if not values:
            break
    return [None if gradient is None else gradient.detach() for gradient in found]


def differentiable(tree: Any) -> list[torch.Tensor]:
    """The tensors that know where they come from."""
    return [v for v in pytree.tree_leaves(tree) if isinstance(v, torch.Tensor) and v.requires_grad]


def _tangent(value: torch.Tensor, number: int) -> torch.Tensor:
    plain = value.layout is torch.strided
    if number % 3 == 2 and plain:
        return torch.full((), 0.7, dtype=value.dtype).expand(value.size())
    made = torch.randn(value.size(), dtype=value.dtype)
    if number % 3 == 1 and plain:
        return made.permute(*reversed(range(made.dim()))).contiguous().permute(*reversed(range(made.dim())))
    return made


def check_derivatives(program: Program) -> tuple[str, str]:
    """What could not do it, or failed, and why; nothing where all is as in eager."""
    for order in (2, 1):
        try:
            expected = derivatives(program.run, inputs_of(program), order)
            again = derivatives(program.run, inputs_of(program), order)
        except Exception as error:
            if order == 1:
                return "eager", " ".join(str(error).split())
            continue
        if difference(expected, again):
            return "eager", "eager does not repeat itself"
        try:
            captured = capture(program.run, inputs_of(program))
        except Exception as error:
            return "capture", " ".join(str(error).split())
        try:
            differs = difference(expected, derivatives(captured, inputs_of(program), order))
        except DataDependentError as error:
            return "refused", " ".join(str(error).split())
        except Exception as error:
            return "run", f"order {order}: {type(error).__name__} {' '.join(str(error).split())}"
        return ("values", f"order {order}: {differs}") if differs else ("", "")
    return "eager", "no derivatives"


def inputs_of(program: Program) -> tuple[torch.Tensor, ...]:
    """A program's inputs, of which those that can require gradients do."""
    given = clone_inputs(program.inputs)
    return tuple(t.requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in given)


def difference(expected: list[Any], actual: list[Any]) -> str:
    """In what derivatives differ; nothing where they do not."""
    if len(expected) != len(actual):
        return f"{len(actual)} derivatives, eager {len(expected)}"
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one is None or other is None:
            if one is not other:
                return f"derivative {number} is {_word(other)}, eager's is {_word(one)}"
            continue
        try:
            torch.testing.assert_close(other, one, equal_nan=True)
        except AssertionError as error:
            return f"derivative {number}: {' '.join(str(error).split())}"
    return ""


def _word(gradient: Any) -> str:
    return "none" if gradient is None else "there"
