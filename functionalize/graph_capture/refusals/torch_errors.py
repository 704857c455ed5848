"""What cannot be captured since the program runs on fake tensors in the places of its inputs, and what to do then.

Limits: errors of torch's are known by their text, written against 2.13 and 2.15; another goes on as it is.
"""

from __future__ import annotations

from typing import NamedTuple

from functionalize._torch import FOLLOWED_VIEW, HOOKS, LEAF_VIEW, SILENT_VIEW, VIEW
from functionalize._torch.fakes import data_dependent, operator_without_fake
from functionalize.call_stack import decisive_line
from functionalize.errors import DataDependentError, UnsupportedProgramError
from functionalize.tracing.fakeify import BEYOND


class _Known(NamedTuple):
    """What an error says, and what is meant: what the program does, why that cannot be captured, what to try."""

    text: str
    what: str
    why: str
    hint: str


_OPERATOR = "move it into a custom operator (torch.library.custom_op), which a capture records as one call"
_KNOWN = (
    _Known(
        "Cannot access data pointer of Tensor",
        "the program reads the address of a tensor",
        "a captured program runs on other tensors at each call",
        f"call data_ptr() outside the captured program, or {_OPERATOR}",
    ),
    _Known(
        "its data is not allocated yet",
        "the program makes a tensor from a Python list of tensors, or reads the memory of a tensor",
        "tensors have no values while a program is captured",
        f"make the tensor with torch.tensor or torch.stack, pass it as an argument, or {_OPERATOR}",
    ),
    _Known(
        "is already associated to a python object of type FakeTensor",
        "the program makes a tensor of a subclass from a tensor that it computed",
        "a captured program computes with plain tensors: what the class does at each operator would be lost",
        "compute with plain tensors, convert the results to the subclass outside, or use torch.compile",
    ),
    _Known(
        ".numpy() is not supported for tensor subclasses",
        "the program makes a NumPy array from a tensor",
        "NumPy reads the values, and tensors have no values while a program is captured",
        f"compute with torch, or {_OPERATOR}",
    ),
    _Known(
        "Not available for 'meta' device type",
        "the program reads the bytes of a storage",
        "storages have no bytes while a program is captured",
        f"use tensors (`x.view(torch.uint8)`), or {_OPERATOR}",
    ),
    _Known(
        "size_bytes_is_heap_allocated_",
        "the program sets a tensor to a storage of data-dependent size",
        "fake tensors cannot represent where the tensor is in that storage",
        "make a view of a tensor with that storage (view, as_strided)",
    ),
    _Known(
        "Autograd not support dtype",
        "the program assigns a number that requires gradients to elements of an integer tensor",
        "for fake tensors this assignment is an operator that autograd records",
        "assign the number's detach()",
    ),
    _Known(
        "unhashable type: non-nested SymInt",
        "the program puts a data-dependent number into a set or a dict, or looks it up there",
        "the number is unknown while the program is captured",
        "call int() on the number (which then becomes a branch on its value), or use torch operators (torch.unique, "
        "torch.isin, an index)",
    ),
    _Known(
        "must be bool, not SymBool",
        "the program passes a data-dependent condition as an option of an operator",
        "options of torch operators must be plain bools",
        "call bool() on the condition (which then becomes a branch on its value)",
    ),
    _Known(
        BEYOND,
        "the program runs a backward into the operators that computed its inputs",
        "a captured program begins with its inputs: the operators before them are not part of its graph",
        "call backward() outside the captured program, or pass leaves and compute the inputs from them inside",
    ),
    _Known(
        "new_fn INTERNAL ASSERT",
        "the program sets requires_grad on a view, and then writes to the view's base",
        "for fake tensors, autograd replays the view operators after the write, and finds a base that requires no "
        "gradients",
        "write first, or set requires_grad on a copy of the view (`.clone()`)",
    ),
    _Known(
        "Mixing fake modes",
        "the program computes gradients through an operator whose body torch compiles separately (scan)",
        "torch traces the backward of that body with fake tensors of another mode",
        "call it under torch.no_grad() if its gradients are not needed; use a Python loop, torch.cond or "
        "while_loop; or use torch.compile(backend='functionalize') for the whole program",
    ),
    _Known(
        "'<' not supported between instances of 'NoneType' and 'int'",
        "the program passes a result of a while_loop to another operator with bodies",
        "with grad mode on, the result is a view at a data-dependent offset, and torch reads the offset when it "
        "traces the bodies",
        "clone() the result; or run the loops under torch.no_grad() if their gradients are not needed",
    ),
    _Known(
        "SeedSequence expects int",
        "the program seeds a NumPy generator with a data-dependent number",
        "the number is unknown while a program is captured, and NumPy would draw only once, at the capture",
        "draw with torch, or outside the captured program",
    ),
    _Known(
        "Values and compressed tensor instance need to be on the same device",
        "the program makes a compressed sparse tensor from its parts",
        "torch cannot do that with fake tensors",
        "make it outside and pass it, or convert a tensor (`to_sparse_csr()`)",
    ),
    _Known(
        "np.ndarray of type numpy.object_",
        "the program makes a tensor from a NumPy array of data-dependent numbers",
        "such numbers have no values while the program is captured, so NumPy holds them as objects",
        "pass the numbers, or a list of them, to torch.tensor()",
    ),
    *(
        _Known(
            text,
            f"the program passes a data-dependent number (a {kind}) to a function that takes only plain Python numbers",
            "while a program is captured, such a number is a symbol for the numbers of all calls",
            "call float() or int() on it (which then becomes a branch on its value), or compute with tensors",
        )
        for kind, plain in (("SymFloat", "float"), ("SymInt", "int"), ("SymBool", "bool"))
        for text in (kind, f"Object of type {plain} is not JSON serializable")  # `json` names the class of the value
    ),
)


