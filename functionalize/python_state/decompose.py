"""How Python objects are decomposed: one registry, by class, that walks, snapshots, guards and reconstruction read.

Takes a class, or an object of it. Gives a :class:`Decomposition`: the containers of an object's values, how two objects
are compared, and the parts from which another object is made. A class that is written in Python adds attributes and
slots to the data of a built-in class (items, keys, a number). All of these are read and set without the class's own
methods: neither `__init__` nor `__setattr__` nor pickling code runs. Other built-in classes are read by
``__reduce_ex__``.

Guarantees that reading an object does not change it, and that no class is kept alive. Limits: objects with state that
none of these shows cannot be made again: generators, locks, most objects of extensions.
"""

from __future__ import annotations

import contextvars
import copyreg
import enum
import struct
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse, islice
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from functionalize._torch import containers_of_module
from functionalize._torch.tensors import SYMBOLS
from functionalize.python_state.containers import (
    MAPPINGS,
    ClassAttributes,
    Container,
    ContextValue,
    SetItems,
    ShardRecords,
    SlotsOf,
    ThreadAttributes,
    assign,
    attributes_in_thread,
    copy_of,
    per_class,
)
from functionalize.python_state.ownership import is_of_torch_or_python
from functionalize.python_state.traversal_rules import (
    CONTAINERS,
    OPAQUE,
    PLAIN,
    PLAIN_BASES,
    SCALARS,
    has_shard_records,
    is_value,
)

HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ATTRIBUTES_OF_MODULES = frozenset(torch.nn.Module().__dict__)
_hooks_of = itemgetter(*HOOKS_OF_MODULES)
_is_of_torch = ATTRIBUTES_OF_MODULES.difference({"training"}).__contains__  # a program may give this another value
_NOT_SAVED = "_non_persistent_buffers_set"  # names of a module's buffers that are not in its state_dict
_WHOLE = (*OPAQUE, torch.Tensor, torch.nn.Module, torch.optim.Optimizer)  # compared by identity
# Flags of classes.
_HEAP_TYPE = 1 << 9  # created at run time, as all classes written in Python are
_CLOSED = 1 << 7 | 1 << 8  # cannot be called, or cannot be changed
_READERS = (types.GetSetDescriptorType, types.MemberDescriptorType)  # of attributes, in C
_POINTER = struct.calcsize("P")


# A container that an object consists of, and the keys of its entries that a walk enters. A capture meets thousands.
Entries = tuple[Container, list[Any]]


class Comparison(enum.Enum):
    """How a program distinguishes two objects of a class."""

    VALUE = enum.auto()  # a plain value
    EQUALITY = enum.auto()  # by ``==``, and by its text
    CONTENT = enum.auto()  # items, attributes and slots
    IDENTITY = enum.auto()
    OTHER = enum.auto()  # classes of extensions: arrays by their elements, others by equality or identity


class Part(NamedTuple):
    """One part of an object."""

    step: str  # the last step of its path
    value: Any


Fill = Callable[[Any, Sequence[Any]], None]


def _nothing(made: Any, parts: Sequence[Any]) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of one object, and how another one of its class is made of them: by ``new``, then by ``fill``."""

    new: Callable[[Sequence[Any]], Any]
    first: list[Part] = field(default_factory=list)  # what `new` takes
    fill: Fill = _nothing
    rest: list[Part] = field(default_factory=list)  # what `fill` takes


class Items(NamedTuple):
    """The content of an object, to be compared: in order, or sorted if it has no order."""

    keys: tuple[Any, ...]
    values: Sequence[Any]


@dataclass(frozen=True, eq=False)
class Decomposition:
    """How the objects of one class are decomposed."""

    entries: Callable[[Any], Iterable[Entries]]  # of values that can be replaced
    items: Callable[[Any], Items]  # what is compared
    parts: Callable[[Any], Parts | None]  # to make another object; None if that is impossible
    comparison: Comparison


@per_class
def decomposition_of(cls: type) -> Decomposition:
    """The decomposition of a class, which is computed once."""
    slots = slots_of(cls)
    if issubclass(cls, torch.nn.Module):
        entries: Callable[[Any], Iterable[Entries]] = _entries_of_slotted(slots) if slots else _entries_of_module
    elif issubclass(cls, type):
        entries = _entries([ClassAttributes])
    elif issubclass(cls, contextvars.ContextVar):
        entries = _entries([ContextValue])
    elif has_shard_records(cls):
        entries = _entries([ShardRecords])
    else:
        entries = _entries([*_places(cls)], issubclass(cls, CONTAINERS) and is_of_torch_or_python(cls.__module__))
    items = next((row.items for base, row in _ROWS.items() if row.items is not None and issubclass(cls, base)), None)
    return Decomposition(entries, items or _named_items(slots), _parts(cls), _comparison(cls, slots))


def entries_of(value: Any) -> Iterable[Entries]:
    """The containers of an object's values, each with the keys of the entries that a walk enters."""
    return decomposition_of(type(value)).entries(value)


