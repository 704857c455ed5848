"""Keeps functions on eager's kernels if torch's kernels in Python compute something else.

On symbolic sizes the kernels in Python take over. They interpolate by a scale where eager's copy, and round
differently; for `multilabel_margin_loss` they read targets past the first negative one.

Invariant: results are those of eager's kernels. Limits: fake modes of others, such as Dynamo's, have no meta kernels of
these operators for symbols; there torch's kernels in Python stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch.nn.functional import interpolate, multilabel_margin_loss

from functionalize._torch import has_symbol, no_python_dispatcher, pytree
from functionalize._torch.fakes import has_foreign_fakes
from functionalize._torch.tensors import INTERPOLATIONS, MARGIN_LOSS

Call = Callable[..., Any]
_QUESTIONS = ("has_torch_function_unary", "has_torch_function_variadic")


def _lacks_metas(args: Any) -> bool:
    """Whether only torch's kernels in Python can run an operator on these arguments."""
    return has_foreign_fakes() and any(map(has_symbol, pytree.tree_leaves(args)))


def _in_eager(call: Call) -> Call:
    """A function on the kernels in C++, which take symbols, too."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if _lacks_metas(args):
            return call(*args, **kwargs)
        with no_python_dispatcher():
            return call(*args, **kwargs)

    return called


def _interpolated(call: Call) -> Call:
    """An interpolation by the operator that it calls, which takes symbolic sizes: the function in C++ does not."""
    op, kept = getattr(torch.ops.aten, call.__name__), _in_eager(call)
    arguments = len(op.vec._schema.arguments)
    dims = len(op.default._schema.arguments) - arguments + 1

    def interpolated(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != arguments or args[0].dim() != 2 + dims or (args[1] is None) == (args[-1] is None):
            return kept(*args, **kwargs)
        input, sizes, *flags, scales = args
        if _lacks_metas(args) or any(isinstance(scale, torch.SymFloat) for scale in scales or ()):
            return call(*args)  # the operator takes no symbols for scales
        if sizes is None:
            sizes = [_scaled(size, scale) for size, scale in zip(input.shape[2:], scales, strict=True)]
        with no_python_dispatcher():
            return op.default(input, sizes, *flags, *(scales or [None] * dims))

    return interpolated


def _scaled(size: Any, scale: Any) -> Any:
    return size * int(scale) if int(scale) == scale else torch.sym_int(size * scale)


def _unasked(function: Any) -> Call:
    """A function of torch's in Python, without the check whether a mode intercepts its call."""
    names = {**function.__globals__, **dict.fromkeys(_QUESTIONS, lambda *tensors: False)}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


IN_EAGER: Mapping[Any, Call] = {
    **{call: _interpolated(call) for call in INTERPOLATIONS},
    MARGIN_LOSS: _in_eager(MARGIN_LOSS),
}
# The public functions that call these; they run with the mode active, which looks up the functions above.
OPENED: Mapping[Any, Call] = {function: _unasked(function) for function in (interpolate, multilabel_margin_loss)}
