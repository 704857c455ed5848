"""Results that pytrees do not know, or that torch cannot write as text: by a node of pytrees that rebuilds them.

An exported program gives leaves, and says by a ``TreeSpec`` how they are nested. Text, dtypes, sets, named tuples and
dicts whose keys are tuples have no place there. Each is a :class:`Rebuilt` node instead: its context is text that says
what it is, its children are what it holds.

Invariant: what is made of a node's text and children equals what the program returned. Limits: the values of
``_VALUES``; classes that can be imported. Who loads such a program from a file imports this package. This module stays
where it is: files have its name.
"""

from __future__ import annotations

import enum
import importlib
import json
import math
import pathlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from functionalize._torch import pytree

_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_JSON = (str, int, float, bool, type(None))  # keys that torch's own text of a dict keeps


class Rebuilt:
    """A node of pytrees: unflattened it is no such object, but what its text says."""

    def __init__(self, text: str, parts: Sequence[Any]) -> None:
        self.text, self.parts = text, list(parts)


def rebuilt(value: Any, part: Callable[[Any], Any]) -> Rebuilt | None:
    """The node of a value that needs one; None of others, and of those that no text can say.

    Args:
        value: a result, or a part of one.
        part: what stands for each part of it.

    Example:
        >>> node = rebuilt({(1, "a"): 2.5}, lambda part: part)
        >>> pytree.tree_map(lambda leaf: leaf * 2, node)
        {(1, 'a'): 5.0}
    """
    if type(value) in (int, bool, type(None)) or (type(value) is float and math.isfinite(value)):
        return None
    try:
        what, parts = _parted(value)
    except _UnnamedError:
        return None
    return None if what is None else Rebuilt(json.dumps(what), list(map(part, parts)))


class _UnnamedError(Exception):
    """There is no text for a value."""


def _parted(value: Any) -> tuple[Any, Iterable[Any]]:
    """What a value is, in words of JSON, and its parts; None in place of the words where pytrees know it."""
    kind: Any = type(value)
    if kind in _BY_PARTS:
        return [kind.__name__], _BY_PARTS[kind](value)
    if kind in (dict, OrderedDict, defaultdict):
        if all(type(key) in _JSON for key in value):
            return None, ()
        factory = _encoded(value.default_factory) if kind is defaultdict else None
        return [kind.__name__, list(map(_encoded, value)), factory], value.values()
    if pytree.is_namedtuple_class(kind) or kind.__module__ == "torch.return_types":
        return ["tuple", _class_name(kind)], value
    if isinstance(value, (list, tuple, torch.Tensor)):
        return None, ()
    return ["value", _encoded(value)], ()


_BY_PARTS: dict[type, Callable[[Any], Sequence[Any]]] = {
    set: list,
    frozenset: list,
    slice: attrgetter("start", "stop", "step"),
}
_KINDS: dict[str, Callable[..., Any]] = {"set": set, "frozenset": frozenset, "slice": lambda parts: slice(*parts)}


def _made(parts: Iterable[Any], text: str) -> Any:
    what, *rest = json.loads(text)
    if what in _KINDS:
        return _KINDS[what](list(parts))
    if what == "value":
        return _decoded(rest[0])
    if what == "tuple":
        cls = _class_of(rest[0])
        return cls(*parts) if hasattr(cls, "_fields") else cls(list(parts))  # one of torch's own takes a sequence
    entries = zip(map(_decoded, rest[0]), parts, strict=True)
    if what == "defaultdict":
        return defaultdict(_decoded(rest[1]), entries)
    return OrderedDict(entries) if what == "OrderedDict" else dict(entries)


def steps_of(text: str) -> Sequence[Any] | None:
    """The keys, or the names of attributes, by which a node's children are reached; None where there are none."""
    what, *rest = json.loads(text)
    if what == "tuple":
        return getattr(_class_of(rest[0]), "_fields", None)
    return list(map(_decoded, rest[0])) if what in ("dict", "OrderedDict", "defaultdict") else None


def is_value(text: str) -> bool:
    """Whether a node is a value without parts."""
    return bool(json.loads(text)[0] == "value")


pytree.register_pytree_node(
    Rebuilt,
    lambda node: (node.parts, node.text),
    _made,
    serialized_type_name=f"{__name__}.{Rebuilt.__name__}",
    to_dumpable_context=lambda text: text,
    from_dumpable_context=lambda text: text,
    flatten_with_keys_fn=lambda node: (
        [(pytree.SequenceKey(number), part) for number, part in enumerate(node.parts)],
        node.text,
    ),
)


# Values without parts: by a word, and what JSON keeps


def _class_name(kind: Any) -> str:
    """Where a class is found when it is imported."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        if _class_of(name) is kind:
            return name
    except (ImportError, AttributeError):
        pass
    raise _UnnamedError


def _class_of(name: str) -> Any:
    module, _, path = name.partition(":")
    return attrgetter(path)(importlib.import_module(module))


_Row = tuple[str, Callable[[Any], Any], Callable[[Any], Any]]
_VALUES: dict[Any, _Row] = {
    float: ("float", repr, float),
    complex: ("complex", str, complex),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    range: ("range", lambda value: [value.start, value.stop, value.step], lambda ends: range(*ends)),
    type(...): ("ellipsis", lambda value: None, lambda nothing: ...),
    torch.device: ("device", str, torch.device),
    tuple: ("tuple", lambda items: list(map(_encoded, items)), lambda items: tuple(map(_decoded, items))),
    torch.Size: ("size", list, torch.Size),
    frozenset: ("frozenset", lambda items: list(map(_encoded, items)), lambda items: frozenset(map(_decoded, items))),
    _OF_TORCH: ("torch", lambda value: str(value).removeprefix("torch."), lambda name: getattr(torch, name)),
    enum.Enum: (
        "enum",
        lambda value: [_class_name(type(value)), value.name],
        lambda words: _class_of(words[0])[words[1]],
    ),
    np.generic: (
        "numpy",
        lambda value: [value.dtype.str, value.tobytes().hex()],
        lambda words: np.frombuffer(bytes.fromhex(words[1]), np.dtype(words[0]))[0],
    ),
    pathlib.PurePath: (
        "path",
        lambda value: [_class_name(type(value)), str(value)],
        lambda words: _class_of(words[0])(words[1]),
    ),
    type: ("class", _class_name, _class_of),
}
_OPEN = (enum.Enum, np.generic, pathlib.PurePath, type, _OF_TORCH)  # with the classes that are derived from them
_BY_WORD = {word: decode for word, _, decode in _VALUES.values()}


def _encoded(value: Any) -> Any:
    kind: Any = type(value)
    if kind in (str, int, bool, type(None)):
        return value
    if pytree.is_namedtuple_class(kind):
        return {"named": [_class_name(kind), list(map(_encoded, value))]}
    row = next((row for base, row in _VALUES.items() if base in _OPEN and isinstance(value, base)), _VALUES.get(kind))
    if row is None or (kind is np.void or (isinstance(value, np.generic) and value.dtype.hasobject)):
        raise _UnnamedError
    word, encode, _ = row
    return {word: encode(value)}


def _decoded(text: Any) -> Any:
    if not isinstance(text, dict):
        return text
    ((word, content),) = text.items()
    if word == "named":
        return _class_of(content[0])(*map(_decoded, content[1]))
    return _BY_WORD[word](content)
