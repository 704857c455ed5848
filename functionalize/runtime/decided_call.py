"""What a call of a program with decisions does before it writes: it finds out whether the data decide as captured.

Invariant: a call that decides otherwise has changed nothing, and has drawn no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize.runtime.decisions import Diverged
from functionalize.runtime.execution import Computed
from functionalize.runtime.joint import called
from functionalize.runtime.metadata import ProgramMetadata
from functionalize.runtime.random_state import RandomState


def compute_as_decided(
    metadata: ProgramMetadata, function: Callable[..., Any], inputs: Sequence[Any], computed: Callable[[], Computed]
) -> Computed:
    """What ``computed`` gives of a graph with decisions. ``function``: the graph, which compares each in its place.

    Raises:
        Diverged: one came out otherwise.
    """
    random = RandomState.now(metadata.graph.draws, {metadata.inputs[n].name: inputs[n] for n in metadata.taken})
    try:
        return computed()
    except Diverged as error:
        diverged = error
    except Exception:  # perhaps of what the program does only where the data decide as captured
        with random.again():
            found = _divergence(function, [inputs[number] for number in metadata.taken])
        if found is None:
            raise
        diverged = found
    random.restore()
    for number, requires in metadata.requiring:
        if requires:
            inputs[number].requires_grad_(False)
    raise diverged


def _divergence(function: Callable[..., Any], inputs: Sequence[Any]) -> Diverged | None:
    """Which decision comes out otherwise; None where the graph fails without such."""
    try:
        with torch.no_grad():
            called(function, inputs)
    except Diverged as error:
        return error
    except Exception:
        return None
    return None
