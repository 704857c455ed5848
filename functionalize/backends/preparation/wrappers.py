"""Programs that take or return wrappers, as programs of the parts: a dict of tensors in the place of each wrapper.

In: a captured program. Out: one that takes and returns for each wrapper a dict of its parts by their attributes, and
for what a part itself holds a dict again. Guarantees: what is the same tensor in one is the same tensor in the other.
Limits: wrappers in containers that pytrees know; state stays where it is, and the graph takes its parts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from functionalize._torch import pytree
from functionalize._torch.subclasses.wrappers import Wrapping, is_wrapper_class, plain_part
from functionalize.refusals.tensors import WRAPPER_EXPORTED
from functionalize.runtime.metadata import ProgramMetadata

if TYPE_CHECKING:
    from functionalize.runtime.calls.program import CapturedProgram


def passes_wrappers(metadata: ProgramMetadata) -> bool:
    """Whether wrappers are among the arguments or the results of a program, or what it leaves."""
    given = any(alias.wrapping is not None for alias in metadata.outputs)
    return given or any(entry.wrapping is not None and entry.argument is not None for entry in metadata.inputs)


def refuse_wrappers(metadata: ProgramMetadata) -> None:
    """Raise if wrappers are among the arguments or the results of a program, or what it leaves.

    Raises:
        UnsupportedProgramError: they are.
    """
    for number, entry in enumerate(metadata.inputs):
        if entry.wrapping is not None and (entry.argument is not None or number in metadata.gradients):
            gradient = "the gradient of " if number in metadata.gradients else ""
            raise WRAPPER_EXPORTED.error(tensor=f"{gradient}{entry.label}", kind=entry.wrapping.name)
    for alias in metadata.outputs:
        if alias.wrapping is not None:
            raise WRAPPER_EXPORTED.error(tensor="what the program leaves in an object", kind=alias.wrapping.name)


def of_parts(program: CapturedProgram, args: Any, kwargs: Any) -> CapturedProgram:
    """A program as one of the parts of its wrappers; ``args`` and ``kwargs``: examples of its arguments."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    wrappings = [Wrapping.of(leaf) if _is_wrapper(leaf) else None for leaf in leaves]
    args, kwargs = opened((tuple(args), dict(kwargs)))
    adapt = functools.partial(ProgramOfParts, spec=spec, wrappings=wrappings)
    return program.captured_again(args, kwargs, program.current.answers, adapt=adapt)


class ProgramOfParts:
    """A program of wrappers that is called with the parts, and gives the parts."""

    def __init__(
        self, program: Callable[..., Any], *, spec: pytree.TreeSpec, wrappings: Sequence[Wrapping | None]
    ) -> None:
        """``spec``: of its arguments; ``wrappings``: of the leaves of these."""
        self._program, self._spec, self._wrappings = program, spec, wrappings
        functools.update_wrapper(self, program, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._spec.flatten_up_to((args, kwargs))
        made: dict[Any, torch.Tensor] = {}  # one wrapper of the same parts
        for place, wrapping in enumerate(self._wrappings):
            if wrapping is not None:
                parts = [functools.reduce(operator.getitem, path, leaves[place]) for path in wrapping.paths]
                key = wrapping.cls, *map(id, parts)
                if key not in made:
                    made[key] = wrapping.wrapped(parts).requires_grad_(wrapping.requires_grad)
                leaves[place] = made[key]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return opened(self._program(*args, **kwargs))


def opened(tree: Any) -> Any:
    """A pytree with a dict of its parts in the place of each wrapper."""
    return pytree.tree_map(_opened, tree)


def _opened(value: Any) -> Any:
    """A wrapper as a dict of its parts."""
    if not _is_wrapper(value):
        return value
    parts = dict[str, Any]()
    for path in Wrapping.of(value).paths:
        within = parts
        for name in path[:-1]:
            within = within.setdefault(name, {})
        within[path[-1]] = plain_part(value, path)
    return parts


def _is_wrapper(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_wrapper_class(type(value))