def items_of(value: Any) -> Items:
    """The keys and the items of a container, or of an object with attributes."""
    return decomposition_of(type(value)).items(value)


def decompose(value: Any) -> Parts | None:
    """The parts from which another object like this one is made; None if that is impossible."""
    return decomposition_of(type(value)).parts(value)


# How values of a class are compared


def _comparison(cls: type, slots: tuple[str, ...]) -> Comparison:
    if issubclass(cls, PLAIN_BASES):
        return Comparison.VALUE
    if is_value(cls):
        return Comparison.EQUALITY
    if issubclass(cls, _WHOLE) or _defines(cls, "__call__"):
        return Comparison.IDENTITY
    if slots or _defines(cls, "__dict__") or issubclass(cls, (*CONTAINERS, tuple, frozenset)):
        return Comparison.CONTENT
    return Comparison.OTHER


def _defines(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__)


# The containers of an object's values

Place = Callable[[Any], Container]  # gives one of an object's containers, or None


def _places(cls: type) -> Iterator[Place]:
    """The containers of items, attributes and slots that objects of a class have."""
    if issubclass(cls, CONTAINERS):
        yield SetItems if issubclass(cls, set) else _itself
    if cls not in CONTAINERS:
        yield ThreadAttributes if issubclass(cls, threading.local) else attributes_of
    slots = slots_of(cls)
    if slots:
        yield lambda value: SlotsOf(value, slots)


def _itself(value: Any) -> Container:
    return value


def _entries(places: Sequence[Place], skips_empty: bool = False) -> Callable[[Any], Iterator[Entries]]:
    def entries(value: Any) -> Iterator[Entries]:
        for place in places:
            container = place(value)
            if container is None or (skips_empty and place is attributes_of and not container):
                continue  # nobody sets a first attribute on a container of a built-in class
            mapping = isinstance(container, MAPPINGS)
            yield container, list(copy_of(container)) if mapping else list(range(len(container)))

    return entries


def _entries_of_module(value: Any) -> list[Entries]:
    """Parameters, buffers and modules; hooks; and the module's own attributes that may reach tensors."""
    content, (parameters, buffers, modules) = value.__dict__, containers_of_module(value)
    return [
        (parameters, [*parameters]),
        (buffers, [*buffers]),
        (modules, [name for name, module in modules.items() if module is not None] if modules else []),
        *((hooks, [*hooks]) for hooks in hooks_in(content)),
        (SetItems(content[_NOT_SAVED]), []),
        (content, [name for name in filterfalse(_is_of_torch, content) if type(content[name]) not in PLAIN]),
    ]


def _entries_of_slotted(slots: tuple[str, ...]) -> Callable[[Any], Iterable[Entries]]:
    """The entries of modules whose class gives them slots."""

    def entries(value: Any) -> Iterable[Entries]:
        held = SlotsOf(value, slots)
        return [*_entries_of_module(value), (held, list(held))]

    return entries


def hooks_in(content: dict[str, Any]) -> list[dict[Any, Any]]:
    """The dicts of hooks in a module's attributes, unless empty."""
    held = _hooks_of(content)
    return [hooks for hooks in held if hooks] if any(held) else []


