"""Hooks that a program registers on modules and optimizers and leaves there: changes of dicts, like other side effects.

Takes the watched objects of a run, and adds the dicts of hooks that the program has changed to them. Most such dicts
are empty, and no walk enters those, so new hooks are recognized by the increasing numbers that torch gives to hooks.
Guarantees that none of the program's hooks is left after a capture. Limits: modules and optimizers that it reaches.
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
    """The modules and optimizers on which a program may register hooks, while it runs."""

    def __init__(self, states: Sequence[WatchedState]) -> None:
        self._states, self._first = states, RemovableHandle.next_id

    def __enter__(self) -> HooksLeft:
        self._first = RemovableHandle.next_id
        return self

    def note(self) -> None:
        """Count the dicts that hold new hooks among what the program changes.

        Raises:
            UnsupportedProgramError: an argument had no hooks there, and a call does not enter its empty dicts.
        """
        for state, path, hooks in self._changed():
            if id(hooks) not in state.walk.containers:
                if state is not self._states[0]:
                    raise HOOK_LEFT.error(place=f"in `{path}` of an argument")
                state.watch_late(hooks, path, {key: hook for key, hook in hooks.items() if not self._is_new(key)})

    def __exit__(self, *raised: object) -> None:
        for *_, hooks in self._changed():
            for key in filter(self._is_new, list(hooks)):
                del hooks[key]

    def _changed(self) -> Iterator[tuple[WatchedState, str, dict[Any, Any]]]:
        """The dicts that hold new hooks, each with its state and path."""
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
