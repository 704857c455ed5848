"""Functions that lose ``out=`` as soon as any dispatch mode is active.

Their kernels, seeing a mode, compute a new tensor in place of writing the one that was passed. No op tells the mode of
it, so the call has to be caught before it is dispatched. Found by the sweep over torch's operator database.

Invariant: what is passed as ``out=`` is written and returned. Limits: calls by the function's public name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LOSE_OUT = frozenset({torch.linalg.matrix_rank})


class KeptOut(TorchFunctionMode):
    """Writes to ``out=`` what these functions return."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:
            return func(*args)
        if func in _LOSE_OUT and kwargs.get("out") is not None:
            kwargs = dict(kwargs)
            out, result = kwargs.pop("out"), func(*args, **kwargs)
            return out.resize_(result.size()).copy_(result)
        return func(*args, **kwargs)
