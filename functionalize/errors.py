"""The exceptions of this package. Invariant: each says what, where, why and what to try next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from functionalize.call_stack import user_frames, user_location


class NotFunctionalError(AssertionError):
    """A graph contains mutations (or views) that it must not contain; the message lists the nodes."""


class NotEquivalentError(AssertionError):
    """A transformed function and the eager one differ; the message says in what."""


def explanation(what: str, why: str, hint: str, at: object = None) -> str:
    """The text of an error."""
    place = f"    at   {at}\n" if at else ""
    return f"{what}\n{place}    why  {why}\n    try  {hint}"


class ExplainedError(RuntimeError):
    """An error that says what, why and what to try, and where if that is known."""

    def __init__(self, what: str, *, why: str, hint: str, at: object = None) -> None:
        """``at``: the line."""
        super().__init__(explanation(what, why, hint, at))


class UnsupportedProgramError(ExplainedError):
    """A program cannot be captured; the message says what, where, why and what to try."""

    causes: tuple[str, ...] = ()  # where there are several: each with where and why

    def __init__(self, what: str, *, why: str, hint: str, at: object = None) -> None:
        """``at``: the line, where that is not the one that runs."""
        super().__init__(what, why=why, hint=hint, at=at or user_location())

    @classmethod
    def of_causes(cls, what: str, causes: Sequence[tuple[str, str]], hint: str) -> UnsupportedProgramError:
        """For several causes at once. ``causes``: lines of the program, each with the reason."""
        said = [f"    at   {at}\n    why  {why}" for at, why in dict.fromkeys(causes)]
        error = cls.__new__(cls)
        RuntimeError.__init__(error, "\n".join([what, *said, f"    try  {hint}"]))
        error.causes = tuple(said)
        return error

    @classmethod
    def of_exports(cls, to: str, causes: Sequence[str]) -> UnsupportedProgramError:
        """For all causes why a backend cannot run a program, with the text of :class:`UnsupportedExportError`."""
        said = UnsupportedExportError(to, causes)
        error = cls.__new__(cls)
        RuntimeError.__init__(error, str(said))
        error.causes = said.causes
        return error


class UnsupportedExportError(RuntimeError):
    """A backend cannot represent a program; the message lists all causes, and no file was written."""

    def __init__(self, to: str, causes: Sequence[str]) -> None:
        """``to``: the backend. ``causes``: each with what, and in further lines where, why and what to try."""
        count = "one cause" if len(causes) == 1 else f"{len(causes)} causes"
        super().__init__("\n".join([f"the program cannot be exported to {to}, for {count}:", *causes]))
        self.causes = tuple(causes)

    @staticmethod
    def cause(what: str, *, why: str, hint: str, at: object = None) -> str:
        """The text of one cause, in the form of all errors."""
        return explanation(what, why, hint, at)


class UnsupportedMutationError(UnsupportedProgramError):
    """No functional program can express a write; the message says what, where, why and what to try."""


class OverlappingInputsError(UnsupportedMutationError):
    """Gradients flow through a write to an input that overlaps another: both must be views of one tensor."""


class NoFormulaError(UnsupportedProgramError):
    """A gradient goes through an operator for which autograd has no formula."""

    @classmethod
    def of_eager(cls, text: str) -> NoFormulaError:
        """For one that eager refuses as well, in its words."""
        error = cls.__new__(cls)
        RuntimeError.__init__(error, text)
        return error


class DeferredError(UnsupportedProgramError):
    """A construction cannot be deferred or materialized; the message says what, where, why and what to try."""


class NotDeferredError(DeferredError, ValueError):
    """A fake tensor cannot be materialized, because ``deferred_init`` did not make it."""


class InputMismatchError(ValueError):
    """A captured program was called with inputs that it was not captured for; the message says with which."""

    def __init__(self, what: str, *, hint: str, containers: Sequence[object] = ()) -> None:
        """``containers``: what the values sit in, of Python state."""
        super().__init__(f"{what}\n    try  {hint}")
        self.containers = containers


class StateMismatchError(InputMismatchError):
    """A captured program changes Python state, and found it at another value than when it was captured."""

    def __init__(self, what: str, *, hint: str, containers: Sequence[object] = (), is_option: bool = True) -> None:
        """``is_option``: whether the program's author chooses the value, so that another one may be a mistake."""
        super().__init__(what, hint=hint, containers=containers)
        self.is_option = is_option


class NumberMismatchError(StateMismatchError):
    """A captured program found another number in Python state: a new capture may make the number an input."""

    def __init__(self, what: str, *, hint: str, containers: Sequence[object] = (), key: object = None) -> None:
        """``key``: where in the container the number is."""
        super().__init__(what, hint=hint, containers=containers)
        self.key = key


class GradientMismatchError(InputMismatchError):
    """A captured program was called in another grad mode, or with other inputs that require or have gradients."""


class DataDependentError(ExplainedError):
    """A captured program depends on tensor values in a way that its graph cannot hold; the message says what to try."""


class NotCapturedWarning(UserWarning):
    """A call ran the original, because its inputs could not be captured: eager accepts them, fake tensors do not."""


class DecisionsAssertedWarning(UserWarning):
    """An exported program asserts the outcomes of its branches on tensor values, and refuses calls with others."""


class TrainingModeWarning(UserWarning):
    """A module is exported in training mode, where it applies dropout or uses statistics of the batch."""


def is_own(error: BaseException) -> bool:
    """Whether an error is of a class of this package."""
    return str(type(error).__module__).partition(".")[0] == __name__.partition(".")[0]


def in_words(error: Exception) -> bool:
    """Whether an error is this package's own, which says why."""
    return isinstance(error, InputMismatchError) or "\n    why  " in text_of(error)


def text_of(error: BaseException) -> str:
    """The message of an error; empty if its class fails to say it."""
    try:
        return str(error)
    except Exception:
        return ""


def check_remove(remove: str) -> None:
    """Raise unless it names what is to be removed from a program.

    Raises:
        ValueError: it is neither of the two.
    """
    check_choice("remove", remove, ("mutations", "mutations_and_views"))


def check_choice(name: str, value: str, choices: tuple[str, str]) -> None:
    """Raise unless an option has one of two values.

    Raises:
        ValueError: it has another.
    """
    if value not in choices:
        raise ValueError(f"{name} must be {choices[0]!r} or {choices[1]!r}, not {value!r}")


def variable_of(tensor: torch.Tensor) -> str | None:
    """The local variable of the running program that holds a tensor, or None; faster than `name_of`."""
    names = (name for frame in user_frames() for name, bound in frame.f_locals.items() if bound is tensor)
    name = next(names, None)
    return None if name is None else f"`{name}`"


def name_of(tensor: torch.Tensor) -> str:
    """What the running program calls a tensor: a variable, or a module's buffer or parameter; else its size."""
    for frame in user_frames():
        for name, bound in [*frame.f_locals.items(), *frame.f_globals.items()]:
            if bound is tensor:
                return f"`{name}`"
            if isinstance(bound, torch.nn.Module):
                for path, state in (*bound.named_buffers(), *bound.named_parameters()):
                    if state is tensor:
                        return f"`{name}.{path}`"
    return f"a tensor of size {tuple(tensor.size())}"
