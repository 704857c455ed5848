"""Random programs, each a function of its seed. They grow with eager: a step that fails is mostly left out.

Invariant: what a program does is defined: no write depends on the order of eager's loops, but for some whose sources
overlap what is written: a trace refuses these, or does what eager does.
Limits: values are small numbers, so that two ways to compute them round alike.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.sweeps.fuzz.gradients import GRADIENTS
from tests.sweeps.fuzz.metadata import IN_PLACE
from tests.sweeps.fuzz.pool import Pool, Unfit, addresses, meet, overlaps_itself, same_place
from tests.sweeps.fuzz.program import NAME, Input, Program, Step, Storage
from tests.sweeps.fuzz.views import MULTI, VIEWS
from tests.sweeps.fuzz.writes import READS, WRITES

LARGEST = 120  # elements of a tensor
KEPT_ERRORS = 0.02  # share of the failing steps that end their program
OVERLAPPING = 0.4  # share that is taken of the writes whose sources overlap what they write
_TABLES = ("view",) * 6 + ("multi", "multi") + ("write",) * 6 + ("in_place", "in_place", "in_place", "read", "read")
_TABLES_WITH_GRADIENTS = (*_TABLES, *("gradient",) * 8)
_TABLES_OF_FOLLOWED = ("view",) * 3 + ("write",) * 5 + ("in_place",) * 6 + ("read", "gradient", "gradient")
FOLLOWED = 0.1  # share of the programs that calls are to follow gradients in
_METADATA = re.compile(
    r"^\w+\.(data = |(t|transpose|swapaxes|squeeze|unsqueeze|as_strided|resize|resize_as|set|detach|requires_grad)_\()"
)
_WRITTEN = re.compile(r"(?<!_foreach)_\(|\] [*+-]?= |out=|foreach_\w+_\(| [*+-]= ")
# Their `out=` may not be their input.
_REARRANGES = re.compile(r"torch\.(sum|cumsum|cat|stack|amax|max|min|sort|flip|tril)\(.*out=")
_ANY_OVERLAP = re.compile(r"\.(zero_|fill_|clamp_|clamp_min_|relu_|abs_)\(")


def generate(seed: int, length: int = 8) -> Program:
    """The program of a seed: ``length`` steps at most."""
    rng = random.Random(seed)
    storages, inputs = _inputs(rng)
    grown = _Grown(rng, storages, inputs)
    grown.overlapping.seed(seed)
    if is_followed(seed):
        storages, inputs = _parts(random.Random(f"{seed} parts"))
        begun = followed(Program(storages, inputs, (), ""))
        grown = _Grown(rng, begun.storages, begun.inputs)
        grown.tables = _TABLES_OF_FOLLOWED
    for _ in range(rng.randint(2, length)):
        if not grown.step():
            break
    return Program(storages, inputs, tuple(grown.steps), _outputs(rng, grown.pool), seed)


def is_followed(seed: int) -> bool:
    """Whether the inputs of a program often overlap and get new metadata, and calls follow gradients through them."""
    return random.Random(f"{seed} follows").random() < FOLLOWED


def followed(program: Program) -> Program:
    """A program through whose inputs gradients flow, to one tensor where they have one storage."""
    kinds = {"s0": "view"}
    inputs = tuple(replace(entry, gradient=kinds.get(entry.storage, "computed")) for entry in program.inputs)
    storages = tuple(replace(storage, computed=storage.name in kinds) for storage in program.storages)
    return replace(program, storages=storages, inputs=inputs)


class _Grown:
    """A program so far, and eager's state after it."""

    def __init__(self, rng: random.Random, storages: Any, inputs: Any) -> None:
        self.rng, self.storages, self.inputs = rng, storages, inputs
        self.steps: list[Step] = []
        self.overlapping = random.Random()  # of its own, so that what else is drawn stays as it is
        self.pool = Pool(rng)
        gradients = rng.random() < 0.25 or any(entry.gradient for entry in inputs)
        self.tables: Sequence[str] = _TABLES_WITH_GRADIENTS if gradients else _TABLES
        self._replay()

    def step(self) -> bool:
        """Add a step; False when it ends the program with an error."""
        for _ in range(30):
            try:
                step = _statement(self.pool, self.tables)
            except (Unfit, IndexError, RuntimeError):
                continue
            before, rooms = dict(self.pool.tensors), sizes(self.pool.tensors)
            try:
                self._run(step)
                fine = defined(step, before) and (apart(step, before) or self.overlapping.random() < OVERLAPPING)
                fine = fine and filled(step, rooms, sizes(self.pool.tensors)) and self._small()
                if fine and bits_defined(step, self.pool.tensors):
                    self.steps.append(step)
                    return True
            except Exception:
                if self.rng.random() < KEPT_ERRORS and defined(step, before) and apart(step, before):
                    self.steps.append(step)
                    self._replay()
                    return False
            self._replay()
        return False

    def _replay(self) -> None:
        names = [entry.name for entry in self.inputs]
        made = Program(self.storages, self.inputs, (), "").arguments()
        self.pool.tensors = dict(zip(names, made, strict=True))
        torch.manual_seed(0)
        for step in self.steps:
            try:
                self._run(step)
            except Exception:
                return  # the last step, which is meant to fail

    def _run(self, step: Step) -> None:
        _execute(step, self.pool.tensors)

    def _small(self) -> bool:
        return all(t.numel() <= LARGEST and t.dim() <= 5 for t in self.pool.tensors.values())


