"""Hooks that a program registers on modules and optimizers, and leaves there: entries of dicts, as others are.

Takes the watched objects of a run. Gives the dicts of hooks that it has changed to the watch: most are empty, and no
walk looks into those, so new hooks are recognized by the numbers that torch gives to hooks, one after the other.
Guarantees that none of its hooks is left after a capture. Limits: modules and optimizers that the program reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from functionalize._torch import hooks_of_all
from functionalize.graph_capture.inputs.watched_state import WatchedState
from functionalize.python_state.walk import is_module, joined
from functionalize.refusals.gradients import HOOK_LEFT


class HooksLeft:
    """Where a program may register hooks, from its beginning to its end."""

    def __init__(self, states: Sequence[WatchedState]) -> None:
        self._states, self._first = states, RemovableHandle.next_id

    def __enter__(self) -> HooksLeft:
        self._first = RemovableHandle.next_id
        return self

    def note(self) -> None:
        """Have those that are there now be among what the program changes.

        Raises:
            UnsupportedProgramError: an argument had none there, and a call does not look into its empty dicts.
        """
        for state, path, hooks in self._found():
            if id(hooks) not in state.walk.containers:
                if state is not self._states[0]:
                    raise HOOK_LEFT.error(place=f"in `{path}` of an argument")
                state.watch_late(hooks, path, {key: hook for key, hook in hooks.items() if not self._is_new(key)})

    def __exit__(self, *raised: object) -> None:
        for *_, hooks in self._found():
            for key in filter(self._is_new, list(hooks)):
                del hooks[key]

    def _found(self) -> Iterator[tuple[WatchedState, str, dict[Any, Any]]]:
        """The dicts that hold such hooks, with what they are called."""
        if self._first == RemovableHandle.next_id:
            return
        for state, path, hooks in self._all():
            if any(map(self._is_new, hooks)):
                yield state, path, hooks

    def _is_new(self, key: Any) -> bool:
        return type(key) is int and key >= self._first

    def _all(self) -> Iterator[tuple[WatchedState, str, dict[Any, Any]]]:
        for path, hooks in hooks_of_all().items():
            yield self._states[0], path, hooks
        for state in self._states:
            for item in filter(is_module, list(state.walk.seen)):
                path = state.walk.modules[id(item)]
                pairs = ((name, hooks) for name, hooks in item.__dict__.items() if "_hooks" in name)
                yield from ((state, joined(path, name), hooks) for name, hooks in pairs if isinstance(hooks, dict))
