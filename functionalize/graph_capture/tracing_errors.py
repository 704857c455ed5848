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


_OPERATOR = "have an operator of your own do it (torch.library.custom_op), which a capture takes as a whole"
_KNOWN = (
    _Known(
        "Cannot access data pointer of Tensor",
        "the program asks where in memory a tensor lies",
        "a captured program runs on other tensors at each call",
        f"leave data_ptr() out of what is captured, or {_OPERATOR}",
    ),
    _Known(
        "its data is not allocated yet",
        "the program has torch fill memory with numbers of Python's that are tensors, or read it",
        "there are no values while a program is captured",
        f"make the tensor by torch.tensor or torch.stack, pass what was made as an argument, or {_OPERATOR}",
    ),
    _Known(
        "is already associated to a python object of type FakeTensor",
        "the program makes a tensor of a class of its own, of one that it computed",
        "a captured program is of plain tensors: what the class makes of each operator would be lost",
        "compute with plain tensors, make such of the results, or compile by torch.compile",
    ),
    _Known(
        ".numpy() is not supported for tensor subclasses",
        "the program makes a NumPy array of a tensor",
        "NumPy looks at the values, and there are none while a program is captured",
        f"compute with torch, or {_OPERATOR}",
    ),
    _Known(
        "Not available for 'meta' device type",
        "the program reads the bytes of a storage",
        "there are no bytes while a program is captured",
        f"use tensors (`x.view(torch.uint8)`), or {_OPERATOR}",
    ),
    _Known(
        "size_bytes_is_heap_allocated_",
        "the program sets a tensor to a storage whose size the data tell",
        "fake tensors cannot say where it would lie",
        "take a view of the tensor that has the storage (view, as_strided)",
    ),
    _Known(
        "Autograd not support dtype",
        "the program assigns a number that requires gradients to elements of a tensor of integers",
        "fake tensors are filled with it by an operator that autograd follows",
        "assign its detach()",
    ),
    _Known(
        "unhashable type: non-nested SymInt",
        "the program puts a number that the data tell into a set, or looks it up",
        "the number is not known while the program is captured",
        "int() of the number, which the data then decide, or operators of torch that do the same (torch.unique, "
        "torch.isin, an index)",
    ),
    _Known(
        "must be bool, not SymBool",
        "the program passes a condition that the data tell as an option of an operator",
        "operators of torch take plain truths",
        "bool() of the condition, which the data then decide",
    ),
    _Known(
        BEYOND,
        "the program runs a backward through how its inputs were computed",
        "a captured program begins with its inputs: what lies before them is none of its graph",
        "call backward() outside of what is captured, or pass leaves and compute the inputs of them inside",
    ),
    _Known(
        "new_fn INTERNAL ASSERT",
        "a view is told to require gradients, and then the memory of what it is a view of is written",
        "of fake tensors, autograd takes views of such a leaf by the same steps again, from what requires no gradients",
        "write first, or have a copy of the view (`.clone()`) require gradients",
    ),
    _Known(
        "Mixing fake modes",
        "the program takes gradients through an operator whose body torch compiles by itself (scan)",
        "torch traces that body's backward with other fake tensors than those of the capture",
        "torch.no_grad() around it, where nobody takes its gradients; a loop of Python's, torch.cond or while_loop; or "
        "torch.compile(backend='functionalize') of the whole",
    ),
    _Known(
        "'<' not supported between instances of 'NoneType' and 'int'",
        "the program passes a result of a while_loop to another operator with bodies",
        "where gradients are on, the result is the last row of all steps, and only the data tell where it lies, which "
        "torch asks when it traces the bodies",
        "clone() of the result; or torch.no_grad() around the loops, where nobody takes their gradients",
    ),
    _Known(
        "SeedSequence expects int",
        "the program seeds a generator of NumPy's by a number that the data tell",
        "the number is not known while a program is captured, and what NumPy draws would be drawn once",
        "draw by torch, or outside of what is captured",
    ),
    _Known(
        "Values and compressed tensor instance need to be on the same device",
        "the program makes a compressed sparse tensor of its parts",
        "torch's fake tensors cannot be put together so",
        "make it outside, and pass it; or convert a tensor (`to_sparse_csr()`)",
    ),
    _Known(
        "np.ndarray of type numpy.object_",
        "the program makes a tensor of an array of numbers that the data tell",
        "NumPy has an array of objects for them, and there are no values while the program is captured",
        "torch.tensor() of the numbers, or of a list of them",
    ),
    *(
        _Known(
            kind,
            f"the program gives a number that the data tell to what takes none but Python's own (a {kind} was met)",
            "while a program is captured such a number is a symbol, which stands for those of all calls",
            "float() or int() of it, which the data then decide, or the same with tensors",
        )
        for kind in ("SymFloat", "SymInt", "SymBool")
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
        f"a tensor that requires gradients gets new metadata (squeeze_, t_, ...), and then: {error}",
        why="of fake tensors, autograd takes older views by the same steps again, which the tensor may no longer allow",
        hint="use the out-of-place operator (squeeze, t, ...) and its result",
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
            f"{what} of a captured program decides by the value of a tensor\n    at   {decisive_line(error)}",
            why="it is captured with the forward, before anybody asks for gradients, and so has no data",
            hint="torch.where or torch.cond instead of `if`, or take the gradients inside of what is captured",
        )
    else:
        reason = RuntimeError(
            f"{what} of a captured program cannot be captured: {error}\n"
            "    why  a formula of autograd's raised that, which went through what the program did on fake tensors\n"
            "    try  the same without writing in place to views, or take the gradients in eager"
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


class _Otherwise(NamedTuple):
    """What a program asks of an input, where a fake tensor says otherwise."""

    what: str
    why: str
    hint: str


OTHERWISE = {
    VIEW: _Otherwise(
        "the program asks whether `{}` is a view, by `_is_view`, `_base`, `detach_`, a write after a hook on its "
        "gradient, or, where it has views, by `requires_grad_` or `as_strided_`",
        "it is one, of memory that the program does not get, and is captured on a tensor of its own",
        "use detach() instead of detach_(), pass a clone, or ask before what is captured",
    ),
    LEAF_VIEW: _Otherwise(
        "the program writes memory of `{}` while it has views of it, or takes views of it where gradients are off",
        "it was told to require gradients when it was a view, of memory that the program does not get: eager goes back "
        "to that, which has none",
        "pass a clone that requires gradients: `x.detach().clone().requires_grad_()`",
    ),
    SILENT_VIEW: _Otherwise(
        "the program has a view of `{}` require gradients, and writes their memory",
        "it is a view, taken where gradients are off, of what requires some, and which the program does not get: eager "
        "goes back to that",
        "pass a clone, or have a clone of the view require gradients",
    ),
    FOLLOWED_VIEW: _Otherwise(
        "the program gives `{}` other data by `.data =`, and writes in place to its data, of before or after that",
        "it requires gradients as a view of what does: after the write eager looks for it there at the place that it "
        "has among its new data, and so gives its gradient to other elements",
        "return the new tensor instead, or assign to `.data` of a clone",
    ),
    HOOKS: _Otherwise(
        "the program computes gradients, and `{}` has hooks on its own",
        "it is an argument: each call gets another, with hooks of its own, and a graph could not call what they do",
        "remove the hooks and do in the program what they do, or leave the backward out of what is captured",
    ),
}


def otherwise(name: str, label: str, at: object) -> UnsupportedProgramError:
    """The error for one of these; ``label``: what the input is called; ``at``: the line that asks."""
    found = OTHERWISE[name]
    return UnsupportedProgramError(found.what.format(label), why=found.why, hint=found.hint, at=at)
