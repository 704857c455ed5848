"""A captured program beside eager in several calls, which differ from the capture's: see `tests.sweeps.fuzz.calls`.

Each call must equal eager in all that a caller sees: values, dtypes, strides, aliasing, what autograd says of outputs
and inputs, gradients for random tangents with respect to all that requires them. Or it is refused by an error of this
package, with nothing changed. With ``on_guard_failure="recapture"``, which every second program has, a guard refuses
nothing.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from functionalize import capture
from functionalize._torch import FakeTensor
from functionalize.errors import (
    DataDependentError,
    InputMismatchError,
    NotCapturedWarning,
    NotFunctionalError,
    UnsupportedProgramError,
)
from functionalize.verify import assert_functional
from functionalize.verify.observation import differences, leaf_differences, observe, raises_alike
from tests.sweeps.fuzz.calls import MODES, Call, Surrounded, calls_of, surrounded
from tests.sweeps.fuzz.program import Program, Step
from tests.sweeps.fuzz.verdict import (
    FAILED,
    NOT_COUNTED,
    PASSED,
    REFUSED,
    Verdict,
    line_of,
    reads_past_a_storage,
    refusal,
    visible_differences,
)

TWICE = 4  # of so many programs one is differentiated twice: that takes as long as all else
REFUSALS = (InputMismatchError, UnsupportedProgramError, DataDependentError)
_VISIBLE = ("requires_grad", "is_leaf", "is_conj", "is_neg", "is_inference")
Tensors = list[torch.Tensor]


def check_calls(program: Program, remove: str, implementation: Callable[[Any], Any]) -> Verdict:
    """Capture a program, and hold several calls of it against eager; ``implementation`` makes what is captured."""
    calls = calls_of(program)
    if _Called(program, calls[0]).seen.error is not None:
        return Verdict(NOT_COUNTED, "eager raises")
    again = "recapture" if random.Random(f"{program.seed} guards").random() < 0.5 else "raise"
    module = _callable(program)
    try:
        arguments, _ = _arguments(calls[0])
        torch.manual_seed(0)  # as the calls: where the data decide whether the program raises, they must not
        with MODES[calls[0].mode]():
            captured = capture(implementation(module), arguments, remove=remove, on_guard_failure=again)
        assert_functional(captured.graph_module, remove)
    except NotFunctionalError as impure:
        return Verdict(FAILED, "purity", str(impure))
    except (UnsupportedProgramError, DataDependentError) as error:
        return refusal(error)
    except Exception as error:
        return Verdict(FAILED, "trace", f"{line_of(error)}; {calls[0]}")
    refused = 0
    for place, call in enumerate(calls):
        eager, actual = _Called(program, call), _Called(program, call, captured, module)
        verdict = reads_past_a_storage(eager.seen) or _verdict(eager, actual, place > 0, again)
        if verdict.status == FAILED and actual.seen.error is None and eager.seen.error is not None:
            verdict = _verdict_on_unread(call, eager.seen.error, remove, implementation) or verdict
        if verdict.status == FAILED:
            reason = f"{verdict.reason}; {again}, {place}: {call}"
            return Verdict(FAILED, verdict.kind, f"{reason}\n{call.program.arguments_source()}")
        refused += verdict.status == REFUSED
    if refused == len(calls):
        return verdict
    return Verdict(PASSED, equal=len(calls) - refused, refused=refused)


def run_in_eager(program: Program) -> None:
    """All that `check_calls` does with a program but for what is captured."""
    for call in calls_of(program):
        eager = _Called(program, call)
        with contextlib.suppress(RuntimeError, TypeError):
            eager.gradients(eager.rewritten)


def _callable(program: Program) -> Any:
    return Surrounded(program.function()) if surrounded(program) else program.function()


def _arguments(call: Call) -> tuple[list[Any], Tensors]:
    """The arguments of a call, and the leaves that they were computed from."""
    made, leaves = call.program.with_leaves()
    return [call.number, *made] if surrounded(call.program) else list(made), leaves


def _verdict_on_unread(
    call: Call, error: Exception, remove: str, implementation: Callable[[Any], Any]
) -> Verdict | None:
    """Where eager alone raises: whether that is for what nobody reads, which a graph does not run.

    Read after each step it must raise here too.
    """
    steps, copies = list[Step](), list[str]()
    for step in call.program.steps:
        read = [Step(f"v{1000 + len(copies) + n} = {name}.clone()") for n, name in enumerate(step.names)]
        copies += [one.source.split(" = ")[0] for one in read]
        steps += [step, *read]
    program = replace(call.program, steps=tuple(steps), outputs=f"({', '.join(copies)},)")
    other, module = replace(call, program=program), _callable(program)
    arguments, _ = _arguments(other)
    torch.manual_seed(0)
    try:
        with MODES[call.mode]():
            captured = capture(implementation(module), arguments, remove=remove)
        found = _Called(program, other, captured, module).seen.error
    except Exception as raised:
        found = raised
    alike = raises_alike(error, found) or str(found) == str(error)
    return Verdict(NOT_COUNTED, "eager raises for what nobody reads") if alike else None


class _Called:
    """One call: its tensors as the caller knows them before and after, and what came of it."""

    def __init__(self, program: Program, call: Call, captured: Any = None, module: Any = None) -> None:
        """Of eager, unless there is a captured program, with the module that it was captured of."""
        module = _callable(program) if module is None else module
        state = list(module.train(call.training).parameters()) if isinstance(module, torch.nn.Module) else []
        arguments, leaves = _arguments(call)
        self.tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        # A piece of these has a version of its own; there eager counts writes to views of it to what it is a piece of.
        self.counts_versions = not ("unsafe_" in program.body() and call.mode == "inference_mode")
        # The gradient of cumprod is a quotient: of complex numbers a rounded one, also where it is a whole number.
        self.divides_complex_numbers = "cumprod_(" in program.body() and any(map(torch.is_complex, self.tensors))
        # Of what lies between the elements of a tensor, and is shown by `as_strided_`, eager has the gradient, unless
        # the metadata change once more: then it has none.
        self.shows_gaps = ".as_strided_(" in program.body() and any(map(_has_gaps, self.tensors))
        self.wanted = [tensor for tensor in (*leaves, *self.tensors, *state) if tensor.requires_grad]
        self._twice = program.seed % TWICE == 0
        grad_mode = torch.is_grad_enabled()
        with MODES[call.mode]():
            torch.manual_seed(0)
            self.before = _state(self.tensors)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always", NotCapturedWarning)
                self.seen = observe(module if captured is None else captured, arguments)
            self.as_it_is = any(issubclass(one.category, NotCapturedWarning) for one in warned)
            self.after = _state(self.tensors)
        torch.set_grad_enabled(grad_mode)  # which the program may leave otherwise

    @property
    def changed(self) -> list[str]:
        """What the call changed."""
        return [name for name, value in self.after.items() if self.before[name] != value]

    @property
    def rewritten(self) -> set[int]:
        """Which of the wanted tensors autograd takes for another value now, or for none."""
        written = [t for n, t in enumerate(self.tensors) if f"version of input {n}" in self.changed]
        gone = [not t.requires_grad or any(t is other for other in written) for t in self.wanted]
        return {place for place, is_gone in enumerate(gone) if is_gone}

    def gradients(self, without: set[int]) -> tuple[list[Any], list[Any]]:
        """What the outputs and inputs give for random tangents, and the gradients of that, where these are asked."""
        wanted = [tensor for place, tensor in enumerate(self.wanted) if place not in without]
        torch.manual_seed(1)  # a checkpointed region may draw once more

        def derived(results: Sequence[Any], **options: Any) -> list[Any]:
            # By the place: of zeros one side may say that they depend on nothing, and has the same tangents else.
            roots = {at: r for at, r in enumerate(results) if isinstance(r, torch.Tensor) and r.requires_grad}
            tangents = [_tangent(root, torch.Generator().manual_seed(at)) for at, root in roots.items()]
            if not roots or not wanted:
                return []
            return list(torch.autograd.grad(list(roots.values()), wanted, tangents, allow_unused=True, **options))

        first = derived([*self.seen.outputs, *self.tensors], create_graph=self._twice)
        return first, (derived(first) or [None] * len(wanted)) if self._twice else []


def _tangent(root: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Whole numbers, whose sums are the same in any order, also in float16."""
    return torch.randint(1, 8, root.shape, generator=generator).sub(3.5).mul(2).to(root.dtype)


