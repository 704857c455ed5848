"""Uses of arrays' memory by a program's tensors: refused where a call could not do the same.

A call reads an array in its own memory. What a program makes of an array (`torch.from_numpy`) is a copy in the graph.

Invariant: a refusal has changed nothing. Limits: of arrays that the program makes itself, those that it returns
directly, or in dicts, lists and tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functionalize._torch import pytree
from functionalize.python_state.buffers import ARRAYS, Extent, access_to
from functionalize.refusals.python_objects import ARRAY_MEMORY_GIVEN, ARRAY_MEMORY_MISSED, ARRAY_MEMORY_WRITTEN
from functionalize.transform.borrowed_memory import GIVES, MISSES, WRITES, Borrowed
from functionalize.transform.context import FunctionalizationContext

_REFUSED = {WRITES: ARRAY_MEMORY_WRITTEN, GIVES: ARRAY_MEMORY_GIVEN, MISSES: ARRAY_MEMORY_MISSED}


def refuse_shared(context: FunctionalizationContext, handles: Sequence[Any], returned: Any) -> None:
    """Raise where a program that has run wrote to memory of others, or hands it out.

    ``handles``: the tensors that the caller gets; ``returned``: what the program returned.

    Raises:
        UnsupportedProgramError: a call would write to other memory, or give other memory.
    """
    if context.borrowed is None:
        return
    written = [tensor for tensor, _ in (context.notes.constants or {}).values()]
    borrowed = context.borrowed.found(context.graph, handles, written)
    arrays = [*context.borrowed.held, *pytree.tree_leaves(returned)] if borrowed else []
    for use in borrowed:
        owners = [array for array in arrays if _share(use, array)]
        if owners or use.at is None or use.did == MISSES:
            access = access_to(owners[0], ARRAYS, large=True) if owners else None
            memory = access.name if access is not None else "an array or a file"
            raise _REFUSED[use.did].error(use.at, did=use.did, size=tuple(use.tensor.size()), memory=memory)


def _share(use: Borrowed, array: Any) -> bool:
    access = access_to(array, ARRAYS, large=True)
    extent = None if access is None else access.extent(array)
    return extent is not None and _of(use.tensor).meets(extent)


def _of(tensor: Any) -> Extent:
    storage = tensor.untyped_storage()
    return Extent(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
