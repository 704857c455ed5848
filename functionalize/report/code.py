"""A graph as lines of code: one a node, in the words of the user's program rather than those of the dispatcher.

Invariant: each node gives one line. Limits: a list of more than a dozen arguments is cut short.
"""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import OpOverload
from functionalize.aliasing.geometry import hint

_DTYPE = re.compile(r"^(b?[fiuc])[a-z]*(\d.*)$")
_MANY = 12


def code_of(node: Node) -> str:
    """What a node computes: ``aten.add(x, 1)``."""
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem:
        return f"{argument(node.args[0])}[{argument(node.args[1])}]"
    given = [argument(arg) for arg in node.args] + [f"{name}={argument(arg)}" for name, arg in node.kwargs.items()]
    return f"{op_name(node.target)}({', '.join(given)})"


def op_name(op: Any) -> str:
    """``aten.add`` for ``aten.add.Tensor``: the arguments tell the overload."""
    text = str(op) if isinstance(op, (str, OpOverload)) else getattr(op, "__name__", str(op))
    parts = text.split(".")
    return ".".join(parts[:2]) if len(parts) == 3 else text


def argument(value: Any) -> str:
    """An argument of a call."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (list, tuple)):
        shown = [argument(item) for item in value[:_MANY]]
        if len(value) > _MANY:
            shown.append(f"… {len(value) - _MANY} more")
        return f"[{', '.join(shown)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {argument(item)}" for key, item in value.items()) + "}"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if type(value) is int and value == sys.maxsize:
        return "end"  # of a slice that has none
    return repr(str(value)) if isinstance(value, (str, torch.device)) else str(value)


def dtype_name(dtype: Any) -> str:
    """``f32`` for ``torch.float32``."""
    return _DTYPE.sub(r"\1\2", str(dtype).removeprefix("torch."))


def look_of(value: Any) -> str:
    """What a value looks like: ``f32[2,3]``."""
    if isinstance(value, torch.Tensor):
        return place_of(value.dtype, value.size())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(look_of, value))})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(value).__name__.removeprefix("Sym").lower()
    return "" if value is None else repr(value)


def place_of(dtype: Any, size: Any, stride: Any = None, offset: Any = 0) -> str:
    """A place in a storage: where it is dense and at the start, dtype and size say it all."""
    text = f"{dtype_name(dtype)}[{','.join(map(str, size))}]"
    if stride is not None and not _dense(size, stride):
        text += f" strides {','.join(map(str, stride)) or '-'}"
    return text if isinstance(offset, int) and offset == 0 else f"{text} at {offset}"


def _dense(size: Any, stride: Any) -> bool:
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if hint(length) != 1 and hint(step) != expected:
            return False
        expected *= hint(length)
    return True


def bytes_of(value: Any) -> int:
    """How many bytes a value's elements take; of sizes that are symbols, their hints."""
    if isinstance(value, torch.Tensor):
        return elements(value.size()) * value.dtype.itemsize
    return sum(map(bytes_of, value)) if isinstance(value, (list, tuple)) else 0


def elements(size: Any) -> int:
    """How many there are in a tensor of a size."""
    return math.prod(map(hint, size))


def size_text(count: int | None) -> str:
    """``1.5 KiB`` for 1536."""
    if count is None:
        return ""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    value = count / 1024**power
    return f"{value:{'.0f' if value >= 999.5 else '.3g'}} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