def _execute(step: Step, tensors: dict[str, torch.Tensor]) -> None:
    scope: dict[str, Any] = {**tensors, "torch": torch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(step.source, "<step>", "exec"), scope)
    for name in step.defines:
        if not isinstance(scope[name], torch.Tensor):
            raise Unfit
        tensors[name] = scope[name]


def well_defined(program: Program) -> bool:
    """Whether each step of a program is :func:`defined` and reads only what is there."""
    if not program.within_bounds():
        return False
    try:
        tensors = dict(zip((entry.name for entry in program.inputs), program.arguments(), strict=True))
    except RuntimeError:
        return False  # a simpler input may have a dtype that cannot require gradients
    torch.manual_seed(0)
    for step in program.steps:
        if not set(step.uses) <= set(tensors) or not defined(step, tensors):
            return False
        before = sizes(tensors)
        try:
            _execute(step, tensors)
        except Exception:
            break  # an error ends the program
        if not (filled(step, before, sizes(tensors)) and bits_defined(step, tensors)):
            return False
    return set(NAME.findall(program.outputs)) <= set(tensors)


def _statement(pool: Pool, tables: Sequence[str]) -> Step:
    rng, kind = pool.rng, pool.rng.choice(tables)
    whole = {"write": WRITES, "read": READS, "gradient": GRADIENTS}.get(kind)
    if whole is not None:
        source = rng.choice(list(whole.values()))(pool)
        head = source.split(" = ")[0]
        return Step(source, (head,) if re.fullmatch(r"v\d+", head) else ())
    x = pool.pick()
    table = {"view": VIEWS, "multi": MULTI, "in_place": IN_PLACE}[kind]
    tail = rng.choice(list(table.values()))(pool, pool[x]).replace("_same_", x)
    if kind == "in_place":
        return Step(f"{x}.{tail}")
    call = tail if tail.startswith("torch.") else f"{x}{tail}" if tail.startswith("[") else f"{x}.{tail}"
    if kind == "view":
        name = pool.new()
        return Step(f"{name} = {call}", (name,))
    return _pieces(pool, call, len(eval(call, {"torch": torch, x: pool[x]})) if pool[x].numel() else 0)


def _pieces(pool: Pool, call: str, count: int) -> Step:
    """All pieces of a multi-output view, if they are few, else one of them."""
    if 0 < count <= 3:
        names = tuple(pool.new() for _ in range(count))
        return Step(f"{', '.join(names)}{',' if count == 1 else ''} = {call}", names)
    name = pool.new()
    return Step(f"{name} = {call}[{pool.rng.randrange(max(count, 1))}]", (name,))


