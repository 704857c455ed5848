"""``isinstance``, ``type`` and ``id`` of substitutes for tensors and numbers: the answers are those of the originals.

For numbers, their own table of methods answers ``isinstance`` (`number_methods`).

Invariant: other code than the program's gets the same answers as before. Limits: ``type`` and ``id`` in functions that
a capture follows; for tensors, ``x.__class__`` is that of the substitute.
"""

from __future__ import annotations

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
from functionalize.graph_capture.trace.numbers.number_methods import CLASSES
from functionalize.patches import Patch, Patches


class TypeChecks:
    """The ``isinstance``, ``type`` and ``id`` of one run of a program; its conversions by ``float`` and ``int``."""

    def __init__(
        self,
        asking: Mapping[str, Mapping[int, dict[str, Any]]],
        identity: Callable[[Any], int],
        converting: Iterable[Any],
    ) -> None:
        """``asking``: by name, the globals of functions that use it.

        The names are ``type``, ``id``, and ``FakeTensor``, as in libraries that treat fake tensors differently.
        ``identity``: the program's ``id``; ``converting``: functions that call ``float`` or ``int``.
        """
        self._asking, self._identity, self._converting = asking, identity, converting
        self._checks: Patches | None = None

    def rows(self) -> Iterator[Patch]:
        """Have ``torch.compile`` run without these checks."""
        yield Patch(torch, "compile", self._as_before)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Install the checks while the program runs."""
        with Patches([*self._of_globals(), *self._conversions()]) as self._checks:
            yield
        self._checks = None

    def _of_globals(self) -> Iterator[Patch]:
        asking, identity = self._asking, self._identity
        replacements: list[tuple[dict[str, Any], str, Any]] = [
            *((variables, "type", _Type) for variables in asking["type"].values()),
            (vars(statistics), "type", _Type),  # it makes results of the classes that it finds
            *((variables, "id", identity) for variables in asking["id"].values() if not _is_of_torch(variables)),
            *(
                (of_library, "isinstance", _isinstance)
                for of_library in (*asking["FakeTensor"].values(), *_libraries_asking())
            ),
        ]
        for variables, name, value in replacements:
            if name not in variables:
                yield Patch.by(value, variables, name, shared=True)

    def _conversions(self) -> Iterator[Patch]:
        for function, code in convert(self._converting):
            yield Patch.by(code, function, "__code__", shared=True)

    def _as_before(self, compiled: Any) -> Any:
        """``torch.compile`` for bodies of higher-order operators: Dynamo knows only Python's classes."""

        @functools.wraps(compiled)
        def compile(*args: Any, **options: Any) -> Any:
            made = compiled(*args, **options)
            if is_of_program(sys._getframe(2).f_code):  # frame 1 is that of the replaced name
                return made

            def called(*inputs: Any, **named: Any) -> Any:
                with contextlib.nullcontext() if self._checks is None else self._checks.suspended():
                    return made(*inputs, **named)

            return called

        return compile


def _is_of_torch(variables: dict[str, Any]) -> bool:
    """Whether these are the globals of a module of torch's, which uses identities for its own purposes."""
    return str(variables.get("__name__")).partition(".")[0] == "torch"


def _isinstance(value: Any, kinds: Any, /) -> bool:
    """``isinstance`` for code that knows fake tensors by name."""
    cls = type(value)
    if cls is FakeTensor:
        return isinstance(value, _but_for_fakes(kinds))
    return isinstance(value, kinds) or (cls in CLASSES and isinstance(CLASSES[cls](), kinds))


def _but_for_fakes(kinds: Any) -> Any:
    if isinstance(kinds, tuple):
        return tuple(map(_but_for_fakes, kinds))
    return () if kinds is FakeTensor else kinds


_SCANNED: dict[str, dict[str, Any] | None] = {}  # modules by name: their globals, if their code names FakeTensor
_NOT_SCANNED = frozenset({"torch", "functionalize", "numpy", "sympy", "builtins", *sys.stdlib_module_names})


def _libraries_asking() -> list[dict[str, Any]]:
    """The globals of loaded libraries with a function that names ``FakeTensor``, and of torch's modules themselves.

    ``Module.to`` would swap fake parameters, to which something else refers, instead of giving them other data.
    """
    if len(_SCANNED) != len(sys.modules):
        for name, module in list(sys.modules.items()):
            if name not in _SCANNED:
                skipped = module is None or name.partition(".")[0] in _NOT_SCANNED
                codes = () if skipped else (function.__code__ for function in functions_of(module))
                _SCANNED[name] = vars(module) if any(map(_names_fakes, codes)) else None
        for name in _SCANNED.keys() - sys.modules.keys():
            del _SCANNED[name]
    return [vars(modules), *(variables for variables in _SCANNED.values() if variables is not None)]


def _names_fakes(code: types.CodeType) -> bool:
    return "FakeTensor" in code.co_names or any(
        _names_fakes(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)
    )


def _class_of(value: Any) -> Any:
    """The class of what a value replaces."""
    cls = type(value)
    if cls is FakeTensor:
        return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    return CLASSES.get(cls, _Type if cls is type else cls)


class _OfType(type):
    """Calls of :class:`_Type`, and checks for instances and subclasses of it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:  # a class of classes that the program makes of it
            return super().__call__(*args, **kwargs)
        return _class_of(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type) if cls is _Type else super().__instancecheck__(value)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type) if cls is _Type else super().__subclasscheck__(subclass)


class _Type(type, metaclass=_OfType):
    """``type``, as functions of a program know it while it is captured."""

    def __class_getitem__(cls, item: Any) -> Any:
        return types.GenericAlias(type, item)


_Type.__name__ = _Type.__qualname__ = type.__name__
_Type.__module__ = type.__module__


def of_python(value: Any) -> Any:
    """A value that a program keeps or returns; ``type`` itself for its :class:`_Type`."""
    return type if value is _Type else value
