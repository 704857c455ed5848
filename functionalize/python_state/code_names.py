"""The variables that a program's code names, and the attributes that it assigns, read from its instructions.

Takes functions, or their code. Gives containers and keys of variables, and names. Guarantees that nothing runs. Limits:
only modules of the program itself are searched, not those of libraries; methods are found by name, whatever object they
are called on; assignments by ``setattr`` or to entries of a dict are not seen.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dis import opmap
from typing import Any, NamedTuple

from functionalize.call_stack import is_of_program
from functionalize.python_state.containers import ABSENT, BoundBy, SlotsOf, Variable, cell_content
from functionalize.python_state.ownership import is_of_python, is_own, root_of
from functionalize.python_state.traversal_rules import PLAIN
from functionalize.python_state.walk import is_module

# Attributes that only these methods assign may be constant.
CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__"})
_STORE_GLOBAL, _STORE_ATTR = opmap["STORE_GLOBAL"], opmap["STORE_ATTR"]
_GIVE_ATTRIBUTES = frozenset({"setattr", "delattr", "vars", "__setattr__", "__dict__"})  # names of what does, too
_GET_ATTRIBUTES = frozenset({"getattr", "__getattribute__", "attrgetter", "methodcaller"})  # of what gets them by name
_LOAD_GLOBAL, _EXTENDED_ARG = opmap["LOAD_GLOBAL"], opmap["EXTENDED_ARG"]
_MATCHES = {opmap[name] for name in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "JUMP_IF_NOT_EXC_MATCH") if name in opmap}
_CAUGHT, _POP_TOP = opmap.get("PUSH_EXC_INFO"), opmap["POP_TOP"]
_LOADS_BY_NAME = {
    opmap[name] for name in ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS") if name in opmap
}  # the second since 3.12
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, type(functools.lru_cache(lambda: None)))
METHODS_IN_C = (types.BuiltinFunctionType, types.MethodWrapperType)  # functions too: they are bound to a module
BY_NAME = "__kwdefaults__"  # the attribute of a function that holds its defaults of arguments by name
_NO_MODULES = PLAIN | {type, types.FunctionType, types.BuiltinFunctionType}  # the classes of most values
Named = tuple[str, Any, Any]  # a variable: its name, and its container and key


def callables_behind(func: Any) -> list[Any]:
    """A callable, then in turn the callables that it wraps: by ``partial``, as a method, by a decorator."""
    if type(func) is types.FunctionType and not func.__dict__:  # most are
        return [func]
    behind = dict[int, Any]()
    while callable(func) and id(func) not in behind:
        behind[id(func)] = func
        if isinstance(func, functools.partial):
            func = func.func
        else:
            func = getattr(func, "__func__", None) or getattr(func, "__wrapped__", None)
    return list(behind.values())


def functions_among(layers: Iterable[Any]) -> list[Any]:
    """Of a callable's layers, the function behind decorators, and the wrappers of the user's own decorators."""
    return [
        layer
        for layer in layers
        if isinstance(layer, types.FunctionType)
        if "__wrapped__" not in layer.__dict__ or is_of_program(layer.__code__)
    ]


def bound_by_name(layers: Iterable[Any]) -> list[dict[str, Any]]:
    """The dicts of arguments that ``functools.partial`` binds by name; a program may change them."""
    return [layer.keywords for layer in layers if isinstance(layer, functools.partial)]


def variables(layers: Sequence[Any], functions: Iterable[Any]) -> Iterator[Named]:
    """The variables that a callable reaches: arguments bound by ``partial``, ``self``, defaults, closures, globals.

    ``layers``: the callable, and those behind it; ``functions``: those among them.
    """
    for layer in layers:
        if type(layer) is types.FunctionType:
            continue
        if isinstance(layer, functools.partial):
            yield "args", BoundBy(layer), "args"
            yield from ((name, layer.keywords, name) for name in layer.keywords)
        elif inspect.ismethod(layer):
            yield "self", {"self": layer.__self__}, "self"
        elif not (layer is layers[0] and is_module(layer)):
            yield "self", {"self": layer}, "self"
            called = inspect.getattr_static(type(layer), "__call__", None)
            yield from _of_functions(functions_among(callables_behind(called)))
    yield from _of_functions(functions)


def _of_functions(functions: Iterable[Any]) -> Iterator[Named]:
    for function in functions:
        if root_of(function.__module__) != "torch":
            yield from _defaults(function)
            yield from _named(function)


def _named(func: Any) -> list[Named]:
    """A function's closure variables, its globals, and variables of modules that it names."""
    code, space = func.__code__, func.__globals__
    closed = dict(zip(code.co_freevars, func.__closure__, strict=False)) if func.__closure__ else {}
    named: list[Named] = [(name, Variable(cell, None), 0) for name, cell in closed.items()]
    if is_of_python(code.co_filename):
        return named  # what the standard library keeps, such as compiled patterns, is not state of the program
    names = names_in(code)
    named += [(name, space, name) for name in filter(space.__contains__, names.loaded) if name not in names.stored]
    named += [(name, Variable(space, name), 0) for name in names.stored]
    values = [(name, cell_content(cell)) for name, cell in closed.items()]
    loaded = sys.modules  # a name may be that of a module which the function imports
    values += [
        (name, space[name] if name in space else loaded[name]) for name in names.all if name in space or name in loaded
    ]
    seen = set[str]()
    for name, value in values:
        if type(value) not in _NO_MODULES:
            named += variables_of_module(value, name, names.all, seen, names.computes)
    return named


