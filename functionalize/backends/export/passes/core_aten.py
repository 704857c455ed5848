"""An exported program by the core ATen set: what torch's own decompositions leave is decomposed, until the set has it.

Invariant: what can be decomposed has torch's tag ``core``. Limits: operators that neither torch's decompositions nor
its composites nor ours decompose, and those with data-dependent sizes, stay; bodies of higher-order operators are
torch's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Set
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from functionalize._torch import OpOverload
from functionalize.backends.decompositions.decompose import decomposed
from functionalize.backends.decompositions.own import DIFFERING
from functionalize.backends.export.passes.views import keep_names, remade


def in_core(exported: ExportedProgram) -> ExportedProgram:
    """The same program, decomposed."""
    return _spelt_out(exported, _is_core)


def without_differing(exported: ExportedProgram, further: Set[Any] = frozenset()) -> ExportedProgram:
    """The same program, where what torch decomposes into something else is decomposed by ours; ``further``, too."""
    return _spelt_out(exported, lambda node: node.target not in DIFFERING | further)


def _spelt_out(exported: ExportedProgram, stays: Callable[[Node], bool]) -> ExportedProgram:
    if all(map(stays, exported.graph.nodes)):
        return exported
    graph, root = decomposed(exported.graph, exported.graph_module, stays)
    keep_names(exported.graph, graph)
    results: Any = graph.output_node().args[0]
    graph.eliminate_dead_code()
    return remade(exported, graph, list(results), root)


def unshared(exported: ExportedProgram) -> ExportedProgram:
    """The same program, whose state that is written has memory of its own: torch takes no other apart.

    What shares memory with state that is written is written as well, by its own output.
    """
    signature = exported.graph_signature
    written = {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}
    for held in (exported.state_dict, exported.constants):
        held.update({name: copy.deepcopy(value) for name, value in held.items() if name in written})
    return exported


def _is_core(node: Node) -> bool:
    return not isinstance(node.target, OpOverload) or torch.Tag.core in node.target.tags
