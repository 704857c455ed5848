"""The line of a program that changes something without an operator: found by one more run, line by line.

Invariant: a trace function from before, such as a debugger's, is in place afterwards. Limits: no line is found in a
program that does something else when it runs again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from functionalize.call_stack import Location, is_of_program, user_location
from functionalize.errors import UnsupportedProgramError
from functionalize.python_state.ownership import is_library_file, is_of_python
from functionalize.refusals.refusal import Refusal


class LineWanted(Exception):
    """A program changed something: it is refused once the line that did so is found."""

    def __init__(self, is_changed: Callable[[], bool], row: Refusal[UnsupportedProgramError], **values: object) -> None:
        """``is_changed``: whether it is changed, asked in a second run; ``values``: for the placeholders of the row."""
        super().__init__(row.what)
        self._is_changed, self._row, self._values = is_changed, row, values

    def refusal(self, run: Callable[[], object]) -> UnsupportedProgramError:
        """The error; ``run`` runs the program again."""
        line = _changing_line(self._is_changed, run)
        return self._row.error(line or user_location(), **self._values)


def _changing_line(is_changed: Callable[[], bool], run: Callable[[], object]) -> Location | None:
    """The first line of a program after which something is changed, the user's own rather than a library's."""
    last, changing = list[Location](), list[Location]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if changing:
            return None
        if last and is_changed():
            changing.extend(last)
            return None
        if event != "call":
            begun = frame.f_back if event == "return" else frame  # the line of a call may continue
            lines = sorted(_lines_of(begun), key=lambda line: is_library_file(line.file))
            # The capture runs code of libraries as well, whose frames have no line of the program.
            if lines and (not last or is_library_file(last[0].file) or not is_library_file(lines[0].file)):
                last[:] = lines
        return trace

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        followed = is_of_program(code) and not is_of_python(code.co_filename)
        return trace(frame, event, argument) if followed else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    except Exception:
        pass  # the program's own: it is refused anyway
    finally:
        sys.settrace(before)
    return changing[0] if changing else None


def _lines_of(frame: FrameType | None) -> Iterator[Location]:
    """The lines at which frames of a program are, innermost first, up to those of this package."""
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("functionalize."):
        code = frame.f_code
        if is_of_program(code) and not is_of_python(code.co_filename):
            yield Location(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
