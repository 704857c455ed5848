"""Where a call reads the symbols of a graph: from its inputs and results, and from outputs that are added for them.

Invariant: a symbol that a call looks up is determined by some size, or is an output. Limits: as for ``SymbolSources``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export.graph_signature import OutputKind

from functionalize._torch.symbols.traced_symbols import symbol_node_of
from functionalize.aliasing.geometry import Layout
from functionalize.graph_capture.finish.outputs import GraphOutputs
from functionalize.graph_capture.inputs.inputs import TracedInput
from functionalize.runtime.metadata import OutputAlias, SymbolSources, frozen_layout, frozen_number

Sized = tuple[Sequence[TracedInput], Mapping[int, Layout], Sequence[OutputAlias]]


def symbol_sources(
    tracer: Any,
    results: GraphOutputs,
    sized: Sized,
    read: tuple[Sequence[Layout], Sequence[Any]],
    asserted: Sequence[Any],
) -> SymbolSources:
    """Where a call reads the symbols that it looks up; a symbol that no size determines becomes an output of the graph.

    ``sized``: inputs, their layouts before the call, and what the caller gets. ``read``: layouts and numbers whose
    symbols a call replaces by integers. ``asserted``: conditions on symbols.
    """
    entries, layouts, aliases = sized
    inputs = [(number, frozen_layout(layout)) for number, layout in layouts.items() if not layout.static]
    numbers = [
        (number, frozen_number(entry.value))
        for number, entry in enumerate(entries)
        if isinstance(entry.value, torch.SymInt)
    ]
    outputs = [(a.result, a.layout) for a in aliases if a.result is not None and not a.layout.static]
    sources = SymbolSources(tuple(inputs), tuple(numbers), tuple(outputs))
    unlearned = sources.unlearned(read[0], [*read[1], *asserted])
    nodes = [(symbol_node_of(tracer, symbol), symbol) for symbol in unlearned]
    computed = [(results.add(node, OutputKind.USER_OUTPUT), s) for node, s in nodes if node is not None]
    sources = replace(sources, computed=tuple(computed))
    learned = sources.learned if asserted else set()
    return replace(sources, asserted=tuple(condition for condition in asserted if condition.free_symbols <= learned))
