"""Where code sends a text that it makes: to a log, to ``print``, or to an error's message. It reads the instructions.

Invariant: where sinks take all of a text, nothing else in the program reads it. Limits: instructions without
jumps between the one that makes the text and its sink; local variables all of whose reads lead to sinks.
"""

from __future__ import annotations

import builtins
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from functionalize.python_state.code_names import instructions
from functionalize.python_state.decompose import dict_of

_METHODS_ARE_FLAGGED = sys.version_info >= (3, 12)  # the lowest bit of the argument: whether a method is loaded
_NULLS_ARE_FLAGGED = sys.version_info >= (3, 11)  # the lowest bit: whether the loaded value is called
_IDLE = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "PRECALL", "KW_NAMES", "RESUME"})
_CALLS = frozenset({"CALL", "CALL_METHOD", "CALL_FUNCTION"})
_FORMATS = {"FORMAT_SIMPLE": 1, "FORMAT_WITH_SPEC": 2, "CONVERT_VALUE": 1}
# How many values instructions pop and push.
_FIXED = {
    **dict.fromkeys(_IDLE, (0, 0)),
    **dict.fromkeys(("LOAD_CONST", "LOAD_DEREF", "LOAD_NAME", "LOAD_CLOSURE", "PUSH_NULL"), (0, 1)),
    "LOAD_ASSERTION_ERROR": (0, 1),
    **dict.fromkeys(("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"), (0, 1)),
    **dict.fromkeys(("POP_TOP", "RETURN_VALUE", "STORE_FAST", "STORE_DEREF", "RAISE_VARARGS"), (1, 0)),
    **dict.fromkeys(("BINARY_OP", "BINARY_SUBSCR", "BINARY_ADD", "BINARY_MODULO", "BINARY_MULTIPLY"), (2, 1)),
    **dict.fromkeys(("BINARY_SUBTRACT", "BINARY_TRUE_DIVIDE", "COMPARE_OP", "IS_OP", "CONTAINS_OP"), (2, 1)),
    **dict.fromkeys(("UNARY_NOT", "UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT"), (1, 1)),
    **{name: (count, 1) for name, count in _FORMATS.items()},
    "STORE_ATTR": (2, 0),
}
_BY_ARGUMENT: dict[str, Callable[[int], tuple[int, int]]] = {
    **dict.fromkeys(("BUILD_STRING", "BUILD_TUPLE", "BUILD_LIST"), lambda count: (count, 1)),
    **dict.fromkeys(("CALL", "CALL_METHOD"), lambda count: (count + 2, 1)),
    "CALL_FUNCTION": lambda count: (count + 1, 1),
    "BUILD_MAP": lambda count: (2 * count, 1),
    "BUILD_CONST_KEY_MAP": lambda count: (count + 1, 1),
    "FORMAT_VALUE": lambda flags: (1 + bool(flags & 4), 1),
    "LOAD_GLOBAL": lambda index: (0, 1 + (index & 1 if _NULLS_ARE_FLAGGED else 0)),
    "LOAD_ATTR": lambda index: (1, 1 + (index & 1 if _METHODS_ARE_FLAGGED else 0)),
    "LOAD_METHOD": lambda index: (1, 2),
}
_ASCII = 3  # the conversion `!a`
_READ_ALL = frozenset({"locals", "eval", "exec", "vars"})
_LEVELS = frozenset({"debug", "info", "warning", "error", "critical", "log", "exception"})
_CHECKS = frozenset(
    {
        *("_check", "_check_with", "_check_value", "_check_type", "_check_index", "_check_not_implemented"),
        *("_check_tensor_all", "_assert", "torch_compilable_check"),
    }
)
_CHECKERS = ("torch", "transformers.")  # where functions of these names read their message only for an error


def _effect(step: Any) -> tuple[int, int] | None:
    """How many values an instruction pops and pushes; None where it jumps, or is not known."""
    counts = _BY_ARGUMENT.get(step.opname)
    return _FIXED.get(step.opname) if counts is None else counts(step.arg)


@dataclass(frozen=True)
class _Use:
    """Which instruction takes a value, and the value's depth on the stack then; the top has depth 1."""

    place: int
    depth: int


def _use(steps: Sequence[Any], place: int, depth: int = 1) -> _Use | None:
    for later in range(place + 1, len(steps)):
        effect = _effect(steps[later])
        if effect is None:
            return None
        if effect[0] >= depth:
            return _Use(later, depth)
        depth += effect[1] - effect[0]
    return None


