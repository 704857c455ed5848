"""The Python state of a program: what its functions reach by names, and which of it the program may branch on.

Invariant: values are taken before the program runs. Limits: functions that call functions are followed a few calls
deep, by the names in their code; the names in torch's functions are not followed.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from functionalize._torch import gradient_hooks, hooks_behind, hooks_of_all
from functionalize._torch.subclasses.wrappers import tensors_given_to
from functionalize.graph_capture.refusals import iterators
from functionalize.graph_capture.refusals.logs import Logs, adds
from functionalize.graph_capture.trace.numbers.conversions import CONVERSIONS
from functionalize.python_state.code_names import (
    BY_NAME,
    FUNCTIONS,
    METHODS_IN_C,
    Named,
    Names,
    bound_by_name,
    callables_behind,
    catches,
    functions_among,
    names_in,
    variables,
    variables_of_module,
)
from functionalize.python_state.containers import ABSENT, Variable, per_class, place_of, read
from functionalize.python_state.decompose import hooks_in
from functionalize.python_state.methods import Methods, forward_of, functions_in
from functionalize.python_state.ownership import is_installed, is_of_torch_or_python, is_own
from functionalize.python_state.traversal_rules import PLAIN, is_entered, of_proxy
from functionalize.python_state.walk import TENSOR_TYPES, StateWalk, is_module
from functionalize.runtime.calls.program import CapturedProgram
from functionalize.runtime.guards.python_guards import Code, PythonGuards

_CODE = (*FUNCTIONS, *METHODS_IN_C, type)
_DEPTH = 4  # how far functions that call functions are followed
_BUILTINS = frozenset({"type", "id"})  # replaced in a program's functions while it is captured
_ASKED = _BUILTINS | {"FakeTensor", "Parameter", "Buffer"}  # names by which functions distinguish tensors
_OF_MEMBERS = frozenset({"_name_", "_value_", "__objclass__", "_sort_order_"})  # of any enumeration
_OF_FUNCTIONS = ("__code__", "__defaults__", BY_NAME)  # what a function does depends on these


def python_guards_of(state: StateWalk, code: Iterable[Code]) -> PythonGuards:
    """Guards on what a program with this state may branch on; ``code``: what decides which code runs."""
    guards = PythonGuards([source for slot, source in state.entered.items() if slot.steps or slot.key is BY_NAME])
    entered = {*map(id, state.seen), *state.containers}
    for source in state.objects:
        path = state.modules.get(id(source.value))
        if path is not None:
            guards.add_module(path, state.containers[id(source.value.__dict__)], entered)
    guards.add((*state.constants, *state.tuples))
    guards.add_structure(state)
    guards.add_code(code)
    return guards


class ProgramCode:
    """The code that a program may run, as far as it is known."""

    def __init__(self) -> None:
        self.all: set[types.CodeType] = set()  # of the functions
        self.names: set[str] = set()  # in that code
        self.catches = False  # whether code of the program's own catches errors
        self.computes = False  # whether such code gets attributes whose names are not constants
        # By name, the globals of functions that use it.
        self.asking: dict[str, dict[int, Any]] = {name: {} for name in _ASKED}
        # On what it depends which code runs: by function, or by class and base class.
        self.decisive: dict[tuple[int, int], Code] = {}
        self.converting: dict[int, Any] = {}  # functions that may call `float` or `int`, by identity
        # Whether these, and slices, return symbols; else numbers are decisions wherever only plain ones are accepted.
        self.converts = True

    def note(self, function: Any) -> Names:
        """Record a function that the program may run. Returns what its code does by names."""
        code = function.__code__
        self.all.add(code)
        names, asked, converts = _traits_of(code)
        self.names.update(names.all)
        for name in asked:
            self.asking[name][id(function.__globals__)] = function.__globals__
        if converts and not is_of_torch_or_python(function.__module__):
            self.converting[id(function)] = function
        if is_own(function.__module__ or ""):
            self.catches = self.catches or catches(code)
            self.computes = self.computes or names.computes
            self.decisive[id(function), 0] = Code.of(function.__qualname__, function, _OF_FUNCTIONS)
        return names


class _Traits(NamedTuple):
    """What code does that matters to a capture, whichever function has it."""

    names: Names
    asked: Set[str]  # the names by which it distinguishes tensors
    converts: bool  # whether it may call `float` or `int`, or write numbers into a text


@functools.lru_cache(maxsize=1 << 12)
def _traits_of(code: types.CodeType) -> _Traits:
    names = names_in(code)
    asked = _BUILTINS.intersection(names.loaded) | (_ASKED - _BUILTINS).intersection(names.all)
    writes = any(isinstance(constant, str) and "%" in constant for constant in code.co_consts)
    return _Traits(names, asked, writes or not CONVERSIONS.keys().isdisjoint(names.loaded))


class Follower:
    """Walks what a function reaches by its variables, and what the functions among these reach."""

    def __init__(self, func: Any, state: StateWalk, hooked: bool = False) -> None:
        """``hooked``: whether the program runs the hooks on gradients of tensors."""
        self._state, self._hooked = state, hooked
        self.code = ProgramCode()
        self._logs = Logs(state)
        self._followed: dict[int, Any] = {}  # by identity: followed callables that are not methods
        self._whole = True  # whether all functions that the program may reach were followed
        self._kinds: set[type] = set()  # followed classes
        self._modules: list[Methods] = []  # of module classes, more of whose methods may run
        self._named: set[type] = set()  # classes of which the program may make objects
        self._held: dict[str, Any] = {}  # modules of Python that objects hold, by path
        self._places: set[tuple[int, Any]] = set()
        self._others = self._seen = self._tensors = self._tuples = 0  # how many of the walk's are done
        self._follow(func, _DEPTH)
        self.follow_found()
        if state.holds:
            for path, hooks in hooks_of_all().items():
                state.open(hooks, path)
            self.follow_found()

    def follow_arguments(self, arguments: StateWalk) -> None:
        """Follow the code in the program's arguments: functions among them, and methods of objects."""
        for slot in arguments.others:
            self._follow_value(slot.get(), slot.path)
        for value in arguments.seen:
            self._follow_object(value)
        for slot in arguments.tensors:
            self._name_class(type(slot.get()))
        self.follow_found()

    def is_log(self, container: Any) -> bool:
        """Whether the program only adds to a list."""
        return self._whole and self._logs.is_log(container, self.code.all)

    def follow_found(self) -> None:
        """Follow the code of newly found objects: of modules the methods that any code names."""
        count = -1
        while count < len(self.code.all):
            count = len(self.code.all)
            self._follow_objects()
            for path, module in self._held.items():
                for variable in variables_of_module(module, path, [*self.code.names], set(), self.code.computes):
                    self._follow_variable(variable, True, _DEPTH - 1)
            for methods in [*self._modules]:
                self._follow_methods(methods, self.code.names)

    def _follow_objects(self) -> None:
        state = self._state
        self._open_hooks()
        while self._others < len(state.others) or self._seen < len(state.objects) or self._named - self._kinds:
            others = [*state.others[self._others :], *state.tuples[self._tuples :]]
            objects, self._tuples = state.objects[self._seen :], len(state.tuples)
            self._others, self._seen = len(state.others), len(state.objects)
            for slot in others:
                self._follow_value(slot.get(), slot.path)
            for cls in [*self._named]:
                self._follow_class(cls)
            for source in objects:
                self._follow_object(source.value)
            self._open_hooks()

    def _follow_object(self, value: Any) -> None:
        """Follow the methods of an object, and the hooks of a module."""
        cls = type(value)
        if cls not in self._kinds and not isinstance(value, type):
            self._follow_class(cls)
        if is_module(value):
            for hooks in hooks_in(value.__dict__):
                for hook in [*hooks.values()]:
                    self._follow(hook, _DEPTH)
        elif isinstance(value, RemovableHandle):
            for hooks in hooks_behind(value):
                self._state.watch(hooks, "a hook's handle")

    def _follow_value(self, value: Any, path: str) -> None:
        """Follow a value that is neither a tensor nor entered: a function, method in C, captured program or class."""
        value = of_proxy(value)
        if isinstance(value, FUNCTIONS):
            self._follow(value, _DEPTH - 1)
        elif isinstance(value, METHODS_IN_C):
            self._open_owner(value, path)
        elif isinstance(value, types.ModuleType):
            self._held[path] = value
        elif isinstance(value, CapturedProgram):  # it runs its original while another program is captured
            self._state.walk(vars(value), "original", path)
        self._name_class(value if isinstance(value, type) else type(value))

    def _open_hooks(self) -> None:
        """Enter the hooks of newly found tensors if the program runs them; watch them if not: it may remove some."""
        tensors = self._state.tensors[self._tensors :]
        self._tensors += len(tensors)
        for slot in tensors:
            tensor = slot.get()
            self._open_attributes(tensor, slot.path)
            if type(tensor) not in TENSOR_TYPES:
                self._name_class(type(tensor))
            for hooks in gradient_hooks(tensor):
                (self._state.open if self._hooked else self._state.watch)(hooks, f"{slot.path}: hooks")

    def _open_attributes(self, tensor: torch.Tensor, path: str) -> None:
        """Enter the tensors that somebody gave to a tensor as attributes (`p.main_grad`)."""
        for name in tensors_given_to(tensor):
            self._state.walk(vars(tensor), name, f"{path}.{name}")

    def _name_class(self, cls: type) -> None:
        """Follow a class if it is of the program's own, such as that of a tensor: it has operators."""
        if is_own(cls.__module__):
            self._named.add(cls)

    def _follow_class(self, cls: type) -> None:
        if cls not in self._kinds:
            self._kinds.add(cls)
            self._open_class(cls)
            if is_own(type(cls).__module__):
                self._follow_class(type(cls))
            if is_installed(cls):
                self._follow_forward(cls)
                return
            methods = Methods(cls)
            if issubclass(cls, torch.nn.Module):
                self._modules.append(methods)
            self._follow_methods(methods)

    def _follow_forward(self, cls: type) -> None:
        """Follow the method of a library's class."""
        forward = forward_of(cls)
        if forward is not None:
            self.code.decisive[id(cls), id(cls)] = Code.of(cls.__qualname__, cls, ("forward",))
            self._follow(forward, _DEPTH)

    def _follow_methods(self, methods: Methods, names: Set[str] = frozenset()) -> None:
        """Follow the methods of a class; ``names``: methods of a module that may be called, besides ``forward``."""
        added = methods.further(names, self.code.computes)
        for cls, guarded in methods.guarded.items():
            self.code.decisive[id(methods.kind), id(cls)] = Code.of(cls.__qualname__, cls, tuple(guarded))
        for _, method in added:
            for function in functions_in(method):
                self._follow(function, _DEPTH)

    def _open_owner(self, method: Any, path: str) -> None:
        """Enter the list, dict or other container that a method in C is bound to."""
        owner = method.__self__
        if iterators.is_iterator(owner):
            raise iterators.refusal(owner, f"what the method `{path}` of the program is bound to")
        entered = is_entered(type(owner)) and not isinstance(owner, torch.Tensor)
        if entered and id(method) not in self._followed:
            self._followed[id(method)] = method
            place = {"self": owner}
            if adds(method):
                self._logs.meet_adder(place, owner)
            self._state.walk(place, "self", path)

    def _open_class(self, cls: type) -> None:
        """Enter the attributes of a class, and of its base classes, that are of a program's own."""
        if issubclass(cls, enum.Enum):
            self._open_members(cls)
            return
        for base in cls.__mro__ if _has_own_base(cls) else ():
            if is_own(base.__module__):
                self._state.open(base, base.__qualname__)

    def _open_members(self, enumeration: type[enum.Enum]) -> None:
        """Enter the members of an enumeration that hold more than a name and a plain value."""
        for member in enumeration.__members__.values() if is_own(enumeration.__module__) else ():
            if type(member.value) not in PLAIN or vars(member).keys() - _OF_MEMBERS:
                self._state.open_attributes(member, str(member))

    def _follow(self, func: Any, depth: int) -> None:
        if not isinstance(func, types.MethodType):
            if id(func) in self._followed:
                return
            self._followed[id(func)] = func
        layers = callables_behind(func)
        for layer in layers:
            self._name_class(type(layer))
        functions = functions_among(layers)
        marks = own = False
        for function in functions:
            marks |= self.code.note(function).gives_attributes
            own |= is_own(function.__module__)
            self._logs.meet_globals(function.__globals__)
        for keywords in bound_by_name(layers):
            self._state.watch(keywords, "keywords")
        for variable in variables(layers, functions):
            if own:
                self._logs.meet_value(variable[0], of_proxy(read(*variable[1:])))
            self._follow_variable(variable, marks, depth)

    def _follow_variable(self, variable: Named, marks: bool, depth: int) -> None:
        """``marks``: whether code that names it gives attributes to objects."""
        name, container, key = variable
        value = self._walk(name, container, key)
        if not isinstance(value, _CODE):
            return
        if isinstance(value, (types.FunctionType, functools.partial)) and (marks or value.__dict__):
            self._state.open(value, name)
        if isinstance(value, METHODS_IN_C):
            self._open_owner(value, name)
        owner = value.__self__ if isinstance(value, types.BuiltinFunctionType) else value  # of a method in C
        if isinstance(owner, type):
            self._name_class(owner)
        elif isinstance(value, FUNCTIONS):
            self._whole = self._whole and depth > 0
            if depth:
                self._follow(value, depth - 1)

    @property
    def decisive(self) -> Iterable[Code]:
        """The attributes of functions and classes on which it depends which code the program runs."""
        return self.code.decisive.values()

    def _walk(self, name: str, container: Any, key: Any) -> Any:
        """Walk a variable. Returns its value, or the object behind that."""
        value = read(container, key)
        shown = of_proxy(value) if type(value) in weakref.ProxyTypes else value
        if isinstance(shown, type):
            self._open_class(shown)
        where, variable = place_of(container, key)
        place = id(where), variable
        self._logs.meet_variable(name, place)
        if type(container) is Variable:
            self._state.watch(container, name)
        if place not in self._places:
            self._places.add(place)
            if value is not ABSENT:
                self._state.walk(container, key, name)
        return shown


@per_class
def _has_own_base(cls: type) -> bool:
    """Whether a class, or a base class, is of a program's own."""
    return any(is_own(base.__module__) for base in cls.__mro__)


def reached(func: Any) -> dict[str, Any]:
    """Modules and optimizers that a function reaches through its variables, by name."""
    state = StateWalk()
    Follower(func, state)
    held = {slot.path: slot.get() for slot in state.entered if not slot.held}
    return {path: value for path, value in held.items() if isinstance(value, (torch.nn.Module, torch.optim.Optimizer))}
