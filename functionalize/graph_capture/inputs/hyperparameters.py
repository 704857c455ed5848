"""Python numbers of a program's state that are inputs of its graph: hyperparameters of optimizers, and what changes.

A call makes a tensor of such a number; the program gets what ``item()`` gives of that. Where it only computes with it,
any value will do; where Python must know it, that is a decision by data.

Invariant: after a capture each number is in its place. Limits: a number is one to Python's operators and to
``isinstance``, not by its ``__class__``, and has no hash.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dis import opmap
from typing import Any, NamedTuple, TypeVar

import torch

from functionalize.python_state.code_names import assigned
from functionalize.python_state.containers import SetItems, Variable, entry, place_of, unchanged, write
from functionalize.python_state.slots import NUMBERS, ContainerSource, NumberSlot, Slot, is_number
from functionalize.python_state.traversal_rules import key_behind
from functionalize.python_state.walk import StateWalk
from functionalize.refusals.python_objects import HYPERPARAMETERS_CHANGED, HYPERPARAMETERS_KEPT
from functionalize.runtime.guards.python_guards import PythonGuard, PythonGuards, is_numbers, is_whole

Result = TypeVar("Result")
_MATCH_CLASS = opmap["MATCH_CLASS"]
Place = tuple[int, Any]  # the identity of a container, and a key


class _Number(NamedTuple):
    """A number, or a list of numbers, that a program may decide by."""

    guard: PythonGuard
    steps: tuple[int, ...]  # into the tuples that the guard holds
    path: str
    value: Any


class ChangingNumbers:
    """Which numbers are inputs, of one program: it sees what each capture finds."""

    def __init__(self) -> None:
        self._last: list[PythonGuard] = []  # of the last capture
        self._changing: set[str] = set()
        self._expected: set[str] = set()  # to change, as others of the same object have
        self._expects = True
        self.tied: list[
            tuple[PythonGuard, PythonGuard]
        ] = []  # further places of lists of the last capture, and the first
        self.follows_steps = False  # whether schedules are stepped in the graph, and not by calls
        self.converts = True  # whether `float` and `int` give symbols
        self._constant: set[str] = set()  # of which the program asks what only numbers of Python's can do

    def give_up(self) -> bool:
        """Have what has changed be constants again, first what was only expected to; false where there is nothing."""
        expected = self._expected - self._changing
        if expected:
            self._expected, self._expects = set(), False
            return True
        given = self._changing - self._constant
        self._constant |= given
        return bool(given)

    def without_conversions(self, captured: Callable[[], Result]) -> Result:
        """Capture with Python's own `float` and `int`, from now on if that is possible: something takes no symbols."""
        self.converts = False
        try:
            return captured()
        except BaseException:
            self.converts = True
            raise

    def expect(self, paths: Iterable[str]) -> None:
        """Have numbers be inputs that have not changed yet."""
        self._changing |= set(map(_kind, paths))

    def found(self, state: StateWalk, guards: PythonGuards, codes: Set[types.CodeType]) -> list[NumberSlot]:
        """The inputs among the numbers that a program may decide by; these are no guards any more.

        ``codes``: of the functions that the program may come to.
        """
        groups, last, self._last = _groups_of(state), self._last, guards.rows
        if not (groups or self._changing or self._expected) and _are_unchanged(last, guards.rows):
            return []  # as in most captures: of programs that train nothing, the first one and that with gradients
        places = Counter(id(slot.get()) for slot in state.entered)
        candidates = [one for one in _found_in(guards.rows) if not isinstance(one.guard.container, SetItems)]
        shared = Counter(id(one.value) for one in candidates if type(one.value) is list)
        candidates = [one for one in candidates if places[id(one.value)] in (0, shared[id(one.value)])]
        before = {one.path: one.value for one in _found_in(last)}
        self._changing |= {_kind(one.path) for one in candidates if _differ(before.get(one.path, one.value), one.value)}
        self._expect(candidates, state, codes)
        wanted = set() if any(map(_asks_classes, codes)) else (self._changing | self._expected) - self._constant
        rates = {id(one) for one in guards.rows if _is_hyperparameter(one, groups)}
        taken = [one for one in candidates if _kind(one.path) in wanted or id(one.guard) in rates]
        whole = [one.guard for one in taken if not one.steps]
        whole += [one for one in guards.rows if type(one.value) is tuple and id(one) in rates]
        places_taken = {(id(one.container), one.key) for one in whole}
        lists = {id(one.value) for one in whole if type(one.value) is list}
        guards.rows = [
            one
            for one in guards.rows
            if (id(one.container), one.key) not in places_taken and id(one.container) not in lists
        ]
        unique = {(id(one.container), one.key): one for one in whole if id(one.container) not in lists}
        slots = [slot for one in self._tied(unique.values(), guards) for slot in _slots(one)]
        return [*slots, *_in_tuples([one for one in taken if one.steps and id(one.guard) not in rates], guards)]

    def _expect(self, candidates: Sequence[_Number], state: StateWalk, codes: Set[types.CodeType]) -> None:
        """Expect a number to change that the program assigns, once another one of the same object has."""
        changed = {id(one.guard.container) for one in candidates if _kind(one.path) in self._changing}
        if not (self._expects and changed):
            return
        kinds = {type(item) for item in state.seen if id(getattr(item, "__dict__", None)) in changed}
        names = assigned(codes, kinds)
        of_these = [one for one in candidates if id(one.guard.container) in changed and one.guard.key in names]
        self._expected |= {_kind(one.path) for one in of_these}

    def _tied(self, taken: Iterable[PythonGuard], guards: PythonGuards) -> list[PythonGuard]:
        """Those but for further places of lists, which are tied to the first."""
        first = dict[int, PythonGuard]()
        self.tied = []
        for one in taken:
            before = first.setdefault(id(one.value), one) if type(one.value) is list else one
            if before is not one:
                guards.rows.append(one)
                guards.tie(one, before)
                self.tied.append((one, before))
        further = {id(one) for one, _ in self.tied}
        return [one for one in taken if id(one) not in further]


