"""The Python state of a program: what its functions reach by names, and what of that it may decide by.

Invariant: values are taken before the program runs. Limits: functions that call functions are followed a few calls
deep, by the names that their code has; functions of torch have none.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from dis import opmap
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from functionalize._torch import gradient_hooks, hooks_behind, hooks_of_all
from functionalize.call_stack import is_of_program
from functionalize.errors import UnsupportedProgramError
from functionalize.graph_capture.assignments import CONSTRUCTORS
from functionalize.runtime.containers import ABSENT, BoundBy, SlotsOf, Variable, cell_content, per_class, place_of, read
from functionalize.runtime.settings import Settings, hooks_of
from functionalize.runtime.state_walk import StateWalk, is_module

_DEPTH = 4  # how far functions that call functions are followed
_CONSTANT = (type, types.ModuleType)  # whose names nobody gives to something else
_NOT_OWN = frozenset({"torch", "functionalize", "builtins"}) | set(sys.builtin_module_names)
_PLAIN = frozenset({bool, int, float, str, type(None)})
_STORE_GLOBAL, _STORE_ATTR = opmap["STORE_GLOBAL"], opmap["STORE_ATTR"]
_LOAD_GLOBAL, _EXTENDED_ARG = opmap["LOAD_GLOBAL"], opmap["EXTENDED_ARG"]
_LOADS_BY_NAME = {
    opmap[name] for name in ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS") if name in opmap
}  # the second since 3.12
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")  # which decide what they do
_ASSIGNABLE = 1 << 9  # the flag of classes that a program can give an object instead of its own
Named = tuple[str, Any, Any]  # a variable: its name, and the container and key where it is


def settings_of(state: StateWalk, code: Iterable[tuple[str, Any, tuple[str, ...]]]) -> Settings:
    """What a program with this state may decide by; ``code``: whose attributes decide which code it runs."""
    settings = Settings(slot.get() for slot in state.entered if slot.steps)
    entered = {*map(id, state.seen), *state.containers}
    for item in state.seen:
        if is_module(item):
            settings.add_module(item, state.modules[id(item)], entered)
    for slot in (*state.constants, *state.tuples):
        settings.add(slot.path, slot.container, slot.key)
    settings.add_structure(state)
    for path, owner, names in code:
        settings.add_code(path, owner, names)
    return settings


class Follower:
    """Walks what a function reaches by its variables, and what functions reach that are found there."""

    def __init__(self, func: Any, state: StateWalk, hooked: bool = False) -> None:
        """``hooked``: whether the hooks on gradients of tensors are among what the program runs."""
        self._state, self._hooked = state, hooked
        self.codes: set[types.CodeType] = set()  # of all functions that were met
        self.asking: dict[int, dict[str, Any]] = {}  # the globals of those among them that name `type`
        self._codes: set[types.CodeType] = set()  # that were looked through
        self._run: dict[int, tuple[str, Any, tuple[str, ...]]] = {}  # attributes that decide which code runs
        self._followed: dict[int, Any] = {}  # by identity: what is no method, and was followed
        self._whole = True  # whether all were that the program may come to
        self._kinds: set[type] = set()  # classes, likewise
        self._named: set[type] = set()  # classes of which the program may make objects
        self._places: set[tuple[int, Any]] = set()
        self._constants = self._seen = self._tensors = 0  # how many of the walk's were looked at
        refuse_iterators(func)
        self._follow(func, _DEPTH)
        self._follow_found()
        if state.holds:
            for path, hooks in hooks_of_all().items():
                state.open(hooks, path)
            self._follow_found()

    def is_log(self, container: Any) -> bool:
        """Whether a list is one that the program adds to, and does nothing else with: it is known by one name."""
        slots = [slot for slot in self._state.entered if slot.found() is container]
        if type(container) is not list or len(slots) != 1 or not self._whole:
            return False
        slot = slots[0]
        name = slot.path if isinstance(slot.container, Variable) else slot.key
        made = {function.__code__ for kind in self._named - self._kinds for _, function in methods(kind)}
        codes = {code for code in self._codes | made if code.co_name not in CONSTRUCTORS}  # that of another object
        return isinstance(name, str) and not slot.steps and all(only_adds(code, name) for code in codes)

    def _follow_found(self) -> None:
        """Follow what the objects run that were found on the way."""
        state = self._state
        self._open_hooks()
        while self._constants < len(state.constants) or self._seen < len(state.seen):
            constants, objects = state.constants[self._constants :], state.seen[self._seen :]
            self._constants, self._seen = len(state.constants), len(state.seen)
            for slot in constants:
                value = slot.get()
                if isinstance(value, _FUNCTIONS):
                    self._follow(value, _DEPTH - 1)
            for value in objects:
                for function in self._functions_of(value):
                    self._follow(function, _DEPTH)
                if isinstance(value, RemovableHandle):
                    for hooks in hooks_behind(value):
                        state.watch(hooks, "a hook's handle")
            self._open_hooks()

    def _open_hooks(self) -> None:
        """Enter the hooks of the tensors that were found, if the program runs them; others it may remove."""
        tensors = self._state.tensors[self._tensors :]
        self._tensors += len(tensors)
        for slot in tensors:
            for hooks in gradient_hooks(slot.get()):
                (self._state.open if self._hooked else self._state.watch)(hooks, f"{slot.path}: hooks")

    def _functions_of(self, value: Any) -> Iterator[Any]:
        """What an object runs: methods of its class, hooks of a module."""
        if is_module(value):
            yield from hooks_of(value)
        if isinstance(value, type):
            return
        kind = type(value)
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._open_class(kind)
            found = list(methods(kind))
            names = tuple({name for name, function in found if getattr(kind, name, None) is function})
            self._run[id(kind)] = kind.__qualname__, kind, names
            yield from (function for _, function in found)

    def _open_class(self, kind: type) -> None:
        """Enter what a class of a program's own, and those that it inherits from, have for all their objects."""
        if issubclass(kind, (tuple, enum.Enum)):
            return
        for one in kind.__mro__:
            if is_own(one.__module__):
                self._state.open(one, one.__qualname__)

    def _follow(self, func: Any, depth: int) -> None:
        if not isinstance(func, types.MethodType):
            if id(func) in self._followed:
                return
            self._followed[id(func)] = func
        functions = list(layers(func))
        codes = [function.__code__ for function in functions]
        self.codes.update(codes)
        if not isinstance(func, types.MethodType):
            self._codes.update(codes)
        self._note(functions)
        marks = any(_STORE_ATTR in code.co_code[::2] for code in codes)
        for name, container, key in variables(func):
            value = read(container, key)
            self._walk(name, container, key, value)
            if isinstance(value, types.FunctionType) and (marks or value.__dict__):
                self._state.open(value, name)
            if isinstance(value, type):
                self._named.add(value)
            elif isinstance(value, _FUNCTIONS):
                self._whole = self._whole and depth > 0
                if depth:
                    self._follow(value, depth - 1)

    def _note(self, functions: list[Any]) -> None:
        """Note which functions name `type`, and which are the program's own."""
        for function in functions:
            if "type" in _global_names(function.__code__)[1]:
                self.asking[id(function.__globals__)] = function.__globals__
            if is_own(function.__module__ or ""):
                self._run[id(function)] = function.__qualname__, function, _OF_FUNCTIONS

    @property
    def run(self) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
        """What decides which code the program runs: paths, objects, and names of attributes."""
        paths = {id(slot.found()): slot.path for slot in self._state.entered}
        for value in self._state.seen:
            if type(value).__flags__ & _ASSIGNABLE and not isinstance(value, type):
                path = self._state.modules.get(id(value)) or paths.get(id(value), "")
                yield path, value, ("__class__",)
        yield from self._run.values()

    def _walk(self, name: str, container: Any, key: Any, value: Any) -> None:
        if isinstance(value, type):
            self._open_class(value)
        if isinstance(value, _CONSTANT):
            return
        where, place = place_of(container, key)
        first = (id(where), place) not in self._places
        self._places.add((id(where), place))
        if isinstance(container, Variable):
            self._state.watch(container, name)
        if first and value is not ABSENT:
            self._state.walk(container, key, name)


