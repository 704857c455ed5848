"""The containers of Python values: dicts and lists, variables of functions, slots of objects, items of sets.

Takes a container and a key. Reads and writes entries of all in the same way: :class:`Variable`, :class:`ContextValue`,
:class:`SetItems`, :class:`SlotsOf` and its kin make objects look like a dict or a list. Guarantees
that methods which the class of a container overrides do not run. Limits: Python determines the order of a set.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import types
import weakref
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from operator import attrgetter, is_
from typing import Any, TypeVar

from functionalize._torch.distributed.parallel import shard_records
from functionalize.python_state.ownership import is_of_torch_or_python

Result = TypeVar("Result")


def per_class(find: Callable[[type], Result]) -> Callable[[type], Result]:
    """A cached function of a class: it keeps a result as long as the class lives, and does not keep the class alive."""
    results: dict[int, Result] = {}
    references: dict[int, weakref.ReferenceType[type]] = {}

    def of_class(cls: type) -> Result:
        identity = id(cls)
        try:
            return results[identity]
        except KeyError:
            return remembered(identity, cls)

    def remembered(identity: int, cls: type) -> Result:
        def forget(reference: Any) -> None:
            results.pop(identity, None)
            references.pop(identity, None)

        result = find(cls)
        references[identity] = weakref.ref(cls, forget)
        results[identity] = result
        return result

    return of_class


Container = Any  # a dict, a list, a deque, or a view of the classes below
ABSENT = object()  # in the place of a missing value


class _Items(MutableSequence[Any]):
    """A list that is read and written as a whole."""

    __slots__ = ()

    @abstractmethod
    def get(self) -> list[Any]:
        """All items."""

    @abstractmethod
    def put(self, items: list[Any]) -> None:
        """Replace all items."""

    def __len__(self) -> int:
        return len(self.get())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __getitem__(self, index: Any) -> Any:
        return self.get()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        items = self.get()
        items[index] = value
        self.put(items)

    def __delitem__(self, index: Any) -> None:
        items = self.get()
        del items[index]
        self.put(items)

    def insert(self, index: int, value: Any) -> None:
        items = self.get()
        items.insert(index, value)
        self.put(items)


class Variable(_Items):
    """A closure variable or a global one, as a list of one item; empty while it is unbound."""

    __slots__ = ("_key", "_where")

    def __init__(self, where: Any, key: str | None) -> None:
        """``where``: a cell, or the dict of a module's globals, where the variable is called ``key``."""
        self._where, self._key = where, key

    @property
    def place(self) -> tuple[Any, Any]:
        """The cell and None, or the globals and a name."""
        return self._where, self._key

    def get(self) -> list[Any]:
        value = cell_content(self._where) if self._key is None else self._where.get(self._key, ABSENT)
        return [] if value is ABSENT else [value]

    def put(self, items: list[Any]) -> None:
        if self._key is None:
            if items:
                self._where.cell_contents = items[0]
            else:
                del self._where.cell_contents
        elif items:
            self._where[self._key] = items[0]
        else:
            self._where.pop(self._key, None)


class ContextValue(_Items):
    """The value of a ``ContextVar`` in this context, as a list of one item; empty without a value."""

    __slots__ = ("_variable",)

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    def get(self) -> list[Any]:
        try:
            return [self._variable.get()]
        except LookupError:
            return []

    def put(self, items: list[Any]) -> None:
        for item in items:  # a value cannot be removed
            self._variable.set(item)


class SetItems(_Items):
    """The items of a set, in the order of its iteration."""

    __slots__ = ("members",)

    def __init__(self, items: set[Any]) -> None:
        self.members = items

    def get(self) -> list[Any]:
        return list(self.members)

    def __len__(self) -> int:
        return set.__len__(self.members)

    def put(self, items: list[Any]) -> None:
        set.clear(self.members)
        set.update(self.members, items)

    def holds(self, item: Any) -> bool:
        """Whether a tensor is in the set: tensors hash by identity."""
        return set.__contains__(self.members, item)


