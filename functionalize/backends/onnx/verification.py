"""Holds an ONNX file against the program that it was written of, over some calls, each with the state of the last one.

Invariant: afterwards the original is as it was: its objects, its tensors, their gradients, and sources of random
numbers. Limits: state that the program does not reach, and what it does outside of Python, stay as the calls leave
them; what draws random numbers is not compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize.backends.export.signature.state import Arguments
from functionalize.backends.onnx.options import Call
from functionalize.backends.onnx.runner import OnnxProgram
from functionalize.backends.preparation.example_call import ExampleCall
from functionalize.backends.preparation.wrappers import opened
from functionalize.errors import DataDependentError, NotEquivalentError
from functionalize.graph_capture.inputs.watched_state import WatchedState
from functionalize.graph_capture.trace.random.random_sources import RandomSources
from functionalize.python_state.slots import NumberSlot
from functionalize.runtime.calls.program import CapturedProgram
from functionalize.runtime.calls.specialization import Specialization
from functionalize.runtime.random_state import is_random
from functionalize.uninterrupted import uninterrupted
from functionalize.verify.observation import clone_inputs, leaf_differences

_CALLS = 3
# How far results may be off: engines add in another order, and approximate functions otherwise.
_RELATIVE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_ABSOLUTE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def refuse_random(program: CapturedProgram) -> None:
    """Raise where there is nothing to compare.

    Raises:
        ValueError: the program draws random numbers.
    """
    drawing = next((node for node in program.current.recorded.graph.nodes if is_random(node)), None)
    if drawing is not None:
        raise ValueError(
            f"verify compares results, but the program draws random numbers ({drawing.target})\n"
            "    why  ONNX Runtime draws other random numbers than torch\n"
            "    try  call model.eval() before the capture if these are dropouts, or export without verify"
        )


def check_values(program: CapturedProgram, file: Path, calls: Sequence[Call]) -> None:
    """Run a file beside the original; ``calls``: with which arguments. Unless given, with random numbers.

    Raises:
        NotEquivalentError: says which output of which call differs, and how far.
    """
    example = ExampleCall(program.current)
    arguments = Arguments(example)
    run = OnnxProgram(file, {})
    with as_before(example):
        for number, (args, kwargs) in enumerate(calls or _random_calls(example)):
            given = program.current.capture.convention.arguments(args, dict(kwargs))
            mine = clone_inputs((tuple(given.args), given.kwargs))
            theirs = clone_inputs(opened(arguments.of(*mine)))
            try:
                expected = clone_inputs(opened(program.original(*mine[0], **mine[1])))
            except Exception as error:
                raise ValueError(
                    f"the original raises in call {number + 1} of verify: {type(error).__name__}: {error}\n"
                    "    try  pass your own calls: verify=[((x,), {}), ((y,), {})]"
                ) from error
            try:
                actual = run(*theirs[0], **theirs[1])
            except DataDependentError as error:
                raise NotEquivalentError(
                    f"call {number + 1} of verify takes another branch on tensor values than the file holds\n"
                    f"    why  {error}\n"
                    "    try  pass calls with data for the captured branch, verify=[((x,), {})], or use torch.cond"
                ) from error
            lines = [*_results(run, expected, actual), *_written(opened(arguments.of(*mine)), theirs, arguments.names),
                     *_state(program.current, run)]  # fmt: skip
            if lines:
                listed = "\n".join(f"    at   call {number + 1}, {line}" for line in lines)
                raise NotEquivalentError(
                    "the ONNX file computes other results than the original, and was not written\n"
                    f"{listed}\n"
                    "    try  correct custom_translation_table if you pass one; otherwise please report this with "
                    "the program (without verify, the file is written)"
                )


def _random_calls(example: ExampleCall) -> Iterator[Call]:
    """Calls like the example's, each with other numbers."""
    for number in range(_CALLS):
        generator = torch.Generator().manual_seed(number)
        args, kwargs = clone_inputs((example.args, example.kwargs))
        for leaf in pytree.tree_leaves((args, kwargs)) if number and not example.program.recorded.shared else ():
            if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point and leaf.dtype.itemsize > 1:
                leaf.detach().copy_(torch.randn(leaf.size(), generator=generator))
        yield args, kwargs