def _state(tensors: Tensors) -> dict[str, Any]:
    """All that a refused call leaves as it was."""
    found: dict[str, Any] = {"random state": bytes(torch.get_rng_state()), "grad mode": torch.is_grad_enabled()}
    for place, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()
        found[f"layout of input {place}"] = tensor.size(), tensor.stride(), tensor.storage_offset(), storage.data_ptr()
        found[f"bytes of input {place}"] = bytes(storage.tolist())
        found[f"version of input {place}"] = None if tensor.is_inference() else tensor._version
        found[f"requires_grad of input {place}"] = tensor.requires_grad
        found[f"gradient of input {place}"] = None if tensor.grad is None else (id(tensor.grad), tensor.grad._version)
    return found


def _verdict(eager: _Called, actual: _Called, other: bool, again: str) -> Verdict:
    """On one call; ``other``: whether it is another than that of the capture."""
    error = actual.seen.error
    if isinstance(error, REFUSALS):
        if actual.changed:
            return Verdict(FAILED, "refused, with changes", f"{', '.join(actual.changed)} by {line_of(error)}")
        guarded = isinstance(error, InputMismatchError)
        if guarded and eager.seen.error is None and (again == "recapture" or not other):
            return Verdict(FAILED, "refused", line_of(error))
        return refusal(error)
    if any(isinstance(output, FakeTensor) for output in actual.seen.outputs):
        return Verdict(FAILED, "differs", "a result has no data")
    if any(words in str(eager.seen.error) for words in ("not implemented for", "Unexpected floating ScalarType")):
        return Verdict(NOT_COUNTED, "eager's kernel does not know the dtype")  # a graph does not run what nobody reads
    if error is not None and eager.seen.error is not None and _says_alike(str(error), str(eager.seen.error)):
        return Verdict(PASSED)
    found = list(differences(eager.seen, actual.seen, strides=True, aliasing=True, rtol=None, atol=None))
    if not found and error is None:
        found = list(_autograd_differences(eager, actual)) or list(_gradient_differences(eager, actual))
    if not found and actual.as_it_is:
        return Verdict(REFUSED, "refused", "fake tensors refuse what eager takes: the program was run as it is")
    if not found:
        return Verdict(PASSED)
    return Verdict(FAILED, "differs" if error is None else "raises", "; ".join(found))