_VIEWS_OF_ITEMS = frozenset({Variable, ContextValue, SetItems})


class SlotsOf(MutableMapping[str, Any]):
    """The ``__slots__`` of an object that are set, by name."""

    __slots__ = ("names", "owner")

    def __init__(self, owner: Any, names: Iterable[str]) -> None:
        """``owner``: the object whose slots these are; ``names``: those of all its slots."""
        self.owner, self.names = owner, tuple(names)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if hasattr(self.owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, key: str) -> Any:
        try:
            return object.__getattribute__(self.owner, key)
        except AttributeError as error:
            raise KeyError(key) from error

    def __setitem__(self, key: str, value: Any) -> None:
        object.__setattr__(self.owner, key, value)

    def __delitem__(self, key: str) -> None:
        object.__delattr__(self.owner, key)


class ThreadAttributes(SlotsOf):
    """The attributes of a ``threading.local``: others in each thread."""

    __slots__ = ()

    def __init__(self, owner: Any) -> None:
        super().__init__(owner, ())

    def __iter__(self) -> Iterator[str]:
        return iter([*attributes_in_thread(self.owner)])

    def __getitem__(self, key: str) -> Any:
        return attributes_in_thread(self.owner)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        attributes_in_thread(self.owner)[key] = value

    def __delitem__(self, key: str) -> None:
        del attributes_in_thread(self.owner)[key]


def attributes_in_thread(value: Any) -> dict[str, Any]:
    """The ``__dict__`` that a ``threading.local`` has in this thread."""
    attributes: dict[str, Any] = threading.local.__getattribute__(value, "__dict__")
    return attributes


class ClassAttributes(SlotsOf):
    """The own attributes of a class that are data: neither code nor what Python itself stores there."""

    __slots__ = ()

    def __init__(self, owner: type) -> None:
        super().__init__(owner, ())

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in list(vars(self.owner).items()) if _is_data(name, value))

    def __getitem__(self, key: str) -> Any:
        return vars(self.owner)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        type.__setattr__(self.owner, key, value)

    def __delitem__(self, key: str) -> None:
        type.__delattr__(self.owner, key)


class ShardRecords(SlotsOf):
    """The records that ``fully_shard`` keeps of a module."""

    __slots__ = ("_records",)

    def __init__(self, owner: Any) -> None:
        """``owner``: what the module has from ``fully_shard``."""
        self._records = shard_records(owner)
        super().__init__(owner, self._records)

    def __iter__(self) -> Iterator[str]:
        return (name for name, record in self._records.items() if record.is_there)

    def __getitem__(self, key: str) -> Any:
        record = self._records[key]
        if not record.is_there:
            raise KeyError(key)
        return record.get()

    def __setitem__(self, key: str, value: Any) -> None:
        self._records[key].set(value)

    def __delitem__(self, key: str) -> None:
        self._records[key].drop()

    def clear(self) -> None:
        """Do nothing: an option has some value, and the others decide which further records are there."""


def _is_data(name: str, value: Any) -> bool:
    special = name == "_abc_impl" or (name.startswith("__") and name.endswith("__"))
    if special or isinstance(value, types.ModuleType):
        return False
    cls = type(value)
    return (
        cls in DESCRIPTORS
        or issubclass(cls, type)
        or not hasattr(cls, "__get__")
        or not is_of_torch_or_python(cls.__module__)
    )


class CodeOf(SlotsOf):
    """The attributes that decide which code runs, by name: a function's code and defaults, a class's methods, a class.

    A name may contain dots, for attributes of attributes.
    """

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        try:
            return attrgetter(key)(self.owner)
        except AttributeError as error:
            raise KeyError(key) from error


