"""Puts each wait for a collective as late as it can be, so that what does not read its result runs meanwhile.

In: a graph. Out: the same graph, each wait just before the first node that reads it. Guarantees: collectives keep their
order. Limits: a collective whose result is read at once overlaps with nothing.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def sink_waits(graph: Graph) -> None:
    """Move each wait down to its first reader, or to the end."""
    waits = graph.find_nodes(op="call_function", target=_WAIT)
    for wait in reversed(waits):  # a wait for a wait moves first
        (min(wait.users) if wait.users else graph.output_node()).prepend(wait)
