"""Whether a call is, for sure, like one that passed the guards: what torch and Python compare fast.

What is compared is written down as the source of one Python function: a call of a small program takes about as long as
a few operators, and so would a loop over a table of what to compare.

Invariant: what passes here would pass the guards. Limits: what does not may pass them nevertheless; calls whose
tensors are not strided, or whose sizes are new, always ask the guards themselves.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch

from functionalize._torch import share_storages, storage_key
from functionalize._torch.dispatch import GlobalStateGuard, TensorGuards, function_modes, in_forward_ad
from functionalize.errors import InputMismatchError
from functionalize.python_state.containers import CodeOf, cell_content
from functionalize.python_state.containers import entry as entry_of
from functionalize.python_state.decompose import HOOKS_OF_MODULES
from functionalize.python_state.slots import NumberSlot, Slot
from functionalize.python_state.traversal_rules import key_behind, keys_of
from functionalize.runtime.arguments import CallArguments, base_of
from functionalize.runtime.guards.guards import Guards
from functionalize.runtime.guards.python_guards import LENGTH, ORDER, SettingsCheck
from functionalize.runtime.guards.tensors import is_answer

# Modes that torch's own check leaves out. They are to be off.
_OFF: dict[str, Callable[[], Any]] = {
    "function_modes": function_modes,
    "inference_mode": torch.is_inference_mode_enabled,
    "forward_ad": in_forward_ad,
}
_EMPTY_IS_FALSE = (dict, OrderedDict, list)  # asked so, they take a third of the time that their length takes
Passes = Callable[[CallArguments], list[Any] | None]  # the program's inputs for a call; None: ask the guards


def fast_guards(guards: Guards, arguments: CallArguments, values: Sequence[Any]) -> FastGuards | None:
    """What compares calls with one that passed; ``values``: the inputs of that call. None in rare cases."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    rare = any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors)
    rare = rare or any(is_on() for is_on in _OFF.values())
    return None if rare else FastGuards(guards, arguments, values)


class Source:
    """The lines of a function, and what the names in it stand for."""

    def __init__(self, lines: Sequence[str] = ()) -> None:
        self.lines = list(lines)
        self.known: dict[str, Any] = {}

    def refuse(self, condition: str, **known: Any) -> None:
        """Return None where a condition holds."""
        self.known |= known
        self.lines.append(f"if {condition}: return None")

    def name(self, kind: str, value: Any) -> str:
        """A name for a value."""
        name = f"{kind}_{len(self.known)}"
        self.known[name] = value
        return name

    def function(self, parameters: str, *ends: str) -> Any:
        """The function; ``ends``: its last lines."""
        body = "\n    ".join([*self.lines, *ends])
        found = dict(self.known)
        exec(compile(f"def function({parameters}):\n    {body}", "<functionalize: fast guards>", "exec"), found)
        return found["function"]


