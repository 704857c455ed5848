"""The table of the names of the process that are replaced while a capture runs a program.

In: what one run needs to answer for its substitutes. Out: the rows, as one context manager. Guarantees that a program
without symbols runs with few replacements: methods of symbols are replaced when the trace makes its first symbol.
Functions of modules are replaced at once: in ``math.sqrt(x.item())`` Python looks up the function before there is a
symbol.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from functionalize._torch.dispatch import kernels_alone
from functionalize._torch.distributed.collectives import of_symbols
from functionalize._torch.subclasses.sharding import PLANNER, dispatcher, planning_once
from functionalize._torch.subclasses.wrappers import DESCRIBING_VIEWS, JAGGED
from functionalize.graph_capture.inputs.tensor_attributes import TensorAttributes
from functionalize.graph_capture.parallel_modules import ParallelModules
from functionalize.graph_capture.refusals.refused_calls import rows_for_processes, rows_for_streams
from functionalize.graph_capture.refusals.started_threads import rows_for_threads
from functionalize.graph_capture.trace.numbers.number_methods import Hashed, rows_for_methods
from functionalize.graph_capture.trace.numbers.numpy_functions import rows_for_numpy
from functionalize.graph_capture.trace.numbers.symbolic_math import rows_for_math
from functionalize.graph_capture.trace.numbers.texts import Texts
from functionalize.graph_capture.trace.patched_type_checks import TypeChecks
from functionalize.graph_capture.trace.random.unread_draws import UnreadDraws
from functionalize.patches import Patch, Patches


@dataclass(frozen=True, eq=False)
class RunPatches:
    """What the rows of one run refer to."""

    tracer: Any
    environment: Any  # of the symbols of the trace; None where there cannot be any
    attributes: TensorAttributes
    texts: Texts
    types: TypeChecks
    draws: UnreadDraws
    hashed: Hashed
    parallel: ParallelModules

    def rows(self) -> Iterator[Patch]:
        """The rows that are installed before the program runs."""
        yield from rows_for_threads()
        yield from rows_for_streams()
        yield from self.parallel.rows()
        yield from rows_for_plans()
        yield from rows_for_jagged()
        yield from rows_for_processes()
        yield from self.draws.rows()
        yield from self.attributes.rows()
        yield from self.types.rows()
        if self.environment is not None:
            yield from rows_for_math(self.tracer)

    def rows_for_symbols(self) -> Iterator[Patch]:
        """Methods of symbols, of loggers and of process groups. A later row of a name builds on the earlier one."""
        yield from rows_for_methods(self.tracer, self.environment, self.texts, self.hashed)
        yield from rows_for_numpy(self.tracer)
        yield from self.texts.rows()
        yield from rows_for_splits()

    def patches(self) -> Patches:
        """All rows, to be entered around the run."""
        return Patches(self.rows(), self.rows_for_symbols)


def rows_for_jagged() -> Iterator[Patch]:
    """Have torch make the tensor that describes views to nested ones, which it keeps, outside of the trace."""
    yield Patch(JAGGED, DESCRIBING_VIEWS, lambda describing: kernels_alone()(describing))


def rows_for_plans() -> Iterator[Patch]:
    """Have DTensor plan an optimizer's parameters of equal sizes and placements once."""
    cls = dispatcher()
    if cls is not None:
        yield Patch(cls, PLANNER, planning_once)


def rows_for_splits() -> Iterator[Patch]:
    """Have process groups take symbols for the splits of `all_to_all_single`: in C++ they take plain numbers."""
    if torch.distributed.is_available():
        yield Patch(torch.distributed.ProcessGroup, "all_to_all_single", of_symbols)


@contextlib.contextmanager
def symbols_expected(environment: Any, install: Callable[[], None], *, at_once: bool) -> Iterator[None]:
    """Install rows when a trace makes its first symbol.

    ``at_once``: there are symbols from the beginning, as there may be in an environment that is not this package's.
    """
    ours = hasattr(environment, "on_data_symbol")
    if at_once or (environment is not None and not ours):
        install()
        yield
        return

    def begin() -> None:
        environment.on_data_symbol = None
        install()

    if ours:
        environment.on_data_symbol = begin
    try:
        yield
    finally:
        if ours:
            environment.on_data_symbol = None