# What classes written in Python add


def native_class(cls: Any) -> Any:
    """The built-in class to which a class adds at most attributes and slots."""
    return next(base for base in cls.__mro__ if not _is_written_in_python(base))


def _is_written_in_python(cls: Any) -> bool:
    """Whether a class adds only attributes and slots to the data of its base."""
    if not cls.__flags__ & _HEAP_TYPE or cls.__flags__ & _CLOSED:
        return False
    if isinstance(vars(cls).get("__new__"), types.BuiltinFunctionType):
        return False
    slots = sum(isinstance(member, types.MemberDescriptorType) for member in vars(cls).values())
    room = _POINTER * (slots + 2)  # two for `__dict__` and weak references
    return bool(cls.__basicsize__ <= cls.__base__.__basicsize__ + room)


@per_class
def slots_of(cls: type) -> tuple[str, ...]:
    """The names of the slots that a class gives its objects."""
    return tuple(dict.fromkeys(name for base in cls.__mro__ for name in _own_slots(base)))


def _own_slots(cls: type) -> Iterator[str]:
    names = vars(cls).get("__slots__", ())
    for name in (names,) if isinstance(names, str) else names:
        private = name.startswith("__") and not name.endswith("__")
        mangled = f"_{cls.__name__.lstrip('_')}{name}" if private else name
        if isinstance(vars(cls).get(mangled), types.MemberDescriptorType):
            yield mangled


@per_class
def _dict_reader(cls: type) -> Callable[[Any], Any] | None:
    """Python's own reader of the ``__dict__`` of a class's objects, whatever the class shows under this name."""
    if issubclass(cls, threading.local):
        return attributes_in_thread
    named = (vars(base).get("__dict__") for base in cls.__mro__)
    return next((each.__get__ for each in named if isinstance(each, _READERS)), None)


def dict_of(value: Any) -> Any:
    """The ``__dict__`` of an object that nobody computes; None for an object without one."""
    read = _dict_reader(type(value))
    return None if read is None else read(value)


def attributes_of(value: Any) -> Any:
    """The ``__dict__`` of an object, or None."""
    attributes = dict_of(value)
    return attributes if isinstance(attributes, dict) else None


def _named_items(slots: tuple[str, ...]) -> Callable[[Any], Items]:
    """A function that gives the slots and attributes of an object."""

    def items(value: Any) -> Items:
        attributes = attributes_of(value) or {}
        held = {**SlotsOf(value, slots), **attributes} if slots else attributes
        return Items(tuple(held), list(held.values()))

    return items


# What built-in classes keep


def _numbered(items: Iterable[Any]) -> list[Part]:
    return [Part(f"[{index}]", item) for index, item in enumerate(items)]


def _keyed(entries: Iterable[tuple[Any, Any]]) -> list[Part]:
    pairs = ((Part(" (a key)", key), Part(f"[{key_name(key)}]", item)) for key, item in entries)
    return [part for pair in pairs for part in pair]


def _bare(value: Any, cls: type, native: Any) -> Parts:
    return Parts(lambda first: native.__new__(cls))


def _deque(value: Any, cls: type, native: Any) -> Parts:
    length = value.maxlen

    def new(first: Sequence[Any]) -> Any:
        made = native.__new__(cls)
        native.__init__(made, (), length)
        return made

    return Parts(new)


def _tuple(value: Any, cls: type, native: Any) -> Parts:
    return Parts(lambda first: native.__new__(cls, first), _numbered(tuple.__iter__(value)))


def _frozenset(value: Any, cls: type, native: Any) -> Parts:
    return Parts(lambda first: native.__new__(cls, first), _numbered(native.__iter__(value)))


def _defaultdict(value: Any, cls: type, native: Any) -> Parts:
    factory = native.default_factory

    def new(first: Sequence[Any]) -> Any:
        made = native.__new__(cls)
        factory.__set__(made, first[0])
        return made

    return Parts(new, [Part(".default_factory", factory.__get__(value))])


