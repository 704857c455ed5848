"""The modes of torch that a program runs under: a table of how each is read and set, and the guards on them.

Invariant: the results of a program depend on no other modes. Limits: the modes of one thread; settings that kernels
read when the graph runs, such as the precision of matrix products, are not among them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from functionalize._torch.dispatch import GlobalStateGuard, function_modes, in_forward_ad
from functionalize.errors import GradientMismatchError, InputMismatchError
from functionalize.runtime.guards.guard import CallInputs, FastCode, Guard, GuardKind, mismatch


@dataclass(frozen=True)
class Mode:
    """How a mode is read, and how it is set if a program may leave it changed."""

    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None


def _autocast(device: str) -> Any:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _set_autocast(device: str, dtype: torch.dtype | None) -> None:
    torch.set_autocast_enabled(device, dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype(device, dtype)


def _deterministic() -> Any:
    if not torch.are_deterministic_algorithms_enabled():
        return False
    return "warn_only" if torch.is_deterministic_algorithms_warn_only_enabled() else True


def _set_deterministic(value: Any) -> None:
    torch.use_deterministic_algorithms(bool(value), warn_only=value == "warn_only")


GRAD_MODE, DEFAULT_DTYPE = "grad mode", "default dtype"
MODES: dict[str, Mode] = {
    GRAD_MODE: Mode(torch.is_grad_enabled, torch.set_grad_enabled),
    "inference mode": Mode(torch.is_inference_mode_enabled),
    "autocast on cpu": Mode(partial(_autocast, "cpu"), partial(_set_autocast, "cpu")),
    "autocast on cuda": Mode(partial(_autocast, "cuda"), partial(_set_autocast, "cuda")),
    "cache of autocast": Mode(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    DEFAULT_DTYPE: Mode(torch.get_default_dtype, torch.set_default_dtype),
    "default device": Mode(torch.get_default_device, torch.set_default_device),
    "use of deterministic algorithms": Mode(_deterministic, _set_deterministic),
    "number of torch function modes": Mode(function_modes),
}

# Modes that torch's own check leaves out. The fast code requires them to be off.
_OFF: dict[str, Callable[[], Any]] = {
    "function_modes": function_modes,
    "inference_mode": torch.is_inference_mode_enabled,
    "forward_ad": in_forward_ad,
}


def modes_now() -> dict[str, Any]:
    """The modes of this thread, by name."""
    return {name: mode.read() for name, mode in MODES.items()}


def set_modes(values: Mapping[str, Any]) -> None:
    """Set some modes."""
    for name, value in values.items():
        write = MODES[name].write
        if write is not None:
            write(value)


@contextlib.contextmanager
def in_modes(values: Mapping[str, Any]) -> Iterator[None]:
    """Run in modes that were read before, perhaps in another thread."""
    before = modes_now()
    differing = {name: value for name, value in values.items() if value != before[name]}
    set_modes(differing)
    try:
        yield
    finally:
        set_modes({name: before[name] for name in differing})


def changed_modes(before: Mapping[str, Any]) -> dict[str, Any]:
    """The modes that have changed."""
    return {name: value for name, value in modes_now().items() if value != before[name]}


class ModeGuards(GuardKind):
    """The modes of the thread that calls. All are listed and compared fast; :class:`GradModeGuard` checks grad mode."""

    def __init__(self, expected: Mapping[str, Any]) -> None:
        self._expected = expected

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        now = modes_now()
        for name, before in self._expected.items():
            if name != GRAD_MODE and now[name] != before:
                return mismatch(f"the {name}", now[name], before)
        return None

    def write(self, code: FastCode) -> None:
        off = " or ".join(f"{name}()" for name in _OFF)
        code.body.refuse(f"not modes() or {off}", modes=GlobalStateGuard().check, **_OFF)

    def listed(self) -> Iterator[Guard]:
        return (Guard("the call", name, value) for name, value in self._expected.items())


class GradModeGuard(GuardKind):
    """Grad mode. It is checked late: a call that differs in nothing else is captured again."""

    def __init__(self, expected: Mapping[str, Any]) -> None:
        self._expected = expected[GRAD_MODE]

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        now = MODES[GRAD_MODE].read()
        return (
            None if now == self._expected else mismatch(f"the {GRAD_MODE}", now, self._expected, GradientMismatchError)
        )

    def write(self, code: FastCode) -> None:
        """Write nothing: the lines of :class:`ModeGuards` compare it."""


def can_be_compared_fast() -> bool:
    """Whether the modes that torch's own check leaves out are off."""
    return not any(is_on() for is_on in _OFF.values())
