"""Fast calls of a program that returns its graph's results unchanged: no view of an input, no object, no new gradient.

Most programs do. After a first call, one generated function goes from the arguments to what the program returns,
without the steps of a general call. It checks that the graph's results have the layouts of that first call.

Invariant: it does what the guards and the stages of a call do. Limits: calls that autograd does not record, with
arguments that are tensors and plain values; other calls take the general path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize._torch.dispatch import (
    BelowVersions,
    TensorGuards,
    any_autocast,
    in_functorch_transform,
)
from functionalize._torch.tensors import count_writes
from functionalize.python_state.reconstruct import TensorRef
from functionalize.runtime.arguments import CallingConvention
from functionalize.runtime.autograd.joint import called
from functionalize.runtime.calls.bindings import bound
from functionalize.runtime.guards.compiled import FunctionWriter, items_of
from functionalize.runtime.guards.guard import FastCode
from functionalize.runtime.metadata import AliasKind, InputMutation, ProgramMetadata

CallFunction = Callable[[Sequence[Any], dict[str, Any]], Any]  # what a program returns; None: take the general path
_copy = torch.ops.aten.copy_.default._op


@dataclass(frozen=True, eq=False)
class FastCall:
    """The parts of which the function for fast calls is made."""

    metadata: ProgramMetadata
    convention: CallingConvention
    function: Callable[..., Any]  # the graph
    may_fail: bool  # whether an operator may raise, with nothing written: the general path then runs the program
    assemble: Callable[[Sequence[Any]], Any]  # from leaves to what the program returns
    general: Callable[[list[Any], Sequence[Any]], Any]  # the same for results with other layouts

    def call(
        self, guards: FastCode, inputs: Sequence[Any], results: Sequence[Any], leaves: Sequence[Any]
    ) -> CallFunction | None:
        """The function, made from the ``inputs``, the graph's ``results`` and the returned ``leaves`` of one call.

        None if a call does more than that.
        """
        returned = self._returned(results, leaves)
        if not returned or guards.needs_arguments or not guards.is_flat:
            return None
        names, keywords = self.convention.names, self.convention.keywords
        writer = FunctionWriter()
        writer.refuse("in_transform() is not None", in_transform=in_functorch_transform)
        writer.refuse(f"{'tuple(kwargs) != keywords' if keywords else 'kwargs'} or len(args) != {len(names)}")
        writer.lines.append(f"leaves = {'(*args, *kwargs.values())' if keywords else 'args'}")
        writer.lines += guards.body.lines
        writer.names |= {
            "keywords": keywords,
            **guards.body.names,
            **self._names(inputs, [results[n] for n in returned]),
        }
        writer.lines += self._lines(returned)
        call: CallFunction = writer.function("args, kwargs")
        return call

    def _returned(self, results: Sequence[Any], leaves: Sequence[Any]) -> list[int]:
        """The results of the graph that the program returns unchanged; empty if it does more."""
        metadata = self.metadata
        others = (
            metadata.bases,
            metadata.gradients,
            metadata.left,
            metadata.requiring,
            metadata.symbols.inputs,
            metadata.symbols.asserted,
            metadata.graph.decisions,
        )
        if any(others) or metadata.graph.keeps_workspaces or not all(map(_is_plain, metadata.mutations)):
            return []
        outputs = [metadata.outputs[part.number] for part in metadata.results if isinstance(part, TensorRef)]
        own = [alias for alias in outputs if alias.kind is AliasKind.RESULT and alias.gradient is None]
        returned = [alias.result for alias in own if alias.result is not None]
        plain = len(returned) == len(leaves) and all(map(_is_returned, (results[n] for n in returned), leaves))
        return returned if plain else []

    def _names(self, inputs: Sequence[Any], returned: Sequence[torch.Tensor]) -> dict[str, Any]:
        sizes: list[Any] = [list(result.size()) for result in returned]
        strides: list[Any] = [list(result.stride()) for result in returned]
        function = bound(self.function, inputs)  # the guards have checked that no function mode is on
        guards = TensorGuards(*returned, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return {
            # The guards have checked whether autocast is on.
            "graph": (lambda *inputs: called(function, inputs)) if any_autocast() else function,
            "unseen": BelowVersions,
            "copy": _copy,
            "count": count_writes,
            "alike": guards.check,
            "assemble": self.assemble,
            "general": self.general,
        }

    def _lines(self, returned: Sequence[int]) -> list[str]:
        taken = items_of("inputs", self.metadata.taken, len(self.metadata.inputs))
        leaves = ", ".join(f"results[{number}]" for number in returned)
        copies = [(write.result, m.input) for m in self.metadata.mutations for write in m.writes]
        return [
            *(["try:"] if self.may_fail else []),
            f"{'    ' if self.may_fail else ''}with unseen(): results = graph({taken})",
            *(["except Exception: return None"] if self.may_fail else []),
            f"if not alike({leaves}): return general(inputs, results)",
            *(["with unseen():"] if copies else []),
            *(f"    if inputs[{n}] is not results[{k}]: copy(inputs[{n}], results[{k}])" for k, n in copies),
            *(f"count(inputs[{n}], {count})" for n, count in self.metadata.versions.items()),
            f"return {leaves if self.metadata.spec.is_leaf() else f'assemble(({leaves},))'}",
        ]


def _is_returned(result: Any, leaf: Any) -> bool:
    """Whether a result is what the program returns, and has a layout that torch can compare fast."""
    return result is leaf and leaf.layout is torch.strided and not leaf.is_nested and not leaf.requires_grad


def _is_plain(mutation: InputMutation) -> bool:
    """Whether a mutation only writes an input as a whole."""
    does_more = mutation.metadata or mutation.after or mutation.layout is not None or mutation.differentiable
    return not does_more and not any(write.path for write in mutation.writes)