def _are_unchanged(last: Sequence[PythonGuard], guards: Sequence[PythonGuard]) -> bool:
    """Whether a capture finds the very values of the last one in the same places; so does the first one."""
    if last and len(last) != len(guards):
        return False
    return all(
        (before.container is now.container or before.path == now.path)
        and before.key is now.key
        and (before.value is now.value or is_whole(now.key))
        for before, now in zip(last, guards, strict=False)
    )


@functools.lru_cache(maxsize=1 << 12)
def _asks_classes(code: types.CodeType) -> bool:
    """Whether code tells values by their classes as symbols answer for themselves: `match`, `singledispatch`."""
    dispatches = code.co_filename == functools.__file__ and "dispatch" in code.co_freevars
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return dispatches or _MATCH_CLASS in code.co_code[::2] or any(map(_asks_classes, inner))


def _found_in(guards: Iterable[PythonGuard]) -> Iterator[_Number]:
    """The numbers, and lists of numbers, among guards and in the tuples there."""
    for one in guards:
        if is_whole(one.key) or isinstance(key_behind(one.key), torch.Tensor):
            continue
        if is_numbers(one.value):
            yield _Number(one, (), one.path, one.value)
        elif _is_tuple(one.value):
            yield from _items(one, one.value, ())


def _items(guard: PythonGuard, items: tuple[Any, ...], steps: tuple[int, ...]) -> Iterator[_Number]:
    for index, item in enumerate(items):
        at = (*steps, index)
        if is_number(item):
            yield _Number(guard, at, ".".join(map(str, (guard.path, *at))), item)
        elif _is_tuple(item):
            yield from _items(guard, item, at)


def _is_tuple(value: Any) -> bool:
    """Whether a value is a tuple that may hold symbols: a `torch.Size` may not."""
    kind = type(value)  # not `isinstance`, which asks the object: a weak proxy of what is gone raises
    return issubclass(kind, tuple) and not issubclass(kind, torch.Size)


