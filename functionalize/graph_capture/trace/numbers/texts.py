"""Numbers that a program writes into a log, prints, or puts into an error's message: a call writes its own numbers.

Such a text holds a mark for each number; in what a call leaves, or prints, its own numbers replace the marks. So the
text decides nothing. Invariant: only text that nothing else reads has marks (`text_flow`); all other text asks for the
value. Limits: lines are printed when a call is done, in their order.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from functionalize._torch import SYMBOLS
from functionalize.call_stack import user_frames
from functionalize.graph_capture.trace.numbers.text_flow import Rules, TextFlow
from functionalize.patches import Patch
from functionalize.python_state.reconstruct import Reconstruction
from functionalize.runtime.outputs.side_effects import LoggedRecord, PrintedLine

MARK = re.compile("\0number ([0-9]+)\0")
_PLACES = re.compile(r"%%|(%[-#0 +]*[0-9]*(?:\.[0-9]+)?[diouxXeEfFgGsr])")  # where `%` writes a value, in order
_PRINTED = (str, bool, int, float, type(None), torch.Size, torch.dtype, torch.device, *SYMBOLS)


class Texts:
    """The texts of one run of a program."""

    now: Texts | None = None  # of the current capture

    def __init__(self, is_log: Callable[[list[Any]], bool], catches: Callable[[], bool]) -> None:
        """``is_log``: whether a program only adds to a list; ``catches``: whether it catches errors."""
        self._rules, self._thread = Rules(print_, is_log, catches), threading.get_ident()
        self._numbers: list[tuple[Any, Callable[[Any], str]]] = []  # by mark, with how they are written
        self._lines: list[tuple[Callable[..., Any], Any, Any]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Collect texts while the program runs."""
        before, Texts.now = Texts.now, self
        try:
            yield
        except Exception as error:
            error.args = tuple(map(self.plain, error.args))
            raise
        finally:
            Texts.now = before

    def rows(self) -> Iterator[Patch]:
        """Have calls make the log records that hold numbers."""
        yield Patch(logging.Logger, "handle", self._handling)

    def written(self, number: Any, write: Callable[[Any], str]) -> str | None:
        """A mark for a number that is being written; None where something else may read the text."""
        frame = next(user_frames(), None)
        if frame is None or threading.get_ident() != self._thread:
            return None
        if not TextFlow.of_frame(frame, self._rules).ends(frame.f_lasti):
            return None
        self._numbers.append((number, write))
        return f"\0number {len(self._numbers) - 1}\0"

    def plain(self, value: Any) -> Any:
        """A value with numbers in the places of its marks: these are asked for, and decide."""
        if not isinstance(value, str):
            return value
        return MARK.sub(lambda mark: self._of(mark)[1](_plain_number(self._of(mark)[0])), value)

    def reconstruction(self, text: str, describe: Callable[[Any], Any]) -> Any:
        """How a call makes a text with marks. ``describe``: how it makes a number."""
        numbers = [self._of(mark) for mark in MARK.finditer(text)]
        make = functools.partial(_text, MARK.split(text)[::2], [write for _, write in numbers])
        return Reconstruction(make, _nothing, [describe(number) for number, _ in numbers])

    def print(self, values: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Have calls print values, where all are plain; print other values now."""
        options = {name: self.plain(value) for name, value in options.items()}
        own = options.get("file") in (None, sys.stdout, sys.stderr) and threading.get_ident() == self._thread
        if not own or not all(isinstance(value, _PRINTED) for value in values):
            print(*map(self.plain, values), **options)
            return
        options = {**options, "file": "stderr" if options.get("file") is sys.stderr else "stdout"}
        self._lines.append((PrintedLine, values, options))

    def described(self, describe: Callable[[Any, str], Any]) -> tuple[PrintedLine | LoggedRecord, ...]:
        """What a call prints and logs. ``describe``: how it makes a value."""

        def made(value: Any) -> Any:
            return describe(value, "the text that the program prints")

        return tuple(record(tuple(map(made, values)), about) for record, values, about in self._lines)

    def _of(self, mark: re.Match[str]) -> tuple[Any, Callable[[Any], str]]:
        return self._numbers[int(mark[1])]

    def _handling(self, handle: Callable[..., Any]) -> Any:
        @functools.wraps(handle)
        def handling(logger: logging.Logger, record: logging.LogRecord) -> Any:
            args = record.args if isinstance(record.args, tuple) else ()
            values = record.msg, *args
            symbolic = any(
                isinstance(value, SYMBOLS) or (isinstance(value, str) and MARK.search(value)) for value in values
            )
            printed = all(isinstance(value, _PRINTED) for value in values)
            if not (symbolic and printed and isinstance(record.args, (tuple, type(None)))):
                record.msg = self.plain(record.msg)
                record.args = tuple(map(self.plain, args)) if args else record.args
                return handle(logger, record)
            self._lines.append((LoggedRecord, values, (logger, record)))
            return None

        return handling


def print_(*values: Any, **options: Any) -> None:
    """Python's ``print``, in functions that a capture follows."""
    if Texts.now is None:
        print(*values, **options)
    else:
        Texts.now.print(values, options)


class Template(str):
    """A constant that code formats by ``%``."""

    __slots__ = ()

    def __mod__(self, values: Any) -> str:
        numbers = [_number_of(value) for value in (values if isinstance(values, tuple) else (values,))]
        pieces = _PLACES.split(self)  # texts, with places between them; None for `%%`
        places = [place for place in pieces[1::2] if place]
        plain = any("%" in piece for piece in pieces[::2]) or not any(isinstance(number, SYMBOLS) for number in numbers)
        if plain or len(places) != len(numbers):
            return str.__mod__(self, values)
        written = map(self._written, places, numbers)
        between = ["%" if place is None else next(written) for place in pieces[1::2]]
        return "".join(part for pair in zip(pieces[::2], [*between, ""], strict=True) for part in pair)

    def _written(self, place: str, number: Any) -> str:
        mark = Texts.now.written(number, place.__mod__) if Texts.now and isinstance(number, SYMBOLS) else None
        return place % ((_plain_number(number) if isinstance(number, SYMBOLS) else number),) if mark is None else mark


def _number_of(value: Any) -> Any:
    """The number in a tensor without dimensions; any other value as it is."""
    tensor = isinstance(value, torch.Tensor) and not value.dim() and not value.is_complex()
    return value.item() if tensor else value


def _plain_number(number: Any) -> Any:
    if isinstance(number, torch.SymBool):
        return bool(number)
    return int(number) if isinstance(number, torch.SymInt) else float(number)


def _text(pieces: Sequence[str], writes: Sequence[Callable[[Any], str]], numbers: Sequence[Any]) -> str:
    """The pieces, and the numbers between them."""
    written = [write(number) for write, number in zip(writes, numbers, strict=True)]
    return "".join(part for pair in zip(pieces, [*written, ""], strict=True) for part in pair)


def _nothing(text: str, parts: Sequence[Any]) -> None:
    """A text is whole when it is made."""
