"""Calls of ``float`` and ``int``, in functions that a capture follows: for data-dependent numbers they return symbols.

Python's own ``float`` must return a number, so that a loss that is written into a log would be a decision. No name is
replaced (``dtype=float``, ``isinstance(x, float)`` and ``type(x) is float`` mean Python's class): the instructions that
call the builtin load a function of this module instead.

Invariant: for values that hold no data-dependent number these functions are Python's, and for all values in a run where
conversions are decisions. Limits: the builtin is called by
its name, or passed to ``map``; torch's own functions and Python's are left as they are, but for those of a few modules.
"""

from __future__ import annotations

import dis
import functools
import math
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from functionalize._torch.tensors import SYMBOLS
from functionalize.graph_capture.trace.numbers.text_flow import templates
from functionalize.graph_capture.trace.numbers.texts import Template, print_
from functionalize.transform.functions.numbers import Conversions

_LOAD_GLOBAL, _LOAD_CONST, _EXTENDED_ARG = dis.opmap["LOAD_GLOBAL"], dis.opmap["LOAD_CONST"], dis.opmap["EXTENDED_ARG"]
_NOP, _CACHE, _PUSH_NULL = dis.opmap["NOP"], dis.opmap.get("CACHE"), dis.opmap.get("PUSH_NULL")
_SAYS_CALLS = sys.version_info >= (3, 11)  # the lowest bit of the argument: whether the loaded value is called
_NULL_IS_FIRST = sys.version_info < (3, 13)
_LARGEST = 255  # argument of an instruction
_PLAIN_CALLS = [name for name in ("PRECALL", "CALL", "CALL_FUNCTION") if name in dis.opmap]
_OF_CONSTANTS = [bytes([_LOAD_CONST, dis.opmap[name]]) for name in _PLAIN_CALLS]
_OF_TORCH = (
    "torch.nn.modules.batchnorm",
    "torch.optim.lr_scheduler",
)  # modules whose numbers only flow into arithmetic


def _float(value: Any = 0.0, /) -> Any:
    if Conversions.decide:
        return float(value)
    value = _number_of(value)
    if not isinstance(value, SYMBOLS):
        return float(value)
    Conversions.count += 1
    return torch.sym_float(value)


def _int(value: Any = 0, /, *base: Any, **options: Any) -> Any:
    if Conversions.decide:
        return int(value, *base, **options)
    value = value if base or options else _number_of(value)
    whole = isinstance(value, torch.SymInt) and value.node.hint is None
    if not (whole or isinstance(value, torch.SymFloat)):
        return int(value, *base, **options)
    Conversions.count += 1
    return math.trunc(value)


CONVERSIONS: dict[str, Any] = {"float": _float, "int": _int, "print": print_}


def _number_of(value: Any) -> Any:
    """The number in a tensor; any other value as it is."""
    return value.item() if isinstance(value, torch.Tensor) and not value.is_complex() else value


def convert(functions: Iterable[Any]) -> list[tuple[Any, types.CodeType]]:
    """Functions, each with code that does the same, but converts by the functions of this module."""
    own = [function for name in _OF_TORCH if name in sys.modules for function in _converting_in(name)]
    converted = list[tuple[Any, types.CodeType]]()
    for function in (*functions, *own):
        code = function.__code__
        made = _converted(code, frozenset([name for name in CONVERSIONS if name not in function.__globals__]))
        converted += [] if made is code else [(function, made)]
    return converted


@functools.cache
def _converting_in(module: str) -> list[types.FunctionType]:
    """The functions of a module that convert."""
    functions = list(functions_of(sys.modules[module]))
    names = frozenset(CONVERSIONS)
    return [function for function in functions if _converted(function.__code__, names) is not function.__code__]


def functions_of(module: Any) -> Iterator[types.FunctionType]:
    """The functions that a module defines, and the methods of its classes."""
    values = [value for value in vars(module).values() if issubclass(type(value), (types.FunctionType, type))]
    for value in values:
        if value.__module__ == module.__name__:
            entries = vars(value).values() if isinstance(value, type) else [value]
            yield from (entry for entry in entries if isinstance(entry, types.FunctionType))


