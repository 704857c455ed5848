"""What ``isinstance``, ``type`` and ``id`` say of what stands for tensors and numbers: what they say of these.

Of numbers, ``isinstance`` says what their own table of methods says (`number_methods`).

Invariant: other code than the program's gets the same answers as before. Limits: ``type`` and ``id`` in functions that
a capture follows; of tensors, ``x.__class__`` is that of the substitute.
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
    """What one run of a program finds as ``isinstance``, ``type`` and ``id``; its conversions by ``float``, ``int``."""

    def __init__(
        self,
        asking: Mapping[str, Mapping[int, dict[str, Any]]],
        identity: Callable[[Any], int],
        converting: Iterable[Any],
    ) -> None:
        """``asking``: by names, the globals of functions that have them.

        These are ``type``, ``id``, and ``FakeTensor``, as libraries do that go other ways for fake tensors.
        ``identity``: what ``id`` says; ``converting``: functions that call ``float`` or ``int``.
        """
        self._asking, self._identity, self._converting = asking, identity, converting
        self._checks: Patches | None = None

    def rows(self) -> Iterator[Patch]:
        """Have the program use these."""
        yield Patch(torch, "compile", self._as_before)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """While the program runs."""
        with Patches([*self._of_globals(), *self._conversions()]) as self._checks:
            yield
        self._checks = None

    def _of_globals(self) -> Iterator[Patch]:
        asking, identity = self._asking, self._identity
        found: list[tuple[dict[str, Any], str, Any]] = [
            *((variables, "type", _Type) for variables in asking["type"].values()),
            (vars(statistics), "type", _Type),  # it makes results of the classes that it finds
            *((variables, "id", identity) for variables in asking["id"].values() if not _is_of_torch(variables)),
            *((one, "isinstance", _isinstance) for one in (*asking["FakeTensor"].values(), *_libraries_asking())),
        ]
        for variables, name, value in found:
            if name not in variables:
                yield Patch.by(value, variables, name, shared=True)

    def _conversions(self) -> Iterator[Patch]:
        for function, code in convert(self._converting):
            yield Patch.by(code, function, "__code__", shared=True)

    def _as_before(self, compiled: Any) -> Any:
        """``torch.compile`` for bodies of higher-order operators: Dynamo knows Python's classes alone."""

        @functools.wraps(compiled)
        def compile(*args: Any, **options: Any) -> Any:
            made = compiled(*args, **options)
            if is_of_program(sys._getframe(2).f_code):  # the first is that of the replaced name
                return made

            def called(*inputs: Any, **named: Any) -> Any:
                with contextlib.nullcontext() if self._checks is None else self._checks.suspended():
                    return made(*inputs, **named)

            return called

        return compile


def _is_of_torch(variables: dict[str, Any]) -> bool:
    """Whether these are the globals of a module of torch's, which asks for identities of its own."""
    return str(variables.get("__name__")).partition(".")[0] == "torch"


def _isinstance(value: Any, kinds: Any, /) -> bool:
    """What ``isinstance`` is to code that knows fake tensors by name."""
    kind = type(value)
    if kind is FakeTensor:
        return isinstance(value, _but_for_fakes(kinds))
    return isinstance(value, kinds) or (kind in CLASSES and isinstance(CLASSES[kind](), kinds))


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


def _class_of(value: Any) -> Any:
    """The class of what a value stands for."""
    kind = type(value)
    if kind is FakeTensor:
        buffer = torch.nn.Buffer if isinstance(value, torch.nn.Buffer) else torch.Tensor
        return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else buffer
    return CLASSES.get(kind, _Type if kind is type else kind)


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