def _scalar(value: Any, cls: type, native: Any) -> Parts:
    plain = native.__getnewargs__(value)
    return Parts(lambda first: native.__new__(cls, *plain))


def key_name(key: Any) -> str:
    """The name of a key in a path."""
    return repr(key) if isinstance(key, SCALARS) else f"a {type(key).__name__}"


def _in_order(value: Any) -> Items:
    return Items((), list(value))


def _sorted(value: Any) -> Items:
    return Items((), sorted(value, key=repr))


def _by_key(value: Any) -> Items:
    return Items(tuple(value), list(value.values()))


@dataclass(frozen=True, eq=False)
class _Row:
    """How objects that are based on a built-in class are made and compared."""

    new: Callable[[Any, type, Any], Parts]  # the first parts, from an object, its class and the built-in class
    items: Callable[[Any], Items] | None = None  # None if only attributes and slots are compared


_ROWS: dict[type, _Row] = {
    list: _Row(_bare, _in_order),
    tuple: _Row(_tuple, _in_order),
    deque: _Row(_deque, _in_order),
    set: _Row(_bare, _sorted),
    frozenset: _Row(_frozenset, _sorted),
    OrderedDict: _Row(_bare, _by_key),
    defaultdict: _Row(_defaultdict, _by_key),
    dict: _Row(_bare, _by_key),
    **dict.fromkeys(SCALARS, _Row(_scalar)),
    object: _Row(_bare),
}


def _parts(cls: type) -> Callable[[Any], Parts | None]:
    """The function that gives the parts of objects of a class."""
    if cls in _SPECIAL:
        return _SPECIAL[cls]
    native = native_class(cls)
    row = _ROWS[tuple] if issubclass(native, tuple) else _ROWS.get(native)
    if row is not None:
        places, new = list(_places(cls)), row.new
        return lambda value: _filled(new(value, type(value), native), places, value)
    if (native.__module__, native.__name__) == ("numpy", "ndarray"):
        return lambda value: _of_array(value) if _has_symbols(value) else _reduced(value)
    return _reduced


def _filled(begun: Parts, places: Sequence[Place], value: Any) -> Parts:
    """The first parts of an object, then the contents of its containers; only the parts hold values."""
    rest, fillers = list[Part](), list[Callable[[Any, Iterable[Any]], None]]()
    for place in places:
        container = place(value)
        if container:
            content = copy_of(container)
            if not isinstance(content, dict):
                rest += _numbered(content)
                filler = partial(_fill_in_order, place, len(content))
            elif place is _itself:
                rest += _keyed(content.items())
                filler = partial(_fill_by_key, len(content))
            else:
                rest += (Part(f".{name}", item) for name, item in content.items())
                filler = partial(_fill_by_name, place, tuple(content))
            fillers.append(filler)

    def fill(made: Any, parts: Sequence[Any]) -> None:
        remaining = iter(parts)
        for filler in fillers:
            filler(made, remaining)

    return Parts(begun.new, begun.first, fill, rest) if rest else begun


def _fill_in_order(place: Place, count: int, made: Any, parts: Iterable[Any]) -> None:
    assign(place(made), list(islice(parts, count)))


def _fill_by_key(count: int, made: Any, parts: Iterable[Any]) -> None:
    flat = list(islice(parts, 2 * count))
    assign(made, dict(zip(flat[::2], flat[1::2], strict=True)))


def _fill_by_name(place: Place, names: tuple[str, ...], made: Any, parts: Iterable[Any]) -> None:
    assign(place(made), dict(zip(names, islice(parts, len(names)), strict=True)))


# Functions and what they close over