def variables_of_module(
    value: Any, path: str, names: Sequence[str], seen: set[str], computed: bool = False
) -> list[Named]:
    """The variables of a module that a function may reach by its names, if the module is the program's own.

    ``computed``: whether it computes names: these may be of any function, class or plain value.
    """
    if not issubclass(type(value), types.ModuleType) or value.__name__ in seen or not is_own(value.__name__):
        return []
    seen.add(value.__name__)
    content, named = vars(value), list[Named]()
    others = [name for name, member in content.items() if type(member) in _NO_MODULES] if computed else []
    for name in dict.fromkeys([*names, *others]):
        member = content.get(name, ABSENT)
        if member is not ABSENT and not name.startswith("__"):
            named.append((f"{path}.{name}", Variable(content, name), 0))
        if issubclass(type(member), types.ModuleType):
            named += variables_of_module(member, f"{path}.{name}", names, seen, computed)
    return named


def _defaults(func: Any) -> list[Named]:
    """Defaults that are not plain: each call gets the same object."""
    by_name = (func.__kwdefaults__ or {}).values()
    held = {"__defaults__": func.__defaults__ or (), BY_NAME: by_name}
    return [(name, SlotsOf(func, (name,)), name) for name in held if not PLAIN.issuperset(map(type, held[name]))]


class Names(NamedTuple):
    """The names that code, and code of functions in it, uses."""

    all: list[str]
    loaded: list[str]  # globals that it reads
    stored: list[str]  # globals that it writes
    gives_attributes: bool  # whether it assigns attributes of any object
    computes: bool  # whether it gets attributes whose names are not constants


@functools.lru_cache(maxsize=1 << 12)
def names_in(code: types.CodeType) -> Names:
    """The names that code, and code of functions in it, uses."""
    opcodes = set(code.co_code[::2])
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    writes = _STORE_GLOBAL in opcodes
    stored = [step.argval for step in instructions(code) if step.opcode == _STORE_GLOBAL] if writes else []
    gives = _STORE_ATTR in opcodes or not _GIVE_ATTRIBUTES.isdisjoint(code.co_names)
    gets, spaces = not _GET_ATTRIBUTES.isdisjoint(code.co_names), "globals" in code.co_names
    named_in = code.co_consts if gets or spaces else ()
    texts = [text for text in named_in if type(text) is str and text.isidentifier()]
    stored += texts if spaces else []
    own = Names([*code.co_names, *texts], [*_loaded(code)], stored, gives, gets and _computes(code))
    named, loaded, written, giving, computing = zip(own, *map(names_in, inner), strict=True)
    return Names(_once(named), _once(loaded), _once(written), any(giving), any(computing))


