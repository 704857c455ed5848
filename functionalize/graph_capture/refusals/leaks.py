"""Traced tensors that outlive their capture: it finds those still alive, and refuses them by their holders.

It also restores the versions of tensors that a program wrote though they are not in its state.

Invariant: after a capture only the program holds its fake tensors, or an error names another holder. Caches by
arguments (``functools.lru_cache``) that hold some are emptied: their next caller fills them with its own tensors.
Hooks on gradients of such tensors are dropped: a hook that refers to its own tensor is never collected, as autograd
holds it. Limits: holders in C++ are not seen.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils.hooks import RemovableHandle

from functionalize._torch import FakeTensor, gradient_hooks, set_versions
from functionalize.call_stack import Origin
from functionalize.refusals.python_objects import GRADIENT_LEFT_ELSEWHERE, TENSOR_HELD_ELSEWHERE

_LRU_CACHE = type(functools.lru_cache(lambda: None))
_PASSED = (list, tuple, dict, set, types.CellType)  # holders that have no name
_IGNORED = (types.FrameType, weakref.ReferenceType)
_OF_PYTHON = 1 << 9  # the flag of a class that a `class` statement has made
_MOMENT = 0.2  # seconds
_STEPS = 4  # how many levels of holders are searched


class Traced:
    """The tensors that one capture traced, without holding them."""

    def __init__(self, nodes: Mapping[torch.Tensor, Any], earlier: Iterable[Any]) -> None:
        """``nodes``: what each living tensor stands for in the graph; ``earlier``: tensors from before the capture."""
        self._nodes, self._earlier = nodes, set(map(id, earlier))
        self._first_hook = RemovableHandle.next_id

    def alive(self) -> list[tuple[torch.Tensor, Any]]:
        """The traced tensors that somebody holds, each with what it stands for."""
        fakes = ((tensor, entry) for tensor, entry in self._nodes.items() if isinstance(tensor, FakeTensor))
        return [(tensor, entry) for tensor, entry in fakes if id(tensor) not in self._earlier]

    def empty_caches(self) -> None:
        """Empty the caches by arguments that hold traced tensors."""
        traced = set(map(id, self._nodes))
        if traced:
            for cache in [value for value in gc.get_objects() if type(value) is _LRU_CACHE]:
                if _reaches(cache, traced):
                    cache.cache_clear()

    def _kept(self) -> list[Any]:
        """Chains of holders of traced tensors, without those of this package."""
        chains = _holders([tensor for tensor, _ in self.alive()])
        own = set(map(id, chains))
        return [chain for chain in _whole(chains) if not (any(map(_is_ours, chain)) or _is_unnamed(chain[-1], own))]

    def _drop_hooks(self) -> None:
        """Drop the hooks on gradients that the run has registered; all others are those of the originals."""
        for hooks in [hooks for tensor, _ in self.alive() for hooks in gradient_hooks(tensor)]:
            for key in [key for key in hooks if key >= self._first_hook]:
                del hooks[key]

    def check(self) -> None:
        """Raise if a traced tensor is still held, once the capture has ended.

        Raises:
            UnsupportedProgramError: it is.
        """
        if not self.alive():
            return
        self._drop_hooks()
        gc.collect()  # reference cycles
        self.empty_caches()
        others = self._kept()
        if others and threading.active_count() > 1:  # a thread that met a tensor is about to raise, and drops it
            del others
            time.sleep(_MOMENT)
            others = self._kept()
        if not others:  # held by the program itself, or by code in C++, which has no names
            return
        tensor = others[0][0]
        raise TENSOR_HELD_ELSEWHERE.error(
            _line_of(self._nodes[tensor]), size=tuple(tensor.size()), holder=_named(others)
        )


def _is_unnamed(holder: Any, own: set[int]) -> bool:
    """Whether no object of Python's holds a holder: code in C++ does, as autograd holds what hooks have packed.

    ``own``: the objects of this search.
    """
    if not (isinstance(holder, (torch.Tensor, *_PASSED)) or type(holder).__flags__ & _OF_PYTHON):
        return False
    further = [referrer for referrer in gc.get_referrers(holder) if not isinstance(referrer, _IGNORED)]
    return all(id(referrer) in own for referrer in further)


def take_back(written: Iterable[tuple[torch.Tensor, int]], constants: Iterable[torch.Tensor]) -> None:
    """Restore tensors that are not in the program's state.

    ``written``: those that it wrote, with their versions before; ``constants``: all of them.

    Raises:
        UnsupportedProgramError: the program left a gradient on one.
    """
    for tensor, version in written:
        set_versions([tensor], [version])
    left = [tensor for tensor in constants if tensor.is_leaf and isinstance(tensor.grad, FakeTensor)]
    for tensor in left:
        tensor.grad = None
    if left:
        raise GRADIENT_LEFT_ELSEWHERE.error(size=tuple(left[0].size()))


def _reaches(cache: Any, traced: set[int]) -> bool:
    """Whether a cache holds one of the traced objects, perhaps in containers."""
    fringe = [cache]
    for _ in range(_STEPS):
        fringe = [part for holder in fringe for part in gc.get_referents(holder)]
        if any(id(part) in traced for part in fringe):
            return True
        fringe = [part for part in fringe if isinstance(part, _PASSED) and not _is_global(part)]
    return False


def _line_of(entry: Any) -> object:
    """Where in the user's code a tensor was made, if that is known."""
    node = getattr(entry, "node", None)
    origin = node.meta.get("stack_trace") if isinstance(node, Node) else None
    return origin.location if isinstance(origin, Origin) else origin and origin.strip().replace("\n", " ")