def _in_tuples(taken: Sequence[_Number], guards: PythonGuards) -> Iterator[NumberSlot]:
    """Where numbers in tuples sit; they count no more."""
    steps: dict[Place, list[tuple[int, ...]]] = {}
    for one in taken:
        slot = _slot_of(one.guard)
        steps.setdefault((id(one.guard.container), one.guard.key), []).append(one.steps)
        yield NumberSlot(slot.source, slot.key, one.path, one.steps, True, type(one.value))
    guards.leave_out(steps)


def _kind(path: str) -> str:
    """What numbers have in common that objects of one list have under one name."""
    return re.sub(r"\.\d+(?=\.)", ".*", path)


def _differ(before: Any, now: Any) -> bool:
    """Whether a number is another, or a list of numbers another list."""
    if type(now) is list:  # one that stays is known by its items
        return now is not before
    return is_numbers(before) and repr(before) != repr(now)


def _is_hyperparameter(one: PythonGuard, groups: set[int]) -> bool:
    values = one.value if type(one.value) is tuple else (one.value,)
    return id(one.container) in groups and bool(values) and all(type(value) is float for value in values)


def _groups_of(state: StateWalk) -> set[int]:
    """The identities of the groups of parameters of the optimizers."""
    optimizers = [item for item in state.seen if isinstance(item, torch.optim.Optimizer)]
    return {id(group) for optimizer in optimizers for group in optimizer.param_groups}


def _slot_of(one: PythonGuard) -> Slot:
    """The slot of a guard; a cell has no entries, but is a variable."""
    if isinstance(one.container, types.CellType):
        return Slot(ContainerSource(Variable(one.container, None)), 0, one.path)
    return Slot(one.source, one.key, one.path)


def _slots(one: PythonGuard) -> Iterator[NumberSlot]:
    slot = _slot_of(one)
    if type(one.value) in NUMBERS:
        yield NumberSlot(slot.source, slot.key, one.path, (), True, type(one.value))
        return
    for index, item in enumerate(one.value):
        path = f"{one.path}.{index}"
        yield NumberSlot(slot.source, slot.key, path, (index,), True, type(item), len(one.value))


class Numbers:
    """The numbers of one run of a program."""

    def __init__(self, pairs: Sequence[tuple[Slot, Any]], tied: Sequence[tuple[PythonGuard, PythonGuard]] = ()) -> None:
        """``pairs``: where each number sits, and the tensor that stands for it; ``tied``: places of one list."""
        self._pairs, self._tied = pairs, tied
        self._lists: list[tuple[Slot, list[Any], list[Any]]] = []

    @property
    def places(self) -> set[Place]:
        """Where they are."""
        return {(id(where), key) for where, key in (place_of(slot.container, slot.key) for slot, _ in self._pairs)}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put the numbers back in the end."""
        slots = [*(slot for slot, _ in self._pairs), *(_slot_of(one) for one, _ in self._tied)]
        before = [(slot.container, slot.key, entry(slot.container, slot.key)) for slot in slots]
        try:
            yield
        finally:
            for container, key, value in before:
                write(container, key, value)

    def place(self) -> None:
        """Have the program find what the graph's inputs come to. To be called where it is recorded."""
        for slot, substitute in self._pairs:
            slot.set(substitute.item())
        for one, first in self._tied:
            _slot_of(one).set(_slot_of(first).get())
        lists = [(slot, entry(slot.container, slot.key)) for slot, _ in self._pairs]
        self._lists = [(slot, items, items.copy()) for slot, items in lists if isinstance(items, list)]

    def check_kept(self, is_reached: Callable[[Any], bool]) -> None:
        """Raise where the program gives a list of numbers itself, or keeps it in another place.

        Raises:
            UnsupportedProgramError: it does.
        """
        for slot, items, _ in self._lists:
            if is_reached(items):
                raise HYPERPARAMETERS_KEPT.error(path=slot.path)

    def check(self) -> None:
        """Raise where the program changed a list of numbers in its place.

        Raises:
            UnsupportedProgramError: it did.
        """
        for slot, items, before in self._lists:
            if not unchanged(items, before):
                raise HYPERPARAMETERS_CHANGED.error(path=slot.path)
