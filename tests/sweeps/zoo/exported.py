"""Exports one model, and holds two calls of what was exported against eager. Invariant: one verdict.

Limits: of the results each tensor must be there, in whatever order; gradients of later backwards are not looked at, and
models that draw random numbers count on ONNX Runtime in their sizes alone.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from functionalize import UnsupportedExportError, capture
from functionalize.errors import DataDependentError, InputMismatchError, UnsupportedProgramError
from tests.support.ledger import REFUSED, RIGHT, WRONG
from tests.support.routes import ONNX, SAVED
from tests.sweeps.zoo.check import CRASH, Case, one_line, seed
from tests.sweeps.zoo.observe import Observation, distances, leaves
from tests.sweeps.zoo.specimen import Call

_REFUSALS = (UnsupportedProgramError, DataDependentError, InputMismatchError)
ROUTES = {"module": SAVED, "onnx": ONNX}  # by the name that the ledgers have


def _state(run: Any) -> Mapping[str, Tensor]:
    """The state of what was exported, as its calls left it."""
    return dict([*run.named_buffers(), *run.named_parameters()]) if isinstance(run, nn.Module) else run.state


def judged(
    case: Case, mode: str, routes: Sequence[str], rounded: Sequence[Observation] | None = None
) -> tuple[str, str]:
    """Capture; by each route export, call twice, compare results and state. The first that is not right tells.

    ``rounded``: what eager gives but for roundings, as far from which the values may be.
    """
    stage = "capture"
    try:
        model = copy.deepcopy(case.model)
        args, kwargs = copy.deepcopy(case.calls[0])
        with torch.set_grad_enabled(mode == "train"), tempfile.TemporaryDirectory() as folder:
            seed(7)
            program = capture(model, args, kwargs)
            for route in routes:
                stage = f"{route}: export"
                run = ROUTES[route](program, Path(folder))
                values = route != "onnx" or not _draws(program)
                reference = copy.deepcopy(case.model)
                for number, call in enumerate(case.calls, 1):
                    stage = f"{route}: call {number}"
                    once, nudged = case.expected[number - 1], rounded[number - 1] if rounded else None
                    far, far_state = (distances(once, nudged, kind) for kind in ("results", "buffers"))
                    missing = _missing(_results(reference, call), _results(run, call), far, values=values)
                    missing = missing or _other_state(
                        dict(reference.named_buffers()), _state(run), far_state, values=values
                    )
                    if missing:
                        return WRONG, f"{stage}: {missing}"
    except UnsupportedExportError as error:
        cause = error.causes[0].splitlines()
        return REFUSED, f"{stage}: {' '.join(cause[:1] + [line for line in cause if 'why ' in line])[:200]}"
    except _REFUSALS as error:
        return REFUSED, f"{stage}: {type(error).__name__}: {one_line(error)}"
    except Exception as error:  # an assertion of an exported program's is a RuntimeError
        decided = ": call" in stage and " -> " in str(error)
        return (REFUSED if decided else CRASH), f"{stage}: {type(error).__name__}: {one_line(error)}"
    return RIGHT, ""


def _draws(program: Any) -> bool:
    seeded = torch.Tag.nondeterministic_seeded
    return any(seeded in getattr(node.target, "tags", ()) for node in program.graph_module.graph.nodes)


def _results(function: Callable[..., Any], call: Call) -> dict[str, Tensor]:
    args, kwargs = copy.deepcopy(call)
    seed(7)
    return {path: leaf for path, leaf in leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)}


def _missing(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], far: Mapping[str, float], *, values: bool
) -> str | None:
    """Which tensor of eager's is not among those that were found."""
    for number, (path, one) in enumerate(expected.items()):
        if not any(_equal(one, other, far.get(path), values=values) for other in found.values()):
            alike = [other for other in found.values() if other.shape == one.shape and other.dtype == one.dtype]
            distance = min((float((other - one).abs().max()) for other in alike if one.numel()), default=None)
            near = "no tensor of that size" if distance is None else f"the nearest differs by {distance:.2g}"
            return f"result {number} of {one.dtype}{list(one.shape)}: {near}"
    return None


def _other_state(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], far: Mapping[str, float], *, values: bool
) -> str | None:
    for name, one in expected.items():
        other = found.get(name)
        if other is not None and not _equal(one, other, far.get(name), values=values):
            return f"the buffer {name} differs"
    return None


def _equal(one: Tensor, other: Tensor, far: float | None, *, values: bool) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not values:
        return True
    one, other = one.detach(), other.detach()
    if far is not None and one.numel() and float((one - other).abs().max()) <= far:
        return True
    limit = 2e-2 if one.dtype in (torch.float16, torch.bfloat16) else 2e-3
    scale = float(one.abs().max()) if one.numel() and one.is_floating_point() else 1.0
    limits: Any = {"rtol": limit, "atol": limit * max(scale, 1e-3)} if one.is_floating_point() else {}
    try:
        torch.testing.assert_close(other, one, equal_nan=True, check_stride=False, **limits)
    except AssertionError:
        return False
    return True