def explained(error: Exception) -> UnsupportedProgramError | None:
    """The same error in other words, if it is one of those."""
    operator = operator_without_fake(error)
    if operator is not None:
        return UnsupportedProgramError.of_operator(operator, decisive_line(error))
    for known in _KNOWN:
        if known.text in str(error):
            return UnsupportedProgramError(known.what, why=known.why, hint=known.hint, at=decisive_line(error))
    return None


def replayed(error: Exception, reshaped: bool) -> UnsupportedProgramError | None:
    """The error in other words, if autograd may have raised it: of views of what has got other metadata since.

    ``reshaped``: whether something has that requires gradients.
    """
    if not reshaped or isinstance(error, UnsupportedProgramError):
        return None
    return UnsupportedProgramError(
        f"a tensor that requires gradients changes its size or strides in place (squeeze_, t_, ...), and then: {error}",
        why="for fake tensors, autograd replays older views of the tensor, which may fail after the change",
        hint="use the result of the out-of-place operator (squeeze, t, ...)",
        at=decisive_line(error),
    )


def of_derivative(error: Exception, order: int) -> Exception:
    """Why there is no derivative of an order, for an error that its capture raised."""
    if isinstance(error, UnsupportedProgramError):
        forget_frames(error)
        return error
    what = "the backward" if order == 1 else f"the derivative of order {order}"
    if isinstance(error, data_dependent()):
        reason: Exception = DataDependentError(
            f"{what} of a captured program branches on the value of a tensor\n    at   {decisive_line(error)}",
            why="the backward is captured together with the forward, without data",
            hint="use torch.where or torch.cond instead of `if`, or compute the gradients inside the captured program",
        )
    else:
        reason = RuntimeError(
            f"{what} of a captured program cannot be captured: {error}\n"
            "    why  an autograd formula raised this error while the backward was traced with fake tensors\n"
            "    try  write the program without in-place writes to views, or compute the gradients in eager"
        )
    forget_frames(error)
    reason.__cause__ = error
    return reason


def forget_frames(error: BaseException) -> None:
    """Have an error that is kept hold nothing of the run that raised it: its message says where that was."""
    known: BaseException | None = error
    while known is not None and known.__traceback__ is not None:
        known.__traceback__ = None
        known = known.__cause__ or known.__context__


class _Unanswerable(NamedTuple):
    """What a program asks of an input, where a fake tensor says otherwise."""

    what: str
    why: str
    hint: str


UNANSWERABLE = {
    VIEW: _Unanswerable(
        "the program depends on whether `{}` is a view, by `_is_view`, `_base`, `detach_`, a write after a hook on "
        "its gradient, or, if it has views, by `requires_grad_` or `as_strided_`",
        "it is a view, but its base is not an input, and the capture uses a tensor that is not a view",
        "use detach() instead of detach_(), pass a clone, or read the property before the program is called",
    ),
    LEAF_VIEW: _Unanswerable(
        "the program writes the memory of `{}` while it has views of it, or makes views of it with grad mode off",
        "it is a view whose requires_grad was set: eager replays it from its base, which is not an input and "
        "requires no gradients",
        "pass a clone that requires gradients: `x.detach().clone().requires_grad_()`",
    ),
    SILENT_VIEW: _Unanswerable(
        "the program sets requires_grad on a view of `{}`, and writes their memory",
        "it is itself a view, made with grad mode off, of a tensor that requires gradients and is not an input: "
        "eager replays it from there",
        "pass a clone, or set requires_grad on a clone of the view",
    ),
    FOLLOWED_VIEW: _Unanswerable(
        "the program replaces the data of `{}` by `.data =`, and writes in place to its old or new data",
        "it is a view of a tensor that requires gradients: after the write, eager applies its new offset and "
        "strides to that tensor, so that other elements get its gradient",
        "return the new tensor instead, or assign to `.data` of a clone",
    ),
    HOOKS: _Unanswerable(
        "the program computes gradients, and `{}` has hooks on its gradient",
        "it is an argument: each call passes another tensor with other hooks, which a graph cannot call",
        "remove the hooks and do their work in the program, or run the backward outside the captured program",
    ),
}


def unanswerable(name: str, label: str, at: object) -> UnsupportedProgramError:
    """The error for one of these; ``label``: what the input is called; ``at``: the line that asks."""
    found = UNANSWERABLE[name]
    return UnsupportedProgramError(found.what.format(label), why=found.why, hint=found.hint, at=at)
