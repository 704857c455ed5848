"""The program being functionalized: its alias graph and the domain of its values, seen through handles.

Invariant: between two ops every handle has one current value, and a real handle's memory holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functionalize.alias_graph import AliasGraph, View
from functionalize.domains.tensors import TensorsDomain, same_strides
from functionalize.regenerate import commit, regenerate
from functionalize.view_rules import Value


class Program:
    """What the ops of one call act on."""

    def __init__(self, domain: TensorsDomain) -> None:
        self.domain = domain
        self.graph = AliasGraph()

    def value(self, handle: torch.Tensor) -> Value:
        """What a handle is worth now."""
        view = self.graph.find(handle)
        return handle if view is None else self.read(view)

    def read(self, view: View) -> Value:
        """What a view is worth now."""
        return regenerate(self.domain.call, view)

    def write(self, handle: torch.Tensor, value: Value, *, borrowed: bool = False) -> None:
        """The program wrote ``value``, of the handle's shape and dtype, to a handle."""
        view = self.graph.ensure(handle)
        base = view.base
        root_handle = base.original and base.original()
        if not base.log and root_handle is not None:
            self.graph.track(root_handle, base.root)
        self.graph.track(handle, view)
        commit(view, self.domain.freeze(value) if borrowed else value, borrowed=borrowed)
        self.domain.show(handle, value)

    def unshare(self, handle: torch.Tensor) -> None:
        """Part a handle whose metadata is about to change from the value that it may be."""
        root = self.graph.ensure(handle).base.root
        if root.value is handle:
            root.value = self.domain.alias(handle)
            self.graph.track(handle, root)

    def values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any], bool]:
        """Arguments with handles replaced by values, and whether some value has other strides than its handle."""
        skewed = False

        def replaced(arg: Any) -> Any:
            nonlocal skewed
            if isinstance(arg, torch.Tensor):
                value = self.value(arg)
                skewed = skewed or (value is not arg and not _alike(value, arg))
                return value
            if isinstance(arg, (list, tuple)):
                return [replaced(item) for item in arg]
            return arg

        new_kwargs = {name: replaced(arg) for name, arg in kwargs.items()} if kwargs else kwargs
        return [replaced(arg) for arg in args], new_kwargs, skewed

    def rehandle(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
        """Give results of an op on skewed values the strides that eager gives them: they are handles from now on."""
        handles = self.domain.expected(func, args, kwargs, out)
        for handle, value in zip(_tensors(handles), _tensors(out), strict=True):
            if handle is not value:
                self.graph.adopt(handle, value)
        return handles


def _alike(value: Value, handle: torch.Tensor) -> bool:
    return value.layout is not torch.strided or same_strides(value, handle)


def _tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    return [leaf for item in out for leaf in _tensors(item)] if isinstance(out, (list, tuple)) else []
