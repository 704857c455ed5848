"""An exported program as a captured one that decides where it asserts: what is compared after a run, by whoever calls.

Invariant: the way is that of the exported program, whatever its example inputs hold.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import has_side_effect

from functionalize.backends.export.exported_program import from_exported_program
from functionalize.runtime.calls.program import CapturedProgram
from functionalize.runtime.decisions import Decision

aten = torch.ops.aten
_ASSERTIONS = (aten._assert_scalar.default, aten._assert_async.msg)


@has_side_effect
def _decide(value: Any, answer: Any) -> None:
    """Ask whether a number is what was asserted of it; ``value``: the tensor that it is read off, or the assertion."""
    if not isinstance(value, torch.Tensor):
        bool(value)
    else:
        bool((value.bool() if isinstance(answer, bool) else value) == answer)


@dataclasses.dataclass(frozen=True)
class _Asserted(Decision):
    """``location``: what the assertion says, which is the decision as text."""

    def __str__(self) -> str:
        return self.location


def with_decisions(exported: ExportedProgram) -> CapturedProgram:
    """The program, captured with a decision for each assertion."""
    said = []
    for node in exported.graph.nodes:
        if node.target in _ASSERTIONS:
            said.append(str(node.args[1]))
            node.args, node.target = _asserted(node.args[0]), _decide
    program = from_exported_program(exported)
    if not said:
        return program
    args, kwargs = exported.example_inputs or ((), {})
    program = program.captured_again(args, kwargs, (True,) * len(said))
    decisions = program.current.decisions
    if len(decisions) != len(said):  # some assert what is known by now
        return program
    pairs = zip(decisions, said, strict=True)
    return program.with_decisions([_Asserted(text, one.answer, one.output, one.of_backward) for one, text in pairs])


def _asserted(agrees: Any) -> tuple[Any, Any]:
    """What an assertion is about, and what it is there: numbers as the tensors that they are read off."""
    number: Any = agrees
    answer: Any = True
    if isinstance(agrees, Node) and agrees.target is torch.sym_not:
        number, answer = agrees.args[0], False
    elif isinstance(agrees, Node) and agrees.target is operator.eq:
        number, answer = agrees.args
    if isinstance(number, Node) and number.target is aten._local_scalar_dense.default:
        return number.args[0], answer
    return agrees, True
