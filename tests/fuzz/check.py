"""One program in one configuration, held against eager. Invariant: the verdict depends on these two alone.

Direct use is compared in everything a caller can see. A traced case counts when plain `make_fx` traces the
program and its graph does what eager does; then ours must trace, be functional, and do the same.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import functionalize
from functionalize.errors import NotFunctionalError, UnsupportedMutationError
from functionalize.observation import Observation, differences, leaf_differences, observe
from functionalize.verify import assert_functional
from tests.fuzz.program import Program

REMOVES = {"mutations": "mutations", "views": "mutations_and_views"}
MODES = tuple(f"{mode}/{remove}" for remove in REMOVES for mode in ("direct", "real", "fake", "symbolic"))
PASSED, FAILED, NOT_COUNTED = "passed", "failed", "not counted"


@dataclass(frozen=True)
class Verdict:
    """What became of a program in a mode. ``kind`` groups failures, ``reason`` describes one."""

    status: str
    kind: str = ""
    reason: str = ""

    @property
    def signature(self) -> str:
        """Equal for failures that look alike."""
        return f"{self.kind}: {re.sub(r'[0-9.]+|0x[0-9a-f]+', 'N', self.reason)[:90]}"


def check(program: Program, mode: str, implementation: Any = functionalize) -> Verdict:
    """Run a program in a mode such as ``fake/views`` and compare with eager."""
    way, remove = mode.split("/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = program.function()
        transformed = implementation(function, remove=REMOVES[remove])
        eager = observe(function, program.arguments())
        if way == "direct":
            return _direct(program, transformed, eager)
        return _traced(program, function, transformed, eager, way, REMOVES[remove])


def _direct(program: Program, transformed: Any, eager: Observation) -> Verdict:
    actual = observe(transformed, program.arguments())
    found = list(_compare(eager, actual, direct=True))
    if eager.error is not None and actual.error is not None and not found:
        for index, (want, got) in enumerate(zip(eager.inputs, actual.inputs, strict=True)):
            found += [f"input {index} after the error: {line}" for line in leaf_differences(want, got, strides=True)]
    return _verdict(found, actual)


def _compare(eager: Observation, actual: Observation, *, direct: bool) -> Any:
    return differences(eager, actual, strides=direct, aliasing=direct, rtol=None, atol=None)


def _verdict(found: list[str], actual: Observation) -> Verdict:
    if not found:
        return Verdict(PASSED)
    return Verdict(FAILED, "raises" if actual.error is not None else "differs", "; ".join(found))


def _traced(program: Program, function: Any, transformed: Any, eager: Observation, way: str, remove: str) -> Verdict:
    plain, plain_error = _trace(function, program, way)
    if plain is None:
        if eager.error is None or type(plain_error) is not type(eager.error):
            return Verdict(NOT_COUNTED)
        graph, error = _trace(transformed, program, way)
        if graph is None and isinstance(error, type(eager.error)):
            return Verdict(PASSED)
        return Verdict(FAILED, "no error", f"{_line(error)}, plain make_fx raises {_line(plain_error)}")
    if eager.error is not None or list(_compare(eager, observe(plain, program.arguments()), direct=False)):
        return Verdict(NOT_COUNTED)
    graph, error = _trace(transformed, program, way)
    if way == "symbolic" and isinstance(error, UnsupportedMutationError):
        return Verdict(NOT_COUNTED)  # where storages meet may depend on sizes that are not known; a clear refusal
    if graph is None:
        return Verdict(FAILED, "trace", _line(error))
    try:
        assert_functional(graph, remove)
    except NotFunctionalError as impure:
        return Verdict(FAILED, "purity", str(impure))
    actual = observe(graph, program.arguments())
    return _verdict(list(_compare(eager, actual, direct=False)), actual)


def _trace(function: Any, program: Program, way: Any) -> tuple[Any, Exception | None]:
    torch.manual_seed(0)
    try:
        return make_fx(function, tracing_mode=way)(*program.arguments()), None
    except Exception as error:
        return None, error


def _line(error: Exception | None) -> str:
    if error is None:
        return "no error"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
