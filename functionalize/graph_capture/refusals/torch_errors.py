"""Explains errors that torch raises because the program runs on fake tensors in the places of its inputs.

Limits: it recognizes errors of torch's by their text, written against 2.13 and 2.15; other errors stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from functionalize._torch import FOLLOWED_VIEW, HOOKS, LEAF_VIEW, SILENT_VIEW, VIEW
from functionalize._torch.fakes import data_dependent, operator_without_fake
from functionalize.call_stack import decisive_line
from functionalize.errors import UnsupportedProgramError, text_of
from functionalize.refusals.calls import BACKWARD_NOT_CAPTURED
from functionalize.refusals.gradients import (
    BACKWARD_BEYOND_INPUTS,
    INPUT_FOLLOWS_VIEW,
    INPUT_HAS_HOOKS,
    INPUT_IS_LEAF_VIEW,
    INPUT_IS_SILENT_VIEW,
    INPUT_IS_VIEW,
    INTEGERS_ASSIGNED_GRADIENTS,
    LOOP_RESULT_IN_BODY,
    RESHAPED_AND_REPLAYED,
    SCAN_DIFFERENTIATED,
    VIEW_REQUIRES_GRAD,
)
from functionalize.refusals.operators import NO_FAKE
from functionalize.refusals.refusal import Refusal
from functionalize.refusals.tensors import COMPRESSED_SPARSE_MADE, SUBCLASS_MADE
from functionalize.refusals.values import (
    ADDRESS_READ,
    ARRAY_OF_NUMBERS,
    ARRAY_OF_TENSOR,
    BOOL_AS_OPTION,
    BRANCH_IN_BACKWARD,
    DATA_DEPENDENT_STORAGE,
    MEMORY_READ,
    NUMBER_AS_KEY,
    NUMBER_AS_NUMPY_SEED,
    NUMBER_AS_PLAIN,
    STORAGE_BYTES_READ,
)
from functionalize.tracing.fakeify import BEYOND


@dataclass(frozen=True)
class _TorchError:
    """An error of torch's: a part of its text, the row that explains it, and values for the row's placeholders."""

    text: str
    row: Refusal[UnsupportedProgramError]
    values: Mapping[str, str] = field(default_factory=dict)


_TORCH_ERRORS = (
    _TorchError("Cannot access data pointer of Tensor", ADDRESS_READ),
    _TorchError("its data is not allocated yet", MEMORY_READ),
    _TorchError("is already associated to a python object of type FakeTensor", SUBCLASS_MADE),
    _TorchError(".numpy() is not supported for tensor subclasses", ARRAY_OF_TENSOR),
    _TorchError("Not available for 'meta' device type", STORAGE_BYTES_READ),
    _TorchError("size_bytes_is_heap_allocated_", DATA_DEPENDENT_STORAGE),
    _TorchError("Autograd not support dtype", INTEGERS_ASSIGNED_GRADIENTS),
    _TorchError("unhashable type: non-nested SymInt", NUMBER_AS_KEY),
    _TorchError("must be bool, not SymBool", BOOL_AS_OPTION),
    _TorchError(BEYOND, BACKWARD_BEYOND_INPUTS),
    _TorchError("new_fn INTERNAL ASSERT", VIEW_REQUIRES_GRAD),
    _TorchError("Mixing fake modes", SCAN_DIFFERENTIATED),
    _TorchError("'<' not supported between instances of 'NoneType' and 'int'", LOOP_RESULT_IN_BODY),
    _TorchError("SeedSequence expects int", NUMBER_AS_NUMPY_SEED),
    _TorchError("Values and compressed tensor instance need to be on the same device", COMPRESSED_SPARSE_MADE),
    _TorchError("np.ndarray of type numpy.object_", ARRAY_OF_NUMBERS),
    *(
        _TorchError(text, NUMBER_AS_PLAIN, {"kind": symbol})
        for symbol, plain in (("SymFloat", "float"), ("SymInt", "int"), ("SymBool", "bool"))
        for text in (symbol, f"Object of type {plain} is not JSON serializable")  # `json` names the class of the value
    ),
)


def explained(error: Exception) -> UnsupportedProgramError | None:
    """The refusal that explains an error of torch's; None for errors that are not in the table."""
    operator = operator_without_fake(error)
    if operator is not None:
        return NO_FAKE.error(decisive_line(error), op=operator)
    for torch_error in _TORCH_ERRORS:
        if torch_error.text in text_of(error):
            return torch_error.row.error(decisive_line(error), **torch_error.values)
    return None


def is_bool_as_option(error: Exception) -> bool:
    """Whether an error refuses a data-dependent condition as an option of an operator, or of another function."""
    return text_of(error).startswith((BOOL_AS_OPTION.what, NUMBER_AS_PLAIN.what.format(kind="SymBool")))


def replayed(error: Exception, reshaped: bool) -> UnsupportedProgramError | None:
    """The refusal for an error that autograd may have raised about views of a tensor whose metadata changed since.

    ``reshaped``: whether the metadata of a tensor that requires gradients changed.
    """
    if not reshaped or isinstance(error, UnsupportedProgramError):
        return None
    return RESHAPED_AND_REPLAYED.error(decisive_line(error), error=error)


def of_derivative(error: Exception, order: int) -> Exception:
    """Why a derivative of an order is missing, for an error that its capture raised."""
    if isinstance(error, UnsupportedProgramError):
        forget_frames(error)
        return error
    derivative = "the backward" if order == 1 else f"the derivative of order {order}"
    if isinstance(error, data_dependent()):
        reason: Exception = BRANCH_IN_BACKWARD.error(decisive_line(error), derivative=derivative)
    else:
        reason = BACKWARD_NOT_CAPTURED.error(derivative=derivative, error=error)
    forget_frames(error)
    reason.__cause__ = error
    return reason


def forget_frames(error: BaseException) -> None:
    """Drop what a kept error holds of the run that raised it: its message says where that was."""
    cause: BaseException | None = error
    while cause is not None and cause.__traceback__ is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


# Questions of a program to an input that its fake tensor answers differently.
UNANSWERABLE = {
    VIEW: INPUT_IS_VIEW,
    LEAF_VIEW: INPUT_IS_LEAF_VIEW,
    SILENT_VIEW: INPUT_IS_SILENT_VIEW,
    FOLLOWED_VIEW: INPUT_FOLLOWS_VIEW,
    HOOKS: INPUT_HAS_HOOKS,
}