@dataclass(frozen=True, eq=False)
class _Conversion:
    """The conversion of some code; no ``made`` code where it converts nothing."""

    code: weakref.ref[types.CodeType]
    made: types.CodeType | None


# By identity, since equal code may be of another file, and by the names of the functions that convert.
_CONVERSIONS: dict[tuple[int, frozenset[str]], _Conversion] = {}


def _converted(code: types.CodeType, names: frozenset[str]) -> types.CodeType:
    """Code that converts by these names; the code itself where it converts nothing."""
    key = (id(code), names)
    conversion = _CONVERSIONS.get(key)
    if conversion is None:
        made = _converting(code, names)
        lives = weakref.ref(code, lambda _: _CONVERSIONS.pop(key, None))
        conversion = _CONVERSIONS[key] = _Conversion(lives, None if made is code else made)
    return conversion.made or code


def _converting(code: types.CodeType, names: frozenset[str]) -> types.CodeType:
    """The same, without a cache."""
    constants = [_converting(item, names) if isinstance(item, types.CodeType) else item for item in code.co_consts]
    steps = bytearray(code.co_code)
    for at, end, name, called in _conversions(code, names):
        index = constants.index(CONVERSIONS[name]) if CONVERSIONS[name] in constants else len(constants)
        loads = [_LOAD_CONST, index]
        if called and _PUSH_NULL is not None:
            null = [_PUSH_NULL, 0]
            loads = null + loads if _NULL_IS_FIRST else loads + null
        if index > _LARGEST or len(loads) > end - at:
            continue
        if index == len(constants):
            constants.append(CONVERSIONS[name])
        steps[at:end] = bytes(loads) + bytes([_NOP, 0]) * ((end - at - len(loads)) // 2)
    for at, text in templates(code):
        constants.append(Template(text))
        if len(constants) <= _LARGEST + 1 and (at == 0 or steps[at - 2] != _EXTENDED_ARG):
            steps[at + 1] = len(constants) - 1
    if all(new is old for new, old in zip(constants, code.co_consts, strict=False)) and steps == code.co_code:
        return code
    return code.replace(co_code=bytes(steps), co_consts=tuple(constants))


def _conversions(code: types.CodeType, names: frozenset[str]) -> Iterator[tuple[int, int, str, bool]]:
    """Where code loads a builtin by one of these names in order to call it, or to have ``map`` call it.

    For each place: the first byte and the one behind the last, the name, and whether the loaded value is called.
    """
    if names.isdisjoint(code.co_names):  # as for most code: reading its steps takes long
        return
    steps, before = code.co_code, ""
    starts = [at for at in range(0, len(steps), 2) if steps[at] != _CACHE]
    for at, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        loads = steps[at] == _LOAD_GLOBAL and (at == 0 or steps[at - 2] != _EXTENDED_ARG)
        name = code.co_names[steps[at + 1] >> 1 if _SAYS_CALLS else steps[at + 1]] if loads else ""
        called = loads and (bool(steps[at + 1] & 1) if _SAYS_CALLS else _is_called(steps, end))
        constant = name != "print" and steps[end : end + 3 : 2] in _OF_CONSTANTS  # constants need no symbols
        if name in names and ((called and not constant) or before == "map"):
            yield at, end, name, called
        before = name if called else ""


def _is_called(steps: bytes, at: int) -> bool:
    """Whether the next call on this level calls what code before Python 3.11 has just loaded."""
    depth = 0
    for opcode, argument in zip(steps[at::2], steps[at + 1 :: 2], strict=True):
        if opcode == dis.opmap["CALL_FUNCTION"] and argument == depth:
            return True
        if opcode in (*dis.hasjrel, *dis.hasjabs):
            return False
        depth += dis.stack_effect(opcode, argument if opcode >= dis.HAVE_ARGUMENT else None)
        if depth < 0:
            return False
    return False
