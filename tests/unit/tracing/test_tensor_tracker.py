"""The tracker of tensors: entries count while their tensors live, also where another tensor gets the same identity."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.fx import Graph

from functionalize._torch.symbols.tracing import TensorTracker


def test_entries_end_with_their_tensors() -> None:
    tracker, graph = TensorTracker(), Graph()
    kept, node = torch.ones(2), graph.placeholder("kept")
    tracker.add(kept, node, None)
    seen = set[int]()
    for number in range(50):
        tensor = torch.ones(2)
        assert tensor not in tracker and tracker.node(tensor) is None and tracker.get(tensor) is None
        tracker.add(tensor, graph.placeholder(f"x{number}"), None)
        assert tracker.node(tensor) is not node and len(tracker) == 2
        seen.add(id(tensor))
        del tensor
    assert len(seen) < 50  # identities were used again
    assert list(tracker) == [kept] and tracker.node(kept) is node


def test_what_an_entry_holds_is_dropped_with_the_dead() -> None:
    """An entry of a result that nobody used holds the run that made it, and so the run's other tensors."""
    tracker, held = TensorTracker(), torch.ones(2)
    tracker.add(held, Graph().placeholder("held"), None)
    dead, maker, reference = torch.ones(2), [held], weakref.ref(held)
    entry: Any = maker
    tracker[dead] = entry
    del dead, maker, entry, held
    assert reference() is not None
    assert list(tracker) == [] and reference() is None