class FastGuards:
    """The source of the comparison: from ``leaves``, tensors and plain values among the arguments, to ``inputs``."""

    def __init__(self, guards: Guards, arguments: CallArguments, values: Sequence[Any]) -> None:
        self._guards, self.flat = guards, arguments.flat
        self._arguments, self.source = Source(), Source()
        if not arguments.flat:
            self._arguments.refuse("arguments.kinds != kinds", kinds=arguments.kinds)
            self._arguments.refuse("arguments.structure != structure", structure=arguments.structure)
        self._numbers = [
            number
            for number, entry in enumerate(guards.inputs)
            if entry.gradient_of is None and isinstance(values[number], torch.Tensor)
        ]
        off = " or ".join(f"{name}()" for name in _OFF)
        self.source.refuse(f"not modes() or {off}", modes=GlobalStateGuard().check, **_OFF)
        self._compare_leaves(arguments.leaves)
        self._compare_settings()
        self._take_inputs()
        for number, view in guards.sources.bases:
            self.source.lines.append(f"inputs[{number}] = base(inputs[{view}])")
            self.source.known["base"] = base_of
        self._compare_tensors([values[number] for number in self._numbers])
        for number, entry in enumerate(guards.inputs):
            if entry.gradient_of is not None:
                self.source.lines.append(f"inputs[{number}] = inputs[{entry.gradient_of}].grad")
        self._compare_sharing(values)
        rare = _RareChecks(guards, self._numbers, values)
        self.rare = not rare.empty
        if self.rare:
            self.source.refuse("rare.differ(arguments, inputs)", rare=rare)

    def passes(self) -> Passes:
        """The comparison as a function."""
        whole = Source([*self._arguments.lines, f"leaves = arguments.{'values' if self.flat else 'leaves'}"])
        whole.lines += self.source.lines
        whole.known = self._arguments.known | self.source.known
        passes: Passes = whole.function("arguments", "return inputs")
        return passes

    def _compare_leaves(self, leaves: Sequence[Any]) -> None:
        """All but the program's inputs."""
        compared = {entry.argument for entry in self._guards.inputs}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                name = self.source.name("leaf", leaf)
                self.source.refuse(
                    f"leaves[{index}] is not {name} and not equal(leaves[{index}], {name})", equal=_equal
                )
            elif index not in compared:
                self.source.refuse(f"type(leaves[{index}]) is not {self.source.name('type', type(leaf))}")

    def _compare_settings(self) -> None:
        found, source = SettingsCheck(self._guards.settings), self.source
        entries = [_differs(source, *entry) for entry in found.entries]
        source.known |= {"content": cell_content}
        source.lines += ["try:", *(f"    if {entry}: return None" for entry in entries)] if entries else []
        source.lines += ["except (LookupError, AttributeError): return None"] if entries else []
        asked = {id(_asked_empty(*entry)) for entry in found.entries}
        for content in found.empty:
            if id(content) not in asked:
                source.refuse(source.name("empty", content))
        if found.contents or found.arrays:
            source.refuse("changed()", changed=found.changed)

    def _take_inputs(self) -> None:
        """``inputs``: the program's, but for gradients and bases."""
        taken, source = list[str](), self.source
        for entry in self._guards.inputs:
            if entry.argument is not None:
                taken.append(f"leaves[{entry.argument}]")
            elif entry.slot is not None:
                taken.append(_place(source, entry.slot))
            else:
                taken.append(source.name("constant", entry.constant))
        shared = [f"{_place(source, slot)} is not inputs[{n}]" for slot, n in self._guards.shared_places.places]
        shared += [
            f"not {source.name('holds', one.holds)}(inputs[{n}])" for one, n in self._guards.shared_places.members
        ]
        source.lines += [
            "try:",
            f"    inputs = [{', '.join(taken)}]",
            *(f"    if {one}: return None" for one in shared),
        ]
        source.lines += ["except (LookupError, TypeError): return None"]
        if not self._guards.shared_places.is_empty:
            source.refuse("others_differ(inputs)", others_differ=self._guards.shared_places.differ)

    def _compare_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            given = all_of("inputs", self._numbers, len(self._guards.inputs))
            looks = TensorGuards(*tensors, **self._sizes(tensors))
            self.source.refuse(f"not looks({given})", looks=looks.check)

    def _compare_sharing(self, values: Sequence[Any]) -> None:
        """How inputs share memory; a gradient that is missing shares none."""
        numbers = sorted({*self._numbers, *self._guards.sharing.gradients})
        tensors = [values[number] for number in numbers if values[number] is not None]
        if len(set(map(storage_key, tensors))) < len(tensors):
            self.source.refuse("sharing.now(inputs) != sharing.pattern", sharing=self._guards.sharing)
        elif len(numbers) > 1:
            given = all_of("inputs", numbers, len(self._guards.inputs))
            self.source.refuse(f"share((), {{}}, ({given},))", share=share_storages)

    def _sizes(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        pairs, dynamic = list(zip(self._numbers, tensors, strict=True)), self._guards.dynamic
        sizes = [[None] * t.dim() if n in dynamic else list(t.size()) for n, t in pairs]
        strides = [[None] * t.dim() if n in dynamic else list(t.stride()) for n, t in pairs]
        return {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}


def all_of(name: str, numbers: Sequence[int], count: int) -> str:
    """Arguments of a call: some entries of a list, the list at once where these are all of it, in order."""
    return f"*{name}" if [*numbers] == [*range(count)] else ", ".join(f"{name}[{number}]" for number in numbers)


def _place(source: Source, slot: Slot) -> str:
    """What reads a place."""
    if isinstance(slot, NumberSlot):
        return f"{source.name('number', slot.get)}()"
    return _entry(source, slot.container, slot.key) + "".join(f"[{step}]" for step in slot.steps)


def _asked_empty(container: Any, key: Any, value: Any) -> Any:
    """The container of which one comparison tells whether it is empty still; None of most."""
    if key is LENGTH and type(container) in _EMPTY_IS_FALSE and not value:
        return container
    named = type(key) is str and key in HOOKS_OF_MODULES
    return value if named and type(value) in _EMPTY_IS_FALSE and not value else None


def _differs(source: Source, container: Any, key: Any, value: Any) -> str:
    """What tells whether an entry of a container is not the very object that it was."""
    if _asked_empty(container, key, value) is not None:
        # Hooks are taken as they are now: none in one dict are to torch what none in another are.
        return source.name("container", container) if key is LENGTH else _entry(source, container, key)
    if key is LENGTH:
        return f"len({source.name('container', container)}) != {value}"
    if key is ORDER:
        source.known["keys_of"] = keys_of
        return f"{_keys(container).format(source.name('container', container))} != {source.name('keys', value)}"
    if type(container) is CodeOf and all(map(str.isidentifier, key.split("."))):
        now = f"{source.name('owner', container.owner)}.{key}"
    elif isinstance(container, types.CellType):
        now = f"content({source.name('cell', container)})"
    else:
        now = _entry(source, container, key)
    literal = any(value is one for one in (True, False, None))
    return f"{now} is not {value if literal else source.name('value', value)}"


def _keys(container: Any) -> str:
    """What reads the keys of a dict as ``keys_of`` does, as fast as these allow."""
    if all(map(is_, container, keys_of(container))):
        return "tuple({})"
    tensors = all(isinstance(key_behind(key), torch.Tensor) for key in container)
    return "tuple(map(id, {}))" if tensors else "keys_of({})"


def _entry(source: Source, container: Any, key: Any) -> str:
    """What reads an entry of a container."""
    known = repr(key) if type(key) in (str, int) else source.name("key", key)
    names = source.name("container", container), known
    plain = type(container) is dict or not isinstance(container, dict)
    source.known["entry_of"] = entry_of
    return f"{names[0]}[{names[1]}]" if plain else f"entry_of({names[0]}, {names[1]})"


class _RareChecks:
    """What few programs look at."""

    def __init__(self, guards: Guards, numbers: Sequence[int], values: Sequence[Any]) -> None:
        self._guards = guards
        self._gradients = [n for n, entry in enumerate(guards.inputs) if entry.gradient_of is not None]
        self._dynamic = [number for number in numbers if number in guards.dynamic]
        self._known_sizes = self._sizes(values)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compare."""
        guards = self._guards
        own = self._gradients or self._dynamic
        return not (own or guards.asked or guards.leaves or guards.had_gradient or guards.metadata.side_effects)

    def differ(self, arguments: CallArguments, values: Sequence[Any]) -> bool:
        """Whether it may be another call by these."""
        guards = self._guards
        if self._dynamic and self._sizes(values) != self._known_sizes:
            return True
        if not all(is_answer(name, values[number], answer) for (number, name), answer in guards.asked.items()):
            return True
        if any(values[number].is_leaf != leaf for number, leaf in guards.leaves.items() if values[number] is not None):
            return True
        if any((values[number].grad is not None) != had for number, had in guards.had_gradient.items()):
            return True
        if not guards.agree(self._gradients, values):
            return True
        try:
            guards.check_side_effects(arguments, values)
        except InputMismatchError:
            return True
        return False

    def _sizes(self, values: Sequence[Any]) -> list[Any]:
        return [(values[number].size(), values[number].stride()) for number in self._dynamic]


def _equal(now: Any, before: Any) -> bool:
    """Whether two plain values are, for sure, the same to a program."""
    plain = type(now) in (int, str) or (type(now) is float and now)  # zeros have a sign
    return bool(plain and type(now) is type(before) and now == before)