def _callee(steps: Sequence[Any], call: int) -> int:
    """The instruction that loads what a call calls; -1 where it cannot be found."""
    for place in reversed(range(call)):
        effect = _effect(steps[place])
        if effect is None:
            return -1
        use = _use(steps, place, effect[1]) if effect[1] else None
        if use is not None and use.place == call and use.depth > steps[call].arg and steps[place].opname != "PUSH_NULL":
            return place
    return -1


@dataclass(frozen=True)
class Rules:
    """What readers of a text depend on: the function that replaces ``print`` in code, and facts about the program.

    ``is_log``: whether a list is only added to; ``catches``: whether its own code catches errors, and sees messages.
    """

    printing: Any
    is_log: Callable[[list[Any]], bool]
    catches: Callable[[], bool]


class TextFlow:
    """Where one function sends the text that one of its instructions makes."""

    def __init__(self, function: _Names, steps: Sequence[Any], rules: Rules) -> None:
        self._names, self._steps, self._rules = function, steps, rules

    @classmethod
    def of_frame(cls, frame: types.FrameType, rules: Rules) -> TextFlow:
        """For the function that runs in a frame."""
        return cls(_Names(frame.f_globals, frame.f_locals), _steps_of(frame.f_code), rules)

    def ends(self, offset: int) -> bool:
        """Whether the text that the instruction at an offset makes of a number ends in sinks alone."""
        place = next((place for place, step in enumerate(self._steps) if step.offset == offset), -1)
        return place >= 0 and self._makes_text(place) and self._goes(place)

    def _makes_text(self, place: int) -> bool:
        step = self._steps[place]
        if step.opname == "FORMAT_VALUE":  # a format pads the result of `!r`; `!a` escapes
            return bool(step.arg & 3 != _ASCII and not (step.arg & 3 and step.arg & 4))
        if step.opname in _FORMATS:
            return bool(step.opname != "CONVERT_VALUE" or step.arg != _ASCII)
        callee = _callee(self._steps, place) if step.opname in _CALLS else -1
        if callee < 0:
            return _is_modulo(step)
        loaded = self._steps[callee]
        if loaded.argval == "str" and loaded.opname == "LOAD_GLOBAL":
            return step.arg == 1 and self._names.of("str") is str
        return loaded.argval == "format" and isinstance(self._steps[callee - 1].argval, str)

    def _goes(self, place: int, kept: bool = False) -> bool:
        """Whether the result of an instruction goes to sinks alone. ``kept``: it is in a container, for a log alone."""
        use = _use(self._steps, place)
        if use is None:
            return False
        step = self._steps[use.place]
        match step.opname:
            case "BUILD_STRING":
                return self._goes(use.place)
            case "BUILD_TUPLE" | "BUILD_LIST":
                return self._goes(use.place, kept=True)
            case "FORMAT_VALUE" | "FORMAT_SIMPLE":  # as it is, in another text
                return step.arg in (None, 0, 1) and self._goes(use.place)
            case "BUILD_MAP":
                return bool(use.depth % 2) and self._goes(use.place, kept=True)  # a value, not a key
            case "BUILD_CONST_KEY_MAP":
                return use.depth > 1 and self._goes(use.place, kept=True)
            case "BINARY_OP" | "BINARY_ADD":
                return _is_addition(step) and self._adds_text(use) and self._goes(use.place)
            case "STORE_FAST":
                return not kept and self._variable_goes(step.argval)
            case name if name in _CALLS:
                return self._is_sink(use, kept)
        return False

    def _adds_text(self, use: _Use) -> bool:
        """Whether the other operand of an addition is a text."""
        for place in range(use.place):
            effect = _effect(self._steps[place])
            if effect and effect[1] == 1 and _use(self._steps, place) == _Use(use.place, 3 - use.depth):
                step = self._steps[place]
                text = step.opname == "LOAD_CONST" and isinstance(step.argval, str)
                if text or step.opname in ("BUILD_STRING", "FORMAT_VALUE", *_FORMATS) or _is_addition(step):
                    return True
        return False

    def _variable_goes(self, name: str) -> bool:
        """Whether all reads of a local variable lead to sinks."""
        if self._names.reads_all(self._steps):
            return False
        of_variable = [(n, step) for n, step in enumerate(self._steps) if step.argval == name]
        if any(step.opname in ("LOAD_DEREF", "LOAD_CLOSURE", "MAKE_CELL") for _, step in of_variable):
            return False
        joined = any(
            "_FAST" in step.opname and isinstance(step.argval, tuple) and name in step.argval for step in self._steps
        )
        reads = [n for n, step in of_variable if step.opname.startswith("LOAD_FAST")]
        return not joined and all(map(self._goes, reads))

    def _is_sink(self, use: _Use, kept: bool) -> bool:
        """Whether a call only keeps an argument in a log, prints it, or has it in an error that nobody catches."""
        after = _use(self._steps, use.place)
        if after is not None and self._steps[after.place].opname == "RAISE_VARARGS":
            return not (kept or self._rules.catches())
        place, call = _callee(self._steps, use.place), self._steps[use.place]
        if place < 0 or use.depth > call.arg:
            return False
        loaded = self._steps[place]
        if loaded.argval is self._rules.printing:
            return not kept
        if loaded.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            owner = self._loaded(place - 1)
            if loaded.argval == "append":
                return type(owner) is list and self._rules.is_log(owner)
            if loaded.argval in _LEVELS and type(owner) in (logging.Logger, logging.RootLogger, types.ModuleType):
                return not kept and (owner is logging or not isinstance(owner, types.ModuleType))
        return not kept and self._is_message(self._loaded(place), call.arg - use.depth, call, use.place)

    def _is_message(self, function: Any, number: int, call: Any, place: int) -> bool:
        """Whether a function uses an argument for a message alone."""
        name, module = getattr(function, "__name__", ""), str(getattr(function, "__module__", ""))
        if name in _CHECKS and (module + ".").startswith(_CHECKERS):
            return number > 0 and not self._rules.catches()
        if type(function) is not types.FunctionType or self._steps[place - 1].opname == "KW_NAMES":
            return False
        code = function.__code__
        if number >= code.co_argcount or call.opname == "CALL_METHOD":
            return False
        inner = TextFlow(_Names(function.__globals__, {}), _steps_of(code), self._rules)
        return inner._variable_goes(code.co_varnames[number])

    def _loaded(self, place: int) -> Any:
        """The value that an instruction loads, without running anything: a variable, attributes, entries of dicts."""
        step = self._steps[place]
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") or step.opname.startswith("LOAD_FAST"):
            return self._names.of(step.argval)
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            return (dict_of(self._loaded(place - 1)) or {}).get(step.argval)
        if step.opname in _CALLS and step.arg == 1 and self._steps[place - 1].opname == "LOAD_CONST":
            callee = _callee(self._steps, place)
            getter = callee >= 0 and self._loaded(callee) is logging.getLogger
            return logging.getLogger(self._steps[place - 1].argval) if getter else None
        if step.opname == "BINARY_SUBSCR" and self._steps[place - 1].opname == "LOAD_CONST":
            owner = self._loaded(place - 2)
            return owner.get(self._steps[place - 1].argval) if type(owner) is dict else None
        return None


