"""The core ATen set, and how the table of a backend covers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from functionalize._torch.decompositions import decomposition_of
from functionalize.backends.arrays.registry import view_of
from functionalize.backends.decompositions.own import DECOMPOSITIONS
from functionalize.ops.tables import row

# Of the core set, what no table of a backend without sizes by data can have.
SIZED_BY_DATA = {"aten::nonzero": "how many elements its result has is told by the data alone"}
OF_STRIDES = {
    "aten::sym_storage_offset": "a value has no storage: torch answers it when the program is captured",
    "aten::sym_stride.int": "a value has no strides: torch answers it when the program is captured",
}


def core_operators() -> Iterator[Any]:
    """The operators that torch tags as core, but for those that write."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):  # `dir(torch.ops.aten)` has those that somebody used
        namespace, _, name = name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten":
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if torch.Tag.core in op.tags and not row(op).written:
                yield op


def coverage(rows: Mapping[Any, Any]) -> dict[str, str]:
    """By operator of the core set, how it is computed: by a row, by a decomposition, or why it is not."""
    found = {}
    for op in core_operators():
        name = op.name()
        if op in rows or view_of(op) in rows:
            found[name] = "row"
        elif name in SIZED_BY_DATA | OF_STRIDES:
            found[name] = f"refused: {(SIZED_BY_DATA | OF_STRIDES)[name]}"
        else:
            found[name] = "missing" if op not in DECOMPOSITIONS and decomposition_of(op) is None else "decomposed"
    return found