def _says_alike(error: str, of_eager: str) -> bool:
    """Fake tensors raise some errors as other types, and of two arguments that are both wrong name another first."""
    return error == of_eager or ("be cast" in error and "be cast" in of_eager)


def _autograd_differences(eager: _Called, actual: _Called) -> Iterator[str]:
    yield from visible_differences(eager.seen, actual.seen, _VISIBLE)
    # A result of a call begins its storage; eager's may be a part of what nobody has any more.
    yield from visible_differences(eager.seen, actual.seen, ("storage_offset",), of=("inputs",))
    if actual.after["random state"] != eager.after["random state"]:
        yield "the state of the generator"
    for place in range(len(eager.tensors) if eager.counts_versions else 0):
        version, changed = f"version of input {place}", {f"bytes of input {place}", f"layout of input {place}"}
        if changed.intersection(eager.changed) and actual.after[version] != eager.after[version]:
            yield f"{version}: {actual.after[version]}, eager gives {eager.after[version]}"
    for place, (want, got) in enumerate(zip(eager.wanted, actual.wanted, strict=True)):
        found = leaf_differences(want, got, strides=True)
        yield from (f"tensor {place} that requires gradients: {line}" for line in found)


def _gradient_differences(eager: _Called, actual: _Called) -> Iterator[str]:
    """With respect to what was not written: results of a captured program are of the inputs as they were before."""
    without = eager.rewritten | actual.rewritten
    try:
        wanted = eager.gradients(without)
    except (RuntimeError, TypeError):
        return  # it wrote to what its backward needs, or a hook of its own got no gradient
    try:
        given = actual.gradients(without)
    except Exception as error:
        if isinstance(error, REFUSALS) or "\n    why  " in str(error):
            return  # refused, in words
        yield f"gradients: {line_of(error)}"
        return
    for order, (wants, gots) in enumerate(zip(wanted, given, strict=True), start=1):
        for place, (want, got) in enumerate(zip(wants, gots, strict=True)):
            if isinstance(want, torch.Tensor) and want.dtype is torch.float16:
                continue  # sums are rounded in the order in which autograd adds gradients up
            if eager.divides_complex_numbers or eager.shows_gaps:
                continue  # so are these, of numbers that are no whole ones; or eager differs from itself
            if order == 2 and (_is_nothing(want, got) or _is_nothing(got, want)):
                continue
            yield from (f"derivative {order}, {place}: {line}" for line in leaf_differences(want, got, strides=False))


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Whether gradients flow to a tensor that leaves elements out."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.requires_grad and 0 < tensor.numel() <= last


def _is_nothing(none: Any, other: Any) -> bool:
    """Whether a gradient depends on nothing and says so, where the other one is zero times something."""
    return none is None and (other is None or bool(((other == 0) | other.isnan()).all()))
