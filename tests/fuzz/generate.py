"""Random programs, each a function of its seed. They grow with eager: a step that fails is mostly left out.

Invariant: what a program does is defined: no write depends on the order of eager's loops.
Limits: values are small numbers, so that two ways to compute them round alike.
"""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import torch

from tests.fuzz.pool import Pool, Unfit, addresses, meet, overlaps_itself, same_place
from tests.fuzz.program import NAME, Input, Program, Step, Storage
from tests.fuzz.views import IN_PLACE, MULTI, VIEWS
from tests.fuzz.writes import READS, WRITES

LARGEST = 120  # elements of a tensor
KEPT_ERRORS = 0.02  # share of the failing steps that end their program
_TABLES = ("view", "view", "view", "multi", "write", "write", "write", "in_place", "read")
_WRITTEN = re.compile(r"(?<!_foreach)_\(|\] [*+-]?= |out=|foreach_\w+_\(| [*+-]= ")
# Their `out=` may not be their input.
_REARRANGES = re.compile(r"torch\.(sum|cumsum|cat|stack|amax|max|min|sort|flip|tril)\(.*out=")
_ANY_OVERLAP = re.compile(r"\.(zero_|fill_|clamp_|clamp_min_|relu_|abs_)\(")


def generate(seed: int, length: int = 8) -> Program:
    """The program of a seed: ``length`` steps at most."""
    rng = random.Random(seed)
    storages, inputs = _inputs(rng)
    grown = _Grown(rng, storages, inputs)
    for _ in range(rng.randint(2, length)):
        if not grown.step():
            break
    return Program(storages, inputs, tuple(grown.steps), _outputs(rng, grown.pool))


class _Grown:
    """A program so far, and eager's state after it."""

    def __init__(self, rng: random.Random, storages: Any, inputs: Any) -> None:
        self.rng, self.storages, self.inputs = rng, storages, inputs
        self.steps: list[Step] = []
        self.pool = Pool(rng)
        self._replay()

    def step(self) -> bool:
        """Add a step; False when it ends the program with an error."""
        for _ in range(30):
            try:
                step = _statement(self.pool)
            except (Unfit, IndexError):
                continue
            before = dict(self.pool.tensors)
            try:
                self._run(step)
                if defined(step, before) and self._small():
                    self.steps.append(step)
                    return True
            except Exception:
                if self.rng.random() < KEPT_ERRORS and defined(step, before):
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
    tensors = dict(zip((entry.name for entry in program.inputs), program.arguments(), strict=True))
    torch.manual_seed(0)
    for step in program.steps:
        if not set(step.uses) <= set(tensors) or not defined(step, tensors):
            return False
        try:
            _execute(step, tensors)
        except Exception:
            break  # an error ends the program
    return set(NAME.findall(program.outputs)) <= set(tensors)


def _statement(pool: Pool) -> Step:
    rng, kind = pool.rng, pool.rng.choice(_TABLES)
    if kind in ("write", "read"):
        source = rng.choice(list((WRITES if kind == "write" else READS).values()))(pool)
        head = source.split(" = ")[0]
        return Step(source, (head,) if re.fullmatch(r"v\d+", head) else ())
    x = pool.pick()
    table = {"view": VIEWS, "multi": MULTI, "in_place": IN_PLACE}[kind]
    tail = rng.choice(list(table.values()))(pool, pool[x]).replace("_same_", x)
    if tail == "alias()":
        tail, x_call = "", f"torch.ops.aten.alias({x})"
    else:
        x_call = f"{x}.{tail}"
    if kind == "in_place":
        return Step(f"{x}.{tail}")
    if kind == "view":
        name = pool.new()
        return Step(f"{name} = {x_call}", (name,))
    pieces = len(eval(f"t.{tail}", {"t": pool[x]})) if pool[x].numel() else 0
    if 0 < pieces <= 3:
        names = tuple(pool.new() for _ in range(pieces))
        return Step(f"{', '.join(names)}{',' if pieces == 1 else ''} = {x_call}", names)
    name = pool.new()
    return Step(f"{name} = {x_call}[{rng.randrange(max(pieces, 1))}]", (name,))


def defined(step: Step, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether eager's result does not rest on the order in which it walks through elements that overlap."""
    if not _WRITTEN.search(step.source):
        return True
    used = {name: tensors[name] for name in step.uses if name in tensors}
    written = [name for name in written_names(step) if name in tensors]
    in_turn = "foreach" in step.source  # on the CPU one tensor after another
    if not in_turn and len(set(written)) < len(written):
        return False
    for name in written:
        handle = tensors[name]
        if overlaps_itself(handle) and not _ANY_OVERLAP.search(step.source) and not _refused(handle):
            return False
        others = [used[other] for other in used if other != name]
        if _REARRANGES.search(step.source):
            others += [handle] * (step.source.count(name) > 1)
        elif not in_turn:
            others = [other for other in others if not same_place(handle, other)]
        if not in_turn and any(meet(handle, other) for other in others):
            return False
    return True


def written_names(step: Step) -> list[str]:
    """The names that a step writes: the ones of `out=` or of a list, else the one it begins with."""
    source = step.source
    if "out=" in source:
        return NAME.findall(source.split("out=")[1])
    if "foreach" in source:
        return NAME.findall(source.split("]")[0])
    if source.startswith("if "):
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


def _inputs(rng: random.Random) -> tuple[tuple[Storage, ...], tuple[Input, ...]]:
    storages: list[Storage] = []
    inputs: list[Input] = []
    for position in range(rng.randint(1, 3)):
        if not storages or rng.random() < 0.75:
            dtype = rng.choice(["float32"] * 5 + ["int64", "complex64", "complex64", "bool"])
            storages.append(Storage(f"s{position}", dtype, rng.choice([4, 6, 8, 12, 12, 24])))
            inputs.append(_input(rng, f"x{position}", storages[-1], whole=rng.random() < 0.7))
        else:
            inputs.append(_input(rng, f"x{position}", rng.choice(storages), whole=rng.random() < 0.3))
    return tuple(storages), tuple(inputs)


def _input(rng: random.Random, name: str, storage: Storage, *, whole: bool) -> Input:
    dtype, room = storage.dtype, storage.numel
    if not whole and dtype != "bool" and rng.random() < 0.2:
        bits = {"float32": ("int32", 1), "int64": ("float32", 2), "complex64": ("float32", 2)}[dtype]
        dtype, room = bits[0], room * bits[1]
    offset = 0 if whole else rng.randrange(0, max(1, room // 2))
    count = room if whole else rng.randint(1, room - offset)
    step = 1 if whole or rng.random() < 0.6 else 2
    count = (count - 1) // step + 1
    rows = rng.choice([n for n in range(1, count + 1) if count % n == 0])
    size: tuple[int, ...] = (rows, count // rows)
    stride: tuple[int, ...] = (count // rows * step, step)
    if rng.random() < 0.3:
        size, stride = size[::-1], stride[::-1]
    if rng.random() < 0.3:
        size, stride = (count,), (step,)
    place = Input(name, storage.name, dtype, size, stride, offset)
    assert len(set(addresses(torch.empty(room).as_strided(size, stride, offset)))) == count
    return place
