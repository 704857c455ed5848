"""One operator under ``torch.compile`` with our backend, against eager: results, their strides, and gradients.

Invariant: what ``aot_eager`` gives as eager does counts. Limits: the values of memory that an operator does not fill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from functionalize.verify.observation import clone_inputs
from tests.sweeps.opinfo.cases import Case, op_table, sample_of

SEED = 42


def check_compiled(case: Case, uninitialized: bool) -> tuple[str, str]:
    """What could not do it, or failed, and why; nothing where all is as in eager."""
    op, sample = op_table()[case.op], sample_of(case)
    given = (sample.input, *sample.args), dict(sample.kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        return op.op(*args, **kwargs)

    try:
        expected = _observed(run, given)
    except Exception as error:
        return "eager", _words(error)
    if uninitialized or _difference(expected, _observed(run, given)):
        return "eager", "eager does not repeat itself"
    ours = _compiled(run, given, "functionalize", expected)
    if ours and _compiled(run, given, "aot_eager", expected):
        return "aot_eager", ours
    return ("compiled", ours) if ours else ("", "")


def _compiled(run: Callable[..., Any], given: Any, backend: str, expected: list[Any]) -> str:
    torch._dynamo.reset()
    try:
        return _difference(expected, _observed(torch.compile(run, backend=backend), given))
    except Exception as error:
        return _words(error)
    finally:
        torch._dynamo.reset()


def _observed(run: Callable[..., Any], given: Any) -> list[Any]:
    """Results and gradients."""
    args, kwargs = pytree.tree_map(_leaf, given)
    torch.manual_seed(SEED)
    results = [value for value in pytree.tree_leaves(run(*args, **kwargs)) if isinstance(value, torch.Tensor)]
    roots = [value for value in results if value.requires_grad]
    leaves = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor) and v.requires_grad]
    if roots and leaves:
        tangents = [torch.ones_like(root) for root in roots]
        return [*results, *torch.autograd.grad(roots, leaves, tangents, allow_unused=True)]
    return results


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copied: torch.Tensor = clone_inputs(value.detach())
    return copied.requires_grad_() if copied.is_floating_point() or copied.is_complex() else copied


def _difference(expected: list[Any], actual: list[Any]) -> str:
    if [one is None for one in expected] != [one is None for one in actual]:
        return "other results are there"
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one is not None:
            try:
                torch.testing.assert_close(other, one, equal_nan=True, check_stride=False)
            except AssertionError as error:
                return f"result {number}: {' '.join(str(error).split())}"
            if one.requires_grad != other.requires_grad:
                return f"result {number}: requires_grad {other.requires_grad}, eager {one.requires_grad}"
    return ""


def _words(error: Exception) -> str:
    return f"{type(error).__name__} {' '.join(str(error).split())}"
