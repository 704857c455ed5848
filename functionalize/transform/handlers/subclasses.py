"""``tensor.as_subclass``: torch takes a view behind all modes, and no fake tensor is of a class of its own.

Invariant: outside of transformed calls torch's method is as it was. Limits: ``Sub(tensor)`` goes torch's own way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from functionalize._torch import PLAIN_TYPES, FakeTensor, unwrap_functorch
from functionalize.errors import UnsupportedProgramError

_METHOD = torch.Tensor.as_subclass
_lock, _calls = threading.Lock(), list[None]()


@contextlib.contextmanager
def as_subclass_seen() -> Iterator[None]:
    """Around a call: have modes see what ``as_subclass`` does."""
    with _lock:
        _calls.append(None)
        torch.Tensor.as_subclass = _as_subclass  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        with _lock:
            _calls.pop()
            if not _calls:
                del torch.Tensor.as_subclass  # that of the base class


def _as_subclass(tensor: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    if cls in (torch.Tensor, FakeTensor) and type(tensor) in PLAIN_TYPES and unwrap_functorch(tensor) is tensor:
        return torch.ops.aten.alias.default(tensor)  # type: ignore[no-any-return]
    if isinstance(tensor, FakeTensor):
        raise UnsupportedProgramError.of_subclass(cls, "a tensor that the program makes by `as_subclass`")
    return _METHOD(tensor, cls)