def _holders(tensors: list[Any]) -> list[tuple[Any, ...]]:
    """The holders of some tensors, their holders, and so on a few steps up: chains that begin with a tensor."""
    held_by: list[tuple[Any, ...]] = []
    chains: dict[int, tuple[Any, ...]] = {id(tensor): (tensor,) for tensor in tensors}
    own: list[Any] = [held_by, chains, tensors]  # of this search, which hold its objects
    seen, fringe = set(chains), tensors
    for _ in range(_STEPS):
        holders = gc.get_referrers(*fringe) if fringe else []
        below, fringe = set(map(id, fringe)), []
        own += [holders, fringe]
        ignored = {id(own), *map(id, own), *map(id, chains.values()), *map(id, held_by)} | seen
        for holder in holders:
            if id(holder) in ignored or isinstance(holder, _IGNORED):
                continue
            part = next((part for part in gc.get_referents(holder) if id(part) in below), None)
            if part is None:
                continue
            seen.add(id(holder))
            chains[id(holder)] = (*chains[id(part)], holder)
            held_by.append(chains[id(holder)])
            if isinstance(holder, (*_PASSED, torch.Tensor)) and not _is_global(holder):
                fringe.append(holder)
    return held_by


def _is_ours(holder: Any) -> bool:
    """Whether an object is part of a captured program, or of what an error kept of a capture."""
    return isinstance(holder, Node) or str(type(holder).__module__).startswith("functionalize.")


def _is_global(holder: Any) -> bool:
    """Whether an object is the dict of a module's variables."""
    return isinstance(holder, dict) and "__name__" in holder and "__builtins__" in holder


def _whole(chains: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The chains that are not the beginning of another chain."""
    beginnings = {tuple(map(id, chain[:count])) for chain in chains for count in range(len(chain))}
    return [chain for chain in chains if tuple(map(id, chain)) not in beginnings]


def _named(chains: list[tuple[Any, ...]]) -> str:
    """The holder at the end of some chains, in words."""
    for chain in chains:
        if _is_global(chain[-1]):
            name = next((name for name, value in chain[-1].items() if value is chain[-2]), "?")
            return f"the global variable `{name}` of {chain[-1]['__name__']}"
    named = (chain[-1] for chain in chains if not isinstance(chain[-1], _PASSED))
    return f"an object of the class {type(next(named, chains[0][-1])).__qualname__}"
