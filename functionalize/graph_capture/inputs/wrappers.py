"""Wrappers among a program's inputs, while it is captured: made of the fake tensors of their parts.

In: the inputs, with fakes for all parts. Out: the wrappers that the program gets. Guarantees: autograd takes them for
leaves or computed tensors as their originals; what the program does to them, other than to their parts, is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set

import torch

from functionalize._torch.fakes import mark_as
from functionalize._torch.subclasses.wrappers import Wrapping
from functionalize.graph_capture.inputs.inputs import PartInput, TracedInput, WrapperInput
from functionalize.refusals.tensors import WRAPPER_CHANGED, WRAPPER_OF_SYMBOLS
from functionalize.tracing.fakeify import fresh


def refuse_symbolic(inputs: Sequence[TracedInput], dynamic: Set[int]) -> None:
    """Raise if a wrapper, or what it holds, is among the tensors whose sizes may be symbols, by identity.

    Raises:
        UnsupportedProgramError: it is.
    """
    for entry, parts in _wrappers(inputs):
        if any(id(each.value) in dynamic for each in (entry, *parts)):
            raise WRAPPER_OF_SYMBOLS.error(tensor=entry.label, kind=entry.wrapping.name)


def _as_original(original: torch.Tensor) -> bool:
    return original.is_leaf


def wrap_fakes(
    inputs: Sequence[TracedInput], leaf: Callable[[torch.Tensor], bool] = _as_original
) -> dict[int, torch.Tensor]:
    """A wrapper of fake tensors for each wrapper, by the wrapper's identity, which inputs get.

    ``leaf``: whether autograd is to take it for a leaf, by the original.
    """
    made: dict[int, torch.Tensor] = {}
    for entry, parts in _wrappers(inputs):
        key = id(entry.value)
        if key not in made:
            wrapper = entry.wrapping.wrapped([part.fake for part in parts if part.fake is not None])
            mark_as(wrapper, entry.value)
            made[key] = wrapper if leaf(entry.value) else fresh(wrapper)
            vars(made[key]).update(entry.wrapping.attributes)
        entry.fake = made[key]
        if not entry.wrapping.is_static:  # the symbols of autograd's view of it are those of its parts
            entry.wrapping = Wrapping.of(entry.fake)
        for part, fake in zip(parts, entry.wrapping.parts_of(entry.fake), strict=True):
            part.fake = fake
    return made


def frozen_wrapping(wrapper: torch.Tensor, label: str) -> Wrapping:
    """The wrapping of a wrapper of fake tensors, as a call makes it; ``label``: what it is.

    Raises:
        UnsupportedProgramError: it has sizes that its parts do not have.
    """
    wrapping = Wrapping.of(wrapper)
    frozen = wrapping.frozen(wrapping.parts_of(wrapper))
    if frozen is None:
        raise WRAPPER_OF_SYMBOLS.error(tensor=label, kind=wrapping.name)
    return frozen


def refuse_changed(inputs: Sequence[TracedInput]) -> None:
    """Raise where a program changed more of a wrapper than the data of its parts.

    Raises:
        UnsupportedProgramError: it did.
    """
    for entry, parts in _wrappers(inputs):
        assert entry.fake is not None
        change = Wrapping.of(entry.fake).difference(entry.wrapping)
        if change is None:
            held = zip(entry.wrapping.parts_of(entry.fake), parts, strict=True)
            change = next((f"`{'.'.join(part.path)}`" for now, part in held if now is not part.fake), None)
        if change is not None:
            raise WRAPPER_CHANGED.error(tensor=entry.label, kind=entry.wrapping.name, part=change)


def _wrappers(inputs: Sequence[TracedInput]) -> list[tuple[WrapperInput, list[PartInput]]]:
    """The wrappers, each with its parts."""
    parts: dict[int, list[PartInput]] = defaultdict(list)
    for entry in inputs:
        if type(entry) is PartInput:
            parts[id(entry.wrapper)].append(entry)
    return [(entry, parts[id(entry)]) for entry in inputs if type(entry) is WrapperInput]
