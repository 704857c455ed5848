"""What ``isinstance``, ``type`` and ``id`` say of what stands for tensors and numbers: what they say of these.

Invariant: other code than the program's gets the same answers as before. Limits: ``isinstance`` that code of the
program calls by name, ``type`` and ``id`` in functions that a capture follows; ``x.__class__`` and class patterns of
``match`` see the substitute.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import statistics
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules import module as modules

from functionalize._torch import FakeTensor
from functionalize.call_stack import is_of_program
from functionalize.graph_capture.trace.numbers.conversions import convert, functions_of

_NUMBERS: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}


@contextlib.contextmanager
def classes_of_stand_ins(
    environment: Any,
    asking: Mapping[str, Mapping[int, dict[str, Any]]],
    identity: Callable[[Any], int],
    converting: Iterable[Any],
    *,
    at_once: bool,
) -> Iterator[None]:
    """Have symbols and fake tensors be of the classes of what they stand for.

    ``environment``: the ``DecidingShapeEnv`` of the trace, if it has one; ``asking``: by names, the globals of
    functions that have them: ``type``, ``id``, and ``FakeTensor``, as libraries do that go other ways for fake tensors;
    ``identity``: what ``id`` says; ``converting``: functions that call ``float`` or ``int``; ``at_once``: there are
    symbols from the beginning, else from the first data-dependent one on.
    """
    lent: list[tuple[dict[str, Any], str, Any]] = [(variables, "type", _Type) for variables in asking["type"].values()]
    lent += [(vars(statistics), "type", _Type)]  # it makes results of the classes that it finds
    lent += [(variables, "id", identity) for variables in asking["id"].values() if not _is_of_torch(variables)]
    of_fakes = (*asking["FakeTensor"].values(), *_libraries_asking())
    lent += [(variables, "isinstance", _isinstance_of_fakes) for variables in of_fakes]
    classes, compiled = _Classes(lent, convert(converting)), torch.compile
    has_symbols = hasattr(environment, "on_data_symbol")

    def begin() -> None:
        environment.on_data_symbol = None
        classes.take_symbols()

    if has_symbols:
        environment.on_data_symbol = begin
    try:
        classes.install()
        torch.compile = classes.as_before(compiled)
        if has_symbols and at_once:
            begin()
        yield
    finally:
        torch.compile = compiled
        classes.take_back()
        classes.ended = True
        if has_symbols:
            environment.on_data_symbol = None


def _is_of_torch(variables: dict[str, Any]) -> bool:
    """Whether these are the globals of a module of torch's, which asks for identities of its own."""
    return str(variables.get("__name__")).partition(".")[0] == "torch"


class _Classes:
    """``isinstance``, ``type`` and ``id`` of one capture, and code that converts by ``float`` and ``int``."""

    def __init__(
        self, lent: Iterable[tuple[dict[str, Any], str, Any]], codes: Iterable[tuple[Any, types.CodeType]]
    ) -> None:
        self._isinstance = self._before = builtins.isinstance
        self._lent = [(variables, name, value) for variables, name, value in lent if name not in variables]
        self._codes = [(function, function.__code__, code) for function, code in codes]
        self.ended = False

    def install(self) -> None:
        """Have the program use them."""
        builtins.isinstance = self._isinstance
        for variables, name, value in self._lent:
            variables[name] = value
        for function, _, code in self._codes:
            function.__code__ = code

    def take_back(self) -> None:
        """Have it use Python's."""
        builtins.isinstance = self._before
        for variables, name, _ in self._lent:
            variables.pop(name, None)
        for function, code, _ in self._codes:
            function.__code__ = code

    def take_symbols(self) -> None:
        """There are symbols from now on."""
        builtins.isinstance = self._isinstance = _of_numbers(self._before)

    def as_before(self, compiled: Any) -> Any:
        """``torch.compile`` for bodies of higher-order operators: Dynamo knows Python's classes alone."""

        @functools.wraps(compiled)
        def compile(*args: Any, **options: Any) -> Any:
            made = compiled(*args, **options)
            if is_of_program(sys._getframe(1).f_code):
                return made

            def called(*inputs: Any, **named: Any) -> Any:
                if self.ended:
                    return made(*inputs, **named)
                self.take_back()
                try:
                    return made(*inputs, **named)
                finally:
                    self.install()

            return called

        return compile


def _isinstance_of_fakes(value: Any, kinds: Any, /) -> bool:
    """What ``isinstance`` is to code that knows fake tensors by name."""
    kind = type(value)
    if kind is FakeTensor:
        return isinstance(value, _but_for_fakes(kinds))
    return isinstance(value, kinds) or (kind in _NUMBERS and isinstance(_NUMBERS[kind], kinds))


def _but_for_fakes(kinds: Any) -> Any:
    if isinstance(kinds, tuple):
        return tuple(map(_but_for_fakes, kinds))
    return () if kinds is FakeTensor else kinds


_SCANNED: dict[str, dict[str, Any] | None] = {}  # modules by name: their globals, if their code names FakeTensor
_NOT_SCANNED = frozenset({"torch", "functionalize", "numpy", "sympy", "builtins", *sys.stdlib_module_names})


def _libraries_asking() -> list[dict[str, Any]]:
    """The globals of loaded libraries of which some function names ``FakeTensor``, and of torch's modules themselves.

    ``Module.to`` would swap fake parameters, which something else refers to, and not give them other data.
    """
    if len(_SCANNED) != len(sys.modules):
        for name, module in list(sys.modules.items()):
            if name not in _SCANNED:
                skipped = module is None or name.partition(".")[0] in _NOT_SCANNED
                codes = () if skipped else (one.__code__ for one in functions_of(module))
                _SCANNED[name] = vars(module) if any(map(_names_fakes, codes)) else None
        for name in _SCANNED.keys() - sys.modules.keys():
            del _SCANNED[name]
    return [vars(modules), *(variables for variables in _SCANNED.values() if variables is not None)]


def _names_fakes(code: types.CodeType) -> bool:
    return "FakeTensor" in code.co_names or any(
        _names_fakes(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)
    )


def _of_numbers(plain: Callable[[Any, Any], bool]) -> Any:
    def isinstance(value: Any, kinds: Any, /) -> bool:
        if plain(value, kinds):
            return True
        kind = type(value)
        return kind in _NUMBERS and is_of_program(sys._getframe(1).f_code) and plain(_NUMBERS[kind], kinds)

    return isinstance


def _class_of(value: Any) -> Any:
    """The class of what a value stands for."""
    kind = type(value)
    if kind is FakeTensor:
        buffer = torch.nn.Buffer if isinstance(value, torch.nn.Buffer) else torch.Tensor
        return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else buffer
    return type(_NUMBERS[kind]) if kind in _NUMBERS else _Type if kind is type else kind


class _OfType(type):
    """What calls of :class:`_Type` come to, and questions for instances of it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:  # a class of classes that the program makes of it
            return super().__call__(*args, **kwargs)
        return _class_of(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type) if cls is _Type else super().__instancecheck__(value)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, type) if cls is _Type else super().__subclasscheck__(kind)


class _Type(type, metaclass=_OfType):
    """``type``, as functions of a program know it while it is captured."""

    def __class_getitem__(cls, item: Any) -> Any:
        return types.GenericAlias(type, item)


_Type.__name__ = _Type.__qualname__ = type.__name__
_Type.__module__ = type.__module__


def of_python(value: Any) -> Any:
    """A value that a program keeps or gives; ``type`` itself for what it knew as that."""
    return type if value is _Type else value