@dataclass(frozen=True)
class _Names:
    """The variables of a function."""

    of_module: Mapping[str, Any]
    own: Mapping[str, Any]

    def of(self, name: str) -> Any:
        """The value that a variable has now."""
        missing = getattr(builtins, name, None)
        return self.own.get(name, self.of_module.get(name, missing))

    def reads_all(self, steps: Sequence[Any]) -> bool:
        """Whether code may read its variables without their names."""
        return any(step.argval in _READ_ALL for step in steps if step.opname == "LOAD_GLOBAL")


def _steps_of(code: types.CodeType) -> list[Any]:
    return list(_without_idle(instructions(code)))


def templates(code: types.CodeType) -> Iterator[tuple[int, str]]:
    """The constants that code formats by ``%``: where it loads them, and their values."""
    formats = any(type(constant) is str and "%" in constant for constant in code.co_consts)
    steps = _steps_of(code) if formats else []  # few functions have such constants, and each capture asks
    for place, step in enumerate(steps):
        if step.opname == "LOAD_CONST" and type(step.argval) is str and "%" in step.argval:
            use = _use(steps, place)
            if use is not None and use.depth == 2 and _is_modulo(steps[use.place]):
                yield step.offset, step.argval


def _is_addition(step: Any) -> bool:
    return bool(step.opname == "BINARY_ADD" or (step.opname == "BINARY_OP" and step.argrepr == "+"))


def _is_modulo(step: Any) -> bool:
    return bool(step.opname == "BINARY_MODULO" or (step.opname == "BINARY_OP" and step.argrepr == "%"))


def _without_idle(steps: Sequence[Any]) -> Iterator[Any]:
    return (step for step in steps if step.opname not in _IDLE or step.opname == "KW_NAMES")