def reached(func: Any) -> dict[str, Any]:
    """Modules and optimizers that a function reaches through its variables, by name."""
    state = StateWalk()
    Follower(func, state)
    found = {slot.path: slot.get() for slot in state.entered if not slot.held}
    return {path: value for path, value in found.items() if isinstance(value, (torch.nn.Module, torch.optim.Optimizer))}


def refuse_iterators(func: Any) -> None:
    """Raise if a function names an iterator, which knows by itself what comes next.

    Raises:
        UnsupportedProgramError: it does.
    """
    for name, container, key in variables(func):
        value = read(container, key)
        if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            raise UnsupportedProgramError(
                f"the variable `{name}` of the program is a {type(value).__name__}",
                why="each next() takes something out of it, and a call of a captured program could not do so",
                hint="pass what next() gives as an argument",
            )


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The functions that objects of a class run, by name: of a module those that ``forward`` comes to.

    Of classes of a library, whose objects keep what they know to themselves, only ``forward``.
    """
    if is_installed(kind):
        forward = getattr(kind, "forward", None) if issubclass(kind, torch.nn.Module) else None
        yield from [("forward", forward)] if inspect.isfunction(forward) else []
        return
    own = [one for one in kind.__mro__ if one.__module__.partition(".")[0] != "torch"]
    entries = [entry for one in own for entry in vars(one).items() if inspect.isfunction(entry[1])]
    if not issubclass(kind, torch.nn.Module):
        yield from entries
        return
    todo, seen = ["forward"], set[str]()
    while todo:
        name = todo.pop()
        functions = [function for named, function in entries if named == name and name not in seen]
        yield from ((name, function) for function in functions)
        todo += [other for one in functions for layer in layers(one) for other in layer.__code__.co_names]
        seen.add(name)


@per_class
def is_installed(kind: type) -> bool:
    """Whether a class is one of Python's or of a library's."""
    return _is_of_library(sys.modules.get(kind.__module__))


def _is_of_library(module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file or file.startswith(sys.base_prefix)


@functools.cache
def is_own(name: str) -> bool:
    """Whether a module, by its name, is a program's own: none of Python's, nor of a library."""
    root = name.partition(".")[0]
    return not (root in _NOT_OWN or root in sys.stdlib_module_names or _is_of_library(sys.modules.get(name)))


def variables(func: Any) -> Iterator[Named]:
    """What a function reaches by names: arguments bound by ``partial``, ``self``, defaults, closures, globals."""
    while isinstance(func, functools.partial):
        yield "args", BoundBy(func), "args"
        yield from ((name, func.keywords, name) for name in func.keywords)
        func = func.func
    if inspect.ismethod(func):
        yield "self", {"self": func.__self__}, "self"
        func = func.__func__
    elif not (inspect.isfunction(func) or is_module(func)):
        yield "self", {"self": func}, "self"
        func = inspect.getattr_static(type(func), "__call__", None)
    for function in layers(func):
        if not (function.__module__ and function.__module__.split(".")[0] == "torch"):
            yield from _defaults(function)
            yield from _named(function)


def layers(func: Any) -> Iterator[Any]:
    """The function behind decorators, and what decorators of the user's wrapped it in."""
    seen, wrapped = set[int](), func if callable(func) else None
    while wrapped is not None and id(wrapped) not in seen:
        seen.add(id(wrapped))
        one, wrapped = getattr(wrapped, "__func__", wrapped), getattr(wrapped, "__wrapped__", None)
        if inspect.isfunction(one) and (wrapped is None or is_of_program(one.__code__)):
            yield one