def _results(run: OnnxProgram, expected: Any, actual: Any) -> Iterator[str]:
    wanted, given = pytree.tree_flatten(expected), pytree.tree_flatten(actual)
    if wanted[1] != given[1]:
        yield f"the results have the structure {given[1]}, eager's have {wanted[1]}"
        return
    for number, (want, got) in enumerate(zip(wanted[0], given[0], strict=True)):
        name = run.convention.results[number].name or number
        yield from _differences(f"output `{name}`", want, got)


def _written(expected: Any, actual: Any, names: Sequence[str]) -> Iterator[str]:
    for name, want, got in zip(names, [*expected[0], *expected[1].values()], [*actual[0], *actual[1].values()],
                               strict=True):  # fmt: skip
        for one, other in zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True):
            yield from _differences(f"argument `{name}` after the call", one, other)


def _state(program: Specialization, run: OnnxProgram) -> Iterator[str]:
    kept = run.state
    for entry in program.metadata.inputs:
        now = kept.get(entry.target or "")
        if now is not None and entry.slot is not None and not isinstance(entry.slot, NumberSlot):
            value = entry.now()
            if isinstance(value, torch.Tensor):
                yield from _differences(f"state `{entry.target}` after the call", value, now)


def _differences(label: str, want: Any, got: Any) -> Iterator[str]:
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        want, got = want.detach().cpu(), got.detach()
    exact = not isinstance(want, torch.Tensor) or want.dtype not in _RELATIVE
    limits: dict[str, Any] = {} if exact else {"rtol": _RELATIVE[want.dtype], "atol": _ABSOLUTE[want.dtype]}
    for line in leaf_differences(want, got, strides=False, **limits):
        yield f"{label}: {line}"


# The original, as it was


@contextlib.contextmanager
def as_before(example: ExampleCall) -> Iterator[None]:
    """While a program's original may run: in the end what it reaches is as it was when this was entered."""
    walks = [example.program.capture.state, example.arguments.walk]
    held = [slot.get() for walk in walks for slot in walk.constants]
    constants = [entry.constant for entry in example.program.metadata.inputs]
    tensors = [slot.get() for walk in walks for slot in walk.tensors] + constants
    distinct = {id(tensor): tensor for tensor in tensors if isinstance(tensor, torch.Tensor)}
    kept = [_Kept(tensor) for tensor in distinct.values()]
    sources, torchs = RandomSources(held), torch.get_rng_state()
    try:
        with WatchedState(walks[0]).substituted({}), WatchedState(walks[1]).substituted({}):
            yield
    finally:

        def put_back() -> None:
            sources.restore()
            torch.set_rng_state(torchs)
            for one in kept:
                one.put_back()

        uninterrupted(put_back)


class _Kept:
    """A tensor as it is now: its memory, its numbers, its gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._memory, self._requires_grad = tensor, tensor.detach(), tensor.requires_grad
        self._numbers, self._version = self._memory.clone(), tensor._version
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._of_gradient = None if self._gradient is None else _Kept(self._gradient)

    def put_back(self) -> None:
        """Have it be so again. What nobody wrote is left alone."""
        tensor = self._tensor
        with torch.no_grad():
            moved = _place(tensor) != _place(self._memory)
            if moved:
                tensor.data = self._memory
            if moved or tensor._version != self._version:
                self._memory.copy_(self._numbers)
        if tensor.is_leaf:
            tensor.requires_grad_(self._requires_grad)
            tensor.grad = self._gradient
        if self._of_gradient is not None:
            self._of_gradient.put_back()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype
