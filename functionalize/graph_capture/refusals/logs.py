"""Lists that a program only adds to: logs, whose length does not matter to it.

A list is a log if code reaches it by one name alone (a variable, an attribute, or a variable or an attribute that is a
dict, and text as key), and if all code of the program that has this name goes on with `append` or `extend`.

Invariant: a list counts as a log only if the code proves it. Limits: code of libraries is checked for the name only.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from functionalize.call_stack import is_of_program
from functionalize.python_state.code_names import CONSTRUCTORS, instructions
from functionalize.python_state.containers import SlotsOf, Variable, place_of
from functionalize.python_state.decompose import dict_of
from functionalize.python_state.ownership import is_library_file, is_own
from functionalize.python_state.slots import Slot
from functionalize.python_state.walk import StateWalk

_ADDS = frozenset({"append", "extend"})
_DICTS = (dict, OrderedDict, defaultdict)  # code reaches their entries by their methods alone
_KNOWN = frozenset({"builtins", "typing", "abc", "torch"})  # modules whose classes read attributes by name, if at all
_IDLE = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "PUSH_NULL", "COPY_FREE_VARS", "MAKE_CELL"})
_DEFINES = frozenset({"LOAD_CLOSURE", "KW_NAMES"})  # passed to a function whose code is checked; names of arguments

_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"})

# Functions that read variables without their names: builtins, and others, which may be attributes as well.
_BUILTINS = frozenset({"eval", "exec", "vars", "globals", "locals"})
_READERS = frozenset(
    {
        *("__dict__", "__self__", "__reduce__", "__reduce_ex__", "__globals__", "__closure__", "cell_contents"),
        *("getclosurevars", "f_locals", "f_globals", "builtins", "__builtins__"),
    }
)
_OF_ATTRIBUTES = (
    frozenset({"getattr"}),
    frozenset(
        {
            *("attrgetter", "__getattribute__", "__getstate__", "getattr_static", "getmembers", "getmembers_static"),
            *("asdict", "astuple", "deepcopy", "dump", "dumps", "save", "Pickler"),
        }
    ),
)
_ALL = frozenset().union(_BUILTINS, _READERS, *_OF_ATTRIBUTES)


def adds(method: Any) -> bool:
    """Whether a method in C is one that adds to a list."""
    return type(method.__self__) is list and method.__name__ in _ADDS


class Logs:
    """Records how the code of a program reaches lists."""

    def __init__(self, state: StateWalk) -> None:
        self._state = state
        self._globals: dict[int, Any] = {}  # of the functions, by identity
        self._of_modules: set[tuple[int, Any]] = set()  # variables that some code reads as attributes
        self._adders: dict[int, tuple[Any, Any]] = {}  # places of lists that a method adds to, and the lists
        self._names_modules = False  # whether code of the program's own names a module of its own
        self._renamed: set[str] = set()  # names in `_ALL` whose functions some code calls by other names

    def meet_globals(self, space: dict[str, Any]) -> None:
        """Record the globals of a function that the program may run."""
        self._globals[id(space)] = space

    def meet_variable(self, name: str, place: tuple[int, Any]) -> None:
        """Record a variable, by its name in code; ``place``: the identity of its container, and the key."""
        if "." in name:
            self._of_modules.add(place)

    def meet_value(self, name: str, value: Any) -> None:
        """Record the value that a program's own code has under a name."""
        self._names_modules |= isinstance(value, types.ModuleType) and is_own(value.__name__)
        if isinstance(value, (types.BuiltinFunctionType, types.FunctionType, type)) and value.__name__ in _ALL:
            self._renamed |= {value.__name__} - {name.rpartition(".")[2]}

    def meet_adder(self, place: Any, container: Any) -> None:
        """Record a list that a method of the program adds to; ``place``: where the walk met it."""
        self._adders[id(place)] = place, container

    def is_log(self, container: Any, codes: Iterable[types.CodeType]) -> bool:
        """Whether a list is a log; ``codes``: of all functions that the program may reach."""
        slots = self._slots(container)
        if type(container) is not list or len(slots) > 1:
            return False
        if not slots:
            added = any(receiver is container for _, receiver in self._adders.values())
            return added and not any(_reads_unnamed(code, False, frozenset(self._renamed)) for code in codes)
        slot, keyed = slots[0], slots[0].owner is slots[0].container
        if keyed:
            slots = self._slots(slot.owner)
            if type(slot.owner) not in _DICTS or type(slot.key) is not str or len(slots) != 1:
                return False
        name, attribute = self._name(slots[0])
        unnamed = functools.partial(_reads_unnamed, attribute=attribute, renamed=frozenset(self._renamed))
        return bool(name) and all(not unnamed(code) and _only_adds(code, name, attribute, keyed) for code in codes)

    def _slots(self, value: Any) -> list[Slot]:
        """The places of an object, without those in methods that add to it."""
        slots = (slot for slot in self._state.entered if slot.found() is value)
        return [slot for slot in slots if id(slot.container) not in self._adders]

    def _name(self, slot: Slot) -> tuple[str, bool]:
        """The only name of a place in code, and whether it names an attribute; empty if there may be more names."""
        container, key = place_of(slot.container, slot.key)
        if slot.steps:
            return "", False
        if isinstance(slot.container, Variable) or id(container) in self._globals:
            attribute = key is not None and (self._names_modules or (id(container), key) in self._of_modules)
            return slot.path if key is None else str(key), attribute
        return (key, True) if isinstance(key, str) and _is_attribute(slot) else ("", False)


