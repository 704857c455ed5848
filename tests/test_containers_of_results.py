"""What programs take and return, on every route: containers, their keys, and values that are no tensors.

A route gives what the program returns, or refuses it: never an internal object, another order, or another container.
To JAX a container is the nearest that it has: see ``_on_jax``.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize._torch import pytree

Program = Callable[..., Any]
Route = Callable[[Program, tuple[Any, ...], Path], Program]


class Pair(NamedTuple):
    first: Any
    second: Any


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 3


@dataclasses.dataclass
class Output:
    logits: Any
    hidden: Any = None
    note: str = "n"


@dataclasses.dataclass
class Registered:
    logits: Any
    hidden: Any


pytree.register_pytree_node(
    Registered,
    lambda value: ([value.logits, value.hidden], None),
    lambda parts, _: Registered(*parts),
    serialized_type_name=f"{__name__}.Registered",
)


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept: Any) -> None:
        self.kept = kept


class Items(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, **items: Any) -> None:
        self.items_of_it = items

    def __getitem__(self, key: str) -> Any:
        return self.items_of_it[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of_it)

    def __len__(self) -> int:
        return len(self.items_of_it)


class Named(dict[str, Any]):
    """A dict of a class of the program's."""


def captured(program: Program, args: tuple[Any, ...], folder: Path) -> Program:
    return capture(program, args)


def module(program: Program, args: tuple[Any, ...], folder: Path) -> Program:
    exported: Program = capture(program, args).to_exported_program().module()
    return exported


def saved(program: Program, args: tuple[Any, ...], folder: Path) -> Program:
    path = folder / "program.pt2"
    torch.export.save(capture(program, args).to_exported_program(), path)
    loaded: Program = torch.export.load(path).module()
    return loaded


def onnx(program: Program, args: tuple[Any, ...], folder: Path) -> Program:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from functionalize.backends.onnx import load

    loaded: Program = load(capture(program, args).to_onnx(folder / "program.onnx"))
    return loaded


def _from_jax(value: Any) -> Any:
    is_array = hasattr(value, "__array__") and not isinstance(value, (Tensor, np.generic))
    return torch.from_numpy(np.array(value)) if is_array else value


def _to_jax(args: Any) -> Any:
    import jax.numpy as jnp

    return pytree.tree_map(lambda leaf: jnp.asarray(leaf.numpy()) if isinstance(leaf, Tensor) else leaf, args)


def jax(program: Program, args: tuple[Any, ...], folder: Path) -> Program:
    pytest.importorskip("jax")
    exported = capture(program, args).to_jax()

    def run(*args: Any) -> Any:
        return pytree.tree_map(_from_jax, exported(exported.initial_state, *_to_jax(args))[1])

    return run


def stablehlo(program: Program, args: tuple[Any, ...], folder: Path) -> Program:
    pytest.importorskip("jax")
    from functionalize.backends.jax.stablehlo import load

    loaded = load(capture(program, args).to_stablehlo(folder / "program.stablehlo"))
    return lambda *args: pytree.tree_map(_from_jax, loaded(*_to_jax(args)))


def jaxified(program: Program, args: tuple[Any, ...], folder: Path) -> Program:
    pytest.importorskip("jax")
    from functionalize.backends.jax import jaxify

    function = jaxify(program)
    return lambda *args: pytree.tree_map(_from_jax, function(*_to_jax(args)))


TORCH: tuple[Route, ...] = (captured, module, saved, onnx)
JAX: tuple[Route, ...] = (jax, stablehlo, jaxified)

RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x + 1, x * 2),
    "list": lambda x: [x + 1, [x * 2]],
    "empty": lambda x: (x + 1, [], (), {}, None),
    "dict": lambda x: {"b": x + 1, "a": x * 2},
    "integer-keys": lambda x: {2: x + 1, 1: x * 2},
    "tuple-keys": lambda x: {(0, "a"): x + 1, (0, "b"): {(1,): x * 2}},
    "mixed-keys": lambda x: {"b": x + 1, 1: x * 2, None: x - 1, (1, 2): x, 2.5: x + 3},
    "bool-keys": lambda x: {True: x + 1, False: x * 2},
    "enum-keys": lambda x: {Color.RED: x + 1, Level.LOW: x * 2},
    "dtype-keys": lambda x: {torch.float32: x + 1, torch.device("cpu"): x * 2},
    "ordered": lambda x: OrderedDict([("b", x + 1), ("a", x * 2)]),
    "ordered-tuple-keys": lambda x: OrderedDict([((1, 0), x + 1), ((0, 1), x * 2)]),
    "defaultdict": lambda x: defaultdict(list, b=[x + 1], a=[x * 2]),
    "defaultdict-integer-keys": lambda x: defaultdict(list, {4: [x + 1], 3: [x * 2]}),
    "deque": lambda x: deque([x + 1, x * 2]),
    "deque-maxlen": lambda x: deque([x + 1, x * 2, x], maxlen=2),
    "nested-deque": lambda x: {"b": deque([(x + 1, deque())])},
    "namedtuple": lambda x: Pair(x + 1, {"b": x * 2}),
    "return-types": lambda x: x.max(0),
    "nested-return-types": lambda x: {"b": torch.sort(x, dim=0), "a": [x.min(0)]},
    "registered": lambda x: Registered(x + 1, [x * 2]),
    "text": lambda x: {"y": x + 1, "kind": "mean"},
    "values": lambda x: (x + 1, 2, 2.5, True, None, "text", float("inf")),
    "enum": lambda x: (x + 1, Color.RED, Level.LOW),
    "dtype": lambda x: (x + 1, x.dtype, x.device, torch.strided),
    "slice": lambda x: (x + 1, slice(1, None)),
    "slice-of-size": lambda x: (x + 1, slice(0, x.shape[0])),
    "numpy-scalar": lambda x: (x + 1, np.float32(2.5), np.int64(3)),
    "path": lambda x: (x + 1, pathlib.PurePosixPath("a/b")),
    "bytes-range-complex": lambda x: (x + 1, b"ab", range(3), 1 + 2j, ...),
    "size": lambda x: (x + 1, x.shape),
    "set-of-text": lambda x: (x + 1, {"a"}, frozenset({1})),
    "class": lambda x: (x + 1, Pair),
    "no-tensor": lambda x: {"kind": "mean", (1, 2): 3},
    "argument": lambda x: {(1, 0): x, "y": x + 1},
}
# Objects: to exported programs and JAX the tensors that they hold, by name.
OBJECTS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": lambda x: Output(x + 1, [x * 2]),
    "namespace": lambda x: types.SimpleNamespace(b=x + 1, a=x * 2),
    "slots": lambda x: Slotted(x + 1),
    "mapping": lambda x: Items(b=x + 1, a=x * 2),
    "user-dict": lambda x: UserDict(b=x + 1, a=x * 2),
    "dict-of-a-class": lambda x: Named(b=x + 1, a=x * 2),
    "set-of-tensors": lambda x: {x + 1},
    "nested-dataclass": lambda x: {"b": [Output(x + 1)], "a": Pair(x * 2, Output(x))},
    "dataclass-in-deque": lambda x: deque([Output(x + 1)]),
}
