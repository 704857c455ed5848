"""Functions of ``math`` on numbers that the data tell give symbols, as operators do; so do ``min``, ``max``, ``float``.

Invariant: for numbers that are none of a trace's they do what they did, in every thread. Limits: functions of floats
that give floats, by the name of their module; others ask for the value of a symbol. ``float`` is Python's own, which
nobody can replace: modules of torch whose ``float(tensor)`` only flows into arithmetic get a variable of that name.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler as schedulers

from functionalize._torch.tracing import SYMBOLS, opaque_float

_EXPONENTIALS = ("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "pow", "sqrt", "cbrt")
_CIRCULAR = ("acos", "asin", "atan", "atan2", "cos", "sin", "tan", "degrees", "radians")
_HYPERBOLIC = ("acosh", "asinh", "atanh", "cosh", "sinh", "tanh")
_OTHERS = ("copysign", "erf", "erfc", "fabs", "fmod", "gamma", "hypot", "lgamma", "remainder")
_OF_FLOATS = [name for name in (*_EXPONENTIALS, *_CIRCULAR, *_HYPERBOLIC, *_OTHERS) if hasattr(math, name)]
_CHOOSING: tuple[Callable[..., Any], ...] = (min, max)
_TAKING_FLOATS = ("torch.nn.modules.batchnorm", "torch.optim.lr_scheduler")


@contextlib.contextmanager
def math_of_symbols(tracer: Any) -> Iterator[None]:
    """Have functions of ``math`` that get symbols give symbols: by themselves they ask for the value."""
    before = {name: getattr(math, name) for name in _OF_FLOATS}
    method: Any = torch.SymFloat.is_integer
    for name, function in before.items():
        setattr(math, name, _symbolic(function, tracer))
    for function in _CHOOSING:
        setattr(builtins, function.__name__, _choosing(function, tracer))
    # Torch's own method is no target of a node that can be printed.
    torch.SymFloat.is_integer = lambda x: opaque_float(tracer, rest, (x,)) == 0  # type: ignore[method-assign]
    copied: list[Any] = [kind for kind in SYMBOLS if "__deepcopy__" not in vars(kind)]
    for symbol in copied:  # as a number is
        symbol.__deepcopy__ = lambda number, memo: number
    taking = [vars(sys.modules[name]) for name in _TAKING_FLOATS if name in sys.modules]
    for variables in taking:
        variables["float"] = _Float
    kind: Any = schedulers.MultiStepLR  # of a class nobody is to replace a method
    looking_up = kind.get_lr
    kind.get_lr = lambda scheduler: _at_milestones(scheduler) or looking_up(scheduler)
    try:
        yield
    finally:
        kind.get_lr = looking_up
        for variables in taking:
            variables.pop("float", None)
        for function in _CHOOSING:
            setattr(builtins, function.__name__, function)
        for name, function in before.items():
            setattr(math, name, function)
        torch.SymFloat.is_integer = method  # type: ignore[method-assign]
        for symbol in copied:
            del symbol.__deepcopy__


def rest(number: float) -> float:
    """What a float has beside a whole number; not a number for those that are not finite."""
    return number % 1


class _KindOfFloat(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (float, torch.SymFloat))


class _Float(metaclass=_KindOfFloat):
    """What ``float`` is to some modules: of a tensor whose value nobody knows it gives a symbol."""

    def __new__(cls, value: Any = 0.0) -> Any:
        if isinstance(value, torch.Tensor) and not value.is_complex():
            value = value.item()
        return torch.sym_float(value) if isinstance(value, SYMBOLS) else float(value)


def _at_milestones(scheduler: schedulers.MultiStepLR) -> list[Any]:
    """The learning rates of a schedule that looks a counter up in a dict, by arithmetic; none where it may look."""
    epoch: Any = scheduler.last_epoch
    factor = 1.0
    if not isinstance(epoch, SYMBOLS):
        return []
    for milestone, count in scheduler.milestones.items():
        factor = factor * torch.sym_ite(epoch == milestone, scheduler.gamma**count, 1.0)
    return [group["lr"] * factor for group in scheduler.optimizer.param_groups]


def _symbolic(function: Callable[..., float], tracer: Any) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        symbolic = any(isinstance(arg, SYMBOLS) for arg in args)
        return opaque_float(tracer, function, args) if symbolic else function(*args)

    return called


def _choosing(function: Callable[..., Any], tracer: Any) -> Callable[..., Any]:
    """``min`` or ``max``, which compares its arguments: of floats that the data tell it gives one without asking."""

    def called(*args: Any, **kwargs: Any) -> Any:
        numbers = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        if kwargs or not any(isinstance(number, torch.SymFloat) for number in numbers):
            return function(*args, **kwargs)
        if not all(isinstance(number, (float, torch.SymFloat)) for number in numbers):  # a whole number stays one
            return function(*args)
        return opaque_float(tracer, function, tuple(numbers))

    return called
