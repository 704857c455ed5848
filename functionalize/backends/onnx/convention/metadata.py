"""How a program in an ONNX file is called: what its inputs and outputs are to its caller, kept in the file's metadata.

Invariant: what is written is read back equal. Limits: nestings that ``torch.utils`` can write as text; objects of
classes of other packages are found by importing these.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch

from functionalize._torch import pytree
from functionalize.backends.onnx.convention.sizes import Sizes

KEY, FORMAT = "functionalize", 4
ELEMENTS: dict[torch.dtype, int] = {  # ONNX's numbers for types
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.int16: onnx.TensorProto.INT16,
    torch.int32: onnx.TensorProto.INT32,
    torch.int64: onnx.TensorProto.INT64,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.bool: onnx.TensorProto.BOOL,
}


@dataclass
class Argument:
    """A leaf of the arguments: an input's name, or a value that each call must pass."""

    name: str
    value: Any = None
    constant: bool = False


@dataclass
class State:
    """A tensor that is kept between calls: an input, and the output that has its new value."""

    target: str
    input: str
    output: str
    dtype: str
    shape: list[int]
    initial: str | None = None  # the entry of the metadata, or the initializer, of its first value; None: zeros
    in_place: bool = False  # whether the output may lie where the input does


@dataclass
class Result:
    """A leaf of what a call returns: an output, of ``kind`` ``tensor`` or ``number``, or a constant, a ``value``."""

    kind: str
    name: str | None = None  # of the output
    value: Any = None
    same_as: str | None = None  # the argument, or the earlier result, that is the very same tensor


@dataclass
class Check:
    """A condition that the data of a call must meet: an output, and what is said where it is false."""

    output: str
    message: str


@dataclass
class Layout:
    """How an argument must lie in memory: in a memory format, at an offset, or with strides."""

    argument: str
    look: str | int | list[int]


@dataclass
class Convention:
    """All of it."""

    in_spec: str = ""
    out_spec: str = ""
    names: list[str] = field(default_factory=list)  # of the arguments
    arguments: list[Argument] = field(default_factory=list)
    state: list[State] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    writes: dict[str, str] = field(default_factory=dict)  # arguments that are written: the outputs with the new values
    sizes: Sizes = field(default_factory=Sizes)  # of arguments, where some may differ from call to call
    shared: list[list[Any]] = field(default_factory=list)  # arguments that share memory, and how far they lie apart

    @property
    def passed(self) -> list[str]:
        """The names of inputs of the graph."""
        return [one.name for one in self.arguments if not one.constant] + [one.input for one in self.state]

    @property
    def read(self) -> list[str]:
        """The names of outputs of the graph that a call of the original's kind reads."""
        results = [one.name for one in self.results if one.name is not None and one.same_as is None]
        return [*(one.output for one in self.state), *self.writes.values(), *results, *(c.output for c in self.checks)]

    def text(self) -> str:
        """As it stands in a file."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def parse(cls, text: str) -> Convention:
        """Read it.

        Raises:
            ValueError: another version of this package wrote it.
        """
        data = json.loads(text)
        written = data.pop("format", None)
        if written != FORMAT:
            raise ValueError(
                f"another version of functionalize wrote the file: its format is {written}, but this version reads "
                f"{FORMAT}\n"
                "    try  write it again with to_onnx, or run it with the version that wrote it"
            )
        kinds: dict[str, Any] = {"arguments": Argument, "state": State, "results": Result, "checks": Check}
        kinds["layouts"] = Layout
        for name, kind in kinds.items():
            data[name] = [kind(**one) for one in data[name]]
        data["sizes"] = Sizes(**data["sizes"])
        return cls(**data)


def spec_of(text: str) -> pytree.TreeSpec:
    """A nesting from its text; what registers its classes is imported.

    Raises:
        ValueError: a class is registered by nobody.
    """
    for name in sorted(set(_types(json.loads(text)))):
        try:
            importlib.import_module(name.rpartition(".")[0])
        except ModuleNotFoundError as error:
            raise ValueError(
                f"the program's arguments or results contain objects of class {name}\n    try  install {error.name}"
            ) from error
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise ValueError(f"the program's arguments or results contain objects of an unknown class: {error}") from error


def _types(data: Any) -> Any:
    if isinstance(data, list):
        for item in data:
            yield from _types(item)
    elif isinstance(data, dict):
        kind = data.get("type")
        if isinstance(kind, str) and "." in kind:
            yield kind
        for item in data.values():
            yield from _types(item)
