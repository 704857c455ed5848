"""What an object of Python consists of, and how another one is made of such parts.

A class that is written in Python adds attributes to what a built-in class keeps: items, keys, a number. Both are
read, and set, below the class's own methods, so that neither `__init__` nor `__setattr__` nor pickling code of it has
a say: what is made has the attributes that the object has. Other built-in classes are asked by ``__reduce_ex__``.

Invariant: nothing is changed by being looked at. Limits: objects whose class keeps state where neither shows it have no
anatomy: generators, locks, most objects of extensions.
"""

from __future__ import annotations

import copyreg
import functools
import struct
import sys
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from functionalize._torch.tensors import SYMBOLS

Parts = list[tuple[str, Any]]  # each with the step that leads to it
Fill = Callable[[Any, Sequence[Any]], None]
# Flags of classes.
_HEAP_TYPE = 1 << 9  # made at run time, as all that are written in Python
_CLOSED = 1 << 7 | 1 << 8  # not to be called, or not to be changed: none is
_POINTER = struct.calcsize("P")
_SCALARS = (int, float, complex, str, bytes)


def _nothing(made: Any, parts: Sequence[Any]) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of one object, and what makes another one of its class of them: ``new``, and then ``fill``."""

    new: Callable[[Sequence[Any]], Any]
    first: Parts = field(default_factory=list)  # what `new` takes
    fill: Fill = _nothing
    rest: Parts = field(default_factory=list)  # what `fill` takes


def anatomy_of(value: Any) -> Anatomy | None:
    """What a value consists of; None where that cannot be told."""
    kind: Any = type(value)
    special = _SPECIAL.get(kind)
    if special is not None:
        return special(value)
    native = native_class(kind)
    content = next((made for base, made in _CONTENTS if native is base), None)
    if (native.__module__, native.__name__) == ("numpy", "ndarray") and _has_numbers_of_the_data(value):
        content = _array
    if content is None and issubclass(native, tuple):
        content = _tuple
    if content is None:
        return _reduced(value)
    return _with_attributes(value, content(value, kind, native))


@functools.cache
def native_class(kind: Any) -> Any:
    """The built-in class that a class adds attributes to, at most."""
    return next(base for base in kind.__mro__ if not is_written_in_python(base))


@functools.cache
def is_written_in_python(kind: Any) -> bool:
    """Whether a class keeps nothing but attributes beside what its base keeps."""
    if not kind.__flags__ & _HEAP_TYPE or kind.__flags__ & _CLOSED:
        return False
    if isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType):
        return False
    slots = sum(isinstance(member, types.MemberDescriptorType) for member in vars(kind).values())
    room = _POINTER * (slots + 2)  # and a `__dict__`, and weak references
    return bool(kind.__basicsize__ <= kind.__base__.__basicsize__ + room)


# Attributes


@functools.cache
def _slots(kind: Any) -> tuple[tuple[str, Any], ...]:
    """The members of ``__slots__``."""
    return tuple(
        (name, member)
        for base in kind.__mro__
        if is_written_in_python(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    )


def attributes_of(value: Any) -> Any:
    """The ``__dict__`` of an object; None if it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _filled_slots(value: Any) -> Iterable[tuple[str, Any, Any]]:
    kind: Any = type(value)
    for name, member in _slots(kind):
        try:
            yield name, member, member.__get__(value)
        except AttributeError:  # not set
            continue


def _with_attributes(value: Any, content: Anatomy) -> Anatomy:
    attributes, slots = attributes_of(value) or {}, list(_filled_slots(value))
    if not (attributes or slots):
        return content
    names, members = tuple(attributes), [member for _, member, _ in slots]
    own, fill_content = len(content.rest), content.fill

    def fill(made: Any, parts: Sequence[Any]) -> None:
        fill_content(made, parts[:own])
        if names:
            object.__getattribute__(made, "__dict__").update(zip(names, parts[own:], strict=False))
        for member, part in zip(members, parts[own + len(names) :], strict=True):
            member.__set__(made, part)

    rest = [(f".{name}", item) for name, item in [*attributes.items(), *((name, item) for name, _, item in slots)]]
    return Anatomy(content.new, content.first, fill, [*content.rest, *rest])


# What built-in classes keep


def _items(items: Iterable[Any]) -> Parts:
    return [(f"[{index}]", item) for index, item in enumerate(items)]


def _entries(entries: Iterable[tuple[Any, Any]]) -> Parts:
    return [part for key, item in entries for part in ((" (a key)", key), (f"[{key_name(key)}]", item))]


def _object(value: Any, kind: type, native: Any) -> Anatomy:
    return Anatomy(lambda first: native.__new__(kind))


def _list(value: Any, kind: type, native: Any) -> Anatomy:
    return Anatomy(lambda first: native.__new__(kind), [], native.extend, _items(native.__iter__(value)))


def _set(value: Any, kind: type, native: Any) -> Anatomy:
    return Anatomy(lambda first: native.__new__(kind), [], native.update, _items(native.__iter__(value)))


def _deque(value: Any, kind: type, native: Any) -> Anatomy:
    length = value.maxlen

    def new(first: Sequence[Any]) -> Any:
        made = native.__new__(kind)
        native.__init__(made, (), length)
        return made

    return Anatomy(new, [], native.extend, _items(native.__iter__(value)))


def _tuple(value: Any, kind: type, native: Any) -> Anatomy:
    return Anatomy(lambda first: native.__new__(kind, first), _items(tuple.__iter__(value)))


