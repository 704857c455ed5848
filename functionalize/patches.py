"""Replaces names of the process for a while. No other module replaces any.

In: rows, each with a name of a module, a class or a dict of globals, and its replacement. Out: a context manager, in
which its thread sees the replacements, and other threads see the originals.

Invariant: a name that is no longer replaced has its original value, also after an interrupt, and in whatever order
several threads began and ended. Limits: all threads see a row with ``shared``, which must distinguish them by itself.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from functionalize.uninterrupted import uninterrupted

ABSENT: Any = object()  # the value of a name that does not exist


class Patch(NamedTuple):
    """One name, and its replacement.

    ``make`` gets the value that this thread sees now, ``ABSENT`` if it sees no value. A replaced function of a module
    is called through one more frame; a replaced method is not.
    """

    owner: Any  # a module, a class, a function, or a dict of globals
    name: str
    make: Callable[[Any], Any]
    shared: bool = False  # whether all threads see it

    @classmethod
    def by(cls, value: Any, owner: Any, name: str, *, shared: bool = False) -> Patch:
        """A name that is replaced by a value, whatever its own value is."""
        return cls(owner, name, lambda _: value, shared)


class Patches:
    """Rows that are installed together, for the thread that enters the context.

    Example:
        >>> import math
        >>> with Patches([Patch(math, "floor", lambda floor: lambda number: floor(number) + 1)]):
        ...     math.floor(2.5)
        3
        >>> math.floor(2.5)
        2
    """

    def __init__(self, rows: Iterable[Patch], later: Callable[[], Iterable[Patch]] = tuple) -> None:
        """``later``: gives the rows that :meth:`install_later` installs."""
        self._rows, self._later = list(rows), later
        self._thread = threading.get_ident()
        self._installed: list[tuple[_Place, int | None]] = []

    def __enter__(self) -> Patches:
        self._thread = threading.get_ident()
        self._install(self._rows)
        return self

    def __exit__(self, *error: object) -> None:
        uninterrupted(self._take_back)

    def install_later(self) -> None:
        """Install the rows that were left for later, once."""
        later, self._later = self._later, tuple
        rows = list(later())
        self._rows += rows
        self._install(rows)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which this thread sees the originals; does nothing unless the rows are installed."""
        if not self._installed:
            yield
            return
        uninterrupted(self._take_back)
        try:
            yield
        finally:
            self._install(self._rows)

    def _install(self, rows: Iterable[Patch]) -> None:
        try:
            with _LOCK:
                for owner, name, make, shared in rows:
                    key = id(owner), name
                    place = _PLACES.get(key)
                    if place is None:
                        place = _PLACES[key] = _Place(owner, name)
                    elif not place.replacements:
                        place.begin()
                    thread = None if shared else self._thread
                    self._installed.append((place, thread))
                    place.install(self, thread, make)
        except BaseException:
            uninterrupted(self._take_back)
            raise

    def _take_back(self) -> None:
        with _LOCK:
            while self._installed:
                place, thread = self._installed[-1]
                place.take_back(self, thread)
                if not (place.replacements or type(place.owner) is types.ModuleType):
                    _PLACES.pop((id(place.owner), place.name), None)
                self._installed.pop()


class _Replacement(NamedTuple):
    """A value in the place of another one, and whose it is."""

    user: Patches
    value: Any


class _Place:
    """A name that is replaced: its own value, and the replacements of each thread."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.replacements: dict[int | None, tuple[_Replacement, ...]] = {}  # by thread, the innermost last
        self._dispatcher: Any = None  # of functions of modules: made once, and again for another function
        self._dispatches = False
        self.own: Any = None
        self.original: Any = None
        self.begin()

    def begin(self) -> None:
        """Read the name's own value, which is not replaced."""
        own = _read(self.owner, self.name)  # ABSENT also where a class inherits it
        if own is not self.own:
            self._dispatcher = None
        self.own = own
        self.original = _inherited(self.owner, self.name) if isinstance(self.owner, type) else own
        self._dispatches = False

    def value(self, thread: int | None) -> Any:
        """The value that a thread sees."""
        replacements = self.replacements.get(thread)
        return self.original if replacements is None else replacements[-1].value

    def install(self, user: Patches, thread: int | None, make: Callable[[Any], Any]) -> None:
        before = self.replacements.get(thread, ())
        value = make(before[-1].value if before else self.original)
        self.replacements[thread] = (*before, _Replacement(user, value))
        if thread is None:
            _write(self.owner, self.name, value)
        elif not self._dispatches:
            self._dispatches = True
            if self._dispatcher is None:
                self._dispatcher = self._dispatching()
            _write(self.owner, self.name, self._dispatcher)

    def take_back(self, user: Patches, thread: int | None) -> None:
        before = self.replacements.get(thread, ())
        alone = len(before) == 1 and before[0].user is user  # as almost always
        kept = () if alone else tuple([replacement for replacement in before if replacement.user is not user])
        if len(kept) == len(before):
            return
        if kept:
            self.replacements[thread] = kept
            if thread is None:
                _write(self.owner, self.name, kept[-1].value)
            return
        if len(self.replacements) == 1:
            _write(self.owner, self.name, self.own)
        del self.replacements[thread]

    def _dispatching(self) -> Any:
        """The object to install: it uses the value that the calling thread sees."""
        find, thread_of = self.value, threading.get_ident
        if isinstance(self.owner, type):
            return _Attribute(self)

        @functools.wraps(self.original)
        def dispatched(*args: Any, **kwargs: Any) -> Any:
            return find(thread_of())(*args, **kwargs)

        return dispatched


class _Attribute:
    """A method or property of a class that is replaced."""

    def __init__(self, place: _Place) -> None:
        self._place = place

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        value = self._place.value(threading.get_ident())
        if type(value) is types.FunctionType:
            return value if instance is None else types.MethodType(value, instance)
        if value is ABSENT:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._place.name!r}")
        bind = getattr(type(value), "__get__", None)
        return value if bind is None else bind(value, instance, owner)


_LOCK = threading.RLock()
_PLACES: dict[tuple[int, str], _Place] = {}


def _read(owner: Any, name: str) -> Any:
    if isinstance(owner, (type, types.ModuleType)):
        return vars(owner).get(name, ABSENT)
    return owner.get(name, ABSENT) if isinstance(owner, dict) else getattr(owner, name)


def _inherited(owner: type, name: str) -> Any:
    return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), ABSENT)


def _write(owner: Any, name: str, value: Any) -> None:
    if type(owner) is types.ModuleType and value is not ABSENT:  # most are
        setattr(owner, name, value)
    elif isinstance(owner, type) and name == "__class__":
        # An assignment would give the class itself another class. Setting `__doc__` makes Python see the change.
        _write(gc.get_referents(vars(owner))[0], name, value)
        owner.__doc__ = owner.__doc__
    elif isinstance(owner, dict):
        owner.pop(name, None) if value is ABSENT else owner.__setitem__(name, value)
    elif value is ABSENT:
        if name in vars(owner):
            delattr(owner, name)
    else:
        setattr(owner, name, value)
