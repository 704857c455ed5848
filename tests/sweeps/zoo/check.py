"""Captures one model and holds two calls against eager. Invariant: one verdict; eager on a deep copy is the reference.

Limits: a model counts where eager runs it, and runs it alike twice.
"""

from __future__ import annotations

import copy
import random
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from functionalize import capture
from functionalize.errors import DataDependentError, InputMismatchError, UnsupportedProgramError
from tests.support.ledger import REFUSED, RIGHT, WRONG, Ledger, Row
from tests.sweeps.pool import OutOfTime
from tests.sweeps.zoo.observe import Kept, Observation, difference, fakes, leaves, observe
from tests.sweeps.zoo.specimen import Call, Family, NotApplicable

CRASH = "crash"
EAGER, TIME = "eager cannot", "out of time"
COUNTED = (RIGHT, REFUSED, WRONG, CRASH, TIME)
MODES = ("eval", "train")
_REFUSALS = (UnsupportedProgramError, DataDependentError, InputMismatchError)


# Which candidate of a model eager ran, so that the other mode begins with it.
_KNOWN: dict[tuple[str, str], int] = {}


@dataclass(frozen=True)
class Verdict:
    """What came out for one model in one mode. ``reason`` is one line; ``export`` that of torch.export, if asked."""

    family: str
    name: str
    mode: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    export: str = ""


def ledger_of(to: Sequence[str] = ()) -> Ledger:
    """The ledger of what is captured, or exported by some routes."""
    return Ledger("-".join(("zoo", *sorted(to))))


def rows_of(verdict: Verdict) -> list[Row]:
    """A verdict as a row that the ledger is asked for; none where eager does not run the model."""
    if verdict.status == EAGER:
        return []
    status = verdict.status if verdict.status in (RIGHT, REFUSED) else WRONG
    return [Row(f"{verdict.family}/{verdict.name}", verdict.mode, status, verdict.reason)]


@dataclass(frozen=True)
class Case:
    """A model that eager runs, and what it does."""

    model: nn.Module
    calls: tuple[Call, Call]
    expected: list[Observation]
    reference: nn.Module  # as eager's calls left it


def check(family: Family, name: str, mode: str, *, compare: bool = False, to: Sequence[str] = ()) -> Verdict:
    """The verdict on one model; ``to``: as what is exported of it, by these routes."""
    begin = time.monotonic()
    status, reason, export = EAGER, "", ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # models warn of kernels that are not installed
            try:
                case = _case(family, name, mode)
            except Exception as error:  # whatever keeps eager from running the model
                reason = one_line(error)
            else:
                status = CRASH
                status, reason = _exported_to(to, case, mode) if to else _judged(case, mode)
                if status == WRONG and (to or ": values: " in reason):
                    rounded = _nudged(case, mode)
                    again, _ = _exported_to(to, case, mode, rounded) if to else _judged(case, mode, rounded)
                    status, reason = (RIGHT, f"but for rounding: {reason}") if again == RIGHT else (status, reason)
                export = _exported(case, mode) if compare else ""
    except OutOfTime:
        status = TIME if status != EAGER else EAGER
        reason = f"after {time.monotonic() - begin:.0f} s"
    return Verdict(family.name, name, mode, status, reason, round(time.monotonic() - begin, 1), export)


def _case(family: Family, name: str, mode: str) -> Case:
    """The first candidate that eager runs, with what eager does in two calls and a third like the first."""
    first: Exception | None = None
    begin = _KNOWN.get((family.name, name), 0)
    scratch: nn.Module | None = None
    model: nn.Module | None = None
    for number, candidate in islice(enumerate(family.candidates(name)), begin, None):
        try:
            candidate.model.train(mode == "train")
            torch.manual_seed(1)
            calls = (candidate.inputs(), candidate.inputs())
            if candidate.model is not model or scratch is None:
                model, scratch = candidate.model, copy.deepcopy(candidate.model)
            with torch.no_grad():
                scratch(*calls[0][0], **calls[0][1])
        except NotApplicable:
            continue
        except Exception as error:  # the next may run
            first = first or error
            continue
        _KNOWN[family.name, name] = number
        return _with_reference(candidate.model, calls, mode)
    raise first or ValueError("no candidates")


def _with_reference(model: nn.Module, calls: tuple[Call, Call], mode: str) -> Case:
    once, again = copy.deepcopy(model), copy.deepcopy(model)
    expected = _run(once, once, calls, mode)
    repeated = difference_of_all(expected, _run(again, again, calls, mode))
    if repeated:
        raise ValueError(f"eager does not repeat itself: {repeated}")
    return Case(model, calls, expected, again)


def _run(function: Any, model: nn.Module, calls: tuple[Call, Call], mode: str) -> list[Observation]:
    """What the calls return and leave: the first, the second, and the first again."""
    return [_call(function, model, call, mode) for call in (*calls, calls[0])]