def code_now(owner: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The values of such attributes, in order; ``ABSENT`` for missing ones."""
    try:
        values: tuple[Any, ...] = _reader(names)(owner)
    except AttributeError:
        return tuple(read(CodeOf(owner, names), name) for name in names)
    return values[:-1]


@functools.lru_cache(maxsize=1 << 12)
def _reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*names, names[0])  # of more than one name, it gives a tuple


class BoundBy(SlotsOf):
    """The arguments that a ``functools.partial`` binds by position: one tuple, under the name ``args``."""

    __slots__ = ()

    def __init__(self, owner: functools.partial[Any]) -> None:
        super().__init__(owner, ("args",))

    def __setitem__(self, key: str, value: Any) -> None:
        owner = self.owner
        owner.__setstate__((owner.func, value, owner.keywords, owner.__dict__))


DESCRIPTORS = (functools.partialmethod, functools.singledispatchmethod)  # Python's, which hold objects of the program
MAPPINGS = (dict, SlotsOf)  # containers whose entries have keys; entries of other containers have positions


def cell_content(cell: types.CellType) -> Any:
    """The value of a closure variable; ``ABSENT`` while it is unbound."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled, or deleted
        return ABSENT


def read(container: Container, key: Any) -> Any:
    """The current value of an entry, or ``ABSENT``; a cell has one entry, whatever the key."""
    if type(container) is dict:  # most are
        return container.get(key, ABSENT)
    if isinstance(container, types.CellType):
        return cell_content(container)
    if isinstance(container, dict):
        return dict.get(container, key, ABSENT)
    if isinstance(container, SlotsOf):
        try:
            return container[key]
        except KeyError:
            return ABSENT
    return container[key] if key < len(container) else ABSENT


def identity(container: Container) -> Any:
    """A key for a container: the same for all views of an object's slots, the identity for other containers."""
    return (type(container), id(container.owner)) if isinstance(container, SlotsOf) else id(container)


def place_of(container: Container, key: Any) -> tuple[Any, Any]:
    """The container and key of an entry, which are the same for all views of a variable."""
    return container.place if type(container) is Variable else (container, key)


def entry(container: Container, key: Any) -> Any:
    """The value of an entry that exists.

    Raises:
        LookupError: the entry does not exist.
    """
    if type(container) is dict or not isinstance(container, dict):  # most are
        return container[key]
    value = dict.get(container, key, ABSENT)  # its class may make missing entries (`__missing__`)
    if value is ABSENT:
        raise KeyError(key)
    return value


def write(container: Container, key: Any, value: Any) -> None:
    """Set the value of an entry."""
    if type(container) is dict:  # most are
        container[key] = value
    elif isinstance(container, dict):
        _dict_of(container).__setitem__(container, key, value)
    else:
        container[key] = value


def remove(container: Container, key: Any) -> None:
    """Remove an entry of a mapping."""
    if isinstance(container, dict):
        _dict_of(container).__delitem__(container, key)
    else:
        del container[key]


def _dict_of(container: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The built-in class whose methods read and write a dict."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


def copy_of(container: Container) -> Any:
    """A copy of a container's content."""
    cls = type(container)
    if cls is dict:
        return container.copy()
    if cls in _VIEWS_OF_ITEMS:
        return container.get()
    if isinstance(container, dict):
        return dict(_dict_of(container).items(container))
    if isinstance(container, SlotsOf):
        return dict(container)
    return list.copy(container) if isinstance(container, list) else list(container)


def unchanged(container: Container, content: Any) -> bool:
    """Whether a container still holds the very objects of its copy, in the same order."""
    if type(container) is dict:
        return (
            len(container) == len(content)
            and all(map(is_, container, content))
            and all(map(is_, container.values(), content.values()))
        )
    now = copy_of(container)
    if isinstance(now, dict):
        return unchanged(now, content)
    return len(now) == len(content) and all(map(is_, now, content))


def assign(container: Container, content: Any) -> None:
    """Replace the content of a container, in the order of the new content."""
    if isinstance(container, dict):
        cls = _dict_of(container)
        cls.clear(container)
        for key, value in content.items():
            cls.__setitem__(container, key, value)
    elif isinstance(container, SlotsOf):
        container.clear()
        container.update(content)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), content)
    elif isinstance(container, deque):
        deque.clear(container)
        deque.extend(container, content)
    else:
        container[:] = content