def _function(value: types.FunctionType) -> Parts:
    cells, defaults, named = value.__closure__ or (), value.__defaults__, value.__kwdefaults__ or {}
    closed, has_defaults = len(cells), defaults is not None
    code, space, name, doc = value.__code__, value.__globals__, value.__name__, value.__doc__
    qualified, module, hints = value.__qualname__, value.__module__, value.__annotations__
    attributes = vars(value)

    def new(first: Sequence[Any]) -> Any:
        defaults = tuple(first[closed:]) if has_defaults else None
        made = types.FunctionType(code, space, name, defaults, tuple(first[:closed]) if closed else None)
        made.__doc__, made.__qualname__, made.__module__, made.__annotations__ = doc, qualified, module, hints
        return made

    names, others = tuple(named), tuple(attributes)

    def fill(made: Any, parts: Sequence[Any]) -> None:
        if names:
            made.__kwdefaults__ = dict(zip(names, parts, strict=False))
        vars(made).update(zip(others, parts[len(names) :], strict=True))

    first = [Part(f", its variable `{name}`", cell) for name, cell in zip(code.co_freevars, cells, strict=True)]
    first += [Part(".__defaults__", item) for item in defaults or ()]
    rest = [Part(f"'s {key}=", item) for key, item in named.items()]
    rest += [Part(f".{key}", item) for key, item in attributes.items()]
    return Parts(new, first, fill, rest)


def _cell(value: types.CellType) -> Parts:
    def fill(made: Any, parts: Sequence[Any]) -> None:
        made.cell_contents = parts[0]

    try:
        return Parts(lambda first: types.CellType(), [], fill, [Part("", value.cell_contents)])
    except ValueError:  # not filled
        return Parts(lambda first: types.CellType())


def _method(value: types.MethodType) -> Parts:
    parts = [Part(".__func__", value.__func__), Part(".__self__", value.__self__)]
    return Parts(lambda first: types.MethodType(*first), parts)


def _reference(value: Any) -> Parts | None:
    target = value()
    if target is None:
        return Parts(lambda first: value)
    if value.__callback__ is not None:
        return None
    return Parts(lambda first: weakref.ref(first[0]), [Part("()", target)])


_SPECIAL: dict[type, Callable[[Any], Parts | None]] = {
    types.FunctionType: _function,
    types.CellType: _cell,
    types.MethodType: _method,
    weakref.ref: _reference,
}


def _has_symbols(array: Any) -> bool:
    """Whether an array has the dtype object because it contains data-dependent numbers."""
    return array.dtype.hasobject and any(isinstance(item, SYMBOLS) for item in array.flat)


def _of_array(value: Any) -> Parts:
    """The parts of an array of data-dependent numbers, from which a call makes an array of its own numbers."""
    numpy, cls, shape = sys.modules["numpy"], type(value), value.shape

    def make(parts: Sequence[Any]) -> Any:
        return numpy.array(list(parts)).reshape(shape).view(cls)

    return Parts(make, _numbered(value.flat))


# Other built-in classes, as `copyreg` knows them


def _reduced(value: Any) -> Parts | None:
    """The parts that an object's own ``__reduce_ex__`` gives for copies."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reduced = value.__reduce_ex__(4)
    except Exception:
        return None
    if not isinstance(reduced, tuple) or reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        return None  # a name; or attributes alone, without other data that the object may have
    fields: list[Any] = [*reduced, *[None] * (6 - len(reduced))]
    make, args, state, listed, mapped, setter = fields
    added, entries = list(listed or ()), list(mapped or ())
    has_state, count = state is not None, len(added)

    def fill(made: Any, parts: Sequence[Any]) -> None:
        rest = list(parts)
        if has_state:
            _set_state(made, rest.pop(0), setter)
        for item in rest[:count]:
            made.append(item)
        for key, item in zip(rest[count::2], rest[count + 1 :: 2], strict=True):
            made[key] = item

    parts = [] if state is None else [Part(" (its state)", state)]
    parts += [*_numbered(added), *_keyed(entries)]
    return Parts(lambda first: make(*first), [Part(f" (part {n})", item) for n, item in enumerate(args)], fill, parts)


def _set_state(made: Any, state: Any, setter: Callable[[Any, Any], None] | None) -> None:
    """Set the state of an object as unpickling does."""
    if setter is not None:
        setter(made, state)
    elif hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if attributes:
            vars(made).update(attributes)
        for name, item in (slots or {}).items():
            setattr(made, name, item)
