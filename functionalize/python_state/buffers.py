"""How to read and write objects whose state is not in attributes or items: arrays, generators of random numbers.

Invariant: a state that was read can be written back. Limits: the rows below; large arrays are not compared.
"""

from __future__ import annotations

import array
import ctypes
import math
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from functionalize.python_state.ownership import name_of

_MAX_BYTES = 2**20  # of arrays that calls compare


class Extent(NamedTuple):
    """A range of memory: its first address, and the one after its last."""

    first: int
    end: int

    def meets(self, other: Extent) -> bool:
        """Whether both share an address."""
        return self.first < other.end and other.first < self.end


def _extent_of_buffer(value: Any) -> Extent | None:
    with memoryview(value) as view:
        if view.readonly or not view.nbytes or not view.c_contiguous:
            return None
        first = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return Extent(first, first + view.nbytes)


def _extent_of_numpy(value: Any) -> Extent | None:
    first: int = value.__array_interface__["data"][0]
    steps = [(size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)]
    low, high = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
    return Extent(first + low, first + high + value.itemsize) if value.size else None


class Access(NamedTuple):
    """How the state of an object is read, as a value that can be compared, and written back."""

    name: str
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    size: Callable[[Any], float] = lambda value: 0  # in bytes
    extent: Callable[[Any], Extent | None] = lambda value: None  # of memory that tensors may share


def _write_items(value: Any, held: Any) -> None:
    value[:] = held


def _write_numpy(value: Any, held: Any) -> None:
    numpy: Any = sys.modules["numpy"]  # loaded, as there is an array
    value[...] = numpy.frombuffer(held[2], value.dtype).reshape(value.shape)


def _write_state(generator: Any, held: bytes) -> None:
    generator.bit_generator.state = pickle.loads(held)


# By module and name of a class, as not all classes are loaded.
ARRAYS: Mapping[tuple[str, str], Access] = {
    ("builtins", "bytearray"): Access("a bytearray", bytes, _write_items, len, _extent_of_buffer),
    ("builtins", "memoryview"): Access(
        "a memoryview", memoryview.tobytes, _write_items, lambda view: view.nbytes, _extent_of_buffer
    ),
    ("array", "array"): Access(
        "an array.array",
        lambda a: array.array(a.typecode, a),
        _write_items,
        lambda a: len(a) * a.itemsize,
        _extent_of_buffer,
    ),
    ("numpy", "ndarray"): Access(
        "a NumPy array",
        lambda a: (a.shape, a.dtype.str, a.tobytes()),
        _write_numpy,
        lambda a: math.inf if a.dtype.hasobject else a.nbytes,
        _extent_of_numpy,
    ),
}
GENERATORS: Mapping[tuple[str, str], Access] = {
    ("random", "Random"): Access("a random.Random", random.Random.getstate, random.Random.setstate),
    ("numpy.random.mtrand", "RandomState"): Access(
        "a NumPy RandomState", lambda g: pickle.dumps(g.get_state()), lambda g, held: g.set_state(pickle.loads(held))
    ),
    ("numpy.random._generator", "Generator"): Access(
        "a NumPy Generator", lambda g: pickle.dumps(g.bit_generator.state), _write_state
    ),
}


def access_to(value: Any, table: Mapping[tuple[str, str], Access], *, large: bool = False) -> Access | None:
    """The row of a value's class; None if it has no row, or the value is too large and not ``large``."""
    cls = type(value)
    access = table.get(name_of(cls))
    return None if access is None or (not large and access.size(value) > _MAX_BYTES) else access


def held_by(value: Any, table: Mapping[tuple[str, str], Access]) -> Any:
    """The state of a value; None if it cannot be read."""
    access = access_to(value, table)
    return None if access is None else access.read(value)
