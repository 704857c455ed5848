"""What a call left, to be compared: tensors and numbers of any object, by their paths.

Invariant: two observations are equal where nobody could tell the calls apart by their results, buffers and gradients.
Limits: objects are looked into by their items, attributes and slots; iterators are not.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


def leaves(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values of any object, with their paths; types of the objects between, too."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        yield path, value
        return
    if id(value) in seen or isinstance(value, type) or (callable(value) and not isinstance(value, nn.Module)):
        return
    seen.add(id(value))
    yield f"{path}:type", type(value).__name__
    for name, part in _parts(value):
        yield from leaves(part, path + name, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, Set):
        yield from ((f"{{{place}}}", part) for place, part in enumerate(sorted(value, key=repr)))
    attributes = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                attributes[slot] = getattr(value, slot)
    mapped = isinstance(value, Mapping) and dataclasses.is_dataclass(value)  # outputs of transformers: items say all
    for name, part in () if mapped else attributes.items():
        yield f".{name}", part


def fakes(value: Any) -> list[str]:
    """Where fake tensors are in an object."""
    return [path for path, leaf in leaves(value) if isinstance(leaf, FakeTensor)]


@dataclasses.dataclass
class Observation:
    """What a call returned and left, copied, by paths."""

    results: dict[str, Any]
    buffers: dict[str, Any]
    gradients: dict[str, Any]


def observe(results: Any, model: nn.Module) -> Observation:
    """Copy what is to be compared."""
    found = {path: _copied(leaf) for path, leaf in leaves(results)}
    buffers = {name: _copied(buffer) for name, buffer in model.named_buffers()}
    gradients = {name: None if p.grad is None else _copied(p.grad) for name, p in model.named_parameters()}
    return Observation(found, buffers, gradients)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A tensor as it was: a copy of its values, and what a copy does not keep."""

    values: Tensor
    strides: tuple[int, ...]
    requires_grad: bool


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
        return leaf
    return Kept(leaf.detach().clone(), leaf.stride(), leaf.requires_grad)


def difference(expected: Observation, actual: Observation, rounded: Observation | None = None) -> str | None:
    """In what two observations differ first, if they do.

    ``rounded``: one more, which differs from what is expected by roundings alone: values may be as far from that.
    """
    for kind in ("results", "buffers", "gradients"):
        ours, theirs = getattr(actual, kind), getattr(expected, kind)
        if list(ours) != list(theirs):
            names = sorted(set(ours) ^ set(theirs))[:2]
            return f"{kind}: other paths, {names}"
        for path, one in theirs.items():
            differs = _difference(one, ours[path], getattr(rounded, kind).get(path) if rounded else None)
            if differs:
                return f"{kind}: {differs}, at {path or 'the root'}"
    return None


def distances(expected: Observation, rounded: Observation | None, kind: str) -> dict[str, float]:
    """How far values may be from what is expected, by path: see :func:`difference`; none where sizes differ."""
    if rounded is None:
        return {}
    found = dict[str, float]()
    for path, one in getattr(expected, kind).items():
        other = getattr(rounded, kind).get(path)
        if not isinstance(one, Kept) or not isinstance(other, Kept) or one.values.shape != other.values.shape:
            continue
        if one.values.is_floating_point() and one.values.numel():
            found[path] = _FARTHER * float((one.values - other.values).abs().max())
    return found


_FARTHER = 4  # times as far as what differs by roundings


def _difference(expected: Any, actual: Any, rounded: Any = None) -> str | None:
    if isinstance(actual, FakeTensor):
        return "a FakeTensor"
    if not isinstance(expected, Kept) or not isinstance(actual, Kept):
        same = type(expected) is type(actual) and (expected == actual or expected != expected)
        return None if same else f"{actual!r:.80} instead of {expected!r:.80}"
    one, other = actual.values, expected.values
    for what, ours, theirs in (
        ("dtype", one.dtype, other.dtype),
        ("shape", tuple(one.shape), tuple(other.shape)),
        ("requires_grad", actual.requires_grad, expected.requires_grad),
        ("strides", _told(actual), _told(expected)),
    ):
        if ours != theirs:
            return f"{what} {ours} instead of {theirs}"
    if isinstance(rounded, Kept) and other.is_floating_point() and rounded.values.shape == other.shape:
        far = (rounded.values - other).abs().max() if other.numel() else torch.zeros(())
        if bool(((one - other).abs() <= _FARTHER * far).all()):
            return None
    try:
        torch.testing.assert_close(one, other, equal_nan=True)
    except AssertionError as error:
        return "values: " + " ".join(str(error).split())[:120]
    return None


def _told(kept: Kept) -> list[int]:
    """Strides that say where elements are: not those of dimensions with one element, nor of tensors without any."""
    pairs = zip(kept.strides, kept.values.shape, strict=True)
    return [stride for stride, size in pairs if size != 1] if kept.values.numel() else []
