"""``tensor.as_subclass``: torch takes a view behind all modes, and no fake tensor is of a class of its own.

Invariant: the class of fake tensors is as it was once all calls have ended. Limits: of fake tensors, by the method;
``Sub(tensor)`` goes torch's own way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from functionalize._torch import FakeTensor, unwrap_functorch
from functionalize.errors import UnsupportedProgramError

_METHOD = torch.Tensor.as_subclass
_FAKES: Any = FakeTensor  # whose stubs do not have this method
_lock, _calls = threading.Lock(), list[None]()


@contextlib.contextmanager
def as_subclass_seen() -> Iterator[None]:
    """Around a call: have modes see what ``as_subclass`` does."""
    with _lock:
        _calls.append(None)
        _FAKES.as_subclass = _as_subclass
    try:
        yield
    finally:
        with _lock:
            _calls.pop()
            if not _calls:
                del _FAKES.as_subclass  # that of the base class


def _as_subclass(tensor: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    if unwrap_functorch(tensor) is not tensor:
        return _METHOD(tensor, cls)
    if cls in (torch.Tensor, FakeTensor):
        return torch.ops.aten.alias.default(tensor)  # type: ignore[no-any-return]
    raise UnsupportedProgramError.of_subclass(cls, "a tensor that the program makes with `as_subclass`")
