"""Python numbers of a program's state that are inputs of its graph: hyperparameters of optimizers, and what changes.

A call makes a tensor of each number, and the program gets its ``item()``. Where the program only computes with the
number, one graph serves all values; where Python must know the value, the capture records a decision.

Invariant: after a capture each number is in its place. Limits: it behaves like a number for Python's operators and for
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
from functionalize.python_state.decompose import dict_of
from functionalize.python_state.slots import NUMBERS, ContainerSource, NumberSlot, Slot, is_number
from functionalize.python_state.traversal_rules import key_behind
from functionalize.python_state.walk import StateWalk
from functionalize.refusals.python_objects import HYPERPARAMETERS_CHANGED, HYPERPARAMETERS_KEPT
from functionalize.runtime.guards.python_guards import PythonGuard, PythonGuards, is_numbers, is_whole

Result = TypeVar("Result")
_MATCH_CLASS = opmap["MATCH_CLASS"]
Place = tuple[int, Any]  # the identity of a container, and a key


class _Number(NamedTuple):
    """A number, or a list of numbers, that a program may branch on."""

    guard: PythonGuard
    steps: tuple[int, ...]  # into the tuples at the guard
    path: str
    value: Any


class ChangingNumbers:
    """Finds out which numbers of one program are inputs, from what each capture of it finds."""

    def __init__(self) -> None:
        self._last: Callable[[], Sequence[PythonGuard]] = tuple  # gives the guards of the last capture
        self._changing: set[str] = set()
        self._expected: set[str] = set()  # to change, like other numbers of the same object
        self._expects = True
        self.tied: list[
            tuple[PythonGuard, PythonGuard]
        ] = []  # lists of the last capture in several places: each place, and the first
        self.follows_steps = False  # whether schedules are stepped in the graph, and not by calls
        self.converts = True  # whether `float` and `int` return symbols
        self._constant: set[str] = set()  # numbers that the program uses as only Python's numbers allow

    def give_up(self) -> bool:
        """Make changing numbers constants again, first those only expected to change. Returns whether any were left."""
        expected = self._expected - self._changing
        if expected:
            self._expected, self._expects = set(), False
            return True
        given_up = self._changing - self._constant
        self._constant |= given_up
        return bool(given_up)

    def without_conversions(self, captured: Callable[[], Result]) -> Result:
        """Capture with Python's own `float` and `int`, and keep them if that works: something accepts no symbols."""
        self.converts = False
        try:
            return captured()
        except BaseException:
            self.converts = True
            raise

    def expect(self, paths: Iterable[str]) -> None:
        """Make inputs of numbers that have not changed yet."""
        self._changing |= set(map(_name_in_all, paths))

    def take_inputs(self, state: StateWalk, guards: PythonGuards, codes: Set[types.CodeType]) -> list[NumberSlot]:
        """The inputs among the numbers that a program may branch on; they stop being guards.

        ``codes``: of the functions that the program may reach.
        """
        groups, last, self._last = _groups_of(state), self._last(), lambda: guards.rows
        expects_none = not (groups or self._changing or self._expected)
        if expects_none and (not last or _are_unchanged(last, guards.rows)):
            return []  # as in most captures of programs that train nothing: the first, and the one with gradients
        rows = guards.rows
        self._last = lambda: rows
        places = Counter(id(slot.get()) for slot in state.entered)
        candidates = [number for number in _numbers_in(guards.rows) if not isinstance(number.guard.container, SetItems)]
        shared = Counter(id(number.value) for number in candidates if type(number.value) is list)
        candidates = [number for number in candidates if places[id(number.value)] in (0, shared[id(number.value)])]
        before = {number.path: number.value for number in _numbers_in(last)}
        self._changing |= {
            _name_in_all(number.path)
            for number in candidates
            if _differ(before.get(number.path, number.value), number.value)
        }
        self._expect(candidates, state, codes)
        wanted = set() if any(map(_asks_classes, codes)) else (self._changing | self._expected) - self._constant
        rates = {id(guard) for guard in guards.rows if _is_hyperparameter(guard, groups)}
        taken = [number for number in candidates if _name_in_all(number.path) in wanted or id(number.guard) in rates]
        whole = [number.guard for number in taken if not number.steps]
        whole += [guard for guard in guards.rows if type(guard.value) is tuple and id(guard) in rates]
        places_taken = {(id(guard.container), guard.key) for guard in whole}
        lists = {id(guard.value) for guard in whole if type(guard.value) is list}
        guards.rows = [
            guard
            for guard in guards.rows
            if (id(guard.container), guard.key) not in places_taken and id(guard.container) not in lists
        ]
        unique = {(id(guard.container), guard.key): guard for guard in whole if id(guard.container) not in lists}
        slots = [slot for guard in self._tied(unique.values(), guards) for slot in _slots(guard)]
        return [
            *slots,
            *_in_tuples([number for number in taken if number.steps and id(number.guard) not in rates], guards),
        ]

    def _expect(self, candidates: Sequence[_Number], state: StateWalk, codes: Set[types.CodeType]) -> None:
        """Expect numbers to change that the program assigns, once another number of the same object has changed."""
        changed = {id(number.guard.container) for number in candidates if _name_in_all(number.path) in self._changing}
        if not (self._expects and changed):
            return
        classes = {type(item) for item in state.seen if id(dict_of(item)) in changed}
        names = assigned(codes, classes)
        of_these = [
            number for number in candidates if id(number.guard.container) in changed and number.guard.key in names
        ]
        self._expected |= {_name_in_all(number.path) for number in of_these}

    def _tied(self, taken: Iterable[PythonGuard], guards: PythonGuards) -> list[PythonGuard]:
        """The guards, without further places of lists, which are tied to the first place."""
        first = dict[int, PythonGuard]()
        self.tied = []
        for guard in taken:
            before = first.setdefault(id(guard.value), guard) if type(guard.value) is list else guard
            if before is not guard:
                guards.rows.append(guard)
                guards.tie(guard, before)
                self.tied.append((guard, before))
        further = {id(guard) for guard, _ in self.tied}
        return [guard for guard in taken if id(guard) not in further]