def _call(function: Any, model: nn.Module, call: Call, mode: str) -> Observation:
    args, kwargs = copy.deepcopy(call)
    model.zero_grad(set_to_none=True)
    seed(7)
    with torch.set_grad_enabled(mode == "train"):
        results = function(*args, **kwargs)
        found = fakes(results)
        if not found and mode == "train":
            _backward(results)
    return observe(results, model)


def _backward(results: Any) -> None:
    """Gradients of a scalar to which every result adds that requires grad, each in its own measure."""
    outputs = {id(leaf): leaf for _, leaf in leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad}
    loss = torch.zeros(())
    for number, output in enumerate(outputs.values()):
        if output.is_floating_point():
            loss = loss + (output.float() * (number + 2)).sin().mean()
    if loss.requires_grad:
        loss.backward()


def difference_of_all(expected: list[Observation], actual: list[Observation]) -> str | None:
    """In what the first call differs that does."""
    for number, (one, other) in enumerate(zip(expected, actual, strict=True), 1):
        found = difference(one, other)
        if found:
            return f"call {number}: {found}"
    return None


def _judged(case: Case, mode: str, rounded: list[Observation] | None = None) -> tuple[str, str]:
    """Capture, call, compare; and run eager again afterwards. ``rounded``: what may be between, see `_nudged`."""
    model = copy.deepcopy(case.model)
    stage = "capture"
    try:
        args, kwargs = copy.deepcopy(case.calls[0])
        seed(7)
        with torch.set_grad_enabled(mode == "train"):
            program = capture(model, args, kwargs)
        left = fakes(model)
        if left:
            return WRONG, f"after the capture the module holds fake tensors: {left[0]}"
        stage = "call"
        for number, call in enumerate((*case.calls, case.calls[0]), 1):
            stage = f"call {number}"
            allowed = rounded[number - 1] if rounded else None
            found = difference(case.expected[number - 1], _call(program, model, call, mode), allowed)
            if found:
                return WRONG, f"{stage}: {found}"
        if rounded:
            return RIGHT, ""
        stage = "eager afterwards"
        return _eager_afterwards(case, mode, model)
    except _REFUSALS as error:
        return REFUSED, f"{stage}: {type(error).__name__}: {one_line(error)}"
    except Exception as error:  # anything else is no answer to a user
        return CRASH, f"{stage}: {type(error).__name__}: {one_line(error)}"


def _nudged(case: Case, mode: str) -> list[Observation]:
    """What eager's calls return and leave where weights and inputs are other ones in their last bit.

    Some models blow that up. Where views are copied, kernels add up in another order: so do the results differ then.
    """
    generator = torch.Generator().manual_seed(0)

    def nudge(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype not in (torch.float32, torch.float64):
            return leaf
        signs = torch.randint(-1, 2, leaf.shape, generator=generator)
        return leaf * (1 + signs * torch.finfo(leaf.dtype).eps).to(leaf.dtype)

    model, calls = copy.deepcopy(case.model), pytree.tree_map(nudge, copy.deepcopy(case.calls))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.layout is torch.strided and tensor.is_floating_point():
                tensor.copy_(nudge(tensor))
    return _run(model, model, calls, mode)


def _eager_afterwards(case: Case, mode: str, model: nn.Module) -> tuple[str, str]:
    """Eager goes on where the captured calls ended: as eager's own calls would."""
    expected = _call(case.reference, case.reference, case.calls[1], mode)
    found = difference(expected, _call(model, model, case.calls[1], mode)) or next(iter(fakes(model)), None)
    return (WRONG, f"eager afterwards: {found}") if found else (RIGHT, "")


def _exported_to(
    routes: Sequence[str], case: Case, mode: str, rounded: list[Observation] | None = None
) -> tuple[str, str]:
    from tests.sweeps.zoo.exported import judged

    return judged(case, mode, routes, rounded)


def _exported(case: Case, mode: str) -> str:
    """Whether torch.export takes the model: "right", "wrong" or what it raises."""
    model = copy.deepcopy(case.model)
    try:
        args, kwargs = copy.deepcopy(case.calls[0])
        with torch.set_grad_enabled(mode == "train"):
            program = torch.export.export(model, args, kwargs, strict=False).module(check_guards=False)
        args, kwargs = copy.deepcopy(case.calls[1])
        torch.manual_seed(7)
        with torch.set_grad_enabled(mode == "train"):
            results = program(*args, **kwargs)
    except Exception as error:  # torch.export raises a dozen classes
        return f"{type(error).__name__}: {one_line(error)}"
    found = _values(observe(results, model))
    different = difference(_values(case.expected[1]), found)
    return f"wrong: {different}" if different else RIGHT


def _values(observed: Observation) -> Observation:
    """The tensors among the results, in order, without what torch.export promises nothing of."""
    kept = [leaf for leaf in observed.results.values() if isinstance(leaf, Kept)]
    alike = {str(place): Kept(one.values.contiguous(), (), False) for place, one in enumerate(kept)}
    return Observation(alike, {}, {})


def seed(number: int) -> None:
    """Seed all that models draw from."""
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def one_line(error: BaseException) -> str:
    """The first line of what an error says."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return " ".join(text.split())[:300]
