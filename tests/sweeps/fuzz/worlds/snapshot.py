"""What a world is like: every object that its variables reach, in order, with what is compared of each.

Invariant: worlds that are alike have equal snapshots, whatever the identities of their objects are; `Snapshot.exact`
holds these, the bytes and the versions as well, for a world that nobody may have changed.
Limits: hooks on results (docs/limits-kernels.md) are not compared; objects of the standard library and of torch
other than modules, optimizers and schedulers are told by their type; the order of sets is nobody's.
"""

from __future__ import annotations

import collections
import functools
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from functionalize._torch import FakeTensor

_TOLD = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_COUNTED = (
    "_hooks",
    "_hooks_with_kwargs",
    "_hooks_always_called",
    "hooks_dict_ref()",
    "extra_dict_ref",
)  # by ids that all worlds share
_NOT_ENTERED = {"torch": ("nn.modules.", "optim.", "utils.hooks")}


class Snapshot:
    """One world at one time."""

    def __init__(self, roots: dict[str, Any], grown: dict[int, int] | None = None) -> None:
        """``grown``: the versions of tensors by identity, since when growth is told."""
        self.facts: list[tuple[str, Any]] = []  # path, and what is compared
        self.values: dict[int, tuple[str, torch.Tensor]] = {}  # by the place among the facts: numbers of tensors
        self.exact: list[tuple[str, str, Any]] = []
        self.fakes: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self._grown = grown or {}
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, tuple[int, Any]] = {}
        self._held: list[Any] = []
        self._later: list[tuple[set[Any] | frozenset[Any], str]] = []
        self._enter_all(roots.items(), "")
        for items, path in self._later:
            known = sorted(self._numbers.get(id(item), -1) for item in items)
            others = [item for item in items if not isinstance(item, torch.Tensor)]
            self._add(path, ("set", len(items), known, sorted(map(_brief, others))))
            alone = [item for item in items if isinstance(item, torch.Tensor) and id(item) not in self._numbers]
            self._enter_all(enumerate(sorted(alone, key=self._order)), path)
        self._add("default generator", bytes(torch.get_rng_state().tolist()))
        self._add("modes", (torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    def _order(self, tensor: torch.Tensor) -> tuple[str, tuple[int, int], int]:
        """What tells tensors of a set apart that are in no other place: values, the storage and growth if known."""
        known = self._storages.get(tensor.untyped_storage()._cdata, (len(self._storages), 0))
        return _brief(tensor.detach() * 1000 // 1), known, self._growth(tensor)

    def _growth(self, tensor: torch.Tensor) -> int:
        """How often a tensor was written since its version was noted; -1 if it was not."""
        return tensor._version - self._grown.get(id(tensor), tensor._version + 1)

    def _add(self, path: str, fact: Any) -> None:
        self.facts.append((path, fact))
        self.exact.append((path, "what it is", fact))

    def _enter_all(self, items: Any, path: str) -> None:
        for key, value in items:
            self._enter(value, f"{path}.{key}" if path else str(key))

    def _enter(self, value: Any, path: str) -> None:
        if isinstance(value, _TOLD):
            self._add(path, (type(value).__name__, repr(value)))
            return
        number = self._numbers.get(id(value))
        if number is not None:
            self._add(path, ("same as", number))
            return
        self._numbers[id(value)] = len(self._numbers)
        self._held.append(value)
        self.exact.append((path, "identity", id(value)))
        if isinstance(value, torch.Tensor):
            self._tensor(value, path)
        else:
            self._object(value, path)

    def _tensor(self, tensor: torch.Tensor, path: str) -> None:
        if isinstance(tensor, FakeTensor):
            self.fakes.append(path)
            self._add(path, "a FakeTensor")
            return
        self.tensors.append(tensor)
        storage, first = self._storages.setdefault(
            tensor.untyped_storage()._cdata, (len(self._storages), tensor.storage_offset())
        )
        layout = tuple(tensor.shape), tensor.stride(), tensor.dtype, storage, tensor.storage_offset() - first
        autograd = tensor.requires_grad, tensor.is_leaf
        self.values[len(self.facts)] = path, tensor.detach().clone()
        memory = tensor.untyped_storage()
        self.exact.append((path, "version", tensor._version))
        self.exact.append((path, "bytes", (memory.data_ptr(), bytes(memory.tolist()))))
        self._add(path, (type(tensor).__name__, *layout, *autograd))
        if self._growth(tensor) >= 0:
            self._add(f"{path}: versions", self._growth(tensor))
        hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
        for name, registered in zip(("hooks", "post-accumulate hooks"), hooks if tensor.is_leaf else (), strict=False):
            self._enter_all(enumerate((registered or {}).values()), f"{path}: {name}")
        if tensor.is_leaf and tensor.grad is not None:
            self._enter(tensor.grad, f"{path}.grad")
        self._enter_all(tensor.__dict__.items() if type(tensor) is torch.nn.Parameter else (), path)

    def _object(self, value: Any, path: str) -> None:
        self._add(path, type(value).__qualname__)
        if isinstance(value, dict):
            for number, (key, item) in enumerate(value.items()):
                if not path.endswith(_COUNTED):
                    self._enter(key, f"{path}: key {number}")
                self._enter(item, f"{path}[{key if isinstance(key, str) else number}]")
        elif isinstance(value, list | tuple | collections.deque):
            self._enter_all(enumerate(value), path)
            self._add(path, (len(value), getattr(value, "maxlen", None)))
        elif isinstance(value, set | frozenset):
            self._later.append((value, path))
        elif isinstance(value, torch.Generator):
            self._add(path, bytes(value.get_state().tolist()))
        elif isinstance(value, weakref.ref):
            self._enter(value(), f"{path}()")
        else:
            self._enter_all(_parts(value), path)

    def versions(self) -> dict[int, int]:
        """The versions of the tensors by identity."""
        return {id(tensor): tensor._version for tensor in self.tensors}

    def differences(self, other: Snapshot) -> Iterator[str]:
        """In what another world is not like this one."""
        for (path, fact), (other_path, other_fact) in zip(self.facts, other.facts, strict=False):
            if path != other_path:
                yield f"{other_path} instead of {path}"
                return
            if fact != other_fact:
                yield f"{path}: {_short(other_fact)} instead of {_short(fact)}"
                return
        if len(self.facts) != len(other.facts):
            yield f"{len(other.facts)} facts instead of {len(self.facts)}"
            return
        for place, (path, tensor) in self.values.items():
            try:
                torch.testing.assert_close(other.values[place][1], tensor, equal_nan=True)
            except AssertionError:
                yield f"{path}: {_numbers(other.values[place][1])} instead of {_numbers(tensor)}"

    def changes(self, later: Snapshot) -> Iterator[str]:
        """What somebody did to a world that nobody may change; object by object, byte by byte."""
        for (path, what, before), (other, _, after) in zip(self.exact, later.exact, strict=False):
            if path != other:
                yield f"{other} instead of {path}"
                return
            if before != after:
                yield f"{path}: {what} {_short(after)} instead of {_short(before)}"
                return
        if len(self.exact) != len(later.exact):
            yield "there is more, or less"


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object that is no container consists of."""
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield "name", value.__qualname__
        yield "defaults", value.__defaults__
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield name, _content(cell)
    elif hasattr(value, "cache_info"):
        yield "fakes", sum(isinstance(item, FakeTensor) for item in _kept(value))  # the rest is its own affair
    elif _is_entered(type(value)):
        counted = "id" if isinstance(value, RemovableHandle) else None
        yield from (item for item in getattr(value, "__dict__", {}).items() if item[0] != counted)
        for name in (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())):
            yield name, getattr(value, name, "absent")


def _kept(cache: Any) -> list[Any]:
    """What a cache holds, which is C's to know: the results are a few references away."""
    found = reached = [cache]
    for _ in range(4):
        reached = [item for item in gc.get_referents(*reached) if not isinstance(item, types.FunctionType | type)]
        found = [*found, *reached]
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _is_entered(kind: type) -> bool:
    root, _, rest = kind.__module__.partition(".")
    return root in ("__main__", "argparse") or (root == "torch" and rest.startswith(_NOT_ENTERED["torch"]))


def _brief(item: Any) -> str:
    return f"{tuple(item.shape)} {item.tolist()}" if isinstance(item, torch.Tensor) else repr(item)


def _short(fact: Any) -> str:
    return f"{hash(fact)} (bytes)" if isinstance(fact, bytes) else str(fact)[:150]


def _numbers(tensor: torch.Tensor) -> str:
    return str([round(number, 4) for number in tensor.flatten().tolist()][:6])