def _is_attribute(slot: Slot) -> bool:
    """Whether a place is an attribute of an object that is read by its name alone."""
    owner, container = slot.owner, slot.container
    if owner is None or not (isinstance(container, SlotsOf) or dict_of(owner) is container):
        return False
    cls = owner if isinstance(owner, type) else type(owner)
    if issubclass(cls, (torch.nn.Module, types.FunctionType)):
        return True
    return all(is_own(base.__module__) or str(base.__module__).partition(".")[0] in _KNOWN for base in cls.__mro__)


def _is_own(code: types.CodeType) -> bool:
    """Whether code is a program's own: no library knows the attributes that its user gives to objects."""
    return is_of_program(code) and not is_library_file(code.co_filename)


@functools.lru_cache(maxsize=1 << 12)
def _reads_unnamed(code: types.CodeType, attribute: bool, renamed: frozenset[str]) -> bool:
    """Whether code of a program's own, or of functions in it, may read a variable or an attribute without its name."""
    builtin = _BUILTINS | _OF_ATTRIBUTES[0] if attribute else _BUILTINS
    names = builtin | _READERS | _OF_ATTRIBUTES[1] if attribute else builtin | _READERS
    if not _is_own(code):
        return False
    if names & renamed:
        return True
    constants = (constant for constant in code.co_consts if isinstance(constant, str))
    steps = _steps(code) if attribute or names.intersection((*code.co_names, *constants)) else []
    for index, step in enumerate(steps):
        if step.opname == "MATCH_CLASS" and attribute:
            return True
        if isinstance(step.argval, str) and step.argval in names:
            text = step.opname == "LOAD_CONST" and not step.argval.startswith("__")
            method = step.argval in builtin and not step.opname.endswith(("_GLOBAL", "_NAME"))
            named = step.argval == "getattr" and _has_constant_name(steps[index + 1 :])
            if not (text or method or named or _of_self(code, steps, index)):
                return True
    return any(_reads_unnamed(inner, attribute, renamed) for inner in _inner(code))


def _has_constant_name(steps: Sequence[Any]) -> bool:
    """Whether the arguments of `getattr` follow: a variable, or an attribute of one, a text, and a default."""
    if not steps or steps[0].opname not in _LOADS:
        return False
    rest = list(itertools.dropwhile(lambda step: step.opname == "LOAD_ATTR", steps[1:]))[:3]
    names = [step.opname for step in rest]
    if names[:1] != ["LOAD_CONST"] or not isinstance(rest[0].argval, str):
        return False
    place = 2 if names[1].startswith("LOAD_") else 1
    return bool(names[place].startswith(("PRECALL", "CALL")) and rest[place].arg == place + 1)


def _only_adds(code: types.CodeType, name: str, attribute: bool, keyed: bool) -> bool:
    """Whether code, and code of functions in it, uses a name only to append to its value, or to extend it.

    ``keyed``: to the value's entry under a constant text.
    """
    texts = code.co_consts if attribute and _is_own(code) else ()
    if name in (*code.co_names, *code.co_freevars, *code.co_cellvars) or any(map(_holds(name), texts)):
        steps = _steps(code)
        for index, step in enumerate(steps):
            if _mentions(step, name) and not (attribute and _of_self(code, steps, index)):
                adds = step.opname.startswith("LOAD_") and step.opname != "LOAD_CONST"
                if not (adds and _adds(steps[index + 1 : index + 4], keyed)):
                    return False
    return all(_only_adds(inner, name, attribute, keyed) for inner in _inner(code))


def _holds(name: str) -> Callable[[Any], bool]:
    """A test of constants: whether one is a text, or a tuple with it: the name of an attribute, perhaps."""
    return lambda constant: (
        constant == name if isinstance(constant, str) else isinstance(constant, tuple) and name in constant
    )


def _mentions(step: Any, name: str) -> bool:
    """Whether an instruction uses a name, other than as a local variable."""
    if step.opname in _DEFINES or "_FAST" in step.opname:
        return False
    return _holds(name)(step.argval)


def _of_self(code: types.CodeType, steps: Sequence[Any], index: int) -> bool:
    """Whether an instruction is about an attribute of the object that the code constructs: another list."""
    if code.co_name not in CONSTRUCTORS or not index or not code.co_varnames:
        return False
    loaded = steps[index - 1].argval
    return bool((loaded[-1] if isinstance(loaded, tuple) and loaded else loaded) == code.co_varnames[0])


def _adds(following: Sequence[Any], keyed: bool) -> bool:
    if keyed:
        if len(following) < 3 or following[0].opname != "LOAD_CONST" or not isinstance(following[0].argval, str):
            return False
        if not (following[1].opname == "BINARY_SUBSCR" or following[1].argrepr == "[]"):
            return False
        following = following[2:]
    return bool(following) and following[0].opname in ("LOAD_METHOD", "LOAD_ATTR") and following[0].argval in _ADDS


def _steps(code: types.CodeType) -> list[Any]:
    return [step for step in instructions(code) if step.opname not in _IDLE]


def _inner(code: types.CodeType) -> list[types.CodeType]:
    """The code of functions in code."""
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
