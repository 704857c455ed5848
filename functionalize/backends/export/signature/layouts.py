"""The dtypes of arguments, and how they lie in memory where the results depend on it: asserted in an exported graph.

A captured program compares the dtypes and strides of each call. An exported one would run on any. A conversion to a
dtype that a tensor has is in no graph. Most programs compute the same with other strides; not so where one asks for
them, or writes what ``reshape`` and its like give, which is a view or a copy by these.

Invariant: assertions are of arguments alone; all else follows. Limits: torch's decompositions drop those of layouts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from functionalize.backends.preparation.example_call import concrete
from functionalize.errors import UnsupportedExportError

aten = torch.ops.aten
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_FORMAT, _OFFSET, _STRIDE = aten.is_contiguous.memory_format, aten.sym_storage_offset.default, aten.sym_stride.int
_METADATA = aten._assert_tensor_metadata.default
ADDRESSING = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}
_WHY = (
    "the program reads the strides of its arguments, or calls an operator whose result is a view or a copy "
    "depending on them"
)
Look = tuple[str, Any]  # an argument's name; a memory format, an offset, or strides


def counts_from_storage(tensor: Node) -> bool:
    """Whether a graph takes elements of a tensor by their places in its storage."""
    return any(user.target in ADDRESSING and user.args[0] is tensor for user in tensor.users)


def assert_arguments(graph: Graph, argument: Node, begin: int | None, *, layout: bool) -> Iterator[str]:
    """Assert at the end of a graph that an argument is of its dtype, and lies as it does; why that cannot be.

    ``begin``: where it begins in its storage, if elements are taken by their places there; ``layout``: whether its
    strides matter.
    """
    look = argument.meta["val"]
    _call(graph, _METADATA, (argument, None, None, look.dtype), None)
    if begin is not None:
        found = _call(graph, _OFFSET, (argument,), begin)
        _assert(graph, _call(graph, operator.eq, (found, begin), True), f"began at {begin} in its storage")
        argument.meta["val"] = _begun_at(look, begin)  # so that torch, which runs the graph on it, finds it so
    if not (layout and look.dim()):
        return
    memory_format = _format(look)
    if memory_format is not None:
        name = str(memory_format).removeprefix("torch.")
        _assert(graph, _call(graph, _FORMAT, (argument, memory_format), True), f"was in {name}")
    elif all(type(step) is int for step in look.stride()):
        for dim, step in enumerate(look.stride()):  # torch's own assertion of them holds for no fake tensor
            found = _call(graph, _STRIDE, (argument, dim), step)
            _assert(graph, _call(graph, operator.eq, (found, step), True), f"had the stride {step} in dimension {dim}")
    else:
        yield UnsupportedExportError.cause(
            f"`{argument.name}` has dynamic sizes, and strides of no memory format",
            why=_WHY,
            hint="capture with a contiguous tensor, or call .contiguous() before the program",
        )


def layout_of(node: Node) -> Look | None:
    """What an assertion says of an argument's layout; None: it is about something else.

    A memory format by its name, the offset, or the stride of a dimension, as a pair.
    """
    if node.target is not aten._assert_scalar.default or not isinstance(node.args[0], Node):
        return None
    asked = node.args[0]
    if asked.target is _FORMAT:
        return str(asked.args[0]), str(asked.args[1]).removeprefix("torch.")
    of = asked.args[0] if asked.target is operator.eq else None
    if not isinstance(of, Node) or of.target not in (_OFFSET, _STRIDE):
        return None
    return str(of.args[0]), asked.args[1] if of.target is _OFFSET else (of.args[1], asked.args[1])


def serves_layouts(node: Node) -> bool:
    """Whether a node is what such assertions ask, and nobody else."""
    if node.target in (_FORMAT, operator.eq):
        return bool(node.users) and all(layout_of(user) is not None for user in node.users)
    return node.target in (_OFFSET, _STRIDE) and bool(node.users) and all(map(serves_layouts, node.users))


def lies_so(tensor: torch.Tensor, look: Any) -> bool:
    """Whether a tensor lies in memory as :func:`layout_of` says."""
    if isinstance(look, str):
        return tensor.is_contiguous(memory_format=getattr(torch, look))
    return tensor.storage_offset() == look if isinstance(look, int) else list(tensor.stride()) == list(look)


def laid_out(tensor: torch.Tensor, look: Any) -> torch.Tensor:
    """The same elements, so that they lie as :func:`layout_of` says."""
    if isinstance(look, str):
        return tensor.contiguous(memory_format=getattr(torch, look))
    if isinstance(look, int):
        memory = tensor.new_zeros(look + tensor.numel())
        return memory.as_strided(tensor.size(), tensor.contiguous().stride(), look).copy_(tensor)
    return torch.empty_strided(tensor.size(), look, dtype=tensor.dtype).copy_(tensor)


def _format(look: torch.Tensor) -> torch.memory_format | None:
    like = torch.empty_strided(*(list(map(concrete, some)) for some in (look.size(), look.stride())), device="meta")
    ranks = {torch.channels_last: 4, torch.channels_last_3d: 5}
    fitting = (one for one in _FORMATS if ranks.get(one, look.dim()) == look.dim())
    return next((one for one in fitting if like.is_contiguous(memory_format=one)), None)


def _begun_at(look: torch.Tensor, begin: int) -> torch.Tensor:
    last = sum((size - 1) * step for size, step in zip(look.size(), look.stride(), strict=True))
    return look.new_empty([begin + last + 1]).as_strided(look.size(), look.stride(), begin)


def _call(graph: Graph, target: Any, args: tuple[Any, ...], value: Any) -> Node:
    made = graph.call_function(target, args)
    made.meta |= {"val": value, "stack_trace": "", "nn_module_stack": {}}
    return made


def _assert(graph: Graph, condition: Node, what: str) -> None:
    of: Any = condition.args[0]
    name = (of.args[0] if of.target in (_OFFSET, _STRIDE) else of).name
    message = (
        f"the argument `{name}` has another memory layout than at the capture, where it {what}\n"
        f"    why  {_WHY}\n"
        "    try  pass a tensor with that layout (.contiguous()), or capture again"
    )
    _call(graph, aten._assert_scalar.default, (condition, message), None)