def defined(step: Step, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether eager's result does not rest on the order in which it walks through elements that overlap, or a bug."""
    if not _WRITTEN.search(step.source) or _METADATA.search(step.source):
        return True
    if ".copy_(" in step.source and _loses_a_negation([tensors[name] for name in step.uses if name in tensors]):
        return False
    written = [name for name in written_names(step) if name in tensors]
    if "foreach" not in step.source and len(set(written)) < len(written):
        return False
    handles = [tensors[name] for name in written if overlaps_itself(tensors[name])]
    return all(_ANY_OVERLAP.search(step.source) or _refused(handle) for handle in handles)


def apart(step: Step, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a step reads what it writes in the same place alone."""
    if not _WRITTEN.search(step.source) or _METADATA.search(step.source):
        return True
    if "foreach" in step.source:  # on the CPU one tensor after another
        return _entries_apart(step, tensors)
    used = {name: tensors[name] for name in step.uses if name in tensors}
    for name in (name for name in written_names(step) if name in tensors):
        handle = tensors[name]
        others = [used[other] for other in used if other != name]
        if _REARRANGES.search(step.source):
            others += [handle] * (step.source.count(name) > 1)
        else:
            others = [other for other in others if not same_place(handle, other)]
        if any(meet(handle, other) for other in others):
            return False
    return True


def _loses_a_negation(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a copy between float16 and float32 has a lazy negation, which the kernel of eager's forgets."""
    dtypes = {tensor.dtype for tensor in tensors}
    return {torch.float16, torch.float32} <= dtypes and any(tensor.is_neg() for tensor in tensors)


def _entries_apart(step: Step, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether each entry of a foreach op reads what it writes in the same place, or nothing of it."""
    lists = [[tensors.get(name) for name in NAME.findall(part)] for part in re.findall(r"\[(.*?)\]", step.source)]
    pairs = [(one, other) for others in lists[1:] for one, other in zip(lists[0], others, strict=False)]
    return not any(
        one is not None and other is not None and not same_place(one, other) and meet(one, other)
        for one, other in pairs
    )


def sizes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Of each tensor the elements that its storage has room for after its first, and the storage's bytes."""
    rooms = {name: (t, t.untyped_storage().nbytes()) for name, t in tensors.items()}
    return {name: (size // t.itemsize - int(t.storage_offset()), size) for name, (t, size) in rooms.items()}


def filled(step: Step, before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> bool:
    """Whether a step that makes a storage larger writes all that it gains: eager leaves there what was there."""
    if not re.search(r"\.(resize|resize_as|set)_\(", step.source):
        return True
    grown = NAME.findall(step.source)[-1 if ".set_(" in step.source else 0]
    if grown not in before or after[grown][1] <= before[grown][1] or "set_()" in step.source:
        return True
    return f"[{max(before[grown][0], 0)}:]" in step.source


def bits_defined(step: Step, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether nobody can read, as numbers of another dtype, the bits of a NaN that a step wrote.

    What arithmetic leaves in them is up to the instruction, and so to the kernel.
    """
    if not _WRITTEN.search(step.source):
        return True
    for handle in (tensors[name] for name in written_names(step) if name in tensors):
        if (handle.is_floating_point() or handle.is_complex()) and bool(handle.detach().isnan().any()):
            key = handle.untyped_storage().data_ptr()
            if any(t.dtype != handle.dtype for t in tensors.values() if t.untyped_storage().data_ptr() == key):
                return False
    return True


def written_names(step: Step) -> list[str]:
    """The names that a step writes: the ones of `out=` or of a list, else the one it begins with."""
    source = step.source
    if "out=" in source:
        return NAME.findall(source.split("out=")[1])
    if "foreach" in source:
        return NAME.findall(source.split("]")[0])
    if source.startswith(("if ", "with ")):
        return NAME.findall(source.split(": ")[1])[:1]
    return NAME.findall(source)[:1]


def _refused(handle: torch.Tensor) -> bool:
    """Elements that overlap because of a stride of zero: eager refuses to write them."""
    return any(stride == 0 and size > 1 for size, stride in zip(handle.shape, handle.stride(), strict=True))


def _outputs(rng: random.Random, pool: Pool) -> str:
    names = list(pool.tensors)
    chosen = rng.sample(names, min(len(names), rng.randint(1, 4)))
    if rng.random() < 0.1:
        chosen.append(chosen[0])
    shape = rng.random()
    if shape < 0.15 and len(chosen) > 1:
        return f"{{'a': {chosen[0]}, 'b': [{', '.join(chosen[1:])}], 'n': 3}}"
    return chosen[0] if len(chosen) == 1 and shape < 0.6 else f"({', '.join(chosen)},)"


_DTYPES = ["float32"] * 8 + ["complex64", "complex64", "float64", "int64", "int32", "int8", "bool", "float16"]


def _inputs(rng: random.Random) -> tuple[tuple[Storage, ...], tuple[Input, ...]]:
    storages: list[Storage] = []
    inputs: list[Input] = []
    gradients = rng.random() < 0.12
    for position in range(rng.choice([1, 1, 2, 2, 2, 3, 3, 4])):
        name = f"x{position}"
        if inputs and rng.random() < 0.06:
            twin = rng.choice(inputs)
            inputs.append(replace(twin, name=name, same_as=twin.same_as or twin.name))
        elif not storages or rng.random() < 0.75:
            storages.append(Storage(f"s{position}", rng.choice(_DTYPES), rng.choice([4, 4, 6, 8, 9, 9, 12, 16, 24])))
            made = _input(rng, name, storages[-1], whole=rng.random() < 0.7)
            smooth = getattr(torch, made.dtype).is_floating_point
            inputs.append(replace(made, gradient="leaf" if smooth and gradients and rng.random() < 0.7 else ""))
        else:
            inputs.append(_input(rng, name, rng.choice(storages), whole=rng.random() < 0.3))
    return tuple(storages), tuple(inputs)


def _parts(rng: random.Random) -> tuple[tuple[Storage, ...], tuple[Input, ...]]:
    """Inputs that are parts of one storage, which may overlap, and sometimes a tensor beside them."""
    shared, beside = (Storage(name, "float32", rng.choice([4, 6, 9, 12])) for name in ("s0", "s1"))
    inputs = [_input(rng, f"x{n}", shared, whole=rng.random() < 0.5) for n in range(rng.choice([1, 1, 2, 2, 3]))]
    parts = tuple(replace(entry, dtype="float32") for entry in inputs if entry.dtype == shared.dtype)
    if rng.random() < 0.5 or not parts:
        return (shared, beside), (*parts, _input(rng, "x3", beside, whole=True))
    return (shared,), parts


_SIZED = ("int8", "int16", "int32", "float32", "int64", "float64", "complex64")


def _input(rng: random.Random, name: str, storage: Storage, *, whole: bool) -> Input:
    dtype, room = storage.dtype, storage.numel
    if not whole and dtype != "bool" and rng.random() < 0.2:
        item = getattr(torch, dtype).itemsize
        dtype = rng.choice([other for other in _SIZED if getattr(torch, other).itemsize <= item])
        room *= item // getattr(torch, dtype).itemsize
    offset = 0 if whole else rng.randrange(0, max(1, room // 2))
    count = room if whole else rng.randint(1, room - offset)
    step = 1 if whole or rng.random() < 0.6 else 2
    count = (count - 1) // step + 1
    rows = rng.choice([n for n in range(1, count + 1) if count % n == 0])
    if rng.random() < 0.5 and math.isqrt(count) ** 2 == count:
        rows = math.isqrt(count)  # a result of a square that is transposed shows in its values alone
    size: tuple[int, ...] = (rows, count // rows)
    stride: tuple[int, ...] = (count // rows * step, step)
    if rng.random() < 0.3:
        size, stride = size[::-1], stride[::-1]
    if rng.random() < 0.3:
        size, stride = (count,), (step,)
    place = Input(name, storage.name, dtype, size, stride, offset)
    assert len(set(addresses(torch.empty(room).as_strided(size, stride, offset)))) == count
    return place
