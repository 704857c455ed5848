"""Calls whose effects no graph has: on streams of a GPU, with Python objects of other processes, or on their groups.

A call of a captured program runs its whole graph on the stream that is current then, and waits for no other stream.

Invariant: a program that makes such a call is refused; streams and groups that others use are not affected. Limits: by
classes and functions of torch, once a GPU or a process group is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple

import torch

from functionalize.patches import Patch
from functionalize.refusals.operators import GROUP_MADE, OBJECT_SENT
from functionalize.refusals.python_objects import STREAM_USED


class _Call(NamedTuple):
    """A function that is refused, and the error."""

    owner: Any
    name: str
    error: Callable[[], Exception]


_ON_STREAMS = (
    _Call(torch.cuda, "set_stream", partial(STREAM_USED.error, action="runs on another stream of a GPU")),
    *(
        _Call(owner, name, partial(STREAM_USED.error, action=f"calls {name}() of {said} of a GPU"))
        for owner, said, names in (
            (torch.cuda.Stream, "a stream", ("record_event", "wait_event", "wait_stream")),
            (torch.cuda.Event, "an event", ("record", "wait")),
        )
        for name in names
    ),
)


def rows_for_streams() -> Iterator[Patch]:
    """Have the program raise `UnsupportedProgramError` where it runs on another stream, or makes a stream wait."""
    return _rows(_ON_STREAMS if torch.cuda.is_initialized() else ())


_OF_OBJECTS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
_PICKLING = ("_object_to_tensor", "_tensor_to_object")  # where a function of objects was imported by its name
_MAKES_GROUP = ("split_group", "_new_process_group_helper")  # all others make theirs by these


def rows_for_processes() -> Iterator[Patch]:
    """Have the program raise `UnsupportedProgramError` where it sends objects to other processes, or makes a group."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    refused = {
        **dict.fromkeys((*_OF_OBJECTS, *_PICKLING), OBJECT_SENT.error),
        **dict.fromkeys(_MAKES_GROUP, GROUP_MADE.error),
    }
    owners = (distributed, distributed.distributed_c10d)
    yield from _rows(
        _Call(owner, name, error) for owner in owners for name, error in refused.items() if hasattr(owner, name)
    )
    yield Patch(distributed.device_mesh.DeviceMesh, "__init__", _refusing_own_groups)


def _refusing_own_groups(begin: Callable[..., None]) -> Callable[..., None]:
    @wraps(begin)
    def made(mesh: Any, *args: Any, _init_backend: bool = True, **kwargs: Any) -> None:
        if _init_backend:  # a slice has the groups of its mesh
            raise GROUP_MADE.error()
        begin(mesh, *args, _init_backend=_init_backend, **kwargs)

    return made


def _rows(calls: Any) -> Iterator[Patch]:
    return (Patch(call.owner, call.name, partial(_refusing, call.error)) for call in calls)


def _refusing(error: Callable[[], Exception], call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        raise error()

    return called