def _are_unchanged(last: Sequence[PythonGuard], guards: Sequence[PythonGuard]) -> bool:
    """Whether a capture finds the very values of the last one in the same places; true for the first capture."""
    if last and len(last) != len(guards):
        return False
    return all(
        (before.source.container is now.source.container or before.path == now.path)
        and before.key is now.key
        and (before.value is now.value or is_whole(now.key))
        for before, now in zip(last, guards, strict=False)
    )


@functools.lru_cache(maxsize=1 << 12)
def _asks_classes(code: types.CodeType) -> bool:
    """Whether code branches on classes in ways that symbols answer themselves: `match`, `singledispatch`."""
    dispatches = code.co_filename == functools.__file__ and "dispatch" in code.co_freevars
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return dispatches or _MATCH_CLASS in code.co_code[::2] or any(map(_asks_classes, inner))


def _numbers_in(guards: Iterable[PythonGuard]) -> Iterator[_Number]:
    """The numbers, and lists of numbers, at guards and in the tuples there."""
    for guard in guards:
        if is_whole(guard.key) or isinstance(key_behind(guard.key), torch.Tensor):
            continue
        if is_numbers(guard.value):
            yield _Number(guard, (), guard.path, guard.value)
        elif _is_tuple(guard.value):
            yield from _items(guard, guard.value, ())


def _items(guard: PythonGuard, items: tuple[Any, ...], steps: tuple[int, ...]) -> Iterator[_Number]:
    for index, item in enumerate(items):
        at = (*steps, index)
        if is_number(item):
            yield _Number(guard, at, ".".join(map(str, (guard.path, *at))), item)
        elif _is_tuple(item):
            yield from _items(guard, item, at)


def _is_tuple(value: Any) -> bool:
    """Whether a value is a tuple that may hold symbols: a `torch.Size` may not."""
    cls = type(value)  # not `isinstance`, which asks the object: a dead weak proxy raises
    return issubclass(cls, tuple) and not issubclass(cls, torch.Size)


