"""Functions that alias otherwise as soon as a dispatch mode is active, or sizes are symbolic.

Some kernels, seeing a mode, compute a new tensor in place of writing the one that was passed as ``out=``; `dropout`
that drops nothing returns its input, but a copy where torch's Python decomposition runs (pytorch/pytorch#195422). No op
tells the mode of it, so the call has to be caught before it is dispatched.

Invariant: what is passed as ``out=`` is written and returned, and an input that eager returns is returned.
Limits: calls by the function's public name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LOSE_OUT = frozenset({torch.linalg.matrix_rank})
_DROPOUTS = frozenset({torch.dropout, torch.nn.functional.dropout})


class KeptOut(TorchFunctionMode):
    """Has these functions alias as in eager."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUTS and _drops_nothing(*args, **(kwargs or {})):
            return args[0] if args else kwargs["input"]
        if not kwargs:
            return func(*args)
        if func in _LOSE_OUT and kwargs.get("out") is not None:
            kwargs = dict(kwargs)
            out, result = kwargs.pop("out"), func(*args, **kwargs)
            return out.resize_(result.size()).copy_(result)
        return func(*args, **kwargs)


def _drops_nothing(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> bool:
    """Whether such a call is legal, and has nothing to do."""
    return 0 <= p <= 1 and (p == 0 or not (training and train))