def _frozenset(value: Any, kind: type, native: Any) -> Anatomy:
    return Anatomy(lambda first: native.__new__(kind, first), _items(native.__iter__(value)))


def _dict(value: Any, kind: type, native: Any) -> Anatomy:
    def fill(made: Any, parts: Sequence[Any]) -> None:
        for key, item in zip(parts[::2], parts[1::2], strict=True):
            native.__setitem__(made, key, item)

    return Anatomy(lambda first: native.__new__(kind), [], fill, _entries(native.items(value)))


def _defaultdict(value: Any, kind: type, native: Any) -> Anatomy:
    content, factory = _dict(value, kind, dict), native.default_factory

    def new(first: Sequence[Any]) -> Any:
        made = native.__new__(kind)
        factory.__set__(made, first[0])
        return made

    return Anatomy(new, [(".default_factory", factory.__get__(value))], content.fill, content.rest)


def _scalar(value: Any, kind: type, native: Any) -> Anatomy:
    plain = native.__getnewargs__(value)
    return Anatomy(lambda first: native.__new__(kind, *plain))


def key_name(key: Any) -> str:
    """What a key is called on a path."""
    return repr(key) if isinstance(key, (*_SCALARS, bool)) else f"a {type(key).__name__}"


_CONTENTS: tuple[tuple[type, Callable[[Any, type, Any], Anatomy]], ...] = (
    (object, _object),
    (list, _list),
    (dict, _dict),
    (OrderedDict, _dict),
    (defaultdict, _defaultdict),
    (set, _set),
    (frozenset, _frozenset),
    (deque, _deque),
    *((scalar, _scalar) for scalar in _SCALARS),
)


# Functions and what they close over


def _function(value: types.FunctionType) -> Anatomy:
    cells, defaults, named = value.__closure__ or (), value.__defaults__, value.__kwdefaults__ or {}
    closed, has_defaults = len(cells), defaults is not None
    code, space, name, doc = value.__code__, value.__globals__, value.__name__, value.__doc__
    qualified, module, hints = value.__qualname__, value.__module__, value.__annotations__
    attributes = vars(value)

    def new(first: Sequence[Any]) -> Any:
        given = tuple(first[closed:]) if has_defaults else None
        made = types.FunctionType(code, space, name, given, tuple(first[:closed]) if closed else None)
        made.__doc__, made.__qualname__, made.__module__, made.__annotations__ = doc, qualified, module, hints
        return made

    names, others = tuple(named), tuple(attributes)

    def fill(made: Any, parts: Sequence[Any]) -> None:
        if names:
            made.__kwdefaults__ = dict(zip(names, parts, strict=False))
        vars(made).update(zip(others, parts[len(names) :], strict=True))

    first = [(f", its variable `{name}`", cell) for name, cell in zip(code.co_freevars, cells, strict=True)]
    first += [(".__defaults__", item) for item in defaults or ()]
    rest = [*((f"'s {key}=", item) for key, item in named.items()), *((f".{k}", v) for k, v in attributes.items())]
    return Anatomy(new, first, fill, rest)


def _cell(value: types.CellType) -> Anatomy:
    def fill(made: Any, parts: Sequence[Any]) -> None:
        made.cell_contents = parts[0]

    try:
        return Anatomy(lambda first: types.CellType(), [], fill, [("", value.cell_contents)])
    except ValueError:  # not filled
        return Anatomy(lambda first: types.CellType())


def _method(value: types.MethodType) -> Anatomy:
    parts = [(".__func__", value.__func__), (".__self__", value.__self__)]
    return Anatomy(lambda first: types.MethodType(*first), parts)


def _reference(value: Any) -> Anatomy | None:
    target = value()
    if target is None:
        return Anatomy(lambda first: value)
    if value.__callback__ is not None:
        return None
    return Anatomy(lambda first: weakref.ref(first[0]), [("()", target)])


_SPECIAL: dict[type, Callable[[Any], Anatomy | None]] = {
    types.FunctionType: _function,
    types.CellType: _cell,
    types.MethodType: _method,
    weakref.ref: _reference,
}


def _has_numbers_of_the_data(array: Any) -> bool:
    """Whether an array is one of objects because data-dependent numbers are among them."""
    return array.dtype.hasobject and any(isinstance(item, SYMBOLS) for item in array.flat)


def _array(value: Any, kind: Any, native: Any) -> Anatomy:
    """Of an array of such numbers, which is what NumPy makes of those of a call."""
    numpy, shape = sys.modules["numpy"], value.shape

    def make(parts: Sequence[Any]) -> Any:
        return numpy.array(list(parts)).reshape(shape).view(kind)

    return Anatomy(make, [(f"[{number}]", item) for number, item in enumerate(value.flat)])


# Other built-in classes, as `copyreg` knows them


def _reduced(value: Any) -> Anatomy | None:
    """By what an object says of itself for copies."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reduced = value.__reduce_ex__(4)
    except Exception:
        return None
    if not isinstance(reduced, tuple) or reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        return None  # a name; or it has attributes at most, and says nothing of what else it keeps
    given: list[Any] = [*reduced, *[None] * (6 - len(reduced))]
    make, args, state, listed, mapped, setter = given
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

    parts: Parts = [] if state is None else [(" (its state)", state)]
    parts += [*_items(added), *_entries(entries)]
    return Anatomy(lambda first: make(*first), [(f" (part {n})", item) for n, item in enumerate(args)], fill, parts)


def _set_state(made: Any, state: Any, setter: Callable[[Any, Any], None] | None) -> None:
    """As unpickling does."""
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