def _in_tuples(taken: Sequence[_Number], guards: PythonGuards) -> Iterator[NumberSlot]:
    """The slots of numbers in tuples, which guards ignore from now on."""
    steps: dict[Place, list[tuple[int, ...]]] = {}
    for number in taken:
        slot = _slot_of(number.guard)
        steps.setdefault((id(number.guard.container), number.guard.key), []).append(number.steps)
        yield NumberSlot(slot.source, slot.key, number.path, number.steps, True, type(number.value))
    guards.leave_out(steps)


def _name_in_all(path: str) -> str:
    """The path without positions in lists: the numbers of one name share it in all objects of a list."""
    return re.sub(r"\.\d+(?=\.)", ".*", path)


def _differ(before: Any, now: Any) -> bool:
    """Whether a number has another value, or a place another list."""
    if type(now) is list:  # a list that stays is compared by its items
        return now is not before
    return is_numbers(before) and repr(before) != repr(now)


def _is_hyperparameter(guard: PythonGuard, groups: set[int]) -> bool:
    values = guard.value if type(guard.value) is tuple else (guard.value,)
    return id(guard.container) in groups and bool(values) and all(type(value) is float for value in values)


def _groups_of(state: StateWalk) -> set[int]:
    """The identities of the groups of parameters of the optimizers."""
    optimizers = [item for item in state.seen if isinstance(item, torch.optim.Optimizer)]
    return {id(group) for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())}


def _slot_of(guard: PythonGuard) -> Slot:
    """The slot of a guard; that of a cell is a variable, as cells have no entries."""
    if isinstance(guard.container, types.CellType):
        return Slot(ContainerSource(Variable(guard.container, None)), 0, guard.path)
    return Slot(guard.source, guard.key, guard.path)


def _slots(guard: PythonGuard) -> Iterator[NumberSlot]:
    slot = _slot_of(guard)
    if type(guard.value) in NUMBERS:
        yield NumberSlot(slot.source, slot.key, guard.path, (), True, type(guard.value))
        return
    for index, item in enumerate(guard.value):
        path = f"{guard.path}.{index}"
        yield NumberSlot(slot.source, slot.key, path, (index,), True, type(item), len(guard.value))


class Numbers:
    """The numbers of one run of a program."""

    def __init__(self, pairs: Sequence[tuple[Slot, Any]], tied: Sequence[tuple[PythonGuard, PythonGuard]] = ()) -> None:
        """``pairs``: the slot of each number, and the tensor that replaces it; ``tied``: places of one list."""
        self._pairs, self._tied = pairs, tied
        self._lists: list[tuple[Slot, list[Any], list[Any]]] = []

    @property
    def places(self) -> set[Place]:
        """The places of the numbers."""
        return {(id(where), key) for where, key in (place_of(slot.container, slot.key) for slot, _ in self._pairs)}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put the numbers back at the end."""
        slots = [*(slot for slot, _ in self._pairs), *(_slot_of(guard) for guard, _ in self._tied)]
        before = [(slot.container, slot.key, entry(slot.container, slot.key)) for slot in slots]
        try:
            yield
        finally:
            for container, key, value in before:
                write(container, key, value)

    def place(self) -> None:
        """Put the ``item()`` of the graph's inputs in the numbers' places. Called where the program is recorded."""
        for slot, substitute in self._pairs:
            slot.set(substitute.item())
        for guard, first in self._tied:
            _slot_of(guard).set(_slot_of(first).get())
        lists = [(slot, entry(slot.container, slot.key)) for slot, _ in self._pairs]
        self._lists = [(slot, items, items.copy()) for slot, items in lists if isinstance(items, list)]

    def check_kept(self, is_reached: Callable[[Any], bool]) -> None:
        """Raise where the program hands out a list of numbers itself, or keeps it in another place.

        Raises:
            UnsupportedProgramError: it does.
        """
        for slot, items, _ in self._lists:
            if is_reached(items):
                raise HYPERPARAMETERS_KEPT.error(path=slot.path)

    def check(self) -> None:
        """Raise where the program changed a list of numbers in place.

        Raises:
            UnsupportedProgramError: it did.
        """
        for slot, items, before in self._lists:
            if not unchanged(items, before):
                raise HYPERPARAMETERS_CHANGED.error(path=slot.path)
