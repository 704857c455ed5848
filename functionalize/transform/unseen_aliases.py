"""Tensors that got the memory of others unseen by modes: ``torch.nn.Parameter(tensor)``, in a real trace.

The tracer would take such a tensor for a constant. Here it stands for the node of the tensor that it was made from, and
whose memory it has. (A fake tensor is not plain: a parameter is made from it by ``detach()``, which modes see.)

Invariant: holds the tensors that the program can still make aliases of, and few others. Limits: an alias has the
layout of a tensor that the program got from an op, or was passed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from functionalize._torch import has_others, storage_key
from functionalize.aliasing.alias_graph import AliasGraph
from functionalize.aliasing.geometry import Layout
from functionalize.transform.values import ValueExecutor

_FEW = 16  # unshared tensors are dropped once there are twice as many as after the last time, plus this


class UnseenAliases:
    """The tensors of a trace, by storage and layout."""

    def __init__(self, executor: ValueExecutor, graph: AliasGraph) -> None:
        self._executor, self._graph = executor, graph
        self._known: dict[int, dict[Any, torch.Tensor]] = {}
        self._limit = _FEW

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors that the tracer knows."""
        for tensor in tensors:
            key = storage_key(tensor)
            if key > 0:
                self._known.setdefault(key, {}).setdefault(Layout.of(tensor).key, tensor)
        if len(self._known) > self._limit:
            self._drop_unreached()
            self._limit = 2 * len(self._known) + _FEW

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let constants of the tracer that have the memory of a tensor noted before stand for that tensor."""
        for tensor in tensors:
            together = self._known.get(storage_key(tensor))
            original = None if together is None else together.get(Layout.of(tensor).key)
            if original is None or original is tensor or not self._executor.is_constant(tensor):
                continue
            view = self._graph.find(tensor)
            self._graph.track(tensor, self._graph.ensure(original) if view is None else view)
            self._executor.retarget_proxy(tensor, original)

    def let_go(self, tensor: torch.Tensor) -> None:
        """Drop one tensor."""
        together = self._known.get(storage_key(tensor), {})
        for layout in [layout for layout, other in together.items() if other is tensor]:
            del together[layout]

    def forget(self) -> None:
        """Drop all tensors: the run has ended."""
        self._known.clear()

    def _drop_unreached(self) -> None:
        """Drop the tensors that are alone with their storages and held only here."""
        alone = {
            key: {layout: weakref.ref(tensor) for layout, tensor in together.items()}
            for key, together in self._known.items()
            if not has_others(key, len(together))
        }
        for key in alone:
            del self._known[key]
        for key, together in alone.items():
            reached = {layout: tensor for layout, ref in together.items() if (tensor := ref()) is not None}
            if reached:
                self._known[key] = reached