def _named(func: Any) -> Iterator[Named]:
    """Variables that a function closes over, global ones, and those of modules that it names."""
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=False):
        yield name, Variable(cell, None), 0
    read_names, loaded, stored = _global_names(func.__code__)
    for name in loaded:
        if name not in stored and name in func.__globals__:
            yield name, func.__globals__, name
    for name in stored:
        yield name, Variable(func.__globals__, name), 0
    seen = set[str]()
    for name, module in _modules_of(func, read_names):
        yield from _of_module(module, name, read_names, seen)


def _modules_of(func: Any, names: list[str]) -> Iterator[tuple[str, Any]]:
    """The modules that a function may know by a name, those among them that it imports when it runs."""
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=False):
        yield name, cell_content(cell)
    for name in names:
        yield name, func.__globals__.get(name, sys.modules.get(name))


def _of_module(value: Any, path: str, names: list[str], seen: set[str]) -> Iterator[Named]:
    """What a function may reach of a module that it names, if that is a program's own, by the names that it has."""
    if not isinstance(value, types.ModuleType) or value.__name__ in seen or not is_own(value.__name__):
        return
    seen.add(value.__name__)
    content = vars(value)
    for name in names:
        found = content.get(name, ABSENT)
        if isinstance(found, types.ModuleType):
            yield from _of_module(found, f"{path}.{name}", names, seen)
        elif found is not ABSENT and not name.startswith("__"):
            constant = isinstance(found, (type, *_FUNCTIONS))
            yield (f"{path}.{name}", content, name) if constant else (f"{path}.{name}", Variable(content, name), 0)