def _computes(code: types.CodeType) -> bool:
    """Whether some `getattr` of code is called with a name that is not a constant, or is not called where it is named.

    Arguments are followed by how many values instructions leave on the stack, without jumps.
    """
    import dis  # few programs need it

    steps = instructions(code)
    for start, load in enumerate(steps):
        if load.argval != "getattr" or not load.opname.startswith("LOAD_"):
            continue
        count, last = 0, dict[int, Any]()  # how many arguments there are; of each count, the instruction that left it
        for step in steps[start + 1 :]:
            count += dis.stack_effect(step.opcode, step.arg, jump=False)
            if count <= 0 and last:
                break
            last[count] = step
        if 2 not in last or not isinstance(last[2].argval, str) or last[2].opcode not in dis.hasconst:
            return True
    return False


def _once(lists: Iterable[list[str]]) -> list[str]:
    """The names of all lists, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(lists)))


def _loaded(code: types.CodeType) -> Iterator[str]:
    """The names that code reads as globals; `co_names` contains attributes too."""
    extended, steps = 0, code.co_code
    for opcode, argument in zip(steps[::2], steps[1::2], strict=True):
        argument |= extended
        extended = argument << 8 if opcode == _EXTENDED_ARG else 0
        if opcode == _LOAD_GLOBAL:
            yield code.co_names[argument >> 1 if sys.version_info >= (3, 11) else argument]
        elif opcode in _LOADS_BY_NAME:  # in the body of a class
            yield code.co_names[argument]


@functools.lru_cache(maxsize=1 << 12)
def catches(code: types.CodeType) -> bool:
    """Whether code, or code of functions in it, has an `except` or suppresses errors.

    In Python 3.10, an `except` without a class is not seen.
    """
    opcodes = code.co_code[::2]
    if (
        not _MATCHES.isdisjoint(opcodes)
        or "suppress" in code.co_names
        or any(pair == (_CAUGHT, _POP_TOP) for pair in itertools.pairwise(opcodes))
    ):
        return True
    return any(catches(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))


def instructions(code: types.CodeType) -> list[Any]:
    """The instructions of code."""
    import dis  # few programs need it

    return list(dis.get_instructions(code))


def assigned(codes: Iterable[types.CodeType], classes: Iterable[type]) -> set[str]:
    """The attributes that a program's code assigns, and methods of some classes that it reaches by name.

    Attributes that are assigned only when an object is constructed are left out.
    """
    names_assigned, classes = set[str](), list(classes)
    todo = [code for code in codes if code.co_name not in CONSTRUCTORS]
    seen = set[str](CONSTRUCTORS)
    while todo:
        names, stored = _names_and_stores(todo.pop())
        names_assigned |= stored
        todo += [code for name in names - seen for cls in classes for code in _methods(cls, name)]
        seen |= names
    return names_assigned


def _methods(cls: type, name: str) -> Iterator[types.CodeType]:
    """The code of a class's methods and properties of a name, in all its bases."""
    for base in cls.__mro__:
        value: Any = vars(base).get(name)
        for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
            inner = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
            if inspect.isfunction(inner):
                yield inner.__code__


@functools.lru_cache(maxsize=1 << 10)
def _names_and_stores(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names in code, and in code of functions in it; and the attributes that it assigns."""
    names, stored = set(code.co_names), set[str]()
    if _STORE_ATTR in code.co_code[::2]:
        stored.update(step.argval for step in instructions(code) if step.opcode == _STORE_ATTR)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_and_stores(constant)
            names |= inner[0]
            stored |= inner[1]
    return frozenset(names), frozenset(stored)