def _defaults(func: Any) -> Iterator[Named]:
    """Defaults of arguments that hold something: the same object at each call."""
    if not _PLAIN.issuperset(map(type, func.__defaults__ or ())):
        yield "defaults", SlotsOf(func, ("__defaults__",)), "__defaults__"
    for name, value in (func.__kwdefaults__ or {}).items():
        if type(value) not in _PLAIN:
            yield name, func.__kwdefaults__, name


@functools.lru_cache(maxsize=1 << 12)
def _global_names(code: types.CodeType) -> tuple[list[str], list[str], list[str]]:
    """Of code, and code of functions in it: all names, those of globals that it reads, and those that it writes."""
    found = list(code.co_names), [*_loaded(code)], list[str]()
    if _STORE_GLOBAL in code.co_code[::2]:
        found[2].extend(one.argval for one in _instructions(code) if one.opcode == _STORE_GLOBAL)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for names, more in zip(found, _global_names(constant), strict=True):
                names += more
    names, loaded, stored = (list(dict.fromkeys(names)) for names in found)
    return names, loaded, stored


def _loaded(code: types.CodeType) -> Iterator[str]:
    """The names that code reads as globals: attributes are names as well."""
    extended, steps = 0, code.co_code
    for opcode, argument in zip(steps[::2], steps[1::2], strict=True):
        argument |= extended
        extended = argument << 8 if opcode == _EXTENDED_ARG else 0
        if opcode == _LOAD_GLOBAL:
            yield code.co_names[argument >> 1 if sys.version_info >= (3, 11) else argument]
        elif opcode in _LOADS_BY_NAME:  # in the body of a class
            yield code.co_names[argument]


def only_adds(code: types.CodeType, name: str) -> bool:
    """Whether code, and code of functions in it, takes what is called so only to append to it, or to extend it."""
    if name in (*code.co_names, *code.co_freevars, *code.co_cellvars):
        steps = [step for step in _instructions(code) if step.opname not in _IDLE]
        for step, following in itertools.zip_longest(steps, steps[1:]):
            if step.argval == name and step.opname not in _DEFINES:
                adds = following is not None and following.argval in ("append", "extend")
                if not (step.opname.startswith("LOAD_") and adds):
                    return False
    return all(only_adds(inner, name) for inner in code.co_consts if isinstance(inner, types.CodeType))


_IDLE = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "PUSH_NULL", "COPY_FREE_VARS", "MAKE_CELL"})
_DEFINES = frozenset({"LOAD_CLOSURE"})  # it is given to a function whose code is looked at


def _instructions(code: types.CodeType) -> list[Any]:
    import dis  # few programs need it

    return list(dis.get_instructions(code))
